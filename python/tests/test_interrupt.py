"""Ctrl-C while a call waits for ranks that do not come: KeyboardInterrupt soon, and destroy works."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import victims

INTERRUPTED = 0.3  # seconds from the signal to the exception


def interrupt_after(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def rank_interrupted(ctx, name):
    """Ctrl-C while the others do not come: KeyboardInterrupt soon, and destroy works."""
    with victims.operation(ctx, name) as (buffer, call):
        call()
        ctx.barrier()
        if ctx.rank == 0:
            interrupt_after(0.4)
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                call()
            took = time.monotonic() - start - 0.4
            assert victims.timed_destroy(buffer) < 2.5
            ctx.barrier()
            return took
        ctx.barrier()
        return 0.0


@pytest.mark.parametrize("name", [*victims.NORMAL, *victims.LOW_LATENCY])
def test_interrupt(pool, name):
    took = pool.run(4, rank_interrupted, name)[0]
    assert took < INTERRUPTED, f"KeyboardInterrupt came after {took:.2f} s"


def rank_interrupted_construction(ctx, folder):
    from deep_ep import Bootstrap, Buffer

    if ctx.rank:
        return 0.0
    interrupt_after(0.4)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Buffer(None, 1 << 20, engine=ctx.engine, bootstrap=Bootstrap.file(0, 2, folder))
    return time.monotonic() - start - 0.4


def test_interrupt_in_construction(pool, tmp_path):
    took = pool.run(2, rank_interrupted_construction, str(tmp_path))[0]
    assert took < INTERRUPTED, f"KeyboardInterrupt came after {took:.2f} s"
