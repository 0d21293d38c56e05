"""A small byte-level mixture-of-experts transformer, cut so that experts can live anywhere.

Two kinds of parameters: a `Trunk` (embeddings, attention, routers, output) of which every rank has a copy, and groups
of `Experts`, of which each rank owns one. `forward` runs any number of trunks in step, joined by a `Mixture`: one trunk
and one group on a rank of the distributed run, all of them in the single-process run. Each piece then computes with the
same shapes in the same order in both runs, which is what lets their losses be compared so closely.

Activations and parameters are float32; rows are BF16 only while they travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixture import Mixture


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `hidden` is a multiple of 128, which the low-latency mode asks for."""

    num_experts: int
    vocabulary: int = 256
    context: int = 128
    hidden: int = 128
    heads: int = 4
    layers: int = 2
    top_k: int = 2
    expert_hidden: int = 256


def _normal(generator: torch.Generator, *size: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size, generator=generator, dtype=torch.float32) * std)


class Layer(nn.Module):
    """The replicated half of a block: attention, and the router that chooses experts."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        super().__init__()
        h, std = shape.hidden, 1 / math.sqrt(shape.hidden)
        self.heads, self.top_k = shape.heads, shape.top_k
        self.norm_attention = nn.Parameter(torch.ones(h))
        self.norm_experts = nn.Parameter(torch.ones(h))
        self.qkv = _normal(generator, 3 * h, h, std=std)
        self.out = _normal(generator, h, h, std=std / math.sqrt(2 * shape.layers))
        self.router = _normal(generator, shape.num_experts, h, std=std)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] → query, key, value, each [B, heads, S, H / heads]."""
        b, s, h = x.shape
        qkv = F.linear(rms_norm(x, self.norm_attention), self.qkv)
        q, k, v = qkv.view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        return q, k, v

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Adds causal attention to `x` [B, S, H], whose first position is `first`; k and v start at position 0."""
        b, s, h = x.shape
        scores = q @ k.transpose(-1, -2) / math.sqrt(h // self.heads)
        at = torch.arange(first, first + s, device=x.device)
        seen = torch.arange(k.shape[2], device=x.device) <= at[:, None]
        mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return x + F.linear(mixed.transpose(1, 2).reshape(b, s, h), self.out)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Chooses experts for [T, H]: rows to send, experts [T, K] int64, weights [T, K], loss that evens the load.

        The loss is E · Σ (share of tokens) · (mean probability), which is 1 when every expert gets the same share.
        """
        rows = rms_norm(x, self.norm_experts)
        probability = F.linear(rows, self.router).softmax(-1)
        weights, experts = probability.topk(self.top_k, dim=-1)
        share = F.one_hot(experts, probability.shape[1]).sum((0, 1)) / experts.numel()
        balance = probability.shape[1] * (share * probability.mean(0)).sum()
        return rows, experts, weights / weights.sum(-1, keepdim=True), balance


class Trunk(nn.Module):
    """Everything but the experts. Trunks made from one seed are equal."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = _normal(generator, shape.vocabulary, shape.hidden, std=1.0)
        self.position = _normal(generator, shape.context, shape.hidden, std=0.3)
        self.layers = nn.ModuleList(Layer(shape, generator) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = _normal(generator, shape.vocabulary, shape.hidden, std=0.5 / math.sqrt(shape.hidden))

    def layer(self, index: int) -> Layer:
        """The layer with that number, typed."""
        module = self.layers[index]
        assert isinstance(module, Layer)
        return module

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """[B, S] bytes at positions from `first` on → [B, S, H]."""
        return F.embedding(tokens, self.embedding) + self.position[first : first + tokens.shape[1]]

    def logits(self, x: Tensor) -> Tensor:
        """[..., H] → scores of the next byte [..., 256]."""
        return F.linear(rms_norm(x, self.norm), self.head)


class Experts(nn.Module):
    """The experts of one rank in one layer. An expert's start depends on its number only, not on who owns it."""

    def __init__(self, shape: Shape, seed: int, layer: int, first: int, count: int) -> None:
        super().__init__()
        h, f = shape.hidden, shape.expert_hidden
        up, down = [], []
        for expert in range(first, first + count):
            generator = torch.Generator().manual_seed(seed + 1 + layer * shape.num_experts + expert)
            up.append(torch.randn(h, f, generator=generator) / math.sqrt(h))
            down.append(torch.randn(f, h, generator=generator) / math.sqrt(f * 2 * shape.layers))
        self.up = nn.Parameter(torch.stack(up))
        self.down = nn.Parameter(torch.stack(down))

    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        """Each expert's network on its rows: `counts[e]` of `rows` [M, H], or `rows[e]` of [L, n, H] without counts."""
        if counts is None:
            return F.silu(rows @ self.up) @ self.down
        parts = torch.split(rows, counts.tolist())
        return torch.cat([F.silu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)])


def expert_group(shape: Shape, seed: int, group: int, num_groups: int) -> nn.ModuleList:
    """The experts of rank `group` in each layer."""
    count = shape.num_experts // num_groups
    return nn.ModuleList(Experts(shape, seed, layer, group * count, count) for layer in range(shape.layers))


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x scaled to unit mean square over the last axis, times `gain`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def forward(trunks: list[Trunk], mixture: Mixture, tokens: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Runs all shards of this process in step.

    Args:
        trunks: one for each shard here.
        mixture: the experts, here and in other processes.
        tokens: for each shard [B, S] int64.

    Returns:
        For each shard the logits [B, S, 256], and the mean of its layers' balance losses (scalars).
    """
    xs = [trunk.embed(t) for trunk, t in zip(trunks, tokens, strict=True)]
    balance = [torch.zeros((), device=x.device) for x in xs]
    depth = len(trunks[0].layers)
    for index in range(depth):
        layers = [trunk.layer(index) for trunk in trunks]
        xs = [layer.attend(x, *layer.project(x), first=0) for layer, x in zip(layers, xs, strict=True)]
        routed = [layer.route(x.flatten(0, 1)) for layer, x in zip(layers, xs, strict=True)]
        ys = mixture.mix(index, [r[0] for r in routed], [r[1] for r in routed], [r[2] for r in routed])
        xs = [x + y.view_as(x) for x, y in zip(xs, ys, strict=True)]
        balance = [b + r[3] / depth for b, r in zip(balance, routed, strict=True)]
    return [trunk.logits(x) for trunk, x in zip(trunks, xs, strict=True)], balance
