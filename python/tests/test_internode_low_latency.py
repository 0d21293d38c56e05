"""Low-latency mode across nodes: formats, hooks, masks, sums at the experts' rank, and RDMA in place of NVLink."""

from __future__ import annotations

import pytest
import torch

import checks
import internode
import lowlat
import test_low_latency
import test_shrink
import test_streams_events
from cases import Case
from conftest import full
from internode import SHAPES, low_latency_case_of, unless_full
from test_low_latency import BASE, COMBINES, FORMATS

B = 16
SEEDS = 1000 if full() else 10
BATCH = 20 if full() else 2
WAITS = {"none": {}, "hook": {"return_recv_hook": True}, "event": {"async_finish": True}}

pytestmark = pytest.mark.usefixtures("nodes")


def rank_formats(ctx, case, buffer_options, every=True):
    """Every format of dispatch, every kind of combine and every way of waiting, on one buffer; or a third of them."""
    combines = list(COMBINES.items())
    with lowlat.buffer_of(ctx, case, B, **buffer_options) as buffer:
        for turn, (form, casting) in enumerate(FORMATS.items()):
            for step, (wait, waiting) in enumerate(WAITS.items()):
                if not every and step != turn % len(WAITS):
                    continue
                name, combining = combines[(turn * len(WAITS) + step) % len(combines)]
                call = lowlat.dispatch_and_check(ctx, buffer, case.but(seed=turn), B, **casting, **waiting)
                try:
                    lowlat.combine_and_check(ctx, buffer, call, **waiting)
                    lowlat.combine_and_check(ctx, buffer, call, **combining)
                except AssertionError as error:
                    raise AssertionError(f"{form}, wait {wait}, {name}: {error}") from error


@pytest.mark.parametrize("shape", SHAPES)
def test_formats(pool, shape):
    every = full() or shape == "2x2"
    internode.run(pool, shape, rank_formats, low_latency_case_of(shape, routing="holes"), {}, every)


@pytest.mark.parametrize("peers", [1, 2, 4])
def test_no_nvlink(pool, peers):
    """allow_nvlink_for_low_latency_mode=False: RDMA among all ranks, those of the same node too."""
    shape = {1: "4x1", 2: "2x2", 4: "1x4"}[peers]
    case = low_latency_case_of("2x2", routing="holes")
    internode.run(pool, shape, rank_formats, case, {"allow_nvlink_for_low_latency_mode": False}, full())


def rank_cases(ctx, named):
    with lowlat.buffer_of(ctx, Case(BASE.tokens, hidden=512, experts=8), B) as buffer:
        for name, case in named.items():
            try:
                call = lowlat.dispatch_and_check(ctx, buffer, case, B, use_fp8=False)
                lowlat.combine_and_check(ctx, buffer, call)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("shape", unless_full(["2x2", "4x1"], ["4x1"]))
def test_chosen(pool, shape):
    internode.run(pool, shape, rank_cases, test_low_latency.CHOSEN)


def rank_seeds(ctx, first, count):
    for seed in range(first, first + count):
        with internode.environment(**internode.rdma_of(seed)):
            test_low_latency.rank_random(ctx, seed)


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_random(pool, first):
    shape = SHAPES[first // BATCH % len(SHAPES)]
    internode.run(pool, shape, rank_seeds, first, BATCH, deadline=200)


LATE_CASE = BASE.but(tokens=(16, 9, 2, 12), routing="hot_first")
REUSED = {
    "out": (test_low_latency.rank_out, BASE, {}),
    "combine twice with one handle": (test_low_latency.rank_combine_twice, BASE),
    "bit-identical": (test_low_latency.rank_bit_identical, BASE, {}),
    "two outstanding": (test_low_latency.rank_two_batches, BASE, BASE.but(routing="holes", tokens=(3, 16, 1, 0)), {}),
    "third outstanding is an error": (test_low_latency.rank_third_outstanding, BASE),
    "statistics": (test_low_latency.rank_statistics, BASE.but(routing="holes")),
    "wait names the late rank": (test_low_latency.rank_wait_is_attributed, BASE),
    "NaN and infinity": (test_low_latency.rank_special_values, BASE, {"round_scale": True, "use_ue8m0": True}),
    "7168 channels": (test_low_latency.rank_round_trip, Case((6, 0, 3, 8), hidden=7168, topk=3), B, {}, {}),
    "halves return at once": (
        test_streams_events.rank_low_latency_returns_at_once,
        LATE_CASE,
        {"return_recv_hook": True},
    ),
    "hook keeps inputs alive": (test_streams_events.rank_hook_inputs_live, BASE),
    "masked by hand and back": (test_shrink.rank_masked_by_hand, test_shrink.CASE, {}),
    "masked by hand and back, hooks": (
        test_shrink.rank_masked_by_hand,
        test_shrink.CASE,
        {"return_recv_hook": True, "use_fp8": False},
    ),
    "masks cleaned": (test_shrink.rank_clean_masks, test_shrink.CASE),
    "a masked source counts nowhere": (test_shrink.rank_statistics, test_shrink.CASE),
    "recovery, nothing missed": (test_shrink.rank_recovery, test_shrink.CASE, 0),
    "recovery, two calls missed": (test_shrink.rank_recovery, test_shrink.CASE, 2),
}


LONG = ("combine twice with one handle", "wait names the late rank", "halves return at once",
        "hook keeps inputs alive", "masked by hand and back", "masks cleaned", "recovery, nothing missed")  # fmt: skip


@pytest.mark.parametrize("name", unless_full(REUSED, LONG))
def test_as_on_one_node(pool, name):
    internode.run(pool, "2x2", *REUSED[name])


@pytest.mark.skipif(not full(), reason="a long test: DEEPEP_TEST_FULL=1 runs it")
def test_late_data_is_never_taken(pool):
    internode.run(pool, "2x2", test_shrink.rank_late_data, test_shrink.CASE)


def rank_qps(ctx, case, count):
    with lowlat.buffer_of(ctx, case, B, num_qps_per_rank=count) as buffer:
        for turn in range(3):
            call = lowlat.dispatch_and_check(ctx, buffer, case.but(seed=turn), B, return_recv_hook=bool(turn % 2))
            lowlat.combine_and_check(ctx, buffer, call)


@pytest.mark.parametrize("count", [1, 3, 8, 24] if full() else [1, 3])
def test_any_number_of_queue_pairs(pool, count):
    internode.run(pool, "2x2", rank_qps, low_latency_case_of("2x2", experts=16), count, seed=count)


def rank_bits(ctx, case):
    with lowlat.buffer_of(ctx, case, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, case, B)
        return checks.raw(lowlat.combine_and_check(ctx, buffer, call, exact=False).got).tolist()


def test_bits_do_not_depend_on_the_order_of_arrival(pool):
    case = low_latency_case_of("2x2", topk=8)
    first, *others = (internode.run(pool, "2x2", rank_bits, case, seed=seed) for seed in (1, 2, 4))
    for other in others:
        assert other == first


def rank_prereduced(ctx, case):
    """Weights sent along with dispatch change nothing about the sums; nor does asking for every row."""
    with lowlat.buffer_of(ctx, case, B) as buffer:
        weights = ctx.to_device(lowlat.make_weights(case, ctx.rank))
        call = lowlat.dispatch_and_check(ctx, buffer, case, B, topk_weights=weights)
        lowlat.combine_and_check(ctx, buffer, call)
        lowlat.combine_and_check(ctx, buffer, call, unreduced=True)
        assert torch.isfinite(lowlat.combine_and_check(ctx, buffer, call, exact=False).got).all()


@pytest.mark.parametrize("shape", unless_full(["2x2", "4x1"], ["4x1"]))
def test_sums_at_the_experts_rank(pool, shape):
    internode.run(pool, shape, rank_prereduced, low_latency_case_of(shape))
