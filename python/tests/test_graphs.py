"""CUDA graphs: calls captured once and replayed thousands of times with new inputs; a peer that is lost meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cases
import checks
import elastic
import lowlat
import normal
import victims
from cases import Case
from test_failures import judge

REPLAYS, REPLAYS_IN_TURNS = 10_000, 1000  # a GPU for each rank; several ranks on one
CHECK_EVERY = 67  # no factor in common with the slots or the kinds of input: all pairs of them are looked at
NORMAL = Case((40, 0, 23), hidden=512, experts=12, topk=4, worst=True)
LOW_LATENCY = Case((16, 0, 5), hidden=512, experts=12, topk=3)
KINDS = 7  # sets of inputs that take turns
B = 16


def for_ranks(ctx: Any, case: Case) -> Case:
    """The case, without the ranks that are not there."""
    return case.but(tokens=case.tokens[: ctx.size])


def capture(ctx: Any, calls: Callable[[], Any]) -> Callable[[], Any]:
    """Runs ``calls`` once by itself, then captures it; the result replays it and returns its outputs."""
    calls()
    if ctx.device.type != "cuda":
        return calls
    torch.cuda.synchronize()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = calls()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def normal_round(buffer: Any, case: Case, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Any:
    """Layout, worst-case dispatch and combine: what can be captured of normal mode."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, case.experts)
    recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
        num_worst_tokens=case.worst_tokens,
    )
    sums, summed_weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
    return recv_x, recv_idx, recv_weights, sums, summed_weights


def rank_normal(ctx: Any, replays: int) -> None:
    case = for_ranks(ctx, NORMAL)
    wanted = [normal.expect(case.but(seed=seed), ctx.rank) for seed in range(KINDS)]
    inputs = [[ctx.to_device(t) for t in (w.own.x, w.own.topk_idx, w.own.topk_weights)] for w in wanted]
    x, idx, weights = (torch.clone(t) for t in inputs[0])
    with normal.buffer_of(ctx) as buffer:
        replay = capture(ctx, lambda: normal_round(buffer, case, x, idx, weights))
        for turn in range(replays):
            kind = turn % KINDS
            for static, new in zip((x, idx, weights), inputs[kind], strict=True):
                static.copy_(new)
            recv_x, recv_idx, recv_weights, sums, summed_weights = replay()
            if turn % CHECK_EVERY and turn != replays - 1:
                continue
            own = wanted[kind]
            checks.same_received(recv_x, recv_idx, recv_weights, own.want, case.worst_tokens)
            ranks = own.layouts[ctx.rank].is_token_in_rank.sum(1, keepdim=True)  # each gave the row back as it was
            checks.same_rows("combined_x", sums, (own.own.x.float() * ranks).to(torch.bfloat16))
            named = torch.where(own.own.topk_idx >= 0, own.own.topk_weights, 0)
            assert torch.equal(summed_weights.cpu(), named.float()), f"replay {turn}: combined weights differ"
        ctx.barrier()


def rank_elastic(ctx: Any, replays: int, expand: bool) -> None:
    """V2 without a CPU sync: dispatch in one of the layouts, a cached repeat, and combine; the routing changes."""
    case = for_ranks(ctx, NORMAL.but(worst=False, kind="bf16"))
    bound = max(case.tokens)
    kinds = [elastic.expect(case.but(seed=seed), bound) for seed in range(KINDS)]
    own = [exchange.inputs[ctx.rank] for exchange in kinds]
    inputs = [[ctx.to_device(t) for t in (one.x, one.topk_idx, one.topk_weights)] for one in own]
    x, idx, weights = (torch.clone(t) for t in inputs[0])
    with elastic.buffer_of(ctx, bound, case.hidden) as buffer:

        def calls() -> Any:
            given = {"num_experts": case.experts, "do_cpu_sync": False, "do_expand": expand}
            rows, local, row_weights, handle, _ = buffer.dispatch(x, idx, weights, **given)
            again, *_ = buffer.dispatch(x, handle=handle, do_expand=expand)
            return rows, local, row_weights, handle, again, *buffer.combine(rows, handle, row_weights)[:2]

        replay = capture(ctx, calls)
        for turn in range(replays):
            kind = turn % KINDS
            for static, new in zip((x, idx, weights), inputs[kind], strict=True):
                static.copy_(new)
            rows, local, row_weights, handle, again, sums, summed_weights = replay()
            if turn % CHECK_EVERY and turn != replays - 1:
                continue
            call = elastic.Call(case.but(seed=kind), kinds[kind], ctx.rank, bound, expand, sync=False)
            call.recv_x, call.recv_topk_idx, call.recv_topk_weights, call.handle = rows, local, row_weights, handle
            elastic.check(call)
            elastic.check_handle(call)
            call.recv_x = again
            elastic.check(call)
            owner = torch.where(call.own.topk_idx < 0, -1, call.own.topk_idx // (case.experts // ctx.size))
            times = (owner >= 0).sum(1) if expand else torch.tensor([len(set(r) - {-1}) for r in owner.tolist()])
            checks.same_rows("combined_x", sums, (call.own.x.float() * times.unsqueeze(1)).to(torch.bfloat16))
            named = torch.where(call.own.topk_idx >= 0, call.own.topk_weights, 0)
            assert torch.equal(summed_weights.cpu(), named.float()), f"replay {turn}: combined weights differ"
        ctx.barrier()


def rank_low_latency(ctx: Any, replays: int, combines: int, weights_known: bool, halves_by: str | None) -> None:
    """`halves_by`: of DEEPEP_LL_TRANSFER; None: calls in one piece."""
    if halves_by is not None:
        os.environ["DEEPEP_LL_TRANSFER"] = halves_by
    try:
        _rank_low_latency(ctx, replays, combines, weights_known, halves_by is not None)
    finally:
        os.environ.pop("DEEPEP_LL_TRANSFER", None)


def _rank_low_latency(ctx: Any, replays: int, combines: int, weights_known: bool, in_halves: bool) -> None:
    case = for_ranks(ctx, LOW_LATENCY)
    gen = cases.generator(ctx.rank, 31)
    num_tokens, hidden = case.tokens[ctx.rank], case.hidden
    xs = [torch.randint(-7, 8, (num_tokens, hidden), generator=gen).to(torch.bfloat16) for _ in range(KINDS)]
    idxs = [cases.routing(case.but(seed=seed), ctx.rank) for seed in range(KINDS)]
    halves = torch.randint(1, 3, (num_tokens, case.topk), generator=gen).float() / 2  # sums are exact in BF16
    weights = ctx.to_device(halves)
    x, idx = ctx.to_device(xs[0].clone()), ctx.to_device(idxs[0].clone())
    known = {"topk_weights": weights} if weights_known else {}
    with lowlat.buffer_of(ctx, case, B) as buffer:

        def both(hook: Any) -> None:
            if hook is not None:
                hook()

        def calls() -> Any:
            recv_x, counts, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, B, case.experts, use_fp8=False, return_recv_hook=in_halves, **known
            )
            both(hook)
            sums = []
            for _ in range(combines):
                got, _, hook = buffer.low_latency_combine(recv_x, idx, weights, handle, return_recv_hook=in_halves)
                both(hook)
                sums.append(got)
            return counts, sums

        replay = capture(ctx, calls)
        for turn in range(replays):
            kind = turn % KINDS
            x.copy_(xs[kind])
            idx.copy_(idxs[kind])
            counts, sums = replay()
            if turn % CHECK_EVERY and turn != replays - 1:
                continue
            want = lowlat.expect(case.but(seed=kind), ctx.rank, B, frozenset(), use_fp8=False).want
            checks.same_bits("recv_count", counts, want.counts)
            total = torch.where(idxs[kind] >= 0, halves, 0).sum(1, keepdim=True)
            for got in sums:
                checks.same_rows("combined_x", got, (xs[kind].float() * total).to(torch.bfloat16))
        ctx.barrier()


@pytest.fixture
def replays(device: str) -> int:
    """How often; skips where nothing can be captured."""
    if device != "cuda":
        pytest.skip("needs a CUDA device: the CPU engine has no graphs")
    return REPLAYS if torch.cuda.device_count() >= 3 else REPLAYS_IN_TURNS


def test_normal_mode(pool, replays):
    pool.run(3, rank_normal, replays, deadline=60.0)


@pytest.mark.parametrize("expand", [False, True])
def test_elastic(pool, replays, expand):
    pool.run(3, rank_elastic, replays, expand, deadline=60.0)


@pytest.mark.parametrize(("combines", "weights_known"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("halves_by", [None, "sm", "copy", "stream"])
def test_low_latency(pool, replays, combines, weights_known, halves_by):
    pool.run(3, rank_low_latency, replays, combines, weights_known, halves_by, deadline=60.0)


def rank_lost(ctx: Any, normal_mode: bool) -> tuple[float, str, int, float]:
    """The victim dies between two replays; the others go on replaying until a replay fails."""
    case = for_ranks(ctx, NORMAL)
    wanted = normal.expect(case, ctx.rank)
    x, idx = ctx.to_device(wanted.own.x), ctx.to_device(wanted.own.topk_idx)
    weights = ctx.to_device(torch.ones(idx.shape))
    make = normal.buffer_of(ctx) if normal_mode else lowlat.buffer_of(ctx, case, max(case.tokens))
    with make as buffer:

        def normal_calls() -> Any:
            return normal_round(buffer, case, x, idx, weights)

        def low_latency_calls() -> Any:
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, max(case.tokens), case.experts, use_fp8=False)
            return buffer.low_latency_combine(rows, idx, weights, handle)

        replay = capture(ctx, normal_calls if normal_mode else low_latency_calls)
        call = victims.settled(ctx, buffer, replay)
        for _ in range(5):
            call()
        ctx.barrier()
        if ctx.rank == victims.VICTIM:
            victims.die(ctx)
        when, text, status = victims.first_error(call)
        victims.refuses(buffer, call, victims.VICTIM)
        return when, text, status, victims.timed_destroy(buffer)


@pytest.mark.parametrize("normal_mode", [True, False], ids=["normal", "low latency"])
def test_peer_lost_between_replays(fresh_pool, device, normal_mode):
    if device != "cuda":
        pytest.skip("needs a CUDA device: the CPU engine has no graphs")
    judge(fresh_pool(3).outcomes(3, rank_lost, normal_mode))
