"""Memory of outputs is used again only when no holder is left: no tensor, no view, no hook that is still to come.

Only storages are kept, so nothing that a caller does to a tensor or its storage may reach a later result.
"""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import cases
import checks
import elastic
import lowlat
import normal
from cases import Case
from conftest import test_device

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_storage_Use_Count") and torch.version.cuda is None,
    reason="this CPU build of torch does not count a storage's holders, so nothing is used again (torch 2.6)",
)
CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
B = 16
HOOK = {"return_recv_hook": True}
# More than a megabyte of rows and of sums on each rank, so that keeping them for the next call is worth it.
BIG = Case((290, 270, 300, 280), hidden=2048, experts=8, topk=7)


@contextmanager
def buffer_of(ctx, case, num_max, **options):
    """A low-latency buffer whose outputs are recycled though they are small."""
    from deep_ep import _memory

    with (
        mock.patch.object(_memory.RowCache, "MIN_BYTES", 1),
        lowlat.buffer_of(ctx, case, num_max, **options) as buffer,
    ):
        yield buffer


def many_calls(ctx, buffer, first=100, count=6):
    """Calls whose results are dropped: their memory is free to be used again."""
    for turn in range(count):
        call = lowlat.dispatch_and_check(ctx, buffer, CASE.but(seed=first + turn), B)
        lowlat.combine_and_check(ctx, buffer, call)
        del call
        gc.collect()


def rank_results_stay(ctx, case):
    """Results of many calls, all still referenced: none may be overwritten by a later call."""
    with buffer_of(ctx, case, B) as buffer:
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
    with buffer_of(ctx, CASE, B) as buffer:
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
    with buffer_of(ctx, CASE, B) as buffer:
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
    with buffer_of(ctx, CASE, B) as buffer:
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
    with buffer_of(ctx, CASE, B) as buffer:
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
    with buffer_of(ctx, CASE, B) as buffer:
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
    with buffer_of(ctx, CASE, B) as buffer:
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
    with buffer_of(ctx, CASE, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B)
        call.recv_x = None
        gc.collect()
        many_calls(ctx, buffer)
        lowlat.combine_and_check(ctx, buffer, call)


def test_handle_kept(pool):
    pool.run(4, rank_handle_kept)


def rank_memory(ctx):
    """Outputs of 300 calls that are dropped take no more memory than those of a few."""
    with buffer_of(ctx, CASE, B) as buffer:
        many_calls(ctx, buffer, count=3)
        before = resident()
        x = ctx.to_device(lowlat.make_x(CASE, ctx.rank, True))
        idx = ctx.to_device(CASE.routings()[ctx.rank])
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

    cache, shape = _memory.RowCache(4), (1024, 1024)
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
    """Normal-mode calls with other contents and routing, whose results are neither kept nor checked."""
    for turn in range(count):
        idx = ctx.to_device(cases.routing(BIG.but(seed=first + turn, routing="holes"), ctx.rank))
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


def rank_sums_in_flight(ctx):
    """The same for the sums of a combine."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, BIG)
        for turn in range(4):
            dropped = torch.full_like(exchange.recv_x, turn + 1.5)
            buffer.combine(dropped, exchange.handle, async_finish=True)
            gc.collect()
            normal.combine(ctx, buffer, exchange, seed=turn, async_finish=True)


def test_sums_in_flight(pool):
    pool.run(4, rank_sums_in_flight)


def rank_sums_used_again(ctx, v2):
    """Sums that no one holds give their memory to the next call's; sums that are held keep it."""
    with elastic.buffer_of(ctx, num_max=300, hidden=BIG.hidden) if v2 else normal.buffer_of(ctx) as buffer:
        if v2:
            call = elastic.dispatch(ctx, buffer, elastic.expect(BIG, 300), BIG)
            combine = elastic.combine
        else:
            call, combine = normal.dispatch_and_check(ctx, buffer, BIG), normal.combine
        seen = []
        for turn in range(6):
            sums = combine(ctx, buffer, call, seed=turn)[0]
            seen.append(sums.data_ptr())
            del sums
        cache = buffer._mode.row_cache if v2 else buffer._normal.row_cache
        assert seen[-1] in [block.storage.data_ptr() for block in cache._blocks]
        assert len(set(seen[1:])) == 1, f"sums that nobody held were at {seen}"  # the first call has no plan yet
        kept = [combine(ctx, buffer, call, seed=turn)[0] for turn in range(8)]
        assert len({sums.data_ptr() for sums in kept}) == len(kept)


@pytest.mark.skipif(test_device() != "cpu", reason="needs the CPU engine: on CUDA sums are torch's own memory")
@pytest.mark.parametrize("v2", [False, True])
def test_sums_used_again(pool, v2):
    pool.run(4, rank_sums_used_again, v2)


def rank_rows_memory(ctx):
    """Rows that are dropped take no more memory than those of a few calls; kept rows stay apart."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, BIG)
        x = normal.x_of(ctx, exchange.own)
        for _ in range(3):
            buffer.dispatch(x, handle=exchange.handle)
        before = resident()
        for _ in range(100):  # four megabytes each
            buffer.dispatch(x, handle=exchange.handle)
        assert resident() - before < 60_000, f"grew by {resident() - before} kB"
        kept = [normal.dispatch_and_check(ctx, buffer, BIG.but(seed=turn)) for turn in range(4)]
        for exchange in kept:
            normal.check(exchange)


def test_rows_memory(pool):
    pool.run(4, rank_rows_memory)


def set_attribute(tensor):
    tensor.note = "set by the caller"


DISTURB = {
    "set_ to nothing": lambda t: t.set_(torch.empty(0, dtype=t.dtype, device=t.device)),
    "data replaced": lambda t: setattr(t, "data", torch.zeros(3, dtype=t.dtype, device=t.device)),
    "requires_grad_": lambda t: t.requires_grad_() if t.dtype.is_floating_point else t,
    "resize_ smaller": lambda t: t.resize_(2, 2),
    "resize_ larger": lambda t: t.resize_(t.numel() * 3 + 7),
    "transpose_": lambda t: t.transpose_(0, t.dim() - 1),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "an attribute": set_attribute,
    "storage freed": lambda t: t.untyped_storage().resize_(0),
    "storage enlarged": lambda t: t.untyped_storage().resize_(t.untyped_storage().nbytes() + 4096),
    "storage shared": lambda t: t.share_memory_() if t.device.type == "cpu" else t,
}


def outputs_of(call):
    rows = call.recv_x if isinstance(call.recv_x, tuple) else (call.recv_x,)
    return [*rows, call.counts, *call.handle[:2]]


def rank_disturbed(ctx, name, use_fp8):
    """What a caller does to the outputs of one call is not met by the next; the memory is not held either."""
    with buffer_of(ctx, CASE, B) as buffer:
        for turn in range(6):
            call = lowlat.dispatch_and_check(ctx, buffer, CASE.but(seed=turn), B, use_fp8=use_fp8)
            for tensor in outputs_of(call):
                assert not tensor.requires_grad and not tensor.is_inference() and not hasattr(tensor, "note")
                DISTURB[name](tensor)
            del call, tensor
            gc.collect()
        blocks = buffer._low_latency._outputs._row_cache._blocks
        assert len(blocks) <= 4, f"{len(blocks)} blocks are kept of calls that came one after another"
        many_calls(ctx, buffer, count=2)


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("name", DISTURB)
def test_disturbed_outputs(pool, name, use_fp8):
    pool.run(4, rank_disturbed, name, use_fp8)


def rank_rows_disturbed(ctx, name):
    """The same for the rows and sums of normal mode."""
    with normal.buffer_of(ctx) as buffer:
        for turn in range(3):
            exchange = normal.dispatch_and_check(ctx, buffer, BIG.but(seed=turn))
            DISTURB[name](normal.combine(ctx, buffer, exchange)[0])
            DISTURB[name](exchange.recv_x)
            del exchange
            gc.collect()


@pytest.mark.parametrize("name", DISTURB)
def test_disturbed_rows(pool, name):
    pool.run(4, rank_rows_disturbed, name)


def rank_rows_freed(ctx):
    """A caller frees the received rows, as frameworks free activations; the handle is still good for a combine."""
    with buffer_of(ctx, CASE, B) as buffer:
        for turn in range(3):
            call = lowlat.dispatch_and_check(ctx, buffer, CASE.but(seed=turn), B)
            for tensor in call.recv_x:
                tensor.untyped_storage().resize_(0)
            lowlat.combine_and_check(ctx, buffer, call)


def test_handle_outlives_freed_rows(pool):
    pool.run(4, rank_rows_freed)


def rank_inference(ctx):
    """Results of calls in inference mode can be written to after it, and so can those of later calls."""
    with buffer_of(ctx, CASE, B) as buffer:
        with torch.inference_mode():
            inside = lowlat.dispatch_and_check(ctx, buffer, CASE, B, use_fp8=False)
            sums = lowlat.combine_and_check(ctx, buffer, inside).got
        after = lowlat.dispatch_and_check(ctx, buffer, CASE.but(seed=1), B, use_fp8=False)
        for tensor in (*outputs_of(inside), *outputs_of(after), sums):
            assert not tensor.is_inference()
            tensor.add_(1)
        del inside, after, tensor
        many_calls(ctx, buffer)


def test_inference_mode(pool):
    pool.run(4, rank_inference)


def in_use(ctx):
    """kB that the engine's tensors take: of the device, or of this process."""
    return torch.cuda.memory_allocated() // 1024 if ctx.device.type == "cuda" else resident()


def rank_disposed_memory(ctx):
    """Rows that a caller gives up with set_ take no more memory after 30 calls than after a few (SGLang does so)."""
    case = CASE.but(hidden=2048, experts=16)
    with lowlat.buffer_of(ctx, case, 128) as buffer:
        x, idx = ctx.to_device(lowlat.make_x(case, ctx.rank, False)), ctx.to_device(case.routings()[ctx.rank])
        kept = []
        for turn in range(33):
            rows, *_ = buffer.low_latency_dispatch(x, idx, 128, case.experts, use_fp8=False)
            assert rows.untyped_storage().nbytes() >= 8 << 20  # each call's rows
            rows.fill_(turn)
            rows.set_(torch.empty(0, dtype=rows.dtype, device=rows.device))
            kept.append(rows)  # the empty tensor stays
            if turn == 2:
                before = in_use(ctx)
        assert in_use(ctx) - before < 20_000, f"grew by {in_use(ctx) - before} kB"


def test_disposed_memory(pool):
    pool.run(4, rank_disposed_memory)


def test_threads_never_share_a_block():
    """Threads that take and drop rows of one cache at once, switching often: no two tensors lie in one block."""
    from deep_ep import _memory

    cache, wrong, end = _memory.RowCache(4), [], threading.Event()

    def take(number):
        while not end.is_set():
            rows = cache.empty((1 << 20,), torch.uint8)
            rows.fill_(number)
            second = cache.empty((1 << 20,), torch.uint8)
            second.fill_(number + 100)
            if not (rows == number).all() or not (second == number + 100).all():
                wrong.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        end.wait(1.5)
        end.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, f"threads {set(wrong)} found other bytes in their rows"


def test_without_counts_nothing_is_recycled():
    """A torch that does not count holders, or counts them wrongly, turns recycling off instead of corrupting rows."""
    from deep_ep import _memory

    every_holder_counts = _memory._every_holder_counts.__wrapped__
    assert every_holder_counts(), "this torch does not count each kind of holder"
    with mock.patch.object(_memory, "_storage_uses", None):
        assert not every_holder_counts()
    with mock.patch.object(_memory, "_storage_uses", lambda number: 1), mock.patch.object(_memory, "sys") as system:
        system.getrefcount = lambda value: 2
        assert not every_holder_counts()
    with mock.patch.object(_memory._Block, "_holders", side_effect=iter(range(1000)).__next__):
        assert not every_holder_counts(), "a count that never comes back to what it was"


def rank_switched_off(ctx):
    from deep_ep import DeepEPError

    off = mock.patch.dict("os.environ", {"DEEPEP_RECYCLE_OUTPUTS": "0"})
    with off, buffer_of(ctx, CASE, B, num_nvl_bytes=1 << 20) as buffer:
        many_calls(ctx, buffer)
        exchange = normal.dispatch_and_check(ctx, buffer, BIG)
        assert not buffer._low_latency._outputs._row_cache._blocks and not buffer._normal.row_cache._blocks
        del exchange
    ctx.barrier()
    with (
        mock.patch.dict("os.environ", {"DEEPEP_RECYCLE_OUTPUTS": "no"}),
        pytest.raises(DeepEPError, match="variable DEEPEP_RECYCLE_OUTPUTS: got 'no', allowed 0 or 1"),
        buffer_of(ctx, CASE, B),
    ):
        pass


def test_switched_off(pool):
    pool.run(4, rank_switched_off)
