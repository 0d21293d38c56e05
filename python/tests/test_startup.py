"""Settings, background start, pre-initialisation and warm-up."""

from __future__ import annotations

import os
import socket
import time

import pytest

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


def rank_background(ctx):
    """A background start: the constructor returns, ready() reports, the first call waits for the rest."""
    with normal.buffer_of(ctx, background=True, preinitialize=True) as buffer:
        assert buffer.ready() in (True, False)
        normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE))
        assert buffer.ready() and buffer.wait_ready(0.0)
    with normal.buffer_of(ctx, background=True) as buffer:
        assert buffer.wait_ready(20.0)
        normal.dispatch_and_check(ctx, buffer, CASE)
    with normal.buffer_of(ctx, background=True):
        pass  # destroyed before it was ready


def test_background_start(pool):
    pool.run(4, rank_background)


def rank_warmup(ctx):
    with lowlat.buffer_of(ctx, LL_CASE, 16, num_nvl_bytes=1 << 22, preinitialize=True) as buffer:
        buffer.warmup(num_tokens=32, hidden=512, num_topk=3, num_experts=8, num_max_dispatch_tokens_per_rank=16)
        lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, LL_CASE, 16))
        normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE.but(hidden=512)))


def test_warmup(pool):
    pool.run(4, rank_warmup)
