"""How frameworks call V2: each test makes a mixture of experts from one client's calls and compares its output."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import cases
import checks
from cases import Case

CASE = Case((9, 0, 14, 5)[: cases.RANKS], hidden=256, experts=4 * cases.RANKS, topk=3, routing="holes", seed=3)
M = 16
BF16 = torch.bfloat16


class Inputs:
    """This rank's tokens: x [T,H], idx and weights [T,K], and what the mixture gives for them."""

    def __init__(self, ctx, case=CASE):
        self.case, gen = case, cases.generator(case.seed, ctx.rank, 31)
        tokens = case.tokens[ctx.rank]
        x = torch.randn((tokens, case.hidden), generator=gen).to(BF16)
        idx = cases.routing(case, ctx.rank)
        weights = torch.rand((tokens, case.topk), generator=gen) + 0.25
        self.x, self.idx, self.weights = (ctx.to_device(t) for t in (x, idx, weights))
        factors = torch.where(idx < 0, 0.0, weights.double() * factor(idx).double())
        self.exact = x.double() * factors.sum(1, keepdim=True)
        self.bound = (
            x.double().abs() * factors.abs().sum(1, keepdim=True) * 2.0**-6
        )  # a rounding for each of two levels

    def check(self, got):
        assert got.dtype == BF16
        checks.within_bound("mixture", got.detach().cpu().double(), self.exact, self.bound + 1e-30)


def factor(experts):
    """What an expert does: it multiplies by this."""
    return 1.0 + (experts.clamp(min=0) % 7).to(torch.float32) / 4


def plain_experts(ctx, x, idx, weights, case=CASE):
    """Rows of the plain layout through this rank's experts, weighted and added."""
    local = case.experts // ctx.size
    scale = torch.where(idx < 0, 0.0, weights * factor(idx + ctx.rank * local))
    return (x.float() * scale.sum(1, keepdim=True)).to(BF16)


def expanded_experts(ctx, x, handle, weights=None, case=CASE):
    """Rows of the expanded layout, each expert's from its first to its psum."""
    local = case.experts // ctx.size
    out = torch.full_like(x, float("nan"))
    start, ends = 0, handle.psum_num_recv_tokens_per_expert.tolist()
    for expert, (end, count) in enumerate(zip(ends, handle.num_unaligned_recv_tokens_per_expert.tolist(), strict=True)):
        start = end - count
        assert start % handle.expert_alignment == 0
        scale = float(factor(torch.tensor(ctx.rank * local + expert)))
        rows = x[start:end].float() * scale
        out[start:end] = (rows if weights is None else rows * weights[start:end].unsqueeze(1)).to(BF16)
    return out


def to_fp8(x):
    """Rows of e4m3 with a scale for 128 columns, column-major, as DeepGEMM wants them."""
    parts = x.float().view(len(x), x.shape[1] // 128, 128)
    scales = parts.abs().amax(2).clamp(min=1e-4) / 448
    rows = (parts / scales.unsqueeze(2)).view(x.shape).to(torch.float8_e4m3fn)
    return rows, scales.t().contiguous().t()


def from_fp8(pair):
    rows, scales = pair
    return (rows.float().view(len(rows), rows.shape[1] // 128, 128) * scales.unsqueeze(2)).view(rows.shape).to(BF16)


def options_of(ctx, **more):
    return {"group": ctx.group, "num_max_tokens_per_rank": M, "hidden": CASE.hidden, "engine": ctx.engine, **more}


# ---- vLLM


def rank_vllm(ctx):
    import deep_ep

    given = [Inputs(ctx), Inputs(ctx, CASE.but(seed=8))]
    arguments = options_of(
        ctx, num_topk=CASE.topk, use_fp8_dispatch=False, allow_hybrid_mode=False, prefer_overlap_with_compute=True,
        allow_multiple_reduction=True, explicitly_destroy=True,
    )  # fmt: skip
    for _ in range(2):  # destroyed, and made again
        buffer = deep_ep.ElasticBuffer(**arguments)
        assert buffer.get_theoretical_num_sms(num_experts=CASE.experts, num_topk=CASE.topk) % 2 == 0

        def dispatch(inputs, expand, power=M, buffer=buffer):
            return buffer.dispatch(
                x=inputs.x, topk_idx=inputs.idx, topk_weights=inputs.weights, num_experts=CASE.experts,
                num_max_tokens_per_rank=power, do_expand=expand, do_cpu_sync=expand, async_with_compute_stream=False,
            )  # fmt: skip

        # Decode: no CPU sync; rows past the real ones are masked by the psum; indices overwritten in place.
        for inputs in given:
            x, idx, weights, handle, event = dispatch(inputs, False)
            assert event.event is None and len(x) == M * ctx.size
            real = torch.arange(len(x), device=x.device) < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
            idx[~real] = -1
            out = plain_experts(ctx, x.nan_to_num(), idx, weights.nan_to_num())
            back, none, _ = buffer.combine(x=out, handle=handle, topk_weights=None, async_with_compute_stream=False)
            assert none is None
            inputs.check(back)
        # Prefill of two micro-batches: both handles are alive, combined asynchronously and waited for later.
        begun = [(inputs, dispatch(inputs, True)) for inputs in given]
        ended = []
        for inputs, (x, idx, weights, handle, _) in begun:
            assert idx is None and len(x) == sum(handle.num_recv_tokens_per_expert_list)
            out = expanded_experts(ctx, x, handle, weights)
            ended.append((inputs, buffer.combine(
                x=out, handle=handle, topk_weights=None, async_with_compute_stream=True, allocate_on_comm_stream=True
            )))  # fmt: skip
        for inputs, (back, _, event) in ended:
            if event is not None and event.event is not None:
                event.current_stream_wait()
            inputs.check(back)
        buffer.destroy()


# ---- SGLang


def rank_sglang(ctx):
    from deep_ep import ElasticBuffer

    inputs = Inputs(ctx)
    arguments = options_of(
        ctx, num_topk=CASE.topk, use_fp8_dispatch=True, allow_hybrid_mode=True, sl_idx=0,
        prefer_overlap_with_compute=False,
    )  # fmt: skip
    buffer = ElasticBuffer(**arguments)
    assert buffer.num_bytes > 0
    sms = buffer.get_theoretical_num_sms(CASE.experts, CASE.topk)
    qps = buffer.get_theoretical_num_qps(sms)
    x, idx, weights = inputs.x, inputs.idx, inputs.weights
    if len(x) == 0:  # one dummy token
        x, weights = x.new_zeros(1, CASE.hidden), weights.new_zeros(1, CASE.topk)
        idx = torch.arange(CASE.topk, dtype=torch.int64, device=x.device).unsqueeze(0)
    for decode in (False, True):
        pair, local, row_weights, handle, event = buffer.dispatch(
            to_fp8(x), topk_idx=idx, topk_weights=weights, num_experts=CASE.experts, num_sms=sms, num_qps=qps,
            num_max_tokens_per_rank=M, expert_alignment=128 if decode else None, do_expand=decode,
            do_cpu_sync=not decode, use_tma_aligned_col_major_sf=True, async_with_compute_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        assert pair[1].stride(0) == 1 and pair[1].stride(1) % 4 == 0
        if decode:
            out = expanded_experts(ctx, from_fp8(pair), handle, row_weights)
        else:
            out = plain_experts(ctx, from_fp8(pair), local, row_weights)
        back, _, event = buffer.combine(out, handle, num_sms=sms, num_qps=qps, async_with_compute_stream=True)
        event.current_stream_wait()
        if len(inputs.x):
            checks.small_diff("mixture of FP8 rows", back, inputs.exact, 2e-3)
    gone = weakref.ref(buffer)
    del buffer, event  # no destroy(): a new key drops it
    gc.collect()
    assert gone() is None
    ElasticBuffer(**arguments)


# ---- LightLLM


def rank_lightllm(ctx):
    from deep_ep import ElasticBuffer

    inputs = Inputs(ctx)
    buffer = ElasticBuffer(**options_of(ctx, num_topk=CASE.topk, deterministic=True, explicitly_destroy=True))
    for decode in (False, True):
        how = {"do_cpu_sync": False, "do_zero_padding": True} if decode else {"do_cpu_sync": True}
        pair, _, weights, handle, event = buffer.dispatch(
            to_fp8(inputs.x), topk_idx=inputs.idx, topk_weights=inputs.weights, num_experts=CASE.experts,
            num_max_tokens_per_rank=M, expert_alignment=128, previous_event=buffer.capture(),
            allocate_on_comm_stream=True, do_handle_copy=False, do_expand=True, use_tma_aligned_col_major_sf=True,
            **how,
        )  # fmt: skip
        real = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1:])
        assert handle.expert_alignment == 128
        rows = expanded_experts(ctx, from_fp8(pair), handle, weights)
        # It adds the rows of a token itself, and rewrites a copy of the handle: token i's sum is row i.
        metadata = handle.recv_src_metadata
        sums = torch.full((len(metadata), CASE.hidden), float("nan"), dtype=BF16, device=rows.device)
        rewritten = metadata.clone()
        for i in range(real):
            places = [row for row in metadata[i, 2:].tolist() if row >= 0]
            sums[i] = rows[places].float().sum(0).to(BF16)
            rewritten[i, 2:] = -1
            rewritten[i, 2] = i
        other = copy.copy(handle)
        other.recv_src_metadata = rewritten
        back, _, _ = buffer.combine(sums, other, previous_event=buffer.capture(), allocate_on_comm_stream=True)
        checks.small_diff("mixture of FP8 rows", back, inputs.exact, 2e-3)
        assert handle.recv_src_metadata is metadata
    buffer.destroy()


# ---- NeMo Automodel, torchtitan, Megatron: training

SAVED = (
    "topk_idx", "psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert", "recv_src_metadata",
    "dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list", "num_unaligned_recv_tokens_per_expert",
)  # fmt: skip


class Dispatch(torch.autograd.Function):
    """Tensors of the handle go through autograd, and back into the handle before it is used."""

    @staticmethod
    def forward(ctx, x, idx, weights, buffer, num_experts, box):
        rows, local, row_weights, handle, event = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=num_experts, num_sms=box.get("num_sms", 0), num_qps=0,
            previous_event=buffer.capture(), allocate_on_comm_stream=True, async_with_compute_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        box["handle"] = handle
        ctx.handle, ctx.buffer = handle, buffer
        ctx.names = [name for name in SAVED if getattr(handle, name) is not None]
        ctx.save_for_backward(*(getattr(handle, name) for name in ctx.names))
        ctx.mark_non_differentiable(local)
        return rows, local, row_weights

    @staticmethod
    def backward(ctx, grad_rows, _, grad_weights):
        for name, tensor in zip(ctx.names, ctx.saved_tensors, strict=True):
            setattr(ctx.handle, name, tensor)
        grad, weights, _ = ctx.buffer.combine(grad_rows.contiguous(), ctx.handle, grad_weights.contiguous())
        return grad, None, weights, None, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        back, _, event = buffer.combine(rows, handle, async_with_compute_stream=True)
        event.current_stream_wait()
        return back

    @staticmethod
    def backward(ctx, grad):
        rows, *_ = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, num_sms=ctx.handle.num_sms, do_cpu_sync=False
        )
        return rows, None, None


def train(ctx, buffer, inputs, checkpointed):
    from torch.utils.checkpoint import checkpoint

    x, weights = inputs.x.clone().requires_grad_(), inputs.weights.clone().requires_grad_()

    def layer(x, weights):
        box = {}
        rows, local, row_weights = Dispatch.apply(x, inputs.idx, weights, buffer, CASE.experts, box)
        return Combine.apply(plain_experts(ctx, rows, local, row_weights), buffer, box["handle"])

    out = checkpoint(layer, x, weights, use_reentrant=False) if checkpointed else layer(x, weights)
    inputs.check(out)
    out.float().sum().backward()
    idx, own, w = inputs.idx.cpu(), inputs.x.cpu().double(), inputs.weights.cpu().double()
    factors = torch.where(idx < 0, 0.0, factor(idx).double())
    want = (factors * w).sum(1, keepdim=True).expand(own.shape)
    checks.within_bound("gradient of x", x.grad.cpu().double(), want, want.abs() * 2.0**-6 + 1e-30)
    want = factors * own.sum(1, keepdim=True)
    magnitude = factors * own.abs().sum(1, keepdim=True)
    checks.within_bound("gradient of weights", weights.grad.cpu().double(), want, magnitude * 2.0**-7 + 1e-30)


def rank_training(ctx):
    from deep_ep import EventOverlap
    from deep_ep.buffers.elastic import ElasticBuffer, EPHandle
    from deep_ep.utils import EventHandle
    from deep_ep.utils.event import EventHandle as SameHandle

    assert EventHandle is SameHandle and issubclass(EPHandle, object) and EventOverlap
    inputs = Inputs(ctx)
    size = ElasticBuffer.get_buffer_size_hint(ctx.group, M, CASE.hidden)
    buffer = ElasticBuffer(
        **options_of(ctx, num_gpu_timeout_secs=300, explicitly_destroy=True),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    assert buffer.group is ctx.group and buffer.num_bytes >= size and buffer.num_max_tokens_per_rank == M
    for checkpointed in (False, True):
        train(ctx, buffer, inputs, checkpointed)
    # torch's deterministic algorithms fill new tensors: outputs must be the library's.
    torch.use_deterministic_algorithms(True)
    try:
        train(ctx, buffer, inputs, False)
    finally:
        torch.use_deterministic_algorithms(False)
    buffer.destroy()


# ---- DeepGEMM's baseline


def rank_deepgemm(ctx):
    from deep_ep import ElasticBuffer

    inputs = Inputs(ctx)
    buffer = ElasticBuffer(
        **options_of(ctx, num_topk=CASE.topk, allow_multiple_reduction=False, explicitly_destroy=True)
    )
    stats = torch.zeros(CASE.experts // ctx.size, dtype=torch.int32, device=inputs.x.device)
    outs = []
    for _ in range(2):
        pair, _, weights, handle, _ = buffer.dispatch(
            to_fp8(inputs.x), topk_idx=inputs.idx, topk_weights=inputs.weights, num_experts=CASE.experts,
            cumulative_local_expert_recv_stats=stats, expert_alignment=32, do_cpu_sync=False, do_handle_copy=False,
            do_expand=True, use_tma_aligned_col_major_sf=True,
        )  # fmt: skip
        outs.append(buffer.combine(expanded_experts(ctx, from_fp8(pair), handle, weights), handle)[0])
        buffer.barrier(use_comm_stream=False)
    assert torch.equal(stats, 2 * handle.num_unaligned_recv_tokens_per_expert)
    assert torch.equal(*outs)
    checks.small_diff("mixture of FP8 rows", outs[0], inputs.exact, 2e-3)
    buffer.destroy()


@pytest.mark.parametrize("client", [rank_vllm, rank_sglang, rank_lightllm, rank_training, rank_deepgemm])
def test_client(pool, client):
    pool.run(cases.RANKS, client)
