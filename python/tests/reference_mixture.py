"""A mixture of experts for tests written as clients: what a rank puts in, and what plain torch makes of it.

Each expert multiplies by a vector of its own: a row at the wrong expert, or a shifted one, shows in the sums.
"""

from __future__ import annotations

from typing import Any

import torch

import cases
import checks
from cases import Case

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NAN = float("nan")
Pair = tuple[torch.Tensor, torch.Tensor]  # rows and their scales


class Mixture:
    """This rank's tokens x [T,H], idx [T,K] (-1: none) and weights [T,K], on its device."""

    def __init__(self, ctx: Any, case: Case) -> None:
        self.case, self.ctx, self.num_local = case, ctx, case.experts // ctx.size
        gen = cases.generator(case.seed, ctx.rank, 71)
        shape = (case.tokens[ctx.rank], case.topk)
        self.x = ctx.to_device(torch.randn((shape[0], case.hidden), generator=gen).to(BF16))
        self.idx = ctx.to_device(cases.routing(case, ctx.rank))
        self.weights = ctx.to_device(torch.rand(shape, generator=gen) + 0.25)
        self.grad = ctx.to_device(torch.randn((shape[0], case.hidden), generator=gen).to(BF16))
        vectors = torch.randint(2, 9, (case.experts, case.hidden), generator=cases.generator(case.seed, 72)) / 4
        self.vectors = ctx.to_device(vectors)

    def own_vectors(self) -> torch.Tensor:
        """[L,H]: those of this rank's experts."""
        return self.vectors[self.ctx.rank * self.num_local :][: self.num_local]

    def plain(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The mixture in plain torch, without communication."""
        factors = torch.where(self.idx < 0, 0.0, weights.double())
        return torch.einsum("th,tk,tkh->th", x.double(), factors, self.vectors[self.idx.clamp(min=0)].double())

    def rows_by_index(self, rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Received rows [N,H] through the local experts that idx [N,K] names, weighted and added; BF16."""
        factors = (idx >= 0).float() if weights is None else torch.where(idx < 0, 0.0, weights)
        return torch.einsum("nh,nk,nkh->nh", rows.float(), factors, self.own_vectors()[idx.clamp(min=0)]).to(BF16)

    def rows_by_expert(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows [L,n,H] of low-latency mode through their experts; NaN behind the received ones."""
        out = torch.full(rows.shape, NAN, dtype=BF16, device=rows.device)
        for local, count in enumerate(counts.tolist()):
            out[local, :count] = (rows[local, :count].float() * self.own_vectors()[local]).to(BF16)
        return out

    def check(self, got: torch.Tensor, limit: float = 1e-5) -> None:
        """Sums of a forward pass; `limit` of calc_diff: 1e-5 for BF16, 2e-3 where the rows were FP8."""
        assert got.dtype == BF16 and got.shape == self.x.shape
        checks.small_diff("mixture", got, self.plain(self.x, self.weights), limit)

    def check_gradients(self, layer: Any, limit: float = 1e-5) -> None:
        """``layer(x, weights)`` and both of its gradients against the same of plain torch."""
        mine = [tensor.clone().requires_grad_() for tensor in (self.x, self.weights)]
        plain = [tensor.double().requires_grad_() for tensor in (self.x, self.weights)]
        got = layer(*mine)
        self.check(got, limit)
        got.backward(self.grad)
        self.plain(*plain).backward(self.grad.double())
        names = ("gradient of x", "gradient of the weights")
        for name, have, want in zip(names, mine, plain, strict=True):
            wanted = torch.zeros_like(want) if want.grad is None else want.grad
            checks.small_diff(name, have.grad, wanted, limit)


def to_fp8(x: torch.Tensor, column_major: bool = False, power_of_two: bool = False) -> Pair:
    """e4m3 rows with a scale for 128 channels; column_major: scales stored by column, padded to 4 rows, as TMA asks."""
    parts = x.float().view(len(x), x.shape[1] // 128, 128)
    scales = parts.abs().amax(2).clamp(min=1e-4) / 448
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    rows = (parts / scales.unsqueeze(2)).view(x.shape).to(FP8)
    if column_major:
        padded = scales.new_zeros((scales.shape[1], -(-len(x) // 4) * 4))
        padded[:, : len(x)] = scales.t()
        scales = padded.t()[: len(x)]
    return rows, scales


def from_fp8(pair: Pair) -> torch.Tensor:
    """BF16 rows of a pair; scales of float32, or of int32 with an exponent in each byte."""
    rows, scales = pair
    if scales.dtype == torch.int32:
        exponents = torch.stack([(scales >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(-2)
        scales = torch.exp2(exponents.float() - 127)
    wide = rows.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)
    return wide.flatten(-2).to(BF16)
