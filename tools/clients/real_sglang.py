"""SGLang: DeepEPDispatcher in both modes, two batches overlapped, and experts that dispose of what they have read."""

from __future__ import annotations

import functools
import json
import logging
import types

import real
import torch

from reference_mixture import BF16, Mixture, from_fp8, to_fp8
from test_clients_inference import CASE, B, alternate, dispose


@functools.cache
def client():
    """Its dispatcher; what the server around it would say is set by ``prepare``."""
    moe = "sglang.srt.layers.moe"
    real.stand_in(
        "sglang", "sglang", "sglang.srt.environ", f"{moe}.utils", f"{moe}.token_dispatcher.base",
        f"{moe}.token_dispatcher.deepep", f"{moe}.token_dispatcher.deepep_v2",
    )  # fmt: skip
    logging.Logger.warning_once = logging.Logger.warning  # which its utils would add
    import sglang.srt.runtime_context as context
    import sglang.srt.utils as utils

    for name in ("is_npu", "is_hip", "is_blackwell", "is_flashinfer_available", "get_bool_env_var"):
        setattr(utils, name, lambda *_, **__: False)
    utils.is_cuda = lambda: True
    utils.get_cuda_version = lambda: (13, 0)
    utils.load_json_config = json.loads
    flags = types.SimpleNamespace(moe=types.SimpleNamespace(deepep_config="", tbo_enabled=False))
    resources = types.SimpleNamespace(buffers={})
    context.get_flags, context.get_resources = lambda: flags, lambda: resources
    context.get_server_args = lambda: None
    import sglang.kernels.ops.quantization.fp8_kernel as kernels

    kernels.sglang_per_token_group_quant_fp8 = quantised
    if not torch.cuda.is_available():  # it asks for the number of SMs, to warn of few
        torch.cuda.get_device_properties = lambda **_: types.SimpleNamespace(multi_processor_count=132)
    import sglang.srt.layers.moe.token_dispatcher.deepep as module
    from sglang.srt.environ import envs

    envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.set(B)
    assert module.use_deepep, module._deepep_import_error
    return module


def quantised(x, group, column_major_scales, scale_tma_aligned, scale_ue8m0):
    """Stands in for its kernel: float32 scales, or with UE8M0 int32 of four exponents, stored by column."""
    assert group == 128 and column_major_scales == scale_tma_aligned and (scale_tma_aligned or not scale_ue8m0)
    rows, scales = to_fp8(x, scale_tma_aligned and not scale_ue8m0, scale_ue8m0)
    if scale_ue8m0:
        exponents = (scales.contiguous().view(torch.int32) >> 23) & 255
        scales = exponents.to(torch.uint8).contiguous().view(torch.int32).t().contiguous().t()
    return rows, scales


def prepare(prefill, dtype="fp8", blackwell=False, config=""):
    module = client()
    module.get_is_extend_in_batch = lambda: prefill
    gemm = module.deep_gemm_wrapper
    gemm.ENABLE_JIT_DEEPGEMM, gemm.DEEPGEMM_SCALE_UE8M0, gemm.DEEPGEMM_BLACKWELL = True, blackwell, blackwell
    module.envs.SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE.set(False)
    module.envs.SGLANG_DEEPEP_BF16_DISPATCH.set(dtype == "bf16")
    if config:
        module.get_deepep_config = lambda: config
        module.DeepEPConfig._instance = None
        module.DeepEPBuffer._state().buffer = None
    return module


def make(module, mix, mode="AUTO", asynchronous=False, hook=False):
    return module.DeepEPDispatcher(
        group=mix.ctx.group, router_topk=CASE.topk, permute_fusion=True, num_experts=CASE.experts,
        num_local_experts=mix.num_local, hidden_size=CASE.hidden, params_dtype=BF16,
        deepep_mode=getattr(module.DeepEPMode, mode), async_finish=asynchronous, return_recv_hook=hook,
    )  # fmt: skip


def steps(dispatcher, mix, module, limit, disposes=False):
    """A batch through the four halves; yields between them. In either mode, by the format of the output."""
    dispatcher.dispatch_a(mix.x, types.SimpleNamespace(topk_weights=mix.weights, topk_ids=mix.idx))
    yield
    got = dispatcher.dispatch_b()
    pair = (got.hidden_states, got.hidden_states_scale)
    rows = pair[0] if pair[1] is None else from_fp8(pair)
    if isinstance(got, module.DeepEPNormalDispatchOutput):
        assert len(got.num_recv_tokens_per_expert) == mix.num_local
        answers = mix.rows_by_index(rows, got.topk_ids, got.topk_weights)
        given = module.DeepEPNormalCombineInput(answers, got.topk_ids, got.topk_weights)
    else:
        given = module.DeepEPLLCombineInput(mix.rows_by_expert(rows, got.masked_m), got.topk_ids, got.topk_weights)
    if disposes:
        for tensor in pair:
            dispose(tensor)
    yield
    dispatcher.combine_a(given)
    yield
    mix.check(dispatcher.combine_b(), limit)


def one(ctx, prefill, dtype, asynchronous, blackwell=False, disposes=False):
    module, mix = prepare(prefill, dtype, blackwell), Mixture(ctx, CASE)
    dispatcher = make(module, mix, asynchronous=asynchronous, hook=not asynchronous)
    for _ in range(3):
        alternate(steps(dispatcher, mix, module, 4e-3 if dtype == "fp8" else 1e-5, disposes))


def two(ctx, prefill, hook):
    """Two batches overlapped, each with a dispatcher of its own over the common buffer."""
    module = prepare(prefill)
    batches = [Mixture(ctx, CASE), Mixture(ctx, CASE.but(seed=1))]
    dispatchers = [make(module, mix, asynchronous=not hook, hook=hook) for mix in batches]
    for _ in range(2):
        alternate(*(steps(d, mix, module, 2e-3, True) for d, mix in zip(dispatchers, batches, strict=True)))


def modes(ctx):
    """Prefill and decoding in turn; the dispatcher cleans the buffer when decoding begins."""
    for prefill in (True, False, True, False):
        one(ctx, prefill, "fp8", False)


def tuned(ctx):
    """A tuned configuration, as JSON."""
    tables = {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 16, "num_max_nvl_chunked_recv_tokens": 512,
              "num_max_rdma_chunked_send_tokens": 16, "num_max_rdma_chunked_recv_tokens": 512}  # fmt: skip
    module = prepare(True, config=json.dumps({"normal_dispatch": tables, "normal_combine": tables}))
    one(ctx, True, "fp8", True)
    assert module.DeepEPConfig.get_instance().num_sms == 24


def elastic(ctx, prefill, dtype, tma=False, blackwell=False, expand=None):
    """V2: decoding and prefill, expanded or plain; one rank may be idle."""
    import sglang.srt.layers.deep_gemm_wrapper as gemm
    import sglang.srt.layers.moe.token_dispatcher.deepep_v2 as module
    import sglang.srt.runtime_context as context

    gemm.DEEPGEMM_NEED_TMA_ALIGNED_SCALES, gemm.DEEPGEMM_SCALE_UE8M0 = tma, blackwell
    parallel = types.SimpleNamespace(attn_dp_size=ctx.size, attn_cp_size=1, tp_size=ctx.size, tp_group=None)
    execution = types.SimpleNamespace(moe=types.SimpleNamespace(deepep_v2_mode="hybrid"))
    module.get_parallel, module.get_exec = lambda: parallel, lambda: execution
    module.get_resources, module.get_is_extend_in_batch = context.get_resources, lambda: prefill
    module.envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.set(4 * B)
    module.envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.set(expand)
    mix = Mixture(ctx, CASE)
    dispatcher = module.DeepEPv2Dispatcher(
        ctx.group, CASE.topk, CASE.experts, mix.num_local, CASE.hidden, BF16, use_fp8_dispatch=dtype == "fp8"
    )
    dispatcher.prebuild()
    for _ in range(2):
        got = dispatcher.dispatch(mix.x, types.SimpleNamespace(topk_weights=mix.weights, topk_ids=mix.idx))
        assert got.use_masked_gemm != prefill and got.is_expanded == (expand is not False)
        pair = (got.hidden_states, got.hidden_states_scale)
        rows = pair[0] if pair[1] is None else from_fp8(pair)
        answers = torch.full(rows.shape, float("nan"), dtype=BF16, device=rows.device)
        if got.is_expanded:
            start = 0
            for local, end in enumerate(got.psum_num_recv_tokens_per_expert.tolist()):
                factors = mix.own_vectors()[local] * got.topk_weights[start:end].unsqueeze(1)
                answers[start:end] = (rows[start:end].float() * factors).to(BF16)
                start = -(-end // got.expert_alignment) * got.expert_alignment
        else:
            answers = mix.rows_by_index(rows, got.topk_ids, got.topk_weights)
        mix.check(dispatcher.combine(module.DeepEPv2CombineInput(answers, None)), 4e-3 if dtype == "fp8" else 2e-5)


def of_v2(ctx, *options):
    prepare(True)
    elastic(ctx, *options)


CASES = {
    "normal": (one, True, "fp8", False), "normal, asynchronous": (one, True, "fp8", True),
    "normal, BF16": (one, True, "bf16", True), "normal, UE8M0": (one, True, "fp8", True, True),
    "low latency, hook": (one, False, "fp8", False), "low latency, event": (one, False, "fp8", True),
    "low latency, BF16": (one, False, "bf16", False), "low latency, UE8M0": (one, False, "fp8", False, True),
    "experts that dispose": (one, False, "fp8", False, True, True), "two batches, normal": (two, True, False),
    "two batches, low latency, hooks": (two, False, True), "two batches, low latency, events": (two, False, False),
    "both modes": (modes,), "a tuned configuration": (tuned,),
    "V2, decoding": (of_v2, False, "fp8"), "V2, decoding, BF16": (of_v2, False, "bf16"),
    "V2, decoding, UE8M0": (of_v2, False, "fp8", True, True), "V2, prefill by expert": (of_v2, True, "fp8", True),
    "V2, prefill by token": (of_v2, True, "fp8", True, False, False),
    "V2, prefill by token, UE8M0": (of_v2, True, "fp8", True, True, False),
}  # fmt: skip
