"""Masks: low-latency calls that complete without some ranks, whether masked by hand or lost on the way."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import checks
import lowlat
from cases import Case

CASE = Case((16, 9, 7, 12), hidden=512, experts=8, topk=3, routing="holes")
B = 16
GONE = 3


def scaled(ctx, seconds):
    """A time limit; on GPUs a longer one, which also has to suffice for making a buffer."""
    return seconds * (3 if ctx.device.type == "cuda" else 1)


def lost_pairs(ranks: int, gone: int = GONE) -> frozenset[tuple[int, int]]:
    """Every rank has masked ``gone``."""
    return frozenset((rank, gone) for rank in range(ranks) if rank != gone)


def mask_of(ctx, buffer):
    status = torch.full((ctx.size,), 9, dtype=torch.int32, device=ctx.device)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def only(ranks: int, gone: int) -> list[int]:
    return [int(rank == gone) for rank in range(ranks)]


def round_trips(ctx, buffer, case, lost, count=3, **options):
    for turn in range(count):
        again = case.but(seed=case.seed + turn)
        call = lowlat.dispatch_and_check(ctx, buffer, again, B, lost=lost, **options)
        lowlat.combine_and_check(ctx, buffer, call)


def rank_masked_by_hand(ctx, case, options):
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True) as buffer:
        assert mask_of(ctx, buffer) == [0] * ctx.size
        round_trips(ctx, buffer, case, frozenset())
        ctx.barrier()
        if ctx.rank != GONE:
            buffer.low_latency_update_mask_buffer(GONE, True)
            assert mask_of(ctx, buffer) == only(ctx.size, GONE)
            round_trips(ctx, buffer, case, lost_pairs(ctx.size), **options)
            assert mask_of(ctx, buffer) == only(ctx.size, GONE)
        ctx.barrier()
        if ctx.rank != GONE:
            buffer.low_latency_update_mask_buffer(GONE, mask=False)
        assert mask_of(ctx, buffer) == [0] * ctx.size
        ctx.barrier()  # what a rank sends while it is masked is ignored, so all unmask it first
        buffer.clean_low_latency_buffer(B, case.hidden, case.experts)
        round_trips(ctx, buffer, case.but(seed=40), frozenset(), **options)


@pytest.mark.parametrize("options", [{}, {"use_fp8": False}, {"return_recv_hook": True}, {"async_finish": True}])
def test_masked_by_hand_and_back(pool, options):
    pool.run(4, rank_masked_by_hand, CASE, options)


def rank_clean_masks(ctx, case):
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True) as buffer:
        ctx.barrier()
        if ctx.rank != GONE:
            buffer.low_latency_update_mask_buffer(GONE, True)
            round_trips(ctx, buffer, case, lost_pairs(ctx.size))
        ctx.barrier()
        buffer.low_latency_clean_mask_buffer()
        assert mask_of(ctx, buffer) == [0] * ctx.size
        ctx.barrier()
        buffer.clean_low_latency_buffer(B, case.hidden, case.experts)
        round_trips(ctx, buffer, case.but(seed=40), frozenset())


def test_clean_masks(pool):
    pool.run(4, rank_clean_masks, CASE)


def rank_statistics(ctx, case):
    """A masked source counts nowhere."""
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True) as buffer:
        round_trips(ctx, buffer, case, frozenset(), count=1)
        ctx.barrier()
        if ctx.rank == GONE:
            return
        buffer.low_latency_update_mask_buffer(GONE, True)
        received = torch.zeros(case.experts // ctx.size, dtype=torch.int32, device=ctx.device)
        waited = torch.zeros(ctx.size, dtype=torch.int64, device=ctx.device)
        call = lowlat.dispatch_and_check(
            ctx,
            buffer,
            case,
            B,
            lost=lost_pairs(ctx.size),
            cumulative_local_expert_recv_stats=received,
            dispatch_wait_recv_cost_stats=waited,
        )
        checks.same_bits("statistics", received, call.want.counts)
        assert int(waited[GONE]) == 0, f"{waited}"
        assert bool((call.handle[1][:, GONE] & 0xFFFFFFFF == 0).all())


def test_masked_source_counts_nowhere(pool):
    pool.run(4, rank_statistics, CASE)


def rank_lost(ctx, case, how, options):
    """The lost rank never comes; each survivor's call completes, masks it, and the next ones do not wait."""
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True, timeout=scaled(ctx, 1.0)) as buffer:
        round_trips(ctx, buffer, case, frozenset())
        ctx.barrier()
        if ctx.rank == GONE:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "destroyed":
                buffer.destroy()
            time.sleep(scaled(ctx, 3.5))
            return None
        start = time.monotonic()
        call = lowlat.dispatch(ctx, buffer, case, B, lost=lost_pairs(ctx.size), **options)
        lowlat.finish(call)
        first = time.monotonic() - start
        lowlat.check(call)
        lowlat.combine_and_check(ctx, buffer, call, **options)
        assert mask_of(ctx, buffer) == only(ctx.size, GONE), f"mask is {mask_of(ctx, buffer)}"
        start = time.monotonic()
        round_trips(ctx, buffer, case.but(seed=60), lost_pairs(ctx.size), **options)
        # six calls, a time limit each if they waited
        assert time.monotonic() - start < scaled(ctx, 3.0), "later calls still wait for the lost rank"
        buffer.check()
        return first, scaled(ctx, 1.0)


@pytest.mark.parametrize("options", [{}, {"return_recv_hook": True}, {"async_finish": True}])
def test_lost_in_dispatch(side_by_side, options):
    killed, sleeps, destroyed = side_by_side(
        4,
        lambda pool: pool.outcomes(4, rank_lost, CASE, "killed", options),
        lambda pool: pool.outcomes(4, rank_lost, CASE, "sleeps", options),
        lambda pool: pool.outcomes(4, rank_lost, CASE, "destroyed", options),
    )
    for outcome in (*killed[:GONE], *sleeps[:GONE], *destroyed[:GONE]):
        assert not outcome.error, outcome.traceback
        first, timeout = outcome.value
        assert first < 3 * timeout, f"rank {outcome.rank} waited {first} s with a timeout of {timeout} s"


def rank_lost_in_combine(ctx, case, options):
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True, timeout=scaled(ctx, 1.0)) as buffer:
        round_trips(ctx, buffer, case, frozenset())
        call = lowlat.dispatch_and_check(ctx, buffer, case, B)
        ctx.barrier()
        if ctx.rank == GONE:
            os.kill(os.getpid(), signal.SIGKILL)
        call.lost = lost_pairs(ctx.size)
        lowlat.combine_and_check(ctx, buffer, call, **options)
        assert mask_of(ctx, buffer) == only(ctx.size, GONE)
        round_trips(ctx, buffer, case.but(seed=60), lost_pairs(ctx.size), **options)


@pytest.mark.parametrize("options", [{}, {"return_recv_hook": True}])
def test_lost_in_combine(fresh_pool, options):
    outcomes = fresh_pool(4).outcomes(4, rank_lost_in_combine, CASE, options)
    assert outcomes[GONE].died
    for outcome in outcomes[:GONE]:
        assert not outcome.error, outcome.traceback


def rank_lost_in_clean(ctx, case):
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True, timeout=scaled(ctx, 1.0)) as buffer:
        round_trips(ctx, buffer, case, frozenset())
        ctx.barrier()
        if ctx.rank == GONE:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer.clean_low_latency_buffer(B, case.hidden, case.experts)
        assert mask_of(ctx, buffer) == only(ctx.size, GONE)
        round_trips(ctx, buffer, case, lost_pairs(ctx.size))


def test_lost_in_clean(fresh_pool):
    outcomes = fresh_pool(4).outcomes(4, rank_lost_in_clean, CASE)
    for outcome in outcomes[:GONE]:
        assert not outcome.error, outcome.traceback


def rank_late_data(ctx, case):
    """A rank comes after it was masked: its rows must appear in no later result of the others."""
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True, timeout=scaled(ctx, 0.5)) as buffer:
        round_trips(ctx, buffer, case, frozenset())
        ctx.barrier()
        if ctx.rank == GONE:
            time.sleep(scaled(ctx, 1.5))
            for turn in range(3):
                late = lowlat.dispatch(ctx, buffer, case.but(seed=200 + turn), B, use_fp8=False)
                assert late.recv_x is not None
            ctx.barrier()
            return
        for turn in range(int(scaled(ctx, 40))):
            round_trips(ctx, buffer, case.but(seed=300 + turn), lost_pairs(ctx.size), count=1, use_fp8=False)
            time.sleep(0.05)
        assert mask_of(ctx, buffer) == only(ctx.size, GONE)
        ctx.barrier()


def test_late_data_is_never_taken(pool):
    pool.run(4, rank_late_data, CASE, deadline=60)


def rank_recovery(ctx, case, missed):
    """vLLM's way back: zero the RDMA view, clean the masks, go on. The lost rank came late, or not at all."""
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True, timeout=scaled(ctx, 0.5)) as buffer:
        round_trips(ctx, buffer, case, frozenset())
        ctx.barrier()
        if ctx.rank != GONE:
            round_trips(ctx, buffer, case, lost_pairs(ctx.size))
            assert mask_of(ctx, buffer) == only(ctx.size, GONE)
        ctx.barrier()
        if ctx.rank == GONE:
            for turn in range(3 - missed):
                call = lowlat.dispatch(ctx, buffer, case.but(seed=case.seed + turn), B)
                lowlat.combine(ctx, buffer, call)
        ctx.barrier()
        buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        buffer.low_latency_clean_mask_buffer()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
        ctx.barrier()
        assert mask_of(ctx, buffer) == [0] * ctx.size
        round_trips(ctx, buffer, case.but(seed=90), frozenset(), count=5)


@pytest.mark.parametrize("missed", [0, 1, 2, 3])
def test_recovery_by_zeroing_and_mask_clean(pool, missed):
    pool.run(4, rank_recovery, CASE, missed)


def rank_needs_shrink(ctx, case):
    from deep_ep import DeepEPError

    with lowlat.buffer_of(ctx, case, B) as buffer:
        status = torch.zeros(ctx.size, dtype=torch.int32, device=ctx.device)
        for call in (
            lambda: buffer.low_latency_update_mask_buffer(1, True),
            lambda: buffer.low_latency_query_mask_buffer(status),
            lambda: buffer.low_latency_clean_mask_buffer(),
        ):
            with pytest.raises(RuntimeError, match="enable_shrink") as caught:
                call()
            assert isinstance(caught.value, DeepEPError)
        round_trips(ctx, buffer, case, frozenset(), count=1)


def test_masks_need_enable_shrink(pool):
    pool.run(2, rank_needs_shrink, CASE.but(tokens=(4, 5)))


def rank_bad_masks(ctx, case):
    with lowlat.buffer_of(ctx, case, B, enable_shrink=True) as buffer:
        for rank in (-1, ctx.size, "one"):
            with pytest.raises((ValueError, TypeError), match="rank"):
                buffer.low_latency_update_mask_buffer(rank, True)
        with pytest.raises(ValueError, match="mask_status"):
            buffer.low_latency_query_mask_buffer(torch.zeros(ctx.size + 1, dtype=torch.int32, device=ctx.device))
        with pytest.raises(TypeError, match="mask_status"):
            buffer.low_latency_query_mask_buffer(torch.zeros(ctx.size, dtype=torch.int64, device=ctx.device))
        assert mask_of(ctx, buffer) == [0] * ctx.size
        round_trips(ctx, buffer, case, frozenset(), count=1)


def test_wrong_arguments(pool):
    pool.run(2, rank_bad_masks, CASE.but(tokens=(4, 5)))
