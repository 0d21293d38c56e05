"""Children that are forked beside a buffer: a clear error where they use it, no harm where they do not."""

from __future__ import annotations

import multiprocessing
import os

import torch

import normal
import victims
from cases import Case

CASE = Case((30, 20, 0, 9), experts=8, topk=3, hidden=64)


def in_child(ctx, function):
    """Runs ``function`` in a forked child; returns what it raised or answered, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(function())
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            answer = f"{type(error).__name__} {getattr(error, 'status', '')} {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        answer = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return answer


def rank_fork(ctx):
    """A child that was forked after use gets a clear error from every call and exits; its parent goes on."""
    from deep_ep import Buffer, Config

    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        idx = exchange.own.topk_idx
        for call in (
            lambda: buffer.get_dispatch_layout(ctx.to_device(idx), CASE.experts),
            lambda: buffer.combine(exchange.recv_x, exchange.handle),
            lambda: buffer.stats(),
            lambda: Config(),
            lambda: Buffer(None, 1 << 16, comm=victims.Comm(ctx), engine=ctx.engine),
        ):
            answer = in_child(ctx, call)
            assert "spawn" in answer and " 12 " in answer, answer
        assert in_child(ctx, lambda: [buffer.ready(), buffer.runtime.is_available()]) == "[False, False]"
        assert buffer.ready() and buffer.runtime.is_available()
        assert in_child(ctx, buffer.destroy) == "None"
        assert in_child(ctx, lambda: torch.ones(3).sum().item()) == "3.0"
        normal.combine(ctx, buffer, exchange)


def test_fork_after_use(pool):
    pool.run(4, rank_fork)


def load_batches(queue):
    """What a DataLoader's worker does: torch on the CPU, results through a queue, a normal exit."""
    for batch in torch.arange(8).split(4):
        queue.put((batch * 2).tolist())


def rank_loaders(ctx):
    """Workers that are forked beside a buffer and never touch it work, exit and leave it alone."""
    fork = multiprocessing.get_context("fork")
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        queue = fork.Queue()
        workers = [fork.Process(target=load_batches, args=(queue,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        batches = sorted(queue.get(timeout=30) for _ in range(4))
        for worker in workers:
            worker.join(30)
        assert batches == [[0, 2, 4, 6]] * 2 + [[8, 10, 12, 14]] * 2
        assert [worker.exitcode for worker in workers] == [0, 0]
        normal.combine(ctx, buffer, exchange)


def test_data_loaders_beside_a_buffer(pool):
    pool.run(4, rank_loaders)
