"""How many SMs a normal-mode call should take: the library's choice beside 20 and beside a sweep, at several sizes."""

from __future__ import annotations

import os
from typing import Any

import torch

import deep_ep
from lib.kernel_clock import Meeting
from lib.normal_kernels import Calls, Rows, inputs_of_kinds, kernel_times, make_buffer
from lib.normal_mode import EXPERTS, TOP_K, Case
from lib.ranks import Team
from lib.tables import Table, duration, median, ratio

TOKENS = (64, 256, 1024, 4096)
SWEEP = (4, 6, 8, 10, 12, 14, 16, 20, 24, 32)
CHOICE, V1 = 0, 20  # a config of 0 SMs leaves the choice to the library


def measure(team: Team, hidden: int, rounds: int) -> list[dict[str, Any]]:
    """Kernel times in us of dispatch and combine by (tokens, format, path, SMs): the slowest rank's of each call."""
    found: list[dict[str, Any]] = []
    for tokens in TOKENS:
        case = Case(team.size, tokens, hidden)
        inputs = inputs_of_kinds(team, case)
        worst = max(team.gather(sum(Rows.of(team, inputs["BF16"]).received)))
        for direct in (True, False):
            planned = _plan(team, tokens, hidden, direct)
            buffer = make_buffer(team, case, direct=direct)
            meeting = Meeting(team, buffer, cold=True)
            for kind, data in inputs.items():
                calls = Calls(buffer, data, worst)
                chosen = planned.dispatch_sms_fp8 if kind == "FP8" else planned.dispatch_sms_bf16
                for sms in (CHOICE, *SWEEP):
                    times = kernel_times(team, meeting, calls.dispatch(sms), "dispatch", rounds)
                    entry = {"operation": "dispatch", "kind": kind, "path": calls.path(), "tokens": tokens, "sms": sms}
                    found.append(entry | {"times": times, "chosen": chosen})
                if direct and kind == "BF16":
                    for sms in (CHOICE, *SWEEP):
                        times = kernel_times(team, meeting, calls.combine(sms), "combine", rounds)
                        entry = {"operation": "combine", "kind": kind, "path": "", "tokens": tokens, "sms": sms}
                        found.append(entry | {"times": times, "chosen": planned.combine_sms})
            team.barrier()
            buffer.destroy()
    return found


def _plan(team: Team, tokens: int, hidden: int, direct: bool) -> deep_ep.Plan:
    """The library's choice for this machine's GPUs, for rows straight to their places or through staging memory."""
    capability = None
    if team.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(team.device)
        capability = 10 * major + minor
    before = os.environ.get("DEEPEP_ZERO_COPY_BYTES")
    os.environ["DEEPEP_ZERO_COPY_BYTES"] = str(512 << 20 if direct else 0)
    try:
        return deep_ep.plan(
            team.size, num_tokens=tokens, hidden=hidden, num_topk=TOP_K, num_experts=EXPERTS, engine=team.engine,
            num_nvl_peers=team.size, compute_capability=capability,
        )  # fmt: skip
    finally:
        if before is None:
            del os.environ["DEEPEP_ZERO_COPY_BYTES"]
        else:
            os.environ["DEEPEP_ZERO_COPY_BYTES"] = before


def table(found: list[dict[str, Any]], hidden: int, rounds: int) -> Table:
    """The choice, 20 SMs and the best of the sweep, for each call."""
    shown = Table(
        f"SMs of normal mode, hidden {hidden}",
        "Kernel time by torch's profiler, L2 cold, all ranks begin together; the slowest rank of each of "
        f"{rounds} calls, median. Choice: what the library takes where nobody gives a number (SMs by deep_ep.plan). "
        f"Best: of {', '.join(map(str, SWEEP))} SMs; fewest: the smallest number within 3 % of it.",
        ["call", "tokens", "choice", "time", f"{V1} SMs", "best", "time", "fewest", "choice ÷ best", f"choice ÷ {V1}"],
    )
    calls: dict[tuple[str, int], dict[int, float]] = {}
    chosen: dict[tuple[str, int], int] = {}
    for entry in found:
        name = " ".join(filter(None, (entry["operation"], entry["kind"], entry["path"])))
        calls.setdefault((name, entry["tokens"]), {})[entry["sms"]] = median(entry["times"])
        chosen[(name, entry["tokens"])] = entry["chosen"]
    for (name, tokens), times in calls.items():
        best = min(SWEEP, key=lambda sms: times[sms])
        fewest = min(sms for sms in SWEEP if times[sms] <= 1.03 * times[best])
        shown.rows.append(
            [name, str(tokens), str(chosen[(name, tokens)]), duration(times[CHOICE]), duration(times[V1]), str(best),
             duration(times[best]), str(fewest), ratio(times[CHOICE], times[best]), ratio(times[CHOICE], times[V1])]
        )  # fmt: skip
    return shown
