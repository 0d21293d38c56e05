"""A rank of another node is killed, late, or lost with shrink on: what the others see, how soon, what they do then."""

from __future__ import annotations

import pytest

import internode
import test_failures
import test_shrink
import test_shrink_normal
import victims
from cases import RANKS
from conftest import full
from test_failures import TIMEOUT, VICTIM, judge, rank_killed, rank_late, rank_two_die, wake
from test_shrink import CASE, GONE

BEFORE = (*victims.NORMAL, *victims.LOW_LATENCY) if full() else ("dispatch", "low_latency_combine")
INSIDE = test_failures.SOME if full() else ("low_latency_dispatch with hook",)
LATE = test_failures.SOME if full() else ("combine",)
PAIRS = f"2x{RANKS // 2}"
SHAPES = (PAIRS, "4x1") if full() else (PAIRS,)

pytestmark = pytest.mark.usefixtures("nodes")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", BEFORE)
def test_killed_before_the_call(fresh_pool, tmp_path, name, shape):
    """Every survivor, of both nodes, has an error within 2 s; then a group of the survivors works."""
    judge(internode.outcomes(fresh_pool(RANKS), shape, rank_killed, name, "before", str(tmp_path)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INSIDE)
def test_killed_inside_the_call(fresh_pool, tmp_path, name, shape):
    judge(internode.outcomes(fresh_pool(RANKS), shape, rank_killed, name, "inside", str(tmp_path)))


@pytest.mark.skipif(not full(), reason="a long test: DEEPEP_TEST_FULL=1 runs it")
def test_two_nodes_die(fresh_pool):
    """Ranks 1 and 2, each a node of its own: every survivor names one of them."""
    outcomes = internode.outcomes(fresh_pool(4), "4x1", rank_two_die)
    for outcome in (outcomes[0], outcomes[3]):
        assert not outcome.error, outcome.traceback
        when, text, status, took = outcome.value
        assert when - outcomes[1].notes[0][0] < test_failures.SOON + 0.2 and took < 2.5, text
        assert f"rank {VICTIM}" in text or "rank 1" in text


@pytest.mark.parametrize("how", ["sleeps", "stopped"] if full() else ["sleeps"])
@pytest.mark.parametrize("name", LATE)
def test_late_is_not_dead(fresh_pool, name, how):
    meanwhile = wake if how == "stopped" else None
    outcomes = internode.outcomes(fresh_pool(RANKS), PAIRS, rank_late, name, how, meanwhile=meanwhile)
    for outcome in outcomes:
        assert not outcome.error, outcome.traceback
        if outcome.rank == VICTIM:
            continue
        seconds, text, status, took = outcome.value
        assert 0.9 < seconds < 2.9, f"rank {outcome.rank}: error after {seconds:.2f} s with a timeout of 1 s: {text}"
        assert status == TIMEOUT and f"rank {VICTIM}" in text and took < 2.5, f"status {status}: {text}"


@pytest.mark.parametrize("how", ["killed", "sleeps", "destroyed"] if full() else ["killed"])
@pytest.mark.parametrize("options", [{}, {"return_recv_hook": True}] if full() else [{"return_recv_hook": True}])
def test_lost_with_shrink(fresh_pool, how, options):
    """Ranks of its own node and of the other one mask the lost rank; calls go on over RDMA."""
    outcomes = internode.outcomes(fresh_pool(4), "2x2", test_shrink.rank_lost, CASE, how, options)
    for outcome in outcomes[:GONE]:
        assert not outcome.error, outcome.traceback
        first, timeout = outcome.value
        assert first < 3 * timeout, f"rank {outcome.rank} waited {first} s with a timeout of {timeout} s"


def test_lost_in_combine_with_shrink(fresh_pool):
    outcomes = internode.outcomes(fresh_pool(4), "2x2", test_shrink.rank_lost_in_combine, CASE, {})
    assert outcomes[GONE].died
    for outcome in outcomes[:GONE]:
        assert not outcome.error, outcome.traceback


@pytest.mark.parametrize("how", ["killed", "stopped"] if full() else ["killed"])
def test_lost_among_normal_calls(fresh_pool, how):
    """Rows and sums between the survivors are whole in every call, of the lost rank's node and of the other one."""
    function, case = test_shrink_normal.rank_lost_among_calls, test_shrink_normal.CASE
    test_shrink_normal.judge_lost(internode.outcomes(fresh_pool(4), "2x2", function, case, how, 0.05))


@pytest.mark.skipif(not full(), reason="a long test: DEEPEP_TEST_FULL=1 runs it")
def test_late_for_normal_calls(pool):
    internode.run(pool, "2x2", test_shrink_normal.rank_late, test_shrink_normal.CASE, deadline=60)


@pytest.mark.skipif(not full(), reason="a long test: DEEPEP_TEST_FULL=1 runs it")
def test_masked_in_normal_calls(pool):
    internode.run(pool, "2x2", test_shrink_normal.rank_masked_by_one, test_shrink_normal.CASE)


@pytest.mark.skipif(not full(), reason="a long test: DEEPEP_TEST_FULL=1 runs it")
@pytest.mark.parametrize("when", ["dispatch", "combine", "barrier"])
def test_killed_in_normal_calls(fresh_pool, when):
    outcomes = internode.outcomes(
        fresh_pool(4), "2x2", test_shrink_normal.rank_killed, test_shrink_normal.CASE, when, {}
    )
    assert outcomes[GONE].died
    test_shrink_normal.judge_lost(outcomes)
