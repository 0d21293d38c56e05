"""The pool itself: values, errors, deaths, deadlines. A pool that hides a failure would hide every other one."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from pool import RankPool, RanksFailed, RanksLate


def rank_sum(ctx, add):
    value = torch.tensor([ctx.rank + add])
    dist.all_reduce(value, group=ctx.group)
    return ctx.rank, ctx.size, int(value)


def rank_raise(ctx, culprit):
    if ctx.rank == culprit:
        raise ValueError(f"rank {ctx.rank} refuses")
    return "fine"


def rank_die(ctx, culprit):
    if ctx.rank == culprit:
        ctx.report("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def rank_sleep(ctx, culprit):
    if ctx.rank == culprit:
        time.sleep(600)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_values(pool, ranks):
    want = sum(range(ranks)) + 10 * ranks
    assert pool.run(ranks, rank_sum, 10) == [(rank, ranks, want) for rank in range(ranks)]


def test_error_is_raised_with_the_ranks_traceback(pool):
    with pytest.raises(RanksFailed, match="rank 2 refuses"):
        pool.run(4, rank_raise, 2)
    assert [o.value for o in pool.outcomes(4, rank_raise, 9)] == ["fine"] * 4


def test_death_is_an_outcome():
    pool = RankPool(2)
    outcomes = pool.outcomes(2, rank_die, 1)
    assert outcomes[0].value == "fine" and not outcomes[0].died
    assert outcomes[1].died and "exit code -9" in outcomes[1].traceback
    assert outcomes[1].notes[0][1] == "last words"
    assert not pool.alive


def test_deadline_reports_the_stack_and_kills():
    pool = RankPool(2)
    pool.start()
    pid = pool.pid(1)
    with pytest.raises(RanksLate, match="rank_sleep"):
        pool.run(2, rank_sleep, 1, deadline=1.0)
    assert not os.path.exists(f"/proc/{pid}") or not pool.alive
    assert pool.run(2, rank_sum, 0)[0] == (0, 2, 1)
    pool.stop()


def test_a_mended_pool_keeps_the_survivors():
    pool = RankPool(3, mends=True)
    try:
        pool.mend()
        survivors = [pool.pid(0), pool.pid(2)]
        assert pool.outcomes(3, rank_die, 1)[1].died
        pool.mend()
        assert [pool.pid(0), pool.pid(2)] == survivors
        assert pool.run(3, rank_sum, 10) == [(rank, 3, 33) for rank in range(3)]
    finally:
        pool.stop()
