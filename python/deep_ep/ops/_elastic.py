"""Operators of V2: dispatch (fresh, worst case, cached) and combine, in the plain and the expanded layout."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _names, _torch
from .._elastic import SCALE_ALIGNMENT, TENSORS, EPHandle, Shape
from ..errors import type_error, value_error
from ._autograd import once
from ._define import cast_under_autocast, define

OptionalTensor = Tensor | None
Tensors = tuple[Tensor, ...]
Numbers = Sequence[Any]

# A handle, as operators take it: EPHandle's tensors in the order of TENSORS, and these numbers of it. `rows` is
# num_expanded_tokens, `is_worst_case` says that rows past the real ones hold anything.
NUMBERS = (
    "num_experts",
    "expert_alignment",
    "num_max_tokens_per_rank",
    "num_sms",
    "rows",
    "do_expand",
    "is_worst_case",
)
_EXPERTS, _ALIGNMENT, _MOST, _SMS, _ROWS, _EXPAND, _WORST = range(len(NUMBERS))
_TOPK, _RANK_SUM, _EXPERT_SUM, _, _METADATA, _SLOTS, _MATRIX, _HEAD = range(len(TENSORS))
_INPUTS = (
    "(Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, "
    "Tensor(a!)? cumulative_local_expert_recv_stats, SymInt num_experts, SymInt num_max_tokens_per_rank, str buffer, "
    "int expert_alignment=1, bool do_expand=True, bool do_zero_padding=False, bool column_scales=False, int num_sms=0) "
)
_HANDLE = "Tensor[] handle, SymInt[] numbers, str buffer, "
_NARROW = 8  # BF16 elements of the shortest row


def numbers_of(handle: EPHandle) -> list[Any]:
    """The numbers of a handle that operators take."""
    worst = not handle.num_recv_tokens_per_expert_list
    return [
        handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank, handle.num_sms,
        handle.num_expanded_tokens, int(handle.do_expand), int(worst),
    ]  # fmt: skip


def tensors_of(handle: EPHandle) -> list[Any]:
    """The tensors of a handle that operators take."""
    return [getattr(handle, name) for name in TENSORS]


def handle_of(tensors: Sequence[Tensor], numbers: Numbers, per_expert: list[int]) -> EPHandle:
    """The handle of what operators take and return."""
    for name, got, want in (("handle", len(tensors), len(TENSORS)), ("numbers", len(numbers), len(NUMBERS))):
        if got != want:
            raise value_error(name, f"{got} entries", f"the {want} of a handle")
    rows = numbers[_ROWS]
    return EPHandle(
        bool(numbers[_EXPAND]), numbers[_EXPERTS], numbers[_ALIGNMENT], numbers[_MOST], numbers[_SMS], tensors[_TOPK],
        rows, rows, per_expert, *tensors[_RANK_SUM:],
    )  # fmt: skip


def _or_empty(tensor: OptionalTensor, prototype: Tensor) -> Tensor:
    """Operators return no None: what is not there has no elements, and a prototype's dtype."""
    return _torch.like(prototype, 0) if tensor is None else tensor


def _received(x: Tensor, recv_x: Any, idx: OptionalTensor, weights: OptionalTensor) -> Tensors:
    rows, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    return rows, _or_empty(scales, x), _or_empty(idx, x), _or_empty(weights, x)


# ---- fresh, and into outputs with room for any routing


def _run_dispatch(
    worst: bool,
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: Tensor,
    topk_weights: OptionalTensor,
    stats: OptionalTensor,
    num_experts: int,
    num_max_tokens: int,
    buffer: str,
    alignment: int,
    expand: bool,
    padding: bool,
    columns: bool,
    num_sms: int,
) -> tuple[Tensors, EPHandle]:
    rows: Any = x if x_scales is None else (x, x_scales)
    recv_x, idx, weights, handle, _ = _names.find_elastic(buffer)._dispatch(
        rows, topk_idx, topk_weights, stats, num_experts, num_max_tokens, alignment, num_sms, 0, None, None, False,
        False, None, False, not worst, expand, padding, columns,
    )  # fmt: skip
    return _received(x, recv_x, idx, weights), handle


def _dispatch(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: Tensor,
    topk_weights: OptionalTensor,
    stats: OptionalTensor,
    num_experts: int,
    num_max_tokens: int,
    buffer: str,
    alignment: int = 1,
    expand: bool = True,
    padding: bool = False,
    columns: bool = False,
    num_sms: int = 0,
) -> Tensors:
    received, handle = _run_dispatch(
        False, x, x_scales, topk_idx, topk_weights, stats, num_experts, num_max_tokens, buffer, alignment, expand,
        padding, columns, num_sms,
    )  # fmt: skip
    counts = torch.frombuffer(array.array("i", handle.num_recv_tokens_per_expert_list), dtype=torch.int32)
    return (*received, counts, *tensors_of(handle)[_RANK_SUM:])


def _dispatch_worst_case(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: Tensor,
    topk_weights: OptionalTensor,
    stats: OptionalTensor,
    num_experts: int,
    num_max_tokens: int,
    buffer: str,
    alignment: int = 1,
    expand: bool = True,
    padding: bool = False,
    columns: bool = False,
    num_sms: int = 0,
) -> Tensors:
    received, handle = _run_dispatch(
        True, x, x_scales, topk_idx, topk_weights, stats, num_experts, num_max_tokens, buffer, alignment, expand,
        padding, columns, num_sms,
    )  # fmt: skip
    return (*received, *tensors_of(handle)[_RANK_SUM:])


def _fake_received(
    x: Tensor, x_scales: OptionalTensor, topk_idx: Tensor, weights: OptionalTensor, rows: Any, expand: Any, columns: Any
) -> Tensors:
    scales = x.new_empty((0,))
    if x_scales is not None:
        count = x_scales.shape[1]
        if columns:
            stride: Any = torch.sym_max(1, (rows + SCALE_ALIGNMENT - 1) // SCALE_ALIGNMENT)  # type: ignore[no-untyped-call]
            stride *= SCALE_ALIGNMENT
            scales = x_scales.new_empty_strided((rows, count), (1, stride))
        else:
            scales = x_scales.new_empty((rows, count))
    wide = (rows,) if expand else (rows, topk_idx.shape[1])
    idx = x.new_empty((0,)) if expand else topk_idx.new_empty(wide)
    recv_weights = x.new_empty((0,)) if weights is None else weights.new_empty(wide)
    return x.new_empty((rows, x.shape[1])), scales, idx, recv_weights


def _fake_handle(topk_idx: Tensor, num_experts: Any, buffer: str, tokens: Any) -> Tensors:
    of, (num_tokens, num_topk) = _names.find_elastic(buffer), topk_idx.shape
    ranks, domain = of.num_ranks, of.num_scaleup_ranks
    local = num_experts // ranks
    shapes = (
        (domain,), (local,), (local,), (tokens, num_topk + 2), (num_tokens, num_topk), (ranks, ranks),
        (num_tokens, ranks),
    )  # fmt: skip
    return tuple(topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _fake_dispatch(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: Tensor,
    topk_weights: OptionalTensor,
    stats: OptionalTensor,
    num_experts: Any,
    num_max_tokens: Any,
    buffer: str,
    alignment: Any = 1,
    expand: Any = True,
    padding: Any = False,
    columns: Any = False,
    num_sms: Any = 0,
) -> Tensors:
    tokens: Any = torch.library.get_ctx().new_dynamic_size()
    rows: Any = torch.library.get_ctx().new_dynamic_size() if expand else tokens
    counts = torch.empty((num_experts // _names.find_elastic(buffer).num_ranks,), dtype=torch.int32, device="cpu")
    received = _fake_received(x, x_scales, topk_idx, topk_weights, rows, expand, columns)
    return (*received, counts, *_fake_handle(topk_idx, num_experts, buffer, tokens))


def _fake_dispatch_worst_case(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: Tensor,
    topk_weights: OptionalTensor,
    stats: OptionalTensor,
    num_experts: Any,
    num_max_tokens: Any,
    buffer: str,
    alignment: Any = 1,
    expand: Any = True,
    padding: Any = False,
    columns: Any = False,
    num_sms: Any = 0,
) -> Tensors:
    shape = Shape(
        topk_idx.shape[1], num_experts, alignment, num_max_tokens, expand, _names.find_elastic(buffer).num_ranks
    )
    received = _fake_received(x, x_scales, topk_idx, topk_weights, worst_rows(shape), expand, columns)
    return (*received, *_fake_handle(topk_idx, num_experts, buffer, shape.bound()))


def worst_rows(shape: Shape) -> Any:
    """Rows of outputs with room for any routing."""
    return shape.expanded_bound() if shape.expand else shape.bound()


# ---- with a handle


def _dispatch_cached(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_weights: OptionalTensor,
    handle: Sequence[Tensor],
    numbers: Numbers,
    buffer: str,
    expand: bool = True,
    padding: bool = False,
    columns: bool = False,
    num_sms: int = 0,
) -> Tensors:
    rows: Any = x if x_scales is None else (x, x_scales)
    recv_x, idx, weights, _, _ = _names.find_elastic(buffer)._dispatch(
        rows, None, topk_weights, None, None, None, None, num_sms, 0, None, None, False, False,
        handle_of(handle, numbers, []), False, None, expand, padding, columns,
    )  # fmt: skip
    return _received(x, recv_x, idx, weights)


def _fake_dispatch_cached(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_weights: OptionalTensor,
    handle: Sequence[Tensor],
    numbers: Numbers,
    buffer: str,
    expand: Any = True,
    padding: Any = False,
    columns: Any = False,
    num_sms: Any = 0,
) -> Tensors:
    rows = numbers[_ROWS] if expand or not numbers[_EXPAND] else handle[_METADATA].shape[0]
    return _fake_received(x, x_scales, handle[_TOPK], topk_weights, rows, expand, columns)


def _combine(
    x: Tensor,
    bias_0: OptionalTensor,
    bias_1: OptionalTensor,
    topk_weights: OptionalTensor,
    handle: Sequence[Tensor],
    numbers: Numbers,
    buffer: str,
    num_sms: int = 0,
) -> Tensors:
    combined, weights, _ = _names.find_elastic(buffer)._combine(
        x, handle_of(handle, numbers, []), topk_weights, (bias_0, bias_1), num_sms, 0, None, None, False, False
    )
    return combined, _or_empty(weights, x)


def _fake_combine(
    x: Tensor,
    bias_0: OptionalTensor,
    bias_1: OptionalTensor,
    topk_weights: OptionalTensor,
    handle: Sequence[Tensor],
    numbers: Numbers,
    buffer: str,
    num_sms: Any = 0,
) -> Tensors:
    num_tokens, num_topk = handle[_TOPK].shape
    combined = x.new_empty((num_tokens, x.shape[1]))
    return combined, x.new_empty((0,)) if topk_weights is None else topk_weights.new_empty((num_tokens, num_topk))


# ---- gradients: of dispatch a combine, of combine a cached dispatch


class _Dispatch(torch.autograd.Function):
    """Every dispatch: its rows and weights come back by a combine."""

    @staticmethod
    def forward(ctx: Any, name: str, run: Any, x: Tensor, weights: Any, handle: Any, numbers: Any, buffer: str) -> Any:
        if x.dtype is not torch.bfloat16 and x.requires_grad:
            raise type_error("x", f"dtype {x.dtype} that requires grad", "torch.bfloat16, or rows that require none")
        outputs = run(x, weights)
        ctx.name, ctx.buffer = name, buffer
        ctx.numbers = [*numbers[:_ROWS], outputs[0].shape[0], *numbers[_ROWS + 1 :]]
        tensors = [handle[_TOPK], *outputs[-len(TENSORS) + 1 :]] if len(handle) == 1 else handle
        ctx.save_for_backward(outputs[2], *tensors)
        fixed = [output for place, output in enumerate(outputs) if place not in (0, 3)]
        if weights is None:
            fixed.append(outputs[3])
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_x, of_weights = ctx.needs_input_grad[2:4]
        idx, *handle = ctx.saved_tensors
        rows, weights = grads[0].detach().contiguous(), None
        if not of_x:  # weights alone travel, beside the shortest rows
            rows = torch.zeros((rows.shape[0], _NARROW), dtype=torch.bfloat16, device=rows.device)
        if of_weights:
            weights = grads[3].detach().contiguous()
            if not ctx.numbers[_EXPAND]:  # a choice has its gradient from the rank of its expert
                weights = weights.masked_fill(idx < 0, 0)
        with torch.no_grad():
            x, topk_weights = torch.ops.deep_ep.elastic_combine(
                rows, None, None, weights, handle, ctx.numbers, ctx.buffer
            )
        gradients = x if of_x else None, topk_weights if of_weights else None
        x, topk_weights = once(ctx.name, gradients, (grads[0], grads[3]))
        return None, None, x, topk_weights, None, None, None


def _gradient_of_fresh(name: str, worst: bool) -> Any:
    def gradient(below: Any, *args: Any) -> Any:
        def run(x: Tensor, weights: Any) -> Any:
            return below(x, *args[1:3], weights, *args[4:])

        given = (*args[8:], *(1, True, False, False, 0)[len(args) - 8 :])  # the dispatcher leaves out what is default
        alignment, expand, _, _, num_sms = given
        numbers = [args[5], alignment, args[6], num_sms, 0, int(expand), int(worst)]
        return _Dispatch.apply(name, run, args[0], args[3], [args[2]], numbers, args[7])  # type: ignore[no-untyped-call]

    return gradient


def _gradient_of_cached(below: Any, *args: Any) -> Any:
    handle, numbers = args[3], list(args[4])

    def run(x: Tensor, weights: Any) -> Any:
        return below(x, args[1], weights, *args[3:])

    numbers[_EXPAND] = int(len(args) <= 6 or args[6])
    return _Dispatch.apply("elastic_dispatch_cached", run, args[0], args[2], handle, numbers, args[5])  # type: ignore[no-untyped-call]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Any, x: Tensor, bias_0: Any, bias_1: Any, weights: Any, args: tuple[Any, ...]) -> Any:
        ctx.numbers, ctx.buffer, ctx.rows = list(args[5]), args[6], x.shape[0]
        ctx.save_for_backward(*args[4])
        combined, combined_weights = below(x, bias_0, bias_1, weights, *args[4:])
        if weights is None:
            ctx.mark_non_differentiable(combined_weights)
        return combined, combined_weights

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_weights: Any) -> Any:
        of_x, of_bias_0, of_bias_1, of_weights = ctx.needs_input_grad[1:5]
        rows = weights = None
        if of_x or of_weights:
            with torch.no_grad():
                rows, weights = _send_back(ctx, grad if of_x else None, grad_weights if of_weights else None)
        own = grad if of_bias_0 else None, grad if of_bias_1 else None
        rows, weights = once("elastic_combine", (rows, weights), (grad, grad_weights))
        return None, rows, *own, weights, None


def _send_back(ctx: Any, grad: Any, grad_weights: Any) -> tuple[Any, Any]:
    """Gradients of combine's rows and weights: a cached dispatch, with zeros in rows that no token has."""
    handle, numbers = list(ctx.saved_tensors), ctx.numbers
    expand = bool(numbers[_EXPAND])
    if grad is None:
        topk = handle[_TOPK]
        given = torch.zeros((topk.shape[0], _NARROW), dtype=torch.bfloat16, device=topk.device)
    else:
        given = grad.detach().contiguous()
    wanted = None if grad_weights is None else grad_weights.detach().contiguous()
    rows, _, idx, weights = torch.ops.deep_ep.elastic_dispatch_cached(
        given, None, wanted, handle, numbers, ctx.buffer, expand, expand
    )
    if wanted is not None and not expand:
        weights = weights.masked_fill(idx < 0, 0)
    real = handle[_EXPERT_SUM if expand else _RANK_SUM][-1] if numbers[_WORST] else None
    return (
        None if grad is None else _fit(rows, ctx.rows, real),
        None if wanted is None else _fit(weights, ctx.rows, real),
    )


def _fit(sent: Tensor, rows: Any, real: OptionalTensor) -> Tensor:
    """As many rows as combine was given; those past the real ones, which hold anything, are zeros."""
    if real is not None:
        tail = torch.arange(sent.shape[0], device=sent.device) >= real
        sent = sent.masked_fill(tail if sent.dim() == 1 else tail.unsqueeze(1), 0)
    missing = rows - sent.shape[0]
    if missing > 0:
        return torch.cat([sent, sent.new_zeros((missing, *sent.shape[1:]))])
    return sent if missing == 0 else sent[:rows].contiguous()


def _gradient_of_combine(below: Any, *args: Any) -> Any:
    return _Combine.apply(below, *args[:4], args)  # type: ignore[no-untyped-call]


_SEVEN = ", ".join(["Tensor"] * (len(TENSORS) - 1))  # a handle without topk_idx, which the caller has
dispatch = define(
    "elastic_dispatch",
    f"{_INPUTS}-> (Tensor, Tensor, Tensor, Tensor, Tensor, {_SEVEN})",
    _dispatch,
    _fake_dispatch,
    _gradient_of_fresh("elastic_dispatch", False),
)
dispatch_worst_case = define(
    "elastic_dispatch_worst_case",
    f"{_INPUTS}-> (Tensor, Tensor, Tensor, Tensor, {_SEVEN})",
    _dispatch_worst_case,
    _fake_dispatch_worst_case,
    _gradient_of_fresh("elastic_dispatch_worst_case", True),
)
dispatch_cached = define(
    "elastic_dispatch_cached",
    f"(Tensor x, Tensor? x_scales, Tensor? topk_weights, {_HANDLE}bool do_expand=True, bool do_zero_padding=False, "
    "bool column_scales=False, int num_sms=0) -> (Tensor, Tensor, Tensor, Tensor)",
    _dispatch_cached,
    _fake_dispatch_cached,
    _gradient_of_cached,
)
combine = define(
    "elastic_combine",
    f"(Tensor x, Tensor? bias_0, Tensor? bias_1, Tensor? topk_weights, {_HANDLE}int num_sms=0) -> (Tensor, Tensor)",
    _combine,
    _fake_combine,
    _gradient_of_combine,
)
cast_under_autocast(dispatch, 1)
cast_under_autocast(dispatch_worst_case, 1)
cast_under_autocast(dispatch_cached, 1)
cast_under_autocast(combine, 3)
