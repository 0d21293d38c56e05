"""EPBuffer's load balancing: copies of experts arrive bit for bit, their gradients are added to the owners'."""

from __future__ import annotations

import weakref

import pytest
import torch

import cases
import checks
import elastic

SHAPES = (((6, 40), torch.bfloat16), ((16,), torch.float32), ((33, 112), torch.uint8), ((8, 4096), torch.float8_e4m3fn))


def mapping_of(ctx, slots, local, seed, pattern):
    """[R, slots] int32, the same on all ranks; none of a rank's own experts."""
    gen, rows = cases.generator(seed, 41), []
    for rank in range(ctx.size):
        row = []
        for slot in range(slots):
            owner = (rank + 1 + int(torch.randint(0, ctx.size - 1, (1,), generator=gen))) % ctx.size
            expert = owner * local + int(torch.randint(0, local, (1,), generator=gen))
            if pattern == "ring":
                expert = (rank + 1) % ctx.size * local + slot % local
            empty = pattern == "none" or (pattern == "random" and float(torch.rand(1, generator=gen)) < 0.25)
            row.append(-1 if empty else expert)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32)


def bytes_of(count, shape, dtype, *keys):
    size = torch.empty((count, *shape), dtype=dtype, device="meta").numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=cases.generator(*keys), dtype=torch.uint8)
    return raw.view(dtype).view(count, *shape)


def raw(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def rank_prefetch(ctx, slots, local):
    from deep_ep import BufferAllocator, EPBuffer

    plan = BufferAllocator()
    targets = [plan.allocate((slots, *shape), dtype) for shape, dtype in SHAPES]
    assert all(t.device.type == "meta" for t in targets) and plan.num_bytes % (2 << 20) == 0 and not plan.materialized
    buffer = EPBuffer(
        ctx.group, num_max_tokens_per_rank=8, hidden=64, lb_allocation_plan_or_num_bytes=plan, engine=ctx.engine,
        explicitly_destroy=True,
    )  # fmt: skip
    storage = buffer.runtime.lb_storage
    assert plan.materialized and buffer.num_lb_bytes == plan.num_bytes == storage.numel()
    for number, target in enumerate(targets):
        assert target.device == ctx.device and target.data_ptr() == storage.data_ptr() + number * (2 << 20)
    sms = buffer.lb_get_theoretical_num_sms()
    assert sms % 2 == 0
    for seed, pattern in enumerate(("random", "ring", "none", "random")):
        mapping = mapping_of(ctx, slots, local, seed, pattern)
        storage.fill_(7)
        experts = [[bytes_of(local, *kind, seed, rank, n) for n, kind in enumerate(SHAPES)] for rank in range(ctx.size)]
        sources = [ctx.to_device(t) for t in experts[ctx.rank]]
        given = (targets, sources) if seed else (targets[0], sources[0])
        event = buffer.lb_prefetch_weights(
            *given, ctx.to_device(mapping), num_sms=sms, previous_event=buffer.capture() if seed == 1 else None
        )
        event.current_stream_wait()
        for n, target in enumerate(targets):
            for slot, expert in enumerate(mapping[ctx.rank].tolist()):
                if expert < 0 or not seed and n:
                    assert bool((raw(target[slot]) == 7).all()), f"slot {slot} of tensor {n} was written"
                else:
                    want = experts[expert // local][n][expert % local]
                    assert torch.equal(raw(target[slot]), raw(want)), f"slot {slot} of tensor {n}: not expert {expert}"
    elastic.round_trip(ctx, buffer, CASE, elastic.expect(CASE, 16), expand=True, sync=True)
    with pytest.raises(AssertionError, match="materialized"):
        plan.allocate((1,), torch.uint8)
    buffer.destroy()


CASE = cases.Case((9, 0, 5, 7)[: cases.RANKS], hidden=64, experts=8, topk=2, routing="skewed", seed=1)


@pytest.mark.parametrize(("slots", "local"), [(3, 2), (11, 5)])
def test_prefetch(pool, slots, local):
    pool.run(cases.RANKS, rank_prefetch, slots, local)


def rank_reduce(ctx, slots, local):
    with elastic.buffer_of(ctx, 8, 64, kind="EPBuffer", lb_allocation_plan_or_num_bytes=2 << 20) as buffer:
        for seed, pattern in enumerate(("random", "ring", "none")):
            mapping = mapping_of(ctx, slots, local, seed, pattern)
            draw = lambda count, *keys: torch.randint(-99, 99, (count, 72), generator=cases.generator(*keys)).float()  # noqa: E731
            copies = [draw(slots, seed, rank, 1) for rank in range(ctx.size)]
            own = draw(local, seed, ctx.rank, 2)
            want = own.clone()
            for rank in range(ctx.size):
                for slot, expert in enumerate(mapping[rank].tolist()):
                    if expert >= 0 and expert // local == ctx.rank:
                        want[expert % local] += copies[rank][slot]
            grads, mine = ctx.to_device(own.clone()).requires_grad_(), ctx.to_device(copies[ctx.rank].clone())
            buffer.lb_reduce_grads(mine, grads, ctx.to_device(mapping)).wait()
            checks.same_bits("gradients", grads.detach().cpu(), want)
            assert torch.equal(mine.cpu(), copies[ctx.rank])
            twice = [ctx.to_device(own.clone()) for _ in range(2)]
            buffer.lb_reduce_grads([mine, mine], twice, ctx.to_device(mapping), previous_event=buffer.capture()).wait()
            checks.same_bits("gradients", torch.stack(twice).cpu(), torch.stack([want, want]))


def test_reduce(pool):
    pool.run(cases.RANKS, rank_reduce, 3, 2)


def rank_refused(ctx):
    with elastic.buffer_of(ctx, 8, 64, kind="EPBuffer") as buffer:
        mapping = ctx.to_device(mapping_of(ctx, 2, 2, 0, "ring"))
        good = ctx.to_device(torch.zeros(2, 32))
        for call, arguments, text in (
            (buffer.lb_prefetch_weights, ([good, good], [good], mapping), "2 and 1 tensors"),
            (buffer.lb_prefetch_weights, (good, good, mapping.long()), "redundancy_mapping"),
            (buffer.lb_prefetch_weights, (good, good[:, :8].contiguous(), mapping), r"expert\[0\]"),
            (buffer.lb_prefetch_weights, (good[:1], good, mapping), r"redundant_expert\[0\]"),
            (buffer.lb_reduce_grads, (good.bfloat16(), good, mapping), "bfloat16"),
        ):
            with pytest.raises((ValueError, TypeError, AssertionError), match=text):
                call(*arguments)
        buffer.lb_prefetch_weights(good.clone(), good, mapping).wait()
    with pytest.raises(ValueError, match="lb_allocation_plan_or_num_bytes"):
        elastic.buffer_of(ctx, 8, 64, kind="EPBuffer", lb_allocation_plan_or_num_bytes=5).__enter__()


def test_refused(pool):
    pool.run(2, rank_refused)


def test_plans_that_cannot_be_materialized():
    """Nothing has changed then: the plan may be materialized later."""
    from deep_ep import BufferAllocator, EPBuffer
    from deep_ep.bootstrap import Bootstrap

    plan = BufferAllocator()
    first, second = plan.allocate((4, 8), torch.float32), plan.allocate((3,), torch.bfloat16)
    storage = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    freed = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    for wrong in (
        None,
        storage[1:],
        torch.zeros(plan.num_bytes + 2, dtype=torch.uint8)[2:],
        freed,
        storage.view(2, -1),
        torch.zeros(2, plan.num_bytes, dtype=torch.uint8)[:, 0],
    ):
        with pytest.raises((TypeError, ValueError), match="storage"):
            plan.materialize(wrong)
    where = Bootstrap.file(0, 1, "/nonexistent", "never reached")
    for held in (weakref.ref(second), second[1:]):
        with pytest.raises(AssertionError, match="tensor 1 of a BufferAllocator"):
            plan.materialize(storage)
        with pytest.raises(AssertionError, match="tensor 1 of a BufferAllocator"):
            EPBuffer(None, lb_allocation_plan_or_num_bytes=plan, bootstrap=where, engine="cpu")
        del held
    assert not plan.materialized and first.device.type == second.device.type == "meta"
    plan.materialize(storage)
    assert first.data_ptr() == storage.data_ptr() and second.data_ptr() == storage.data_ptr() + (2 << 20)


def rank_no_tensors(ctx):
    with elastic.buffer_of(ctx, 8, 64, kind="EPBuffer") as buffer:
        mapping, good = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, 32)
        good, mapping = ctx.to_device(good), ctx.to_device(mapping)
        for wrong in (None, 5, "ab", [None], torch.zeros((), device=good.device)):
            for call in (buffer.lb_prefetch_weights, buffer.lb_reduce_grads):
                for copies, own in ((wrong, good), (good, wrong)):
                    with pytest.raises((ValueError, TypeError, AssertionError)) as caught:
                        call(copies, own, mapping)
                    assert "argument" in str(caught.value) or "tensors" in str(caught.value), caught.value


def test_no_tensors(pool):
    pool.run(1, rank_no_tensors)
