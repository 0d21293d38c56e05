"""ElasticBuffer against the reference in plain torch: layouts, handles, sums bit for bit."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from torch.utils import _pytree as pytree

import cases
import checks
import elastic
import normal
import victims
from cases import Case
from conftest import full

M = 96
CASES = (
    Case((9, 0, 31, 17), hidden=64, experts=16, topk=4, routing="random", seed=0),
    Case((33, 20, 1, 8), hidden=136, experts=8, topk=3, routing="holes", alignment=4, seed=1),
    Case((12, 12, 12, 12), hidden=64, experts=4, topk=4, routing="duplicates", alignment=128, seed=2),
    Case((40, 3, 0, 22), hidden=128, experts=12, topk=8, routing="skewed", kind="fp8", num_scales=3, seed=4),
    Case((5, 6, 7, 8), hidden=32, experts=32, topk=6, routing="hot_first", kind="fp8", scales="int32", seed=5),
    Case((5, 0, 0, 0), hidden=16, experts=8, topk=1, routing="none", seed=6),
    Case((7, 9, 0, 2), hidden=24, experts=8, topk=2, routing="hot", kind="bits", index_dtype=torch.int32, seed=7),
    Case((21, 9, 30, 2), hidden=256, experts=20, topk=7, kind="fp8", num_scales=56, scales="strided", alignment=3,
         seed=8),
)  # fmt: skip
CASE = CASES[1]


def rank_cases(ctx, some, kind, options):
    with elastic.buffer_of(ctx, M, kind=kind, **options) as buffer, torch.inference_mode(kind == "EPBuffer"):
        for number, case in enumerate(some):
            for num_max in (M, max(case.tokens) + 3) if full() else (M if number % 2 else max(case.tokens) + 3,):
                exchange = elastic.expect(case, num_max)
                for expand in (False, True):
                    for sync in (True, False):
                        elastic.round_trip(ctx, buffer, case, exchange, expand=expand, sync=sync)


@pytest.mark.parametrize(
    ("kind", "some", "options"),
    [
        ("ElasticBuffer", slice(None), {}),
        ("EPBuffer", slice(1, 5, 2), {}),
        ("ElasticBuffer", slice(2, 4), {"allow_multiple_reduction": 0, "deterministic": 1}),
    ],
    ids=["elastic", "ep", "single-reduction"],
)
def test_cases(pool, kind, some, options):
    pool.run(4, rank_cases, CASES[some], kind, options, deadline=120)


def rank_sizes(ctx):
    for ranks_of in (1, 2):
        if ctx.size != ranks_of:
            continue
        case = Case(CASE.tokens[: ctx.size], hidden=CASE.hidden, experts=8, topk=3, routing="skewed", alignment=4)
        with elastic.buffer_of(ctx, M) as buffer:
            exchange = elastic.expect(case, M)
            for expand in (False, True):
                elastic.round_trip(ctx, buffer, case, exchange, expand=expand, sync=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_few_ranks(pool, ranks):
    pool.run(ranks, rank_sizes)


# ---- warm-up


def rank_warm(ctx, kind):
    case = CASES[3]
    with elastic.buffer_of(ctx, M, kind=kind, hidden=case.hidden, num_topk=case.topk) as buffer:
        for options in ({}, {"do_expand": True, "use_fp8": True}, {"do_cpu_sync": False, "num_tokens": 3}):
            before = buffer.stats()["dispatch"]["calls"]
            buffer.warmup(case.experts, **options)
            assert buffer.stats()["dispatch"]["calls"] > before
        for expand in (False, True):
            elastic.round_trip(ctx, buffer, case, elastic.expect(case, M), expand=expand, sync=True)
        for wrong, named in (
            ({"num_tokens": M + 1}, "num_tokens"),
            ({"hidden": 1.5}, "hidden"),
            ({"use_fp8": "no"}, "use_fp8"),
        ):
            with pytest.raises((ValueError, TypeError), match=named):
                buffer.warmup(case.experts, **wrong)
        with pytest.raises((AssertionError, ValueError), match="num_experts"):
            buffer.warmup(case.experts + 1)
    with elastic.buffer_of(ctx, M, kind=kind) as buffer:  # without K
        with pytest.raises(ValueError, match="num_topk"):
            buffer.warmup(case.experts)
        buffer.warmup(case.experts, num_topk=2)


@pytest.mark.parametrize("kind", ["ElasticBuffer", "EPBuffer"])
def test_warmup(pool, kind):
    pool.run(4, rank_warm, kind)


# ---- random rounds

ROUNDS, BATCH = (1000, 50) if full() else (10, 10)


def random_case(seed: int, ranks: int) -> tuple[Case, dict[str, bool]]:
    gen = cases.generator(seed, 17)
    draw = lambda n: int(torch.randint(0, n, (1,), generator=gen))  # noqa: E731
    kind = ("bf16", "bits", "fp8")[draw(3)]
    topk = 1 + draw(9)
    per_rank = max(-(-topk // ranks), 1 + draw(12))
    case = Case(
        tokens=tuple(draw(60) * (draw(5) > 0) for _ in range(ranks)),
        hidden=16 * (1 + draw(24)),
        experts=ranks * per_rank,
        topk=topk,
        routing=("random", "holes", "duplicates", "skewed", "none", "hot", "hot_first", "few", "edges")[draw(9)],
        kind=kind,
        num_scales=1 + draw(9),
        scales=("float32", "int32", "strided", "sliced")[draw(4)],
        index_dtype=(torch.int64, torch.int32)[draw(2)],
        alignment=(1, 1, 2, 4, 7, 128)[draw(6)],
        seed=seed,
    )
    return case, {"expand": bool(draw(2)), "sync": bool(draw(2))}


def rank_random(ctx, first, count):
    with elastic.buffer_of(ctx, M, 256) as buffer:
        for seed in range(first, first + count):
            case, how = random_case(seed, ctx.size)
            exchange = elastic.expect(case, M)
            if how["expand"] and not how["sync"] and overflows(ctx, exchange, case):
                with pytest.raises(RuntimeError, match="so many expanded rows arrive"):
                    elastic.dispatch(ctx, buffer, exchange, case, **how)
                how["sync"] = True
            elastic.round_trip(ctx, buffer, case, exchange, **how)


def overflows(ctx, exchange, case):
    """Only tokens that name an expert twice bring more rows than the bound has room for: the call is refused."""
    rows = elastic.Call(case, exchange, ctx.rank, M, True, False).rows
    return any(len(received.expanded) > rows for received in exchange.received)


@pytest.mark.parametrize("first", range(0, ROUNDS, BATCH))
def test_random(pool, first):
    pool.run(4, rank_random, first, BATCH, deadline=240)


# ---- handles


def rank_handles(ctx):
    from deep_ep import EPHandle

    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer, elastic.buffer_of(ctx, M, CASE.hidden) as other:
        for expand in (False, True):
            call = elastic.dispatch(ctx, buffer, exchange, CASE, expand=expand)
            second = elastic.dispatch(ctx, buffer, exchange, CASE, expand=expand)
            made = call.handle
            leaves, tree = pytree.tree_flatten({"handle": made})
            assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 8
            mapped = pytree.tree_map(lambda t: t.clone(), made)
            by_position = EPHandle(
                made.do_expand, made.num_experts, made.expert_alignment, made.num_max_tokens_per_rank, made.num_sms,
                made.topk_idx, made.num_recv_tokens, made.num_expanded_tokens, made.num_recv_tokens_per_expert_list,
                made.psum_num_recv_tokens_per_scaleup_rank, made.psum_num_recv_tokens_per_expert,
                made.num_unaligned_recv_tokens_per_expert, made.recv_src_metadata, made.dst_buffer_slot_idx,
                made.token_metadata_at_forward, made.channel_linked_list,
            )  # fmt: skip
            assigned = copy.copy(made)
            assigned.recv_src_metadata = second.handle.recv_src_metadata
            assigned.psum_num_recv_tokens_per_expert = second.handle.psum_num_recv_tokens_per_expert.clone()
            unpickled = pickle.loads(pickle.dumps(made))
            for handle in (pytree.tree_unflatten(leaves, tree)["handle"], mapped, by_position, assigned, unpickled):
                call.handle = handle
                elastic.check_handle(call)
                elastic.check(elastic.again(ctx, other, call))
                elastic.combine(ctx, other, call)
            # Without CPU sync the metadata has rows for any routing; a caller may cut it to the real ones.
            loose = elastic.dispatch(ctx, buffer, exchange, CASE, expand=expand, sync=False)
            real = int(loose.handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            loose.handle.recv_src_metadata = loose.handle.recv_src_metadata[:real]
            elastic.combine(ctx, buffer, loose)
            # The tensor itself, or a copy.
            idx = ctx.to_device(exchange.inputs[ctx.rank].topk_idx)
            for copied in (0, 1):
                _, _, _, handle, _ = buffer.dispatch(
                    elastic.x_of(ctx, exchange.inputs[ctx.rank]), idx, num_experts=CASE.experts, do_handle_copy=copied
                )
                assert (handle.topk_idx.data_ptr() == idx.data_ptr()) != bool(copied) or not len(idx)
                assert torch.equal(handle.topk_idx, idx)
            # Plain rows by an expanded handle, in the order of the metadata.
            if expand:
                call.handle = made
                rows = elastic.again(ctx, buffer, call, expand=False)
                rows.sync = True
                elastic.check(rows)


def test_handles(pool):
    """Copied, pickled, mapped, rebuilt by position, assigned to; on another buffer too."""
    pool.run(4, rank_handles)


def rank_outlives(ctx):
    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        call = elastic.dispatch(ctx, buffer, exchange, CASE, expand=True)
    elastic.check(call)
    with elastic.buffer_of(ctx, 3, 16) as buffer:  # smaller than the call: a size costs time alone
        elastic.combine(ctx, buffer, call)
        elastic.check(elastic.again(ctx, buffer, call))


def test_handle_outlives_its_buffer(pool):
    pool.run(4, rank_outlives)


class Layer(torch.autograd.Function):
    """Dispatch and combine with gradients, as training frameworks write them."""

    @staticmethod
    def forward(ctx, buffer, x, weights, idx, num_experts, expand):
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=num_experts, do_expand=expand, do_handle_copy=False
        )
        back, _, _ = buffer.combine(rows, handle, row_weights)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.save_for_backward(handle.topk_idx, handle.recv_src_metadata)
        return back

    @staticmethod
    def backward(ctx, grad):
        ctx.handle.topk_idx, ctx.handle.recv_src_metadata = ctx.saved_tensors
        expand = ctx.handle.do_expand
        rows, _, _, _, _ = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, num_sms=ctx.handle.num_sms, do_cpu_sync=False, do_expand=expand,
            do_zero_padding=expand,
        )  # fmt: skip
        return None, ctx.buffer.combine(rows, ctx.handle)[0], None, None, None, None


def rank_checkpoint(ctx):
    """Under activation checkpointing the forward part runs twice; the gradient counts each choice's ranks or rows."""
    from torch.utils.checkpoint import checkpoint

    own = CASE.inputs()[ctx.rank]
    idx, weights = ctx.to_device(own.topk_idx), ctx.to_device(own.topk_weights)
    owner = torch.where(own.topk_idx < 0, -1, own.topk_idx // (CASE.experts // ctx.size))
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        for expand in (False, True):
            times = (own.topk_idx >= 0).sum(1) if expand else torch.tensor([len(set(r) - {-1}) for r in owner.tolist()])
            for reentrant in (False, True):
                x = ctx.to_device(own.x).clone().requires_grad_()
                layer = lambda t, e=expand: Layer.apply(buffer, t, weights, idx, CASE.experts, e)  # noqa: E731
                out = checkpoint(layer, x, use_reentrant=reentrant)
                checks.same_bits("output", out.detach().cpu(), own.x * times.unsqueeze(1).to(torch.bfloat16))
                out.backward(torch.ones_like(out))
                want = times.unsqueeze(1).expand(own.x.shape).to(torch.bfloat16)
                checks.same_bits("gradient", x.grad.cpu(), want.contiguous())


def test_activation_checkpoint(pool):
    pool.run(4, rank_checkpoint)


# ---- beside V1


def rank_side_by_side(ctx):
    case = CASE.but(alignment=1)
    exchange = elastic.expect(case, M)
    with elastic.buffer_of(ctx, M, case.hidden) as buffer, normal.buffer_of(ctx) as v1:
        assert v1._core.comm_stream_address != buffer._core.comm_stream_address or ctx.engine == "cpu"
        call = elastic.dispatch(ctx, buffer, exchange, case, expand=True)
        old = normal.dispatch_and_check(ctx, v1, case)
        elastic.check(call)
        elastic.combine(ctx, buffer, call)
        normal.combine(ctx, v1, old)
        # Ordered by events, as any two buffers.
        call = elastic.dispatch(ctx, buffer, exchange, case, async_with_compute_stream=True)
        old = normal.dispatch(ctx, v1, case, previous_event=call.event, async_finish=True)
        again = elastic.dispatch(
            ctx, buffer, exchange, case, previous_event=old.event, allocate_on_comm_stream=True,
            async_with_compute_stream=True,
        )  # fmt: skip
        for event in (call.event, old.event, again.event):
            event.current_stream_wait()
        elastic.check(call)
        elastic.check(again)
        normal.check(old)
        assert {name for name, entry in v1.stats().items() if entry["calls"]} >= {"dispatch", "combine"}


def test_beside_v1(pool):
    pool.run(4, rank_side_by_side)


# ---- events


def rank_events(ctx):
    from deep_ep import ElasticBuffer, EventHandle, EventOverlap

    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        captured = ElasticBuffer.capture()
        assert type(captured) is EventHandle
        call = elastic.dispatch(ctx, buffer, exchange, CASE)
        assert type(call.event) is EventOverlap and call.event.event is None
        with pytest.raises(AssertionError, match="without an event"):
            call.event.current_stream_wait()
        calls = []
        for previous in (None, captured, EventOverlap(captured)):
            for flag in (0, 1):
                calls.append(
                    elastic.dispatch(
                        ctx,
                        buffer,
                        exchange,
                        CASE,
                        previous_event=previous,
                        async_with_compute_stream=flag,
                        allocate_on_comm_stream=1 if previous is not None else flag,
                    )  # fmt: skip
                )
        seen = []
        overlap = calls[1].event
        overlap.register_hook_after_wait(lambda: seen.append(1) or "result")
        with pytest.raises(AssertionError, match="has a hook"):
            overlap.register_hook_after_wait(lambda: None)
        assert overlap.wait() == "result" and overlap.current_stream_wait() is None and seen == [1]
        with overlap(release_handle=True) as inside:
            assert inside is overlap and overlap.event is not None
        assert overlap.event is None
        calls[3].event.current_stream_wait(release_handle=True)
        calls[5].event.event.current_stream_wait()
        calls[5].event.event.current_stream_wait()
        for call in calls:
            elastic.check(call)
            elastic.check_handle(call)
        # A call's results feed the next by its event; the caller drops its tensors at once.
        call = elastic.dispatch(ctx, buffer, exchange, CASE, expand=True, async_with_compute_stream=True)
        elastic.combine(
            ctx, buffer, call, previous_event=call.event, allocate_on_comm_stream=True, async_with_compute_stream=True,
            previous_event_before_epilogue=captured,
        )  # fmt: skip
        with pytest.raises(AssertionError, match="allocate_on_comm_stream"):
            elastic.dispatch(ctx, buffer, exchange, CASE, previous_event=captured)
        elastic.check(elastic.dispatch(ctx, buffer, exchange, CASE))
        for flag in (True, False):
            buffer.barrier(use_comm_stream=flag, with_cpu_sync=flag)


def test_events(pool):
    pool.run(4, rank_events)


def rank_deferred(ctx):
    from deep_ep import EventOverlap

    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden, kind="EPBuffer") as buffer:
        for expand in (False, True):
            for how in ("sync", "bound", "cached"):
                call = (
                    elastic.dispatch(ctx, buffer, exchange, CASE, expand=expand, sync=how == "sync")
                    if (how == "cached")
                    else elastic.Call(CASE, exchange, ctx.rank, M, expand, how == "sync")
                )
                own = call.own
                arguments = (
                    {"handle": call.handle}
                    if how == "cached"
                    else {
                        "topk_idx": ctx.to_device(own.topk_idx), "num_experts": CASE.experts,
                        "expert_alignment": CASE.alignment, "do_cpu_sync": how == "sync",
                    }
                )  # fmt: skip
                event = buffer.dispatch(
                    elastic.x_of(ctx, own), topk_weights=ctx.to_device(own.topk_weights), do_expand=expand,
                    async_with_compute_stream=True, defer_epilogue=True, **arguments,
                )  # fmt: skip
                assert type(event) is EventOverlap
                for refused in (
                    lambda: elastic.dispatch(ctx, buffer, exchange, CASE),  # noqa: B023
                    lambda: buffer.combine(ctx.to_device(own.x), call.handle),  # noqa: B023
                ):
                    with pytest.raises(RuntimeError, match="deferred dispatch of this buffer was not waited for"):
                        refused()
                call.recv_x, call.recv_topk_idx, call.recv_topk_weights, call.handle = event.wait()
                assert event.wait() is None
                elastic.check(call)
                rows = ctx.to_device(torch.ones(len(call.recv_x), CASE.hidden, dtype=torch.bfloat16))
                wanted, _, _ = buffer.combine(rows, call.handle)
                event = buffer.combine(rows, call.handle, async_with_compute_stream=True, defer_epilogue=True)
                combined, weights = event.current_stream_wait()
                assert torch.equal(combined, wanted) and weights is None
        with pytest.raises(AssertionError, match="do_handle_copy"):
            elastic.dispatch(ctx, buffer, exchange, CASE, do_handle_copy=True)
        with pytest.raises(AssertionError, match="defer_epilogue needs"):
            elastic.dispatch(ctx, buffer, exchange, CASE, defer_epilogue=True)
        buffer.barrier(wait_comm_stream=True)


def rank_reference(ctx):
    """EPBuffer: a handle holds the caller's indices, and is refused once they were written to; a copy has its own."""
    exchange = elastic.expect(CASE, M)
    own = exchange.inputs[ctx.rank]
    x, weights = ctx.to_device(own.x), ctx.to_device(own.topk_weights)
    with elastic.buffer_of(ctx, M, CASE.hidden, kind="EPBuffer") as buffer:
        for defer in (False, True):
            idx = ctx.to_device(own.topk_idx).clone()
            numbers = {"num_experts": CASE.experts, "expert_alignment": CASE.alignment}
            result = buffer.dispatch(x, idx, weights, async_with_compute_stream=defer, defer_epilogue=defer, **numbers)
            rows, _, _, handle = (result.wait() if defer else result)[:4]
            rows = rows.to(torch.bfloat16)
            assert handle.topk_idx is idx
            others = [copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))]
            leaves, spec = pytree.tree_flatten(handle)
            others.append(pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec))
            wanted, _, _ = buffer.combine(rows, handle)
            idx += 1
            for call in (lambda: buffer.combine(rows, handle), lambda: buffer.dispatch(x, handle=handle)):  # noqa: B023
                with pytest.raises(AssertionError, match=r"handle\.topk_idx was written to after the dispatch"):
                    call()
            for other in others:
                assert torch.equal(buffer.combine(rows, other)[0], wanted)
            handle.topk_idx = ctx.to_device(own.topk_idx)  # the right ones, assigned
            assert torch.equal(buffer.combine(rows, handle)[0], wanted)


def test_indices_by_reference(pool):
    pool.run(2, rank_reference)


def test_deferred(pool):
    """EPBuffer: results by the event's first wait; other calls are refused by name until then."""
    pool.run(4, rank_deferred)


def rank_no_scales(ctx):
    """Scales of no columns come as they go, by Python and by the face."""
    x, scales = ctx.to_device(torch.ones(5, 64).bfloat16()), torch.zeros(5, 0, device=ctx.device)
    idx = torch.zeros(5, 1, dtype=torch.int64, device=ctx.device)
    with elastic.buffer_of(ctx, 8, 64) as buffer:
        handle = buffer.dispatch(x, idx, num_experts=1)[3]
        for columns in (False, True):
            for given in ({"topk_idx": idx, "num_experts": 1}, {"handle": handle}):
                for _ in range(3):
                    (rows, received), *_ = buffer.dispatch((x, scales), **given, use_tma_aligned_col_major_sf=columns)
                    assert torch.equal(rows, x) and received.shape == (5, 0)


def test_no_scales(pool):
    pool.run(1, rank_no_scales)


def rank_dropped(ctx):
    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden, kind="EPBuffer") as buffer:
        given = {"async_with_compute_stream": True, "defer_epilogue": True}
        call = elastic.dispatch(ctx, buffer, exchange, CASE)
        rows = ctx.to_device(torch.ones(len(call.recv_x), CASE.hidden, dtype=torch.bfloat16))
        wanted = buffer.combine(rows, call.handle)[0]
        own = call.own
        inputs = elastic.x_of(ctx, own), ctx.to_device(own.topk_idx)
        for late in (False, True):  # the event is dropped before or behind the peers' wait
            event = buffer.dispatch(*inputs, num_experts=CASE.experts, expert_alignment=CASE.alignment, **given)
            with pytest.raises(RuntimeError, match="deferred dispatch of this buffer was not waited for"):
                buffer.release()
            if ctx.rank == 1:
                time.sleep(0.2 * late)
                event = None
            else:
                with pytest.raises(RuntimeError, match="rank 1"):
                    victims.settled(ctx, buffer, event.wait)()
            elastic.check(elastic.dispatch(ctx, buffer, exchange, CASE))
        buffer.combine(rows, call.handle, **given)
        assert torch.equal(buffer.combine(rows, call.handle)[0], wanted)
        for options in ({"handle": call.handle}, {"topk_idx": inputs[1], "num_experts": 8, "do_cpu_sync": False}):
            buffer.dispatch(inputs[0], **options, **given)
            assert torch.equal(buffer.combine(rows, call.handle)[0], wanted)


def test_deferred_and_dropped(pool):
    """EPBuffer: an event that nobody has any more leaves the buffer usable; the peers of a dispatch hear of it."""
    pool.run(4, rank_dropped)


# ---- statistics, and callers who change torch's defaults


def rank_defaults(ctx):
    exchange = elastic.expect(CASE, M)
    want = torch.tensor(exchange.received[ctx.rank].counts, dtype=torch.int32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
            results = []
            with torch.inference_mode():
                for expand in (0, 1):
                    stats = ctx.to_device(torch.full((CASE.experts // ctx.size,), 5, dtype=torch.int32, device="cpu"))
                    with torch.device("cpu"):
                        call = elastic.dispatch(
                            ctx, buffer, exchange, CASE, expand=expand, sync=not expand,
                            cumulative_local_expert_recv_stats=stats,
                        )  # fmt: skip
                        checks.same_bits("stats", stats.cpu(), want + 5)
                        results.append(call)
            with torch.device("cpu"):
                for call in results:
                    elastic.check(call)
                    elastic.combine(ctx, buffer, call)
    finally:
        torch.set_default_dtype(before)


def test_changed_defaults(pool):
    """Inference mode, default dtype BF16 and a default device that nothing may be allocated on."""
    pool.run(4, rank_defaults)
