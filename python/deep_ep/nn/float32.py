"""Rows that travel in float32: bit for bit there, bit for bit back, and added in float32 by the rank that sent them.

The engines' combine adds BF16 rows. Here answers go back by a dispatch of their own, which moves bytes, each row to the
rank that its token came from. Gradients take the same two ways. A row crosses with its token's number and rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffer import Buffer
from ..ops._autograd import once
from ..ops.functional import Handle, dispatch

_ALIGNMENT = 4  # elements: the 16 bytes that a row's length is a multiple of
_ORIGIN = 2  # elements of a row that say where it came from


def elements(hidden: int, top_k: int) -> int:
    """BF16 elements of the longest row that crosses, in backward: a gradient, those of K weights, and the origin."""
    width = hidden + top_k + _ORIGIN
    return 2 * (width + -width % _ALIGNMENT)


class Way(NamedTuple):
    """Where the rows of a dispatch came from, for their way back.

    Attributes:
        origin: ``[N, 2]`` int32: rank and token of each received row.
        handle: of the dispatch.
        num_tokens: T.
        num_experts: E.
        num_ranks: R.
        buffer: its name.
    """

    origin: Tensor
    handle: Handle
    num_tokens: int
    num_experts: int
    num_ranks: int
    buffer: str


class Received(NamedTuple):
    """What the dispatch delivers, as `ops.functional.Received`, with float32 rows."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: Tensor
    way: Way


def _pack(values: Tensor, origin: Tensor) -> Tensor:
    """BF16 rows with the bits of float32 ``[M, W]`` and of int32 ``[M, 2]``; copied as integers, so that bits stay."""
    rows = torch.cat([values.detach().contiguous().view(torch.int32), origin], 1)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % _ALIGNMENT)).view(torch.bfloat16)


def _unpack(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    bits = rows.view(torch.int32)
    values = bits[:, :width].contiguous().view(torch.float32)
    return values, bits[:, width : width + _ORIGIN].contiguous()


def _send_back(values: Tensor, way: Way) -> Tensor:
    """float32 ``[T, W]``: for each token the sum of the rows ``[N, W]`` that were computed from it. Collective."""
    first_expert = way.origin[:, :1].to(torch.int64) * (way.num_experts // way.num_ranks)
    weights = torch.ones_like(first_expert, dtype=torch.float32)
    received = dispatch(_pack(values, way.origin), first_expert, weights, way.num_experts, way.buffer)
    rows, origin = _unpack(received.x, values.shape[1])
    sums = torch.zeros((way.num_tokens, values.shape[1]), dtype=torch.float32, device=values.device)
    return sums.index_add(0, origin[:, 1].long(), rows)


def _send_again(values: Tensor, way: Way) -> Tensor:
    """float32 ``[N, W]`` of ``[T, W]``: to the same ranks, in the same order, as the dispatch. Collective."""
    sent = _pack(values, torch.zeros((values.shape[0], _ORIGIN), dtype=torch.int32, device=values.device))
    rows, _ = torch.ops.deep_ep.dispatch_cached(sent, None, *way.handle[:3], way.buffer)
    return _unpack(rows, values.shape[1])[0]


def _way(ctx: Any, origin: Tensor, matrix: Tensor, source: Tensor, head: Tensor) -> Way:
    return Way(origin, Handle(matrix, source, head, False), *ctx.way)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, idx: Tensor, num_experts: int, rank: int, ranks: int, name: str
    ) -> Any:
        tokens, hidden = x.shape
        numbers = torch.arange(tokens, dtype=torch.int32, device=x.device)
        sent = _pack(x, torch.stack([torch.full_like(numbers, rank), numbers], 1))
        received = dispatch(sent, idx, weights, num_experts, name)
        rows, origin = _unpack(received.x, hidden)
        counts = received.num_recv_tokens_per_expert
        ctx.way, ctx.hidden = (tokens, num_experts, ranks, name), hidden
        fixed = (received.topk_idx, counts, origin, *received.handle[:3])
        ctx.save_for_backward(received.topk_idx, origin, *received.handle[:3])
        ctx.mark_non_differentiable(*fixed)
        return rows, received.topk_weights, *fixed

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor, of_weights: Tensor, *_: Any) -> Any:
        # A row has its weights for local experts only: elsewhere forward gave 0, whatever the weight was.
        idx, *rest = ctx.saved_tensors  # once: a checkpoint gives them only once
        weights = of_weights.detach().masked_fill(idx < 0, 0)
        with torch.no_grad():
            sums = _send_back(torch.cat([of_rows.detach(), weights], 1), _way(ctx, *rest))
        gradients = sums[:, : ctx.hidden].contiguous(), sums[:, ctx.hidden :].contiguous()
        return *once("dispatch", gradients, (of_rows, of_weights)), None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, origin: Tensor, way: Way) -> Any:
        ctx.way = way[2:]
        ctx.save_for_backward(origin, *way.handle[:3])
        return _send_back(rows, way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        way = _way(ctx, *ctx.saved_tensors)  # with gradients: a checkpoint computes its layer here
        with torch.no_grad():
            rows = _send_again(grad, way)
        return *once("combine", (rows,), (grad,)), None, None


def send(x: Tensor, idx: Tensor, weights: Tensor, num_experts: int, buffer: Buffer) -> Received:
    """Sends float32 rows ``[T, H]`` to the ranks of their experts, differentiably. Collective."""
    given = (x, weights, idx, num_experts, buffer.rank, buffer.group_size, buffer.name)
    rows, recv_weights, recv_idx, counts, origin, matrix, source, head = _Dispatch.apply(*given)  # type: ignore[no-untyped-call]
    way = Way(origin, Handle(matrix, source, head, False), x.shape[0], num_experts, buffer.group_size, buffer.name)
    return Received(rows, recv_idx, recv_weights, counts, way)


def send_back(rows: Tensor, way: Way) -> Tensor:
    """Sums float32 rows ``[N, H]`` at the tokens ``[T, H]`` that they came from, differentiably. Collective."""
    sums: Tensor = _Combine.apply(rows, way.origin, way)  # type: ignore[no-untyped-call]
    return sums
