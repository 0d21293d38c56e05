"""Gradients of dispatch and combine: against plain torch on all ranks' data, and in what training does with them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import checks
import normal
from cases import Case

CASE = Case((12, 7), experts=8, topk=3, hidden=64, routing="holes")


def batch(rank, case=CASE):
    """x, indices and weights of a rank; the values are such that no sum of them is rounded."""
    generator = torch.Generator().manual_seed(100 * case.seed + rank)
    tokens = case.tokens[rank]
    x = torch.randint(-4, 5, (tokens, case.hidden), generator=generator).bfloat16()
    weights = torch.randint(1, 5, (tokens, case.topk), generator=generator).float() / 4
    return x, normal.expect(case, rank).own.topk_idx, weights


def coefficients(case, rank):
    """What the loss multiplies a rank's results with."""
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randint(-2, 3, (case.tokens[rank], case.hidden), generator=generator).float()


def scale_of(expert):
    """What stands for an expert's network: it is not the same on two ranks."""
    return expert % 3 + 1


def expert_sum(x, idx, weights, first):
    """[N, H]: each row times the weighted scales of its experts, which begin at `first`."""
    scales = torch.where(idx >= 0, weights * scale_of(idx + first), 0.0).sum(1, keepdim=True)
    return (x.float() * scales).to(x.dtype)


def exchange(x, idx, weights, buffer, worst=0, case=CASE):
    """One layer: [T, H], and the weights' round trip."""
    from deep_ep import ops

    received = ops.dispatch(x, idx, weights, case.experts, buffer, num_worst_tokens=worst)
    first = buffer.rank * case.experts // buffer.group_size
    rows = torch.where((received.topk_idx >= 0).any(1, keepdim=True), received.x, 0)
    answers = expert_sum(rows, received.topk_idx, received.topk_weights, first)
    return ops.combine(answers, received.handle, buffer, received.topk_weights, bias=x)


def local(x, idx, weights):
    """The same in plain torch: every expert is here."""
    ranks, experts = CASE.ranks, CASE.experts
    parts = []
    for rank in range(ranks):
        here = torch.div(idx, experts // ranks, rounding_mode="floor") == rank
        parts.append(expert_sum(x, torch.where(here, idx, -1), weights, 0).float())
    return (torch.stack(parts).sum(0) + x.float()).bfloat16(), torch.where(idx >= 0, weights, 0)


def loss_of(results, rank):
    y, weights = results
    return (y.float() * coefficients(CASE, rank)).sum() + (weights**2).sum()


def leaves(ctx, *tensors):
    return [ctx.to_device(each.detach().clone()).requires_grad_() for each in tensors]


def gradients_of(ctx, buffer, **options):
    x, idx, weights = batch(ctx.rank)
    given = leaves(ctx, x, weights)
    loss = loss_of(
        [each.cpu() for each in exchange(given[0], ctx.to_device(idx), given[1], buffer, **options)], ctx.rank
    )
    loss.backward()
    return loss.detach(), *(each.grad.cpu() for each in given)


def wanted_gradients(rank):
    x, idx, weights = batch(rank)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    loss = loss_of(local(x, idx, weights), rank)
    loss.backward()
    return loss.detach(), x.grad, weights.grad


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3)


def rank_gradients(ctx):
    want = wanted_gradients(ctx.rank)
    with normal.buffer_of(ctx) as buffer:
        same(gradients_of(ctx, buffer), want)
        same(gradients_of(ctx, buffer, worst=50), want)
        calls = buffer.stats()
        assert calls["dispatch"]["calls"] == 2 * 3 and calls["combine"]["calls"] == 2 * 2


def test_gradients(pool):
    """Backward of a layer: one combine for dispatch; for combine a dispatch of the rows and one of the weights."""
    pool.run(2, rank_gradients)


def rank_single_operators(ctx):
    """Each operator by itself: what its gradient is, and which calls it makes on a rank where nobody uses a result."""
    from deep_ep import ops

    x, idx, weights = batch(ctx.rank)
    with normal.buffer_of(ctx) as buffer:
        x, weights = leaves(ctx, x, weights)
        received = ops.dispatch(x, ctx.to_device(idx), weights, CASE.experts, buffer)
        # Rank 0 uses the weights that it received, rank 1 the rows: both take part in the same calls.
        (received.topk_weights if ctx.rank == 0 else received.x).sum().backward()
        assert torch.equal(weights.grad.cpu(), ((idx >= 0) & (idx < 4)).float())
        assert torch.equal(x.grad[:, 0].cpu(), (idx >= 4).any(1).bfloat16())
        name, handle = buffer.name, received.handle[:3]
        owners = torch.stack([((idx >= 4 * r) & (idx < 4 * r + 4)).any(1) for r in range(2)]).sum(0)
        x.grad = None
        rows, _ = torch.ops.deep_ep.dispatch_cached(x, None, *handle, name)
        rows.backward(torch.ones_like(rows))
        assert torch.equal(x.grad[:, 0].cpu(), owners.bfloat16())
        (row_weights,) = leaves(ctx, received.topk_weights)
        _, sums = ops.combine(received.x.detach(), received.handle, buffer, row_weights)
        factors = torch.arange(sums.numel(), dtype=torch.float32, device=ctx.device).view_as(sums) + 100 * ctx.rank
        (sums * factors).sum().backward()
        sources = torch.arange(2).repeat_interleave(matrix_counts(received.handle.rank_prefix_matrix, ctx.rank))
        tokens = received.handle.recv_src_idx.cpu()
        want = 100.0 * sources[:, None] + (tokens[:, None] * CASE.topk + torch.arange(CASE.topk))
        assert torch.equal(row_weights.grad.cpu(), want)


def rank_pipeline(ctx):
    """Micro-batches as a pipeline has them: backward of the first between forward of the others, the last one first."""
    x, idx, weights = batch(ctx.rank)
    want = wanted_gradients(ctx.rank)
    idx = ctx.to_device(idx)
    with normal.buffer_of(ctx) as buffer:
        given = [leaves(ctx, x, weights) for _ in range(3)]
        losses = []
        for number, (rows, own) in enumerate(given):
            losses.append(loss_of([each.cpu() for each in exchange(rows, idx, own, buffer)], ctx.rank))
            if number == 1:
                losses[0].backward()
        losses[2].backward()
        losses[1].backward()
        for loss, leaf in zip(losses, given, strict=True):
            same([loss.detach(), *(each.grad.cpu() for each in leaf)], want)


def test_pipeline_order(pool):
    pool.run(2, rank_pipeline)


def matrix_counts(matrix, rank):
    """Rows from each rank."""
    ends = matrix[:, rank].cpu()
    return torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))


def test_single_operators(pool):
    pool.run(2, rank_single_operators)


def rank_refused(ctx):
    """Double backward, low-latency calls and rows that are not BF16 are refused by name; create_graph alone is not."""
    x, idx, weights = batch(ctx.rank)
    idx = ctx.to_device(idx)
    with normal.buffer_of(ctx) as buffer:
        x, weights = leaves(ctx, x, weights)
        y, _ = exchange(x, idx, weights, buffer)
        gradients = torch.autograd.grad(y.float().pow(2).sum(), [x, weights], create_graph=True)
        same([each.detach().cpu() for each in gradients], [each.cpu() for each in gradients])
        with pytest.raises(NotImplementedError, match="deep_ep.dispatch: double backward is not supported"):
            gradients[1].sum().backward()
        per_rank, _, per_expert, in_rank = torch.ops.deep_ep.layout(idx, CASE.experts, buffer.name)
        wide = x.detach().to(torch.float8_e4m3fn).requires_grad_()
        with pytest.raises(TypeError, match="argument x: got dtype torch.float8_e4m3fn that requires grad"):
            torch.ops.deep_ep.dispatch(wide, None, idx, weights, per_rank, None, in_rank, per_expert, buffer.name)


def test_refused(pool):
    pool.run(2, rank_refused)


def rank_low_latency(ctx):
    import lowlat

    case = CASE.but(hidden=128, routing="random")
    x, idx, _ = (ctx.to_device(each) for each in batch(ctx.rank, case))
    with lowlat.buffer_of(ctx, case, 16) as buffer:
        import deep_ep.ops  # noqa: F401

        rows, *_ = torch.ops.deep_ep.low_latency_dispatch(
            x.requires_grad_(), idx, 16, case.experts, buffer.name, None, None, None, False
        )
        with pytest.raises(NotImplementedError, match="deep_ep.low_latency_dispatch: backward is not supported"):
            rows.sum().backward()


def test_low_latency_is_not_differentiable(pool):
    pool.run(2, rank_low_latency)


def rank_checkpoint(ctx):
    """Full: the exchanges are made again. Selective: they are not. The gradients are the same."""
    from deep_ep import ops

    want = wanted_gradients(ctx.rank)
    x, idx, weights = batch(ctx.rank)
    with normal.buffer_of(ctx) as buffer:
        for options, dispatches, combines in (
            ({}, 1 + 1 + 2, 1 + 1 + 1),
            ({"context_fn": ops.communicate_once}, 1 + 2, 1 + 1),
        ):
            before = buffer.stats()
            given = leaves(ctx, x, weights)
            results = checkpoint(
                exchange, given[0], ctx.to_device(idx), given[1], buffer, use_reentrant=False, **options
            )
            loss = loss_of([each.cpu() for each in results], ctx.rank)
            loss.backward()
            same([loss.detach(), *(each.grad.cpu() for each in given)], want)
            after = buffer.stats()
            assert after["dispatch"]["calls"] - before["dispatch"]["calls"] == dispatches
            assert after["combine"]["calls"] - before["combine"]["calls"] <= combines
            assert after["notify"]["calls"] - before["notify"]["calls"] == (1 if options else 2)


@checks.needs_checkpoint_policies
def test_checkpoint(pool):
    pool.run(2, rank_checkpoint)


def rank_overlap(ctx):
    """Calls in the region run on a stream of their own, forward and backward."""
    from deep_ep import ops

    streams = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            streams.append(torch.cuda.current_stream())
            return gradient

    want = wanted_gradients(ctx.rank)
    x, idx, weights = batch(ctx.rank)
    idx = ctx.to_device(idx)
    with normal.buffer_of(ctx) as buffer:
        given = leaves(ctx, x, weights)
        with ops.overlap(buffer) as region:
            y, sums = exchange(Watch.apply(given[0]) if ctx.device.type == "cuda" else given[0], idx, given[1], buffer)
        region.wait(y, sums)
        loss = loss_of([y.cpu(), sums.cpu()], ctx.rank)
        loss.backward()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()
            assert streams and all(stream != torch.cuda.current_stream() for stream in streams)
        same([loss.detach(), *(each.grad.cpu() for each in given)], want)


def test_overlap(pool):
    pool.run(2, rank_overlap)


def rank_compiled(ctx):
    """AOTAutograd traces forward and backward into graphs of operators."""
    want = wanted_gradients(ctx.rank)
    with (
        normal.buffer_of(ctx) as buffer,
        torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
    ):
        x, idx, weights = batch(ctx.rank)
        for worst in (0, 50):
            torch._dynamo.reset()
            traced = torch.compile(exchange, backend="aot_eager", fullgraph=True)
            given = leaves(ctx, x, weights)
            loss = loss_of(
                [each.cpu() for each in traced(given[0], ctx.to_device(idx), given[1], buffer, worst)], ctx.rank
            )
            loss.backward()
            same([loss.detach(), *(each.grad.cpu() for each in given)], want)


@checks.needs_traced_gradients
def test_compiled(pool):
    pool.run(2, rank_compiled, deadline=120)
