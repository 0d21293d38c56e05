"""Ranks that disagree: an error on every rank, soon, that names each rank and its value."""

from __future__ import annotations

import time

import pytest
import torch

import cases
import lowlat
import normal
from cases import Case

CASE = Case((12, 7, 5), experts=6, topk=3, hidden=512, routing="random")
ODD = 1  # the rank whose arguments differ


def error_of(buffer, call):
    """The error of a call that had to fail: its own, or the one that the buffer keeps."""
    from deep_ep import DeepEPError

    start = time.monotonic()
    try:
        call()
        if not buffer._core.host_stream:
            torch.cuda.synchronize()  # only a kernel sees it, maybe after the call has returned
        buffer.check()
    except DeepEPError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the ranks disagree, and this one did not notice")


def judge(results, words):
    """Every rank has an error within 10 s that names the odd rank, another one, and both values."""
    for rank, (text, seconds) in enumerate(results):
        assert seconds < 10, f"rank {rank} noticed after {seconds} s"
        assert f"rank {ODD}" in text, f"rank {rank}: the text does not name rank {ODD}: {text}"
        for word in words:
            assert word in text, f"rank {rank}: the text lacks {word!r}: {text}"


def rank_normal(ctx, changes):
    case = CASE.but(**changes) if ctx.rank == ODD else CASE
    with normal.buffer_of(ctx, timeout=20) as buffer:
        exchange = normal.expect(case, ctx.rank)
        arguments = normal.layout_arguments(ctx, buffer, exchange)
        own = exchange.own

        def call():
            buffer.dispatch(
                normal.x_of(ctx, own),
                **arguments,
                topk_idx=ctx.to_device(own.topk_idx),
                topk_weights=ctx.to_device(own.topk_weights),
                num_worst_tokens=case.worst_tokens,
            )

        return error_of(buffer, call)


NORMAL = {
    "hidden": ({"hidden": 256}, ("hidden", "512", "1024")),  # bytes of a row
    "experts": ({"experts": 9}, ("num_experts", "6", "9")),
    "top-k": ({"topk": 2}, ("topk", "3", "2")),
    "no top-k": ({"with_topk": False}, ("topk", "3", "0")),
    "dtype": ({"kind": "fp8", "num_scales": 4}, ("512", "1024")),
}


@pytest.mark.parametrize("name", NORMAL)
def test_dispatch(pool, name):
    changes, words = NORMAL[name]
    judge(pool.run(3, rank_normal, changes), words)


def rank_scales(ctx):
    case = CASE.but(kind="fp8", num_scales=2 if ctx.rank == ODD else 4)
    with normal.buffer_of(ctx, timeout=20) as buffer:
        return error_of(buffer, lambda: normal.dispatch(ctx, buffer, case))


def test_number_of_scales(pool):
    judge(pool.run(3, rank_scales), ("scales", "2", "4"))


def rank_low_latency(ctx, num_max, changes, options, combine):
    """Only ODD takes the changed shape."""
    odd = ctx.rank == ODD
    case = CASE.but(**changes) if odd else CASE
    big = CASE.but(hidden=1024, experts=9)
    with lowlat.buffer_of(ctx, big, 64, timeout=20) as buffer:
        agreed = lowlat.dispatch_and_check(ctx, buffer, CASE, 16)
        if combine:
            call = agreed if not odd else lowlat.expect(case, ctx.rank, num_max, frozenset())
            local = case.experts // ctx.size
            ranges = torch.zeros((local, ctx.size), dtype=torch.int64, device=ctx.device)
            info = torch.zeros((local, ctx.size * num_max), dtype=torch.int32, device=ctx.device)
            if odd:
                call.handle = (info, ranges, num_max, case.hidden, case.experts)
            return error_of(buffer, lambda: lowlat.finish(lowlat.combine(ctx, buffer, call, **options)))
        num_max = num_max if odd else 16
        return error_of(buffer, lambda: lowlat.finish(lowlat.dispatch(ctx, buffer, case, num_max, **options)))


LOW_LATENCY = {
    "hidden": (16, {"hidden": 1024}, ("hidden", "1024", "2048")),  # bytes of a row
    "B": (32, {}, ("num_max_dispatch_tokens_per_rank", "16", "32")),
    "experts": (16, {"experts": 9}, ("num_experts", "6", "9")),
    "top-k": (16, {"topk": 2}, ("topk", "3", "2")),
}


@pytest.mark.parametrize("name", LOW_LATENCY)
@pytest.mark.parametrize("options", [{}, {"return_recv_hook": True}, {"async_finish": True}])
def test_low_latency_dispatch(pool, name, options):
    num_max, changes, words = LOW_LATENCY[name]
    judge(pool.run(3, rank_low_latency, num_max, changes, options, False), words)


@pytest.mark.parametrize("name", ["hidden", "B", "experts"])
def test_low_latency_combine(pool, name):
    num_max, changes, words = LOW_LATENCY[name]
    judge(pool.run(3, rank_low_latency, num_max, changes, {}, True), words)


def rank_fp8_or_not(ctx):
    with lowlat.buffer_of(ctx, CASE, 16, timeout=20) as buffer:
        lowlat.dispatch_and_check(ctx, buffer, CASE, 16)
        return error_of(buffer, lambda: lowlat.dispatch(ctx, buffer, CASE, 16, use_fp8=ctx.rank != ODD))


def test_low_latency_fp8_or_not(pool):
    judge(pool.run(3, rank_fp8_or_not), ("use_fp8=True", "use_fp8=False"))


def rank_construction(ctx, common, odd):
    from deep_ep import Buffer, DeepEPError

    start = time.monotonic()
    try:
        buffer = Buffer(
            ctx.group, engine=ctx.engine, explicitly_destroy=True, timeout=20, **(odd if ctx.rank == ODD else common)
        )
    except DeepEPError as error:
        return str(error), time.monotonic() - start
    buffer.destroy()
    raise AssertionError("the ranks disagree, and this one did not notice")


CONSTRUCTION = {
    "num_nvl_bytes": ({"num_nvl_bytes": 1 << 20}, {"num_nvl_bytes": 1 << 21}, ("1048576", "2097152")),
    "num_rdma_bytes": ({"num_rdma_bytes": 1 << 20}, {"num_rdma_bytes": 1 << 21}, ("1048576", "2097152")),
    "low_latency_mode": ({"num_rdma_bytes": 1 << 20, "low_latency_mode": True}, {"num_rdma_bytes": 1 << 20}, ()),
    "enable_shrink": ({"num_nvl_bytes": 1 << 20, "enable_shrink": True}, {"num_nvl_bytes": 1 << 20}, ()),
    "num_nvl_peers": (
        {"num_nvl_bytes": 1 << 20},
        {"num_nvl_bytes": 1 << 20, "num_nvl_peers": 3},
        (str(cases.node_size()), "3"),
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTION)
def test_constructor(pool, name):
    common, odd, words = CONSTRUCTION[name]
    judge(pool.run(3, rank_construction, common, odd), (name, *words))


def rank_other_call(ctx):
    """One rank dispatches while the others combine."""
    with normal.buffer_of(ctx, timeout=20) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        rows = ctx.to_device(normal.expert_rows(exchange, True)[ctx.rank])
        x = normal.x_of(ctx, exchange.own)
        if ctx.rank == ODD:
            return error_of(buffer, lambda: buffer.dispatch(x, handle=exchange.handle))
        return error_of(buffer, lambda: buffer.combine(rows, exchange.handle))


def test_another_operation(pool):
    judge(pool.run(3, rank_other_call), ("dispatch", "combine"))


def rank_fails_then_refuses(ctx):
    """After a disagreement the buffer refuses with that reason, destroy works, and a new buffer serves."""
    from deep_ep import DeepEPError

    case = CASE.but(hidden=256) if ctx.rank == ODD else CASE
    with normal.buffer_of(ctx, timeout=20) as buffer:
        text, _ = error_of(buffer, lambda: normal.dispatch(ctx, buffer, case))
        with pytest.raises(DeepEPError) as caught:
            normal.dispatch(ctx, buffer, CASE)
        assert f"rank {ODD}" in str(caught.value) and "hidden" in str(caught.value), f"{caught.value} after {text}"
    with normal.buffer_of(ctx) as buffer:
        normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE))


def test_buffer_refuses_afterwards(pool):
    pool.run(3, rank_fails_then_refuses)


def rank_cached_handle_of_others(ctx):
    """A handle of a larger group is refused at once, by this rank alone."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        other = list(exchange.handle)
        matrix = 0 if len(other) == 6 else 1
        other[matrix] = torch.zeros((4, 4), dtype=torch.int32, device=ctx.device)
        with pytest.raises(ValueError, match="handle"):
            buffer.combine(exchange.recv_x, tuple(other))
        normal.combine(ctx, buffer, exchange)


def test_handle_of_another_group(pool):
    pool.run(3, rank_cached_handle_of_others)
