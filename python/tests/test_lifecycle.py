"""Creating, using and destroying buffers: many times, two at once, from several threads."""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch

import alone
import lowlat
import normal
import victims
from cases import Case
from conftest import full

CASE = Case((30, 20, 0, 9), experts=8, topk=3, hidden=64)
LL_CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
CYCLES = 200 if full() else 20


def resources():
    """Descriptors, threads, mappings of shared memory and their files, memory and addresses, all of this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        shared = [line for line in file if "memfd:" in line or "/dev/shm" in line or "(deleted)" in line]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": len(shared),
        "pages in /dev/shm": len(glob.glob(f"/dev/shm/deepep*/{os.getpid()}-*")),
        "kilobytes": rss(),
        "kilobytes of addresses": rss("VmSize"),
    }


def rss(field="VmRSS"):
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(next(line for line in file if line.startswith(field)).split()[1])


def leaks(before, after):
    """What grew: nothing may, except a few runtime threads and what the allocator keeps."""
    allowed = {"threads": 4, "kilobytes": 40_000, "kilobytes of addresses": 1 << 20}  # stacks, arenas of allocators
    if os.environ.get("DEEPEP_TEST_DEVICE") == "cuda":
        allowed["kilobytes of addresses"] = 1 << 40  # CUDA reserves as it likes
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


@pytest.mark.timeout(120 + 4 * CYCLES)
def test_cycles_leak_nothing(pool):
    pool.run(4, rank_cycles, CYCLES, deadline=60 + 3 * CYCLES)


def rank_finalizer(ctx):
    """Without the flag the finalizer frees, also inside a reference cycle."""
    from deep_ep import Buffer

    one_cycle(ctx, 0)
    before = resources()
    for turn in range(6):
        buffer = Buffer(ctx.group, 1 << 22, 1 << 20, engine=ctx.engine)
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


def in_threads(ctx, *functions):
    """Runs the functions at the same time; raises the first error. On a GPU each has a stream of its own.

    On one stream a thread's calls wait for another's, and nothing makes the order the same on every rank. What a first
    use on a stream loads or allocates comes before, one function after the other: docs/streams.md has the reason.
    """
    errors, on_gpu = [], ctx.device.type == "cuda"
    contexts = [torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext() for _ in functions]
    if on_gpu:
        for function, context in zip(functions, contexts, strict=True):
            with context:
                function()
            torch.cuda.synchronize()

    def guarded(function, context):
        try:
            with context:
                function()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=pair) for pair in zip(functions, contexts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if on_gpu:
        torch.cuda.synchronize()
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

        in_threads(ctx, exchange, low_latency, ask, ask)


def test_threads(fresh_pool):
    """With what threads need on a GPU (docs/streams.md), and other pools do not get: it makes contexts slow to make."""
    fresh_pool(4, settings={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}).run(4, rank_threads)


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


def rank_destroyed_from_another_thread(ctx):
    """destroy() while another thread waits: that thread gets an error, soon."""
    from deep_ep import DeepEPError

    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        rows = ctx.to_device(normal.expert_rows(exchange, True)[ctx.rank])
        ctx.barrier()
        if ctx.rank == 0:
            caught = []

            def wait():
                try:
                    buffer.combine(rows, exchange.handle)
                    if rows.is_cuda:  # the call has only been issued: the wait is on the stream
                        torch.cuda.synchronize()
                        buffer.get_comm_stream()
                except DeepEPError as error:
                    caught.append(str(error))

            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.2)
            took = victims.timed_destroy(buffer)
            thread.join(3)
            assert took < 2.5 and not thread.is_alive() and caught and "destroyed" in caught[0], (took, caught)
        ctx.barrier()


def test_destroy_from_another_thread(pool):
    pool.run(4, rank_destroyed_from_another_thread)


def rank_after_destroy(ctx):
    """Every call on a destroyed buffer says so, also a hook and an event of before."""
    from deep_ep import DeepEPError, errors

    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer)
        given = (calls.x, calls.idx, alone.BOUND, alone.EXPERTS)
        hook = buffer.low_latency_dispatch(*given, return_recv_hook=True)[4]
        assert buffer.ready() and buffer.check() is None
        buffer.destroy()
        assert not buffer.ready() and not buffer.runtime.is_available()
        refused = [calls.of(kind) for kind in alone.KINDS]
        refused += [hook, buffer.check, buffer.stats, buffer.wait_ready, buffer.get_comm_stream]
        refused += [lambda: buffer.get_local_buffer_tensor(torch.int8), lambda: buffer.warmup(num_tokens=1)]
        refused += [buffer.runtime.get_num_rdma_ranks]
        for call in refused:
            with pytest.raises(DeepEPError, match="the buffer is destroyed") as caught:
                call()
            assert caught.value.status == errors.INVALID_STATE


def test_after_destroy(pool):
    pool.run(1, rank_after_destroy)


def rank_last_reference(ctx, refused):
    """No cycle of ours has a buffer or a call's tensors: where the collector is off they would stay for ever."""
    from deep_ep import Buffer, DeepEPError

    rdma = Buffer.get_low_latency_rdma_size_hint(alone.BOUND, alone.HIDDEN, ctx.size, alone.EXPERTS * ctx.size)
    options = {"low_latency_mode": True, "num_qps_per_rank": alone.EXPERTS, "engine": ctx.engine}

    def wrong_calls(buffer, calls):
        """Refused in Python and by the library, in each mode."""
        sizes, indices = (alone.BOUND, alone.EXPERTS), calls.idx + alone.EXPERTS
        rows, _, weights, _, handle, _ = calls.dispatched
        received, _, low, _, _ = buffer.low_latency_dispatch(calls.x, calls.idx, *sizes, use_fp8=False)
        tensors = calls.x.float(), rows.float(), indices
        for call in (
            lambda: buffer.low_latency_dispatch(tensors[0], calls.idx, *sizes, use_fp8=False),
            lambda: buffer.low_latency_dispatch(calls.x, calls.idx, 1 << 20, alone.EXPERTS, use_fp8=False),
            lambda: buffer.combine(tensors[1], handle),
            lambda: buffer.get_dispatch_layout(calls.idx, alone.EXPERTS + 0.5),
            lambda: buffer.dispatch(calls.x[:1], handle=handle),
        ):
            with contextlib.suppress(DeepEPError):
                call()
                raise AssertionError("not refused")
        if ctx.device.type == "cpu":  # where the library reads the indices before it goes on
            for options in ({}, {"async_finish": True}):
                for call in (
                    lambda options=options: buffer.low_latency_dispatch(
                        calls.x, tensors[2], *sizes, use_fp8=False, **options
                    ),
                    lambda options=options: buffer.low_latency_combine(
                        received, tensors[2], calls.weights, low, **options
                    ),
                ):
                    with contextlib.suppress(DeepEPError):
                        alone.finish(*call()[-2:])
                        raise AssertionError("not refused")
        return [weakref.ref(tensor) for tensor in tensors]

    def made(compiled, kind):
        buffer = Buffer(ctx.group, 1 << 22, rdma, **options)
        buffer._core.compiled = compiled
        calls = alone.Calls(buffer)
        for _ in range(3):
            calls.of(kind)()
        gone = wrong_calls(buffer, calls) if refused else []
        return [weakref.ref(buffer._core), *gone]

    gc.collect()
    gc.disable()
    try:
        for compiled in (True, False):
            for kind in alone.KINDS:
                left = [one() for one in made(compiled, kind)]
                assert left == [None] * len(left), (compiled, kind, left)
    finally:
        gc.enable()


@pytest.mark.parametrize("refused", (False, True), ids=("calls", "refused calls"))
def test_nothing_waits_for_the_collector(pool, refused):
    pool.run(1, rank_last_reference, refused)


def rank_event_in_a_cycle(ctx):
    """The collector finalizes an event and what it holds in any order; later calls have events of their own."""
    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer)
        for _ in range(20):
            given = (calls.x, calls.idx, alone.BOUND, alone.EXPERTS)
            events = [buffer.low_latency_dispatch(*given, async_finish=True)[3]]
            events.append(buffer.combine(calls.x, calls.dispatched[4], async_finish=True)[2])
            for event in events:
                event.current_stream_wait()
            events.append(events)
            del event, events
            gc.collect()
            for kind in alone.KINDS:
                calls.of(kind)()


def test_event_in_a_cycle(pool):
    pool.run(1, rank_event_in_a_cycle)


def rank_hook_after_clean(ctx):
    from deep_ep import DeepEPError, errors

    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer)
        hook = buffer.low_latency_dispatch(calls.x, calls.idx, alone.BOUND, alone.EXPERTS, return_recv_hook=True)[4]
        calls.clean()
        with pytest.raises(DeepEPError, match="clean_low_latency_buffer") as caught:
            hook()
        assert caught.value.status == errors.INVALID_STATE
        calls.low_latency()


def test_hook_after_clean(pool):
    pool.run(1, rank_hook_after_clean)


def rank_view_after_destroy(ctx):
    """Memory that a view still shows is gone, its addresses are not: reads give zeros, writes go nowhere."""
    views = []
    for _ in range(3):
        with normal.buffer_of(ctx) as buffer:
            view = buffer.get_local_buffer_tensor(torch.int32)
            view.fill_(7)
            buffer.destroy()
            assert not view.any()
            view[::1024] = 5
            views.append(view)
    assert all(int(view[0]) == 5 for view in views)  # no memory of another buffer


def test_view_after_destroy(pool, device):
    if device != "cpu":
        pytest.skip("on GPUs a kernel that uses such a view fails its context")
    pool.run(2, rank_view_after_destroy)


def rank_failures(ctx, count):
    """Refused calls, hooks that nobody calls, starts in which ranks disagree."""
    from deep_ep import Buffer, DeepEPError

    case = Case((8,) * ctx.size, experts=8, topk=2, hidden=256)

    def refused(call):
        with pytest.raises(DeepEPError):
            call()

    with normal.buffer_of(ctx) as other, lowlat.buffer_of(ctx, case, 8) as buffer:
        exchange = normal.dispatch_and_check(ctx, other, case)
        x = ctx.to_device(torch.ones(8, 256, dtype=torch.bfloat16))
        idx = ctx.to_device((torch.arange(16).reshape(8, 2) % 8).to(torch.int64))
        few = exchange.recv_x[:-1]

        def send():
            return buffer.low_latency_dispatch(x, idx, 8, 8, use_fp8=False, return_recv_hook=True)

        def turn():
            refused(lambda: other.combine(few, exchange.handle))
            send(), send()
            refused(send)
            buffer.clean_low_latency_buffer(8, 256, 8)

        def start():
            refused(lambda: Buffer(ctx.group, (1 + ctx.rank) << 22, 0, engine=ctx.engine))

        turn(), start()
        before = resources()
        for number in range(count):
            turn()
            if number % 10 == 0:
                start()
        settle(before)
        grown = leaks(before, resources())
        assert not grown, f"after {count} turns: {grown}"


def test_failures_leak_nothing(pool):
    pool.run(2, rank_failures, 10 * CYCLES // 4)
