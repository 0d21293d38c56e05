"""Normal mode: dispatch and combine through deep_ep, the same work over gloo, and a plain copy of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deep_ep
from lib.ranks import Team, time_rounds

TOP_K = 8
EXPERTS = 256
# Callers' tolerance for combine against the plain sum (calc_diff).
COMBINE_TOLERANCE = 5e-6


@dataclass(frozen=True)
class Case:
    """Shapes of one benchmark: T tokens a rank, H channels, BF16 or FP8 rows."""

    ranks: int
    tokens: int
    hidden: int
    fp8: bool = False

    @property
    def name(self) -> str:
        return f"{self.ranks} x {self.tokens} x {self.hidden} {'FP8' if self.fp8 else 'BF16'}"


@dataclass
class Input:
    """A rank's tokens: BF16 rows or (e4m3 rows, float32 scales), their experts and weights."""

    x: Tensor | tuple[Tensor, Tensor]
    experts: Tensor
    weights: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.x if isinstance(self.x, tuple) else (self.x,)

    def to(self, device: torch.device) -> Input:
        """The same on another device."""
        x = (self.x[0].to(device), self.x[1].to(device)) if isinstance(self.x, tuple) else self.x.to(device)
        return Input(x, self.experts.to(device), self.weights.to(device))


def make_input(case: Case, rank: int, seed: int = 0) -> Input:
    """Uniform routing: each token names K different experts out of E, all equally likely."""
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    scores = torch.rand(case.tokens, EXPERTS, generator=generator)
    weights, experts = scores.topk(TOP_K, dim=1)
    x = torch.randn(case.tokens, case.hidden, generator=generator)
    if not case.fp8:
        return Input(x.to(torch.bfloat16), experts, weights)
    blocks = x.view(case.tokens, case.hidden // 128, 128)
    scales = blocks.abs().amax(2).clamp(min=1e-4) / 448
    rows = (blocks / scales[:, :, None]).clamp(-448, 448).view_as(x).to(torch.float8_e4m3fn)
    return Input((rows, scales), experts, weights)


class Ours:
    """Layout, counts, rows and top-k through deep_ep, and back."""

    def __init__(self, team: Team, case: Case, data: Input) -> None:
        row = case.hidden * 2
        hints = (deep_ep.Buffer.get_dispatch_config(case.ranks), deep_ep.Buffer.get_combine_config(case.ranks))
        self.buffer = deep_ep.Buffer(
            team.group,
            num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row, case.ranks) for config in hints),
            explicitly_destroy=True,
            preinitialize=True,
            engine=team.engine,
        )
        self._data = data
        self.rows: Any = None
        self.back: Tensor | None = None
        self._handle: Any = None

    def forget(self) -> None:
        """Drops the last round's outputs."""
        self.rows = self.back = self._handle = None

    def dispatch(self) -> None:
        data = self._data
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(data.experts, EXPERTS)
        self.rows, _, _, _, self._handle, _ = self.buffer.dispatch(
            data.x,
            topk_idx=data.experts,
            topk_weights=data.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )

    def combine(self) -> None:
        self.back, _, _ = self.buffer.combine(self.rows, self._handle)


class Gloo:
    """The same rows through index_select and all_to_all_single, and back through index_add. Top-k is not sent."""

    def __init__(self, team: Team, case: Case, data: Input) -> None:
        self._team, self._case, self._data = team, case, data
        self.rows: Any = None
        self.back: Tensor | None = None
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._sent: list[int] = []
        self._received: list[int] = []

    def forget(self) -> None:
        """Drops the last round's outputs."""
        self.rows = self.back = None

    def dispatch(self) -> None:
        owner = self._data.experts // (EXPERTS // self._case.ranks)
        tokens = [(owner == rank).any(1).nonzero().flatten() for rank in range(self._case.ranks)]
        self._tokens = torch.cat(tokens)
        sent = torch.tensor([part.numel() for part in tokens])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._team.group)
        self._sent, self._received = sent.tolist(), received.tolist()
        parts = tuple(self._move(part, self._received, self._sent) for part in self._data.parts)
        self.rows = parts if isinstance(self._data.x, tuple) else parts[0]

    def _move(self, part: Tensor, received: list[int], sent: list[int]) -> Tensor:
        words = part.view(torch.int32).index_select(0, self._tokens)  # gloo has no FP8
        rows = torch.empty(sum(received), words.shape[1], dtype=torch.int32)
        dist.all_to_all_single(rows, words, received, sent, group=self._team.group)
        return rows.view(part.dtype)

    def combine(self) -> None:
        rows = self.rows.view(torch.int32)
        back = torch.empty(sum(self._sent), rows.shape[1], dtype=torch.int32)
        dist.all_to_all_single(back, rows, self._sent, self._received, group=self._team.group)
        total = torch.zeros(self._case.tokens, self._case.hidden, dtype=torch.float32)
        total.index_add_(0, self._tokens, back.view(torch.bfloat16).float())
        self.back = total.to(torch.bfloat16)


def check(ours: Ours, gloo: Gloo, case: Case) -> None:
    """Both rivals' results agree: rows bit for bit, sums within the callers' tolerance."""
    ours.dispatch()
    gloo.dispatch()
    pairs = zip(ours.rows, gloo.rows, strict=True) if case.fp8 else [(ours.rows, gloo.rows)]
    for mine, theirs in pairs:
        if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            raise RuntimeError(f"{case.name}: deep_ep and gloo delivered different rows")
    if case.fp8:
        return
    ours.combine()
    gloo.combine()
    assert ours.back is not None and gloo.back is not None
    a, b = ours.back.double() + 1, gloo.back.double() + 1
    difference = float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())
    if not difference <= COMBINE_TOLERANCE:
        raise RuntimeError(f"{case.name}: combined sums differ by {difference} (allowed {COMBINE_TOLERANCE})")


def measure(team: Team, case: Case, rounds: int) -> dict[str, Any]:
    """Times of both rivals and of the copy (us, the slowest rank's), and the bytes of rows that each rank received."""
    data = make_input(case, team.rank)
    ours, gloo = Ours(team, case, data), Gloo(team, case, data)
    check(ours, gloo, case)
    received = [torch.empty_like(part) for part in (ours.rows if case.fp8 else (ours.rows,))]
    target = [torch.empty_like(part) for part in received]

    def copy() -> None:
        for to, what in zip(target, received, strict=True):
            to.copy_(what)

    def before() -> None:
        ours.forget()
        gloo.forget()

    calls = {"ours_dispatch": ours.dispatch, "gloo_dispatch": gloo.dispatch, "copy": copy}
    if not case.fp8:
        calls |= {"ours_combine": ours.combine, "gloo_combine": gloo.combine}
    times = time_rounds(team, calls, rounds, warmup=5, before=before)
    total = sum(part.numel() * part.element_size() for part in received)
    ours.buffer.destroy()
    return {"case": case.name, "bytes": max(team.gather(total)), "times": times}
