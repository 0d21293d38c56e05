"""Times of kernels, by torch's profiler; and times from the host's view.

Before each call all ranks meet in the buffer's own barrier kernel, behind a short pause on the device: so the call is
in the queue when the barrier ends, and every rank's kernels begin within a microsecond or two. Each figure is that of
the slowest rank in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lib.call_clock import clocked
from lib.ranks import Team

PAUSE_CYCLES = 300_000  # about 150 us: time for the host to issue a call
FLUSH_BYTES = 192 << 20  # more than the L2 cache of any GPU
Kernels = list[tuple[str, float]]  # (name, us) in the order of their begin


class Meets(Protocol):
    """What has a barrier on the current stream: a buffer of V1 or V2."""

    def barrier(self) -> None: ...


class Meeting:
    """Where all ranks begin a call together. ``cold``: with nothing of use in the L2 cache."""

    def __init__(self, team: Team, buffer: Meets, cold: bool) -> None:
        self._team, self._buffer = team, buffer
        on_gpu = team.device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=team.device) if cold and on_gpu else None

    def on_device(self) -> None:
        """Enqueues the meeting; what is enqueued next begins at the same time on all ranks."""
        self._team.finish()
        if self._flush is not None:
            self._flush.zero_()
        if self._team.device.type == "cuda":
            torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]
        self._buffer.barrier()

    def on_host(self) -> None:
        """Returns on all ranks at the same time, with idle devices."""
        self.on_device()
        self._team.finish()


def _kernels(profiler: Any) -> Kernels:
    """All kernels of a profile."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == DeviceType.CUDA]
    events.sort(key=lambda event: event.start_ns())
    return [(event.name(), event.duration_ns() / 1e3) for event in events]


def profiled(
    team: Team, meeting: Meeting, call: Callable[[], None], rounds: int, wanted: Callable[[str], bool], warmup: int = 3
) -> list[list[float]]:
    """Times the kernels of a call.

    Args:
        call: enqueues; it runs `warmup` + `rounds` times.
        wanted: which kernels count, by name.

    Returns:
        A list for each kernel of a call, in their order: its times in us, the slowest rank's in each round. Without a
        GPU: one list, of the call's times on the host's clock.
    """
    for _ in range(warmup):
        meeting.on_device()
        call()
    if team.device.type != "cuda":
        return [host_view(team, meeting, call, rounds, warmup=0)]
    team.finish()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(rounds):
            meeting.on_device()
            call()
        team.finish()
    times = [us for name, us in _kernels(profiler) if wanted(name)]
    found = team.gather(len(times))
    if min(found) != max(found) or not times or len(times) % rounds:
        names = sorted({name[:60] for name, _ in _kernels(profiler)})
        raise RuntimeError(f"the ranks' profiles of {rounds} calls have {found} kernels; this rank's: {names}")
    each = len(times) // rounds
    return [team.slowest(times[number::each]) for number in range(each)]


def sums(lists: Sequence[Sequence[float]]) -> list[float]:
    """A call's time where it has several kernels."""
    return [sum(times) for times in zip(*lists, strict=True)]


def host_view(team: Team, meeting: Meeting, call: Callable[[], Any], rounds: int, warmup: int = 3) -> list[float]:
    """Times in us from the call until the device is done, all ranks having begun together; the slowest rank's."""
    return team.slowest(clocked(meeting.on_host, call, team.finish, rounds, warmup)[1])
