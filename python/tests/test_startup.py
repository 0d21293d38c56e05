"""Settings, background start, pre-initialisation and warm-up."""

from __future__ import annotations

import os
import resource
import socket
import time

import pytest
import torch
import torch.distributed as dist

import lowlat
import normal
import victims
from cases import Case

CASE = Case((30, 20, 0, 9), experts=8, topk=3, hidden=64)
LL_CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_bootstrap(ctx, kind, place):
    """No torch group at all: ranks meet at an address, in a folder, or where the environment names."""
    from deep_ep import Bootstrap, Buffer

    if kind == "file":
        where = Bootstrap.file(ctx.rank, ctx.size, place)
    elif kind == "tcp":
        where = Bootstrap.tcp(ctx.rank, ctx.size, f"127.0.0.1:{place}")
    else:
        settings = {"RANK": ctx.rank, "WORLD_SIZE": ctx.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place}
        os.environ.update({name: str(value) for name, value in settings.items()})
        try:
            where = Bootstrap.from_env()
        finally:
            for name in settings:
                del os.environ[name]
    buffer = Buffer(None, 1 << 20, 1 << 20, bootstrap=where, engine=ctx.engine, explicitly_destroy=True)
    normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE))
    buffer.destroy()


@pytest.mark.parametrize("kind", ["file", "tcp", "environment"])
def test_bootstraps(pool, tmp_path, kind):
    pool.run(4, rank_bootstrap, kind, str(tmp_path) if kind == "file" else free_port())


def test_bootstrap_arguments(monkeypatch):
    from deep_ep import Bootstrap

    with pytest.raises(ValueError, match="rank"):
        Bootstrap.file(4, 4, "/tmp")
    with pytest.raises(ValueError, match="size"):
        Bootstrap.tcp(0, 0, "127.0.0.1:1")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        Bootstrap.from_env()


def rank_settings(ctx):
    """Variables that Python sets after start count."""
    from deep_ep import Buffer, DeepEPError

    os.environ["DEEPEP_TIMEOUT_MS"] = "700"
    os.environ["DEEPEP_FIRST_TIMEOUT_MS"] = "700"
    try:
        with normal.buffer_of(ctx) as buffer:
            exchange = normal.dispatch_and_check(ctx, buffer, CASE)
            ctx.barrier()
            if ctx.rank != 1:
                start = time.monotonic()
                with pytest.raises(DeepEPError, match="late"):
                    victims.settled(ctx, buffer, lambda: buffer.combine(exchange.recv_x, exchange.handle))()
                assert 0.6 < time.monotonic() - start < 2.0
            ctx.barrier()
    finally:
        del os.environ["DEEPEP_TIMEOUT_MS"], os.environ["DEEPEP_FIRST_TIMEOUT_MS"]
    os.environ["DEEPEP_ENGINE"] = "abacus"
    try:
        with pytest.raises(ValueError, match="(?s)DEEPEP_ENGINE.*abacus|abacus.*DEEPEP_ENGINE"):
            Buffer(ctx.group, 1 << 16)
    finally:
        del os.environ["DEEPEP_ENGINE"]


def test_settings_from_python(pool):
    pool.run(4, rank_settings)


class HeldBack:
    """A communicator over the rank's group. On rank 1 it returns from its first exchange only once `flag` exists."""

    def __init__(self, ctx, flag):
        self.ctx, self.flag = ctx, flag

    def Get_rank(self):  # noqa: N802 - mpi4py's names
        return self.ctx.rank

    def Get_size(self):  # noqa: N802
        return self.ctx.size

    def allgather(self, blob):
        blobs = [None] * self.ctx.size
        dist.all_gather_object(blobs, blob, group=self.ctx.group)
        end = time.monotonic() + 5  # a constructor that waits for the start would wait for this rank
        while self.ctx.rank == 1 and not os.path.exists(self.flag) and time.monotonic() < end:
            time.sleep(0.01)
        return blobs


def rank_background(ctx, flag):
    """A background start: the constructor returns while another rank has not begun; the first call waits for it."""
    from deep_ep import Buffer

    options = {"background": True, "preinitialize": True, "engine": ctx.engine, "explicitly_destroy": True}
    buffer = Buffer(None, 1 << 24, normal.RDMA_BYTES, comm=HeldBack(ctx, flag), **options)
    if ctx.rank == 0:
        assert not buffer.ready() and not buffer.wait_ready(0.02), "ready before rank 1 has begun"
        with open(flag, "w"):
            pass
    normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE))
    assert buffer.ready() and buffer.wait_ready(0.0)
    buffer.destroy()
    with normal.buffer_of(ctx, background=True) as buffer:
        assert buffer.wait_ready(20.0)
        normal.dispatch_and_check(ctx, buffer, CASE)
    with normal.buffer_of(ctx, background=True):
        pass  # destroyed before it was ready


def test_background_start(pool, tmp_path):
    pool.run(4, rank_background, str(tmp_path / "begin"))


def rank_preinitialize(ctx):
    """Memory is brought in, as much as the setting says, and none without the option."""
    for option, setting, least, most in (
        (False, None, 0, 0),
        (True, None, 4 << 20, 256 << 20),
        (True, 1 << 20, 1 << 19, 1 << 20),
    ):
        if setting is not None:
            os.environ["DEEPEP_PREINIT_BYTES"] = str(setting)
        try:
            before = page_faults()
            with normal.buffer_of(ctx, 1 << 24, preinitialize=option) as buffer:
                report = buffer.startup_report()
                assert report["preinitialized"] == option
                found = report["construction"]
                assert found["load_ms"] > 0 and found["memory_ms"] > 0 and found["connect_ms"] > 0
                if ctx.engine == "cpu":
                    assert least <= found["bytes"] <= most, found
                    assert page_faults() - before >= least // 4096 and found["page_faults"] >= least // 4096
                else:  # the regions, whatever the setting
                    assert (found["bytes"] > 0) == option
        finally:
            os.environ.pop("DEEPEP_PREINIT_BYTES", None)


def test_preinitialize(pool):
    pool.run(2, rank_preinitialize)


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def calls_of(buffer):
    return {name: found["calls"] for name, found in buffer.stats().items()}


NORMAL_CALLS = ("layout", "notify", "dispatch", "combine")
LOW_LATENCY_CALLS = ("low_latency_dispatch", "low_latency_combine")


def rank_warmup_without_shape(ctx):
    """``warmup()`` as users type it: every mode that the buffer allows makes calls, in the library and in Python."""
    shape = {"num_tokens": 24, "hidden": 512, "num_topk": 3, "num_experts": 8}
    for modes in ("normal", "low latency", "both"):
        for told in ({}, shape):
            options = {"num_nvl_bytes": 0 if modes == "low latency" else 1 << 22, "preinitialize": True, **told}
            make = (
                normal.buffer_of(ctx, **options) if modes == "normal" else lowlat.buffer_of(ctx, LL_CASE, 32, **options)
            )
            with make as buffer:
                report = buffer.warmup()
                calls = calls_of(buffer)
                for name in NORMAL_CALLS:
                    assert (calls[name] >= 3) == (modes != "low latency"), (modes, calls)  # the library's and Python's
                for name in LOW_LATENCY_CALLS:
                    assert (calls[name] >= 6) == (modes != "normal"), (modes, calls)
                assert (report["shape"] is not None) == (modes != "low latency")
                assert (report["low_latency_shape"] is not None) == (modes != "normal")
                for found in (report["shape"], report["low_latency_shape"]):
                    assert found is None or not told or found == {**shape, "from": "constructor"}, found
                assert report["num_warmups"] == 1 and report["warmup"]["launch_ms"] > 0, report
                assert report["warmup"]["python_ms"] > 0 and not report["operations"], report
                if modes != "low latency":
                    normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE.but(hidden=512)))
                if modes != "normal":
                    case = LL_CASE
                    lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, case, 32))
                first = buffer.startup_report()["operations"]
                assert ctx.engine != "cpu" or first, "the first calls are reported"


def test_warmup_without_shape(pool):
    pool.run(4, rank_warmup_without_shape)


def rank_warmup_by_hints(ctx):
    """A size hint that was asked for tells the shape, also where other hints were asked for before and after."""
    from deep_ep import Buffer

    hint = Buffer.get_low_latency_rdma_size_hint
    hint(8, 256, ctx.size, 8), hint(48, 2048, ctx.size, 8)
    wanted = hint(40, 1024, ctx.size, 12)
    hint(16, 512, ctx.size, 8), hint(40, 1024, 2 * ctx.size, 16)
    with normal.buffer_of(ctx, 0, wanted, low_latency_mode=True, num_qps_per_rank=3) as buffer:
        found = buffer.warmup()["low_latency_shape"]
        assert (found["num_tokens"], found["hidden"], found["num_experts"]) == (40, 1024, 12), found


def test_warmup_by_hints(pool):
    pool.run(4, rank_warmup_by_hints)


def first_calls_faults(ctx, warm, low_latency):
    """Page faults of the first call of a new buffer."""
    from deep_ep import Buffer

    tokens, hidden, topk, experts = 192, 2048, 4, 16
    x = torch.zeros((tokens, hidden), dtype=torch.bfloat16)
    topk_idx = torch.rand((tokens, experts)).topk(topk, 1).indices
    weights = torch.ones((tokens, topk))
    rows = torch.zeros((experts // ctx.size, ctx.size * tokens, hidden), dtype=torch.bfloat16) if low_latency else None
    nvl, rdma = 0 if low_latency else 1 << 24, 0
    if low_latency:
        rdma = Buffer.get_low_latency_rdma_size_hint(tokens, hidden, ctx.size, experts)
    with normal.buffer_of(ctx, nvl, rdma, low_latency_mode=low_latency, num_qps_per_rank=4) as buffer:
        if warm is not None:
            buffer.warmup(**warm)
        ctx.barrier()
        before = page_faults()
        if low_latency:
            _, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, tokens, experts)
            buffer.low_latency_combine(rows, topk_idx, weights, handle)
        else:
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, experts)
            received, _, _, _, handle, _ = buffer.dispatch(
                x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert, topk_idx=topk_idx, topk_weights=weights,
            )  # fmt: skip
            buffer.combine(received, handle)
        found = page_faults() - before
        ctx.barrier()
        return found


def rank_warm_memory(ctx):
    """What a first call brings in: next to nothing after a warm-up, whether or not it was told the shape."""
    common = {"hidden": 2048, "num_topk": 4, "num_experts": 16}
    for low_latency in (False, True):
        tokens = "num_max_dispatch_tokens_per_rank" if low_latency else "num_tokens"
        plain = first_calls_faults(ctx, None, low_latency)
        for warm in ({tokens: 192, **common}, {"max_seconds": 8.0}):  # more than the usual 2, beside other work
            warmed = first_calls_faults(ctx, warm, low_latency)
            assert warmed * 5 < plain, (low_latency, warm, warmed, plain)


def test_first_call_finds_its_memory(pool, device):
    if device != "cpu":
        pytest.skip("needs the CPU engine, where new memory is page faults of the call")
    pool.run(2, rank_warm_memory)


def rank_warmup(ctx):
    with lowlat.buffer_of(ctx, LL_CASE, 16, num_nvl_bytes=1 << 22, preinitialize=True) as buffer:
        for _ in range(2):
            given = {"hidden": 512, "num_topk": 3, "num_experts": 8}
            report = buffer.warmup(num_tokens=32, num_max_dispatch_tokens_per_rank=16, **given)
        assert report["shape"] == {"num_tokens": 32, **given, "from": "given"}
        assert report["low_latency_shape"] == {"num_tokens": 16, **given, "from": "given"}
        assert report["num_warmups"] == 2
        alone = buffer.warmup(num_tokens=8, **given)
        assert alone["shape"]["num_tokens"] == 8 and alone["low_latency_shape"] is None
        lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, LL_CASE, 16))
        normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE.but(hidden=512)))
        for wrong, name in (
            ({"num_tokens": -1}, "num_tokens"), ({"hidden": 1.5}, "hidden"), ({"max_seconds": 0}, "max_seconds"),
            ({"max_bytes": 0}, "max_bytes"), ({"num_tokens": 8, "max_bytes": 1, **given}, "max_bytes"),
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError), match=name):
                buffer.warmup(**wrong)


def test_warmup(pool):
    pool.run(4, rank_warmup)


def test_constructor_refuses_shapes():
    from deep_ep import Bootstrap, Buffer

    with pytest.raises(ValueError, match="num_topk"):
        Buffer(None, 1 << 16, bootstrap=Bootstrap.file(0, 1, "/nowhere"), num_topk=-1)


def rank_disagree(ctx):
    from deep_ep import DeepEPError

    with normal.buffer_of(ctx, 1 << 22) as buffer:
        with pytest.raises(DeepEPError, match="disagree on the shapes of warmup"):
            buffer.warmup(num_tokens=8 + ctx.rank, hidden=64, num_topk=2, num_experts=8)
        buffer.warmup(num_tokens=8, hidden=64, num_topk=2, num_experts=8)


def test_ranks_that_warm_different_shapes(pool):
    pool.run(2, rank_disagree)


def rank_log(ctx, path):
    """The log (info) says what was done, and how long each part took."""
    os.environ["DEEPEP_LOG"] = f"info:{path}.{ctx.rank}"
    try:
        with normal.buffer_of(ctx, 1 << 22, preinitialize=True) as buffer:
            buffer.warmup()
        with open(f"{path}.{ctx.rank}") as log:
            text = log.read()
        assert "made: kernels" in text and "warmed up: kernels" in text, text
        assert "page faults" in text and "launches" in text and "calls of the language" in text, text
    finally:
        del os.environ["DEEPEP_LOG"]


def test_log_of_the_start(pool, tmp_path):
    pool.run(2, rank_log, str(tmp_path / "log"))
