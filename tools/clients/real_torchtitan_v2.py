"""torchtitan since 0.3, over ElasticBuffer. Its operators are for CUDA; here they are for the CPU too."""

from __future__ import annotations

import functools

import real
import torch

from reference_mixture import Mixture
from test_clients_training import CASE

MOST = max(CASE.tokens)


@functools.cache
def client():
    module = real.load("torchtitan_v2", real.folder("torchtitan-v2") / "torchtitan/distributed/deepep/deepep.py")
    if not torch.cuda.is_available():
        module._lib.impl("dispatch", module._dispatch_op_impl, "CPU")
        module._lib.impl("combine", module._combine_op_impl, "CPU")
    return module


def layer_of(ctx, mix, capturable=False, most=MOST):
    titan = client()
    buffer = titan.get_buffer(ctx.group, hidden=mix.case.hidden, num_max_tokens_per_rank=most, num_topk=mix.case.topk)
    assert titan.get_hidden_bytes(mix.x) == 2 * mix.case.hidden and buffer.num_max_tokens_per_rank >= most

    def layer(x, weights):
        scores = torch.where(mix.idx < 0, 0.0, weights)
        rows, counts, state = titan.dispatch_tokens(
            x, mix.idx.clamp(min=0), scores, mix.num_local, mix.case.experts, num_tokens_per_rank=MOST,
            cudagraphable=capturable,
        )  # fmt: skip
        local = torch.repeat_interleave(torch.arange(mix.num_local, device=x.device), counts.long())
        assert len(rows) == len(local) or state.cudagraphable
        vectors = mix.own_vectors()[torch.nn.functional.pad(local, (0, len(rows) - len(local)))]
        answers = titan.combine_tokens((rows.float() * vectors).to(rows.dtype), state)
        titan.sync_combine()
        return answers * 1

    return layer


def training(ctx, *options):
    mix = Mixture(ctx, CASE)
    for _ in range(2):
        mix.check_gradients(layer_of(ctx, mix, *options), 2e-5)
    assert not client()._handle_cache


def inference(ctx, capturable):
    mix = Mixture(ctx, CASE)
    with torch.inference_mode():
        mix.check(layer_of(ctx, mix, capturable)(mix.x, mix.weights), 2e-5)
    assert not client()._handle_cache


def replaced(ctx):
    """A larger buffer takes the place of the first, whose handles are used in backward."""
    mix = Mixture(ctx, CASE)
    small = layer_of(ctx, mix)
    first, x = client()._buffer, mix.x.clone().requires_grad_()
    sums = small(x, mix.weights)
    mix.check_gradients(layer_of(ctx, mix, False, 256 * MOST), 2e-5)
    assert client()._buffer is not first
    sums.backward(mix.grad)
    again = mix.x.clone().requires_grad_()
    layer_of(ctx, mix)(again, mix.weights).backward(mix.grad)
    assert torch.equal(x.grad, again.grad)


CASES = {
    "training": (training,), "training, capturable where it can be": (training, True),
    "inference, expanded without a wait": (inference, True), "inference, compact": (inference, False),
    "replaced by a larger buffer": (replaced,),
}  # fmt: skip
