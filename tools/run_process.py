"""Runs one command for run_tests.py: output shown and kept, no input, a limit on its time, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

TIMED_OUT = 124


def run_process(
    command: list[str],
    cwd: pathlib.Path,
    log: pathlib.Path,
    limit: float,
    env: dict[str, str],
    on_line: Callable[[str], bool] | None = None,
    on_start: Callable[[Callable[[], None]], None] | None = None,
) -> int:
    """Runs ``command`` in a process group of its own and returns its exit status, 124 if ``limit`` (s) was reached.

    Each line of output goes to ``log``, and to standard output unless ``on_line(line)`` is False. ``on_start(kill)``
    gets what another thread may call to end the process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    if on_start is not None:
        on_start(lambda: _kill_group(process))
    with open(log, "w") as kept, _killed_at_end(process), _limited(process, limit) as expired:
        for line in process.stdout:
            kept.write(line)
            if on_line is None or on_line(line):
                print(line, end="", flush=True)
        code = process.wait()
    if expired.is_set():
        print(f"{command[0]}: killed after {limit:.0f} s", flush=True)
        return TIMED_OUT
    return code


@contextlib.contextmanager
def _limited(process: subprocess.Popen[str], seconds: float) -> Iterator[threading.Event]:
    """Kills the group after ``seconds``; the event tells whether that happened."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _kill_group(process)

    timer = threading.Timer(seconds, expire)
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


@contextlib.contextmanager
def _killed_at_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Also on Ctrl-C: no process of the group outlives the call."""
    try:
        yield
    finally:
        _kill_group(process)
        process.wait()


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
