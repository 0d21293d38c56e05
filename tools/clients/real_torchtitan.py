"""torchtitan: dispatch_tokens, experts, combine_tokens. Its operators are for CUDA; here they are for the CPU too."""

from __future__ import annotations

import functools

import real
import torch

from reference_mixture import Mixture
from test_clients_training import CASE


@functools.cache
def client():
    module = real.load("torchtitan_deepep", real.folder("torchtitan") / "torchtitan/distributed/deepep/deepep.py")
    if not torch.cuda.is_available():
        module._lib.impl("dispatch", module._dispatch_op_impl, "CPU")
        module._lib.impl("combine", module._combine_op_impl, "CPU")
    return module


def layer_of(ctx, mix, before):
    titan = client()

    def layer(x, weights):
        scores = torch.where(mix.idx < 0, 0.0, weights)
        rows, counts, state = titan.dispatch_tokens(
            x, mix.idx.clamp(min=0), scores, mix.num_local, mix.case.experts, ctx.group, before
        )
        vectors = mix.own_vectors().repeat_interleave(counts.long(), 0)
        answers = titan.combine_tokens((rows.float() * vectors).to(rows.dtype), state)
        titan.sync_combine()
        return answers * 1

    return layer


def eager(ctx, before):
    mix = Mixture(ctx, CASE)
    mix.check_gradients(layer_of(ctx, mix, before), 2e-5)
    assert not client()._handle_cache


def compiled(ctx, before):
    mix = Mixture(ctx, CASE)
    torch._dynamo.reset()
    mix.check_gradients(torch.compile(layer_of(ctx, mix, before), backend="eager"), 2e-5)
    torch._dynamo.reset()


def inference(ctx):
    mix = Mixture(ctx, CASE)
    with torch.inference_mode():
        mix.check(layer_of(ctx, mix, True)(mix.x, mix.weights), 2e-5)
    assert not client()._handle_cache


CASES = {
    "scores before the experts": (eager, True), "scores after the experts": (eager, False),
    "compiled, scores before": (compiled, True), "compiled, scores after": (compiled, False), "inference": (inference,),
}  # fmt: skip
