"""LMDeploy: its three dispatchers over one common buffer, and the tensors that they dispose of."""

from __future__ import annotations

import real
import torch

from reference_mixture import BF16, Mixture, from_fp8, to_fp8
from test_clients_inference import CASE, B


def client():
    backends = "lmdeploy.pytorch.backends"
    real.stand_in(
        "lmdeploy", "lmdeploy", "lmdeploy.pytorch.envs", f"{backends}.token_dispatcher",
        f"{backends}.default.token_dispatcher", f"{backends}.cuda.token_dispatcher",
    )  # fmt: skip
    import lmdeploy.pytorch.backends.cuda.token_dispatcher as module

    assert module.use_deepep
    return module


def make(kind, mix, **options):
    return getattr(client(), kind)(
        group=mix.ctx.group, num_experts=CASE.experts, num_local_experts=mix.num_local, hidden_size=CASE.hidden,
        params_dtype=BF16, num_max_dispatch_tokens_per_rank=B, **options,
    )  # fmt: skip


def capture():
    from deep_ep import Buffer

    return Buffer.capture()


def permuted(ctx):
    """The dispatcher that permutes: indices become a map of all experts, so each rank names its own from 0 on."""
    mix = Mixture(ctx, CASE)
    dispatcher = make("DeepEPTokenDispatcher", mix)
    for _ in range(2):
        rows, _, _, counts = dispatcher.dispatch(mix.x, mix.idx, mix.weights)
        vectors = mix.own_vectors().repeat_interleave(counts, 0)
        mix.check(dispatcher.combine((rows.float() * vectors).to(BF16)), 2e-5)


def normal(ctx, fp8):
    mix = Mixture(ctx, CASE)
    dispatcher = make("DeepEPTokenDispatcherNormal", mix)
    for _ in range(2):
        given = to_fp8(mix.x) if fp8 else mix.x
        got, idx, weights, counts = dispatcher.dispatch(given, mix.idx, mix.weights)
        assert len(counts) == mix.num_local and all(count % 128 == 0 for count in counts)
        answers = mix.rows_by_index(from_fp8(got) if fp8 else got, idx, weights)
        mix.check(dispatcher.combine(answers), 2e-3 if fp8 else 1e-5)


def normal_async(ctx, with_event):
    mix = Mixture(ctx, CASE)
    dispatcher = make("DeepEPTokenDispatcherNormal", mix)
    got, idx, weights, _, handle, event = dispatcher.dispatch_normal_async(
        to_fp8(mix.x), mix.idx, mix.weights, previous_event=capture() if with_event else None
    )
    event.current_stream_wait()
    answers = mix.rows_by_index(from_fp8(got), idx, weights)
    sums, event = dispatcher.combine_normal_async(answers, handle, previous_event=capture() if with_event else None)
    event.current_stream_wait()
    mix.check(sums, 2e-3)


def low_latency(ctx, hook):
    mix = Mixture(ctx, CASE)
    dispatcher = make("DeepEPTokenDispatcherLowLatency", mix, return_recv_hook=hook)
    for _ in range(3):
        pair, idx, weights, counts, _ = dispatcher.dispatch(mix.x, mix.idx, mix.weights, CASE.experts)
        rows = mix.rows_by_expert(from_fp8([each.value for each in pair]), counts)
        for each in pair:
            each.dispose()
        mix.check(dispatcher.combine(rows, idx, weights), 2e-3)


def low_latency_async(ctx, asynchronous):
    """Two batches overlapped: both are sent before the first is waited for."""
    batches = [Mixture(ctx, CASE), Mixture(ctx, CASE.but(seed=1))]
    dispatcher = make("DeepEPTokenDispatcherLowLatency", batches[0])
    sent = [dispatcher.dispatch_async(mix.x, mix.idx, async_finish=asynchronous) for mix in batches]
    combined = []
    for mix, (pair, counts, handle, event, hook) in zip(batches, sent, strict=True):
        event.current_stream_wait() if asynchronous else hook()
        rows = mix.rows_by_expert(from_fp8([each.value for each in pair]), counts)
        combined.append(dispatcher.combine_async(rows, mix.idx, mix.weights, handle, asynchronous))
    for mix, (sums, event, hook) in zip(batches, combined, strict=True):
        event.current_stream_wait() if asynchronous else hook()
        mix.check(sums, 2e-3)


def modes(ctx):
    """Prefill and decoding in turn on the common buffer, which is cleaned when decoding begins; then destroyed."""
    module = client()
    module.DeepEPBuffer.destroy()
    module.DeepEPBuffer._buffer_common = None
    assert module.DeepEPBuffer.set_explicitly_destroy() or module.DeepEPBuffer.get_explicitly_destroy()
    for _ in range(2):
        module.DeepEPBuffer.set_deepep_mode(module.DeepEPMode.NORMAL)
        normal(ctx, True)
        assert module.DeepEPBuffer.set_deepep_mode(module.DeepEPMode.LOW_LATENCY)[1]
        low_latency(ctx, True)
    assert module.DeepEPBuffer.destroy()
    torch.distributed.barrier(ctx.group)
    normal(ctx, False)


CASES = {
    "permuted": (permuted,), "normal, BF16": (normal, False), "normal, FP8": (normal, True),
    "normal, asynchronous": (normal_async, False), "normal, asynchronous, behind an event": (normal_async, True),
    "low latency, event": (low_latency, False), "low latency, hook": (low_latency, True),
    "two batches, events": (low_latency_async, True), "two batches, hooks": (low_latency_async, False),
    "both modes, destroyed": (modes,),
}  # fmt: skip
