"""V2 over several nodes, on the CPU engine's software RDMA: hybrid and direct mode, bit for bit as on one node."""

from __future__ import annotations

import pytest

import cases
import elastic
import internode
from cases import Case
from conftest import test_device

pytestmark = pytest.mark.skipif(test_device() != "cpu", reason="handles with a routing serve one node on GPUs")

CASES = (
    Case((9, 0, 14, 5), experts=8, topk=4, hidden=64, routing="holes", seed=0),
    Case((6, 11, 3, 8), experts=16, topk=6, hidden=520, routing="random", alignment=4, seed=1),
    Case((7, 7, 7, 7), experts=8, topk=3, hidden=128, kind="fp8", num_scales=4, seed=2),
)
MODES = ((True, True), (False, True), (True, False), (False, False))  # hybrid, multiple reduction


def rank_cases(ctx, some, modes):
    for case in some:
        exchange = elastic.expect(case, 32)
        for hybrid, multiple in modes:
            options = {"allow_hybrid_mode": hybrid, "allow_multiple_reduction": multiple}
            with elastic.buffer_of(ctx, 32, case.hidden, **options) as buffer:
                nodes = buffer.num_rdma_ranks
                assert nodes > 1 and buffer.get_logical_domain_size()[0] == (nodes if hybrid else 1)
                for expand in (False, True):
                    for sync in (False, True):
                        elastic.round_trip(ctx, buffer, case, exchange, expand=expand, sync=sync)
                    call = elastic.dispatch(ctx, buffer, exchange, case, expand=expand)
                    assert len(call.handle.psum_num_recv_tokens_per_scaleup_rank) == buffer.num_scaleup_ranks
                    elastic.combine(ctx, buffer, call, biases=2, weights=True, seed=3, unreduced=not multiple)


@pytest.mark.skipif(cases.RANKS < 4, reason="needs 4 ranks")
@pytest.mark.parametrize(
    ("shape", "some", "modes"), [("2x2", CASES[:2], MODES), ("4x1", CASES[2:], MODES[:2])], ids=["2x2", "4x1"]
)
def test_cases(pool, shape, some, modes):
    internode.run(pool, shape, rank_cases, some, modes, seed=1, deadline=120)
