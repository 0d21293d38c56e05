"""What a user's call costs: time on the host until a Python call returns, and until the device is done.

Beside it in the same processes: a launch, an allocation and NCCL's all_to_all_single; and the dense way of moving
tokens to all experts, without deep_ep: every rank gathers all tokens, and partial sums are reduced and scattered.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lib.call_clock import WARMUP, clocked
from lib.kernel_clock import Meeting, host_view
from lib.low_latency_kernels import Step
from lib.normal_kernels import Calls as NormalCalls
from lib.normal_kernels import Rows, make_buffer
from lib.normal_mode import Case, make_input
from lib.ranks import Team

DENSE_TOKENS = (1, 16, 64, 128, 512, 1024, 4096)
REPLAYS = 20
BUSY = "beside a busy thread"
BUSY_ROUNDS = 30  # such a call may take tens of milliseconds
Call = Callable[[], Any]
Times = dict[str, dict[str, list[float]]]


def _make_calls(team: Team, case: Case) -> NormalCalls:
    """Normal mode's calls of one batch, as training and prefill make them; rows go straight to their places."""
    data = make_input(case, team.rank).to(team.device)
    worst = max(team.gather(sum(Rows.of(team, data).received)))
    return NormalCalls(make_buffer(team, case, direct=True), data, worst)


def _combine(normal: NormalCalls) -> Any:
    """Of the rows that the last dispatch delivered."""
    return normal.buffer.combine(normal.result[0], normal.result[4])


def _calls(team: Team, normal: NormalCalls, step: Step) -> dict[str, Call]:
    """The measured calls, in the order of a model's layer."""
    layout = normal.layout
    normal.issue(layout)
    handle = normal.result[4]
    rows = Rows.of(team, normal.data)
    assert isinstance(normal.data.x, torch.Tensor)
    out = normal.data.x.view(torch.int32).index_select(0, rows.tokens)
    there = torch.empty((sum(rows.received), out.shape[1]), dtype=out.dtype, device=out.device)
    group = team.rival or team.group
    one = torch.zeros(1, device=team.device)

    def cached() -> None:
        normal.result = None
        normal.result = (*normal.buffer.dispatch(normal.data.x, handle=handle)[:4], handle, None)

    return {
        "get_dispatch_layout": normal.make_layout,
        "dispatch (waits for counts)": lambda: normal.issue(layout),
        "dispatch, num_worst_tokens": lambda: normal.issue(layout, normal.worst),
        "dispatch, cached handle": cached,
        "combine": lambda: _combine(normal),
        "low-latency dispatch FP8": lambda: step.dispatch(weights=False),
        "low-latency combine": lambda: step.combine(),
        "torch.empty": lambda: torch.empty((128, 7168), dtype=torch.bfloat16, device=team.device),
        "a launch (add_ of one number)": lambda: one.add_(1),
        "all_to_all_single of the rows": lambda: dist.all_to_all_single(
            there, out, rows.received, rows.sent, group=group
        ),
    }


@contextmanager
def _busy_thread() -> Iterator[None]:
    """A second thread that holds the interpreter whenever it can, as another micro-batch's does."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def call_times(team: Team, meeting: Meeting, call: Call, rounds: int) -> dict[str, list[float]]:
    """Times in us of the slowest rank: "call" until a call returns, "done" until the device is done."""
    returned, done = clocked(meeting.on_host, call, team.finish, rounds)
    return {"call": team.slowest(returned), "done": team.slowest(done)}


def measure(team: Team, case: Case, decoding: Case, rounds: int) -> dict[str, Any]:
    """Times in us of the slowest rank: {how: {call: {"call": until it returns, "done": until the device is done}}}."""
    normal, step = _make_calls(team, case), Step(team, decoding)
    step.dispatch(weights=False)
    meeting = Meeting(team, normal.buffer, cold=False)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "": nullcontext,
        "under set_default_device": lambda: torch.device(team.device),
        BUSY: _busy_thread,
    }
    found = {}
    for way, context in ways.items():
        times: Times = {}
        for name, call in _calls(team, normal, step).items():
            with context():
                times[name] = call_times(team, meeting, call, min(rounds, BUSY_ROUNDS) if way == BUSY else rounds)
        found[way] = times
    team.barrier()
    normal.buffer.destroy()
    step.buffer.destroy()
    shapes = {"normal": f"{case.tokens} x {case.hidden}", "decoding": f"{decoding.tokens} x {decoding.hidden}"}
    return {"ways": found, "switch": sys.getswitchinterval(), **shapes}


def _in_graph(team: Team, meeting: Meeting, call: Call) -> list[float]:
    """Times in us of a graph's replays, by events, of the slowest rank."""
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    team.finish()
    with torch.cuda.graph(graph):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    own = []
    for number in range(3 + REPLAYS):
        meeting.on_device()
        begin.record()
        graph.replay()
        end.record()
        team.finish()
        if number >= 3:
            own.append(begin.elapsed_time(end) * 1e3)
    return team.slowest(own)


def measure_dense(team: Team, hidden: int, most: int, rounds: int) -> list[dict[str, Any]]:
    """Layout, dispatch and combine beside the dense way, in us: host view, and in a graph (ours: num_worst_tokens)."""
    if team.rival is None:
        return []
    found = []
    for tokens in [n for n in DENSE_TOKENS if n <= most]:
        ours = _make_calls(team, Case(team.size, tokens, hidden))
        meeting = Meeting(team, ours.buffer, cold=False)
        x, experts, weights = ours.data.x, ours.data.experts, ours.data.weights
        assert isinstance(x, torch.Tensor)
        gathered = [torch.empty((team.size * tokens, *part.shape[1:]), dtype=part.dtype, device=part.device)
                    for part in (x, experts, weights)]  # fmt: skip
        back = torch.empty_like(x)

        def dense(parts: Any = (x, experts, weights), gathered: Any = gathered, back: torch.Tensor = back) -> None:
            for all_ranks, own in zip(gathered, parts, strict=True):
                dist.all_gather_into_tensor(all_ranks, own, group=team.rival)
            dist.reduce_scatter_tensor(back, gathered[0], group=team.rival)

        def there_and_back(ours: NormalCalls = ours, worst: int = 0) -> None:
            ours.issue(ours.make_layout(), worst)
            _combine(ours)

        entry: dict[str, Any] = {"tokens": tokens}
        entry["ours"] = host_view(team, meeting, there_and_back, rounds, WARMUP)
        entry["dense"] = host_view(team, meeting, dense, rounds, WARMUP)
        entry["ours, graph"] = _in_graph(team, meeting, partial(there_and_back, worst=ours.worst))
        entry["dense, graph"] = _in_graph(team, meeting, dense)
        found.append(entry)
        team.barrier()
        ours.result = None
        ours.buffer.destroy()
    return found
