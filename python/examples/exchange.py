"""How token rows travel between the ranks' trunks and the experts.

`DeepEPExchange` is the product at work: one process holds one shard of the tokens and one group of the experts, and
rows cross process borders through `deep_ep`. `LocalExchange` is its independent counterpart in plain torch indexing:
one process holds every shard and every group. Both round what crosses the wire to BF16 in the same places, forward
and backward, so a model trained through either gives the same losses.

Lists have an entry per shard (what this process has of them): one entry with `DeepEPExchange`, R with `LocalExchange`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import deep_ep


class Routed(NamedTuple):
    """What one group of experts received: N rows, ordered by source rank, then by the token's index there."""

    rows: Tensor  # [N, H] float32, values that BF16 can hold
    experts: Tensor  # [N, K] int64: index of the expert within the group, -1 where another group has it
    weights: Tensor  # [N, K] float32: the router's weight, 0 where `experts` is -1


class Exchange(Protocol):
    """Moves rows to the experts and back; differentiable in rows and weights."""

    def dispatch(self, xs: list[Tensor], experts: list[Tensor], weights: list[Tensor]) -> tuple[list[Routed], Any]:
        """Sends `xs[s][T, H]` to the groups that hold one of its `experts[s][T, K]`; returns rows and a handle."""
        ...

    def combine(self, ys: list[Tensor], handle: Any) -> list[Tensor]:
        """Returns `[T, H]` float32 for each shard: the sum of the rows `ys[g][N, H]` that came from each token."""
        ...

    def gather(self, values: list[Tensor]) -> list[Tensor]:
        """Returns the tensors of all shards, in rank order, on every process."""
        ...


def to_wire(x: Tensor) -> Tensor:
    """`x` as it travels: BF16, contiguous."""
    return x.to(torch.bfloat16).contiguous()


class _Dispatch(torch.autograd.Function):
    """Forward: dispatch. Backward: the gradients of a token's copies are summed, which is what combine does."""

    @staticmethod
    def forward(ctx: Any, exchange: DeepEPExchange, x: Tensor, weights: Tensor, experts: Tensor) -> Any:
        buffer = exchange.buffer
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, exchange.num_experts)
        rows, recv_experts, recv_weights, _, handle, _ = buffer.dispatch(
            to_wire(x),
            topk_idx=experts,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        exchange.corrupt(rows)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_experts)
        return rows.float(), recv_weights, recv_experts, handle

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, *_: Any) -> Any:
        grad_x, grad_w, _ = ctx.buffer.combine(to_wire(grad_rows), ctx.handle, topk_weights=grad_weights.contiguous())
        return None, grad_x.float(), grad_w, None


class _Combine(torch.autograd.Function):
    """Forward: combine. Backward: each copy of a token gets that token's gradient: a dispatch with the same handle."""

    @staticmethod
    def forward(ctx: Any, exchange: DeepEPExchange, y: Tensor, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = exchange.buffer, handle
        combined, _, _ = exchange.buffer.combine(to_wire(y), handle)
        return combined.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows = ctx.buffer.dispatch(to_wire(grad), handle=ctx.handle)[0]
        return None, rows.float(), None


class DeepEPExchange:
    """Rows through a `deep_ep.Buffer`; small dense tensors over the same torch group."""

    def __init__(self, buffer: deep_ep.Buffer, group: dist.ProcessGroup, num_experts: int) -> None:
        self.buffer = buffer
        self.num_experts = num_experts
        self._group = group
        self._corrupt_next = False

    def corrupt_next_dispatch(self) -> None:
        """Makes the next dispatch look as if one received row had its sign bits flipped on the way."""
        self._corrupt_next = True

    def corrupt(self, rows: Tensor) -> None:
        """Flips the first of `rows` in place if that was asked for; waits for a dispatch that received any."""
        if self._corrupt_next and rows.shape[0] > 0:
            rows[0].neg_()
            self._corrupt_next = False

    def dispatch(self, xs: list[Tensor], experts: list[Tensor], weights: list[Tensor]) -> tuple[list[Routed], Any]:
        rows, recv_weights, recv_experts, handle = _Dispatch.apply(self, xs[0], weights[0], experts[0])  # type: ignore[no-untyped-call]
        return [Routed(rows, recv_experts, recv_weights)], handle

    def combine(self, ys: list[Tensor], handle: Any) -> list[Tensor]:
        return [_Combine.apply(self, ys[0], handle)]  # type: ignore[no-untyped-call]

    def gather(self, values: list[Tensor]) -> list[Tensor]:
        mine = values[0].cpu()  # gloo works on host memory
        parts = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(parts, mine, group=self._group)
        return [part.to(values[0].device) for part in parts]


class _Wire(torch.autograd.Function):
    """What BF16 transport does to values: rounds them on the way out and gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(torch.bfloat16).float()


def over_wire(x: Tensor) -> Tensor:
    """`x` as it arrives after a journey in BF16."""
    arrived: Tensor = _Wire.apply(x)  # type: ignore[no-untyped-call]
    return arrived


class LocalExchange:
    """The same exchange inside one process, written with nothing but torch indexing and autograd."""

    def __init__(self, num_shards: int, num_experts: int) -> None:
        self.num_shards = num_shards
        self.experts_per_group = num_experts // num_shards

    def dispatch(self, xs: list[Tensor], experts: list[Tensor], weights: list[Tensor]) -> tuple[list[Routed], Any]:
        xs = [over_wire(x) for x in xs]
        received: list[Routed] = []
        sources: list[list[Tensor]] = []
        for group in range(self.num_shards):
            first = group * self.experts_per_group
            here = [(e >= first) & (e < first + self.experts_per_group) for e in experts]
            tokens = [mask.any(dim=1).nonzero().flatten() for mask in here]
            rows = torch.cat([x.index_select(0, t) for x, t in zip(xs, tokens, strict=True)])
            mask = torch.cat([m[t] for m, t in zip(here, tokens, strict=True)])
            local = torch.cat([e[t] for e, t in zip(experts, tokens, strict=True)]) - first
            weight = torch.cat([w.index_select(0, t) for w, t in zip(weights, tokens, strict=True)])
            received.append(
                Routed(
                    over_wire(rows), torch.where(mask, local, -1), torch.where(mask, weight, torch.zeros_like(weight))
                )
            )
            sources.append(tokens)
        return received, ([x.shape[0] for x in xs], sources)

    def combine(self, ys: list[Tensor], handle: Any) -> list[Tensor]:
        num_tokens, sources = handle
        sums = [torch.zeros(n, ys[0].shape[1], dtype=torch.float32, device=ys[0].device) for n in num_tokens]
        for y, tokens in zip(ys, sources, strict=True):
            parts = torch.split(over_wire(y), [t.numel() for t in tokens])
            sums = [total.index_add(0, t, part) for total, t, part in zip(sums, tokens, parts, strict=True)]
        return [over_wire(total) for total in sums]

    def gather(self, values: list[Tensor]) -> list[Tensor]:
        return values
