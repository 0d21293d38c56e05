"""Tensors without memory of their own, or with less than their shape says: each call refuses them by name.

Frameworks free an activation by ``untyped_storage().resize_(0)`` and keep the tensor; tensors of a tracer or of a
subclass that wraps others never had memory. The address of such a tensor is no address of its elements.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

import alone


class Wrapper(torch.Tensor):
    """As DTensor: a tensor of other tensors."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} of a wrapper was called")


def behind(tensor, offset):
    """A copy that begins `offset` elements behind the beginning of its storage."""
    room = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=tensor.device)
    copied = room[offset:].view(tensor.shape)
    copied.copy_(tensor)
    return copied


def resized(tensor, size):
    tensor.untyped_storage().resize_(size)
    return tensor


KINDS = {
    "freed": lambda t: resized(t.clone(), 0),
    "freed, behind an offset": lambda t: resized(behind(t, 1 << 16), 0),
    "cut short": lambda t: resized(t.clone(), t.nbytes - 1),
    "meta": lambda t: t.to("meta"),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "functional": torch._to_functional_tensor,
    "of a transform": lambda t: torch._C._functorch._add_batch_dim(t.unsqueeze(0), 0, 1),
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "sparse": lambda t: t.to_sparse(),
    "wrapper": Wrapper,
}


def v1_calls(buffer, x, idx, weights):
    """Calls by name: a function of tensors by name, and right ones."""
    experts, bound = alone.EXPERTS, alone.BOUND
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    fresh = {"x": x, **counts, "topk_idx": idx, "topk_weights": weights}
    rows, _, row_weights, _, handle, _ = buffer.dispatch(**fresh)
    matrix, _, _, source, _, head = handle
    own = {"matrix": matrix, "source": source, "head": head}
    received, _, low_latency, _, _ = buffer.low_latency_dispatch(x, idx, bound, experts, use_fp8=False)
    stats = torch.zeros(experts, dtype=torch.int32, device=x.device)

    def tuple_of(matrix, source, head):
        return matrix, None, None, source, None, head

    def cached(x, **own):
        return buffer.dispatch(x, handle=tuple_of(**own))

    def combine(x, weights, bias, **own):
        return buffer.combine(x, tuple_of(**own), topk_weights=weights, bias=bias)

    def send(x, idx, stats):
        return buffer.low_latency_dispatch(x, idx, bound, experts, cumulative_local_expert_recv_stats=stats)

    def receive(x, idx, weights, source, ranges, out):
        return buffer.low_latency_combine(x, idx, weights, (source, ranges, *low_latency[2:]), out=out)

    return {
        "layout": (lambda idx: buffer.get_dispatch_layout(idx, experts), {"idx": idx}),
        "dispatch": (buffer.dispatch, fresh),
        "worst case": (lambda **given: buffer.dispatch(**given, num_worst_tokens=2 * len(x)), fresh),
        "cached": (cached, {"x": x, **own}),
        "combine": (combine, {"x": rows, "weights": row_weights, "bias": x, **own}),
        "low latency": (send, {"x": x, "idx": idx, "stats": stats}),
        "low latency combine": (
            receive,
            {
                **{"x": received, "idx": idx, "weights": weights, "source": low_latency[0], "ranges": low_latency[1]},
                "out": torch.empty_like(x),
            },
        ),
    }


def v2_calls(buffer, x, idx, weights):
    from deep_ep._elastic import TENSORS

    stats = torch.zeros(alone.EXPERTS, dtype=torch.int32, device=x.device)
    calls = {}
    for expand in (False, True):
        for sync in (False, True):

            def fresh(x, idx, weights, stats, expand=expand, sync=sync):
                given = {"num_experts": alone.EXPERTS, "do_expand": expand, "do_cpu_sync": sync}
                return buffer.dispatch(x, idx, weights, stats, **given)

            calls[f"dispatch {expand} {sync}"] = (fresh, {"x": x, "idx": idx, "weights": weights, "stats": stats})
        rows, _, row_weights, handle, _ = fresh(x, idx, weights, None)
        own = {name: getattr(handle, name) for name in TENSORS}

        def changed(tensors, handle=handle):
            made = copy.copy(handle)
            vars(made).update(tensors)
            return made

        def cached(x, weights, changed=changed, expand=expand, **own):
            return buffer.dispatch(x, topk_weights=weights, handle=changed(own), do_expand=expand)

        def combine(x, weights, bias, changed=changed, **own):
            return buffer.combine(x, changed(own), topk_weights=weights, bias=bias)

        calls[f"cached {expand}"] = (cached, {"x": x, "weights": weights, **own})
        calls[f"combine {expand}"] = (combine, {"x": rows, "weights": row_weights, "bias": x, **own})
    return calls


def balancing_calls(buffer, x, idx, weights):
    own, copies = torch.ones(4, 16, device=x.device), torch.zeros(2, 16, device=x.device)
    tensors = {"copies": copies, "own": own, "mapping": torch.zeros(1, 2, dtype=torch.int32, device=x.device)}
    # These run on the communication stream: unless the caller waits, torch makes the next tensor of `copies` while the
    # kernel writes it, and to_sparse(), which counts first, writes behind what it has allocated.
    return {
        "prefetch": (lambda copies, own, mapping: buffer.lb_prefetch_weights(copies, own, mapping).wait(), tensors),
        "reduce": (lambda copies, own, mapping: buffer.lb_reduce_grads(copies, own, mapping).wait(), tensors),
    }


def complaints_of(name, call, right, make):
    """Every tensor of a call in turn, before and after the library has seen calls of the kind."""
    from deep_ep import DeepEPError

    found = []
    for seen in (False, True):
        for _ in range(2 * seen):
            call(**right)
        for argument, tensor in right.items():
            try:
                bad = make(tensor)
            except getattr(torch, "AcceleratorError", ()):  # of a device, whatever came before: no other call can work
                raise
            except (RuntimeError, NotImplementedError):  # this torch makes none of such a shape or type
                continue
            where = f"{name}, {argument}, {'after' if seen else 'before'} calls of its kind"
            try:
                call(**{**right, argument: bad})
                found.append(f"{where}: was taken")
            except DeepEPError as error:
                if not isinstance(error, (TypeError, ValueError)) or "argument" not in str(error):
                    found.append(f"{where}: {type(error).__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no error of ours
                found.append(f"{where}: {type(error).__name__}: {str(error)[:200]}")
        call(**right)
    return found


def rank_refused(ctx, kind, compiled):
    from deep_ep import ElasticBuffer, EPBuffer

    make, found = KINDS[kind], []
    options = {"num_max_tokens_per_rank": alone.BOUND, "hidden": alone.HIDDEN, "engine": ctx.engine}
    with alone.buffer_of(ctx) as v1:
        x, idx, weights = (lambda calls: (calls.x, calls.idx, calls.weights))(alone.Calls(v1, tokens=8))
        for cls in (None, ElasticBuffer, EPBuffer):
            buffer = v1 if cls is None else cls(ctx.group, **options, explicitly_destroy=True)
            buffer._core.compiled = compiled
            makers = [v1_calls] if cls is None else [v2_calls, balancing_calls] if cls is EPBuffer else [v2_calls]
            for maker in makers:
                for name, (call, right) in maker(buffer, x, idx, weights).items():
                    found += complaints_of(f"{type(buffer).__name__} {name}", call, right, make)
            if cls is not None:
                buffer.destroy()
    return found


@pytest.mark.parametrize("compiled", (True, False), ids=("compiled", "ctypes"))
@pytest.mark.parametrize("kind", KINDS)
def test_refused_by_name(pool, kind, compiled):
    (found,) = pool.run(1, rank_refused, kind, compiled)
    assert not found, "\n".join(found)


def rank_behind(ctx):
    """Tensors that lie in the midst or at the very end of a larger storage are as good as others."""
    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer, tokens=8)
        for _ in range(3):
            calls.x, calls.idx, calls.weights = (behind(t, 64) for t in (calls.x, calls.idx, calls.weights))
            for kind in ("layout", "dispatch", "cached", "combine", "low latency"):
                calls.of(kind)()


def test_part_of_a_storage(pool):
    pool.run(1, rank_behind)


def rank_meaning(ctx):
    """Rows whose values are not their bytes: refused, where torch's own kernels would resolve them."""
    from deep_ep import ElasticBuffer
    from deep_ep.errors import DeepEPTypeError

    options = {"num_max_tokens_per_rank": 8, "hidden": 64, "engine": ctx.engine, "explicitly_destroy": True}
    buffer = ElasticBuffer(ctx.group, **options)
    idx = torch.zeros(8, 1, dtype=torch.int64, device=ctx.device)
    plain = torch.complex(torch.ones(8, 16), torch.ones(8, 16)).to(ctx.device)
    quantized = torch.quantize_per_tensor(torch.ones(8, 64), 0.5, 3, torch.quint8).to(ctx.device)
    handle = buffer.dispatch(plain, idx, num_experts=ctx.size)[3]
    with pytest.raises(DeepEPTypeError, match="argument topk_weights: got a negative view"):
        buffer.dispatch(plain, idx, torch._neg_view(torch.ones(8, 1, device=ctx.device)), num_experts=ctx.size)
    for _ in range(3):
        for given in ({"topk_idx": idx, "num_experts": ctx.size}, {"handle": handle}):
            assert torch.equal(buffer.dispatch(plain, **given)[0], plain)
            assert torch.equal(buffer.dispatch(plain.conj().resolve_conj(), **given)[0], plain.conj())
            for wrong, word in ((plain.conj(), "conjugate"), (quantized, "quint8")):
                with pytest.raises(DeepEPTypeError, match=word):
                    buffer.dispatch(wrong, **given)
    pairs = torch.complex(torch.ones(8, 4), torch.ones(8, 4)).to(ctx.device)
    halves = torch.ones(8, 4, 2, device=ctx.device).half()
    for scales, wrong, word in (
        (pairs.imag, pairs.conj().imag, "negative"),
        (torch.view_as_complex(halves), torch.view_as_complex(halves).conj(), "conjugate"),
    ):
        for _ in range(3):
            for given in ({"topk_idx": idx, "num_experts": ctx.size}, {"handle": handle}):
                received = buffer.dispatch((plain, scales), **given)[0][1]
                assert torch.equal(received.view(torch.int32), scales.view(torch.int32))
                with pytest.raises(DeepEPTypeError, match=rf"argument x\[1\]: got a {word} view"):
                    buffer.dispatch((plain, wrong), **given)
    buffer.destroy()


def test_rows_that_do_not_mean_their_bytes(pool):
    pool.run(1, rank_meaning)


def rank_mode(ctx, compiled):
    """A call that a tracer's mode spoils leaves nothing behind that spoils later ones."""
    with alone.buffer_of(ctx) as buffer:
        buffer._core.compiled = compiled
        calls = alone.Calls(buffer, tokens=8)
        for kind in ("low latency", "halves", "dispatch", "layout"):
            for mode in (FakeTensorMode(allow_non_fake_inputs=True), FunctionalTensorMode()):
                try:
                    with mode:
                        calls.of(kind)()
                except Exception:  # noqa: BLE001 - it may be refused, in the mode's words
                    if kind in ("low latency", "halves"):
                        buffer.clean_low_latency_buffer(alone.BOUND, alone.HIDDEN, alone.EXPERTS)
            for _ in range(3):
                calls.of(kind)()


@pytest.mark.parametrize("compiled", (True, False), ids=("compiled", "ctypes"))
def test_a_mode_leaves_nothing_behind(pool, compiled):
    pool.run(1, rank_mode, compiled)
