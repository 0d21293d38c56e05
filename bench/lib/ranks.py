"""Processes for the benchmarks, one a rank, and the clock that all of them share.

Eight processes are started once; a case uses the first R of them, the others wait in a gloo barrier, which sleeps.

A round of a call: all ranks of the team meet in a barrier, then each times the call on its own clock. The round's
time is that of the slowest rank, which on the CPU engine meets the others in shared memory: gloo's barrier lets them
go up to a millisecond apart, and the round of a small call, ours or the rival's, was mostly that. Calls that are to
be compared take turns within a round, so that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Eight imports of torch at once take seconds on two cores, and a case may keep the idle ranks waiting for minutes.
PATIENCE = timedelta(minutes=30)


class Gate:
    """A barrier in memory that all ranks of a team share. Each rank counts its arrivals in a word of its own."""

    LINE = 8  # words of 8 bytes that a rank has for itself

    def __init__(self, path: str, rank: int, size: int) -> None:
        words = size * self.LINE
        with open(path, "a+b") as file:
            file.truncate(8 * words)
            self._words = memoryview(mmap.mmap(file.fileno(), 8 * words)).cast("Q")
        self._own, self._all = rank * self.LINE, range(0, words, self.LINE)

    def arrive_and_wait(self) -> None:
        """Returns once every rank has come here as often as this one; meanwhile the others have its core."""
        words = self._words
        words[self._own] += 1
        turn = words[self._own]
        end = time.monotonic() + PATIENCE.total_seconds()
        while any(words[at] < turn for at in self._all):
            os.sched_yield()
            if time.monotonic() > end:
                raise TimeoutError(f"ranks {[i for i, at in enumerate(self._all) if words[at] < turn]} did not come")


@dataclass
class Team:
    """The ranks of one case, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    engine: str = "cpu"
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a device cannot change
    rival: dist.ProcessGroup | None = None  # NCCL's, where each rank has a GPU
    gate: Gate | None = None  # elsewhere

    def meet(self) -> None:
        """As barrier(), but through NCCL where each rank has a GPU; all ranks leave it within microseconds."""
        if self.rival is None:
            self.barrier()
            return
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.rival)
        torch.cuda.synchronize()

    def finish(self) -> None:
        """Returns when the device has done all that was issued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Returns when every rank of the team has come here."""
        if self.gate:
            self.gate.arrive_and_wait()
        else:
            dist.barrier(group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, in rank order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def slowest(self, own: Sequence[float]) -> list[float]:
        """Element by element the largest value of all ranks."""
        return [max(column) for column in zip(*self.gather(list(own)), strict=True)]


def time_rounds(
    team: Team, calls: dict[str, Callable[[], None]], rounds: int, warmup: int, before: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Times the calls in turn.

    Args:
        calls: in this order within each round.
        rounds: how many are timed.
        warmup: how many go before them, untimed.
        before: called first in each round, untimed.

    Returns:
        For each call the rounds' times in microseconds, of the slowest rank.
    """
    own: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        if before:
            before()
        for name, call in calls.items():
            team.barrier()
            start = time.perf_counter()
            call()
            own[name].append((time.perf_counter() - start) * 1e6)
    return {name: team.slowest(times[warmup:]) for name, times in own.items()}


def join(rank: int, world: int, rendezvous: str, sizes: Sequence[int], engine: str = "cpu") -> dict[int, Team]:
    """Enters this process into the world and makes a team of each size. A size's team is absent where rank >= size.

    On the CUDA engine rank r takes GPU r modulo their number, and each team has an NCCL group beside its gloo group,
    unless ranks share a GPU, which NCCL refuses.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whatever its name resolves to
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 4))
    device = torch.device("cpu")
    if engine == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", f"file://{rendezvous}", PATIENCE, world, rank)
    teams = {}
    for size in sizes:
        group = dist.new_group(range(size), timeout=PATIENCE)
        apart = engine == "cuda" and size <= torch.cuda.device_count()  # a GPU for each rank
        rival = dist.new_group(range(size), backend="nccl", timeout=PATIENCE) if apart else None
        if rank < size:
            gate = None if apart else Gate(f"{rendezvous}.{size}", rank, size)
            teams[size] = Team(group, rank, size, engine, device, rival if size > 1 else None, gate)
    return teams


def leave() -> None:
    """Waits for everybody and leaves the world."""
    dist.barrier()
    dist.destroy_process_group()
