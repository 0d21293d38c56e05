"""CUDA graphs with a rank a node: calls captured once and replayed with new inputs; a node that is lost meanwhile."""

from __future__ import annotations

import pytest

import cases
import internode
import test_graphs
from test_failures import judge

SHAPE = "3x1" if cases.RANKS > 2 else "2x1"
REPLAYS = 300  # what goes through NVSHMEM's host side is slow

pytestmark = pytest.mark.usefixtures("nodes", "replays")
replays = test_graphs.replays


def test_normal_mode(pool):
    internode.run(pool, SHAPE, test_graphs.rank_normal, REPLAYS, deadline=60.0)


@pytest.mark.parametrize(("combines", "weights_known"), [(1, False), (2, False), (1, True)])
def test_low_latency(pool, combines, weights_known):
    internode.run(pool, SHAPE, test_graphs.rank_low_latency, REPLAYS, combines, weights_known, None, deadline=60.0)


@pytest.mark.parametrize("normal_mode", [True, False], ids=["normal", "low latency"])
def test_peer_lost_between_replays(fresh_pool, normal_mode):
    judge(internode.outcomes(fresh_pool(internode.ranks_of(SHAPE)), SHAPE, test_graphs.rank_lost, normal_mode))
