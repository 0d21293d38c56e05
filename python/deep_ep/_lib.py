"""Finds, loads and checks libdeepep.so; nothing is loaded before the first use."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import resource
import select
import threading
from pathlib import Path
from typing import Any

from . import _abi, errors

_HERE = Path(__file__).resolve().parent


def _header_path() -> Path:
    """deepep.h: inside an installed package, or in the source tree beside python/."""
    installed = _HERE / "include" / "deepep.h"
    return installed if installed.exists() else _HERE.parent.parent / "include" / "deepep.h"


@functools.lru_cache(maxsize=1)
def header_version() -> str:
    """The version that deepep.h states, "major.minor.patch"."""
    text = _header_path().read_text(encoding="utf-8")
    parts = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"#define DEEPEP_VERSION_{part} (\d+)", text)
        if match is None:
            raise ImportError(f"{_header_path()} does not state DEEPEP_VERSION_{part}")
        parts.append(match.group(1))
    return ".".join(parts)


def candidates() -> list[str]:
    """Where the library is looked for, in order."""
    named = os.environ.get("DEEPEP_LIBRARY")
    if named:
        return [named]
    soname = f"libdeepep.so.{header_version().split('.')[0]}"
    return [str(_HERE / "lib" / soname), str(_HERE.parent.parent / "build" / "lib" / soname), soname]


# The Go runtime ended one process in four with 1.1 to 1.6 GiB of addresses left, and none of 15 with 2.
_ADDRESS_SPACE, _THREADS, _DESCRIPTORS = 2 << 30, 6, 8


def _refusal() -> str:
    """Why the library cannot be loaded here; "" if nothing is in its way.

    The Go runtime ends the process where it gets no address space, threads or epoll: not a thing to find out by trying.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        used = 0
        with contextlib.suppress(OSError):
            used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        if limit - used < _ADDRESS_SPACE:
            return (
                f"address space is limited to {limit} bytes (RLIMIT_AS, ulimit -v), of which {used} are used: "
                f"{_ADDRESS_SPACE} are needed"
            )
    go = threading.Event()
    threads = [threading.Thread(target=go.wait, daemon=True) for _ in range(_THREADS)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        return (
            f"only {len(started)} of {_THREADS} threads can be started ({error}): RLIMIT_NPROC (ulimit -u), pids.max "
            "of the cgroup, or a sandbox that forbids clone3"
        )
    finally:
        go.set()
        for thread in started:
            thread.join()
    descriptors: list[int] = []
    try:
        select.epoll().close()
        descriptors.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_DESCRIPTORS))
    except OSError as error:
        return f"epoll, or {_DESCRIPTORS} descriptors, cannot be had ({error}): a sandbox, or RLIMIT_NOFILE (ulimit -n)"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return ""


def _open() -> str:
    refusal = _refusal()
    if refusal:
        raise errors.DeepEPError(errors.SYSTEM, f"libdeepep is not loaded: {refusal}")
    tried = []
    for path in candidates():
        try:
            ctypes.CDLL(path)
            return path
        except OSError as error:
            tried.append(f"  {path}: {error}")
    raise errors.DeepEPError(
        errors.NOT_FOUND,
        "libdeepep could not be loaded. Tried:\n"
        + "\n".join(tried)
        + "\nSet DEEPEP_LIBRARY to the file, or build it with `make lib kernels`.",
    )


class Library:
    """The loaded library: calls of `with_gil` hold the GIL and cannot block, those of `without_gil` may wait."""

    def __init__(self) -> None:
        self.path = _open()
        self.with_gil = ctypes.PyDLL(self.path)
        self.without_gil = ctypes.CDLL(self.path)
        for handle in (self.with_gil, self.without_gil):
            _abi.declare(handle)
        self.low_latency_dispatch = self._bare("deepep_low_latency_dispatch")
        self.low_latency_combine = self._bare("deepep_low_latency_combine")
        number = int(self.without_gil.deepep_version())
        found = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        if found != header_version():
            raise errors.DeepEPError(
                errors.VERSION,
                f"{self.path} is version {found}, the Python package is {header_version()}: rebuild or reinstall one",
            )

    def _bare(self, name: str) -> Any:
        """A function of `with_gil` that takes c_void_p and byref() only, which ctypes then need not look at."""
        function = self.with_gil[name]
        function.restype = _abi.I32
        return function

    def check(self, status: int) -> None:
        """Raises the exception for `status` unless it is OK."""
        if status != errors.OK:
            raise self.error(status)

    def error(self, status: int) -> errors.DeepEPError:
        """The exception for `status`, with this thread's last message."""
        stay_at_exit()
        text = self.with_gil.deepep_last_error().decode(errors="replace")
        return errors.from_status(status, text or self.with_gil.deepep_status_text(status).decode())


_exiting: list[bool] = []  # [True] once the interpreter ends; empty: nobody watches for it


def _end() -> None:
    _exiting[0] = True


def watch_exit() -> None:
    """Has stay_at_exit() know of the interpreter's end. Called after a finalizer is made, so as to run before those."""
    if not _exiting:
        _exiting.append(False)
        atexit.register(_end)


def stay_at_exit() -> None:
    """Keeps a daemon thread whose call the interpreter's end has cut short.

    It would print the error while Python takes the streams down, and Python aborts the process then.
    """
    if _exiting == [True] and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


_lock = threading.Lock()
_library: Library | None = None


def library() -> Library:
    """Loads the library once and returns it."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = Library()
    return _library
