"""vLLM: the managers of buffers and prepare/finalize of both back ends; experts are plain torch."""

from __future__ import annotations

import functools
import tempfile
import types
from importlib import import_module

import real
import torch
import torch.distributed as dist

import cases
from reference_mixture import FP8, Mixture, from_fp8, to_fp8
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
        return torch.tensor(counts)


@functools.cache
def client():
    """The modules: high throughput, low latency, managers."""
    communicators = "vllm.distributed.device_communicators"
    real.stand_in(
        "vllm", "vllm", f"{PREPARE}.deepep_ht", f"{PREPARE}.deepep_ll", f"{communicators}.all2all",
        f"{communicators}.base_device_communicator", "vllm.v1.worker.ubatching",
    )  # fmt: skip
    import vllm
    import vllm.envs
    import vllm.model_executor.layers.fused_moe.modular_kernel as kernel
    import vllm.model_executor.layers.fused_moe.topk_weight_and_reduce as reduce
    import vllm.model_executor.layers.fused_moe.utils as utils
    import vllm.platforms

    vllm.envs.VLLM_DEEPEP_BUFFER_SIZE_MB = 64
    vllm.envs.VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE = False
    vllm.envs.VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL = False
    vllm.envs.VLLM_DEEPEPLL_NVFP4_DISPATCH = False
    vllm.platforms.current_platform.is_rocm = lambda: False
    kernel.FusedMoEPrepareAndFinalizeModular = type("FusedMoEPrepareAndFinalizeModular", (), {})
    kernel.ExpertTokensMetadata = Metadata
    reduce.TopKWeightAndReduceDelegate = type("TopKWeightAndReduceDelegate", (), {})
    utils.moe_kernel_quantize_input = quantised
    if not torch.cuda.is_available():
        torch.accelerator.synchronize = lambda *_: None
    return tuple(
        import_module(name) for name in (f"{PREPARE}.deepep_ht", f"{PREPARE}.deepep_ll", f"{communicators}.all2all")
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


def configuration(block):
    return types.SimpleNamespace(
        is_block_quantized=block, quant_dtype=FP8 if block else None, a1_scale=None, a1_gscale=None, a2_scale=None,
        per_act_token_quant=False, block_shape=[128, 128] if block else None, is_scale_swizzled=False,
    )  # fmt: skip


def throughput(ctx, block, asynchronous, alone=False):
    module, _, _ = client()
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
        assert counts.tolist() == [int((local == expert).sum()) for expert in range(mix.num_local)]
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


def low_latency(ctx, fp8, packed, batches=1):
    _, module, _ = client()
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


CASES = {
    "high throughput, FP8 blocks": (throughput, True, False), "high throughput, BF16": (throughput, False, False),
    "high throughput, asynchronous": (throughput, True, True), "stateless group": (throughput, True, True, True),
    "low latency, FP8": (low_latency, True, False), "low latency, UE8M0": (low_latency, True, True),
    "low latency, BF16": (low_latency, False, False), "low latency, two batches": (low_latency, True, False, 2),
}  # fmt: skip
