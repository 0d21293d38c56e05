"""V2's face: what its Python calls cost, and a decoding round of dispatch and combine in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import deep_ep
from lib.kernel_clock import Meeting
from lib.normal_kernels import entry, kernel_times
from lib.normal_mode import EXPERTS, TOP_K, Case, make_input
from lib.overlap import replayed
from lib.python_calls import call_times
from lib.ranks import Team
from lib.tables import Table, duration, spread

Call = Callable[[], Any]
KERNEL_SMS = {"plain": (20, 24), "expanded": (24,)}


class Batch:
    """A rank's tokens, and V2's calls with them. The newest outputs are kept, as a layer keeps them."""

    def __init__(self, team: Team, case: Case, expand: bool) -> None:
        data = make_input(case, team.rank).to(team.device)
        self.x, self.idx, self.weights, self._expand = data.x, data.experts, data.weights, expand
        self.buffer = deep_ep.ElasticBuffer(
            team.group, num_max_tokens_per_rank=case.tokens, hidden=case.hidden, num_topk=TOP_K,
            explicitly_destroy=True, engine=team.engine,
        )  # fmt: skip
        self.received: Any = None
        self.handle: Any = None
        self.rows = torch.empty(0)

    def dispatch(self, **options: Any) -> None:
        """Of the tokens."""
        self.received, _, _, self.handle, _ = self.buffer.dispatch(
            self.x, self.idx, self.weights, num_experts=EXPERTS, do_expand=self._expand, **options
        )

    def again(self) -> None:
        """The same by the handle."""
        self.received = self.buffer.dispatch(self.x, handle=self.handle, do_expand=self._expand)[0]

    def make_rows(self) -> None:
        """What the experts would return for the rows of the last dispatch."""
        rows = self.received[0] if isinstance(self.received, tuple) else self.received
        self.rows = torch.ones(rows.shape, dtype=torch.bfloat16, device=rows.device)

    def combine(self, **options: Any) -> Any:
        """Of these."""
        return self.buffer.combine(self.rows, self.handle, **options)

    def destroy(self, team: Team) -> None:
        """Collective: the buffer, which no rank uses any more."""
        team.barrier()
        self.received = self.handle = None
        self.buffer.destroy()


def _times_of_calls(team: Team, case: Case, expand: bool, rounds: int) -> dict[str, dict[str, list[float]]]:
    batch = Batch(team, case, expand)
    batch.dispatch()
    meeting = Meeting(team, batch.buffer, cold=False)

    def exact() -> None:
        batch.dispatch()
        batch.make_rows()

    calls: dict[str, Call] = {
        "dispatch without CPU sync": lambda: batch.dispatch(do_cpu_sync=False),
        "dispatch (waits for counts)": batch.dispatch,
        "dispatch with a handle": batch.again,
        "combine": batch.combine,
    }
    found = {}
    for name, call in calls.items():
        exact()
        found[name] = call_times(team, meeting, call, rounds)
    batch.destroy(team)
    return found


def _decode_round(team: Team, case: Case, expand: bool, rounds: int) -> float:
    """Time in us of an FP8 dispatch without CPU sync and a BF16 combine, in a graph of several of these."""
    batch = Batch(team, Case(case.ranks, case.tokens, case.hidden, fp8=True), expand)
    meeting = Meeting(team, batch.buffer, cold=False)
    batch.dispatch(do_cpu_sync=False)
    batch.make_rows()

    def one() -> None:
        batch.dispatch(do_cpu_sync=False)
        batch.combine()

    found = replayed(team, meeting, one, rounds)
    batch.destroy(team)
    return found


def measure_kernels(team: Team, case: Case, rounds: int) -> list[dict[str, Any]]:
    """Times in us of the slowest rank: the kernels of dispatch (FP8 with scales by columns; without that of the counts)
    and combine."""
    found = []
    for layout, choices in KERNEL_SMS.items():
        for kind in ("FP8", "BF16"):
            batch = Batch(team, Case(case.ranks, case.tokens, case.hidden, fp8=kind == "FP8"), layout == "expanded")
            for operation, sms, times in _times_of_kernels(team, batch, kind, choices, rounds):
                found.append(entry(operation, kind, f"V2 {layout}", sms, times))
            batch.destroy(team)
    return found


def _times_of_kernels(
    team: Team, batch: Batch, kind: str, choices: tuple[int, ...], rounds: int
) -> Iterator[tuple[str, int, list[float]]]:
    meeting = Meeting(team, batch.buffer, cold=True)

    def timed(operation: str, call: Call) -> list[float]:
        return kernel_times(team, meeting, call, operation, rounds)

    for sms in choices:
        options = {"num_sms": sms, "use_tma_aligned_col_major_sf": kind == "FP8"}
        yield "dispatch", sms, timed("dispatch", partial(batch.dispatch, do_cpu_sync=False, **options))
        if kind == "BF16":
            batch.dispatch(**options)
            batch.make_rows()
            yield "combine", sms, timed("combine", partial(batch.combine, num_sms=sms))


def measure(team: Team, case: Case, decoding: Case, rounds: int) -> dict[str, Any]:
    """Times in us of the slowest rank, for the plain and the expanded layout."""
    layouts = {"plain": False, "expanded": True}
    return {
        "calls": {name: _times_of_calls(team, case, expand, rounds) for name, expand in layouts.items()},
        "decode": {name: _decode_round(team, decoding, expand, rounds) for name, expand in layouts.items()},
        "case": f"{case.tokens} x {case.hidden}",
        "decoding": f"{decoding.tokens} x {decoding.hidden}",
    }


def table(found: dict[str, Any]) -> Table:
    """What V2's calls cost."""
    result = Table(
        "V2's Python calls",
        f"As above, {found['case']} BF16, top-8 of 256 experts; medians of the slowest rank, p99 in brackets. Decoding "
        f"round: FP8 dispatch without CPU sync and BF16 combine of {found['decoding']}, a round's time in a graph of "
        "several by events.",
        ["call", "returns", "done"],
    )
    for layout, calls in found["calls"].items():
        for name, times in calls.items():
            cells = [spread(times[what]) for what in ("call", "done")]
            result.rows.append([f"{name}, {layout}", *cells])
    for layout, us in found["decode"].items():
        result.rows.append([f"decoding round in a graph, {layout}", "", duration(us)])
    return result
