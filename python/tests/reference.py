"""What every call of ``deep_ep`` must return, written a second time in plain torch.

One process computes the results of all ranks from the inputs of all ranks. Nothing here depends on how the library
moves bytes; clarity wins over speed everywhere. Number formats (FP8, UE8M0, LogFMT) are in ``reference_formats``.

Letters: T tokens of a rank, R ranks, E experts, L = E / R experts of a rank, K top-k, H hidden, N rows received,
B the low-latency mode's largest number of tokens a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import reference_formats as formats


@dataclass
class Tokens:
    """What one rank puts into a dispatch: x [T,H], scales [T,S] or None, indices and weights [T,K] or None."""

    x: torch.Tensor
    scales: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None


@dataclass
class Layout:
    """Result of ``get_dispatch_layout`` for one rank."""

    num_tokens_per_rank: torch.Tensor  # [R] int32
    num_tokens_per_rdma_rank: torch.Tensor | None  # [nodes] int32
    num_tokens_per_expert: torch.Tensor  # [E] int32
    is_token_in_rank: torch.Tensor  # [T,R] bool


@dataclass
class Received:
    """Result of ``dispatch`` on one rank; row n came from token src_idx[n] of rank src_rank[n]."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_counts: list[int]
    rank_prefix: torch.Tensor  # [R] int32: rows from ranks 0..i, this rank's column of rank_prefix_matrix
    src_rank: torch.Tensor  # [N] int64
    src_idx: torch.Tensor  # [N] int32


def layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, peers: int = 8) -> Layout:
    """Counts a token once for a rank and a node, and for an expert as often as it names it; -1 selects nothing."""
    num_tokens = topk_idx.shape[0]
    named = torch.zeros((num_tokens, num_experts), dtype=torch.int32)
    for k in range(topk_idx.shape[1]):
        chosen = topk_idx[:, k].to(torch.int64)
        rows = (chosen >= 0).nonzero().flatten()
        named[rows, chosen[rows]] += 1
    in_rank = (named > 0).view(num_tokens, num_ranks, num_experts // num_ranks).any(dim=2)
    per_node = None
    if num_ranks > peers:
        in_node = in_rank.view(num_tokens, num_ranks // peers, peers).any(dim=2)
        per_node = in_node.sum(dim=0, dtype=torch.int32)
    return Layout(
        num_tokens_per_rank=in_rank.sum(dim=0, dtype=torch.int32),
        num_tokens_per_rdma_rank=per_node,
        num_tokens_per_expert=named.sum(dim=0, dtype=torch.int32),
        is_token_in_rank=in_rank,
    )


def without(whole: Layout, rank: int, lost: frozenset[int]) -> Layout:
    """The layout of ``rank`` where the lost ranks take no part: nothing goes to them or comes from them."""
    num_ranks, num_experts = whole.is_token_in_rank.shape[1], len(whole.num_tokens_per_expert)
    stays = torch.tensor([rank not in lost and r not in lost for r in range(num_ranks)])
    in_rank = whole.is_token_in_rank & stays
    experts = whole.num_tokens_per_expert * stays.repeat_interleave(num_experts // num_ranks)
    per_node = None
    if whole.num_tokens_per_rdma_rank is not None:
        in_node = in_rank.view(len(in_rank), len(whole.num_tokens_per_rdma_rank), -1).any(dim=2)
        per_node = in_node.sum(dim=0, dtype=torch.int32)
    return Layout(in_rank.sum(dim=0, dtype=torch.int32), per_node, experts.to(torch.int32), in_rank)


def dispatch(inputs: list[Tokens], layouts: list[Layout], rank: int, num_experts: int) -> Received:
    """What ``rank`` receives when rank i sends ``inputs[i]`` by ``layouts[i]``."""
    num_ranks = len(inputs)
    num_local = num_experts // num_ranks
    chosen = [lay.is_token_in_rank[:, rank].nonzero().flatten() for lay in layouts]
    counts = torch.tensor([len(c) for c in chosen], dtype=torch.int64)

    def gather(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[rows] for part, rows in zip(parts, chosen, strict=True)])

    # Bytes, because indexing is not defined for FP8 everywhere and NaN patterns must survive.
    raw = gather([tokens.x.contiguous().view(torch.uint8) for tokens in inputs])
    scales = idx = weights = None
    if inputs[0].scales is not None:
        scales = gather([tokens.scales for tokens in inputs]).contiguous()
    if inputs[0].topk_idx is not None:
        idx = gather([tokens.topk_idx for tokens in inputs])
        weights = gather([tokens.topk_weights for tokens in inputs])
        idx, weights = localise(idx, weights, rank, num_local)
    own = slice(rank * num_local, (rank + 1) * num_local)
    return Received(
        x=raw.view(inputs[0].x.dtype),
        scales=scales,
        topk_idx=idx,
        topk_weights=weights,
        expert_counts=sum(lay.num_tokens_per_expert[own].to(torch.int64) for lay in layouts).tolist(),
        rank_prefix=counts.cumsum(0).to(torch.int32),
        src_rank=torch.repeat_interleave(torch.arange(num_ranks), counts),
        src_idx=torch.cat(chosen).to(torch.int32),
    )


def localise(idx: torch.Tensor, weights: torch.Tensor, rank: int, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns global expert indices into the rank's own; those of other ranks become -1 with weight 0."""
    local = (idx >= rank * num_local) & (idx < (rank + 1) * num_local)
    local_idx = torch.where(local, idx - rank * num_local, torch.full_like(idx, -1))
    return local_idx, torch.where(local, weights, torch.zeros_like(weights))


def align(counts: list[int], alignment: int) -> list[int]:
    """Each count rounded up to a multiple of ``alignment``."""
    return [-(-count // alignment) * alignment for count in counts]


def combine_in_nodes(
    rows: list[torch.Tensor], received: list[Received], rank: int, num_tokens: int, peers: int
) -> list[torch.Tensor]:
    """What each node of ``peers`` ranks adds to the tokens of ``rank``: float64 [T, anything], not rounded.

    ``rows[j]`` is [N_j, anything], what rank j hands to combine; ``received[j]`` has the source of each row.
    """
    sums = []
    for first in range(0, len(rows), peers):
        total = torch.zeros((num_tokens, rows[0].shape[1]), dtype=torch.float64)
        for part, source in zip(rows[first : first + peers], received[first : first + peers], strict=True):
            mine = source.src_rank == rank
            total.index_add_(0, source.src_idx[mine].to(torch.int64), part[mine].to(torch.float64))
        sums.append(total)
    return sums


def combine(
    rows: list[torch.Tensor],
    received: list[Received],
    rank: int,
    num_tokens: int,
    biases: Sequence[torch.Tensor] = (),
    peers: int = 8,
) -> torch.Tensor:
    """The sum (float64) for each of the ``num_tokens`` tokens of ``rank``; rows as in ``combine_in_nodes``.

    Exact but for one thing: BF16 rows of another node are summed there and cross as one BF16 row.
    """
    total = torch.zeros((num_tokens, rows[0].shape[1]), dtype=torch.float64)
    for node, part in enumerate(combine_in_nodes(rows, received, rank, num_tokens, peers)):
        crosses = rows[0].dtype == torch.bfloat16 and node != rank // peers
        total += part.to(torch.float32).to(torch.bfloat16).to(torch.float64) if crosses else part
    for bias in biases:
        total += bias.to(torch.float64)
    return total


@dataclass
class LowLatencyReceived:
    """Result of ``low_latency_dispatch`` on one rank: per local expert l, rows[l] = [(source rank, token), ...]."""

    rows: list[list[tuple[int, int]]]
    layout_range: torch.Tensor  # [L,R] int64
    num_max_tokens: int  # B

    @property
    def counts(self) -> torch.Tensor:
        return torch.tensor([len(rows) for rows in self.rows], dtype=torch.int32)

    def src_info(self, expert: int) -> torch.Tensor:
        """[count] int32: the token's index at its source."""
        return torch.tensor([token for _, token in self.rows[expert]], dtype=torch.int32)


def low_latency_dispatch(
    topk_idx: list[torch.Tensor],
    rank: int,
    num_experts: int,
    num_max_tokens: int,
    lost: frozenset[tuple[int, int]] = frozenset(),
) -> LowLatencyReceived:
    """Who sends what to ``rank``. ``lost`` holds pairs (a, b): rank a has masked rank b.

    Nothing goes from a to b nor is awaited by a from b, so a mask on either side empties both directions' rows.
    """
    num_ranks = len(topk_idx)
    num_local = num_experts // num_ranks
    ranges = torch.zeros((num_local, num_ranks), dtype=torch.int64)
    all_rows = []
    for local in range(num_local):
        expert = rank * num_local + local
        rows: list[tuple[int, int]] = []
        for source in range(num_ranks):
            begin = len(rows)
            if (rank, source) not in lost and (source, rank) not in lost:
                named = (topk_idx[source] == expert).any(dim=1).nonzero().flatten().tolist()
                rows += [(source, token) for token in named]
            ranges[local, source] = (begin << 32) | (len(rows) - begin)
        all_rows.append(rows)
    return LowLatencyReceived(all_rows, ranges, num_max_tokens)


def low_latency_combine(
    expert_rows: list[dict[tuple[int, int, int], torch.Tensor]],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    rank: int,
    num_experts: int,
    hidden: int,
    use_logfmt: bool = False,
) -> torch.Tensor:
    """Exact (float64) weighted sums [T,H] for ``rank``.

    ``expert_rows[j]`` maps (local expert, source rank, token) to the BF16 row that rank j hands to combine; a row
    that is missing there (masked rank) adds nothing.
    """
    num_local = num_experts // len(expert_rows)
    total = torch.zeros((topk_idx.shape[0], hidden), dtype=torch.float64)
    for token in range(topk_idx.shape[0]):
        for k, expert in enumerate(topk_idx[token].tolist()):
            if expert < 0:
                continue
            row = expert_rows[expert // num_local].get((expert % num_local, rank, token))
            if row is None:
                continue
            value = formats.logfmt_round_trip(row) if use_logfmt else row
            total[token] += topk_weights[token, k].to(torch.float64) * value.to(torch.float64)
    return total


def calc_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - 2 sum((a+1)(b+1)) / sum((a+1)^2 + (b+1)^2) in float64; 0 means equal, NaN anywhere gives NaN."""
    x = a.detach().cpu().to(torch.float64) + 1
    y = b.detach().cpu().to(torch.float64) + 1
    denominator = (x * x + y * y).sum().item()
    if x.numel() == 0:
        return 0.0
    return float(1 - 2 * (x * y).sum().item() / denominator)
