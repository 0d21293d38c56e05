"""The call patterns of the frameworks that use this API, argument for argument."""

from __future__ import annotations

import pytest
import torch

import cases
import checks
import lowlat
import normal
import victims
from cases import Case

CASE = Case((40, 25, 0, 64), experts=16, topk=4, hidden=512)
LL_CASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3)
B = 16


def rank_vllm_low_latency(ctx):
    """Two micro-batches in turn, each keeping its results until its combine was sent; then recovery."""
    from deep_ep import Buffer

    size = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=B, hidden=LL_CASE.hidden, num_ranks=ctx.size, num_experts=LL_CASE.experts
    )
    buffer = Buffer(
        group=ctx.group,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=LL_CASE.experts // ctx.size,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=True,
    )
    hook = {"return_recv_hook": True, "async_finish": False}
    for turn in range(4):
        options = {"use_fp8": True, "round_scale": bool(turn % 2), "use_ue8m0": bool(turn % 2), **hook}
        a = lowlat.dispatch(ctx, buffer, LL_CASE.but(seed=turn), B, **options)
        a.hook()
        b = lowlat.dispatch(ctx, buffer, LL_CASE.but(seed=40 + turn), B, **options)
        lowlat.check(a)  # in place of the GEMM of A while B is in flight
        b.hook()
        out = torch.empty((LL_CASE.tokens[ctx.rank], LL_CASE.hidden), dtype=torch.bfloat16, device=ctx.device)
        sums_a = lowlat.combine(ctx, buffer, a, out=out, **hook)
        lowlat.check(b)
        sums_a.hook()
        sums_b = lowlat.combine(ctx, buffer, b, zero_copy=False, **hook)
        sums_b.hook()
        lowlat.check_combined(sums_a)
        lowlat.check_combined(sums_b)
    status = torch.zeros(ctx.size, dtype=torch.int32, device=ctx.device)
    buffer.low_latency_query_mask_buffer(status)
    assert status.sum().item() == 0
    ctx.barrier()
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    ctx.barrier()
    lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, LL_CASE, B))
    buffer.destroy()


def test_vllm_low_latency(pool):
    pool.run(4, rank_vllm_low_latency)


def internode(ctx):
    return ctx.size > cases.node_size()


def rank_vllm_throughput(ctx):
    """Layout, dispatch and combine by keyword, asynchronous, ordered by captured events."""
    from deep_ep import Buffer

    Buffer.set_num_sms(20)
    buffer = Buffer(
        group=ctx.group, num_nvl_bytes=1 << 24, num_rdma_bytes=normal.RDMA_BYTES if internode(ctx) else 0,
        low_latency_mode=False, num_qps_per_rank=10 if internode(ctx) else 1, explicitly_destroy=True,
    )  # fmt: skip
    case = CASE.but(kind="fp8", num_scales=4)
    exchange = normal.expect(case, ctx.rank)
    own = exchange.own
    previous = Buffer.capture()
    per_rank, per_node, per_expert, table, event = buffer.get_dispatch_layout(
        topk_idx=ctx.to_device(own.topk_idx), num_experts=case.experts, previous_event=previous, async_finish=False,
        allocate_on_comm_stream=False,
    )  # fmt: skip
    (
        exchange.recv_x, exchange.recv_topk_idx, exchange.recv_topk_weights, exchange.counts, exchange.handle, event,
    ) = buffer.dispatch(
        x=normal.x_of(ctx, own), handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=table, num_tokens_per_expert=per_expert, topk_idx=ctx.to_device(own.topk_idx),
        topk_weights=ctx.to_device(own.topk_weights), expert_alignment=1, config=Buffer.get_dispatch_config(ctx.size),
        previous_event=previous, async_finish=True, allocate_on_comm_stream=False,
    )  # fmt: skip
    event.current_stream_wait()
    normal.check(exchange)
    combined, weights, event = buffer.combine(
        x=ctx.to_device(normal.expert_rows(exchange, True)[ctx.rank]), handle=exchange.handle, topk_weights=None,
        config=Buffer.get_combine_config(ctx.size), previous_event=Buffer.capture(), async_finish=True,
        allocate_on_comm_stream=False,
    )  # fmt: skip
    event.current_stream_wait()
    assert weights is None
    normal.check_combined(exchange, normal.expert_rows(exchange, True), [], combined, True)
    buffer.destroy()


def test_vllm_throughput(pool):
    pool.run(4, rank_vllm_throughput)


def rank_sglang(ctx):
    """Configs from a table by keyword, positional size hint, both modes on one buffer with cleaning in between."""
    from deep_ep import Buffer, Config

    table = {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 16, "num_max_nvl_chunked_recv_tokens": 512,
             "num_max_rdma_chunked_send_tokens": 16, "num_max_rdma_chunked_recv_tokens": 512}  # fmt: skip
    config = Config(**table)
    both = (config, Buffer.get_combine_config(ctx.size))
    nvl = max(each.get_nvl_buffer_size_hint(CASE.hidden * 2, ctx.size) for each in both)
    rdma = max(
        config.get_rdma_buffer_size_hint(CASE.hidden * 2, ctx.size),
        Buffer.get_low_latency_rdma_size_hint(B, LL_CASE.hidden, ctx.size, LL_CASE.experts),
    )
    buffer = Buffer(
        ctx.group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=max(24, LL_CASE.experts // ctx.size),
        allow_mnnvl=True,
    )  # fmt: skip
    for turn in range(3):
        exchange = normal.dispatch_and_check(
            ctx, buffer, CASE.but(seed=turn, alignment=128), config=config, previous_event=Buffer.capture(),
            async_finish=True, allocate_on_comm_stream=True,
        )  # fmt: skip
        normal.combine(ctx, buffer, exchange, config=config)
        buffer.clean_low_latency_buffer(B, LL_CASE.hidden, LL_CASE.experts)
        call = lowlat.dispatch_and_check(ctx, buffer, LL_CASE.but(seed=turn), B, return_recv_hook=True)
        lowlat.combine_and_check(ctx, buffer, call, return_recv_hook=True)


def test_sglang(pool):
    pool.run(4, rank_sglang)


class FusedDispatch(torch.autograd.Function):
    """Megatron's: forward dispatches, backward combines gradients and the probabilities' gradients."""

    @staticmethod
    def forward(ctx, x, idx, probabilities, experts, buffer):
        from deep_ep import EventHandle, EventOverlap

        previous = EventOverlap(EventHandle())
        per_rank, per_node, per_expert, table, event = buffer.get_dispatch_layout(
            idx, experts, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        rows, row_idx, row_probabilities, counts, handle, after = buffer.dispatch(
            x, topk_idx=idx, topk_weights=probabilities, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=table, num_tokens_per_expert=per_expert,
            previous_event=event, async_finish=True, allocate_on_comm_stream=True,
        )  # fmt: skip
        after.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return rows, row_idx, row_probabilities, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad_rows, grad_idx, grad_probabilities, grad_counts, grad_handle):
        from deep_ep import EventHandle, EventOverlap

        grad_x, grad_weights, after = ctx.buffer.combine(
            grad_rows.contiguous(), ctx.handle, topk_weights=grad_probabilities.float(),
            previous_event=EventOverlap(EventHandle()), async_finish=True, allocate_on_comm_stream=True,
        )  # fmt: skip
        after.current_stream_wait()
        return grad_x, None, grad_weights, None, None


class FusedCombine(torch.autograd.Function):
    """Megatron's: forward combines, backward is a cached dispatch."""

    @staticmethod
    def forward(ctx, x, handle, buffer):
        combined, _, _ = buffer.combine(x, handle)
        ctx.buffer, ctx.handle = buffer, handle
        return combined

    @staticmethod
    def backward(ctx, grad):
        rows, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)
        return rows, None, None


def rank_megatron(ctx, case):
    """y = sum over ranks of scale_of_rank * row * probability; gradients by hand."""
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.expect(case, ctx.rank)
        own = exchange.own
        x = ctx.to_device((own.x / 64).to(torch.bfloat16)).requires_grad_()
        probabilities = ctx.to_device(torch.rand(own.topk_idx.shape, generator=cases.generator(ctx.rank)))
        probabilities.requires_grad_()
        rows, row_idx, row_probabilities, _, handle = FusedDispatch.apply(
            x, ctx.to_device(own.topk_idx), probabilities, case.experts, buffer
        )
        weight = (row_probabilities * (row_idx >= 0)).sum(dim=1, keepdim=True)
        y = FusedCombine.apply((rows * weight).to(torch.bfloat16), handle, buffer)
        weights = probabilities.detach().cpu() * (own.topk_idx >= 0)
        want = x.detach().cpu().float() * weights.sum(dim=1, keepdim=True)
        checks.small_diff("forward", y, want, 1e-5)
        y.backward(torch.ones_like(y))
        checks.small_diff("gradient of x", x.grad, weights.sum(dim=1, keepdim=True).expand_as(want), 1e-5)
        per_choice = x.detach().cpu().float().sum(dim=1, keepdim=True) * (own.topk_idx >= 0)
        checks.small_diff("gradient of the probabilities", probabilities.grad, per_choice, 1e-4)


def test_megatron(pool):
    pool.run(4, rank_megatron, CASE.but(hidden=64, routing="holes"))


def rank_megatron_replaces_buffer(ctx):
    """Forward on one buffer, which is then replaced; backward on the new one. Sizes by hints."""
    from deep_ep import Buffer

    configs = (Buffer.get_dispatch_config(ctx.size), Buffer.get_combine_config(ctx.size))
    nvl, rdma = 0, 0
    for config in configs:
        nvl = max(config.get_nvl_buffer_size_hint(CASE.hidden * 2, ctx.size), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(CASE.hidden * 2, ctx.size), rdma)
    buffer = Buffer(ctx.group, nvl // 2, rdma)
    exchange = normal.dispatch_and_check(ctx, buffer, CASE)
    buffer = Buffer(ctx.group, nvl, rdma)
    normal.combine(ctx, buffer, exchange, with_weights=True)
    rows, *_ = buffer.dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle)
    checks.same_rows("recv_x", rows, exchange.want.x)


def test_megatron_replaces_its_buffer(pool):
    pool.run(4, rank_megatron_replaces_buffer)


def rank_tensorrt(ctx, legacy):
    """No torch group but an mpi4py communicator, and the node size by keyword."""
    if legacy:
        from deep_ep.buffers.legacy import Buffer
    else:
        from deep_ep import Buffer
    comm, peers = victims.Comm(ctx), min(4, cases.node_size())
    rdma = Buffer.get_low_latency_rdma_size_hint(B, LL_CASE.hidden, ctx.size, LL_CASE.experts)
    buffer = Buffer(
        None, 1 << 22, rdma, low_latency_mode=True, num_qps_per_rank=2, num_nvl_peers=peers,
        explicitly_destroy=True, comm=comm,
    )  # fmt: skip
    assert comm.exchanges >= 1 and buffer.group_size == ctx.size and buffer.rank == ctx.rank
    exchange = normal.dispatch(ctx, buffer, CASE)
    assert exchange.event.event is None
    normal.check(exchange)
    _, _, event = normal.combine(ctx, buffer, exchange)
    assert event.event is None
    call = lowlat.dispatch(ctx, buffer, LL_CASE, B, use_fp8=False)
    assert call.event.event is None and call.hook is None
    lowlat.check(call)
    done = lowlat.combine_and_check(ctx, buffer, call)
    assert done.event.event is None and done.hook is None
    buffer.destroy()


@pytest.mark.parametrize("legacy", [False, True])
def test_tensorrt_llm(pool, legacy):
    pool.run(4, rank_tensorrt, legacy)


def rank_lmdeploy(ctx):
    """set_num_sms at import time, probing of keywords by TypeError, then both modes."""
    import deep_ep

    deep_ep.Buffer.set_num_sms(32)
    assert deep_ep.Buffer.num_sms == 32
    try:
        with pytest.raises(TypeError):
            deep_ep.Buffer(ctx.group, 1 << 22, 0, low_latency_mode=False, num_qps_per_rank=1, deepep_probe=1)
        with normal.buffer_of(ctx) as buffer:
            with pytest.raises(TypeError):
                buffer.low_latency_dispatch(None, None, 1, 1, probing=True)
            normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE))
    finally:
        deep_ep.Buffer.set_num_sms(20)


def test_lmdeploy(pool):
    pool.run(4, rank_lmdeploy)


def rank_old_extension(ctx):
    """Code that imports the old extension module finds the same objects there."""
    import deep_ep
    import deep_ep_cpp

    assert deep_ep_cpp.Config is deep_ep.Config and deep_ep_cpp.EventHandle is deep_ep.EventHandle
    assert deep_ep_cpp.topk_idx_t is torch.int64 and type(deep_ep_cpp.is_sm90_compiled()) is bool
    hint = deep_ep_cpp.get_low_latency_rdma_size_hint(B, 512, ctx.size, 8)
    assert hint == deep_ep.Buffer.get_low_latency_rdma_size_hint(B, 512, ctx.size, 8)


def test_old_extension_module(pool):
    pool.run(1, rank_old_extension)


def rank_gpt_style(ctx):
    """Upstream's own test: group of any backend, handle reused, bias given, weights checked."""
    with normal.buffer_of(ctx, int(2e6)) as buffer:
        for previous in (False, True):
            for asynchronous in (False, True):
                from deep_ep import Buffer

                options = {"async_finish": asynchronous, "config": Buffer.get_dispatch_config(ctx.size)}
                if previous:
                    options["previous_event"] = Buffer.capture()
                exchange = normal.dispatch_and_check(ctx, buffer, CASE, **options)
                normal.combine(ctx, buffer, exchange, with_weights=True, bias=2, **options)


def test_upstream_loop(pool):
    pool.run(4, rank_gpt_style)
