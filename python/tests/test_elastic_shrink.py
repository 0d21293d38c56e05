"""V2 with ``enable_shrink``: ranks that are masked or dead are left out by all survivors alike, in both layouts."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest
import torch

import cases
import elastic
import elastic_reference
from cases import Case

M, GONE = 24, 2
CASE = Case((16, 9, 24), experts=12, topk=3, hidden=64, routing="holes", alignment=4)
pytestmark = pytest.mark.skipif(cases.node_size() < 3, reason="masks with a routing: ranks of one node")


def without_gone(case):
    """What should come where the last rank takes no part."""
    inputs, local = [], case.experts // 3
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


def rank_masked(ctx):
    from deep_ep import DeepEPError

    with elastic.buffer_of(ctx, M, CASE.hidden, enable_shrink=True) as buffer:
        plain, expanded = serve(ctx, buffer, CASE)
        ctx.barrier()
        if ctx.rank == 0:
            buffer.update_mask(GONE)
        ctx.barrier()
        if ctx.rank == GONE:
            with pytest.raises(DeepEPError, match="left out: rank [01] has masked this rank"):
                elastic.dispatch(ctx, buffer, elastic.expect(CASE, M), CASE)
        else:
            survivors(ctx, buffer, CASE.but(seed=3))
            assert masks(ctx, buffer) == [0, 0, 1]
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
        serve(ctx, buffer, CASE.but(seed=4))


def balance():
    from deep_ep import _abi

    return _abi.sized(_abi.BalanceArgs, num_tensors=1, num_slots=1, num_local_experts=1)


def test_masked(pool):
    pool.run(3, rank_masked)


def rank_dies(ctx):
    """The last rank dies; the others go on with their numbers, then in a group of their own."""
    with elastic.buffer_of(ctx, M, CASE.hidden, "EPBuffer", enable_shrink=True) as buffer:
        serve(ctx, buffer, CASE)
        ctx.barrier()
        if ctx.rank == GONE:
            os.kill(os.getpid(), signal.SIGKILL)
        for turn in range(2):
            survivors(ctx, buffer, CASE.but(seed=5 + turn))
        assert masks(ctx, buffer) == [0, 0, 1] and buffer.lost_ranks() == [GONE]
        buffer.regroup([0, 1], renumber=False)
        survivors(ctx, buffer, CASE.but(seed=7))
        buffer.regroup([0, 1])
        assert buffer.num_ranks == 2


def test_a_rank_dies(fresh_pool):
    outcomes = fresh_pool(3).outcomes(3, rank_dies)
    assert outcomes[GONE].died and not any(o.error for o in outcomes[:GONE]), [o.traceback for o in outcomes]
