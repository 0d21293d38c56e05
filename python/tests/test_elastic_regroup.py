"""V2: a buffer goes on without a lost rank; results afterwards, and what of before is refused."""

from __future__ import annotations

import os
import signal

import pytest

import elastic
import victims
from cases import Case

M, HIDDEN = 40, 64


class Seat:
    """What the checks ask of a rank: its present number in the buffer's group, which is not that in the pool."""

    def __init__(self, ctx, buffer):
        self.rank, self.size = buffer.rank_idx, buffer.num_ranks
        self.device, self.engine, self.to_device = ctx.device, ctx.engine, ctx.to_device


def case_of(size):
    return Case((16, 9, 7)[:size], experts=12, topk=3, hidden=HIDDEN, routing="holes", alignment=4)


def serve(ctx, buffer):
    """Both layouts, cached dispatch and combine, whose results are checked."""
    case = case_of(buffer.num_ranks)
    for expand in (False, True):
        call = elastic.round_trip(Seat(ctx, buffer), buffer, case, elastic.expect(case, M), expand=expand, sync=True)
    return call


def rank_swapped(ctx):
    case = case_of(2)
    with elastic.buffer_of(ctx, M, HIDDEN, "EPBuffer") as buffer:
        call = serve(ctx, buffer)
        with pytest.raises(ValueError, match="each rank once"):
            buffer.regroup([0, 0, 1])
        own = call.own
        event = buffer.dispatch(
            elastic.x_of(ctx, own), ctx.to_device(own.topk_idx), num_experts=case.experts,
            num_max_tokens_per_rank=M, async_with_compute_stream=1, defer_epilogue=1,
        )  # fmt: skip
        buffer.regroup([1, 0])
        assert (buffer.rank_idx, buffer.num_ranks, buffer.scaleup_rank_idx) == (1 - ctx.rank, 2, 1 - ctx.rank)
        with pytest.raises(RuntimeError, match=r"deferred dispatch is one of before regroup\(\)"):
            event.wait()
        with pytest.raises(RuntimeError, match=r"handle: .*of before regroup\(\) renumbered the ranks"):
            elastic.again(ctx, buffer, call)
        serve(ctx, buffer)


def test_renumbered(pool):
    pool.run(2, rank_swapped)


def rank_left(ctx):
    """Rank 1 of 3 dies; the others go on."""
    with elastic.buffer_of(ctx, M, HIDDEN) as buffer:
        call = serve(ctx, buffer)
        ctx.barrier()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _, text, _ = victims.first_error(lambda: elastic.again(ctx, buffer, call))
        assert "rank 1" in text, text
        assert buffer.lost_ranks() == [1]
        buffer.regroup([0, 2])
        assert (buffer.rank_idx, buffer.num_ranks, buffer.num_scaleup_ranks) == (ctx.rank // 2, 2, 2)
        with pytest.raises(ValueError, match="handle"):
            elastic.again(ctx, buffer, call)
        serve(ctx, buffer)
        buffer.barrier()
    return text


def test_a_rank_dies(fresh_pool):
    outcomes = fresh_pool(3).outcomes(3, rank_left)
    assert outcomes[1].died and not outcomes[0].error and not outcomes[2].error, [o.traceback for o in outcomes]
