"""Normal mode across nodes, over the software RDMA: layout, rows, handle, sums, cached and worst-case mode.

The software RDMA breaks every order that queue pairs do not promise, by a seed. What one node's tests check is checked
here by the same functions; see ``internode``.
"""

from __future__ import annotations

import re

import pytest
import torch

import cases
import checks
import internode
import lowlat
import normal
import test_combine
import test_dispatch
import test_layout
import test_streams_events
from cases import Case
from conftest import full
from internode import SHAPES, case_of, low_latency_case_of, unless_full

SEEDS = 1000 if full() else 10
BATCH = 20 if full() else 2
B = 16  # of low-latency calls

pytestmark = pytest.mark.usefixtures("nodes")


def rank_everything(ctx, case):
    """The ways to call dispatch and combine, one after the other on one buffer."""
    from deep_ep import Buffer

    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        normal.combine(ctx, buffer, exchange, bias=2, with_weights=True)
        normal.combine(ctx, buffer, exchange, bias=1, exact=False)
        later = normal.dispatch_and_check(ctx, buffer, case, previous_event=Buffer.capture(), async_finish=True)
        normal.combine(ctx, buffer, later, with_weights=True, previous_event=Buffer.capture(), async_finish=True)
        fp8 = case.but(kind="fp8", hidden=144, num_scales=3, scales="strided", seed=1)
        normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, fp8), with_weights=True)
        worst = normal.dispatch_and_check(ctx, buffer, case.but(worst=True, routing="holes", seed=2))
        normal.combine(ctx, buffer, worst, bias=1, with_weights=True)
        without = case.but(with_topk=False, seed=3)
        normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, without))
        again, *rest = buffer.dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle)
        checks.same_rows("recv_x", again, exchange.want.x)
        assert rest[:4] == [None] * 4
        normal.combine(ctx, buffer, worst, seed=7)


@pytest.mark.parametrize("shape", SHAPES)
def test_everything(pool, shape):
    internode.run(pool, shape, rank_everything, case_of(shape))


def rank_cases(ctx, named, **options):
    with normal.buffer_of(ctx, **options) as buffer:
        for name, case in named.items():
            try:
                exchange = normal.dispatch_and_check(ctx, buffer, case)
                if case.kind != "bits":  # sums of NaN patterns cannot be compared
                    normal.combine(ctx, buffer, exchange, bias=1, with_weights=case.with_topk)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


CHOSEN = {
    **test_dispatch.CHOSEN,
    "every rank gets every token": case_of("2x2", experts=4, topk=4),
    "one token for each of the experts": Case((1, 1, 1, 1), experts=4, topk=1, routing="few"),
    "all to the last rank": case_of("2x2", routing="hot"),
    "rows of 16 bytes": case_of("2x2", hidden=8),
    "rows of 14336 bytes": Case((9, 0, 40, 3), hidden=7168, experts=8, topk=3),
    "rows of 32768 bytes": Case((3, 5, 0, 7), hidden=16384, experts=8, topk=3),
    "many scales": Case((9, 0, 40, 3), hidden=128, experts=8, topk=3, kind="fp8", num_scales=129, scales="sliced"),
}


@pytest.mark.parametrize("shape", unless_full(["2x2", "4x1"], ["4x1"]))
def test_chosen(pool, shape):
    internode.run(pool, shape, rank_cases, CHOSEN)


def rank_seeds(ctx, first, count):
    """A random case, twice, for each seed of the software RDMA; the repetition gives the same bits."""
    for seed in range(first, first + count):
        case = cases.random_case(seed, ctx.size)
        with internode.environment(**internode.rdma_of(seed)), normal.buffer_of(ctx) as buffer:
            sums = []
            for _ in range(2):
                exchange = normal.dispatch_and_check(ctx, buffer, case)
                if case.kind != "bits":
                    options = {"exact": seed % 2 == 0, "bias": seed % 3, "with_weights": case.with_topk}
                    sums.append(normal.combine(ctx, buffer, exchange, **options)[0])
            if sums:
                checks.same_bits(f"seed {seed}, repeated", sums[1], sums[0].cpu())


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_random(pool, first):
    shape = SHAPES[first // BATCH % len(SHAPES)]
    internode.run(pool, shape, rank_seeds, first, BATCH, deadline=200)


def rank_bits(ctx, case):
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        return checks.raw(normal.combine(ctx, buffer, exchange, exact=False)[0]).tolist()


def test_bits_do_not_depend_on_the_order_of_arrival(pool):
    case = case_of("2x2", experts=8, topk=8)
    first, *others = (internode.run(pool, "2x2", rank_bits, case, seed=seed) for seed in (1, 2, 4))
    for other in others:
        assert other == first


REUSED = {
    "cached dispatch of other payloads": (
        test_dispatch.rank_cached,
        Case((60, 3, 0, 41), hidden=128, topk=3, routing="holes"),
        Case((60, 3, 0, 41), hidden=400, topk=3, routing="holes", kind="fp8", num_scales=5, scales="strided"),
    ),
    "cached dispatch after the worst case": (
        test_dispatch.rank_cached,
        Case((60, 3, 0, 41), hidden=128, topk=3, routing="holes", worst=True),
        Case((60, 3, 0, 41), hidden=400, topk=3, routing="holes", kind="fp8", num_scales=5, worst=True),
    ),
    "handle on another buffer": (test_dispatch.rank_handle_moves, Case((60, 3, 0, 41), hidden=128, topk=3)),
    "internode names": (test_dispatch.rank_internode_names, Case((20, 30, 0, 5), hidden=64)),
    "inputs are not written": (test_dispatch.rank_inputs_unchanged, case_of("2x2")),
    "rows outlive their buffer": (test_dispatch.rank_rows_outlive, case_of("2x2"), True),
    "many tokens": (test_dispatch.rank_dispatch, Case((900, 1, 500, 1200), hidden=256, experts=64, topk=8), 2),
    "one handle, many combines": (test_combine.rank_repeated, case_of("2x2")),
    "rows sent back unchanged": (test_combine.rank_identity, case_of("2x2", routing="holes")),
    "NaN stays where it is": (test_combine.rank_special, Case((40, 25, 0, 64), experts=16, topk=4)),
    "asynchronous layout": (test_layout.rank_events, case_of("2x2")),
    "asynchronous chain": (test_streams_events.rank_chain, case_of("2x2")),
    "asynchronous chain, worst case": (test_streams_events.rank_chain_worst, case_of("2x2", worst=True)),
    "previous event alone": (test_streams_events.rank_previous_event_alone, case_of("2x2")),
    "calls return at once": (test_streams_events.rank_returns_at_once, Case((40, 25, 3, 64), experts=16, topk=4)),
    "inputs stay alive": (test_streams_events.rank_inputs_live, case_of("2x2")),
}


LONG = ("calls return at once", "inputs stay alive", "previous event alone", "inputs are not written",
        "asynchronous chain, worst case", "rows outlive their buffer")  # fmt: skip


@pytest.mark.parametrize("name", unless_full(REUSED, LONG))
def test_as_on_one_node(pool, name):
    internode.run(pool, "2x2", *REUSED[name])


def rank_attributes(ctx, nodes, peers, by_keyword):
    """Who is where; the node size by keyword counts more than that of the environment."""
    keyword = {"num_nvl_peers": peers} if by_keyword else {}
    with normal.buffer_of(ctx, **keyword) as buffer:
        runtime = buffer.runtime
        assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (nodes, ctx.rank // peers)
        assert (runtime.get_root_rdma_rank(True), runtime.get_root_rdma_rank(False)) == (ctx.rank % peers, 0)
        assert (buffer.num_nvl_peers, buffer.num_nodes) == (peers, nodes)
        _, per_node, *_ = buffer.get_dispatch_layout(cases.routing(case_of("3x2"), ctx.rank), 24)
        assert per_node.dtype == torch.int32 and tuple(per_node.shape) == (nodes,)


def test_attributes(pool):
    internode.run(pool, "3x2", rank_attributes, 3, 2, False)
    pool.run(6, rank_attributes, 2, 3, True)


def rank_incomplete_node(ctx):
    from deep_ep import Buffer

    with pytest.raises(ValueError, match="every node must be full") as caught:
        Buffer(ctx.group, 1 << 20, 1 << 20, engine=ctx.engine, num_nvl_peers=2)
    assert "3" in str(caught.value)


def test_every_node_is_full(pool):
    pool.run(3, rank_incomplete_node)


def rank_qps(ctx, case, count):
    with normal.buffer_of(ctx, num_qps_per_rank=count) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        normal.combine(ctx, buffer, exchange, with_weights=True)


@pytest.mark.parametrize("count", [1, 3, 10, 24] if full() else [1, 3])
def test_any_number_of_queue_pairs(pool, count):
    internode.run(pool, "2x2", rank_qps, case_of("2x2"), count, seed=count)


def rank_hints(ctx, case):
    """A buffer of exactly the hinted sizes serves calls with that config."""
    from deep_ep import Buffer, Config

    small = Config(2, 1, 2, 1, 2)
    for config in (Buffer.get_dispatch_config(ctx.size), Buffer.get_combine_config(ctx.size), small):
        row = case.hidden * 2
        nvl, rdma = (
            hint(row, ctx.size) for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint)
        )
        assert rdma > 0 and config.get_rdma_buffer_size_hint(row, cases.node_size()) == 0
        with normal.buffer_of(ctx, nvl, rdma) as buffer:
            exchange = normal.dispatch_and_check(ctx, buffer, case, config=config)
            normal.combine(ctx, buffer, exchange, with_weights=True, config=config)


def test_hinted_sizes(pool):
    internode.run(pool, "2x2", rank_hints, Case((70, 0, 33, 150), hidden=1024, experts=16, topk=4))


def rank_both_modes(ctx, case, ll_case):
    """Normal and low-latency calls in turn on one buffer, cleaned in between as SGLang does."""
    from deep_ep import Buffer

    rdma = Buffer.get_low_latency_rdma_size_hint(B, ll_case.hidden, ctx.size, ll_case.experts)
    rdma = max(rdma, Buffer.get_dispatch_config(ctx.size).get_rdma_buffer_size_hint(case.hidden * 2, ctx.size))
    with normal.buffer_of(ctx, 1 << 24, rdma, low_latency_mode=True) as buffer:
        for turn in range(3):
            exchange = normal.dispatch_and_check(ctx, buffer, case.but(seed=turn, worst=turn == 1))
            normal.combine(ctx, buffer, exchange, with_weights=True)
            buffer.clean_low_latency_buffer(B, ll_case.hidden, ll_case.experts)
            call = lowlat.dispatch_and_check(ctx, buffer, ll_case.but(seed=turn), B, return_recv_hook=True)
            lowlat.combine_and_check(ctx, buffer, call, zero_copy=turn == 2)


@pytest.mark.parametrize("shape", ["2x2", "3x2"])
def test_both_modes_on_one_buffer(pool, shape):
    internode.run(pool, shape, rank_both_modes, case_of(shape), low_latency_case_of(shape))


def rank_traffic(ctx, case):
    """What crosses: a row for each token and node, between ranks of the same index; statistics count it."""
    peers, row = cases.node_size(), case.hidden * 2
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        combined, _, _ = normal.combine(ctx, buffer, exchange)
        if combined.is_cuda:  # a rank without tokens has waited for nothing yet
            torch.cuda.synchronize()
        sent = {name: buffer.stats()[name]["bytes_to_peer"] for name in ("dispatch", "combine")}
        per_node = [layout.num_tokens_per_rdma_rank.tolist() for layout in exchange.layouts]
    own = ctx.rank // peers
    for peer in range(ctx.size):
        if peer // peers == own:
            continue
        crosses = peer % peers == ctx.rank % peers
        assert sent["dispatch"][peer] == per_node[ctx.rank][peer // peers] * row * crosses, f"to {peer}: {sent}"
        assert sent["combine"][peer] == per_node[peer][own] * row * crosses, f"to {peer}: {sent}"


@pytest.mark.parametrize("shape", ["2x4", "3x2", "2x2"])
def test_a_token_crosses_once_for_each_node(pool, shape):
    internode.run(pool, shape, rank_traffic, case_of(shape, topk=8))


def rank_small_region(ctx, case):
    """Too few num_rdma_bytes for a row: the error names how many it takes, and with so many all is right.

    Weights make a row longer: a combine with them is refused, and harms nothing.
    """
    with (
        normal.buffer_of(ctx, 1 << 22, 4096) as buffer,
        pytest.raises(ValueError, match="num_rdma_bytes = 4096") as caught,
    ):
        normal.dispatch(ctx, buffer, case)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    with normal.buffer_of(ctx, 1 << 22, least) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        if ctx.engine == "cpu":  # the least that the CUDA engine asks for has room for weights
            with pytest.raises(ValueError, match=f"num_rdma_bytes = {least}"):
                normal.combine(ctx, buffer, exchange, with_weights=True)
        normal.combine(ctx, buffer, exchange)


def test_smallest_region(pool):
    internode.run(pool, "2x2", rank_small_region, Case((40, 0, 13, 25), hidden=7168, experts=8, topk=4))


def rank_node_sizes(ctx, case):
    """A handle is data: what one node size dispatched, another one combines, and dispatches again."""
    sizes = (1, 2, ctx.size)
    with (
        normal.buffer_of(ctx, num_nvl_peers=1) as one,
        normal.buffer_of(ctx, num_nvl_peers=2) as two,
        normal.buffer_of(ctx, num_nvl_peers=ctx.size) as whole,
    ):
        buffers = dict(zip(sizes, (one, two, whole), strict=True))
        for made_by in sizes:
            with internode.environment(**{cases.NODE_SIZE: made_by}):
                exchange = normal.dispatch_and_check(ctx, buffers[made_by], case)
            for used_by in sizes:
                with internode.environment(**{cases.NODE_SIZE: used_by}):
                    normal.combine(ctx, buffers[used_by], exchange, with_weights=True)
                again, *_ = buffers[used_by].dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle)
                checks.same_rows("recv_x", again, exchange.want.x)


def test_handle_serves_other_node_sizes(pool):
    internode.run(pool, "2x2", rank_node_sizes, case_of("2x2"))
