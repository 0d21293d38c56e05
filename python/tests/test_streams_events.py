"""Order of work: previous events, asynchronous calls, EventOverlap, what stays alive until it is done.

A rank that comes LATE seconds late shows whether the others' calls return at once and whether their events wait.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time

import pytest
import torch

import checks
import lowlat
import normal
from cases import Case

CASE = Case((40, 25, 0, 64), experts=16, topk=4, hidden=72)
LL_CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
LATE = 0.8


def rank_chain(ctx, case):
    """dispatch, combine, cached dispatch in a row, all asynchronous, only the last one is waited for."""
    from deep_ep import Buffer

    with normal.buffer_of(ctx) as buffer:
        first = normal.dispatch(ctx, buffer, case, previous_event=Buffer.capture(), async_finish=True)
        rows = normal.expert_rows(first, True)
        sums, weights, event = buffer.combine(
            ctx.to_device(rows[ctx.rank]),
            first.handle,
            topk_weights=first.recv_topk_weights,
            previous_event=first.event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        again = buffer.dispatch(
            sums, handle=first.handle, previous_event=event, async_finish=True, allocate_on_comm_stream=True
        )
        again[-1].current_stream_wait()
        normal.check(first)
        normal.check_combined(first, rows, [], sums, True)
        normal.check_weights(first, weights, True)
        every_sum = ctx.gather(sums.cpu())
        sources = zip(every_sum, first.layouts, strict=True)
        want = torch.cat([part[layout.is_token_in_rank[:, ctx.rank]] for part, layout in sources])
        checks.same_rows("rows of the cached dispatch", again[0], want)


@pytest.mark.parametrize("worst", [False, True])
def test_asynchronous_chain(pool, worst):
    if worst:
        pool.run(4, rank_chain_worst, CASE.but(worst=True))
    else:
        pool.run(4, rank_chain, CASE)


def rank_chain_worst(ctx, case):
    with normal.buffer_of(ctx) as buffer:
        first = normal.dispatch(ctx, buffer, case, async_finish=True)
        done = normal.combine(ctx, buffer, first, previous_event=first.event, async_finish=True)
        assert done[2].event is not None
        normal.check(first)


def rank_previous_event_alone(ctx, case):
    """previous_event without async_finish: the current stream waits for the end of the call all the same."""
    from deep_ep import Buffer

    with normal.buffer_of(ctx) as buffer:
        for _ in range(5):
            exchange = normal.dispatch_and_check(ctx, buffer, case, previous_event=Buffer.capture())
            assert exchange.event.event is None
            normal.combine(ctx, buffer, exchange, previous_event=Buffer.capture())
            first = normal.dispatch(ctx, buffer, case, async_finish=True)
            normal.combine(ctx, buffer, first, previous_event=first.event)
            normal.check(first)


def test_previous_event_alone(pool):
    pool.run(4, rank_previous_event_alone, CASE.but(hidden=4096))


def slow_calls(ctx, buffer, case):
    """Name and function of every call that must not wait for its peers when it is asynchronous."""
    exchange = normal.dispatch_and_check(ctx, buffer, case)
    rows = ctx.to_device(normal.pad_rows(exchange, normal.expert_rows(exchange, True)[ctx.rank]))
    x = normal.x_of(ctx, exchange.own)
    arguments = normal.layout_arguments(ctx, buffer, exchange)
    arguments |= {
        "topk_idx": ctx.to_device(exchange.own.topk_idx),
        "topk_weights": ctx.to_device(exchange.own.topk_weights),
    }
    worst = sum(case.tokens) + 5
    return exchange, {
        "worst-case dispatch": lambda: buffer.dispatch(x, **arguments, num_worst_tokens=worst, async_finish=True),
        "cached dispatch": lambda: buffer.dispatch(x, handle=exchange.handle, async_finish=True),
        "combine": lambda: buffer.combine(rows, exchange.handle, async_finish=True),
    }


def time_call(ctx, call, wait):
    """Seconds until the call returned and until the wait returned, when the last rank comes LATE late."""
    ctx.barrier()
    if ctx.rank == ctx.size - 1:
        time.sleep(LATE)
    start = time.monotonic()
    result = call()
    returned = time.monotonic() - start
    wait(result)
    return result, returned, time.monotonic() - start


def check_times(ctx, name, returned, waited):
    if ctx.rank < ctx.size - 1:
        assert returned < LATE / 2, f"{name} took {returned} s although it is asynchronous"
        assert waited > LATE / 2, f"{name} was done after {waited} s, before the late rank had come"


def rank_returns_at_once(ctx, case):
    with normal.buffer_of(ctx) as buffer:
        exchange, calls = slow_calls(ctx, buffer, case)
        for name, call in calls.items():
            result, returned, waited = time_call(ctx, call, wait_for_event)
            check_times(ctx, name, returned, waited)
            if name != "combine":
                checks.same_rows(name, result[0][: len(exchange.want.x)], exchange.want.x)


def wait_for_event(result):
    event = result[-1]
    event.current_stream_wait()
    if result[0].is_cuda:
        torch.cuda.synchronize()


def test_asynchronous_calls_return_at_once(pool):
    pool.run(4, rank_returns_at_once, CASE.but(tokens=(40, 25, 3, 64)))


def rank_low_latency_returns_at_once(ctx, case, options):
    with lowlat.buffer_of(ctx, case, 16) as buffer:
        lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, case, 16))
        call, *times = time_call(ctx, lambda: lowlat.dispatch(ctx, buffer, case, 16, **options), finish)
        check_times(ctx, "low_latency_dispatch", *times)
        lowlat.check(call)
        done, *times = time_call(ctx, lambda: lowlat.combine(ctx, buffer, call, **options), finish)
        check_times(ctx, "low_latency_combine", *times)
        lowlat.check_combined(done)


def finish(call):
    lowlat.finish(call)
    if (call.recv_x[0] if hasattr(call, "recv_x") else call.got).is_cuda:
        torch.cuda.synchronize()


@pytest.mark.parametrize("options", [{"return_recv_hook": True}, {"async_finish": True}])
def test_low_latency_halves_return_at_once(pool, options):
    pool.run(4, rank_low_latency_returns_at_once, LL_CASE.but(tokens=(16, 9, 2, 12), routing="hot_first"), options)


def rank_inputs_live(ctx, case):
    """Inputs are dropped and their memory is asked for again while the call still waits for a late rank."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        rows = normal.expert_rows(exchange, True)
        ctx.barrier()
        if ctx.rank == 0:
            time.sleep(0.3)
        given = ctx.to_device(rows[ctx.rank].clone())
        sums, _, event = buffer.combine(given, exchange.handle, async_finish=True)
        del given
        rubbish = spoil(rows[ctx.rank], ctx.device)
        event.current_stream_wait()
        normal.check_combined(exchange, rows, [], sums, True)
        x = exchange.own.x.clone().to(ctx.device)
        result = buffer.dispatch(x, handle=exchange.handle, async_finish=True)
        del x
        rubbish += spoil(exchange.own.x, ctx.device)
        result[-1].current_stream_wait()
        checks.same_rows("recv_x", result[0], exchange.want.x)
        assert len(rubbish) == 40


def spoil(like, device):
    gc.collect()
    return [torch.full(like.shape, -1.0, dtype=like.dtype, device=device) for _ in range(20)]


def test_inputs_stay_alive(pool):
    pool.run(4, rank_inputs_live, CASE.but(hidden=2048))


def rank_hook_inputs_live(ctx, case):
    with lowlat.buffer_of(ctx, case, 16) as buffer:
        for turn in range(3):
            call = lowlat.dispatch(ctx, buffer, case.but(seed=turn), 16, return_recv_hook=True)
            rubbish = spoil(call.x[ctx.rank], ctx.device)
            call.hook()
            lowlat.check(call)
            done = lowlat.combine(ctx, buffer, call, return_recv_hook=True)
            done.x = None
            rubbish += spoil(call.x[ctx.rank], ctx.device)
            done.hook()
            lowlat.check_combined(done)


def test_hook_keeps_inputs_alive(pool):
    pool.run(4, rank_hook_inputs_live, LL_CASE)


def rank_overlap(ctx, case):
    from deep_ep import Buffer, DeepEPError, EventHandle, EventOverlap

    with normal.buffer_of(ctx) as buffer:
        empty = EventOverlap()
        assert empty.event is None
        with pytest.raises(AssertionError) as caught:
            empty.current_stream_wait()
        assert isinstance(caught.value, DeepEPError)
        with EventOverlap() as inside:
            assert inside.event is None
        captured = Buffer.capture()
        assert type(captured) is EventOverlap and captured.event is not None
        captured.current_stream_wait()
        handle = EventHandle()
        handle.current_stream_wait()
        kept = torch.ones(3)
        assert EventOverlap(handle, (kept,)).extra_tensors[0] is kept
        for previous in (None, EventOverlap(), EventOverlap(None), EventOverlap(EventHandle()), Buffer.capture()):
            exchange = normal.dispatch_and_check(ctx, buffer, case, previous_event=previous)
            normal.combine(ctx, buffer, exchange, previous_event=previous)
        exchange = normal.dispatch(ctx, buffer, case, async_finish=True)
        with exchange.event as entered:
            assert entered is exchange.event
        normal.check(exchange)
        exchange.event.current_stream_wait()  # a second wait does no harm
        event = normal.dispatch(ctx, buffer, case, async_finish=True).event
        with pytest.raises(ZeroDivisionError), event:
            raise ZeroDivisionError
        normal.dispatch_and_check(ctx, buffer, case)


def test_event_overlap(pool):
    pool.run(4, rank_overlap, CASE)


def rank_context_manager_waits(ctx, case):
    """Leaving the block is what waits: the rows are whole afterwards although a rank was late."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        ctx.barrier()
        if ctx.rank == 1:
            time.sleep(LATE)
        start = time.monotonic()
        result = buffer.dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle, async_finish=True)
        with result[-1]:
            inside = time.monotonic() - start
        checks.same_rows("recv_x", result[0], exchange.want.x)
        assert ctx.rank == 1 or (inside < LATE / 2 < time.monotonic() - start)


def test_context_manager_waits_on_leaving(pool):
    pool.run(2, rank_context_manager_waits, CASE.but(tokens=(30, 20), routing="hot_first"))


def rank_allocate(ctx, case):
    """allocate_on_comm_stream needs previous_event and async_finish; the buffer works on after the refusals."""
    from deep_ep import Buffer, DeepEPError

    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, case)
        rows = ctx.to_device(normal.expert_rows(exchange, True)[ctx.rank])
        idx = ctx.to_device(exchange.own.topk_idx)
        calls = [
            lambda **options: buffer.get_dispatch_layout(idx, case.experts, **options),
            lambda **options: buffer.dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle, **options),
            lambda **options: buffer.combine(rows, exchange.handle, **options),
        ]
        for call in calls:
            for options in ({}, {"async_finish": True}, {"previous_event": Buffer.capture()}):
                with pytest.raises(DeepEPError, match="allocate_on_comm_stream"):
                    call(allocate_on_comm_stream=True, **options)
            result = call(allocate_on_comm_stream=True, async_finish=True, previous_event=Buffer.capture())
            result[-1].current_stream_wait()
        normal.dispatch_and_check(ctx, buffer, case)


def test_allocate_on_comm_stream(pool):
    pool.run(4, rank_allocate, CASE)


def rank_event_outlives_buffer(ctx, case):
    from deep_ep import DeepEPError

    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch(ctx, buffer, case, async_finish=True)
        exchange.event.current_stream_wait()
    with contextlib.suppress(DeepEPError):
        exchange.event.current_stream_wait()
    del exchange
    gc.collect()


def test_event_outlives_its_buffer(pool):
    pool.run(2, rank_event_outlives_buffer, CASE.but(tokens=(5, 6)))


def rank_comm_stream(ctx):
    with normal.buffer_of(ctx) as buffer:
        stream = buffer.get_comm_stream()
        kind = torch.cuda.Stream if ctx.device.type == "cuda" else torch.cpu.Stream
        assert isinstance(stream, kind), f"get_comm_stream() gave {type(stream)}"


def test_comm_stream_is_a_torch_stream(pool):
    pool.run(1, rank_comm_stream)


def rank_lost_hook(ctx):
    """The call goes on without its hook: nobody else gets the memory of its outputs before its end."""
    os.environ["DEEPEP_LL_TRANSFER"] = "stream"
    try:
        with lowlat.buffer_of(ctx, LL_CASE, 16) as buffer:
            x = torch.ones(LL_CASE.tokens[ctx.rank], LL_CASE.hidden, dtype=torch.bfloat16, device=ctx.device)
            idx = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=ctx.device)
            for _ in range(3):  # the first call has no plan yet
                torch.cuda.synchronize()
                ctx.barrier()
                if ctx.rank != 0:
                    time.sleep(LATE / 4)
                got = buffer.low_latency_dispatch(x, idx, 16, LL_CASE.experts, use_fp8=False, return_recv_hook=True)
                shape = got[0].shape
                del got
                fresh = [torch.full(shape, 7, dtype=torch.bfloat16, device=ctx.device) for _ in range(4)]
                torch.cuda.synchronize()
                assert all(bool((one == 7).all()) for one in fresh)
                del fresh
                buffer.clean_low_latency_buffer(16, LL_CASE.hidden, LL_CASE.experts)
            lowlat.dispatch_and_check(ctx, buffer, LL_CASE, 16, return_recv_hook=True)
    finally:
        del os.environ["DEEPEP_LL_TRANSFER"]


def test_lost_hook(pool, device):
    if device != "cuda":
        pytest.skip("needs a CUDA device: the CPU engine receives when the hook is called")
    pool.run(4, rank_lost_hook)
