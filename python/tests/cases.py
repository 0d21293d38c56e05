"""Inputs of the tests: cases described by a few numbers, from which every rank can build every rank's tensors.

A payload row encodes (rank, token): a wrong row names where it came from.
"""

from __future__ import annotations

import dataclasses
import os
import random
from dataclasses import dataclass

import torch

import reference

FP8 = torch.float8_e4m3fn
NODE_SIZE = "DEEPEP_NUM_MAX_NVL_PEERS"
RANKS = 2 if os.environ.get("DEEPEP_TEST_NODES") == "2" else 4  # of tests that lose one, and of nodes on GPUs


def node_size() -> int:
    """Ranks of one node, as the library reads it. Every test that takes it from here runs on several nodes too."""
    return int(os.environ.get(NODE_SIZE) or os.environ.get("NUM_MAX_NVL_PEERS") or 8)


@dataclass(frozen=True)
class Case:
    """One exchange. ``tokens[r]`` is T on rank r."""

    tokens: tuple[int, ...]
    hidden: int = 64
    experts: int = 8
    topk: int = 2
    routing: str = "random"
    kind: str = "bf16"  # bf16, bits (any BF16 pattern), fp8
    num_scales: int = 1
    scales: str = "float32"  # float32, int32, strided (float32, column-major), sliced (int32, every second column)
    index_dtype: torch.dtype = torch.int64
    alignment: int = 1
    worst: bool = False  # num_worst_tokens
    with_topk: bool = True
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def but(self, **changes: object) -> Case:
        return dataclasses.replace(self, **changes)

    def inputs(self) -> list[reference.Tokens]:
        return [tokens_of(self, rank) for rank in range(self.ranks)]

    def routings(self) -> list[torch.Tensor]:
        return [routing(self, rank) for rank in range(self.ranks)]

    def layouts(self) -> list[reference.Layout]:
        return [reference.layout(idx, self.experts, self.ranks, node_size()) for idx in self.routings()]

    @property
    def worst_tokens(self) -> int:
        return sum(self.tokens) + 3 if self.worst else 0


def generator(*keys: int) -> torch.Generator:
    """A generator that depends on all keys."""
    seed = 0x9E3779B97F4A7C15
    for key in keys:
        seed = (seed ^ (key + 0x7F4A7C15)) * 0xBF58476D1CE4E5B9 % 2**63
        seed ^= seed >> 29
    return torch.Generator().manual_seed(seed % 2**63)


def payload(rank: int, num_tokens: int, width: int) -> torch.Tensor:
    """[T,width] integers 0..127: column 0 the rank, 1 and 2 the token, the rest depends on all three numbers."""
    token = torch.arange(num_tokens, dtype=torch.int64).unsqueeze(1)
    column = torch.arange(width, dtype=torch.int64).unsqueeze(0)
    values = (token * 31 + column * 7 + rank * 53 + (token * column) // 3) % 128
    values[:, 0::8] = rank + 1
    values[:, 1::8] = token % 128
    values[:, 2::8] = token // 128
    return values


def name_row(row: torch.Tensor) -> str:
    """The source that a row of ``payload`` claims to come from; takes BF16 values or raw bytes."""
    values = row[:3].to(torch.float64).tolist()
    if any(v != v or v != int(v) for v in values):
        return f"no payload (begins {values})"
    return f"rank {int(values[0]) - 1} token {int(values[1] + 128 * values[2])}"


def tokens_of(case: Case, rank: int) -> reference.Tokens:
    """The inputs of one rank, on the CPU."""
    num_tokens = case.tokens[rank]
    gen = generator(case.seed, rank, 1)
    if case.kind == "fp8":
        x = payload(rank, num_tokens, case.hidden).to(torch.uint8).view(FP8)
    elif case.kind == "bits":
        x = torch.randint(0, 1 << 16, (num_tokens, case.hidden), generator=gen, dtype=torch.int32)
        x = x.to(torch.uint16).view(torch.bfloat16)
    else:
        x = payload(rank, num_tokens, case.hidden).to(torch.bfloat16)
    tokens = reference.Tokens(x, make_scales(case, rank) if case.kind == "fp8" else None)
    if case.with_topk:
        tokens.topk_idx = routing(case, rank)
        tokens.topk_weights = weights(case, rank)
    return tokens


def weights(case: Case, rank: int) -> torch.Tensor:
    """[T,K] float32, all different and exact sums of powers of two."""
    token = torch.arange(case.tokens[rank], dtype=torch.float32).unsqueeze(1)
    return 1 + rank * 4096 + token * 4 + torch.arange(case.topk, dtype=torch.float32).unsqueeze(0) / 16


def make_scales(case: Case, rank: int) -> torch.Tensor:
    """[T,S] in the dtype and with the strides that the case asks for; values name (rank, token, column)."""
    num_tokens, count = case.tokens[rank], case.num_scales
    token = torch.arange(num_tokens, dtype=torch.int32).unsqueeze(1)
    values = (rank + 1) * 1_000_000 + token * 1000 + torch.arange(count, dtype=torch.int32).unsqueeze(0)
    if case.scales == "float32":
        return values.to(torch.float32)
    if case.scales == "int32":
        return values
    if case.scales == "strided":
        return values.to(torch.float32).t().contiguous().t()
    wide = torch.full((num_tokens, 2 * count), -1, dtype=torch.int32)
    wide[:, ::2] = values
    return wide[:, ::2]


def routing(case: Case, rank: int) -> torch.Tensor:
    """[T,K] expert indices of one rank."""
    shape = (case.tokens[rank], case.topk)
    gen = generator(case.seed, rank, 2)
    maker = {
        "random": _distinct,
        "holes": _holes,
        "duplicates": lambda c, s, g: torch.randint(0, c.experts, s, generator=g),
        "skewed": _skewed,
        "none": lambda c, s, g: torch.full(s, -1),
        "hot": lambda c, s, g: torch.full(s, c.experts - 1),
        "hot_first": _hot_first,
        "few": lambda c, s, g: torch.randint(0, min(2, c.experts), s, generator=g),
        "edges": lambda c, s, g: torch.randint(0, 2, s, generator=g) * (c.experts - 1),
    }[case.routing]
    return maker(case, shape, gen).to(case.index_dtype)


def _distinct(case: Case, shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    return torch.rand((shape[0], case.experts), generator=gen).topk(shape[1], dim=1).indices


def _holes(case: Case, shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    idx = _distinct(case, shape, gen)
    return idx.masked_fill(torch.rand(shape, generator=gen) < 0.4, -1)


def _skewed(case: Case, shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    """A few experts of this round get most tokens; some indices are -1, some tokens name an expert twice."""
    popularity = torch.rand(case.experts, generator=gen) ** 6 + 1e-3
    flat = torch.multinomial(popularity.expand(max(1, shape[0]), -1), shape[1], replacement=True, generator=gen)
    idx = flat[: shape[0]]
    return idx.masked_fill(torch.rand(shape, generator=gen) < 0.1, -1)


def _hot_first(case: Case, shape: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    idx = _distinct(case, shape, gen)
    if shape[1]:
        idx = torch.where(idx == 0, idx[:, :1], idx)
        idx[:, 0] = 0
    return idx


def random_case(seed: int, ranks: int | None = None) -> Case:
    """A case drawn from everything that dispatch allows."""
    rng = random.Random(seed)
    num_ranks = ranks or rng.choice([1, 2, 3, 4, 5, 6, 7, 8])
    topk = rng.choice([1, 2, 3, 5, 7, 8])
    per_rank = rng.choice([n for n in (1, 2, 3, 5, 8) if n * num_ranks >= topk])
    most = rng.choice([0, 1, 7, 33, 80])
    kind = rng.choice(["bf16", "bits", "fp8"])
    return Case(
        tokens=tuple(rng.choice([0, most, rng.randint(0, most)]) for _ in range(num_ranks)),
        hidden=rng.choice([8, 24, 64, 136, 1000]) * (2 if kind == "fp8" else 1),
        experts=per_rank * num_ranks,
        topk=topk,
        routing=rng.choice(["random", "holes", "duplicates", "skewed", "none", "hot", "hot_first", "few", "edges"]),
        kind=kind,
        num_scales=rng.choice([1, 2, 3, 7, 56]),
        scales=rng.choice(["float32", "int32", "strided", "sliced"]),
        index_dtype=rng.choice([torch.int64, torch.int32]),
        alignment=rng.choice([1, 1, 4, 128]),
        worst=rng.random() < 0.3,
        seed=seed,
    )
