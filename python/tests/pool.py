"""Rank processes that live longer than one test.

A fork server imports torch once; every rank is a fork of it, so that a pool of eight starts in a fraction of the
time that eight imports of torch take. A test sends ``module:name`` and arguments to the first R ranks and gets a
value, an exception or "died" back from each. A rank that misses the deadline has its tracebacks written to the
report, the pool is killed, and the next test gets a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

import pool_worker

GRACE = 15.0  # seconds the other ranks get after the first one has failed


@dataclass
class Outcome:
    """What became of one rank: a value, an error (its type's name, its text and traceback), or its death."""

    rank: int
    value: Any = None
    error: str = ""
    error_type: str = ""
    error_kinds: tuple[str, ...] = ()  # names of the exception's classes, most special first
    traceback: str = ""
    died: bool = False
    notes: list[Any] = field(default_factory=list)  # (time, value) pairs from ctx.report
    ended: float = 0.0  # time.monotonic() of the end


class RanksFailed(AssertionError):
    """At least one rank raised; the text has every rank's traceback."""


class RanksLate(AssertionError):
    """At least one rank did not answer in time; the text has every rank's stacks."""


def report(bad: list[Outcome]) -> str:
    """The ranks' tracebacks; those that are the same only once."""
    ranks: dict[str, list[int]] = {}
    for outcome in bad:
        ranks.setdefault(outcome.traceback, []).append(outcome.rank)
    return "\n".join(f"rank {', '.join(map(str, same))}: {text}" for text, same in ranks.items())


class RankPool:
    """``size`` processes with one gloo group and lazily made groups of the first R of them.

    ``mends``: ranks that died are replaced, where the others ended well, instead of all of them: where a process takes
    seconds to make its GPU context, that is what a test of deaths costs. ``settings``: environment of the ranks alone.
    """

    def __init__(
        self, size: int, device: str = "cpu", mends: bool = False, settings: dict[str, str] | None = None
    ) -> None:
        self.size = size
        self.device = device
        self.mends = mends
        self.settings = settings or {}
        self._generation = 0
        self.alive = False
        self._folder = ""
        self._last_logs = ""
        self._log_starts = [0] * size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def start(self) -> None:
        """Starts the ranks unless they run."""
        if self.alive:
            return
        self._folder = tempfile.mkdtemp(prefix="deepep-pool-")
        self._log_starts = [0] * self.size
        for rank in range(self.size):
            process, connection = self._start_rank(rank)
            self._processes.append(process)
            self._connections.append(connection)
        self.alive = True
        self._await_ranks()

    def _start_rank(self, rank: int) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(pool_worker.PRELOAD)
        here, there = context.Pipe()
        process = context.Process(
            target=pool_worker.main,
            args=(rank, self.size, self.device, self._folder, self._generation, there, self.settings),
            daemon=True,
        )
        process.start()
        there.close()
        return process, here

    def _await_ranks(self) -> None:
        for outcome in self._collect(list(range(self.size)), 120.0):
            assert not outcome.error and not outcome.died, f"rank {outcome.rank} did not start: {self.logs()}"

    def mend(self) -> None:
        """Starts dead ranks again; all of them then form a new group. A pool that was stopped starts as usual."""
        if not self.alive:
            self.start()
            return
        dead = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
        if not dead:
            return
        self._generation += 1
        for rank in range(self.size):
            if rank in dead:
                self._connections[rank].close()
                self._processes[rank], self._connections[rank] = self._start_rank(rank)
            else:
                self._connections[rank].send((pool_worker.REJOIN, self.size, (self._generation,)))
        self._await_ranks()

    def stop(self) -> None:
        """Kills the ranks and removes what they left; no rank is asked."""
        self._last_logs = self.logs()
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self._folder, ignore_errors=True)
        self.alive = False

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def run(self, ranks: int, function: Callable[..., Any] | str, *args: Any, deadline: float = 60.0) -> list[Any]:
        """Calls ``function(ctx, *args)`` on ranks 0..ranks-1 and returns their values; raises what went wrong."""
        outcomes = self.outcomes(ranks, function, *args, deadline=deadline)
        bad = [outcome for outcome in outcomes if outcome.error or outcome.died]
        if bad:
            raise RanksFailed(report(bad) + self.logs())
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        ranks: int,
        function: Callable[..., Any] | str,
        *args: Any,
        deadline: float = 60.0,
        meanwhile: Callable[[RankPool], None] | None = None,
    ) -> list[Outcome]:
        """Like ``run``, but an exception or the death of a rank is a result. ``meanwhile`` runs in the caller."""
        if ranks > self.size:
            pytest.skip(f"needs {ranks} ranks, and the pool has {self.size} (DEEPEP_TEST_RANKS)")
        self.start()
        self._log_starts = [self._log_size(rank) for rank in range(self.size)]
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        for rank in range(ranks):
            self._connections[rank].send((name, ranks, args))
        if meanwhile is not None:
            meanwhile(self)
        outcomes = self._collect(list(range(ranks)), deadline)
        if any(outcome.died for outcome in outcomes):
            for outcome in outcomes:
                if outcome.died:
                    self._processes[outcome.rank].join(5)
                    outcome.traceback = f"died, exit code {self._processes[outcome.rank].exitcode}"
            if not self.mends or any(outcome.error for outcome in outcomes):
                self.stop()
        return outcomes

    def _collect(self, ranks: list[int], deadline: float) -> list[Outcome]:
        waiting = {self._connections[rank]: Outcome(rank) for rank in ranks}
        outcomes = list(waiting.values())
        end = time.monotonic() + deadline
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self._give_up([outcome.rank for outcome in waiting.values()], outcomes, deadline)
            for connection in ready:
                assert isinstance(connection, Connection)
                if self._receive(connection, waiting[connection]):
                    outcome = waiting.pop(connection)
                    outcome.ended = time.monotonic()
                    if outcome.error:
                        end = min(end, time.monotonic() + GRACE)
        return outcomes

    @staticmethod
    def _receive(connection: Connection, outcome: Outcome) -> bool:
        """Takes one message; True when the rank is through."""
        try:
            kind, body = connection.recv()
        except (EOFError, ConnectionResetError):
            outcome.died = True
            return True
        if kind == "note":
            outcome.notes.append(body)
            return False
        if kind == "value":
            outcome.value = body
        else:
            outcome.error_type, outcome.error_kinds, outcome.error, outcome.traceback = body
        return True

    def _give_up(self, late: list[int], outcomes: list[Outcome], deadline: float) -> None:
        """Collects the stacks of the late ranks, kills the pool and raises."""
        for rank in late:
            os.kill(self.pid(rank), signal.SIGUSR1)
        time.sleep(1.0)
        texts = [f"rank {o.rank} raised: {o.traceback}" for o in outcomes if o.error]
        report = f"ranks {late} did not answer within {deadline} s\n" + "\n".join(texts) + self.logs()
        self.stop()
        raise RanksLate(report)

    def _log_size(self, rank: int) -> int:
        path = pool_worker.log_path(self._folder, rank)
        return os.path.getsize(path) if os.path.exists(path) else 0

    def logs(self) -> str:
        """What the ranks wrote to stdout and stderr in this call; of a stopped pool, until it was stopped."""
        if not os.path.isdir(self._folder):
            return self._last_logs
        texts = []
        for rank in range(self.size):
            path = pool_worker.log_path(self._folder, rank)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    file.seek(self._log_starts[rank])
                    text = file.read().decode(errors="replace")[-8000:]
                if text.strip():
                    texts.append(f"\n--- output of rank {rank}\n{text}")
        return "".join(texts)
