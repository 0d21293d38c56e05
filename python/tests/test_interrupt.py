"""Ctrl-C while a call waits for ranks that do not come: KeyboardInterrupt soon, and destroy works."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from unittest import mock

import pytest

import normal
import victims
from cases import Case

INTERRUPTED = 0.3  # seconds from the signal to the exception


def interrupt_after(seconds):
    """The list that is returned gets the time of the signal."""
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(seconds, interrupt).start()
    return sent


def rank_interrupted(ctx, name):
    """Ctrl-C while the others do not come: KeyboardInterrupt soon, and destroy works."""
    with victims.operation(ctx, name) as (buffer, call):
        call()
        ctx.barrier()
        if ctx.rank == 0:
            sent = interrupt_after(0.4)
            with pytest.raises(KeyboardInterrupt):
                call()
            took = time.monotonic() - sent[0]
            assert victims.timed_destroy(buffer) < 2.5
            ctx.barrier()
            return took
        ctx.barrier()
        return 0.0


@pytest.mark.parametrize("name", [*victims.NORMAL, *victims.LOW_LATENCY])
def test_interrupt(pool, name):
    took = pool.run(4, rank_interrupted, name)[0]
    assert took < INTERRUPTED, f"KeyboardInterrupt came after {took:.2f} s"


def rank_kept_until_passed(ctx):
    """The tensors of an interrupted wait are kept while the notify may write to them, and not longer."""
    case = Case((12,), experts=8, topk=3, hidden=512)
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        core = buffer._core
        for turn in range(3):
            interrupted = mock.patch.object(core.native, "wait_counts", side_effect=KeyboardInterrupt)
            with interrupted, pytest.raises(KeyboardInterrupt):
                normal.dispatch(ctx, buffer, case)
            assert len(core.kept) == 1, f"turn {turn}: {len(core.kept)} kept"
            seen = weakref.ref(next(iter(core.kept.values()))[3])  # the matrix that notify fills
            assert seen() is not None
            end = time.monotonic() + 5
            while core.kept and time.monotonic() < end:
                core.enter()
            assert not core.kept and seen() is None
        normal.combine(ctx, buffer, exchange)


def test_kept_until_passed(pool):
    pool.run(1, rank_kept_until_passed)


def rank_kept_until_destroyed(ctx):
    """The other ranks never come: destroy() lets go."""
    with victims.operation(ctx, "dispatch") as (buffer, call):
        call()
        ctx.barrier()
        if ctx.rank == 0:
            interrupt_after(0.2)
            with pytest.raises(KeyboardInterrupt):
                call()
            seen = weakref.ref(next(iter(buffer._core.kept.values()))[3])
            buffer.destroy()
            assert not buffer._core.kept and seen() is None
        ctx.barrier()


def test_kept_until_destroyed(pool):
    pool.run(4, rank_kept_until_destroyed)


def rank_interrupted_construction(ctx, folder):
    from deep_ep import Bootstrap, Buffer

    if ctx.rank:
        return 0.0
    sent = interrupt_after(0.4)
    with pytest.raises(KeyboardInterrupt):
        Buffer(None, 1 << 20, engine=ctx.engine, bootstrap=Bootstrap.file(0, 2, folder))
    return time.monotonic() - sent[0]


def test_interrupt_in_construction(pool, tmp_path):
    took = pool.run(2, rank_interrupted_construction, str(tmp_path))[0]
    assert took < INTERRUPTED, f"KeyboardInterrupt came after {took:.2f} s"
