"""DLBlas: its two dispatchers over one common buffer, as LMDeploy took them from it."""

from __future__ import annotations

import functools

import real

from reference_mixture import BF16, Mixture, from_fp8, to_fp8
from test_clients_inference import CASE, B


class Disposable:
    """Stands in for its utility, which needs Triton."""

    def __init__(self, value):
        self.value = value


@functools.cache
def client():
    moe = "dlblas.layers.moe"
    real.stand_in("dlblas", "dlblas", f"{moe}.token_dispatcher", f"{moe}.token_dispatcher_base")
    import dlblas.utils.utils as utils

    utils.DisposibleTensor = Disposable
    import dlblas.layers.moe.token_dispatcher as module

    assert module.use_deepep
    module.DeepEPBuffer._num_max_dispatch_tokens_per_rank = B
    return module


def make(kind, mix, **options):
    return getattr(client(), kind)(
        group=mix.ctx.group, num_experts=CASE.experts, num_local_experts=mix.num_local, hidden_size=CASE.hidden,
        params_dtype=BF16, **options,
    )  # fmt: skip


def normal(ctx, fp8, asynchronous):
    mix = Mixture(ctx, CASE)
    dispatcher = make("DeepEPTokenDispatcherNormal", mix)
    for _ in range(2):
        given = (to_fp8(mix.x) if fp8 else mix.x, mix.idx, mix.weights)
        if asynchronous:
            got, idx, weights, counts, handle, event = dispatcher.dispatch_normal_async(*given)
            event.current_stream_wait()
        else:
            got, idx, weights, counts = dispatcher.dispatch(*given)
        assert len(counts) == mix.num_local and all(count % 128 == 0 for count in counts)
        answers = mix.rows_by_index(from_fp8(got) if fp8 else got, idx, weights)
        if asynchronous:
            sums, event = dispatcher.combine_normal_async(answers, handle)
            event.current_stream_wait()
        else:
            dispatcher.hidden_shape = mix.x.shape
            sums = dispatcher.combine(answers)
        mix.check(sums, 2e-3 if fp8 else 1e-5)


def low_latency(ctx, hook):
    mix = Mixture(ctx, CASE)
    dispatcher = make("DeepEPTokenDispatcherLowLatency", mix, return_recv_hook=hook)
    for _ in range(3):
        pair, idx, weights, counts, _ = dispatcher.dispatch(mix.x, mix.idx, mix.weights, CASE.experts)
        rows = mix.rows_by_expert(from_fp8([each.value for each in pair]), counts)
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


CASES = {
    "normal, BF16": (normal, False, False), "normal, FP8, asynchronous": (normal, True, True),
    "low latency, event": (low_latency, False), "low latency, hook": (low_latency, True),
    "two batches, events": (low_latency_async, True), "two batches, hooks": (low_latency_async, False),
}  # fmt: skip
