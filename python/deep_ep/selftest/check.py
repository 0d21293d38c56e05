"""The results that the self-test expects: payload that names its source, routing of every rank, comparisons.

Nothing here asks the library under test for anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
CHUNK = 512  # rows that are compared at a time, so that checking needs little memory


class CheckError(Exception):
    """A result is wrong; the text says where and what was expected."""


@dataclass(frozen=True)
class Shape:
    """The numbers that describe one round; every rank can work out every rank's routing from them.

    Attributes:
        peers: ranks of one node; 0: all ranks are one.
        groups: nodes that the experts of one token may lie in; 0: any number.
    """

    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    seed: int
    peers: int = 0
    groups: int = 0

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks

    @property
    def node_size(self) -> int:
        """Ranks of one node."""
        return self.peers or self.ranks

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.node_size

    def routing(self, rank: int) -> Tensor:
        """``[T, K]`` int64 on the CPU: different experts for each token, about one choice in twenty is -1."""
        gen = torch.Generator(device="cpu").manual_seed(self.seed * 1009 + rank)
        scores = torch.rand((self.tokens, self.experts), generator=gen, dtype=torch.float32, device="cpu")
        if 0 < self.groups < self.nodes:  # only experts of each token's best nodes
            of_nodes = scores.view(self.tokens, self.nodes, self.experts // self.nodes)
            left_out = of_nodes.amax(dim=2).topk(self.nodes - self.groups, dim=1, largest=False).indices
            scores = of_nodes.scatter(1, left_out.unsqueeze(2).expand(-1, -1, of_nodes.shape[2]), -1.0).flatten(1)
        chosen = scores.topk(self.topk, dim=1).indices
        skipped = torch.rand((self.tokens, self.topk), generator=gen, dtype=torch.float32, device="cpu") < 0.05
        return chosen.masked_fill(skipped, -1)

    def weights(self, rank: int) -> Tensor:
        """``[T, K]`` float32 on the CPU: multiples of 1/8 up to 1, so that sums are exact."""
        gen = torch.Generator(device="cpu").manual_seed(self.seed * 2003 + rank)
        return torch.randint(1, 9, (self.tokens, self.topk), generator=gen, device="cpu").to(torch.float32) / 8


def payload(rank: Tensor, token: Tensor, hidden: int) -> Tensor:
    """``[N, hidden]`` int32 from 0 to 127 for rows that come from ``token[n]`` of ``rank[n]``."""
    column = torch.arange(hidden, dtype=torch.int32, device=token.device).unsqueeze(0)
    row = token.to(torch.int32).unsqueeze(1)
    values = (row * 31 + column * 7 + rank.to(torch.int32).unsqueeze(1) * 53 + row * column // 3) % 128
    values[:, 0::8] = rank.to(torch.int32).unsqueeze(1) + 1
    values[:, 1::8] = row % 128
    values[:, 2::8] = row // 128
    return values


def own_payload(shape: Shape, rank: int, device: torch.device) -> Tensor:
    """``[T, H]`` int32: the rows of one rank."""
    token = torch.arange(shape.tokens, dtype=torch.int32, device=device)
    return payload(torch.full_like(token, rank), token, shape.hidden)


def sources(shape: Shape, rank: int) -> tuple[Tensor, Tensor]:
    """Source rank and token index of every row that normal dispatch delivers to ``rank``, in order."""
    ranks, tokens = [], []
    low, high = rank * shape.local_experts, (rank + 1) * shape.local_experts
    for source in range(shape.ranks):
        idx = shape.routing(source)
        sent = ((idx >= low) & (idx < high)).any(dim=1).nonzero().flatten()
        ranks.append(torch.full_like(sent, source))
        tokens.append(sent)
    return torch.cat(ranks), torch.cat(tokens)


def nodes_of(shape: Shape, rank: int) -> Tensor:
    """``[T, nodes]`` bool: whether a token of ``rank`` names an expert of a node."""
    idx = shape.routing(rank)
    node = torch.where(idx >= 0, idx // (shape.local_experts * shape.node_size), torch.full_like(idx, -1))
    return torch.stack([(node == n).any(dim=1) for n in range(shape.nodes)], dim=1)


def crossings(shape: Shape, rank: int) -> tuple[int, int]:
    """Rows that RDMA brings to ``rank`` in one dispatch, and in one combine."""
    own, index = rank // shape.node_size, rank % shape.node_size
    senders = (node * shape.node_size + index for node in range(shape.nodes) if node != own)
    arriving = sum(int(nodes_of(shape, sender)[:, own].sum()) for sender in senders)
    sent = nodes_of(shape, rank)
    return arriving, int(sent.sum() - sent[:, own].sum())


def expert_sources(shape: Shape, rank: int, masked: frozenset[int] = frozenset()) -> list[tuple[Tensor, Tensor]]:
    """For each local expert: source rank and token index of its low-latency rows, in order."""
    routings = [shape.routing(source) for source in range(shape.ranks)]
    result = []
    for local in range(shape.local_experts):
        expert = rank * shape.local_experts + local
        tokens = [
            (idx == expert).any(dim=1).nonzero().flatten() if source not in masked else idx.new_empty((0,))
            for source, idx in enumerate(routings)
        ]
        ranks = [torch.full_like(found, source) for source, found in enumerate(tokens)]
        result.append((torch.cat(ranks), torch.cat(tokens)))
    return result


def chunks(count: int) -> Iterator[slice]:
    """Slices that cover ``range(count)``."""
    for begin in range(0, count, CHUNK):
        yield slice(begin, min(count, begin + CHUNK))


def name_of(row: Tensor) -> str:
    """The source that a row of ``payload`` claims."""
    first = row[:3].to(torch.float64).tolist()
    if any(value != value or value != int(value) for value in first):
        return f"no payload (begins with {first})"
    return f"token {int(first[1] + 128 * first[2])} of rank {int(first[0]) - 1}"


def expect(condition: bool, text: str) -> None:
    """Raises CheckError with ``text`` unless ``condition`` holds."""
    if not condition:
        raise CheckError(text)


def expect_equal(name: str, got: Tensor, want: Tensor) -> None:
    """Same shape, dtype and values."""
    expect(tuple(got.shape) == tuple(want.shape), f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    expect(got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}")
    if not torch.equal(got, want):
        where = (got != want).reshape(want.shape[0], -1).any(dim=1).nonzero().flatten()
        raise CheckError(f"{name}: {len(where)} of {len(want)} rows differ, the first is {int(where[0])}")


def expect_rows(name: str, rows: Tensor, rank: Tensor, token: Tensor) -> None:
    """Row n of ``rows`` (BF16 or raw bytes) is the payload of ``token[n]`` of ``rank[n]``, bit for bit."""
    expect(len(rows) == len(token), f"{name}: {len(rows)} rows, expected {len(token)}")
    rank, token = rank.to(rows.device), token.to(rows.device)
    for part in chunks(len(rows)):
        want = payload(rank[part], token[part], rows.shape[1]).to(rows.dtype)
        wrong = (rows[part] != want).any(dim=1).nonzero().flatten()
        if len(wrong):
            row = part.start + int(wrong[0])
            wanted = f"token {int(token[row])} of rank {int(rank[row])}"
            count = int((rows[row] != want[wrong[0]]).sum())
            found = f"row {row} holds {name_of(rows[row])}, expected {wanted}; {count} values differ"
            raise CheckError(f"{name}: {found}")


def expect_cast(name: str, values: Tensor, scales: Tensor, source: Tensor, power_of_two: bool) -> None:
    """FP8 rows with float32 scales ``[N, H/128]`` are a cast of ``source`` ``[N, H]`` float32."""
    blocks = source.view(len(source), source.shape[1] // 128, 128)
    want = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448
    if power_of_two:
        mantissa, exponent = torch.frexp(want)
        want = torch.ldexp(torch.ones_like(want), torch.where(mantissa == 0.5, exponent - 1, exponent))
    expect(bool(((scales - want).abs() <= want * 2.0**-22).all()), f"{name}: scales are wrong")
    error = (values.to(torch.float32).view(blocks.shape) * scales.unsqueeze(2) - blocks).abs()
    # Three bits of mantissa: half a step is 1/16 of the value, or 2^-10 of the scale near zero.
    bound = torch.maximum(blocks.abs() / 16, scales.unsqueeze(2) * 2.0**-10) * (1 + 2.0**-12)
    wrong = int((~(error <= bound)).sum())
    expect(wrong == 0, f"{name}: {wrong} values are not the cast of their source")


def unpack_ue8m0(packed: Tensor) -> Tensor:
    """``[N, H/512]`` int32 to ``[N, H/128]`` float32."""
    exponents = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8).to(torch.int32)
    return (exponents << 23).view(torch.float32)


def calc_diff(got: Tensor, want: Tensor) -> float:
    """1 - 2 sum((a+1)(b+1)) / sum((a+1)^2 + (b+1)^2) in float64; 0 means equal."""
    if want.numel() == 0:
        return 0.0
    a, b = got.to(torch.float64) + 1, want.to(torch.float64) + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def expect_close(name: str, got: Tensor, want: Tensor, limit: float) -> None:
    """``calc_diff`` below ``limit``; a NaN fails."""
    expect(tuple(got.shape) == tuple(want.shape), f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    diff = calc_diff(got, want)
    expect(diff < limit, f"{name}: differs by {diff:.3g}, allowed below {limit:.3g}")


def digest(tensor: Tensor) -> int:
    """A number that depends on every byte and its place; equal tensors give equal numbers."""
    flat = tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.int64, device=flat.device) % 65521
    return int((flat.to(torch.int64) * weights).sum())
