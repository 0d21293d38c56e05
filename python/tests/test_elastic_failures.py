"""V2: a rank is killed or late in the middle of a call; the others name it, and go on in a new group."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import elastic
import victims
from cases import RANKS, Case
from conftest import full
from test_failures import judge
from victims import VICTIM

CASE = Case((30, 20, 25, 9)[:RANKS], experts=8, topk=3, hidden=64, routing="hot_first", alignment=4)
M = 40
CALLS = ("plain", "expanded", "bound", "cached", "combine", "expanded combine", "deferred")


def call_of(ctx, buffer, name):
    """A function that makes the call and waits for it."""
    exchange = elastic.expect(CASE, M)
    expand = name.startswith("expanded")
    made = elastic.dispatch(ctx, buffer, exchange, CASE, expand=expand)
    rows = torch.zeros(len(made.recv_x), CASE.hidden, dtype=torch.bfloat16, device=ctx.device)

    def deferred():
        buffer.dispatch(
            elastic.x_of(ctx, made.own), ctx.to_device(made.own.topk_idx), num_experts=CASE.experts,
            num_max_tokens_per_rank=M, async_with_compute_stream=1, defer_epilogue=1,
        ).wait()  # fmt: skip

    calls = {
        "plain": lambda: elastic.dispatch(ctx, buffer, exchange, CASE),
        "expanded": lambda: elastic.dispatch(ctx, buffer, exchange, CASE, expand=True),
        "bound": lambda: elastic.dispatch(ctx, buffer, exchange, CASE, sync=False),
        "cached": lambda: elastic.again(ctx, buffer, made),
        "combine": lambda: buffer.combine(rows, made.handle),
        "expanded combine": lambda: buffer.combine(rows, made.handle),
        "deferred": deferred,
    }
    return victims.settled(ctx, buffer, calls[name])


def kind_of(name):
    return "EPBuffer" if name == "deferred" else "ElasticBuffer"


def rank_killed(ctx, name, folder):
    """The victim dies inside the call while rank 0 has not come yet."""
    with elastic.buffer_of(ctx, M, CASE.hidden, kind_of(name)) as buffer:
        call = call_of(ctx, buffer, name)
        call()
        ctx.barrier()
        if ctx.rank == VICTIM:
            threading.Timer(0.3, victims.die, (ctx,)).start()
            while True:
                call()
        if ctx.rank == 0:
            time.sleep(0.8)
        when, text, status = victims.first_error(call)
        if name != "deferred":
            victims.refuses(buffer, call, VICTIM)
        took = victims.timed_destroy(buffer)
    victims.new_group_works(ctx, VICTIM, folder)
    return when, text, status, took


@pytest.mark.parametrize("name", CALLS if full() else ("expanded", "combine", "deferred"))
def test_killed(fresh_pool, tmp_path, name):
    judge(fresh_pool(RANKS).outcomes(RANKS, rank_killed, name, str(tmp_path)))


def rank_late(ctx, names):
    """The victim comes two seconds after the others' deadline of one."""
    found = []
    for name in names:
        options = {"num_gpu_timeout_secs": 1, "num_cpu_timeout_secs": 30}
        with elastic.buffer_of(ctx, M, CASE.hidden, kind_of(name), **options) as buffer:
            call = call_of(ctx, buffer, name)
            ctx.barrier()
            if ctx.rank == VICTIM:
                time.sleep(1.6)
                ctx.barrier()
                continue
            start = time.monotonic()
            _, text, _ = victims.first_error(call)
            found.append((time.monotonic() - start, text))
            ctx.barrier()
    # The process and its device go on.
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        elastic.round_trip(ctx, buffer, CASE, elastic.expect(CASE, M), expand=True, sync=True)
    return found


def test_late(pool):
    for rank, found in enumerate(
        pool.run(RANKS, rank_late, ("plain", "expanded combine") if full() else ("expanded combine",))
    ):
        for seconds, text in found:
            assert 0.9 < seconds < 2.9, f"rank {rank}: {seconds:.2f} s: {text}"
            assert f"rank {VICTIM}" in text and "late" in text, text
