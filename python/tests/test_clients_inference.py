"""How inference engines call V1: a mixture of experts from each engine's calls, its output beside plain torch's."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import cases
import victims
from cases import Case
from reference_mixture import BF16, FP8, Mixture, from_fp8, to_fp8

CASE = Case((12, 7, 0, 9), experts=8, topk=3, hidden=512, routing="holes")
B = 16
WAIT = 60.0  # seconds that one thread waits for the other before it gives up
HOOK = {"async_finish": False, "return_recv_hook": True}


def internode(ctx):
    return ctx.size > cases.node_size()


def sizes(ctx, buffer_class, config=None):
    """Bytes of both regions for CASE, by the hints."""
    dispatch, combine = buffer_class.get_dispatch_config(ctx.size), buffer_class.get_combine_config(ctx.size)
    configs = (config or dispatch, combine)
    nvl = max(each.get_nvl_buffer_size_hint(CASE.hidden * 2, ctx.size) for each in configs)
    rdma = max(each.get_rdma_buffer_size_hint(CASE.hidden * 2, ctx.size) for each in configs)
    return nvl, max(rdma, buffer_class.get_low_latency_rdma_size_hint(B, CASE.hidden, ctx.size, CASE.experts))


# ---- vLLM: dual batch overlap


class DualBatch:
    """Two threads that run in turn. What one registers, the other runs when it comes to its next call."""

    def __init__(self, ctx):
        self.ctx, self.turn, self.changed = ctx, 0, threading.Condition()
        self.hooks, self.ended = [None, None], [False, False]
        if ctx.device.type == "cuda":
            self.compute, self.comm = torch.cuda.Stream(), torch.cuda.Stream()
            self.compute.wait_stream(torch.cuda.current_stream())  # which made the inputs

    def on(self, stream):
        return torch.cuda.stream(getattr(self, stream)) if self.ctx.device.type == "cuda" else nullcontext()

    def follow(self, stream, other):
        """One of the two streams waits for what the other has been given."""
        if self.ctx.device.type == "cuda":
            getattr(self, stream).wait_stream(getattr(self, other))

    def register(self, me, hook):
        assert self.hooks[1 - me] is None
        self.hooks[1 - me] = hook

    def run_hook(self, me):
        if self.hooks[me] is not None:
            hook, self.hooks[me] = self.hooks[me], None
            hook()

    def let_other_run(self, me):
        with self.changed:
            if not self.ended[1 - me]:
                self.turn = 1 - me
                self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.turn == me, WAIT), "the other thread gave the turn back too late"

    def thread(self, me, body, *args):
        with self.changed:
            assert self.changed.wait_for(lambda: self.turn == me, WAIT), "the other thread never gave the turn"
        try:
            if self.ctx.device.type == "cuda":
                torch.cuda.set_device(self.ctx.device)
            return body(self, me, *args)
        finally:
            with self.changed:
                self.ended[me], self.turn = True, 1 - me
                self.changed.notify_all()

    def run(self, body, *args):
        with ThreadPoolExecutor(2) as threads:
            done = [threads.submit(self.thread, me, body, *(arg[me] for arg in args)) for me in (0, 1)]
            for each in done:
                each.result()
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize()


def throughput_layer(dual, me, buffer, mix):
    """Calls on a communication stream of the client, ordered by an event of its compute stream, none asynchronous."""
    from deep_ep import Buffer, EventOverlap

    for _ in range(2):
        with dual.on("compute"):
            pair = to_fp8(mix.x)
            previous = Buffer.capture()
            assert isinstance(previous, EventOverlap)
        with dual.on("comm"):
            per_rank, per_node, per_expert, table, event = buffer.get_dispatch_layout(
                topk_idx=mix.idx, num_experts=CASE.experts, previous_event=previous, async_finish=False,
                allocate_on_comm_stream=False,
            )  # fmt: skip
            pair, idx, weights, counts, handle, event = buffer.dispatch(
                x=pair, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=table, num_tokens_per_expert=per_expert, topk_idx=mix.idx, topk_weights=mix.weights,
                expert_alignment=1, config=Buffer.get_dispatch_config(mix.ctx.size), previous_event=previous,
                async_finish=False, allocate_on_comm_stream=False,
            )  # fmt: skip
        dual.let_other_run(me)
        if event.event is not None:
            event.current_stream_wait()
        dual.follow("compute", "comm")
        with dual.on("compute"):
            assert sum(counts) == int((idx >= 0).sum())
            rows = mix.rows_by_index(from_fp8(pair), idx, weights)
            previous = Buffer.capture()
        with dual.on("comm"):
            sums, _, event = buffer.combine(
                x=rows, handle=handle, topk_weights=None, config=Buffer.get_combine_config(mix.ctx.size),
                previous_event=previous, async_finish=False, allocate_on_comm_stream=False,
            )  # fmt: skip
        dual.let_other_run(me)
        dual.follow("compute", "comm")
        with dual.on("compute"):
            mix.check(sums, 2e-3)


def low_latency_layer(dual, me, buffer, mix):
    """Each half of the other batch's call is received just before this batch's next send; masks are asked each step."""
    status = torch.ones(mix.ctx.size, dtype=torch.int32, device=mix.ctx.device)
    for turn in range(3):
        dual.run_hook(me)
        pair, counts, handle, _, hook = buffer.low_latency_dispatch(
            mix.x, mix.idx, B, CASE.experts, use_fp8=True, round_scale=bool(turn % 2), use_ue8m0=bool(turn % 2), **HOOK
        )
        dual.register(me, hook)
        dual.let_other_run(me)
        dual.run_hook(me)
        rows = mix.rows_by_expert(from_fp8(pair), counts)
        out = torch.empty_like(mix.x)
        _, _, hook = buffer.low_latency_combine(rows, mix.idx, mix.weights, handle, zero_copy=False, out=out, **HOOK)
        dual.register(me, hook)
        dual.let_other_run(me)
        dual.run_hook(me)
        mix.check(out, 2e-3)
        buffer.low_latency_query_mask_buffer(status)
        assert not status.any()


def rank_vllm(ctx):
    from deep_ep import Buffer

    batches = [Mixture(ctx, CASE), Mixture(ctx, CASE.but(seed=1, tokens=CASE.tokens[::-1]))]
    nvl, rdma = sizes(ctx, Buffer)
    buffer = Buffer(
        group=ctx.group, num_nvl_bytes=nvl, num_rdma_bytes=rdma if internode(ctx) else 0, low_latency_mode=False,
        num_qps_per_rank=10 if internode(ctx) else 1, explicitly_destroy=True,
    )  # fmt: skip
    DualBatch(ctx).run(throughput_layer, [buffer] * 2, batches)
    buffer.destroy()
    buffer = Buffer(
        group=ctx.group, num_nvl_bytes=nvl, num_rdma_bytes=rdma, low_latency_mode=True,
        num_qps_per_rank=CASE.experts // ctx.size, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
        explicitly_destroy=True, enable_shrink=True,
    )  # fmt: skip
    DualBatch(ctx).run(low_latency_layer, [buffer] * 2, batches)
    buffer.destroy()


# ---- SGLang: two batches overlapped by one thread, experts that free what they have read


def dispose(tensor):
    """What its experts do to rows that they have read: the memory goes back, the tensor stays."""
    tensor.set_(torch.empty((0,), device=tensor.device, dtype=tensor.dtype))


def sglang_normal(buffer, mix, config):
    """A batch's operations of normal mode; yields where the other batch runs."""
    from deep_ep import Buffer

    previous = Buffer.capture()
    # Scales in the format of the GEMM: stored by column, or an int32 with four exponents.
    rows, scales = to_fp8(mix.x, column_major=True, power_of_two=True)
    if mix.case.seed % 2:
        exponents = (scales.contiguous().view(torch.int32) >> 23) & 255
        scales = exponents.to(torch.uint8).contiguous().view(torch.int32)
    yield
    per_rank, per_node, per_expert, table, previous = buffer.get_dispatch_layout(
        mix.idx, CASE.experts, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
    )
    pair, idx, weights, counts, handle, event = buffer.dispatch(
        (rows, scales), topk_idx=mix.idx, topk_weights=mix.weights, num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node, is_token_in_rank=table, num_tokens_per_expert=per_expert,
        previous_event=previous, async_finish=True, allocate_on_comm_stream=True, expert_alignment=128, config=config,
    )  # fmt: skip
    yield
    event.current_stream_wait()
    assert len(counts) == mix.num_local and all(count % 128 == 0 for count in counts)
    answers = mix.rows_by_index(from_fp8(pair), idx, weights)
    for tensor in pair:
        dispose(tensor)
    yield
    sums, _, event = buffer.combine(
        answers, handle, async_finish=True, previous_event=Buffer.capture(), allocate_on_comm_stream=True, config=config
    )
    yield
    event.current_stream_wait()
    mix.check(sums, 4e-3)


def sglang_low_latency(buffer, mix, hook):
    """The same in low-latency mode, with a hook or with an event; the runner disposes of rows and scales."""
    how = {"async_finish": not hook, "return_recv_hook": hook}
    pair, counts, handle, event, receive = buffer.low_latency_dispatch(
        mix.x, mix.idx, B, CASE.experts, use_fp8=True, round_scale=True, use_ue8m0=True, **how
    )
    yield
    receive() if hook else event.current_stream_wait()
    rows = mix.rows_by_expert(from_fp8(pair), counts)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in pair]
    for tensor in pair:
        dispose(tensor)
    yield
    sums, event, receive = buffer.low_latency_combine(
        x=rows, topk_idx=mix.idx, topk_weights=mix.weights, handle=handle, **how
    )
    yield
    receive() if hook else event.current_stream_wait()
    dispose(rows)
    mix.check(sums, 2e-3)
    return storages


def alternate(*batches):
    """Advances the batches in turn, the second one step behind the first; what each returned."""
    results = [None] * len(batches)
    going = dict(enumerate(batches))
    next(going[0])
    while going:
        for number in sorted(going, reverse=True):
            try:
                next(going[number])
            except StopIteration as end:
                results[number] = end.value
                del going[number]
    return results


def rank_sglang(ctx):
    from deep_ep import Buffer, Config

    config = Config(
        num_sms=24, num_max_nvl_chunked_send_tokens=16, num_max_nvl_chunked_recv_tokens=512,
        num_max_rdma_chunked_send_tokens=16, num_max_rdma_chunked_recv_tokens=512,
    )  # fmt: skip
    nvl, rdma = sizes(ctx, Buffer, config)
    buffer = Buffer(
        ctx.group,
        nvl,
        rdma,
        low_latency_mode=True,
        num_qps_per_rank=max(24, CASE.experts // ctx.size),
        allow_mnnvl=True,
    )
    a, b = Mixture(ctx, CASE), Mixture(ctx, CASE.but(seed=1))
    for _ in range(2):
        alternate(sglang_normal(buffer, a, config), sglang_normal(buffer, b, config))
        buffer.clean_low_latency_buffer(B, CASE.hidden, CASE.experts)
        for hook in (True, False):
            alternate(sglang_low_latency(buffer, a, hook), sglang_low_latency(buffer, b, hook))
    with torch.inference_mode():
        alternate(sglang_low_latency(buffer, a, True), sglang_low_latency(buffer, b, True))
    disposed = [alternate(sglang_low_latency(buffer, a, hook))[0] for hook in (True, False) * 4]
    kept = sum(not storage.expired() for storages in disposed for storage in storages)
    assert kept <= 4, f"{kept} of {2 * len(disposed)} disposed tensors keep their memory"


# ---- TensorRT-LLM: a communicator of MPI, graphs' worst case, B of each call


def rank_tensorrt(ctx):
    from deep_ep import Buffer

    nvl, rdma = sizes(ctx, Buffer)
    buffer = Buffer(None, nvl, rdma, low_latency_mode=True, num_qps_per_rank=2, comm=victims.Comm(ctx))
    assert buffer.num_nvl_bytes == nvl and buffer.num_rdma_bytes == rdma
    mix = Mixture(ctx, CASE.but(index_dtype=torch.int32))
    first, worst = ctx.rank * mix.num_local, max(CASE.tokens) * ctx.size
    for num_worst in (0, worst):
        per_rank, per_node, per_expert, table, event = buffer.get_dispatch_layout(mix.idx, CASE.experts)
        assert event.event is None
        rows, idx, weights, counts, handle, event = buffer.dispatch(
            mix.x, topk_idx=mix.idx, topk_weights=mix.weights, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=table, num_tokens_per_expert=per_expert,
            num_worst_tokens=num_worst, global_expert_id_offset=first,
        )  # fmt: skip
        assert event.event is None and idx.dtype == torch.int32
        if num_worst:
            assert len(rows) == worst and counts == []
            rows, weights = rows.nan_to_num(), weights.nan_to_num()
        assert ((idx == -1) | ((idx >= first) & (idx < first + mix.num_local))).all()
        rows = mix.rows_by_index(rows, torch.where(idx < 0, idx, idx - first).long(), weights)
        sums, _, event = buffer.combine(rows, handle)
        assert event.event is None
        mix.check(sums)
    for bound in (B, B - 3, 12, B):  # the most tokens of any rank in this step
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            mix.x, mix.idx, bound, CASE.experts, use_fp8=False
        )
        assert event.event is None and hook is None and rows.shape[1] == ctx.size * bound
        sums, event, hook = buffer.low_latency_combine(mix.rows_by_expert(rows, counts), mix.idx, mix.weights, handle)
        assert event.event is None and hook is None
        mix.check(sums)
    # FP8 rows travel as BF16 of half the hidden size, their experts' answers have all of it.
    rows, _ = to_fp8(mix.x)
    packed, counts, handle, _, _ = buffer.low_latency_dispatch(rows.view(BF16), mix.idx, B, CASE.experts, use_fp8=False)
    rows = packed.view(FP8)
    assert rows.shape[2] == CASE.hidden
    unscaled = Mixture(ctx, CASE)
    unscaled.x = to_fp8(mix.x)[0].to(BF16)
    sums, _, _ = buffer.low_latency_combine(mix.rows_by_expert(rows, counts), mix.idx, mix.weights, handle)
    unscaled.check(sums)


# ---- LMDeploy: asynchronous calls, hooks, tensors that free themselves when nobody else holds them


def lmdeploy_dispose(tensor):
    """Frees the storage if the caller and this function alone hold the tensor."""
    if sys.getrefcount(tensor) <= 4:
        tensor.untyped_storage().resize_(0)


def lmdeploy_prefill(buffer, mix):
    from deep_ep import Buffer

    previous = Buffer.capture()
    per_rank, per_node, per_expert, table, previous = buffer.get_dispatch_layout(
        mix.idx, num_experts=CASE.experts, previous_event=previous, async_finish=True,
        allocate_on_comm_stream=previous is not None,
    )  # fmt: skip
    pair, idx, weights, counts, handle, event = buffer.dispatch(
        to_fp8(mix.x), topk_idx=mix.idx, topk_weights=mix.weights.to(torch.float32), num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node, is_token_in_rank=table, num_tokens_per_expert=per_expert,
        previous_event=previous, async_finish=True, allocate_on_comm_stream=True, expert_alignment=128,
    )  # fmt: skip
    event.current_stream_wait()
    rows = mix.rows_by_index(from_fp8(pair), idx, weights)
    sums, _, event = buffer.combine(
        rows, handle, async_finish=True, previous_event=Buffer.capture(), allocate_on_comm_stream=True
    )
    event.current_stream_wait()
    mix.check(sums, 2e-3)


def lmdeploy_decode(buffer, mix, fp8, hook):
    how = {"async_finish": not hook, "return_recv_hook": hook}
    received, counts, handle, event, receive = buffer.low_latency_dispatch(
        mix.x, mix.idx, B, CASE.experts, use_fp8=fp8, **how
    )
    receive() if hook else event.current_stream_wait()
    rows = mix.rows_by_expert(from_fp8(received) if fp8 else received, counts)
    for tensor in received if fp8 else (received,):
        lmdeploy_dispose(tensor)
    sums, event, receive = buffer.low_latency_combine(rows, mix.idx, mix.weights, handle, **how)
    receive() if hook else event.current_stream_wait()
    mix.check(sums, 2e-3 if fp8 else 1e-5)


def rank_lmdeploy(ctx):
    from deep_ep import Buffer

    before = Buffer.num_sms
    Buffer.set_num_sms(24)
    try:
        nvl, rdma = sizes(ctx, Buffer)
        given = {"low_latency_mode": True, "num_qps_per_rank": max(1, CASE.experts // ctx.size)}
        try:
            buffer = Buffer(ctx.group, nvl, rdma, **given, explicitly_destroy=True, some_newer_option=True)
        except TypeError:
            buffer = Buffer(ctx.group, nvl, rdma, **given, explicitly_destroy=True)
        assert isinstance(buffer, Buffer) and buffer.num_sms == 24
        buffer.set_num_sms(20)
        mix = Mixture(ctx, CASE)
        for _ in range(2):
            lmdeploy_prefill(buffer, mix)
            buffer.clean_low_latency_buffer(B, CASE.hidden, CASE.experts)
            for fp8 in (True, False):
                for hook in (True, False):
                    lmdeploy_decode(buffer, mix, fp8, hook)
        buffer.destroy()
    finally:
        Buffer.set_num_sms(before)


# ---- rtp-llm: a quotient of queue pairs, keywords of its own build


def rank_rtp_llm(ctx):
    from deep_ep import Buffer

    nvl, rdma = sizes(ctx, Buffer)
    mix = Mixture(ctx, CASE)
    buffer = Buffer(group=ctx.group, num_nvl_bytes=nvl, num_rdma_bytes=rdma, num_qps_per_rank=1)
    per_rank, per_node, per_expert, table, _ = buffer.get_dispatch_layout(mix.idx, CASE.experts)
    pair, idx, weights, counts, handle, _ = buffer.dispatch(
        to_fp8(mix.x), None, per_rank, per_node, table, per_expert, mix.idx, mix.weights, expert_alignment=1
    )
    assert sum(counts) == int((idx >= 0).sum())
    mix.check(buffer.combine(mix.rows_by_index(from_fp8(pair), idx, weights), handle)[0], 2e-3)
    del buffer  # which frees it
    size = Buffer.get_low_latency_rdma_size_hint(B, CASE.hidden, ctx.size, CASE.experts)
    buffer = Buffer(
        group=ctx.group, num_nvl_bytes=0, num_rdma_bytes=size, low_latency_mode=True,
        num_qps_per_rank=CASE.experts / ctx.size, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
    )  # fmt: skip
    given = {"x": mix.x, "topk_idx": mix.idx, "num_max_dispatch_tokens_per_rank": B, "num_experts": CASE.experts}
    with pytest.raises(NotImplementedError, match="pertoken_quant"):
        buffer.low_latency_dispatch(**given, use_fp8=True, pertoken_quant=True)
    pair, counts, handle, _, _ = buffer.low_latency_dispatch(
        **given, use_fp8=True, async_finish=False, return_recv_hook=False, pertoken_quant=False, opt_level=1
    )
    sums, _, _ = buffer.low_latency_combine(
        x=mix.rows_by_expert(from_fp8(pair), counts), topk_idx=mix.idx, topk_weights=mix.weights, handle=handle,
        zero_copy=False, async_finish=False, return_recv_hook=False, opt_level=1,
    )  # fmt: skip
    mix.check(sums, 2e-3)


CLIENTS = {
    "vLLM": rank_vllm, "SGLang": rank_sglang, "TensorRT-LLM": rank_tensorrt, "LMDeploy": rank_lmdeploy,
    "rtp-llm": rank_rtp_llm,
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_client(pool, name):
    pool.run(4, CLIENTS[name])
