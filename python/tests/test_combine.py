"""combine: sums of the rows that came from each token, weights, biases; exact where integers allow it."""

from __future__ import annotations

import pytest
import torch

import cases
import checks
import normal
from cases import Case

BASE = Case((40, 25, 0, 64), experts=16, topk=4, hidden=72)


def rank_round_trip(ctx, case, exact, bias, with_weights):
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        normal.combine(ctx, buffer, exchange, exact=exact, bias=bias, with_weights=with_weights)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("bias", [0, 1, 2])
@pytest.mark.parametrize("with_weights", [False, True])
def test_bias_and_weights(pool, exact, bias, with_weights):
    pool.run(4, rank_round_trip, BASE, exact, bias, with_weights)


CHOSEN = {
    "zero tokens everywhere": BASE.but(tokens=(0, 0, 0, 0)),
    "all -1": BASE.but(routing="none"),
    "some -1": BASE.but(routing="holes"),
    "one hot expert": BASE.but(routing="hot"),
    "experts named twice": BASE.but(routing="duplicates", topk=7),
    "worst case": BASE.but(worst=True),
    "worst case, nothing sent": BASE.but(worst=True, routing="none"),
    "int32 indices": BASE.but(index_dtype=torch.int32),
    "every rank gets every token": BASE.but(experts=4, topk=4),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen(pool, name):
    pool.run(4, rank_round_trip, CHOSEN[name], True, 2, True)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_number_of_ranks(pool, ranks):
    tokens = tuple(29 * (rank + 1) % 47 for rank in range(ranks))
    case = Case(tokens, experts=2 * ranks, topk=min(5, 2 * ranks), hidden=256)
    pool.run(ranks, rank_round_trip, case, False, 1, True)


@pytest.mark.parametrize("hidden", [8, 16, 24, 7168, 16384])
def test_hidden(pool, hidden):
    pool.run(3, rank_round_trip, Case((30, 0, 17), hidden=hidden, experts=6, topk=4), False, 0, True)


def test_many_tokens(pool):
    case = Case((1500, 1, 800, 2000), hidden=512, experts=64, topk=8)
    pool.run(4, rank_round_trip, case, False, 0, True)


@pytest.mark.parametrize("seed", range(100, 112))
def test_random(pool, seed):
    case = cases.random_case(seed).but(kind="bf16")
    pool.run(case.ranks, rank_round_trip, case, seed % 2 == 0, seed % 3, True)


def rank_repeated(ctx, case):
    """One handle serves several combines, of other widths too, and always gives the same bits."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        first, first_weights, _ = normal.combine(ctx, buffer, exchange, exact=False, with_weights=True)
        again, again_weights, _ = normal.combine(ctx, buffer, exchange, exact=False, with_weights=True)
        checks.same_bits("combined_x", again, first.cpu())
        checks.same_bits("combined_topk_weights", again_weights, first_weights.cpu())
        normal.combine(ctx, buffer, exchange, exact=True, seed=1)
        rows = [torch.cat([r, r], dim=1) for r in normal.expert_rows(exchange, True)]
        wide, _, _ = buffer.combine(ctx.to_device(rows[ctx.rank]), exchange.handle)
        normal.check_combined(exchange, rows, [], wide, True)


def test_one_handle_many_combines(pool):
    pool.run(4, rank_repeated, BASE)


def rank_after_fp8(ctx, case):
    """Dispatch in FP8, combine in BF16 of the same hidden size."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        normal.combine(ctx, buffer, exchange, exact=False, with_weights=True)


def test_after_fp8_dispatch(pool):
    pool.run(4, rank_after_fp8, BASE.but(kind="fp8", hidden=256, num_scales=2))


def rank_identity(ctx, case):
    """Sending the rows back unchanged multiplies each token by the number of ranks that got it (upstream's check)."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        combined, weights, _ = buffer.combine(exchange.recv_x, exchange.handle, topk_weights=exchange.recv_topk_weights)
        copies = exchange.layouts[ctx.rank].is_token_in_rank.sum(dim=1, keepdim=True)
        checks.small_diff("combined_x", combined, exchange.own.x.to(torch.float32) * copies, 5e-6)
        named = (exchange.own.topk_idx >= 0).to(torch.float32)
        checks.small_diff("combined_topk_weights", weights, exchange.own.topk_weights * named, 1e-9)


def test_identity(pool):
    pool.run(4, rank_identity, BASE.but(routing="holes"))


def rank_special(ctx, case):
    """NaN and infinity in one row reach exactly the tokens that the row belongs to."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        rows = normal.expert_rows(exchange, True)
        for part, want in zip(rows, exchange.received, strict=True):
            hit = (want.src_idx == 3) & (want.src_rank == 1)
            part[hit, 0], part[hit, 1] = float("nan"), float("inf")
        combined, _, _ = buffer.combine(ctx.to_device(rows[ctx.rank]), exchange.handle)
        combined = combined.cpu()
        bad = (~torch.isfinite(combined)).any(dim=1).nonzero().flatten().tolist()
        assert bad == ([3] if ctx.rank == 1 else []), f"rank {ctx.rank}: tokens {bad} are not finite"
        if ctx.rank == 1:
            assert bool(combined[3, 0].isnan()) and combined[3, 1] == float("inf")


def test_nan_stays_where_it_is(pool):
    pool.run(4, rank_special, BASE.but(routing="random"))


def rank_strided(ctx, case):
    """Weights that are a view, biases that are expanded: refused with a clear text or summed right, never wrong."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        rows = normal.expert_rows(exchange, True)
        bias = torch.ones((1, case.hidden), dtype=torch.bfloat16)
        biases = [bias.expand(case.tokens[ctx.rank], case.hidden)]
        try:
            combined, _, _ = buffer.combine(
                ctx.to_device(rows[ctx.rank]), exchange.handle, bias=ctx.to_device(biases[0])
            )
        except ValueError as error:
            assert "bias" in str(error) and "contiguous" in str(error)
        else:
            normal.check_combined(exchange, rows, biases, combined, True)


def test_expanded_bias(pool):
    pool.run(2, rank_strided, BASE.but(tokens=(9, 11)))
