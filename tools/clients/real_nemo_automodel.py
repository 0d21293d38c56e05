"""NeMo Automodel: its dispatcher, fused_a2a, free_buffer, and the replay of dispatches in recomputed layers."""

from __future__ import annotations

import real
import torch
from torch.utils.checkpoint import checkpoint

from reference_mixture import Mixture
from test_clients_training import CASE


def modules():
    real.use("nemo-automodel")
    from nemo_automodel.components.moe.megatron import fused_a2a, token_dispatcher

    assert fused_a2a.HAVE_DEEP_EP
    return fused_a2a, token_dispatcher


def layer_of(ctx, mix, indices, **options):
    _, client = modules()
    config = client.TokenDispatcherConfig(
        moe_router_topk=mix.case.topk, num_moe_experts=mix.case.experts, moe_share_token_dispatcher=False,
        moe_expert_capacity_factor=None if indices else 100.0, **options,
    )  # fmt: skip
    local = list(range(ctx.rank * mix.num_local, (ctx.rank + 1) * mix.num_local))
    dispatcher = client.MoEFlexTokenDispatcher(mix.num_local, local, config, ctx.group)

    def layer(x, weights):
        if indices:
            rows, counts, probabilities = dispatcher.token_permutation2(x, len(x), weights, mix.idx)
        else:
            chosen = torch.where(mix.idx < 0, 0.0, weights)
            dense = x.new_zeros((len(x), mix.case.experts), dtype=torch.float32)
            dense = dense.scatter_add(1, mix.idx.clamp(min=0), chosen)
            rows, counts, probabilities = dispatcher.token_permutation(x, len(x), dense)
        vectors = mix.own_vectors().repeat_interleave(counts, 0)
        answers = (rows.float() * vectors * probabilities.unsqueeze(1)).to(rows.dtype)
        return dispatcher.token_unpermutation(answers)

    return layer


def layer(ctx, indices, asynchronous):
    mix = Mixture(ctx, CASE)
    mix.check_gradients(layer_of(ctx, mix, indices, moe_deepep_async_dispatch=asynchronous), 2e-5)


def freed(ctx):
    """The buffer is freed, and the next call makes a new one."""
    fused_a2a, _ = modules()
    for _ in range(2):
        layer(ctx, True, False)
        assert fused_a2a._buffer is not None
        fused_a2a.free_buffer()
        assert fused_a2a._buffer is None


def replayed(ctx):
    """A checkpointed layer: the recomputed dispatch takes the handle of the first."""
    fused_a2a, _ = modules()
    mix, recorder = Mixture(ctx, CASE), fused_a2a.DispatchReplayRecorder()
    inner = layer_of(ctx, mix, True)

    def contexts():
        recorder.rewind()
        return fused_a2a.dispatch_replay_scope(recorder, "record"), fused_a2a.dispatch_replay_scope(recorder, "replay")

    def outer(x, weights):
        return checkpoint(inner, x, weights, use_reentrant=False, context_fn=contexts)

    mix.check_gradients(outer, 2e-5)
    assert len(recorder._records) == 1 and recorder._cursor == 1 and not recorder.replay_misses


CASES = {
    "indices": (layer, True, False), "indices, asynchronous": (layer, True, True), "dense": (layer, False, False),
    "dense, asynchronous": (layer, False, True), "freed": (freed,), "replayed in a checkpoint": (replayed,),
}  # fmt: skip
