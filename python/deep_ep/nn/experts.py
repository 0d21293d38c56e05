"""Experts of one rank: their networks on rows that are sorted by expert."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ALIGNMENT = 16  # bytes; of a row's length, for torch's grouped product


def _has_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matrix product takes these operands."""
    if not hasattr(F, "grouped_mm") or rows.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        return False
    widths = weight.shape[-2:]
    if any(width * rows.element_size() % _ALIGNMENT for width in widths):
        return False
    return rows.device.type == "cpu" or torch.cuda.get_device_capability(rows.device) >= (9, 0)


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``[M, F]``: the rows of each group times the matrix of the group.

    Args:
        rows: ``[M, H]``, sorted by group; rows past the sum of the counts give anything.
        weight: ``[L, H, F]``.
        counts: ``[L]`` ints: rows of each group, on the rows' device, or on the CPU, where they are read at once.
    """
    some = torch.compiler.is_compiling() or rows.shape[0] > 0
    if some and _has_grouped_mm(rows, weight):
        ends = counts.to(device=rows.device).cumsum(0).to(torch.int32)
        product: Tensor = F.grouped_mm(rows, weight, offs=ends)
        return product
    *parts, rest = torch.split(rows, _lengths(counts, rows.shape[0]))
    products = [part @ matrix for part, matrix in zip(parts, weight, strict=True)]
    return torch.cat([*products, rows.new_zeros((rest.shape[0], weight.shape[2]))])


def _lengths(counts: Tensor, rows: int) -> list[int]:
    """The rows of each group, and of what is left behind the last."""
    lengths: list[int] = counts.tolist()
    return [*lengths, rows - sum(lengths)]


class GroupedExperts(nn.Module):
    """The feed-forward networks of a rank's experts, with their matrices stacked.

    ``down(silu(gate(x)) * up(x))``, or ``down(silu(up(x)))`` without a gate. torch's grouped matrix product computes
    all experts at once where there is one (BF16; GPUs from compute capability 9.0 on), else they take turns.

    Args:
        num_local_experts: L.
        hidden: H.
        intermediate: F.
        gated: with a gate.
        device, dtype: of the parameters.

    Attributes:
        gate (None without one), up: ``[L, H, F]``; down: ``[L, F, H]``.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        intermediate: int,
        *,
        gated: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def matrix(inputs: int, outputs: int) -> nn.Parameter:
            bound = 1 / math.sqrt(inputs)
            values = torch.empty((num_local_experts, inputs, outputs), device=device, dtype=dtype)
            return nn.Parameter(values.uniform_(-bound, bound))

        self.up = matrix(hidden, intermediate)
        self.gate = matrix(hidden, intermediate) if gated else None
        self.down = matrix(intermediate, hidden)

    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        """Applies each expert to its rows.

        Args:
            rows: ``[M, H]`` sorted by expert, or ``[L, n, H]`` with counts None: n rows of each expert.
            counts: ``[L]`` ints: rows of each expert.

        Returns:
            The same shape as rows; what lies past the counts is not defined.
        """

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return torch.bmm(x, weight) if counts is None else grouped_product(x, weight, counts)

        up = product(rows, self.up)
        inner = F.silu(up) if self.gate is None else F.silu(product(rows, self.gate)) * up
        return product(inner, self.down)


def apply_to_groups(experts: nn.Module, rows: Tensor, counts: Tensor | None) -> Tensor:
    """A rank's experts on their rows: a ModuleList one by one, any other module as GroupedExperts is called."""
    if not isinstance(experts, nn.ModuleList):
        results: Tensor = experts(rows, counts)
        return results
    if counts is None:
        return torch.stack([expert(rows[index]) for index, expert in enumerate(experts)])
    *parts, rest = torch.split(rows, _lengths(counts, rows.shape[0]))
    return torch.cat([*(expert(part) for expert, part in zip(experts, parts, strict=True)), rest])


def dtype_of(parameters: Iterable[nn.Parameter], default: torch.dtype) -> torch.dtype:
    """The floating type that a module computes in, by its first parameter."""
    for each in parameters:  # torch 2.4 traces no next() with a default
        if each.is_floating_point():
            return each.dtype
    return default
