"""Normal mode on GPUs: each kernel's time at several numbers of SMs, NCCL's for the same rows, and the host's view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import deep_ep
from lib.kernel_clock import Meeting, host_view, profiled, sums
from lib.normal_mode import EXPERTS, Case, Input, make_input
from lib.ranks import Team

# Where rows go: straight into the receiver's rows (a registered segment), or through staging memory and a copy.
DISPATCH_SMS = {
    ("FP8", "direct"): (10, 16, 24),
    ("FP8", "copied"): (24,),
    ("BF16", "direct"): (16, 24),
    ("BF16", "copied"): (24,),
}
COMBINE_SMS = (16, 20, 24)
NCCL_ROUNDS = 20


@dataclass
class Rows:
    """What of this rank's tokens goes where: one row for each (token, rank) with an expert of the token there."""

    tokens: Tensor  # of all rows sent, by rank
    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, team: Team, data: Input) -> Rows:
        owner = data.experts.cpu() // (EXPERTS // team.size)
        tokens = [(owner == rank).any(1).nonzero().flatten() for rank in range(team.size)]
        sent = [part.numel() for part in tokens]
        matrix = team.gather(sent)
        return cls(torch.cat(tokens).to(data.experts.device), sent, [row[team.rank] for row in matrix])


def make_buffer(team: Team, case: Case, direct: bool) -> deep_ep.Buffer:
    """A buffer for these shapes; room for two batches of received rows, or none."""
    configs = (deep_ep.Buffer.get_dispatch_config(case.ranks), deep_ep.Buffer.get_combine_config(case.ranks))
    row = case.hidden * 2
    return deep_ep.Buffer(
        team.group,
        num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row, case.ranks) for config in configs),
        explicitly_destroy=True,
        preinitialize=True,
        engine=team.engine,
        zero_copy_bytes=2 * case.ranks * case.tokens * (row + 1024) if direct else 0,
    )


class Calls:
    """The calls of one buffer with one kind of rows."""

    def __init__(self, buffer: deep_ep.Buffer, data: Input, worst: int) -> None:
        self.buffer, self.data, self.worst = buffer, data, worst
        self.layout = self.make_layout()
        self.result: Any = None

    def make_layout(self) -> Any:
        """The counts of the batch."""
        return self.buffer.get_dispatch_layout(self.data.experts, EXPERTS)

    def dispatch(self, sms: int) -> Callable[[], None]:
        """In one step, so that the host waits for nothing and the kernels of all ranks begin together."""
        return lambda: self.issue(self.layout, self.worst, deep_ep.Config(sms))

    def layout_and_dispatch(self) -> None:
        """As a training step does it: the host waits for the counts."""
        self.issue(self.make_layout())

    def issue(self, layout: Any, worst: int = 0, config: deep_ep.Config | None = None) -> None:
        """A dispatch after this layout."""
        self.result = None  # its rows are free to be used again
        per_rank, per_node, per_expert, in_rank, _ = layout
        self.result = self.buffer.dispatch(
            self.data.x,
            topk_idx=self.data.experts,
            topk_weights=self.data.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=worst,
            config=config,
        )

    def path(self) -> str:
        """Which way the last dispatch's rows came."""
        pool, rows = self.buffer._core.native.rows, self.result[0]
        first = rows[0] if isinstance(rows, tuple) else rows
        return "direct" if pool is not None and pool.offset(first) is not None else "copied"

    def combine(self, sms: int) -> Callable[[], None]:
        """Of the rows that a dispatch delivered."""
        self.layout_and_dispatch()
        rows, handle = self.result[0], self.result[4]

        def call() -> None:
            self.buffer.combine(rows, handle, config=deep_ep.Config(sms))

        return call


def kernel_named(part: str) -> Callable[[str], bool]:
    """Which kernels of this library have names that begin so."""
    return lambda name: f"::{part}" in name and "internode_ll" not in name


def kernel_times(team: Team, meeting: Meeting, call: Callable[[], None], part: str, rounds: int) -> list[float]:
    """Times in us of the call's kernels of this library whose names begin with `part`."""
    return sums(profiled(team, meeting, call, rounds, kernel_named(part)))


def _nccl(team: Team, rows: Rows, x: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """All-to-all of the rows, already in order, there and back."""
    out = x.view(torch.int32).index_select(0, rows.tokens)
    there = torch.empty((sum(rows.received), out.shape[1]), dtype=out.dtype, device=out.device)
    back = torch.empty_like(out)
    group = team.rival or team.group

    def forth() -> None:
        dist.all_to_all_single(there, out, rows.received, rows.sent, group=group)

    def home() -> None:
        dist.all_to_all_single(back, there, rows.sent, rows.received, group=group)

    return forth, home


def inputs_of_kinds(team: Team, case: Case) -> dict[str, Input]:
    """The rank's tokens in both formats."""
    fp8 = Case(case.ranks, case.tokens, case.hidden, fp8=True)
    return {"BF16": make_input(case, team.rank).to(team.device), "FP8": make_input(fp8, team.rank).to(team.device)}


def entry(operation: str, kind: str, path: str, sms: int, times: list[float]) -> dict[str, Any]:
    """Times in us of a row of the table."""
    return {"operation": operation, "kind": kind, "path": path, "sms": sms, "times": times}


def measure_views(team: Team, case: Case, rounds: int) -> list[dict[str, Any]]:
    """Times in us of layout + dispatch as the host sees them. Comes before any profile: that slows later launches."""
    found = []
    for path in ("direct", "copied"):
        buffer = make_buffer(team, case, direct=path == "direct")
        meeting = Meeting(team, buffer, cold=True)
        for kind, data in inputs_of_kinds(team, case).items():
            calls = Calls(buffer, data, 0)
            times = host_view(team, meeting, calls.layout_and_dispatch, rounds)
            found.append(entry("layout + dispatch", kind, calls.path(), 0, times))
        team.barrier()
        buffer.destroy()
    return found


def measure(team: Team, case: Case, rounds: int) -> dict[str, Any]:
    """Times in us of the slowest rank, by (operation, format, path, SMs), and the rows that leave the busiest rank."""
    inputs = inputs_of_kinds(team, case)
    rows = Rows.of(team, inputs["BF16"])
    worst = max(team.gather(sum(rows.received)))
    leaving = max(team.gather(sum(rows.sent) - rows.sent[team.rank]))
    found: list[dict[str, Any]] = []
    for path in ("direct", "copied"):
        buffer = make_buffer(team, case, direct=path == "direct")
        meeting = Meeting(team, buffer, cold=True)
        for kind, data in inputs.items():
            calls = Calls(buffer, data, worst)
            for sms in DISPATCH_SMS[kind, path]:
                times = kernel_times(team, meeting, calls.dispatch(sms), "dispatch", rounds)
                found.append(entry("dispatch", kind, calls.path(), sms, times))
            if path == "direct" and kind == "BF16":
                found += _combine_and_small(team, meeting, calls, rounds)
        if path == "direct":
            found += _rivals(team, meeting, rows, inputs)
        team.barrier()
        buffer.destroy()
    return {"case": f"{case.ranks} x {case.tokens} x {case.hidden}", "rows": leaving, "found": found}


def _rivals(team: Team, meeting: Meeting, rows: Rows, inputs: dict[str, Input]) -> list[dict[str, Any]]:
    """NCCL's kernels: FP8 rows there, BF16 rows there and back."""
    found = []
    for kind, data in inputs.items():
        for name, call in zip(("dispatch", "combine"), _nccl(team, rows, data.parts[0]), strict=True):
            if (name, kind) != ("combine", "FP8"):
                times = sums(profiled(team, meeting, call, NCCL_ROUNDS, lambda kernel: "nccl" in kernel))
                found.append(entry(name, kind, "nccl", 0, times))
    return found


def _combine_and_small(team: Team, meeting: Meeting, calls: Calls, rounds: int) -> list[dict[str, Any]]:
    """Combine, and the kernels around dispatch."""

    def layout() -> None:
        calls.buffer.get_dispatch_layout(calls.data.experts, EXPERTS)

    def timed(call: Callable[[], None], part: str) -> list[float]:
        return kernel_times(team, meeting, call, part, rounds)

    found = [entry("combine", "BF16", "", sms, timed(calls.combine(sms), "combine")) for sms in COMBINE_SMS]
    found.append(entry("layout", "", "", 0, timed(layout, "layout")))
    return [*found, entry("notify", "", "", 0, timed(calls.dispatch(20), "notify"))]
