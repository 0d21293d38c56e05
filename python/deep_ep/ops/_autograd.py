"""Gradients: of dispatch a combine, of combine a cached dispatch. Each moves the same bytes the other way.

Backward makes the same calls on every rank whatever its rows are: a result that nobody used gets zeros as its gradient,
and weights travel wherever the weights given to forward require grad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import type_error
from ._define import unsupported

Below = Callable[..., Any]
_ROW_FLOATS = 4  # of float32 in the 16 bytes that a row's length is a multiple of


class _Once(torch.autograd.Function):
    """Gradients as they are, with a backward that says that there is no second one."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Any) -> Any:
        ctx.name = name
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise unsupported(ctx.name, "double backward", "its backward communicates once")


def once(name: str, gradients: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under create_graph: the gradients, joined to those they were made of, so that a second backward is refused."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return tuple(_Once.apply(name, len(gradients), *gradients, *given))  # type: ignore[no-untyped-call]
    return gradients


def _rows(gradient: Tensor) -> Tensor:
    return gradient.detach().contiguous()


class _Dispatch(torch.autograd.Function):
    """Every dispatch with top-k: fresh, or into outputs of a fixed size."""

    @staticmethod
    def forward(ctx: Any, name: str, below: Below, x: Tensor, weights: Any, buffer: str, args: tuple[Any, ...]) -> Any:
        if x is not None and x.dtype is not torch.bfloat16 and x.requires_grad:
            raise type_error("x", f"dtype {x.dtype} that requires grad", "torch.bfloat16, or rows that require none")
        outputs = below(x, args[1], args[2], weights, *args[4:])
        ctx.name, ctx.buffer = name, buffer
        ctx.save_for_backward(outputs[2], *outputs[-3:])
        fixed = [output for place, output in enumerate(outputs) if place not in (0, 3)]
        if weights is None:
            fixed.append(outputs[3])
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_x, of_weights = ctx.needs_input_grad[2:4]
        idx, matrix, source, head = ctx.saved_tensors
        # A row has its weights for local experts only: elsewhere forward gave 0, whatever the weight was.
        weights = _rows(grads[3]).masked_fill(idx < 0, 0) if of_weights else None
        with torch.no_grad():
            x, topk_weights = torch.ops.deep_ep.combine(
                _rows(grads[0]), None, None, weights, matrix, source, head, ctx.buffer
            )
        gradients = x if of_x else None, topk_weights if of_weights else None
        x, topk_weights = once(ctx.name, gradients, (grads[0], grads[3]))
        return None, None, x, topk_weights, None, None


def dispatch(below: Below, *args: Any) -> Any:
    """The gradient of deep_ep::dispatch."""
    return _Dispatch.apply("dispatch", below, args[0], args[3], args[8], args)  # type: ignore[no-untyped-call]


def dispatch_worst_case(below: Below, *args: Any) -> Any:
    """The gradient of deep_ep::dispatch_worst_case."""
    return _Dispatch.apply("dispatch_worst_case", below, args[0], args[3], args[8], args)  # type: ignore[no-untyped-call]


class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Below, x: Tensor, args: tuple[Any, ...]) -> Any:
        if x.dtype is not torch.bfloat16:
            raise type_error("x", f"dtype {x.dtype} that requires grad", "torch.bfloat16, or rows that require none")
        ctx.buffer = args[5]
        ctx.save_for_backward(*args[2:5])
        rows, scales = below(x, *args[1:])
        ctx.mark_non_differentiable(scales)
        return rows, scales

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        with torch.no_grad():
            x, _ = torch.ops.deep_ep.combine(_rows(grad), None, None, None, *ctx.saved_tensors, ctx.buffer)
        return None, *once("dispatch_cached", (x,), (grad,)), None


def dispatch_cached(below: Below, *args: Any) -> Any:
    """The gradient of deep_ep::dispatch_cached."""
    return _Cached.apply(below, args[0], args)  # type: ignore[no-untyped-call]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, below: Below, x: Tensor, bias_0: Any, bias_1: Any, weights: Any, args: tuple[Any, ...]
    ) -> Any:
        ctx.buffer, ctx.worst_case = args[7], len(args) > 8 and args[8]
        ctx.save_for_backward(*args[4:7])
        combined, combined_weights = below(x, bias_0, bias_1, weights, *args[4:])
        if weights is None:
            ctx.mark_non_differentiable(combined_weights)
        return combined, combined_weights

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_weights: Any) -> Any:
        of_x, of_bias_0, of_bias_1, of_weights = ctx.needs_input_grad[1:5]
        handle = ctx.saved_tensors
        rows = weights = None
        with torch.no_grad():
            if of_x:
                rows, _ = torch.ops.deep_ep.dispatch_cached(_rows(grad), None, *handle, ctx.buffer)
            if of_weights:
                weights = _send_floats(grad_weights, handle, ctx.buffer)
            if ctx.worst_case:
                rows, weights = (_without_tail(sent, handle[0], ctx.buffer) for sent in (rows, weights))
        own = grad if of_bias_0 else None, grad if of_bias_1 else None
        rows, weights = once("combine", (rows, weights), (grad, grad_weights))
        return None, rows, *own, weights, None


def combine(below: Below, *args: Any) -> Any:
    """The gradient of deep_ep::combine."""
    return _Combine.apply(below, *args[:4], args)  # type: ignore[no-untyped-call]


def _send_floats(values: Tensor, handle: Any, buffer: str) -> Tensor:
    """float32 ``[T, K]`` to each row that came from its token, bit for bit: as BF16 rows of twice the length."""
    width = values.shape[1]
    padded = torch.nn.functional.pad(values.detach(), (0, -width % _ROW_FLOATS)).contiguous()
    rows, _ = torch.ops.deep_ep.dispatch_cached(padded.view(torch.bfloat16), None, *handle, buffer)
    sent: Tensor = rows.view(torch.float32)[:, :width].contiguous()
    return sent


def _without_tail(rows: Tensor | None, matrix: Tensor, buffer: str) -> Tensor | None:
    """Zeros in the rows past those received, which hold anything: what was computed from them gets no gradient."""
    if rows is None:
        return None
    from .. import _names

    received = matrix[-1, _names.find(buffer).rank]
    tail = torch.arange(rows.shape[0], device=rows.device) >= received
    return rows.masked_fill(tail.unsqueeze(1), 0)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, below: Below, args: tuple[Any, ...], *tensors: Any) -> Any:
        ctx.name = name
        outputs = below(*args)
        several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        ctx.mark_non_differentiable(*[output for output in several if not output.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise unsupported(ctx.name, "backward", "train with dispatch and combine of normal mode")


def not_differentiable(name: str) -> Callable[..., Any]:
    """Of an operator without a gradient: its results require grad, and their backward names it."""

    def gradient(below: Below, *args: Any) -> Any:
        return _NoGradient.apply(name, below, args, *args)  # type: ignore[no-untyped-call]

    return gradient
