"""Rows that travel to the experts in FP8: the cast, and a dispatch whose gradients are those of BF16 rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import FP8
from ..buffer import Buffer
from ..errors import value_error
from ..ops._autograd import once
from ..ops.functional import Handle, Received

CHANNELS = 128  # that share a scale
LARGEST, LEAST = 448.0, 1e-4  # of e4m3; of the greatest magnitude of 128 channels, as low-latency mode casts


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 ``[T, H]`` and float32 scales ``[T, H/128]`` of BF16 rows; H is a multiple of 128."""
    tokens, hidden = x.shape
    if hidden % CHANNELS:
        raise value_error("x", f"hidden {hidden}", f"a multiple of {CHANNELS} with use_fp8")
    blocks = x.float().view(tokens, hidden // CHANNELS, CHANNELS)
    scales = blocks.abs().amax(2).clamp(min=LEAST) / LARGEST
    values = (blocks / scales.unsqueeze(2)).clamp(-LARGEST, LARGEST).to(FP8)
    return values.view(tokens, hidden), scales


def uncast(rows: Tensor, scales: Tensor) -> Tensor:
    """BF16 rows ``[..., H]`` of FP8 rows and their scales ``[..., H/128]``."""
    blocks = rows.float().view(*scales.shape, CHANNELS)
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, idx: Tensor, num_experts: int, name: str, worst: int) -> Any:
        rows, scales = cast(x)
        ops = torch.ops.deep_ep
        per_rank, per_node, per_expert, in_rank = ops.layout(idx, num_experts, name)
        nodes = per_node if per_node.shape[0] else None
        given = (rows, scales, idx, weights, per_rank, nodes, in_rank, per_expert, name)
        if worst > 0:
            rows, scales, recv_idx, recv_weights, *handle = ops.dispatch_worst_case(*given, worst)
            counts = idx.new_empty((0,))
        else:
            rows, scales, recv_idx, recv_weights, counts, *handle = ops.dispatch(*given)
        ctx.name = name
        ctx.save_for_backward(recv_idx, *handle)
        ctx.mark_non_differentiable(recv_idx, counts, *handle)
        return uncast(rows, scales), recv_weights, recv_idx, counts, *handle

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor, of_weights: Tensor, *_: Any) -> Any:
        idx, *handle = ctx.saved_tensors
        rows, weights = of_rows.detach().contiguous(), of_weights.detach().contiguous().masked_fill(idx < 0, 0)
        with torch.no_grad():
            gradients = torch.ops.deep_ep.combine(rows, None, None, weights, *handle, ctx.name)
        return *once("dispatch", tuple(gradients), (of_rows, of_weights)), None, None, None, None


def dispatch(x: Tensor, idx: Tensor, weights: Tensor, num_experts: int, buffer: Buffer, worst: int) -> Received:
    """ops.dispatch whose rows cross as FP8 and arrive as BF16. The cast's gradient is the identity."""
    outputs = _Dispatch.apply(x, weights, idx, num_experts, buffer.name, worst)  # type: ignore[no-untyped-call]
    rows, recv_weights, recv_idx, counts, matrix, source, head = outputs
    handle = Handle(matrix, source, head, worst > 0)
    return Received(rows, recv_idx, recv_weights, None if worst > 0 else counts, handle)
