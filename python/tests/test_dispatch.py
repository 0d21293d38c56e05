"""dispatch: every row, index, weight, scale and count, for chosen and for random cases."""

from __future__ import annotations

import pytest
import torch

import cases
import checks
import normal
from cases import Case


def rank_dispatch(ctx, case, repeat=1, **options):
    with normal.buffer_of(ctx, **options) as buffer:
        for _ in range(repeat):
            normal.dispatch_and_check(ctx, buffer, case)


BASE = Case((40, 25, 0, 64), experts=16, topk=4, hidden=72)
CHOSEN = {
    "plain": BASE,
    "zero tokens on one rank": BASE.but(tokens=(0, 50, 60, 70)),
    "zero tokens everywhere": BASE.but(tokens=(0, 0, 0, 0)),
    "one token in all": BASE.but(tokens=(0, 0, 1, 0)),
    "empty experts": BASE.but(routing="few"),
    "first and last expert only": BASE.but(routing="edges"),
    "one hot expert": BASE.but(routing="hot"),
    "one expert that all name": BASE.but(routing="hot_first"),
    "all -1": BASE.but(routing="none"),
    "some -1": BASE.but(routing="holes"),
    "experts named twice": BASE.but(routing="duplicates", topk=7),
    "odd K": BASE.but(topk=3),
    "K of 1": BASE.but(topk=1),
    "K of 9 with one expert a rank": BASE.but(experts=4, topk=9, routing="duplicates"),
    "any BF16 pattern": BASE.but(kind="bits"),
    "int32 indices": BASE.but(index_dtype=torch.int32, routing="holes"),
    "alignment": BASE.but(alignment=128),
    "odd alignment": BASE.but(alignment=7, routing="skewed"),
    "without top-k": BASE.but(with_topk=False),
    "worst case": BASE.but(worst=True),
    "worst case, nothing sent": BASE.but(worst=True, routing="none"),
    "worst case, int32, odd K": BASE.but(worst=True, topk=5, index_dtype=torch.int32, routing="skewed"),
    "worst case, FP8": BASE.but(worst=True, kind="fp8", hidden=256, num_scales=2),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen(pool, name):
    pool.run(4, rank_dispatch, CHOSEN[name])


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_number_of_ranks(pool, ranks):
    tokens = tuple(29 * (rank + 1) % 47 for rank in range(ranks))
    pool.run(ranks, rank_dispatch, Case(tokens, experts=3 * ranks, topk=3, routing="random"))


@pytest.mark.parametrize("hidden", [8, 16, 24, 128, 7168, 16384])
def test_hidden_bf16(pool, hidden):
    pool.run(3, rank_dispatch, Case((30, 0, 17), hidden=hidden, experts=6, topk=2))


@pytest.mark.parametrize("hidden", [16, 48, 7168, 16384])
@pytest.mark.parametrize("scales", ["float32", "int32", "strided", "sliced"])
def test_fp8(pool, hidden, scales):
    case = Case((30, 1, 17), hidden=hidden, experts=6, topk=3, kind="fp8", scales=scales)
    pool.run(3, rank_dispatch, case.but(num_scales=max(1, hidden // 128)))


@pytest.mark.parametrize("num_scales", [1, 2, 3, 5, 56, 129])
def test_fp8_any_number_of_scales(pool, num_scales):
    pool.run(2, rank_dispatch, Case((9, 30), hidden=128, kind="fp8", num_scales=num_scales, scales="sliced"))


@pytest.mark.parametrize("worst", [False, True])
def test_many_tokens(pool, worst):
    pool.run(4, rank_dispatch, Case((1500, 1, 800, 2000), hidden=256, experts=64, topk=8, worst=worst), 2)


@pytest.mark.parametrize("hidden, tokens", [(64, 700), (7168, 120)])
@pytest.mark.parametrize("worst", [False, True])
def test_small_buffer_is_only_slower(pool, hidden, tokens, worst):
    """Far fewer bytes than the rows need: the transfer has to go in pieces."""
    from deep_ep import Config

    floor = Config(2, 1, 2).get_nvl_buffer_size_hint(hidden * 2, 4)
    case = Case((tokens, 0, tokens, 3), hidden=hidden, experts=8, topk=3, routing="skewed", worst=worst)
    pool.run(4, rank_small, case, floor)


def rank_small(ctx, case, num_bytes):
    from deep_ep import Config

    config = Config(2, 1, 2)
    with normal.buffer_of(ctx, num_bytes) as buffer:
        for _ in range(2):
            exchange = normal.dispatch_and_check(ctx, buffer, case, config=config)
            normal.combine(ctx, buffer, exchange, config=config, with_weights=True, bias=1)


@pytest.mark.parametrize("seed", range(24))
def test_random(pool, seed):
    case = cases.random_case(seed)
    pool.run(case.ranks, rank_dispatch, case, 2)


def rank_cached(ctx, case, other):
    """A handle serves other payloads: BF16 of another width, FP8, and again."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        for again in (case.but(seed=5, kind="bits"), other, case):
            inputs = again.inputs()
            want = normal.reference.dispatch(inputs, exchange.layouts, ctx.rank, case.experts)
            result = buffer.dispatch(normal.x_of(ctx, inputs[ctx.rank]), handle=exchange.handle)
            want.topk_idx = want.topk_weights = None
            checks.same_received(result[0], result[1], result[2], want, case.worst_tokens)
            assert result[3] is None and result[4] is None, f"cached mode returned {result[3]}, {result[4]}"


@pytest.mark.parametrize("worst", [False, True])
def test_cached_mode(pool, worst):
    case = Case((60, 3, 0, 41), hidden=128, experts=8, topk=3, routing="holes", worst=worst)
    other = case.but(hidden=400, kind="fp8", num_scales=5, scales="strided")
    pool.run(4, rank_cached, case, other)


def rank_handle_moves(ctx, case):
    """A handle outlives its buffer and works on another one of the group."""
    with normal.buffer_of(ctx) as first:
        exchange = normal.dispatch_and_check(ctx, first, case)
    with normal.buffer_of(ctx, 1 << 22) as second:
        recv_x, *_ = second.dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle)
        checks.same_rows("recv_x", recv_x, exchange.want.x)
        normal.combine(ctx, second, exchange, with_weights=True)


def test_handle_on_another_buffer(pool):
    pool.run(4, rank_handle_moves, Case((60, 3, 0, 41), hidden=128, experts=8, topk=3))


BYTES = [torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bool]


def rank_dtypes(ctx, case, dtypes):
    """Rows of any dtype are moved as bytes; twice, so that a later call is one like an earlier call."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        own, want = exchange.own, exchange.want
        layout = normal.layout_arguments(ctx, buffer, exchange)
        top = {"topk_idx": ctx.to_device(own.topk_idx), "topk_weights": ctx.to_device(own.topk_weights)}
        for dtype in dtypes:
            x = ctx.to_device(own.x.view(torch.uint8).view(dtype))
            scales = None if own.scales is None else ctx.to_device(own.scales)
            given = x if scales is None else (x, scales)
            for options in ({**layout, **top}, {**layout, **top}, {"handle": exchange.handle}):
                got = buffer.dispatch(given, **options)[0]
                if scales is not None:
                    got, got_scales = got
                    checks.same_bits("scales", got_scales, want.scales)
                assert got.dtype == dtype
                checks.same_bits(f"rows of {dtype}", got.view(torch.uint8).cpu(), want.x.view(torch.uint8))


@pytest.mark.parametrize("scaled", [False, True])
def test_dtypes(pool, scaled):
    case = Case((30, 3, 0, 17), hidden=128, experts=8, topk=3, kind="fp8" if scaled else "bits", num_scales=2)
    wider = [] if scaled else [torch.float16, torch.int16, torch.float32, torch.int32, torch.float64, torch.int64]
    pool.run(4, rank_dtypes, case, BYTES + wider)


def rank_offset(ctx, case, offset, asynchronous):
    with normal.buffer_of(ctx) as buffer:
        options = {}
        if asynchronous:
            options = {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}
        exchange = normal.dispatch(ctx, buffer, case, global_expert_id_offset=offset, **options)
        if asynchronous:
            exchange.event.current_stream_wait()
        want = exchange.want.topk_idx
        exchange.want.topk_idx = torch.where(want < 0, want, want + offset)
        normal.check(exchange)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("worst", [False, True])
def test_offset_of_received_indices(pool, worst, asynchronous):
    """TensorRT-LLM has its experts' numbers counted on from one that it gives; -1 stays."""
    case = Case((60, 3, 0, 41), hidden=128, experts=8, topk=3, routing="holes", worst=worst)
    pool.run(4, rank_offset, case, 100, asynchronous)
    pool.run(2, rank_offset, Case((9, 30), hidden=64, index_dtype=torch.int32, worst=worst), 2**30, asynchronous)


def rank_internode_names(ctx, case):
    """The internode names may be called directly, with a config, also on one node."""
    from deep_ep import Buffer

    with normal.buffer_of(ctx) as buffer:
        exchange = normal.expect(case, ctx.rank)
        own, config = exchange.own, Buffer.get_dispatch_config(ctx.size)
        arguments = normal.layout_arguments(ctx, buffer, exchange)
        arguments |= {"topk_idx": ctx.to_device(own.topk_idx), "topk_weights": ctx.to_device(own.topk_weights)}
        result = buffer.internode_dispatch(normal.x_of(ctx, own), **arguments, config=config)
        exchange.recv_x, exchange.recv_topk_idx, exchange.recv_topk_weights, exchange.counts = result[:4]
        exchange.handle = result[4]
        normal.check(exchange)
        rows = normal.expert_rows(exchange, True)
        sums, _, _ = buffer.internode_combine(ctx.to_device(rows[ctx.rank]), exchange.handle, config=config)
        normal.check_combined(exchange, rows, [], sums, True)
        again, *_ = buffer.internode_dispatch(normal.x_of(ctx, own), exchange.handle, config=config)
        checks.same_rows("recv_x", again, exchange.want.x)


def test_internode_names(pool):
    pool.run(4, rank_internode_names, Case((20, 30, 0, 5), hidden=64))


def rank_defaults_changed(ctx, case):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with normal.buffer_of(ctx) as buffer:
            torch.set_default_device("cpu")
            exchange = normal.expect(case, ctx.rank)
            arguments = normal.layout_arguments(ctx, buffer, exchange)
            x, own = normal.x_of(ctx, exchange.own), exchange.own
            torch.set_default_device("meta")
            result = buffer.dispatch(
                x, **arguments, topk_idx=ctx.to_device(own.topk_idx), topk_weights=ctx.to_device(own.topk_weights)
            )
            combined, *_ = buffer.combine(result[0], result[4], topk_weights=result[2])
            torch.set_default_device("cpu")
            checks.same_received(*result[:3], exchange.want)
            assert combined.device.type == ctx.device.type and combined.dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_torch_defaults_do_not_matter(pool):
    pool.run(2, rank_defaults_changed, Case((20, 30), hidden=64))


def rank_inputs_unchanged(ctx, case):
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.expect(case, ctx.rank)
        arguments = normal.layout_arguments(ctx, buffer, exchange)
        tensors = [t.clone() for t in arguments.values() if t is not None]
        x = normal.x_of(ctx, exchange.own)
        topk_idx, topk_weights = ctx.to_device(exchange.own.topk_idx), ctx.to_device(exchange.own.topk_weights)
        buffer.dispatch(x, **arguments, topk_idx=topk_idx, topk_weights=topk_weights)
        fresh = cases.tokens_of(case, ctx.rank)
        checks.same_bits("x", x, fresh.x)
        checks.same_bits("topk_idx", topk_idx, fresh.topk_idx)
        checks.same_bits("topk_weights", topk_weights, fresh.topk_weights)
        now = [t for t in arguments.values() if t is not None]
        for before, after in zip(tensors, now, strict=True):
            checks.same_bits("a layout tensor", after, before.cpu())


def test_inputs_are_not_written(pool):
    pool.run(2, rank_inputs_unchanged, Case((20, 30), hidden=64))


def rank_rows_outlive(ctx, case, asynchronous):
    """Rows stay right after their buffer is gone, and do not keep the memory of a row of buffers."""
    from deep_ep import Buffer

    options = {"async_finish": True, "previous_event": Buffer.capture()} if asynchronous else {}
    for _ in range(24 if ctx.engine == "cuda" else 3):
        with normal.buffer_of(ctx, zero_copy_bytes=2 << 30) as buffer:
            exchange = normal.dispatch(ctx, buffer, case, **options)
            if asynchronous:
                exchange.event.current_stream_wait()
        normal.check(exchange)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_outlive_their_buffer(pool, asynchronous):
    pool.run(2, rank_rows_outlive, Case((20, 30), hidden=64), asynchronous)
