"""V2 with ``enable_shrink``: ranks that are masked or dead are left out by all survivors alike, in both layouts."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest
import torch

import cases
import elastic
import elastic_reference
import internode
from cases import Case
from conftest import full, test_device

M, GONE = 24, 2
CASE = Case((16, 9, 24), experts=12, topk=3, hidden=64, routing="holes", alignment=4)
# Two nodes of two ranks; the lost one's node has another one.
NODES = CASE.but(tokens=(16, 0, 24, 9), experts=16, seed=1)


def without_gone(case):
    """What should come where the last rank takes no part."""
    inputs, local = [], case.experts // len(case.tokens)
    for rank, tokens in enumerate(case.inputs()):
        kept = (tokens.topk_idx // local != GONE) & (rank != GONE)
        inputs.append(dataclasses.replace(tokens, topk_idx=torch.where(kept, tokens.topk_idx, -1)))
    return elastic_reference.Exchange(inputs, case.experts, case.alignment, M)


def survivors(ctx, buffer, case):
    """Dispatch and combine in both layouts, with indices that still name the lost rank's experts."""
    real = case.inputs()[ctx.rank]
    for expand in (False, True):
        for sync in (True, False):
            call = elastic.Call(case, without_gone(case), ctx.rank, M, expand, sync, False)
            result = buffer.dispatch(
                elastic.x_of(ctx, real), ctx.to_device(real.topk_idx), ctx.to_device(real.topk_weights),
                num_experts=case.experts, num_max_tokens_per_rank=M, expert_alignment=case.alignment, do_cpu_sync=sync,
                do_expand=expand,
            )  # fmt: skip
            call.recv_x, call.recv_topk_idx, call.recv_topk_weights, call.handle, call.event = result
            elastic.check(call)
            elastic.combine(ctx, buffer, call, biases=1, weights=True)


def masks(ctx, buffer):
    status = torch.empty(ctx.size, dtype=torch.int32, device=ctx.device)
    buffer.query_mask(status)
    return status.tolist()


def serve(ctx, buffer, case):
    exchange = elastic.expect(case, M)
    return [elastic.round_trip(ctx, buffer, case, exchange, expand=expand, sync=True) for expand in (False, True)]


def rank_masked(ctx, case, options):
    from deep_ep import DeepEPError

    with elastic.buffer_of(ctx, M, case.hidden, enable_shrink=True, **options) as buffer:
        plain, expanded = serve(ctx, buffer, case)
        ctx.barrier()
        if ctx.rank == 0:
            buffer.update_mask(GONE)
        ctx.barrier()
        if ctx.rank == GONE:
            with pytest.raises(DeepEPError, match="left out: rank [013] has masked this rank"):
                elastic.dispatch(ctx, buffer, elastic.expect(case, M), case)
        else:
            survivors(ctx, buffer, case.but(seed=3))
            assert masks(ctx, buffer) == [int(rank == GONE) for rank in range(ctx.size)]
            for call in (plain, expanded):  # handles of before: the lost rank's rows are zeros
                rows = elastic.again(ctx, buffer, call).recv_x
                metadata = call.handle.recv_src_metadata
                lost = (metadata[:, 0] // M == GONE).nonzero().flatten()
                places = metadata[lost, 2:].flatten() if call.expand else lost
                assert len(lost) and not bool(rows[places[places >= 0].long()].any())
            with pytest.raises(DeepEPError, match="copies of experts do not go with enable_shrink"):
                buffer._core.native.balance_workspace(balance(), False)
        ctx.barrier()
        buffer.clean_mask()
        buffer.barrier()
        serve(ctx, buffer, case.but(seed=4))


def balance():
    from deep_ep import _abi

    return _abi.sized(_abi.BalanceArgs, num_tensors=1, num_slots=1, num_local_experts=1)


def test_masked(pool):
    pool.run(3, rank_masked, CASE, {})


@pytest.mark.skipif(cases.RANKS < 4, reason="needs 4 ranks")
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "direct"])
def test_masked_between_nodes(pool, hybrid):
    internode.run(pool, "2x2", rank_masked, NODES, {"allow_hybrid_mode": hybrid})


def rank_dies(ctx, case):
    """A rank dies; the others go on with their numbers, then two of one node in a group of their own."""
    rest = [rank for rank in range(ctx.size) if rank != GONE]
    with elastic.buffer_of(ctx, M, case.hidden, "EPBuffer", enable_shrink=True) as buffer:
        serve(ctx, buffer, case)
        ctx.barrier()
        if ctx.rank == GONE:
            os.kill(os.getpid(), signal.SIGKILL)
        for turn in range(2):
            survivors(ctx, buffer, case.but(seed=5 + turn))
        assert masks(ctx, buffer) == [int(rank == GONE) for rank in range(ctx.size)] and buffer.lost_ranks() == [GONE]
        buffer.regroup(rest, renumber=False)
        survivors(ctx, buffer, case.but(seed=7))
        if ctx.size == 3:
            buffer.regroup(rest)
            assert buffer.num_ranks == 2


def judge(outcomes):
    assert outcomes[GONE].died, outcomes[GONE].traceback
    assert not any(o.error for o in outcomes if o is not outcomes[GONE]), [o.traceback for o in outcomes]


@pytest.mark.skipif(
    cases.node_size() < 3 and test_device() != "cpu", reason="buffers of several GPU nodes do not regroup"
)
def test_a_rank_dies(fresh_pool):
    judge(fresh_pool(3).outcomes(3, rank_dies, CASE))


@pytest.mark.skipif(cases.RANKS < 4 or test_device() != "cpu", reason="4 ranks of the CPU engine")
def test_a_rank_dies_between_nodes(fresh_pool):
    judge(internode.outcomes(fresh_pool(4), "2x2", rank_dies, NODES))


def rank_dies_within(ctx, case, seconds, options):
    """A rank dies anywhere in a call. What it sent is there or zeros; the others' rows are whole."""
    exchange = elastic.expect(case, M)
    with elastic.buffer_of(ctx, M, case.hidden, enable_shrink=True, **options) as buffer:
        serve(ctx, buffer, case)
        ctx.barrier()
        if ctx.rank == GONE:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        own = case.inputs()[ctx.rank]
        for _ in range(40):  # the ranks may not count them by what each of them has noticed
            for expand in (False, True):
                x, idx, _, handle, event = buffer.dispatch(
                    elastic.x_of(ctx, own), ctx.to_device(own.topk_idx), ctx.to_device(own.topk_weights),
                    num_experts=case.experts, num_max_tokens_per_rank=M, expert_alignment=case.alignment,
                    do_cpu_sync=True, do_expand=expand,
                )  # fmt: skip
                buffer.combine(x=x, handle=handle)
                metadata = handle.recv_src_metadata
                for row in range(len(metadata)):
                    source, token = divmod(int(metadata[row, 0]), M)
                    wanted = exchange.inputs[source].x[token]
                    for place in metadata[row, 2:].tolist() if expand else [row]:
                        got = x[place] if place >= 0 else wanted
                        assert torch.equal(got, wanted) or (source == GONE and not bool(got.any())), (source, token)
        if ctx.rank == GONE:
            time.sleep(60)
        survivors(ctx, buffer, case.but(seed=8))
        assert masks(ctx, buffer) == [int(rank == GONE) for rank in range(ctx.size)]


@pytest.mark.skipif(cases.RANKS < 4 or test_device() != "cpu", reason="4 ranks of the CPU engine")
@pytest.mark.parametrize("seconds", [0.0, 0.021, 0.043] if full() else [0.021])
def test_a_rank_dies_within_a_call_between_nodes(fresh_pool, seconds):
    for hybrid in (True, False):
        options = {"allow_hybrid_mode": hybrid}
        judge(internode.outcomes(fresh_pool(4), "2x2", rank_dies_within, NODES, seconds, options))
