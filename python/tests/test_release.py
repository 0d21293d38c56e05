"""Sleep mode: memory that is given back and had again, what is refused meanwhile, graphs that were captured before."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import alone
import checks
import lowlat
import normal
import victims
from cases import Case
from conftest import full
from test_graphs import normal_round
from test_lifecycle import leaks, resources, settle
from test_signals import RaisesAt, Stop, traced

CASE = Case((30, 20, 0, 9), experts=12, topk=3, hidden=512)
LL_CASE = Case((16, 9, 0, 12), hidden=512, experts=12, topk=3)
WORST = CASE.but(worst=True)
B = 16
ROUNDS = 1000 if full() else 40
RESTORE_SECONDS = 0.05
NVL_BYTES = 1 << 24


def for_ranks(ctx: Any, case: Case) -> Case:
    """The case, without the ranks that are not there."""
    return case.but(tokens=case.tokens[: ctx.size])


@contextmanager
def buffer_of(ctx: Any, **options: Any) -> Any:
    """A buffer of both modes."""
    options.setdefault("num_nvl_bytes", NVL_BYTES)
    with lowlat.buffer_of(ctx, for_ranks(ctx, LL_CASE), B, **options) as buffer:
        yield buffer


def calls(ctx: Any, buffer: Any, turn: int) -> None:
    """Each operation once, and all its results."""
    exchange = normal.dispatch_and_check(ctx, buffer, for_ranks(ctx, CASE).but(seed=turn))
    normal.combine(ctx, buffer, exchange, with_weights=True, async_finish=bool(turn % 2))
    normal.check(exchange)
    call = lowlat.dispatch_and_check(
        ctx, buffer, for_ranks(ctx, LL_CASE).but(seed=turn), B, return_recv_hook=bool(turn % 2)
    )
    lowlat.combine_and_check(ctx, buffer, call)


def sleep_and_wake(ctx: Any, buffer: Any) -> float:
    """Releases and restores; the seconds of the restore, in which all ranks take part."""
    buffer.release()
    ctx.barrier()
    began = time.monotonic()
    buffer.restore()
    return time.monotonic() - began


def rank_rounds(ctx: Any, rounds: int) -> tuple[float, dict[str, int]]:
    with buffer_of(ctx) as buffer:
        for turn in range(3):
            calls(ctx, buffer, turn)
            sleep_and_wake(ctx, buffer)
        before, times = resources(), []
        for turn in range(rounds):
            times.append(sleep_and_wake(ctx, buffer))
            if turn % 10 == 0:
                calls(ctx, buffer, turn)
        settle(before)
        after = resources()
        grown = leaks(before, after)
        assert not grown, f"after {rounds} rounds: {grown}"
        return sorted(times)[len(times) // 4], {name: after[name] - before[name] for name in before}


@pytest.mark.timeout(60 + ROUNDS)
def test_rounds_leak_nothing_and_are_quick(pool):
    ranks = pool.run(4, rank_rounds, ROUNDS, deadline=30 + ROUNDS)
    quartile = max(seconds for seconds, _ in ranks)
    print(f"grown after {ROUNDS} rounds: {[more for _, more in ranks]}")
    print(f"restore: {1e3 * quartile:.1f} ms, the lower quartile of {ROUNDS} rounds on the slowest of 4 ranks")
    assert quartile < RESTORE_SECONDS, f"a restore took {1e3 * quartile:.1f} ms"


def memory_in_use(ctx: Any) -> int:
    """Bytes of the GPU, or of shared memory that this process has touched."""
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/status", encoding="utf-8") as file:
        return 1024 * int(next(line for line in file if line.startswith("RssShmem")).split()[1])


def rank_memory(ctx: Any) -> tuple[int, int, int]:
    with buffer_of(ctx, num_nvl_bytes=1 << 28, preinitialize=True) as buffer:
        calls(ctx, buffer, 0)
        ctx.barrier()
        awake = memory_in_use(ctx)
        ctx.barrier()
        buffer.release()
        ctx.barrier()
        asleep = memory_in_use(ctx)
        ctx.barrier()
        buffer.restore()
        calls(ctx, buffer, 1)
    return awake, asleep, 1 << 28


def test_memory_is_given_back(pool, device):
    for rank, (awake, asleep, size) in enumerate(pool.run(2, rank_memory)):
        print(f"rank {rank}: {awake >> 20} MiB in use, {asleep >> 20} MiB while released")
        left = size // 50 if device == "cuda" else 4 << 20
        assert awake - asleep > size - left, f"{awake - asleep} bytes of {size} came back"


def rank_refused(ctx: Any) -> None:
    import deep_ep

    def refused(what: str, call: Any, text: str = "the buffer's memory is released") -> None:
        with pytest.raises(deep_ep.DeepEPError) as failure:
            call()
        assert text in str(failure.value), f"{what}: {failure.value}"

    case, low = for_ranks(ctx, CASE), for_ranks(ctx, LL_CASE)
    with buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case, async_finish=True)
        x = ctx.to_device(exchange.own.x)
        rows = torch.zeros_like(exchange.recv_x)
        view = buffer.get_local_buffer_tensor(torch.uint8)
        call = lowlat.dispatch(ctx, buffer, low, B, return_recv_hook=True)
        refused("an open half", buffer.release, "low_latency_dispatch #1 is without its receive half")
        call.hook()
        lowlat.check(call)
        for _ in range(2):  # twice is fine
            buffer.release()
        idx, weights = ctx.to_device(call.topk_idx[ctx.rank]), torch.ones(call.topk_idx[ctx.rank].shape).to(ctx.device)
        refused("dispatch", lambda: normal.dispatch(ctx, buffer, case))
        refused("cached dispatch", lambda: buffer.dispatch(x, handle=exchange.handle))
        refused("combine", lambda: buffer.combine(rows, exchange.handle))
        refused("low-latency dispatch", lambda: lowlat.dispatch(ctx, buffer, low, B))
        zeros = torch.zeros((low.experts // ctx.size, ctx.size * B, low.hidden), dtype=torch.bfloat16).to(ctx.device)
        refused("low-latency combine", lambda: buffer.low_latency_combine(zeros, idx, weights, call.handle))
        refused("clean", lambda: buffer.clean_low_latency_buffer(B, low.hidden, low.experts))
        refused("next buffer", lambda: buffer.get_next_low_latency_combine_buffer(call.handle))
        refused("view", lambda: buffer.get_local_buffer_tensor(torch.uint8))
        refused("warm-up", lambda: buffer.warmup(num_tokens=4, hidden=64, num_topk=1, num_experts=8))
        refused("check", buffer.check)
        view.fill_(7)  # of no meaning, and no fault; restore() waits for it
        exchange.event.current_stream_wait()
        assert buffer.stats()["dispatch"]["calls"] == 1, "what was refused is no call"
        buffer.restore()
        assert not view.any(), "the view is of the new memory"
        buffer.check()
        refused("a handle of before", lambda: buffer.combine(rows, exchange.handle), "one of before release()")
        refused("a handle of before", lambda: buffer.dispatch(x, handle=exchange.handle), "one of before release()")
        refused(
            "a low-latency handle of before",
            lambda: buffer.low_latency_combine(zeros, idx, weights, call.handle),
            "one of before release()",
        )
        buffer.restore()  # nothing to do
        calls(ctx, buffer, 1)
        with normal.buffer_of(ctx) as other:  # handles are data: those of another buffer pass
            theirs = normal.dispatch_and_check(ctx, other, case)
            assert not buffer.combine(rows, theirs.handle)[0].any()
        buffer.release()


def test_calls_are_refused(pool):
    """... and destroy() of a released buffer works."""
    pool.run(3, rank_refused)


def rank_hook_of_before(ctx: Any) -> str:
    """A hook that clean_low_latency_buffer has made void is refused after a restore as before it."""
    import deep_ep

    low = for_ranks(ctx, LL_CASE)
    with buffer_of(ctx) as buffer:
        call = lowlat.dispatch(ctx, buffer, low, B, return_recv_hook=True)
        buffer.clean_low_latency_buffer(B, low.hidden, low.experts)
        sleep_and_wake(ctx, buffer)
        with pytest.raises(deep_ep.DeepEPError) as failure:
            call.hook()
        calls(ctx, buffer, 0)
        return str(failure.value)


def test_hook_of_before(pool):
    for text in pool.run(2, rank_hook_of_before):
        assert "forgotten" in text


def rank_peer_released(ctx: Any, waits: bool) -> str:
    """Rank 0 releases, the others call: before they hear of it, or while they know."""
    import deep_ep

    case = for_ranks(ctx, CASE)
    text = ""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        normal.combine(ctx, buffer, exchange)
        normal.check(exchange)
        if ctx.rank != 0:
            if waits:
                time.sleep(0.5)
            with pytest.raises(deep_ep.DeepEPError) as failure:
                normal.dispatch(ctx, buffer, case)
            text = str(failure.value)
        elif not waits:
            time.sleep(0.3)  # the others are in the call
        buffer.release()
        if ctx.rank != 0:
            ctx.report("released")
        buffer.restore()
        exchange = normal.dispatch_and_check(ctx, buffer, case.but(seed=1))
        normal.combine(ctx, buffer, exchange)
        normal.check(exchange)
    return text


@pytest.mark.parametrize("waits", [True, False])
def test_peer_has_released(pool, waits):
    began = time.monotonic()
    texts = pool.run(3, rank_peer_released, waits)
    assert time.monotonic() - began < 30, "a call waited for the deadline"
    for text in texts[1:]:
        assert "rank 0" in text and "released" in text, text


def rank_restores_alone(ctx: Any) -> str:
    import deep_ep

    with normal.buffer_of(ctx, timeout=1.0) as buffer:
        if ctx.rank == 0:
            buffer.release()
        ctx.barrier()
        time.sleep(0.2)
        if ctx.rank == 0:
            return ""
        with pytest.raises(deep_ep.DeepEPError) as failure:
            buffer.restore()
        return str(failure.value)


def test_restore_without_release(pool):
    text = pool.run(2, rank_restores_alone)[1]
    assert "rank 0" in text and "release() comes first" in text


def rank_dead_peer(ctx: Any) -> tuple[float, str]:
    import deep_ep

    with normal.buffer_of(ctx) as buffer:
        buffer.release()
        if ctx.rank == 1:
            victims.die()
        began = time.monotonic()
        with pytest.raises(deep_ep.DeepEPError) as failure:
            buffer.restore()
        taken = time.monotonic() - began
        with pytest.raises(deep_ep.DeepEPError):
            normal.dispatch(ctx, buffer, for_ranks(ctx, CASE))
        return taken, str(failure.value)


def test_restore_with_a_dead_rank(fresh_pool):
    for outcome in fresh_pool(3).outcomes(3, rank_dead_peer):
        if outcome.rank != 1:
            taken, text = outcome.value
            assert taken < 3 and "rank 1" in text, f"{taken:.1f} s: {text}"


def rank_graphs(ctx: Any) -> tuple[float, str]:
    """Both modes captured; replays while released leave at once, replays afterwards are right."""
    import deep_ep

    case, low = for_ranks(ctx, WORST), for_ranks(ctx, LL_CASE)
    want = normal.expect(case, ctx.rank)
    x, idx = ctx.to_device(want.own.x), ctx.to_device(want.own.topk_idx)
    weights = ctx.to_device(want.own.topk_weights)
    low_want = lowlat.expect(low, ctx.rank, B, frozenset(), use_fp8=False)
    low_x, low_idx = ctx.to_device(low_want.x[ctx.rank]), ctx.to_device(low_want.topk_idx[ctx.rank])
    low_weights = torch.ones(low_idx.shape).to(ctx.device)
    with buffer_of(ctx) as buffer:

        def both() -> Any:
            rows = normal_round(buffer, case, x, idx, weights)
            recv_x, counts, handle, _, _ = buffer.low_latency_dispatch(low_x, low_idx, B, low.experts, use_fp8=False)
            sums, _, _ = buffer.low_latency_combine(recv_x, low_idx, low_weights, handle)
            buffer.clean_low_latency_buffer(B, low.hidden, low.experts)
            return *rows, counts, sums

        both()
        torch.cuda.synchronize()
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv_x, recv_idx, recv_weights, sums, _, counts, low_sums = both()

        def right() -> None:
            for output in (recv_x, recv_idx, recv_weights, sums, counts, low_sums):
                output.fill_(1)
            torch.cuda.synchronize()
            ctx.barrier()
            graph.replay()
            torch.cuda.synchronize()
            checks.same_received(recv_x, recv_idx, recv_weights, want.want, case.worst_tokens)
            checks.same_bits("recv_count", counts, low_want.want.counts)
            times = (low_want.topk_idx[ctx.rank] >= 0).sum(1, keepdim=True)
            checks.same_rows("combined_x", low_sums, (low_want.x[ctx.rank].float() * times).to(torch.bfloat16))

        slowest, text = 0.0, ""
        for turn in range(5):
            right()
            buffer.release()
            for _ in range(1 + turn % 2):
                began = time.monotonic()
                graph.replay()
                torch.cuda.synchronize()
                slowest = max(slowest, time.monotonic() - began)
                assert not counts.any() and low_sums.isnan().all(), "a released buffer has received"
                with pytest.raises(deep_ep.DeepEPError) as failure:
                    buffer.check()
                text = str(failure.value)
            buffer.restore()
            right()
            calls(ctx, buffer, turn)
        buffer.destroy()
        graph.replay()  # leaves at once too
        torch.cuda.synchronize()
    return slowest, text


def test_graphs(pool, device):
    if device != "cuda":
        pytest.skip("needs a CUDA device: the CPU engine has no graphs")
    for taken, text in pool.run(min(3, pool.size), rank_graphs, deadline=120):
        assert taken < 0.5 and "released" in text, f"{taken:.3f} s: {text}"


def rank_row_segment(ctx: Any) -> None:
    """Low-latency calls never take the memory for received rows; the first dispatch outside a capture does."""
    low, case = for_ranks(ctx, LL_CASE), for_ranks(ctx, WORST)
    room = 64 << 20
    with lowlat.buffer_of(ctx, low, B, num_nvl_bytes=NVL_BYTES, zero_copy_bytes=room, preinitialize=True) as buffer:
        native = buffer._core.native
        buffer.warmup(num_max_dispatch_tokens_per_rank=B, hidden=low.hidden, num_topk=low.topk, num_experts=low.experts)
        lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, low, B))
        assert native.rows is None, "low-latency calls opened the segment"
        want = normal.expect(case, ctx.rank)
        inputs = [ctx.to_device(t) for t in (want.own.x, want.own.topk_idx, want.own.topk_weights)]
        torch.cuda.synchronize()
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recv_x, recv_idx, recv_weights, _, _ = normal_round(buffer, case, *inputs)
        assert native.rows is None, "a capture opened the segment"
        graph.replay()
        torch.cuda.synchronize()
        checks.same_received(recv_x, recv_idx, recv_weights, want.want, case.worst_tokens)
        exchange = normal.dispatch_and_check(ctx, buffer, for_ranks(ctx, CASE))
        rows = native.rows
        assert rows is not None, "the first dispatch opened no segment"
        assert not exchange.recv_x.numel() or rows.offset(exchange.recv_x) is not None, "rows lie elsewhere"
        kept = exchange.recv_x.clone()
        sleep_and_wake(ctx, buffer)
        assert torch.equal(kept, exchange.recv_x), "a tensor of the caller has changed"
        assert native.rows is None
        normal.dispatch_and_check(ctx, buffer, for_ranks(ctx, CASE).but(seed=3))
        assert native.rows is not None
        graph.replay()
        torch.cuda.synchronize()
        checks.same_received(recv_x, recv_idx, recv_weights, want.want, case.worst_tokens)
        assert torch.equal(kept, exchange.recv_x), "a replay has written to a tensor of the caller"


def test_row_segment_is_opened_when_it_is_needed(pool, device):
    if device != "cuda":
        pytest.skip("needs a CUDA device: peers of the CPU engine read rows where they are staged")
    pool.run(min(3, pool.size), rank_row_segment, deadline=120)


# ---- Ctrl-C


def rank_stopped_anywhere(ctx: Any, stride: int) -> None:
    """An exception at any step of either: it has not begun, or the next call does the rest of it first."""
    import deep_ep

    package = deep_ep.__path__[0]

    def stopped(function: Any, n: int) -> RaisesAt:
        tracer = RaisesAt(package, n)
        with contextlib.suppress(Stop):
            traced(tracer, function)
        return tracer

    with alone.buffer_of(ctx) as buffer:
        call = alone.Calls(buffer).of("dispatch")
        call()
        asleep, awake = stopped(buffer.release, 0).count, stopped(buffer.restore, 0).count
        assert asleep > 50 and awake > 30, "the calls are not traced"
        inside = 0
        for n in range(1, asleep + awake + 1, stride):
            if n > asleep:
                buffer.release()
            tracer = stopped(buffer.release, n) if n <= asleep else stopped(buffer.restore, n - asleep)
            begun = tracer.where.startswith("_in_slices")
            inside += begun
            goes_on = True
            if n % 2 or begun:
                try:
                    call()
                except deep_ep.DeepEPError as error:
                    assert "memory is released" in str(error), error
                    goes_on = False
            assert not begun or goes_on == (n > asleep), f"{tracer.where}: another call did not wait for it"
            if n % 3 == 0:
                buffer.release()
            buffer.restore()
            call()
        assert inside or stride > 1, "nothing was stopped in the library's calls"


def test_exception_at_every_instruction(pool, device):
    if device != "cpu":
        pytest.skip("needs the CPU engine: a restore of GPU memory takes too long for hundreds of them")
    pool.run(1, rank_stopped_anywhere, 1 if full() else 7)


def interrupted(call: Any) -> None:
    """A call whose wait Ctrl-C ends."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()


def rank_interrupted(ctx: Any) -> None:
    """Ctrl-C while other ranks are late: release and restore go on, and the next call has their result."""
    import deep_ep

    case = for_ranks(ctx, CASE)

    def serve(seed: int) -> None:
        exchange = normal.dispatch_and_check(ctx, buffer, case.but(seed=seed))
        normal.combine(ctx, buffer, exchange)
        normal.check(exchange)

    with normal.buffer_of(ctx) as buffer:
        serve(0)
        ctx.barrier()
        if ctx.rank == 0:
            worst = case.but(worst=True, seed=1)
            exchange = normal.dispatch(ctx, buffer, worst, async_finish=True)
            interrupted(buffer.release)
            ctx.barrier()
            with pytest.raises(deep_ep.DeepEPError, match="memory is released"):
                buffer.barrier()  # once the dispatch has ended
            normal.check(exchange)
        else:
            ctx.barrier()
            normal.dispatch_and_check(ctx, buffer, case.but(worst=True, seed=1))
            buffer.release()
        ctx.barrier()
        if ctx.rank == 0:
            interrupted(buffer.restore)
            ctx.barrier()
        else:
            ctx.barrier()
            buffer.restore()
        serve(2)
        buffer.release()
        ctx.barrier()
        if ctx.rank == 0:  # one that does not end does not hold up destroy()
            interrupted(buffer.restore)
            assert victims.timed_destroy(buffer) < 2.5
        ctx.barrier()


def test_interrupted(pool):
    pool.run(2, rank_interrupted)
