"""A decoding step of two micro-batches, one of which computes while the other's rows cross, as SGLang overlaps them.

A layer is attention, low-latency dispatch (FP8), experts and combine. Attention and experts are stand-ins: products of
BF16 matrices that read as much memory as such a layer's weights. Ways to run the two micro-batches A and B:

    computing alone    no dispatch, no combine
    one after another  calls in one piece
    halves             attention of B while A's dispatch is under way, experts of A while B's is, experts of B while A's
                       combine is, and the next layer's attention of A while B's is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import deep_ep
from lib.kernel_clock import Meeting
from lib.low_latency_mode import make_buffer
from lib.normal_mode import TOP_K, Case
from lib.overlap import WAYS, check_transfer, replayed, rows_cross_by
from lib.ranks import Team
from lib.tables import Table, duration

TOKENS = (32, 64, 128)  # of a micro-batch
LOCAL_EXPERTS = 8
PROJECTED, INTERMEDIATE = 8192, 1024  # columns of attention's product, of an expert's hidden layer
Hook = Callable[[], None]


class Weights:
    """Of attention and of this rank's experts: random, the same for both micro-batches."""

    def __init__(self, team: Team, hidden: int) -> None:
        def make(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=team.device).to(torch.bfloat16)

        self.attention = make(hidden, PROJECTED)
        self.up = make(LOCAL_EXPERTS, hidden, 2 * INTERMEDIATE)
        self.down = make(LOCAL_EXPERTS, INTERMEDIATE, hidden)


class MicroBatch:
    """Half of a rank's batch: its tokens, and the parts of its layer."""

    def __init__(self, team: Team, case: Case, buffer: deep_ep.Buffer, weights: Weights, told: bool) -> None:
        """told: the dispatch brings the top-k weights, which V1's callers give to the combine alone."""
        self._case, self._buffer, self._weights = case, buffer, weights
        self._num_experts = LOCAL_EXPERTS * case.ranks
        at = {"device": team.device, "dtype": torch.bfloat16}
        self.x = torch.randn(case.tokens, case.hidden, device=team.device).to(torch.bfloat16)
        scores = torch.rand(case.tokens, self._num_experts, device=team.device)
        self._topk_weights, self._topk_idx = scores.topk(min(TOP_K, self._num_experts), dim=1)
        self._told = self._topk_weights if told else None
        self._answers = torch.full((LOCAL_EXPERTS, case.ranks * case.tokens, case.hidden), 0.5, **at)
        # Uniform routing gives each expert about as many rows as a rank has tokens.
        self._rows = torch.randn(LOCAL_EXPERTS, case.tokens, case.hidden, device=team.device).to(torch.bfloat16)
        self._projected = torch.empty(case.tokens, PROJECTED, **at)
        self._inner = torch.empty(LOCAL_EXPERTS, case.tokens, 2 * INTERMEDIATE, **at)
        self._outer = torch.empty_like(self._rows)
        self.combined = torch.empty_like(self.x)
        self._handle: Any = None

    def attention(self) -> None:
        """Stands for attention and its projections."""
        torch.mm(self.x, self._weights.attention, out=self._projected)

    def experts(self) -> None:
        """Stands for the grouped products of the experts."""
        torch.bmm(self._rows, self._weights.up, out=self._inner)
        torch.bmm(self._inner[:, :, :INTERMEDIATE], self._weights.down, out=self._outer)

    def dispatch(self, **options: Any) -> Hook:
        """Issues the dispatch; returns its hook."""
        result = self._buffer.low_latency_dispatch(
            self.x, self._topk_idx, self._case.tokens, self._num_experts, topk_weights=self._told, **options
        )
        self._handle = result[2]
        hook: Hook = result[4]
        return hook

    def combine(self, **options: Any) -> Hook:
        """Issues the combine of the experts' answers; returns its hook."""
        hook: Hook = self._buffer.low_latency_combine(
            self._answers, self._topk_idx, self._topk_weights, self._handle, out=self.combined, **options
        )[2]
        return hook


class Layers:
    """Layers of two micro-batches, one after another. ``finish`` issues what the last one has left."""

    def __init__(self, a: MicroBatch, b: MicroBatch) -> None:
        self._a, self._b = a, b
        self._pending: Hook | None = None

    def computing(self) -> None:
        """One layer without exchange."""
        for batch in (self._a, self._b):
            batch.attention()
            batch.experts()

    def one_after_another(self) -> None:
        """One layer, calls in one piece."""
        for batch in (self._a, self._b):
            batch.attention()
            batch.dispatch()
            batch.experts()
            batch.combine()

    def halves(self) -> None:
        """One layer, each exchange beside the other micro-batch's computing."""
        a, b = self._a, self._b
        a.attention()
        self.finish()  # the combine of B's layer before
        receive = a.dispatch(return_recv_hook=True)
        b.attention()
        receive()
        receive = b.dispatch(return_recv_hook=True)
        a.experts()
        receive()
        receive = a.combine(return_recv_hook=True)
        b.experts()
        receive()
        self._pending = b.combine(return_recv_hook=True)

    def finish(self) -> None:
        """Receives what is still under way."""
        if self._pending is not None:
            self._pending()
        self._pending = None


def _measure_ways(team: Team, case: Case, weights: Weights, rounds: int, by: str, told: bool) -> dict[str, float]:
    """Times in us of a layer of both micro-batches, by way."""
    with rows_cross_by(by):
        buffer = make_buffer(team, case, LOCAL_EXPERTS * case.ranks, preinitialize=True)
    if team.device.type == "cuda":
        check_transfer(buffer, by)
    layers = Layers(*(MicroBatch(team, case, buffer, weights, told) for _ in range(2)))
    meeting = Meeting(team, buffer, cold=False)
    ways = {f"halves by {by}": layers.halves}
    if by == "sm":
        ways |= {"computing alone": layers.computing, "one after another": layers.one_after_another}
    found = {name: replayed(team, meeting, layer, rounds, layers.finish) for name, layer in ways.items()}
    team.barrier()
    buffer.destroy()
    return found


def measure(team: Team, hidden: int, rounds: int) -> list[dict[str, Any]]:
    """Both ways of calling a combine. Without a GPU: few tokens, to try the program."""
    on_gpu = team.device.type == "cuda"
    weights, found = Weights(team, hidden), []
    for tokens in TOKENS if on_gpu else (4,):
        for told in (False, True):
            times: dict[str, float] = {}
            for by in WAYS if on_gpu else ("sm",):
                times |= _measure_ways(team, Case(team.size, tokens, hidden), weights, rounds, by, told)
            found.append({"tokens": tokens, "told": told, "times": times})
    return found


def table(found: list[dict[str, Any]], rounds: int) -> Table:
    """Times of a layer, and how much faster than with halves by SMs each way is."""
    result = Table(
        "A decoding step of two micro-batches",
        "A layer of two micro-batches of so many tokens: attention stand-in, FP8 dispatch, two grouped products of "
        f"{LOCAL_EXPERTS} experts a rank, combine; in a graph of several, by events, the slowest rank of each of "
        f"{rounds} replays, median. Halves: one micro-batch computes while the other's rows cross; by: "
        "DEEPEP_LL_TRANSFER. In brackets: how many times as fast as halves by SMs.",
        ["tokens", "weights", "computing alone", "one after another", *(f"halves by {by}" for by in WAYS)],
    )
    for entry in found:
        times = entry["times"]
        own, rival = [str(entry["tokens"]), "in dispatch" if entry["told"] else "in combine"], times["halves by sm"]
        for name in result.head[2:]:
            own.append(f"{duration(times[name])} ({rival / times[name]:.2f})" if name in times else "")
        result.rows.append(own)
    return result
