"""Normal mode with ``enable_shrink``: ranks that are masked, late or dead are left out by all survivors alike."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import checks
import normal
from cases import Case
from conftest import full
from test_shrink import GONE, mask_of, only, scaled

CASE = Case((40, 9, 33, 24), hidden=512, experts=8, topk=3, routing="holes")
LOST = frozenset((GONE,))


def buffer_of(ctx, seconds=20.0, **options):
    return normal.buffer_of(ctx, enable_shrink=True, timeout=scaled(ctx, seconds), **options)


def round_trip(ctx, buffer, case, lost=frozenset(), masked=True, **extra):
    exchange = normal.dispatch(ctx, buffer, case, lost, masked, **extra)
    if extra.get("async_finish"):
        exchange.event.current_stream_wait()
    normal.check(exchange)
    normal.combine(ctx, buffer, exchange, with_weights=True, **extra)
    return exchange


def expect_left_out(ctx, buffer, case):
    """Each operation names the rank that has masked this one; the buffer lives."""
    from deep_ep import DeepEPError

    for call in (lambda: round_trip(ctx, buffer, case), lambda: (buffer.barrier(), synchronize(ctx), buffer.check())):
        with pytest.raises(DeepEPError, match="left out: rank [0-2] has masked this rank") as caught:
            call()
        assert caught.value.status == 2, "INVALID_STATE"


def synchronize(ctx):
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()


def take_back(ctx, buffer, case):
    """Every rank lifts its masks; the barrier is where they meet."""
    time.sleep(0.02 * ctx.rank)
    buffer.low_latency_clean_mask_buffer()
    buffer.barrier()
    assert mask_of(ctx, buffer) == [0] * ctx.size
    for turn in range(3):
        round_trip(ctx, buffer, case.but(seed=80 + turn))


def rank_masked_by_one(ctx, case):
    with buffer_of(ctx, 3.0) as buffer:
        round_trip(ctx, buffer, case)
        ctx.barrier()
        if ctx.rank == 0:
            buffer.low_latency_update_mask_buffer(GONE, True)
            synchronize(ctx)
        ctx.barrier()
        if ctx.rank == GONE:
            expect_left_out(ctx, buffer, case)
        else:
            before = buffer.stats()["dispatch"]["bytes_to_peer"][GONE]
            round_trip(ctx, buffer, case.but(seed=1), LOST, masked=ctx.rank == 0)
            assert mask_of(ctx, buffer) == only(ctx.size, GONE)
            buffer.barrier()
            round_trip(ctx, buffer, case.but(seed=2), LOST)
            round_trip(ctx, buffer, case.but(seed=3, worst=True), LOST)
            assert buffer.stats()["dispatch"]["bytes_to_peer"][GONE] == before, "rows that were not sent are counted"
        ctx.barrier()
        take_back(ctx, buffer, case)


def test_masked_by_one(pool):
    pool.run(4, rank_masked_by_one, CASE)


def rank_late(ctx, case):
    with buffer_of(ctx, 1.0) as buffer:
        handle = round_trip(ctx, buffer, case).handle
        ctx.barrier()
        if ctx.rank != GONE:
            round_trip(ctx, buffer, case.but(seed=1), LOST, masked=False)
            start = time.monotonic()
            for turn in range(4):
                round_trip(ctx, buffer, case.but(seed=2 + turn), LOST)
            assert time.monotonic() - start < scaled(ctx, 1.5), "later calls still wait for the lost rank"
            cached(ctx, buffer, case, handle)
        ctx.barrier()  # so long the late rank stays away
        if ctx.rank == GONE:
            expect_left_out(ctx, buffer, case)
        ctx.barrier()
        take_back(ctx, buffer, case)
        normal.combine(ctx, buffer, normal.expect(case, ctx.rank), handle=handle)  # all ranks are there again


def cached(ctx, buffer, case, handle):
    """A handle of before the loss: the lost rank's rows are zeros, its sums are missing."""
    exchange = normal.expect(case, ctx.rank)
    recv_x, *_ = buffer.dispatch(normal.x_of(ctx, exchange.own), handle=handle)
    want = exchange.want.x.clone()
    want[exchange.want.src_rank == GONE] = 0
    checks.same_bits("recv_x", recv_x.cpu(), want)
    rows = normal.expert_rows(exchange, exact=True)
    combined, _, _ = buffer.combine(ctx.to_device(rows[ctx.rank]), handle)
    rows[GONE].zero_()
    checks.same_bits("combined_x", combined.cpu() + 0.0, exchange.sums(rows, []).to(torch.bfloat16) + 0.0)


def test_late_rank_and_back(pool):
    pool.run(4, rank_late, CASE, deadline=60)


def rank_killed(ctx, case, when, options):
    with buffer_of(ctx) as buffer:
        exchange = round_trip(ctx, buffer, case)
        ctx.barrier()
        if when == "combine":
            exchange = normal.dispatch_and_check(ctx, buffer, case)
            ctx.barrier()
        if ctx.rank == GONE:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        if when == "combine":
            rows = normal.expert_rows(exchange, exact=True)
            combined, _, _ = buffer.combine(ctx.to_device(rows[ctx.rank]), exchange.handle)
            rows[GONE].zero_()
            checks.same_bits("combined_x", combined.cpu() + 0.0, exchange.sums(rows, []).to(torch.bfloat16) + 0.0)
        elif when == "barrier":
            buffer.barrier()
            synchronize(ctx)
        else:
            round_trip(ctx, buffer, case.but(seed=1), LOST, masked=False, **options)
        assert time.monotonic() - start < scaled(ctx, 5.0), "a dead rank was waited for"
        assert mask_of(ctx, buffer) == only(ctx.size, GONE)
        for turn in range(3):
            round_trip(ctx, buffer, case.but(seed=2 + turn), LOST, **options)
        buffer.check()


@pytest.mark.parametrize("when", ["dispatch", "combine", "barrier"])
def test_killed(fresh_pool, when):
    options = {"async_finish": True} if when == "barrier" else {}
    outcomes = fresh_pool(4).outcomes(4, rank_killed, CASE, when, options)
    assert outcomes[GONE].died
    for outcome in outcomes[:GONE]:
        assert not outcome.error, outcome.traceback


def rank_lost_among_calls(ctx, case, how, seconds):
    """A rank is stopped or killed somewhere in a row of calls; survivors' results are right all the time."""
    with buffer_of(ctx, 0.5 if how == "stopped" else 20.0) as buffer:
        round_trip(ctx, buffer, case)
        ctx.barrier()
        if ctx.rank == GONE:
            be_lost_among_calls(buffer, ctx, case, how, seconds)
        else:
            go_on_among_calls(ctx, buffer, case)
        if how == "stopped":
            ctx.barrier()
            take_back(ctx, buffer, case)


def be_lost_among_calls(buffer, ctx, case, how, seconds):
    from deep_ep import DeepEPError

    stopper = os.fork()
    if stopper == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        time.sleep(scaled(ctx, 2.0) if how == "stopped" else 0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    try:
        for turn in range(100000):
            rows = normal.dispatch(ctx, buffer, case.but(seed=100 + turn % 5))
            buffer.combine(rows.recv_x.to(torch.bfloat16), rows.handle)
    except DeepEPError as error:
        assert "has masked this rank" in str(error), error
    os.waitpid(stopper, 0)


def go_on_among_calls(ctx, buffer, case):
    """Until four calls have gone without the lost rank. Survivors agree which call is the first of these, not when each
    masks the rank: one that waits among the rows of a call does so then, the others in the exchange after it.
    """
    turn, without = 0, 0
    while without < 4:
        one, masked = case.but(seed=100 + turn % 5), mask_of(ctx, buffer)[GONE] != 0
        exchange = normal.expect(one, ctx.rank, LOST if masked else frozenset())
        got = buffer.dispatch(
            normal.x_of(ctx, exchange.own),
            **normal.layout_arguments(ctx, buffer, exchange),
            topk_idx=ctx.to_device(exchange.own.topk_idx),
            topk_weights=ctx.to_device(exchange.own.topk_weights),
        )
        counted = check_rows(ctx, exchange, one, got)
        assert not (counted and (masked or without)), f"rows of rank {GONE} are counted again in call {turn}"
        combined, _, _ = buffer.combine(got[0].to(torch.bfloat16), got[4])
        check_sums(exchange, combined.cpu())
        turn, without = turn + 1, without + (not counted)
    assert mask_of(ctx, buffer) == only(ctx.size, GONE)


def check_sums(exchange, combined):
    """No sum is void; those that the lost rank adds nothing to are whole: rows come back as they went."""
    assert not bool(combined.isnan().any())
    rows = [want.x.to(torch.bfloat16) for want in exchange.received]
    whole = ~exchange.layouts[exchange.rank].is_token_in_rank[:, GONE]
    sums = exchange.sums(rows, []).to(torch.bfloat16)
    checks.same_bits("combined_x", combined[whole] + 0.0, sums[whole] + 0.0)


def check_rows(ctx, exchange, case, got):
    """Rows of the survivors are whole; those of the lost rank are whole, zeros, or were never counted.

    Returns whether they were counted: every survivor has some of them.
    """
    recv_x, src_idx = got[0].cpu(), got[4][3 if len(got[4]) == 6 else -3].cpu()
    wants = [exchange.want, normal.expect(case, ctx.rank, LOST).want]
    want = next((w for w in wants if len(w.x) == len(recv_x)), None)
    assert want is not None, f"{len(recv_x)} rows"
    survives = want.src_rank != GONE
    checks.same_bits("recv_x", recv_x[survives], want.x[survives])
    checks.same_bits("recv_src_idx", src_idx[survives], want.src_idx[survives])
    theirs, rows = want.x[~survives], recv_x[~survives]
    whole = (theirs == rows).all(dim=1) | (rows == 0).all(dim=1)
    assert bool(whole.all()), "a row of the lost rank is neither whole nor zeros"
    return len(theirs) > 0


@pytest.mark.parametrize("how", ["stopped", "killed"] if full() else ["stopped"])
def test_lost_among_calls(fresh_pool, how):
    judge_lost(fresh_pool(4).outcomes(4, rank_lost_among_calls, CASE, how, 0.05))


def judge_lost(outcomes):
    for outcome in outcomes:
        assert outcome.died or not outcome.error, outcome.traceback
        assert not outcome.died or outcome.rank == GONE
