"""Operations in which a rank can be lost, and what its survivors must see."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

import cases
import internode
import lowlat
import normal
from cases import RANKS, Case

CASE = Case((30, 20, 25, 9)[:RANKS], experts=8, topk=3, hidden=64, routing="hot_first")
LL_CASE = Case((16, 9, 7, 12)[:RANKS], hidden=512, experts=8, topk=3, routing="hot_first")
B = 16
VICTIM = RANKS // 2
NORMAL = ("dispatch", "worst-case dispatch", "cached dispatch", "combine", "asynchronous combine")
LOW_LATENCY = (
    "low_latency_dispatch",
    "low_latency_dispatch with hook",
    "low_latency_combine",
    "low_latency_combine with hook",
    "asynchronous low_latency_dispatch",
    "clean_low_latency_buffer",
    "barrier",
)


def die(ctx: Any) -> None:
    """Reports when, then kills this process as the OOM killer would."""
    ctx.report((os.getpid(), socket.gethostname()))
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def operation(ctx: Any, name: str, **options: Any) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A buffer and a function that runs the operation once and waits for it."""
    if name in NORMAL:
        with normal.buffer_of(ctx, **options) as buffer:
            yield buffer, normal_call(ctx, buffer, name)
    else:
        with lowlat.buffer_of(ctx, LL_CASE, B, **options) as buffer:
            yield buffer, low_latency_call(ctx, buffer, name)


def normal_call(ctx: Any, buffer: Any, name: str) -> Callable[[], None]:
    exchange = normal.dispatch_and_check(ctx, buffer, CASE)
    rows = ctx.to_device(normal.expert_rows(exchange, True)[ctx.rank])
    x = normal.x_of(ctx, exchange.own)

    def combine_later() -> None:
        buffer.combine(rows, exchange.handle, async_finish=True)[-1].current_stream_wait()

    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: normal.dispatch(ctx, buffer, CASE),
        "worst-case dispatch": lambda: normal.dispatch(ctx, buffer, CASE.but(worst=True)),
        "cached dispatch": lambda: buffer.dispatch(x, handle=exchange.handle),
        "combine": lambda: buffer.combine(rows, exchange.handle),
        "asynchronous combine": combine_later,
    }
    return settled(ctx, buffer, calls[name])


def low_latency_call(ctx: Any, buffer: Any, name: str) -> Callable[[], None]:
    call = lowlat.dispatch_and_check(ctx, buffer, LL_CASE, B)

    def dispatch(**options: Any) -> None:
        lowlat.finish(lowlat.dispatch(ctx, buffer, LL_CASE, B, **options))

    def combine(**options: Any) -> None:
        lowlat.finish(lowlat.combine(ctx, buffer, call, **options))

    calls: dict[str, Callable[[], Any]] = {
        "low_latency_dispatch": dispatch,
        "low_latency_dispatch with hook": lambda: dispatch(return_recv_hook=True),
        "low_latency_combine": combine,
        "low_latency_combine with hook": lambda: combine(return_recv_hook=True),
        "asynchronous low_latency_dispatch": lambda: dispatch(async_finish=True),
        "clean_low_latency_buffer": lambda: buffer.clean_low_latency_buffer(B, LL_CASE.hidden, LL_CASE.experts),
        "barrier": buffer.barrier,
    }
    return settled(ctx, buffer, calls[name])


def settled(ctx: Any, buffer: Any, call: Callable[[], Any]) -> Callable[[], None]:
    """On a GPU a call that has returned may still fail later: wait, then ask."""

    def run() -> None:
        call()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
            buffer.check()

    return run


def first_error(call: Callable[[], None], seconds: float = 20.0) -> tuple[float, str, int]:
    """Repeats the call until it fails: (when, text, status). A victim's last data may still serve one call."""
    from deep_ep import DeepEPError

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            call()
        except DeepEPError as error:
            return time.monotonic(), str(error), error.status
    raise AssertionError(f"no error within {seconds} s")


def refuses(buffer: Any, call: Callable[[], None], victim: int) -> None:
    """A failed buffer answers every further call at once, with the reason."""
    from deep_ep import DeepEPError

    for again in (call, buffer.check):
        start = time.monotonic()
        try:
            again()
        except DeepEPError as error:
            assert f"rank {victim}" in str(error), f"later error does not name rank {victim}: {error}"
        else:
            raise AssertionError("a failed buffer took another call")
        assert time.monotonic() - start < 0.5


def timed_destroy(buffer: Any) -> float:
    start = time.monotonic()
    buffer.destroy()
    return time.monotonic() - start


def new_group_works(ctx: Any, victim: int, folder: str) -> None:
    """The survivors meet again through the library's own bootstrap and exchange something."""
    from deep_ep import Bootstrap, Buffer

    rank = ctx.rank - (ctx.rank > victim)
    ours = SimpleNamespace(rank=rank, size=ctx.size - 1, device=ctx.device, engine=ctx.engine, to_device=ctx.to_device)
    where = Bootstrap.file(rank, ours.size, folder, name="survivors")
    rdma, settings = 0, {}
    if ours.size > cases.node_size():
        rdma, settings = normal.RDMA_BYTES, {cases.NODE_SIZE: 1}  # a node that lost a rank is not full any more
        if ctx.engine == "cuda":  # NVSHMEM goes on with all ranks or none: GPUs of one machine do without it
            rdma, settings = 0, {cases.NODE_SIZE: ours.size}
    with internode.environment(**settings):
        buffer = Buffer(None, 1 << 20, rdma, engine=ctx.engine, explicitly_destroy=True, bootstrap=where)
        case = CASE.but(tokens=CASE.tokens[: ours.size], experts=4 * ours.size)
        exchange = normal.dispatch_and_check(ours, buffer, case)
        normal.combine(ours, buffer, exchange, with_weights=True)
        buffer.destroy()


class Comm:
    """A communicator with the three methods of mpi4py's that the library uses, over a torch group.

    ``after_exchange`` runs when an exchange is through.
    """

    def __init__(self, ctx: Any, after_exchange: Callable[[], None] | None = None) -> None:
        self._ctx = ctx
        self._after = after_exchange
        self.exchanges = 0

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        return int(self._ctx.rank)

    def Get_size(self) -> int:  # noqa: N802
        return int(self._ctx.size)

    def allgather(self, value: Any) -> list[Any]:
        result = self._ctx.gather(value)
        self.exchanges += 1
        if self._after is not None:
            self._after()
        return list(result)
