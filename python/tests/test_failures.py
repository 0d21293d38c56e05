"""A rank is killed, stopped or late: what the others see, how soon, and what they can do afterwards."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time

import pytest

import normal
import victims
from victims import CASE, LOW_LATENCY, NORMAL, VICTIM

SOME = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine with hook", "barrier")
SOON = 2.0  # seconds from a death to every survivor's error
TIMEOUT, PEER_DEAD, ABORTED = 6, 7, 9  # codes of deepep.h; ABORTED: the death was known before the call


def rank_killed(ctx, name, where, folder):
    """The victim dies before it calls, or inside the call while rank 0 has not come yet."""
    with victims.operation(ctx, name) as (buffer, call):
        call()
        ctx.barrier()
        if ctx.rank == VICTIM:
            if where == "inside":
                threading.Timer(0.3, victims.die, (ctx,)).start()
                while True:
                    call()
            time.sleep(0.3)
            victims.die(ctx)
        if where == "inside" and ctx.rank == 0:
            time.sleep(0.8)
        when, text, status = victims.first_error(call)
        victims.refuses(buffer, call, VICTIM)
        took = victims.timed_destroy(buffer)
    victims.new_group_works(ctx, VICTIM, folder)
    return when, text, status, took


def judge(outcomes, victim=VICTIM):
    """Every survivor: an error soon after the death that names rank, host and pid; a bounded destroy."""
    assert outcomes[victim].died and outcomes[victim].notes, outcomes[victim].traceback
    death, (pid, host) = outcomes[victim].notes[-1]
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert not outcome.error, outcome.traceback
        when, text, code, took = outcome.value
        assert when - death < SOON, f"rank {outcome.rank} noticed after {when - death:.2f} s: {text}"
        for word in (f"rank {victim}", str(pid), host):
            assert word in text, f"rank {outcome.rank}: the text lacks {word!r}: {text}"
        assert code in (PEER_DEAD, ABORTED), f"rank {outcome.rank}: status {code}: {text}"
        assert took < 2.5, f"rank {outcome.rank}: destroy took {took:.2f} s"


@pytest.mark.parametrize("name", (*NORMAL, *LOW_LATENCY))
def test_killed_before_the_call(fresh_pool, tmp_path, name):
    judge(fresh_pool(4).outcomes(4, rank_killed, name, "before", str(tmp_path)))


@pytest.mark.parametrize("name", SOME)
def test_killed_inside_the_call(fresh_pool, tmp_path, name):
    judge(fresh_pool(4).outcomes(4, rank_killed, name, "inside", str(tmp_path)))


def rank_last_call_named(ctx):
    with victims.operation(ctx, "combine") as (_, call):
        call()
        ctx.barrier()
        if ctx.rank == VICTIM:
            victims.die(ctx)
        return victims.first_error(call)[1]


def test_error_names_the_last_call(fresh_pool):
    outcomes = fresh_pool(4).outcomes(4, rank_last_call_named)
    for outcome in outcomes[:VICTIM]:
        assert not outcome.error, outcome.traceback
        assert "combine" in outcome.value, f"the text lacks what rank {VICTIM} did last: {outcome.value}"


def rank_killed_between_halves(ctx):
    """The victim dies between its send and its receive; the others are at the same point."""
    import lowlat

    with lowlat.buffer_of(ctx, victims.LL_CASE, victims.B) as buffer:
        lowlat.dispatch_and_check(ctx, buffer, victims.LL_CASE, victims.B)
        call = lowlat.dispatch(ctx, buffer, victims.LL_CASE, victims.B, return_recv_hook=True)
        ctx.barrier()
        if ctx.rank == VICTIM:
            victims.die(ctx)

        def go_on():
            nonlocal call
            if call is not None:
                call.hook()
                call = None
            lowlat.finish(lowlat.dispatch(ctx, buffer, victims.LL_CASE, victims.B, return_recv_hook=True))

        when, text, status = victims.first_error(go_on)
        return when, text, status, victims.timed_destroy(buffer)


def test_killed_between_send_and_receive(fresh_pool):
    judge(fresh_pool(4).outcomes(4, rank_killed_between_halves))


def rank_killed_in_construction(ctx, delay, background):
    """The victim takes part in the caller's exchange and dies ``delay`` seconds later."""
    from deep_ep import Buffer

    def after_exchange():
        if ctx.rank == VICTIM:
            if delay:
                threading.Timer(delay, victims.die, (ctx,)).start()
            else:
                victims.die(ctx)

    made = []

    def use():
        if not made:
            comm = victims.Comm(ctx, after_exchange)
            options = {"engine": ctx.engine, "background": background, "explicitly_destroy": True}
            made.append(Buffer(None, 1 << 24, 1 << 20, comm=comm, **options))
        if ctx.rank == VICTIM:
            time.sleep(60)
        normal.dispatch(ctx, made[0], CASE)

    when, text, status = victims.first_error(use)
    return when, text, status, victims.timed_destroy(made[0]) if made else 0.0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("delay", [0, 0.003, 0.01, 0.05])
def test_killed_in_construction(fresh_pool, delay, background):
    outcomes = fresh_pool(4).outcomes(4, rank_killed_in_construction, delay, background)
    assert outcomes[VICTIM].died and outcomes[VICTIM].notes
    death, _ = outcomes[VICTIM].notes[-1]
    for outcome in outcomes:
        if outcome.rank != VICTIM:
            assert not outcome.error, outcome.traceback
            when, text, _, took = outcome.value
            assert when - death < SOON, f"rank {outcome.rank} noticed after {when - death:.2f} s: {text}"
            assert f"rank {VICTIM}" in text, text
            assert took < 2.5


def rank_forked_child_lives_on(ctx, name):
    """A DataLoader-like child of the victim keeps its descriptors open; that must not hide the death."""
    with victims.operation(ctx, name) as (buffer, call):
        call()
        if ctx.rank == VICTIM:
            child = os.fork()
            if child == 0:
                ctx.hang_up()
                time.sleep(8)
                os._exit(0)
            ctx.report(child)
        ctx.barrier()
        if ctx.rank == VICTIM:
            time.sleep(0.2)
            victims.die(ctx)
        when, text, status = victims.first_error(call)
        return when, text, status, victims.timed_destroy(buffer)


@pytest.mark.parametrize("name", ["combine", "low_latency_dispatch"])
def test_forked_child_of_the_dead_rank(fresh_pool, name):
    outcomes = fresh_pool(4).outcomes(4, rank_forked_child_lives_on, name)
    child = outcomes[VICTIM].notes[0][1]
    assert os.path.exists(f"/proc/{child}"), "the child was to live on"
    try:
        judge(outcomes)
    finally:
        os.kill(child, signal.SIGKILL)


def rank_two_die(ctx):
    with victims.operation(ctx, "combine") as (buffer, call):
        call()
        ctx.barrier()
        if ctx.rank in (1, VICTIM):
            victims.die(ctx)
        when, text, status = victims.first_error(call)
        return when, text, status, victims.timed_destroy(buffer)


def test_two_ranks_die(fresh_pool):
    outcomes = fresh_pool(4).outcomes(4, rank_two_die)
    for outcome in (outcomes[0], outcomes[3]):
        assert not outcome.error, outcome.traceback
        when, text, status, took = outcome.value
        assert when - outcomes[1].notes[0][0] < SOON + 0.2 and status in (PEER_DEAD, ABORTED) and took < 2.5
        assert f"rank {VICTIM}" in text or "rank 1" in text


def rank_late(ctx, name, how):
    """The victim is alive but does not come before the deadline of one second."""
    with victims.operation(ctx, name):  # a process that is new makes its device's context, which takes as long
        pass
    with victims.operation(ctx, name, timeout=1.0) as (buffer, call):
        call()
        ctx.barrier()
        if ctx.rank == VICTIM:
            if how == "sleeps":
                time.sleep(3.0)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
            return None
        start = time.monotonic()
        when, text, status = victims.first_error(call)
        victims.refuses(buffer, call, VICTIM)
        return when - start, text, status, victims.timed_destroy(buffer)


def wake(pool):
    """Lets a stopped rank go on after the others had their errors: three seconds after it stopped."""
    pid, end = pool.pid(VICTIM), time.monotonic() + 60.0
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T" and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(3.0)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("name", SOME)
def test_late_is_not_dead(side_by_side, name):
    sleeps, stopped = side_by_side(
        4,
        lambda pool: pool.outcomes(4, rank_late, name, "sleeps"),
        lambda pool: pool.outcomes(4, rank_late, name, "stopped", meanwhile=wake),
    )
    for outcome in (*sleeps, *stopped):
        assert not outcome.error, outcome.traceback
        if outcome.rank == VICTIM:
            continue
        seconds, text, status, took = outcome.value
        assert 0.9 < seconds < 2.9, f"rank {outcome.rank}: error after {seconds:.2f} s with a timeout of 1 s: {text}"
        assert status == TIMEOUT and f"rank {VICTIM}" in text, f"status {status}: {text}"
        assert "late" in text and "dead" not in text.replace("not dead", ""), text
        assert took < 2.5


def rank_patient(ctx):
    """Two seconds late is nothing with the default deadline."""
    with victims.operation(ctx, "combine") as (_, call):
        call()
        ctx.barrier()
        if ctx.rank == VICTIM:
            time.sleep(2.0)
        call()
        call()


def test_default_deadline_is_long(pool):
    pool.run(4, rank_patient)


def rank_destroyed(ctx):
    """A rank destroys its buffer and lives on: no crash, no hang, an error at the deadline at the latest."""
    with victims.operation(ctx, "combine", timeout=2) as (buffer, call):
        call()
        ctx.barrier()
        if ctx.rank == VICTIM:
            buffer.destroy()
            time.sleep(4)
            return None
        start = time.monotonic()
        _, text, _ = victims.first_error(call)
        return time.monotonic() - start, text


def test_a_rank_that_destroyed_its_buffer_is_named(pool):
    for rank, value in enumerate(pool.run(4, rank_destroyed)):
        if rank != VICTIM:
            assert value[0] < 3.0 and f"rank {VICTIM}" in value[1], value
