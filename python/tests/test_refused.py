"""Wrong contents of handles, counts and indices: every rank refuses the call by name, and the buffer works on."""

from __future__ import annotations

import contextlib
import time
from unittest import mock

import pytest
import torch

import lowlat
import normal
from cases import Case

CASE = Case((12, 7), experts=8, topk=3, hidden=256, routing="random")
BIG = 10**6


def on_cpu(ctx):
    return ctx.engine == "cpu"


def said(buffer, call):
    """The text of the call's error; "" if it had none. On GPUs it may come after the call."""
    from deep_ep import DeepEPError

    try:
        call()
        if not buffer._core.host_stream:
            torch.cuda.synchronize()
        buffer.check()
    except DeepEPError as error:
        return str(error)
    return ""


def works_on(ctx, buffer, case):
    buffer.check()
    exchange = normal.dispatch_and_check(ctx, buffer, case)
    normal.combine(ctx, buffer, exchange)


# ---- handles


def matrix_and_head(handle):
    return (handle[0], handle[5]) if len(handle) == 6 else (handle[1], handle[-2])


def mutated(handle, how):
    """The handle with other contents."""
    entries = [t.clone() if isinstance(t, torch.Tensor) else t for t in handle]
    matrix, head = matrix_and_head(entries)
    if how == "matrix runs backwards":
        matrix[:-1, :] = BIG
    elif how == "matrix huge":
        matrix.fill_(BIG)
    elif how == "matrix negative":
        matrix[:-1, :] = -BIG
        matrix[0, :] = -BIG
    elif how == "matrix zero":
        matrix.zero_()
    elif how == "head huge":
        head[:] = torch.where(head >= 0, torch.full_like(head, BIG), head)
    elif how == "head of all tokens":
        head[:] = torch.arange(head.shape[0], dtype=torch.int32, device=head.device).unsqueeze(1)
    elif how == "head of none":
        head.fill_(-(2**31))
    elif how == "head int max":
        head.fill_(2**31 - 1)
    if len(entries) != 6:
        entries[-1] = entries[-2]
    return tuple(entries)


HOWS = (
    "matrix runs backwards",
    "matrix huge",
    "matrix negative",
    "matrix zero",
    "head huge",
    "head of all tokens",
    "head of none",
    "head int max",
)


def rank_mutated(ctx, case, what):
    complaints = []
    with normal.buffer_of(ctx, timeout=20) as buffer:
        for how in HOWS:
            if not on_cpu(ctx) and how.startswith("head"):
                continue  # bounded where they are used (kernels/tests/case_refusal.c)
            if ctx.size == 1 and how in ("matrix runs backwards", "head of all tokens"):
                continue  # the same handle
            for who in (0,), tuple(range(ctx.size)):
                if not on_cpu(ctx) and (what, how) == ("dispatch", "matrix zero") and len(who) == ctx.size:
                    continue  # all ranks agree, and a GPU sees it in send_head, in the middle of the call
                exchange = normal.dispatch_and_check(ctx, buffer, case)
                handle = mutated(exchange.handle, how) if ctx.rank in who else exchange.handle
                rows = torch.ones(exchange.recv_x.shape, dtype=torch.bfloat16, device=exchange.recv_x.device)
                x = normal.x_of(ctx, exchange.own)
                if what == "combine":
                    text = said(buffer, lambda rows=rows, handle=handle: buffer.combine(rows, handle))
                else:
                    text = said(buffer, lambda x=x, handle=handle: buffer.dispatch(x, handle=handle))
                if "argument handle" not in text:
                    complaints.append(f"{how} on ranks {who}: {text or 'no error'}")
                if who == (0,) and ctx.rank and "rank 0" not in text:
                    complaints.append(f"{how}: rank 0 is not named: {text}")
                works_on(ctx, buffer, case)
    return complaints


@pytest.mark.parametrize("what", ["dispatch", "combine"])
def test_mutated_handles(pool, what):
    assert pool.run(2, rank_mutated, CASE, what) == [[]] * 2


def rank_agreed_on_zeros(ctx):
    """All ranks' matrices say that no row moves; send_head says otherwise. On GPUs the call has begun by then."""
    with normal.buffer_of(ctx, timeout=20) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        x, handle = normal.x_of(ctx, exchange.own), mutated(exchange.handle, "matrix zero")
        text = said(buffer, lambda: buffer.dispatch(x, handle=handle))
        if on_cpu(ctx):
            works_on(ctx, buffer, CASE)
    with normal.buffer_of(ctx) as another:  # neither the context nor the group has suffered
        works_on(ctx, another, CASE)
    return text


def test_ranks_that_agree_on_a_wrong_matrix(pool):
    for text in pool.run(2, rank_agreed_on_zeros):
        assert "handle" in text, text


@pytest.mark.parametrize("what", ["dispatch", "combine"])
def test_mutated_handle_of_one_rank(pool, what):
    assert pool.run(1, rank_mutated, Case((9,), experts=8, topk=3, hidden=256, routing="random"), what) == [[]]


def rank_two_batches(ctx, what):
    """Rank 0 uses the handle of batch A, rank 1 that of batch B: each is right by itself."""
    with normal.buffer_of(ctx, timeout=20) as buffer:
        first = normal.dispatch_and_check(ctx, buffer, CASE)
        second = normal.dispatch_and_check(ctx, buffer, CASE)
        exchange = second if ctx.rank else first
        rows = torch.ones(exchange.recv_x.shape, dtype=torch.bfloat16, device=exchange.recv_x.device)
        x = normal.x_of(ctx, exchange.own)
        call = (lambda: buffer.combine(rows, exchange.handle)) if what == "combine" else None
        text = said(buffer, call or (lambda: buffer.dispatch(x, handle=exchange.handle)))
        works_on(ctx, buffer, CASE)
        return text


@pytest.mark.parametrize("what", ["dispatch", "combine"])
def test_handles_of_two_batches(pool, what):
    for text in pool.run(2, rank_two_batches, what):
        assert "ranks disagree on the handle" in text and "dispatch #1" in text and "dispatch #2" in text, text


# ---- arguments of a dispatch


def rank_wrong_dispatch(ctx, how):
    """Rank 1's argument is wrong."""
    with normal.buffer_of(ctx, timeout=20) as buffer:
        exchange = normal.expect(CASE, ctx.rank)
        own = exchange.own
        arguments = normal.layout_arguments(ctx, buffer, exchange)
        arguments.update(topk_idx=ctx.to_device(own.topk_idx), topk_weights=ctx.to_device(own.topk_weights))
        if how == "worst":
            arguments["num_worst_tokens"] = 1 if ctx.rank else 64
        elif ctx.rank and how == "counts":
            arguments["num_tokens_per_rank"] = arguments["num_tokens_per_rank"] + 1
        x = normal.x_of(ctx, own)
        text = said(buffer, lambda: buffer.dispatch(x, **arguments))
        works_on(ctx, buffer, CASE)
        return text


WRONG = {"worst": ("num_worst_tokens", "got 1,"), "counts": ("num_tokens_per_rank", "is_token_in_rank")}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_dispatch(pool, how):
    for text in pool.run(2, rank_wrong_dispatch, how):
        assert all(word in text for word in WRONG[how]) and "rank 1" in text, text


def rank_types(ctx):
    """Rows of equal bytes, and different types."""
    case = CASE.but(kind="fp8", hidden=512, num_scales=0) if ctx.rank else CASE
    with normal.buffer_of(ctx, timeout=20) as buffer:
        exchange = normal.expect(CASE, ctx.rank)
        arguments = normal.layout_arguments(ctx, buffer, exchange)
        rows = CASE.tokens[ctx.rank]
        x = ctx.to_device(torch.ones(rows, case.hidden).to(torch.float8_e4m3fn if ctx.rank else torch.bfloat16))
        return said(buffer, lambda: buffer.dispatch(x, **arguments))


def test_types_of_equal_bytes(pool):
    for text in pool.run(2, rank_types):
        assert "the type of x" in text and "BF16" in text and "FP8" in text, text


def rank_without_memory(ctx):
    """Rank 1 has no memory for the rows once it has the counts; then a signal comes just there."""
    texts = []
    with normal.buffer_of(ctx, timeout=20) as buffer:
        normal.dispatch_and_check(ctx, buffer, CASE)  # the next one follows its plan
        for turn, error in enumerate((torch.OutOfMemoryError("no memory"), KeyboardInterrupt()) * 2):
            if turn == 2:
                buffer._normal._face, buffer._normal._has_face = None, False
            face = buffer._normal._face
            compiled = mock.patch.object(face, "_rows_for", side_effect=error) if face else contextlib.nullcontext()
            python = mock.patch.object(buffer._normal, "_receive", side_effect=error)
            exchange = normal.expect(CASE, ctx.rank)
            own = exchange.own
            arguments = normal.layout_arguments(ctx, buffer, exchange)
            arguments.update(topk_idx=ctx.to_device(own.topk_idx), topk_weights=ctx.to_device(own.topk_weights))
            x = normal.x_of(ctx, own)
            start = time.monotonic()
            if ctx.rank == 1:
                with compiled, python, pytest.raises(type(error)):
                    buffer.dispatch(x, **arguments)
                buffer.check()  # it has been told
            else:
                texts.append(said(buffer, lambda x=x, arguments=arguments: buffer.dispatch(x, **arguments)))
            assert time.monotonic() - start < 5
            works_on(ctx, buffer, CASE)
    return texts


def test_a_rank_without_memory_tells_its_peers(pool):
    for texts in pool.run(2, rank_without_memory)[:1]:
        assert all("rank 1 has cancelled it" in text and "works on" in text for text in texts), texts
        assert all("out of memory" in text for text in texts[::2]), texts
        assert all("its program gave it up" in text for text in texts[1::2]), texts


# ---- low latency


def rank_lost_hook(ctx):
    """A send whose hook is never called: the second call after it says so, and a clean mends it."""
    from deep_ep import DeepEPError

    case = Case((8,) * ctx.size, experts=8, topk=2, hidden=256, routing="random")
    with lowlat.buffer_of(ctx, case, 8) as buffer:
        x = ctx.to_device(torch.ones(8, 256, dtype=torch.bfloat16))
        idx = ctx.to_device((torch.arange(16).reshape(8, 2) % 8).to(torch.int64))

        def send(hook):
            return buffer.low_latency_dispatch(x, idx, 8, 8, use_fp8=False, return_recv_hook=hook)[4]

        send(True)
        send(False)
        texts = []
        for _ in range(2):
            try:
                send(False)
            except DeepEPError as error:
                texts.append(str(error))
        buffer.check()
        buffer.clean_low_latency_buffer(8, 256, 8)
        for _ in range(3):
            send(False)
        return texts


def test_lost_hook(pool):
    for texts in pool.run(2, rank_lost_hook):
        assert len(texts) == 2 and all(
            "without its receive half" in t and "clean_low_latency_buffer" in t for t in texts
        ), texts


def rank_wrong_low_latency(ctx, how, way):
    """Rank 1's indices, or its handle, are wrong."""
    case = Case((8,) * ctx.size, experts=8, topk=2, hidden=256, routing="random")
    with lowlat.buffer_of(ctx, case, 8) as buffer:
        x = ctx.to_device(torch.ones(8, 256, dtype=torch.bfloat16))
        idx = ctx.to_device((torch.arange(16).reshape(8, 2) % 8).to(torch.int64))
        weights = ctx.to_device(torch.ones(8, 2))
        wrong = ctx.rank == 1

        def finish(event, hook):
            if way == "hook":
                hook()
            elif way == "async":
                event.current_stream_wait()

        options = {"return_recv_hook": way == "hook", "async_finish": way == "async"}

        def dispatch(given=idx):
            rows, _, handle, event, hook = buffer.low_latency_dispatch(x, given, 8, 8, use_fp8=False, **options)
            finish(event, hook)
            return rows, handle

        def combine(rows, given, handle):
            event, hook = buffer.low_latency_combine(rows, given, weights, handle, **options)[1:]
            finish(event, hook)

        if how == "dispatch":
            text = said(buffer, lambda: dispatch(idx + 1000 if wrong else idx))
        else:
            rows, handle = dispatch()
            ranges = torch.full_like(handle[1], 2**40 + 1000) if wrong and how == "range" else handle[1]
            given = idx + 1000 if wrong and how == "combine" else idx
            text = said(buffer, lambda: combine(rows, given, (handle[0], ranges, *handle[2:])))
        for _ in range(3):
            rows, handle = dispatch()
            combine(rows, idx, handle)
        buffer.check()
        return text


@pytest.mark.parametrize("way", ["waits", "hook", "async"])
@pytest.mark.parametrize("how", ["dispatch", "combine", "range"])
def test_wrong_low_latency(pool, device, how, way):
    if device != "cpu" and how == "range":
        pytest.skip("bounded where it is used (docs/errors.md)")
    for rank, text in enumerate(pool.run(2, rank_wrong_low_latency, how, way)):
        if device == "cpu" or rank == 1:
            assert "layout_range" in text if how == "range" else "topk_idx: got an index 10" in text, text
