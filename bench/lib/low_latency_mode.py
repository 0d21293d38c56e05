"""Low-latency mode: dispatch, combine and the round trip of a decoding step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import deep_ep
from lib.normal_mode import EXPERTS, Case, make_input
from lib.ranks import Team, time_rounds


def make_buffer(team: Team, case: Case, experts: int = EXPERTS, **options: Any) -> deep_ep.Buffer:
    """A buffer for low-latency calls of this shape."""
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(case.tokens, case.hidden, case.ranks, experts)
    options = {"low_latency_mode": True, "explicitly_destroy": True, "engine": team.engine, **options}
    return deep_ep.Buffer(team.group, 0, size, **options)


def measure(team: Team, case: Case, rounds: int) -> dict[str, Any]:
    """Times in us of the slowest rank: dispatch (FP8, BF16), combine, and the round trip with FP8."""
    data = make_input(case, team.rank)
    assert isinstance(data.x, torch.Tensor)
    x, experts, weights = data.x, data.experts, data.weights
    buffer = make_buffer(team, case, preinitialize=True)
    # What the experts would return: the rows as they came, in BF16. Uniform over calls, so that nothing is timed here.
    answers, _, handle, _, _ = buffer.low_latency_dispatch(x, experts, case.tokens, EXPERTS, use_fp8=False)
    out = torch.empty_like(x)

    def dispatch(fp8: bool) -> Callable[[], None]:
        def call() -> None:
            nonlocal handle
            handle = buffer.low_latency_dispatch(x, experts, case.tokens, EXPERTS, use_fp8=fp8)[2]

        return call

    def combine() -> None:
        buffer.low_latency_combine(answers, experts, weights, handle, out=out)

    def round_trip() -> None:
        dispatch(True)()
        combine()

    calls = {
        "dispatch FP8": dispatch(True),
        "dispatch BF16": dispatch(False),
        "combine BF16": combine,
        "round trip": round_trip,
    }
    times = time_rounds(team, calls, rounds, warmup=5)
    buffer.destroy()
    return {"case": f"{case.ranks} x {case.tokens} x {case.hidden}", "times": times}
