"""What a GEMM and a transfer cost each other when they run at the same time.

Normal mode: transfers on a stream of their own beside one GEMM, which they outlast. Low latency: GEMMs between the two
halves of a call, in a graph. The GEMM stands for the experts or the attention of the other micro-batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

import deep_ep
from lib.kernel_clock import Meeting, host_view
from lib.low_latency_kernels import Step
from lib.normal_kernels import Calls, make_buffer
from lib.normal_mode import Case, make_input
from lib.ranks import Team
from lib.tables import Table, duration, median

NORMAL_TOKENS = (512, 4096)
NORMAL_SMS = (4, 8, 12, 16, 20, 24)
NORMAL_GEMM = (4096, 7168, 4096)  # M, K, N
HALVES_TOKENS = (32, 128)
HALVES_GEMM = (512, 7168, 4096)
HALVES_GEMMS = (1, 2, 4)  # between the halves
WAYS = ("sm", "copy", "stream")  # of DEEPEP_LL_TRANSFER
REPEATS = 8  # of the pattern in a graph: its begin and end weigh little then
Call = Callable[[], Any]


def _gemm(team: Team, shape: tuple[int, int, int]) -> Call:
    """A BF16 product of this shape into memory of its own."""
    rows, inner, columns = shape
    a = torch.randn(rows, inner, device=team.device, dtype=torch.bfloat16)
    b = torch.randn(inner, columns, device=team.device, dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=team.device, dtype=torch.bfloat16)
    return lambda: torch.mm(a, b, out=out)


@contextmanager
def _leaving(sms: int) -> Iterator[None]:
    """The GEMM's library leaves so many SMs to others, where this torch can tell it."""
    tell = getattr(torch._C, "_set_sm_carveout_experimental", None)
    before = torch.backends.cuda.preferred_blas_library()
    if tell is not None:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        tell(sms)
    try:
        yield
    finally:
        if tell is not None:
            tell(None)
            torch.backends.cuda.preferred_blas_library(before)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) * 1e3


class _Beside:
    """Times of a GEMM on the current stream, of transfers on another one, and of the GEMM while they run."""

    def __init__(self, team: Team, meeting: Meeting, gemm: Call, rounds: int) -> None:
        self._team, self._meeting, self._gemm, self._rounds = team, meeting, gemm, rounds
        self._side = torch.cuda.Stream()

    def _median(self, once: Callable[[], float]) -> float:
        for _ in range(2):
            once()
        return median(self._team.slowest([once() for _ in range(self._rounds)]))

    def gemm_alone(self) -> float:
        def once() -> float:
            begin, end = _events()
            self._meeting.on_device()
            begin.record()
            self._gemm()
            end.record()
            self._team.finish()
            return _between(begin, end)

        return self._median(once)

    def _transfers(self, transfer: Call, count: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = _events()
        with torch.cuda.stream(self._side):
            begin.record()
            for _ in range(count):
                transfer()
            end.record()
        return begin, end

    def transfer_alone(self, transfer: Call, count: int) -> float:
        def once() -> float:
            self._meeting.on_device()
            self._side.wait_stream(torch.cuda.current_stream())
            begin, end = self._transfers(transfer, count)
            torch.cuda.current_stream().wait_stream(self._side)
            self._team.finish()
            return _between(begin, end) / count

        return self._median(once)

    def both(self, transfer: Call, count: int) -> tuple[float, float]:
        """The GEMM's time while `count` transfers run, which begin before it; and a transfer's."""
        transfers: list[float] = []

        def once() -> float:
            self._meeting.on_device()
            self._side.wait_stream(torch.cuda.current_stream())
            begin, end = self._transfers(transfer, count)
            first, last = _events()
            first.record()
            self._gemm()
            last.record()
            torch.cuda.current_stream().wait_stream(self._side)
            self._team.finish()
            transfers.append(_between(begin, end) / count)
            return _between(first, last)

        gemm = self._median(once)
        return gemm, median(self._team.slowest(transfers[2:]))


@contextmanager
def _setting(name: str, value: str) -> Iterator[None]:
    """An environment variable of the buffers that are made inside."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _copying_buffer(team: Team, case: Case) -> deep_ep.Buffer:
    """A buffer whose rows cross by copy engines: a rank's rows of two combines for each peer fit into the region."""
    with _setting("DEEPEP_NORMAL_TRANSFER", "copy"):
        buffer = deep_ep.Buffer(
            team.group,
            num_nvl_bytes=4 * case.ranks * (case.tokens * case.hidden * 2 + (1 << 20)),
            explicitly_destroy=True,
            preinitialize=True,
            engine=team.engine,
        )
    if buffer.normal_transfer != "copy":
        raise RuntimeError("no copy engines move the rows of this buffer")
    return buffer


def _normal_case(team: Team, case: Case, rounds: int, by: str) -> list[dict[str, Any]]:
    """Times in us of a GEMM and of calls with a cached handle, alone and at the same time, by SMs."""
    buffer = _copying_buffer(team, case) if by == "copy" else make_buffer(team, case, direct=True)
    calls = Calls(buffer, make_input(case, team.rank).to(team.device), 0)
    calls.layout_and_dispatch()
    rows, handle = calls.result[0], calls.result[4]
    beside = _Beside(team, Meeting(team, buffer, cold=False), _gemm(team, NORMAL_GEMM), rounds)
    alone, found = beside.gemm_alone(), []
    for sms in NORMAL_SMS:
        config = deep_ep.Config(sms)
        transfers: dict[str, Call] = {
            "dispatch": partial(buffer.dispatch, calls.data.x, handle=handle, config=config),
            "combine": partial(buffer.combine, rows, handle, config=config),
        }
        for name, transfer in transfers.items():
            own = beside.transfer_alone(transfer, 4)
            count = max(2, int(2 * alone / own) + 1)  # they outlast the GEMM, slower as both are
            gemm, beside_it = beside.both(transfer, count)
            with _leaving(sms):
                left = beside.both(transfer, count)[0]
            entry = {"operation": name, "by": by, "tokens": case.tokens, "sms": sms, "gemm": alone, "transfer": own}
            found.append(entry | {"gemm_beside": gemm, "gemm_leaving": left, "transfer_beside": beside_it})
    team.barrier()
    calls.result = None
    buffer.destroy()
    return found


def replayed(team: Team, meeting: Meeting, pattern: Call, rounds: int, after: Call = lambda: None) -> float:
    """Time in us of a pattern in a graph of several, by events around the replay. Without a GPU: by the host's clock.

    `after` issues what the last pattern has left.
    """
    if team.device.type != "cuda":
        found = median(host_view(team, meeting, pattern, rounds))
        after()
        return found
    pattern()
    after()
    graph = torch.cuda.CUDAGraph()
    team.finish()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            pattern()
        after()
    own = []
    for number in range(2 + rounds):
        begin, end = _events()
        meeting.on_device()
        begin.record()
        graph.replay()
        end.record()
        team.finish()
        if number >= 2:
            own.append(_between(begin, end) / REPEATS)
    team.barrier()
    return median(team.slowest(own))


def _around(send: Callable[[], Call], between: Call) -> None:
    receive = send()
    between()
    receive()


def _repeated(call: Call, count: int) -> None:
    for _ in range(count):
        call()


def rows_cross_by(transfer: str) -> AbstractContextManager[None]:
    """Low-latency calls in halves of buffers that are made inside run so: one of WAYS."""
    return _setting("DEEPEP_LL_TRANSFER", transfer)


def check_transfer(buffer: deep_ep.Buffer, transfer: str) -> None:
    """Raises RuntimeError if a buffer does not do what rows_cross_by asked of it."""
    if buffer.ll_transfer != transfer:
        raise RuntimeError(f"halves of this buffer run by {buffer.ll_transfer}, not by {transfer}")


def _halves_case(team: Team, case: Case, rounds: int, by: str) -> list[dict[str, Any]]:
    """Times in us of low-latency halves with GEMMs between them, of the GEMMs, and of the halves, in graphs."""
    with rows_cross_by(by):
        step = Step(team, case)
    check_transfer(step.buffer, by)
    found: list[dict[str, Any]] = []
    meeting, gemm = Meeting(team, step.buffer, cold=False), _gemm(team, HALVES_GEMM)
    halves: dict[str, Callable[[], Call]] = {
        "dispatch FP8": lambda: step.dispatch(return_recv_hook=True)[4],
        "dispatch BF16": lambda: step.dispatch(fp8=False, return_recv_hook=True)[4],
        "combine": lambda: step.combine(return_recv_hook=True)[2],
        "combine, weights known": lambda: step.combine(return_recv_hook=True)[2],
        "combine LogFMT": lambda: step.combine(use_logfmt=True, return_recv_hook=True)[2],
    }
    for name, send in halves.items():
        step.dispatch(weights=name == "combine, weights known")
        own = replayed(team, meeting, partial(_around, send, lambda: None), rounds)
        for count in HALVES_GEMMS:
            gemms = partial(_repeated, gemm, count)
            alone = replayed(team, meeting, gemms, rounds)
            both = replayed(team, meeting, partial(_around, send, gemms), rounds)
            entry = {"operation": name, "by": by, "tokens": case.tokens, "gemms": count}
            found.append(entry | {"gemm": alone, "halves": own, "both": both})
    team.barrier()
    step.buffer.destroy()
    return found


def tables(found: dict[str, list[dict[str, Any]]], rounds: int) -> list[Table]:
    """Of both modes."""
    m, k, n = NORMAL_GEMM
    normal = Table(
        "Normal mode beside a GEMM",
        f"BF16 GEMM of {m} x {k} x {n} on one stream, calls with a cached handle on another, which outlast it; times "
        f"by events, the slowest rank of each of {rounds} rounds, median. Leaving: cuBLAS is told to leave as many "
        "SMs as the call takes (torch._C._set_sm_carveout_experimental). By copy: DEEPEP_NORMAL_TRANSFER=copy.",
        [
            "call",
            "by",
            "tokens",
            "SMs",
            "GEMM",
            "beside",
            "slower by",
            "leaving",
            "slower by",
            "transfer",
            "beside",
            "slower by",
        ],
    )
    for e in found["normal"]:
        normal.rows.append(
            [e["operation"], e["by"], str(e["tokens"]), str(e["sms"]), duration(e["gemm"]), duration(e["gemm_beside"]),
             f"{e['gemm_beside'] / e['gemm'] - 1:.0%}", duration(e["gemm_leaving"]),
             f"{e['gemm_leaving'] / e['gemm'] - 1:.0%}", duration(e["transfer"]), duration(e["transfer_beside"]),
             f"{e['transfer_beside'] / e['transfer'] - 1:.0%}"]
        )  # fmt: skip
    m, k, n = HALVES_GEMM
    halves = Table(
        "Low-latency halves around GEMMs",
        f"BF16 GEMMs of {m} x {k} x {n} between the sending and the receiving half, in a graph of {REPEATS} of these; "
        f"a round's time by events, the slowest rank of each of {rounds} replays, median. Halves: without anything "
        "between them. Hidden: the part of the halves' time that the GEMMs' time covers. By: "
        "DEEPEP_LL_TRANSFER.",
        ["call", "by", "tokens", "GEMMs", "GEMMs alone", "halves alone", "together", "hidden"],
    )
    for e in found["halves"]:
        hidden = (e["gemm"] + e["halves"] - e["both"]) / e["halves"]
        halves.rows.append(
            [e["operation"], e["by"], str(e["tokens"]), str(e["gemms"]), duration(e["gemm"]), duration(e["halves"]),
             duration(e["both"]), f"{hidden:.0%}"]
        )  # fmt: skip
    return [normal, halves]


def measure(team: Team, hidden: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Both modes; nothing without a GPU."""
    if team.device.type != "cuda":
        return {"normal": [], "halves": []}
    normal = [
        _normal_case(team, Case(team.size, tokens, hidden), rounds, by)
        for tokens in NORMAL_TOKENS
        for by in ("sm", "copy")
    ]
    halves = [
        _halves_case(team, Case(team.size, tokens, hidden), rounds, by) for tokens in HALVES_TOKENS for by in WAYS
    ]
    return {"normal": sum(normal, []), "halves": sum(halves, [])}
