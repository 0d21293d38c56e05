"""What a low-latency call costs its caller outside the kernel, from Python, C and Go.

One rank, one token, asynchronous calls: the call checks its arguments, makes or recycles outputs, and hands the work to
the communication stream, whose thread runs the kernel. The time from call to return is thus the host's alone.

Calls come in bursts, with a pause between them in which that thread falls asleep. The first call of a burst has to wake
it, which is a system call and on a virtual machine a costly one; the others find it awake.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deep_ep
from lib.low_latency_mode import make_buffer
from lib.normal_mode import Case
from lib.ranks import Team

ROOT = Path(__file__).resolve().parents[2]
CASE = Case(ranks=1, tokens=1, hidden=128)
EXPERTS = 1
# host_cost.c and hostcost/main.go have these three too.
WARMUP_BURSTS = 50
BURST = 4
PAUSE_SECONDS = 200e-6


def measure_python(team: Team, calls: int) -> dict[str, list[float]]:
    """Times in us of each call, burst by burst: dispatch with FP8 outputs (recycled), and combine."""
    buffer = make_buffer(team, CASE, EXPERTS, preinitialize=True)
    x = torch.ones(CASE.tokens, CASE.hidden, dtype=torch.bfloat16)
    experts = torch.zeros(CASE.tokens, 1, dtype=torch.int64)
    weights = torch.ones(CASE.tokens, 1, dtype=torch.float32)
    answers = torch.ones(EXPERTS, CASE.ranks * CASE.tokens, CASE.hidden, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    handle = buffer.low_latency_dispatch(x, experts, CASE.tokens, EXPERTS)[2]

    def dispatch() -> deep_ep.EventOverlap:
        return buffer.low_latency_dispatch(x, experts, CASE.tokens, EXPERTS, async_finish=True)[3]

    def combine() -> deep_ep.EventOverlap:
        return buffer.low_latency_combine(answers, experts, weights, handle, async_finish=True, out=out)[1]

    times: dict[str, list[float]] = {"dispatch": [], "combine": []}
    for burst in range(WARMUP_BURSTS + calls // BURST):
        for name, call in (("dispatch", dispatch), ("combine", combine)):
            time.sleep(PAUSE_SECONDS)
            found = time_burst(call)
            if burst >= WARMUP_BURSTS:
                times[name] += found
    buffer.destroy()
    return times


def time_burst(call: Callable[[], deep_ep.EventOverlap]) -> list[float]:
    """Times in us of the calls of one burst; waits for the last one's event."""
    clock, found = time.perf_counter, []
    for _ in range(BURST):
        start = clock()
        event = call()
        found.append((clock() - start) * 1e6)
    event.current_stream_wait()
    return found


def split(times: list[float]) -> tuple[list[float], list[float]]:
    """Times of the first calls of the bursts, and of all others."""
    return times[::BURST], [us for i, us in enumerate(times) if i % BURST]


def measure_program(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Runs a program that prints {"dispatch": [us, …], "combine": [us, …]}; {"missing": why} if it can't be run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, **env}, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return {"missing": said.strip().splitlines()[-1] if said.strip() else repr(error)}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure_c(calls: int, engine: str = "cpu", prebuilt: Path | None = None) -> dict[str, Any]:
    """Builds host_cost.c against build/lib, unless a program is given, and runs it."""
    settings = {"DEEPEP_ENGINE": engine}
    if prebuilt is not None:
        with tempfile.TemporaryDirectory(prefix="host_cost_") as folder:
            return measure_program([str(prebuilt), str(calls), folder], settings)
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    libraries = ROOT / "build" / "lib"
    if compiler is None:
        return {"missing": "no C compiler: set CC"}
    with tempfile.TemporaryDirectory(prefix="host_cost_") as folder:
        program = Path(folder, "host_cost")
        build = [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
        build += [f"-I{ROOT / 'include'}", f"-I{ROOT / 'cpp_examples'}"]
        build += [str(ROOT / "bench" / "host_cost.c"), "-o", str(program), f"-L{libraries}", "-ldeepep", "-ldl"]
        done = subprocess.run([*build, f"-Wl,-rpath,{libraries}"], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"missing": f"host_cost.c does not build: {done.stderr.strip().splitlines()[-1]}"}
        return measure_program([str(program), str(calls), folder], settings)


def measure_go(calls: int) -> dict[str, Any]:
    """Builds and runs the Go program, without cgo."""
    go = shutil.which(os.environ.get("GO", "go"))
    if go is None:
        return {"missing": "no Go: set GO"}
    with tempfile.TemporaryDirectory(prefix="host_cost_") as folder:
        program = Path(folder, "hostcost")
        done = subprocess.run(
            [go, "build", "-o", str(program), "./bench/hostcost"],
            cwd=ROOT, env={**os.environ, "CGO_ENABLED": "0"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return {"missing": f"bench/hostcost does not build: {done.stderr.strip().splitlines()[-1]}"}
        return measure_program([str(program), str(calls)], {"DEEPEP_KERNELS": str(ROOT / "build" / "lib")})
