"""Many rounds of random skewed routing on four ranks: every row is checked, and a repetition gives the same bits."""

from __future__ import annotations

import pytest
import torch

import cases
import checks
import lowlat
import normal
from cases import Case
from conftest import full

BATCH = 10
NUM_MAX = 24
ROUNDS = 1000 if full() else 60


def skewed_case(seed: int, ranks: int) -> Case:
    gen = cases.generator(seed, 7)
    draw = lambda n: int(torch.randint(0, n, (1,), generator=gen))  # noqa: E731
    return Case(
        tokens=tuple(draw(90) * (draw(5) > 0) for _ in range(ranks)),
        hidden=8 * (1 + draw(64)),
        experts=ranks * (1 + draw(16)),
        topk=1 + draw(9),
        routing="skewed",
        kind=("bf16", "bits")[draw(2)],
        worst=draw(4) == 0,
        seed=seed,
    )


def rank_normal_rounds(ctx, first, count):
    with normal.buffer_of(ctx) as buffer:
        for seed in range(first, first + count):
            case = skewed_case(seed, ctx.size)
            results = []
            for _ in range(2):
                exchange = normal.dispatch_and_check(ctx, buffer, case)
                sums, weights, _ = normal.combine(ctx, buffer, exchange, exact=False, with_weights=True)
                rows = len(exchange.want.x)
                results.append((exchange.recv_x[:rows], exchange.recv_topk_idx, sums, weights))
            names = ("recv_x", "recv_topk_idx", "combined_x", "combined_topk_weights")
            for name, one, other in zip(names, *results, strict=True):
                checks.same_bits(f"round {seed}, repeated: {name}", other, one.cpu())


@pytest.mark.parametrize("first", range(0, ROUNDS, BATCH))
def test_normal_mode(pool, first):
    pool.run(4, rank_normal_rounds, first, BATCH, deadline=120)


def low_latency_case(seed: int, ranks: int) -> Case:
    gen = cases.generator(seed, 8)
    draw = lambda n: int(torch.randint(0, n, (1,), generator=gen))  # noqa: E731
    return Case(
        tokens=tuple(draw(NUM_MAX + 1) * (draw(5) > 0) for _ in range(ranks)),
        hidden=512,
        experts=4 * ranks,
        topk=1 + draw(9),
        routing="skewed",
        seed=seed,
    )


def rank_low_latency_rounds(ctx, first, count):
    """A repeated call gives the same bits; where no sum is rounded at the experts' rank, also with and without hook."""
    turns = 2 if ctx.device.type == "cpu" else 3
    with lowlat.buffer_of(ctx, low_latency_case(0, ctx.size), NUM_MAX) as buffer:
        for seed in range(first, first + count):
            case = low_latency_case(seed, ctx.size)
            results = []
            for turn in range(turns):
                options = {"return_recv_hook": bool((seed + turn) % 2)}
                call = lowlat.dispatch_and_check(ctx, buffer, case, NUM_MAX, use_fp8=seed % 3 == 0, **options)
                done = lowlat.combine_and_check(ctx, buffer, call, exact=False, **options)
                x = call.recv_x[0] if call.fp8 else call.recv_x
                results.append(([x[e, :n] for e, n in enumerate(call.want.counts.tolist())], done.got))
            for rows, _ in results[1:]:
                for one, other in zip(results[0][0], rows, strict=True):
                    checks.same_bits(f"round {seed}, repeated: rows", other, one.cpu())
            checks.same_bits(f"round {seed}, repeated: sums", results[-1][1], results[0][1].cpu())


@pytest.mark.parametrize("first", range(0, ROUNDS, BATCH))
def test_low_latency_mode(pool, first):
    pool.run(4, rank_low_latency_rounds, first, BATCH, deadline=120)
