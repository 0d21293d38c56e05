"""Outputs are recycled only when nobody holds them: not a tensor, not a view, not a hook that is still to come."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

import cases
import checks
import lowlat
import normal
from cases import Case

CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
B = 16
HOOK = {"return_recv_hook": True}
# More than a megabyte of rows on each rank, so that keeping them for the next call is worth it.
BIG = Case((110, 90, 120, 100), hidden=2048, experts=8, topk=7)


def many_calls(ctx, buffer, first=100, count=6):
    """Calls whose results nobody keeps: their outputs are free to be used again."""
    for turn in range(count):
        call = lowlat.dispatch_and_check(ctx, buffer, CASE.but(seed=first + turn), B)
        lowlat.combine_and_check(ctx, buffer, call)
        del call
        gc.collect()


def rank_results_stay(ctx, case):
    """Results of many calls, all still referenced: none may be overwritten by a later call."""
    with lowlat.buffer_of(ctx, case, B) as buffer:
        kept = []
        for turn in range(6):
            call = lowlat.dispatch_and_check(ctx, buffer, case.but(seed=turn, routing="holes"), B)
            kept.append((call, lowlat.combine_and_check(ctx, buffer, call, salt=turn)))
        for call, done in kept:
            lowlat.check(call)
            lowlat.check_combined(done)
        lowlat.combine_and_check(ctx, buffer, kept[0][0], salt=50)


def test_results_stay_while_referenced(pool):
    pool.run(4, rank_results_stay, CASE)


def rank_hook_without_tensors(ctx):
    """The caller drops every result of a send; its receive must not land in another call's outputs."""
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        for turn in range(4):
            dropped = lowlat.dispatch(ctx, buffer, CASE.but(seed=turn), B, **HOOK)
            hook = dropped.hook
            del dropped
            gc.collect()
            kept = lowlat.dispatch(ctx, buffer, CASE.but(seed=50 + turn), B, **HOOK)
            hook()
            kept.hook()
            lowlat.check(kept)


def test_hook_without_its_tensors(pool):
    pool.run(4, rank_hook_without_tensors)


def rank_another_call_under_way(ctx):
    """Results of a first call stay right while a second one of the same shape is under way."""
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        for turn in range(4):
            first = lowlat.dispatch_and_check(ctx, buffer, CASE.but(seed=turn), B)
            second = lowlat.dispatch(ctx, buffer, CASE.but(seed=60 + turn), B, **HOOK)
            lowlat.check(first)
            second.hook()
            lowlat.check(first)
            lowlat.check(second)


def test_results_stay_while_another_call_is_under_way(pool):
    pool.run(4, rank_another_call_under_way)


def rank_asynchronous_without_tensors(ctx):
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        for turn in range(4):
            lowlat.dispatch(ctx, buffer, CASE.but(seed=turn), B, async_finish=True)
            gc.collect()
            kept = lowlat.dispatch(ctx, buffer, CASE.but(seed=70 + turn), B, async_finish=True)
            lowlat.finish(kept)
            lowlat.check(kept)


def test_asynchronous_call_without_its_tensors(pool):
    pool.run(4, rank_asynchronous_without_tensors)


HOLD = {
    "a view": lambda call: call.recv_x[0][0, :3],
    "the scales": lambda call: call.recv_x[1],
    "the counts": lambda call: call.counts,
    "src_info": lambda call: call.handle[0],
    "layout_range": lambda call: call.handle[1],
    "a view of a view": lambda call: call.handle[1][0].view(-1)[:2],
}


def rank_held(ctx, name):
    """One part is kept; the bytes of it must not change under later calls."""
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B)
        held = HOLD[name](call)
        before = checks.raw(held).clone()
        del call
        gc.collect()
        many_calls(ctx, buffer)
        assert torch.equal(checks.raw(held), before), f"{name} was overwritten while it was held"


@pytest.mark.parametrize("name", HOLD)
def test_held_part(pool, name):
    pool.run(4, rank_held, name)


def rank_storage_held_with_older_torch(ctx):
    from deep_ep import _memory

    assert _memory._holders_are_references(), "this torch does not count other holders as references"
    with mock.patch.object(_memory, "_holders_are_references", lambda: False):
        rank_storage_held(ctx)


def test_held_storage_with_older_torch(pool):
    """Before 2.10 what autograd holds is seen in the tensor's own count alone."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        pytest.skip("needs torch 2.10: below, test_held_storage is this test")
    pool.run(4, rank_storage_held_with_older_torch)


def rank_storage_held(ctx):
    """Other ways to hold memory: the storage, a NumPy array (CPU), autograd's saved tensors."""
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B)
        count = call.counts
        storage = count.untyped_storage()
        offset, want = count.storage_offset() * 4, count.tolist()
        array = call.handle[1].numpy() if ctx.device.type == "cpu" else None
        ranges = call.handle[1].clone()
        weight = torch.ones((1,), device=ctx.device, requires_grad=True)
        saved = (count.to(torch.float32) * weight).sum()
        del call, count
        gc.collect()
        many_calls(ctx, buffer)
        kept = torch.empty(0, dtype=torch.uint8, device=ctx.device).set_(storage)[offset : offset + 4 * len(want)]
        assert kept.view(torch.int32).tolist() == want, "the storage was held"
        assert array is None or torch.equal(torch.from_numpy(array), ranges), "a NumPy array was held"
        assert saved.item() == sum(want)


def test_held_storage(pool):
    pool.run(4, rank_storage_held)


def rank_only_storage_held(ctx):
    """torch has one Python object for a storage: holding it does not raise the storage's own count."""
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B)
        storage, offset, want = call.counts.untyped_storage(), call.counts.storage_offset() * 4, call.counts.tolist()
        del call
        gc.collect()
        many_calls(ctx, buffer)
        kept = torch.empty(0, dtype=torch.uint8, device=ctx.device).set_(storage)[offset : offset + 4 * len(want)]
        assert kept.view(torch.int32).tolist() == want, "the storage was held"


def test_only_storage_held(pool):
    pool.run(4, rank_only_storage_held)


def rank_handle_kept(ctx):
    """A combine long after, with nothing kept but the handle."""
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B)
        call.recv_x = None
        gc.collect()
        many_calls(ctx, buffer)
        lowlat.combine_and_check(ctx, buffer, call)


def rank_captured(ctx):
    """What a capture makes is the graph's: no later call may get it, and the capture nothing that eager calls use."""
    with (
        lowlat.buffer_of(ctx, CASE, B) as buffer,
        mock.patch("deep_ep._torch.is_capturing", return_value=False) as capturing,
    ):
        key, pool, stream = (CASE.experts // ctx.size, B, CASE.hidden, False, False), [], 1
        first = buffer._take_outputs(key, pool, stream)
        assert buffer._take_outputs(key, pool, stream) is first
        capturing.return_value = True
        captured = buffer._take_outputs(key, pool, stream)
        assert captured is not first and captured not in pool
        assert captured.tensors[0].data_ptr() != first.tensors[0].data_ptr()
        assert buffer._take_outputs(key, pool, stream) is not captured
        capturing.return_value = False
        assert pool == [first] and buffer._take_outputs(key, pool, stream) is first


def test_captured(pool):
    pool.run(1, rank_captured)


def test_handle_kept(pool):
    pool.run(4, rank_handle_kept)


def rank_memory(ctx):
    """Outputs of 300 calls that nobody keeps take no more memory than those of a few."""
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        many_calls(ctx, buffer, count=3)
        before = resident()
        x = ctx.put(lowlat.make_x(CASE, ctx.rank, True))
        idx = ctx.put(CASE.routings()[ctx.rank])
        for _ in range(300):
            buffer.low_latency_dispatch(x, idx, B, CASE.experts)
        assert resident() - before < 30_000, f"grew by {resident() - before} kB"


def resident():
    with open("/proc/self/status", encoding="utf-8") as file:
        return int(next(line for line in file if line.startswith("VmRSS")).split()[1])


def test_memory_does_not_grow(pool):
    pool.run(4, rank_memory)


def test_row_cache_waits_for_every_holder():
    """A block of received rows is used again only when no tensor, view or storage of it is held."""
    from deep_ep import _memory

    cache, shape = _memory.RowCache(), (1024, 1024)
    first = cache.empty(shape, torch.bfloat16)
    where = first.data_ptr()
    assert cache.empty(shape, torch.bfloat16).data_ptr() != where
    for hold in (lambda t: t[3:], lambda t: t.detach(), lambda t: t.untyped_storage(), lambda t: t.numpy()):
        held = hold(first.view(torch.int16))
        first = None
        assert cache.empty(shape, torch.bfloat16).data_ptr() != where
        held = None
        first = cache.empty(shape, torch.bfloat16)
        assert held is None and first.data_ptr() == where, "the block came back late"
    assert first.shape == shape and first.is_contiguous()
    small = cache.empty((600, 1024), torch.bfloat16)
    assert small.data_ptr() != where and small.shape == (600, 1024)


def big_calls(ctx, buffer, first=100, count=4):
    """Normal-mode calls with other contents and routing, whose results nobody keeps and nobody checks."""
    for turn in range(count):
        idx = ctx.put(cases.routing(BIG.but(seed=first + turn, routing="holes"), ctx.rank))
        x = torch.full((len(idx), BIG.hidden), turn + 1.5, dtype=torch.bfloat16, device=ctx.device)
        weights = torch.full(idx.shape, turn + 0.25, dtype=torch.float32, device=ctx.device)
        per_rank, _, per_expert, table, _ = buffer.get_dispatch_layout(idx, BIG.experts)
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": table}
        rows, _, row_weights, _, handle, _ = buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights)
        buffer.combine(rows, handle, topk_weights=row_weights)
        del rows, row_weights, handle
        gc.collect()


HOLD_ROWS = {
    "the rows": lambda e, sums: e.recv_x,
    "a view of rows": lambda e, sums: e.recv_x[5:9, :100],
    "a view of another dtype": lambda e, sums: e.recv_x.view(torch.int16)[3],
    "a detached tensor": lambda e, sums: e.recv_x.detach(),
    "indices": lambda e, sums: e.recv_topk_idx,
    "weights": lambda e, sums: e.recv_topk_weights,
    "sums": lambda e, sums: sums,
    "a view of sums": lambda e, sums: sums[1:3],
}


def rank_rows_held(ctx, name):
    with normal.buffer_of(ctx) as buffer:
        big_calls(ctx, buffer, count=2)
        exchange = normal.dispatch_and_check(ctx, buffer, BIG)
        sums, _, _ = normal.combine(ctx, buffer, exchange)
        held = HOLD_ROWS[name](exchange, sums)
        before = checks.raw(held).clone()
        del exchange, sums
        gc.collect()
        big_calls(ctx, buffer)
        assert torch.equal(checks.raw(held), before), f"{name} changed while it was held"


@pytest.mark.parametrize("name", HOLD_ROWS)
def test_held_rows(pool, name):
    pool.run(4, rank_rows_held, name)


def rank_rows_held_otherwise(ctx):
    """A storage, a NumPy array, and what autograd saved for a backward that comes later."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, BIG)
        rows = exchange.recv_x
        storage, offset, size = rows.untyped_storage(), rows.storage_offset() * 2, rows.numel() * 2
        before = checks.raw(rows).flatten().clone()
        weight = torch.ones((1,), dtype=torch.bfloat16, device=ctx.device, requires_grad=True)
        loss = (rows * weight).float().sum()
        want = rows.float().sum().item()
        array = exchange.recv_topk_weights.numpy() if ctx.device.type == "cpu" else None
        array_before = None if array is None else array.copy()
        del exchange, rows
        gc.collect()
        big_calls(ctx, buffer)
        now = torch.empty(0, dtype=torch.uint8, device=ctx.device).set_(storage)[offset : offset + size]
        assert torch.equal(now.cpu(), before), "the storage was held"
        assert array is None or (array == array_before).all(), "a NumPy array was held"
        loss.backward()
        assert abs(weight.grad.item() - want) <= abs(want) * 0.01 + 1, "autograd had saved the rows"


def test_rows_held_otherwise(pool):
    pool.run(4, rank_rows_held_otherwise)


def rank_rows_in_flight(ctx):
    """Results of an asynchronous call are dropped while it runs: the next call must not share its rows."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, BIG)
        for turn in range(4):
            first = normal.x_of(ctx, BIG.but(kind="bits", seed=turn).inputs()[ctx.rank])
            buffer.dispatch(first, handle=exchange.handle, async_finish=True)
            gc.collect()
            rows, *_, event = buffer.dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle, async_finish=True)
            event.current_stream_wait()
            checks.same_rows("recv_x", rows, exchange.want.x)
            del rows


def test_rows_in_flight(pool):
    pool.run(4, rank_rows_in_flight)


def rank_rows_memory(ctx):
    """Rows that nobody keeps take no more memory than those of a few calls; kept rows stay apart."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, BIG)
        x = normal.x_of(ctx, exchange.own)
        for _ in range(3):
            buffer.dispatch(x, handle=exchange.handle)
        before = resident()
        for _ in range(100):  # a megabyte and a half each
            buffer.dispatch(x, handle=exchange.handle)
        assert resident() - before < 60_000, f"grew by {resident() - before} kB"
        kept = [normal.dispatch_and_check(ctx, buffer, BIG.but(seed=turn)) for turn in range(4)]
        for exchange in kept:
            normal.check(exchange)


def test_rows_memory(pool):
    pool.run(4, rank_rows_memory)
