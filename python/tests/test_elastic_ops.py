"""torch.ops.deep_ep.elastic_*: against ElasticBuffer's methods, torch's checks of operators, gradients, compile."""

from __future__ import annotations

import warnings

import pytest
import torch

import checks
import elastic
from cases import Case
from test_ops import ALL_CHECKS, DYNAMIC, compiled, opcheck, operators, same

CASE = Case((12, 7), experts=8, topk=3, hidden=64, alignment=4, routing="holes")
M = 16


def batch(case, rank):
    """x, indices, weights, the rows' and the weights' coefficients in the loss: no sum of such values is rounded."""
    generator = torch.Generator().manual_seed(100 * case.seed + rank)
    shape = (case.tokens[rank], case.hidden)
    x = torch.randint(-4, 5, shape, generator=generator).bfloat16()
    idx = case.inputs()[rank].topk_idx
    weights = torch.randint(1, 5, idx.shape, generator=generator).float() / 4
    factors = torch.randint(-2, 3, shape, generator=generator).float()
    return x, idx, weights, factors, torch.randint(-2, 3, idx.shape, generator=generator).float()


def results_of(dispatched, combined):
    """What of the results is defined, in an order; rows past the real ones and padding are not."""
    (rows, scales), idx, weights, handle = dispatched
    if handle.do_expand:
        ends = handle.psum_num_recv_tokens_per_expert
        starts = ends - handle.num_unaligned_recv_tokens_per_expert
        place = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        real = ((place >= starts) & (place < ends)).any(1)
    else:
        real = torch.arange(len(rows), device=rows.device) < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
    kept = [each[real] for each in (rows, scales, idx, weights) if each is not None]
    return *kept, *combined, handle.num_expanded_tokens, handle.num_recv_tokens_per_expert_list


def call_methods(buffer, x, idx, weights, expand, sync, **options):
    *got, _ = buffer.dispatch(
        x, idx, weights, num_experts=CASE.experts, expert_alignment=4, do_cpu_sync=sync, do_expand=expand, **options
    )
    rows = got[0][0] if isinstance(got[0], tuple) else got[0]
    sums, back, _ = buffer.combine(rows, got[3], topk_weights=got[2], bias=(x if isinstance(x, torch.Tensor) else None))
    return (got[0] if isinstance(got[0], tuple) else (got[0], None)), *got[1:], (sums, back)


def rank_same_results(ctx):
    """Operators and methods: the same results bit for bit; the statistics that a call adds to are the caller's."""
    from deep_ep import ops

    with elastic.buffer_of(ctx, M) as buffer:
        x, idx, weights = (ctx.to_device(each) for each in batch(CASE, ctx.rank)[:3])
        for expand in (False, True):
            for sync in (False, True):
                *want, sums = call_methods(buffer, x, idx, weights, expand, sync)
                stats = torch.ones(CASE.experts // ctx.size, dtype=torch.int32, device=ctx.device)
                rows, *rest, handle = ops.elastic_dispatch(
                    buffer, x, idx, weights, num_experts=CASE.experts, expert_alignment=4, do_cpu_sync=sync,
                    do_expand=expand, cumulative_local_expert_recv_stats=stats,
                )  # fmt: skip
                got = ops.elastic_combine(buffer, rows, handle, rest[1], x)
                same(results_of(((rows, None), *rest, handle), got), results_of(want, sums))
                assert torch.equal(stats - 1, handle.num_unaligned_recv_tokens_per_expert)
                again, _, sent, same_handle = ops.elastic_dispatch(
                    buffer, x + 1, topk_weights=weights, handle=handle, do_expand=expand, do_zero_padding=expand
                )
                assert same_handle is handle
                ones = buffer.dispatch(x + 1, topk_weights=weights, handle=want[3], do_expand=expand)
                pairs = [((again, None), rest[0], sent), ((ones[0], None), ones[1], ones[2])]
                same(*(results_of((*pair, handle), ()) for pair in pairs))
        fp8 = (torch.randn(len(x), 64, device=ctx.device).to(torch.float8_e4m3fn).view(torch.uint8), x[:, :2].float())
        for columns in (False, True):
            pair = ops.elastic_dispatch(
                buffer, fp8, idx, num_experts=CASE.experts, use_tma_aligned_col_major_sf=columns
            )[0]
            want = buffer.dispatch(
                fp8, idx, num_experts=CASE.experts, do_expand=True, use_tma_aligned_col_major_sf=columns
            )[0]
            same(pair, want)
            assert pair[1].stride() == want[1].stride()
        with pytest.raises(ValueError, match=r"argument buffer: got 'nobody', allowed the name of an ElasticBuffer"):
            operators().elastic_dispatch(x, None, idx, None, None, CASE.experts, M, "nobody")
        with pytest.raises(AssertionError, match="argument expert_alignment: got 7, allowed 4"):
            ops.elastic_dispatch(buffer, x, handle=handle, expert_alignment=7)


def test_same_results_as_methods(pool):
    pool.run(2, rank_same_results)


def rank_opcheck(ctx):
    """torch's own checks; every token goes to all experts, so that no row of the worst case is left undefined."""
    from deep_ep.ops import _elastic

    case = CASE.but(topk=CASE.experts, tokens=(8, 8), alignment=1, routing="random")
    with elastic.buffer_of(ctx, 8) as buffer:
        x, idx, weights = (ctx.to_device(each) for each in batch(case, ctx.rank)[:3])
        ops, grads = operators(), [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        given = None, idx, grads[1], None, case.experts, 8, buffer.name
        opcheck(ops.elastic_dispatch, grads[0], *given)
        stats = torch.zeros(case.experts // ctx.size, dtype=torch.int32, device=ctx.device)
        fp8 = x[:, :2].float(), idx, None, stats, *given[4:], 1, True, False, True
        opcheck(ops.elastic_dispatch_worst_case, x, *fp8, tests=ALL_CHECKS[:3])
        handle = buffer.dispatch(x, idx, num_experts=case.experts, do_expand=True)[3]
        data = _elastic.tensors_of(handle), _elastic.numbers_of(handle), buffer.name
        opcheck(ops.elastic_dispatch_cached, grads[0], None, grads[1], *data, tests=ALL_CHECKS[:3])
        rows = torch.randn(handle.num_expanded_tokens, 64).bfloat16().to(ctx.device).requires_grad_()
        back = torch.randn(len(rows)).to(ctx.device).requires_grad_()
        opcheck(ops.elastic_combine, rows, x.clone().requires_grad_(), None, back, *data)


def test_opcheck(pool):
    pool.run(2, rank_opcheck, deadline=120)


def network(rows, weights, idx, handle, rank, local):
    """What stands for experts: a row times its weight and its expert's number, the same in both layouts."""
    if not handle.do_expand:
        real = torch.arange(len(rows), device=rows.device) < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        here = (idx >= 0) & real.unsqueeze(1)
        scales = torch.where(here, weights * (idx + rank * local + 1), 0.0).sum(1)
        return torch.where(real.unsqueeze(1), rows.float(), 0) * scales.unsqueeze(1), torch.where(here, weights, 0.0)
    ends = handle.psum_num_recv_tokens_per_expert
    starts = ends - handle.num_unaligned_recv_tokens_per_expert
    place = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    mine = (place >= starts) & (place < ends)
    real = mine.any(1)
    scales = torch.where(real, weights * (mine.int().argmax(1) + rank * local + 1), 0.0)
    return torch.where(real.unsqueeze(1), rows.float(), 0) * scales.unsqueeze(1), torch.where(real, weights, 0.0)


def layer(ctx, buffer, given, idx, expand, sync, cached):
    """[T, H], and the weights' round trip, with gradients through `given` = (x, weights)."""
    from deep_ep import ops

    options = {"num_experts": CASE.experts, "expert_alignment": 4, "do_cpu_sync": sync, "do_expand": expand}
    with torch.no_grad():
        _, where, _, handle = ops.elastic_dispatch(buffer, given[0], idx, given[1], **options)
    if cached:
        rows, _, weights, _ = ops.elastic_dispatch(buffer, given[0], None, given[1], handle=handle, do_expand=expand)
    else:
        rows, where, weights, handle = ops.elastic_dispatch(buffer, given[0], idx, given[1], **options)
    answers, back = network(rows, weights, where, handle, ctx.rank, CASE.experts // ctx.size)
    return ops.elastic_combine(buffer, answers.bfloat16(), handle, back, given[0])


def rank_gradients(ctx, multiple):
    x, idx, weights, factors, weight_factors = (ctx.to_device(each) for each in batch(CASE, ctx.rank))
    want = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    scales = torch.where(idx >= 0, want[1] * (idx + 1), 0.0).sum(1, keepdim=True)
    loss = (
        ((want[0].float() * (scales + 1)) * factors).sum(),
        (torch.where(idx >= 0, want[1], 0.0) * weight_factors).sum(),
    )
    sum(loss).backward()
    with elastic.buffer_of(ctx, M, allow_multiple_reduction=multiple) as buffer:
        for expand in (True, False):
            for sync, cached in ((True, False), (False, False), (True, True), (False, True)):
                given = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
                sums, back = layer(ctx, buffer, given, idx, expand, sync, cached)
                assert torch.equal((sums.float() * factors).sum(), loss[0]), (expand, sync, cached)
                ((sums.float() * factors).sum() + (back * weight_factors).sum()).backward()
                for name, one, other in zip(("x", "weights"), given, want, strict=True):
                    assert torch.equal(one.grad, other.grad), (name, expand, sync, cached)
        rows, _, sent, handle = operators_of(buffer, x, idx, given[1])
        given[1].grad = None
        sent.sum().backward()  # of the weights alone
        assert torch.equal(given[1].grad, (idx >= 0).float())
        loss = torch.autograd.grad(rows_of(buffer, handle, given[0]).float().pow(2).sum(), given[0], create_graph=True)[
            0
        ]
        with pytest.raises(NotImplementedError, match="elastic_dispatch_cached: double backward is not supported"):
            loss.sum().backward()


def operators_of(buffer, x, idx, weights):
    from deep_ep import ops

    return ops.elastic_dispatch(buffer, x, idx, weights, num_experts=CASE.experts)


def rows_of(buffer, handle, x):
    from deep_ep import ops

    return ops.elastic_dispatch(buffer, x, handle=handle)[0]


@pytest.mark.parametrize("multiple", [True, False], ids=["", "single"])
def test_gradients(pool, multiple):
    pool.run(2, rank_gradients, multiple)


def traced_calls(buffer, x, idx, weights, expand, sync, columns):
    """As a compiled model has them, between operations of torch."""
    rows, where, sent, handle, event = buffer.dispatch(
        (x * 1, x[:, :2].float()), idx, weights, num_experts=CASE.experts, expert_alignment=4, do_cpu_sync=sync,
        do_expand=expand, use_tma_aligned_col_major_sf=columns,
    )  # fmt: skip
    again = buffer.dispatch(x + 1, handle=handle, do_expand=expand, do_zero_padding=expand)[0]
    sums, back, _ = buffer.combine(rows[0], handle, topk_weights=sent, bias=x)
    counts = handle.num_unaligned_recv_tokens_per_expert * 1
    return sums + 1, back * 2, counts, again.shape[0], sum(handle.num_recv_tokens_per_expert_list), event.event is None


def rank_compile(ctx, backend):
    """fullgraph: the methods leave no break, whatever the number of tokens and of received rows."""
    with elastic.buffer_of(ctx, 32) as buffer, torch._dynamo.config.patch(DYNAMIC), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        traced = compiled(traced_calls, backend, dynamic=True)
        for seed, tokens in enumerate([(12, 7), (5, 20)]):
            case = CASE.but(tokens=tokens, seed=seed)
            given = [ctx.to_device(each) for each in batch(case, ctx.rank)[:3]]
            for expand, sync, columns in ((True, True, False), (True, False, True), (False, False, False)):
                want = traced_calls(buffer, *given, expand, sync, columns)
                same(traced(buffer, *given, expand, sync, columns), want)

        with elastic.buffer_of(ctx, 32, kind="EPBuffer") as other:
            same(compiled(traced_calls, backend)(other, *given, False, False, False), want)

        def asynchronous(x, handle):
            return buffer.combine(x, handle, async_with_compute_stream=True)[0]

        rows, _, _, handle, _ = buffer.dispatch(given[0], given[1], num_experts=CASE.experts)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(asynchronous, backend)(rows, handle)


@checks.needs_traced_methods
def test_compile(pool):
    pool.run(2, rank_compile, "aot_eager", deadline=120)
