"""Megatron-LM: MoEFlexTokenDispatcher with _DeepepManager and fused_a2a, under a real TransformerConfig."""

from __future__ import annotations

import types
import warnings

import real
import torch

from reference_mixture import Mixture
from test_clients_training import CASE


def layer_of(ctx, mix, finish=True, on_comm=True, **options):
    real.use("megatron-core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig
    options = {"moe_expert_capacity_factor": 100.0, "moe_router_dtype": "fp32", **options}
    config = TransformerConfig(
        num_layers=1, hidden_size=mix.case.hidden, num_attention_heads=4, num_moe_experts=mix.case.experts,
        moe_router_topk=mix.case.topk, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep",
        expert_model_parallel_size=ctx.size, bf16=True, params_dtype=torch.bfloat16,
        moe_router_load_balancing_type="none", **options,
    )  # fmt: skip
    alone = torch.distributed.ProcessGroup(0, 1)
    groups = types.SimpleNamespace(ep=ctx.group, expt_tp=alone, tp_ep=ctx.group)
    local = list(range(ctx.rank * mix.num_local, (ctx.rank + 1) * mix.num_local))
    dispatcher = MoEFlexTokenDispatcher(mix.num_local, local, config, groups)

    def layer(x, weights):
        chosen = torch.where(mix.idx < 0, 0.0, weights)
        probabilities = x.new_zeros((len(x), mix.case.experts), dtype=torch.float32)
        probabilities = probabilities.scatter_add(1, mix.idx.clamp(min=0), chosen)
        rows, probabilities = dispatcher.dispatch_preprocess(x, probabilities > 0, probabilities)
        rows, probabilities = dispatcher.token_dispatch(rows, probabilities, finish, on_comm)
        rows, counts, probabilities = dispatcher.dispatch_postprocess(rows, probabilities)
        vectors = mix.own_vectors().repeat_interleave(counts, 0)
        answers = (rows.float() * vectors * probabilities.unsqueeze(1)).to(rows.dtype)
        answers = dispatcher.combine_preprocess(answers)
        answers = dispatcher.token_combine(answers, finish, on_comm)
        return dispatcher.combine_postprocess(answers)

    return layer


def layer(ctx, *flags, **options):
    mix = Mixture(ctx, CASE)
    mix.check_gradients(layer_of(ctx, mix, *flags, **options), 2e-5)


def larger(ctx):
    """The buffer is replaced by a larger one."""
    for hidden in (128, 512):
        mix = Mixture(ctx, CASE.but(hidden=hidden))
        mix.check_gradients(layer_of(ctx, mix), 2e-5)


def replaced(ctx):
    """The same between a forward pass and its backward pass."""
    real.use("megatron-core")
    mix = Mixture(ctx, CASE)
    inner = layer_of(ctx, mix)
    from megatron.core.transformer.moe import fused_a2a

    def outer(x, weights):
        out = inner(x, weights)
        before = fused_a2a._buffer
        assert fused_a2a.get_buffer(ctx.group, mix.case.hidden * 16) is not before
        return out

    mix.check_gradients(outer, 2e-5)


def no_capacity(ctx):
    """Without a capacity a token that chose fewer experts goes to some with probability 0."""
    layer(ctx, moe_expert_capacity_factor=None)


CASES = {
    "asynchronous, on the communication stream": (layer,), "asynchronous": (layer, True, False),
    "in order": (layer, False, False), "no capacity": (no_capacity,), "larger": (larger,),
    "larger between forward and backward": (replaced,),
}  # fmt: skip
