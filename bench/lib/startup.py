"""What start-up costs: construction, the first call, and the steady call, with and without preparation.

Construction is timed without the time inside the caller's own group exchange (torch's all_gather_object), which is
torch's and includes waiting for slower ranks; it is given beside it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import deep_ep
from lib import low_latency_mode
from lib.normal_mode import EXPERTS, TOP_K, Case, make_input
from lib.ranks import Team
from lib.tables import median

STEADY_CALLS = 20
# What Buffer() is told beside the sizes, and whether warmup() follows.
VARIANTS: dict[str, tuple[dict[str, bool], bool]] = {
    "plain": ({}, False),
    "preinitialize": ({"preinitialize": True}, False),
    "preinitialize + warmup": ({"preinitialize": True}, True),
}
# V2's constructor has no such options.
ELASTIC = {"plain": VARIANTS["plain"], "warmup": ({}, True)}
BACKGROUND: dict[str, tuple[dict[str, bool], bool]] = {
    "background": ({"preinitialize": True, "background": True}, False),
    "background + warmup": ({"preinitialize": True, "background": True}, True),
}


@dataclass
class Clock:
    """Seconds spent in the caller's group exchange."""

    seconds: float = 0.0


@contextmanager
def exchange_clock() -> Iterator[Clock]:
    """Times torch.distributed.all_gather_object, which the constructor calls."""
    clock, original = Clock(), dist.all_gather_object

    def timed(*args: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **keywords)
        finally:
            clock.seconds += time.perf_counter() - start

    dist.all_gather_object = timed
    try:
        yield clock
    finally:
        dist.all_gather_object = original


def normal_buffer(team: Team, case: Case, **options: Any) -> deep_ep.Buffer:
    """A buffer for normal-mode calls of this shape."""
    config = deep_ep.Buffer.get_dispatch_config(case.ranks)
    size = config.get_nvl_buffer_size_hint(case.hidden * 2, case.ranks)
    return deep_ep.Buffer(team.group, size, explicitly_destroy=True, engine=team.engine, **options)


def normal_call(buffer: deep_ep.Buffer, team: Team, case: Case) -> Callable[[], None]:
    """Layout, dispatch and combine."""
    data = make_input(case, team.rank).to(team.device)

    def call() -> None:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(data.experts, EXPERTS)
        rows, _, _, _, handle, _ = buffer.dispatch(
            data.x,
            topk_idx=data.experts,
            topk_weights=data.weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        buffer.combine(rows, handle)

    return call


@functools.cache
def experts_answers(case: Case, device: torch.device) -> torch.Tensor:
    """What experts would return, in memory that was touched before: its page faults are not the library's."""
    shape = (EXPERTS // case.ranks, case.ranks * case.tokens, case.hidden)
    return torch.full(shape, 0.5, dtype=torch.bfloat16, device=device)


def low_latency_call(buffer: deep_ep.Buffer, team: Team, case: Case) -> Callable[[], None]:
    """Dispatch with FP8 and combine."""
    data = make_input(case, team.rank).to(team.device)
    assert isinstance(data.x, torch.Tensor)
    x, answers = data.x, experts_answers(case, team.device)

    def call() -> None:
        handle = buffer.low_latency_dispatch(x, data.experts, case.tokens, EXPERTS)[2]
        buffer.low_latency_combine(answers, data.experts, data.weights, handle)

    return call


def elastic_buffer(team: Team, case: Case) -> deep_ep.ElasticBuffer:
    """A buffer of V2 for this shape."""
    return deep_ep.ElasticBuffer(
        team.group, num_max_tokens_per_rank=case.tokens, hidden=case.hidden, num_topk=TOP_K, explicitly_destroy=True,
        engine=team.engine,
    )  # fmt: skip


def elastic_call(buffer: deep_ep.ElasticBuffer, team: Team, case: Case) -> Callable[[], None]:
    """V2's dispatch, which waits for the counts, and combine."""
    data = make_input(case, team.rank).to(team.device)

    def call() -> None:
        rows, _, _, handle, _ = buffer.dispatch(data.x, data.experts, data.weights, num_experts=EXPERTS)
        buffer.combine(rows, handle)

    return call


@dataclass(frozen=True)
class Mode:
    """How a buffer is made, called and warmed."""

    name: str
    make: Callable[..., Any]
    call: Callable[[Any, Team, Case], Callable[[], None]]
    warm: Callable[[Any, Case], Any]


NORMAL = Mode(
    "normal", normal_buffer, normal_call, lambda buffer, case: buffer.warmup(case.tokens, case.hidden, TOP_K, EXPERTS)
)
LOW_LATENCY = Mode(
    "low latency", low_latency_mode.make_buffer, low_latency_call,
    lambda buffer, case: buffer.warmup(0, case.hidden, TOP_K, EXPERTS, num_max_dispatch_tokens_per_rank=case.tokens),
)  # fmt: skip
V2 = Mode("V2", elastic_buffer, elastic_call, lambda buffer, _: buffer.warmup(EXPERTS))


def measure_once(
    team: Team,
    case: Case,
    mode: Mode,
    options: dict[str, bool],
    warm: bool,
    more: Callable[[deep_ep.Buffer, Callable[[], None]], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Figures in us of the slowest rank, from one buffer's life. `more` adds to them before the buffer's end."""
    seconds: dict[str, float] = {}
    team.meet()
    with exchange_clock() as clock:
        start = time.perf_counter()
        buffer = mode.make(team, case, **options)
        seconds["construct"] = time.perf_counter() - start - clock.seconds
    seconds["exchange"] = clock.seconds
    start = time.perf_counter()
    if "background" in options:
        buffer.wait_ready()
    seconds["ready"] = time.perf_counter() - start
    call = mode.call(buffer, team, case)
    start = time.perf_counter()
    if warm:
        mode.warm(buffer, case)
        team.finish()
    seconds["warmup"] = time.perf_counter() - start if warm else 0.0
    rounds = []
    for _ in range(1 + STEADY_CALLS):
        team.meet()
        start = time.perf_counter()
        call()
        team.finish()
        rounds.append(time.perf_counter() - start)
    added = more(buffer, call) if more else {}
    slowest = team.slowest([*seconds.values(), *rounds])
    buffer.destroy()
    figures = dict(zip([*seconds, "first"], slowest, strict=False))
    # The first rounds of the process's own warming (allocator, caches) are not steady yet.
    figures["steady"] = median(slowest[len(seconds) + 1 + STEADY_CALLS // 4 :])
    return {name: value * 1e6 for name, value in (figures | added).items()}


def measure(
    team: Team,
    case: Case,
    mode: Mode,
    repeats: int,
    variants: dict[str, tuple[dict[str, bool], bool]] = VARIANTS,
    more: Callable[[deep_ep.Buffer, Callable[[], None]], dict[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """Medians over `repeats` buffers of each variant; the variants take turns."""
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for _ in range(repeats):
        for variant, (options, warm) in variants.items():
            found[variant].append(measure_once(team, case, mode, options, warm, more if warm else None))
    return [
        {"mode": mode.name, "variant": variant, **{key: median([life[key] for life in lives]) for key in lives[0]}}
        for variant, lives in found.items()
    ]
