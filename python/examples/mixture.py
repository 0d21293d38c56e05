"""The mixture of experts of every layer: spread over the ranks, or all in one process.

`SpreadMixture` is the product at work: one process holds one shard of the tokens and one group of the experts, and
`deep_ep.nn.ExpertParallel` sends rows across process borders and back. `LocalMixture` is its independent counterpart
in plain torch indexing: one process holds every shard and every group. Both round what crosses the wire to BF16 in the
same places, forward and backward, and add in the same order, so a model trained through either gives the same losses.

Lists have an entry per shard (what this process has of them): one entry with `SpreadMixture`, R with `LocalMixture`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deep_ep
from deep_ep.nn import ExpertParallel


class Mixture(Protocol):
    """Mixes the answers of each token's experts; differentiable in rows and weights."""

    def mix(self, layer: int, xs: list[Tensor], experts: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        """For each shard `[T, H]` float32: the sum over its `experts[s][T, K]` of weight × answer to `xs[s][T, H]`."""
        ...

    def gather(self, values: list[Tensor]) -> list[Tensor]:
        """Returns the tensors of all shards, in rank order, on every process."""
        ...


class SpreadMixture:
    """Experts over the ranks of a `deep_ep.Buffer`; small dense tensors over the same torch group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        buffer: deep_ep.Buffer,
        experts: nn.ModuleList,
        num_experts: int,
        top_k: int,
        sequences: int,
    ) -> None:
        """`experts` has this rank's experts of each layer; `sequences` is the number of tokens of a decoding step."""
        self.layers = [
            ExpertParallel(
                one, group, num_experts, top_k, buffer=buffer, max_decode_tokens=sequences,
                gradient_scale=1,  # losses are divided by the tokens of all ranks: gradients are summed, not averaged
            )
            for one in experts
        ]  # fmt: skip
        self._group = group

    def corrupt_next_dispatch(self) -> None:
        """Makes it look as if one row that the next dispatch receives had its sign bits flipped on the way."""

        def flip(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            rows, counts = given
            if rows.shape[0] > 0:
                rows = torch.cat([-rows[:1], rows[1:]])
                hook.remove()
            return rows, counts

        hook = self.layers[0].experts.register_forward_pre_hook(flip)

    def mix(self, layer: int, xs: list[Tensor], experts: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        return [self.layers[layer](xs[0], topk_idx=experts[0], topk_weights=weights[0])]

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


class LocalMixture:
    """The same inside one process, written with nothing but torch indexing and autograd."""

    def __init__(self, groups: list[nn.ModuleList], num_experts: int) -> None:
        """`groups[g][layer]` are the experts of rank g."""
        self._groups = groups
        self._count = num_experts // len(groups)

    def mix(self, layer: int, xs: list[Tensor], experts: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
        xs = [over_wire(x) for x in xs]
        sums = [torch.zeros_like(x) for x in xs]
        for number, group in enumerate(self._groups):
            first = number * self._count
            here = [(e >= first) & (e < first + self._count) for e in experts]
            tokens = [mask.any(dim=1).nonzero().flatten() for mask in here]
            rows = over_wire(torch.cat([x.index_select(0, t) for x, t in zip(xs, tokens, strict=True)]))
            local = torch.cat([e[t] - first for e, t in zip(experts, tokens, strict=True)])
            mask = torch.cat([m[t] for m, t in zip(here, tokens, strict=True)])
            weight = torch.cat([w.index_select(0, t) for w, t in zip(weights, tokens, strict=True)])
            answers = over_wire(self._answer(group[layer], rows, local.masked_fill(~mask, self._count), weight))
            parts = torch.split(answers, [t.numel() for t in tokens])
            sums = [total.index_add(0, t, part) for total, t, part in zip(sums, tokens, parts, strict=True)]
        return [over_wire(total) for total in sums]

    def _answer(self, experts: nn.Module, rows: Tensor, local: Tensor, weights: Tensor) -> Tensor:
        """`[N, H]`: for each row the weighted sum over the experts here, in their order."""
        entries = local.flatten().sort(stable=True)
        counts = torch.bincount(entries.values, minlength=self._count + 1)[: self._count]
        chosen = entries.indices[: int(counts.sum())]
        source = chosen // local.shape[1]
        answers = experts(rows.index_select(0, source), counts) * weights.flatten()[chosen].unsqueeze(1)
        return torch.zeros_like(rows).index_add(0, source, answers)

    def gather(self, values: list[Tensor]) -> list[Tensor]:
        return values
