"""vLLM: the managers of buffers and prepare/finalize of its three back ends; experts are plain torch."""

from __future__ import annotations

import functools
import tempfile
import types
from importlib import import_module

import real
import torch
import torch.distributed as dist

import cases
import reference_formats as formats
from reference_mixture import BF16, FP8, Mixture, from_fp8, to_fp8
from test_clients_inference import CASE, B

WIDE = CASE.but(hidden=2048)  # the least that its low-latency files take
PREPARE = "vllm.model_executor.layers.fused_moe.prepare_finalize"


def quantised(x, scale, quant_dtype, per_act_token_quant, block_shape, **_):
    """Stands in for its kernels: FP8 in blocks of 128 channels, or nothing."""
    return to_fp8(x) if quant_dtype is not None and block_shape is not None else (x, None)


class Metadata(types.SimpleNamespace):
    """Counts of rows by expert, as its kernels are told."""

    @staticmethod
    def make_from_list(counts, device):
        return Metadata(expert_num_tokens=torch.tensor(counts, device=device))


@functools.cache
def client():
    """The modules: high throughput, low latency, managers, V2."""
    communicators = "vllm.distributed.device_communicators"
    real.stand_in(
        "vllm", "vllm", f"{PREPARE}.deepep_ht", f"{PREPARE}.deepep_ll", f"{PREPARE}.deepep_v2",
        f"{communicators}.all2all", f"{communicators}.base_device_communicator", "vllm.v1.worker.ubatching",
    )  # fmt: skip
    import vllm
    import vllm.envs
    import vllm.forward_context as context
    import vllm.model_executor.layers.fused_moe.modular_kernel as kernel
    import vllm.model_executor.layers.fused_moe.topk_weight_and_reduce as reduce
    import vllm.model_executor.layers.fused_moe.utils as utils
    import vllm.platforms
    import vllm.utils.import_utils as importing
    import vllm.utils.math_utils as math

    importing.has_deep_ep = importing.has_deep_ep_v2 = lambda: True
    math.cdiv, math.round_up = (lambda a, b: -(-a // b)), (lambda a, b: -(-a // b) * b)
    most = types.SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(CASE.tokens))
    context.get_forward_context = lambda: types.SimpleNamespace(dp_metadata=most)
    vllm.envs.VLLM_DEEPEP_BUFFER_SIZE_MB = 64
    vllm.envs.VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE = False
    vllm.envs.VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL = False
    vllm.envs.VLLM_DEEPEPLL_NVFP4_DISPATCH = False
    vllm.envs.VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE, vllm.envs.VLLM_DEEPEP_V2_PREFER_OVERLAP = True, False
    vllm.envs.VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION = False
    vllm.platforms.current_platform.is_rocm = lambda: False
    kernel.FusedMoEPrepareAndFinalizeModular = type("FusedMoEPrepareAndFinalizeModular", (), {})
    kernel.ExpertTokensMetadata = Metadata
    reduce.TopKWeightAndReduceDelegate = type("TopKWeightAndReduceDelegate", (), {})
    utils.moe_kernel_quantize_input = quantised
    if not torch.cuda.is_available():
        torch.accelerator.synchronize = lambda *_: None
    return tuple(
        import_module(name)
        for name in (f"{PREPARE}.deepep_ht", f"{PREPARE}.deepep_ll", f"{communicators}.all2all", f"{PREPARE}.deepep_v2")
    )


class NoReduction:
    """Experts here have weighted and added already."""

    def apply(self, output, fused_expert_output, **_):
        return fused_expert_output


def manager_of(ctx, kind, group=None, tolerant=False):
    """A manager as its constructor leaves it; the groups that it asks vLLM for are given."""
    manager = object.__new__(getattr(client()[2], kind))
    manager.cpu_group, manager.world_size, manager.rank = group or ctx.group, ctx.size, ctx.rank
    manager.internode = ctx.size > cases.node_size()
    manager.num_sms, manager.support_fault_tolerance = 20, tolerant
    manager.handle_cache = client()[2].Cache()
    return manager


def configuration(block, factor=None):
    if factor is not None:
        return types.SimpleNamespace(quant_dtype="nvfp4", a1_scale=None, a1_gscale=factor, a2_scale=None)
    return types.SimpleNamespace(
        is_block_quantized=block, quant_dtype=FP8 if block else None, a1_scale=None, a1_gscale=None, a2_scale=None,
        per_act_token_quant=False, block_shape=[128, 128] if block else None, is_scale_swizzled=False, mx_alignment=0,
    )  # fmt: skip


def throughput(ctx, block, asynchronous, alone=False):
    module, *_ = client()
    mix = Mixture(ctx, CASE)
    group = dist.ProcessGroupGloo(alone_store(ctx), ctx.rank, ctx.size) if alone else None
    manager = manager_of(ctx, "DeepEPHTAll2AllManager", group)
    buffer = manager.get_handle({})
    assert manager.get_handle({}) is buffer
    both = module.DeepEPHTPrepareAndFinalize(buffer, ctx.size, ctx.size, ctx.rank * mix.num_local)
    for _ in range(2):
        given = (mix.x, mix.weights, mix.idx, CASE.experts, None, False, configuration(block))
        rows, scales, counts, idx, weights = both.prepare_async(*given)() if asynchronous else both.prepare(*given)
        local = idx - ctx.rank * mix.num_local
        local = torch.where((local < 0) | (local >= mix.num_local), -1, local)
        assert counts.expert_num_tokens.tolist() == [int((local == expert).sum()) for expert in range(mix.num_local)]
        answers = mix.rows_by_index(rows if scales is None else from_fp8((rows, scales)), local, weights)
        out = torch.empty_like(mix.x)
        end = (out, answers, mix.weights, mix.idx, False, NoReduction())
        both.finalize_async(*end)() if asynchronous else both.finalize(*end)
        mix.check(out, 2e-3 if block else 1e-5)
    manager.destroy()


def alone_store(ctx):
    """A store for a group that torch.distributed does not know."""
    names = [None] * ctx.size
    dist.all_gather_object(names, tempfile.mkdtemp() if ctx.rank == 0 else None, group=ctx.group)
    return dist.FileStore(f"{names[0]}/store", ctx.size)


def from_nvfp4(pair, factor):
    """BF16 rows [L,n,H] of packed e2m1 and their scales, as its GEMM kernels are given them."""
    rows, scales = pair[0].permute(2, 0, 1), formats.without_tiles(pair[1].view(torch.uint8)).to(pair[0].device)
    codes = torch.stack([rows & 15, rows >> 4], -1).flatten(2).long()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=rows.device)[codes & 7] * (1 - (codes >> 3) * 2)
    scales = scales[:, : rows.shape[1]].view(FP8).float() / factor
    return (values * scales.repeat_interleave(16, 2)).to(BF16)


def low_latency_nvfp4(ctx, scaled):
    """Rows that dispatch casts to NVFP4, which vLLM asks for where its experts compute in it."""
    module = client()[1]
    mix = Mixture(ctx, WIDE)
    manager = manager_of(ctx, "DeepEPLLAll2AllManager", tolerant=True)
    buffer = manager.get_handle({
        "max_num_tokens_per_dp_rank": B, "token_hidden_size": WIDE.hidden, "num_ep_ranks": ctx.size,
        "num_global_experts": WIDE.experts, "num_local_experts": mix.num_local,
    })  # fmt: skip
    both = module.DeepEPLLPrepareAndFinalize(buffer, B, ctx.size, use_fp8_dispatch=False)
    # What the quantisation of its own does with rows that are quantised is no matter of ours.
    both._do_quant = lambda pair, *_: pair
    factor = torch.full((1,), 448 * 6 / 8.0 if scaled else 1.0, device=ctx.device)
    module.envs.VLLM_DEEPEPLL_NVFP4_DISPATCH = True
    try:
        given = (mix.x, mix.weights, mix.idx, WIDE.experts, None, False, configuration(False, factor))
        rows, scales, meta, _, _ = both.prepare(*given)
    finally:
        module.envs.VLLM_DEEPEPLL_NVFP4_DISPATCH = False
    answers = mix.rows_by_expert(from_nvfp4((rows, scales), factor), meta.expert_num_tokens)
    out = torch.empty_like(mix.x)
    both.finalize(out, answers, mix.weights, mix.idx, False, module.TopKWeightAndReduceDelegate())
    mix.check(out, 2e-2)
    dist.barrier(ctx.group)
    manager.destroy()


def low_latency(ctx, fp8, packed, batches=1):
    module = client()[1]
    mixes = [Mixture(ctx, WIDE.but(seed=seed)) for seed in range(batches)]
    manager = manager_of(ctx, "DeepEPLLAll2AllManager", tolerant=True)
    buffer = manager.get_handle({
        "max_num_tokens_per_dp_rank": B, "token_hidden_size": WIDE.hidden, "num_ep_ranks": ctx.size,
        "num_global_experts": WIDE.experts, "num_local_experts": mixes[0].num_local,
    })  # fmt: skip
    both = [module.DeepEPLLPrepareAndFinalize(buffer, B, ctx.size, use_fp8_dispatch=fp8) for _ in mixes]
    mask = torch.ones(ctx.size, dtype=torch.int32, device=ctx.device)
    for each in both:
        each.post_init_setup(types.SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: packed))
    for _ in range(3):
        begun = [
            one.prepare_async(mix.x, mix.weights, mix.idx, WIDE.experts, None, False, configuration(fp8))
            for one, mix in zip(both, mixes, strict=True)
        ]
        ends = []
        for (hook, receive), one, mix in zip(begun, both, mixes, strict=True):
            hook()
            rows, scales, meta, _, _ = receive()
            answers = mix.rows_by_expert(from_fp8((rows, scales)) if fp8 else rows, meta.expert_num_tokens)
            out = torch.empty_like(mix.x)
            delegate = module.TopKWeightAndReduceDelegate()
            ends.append((mix, out, one.finalize_async(out, answers, mix.weights, mix.idx, False, delegate)[0]))
        for mix, out, hook in ends:
            hook()
            mix.check(out, 2e-3 if fp8 else 1e-5)
        type(manager)._mask = mask
        assert not manager.query_active_mask().any() and not manager.query_fault()
    dist.barrier(ctx.group)
    manager.clean_buffers()
    dist.barrier(ctx.group)
    manager.destroy()


def elastic(ctx, block, decode, asynchronous=False):
    """V2: decoding without a wait for counts, prefill into rows by expert."""
    module = client()[3]
    mix = Mixture(ctx, CASE)
    manager = manager_of(ctx, "DeepEPV2All2AllManager")
    manager._device_group, manager._num_sms = ctx.group, None
    manager._gin_checked = True  # it asks NCCL whether GPUs reach the network
    buffer = manager.get_handle({
        "num_max_tokens_per_rank": 4 * B, "hidden": CASE.hidden, "num_topk": CASE.topk, "use_fp8_dispatch": block,
        "num_experts": CASE.experts,
    })  # fmt: skip
    assert manager.max_sms_used() > 0
    first = ctx.rank * mix.num_local
    both = module.DeepEPV2PrepareAndFinalize(
        buffer, ctx.size, ctx.size, first, CASE.experts, CASE.topk, use_fp8_dispatch=block, use_cudagraph=decode
    )
    both.defer_globalize = True  # its experts do what a kernel of Triton would
    for _ in range(2):
        given = (mix.x, mix.weights, mix.idx, CASE.experts, None, False, configuration(block))
        rows, scales, meta, idx, weights = both.prepare_async(*given)() if asynchronous else both.prepare(*given)
        count = len(rows)
        if decode:
            count = int(meta.psum_recv_per_rank[-1])
            assert 0 < count < len(rows) and meta.rank_expert_offset == first
        else:
            assert count == len(idx) == int(meta.expert_num_tokens.sum())
            idx = idx - first
        got = rows[:count] if scales is None else from_fp8((rows[:count], scales[:count]))
        answers = torch.full(rows.shape, float("nan"), dtype=BF16, device=rows.device)  # behind the real ones too
        answers[:count] = mix.rows_by_index(got, idx[:count], weights[:count])
        out = torch.empty_like(mix.x)
        end = (out, answers, mix.weights, mix.idx, False, NoReduction())
        both.finalize_async(*end)() if asynchronous else both.finalize(*end)
        mix.check(out, 2e-3 if block else 1e-5)
    manager.destroy()


CASES = {
    "high throughput, FP8 blocks": (throughput, True, False), "high throughput, BF16": (throughput, False, False),
    "high throughput, asynchronous": (throughput, True, True), "stateless group": (throughput, True, True, True),
    "low latency, FP8": (low_latency, True, False), "low latency, UE8M0": (low_latency, True, True),
    "low latency, BF16": (low_latency, False, False), "low latency, two batches": (low_latency, True, False, 2),
    "low latency, NVFP4": (low_latency_nvfp4, False), "low latency, NVFP4 with a factor": (low_latency_nvfp4, True),
    "V2, decoding": (elastic, False, True), "V2, decoding, FP8 blocks": (elastic, True, True),
    "V2, prefill": (elastic, False, False), "V2, prefill, FP8 blocks, asynchronous": (elastic, True, False, True),
}  # fmt: skip
