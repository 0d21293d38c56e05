"""The CUDA engine's figures, one process a GPU, each beside NCCL and a limit measured in the same run.

    make bench ENGINE=cuda
    .venv/bin/python bench/gpu.py --only lowlatency --calls 2000
    .venv/bin/python bench/gpu.py --markdown docs/performance.md --json build/bench_cuda.json

Sections: startup (construction, first and steady call, first graph), lowlatency (kernels of a decoding step), hostcost
(CPU time of its calls), normal (kernels of dispatch and combine), calls (what Python calls cost, V1's and V2's, beside
torch's and NCCL's), dense (all tokens to all ranks by NCCL, beside dispatch and combine), and on request sms (the
library's choice of SMs beside 20 and beside a sweep), overlap (a GEMM beside transfers, GEMMs between halves, a
decoding step of two micro-batches) and layer (forward and backward of a mixture-of-experts layer, eager and compiled,
beside all_to_all_single). With --engine cpu the same program runs on CPU ranks, with the host's clock in place of the
profiler: to try the program, not to measure.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

import deep_ep
from deep_ep import _abi, _lib
from lib import (
    cuda_tables,
    decode_step,
    document,
    elastic_calls,
    hostcost,
    layer,
    low_latency_kernels,
    normal_kernels,
    overlap,
    python_calls,
    ranks,
    sms,
    startup,
)
from lib.normal_mode import Case
from lib.tables import machine

SECTIONS = ("startup", "lowlatency", "hostcost", "normal", "calls", "dense")
ON_REQUEST = ("sms", "overlap", "layer")
CALLS_TOKENS = 256  # of normal mode in the section calls
ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 40
# Which buffer is the first of its process: there all kernels are loaded for the first time. Two sets of processes.
FIRSTS: tuple[dict[str, tuple[dict[str, bool], bool]], ...] = (
    {"plain": startup.VARIANTS["plain"]},
    {"background + warmup": startup.BACKGROUND["background + warmup"]},
)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = SECTIONS + ON_REQUEST
    parser.add_argument(
        "--only", nargs="+", choices=sections, default=SECTIONS, help="sections to run (all but sms, overlap, layer)"
    )
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program (cuda)")
    parser.add_argument("--ranks", type=int, default=0, help="processes (a GPU each; 4 on the CPU)")
    for name, usual, what in (
        ("tokens", 4096, "tokens a rank in normal mode"),
        ("ll-tokens", 128, "tokens a rank in low-latency mode"),
        ("hidden", 7168, "channels of a token"),
        ("rounds", 30, "timed calls of each kind in normal mode"),
        ("calls", 1000, "the same in low-latency mode"),
        ("lives", 3, "buffers made for each start-up figure"),
    ):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"{what} ({usual})")
    parser.add_argument(
        "--programs", type=Path, default=ROOT / "build" / "bin", help="folder of bench_ops, host_cost (build/bin)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw times there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables into this document")
    options = parser.parse_args()
    devices = torch.cuda.device_count()
    if options.engine == "cuda" and devices == 0:
        parser.error("no GPU that torch can use; --engine cpu tries the program without one")
    if options.ranks == 0:
        options.ranks = devices if options.engine == "cuda" else 4
    for name in ("ranks", "tokens", "ll_tokens", "hidden", "rounds", "calls", "lives"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; at least 1 is needed")
    if options.markdown:
        document.check(parser, "bench/gpu", options.markdown)
    return options


def run_rank(rank: int, options: argparse.Namespace, number: int, rendezvous: str, result: str) -> None:
    """One rank's process: the first buffer of its kind, and in the last set of processes everything else."""
    team = ranks.join(rank, options.ranks, rendezvous, [options.ranks], options.engine)[options.ranks]
    team.meet()
    found: dict[str, Any] = {}
    normal = Case(options.ranks, options.tokens, options.hidden)
    decoding = Case(options.ranks, options.ll_tokens, options.hidden)

    def take(section: str, measure: Callable[[], Any], name: str = "") -> None:
        if section not in options.only:
            return
        if rank == 0:
            print(f"{section} {name}".strip(), file=sys.stderr, flush=True)
        found[name or section] = measure()
        if rank == 0:  # at once, so that a run that is cut off has told what it knows
            Path(result + ".part").write_text(json.dumps(found))
            Path(result + ".part").rename(result)
        team.barrier()

    take("startup", lambda: startup.measure(team, decoding, startup.LOW_LATENCY, 1, FIRSTS[number]), "first")
    if number == len(FIRSTS) - 1:
        take("startup", lambda: measure_startup(team, normal, decoding, options.lives))
        # What the host does first: once torch's profiler has run, every launch of the process is slower.
        take("hostcost", lambda: low_latency_kernels.measure_host(team, decoding, options.calls))
        few = Case(options.ranks, min(CALLS_TOKENS, options.tokens), options.hidden)
        take("calls", lambda: python_calls.measure(team, few, decoding, min(options.calls, 200)))
        take("calls", lambda: elastic_calls.measure(team, few, decoding, min(options.calls, 200)), "elastic")
        take("dense", lambda: python_calls.measure_dense(team, options.hidden, options.tokens, options.rounds))
        take("normal", lambda: normal_kernels.measure_views(team, normal, options.rounds), "views")
        take("lowlatency", lambda: low_latency_kernels.measure(team, decoding, options.calls))
        take("normal", lambda: normal_kernels.measure(team, normal, options.rounds))
        take("normal", lambda: elastic_calls.measure_kernels(team, normal, options.rounds), "elastic kernels")
        take("sms", lambda: sms.measure(team, options.hidden, options.rounds))
        take("overlap", lambda: decode_step.measure(team, options.hidden, options.rounds), "decode")
        take("overlap", lambda: overlap.measure(team, options.hidden, options.rounds))
        take("layer", lambda: layer.measure(team, options.tokens, options.rounds))
    ranks.leave()


def measure_startup(team: ranks.Team, normal: Case, decoding: Case, lives: int) -> list[dict[str, Any]]:
    """Both modes, every variant, and V2; with a warm-up also the first capture of a graph."""

    def capture(buffer: deep_ep.Buffer, call: Callable[[], None]) -> dict[str, float]:
        if team.device.type != "cuda":
            return {}
        first, steady = low_latency_kernels.first_capture(team, buffer, call)
        return {"first_graph": first, "steady_graph": steady}

    variants = startup.VARIANTS | startup.BACKGROUND
    found = startup.measure(team, decoding, startup.LOW_LATENCY, lives, variants, capture)
    found += startup.measure(team, normal, startup.NORMAL, lives, variants)
    return found + startup.measure(team, normal, startup.V2, lives, startup.ELASTIC)


def measure_limit(options: argparse.Namespace) -> dict[str, Any]:
    """GB/s out of each GPU while all push to all, by bench/cuda; {"missing": why} if that cannot be."""
    if options.engine != "cuda" or options.ranks < 2:
        return {"missing": "a push needs two GPUs"}
    program = options.programs / "bench_ops"
    if not program.exists():
        return {"missing": f"there is no {program} (make bench ENGINE=cuda builds it)"}
    library = deep_ep_cuda_library()
    command = [str(program), library, "mode=normal", f"ranks={options.ranks}", f"devices={options.ranks}"]
    command += [f"tokens={options.tokens}", f"hidden={options.hidden}", "sms=20", "iterations=1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else (late.stdout or "")
    rates = [float(rate) for rate in re.findall(r"all-pairs push,.*: ([0-9.]+) GB/s", output)]
    return {"rate": max(rates)} if rates else {"missing": f"bench_ops told no rate: {output.strip()[-200:]}"}


def deep_ep_cuda_library() -> str:
    """The file of the CUDA kernel library that this package uses."""
    info = _abi.sized(_abi.EngineInfo)
    library = _lib.library()
    library.check(library.without_gil.deepep_engine_query(b"cuda", ctypes.byref(info)))
    return str(info.path.decode())


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the sections in processes of their own; returns what rank 0 found, and under "incomplete" why not all."""
    found: dict[str, Any] = {"first": [], "limit": {"missing": "not asked"}}
    try:
        if {"normal", "lowlatency"} & set(options.only):
            found["limit"] = measure_limit(options)
        if "hostcost" in options.only:
            built = options.programs / "host_cost"
            found["hostcost_c"] = hostcost.measure_c(options.calls, options.engine, built if built.exists() else None)
        for number in range(len(FIRSTS)) if "startup" in options.only else [len(FIRSTS) - 1]:
            run_set(options, number, found)
    except (KeyboardInterrupt, ProcessExitedException, ProcessRaisedException) as error:
        found["incomplete"] = f"{type(error).__name__}: {error}".strip(": ")
    return found


def run_set(options: argparse.Namespace, number: int, found: dict[str, Any]) -> None:
    """Runs one set of processes; adds what rank 0 found, also where they end early."""
    with tempfile.TemporaryDirectory(prefix="bench_cuda_") as folder:
        result = Path(folder, "result.json")
        try:
            arguments = (options, number, str(Path(folder, "rendezvous")), str(result))
            spawn(run_rank, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]
        finally:
            got = json.loads(result.read_text()) if result.exists() else {}
            found["first"] += got.pop("first", [])
            found |= got


def where(options: argparse.Namespace) -> str:
    """One line on where this was measured."""
    versions = {"Python": sys.version.split()[0], "torch": torch.__version__, "deep_ep": deep_ep.__version__}
    if options.engine != "cuda":
        return f"A trial on the CPU engine, no measurement: {machine(versions)}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{options.ranks} x {torch.cuda.get_device_name(0)}, NCCL {nccl}, {machine(versions)}"


def main() -> int:
    """Measures and shows; status 1 if the run ended early."""
    options = parse_arguments()
    found = run_all(options)
    tables = cuda_tables.make(found, options)
    here = where(options)
    print(f"\n{here}\n\n" + "\n".join(table.text() for table in tables))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": here, **found}) + "\n")
    if "incomplete" in found:
        print(f"bench/gpu: incomplete: {found['incomplete']}", file=sys.stderr)
        return 1
    if options.markdown:
        text = f"Measured on: {here}.\n\n" + "\n".join(table.markdown() for table in tables)
        document.write("bench/gpu", options.markdown, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
