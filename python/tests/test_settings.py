"""Settings and options as users type them: what refuses, what is warned of, and that a fix that is named works."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist

import lowlat
import normal
from cases import Case

LL_CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
GUIDES = {"NVSHMEM_IBGDA_QP_DEPTH": "1024", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "2048"}


class Log:
    """The lines that a user sees by default, of the groups that are made inside."""

    def __init__(self, ctx, folder: str, level: str = "warn") -> None:
        self.path = os.path.join(folder, f"log-{level}-{ctx.rank}")
        self.level = level

    def __enter__(self) -> Log:
        os.environ["DEEPEP_LOG"] = f"{self.level}:{self.path}"
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ["DEEPEP_LOG"]

    def lines(self, about: str = "") -> list[str]:
        if not os.path.exists(self.path):
            return []
        with open(self.path) as file:
            return [line for line in file if about in line]


def make(ctx, **options):
    with normal.buffer_of(ctx, **options) as buffer:
        return buffer


def rank_exports_of_the_guides(ctx, folder):
    os.environ.update(GUIDES)
    try:
        with normal.buffer_of(ctx, num_nvl_peers=ctx.size) as buffer:  # one node: no queue pair
            buffer.barrier()
        with Log(ctx, folder) as log:
            for _ in range(4):
                with pytest.raises(ValueError, match="at least 8192 with DEEP_EP_NUM_MAX_RDMA_TOKENS=2048") as caught:
                    make(ctx, num_nvl_peers=1)
                dist.barrier(ctx.group)
            assert log.lines() == [], log.lines()
            fix = re.search(r"fix: export (\w+)=(\w+)$", str(caught.value))
            assert fix, caught.value
            os.environ[fix[1]] = fix[2]
            with normal.buffer_of(ctx, num_nvl_peers=1):
                pass
            del os.environ[fix[1]]
    finally:
        for name in GUIDES:
            del os.environ[name]


def test_exports_of_the_guides(pool, tmp_path):
    pool.run(4, rank_exports_of_the_guides, str(tmp_path))


def rank_sub_team(ctx):
    with normal.buffer_of(ctx, num_nvl_peers=2) as buffer:
        assert buffer.rdma_team == [ctx.rank % 2, ctx.rank % 2 + 2]
        buffer.rdma_team.clear()
        assert len(buffer.rdma_team) == buffer.num_nodes == 2
    with normal.buffer_of(ctx, num_nvl_peers=1) as buffer:
        assert buffer.rdma_team == [0, 1, 2, 3]
    with normal.buffer_of(ctx, num_nvl_peers=4) as buffer:
        assert buffer.rdma_team == [ctx.rank]


def test_sub_team(pool):
    pool.run(4, rank_sub_team)


def test_sub_team_in_a_plan():
    from deep_ep import plan

    assert plan(16, rank=11, num_nvl_peers=8, engine="cpu").rdma_team == [3, 11]
    assert plan(8, rank=5, num_nvl_peers=8, engine="cpu").rdma_team == [5]


def rank_orders(ctx, folder):
    from deep_ep import DeepEPError

    for order in ("linear", "planned", "rotated", "spread", "auto"):
        os.environ["DEEPEP_QP_ORDER"] = order
        try:
            with Log(ctx, folder, "info") as log, lowlat.buffer_of(ctx, LL_CASE, 16, num_nvl_peers=2) as buffer:
                lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, LL_CASE, 16))
            if ctx.engine == "cpu":
                assert log.lines(f"made in the order {'spread' if order == 'auto' else order}"), log.lines()
            else:
                assert order in ("auto", "rotated"), f"{order} was not refused"
        except DeepEPError as error:
            assert ctx.engine != "cpu" and order not in ("auto", "rotated"), error
            assert f'DEEPEP_QP_ORDER: got "{order}", allowed auto or rotated' in str(error), error
        finally:
            del os.environ["DEEPEP_QP_ORDER"]


def test_orders_of_queue_pairs(pool, tmp_path):
    pool.run(4, rank_orders, str(tmp_path))


def rank_options(ctx, folder):
    """Options without effect are warned of once, and only where they ask for something."""
    import warnings

    from deep_ep import Buffer, Config

    with Log(ctx, folder) as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens = torch.zeros(4, 2, dtype=torch.int64, device=ctx.device)
        with normal.buffer_of(ctx, num_nvl_peers=ctx.size) as buffer:
            for _ in range(2):
                buffer.get_dispatch_layout(tokens, 8)
        assert log.lines() == [] and caught == []
        for _ in range(2):
            options = {"num_nvl_peers": ctx.size, "allow_mnnvl": True, "zero_copy_bytes": 1 << 20}
            with lowlat.buffer_of(ctx, LL_CASE, 16, num_nvl_bytes=1 << 22, **options) as buffer:
                x = torch.zeros(3, 512, dtype=torch.bfloat16, device=ctx.device)
                buffer.low_latency_dispatch(x, tokens[:3], 16, 8, opt_level=2)
                if ctx.engine == "cpu":
                    config = Config(34, 7, 99, 5, 50)
                    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(tokens, 8)
                    rows = torch.zeros(4, 64, dtype=torch.bfloat16)
                    buffer.dispatch(rows, None, per_rank, None, in_rank, per_expert, config=config)
    assert Buffer.num_sms == 20
    if ctx.engine == "cpu":
        said = [line for line in log.lines() if "no effect" in line]
        assert len(said) == 2 and "allow_mnnvl" in said[0] and "num_sms = 34" in said[1], said
        assert sorted(str(one.message).split()[0] for one in caught) == ["opt_level", "zero_copy_bytes"]


def test_options_without_effect(pool, tmp_path):
    pool.stop()  # a process warns once
    pool.run(2, rank_options, str(tmp_path))


def rank_transfers(ctx, folder):
    """DEEPEP_LL_TRANSFER: halves give the same; the CPU engine says that it changes nothing; ranks agree."""
    for how in ("copy", "stream"):
        check_transfer(ctx, folder, how)


def check_transfer(ctx, folder, how):
    """One way."""
    from deep_ep import DeepEPError

    os.environ["DEEPEP_LL_TRANSFER"] = how
    try:
        with Log(ctx, folder) as log, lowlat.buffer_of(ctx, LL_CASE, 16, num_nvl_peers=ctx.size) as buffer:
            assert buffer.ll_transfer == ("sm" if ctx.engine == "cpu" else how)
            for _ in range(3):
                for halves in (True, False):
                    call = lowlat.dispatch_and_check(ctx, buffer, LL_CASE, 16, return_recv_hook=halves)
                    lowlat.combine_and_check(ctx, buffer, call, return_recv_hook=halves)
        said = log.lines(f"DEEPEP_LL_TRANSFER={how} changes nothing")
        assert len(said) == (1 if ctx.engine == "cpu" else 0), log.lines()
        if ctx.engine != "cpu":
            os.environ["DEEPEP_LL_TRANSFER"] = how if ctx.rank == 0 else "sm"
            with pytest.raises(DeepEPError, match="ranks disagree on .*DEEPEP_LL_TRANSFER"):
                lowlat.buffer_of(ctx, LL_CASE, 16, num_nvl_peers=ctx.size).__enter__()
    finally:
        del os.environ["DEEPEP_LL_TRANSFER"]


def test_transfers(pool, tmp_path):
    pool.run(4, rank_transfers, str(tmp_path))


def check_replays(ctx, buffer, x, exchange):
    """A cached dispatch in a graph, with new rows in each replay."""
    torch.cuda.synchronize()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = buffer.dispatch(x, handle=exchange.handle)[0]
    for factor in (1, -1, 0, 1):
        x.copy_(normal.x_of(ctx, exchange.own) * factor)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, exchange.recv_x * factor)


def rank_normal_transfers(ctx, folder):
    """DEEPEP_NORMAL_TRANSFER: the same rows, also in a graph; who has no copy engines says so; ranks agree."""
    from deep_ep import DeepEPError

    case = Case((40, 33, 0, 57), hidden=512, experts=8, topk=3)
    os.environ["DEEPEP_NORMAL_TRANSFER"] = "copy"
    try:
        with Log(ctx, folder) as log, normal.buffer_of(ctx) as buffer:
            assert buffer.normal_transfer == ("sm" if ctx.engine == "cpu" else "copy")
            for _ in range(3):
                exchange = normal.dispatch_and_check(ctx, buffer, case)
                x = normal.x_of(ctx, exchange.own)
                again = buffer.dispatch(x, handle=exchange.handle)[0]
                assert torch.equal(again, exchange.recv_x)
                if ctx.device.type == "cuda":
                    check_replays(ctx, buffer, x, exchange)
                normal.combine(ctx, buffer, exchange)
            if ctx.engine != "cpu":
                with pytest.raises(DeepEPError, match="graphs hold copies of rows"):
                    buffer.release()
        assert len(log.lines("DEEPEP_NORMAL_TRANSFER=copy changes nothing")) == (1 if ctx.engine == "cpu" else 0), (
            log.lines()
        )
        if ctx.engine != "cpu":
            os.environ["DEEPEP_NORMAL_TRANSFER"] = "copy" if ctx.rank == 0 else "sm"
            with pytest.raises(DeepEPError, match="ranks disagree on .*DEEPEP_NORMAL_TRANSFER"):
                normal.buffer_of(ctx).__enter__()
    finally:
        del os.environ["DEEPEP_NORMAL_TRANSFER"]


def test_normal_transfers(pool, tmp_path):
    pool.stop()  # a process warns once
    pool.run(4, rank_normal_transfers, str(tmp_path))
