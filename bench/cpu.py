"""The CPU engine's figures, each beside a rival or a limit that was measured in the same run.

    make bench
    .venv/bin/python bench/cpu.py --only normal --rounds 50
    .venv/bin/python bench/cpu.py --markdown docs/performance.md --json build/bench.json

Sections: normal (dispatch and combine beside gloo and a plain copy), lowlatency (a decoding step), hostcost (what a
low-latency call costs outside the kernel, from Python, C and Go), startup (construction, first and steady call).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

import deep_ep
from lib import document, hostcost, low_latency_mode, normal_mode, ranks, startup
from lib.normal_mode import Case
from lib.tables import Table, duration, machine, median, p99, ratio

SECTIONS = ("normal", "lowlatency", "hostcost", "startup")
NORMAL_CASES = (
    Case(4, 512, 7168),
    Case(4, 512, 7168, fp8=True),
    Case(4, 64, 2048),
    Case(2, 512, 7168),
    Case(8, 512, 7168),
    Case(2, 64, 2048),
    Case(8, 64, 2048),
)
LOW_LATENCY_CASE = Case(4, 128, 7168)
STARTUP_CASES = (
    (Case(4, 512, 7168), startup.NORMAL, startup.VARIANTS),
    (LOW_LATENCY_CASE, startup.LOW_LATENCY, startup.VARIANTS),
    (Case(4, 512, 7168), startup.V2, startup.ELASTIC),
)
HOST_COST_CALLS = 2000


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to run (all)")
    parser.add_argument("--rounds", type=int, default=100, help="timed rounds of each call (100)")
    parser.add_argument("--lives", type=int, default=5, help="buffers made for each start-up figure (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw times there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables into this document")
    options = parser.parse_args()
    for name in ("rounds", "lives"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    if options.markdown:
        document.check(parser, "bench/cpu", options.markdown)
    return options


def run_rank(rank: int, options: argparse.Namespace, world: int, rendezvous: str, result: str) -> None:
    """One rank's process: goes through all cases; rank 0 leaves the figures in the file `result`."""
    cases: list[Case] = [LOW_LATENCY_CASE, hostcost.CASE, *NORMAL_CASES]
    teams = ranks.join(rank, world, rendezvous, sorted({case.ranks for case in cases if case.ranks <= world}))
    found: dict[str, Any] = {section: [] for section in options.only}

    def take(section: str, case: Case, measure: Callable[[ranks.Team], Any]) -> None:
        if section not in options.only:
            return
        if rank == 0:
            print(f"{section}: {case.name}", file=sys.stderr, flush=True)
        if case.ranks in teams:
            found[section].append(measure(teams[case.ranks]))
        torch.distributed.barrier()

    for case in NORMAL_CASES:
        take("normal", case, lambda team, case=case: normal_mode.measure(team, case, options.rounds))  # type: ignore[misc]
    take("lowlatency", LOW_LATENCY_CASE, lambda team: low_latency_mode.measure(team, LOW_LATENCY_CASE, options.rounds))
    take("hostcost", hostcost.CASE, lambda team: hostcost.measure_python(team, HOST_COST_CALLS))
    for case, mode, variants in STARTUP_CASES:
        take("startup", case, lambda team, of=(case, mode, options.lives, variants): startup.measure(team, *of))  # type: ignore[misc]
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    ranks.leave()


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the sections in processes of their own; returns what rank 0 found."""
    world = 1 if tuple(options.only) == ("hostcost",) else max(case.ranks for case in NORMAL_CASES)
    with tempfile.TemporaryDirectory(prefix="bench_cpu_") as folder:
        result = Path(folder, "result.json")
        spawn(run_rank, (options, world, str(Path(folder, "rendezvous")), str(result)), nprocs=world)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(result.read_text())
    if "hostcost" in options.only:
        programs = {"Python": found["hostcost"][0]}
        for language, measure in (("C", hostcost.measure_c), ("Go", hostcost.measure_go)):
            print(f"hostcost: {language}", file=sys.stderr, flush=True)
            programs[language] = measure(HOST_COST_CALLS)
        found["hostcost"] = programs
    return found


def normal_tables(found: list[dict[str, Any]], rounds: int) -> list[Table]:
    """Dispatch and combine beside gloo and the copy."""
    head = [
        "ranks x tokens x hidden",
        "rows",
        "ours",
        "p99",
        "GB/s",
        "gloo",
        "p99",
        "gloo ÷ ours",
        "copy",
        "ours ÷ copy",
    ]
    formula = (
        f"A round's time is the slowest rank's, after a barrier in shared memory; median and p99 of {rounds} rounds, "
        "in which the rivals take turns. Top-8 of 256 experts, uniform. Rows: bytes of token rows received by the rank "
        "that receives most, GB/s = rows ÷ median. "
    )
    dispatch = Table(
        "Normal mode, dispatch",
        formula + "Ours: get_dispatch_layout and dispatch with top-k, indices to counts to rows. Gloo: mask, "
        "index_select, counts and rows by all_to_all_single (top-k is not sent; FP8: rows and scales). "
        "Copy: tensor.copy_ of the received rows on all ranks at once.",
        head,
    )
    combine = Table(
        "Normal mode, combine",
        formula + "Gloo: rows back by all_to_all_single, index_add_ in float32, rounding to BF16. Both results were "
        "compared before the timing. Copy as above.",
        head,
    )
    for entry in found:
        for table, name in ((dispatch, "dispatch"), (combine, "combine")):
            if f"ours_{name}" not in entry["times"]:
                continue
            ours, gloo, copy = (entry["times"][key] for key in (f"ours_{name}", f"gloo_{name}", "copy"))
            table.rows.append(
                [entry["case"], f"{entry['bytes'] / 1e6:.1f} MB", duration(median(ours)), duration(p99(ours)),
                 f"{entry['bytes'] / median(ours) / 1e3:.2f}", duration(median(gloo)), duration(p99(gloo)),
                 ratio(median(gloo), median(ours)), duration(median(copy)), ratio(median(ours), median(copy))]
            )  # fmt: skip
    return [dispatch, combine]


def low_latency_table(found: list[dict[str, Any]], rounds: int) -> Table:
    """A decoding step."""
    table = Table(
        f"Low-latency mode, {found[0]['case']} (ranks x tokens x hidden)",
        f"Time of the slowest rank after a barrier in shared memory, median and p99 of {rounds} rounds. Top-8 of 256 "
        "experts, uniform; round trip = dispatch with FP8, then combine of BF16 rows.",
        ["call", "median", "p99"],
    )
    for name, times in found[0]["times"].items():
        table.rows.append([name, duration(median(times)), duration(p99(times))])
    return table


def host_cost_table(found: dict[str, dict[str, Any]]) -> Table:
    """What a call costs its caller."""
    table = Table(
        "Cost of a low-latency call outside the kernel",
        "Time from call to return of an asynchronous call (1 rank, 1 token, hidden 128, FP8 outputs, recycled in "
        f"Python); the kernel runs on the communication stream's thread. Calls come in bursts of {hostcost.BURST}, "
        f"{hostcost.PAUSE_SECONDS * 1e3:.1f} ms apart: the first one has to wake that thread (in brackets), the others "
        f"find it awake. Median and p99 of {HOST_COST_CALLS} calls.",
        ["language", "dispatch", "p99", "(waking)", "combine", "p99", "(waking)"],
    )
    for language, times in found.items():
        if "missing" in times:
            table.rows.append([f"{language}: {times['missing']}", *["-"] * 6])
            continue
        cells = []
        for name in ("dispatch", "combine"):
            waking, awake = hostcost.split(times[name])
            cells += [duration(median(awake)), duration(p99(awake)), f"({duration(median(waking))})"]
        table.rows.append([language, *cells])
    return table


def startup_table(found: list[list[dict[str, Any]]], lives: int) -> Table:
    """Construction, first and steady call."""
    normal_case, low_latency_case, _ = (case.name for case, *_ in STARTUP_CASES)
    table = Table(
        "Start-up",
        "Construction = time in Buffer() without the time in the caller's all_gather_object, which stands beside it. "
        f"Calls: normal = layout + dispatch + combine, {normal_case}; low latency = FP8 dispatch + combine, "
        f"{low_latency_case}; V2 = dispatch + combine, as normal. Slowest rank, median of {lives} buffers; steady = "
        f"median of the last {startup.STEADY_CALLS * 3 // 4} of {startup.STEADY_CALLS} calls after the first.",
        ["mode, variant", "construction", "group exchange", "warmup", "first call", "steady call", "first ÷ steady"],
    )
    for row in (row for rows in found for row in rows):
        figures = [row[name] for name in ("construct", "exchange", "warmup", "first", "steady")]
        shown = [duration(f) if f else "-" for f in figures]
        table.rows.append([f"{row['mode']}, {row['variant']}", *shown, ratio(row["first"], row["steady"])])
    return table


def make_tables(found: dict[str, Any], options: argparse.Namespace) -> list[Table]:
    """All tables of what was run."""
    tables: list[Table] = []
    if "normal" in found:
        tables += normal_tables(found["normal"], options.rounds)
    if "lowlatency" in found:
        tables.append(low_latency_table(found["lowlatency"], options.rounds))
    if "hostcost" in found:
        tables.append(host_cost_table(found["hostcost"]))
    if "startup" in found:
        tables.append(startup_table(found["startup"], options.lives))
    return tables


def main() -> None:
    """Measures and shows."""
    options = parse_arguments()
    where = machine({"Python": sys.version.split()[0], "torch": torch.__version__, "deep_ep": deep_ep.__version__})
    found = run_all(options)
    tables = make_tables(found, options)
    print(f"\n{where}\n\n" + "\n".join(table.text() for table in tables))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": where, "rounds": options.rounds, **found}) + "\n")
    if options.markdown:
        document.write(
            "bench/cpu", options.markdown, f"Measured on: {where}.\n\n" + "\n".join(t.markdown() for t in tables)
        )


if __name__ == "__main__":
    main()
