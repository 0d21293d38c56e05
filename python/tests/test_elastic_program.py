"""What V2's own test program checks, written from its description: 144 combinations, everything bit for bit.

Each combination makes a plain dispatch, an expanded one with column-major scales, cached repeats of both, and both
combines. `make test` plays a share of them, `make test-full` all, with several seeds.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import cases
import checks
import elastic
from cases import Case
from conftest import full

COMBINATIONS = [
    combination
    for combination in itertools.product((1, 0), (128, 1), (1, 0), (0, 1, 2), (0, 1), (0, 1), (0, 1))
    if combination[6] or not combination[4]  # a previous event needs allocation on the communication stream
]
SEEDS = 3 if full() else 1
STRIDE = 1 if full() else 13  # prime to every factor of the product: each flag takes each value


def case_of(fp8: int, alignment: int, seed: int, ranks: int, tokens: int = 20) -> Case:
    return Case(
        tokens=tuple(max(1, tokens - rank) for rank in range(ranks)),
        hidden=256,
        experts=8 * ranks,
        topk=6,
        routing=("random", "skewed", "holes")[seed % 3],
        kind="fp8" if fp8 else "bf16",
        num_scales=2,
        alignment=alignment,
        seed=seed,
    )


def wait(call):
    if call.event.event is not None:
        call.event.current_stream_wait()


def repeat(ctx, buffer, call, **extra):
    again = elastic.again(ctx, buffer, call, **extra)
    wait(again)
    return again


def rank_program(ctx, combinations, seeds, options):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode(), elastic.buffer_of(ctx, 24, 256, **options) as buffer:
            for number, (seed, combination) in enumerate(itertools.product(range(seeds), combinations)):
                play(ctx, buffer, combination, seed + number)
    finally:
        torch.set_default_dtype(before)


def play(ctx, buffer, combination, seed):
    copies, alignment, fp8, biases, previous, is_async, on_comm = combination
    case = case_of(fp8, alignment, seed, ctx.size)
    exchange = elastic.expect(case, 20)
    counts = torch.tensor(exchange.received[ctx.rank].counts, dtype=torch.int32)
    results = []
    for expand in (0, 1):
        stats = ctx.to_device(torch.zeros(len(counts), dtype=torch.int32))
        flags = {
            "num_sms": 8,
            "num_qps": 1,
            "async_with_compute_stream": is_async,
            "allocate_on_comm_stream": on_comm,
            "previous_event": buffer.capture() if previous else None,
        }
        call = elastic.dispatch(
            ctx, buffer, exchange, case, expand=expand, columns=expand, do_handle_copy=copies,
            cumulative_local_expert_recv_stats=stats, **flags,
        )  # fmt: skip
        wait(call)
        results.append((call, stats, flags))
    (plain, _, flags), (expanded, _, _) = results
    cached = (
        repeat(ctx, buffer, plain, weights=False, **flags),
        repeat(ctx, buffer, expanded, columns=True, do_zero_padding=1, **flags),
    )
    # Everything is looked at after all the calls.
    for call, stats, _ in results:
        elastic.check(call)
        elastic.check_handle(call)
        checks.same_bits("stats", stats.cpu(), counts)
    elastic.check(cached[0], weights=False)
    elastic.check(cached[1], padded=True)
    again = elastic.dispatch(ctx, buffer, exchange, case, expand=1, columns=1)
    slots = again.handle.dst_buffer_slot_idx
    assert torch.equal(slots, expanded.handle.dst_buffer_slot_idx)  # outputs repeat bit for bit
    for name in ("recv_src_metadata", "psum_num_recv_tokens_per_expert"):
        assert torch.equal(getattr(again.handle, name), getattr(expanded.handle, name))
    for call in (plain, expanded):
        unreduced = bool(call.expand and not buffer.allow_multiple_reduction)
        elastic.combine(ctx, buffer, call, biases=biases, weights=True, unreduced=unreduced, seed=seed, **flags)


@pytest.mark.parametrize(
    "options",
    [{"deterministic": 1, "allow_hybrid_mode": 1, "prefer_overlap_with_compute": 0, "sl_idx": 0}],
    ids=["usual"],
)
def test_program(pool, options):
    some = COMBINATIONS[::STRIDE]
    for position in range(7):
        assert {c[position] for c in some} == {c[position] for c in COMBINATIONS}
    assert len(COMBINATIONS) == 144
    pool.run(cases.RANKS, rank_program, some, SEEDS, options, deadline=60 + 600 * full())


@pytest.mark.skipif(not full(), reason="make test-full: single reduction, all combinations")
def test_program_single_reduction(pool):
    pool.run(cases.RANKS, rank_program, COMBINATIONS, 1, {"allow_multiple_reduction": 0}, deadline=600)


def rank_held_by_the_event(ctx):
    """EP_AVOID_RECORD_STREAM: the event holds the call's tensors."""
    os.environ["EP_AVOID_RECORD_STREAM"] = "1"
    try:
        case = case_of(1, 4, 1, ctx.size)
        exchange = elastic.expect(case, 20)
        with elastic.buffer_of(ctx, 24, 256) as buffer:
            call = elastic.dispatch(ctx, buffer, exchange, case, async_with_compute_stream=1)
            held = call.event.extra_tensors
            assert ctx.engine == "cpu" or call.event.event._held is held
            if ctx.engine == "cuda":
                assert any(t is call.recv_x[0] for t in held) and any(t is call.handle.topk_idx for t in held)
            wait(call)
            elastic.check(call)
    finally:
        del os.environ["EP_AVOID_RECORD_STREAM"]


def test_held_by_the_event(pool):
    pool.run(cases.RANKS, rank_held_by_the_event)
