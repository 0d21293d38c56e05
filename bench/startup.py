"""First call ÷ steady call, with and without preparation, each buffer in fresh processes.

    .venv/bin/python bench/startup.py
    .venv/bin/python bench/startup.py --engine cuda --json build/startup.json
    .venv/bin/python bench/startup.py --lives 3 --modes normal --variants plain "warm-up, no shape"
    .venv/bin/python bench/startup.py --markdown docs/startup.md --picture docs/pictures/startup.svg
    DEEPEP_NUM_MAX_NVL_PEERS=2 .venv/bin/python bench/startup.py --engine cuda     # between nodes, as a setting

A life: the ranks' processes start, import torch, make a group and a buffer, prepare it as the variant says, and then
time 20 calls, each after a barrier, and 5 more, each after some 5 ms of the host's other work and a barrier. A call's
time is the slowest rank's. Steady = median of calls 6 to 20; it finds the host's caches warm, as a first call does not.
What a later call after other work takes tells how much of a first call's time that is. The table has the median over
the lives; the variants take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

import deep_ep
from lib import document, ranks
from lib.normal_mode import EXPERTS, TOP_K, Case
from lib.startup import LOW_LATENCY, NORMAL, V2, Mode, exchange_clock
from lib.tables import Table, duration, machine, median

CALLS = 20
STEADY = slice(5, CALLS)  # calls 6 to 20
CALLS_AFTER_WORK = 5
WORK = {str(i): [i] * 20 for i in range(1000)}, b"\1" * (8 << 20)  # zeros would have no pages of their own
MODES = {mode.name: mode for mode in (NORMAL, LOW_LATENCY, V2)}


@dataclass(frozen=True)
class Variant:
    """What a program does before its first call."""

    options: dict[str, bool] = field(default_factory=dict)  # of Buffer()
    warm: bool = False
    shape: str = ""  # where the shape is given: "call", "constructor", "hint" (asked for the sizes) or "" (nowhere)


# Those with a warm-up have preinitialize too.
VARIANTS = {
    "plain": Variant(shape="hint"),
    "preinitialize": Variant({"preinitialize": True}, shape="hint"),
    "warm-up, shape given": Variant({"preinitialize": True}, True, "call"),
    "warm-up, shape of the constructor": Variant({"preinitialize": True}, True, "constructor"),
    "warm-up, sizes by hints": Variant({"preinitialize": True}, True, "hint"),
    "warm-up, no shape": Variant({"preinitialize": True}, True),
}
V2_VARIANTS = ("plain", "warm-up, shape of the constructor")  # which always has the shape, and no preinitialize


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4, help="processes, one a GPU (4)")
    parser.add_argument("--lives", type=int, default=9, help="buffers, each in fresh processes, of each variant (9)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(all)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME", help="(all)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(512, 128), help="normal and V2, low latency (512 128)")
    parser.add_argument("--hidden", type=int, default=7168, help="(7168)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, after each life")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: take the figures from there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table into this document")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the calls of all variants (SVG)")
    options = parser.parse_args()
    for name, least in (("ranks", 1), ("lives", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; at least {least} is needed")
    if list(options.modes) == [V2.name] and not set(options.variants) & set(V2_VARIANTS):
        parser.error(f"--variants: of V2 there are {' and '.join(map(repr, V2_VARIANTS))}")
    if options.markdown:
        document.check(parser, mark(options.engine), options.markdown)
    return options


def mark(engine: str) -> str:
    """What the table's place in the document is called."""
    return f"bench/startup {engine}"


def case_of(options: argparse.Namespace, mode: Mode) -> Case:
    """The shape of a mode's calls."""
    return Case(options.ranks, options.tokens[mode is LOW_LATENCY], options.hidden)


def sizes(case: Case, mode: Mode) -> dict[str, int]:
    """The bytes that Buffer() needs. Asking for them tells the library the shape."""
    if mode is V2:
        return {}
    if mode is LOW_LATENCY:
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(case.tokens, case.hidden, case.ranks, EXPERTS)
        return {"num_rdma_bytes": hint}
    config = deep_ep.Buffer.get_dispatch_config(case.ranks)
    return {
        "num_nvl_bytes": config.get_nvl_buffer_size_hint(case.hidden * 2, case.ranks),
        "num_rdma_bytes": config.get_rdma_buffer_size_hint(case.hidden * 2, case.ranks),
    }


def other_work() -> None:
    """Some 5 ms of what a program does between calls: interpreted code, and more memory than a core's caches."""
    items, block = WORK
    json.loads(json.dumps(items))
    zlib.crc32(block)


def timed(call: Callable[[], None], team: ranks.Team) -> float:
    """Seconds from the call until the device is done."""
    start = time.perf_counter()
    call()
    team.finish()
    return time.perf_counter() - start


def run_rank(rank: int, options: argparse.Namespace, mode_name: str, name: str, folder: str) -> None:
    """One rank's life."""
    mode, variant = MODES[mode_name], VARIANTS[name]
    team = ranks.join(rank, options.ranks, f"{folder}/rendezvous", [options.ranks], options.engine)[options.ranks]
    case = case_of(options, mode)
    bytes_needed: dict[str, Any] = json.loads(os.environ["STARTUP_SIZES"]) if not variant.shape else sizes(case, mode)
    told: dict[str, Any] = {}
    if variant.shape == "constructor":
        told = {"num_tokens": case.tokens, "hidden": case.hidden, "num_topk": TOP_K, "num_experts": EXPERTS}
    figures: dict[str, Any] = {}
    team.meet()
    with exchange_clock() as clock:
        start = time.perf_counter()
        if mode is V2:
            buffer = mode.make(team, case)
        else:
            buffer = deep_ep.Buffer(
                team.group, explicitly_destroy=True, engine=options.engine, low_latency_mode=mode is LOW_LATENCY,
                **bytes_needed, **variant.options, **told,
            )  # fmt: skip
        figures["construct"] = time.perf_counter() - start - clock.seconds
    call = mode.call(buffer, team, case)
    start = time.perf_counter()
    if variant.warm:
        if mode is V2 or variant.shape == "call":
            mode.warm(buffer, case)
        else:
            buffer.warmup()
        team.finish()
    figures["warmup"] = time.perf_counter() - start
    rounds, faults, report = [], [], None
    for _ in range(CALLS):
        team.meet()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        rounds.append(timed(call, team))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        if mode is not V2:
            report = report or buffer.startup_report()
    rounds_after_work = []
    for _ in range(CALLS_AFTER_WORK):
        other_work()
        team.meet()
        rounds_after_work.append(timed(call, team))
    figures["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    names = list(figures)
    slowest = team.slowest([*figures.values(), *rounds, *rounds_after_work])
    most_faults = team.slowest([float(n) for n in faults])
    if rank == 0:
        found: dict[str, Any] = dict(zip(names, slowest, strict=False))
        found["calls"], found["page_faults"] = slowest[len(names) : -CALLS_AFTER_WORK], most_faults
        found["after_work"] = slowest[-CALLS_AFTER_WORK:]
        found["report"] = report
        Path(folder, "result.json").write_text(json.dumps(found))
    buffer.destroy()
    ranks.leave()


def life(options: argparse.Namespace, mode: Mode, name: str) -> dict[str, Any]:
    """Runs one life and returns its figures."""
    os.environ["STARTUP_SIZES"] = json.dumps(sizes(case_of(options, mode), mode))
    with tempfile.TemporaryDirectory(prefix="bench_startup_") as folder:
        spawn(run_rank, (options, mode.name, name, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call]
        return json.loads(Path(folder, "result.json").read_text())  # type: ignore[no-any-return]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All lives, by mode and variant; the variants take turns."""
    found: dict[str, Any] = {"engine": options.engine, "ranks": options.ranks, "tokens": list(options.tokens)}
    found |= {"hidden": options.hidden, "machine": machine(versions(options.engine)), "lives": {}}
    for turn in range(options.lives):
        for mode in map(MODES.__getitem__, options.modes):
            for name in options.variants:
                if mode is V2 and name not in V2_VARIANTS:
                    continue
                lives = found["lives"].setdefault(mode.name, {}).setdefault(name, [])
                lives.append(life(options, mode, name))
                last = lives[-1]
                shown = f"first {last['calls'][0] * 1e3:.2f} ms, first ÷ steady {ratio_of(last):.2f}"
                print(f"{turn + 1} of {options.lives}, {mode.name}, {name}: {shown}", file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(found))
    return found


def versions(engine: str) -> dict[str, str]:
    """For the line on where this was measured."""
    found = {"Python": platform.python_version(), "torch": torch.__version__}
    return found | ({torch.cuda.get_device_name(): f"x {torch.cuda.device_count()}"} if engine == "cuda" else {})


def steady(one: dict[str, Any]) -> float:
    """Of one life, in seconds."""
    return median(one["calls"][STEADY])


def ratio_of(one: dict[str, Any]) -> float:
    """First ÷ steady of one life."""
    return float(one["calls"][0]) / steady(one)


def after_work(one: dict[str, Any]) -> float:
    """A later call of one life, after other work, in seconds."""
    return median(one["after_work"])


def table(found: dict[str, Any]) -> Table:
    """One line for each mode and variant."""
    shape = f"x {found['hidden']} BF16, top-{TOP_K} of {EXPERTS} experts, on {found['ranks']} ranks"
    normal, low_latency = found["tokens"]
    lives = min(len(some) for variants in found["lives"].values() for some in variants.values())
    result = Table(
        f"{found['engine'].upper()} engine",
        f"Normal mode: layout + dispatch + combine of {normal} tokens {shape}; low latency: FP8 dispatch + combine of "
        f"{low_latency} tokens; V2: dispatch + combine, as normal mode. Each buffer in fresh processes; medians of "
        f"{lives}; a time is the slowest rank's, steady is the median of calls 6 to 20. After work: later calls, each "
        "after 5 ms of the host's other work. Ratios are the medians of the buffers' own. "
        "Page faults: of the first call, of the rank that has most. "
        f"{found['machine']}.",
        [
            "mode, variant",
            "construction",
            "warm-up",
            "first call",
            "steady",
            "first ÷ steady",
            "after work",
            "first ÷ after work",
            "page faults",
        ],
    )
    for mode, variants in found["lives"].items():
        for name, some in variants.items():

            def middle(value: Callable[[dict[str, Any]], float], of: list[dict[str, Any]] = some) -> float:
                return median([value(one) for one in of])

            warm = duration(middle(lambda one: one["warmup"]) * 1e6) if VARIANTS[name].warm else "-"
            result.rows.append(
                [f"{mode}, {name}", duration(middle(lambda one: one["construct"]) * 1e6), warm,
                 duration(middle(lambda one: one["calls"][0]) * 1e6), duration(middle(steady) * 1e6),
                 f"{middle(ratio_of):.2f}", duration(middle(after_work) * 1e6),
                 f"{middle(lambda one: one['calls'][0] / after_work(one)):.2f}",
                 f"{middle(lambda one: one['page_faults'][0]):.0f}"]
            )  # fmt: skip
    return result


def draw(found: dict[str, Any], path: Path) -> None:
    """Each variant's calls, in steady ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}  # the same figures give the same file
    modes = len(found["lives"])
    figure, panels = plt.subplots(1, modes, figsize=(4.7 * modes, 4.2), sharey=True, squeeze=False)
    shades = ("#999999", "#d1495b", "#1f6fb4", "#2e8b57", "#e0a030", "#7b4fa3")
    colours = dict(zip(VARIANTS, shades, strict=True))
    for axes, (mode, variants) in zip(panels[0], found["lives"].items(), strict=True):
        for name, lives in variants.items():
            calls = [median([one["calls"][i] / steady(one) for one in lives]) for i in range(CALLS)]
            axes.plot(range(1, CALLS + 1), calls, "o-", color=colours[name], label=name, linewidth=1.4, markersize=3)
        axes.axhline(1.2, color="#555555", linewidth=0.8, linestyle=":")
        axes.set(title=f"{mode}, {found['engine'].upper()} engine", xlabel="call of a new buffer")
        axes.set_yscale("log")
        axes.set_yticks([0.8, 1, 1.2, 2, 4, 8, 16])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.set_xticks([1, 5, 10, 15, 20])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("time ÷ steady call")
    max(panels[0], key=lambda axes: len(axes.lines)).legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    print(path)


def main() -> int:
    """Measures and shows."""
    options = parse_arguments()
    found = json.loads(options.read.read_text()) if options.read else measure(options)
    shown = table(found)
    print(shown.text())
    if options.markdown:
        document.write(mark(found["engine"]), options.markdown, shown.markdown())
    if options.picture:
        draw(found, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
