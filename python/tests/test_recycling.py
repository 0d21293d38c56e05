"""Low-latency outputs are recycled only when nobody holds them: not a tensor, not a view, not a hook to come."""

from __future__ import annotations

import gc

import pytest
import torch

import checks
import lowlat
from cases import Case

CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
B = 16
HOOK = {"return_recv_hook": True}


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
    from deep_ep import _torch as tt

    cache, shape = tt.RowCache(), (1024, 1024)
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
