"""Low-latency mode on GPUs: kernels, halves, a graph's round, NCCL for the same rows, and the CPU time of the calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import deep_ep
from lib.kernel_clock import PAUSE_CYCLES, Meeting, host_view, profiled, sums
from lib.low_latency_mode import make_buffer
from lib.normal_kernels import Rows
from lib.normal_mode import EXPERTS, Case, make_input
from lib.ranks import Team
from lib.tables import median

GRAPH_ROUNDS = 20  # dispatch + combine in one graph
HOST_BURST = 8  # calls before the host waits for the device: its queue is never full


class Step:
    """A decoding step's calls, with their tensors."""

    def __init__(self, team: Team, case: Case) -> None:
        self.team, self.case = team, case
        self.data = make_input(case, team.rank).to(team.device)
        assert isinstance(self.data.x, torch.Tensor)
        self.x = self.data.x
        self.buffer = make_buffer(team, case, preinitialize=True)
        self.answers = torch.full(
            (EXPERTS // case.ranks, case.ranks * case.tokens, case.hidden),
            0.5,
            dtype=torch.bfloat16,
            device=team.device,
        )
        self.out = torch.empty_like(self.x)
        self.handle: Any = None

    def dispatch(self, fp8: bool = True, weights: bool = True, **options: Any) -> Any:
        """Issues a dispatch and keeps its handle; returns what the call returned."""
        told = self.data.weights if weights else None
        result = self.buffer.low_latency_dispatch(
            self.x, self.data.experts, self.case.tokens, EXPERTS, use_fp8=fp8, topk_weights=told, **options
        )
        self.handle = result[2]
        return result

    def combine(self, **options: Any) -> Any:
        """Issues the combine of the last dispatch's handle."""
        return self.buffer.low_latency_combine(
            self.answers, self.data.experts, self.data.weights, self.handle, out=self.out, **options
        )


def _in_halves(step: Step, call: Callable[..., Any]) -> Callable[[], None]:
    """Send, a pause in which the rows cross, receive."""

    def run() -> None:
        hook = call(return_recv_hook=True)[-1]
        if step.team.device.type == "cuda":
            torch.cuda._sleep(PAUSE_CYCLES // 4)  # type: ignore[no-untyped-call]
        hook()

    return run


def _kernel_times(step: Step, meeting: Meeting, rounds: int) -> dict[str, list[float]]:
    """Each call's kernel time."""
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "dispatch FP8": (lambda: step.dispatch(weights=False), "dispatch"),
        "dispatch FP8, weights sent along": (step.dispatch, "dispatch"),
        "dispatch BF16": (lambda: step.dispatch(fp8=False, weights=False), "dispatch"),
        "combine BF16, weights known": (step.combine, "combine"),
        "combine BF16": (step.combine, "combine"),
        "combine BF16, a row an expert": (lambda: step.combine(unreduced=True), "combine"),
        "combine LogFMT": (lambda: step.combine(use_logfmt=True), "combine"),
    }
    found = {}
    for name, (call, part) in calls.items():
        if part == "combine":  # whether the experts' ranks know the weights is the last dispatch's doing
            step.dispatch(weights=name.endswith("known"))
        found[name] = sums(profiled(step.team, meeting, call, rounds, lambda kernel, part=part: f"::{part}" in kernel))  # type: ignore[misc]
    halves: dict[str, tuple[Callable[..., Any], str]] = {
        "dispatch FP8": (lambda **o: step.dispatch(weights=False, **o), "dispatch"),
        "combine BF16": (step.combine, "combine"),
    }
    for name, (call, part) in halves.items():
        run = _in_halves(step, call)
        lists = profiled(step.team, meeting, run, rounds, lambda kernel, part=part: f"::{part}" in kernel)  # type: ignore[misc]
        found |= {f"{name}, send": lists[0], f"{name}, receive": lists[-1], f"{name}, both halves": sums(lists)}
    return found


def _graph_times(step: Step, meeting: Meeting, replays: int) -> dict[str, list[float]]:
    """A round's share of a graph of many, by events around the replay. Nothing without a GPU."""
    if step.team.device.type != "cuda":
        return {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_ROUNDS):
            step.dispatch()
            step.combine()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    own = []
    for number in range(3 + replays):
        meeting.on_device()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            own.append(begin.elapsed_time(end) * 1e3 / GRAPH_ROUNDS)
    step.team.barrier()
    return {"dispatch FP8 + combine in a graph": step.team.slowest(own)}


def _nccl_times(step: Step, meeting: Meeting, rounds: int) -> dict[str, list[float]]:
    """All-to-all of the BF16 rows, one for each (token, rank)."""
    rows = Rows.of(step.team, step.data)
    out = step.x.view(torch.int32).index_select(0, rows.tokens)
    there = torch.empty((sum(rows.received), out.shape[1]), dtype=out.dtype, device=out.device)
    group = step.team.rival or step.team.group

    def call() -> None:
        dist.all_to_all_single(there, out, rows.received, rows.sent, group=group)

    return {"NCCL all_to_all, BF16": sums(profiled(step.team, meeting, call, rounds, lambda kernel: "nccl" in kernel))}


def measure(team: Team, case: Case, rounds: int) -> dict[str, Any]:
    """Times in us of the slowest rank, and the rows that leave the busiest rank."""
    step = Step(team, case)
    meeting = Meeting(team, step.buffer, cold=False)
    # The profiler comes last: it slows launches for good.
    views = {"host view: dispatch FP8": host_view(team, meeting, step.dispatch, min(rounds, 200))}
    views |= _graph_times(step, meeting, max(1, rounds // GRAPH_ROUNDS) * 2)
    times = _kernel_times(step, meeting, rounds) | _nccl_times(step, meeting, min(rounds, 200)) | views
    rows = Rows.of(team, step.data)
    leaving = max(team.gather(sum(rows.sent) - rows.sent[team.rank]))
    team.barrier()
    step.buffer.destroy()
    return {"case": f"{case.ranks} x {case.tokens} x {case.hidden}", "rows": leaving, "times": times}


def measure_host(team: Team, case: Case, calls: int) -> dict[str, list[float]]:
    """CPU times in us from call to return, of the rank whose median is greatest; the device is never far behind."""
    step = Step(team, case)
    step.dispatch()
    found: dict[str, list[float]] = {}
    cases: dict[str, Callable[[], Any]] = {
        "dispatch FP8": lambda: step.dispatch(weights=False),
        "dispatch FP8, weights sent along": step.dispatch,
        "combine": step.combine,
    }
    clock = time.perf_counter
    for name, call in cases.items():
        own = []
        for number in range(200 + calls):
            start = clock()
            call()
            own.append((clock() - start) * 1e6)
            if number % HOST_BURST == 0:
                team.finish()
        team.finish()
        team.barrier()
        found[name] = max(team.gather(own[200:]), key=median)
    step.buffer.destroy()
    return found


def first_capture(
    team: Team, buffer: deep_ep.Buffer, call: Callable[[], None], repeats: int = 8
) -> tuple[float, float]:
    """Seconds of the first capture of a call with its first replay, and the median of those after it."""
    own = []
    for _ in range(1 + repeats):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        buffer.barrier()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            start = time.perf_counter()
            graph.capture_begin()
            call()
            graph.capture_end()
            graph.replay()
            stream.synchronize()
            own.append(time.perf_counter() - start)
    slowest = team.slowest(own)
    return slowest[0], sorted(slowest[1:])[repeats // 2]
