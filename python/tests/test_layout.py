"""get_dispatch_layout: counts for ranks, nodes and experts, and the table of who gets what."""

from __future__ import annotations

import pytest
import torch

import cases
import checks
import normal
import reference


def rank_layout(ctx, case, peers):
    options = {} if peers is None else {"num_nvl_peers": peers}
    with normal.buffer_of(ctx, **options) as buffer:
        idx = ctx.to_device(cases.routing(case, ctx.rank))
        before = idx.clone()
        *got, event = buffer.get_dispatch_layout(idx, case.experts)
        checks.same_layout(got, reference.layout(before.cpu(), case.experts, ctx.size, peers or cases.node_size()))
        assert torch.equal(idx, before), "topk_idx was written to"
        assert event is not None and event.event is None, "no event without async_finish"


ROUTINGS = ["random", "holes", "duplicates", "skewed", "none", "hot", "hot_first", "few", "edges"]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_routings(pool, routing, dtype):
    case = cases.Case(tokens=(33, 0, 1, 64), experts=16, topk=5, routing=routing, index_dtype=dtype)
    pool.run(4, rank_layout, case, None)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_number_of_ranks(pool, ranks):
    tokens = tuple(17 * rank % 41 for rank in range(1, ranks + 1))
    pool.run(ranks, rank_layout, cases.Case(tokens, experts=3 * ranks, topk=3, routing="skewed"), None)


@pytest.mark.parametrize("topk", [1, 7, 9, 16])
def test_odd_topk(pool, topk):
    pool.run(2, rank_layout, cases.Case((50, 20), experts=256, topk=topk), None)


def test_many_tokens(pool):
    pool.run(4, rank_layout, cases.Case((4096, 1, 4096, 3000), experts=256, topk=8), None)


def rank_events(ctx, case):
    from deep_ep import Buffer

    with normal.buffer_of(ctx) as buffer:
        idx = ctx.to_device(cases.routing(case, ctx.rank))
        *got, event = buffer.get_dispatch_layout(
            idx, case.experts, previous_event=Buffer.capture(), async_finish=True, allocate_on_comm_stream=True
        )
        event.current_stream_wait()
        checks.same_layout(got, reference.layout(idx.cpu(), case.experts, ctx.size, cases.node_size()))


def test_async(pool):
    pool.run(2, rank_events, cases.Case((100, 10), experts=8, topk=3))


@pytest.mark.parametrize("ranks, peers", [(4, 2), (6, 3), (8, 2), (8, 4)])
def test_nodes(pool, nodes, ranks, peers):
    case = cases.Case(tuple(range(20, 20 + ranks)), experts=4 * ranks, topk=4, routing="holes")
    pool.run(ranks, rank_layout, case, peers)
