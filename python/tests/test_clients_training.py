"""How training frameworks call V1: a layer from each one's calls, output and gradients beside plain torch's."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from cases import Case
from reference_mixture import Mixture

CASE = Case((12, 7, 0, 9), experts=8, topk=3, hidden=256, routing="holes")


class Flags:
    """How a framework orders its calls."""

    def __init__(self, async_finish=False, on_comm=False):
        self.async_finish, self.on_comm = async_finish, on_comm

    def keywords(self):
        from deep_ep.utils import EventHandle, EventOverlap

        previous = EventOverlap(EventHandle()) if self.async_finish else None
        return {
            "previous_event": previous, "async_finish": self.async_finish, "allocate_on_comm_stream": self.on_comm,
        }  # fmt: skip

    def finish(self, event):
        if self.async_finish:
            event.current_stream_wait()


def dispatch_fresh(buffer, x, idx, weights, num_experts, flags):
    """Layout and dispatch, the second ordered behind the first; not waited for."""
    given = flags.keywords()
    per_rank, per_node, per_expert, table, event = buffer.get_dispatch_layout(idx, num_experts, **given)
    if flags.async_finish:
        given["previous_event"] = event
    return buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=table, num_tokens_per_expert=per_expert, **given,
    )  # fmt: skip


class Owner:
    """The module-level buffer of a framework: made for the sizes asked for, replaced by a larger one."""

    def __init__(self, explicitly_destroy=False):
        self.buffer, self.made, self.explicitly_destroy = None, 0, explicitly_destroy

    def get(self, ctx, hidden_bytes):
        from deep_ep import Buffer

        nvl = rdma = 0
        for config in (Buffer.get_dispatch_config(ctx.size), Buffer.get_combine_config(ctx.size)):
            nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, ctx.size), nvl)
            rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, ctx.size), rdma)
        old = self.buffer
        if old is None or old.group != ctx.group or old.num_nvl_bytes < nvl or old.num_rdma_bytes < rdma:
            self.made += 1
            if self.explicitly_destroy:
                self.destroy()
                self.buffer = Buffer(ctx.group, nvl, rdma, explicitly_destroy=True)
            else:
                self.buffer = Buffer(ctx.group, nvl, rdma)
        return self.buffer

    def destroy(self):
        if self.buffer is not None:
            self.buffer.destroy()
            self.buffer = None


# ---- Megatron-LM and NeMo Automodel: autograd functions around dispatch and combine


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(fn, x, idx, weights, num_experts, owner, ctx, flags):
        buffer = owner.get(ctx, x.size(1) * 2)
        rows, row_idx, row_weights, counts, handle, event = dispatch_fresh(
            buffer, x, idx, weights.float(), num_experts, flags
        )
        flags.finish(event)
        fn.handle, fn.state = handle, (owner, ctx, flags)
        return rows, row_idx, row_weights, torch.tensor(counts), handle

    @staticmethod
    def backward(fn, grad_rows, grad_idx, grad_weights, grad_counts, grad_handle):
        owner, ctx, flags = fn.state
        grad_x, grad_weights, event = owner.get(ctx, grad_rows.size(1) * 2).combine(
            grad_rows.contiguous(), fn.handle, topk_weights=grad_weights.float(), **flags.keywords()
        )
        flags.finish(event)
        return grad_x, None, grad_weights, None, None, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(fn, rows, handle, owner, ctx, flags):
        sums, _, event = owner.get(ctx, rows.size(1) * 2).combine(rows, handle=handle, **flags.keywords())
        flags.finish(event)
        fn.handle, fn.state = handle, (owner, ctx, flags)
        return sums, None

    @staticmethod
    def backward(fn, grad, _):
        owner, ctx, flags = fn.state
        rows, _, _, _, _, event = owner.get(ctx, grad.size(1) * 2).dispatch(
            grad.contiguous(), handle=fn.handle, **flags.keywords()
        )
        flags.finish(event)
        return rows, None, None, None, None


def fused_layer(ctx, mix, owner, flags, between=None):
    """A layer from both functions; `between` runs before the backward pass of the experts."""

    def layer(x, weights):
        rows, idx, row_weights, counts, handle = FusedDispatch.apply(
            x, mix.idx, weights, mix.case.experts, owner, ctx, flags
        )
        assert counts.tolist() == [int((idx == local).sum()) for local in range(mix.num_local)]
        answers = mix.rows_by_index(rows, idx, row_weights)
        if between is not None:
            answers.register_hook(between)
        return FusedCombine.apply(answers, handle, owner, ctx, flags)[0]

    return layer


def rank_megatron(ctx):
    """Both ways of ordering; then the buffer is replaced by a larger one between forward and backward."""
    from deep_ep import Buffer

    before = Buffer.num_sms
    Buffer.set_num_sms(24)
    try:
        owner, mix = Owner(), Mixture(ctx, CASE)
        for flags in (Flags(), Flags(True), Flags(True, True)):
            mix.check_gradients(fused_layer(ctx, mix, owner, flags))
        assert owner.made == 1
        grow = lambda grad: owner.get(ctx, CASE.hidden * 8) and None  # noqa: E731
        mix.check_gradients(fused_layer(ctx, mix, owner, Flags(True, True), grow))
        assert owner.made == 2
    finally:
        Buffer.set_num_sms(before)


def rank_automodel(ctx):
    """It looks for the package, asks what is compiled, and destroys the buffer before it makes a larger one."""
    from deep_ep import Buffer

    assert importlib.util.find_spec("deep_ep") is not None
    assert isinstance(Buffer.is_sm90_compiled(), bool)
    owner = Owner(explicitly_destroy=True)
    for case in (CASE, CASE.but(hidden=512, seed=1)):
        mix = Mixture(ctx, case)
        for flags in (Flags(), Flags(True, True)):
            mix.check_gradients(fused_layer(ctx, mix, owner, flags))
    assert owner.made == 2
    owner.destroy()
    mix.check_gradients(fused_layer(ctx, mix, owner, Flags()))  # and once more after the end of a run
    owner.destroy()


# ---- torchtitan and prime-rl: opaque operators with an autograd formula, inside a compiled layer

NAMESPACE = "deepep_tests_training"


class Operators:
    """Two operators. A handle is known by the number that stands in a tensor; combine's event is waited for later."""

    def __init__(self, library, buffer, mix):
        self.buffer, self.mix, self.handles, self.number, self.pending = buffer, mix, {}, 0, None
        library.define(
            "dispatch(Tensor x, Tensor idx, Tensor weights, int experts) -> (Tensor, Tensor, Tensor, Tensor)"
        )
        library.define("combine(Tensor rows, Tensor handle) -> Tensor")
        for name, forward, fake in (
            ("dispatch", self.dispatch, self.fake_dispatch), ("combine", self.combine, self.fake_combine)
        ):  # fmt: skip
            library.impl(name, forward, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
        torch.library.register_autograd(
            f"{NAMESPACE}::dispatch", self.dispatch_backward, setup_context=self.keep_handle, lib=library
        )
        torch.library.register_autograd(
            f"{NAMESPACE}::combine", self.combine_backward, setup_context=self.keep_given, lib=library
        )

    def dispatch(self, x, idx, weights, experts):
        flags = Flags(True, True)
        rows, row_idx, row_weights, _, handle, event = dispatch_fresh(self.buffer, x, idx, weights, experts, flags)
        event.current_stream_wait()
        self.number += 1
        self.handles[self.number] = handle
        return rows, row_idx, row_weights, torch.tensor([self.number])

    def fake_dispatch(self, x, idx, weights, experts):
        count = torch.library.get_ctx().new_dynamic_size()
        return (
            x.new_empty((count, x.shape[1])), idx.new_empty((count, idx.shape[1])),
            weights.new_empty((count, idx.shape[1])), torch.empty((1,), dtype=torch.int64),
        )  # fmt: skip

    def combine(self, rows, handle):
        sums, _, self.pending = self.buffer.combine(rows, self.handles[int(handle)], **Flags(True, True).keywords())
        return sums

    def fake_combine(self, rows, handle):
        return rows.new_empty(self.mix.x.shape)

    @staticmethod
    def keep_handle(ctx, inputs, output):
        ctx.set_materialize_grads(True)
        ctx.save_for_backward(output[3])

    @staticmethod
    def keep_given(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    def dispatch_backward(self, ctx, grad_rows, _, grad_weights, __):
        (handle,) = ctx.saved_tensors
        grad, weights, event = self.buffer.combine(
            grad_rows.contiguous(), self.handles.pop(int(handle)), topk_weights=grad_weights.float().contiguous(),
            **Flags(True, True).keywords(),
        )  # fmt: skip
        event.current_stream_wait()
        return grad, None, weights, None

    def combine_backward(self, ctx, grad):
        (handle,) = ctx.saved_tensors
        rows, *_, event = self.buffer.dispatch(
            grad.contiguous(), handle=self.handles[int(handle)], **Flags(True, True).keywords()
        )
        event.current_stream_wait()
        return rows, None

    @torch.compiler.disable
    def wait(self):
        self.pending.current_stream_wait()


def rank_torchtitan(ctx):
    mix, owner = Mixture(ctx, CASE), Owner()
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        operators = Operators(library, owner.get(ctx, CASE.hidden * 2), mix)
        calls = getattr(torch.ops, NAMESPACE)

        def layer(x, weights):
            rows, idx, row_weights, handle = calls.dispatch(x * 1, mix.idx, weights * 1, CASE.experts)
            sums = calls.combine(mix.rows_by_index(rows, idx, row_weights), handle)
            operators.wait()
            return sums * 1

        torch._dynamo.reset()
        for function in (layer, torch.compile(layer, backend="eager")):
            for _ in range(2):
                mix.check_gradients(function)
        assert operators.number >= 4 and not operators.handles
        with torch.inference_mode():
            mix.check(layer(mix.x, mix.weights))


# ---- xtuner: handles through autograd, events of its own, entries for each part of a tensor-parallel expert


class SavedDispatch(torch.autograd.Function):
    """Every entry of the handle is a saved tensor."""

    @staticmethod
    def forward(fn, x, idx, weights, num_experts, buffer, after):
        rows, row_idx, row_weights, counts, handle, event = dispatch_fresh(
            buffer, x, idx, weights, num_experts, Flags(True, True)
        )
        after.event = event.event
        fn.save_for_backward(*handle)
        fn.buffer = buffer
        fn.mark_non_differentiable(row_idx)
        return rows, row_idx, row_weights, *handle

    @staticmethod
    def backward(fn, grad_rows, _, grad_weights, *__):
        flags = Flags(True, True)
        grad, weights, event = fn.buffer.combine(
            grad_rows.contiguous(), fn.saved_tensors, topk_weights=grad_weights.contiguous(), **flags.keywords()
        )
        flags.finish(event)
        return grad, None, weights, None, None, None


class SavedCombine(torch.autograd.Function):
    @staticmethod
    def forward(fn, rows, buffer, after, *handle):
        sums, _, event = buffer.combine(rows, handle, **Flags(True, True).keywords())
        after.event = event.event
        fn.save_for_backward(*handle)
        fn.buffer = buffer
        return sums

    @staticmethod
    def backward(fn, grad):
        flags = Flags(True, True)
        rows, *_, event = fn.buffer.dispatch(grad.contiguous(), handle=fn.saved_tensors, **flags.keywords())
        flags.finish(event)
        return rows, None, None, *(None for _ in fn.saved_tensors)


def rank_xtuner(ctx):
    from deep_ep import Buffer, EventOverlap

    nvl = Buffer.get_dispatch_config(ctx.size).get_nvl_buffer_size_hint(CASE.hidden * 2, ctx.size)
    rdma = Buffer.get_low_latency_rdma_size_hint(16, CASE.hidden, ctx.size, CASE.experts)
    rdma = max(rdma, Buffer.get_combine_config(ctx.size).get_rdma_buffer_size_hint(CASE.hidden * 2, ctx.size))
    # One buffer for both modes, of which training uses the normal one.
    buffer = Buffer(ctx.group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=Buffer.num_sms // 2)
    # Experts of two parts: each choice names both, of which a token's second half of choices may be absent.
    mix = Mixture(ctx, CASE.but(topk=6))
    mix.idx[:, 3:] = torch.where(mix.idx[:, :3] % 3 == 0, -1, (mix.idx[:, :3] + 1).clamp(max=CASE.experts - 1))
    mix.idx[:, 3:] = torch.where(mix.idx[:, :3] < 0, -1, mix.idx[:, 3:])

    def layer(x, weights):
        dispatched, combined = EventOverlap(None), EventOverlap(None)
        rows, idx, row_weights, *handle = SavedDispatch.apply(x, mix.idx, weights, CASE.experts, buffer, dispatched)
        dispatched.current_stream_wait()
        sums = SavedCombine.apply(mix.rows_by_index(rows, idx, row_weights), buffer, combined, *handle)
        combined.current_stream_wait()
        return sums

    for _ in range(2):
        mix.check_gradients(layer)


CLIENTS = {
    "Megatron-LM": rank_megatron, "Automodel": rank_automodel, "torchtitan": rank_torchtitan, "xtuner": rank_xtuner,
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_client(pool, name):
    pool.run(4, CLIENTS[name])
