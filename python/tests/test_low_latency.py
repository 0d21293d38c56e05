"""low_latency_dispatch and low_latency_combine: rows, order, handle, formats, sums, statistics, edges."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import cases
import checks
import lowlat
from cases import Case

BASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
B = 16


def rank_round_trip(ctx, case, num_max, dispatch_options, combine_options, repeat=2):
    with lowlat.buffer_of(ctx, case, num_max) as buffer:
        for turn in range(repeat):
            call = lowlat.dispatch_and_check(ctx, buffer, case.but(seed=case.seed + turn), num_max, **dispatch_options)
            lowlat.combine_and_check(ctx, buffer, call, **combine_options)


BF16 = {"use_fp8": False}
FORMATS = {
    "BF16": BF16,
    "FP8": {},
    "FP8, power-of-two scales": {"round_scale": True},
    "FP8, UE8M0": {"round_scale": True, "use_ue8m0": True},
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("wait", ["none", "hook", "event"])
def test_formats(pool, form, wait):
    waiting = {"none": {}, "hook": {"return_recv_hook": True}, "event": {"async_finish": True}}[wait]
    pool.run(4, rank_round_trip, BASE, B, {**FORMATS[form], **waiting}, waiting)


CHOSEN = {
    "no token anywhere": BASE.but(tokens=(0, 0, 0, 0)),
    "one token": BASE.but(tokens=(0, 0, 1, 0)),
    "all -1": BASE.but(routing="none"),
    "some -1": BASE.but(routing="holes"),
    "experts named twice": BASE.but(routing="duplicates", topk=7),
    "one hot expert": BASE.but(routing="hot"),
    "one expert that all name": BASE.but(routing="hot_first"),
    "empty experts": BASE.but(routing="few"),
    "first and last expert": BASE.but(routing="edges"),
    "K of 1": BASE.but(topk=1),
    "K of 9": BASE.but(topk=9, routing="duplicates"),
    "every expert": BASE.but(topk=8),
    "B on every rank": BASE.but(tokens=(16, 16, 16, 16), topk=8),
    "one expert a rank": BASE.but(experts=4),
    "skewed": BASE.but(routing="skewed"),
    "hidden of 128": BASE.but(hidden=128),
    "int32 indices": BASE.but(index_dtype=torch.int32, routing="holes"),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen(pool, name):
    pool.run(4, rank_round_trip, CHOSEN[name], B, BF16, {})


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_number_of_ranks(pool, ranks):
    tokens = tuple(5 * (rank + 1) % 12 for rank in range(ranks))
    pool.run(ranks, rank_round_trip, Case(tokens, hidden=256, experts=3 * ranks, topk=3), 11, BF16, {})


@pytest.mark.parametrize("hidden", [1024, 2048, 7168, 8192])
def test_hidden(pool, hidden):
    case = Case((6, 3), hidden=hidden, experts=4, topk=3)
    pool.run(2, rank_round_trip, case, 8, {"return_recv_hook": True}, {"return_recv_hook": True})


def test_num_max_of_one(pool):
    pool.run(3, rank_round_trip, Case((1, 0, 1), hidden=128, experts=3, topk=2), 1, BF16, {})


COMBINES = {
    "real numbers": {"exact": False},
    "zero copy": {"zero_copy": True},
    "zero copy with hook": {"zero_copy": True, "return_recv_hook": True},
    "LogFMT": {"use_logfmt": True, "exact": False},
    "LogFMT of values above 1 stays BF16": {"use_logfmt": True, "exact": True},
    "LogFMT with hook": {"use_logfmt": True, "exact": False, "return_recv_hook": True},
}


@pytest.mark.parametrize("name", COMBINES)
def test_combines(pool, name):
    pool.run(4, rank_round_trip, BASE.but(routing="holes"), B, {}, COMBINES[name])


def rank_out(ctx, case, wait):
    with lowlat.buffer_of(ctx, case, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, case, B, **BF16)
        out = torch.full((case.tokens[ctx.rank], case.hidden), lowlat.NAN, dtype=torch.bfloat16, device=ctx.device)
        done = lowlat.combine_and_check(ctx, buffer, call, out=out, **wait)
        assert done.got is out or done.got.data_ptr() == out.data_ptr(), "out was not returned"


@pytest.mark.parametrize("wait", [{}, {"return_recv_hook": True}, {"async_finish": True}])
def test_out(pool, wait):
    pool.run(4, rank_out, BASE, wait)


def rank_combine_twice(ctx, case):
    with lowlat.buffer_of(ctx, case, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, case, B, **BF16)
        first = lowlat.combine_and_check(ctx, buffer, call, exact=False)
        second = lowlat.combine_and_check(ctx, buffer, call, exact=False)
        checks.same_bits("combined_x", second.got, first.got.cpu())
        lowlat.combine_and_check(ctx, buffer, call, exact=True, salt=77)


def test_combine_twice_with_one_handle(pool):
    pool.run(4, rank_combine_twice, BASE)


HOOK, EVENT = {"return_recv_hook": True}, {"async_finish": True}
KINDS = [
    (BASE, {}, {}),
    (BASE.but(tokens=(3, 16, 1, 0)), {}, HOOK),
    (BASE.but(index_dtype=torch.int32), {"round_scale": True}, {}),
    (BASE.but(topk=5), BF16, HOOK),
    (BASE, {}, HOOK),
    (BASE.but(tokens=(0, 9, 16, 2)), BF16, EVENT),
    (BASE.but(topk=5), {"round_scale": True, "use_ue8m0": True}, {}),
]


def rank_kinds_in_turn(ctx):
    """Calls of many kinds on one buffer, more than it keeps plans for: none is taken for another."""
    from deep_ep import _face, _low_latency_plan

    few = [mock.patch.object(module, "MAX_PLANS", 3) for module in (_face, _low_latency_plan)]
    with few[0], few[1], lowlat.buffer_of(ctx, BASE, B) as buffer:
        for turn in range(3):
            for number, (case, options, wait) in enumerate(KINDS):
                own = case.but(seed=turn * len(KINDS) + number)
                call = lowlat.dispatch_and_check(ctx, buffer, own, B, **options, **wait)
                lowlat.combine_and_check(ctx, buffer, call, **wait)
            plans = buffer._low_latency.plans
            assert len(plans.dispatches) <= 3 and len(plans.combines) <= 3


def test_kinds_in_turn(pool):
    pool.run(4, rank_kinds_in_turn)


def rank_parameters(ctx):
    """A subclass of Tensor is a tensor; results are plain ones."""
    with lowlat.buffer_of(ctx, BASE, B) as buffer:
        call = lowlat.expect(BASE, ctx.rank, B, frozenset())
        idx = ctx.to_device(call.topk_idx[ctx.rank])
        x = torch.nn.Parameter(ctx.to_device(call.x[ctx.rank]), requires_grad=False)
        for _ in range(2):
            call.recv_x, call.counts, call.handle, _, _ = buffer.low_latency_dispatch(x, idx, B, BASE.experts)
            lowlat.check(call)
            rows = torch.nn.Parameter(torch.zeros(call.recv_x[0].shape, dtype=torch.bfloat16, device=ctx.device))
            weights = torch.nn.Parameter(torch.ones(idx.shape, device=ctx.device))
            combined, _, _ = buffer.low_latency_combine(rows, idx, weights, call.handle)
            assert type(combined) is torch.Tensor and not combined.requires_grad and not combined.any()


def test_parameters(pool):
    pool.run(4, rank_parameters)


def rank_bit_identical(ctx, case, options):
    with lowlat.buffer_of(ctx, case, B) as buffer:
        first = None
        for _ in range(5):
            call = lowlat.dispatch_and_check(ctx, buffer, case, B, **options)
            rows = [call.recv_x[0][e, :n] for e, n in enumerate(call.want.counts.tolist())]
            done = lowlat.combine_and_check(ctx, buffer, call, exact=False)
            result = torch.cat([checks.raw(part).flatten() for part in (*rows, done.got)])
            assert first is None or torch.equal(result, first), "outputs differ between equal calls"
            first = result


def test_bit_identical(pool):
    pool.run(4, rank_bit_identical, BASE, {})


def rank_two_batches(ctx, first_case, second_case, combine_options):
    """vLLM's order: two sends outstanding, then the hooks in turn, twice over."""
    hook = {"return_recv_hook": True}
    with lowlat.buffer_of(ctx, first_case, B) as buffer:
        for turn in range(3):
            a = lowlat.dispatch(ctx, buffer, first_case.but(seed=turn), B, **hook)
            b = lowlat.dispatch(ctx, buffer, second_case.but(seed=50 + turn), B, **hook)
            a.hook()
            lowlat.check(a)
            b.hook()
            lowlat.check(b)
            sums_a = lowlat.combine(ctx, buffer, a, **hook, **combine_options)
            sums_b = lowlat.combine(ctx, buffer, b, **hook, **combine_options)
            sums_a.hook()
            sums_b.hook()
            lowlat.check_combined(sums_a)
            lowlat.check_combined(sums_b)


@pytest.mark.parametrize("combine_options", [{}, {"use_logfmt": True, "exact": False}])
def test_two_outstanding(pool, combine_options):
    pool.run(4, rank_two_batches, BASE, BASE.but(routing="holes", tokens=(3, 16, 1, 0)), combine_options)


def rank_third_outstanding(ctx, case):
    from deep_ep import DeepEPError

    hook = {"return_recv_hook": True}
    with lowlat.buffer_of(ctx, case, B) as buffer:
        a = lowlat.dispatch(ctx, buffer, case, B, **hook)
        b = lowlat.dispatch(ctx, buffer, case.but(seed=1), B, **hook)
        with pytest.raises(DeepEPError, match="(?i)hook|outstanding|receive"):
            lowlat.dispatch(ctx, buffer, case.but(seed=2), B, **hook)
        a.hook()
        b.hook()
        lowlat.check(a)
        lowlat.check(b)
        lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, case.but(seed=3), B))


def test_third_outstanding_is_an_error(pool):
    pool.run(4, rank_third_outstanding, BASE)


def rank_statistics(ctx, case):
    with lowlat.buffer_of(ctx, case, B) as buffer:
        device = ctx.device
        received = torch.full((case.experts // ctx.size,), 7, dtype=torch.int32, device=device)
        waited = torch.zeros(ctx.size, dtype=torch.int64, device=device)
        combine_waited = torch.zeros(ctx.size, dtype=torch.int64, device=device)
        total = torch.full((case.experts // ctx.size,), 7, dtype=torch.int32)
        for turn in range(3):
            call = lowlat.dispatch_and_check(
                ctx,
                buffer,
                case.but(seed=turn),
                B,
                cumulative_local_expert_recv_stats=received,
                dispatch_wait_recv_cost_stats=waited,
            )
            total += call.want.counts
            checks.same_bits("cumulative_local_expert_recv_stats", received, total)
            lowlat.combine_and_check(ctx, buffer, call, combine_wait_recv_cost_stats=combine_waited)
        for name, values in (("dispatch", waited), ("combine", combine_waited)):
            assert bool((values >= 0).all()) and int(values.sum()) > 0, f"{name}: {values}"
            assert int(values.max()) < 60_000_000_000, f"{name}: {values} nanoseconds"


def test_statistics(pool):
    pool.run(4, rank_statistics, BASE.but(routing="holes"))


def rank_wait_is_attributed(ctx, case):
    """The rank that comes 0.3 s late is the one that the others report to have waited for."""
    import time

    with lowlat.buffer_of(ctx, case, B) as buffer:
        lowlat.dispatch_and_check(ctx, buffer, case, B)
        waited = torch.zeros(ctx.size, dtype=torch.int64, device=ctx.device)
        ctx.barrier()
        if ctx.rank == 2:
            time.sleep(0.3)
        lowlat.dispatch_and_check(ctx, buffer, case, B, dispatch_wait_recv_cost_stats=waited)
        if ctx.rank != 2:
            assert 200_000_000 < int(waited[2]) < 5_000_000_000, f"{waited} nanoseconds"


def test_wait_names_the_late_rank(pool):
    pool.run(4, rank_wait_is_attributed, BASE)


def rank_special_values(ctx, case, options):
    """NaN and infinity neither hang nor spoil other rows."""
    with lowlat.buffer_of(ctx, case, B) as buffer:
        call = lowlat.expect(case, ctx.rank, B, frozenset(), **options)
        for x in call.x:
            if len(x):
                x[0, 0], x[0, 200] = float("nan"), float("inf")
        (values, _), call.counts, call.handle, _, _ = buffer.low_latency_dispatch(
            ctx.to_device(call.x[ctx.rank]), ctx.to_device(call.topk_idx[ctx.rank]), B, case.experts, **options
        )
        for local, rows in enumerate(call.want.rows):
            plain = [row for row, (_, token) in enumerate(rows) if token != 0]
            source = lowlat.source_rows(call.x, [rows[row] for row in plain], case.hidden)
            low, high = lowlat.formats.fp8_cast_bounds(source, options.get("round_scale", False))
            got = checks.raw(values[local, : len(rows)].cpu().view(torch.uint8)[plain])
            assert bool(((got == checks.raw(low)) | (got == checks.raw(high))).all()), f"expert {local}"
            for row in set(range(len(rows))) - set(plain):
                spoilt = values[local, row].cpu().float()
                assert bool(spoilt[0].isnan()) or spoilt[0].abs() == 448
                assert bool(torch.isfinite(spoilt[256:]).all()), "other blocks of the row are not touched"
        lowlat.combine_and_check(ctx, buffer, call)


@pytest.mark.parametrize("options", [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}])
def test_nan_and_infinity(pool, options):
    pool.run(4, rank_special_values, BASE, options)


def rank_random(ctx, seed):
    rng = cases.generator(seed, 500)
    draw = lambda n: int(torch.randint(0, n, (1,), generator=rng))  # noqa: E731
    num_max, ranks = 1 + draw(20), ctx.size
    case = Case(
        tuple(draw(num_max + 1) for _ in range(ranks)),
        hidden=512 * (1 + draw(3)),
        experts=ranks * (3 + draw(3)),
        topk=1 + draw(3 * ranks) if ranks < 3 else 1 + draw(9),
        routing=("random", "holes", "duplicates", "skewed", "none", "hot", "hot_first", "few", "edges")[draw(9)],
        seed=seed,
    )
    form, wait = list(FORMATS.values())[draw(4)], ({}, {"return_recv_hook": True}, {"async_finish": True})
    with lowlat.buffer_of(ctx, case, num_max) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, case, num_max, **form, **wait[draw(3)])
        for _ in range(2):
            lowlat.combine_and_check(ctx, buffer, call, **list(COMBINES.values())[draw(len(COMBINES))])


@pytest.mark.parametrize("seed", range(12))
def test_random(pool, seed):
    pool.run(1 + seed % 8, rank_random, seed)
