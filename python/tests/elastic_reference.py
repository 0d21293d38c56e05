"""What every call of V2 must return, written a second time in plain torch: rows, handles, and sums term by term.

One process computes the results of all ranks from the inputs of all ranks. Letters as in ``reference``; M is the stride
of token numbers, n the rows of the plain layout, X those of the expanded one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import reference


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A row's bytes: indexing is not defined for every dtype, and NaN patterns must survive."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)  # of plain strides


@dataclass
class Received:
    """What one rank receives, in both layouts, and what its handle says."""

    tokens: torch.Tensor  # [n,2] source rank and token of each plain row
    topk_idx: torch.Tensor  # [n,K] local experts
    choice_rows: torch.Tensor  # [n,K] expanded row of each choice, -1
    counts: list[int]  # [L]
    aligned: list[int]  # [L]
    starts: list[int]  # [L] first expanded row of each expert
    expanded: torch.Tensor  # [X,3] source rank, token and choice of each expanded row; -1 in padding rows
    metadata: torch.Tensor  # [n,2] columns 0 and 1
    psum_ranks: torch.Tensor  # [R]

    @property
    def psum_plain(self) -> torch.Tensor:
        return torch.tensor(self.aligned, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @property
    def psum_expanded(self) -> torch.Tensor:
        pairs = zip(self.starts, self.counts, strict=True)
        return torch.tensor([start + count for start, count in pairs], dtype=torch.int32)


class Exchange:
    """One dispatch of all ranks."""

    def __init__(self, inputs: list[reference.Tokens], num_experts: int, alignment: int, num_max: int) -> None:
        self.inputs, self.num_experts, self.alignment, self.num_max = inputs, num_experts, alignment, num_max
        self.ranks = len(inputs)
        self.local = num_experts // self.ranks
        # [T,K]: the rank of each choice, -1 where nothing is selected.
        self.owner = [torch.where(t.topk_idx < 0, -1, t.topk_idx // self.local).to(torch.int64) for t in inputs]
        self.num_topk = int(inputs[0].topk_idx.shape[1])
        self.received = [self._received(rank) for rank in range(self.ranks)]

    def last_choice(self, source: int, rank: int) -> torch.Tensor:
        """[T]: the highest k whose expert is on `rank`, -1 where there is none."""
        k = torch.arange(self.num_topk).expand_as(self.owner[source])
        return torch.where(self.owner[source] == rank, k, -1).max(dim=1).values if len(k) else k.new_zeros(0)

    def _received(self, rank: int) -> Received:
        tokens, metadata, per_rank = [], [], []
        entries: list[list[tuple[int, int, int]]] = [[] for _ in range(self.local)]
        for source in range(self.ranks):
            last = self.last_choice(source, rank)
            chosen = (last >= 0).nonzero().flatten().tolist()
            per_rank.append(len(chosen))
            for token in chosen:
                tokens.append((source, token))
                metadata.append((source * self.num_max + token, source * self.num_topk + int(last[token])))
                for k in (self.owner[source][token] == rank).nonzero().flatten().tolist():
                    expert = int(self.inputs[source].topk_idx[token, k]) - rank * self.local
                    entries[expert].append((source, token, k))
        counts = [len(rows) for rows in entries]
        aligned = reference.align(counts, self.alignment)
        starts = [sum(aligned[:e]) for e in range(self.local)]
        expanded = torch.full((sum(aligned), 3), -1, dtype=torch.int64)
        row_of = {}
        for start, rows in zip(starts, entries, strict=True):
            for i, entry in enumerate(rows):
                expanded[start + i] = torch.tensor(entry)
                row_of[entry] = start + i
        idx = torch.full((len(tokens), self.num_topk), -1, dtype=self.inputs[rank].topk_idx.dtype)
        choice_rows = torch.full((len(tokens), self.num_topk), -1, dtype=torch.int32)
        for i, (source, token) in enumerate(tokens):
            for k in (self.owner[source][token] == rank).nonzero().flatten().tolist():
                idx[i, k] = int(self.inputs[source].topk_idx[token, k]) - rank * self.local
                choice_rows[i, k] = row_of[source, token, k]
        return Received(
            torch.tensor(tokens, dtype=torch.int64).view(-1, 2), idx, choice_rows, counts, aligned, starts, expanded,
            torch.tensor(metadata, dtype=torch.int32).view(-1, 2),
            torch.tensor(per_rank, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        )  # fmt: skip

    def plain(self, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
        """Rows of `parts[source]` in the plain order of `rank`, as bytes."""
        rows = self.received[rank].tokens
        return _pick(parts, rows[:, 0], rows[:, 1])

    def expanded(self, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
        """Rows of `parts[source]` in the expanded order of `rank`, as bytes; padding rows are 0."""
        rows = self.received[rank].expanded
        picked = _pick(parts, rows[:, 0].clamp(min=0), rows[:, 1].clamp(min=0))
        picked[rows[:, 0] < 0] = 0
        return picked

    def expanded_weights(self, rank: int) -> torch.Tensor:
        """[X] the weight of each expanded row; 0 in padding rows."""
        weights = torch.zeros(len(self.received[rank].expanded), dtype=torch.float32)
        for i, (source, token, k) in enumerate(self.received[rank].expanded.tolist()):
            if source >= 0:
                weights[i] = self.inputs[source].topk_weights[token, k]
        return weights

    # ---- combine

    def combine(
        self,
        source: int,
        rows: list[torch.Tensor],
        biases: list[torch.Tensor],
        expand: bool,
        unreduced: bool = False,
        node: int = 0,
    ) -> torch.Tensor:
        """What rank `source` gets: [T,H] BF16. `rows[j]`: what rank j gives, in the layout of the dispatch.

        node: ranks of a node, which adds its ranks' rows before they cross; 0: none does.
        """
        num_tokens, hidden = self.owner[source].shape[0], rows[0].shape[1]
        total = torch.zeros((num_tokens, hidden), dtype=torch.float32)
        for bias in biases:
            total = total + bias.to(torch.float32)
        if node:
            return self._by_node(source, rows, total, expand, node)
        for k in range(self.num_topk):
            for rank in range(self.ranks):
                if expand and unreduced:
                    at, part = self._choice_rows(source, rank)[:, k], rows[rank]
                else:
                    part, at = self._rank_rows(source, rank, rows[rank], expand)
                    at = torch.where(self.last_choice(source, rank) == k, at, -1)
                here = (at >= 0).nonzero().flatten()
                total[here] = total[here] + part[at[here]].to(torch.float32)
        return total.to(torch.bfloat16)

    def _by_node(
        self, source: int, rows: list[torch.Tensor], total: torch.Tensor, expand: bool, node: int
    ) -> torch.Tensor:
        """Each node's rows by the token's last choice of each rank, rounded; then the nodes by that of each node."""
        sums, lasts = [], []
        for first in range(0, self.ranks, node):
            part = torch.zeros_like(total)
            for k in range(self.num_topk):
                for rank in range(first, first + node):
                    values, at = self._rank_rows(source, rank, rows[rank], expand)
                    here = (torch.where(self.last_choice(source, rank) == k, at, -1) >= 0).nonzero().flatten()
                    part[here] = part[here] + values[at[here]].to(torch.float32)
            sums.append(part.to(torch.bfloat16).to(torch.float32))
            lasts.append(torch.stack([self.last_choice(source, rank) for rank in range(first, first + node)]).amax(0))
        for k in range(self.num_topk):
            for part, last in zip(sums, lasts, strict=True):
                here = (last == k).nonzero().flatten()
                total[here] = total[here] + part[here]
        return total.to(torch.bfloat16)

    def combine_weights(self, source: int, weights: list[torch.Tensor], expand: bool) -> torch.Tensor:
        """[T,K] what the owner of each choice gives; 0 where nothing is selected."""
        result = torch.zeros(self.owner[source].shape, dtype=torch.float32)
        for rank in range(self.ranks):
            at = self._choice_rows(source, rank) if expand else self._plain_rows(source, rank).unsqueeze(1)
            for token, k in (self.owner[source] == rank).nonzero().tolist():
                result[token, k] = weights[rank][at[token, k]] if expand else weights[rank][at[token, 0], k]
        return result

    def _rank_rows(self, source: int, rank: int, rows: torch.Tensor, expand: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The one row that `rank` sends for each token of `source`: rows, and for each token its place or -1."""
        at = self._plain_rows(source, rank)
        if not expand:
            return rows, at
        table = self._choice_rows(source, rank)
        total = torch.zeros((len(table), rows.shape[1]), dtype=torch.float32)
        for k in range(self.num_topk):
            here = (table[:, k] >= 0).nonzero().flatten()
            total[here] = total[here] + rows[table[here, k]].to(torch.float32)
        return total.to(torch.bfloat16), torch.where(at >= 0, torch.arange(len(table)), -1)

    def _plain_rows(self, source: int, rank: int) -> torch.Tensor:
        """[T]: the plain row at `rank` of each token of `source`, -1."""
        at = torch.full((self.owner[source].shape[0],), -1, dtype=torch.int64)
        tokens = self.received[rank].tokens
        mine = (tokens[:, 0] == source).nonzero().flatten()
        at[tokens[mine, 1]] = mine
        return at

    def _choice_rows(self, source: int, rank: int) -> torch.Tensor:
        """[T,K]: the expanded row at `rank` of each choice of `source`'s tokens, -1."""
        table = torch.full(self.owner[source].shape, -1, dtype=torch.int64)
        at = self._plain_rows(source, rank)
        here = (at >= 0).nonzero().flatten()
        table[here] = self.received[rank].choice_rows[at[here]].to(torch.int64)
        return table


def _pick(parts: list[torch.Tensor], sources: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    raw = [bytes_of(part) for part in parts]
    width = raw[0].shape[1] if raw[0].dim() == 2 else 0
    picked = torch.zeros((len(sources), width), dtype=torch.uint8)
    for source, rows in enumerate(raw):
        mine = (sources == source).nonzero().flatten()
        if len(mine) and len(rows):
            picked[mine] = rows[tokens[mine]]
    return picked
