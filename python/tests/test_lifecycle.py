"""Creating, using and destroying buffers, many times, from several threads, and being interrupted meanwhile."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

import lowlat
import normal
import victims
from cases import Case
from conftest import full

CASE = Case((30, 20, 0, 9), experts=8, topk=3, hidden=64)
LL_CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
CYCLES = 200 if full() else 20
INTERRUPTED = 0.3


def resources():
    """Descriptors, threads, mappings of shared memory and their files, all of this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        shared = [line for line in file if "memfd:" in line or "/dev/shm" in line or "(deleted)" in line]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": len(shared),
        "files in /dev/shm": len([name for name in os.listdir("/dev/shm") if "deepep" in name]),
        "kilobytes": rss(),
    }


def rss():
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(next(line for line in file if line.startswith("VmRSS")).split()[1])


def leaks(before, after):
    """What grew: nothing may, except a few runtime threads and what the allocator keeps."""
    allowed = {"threads": 4, "kilobytes": 40_000}
    return {k: (before[k], after[k]) for k in before if after[k] > before[k] + allowed.get(k, 0)}


def one_cycle(ctx, turn):
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE.but(seed=turn))
        normal.combine(ctx, buffer, exchange, with_weights=True, async_finish=bool(turn % 2))
    with lowlat.buffer_of(ctx, LL_CASE, 16) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, LL_CASE, 16, return_recv_hook=bool(turn % 2))
        lowlat.combine_and_check(ctx, buffer, call)


def rank_cycles(ctx, count):
    for turn in range(4):
        one_cycle(ctx, turn)
    before = resources()
    for turn in range(count):
        one_cycle(ctx, turn)
    settle(before)
    grown = leaks(before, resources())
    assert not grown, f"after {count} cycles: {grown}"


def settle(before):
    """Background threads may need a moment to close what they hold."""
    end = time.monotonic() + 3
    while leaks(before, resources()) and time.monotonic() < end:
        time.sleep(0.05)


def test_cycles_leak_nothing(pool):
    pool.run(4, rank_cycles, CYCLES, deadline=60 + 3 * CYCLES)


def rank_finalizer(ctx):
    """Without the flag the finalizer frees, also inside a reference cycle."""
    from deep_ep import Buffer

    one_cycle(ctx, 0)
    before = resources()
    for turn in range(6):
        buffer = Buffer(ctx.group, 1 << 22, engine=ctx.engine)
        normal.dispatch_and_check(ctx, buffer, CASE)
        if turn % 2:
            buffer.itself = buffer
        del buffer
    settle(before)
    grown = leaks(before, resources())
    assert not grown, f"{grown}"


def test_finalizer_frees(pool):
    pool.run(4, rank_finalizer)


def rank_two_buffers(ctx):
    """Two buffers of one group, their calls interleaved and asynchronous."""
    small, low_latency = normal.buffer_of(ctx, 1 << 22), lowlat.buffer_of(ctx, LL_CASE, 16)
    with normal.buffer_of(ctx) as one, small as two, low_latency as three:
        for turn in range(4):
            a = normal.dispatch(ctx, one, CASE.but(seed=turn), async_finish=True)
            b = normal.dispatch(ctx, two, CASE.but(seed=100 + turn, hidden=128), async_finish=True)
            c = lowlat.dispatch(ctx, three, LL_CASE.but(seed=turn), 16, return_recv_hook=True)
            b.event.current_stream_wait()
            normal.check(b)
            normal.combine(ctx, one, a, previous_event=a.event)
            normal.check(a)
            c.hook()
            lowlat.check(c)
            normal.combine(ctx, two, b)
            lowlat.combine_and_check(ctx, three, c)


def test_two_buffers_at_once(pool):
    pool.run(4, rank_two_buffers)


def in_threads(*functions):
    """Runs the functions at the same time; raises the first error."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def rank_threads(ctx):
    """A thread for each buffer, and other threads that ask the same buffers for layouts and statistics."""
    with normal.buffer_of(ctx) as one, lowlat.buffer_of(ctx, LL_CASE, 16) as two:

        def exchange():
            for turn in range(5):
                got = normal.dispatch_and_check(ctx, one, CASE.but(seed=turn))
                normal.combine(ctx, one, got)

        def low_latency():
            for turn in range(5):
                call = lowlat.dispatch_and_check(ctx, two, LL_CASE.but(seed=turn), 16)
                lowlat.combine_and_check(ctx, two, call)

        def ask():
            for _ in range(20):
                normal.layout_arguments(ctx, one, normal.expect(CASE, ctx.rank))
                assert one.stats()["layout"]["calls"] > 0 and two.get_comm_stream() is not None

        in_threads(exchange, low_latency, ask, ask)


def test_threads(pool):
    pool.run(4, rank_threads)


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
            lambda: buffer.get_dispatch_layout(ctx.put(idx), CASE.experts),
            lambda: buffer.combine(exchange.recv_x, exchange.handle),
            lambda: buffer.stats(),
            lambda: Config(),
            lambda: Buffer(None, 1 << 16, comm=victims.Comm(ctx), engine=ctx.engine),
        ):
            answer = in_child(ctx, call)
            assert "spawn" in answer and " 12 " in answer, answer
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
    """A background start: the constructor returns, ready tells, the first call waits for the rest."""
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


def rank_statistics(ctx):
    with normal.buffer_of(ctx) as buffer:
        for turn in range(3):
            normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE.but(seed=turn)))
        stats = buffer.stats()
        for name in ("layout", "dispatch", "combine"):
            assert stats[name]["calls"] == 3 and stats[name]["errors"] == 0, f"{name}: {stats[name]}"
        sent = stats["dispatch"]["bytes_to_peer"]
        assert len(sent) == ctx.size
        if CASE.tokens[ctx.rank]:
            assert sum(sent) == stats["dispatch"]["bytes"] > 0
        assert stats["combine"]["p50_us"] <= stats["combine"]["p99_us"] <= stats["combine"]["max_us"] * 1.3


def test_statistics(pool):
    pool.run(4, rank_statistics)
