"""Draws the CUDA engine's sweeps as SVG, from the output of bench_ops (mode=sweep, mode=llsweep).

    .venv/bin/python bench/pictures.py sweep.txt llsweep.txt --out docs/pictures

Reads the lines that begin with "csv," and the rates of "all-pairs push"; the rest of the output may stand between them.
Writes cuda_sms.svg (time over SMs), cuda_tokens.svg (rate over tokens) and cuda_low_latency.svg (time over tokens),
each where its figures are there.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - after the choice of the backend
from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: E402

Point = dict[str, str]
# bench_ops prints the names of mode=sweep's fields itself; those of mode=llsweep are these.
LOW_LATENCY_FIELDS = [
    "ranks",
    "tokens",
    "hidden",
    "zipf",
    "operation",
    "median_us",
    "p99_us",
    "in_kernel_us",
    "in_kernel_p99_us",
]
# operation -> (label, colour, dashed)
NORMAL = {
    "dispatch_fp8": ("dispatch FP8", "#1f6fb4", False),
    "dispatch_fp8_staged": ("dispatch FP8, through staging", "#1f6fb4", True),
    "dispatch_bf16": ("dispatch BF16", "#d1495b", False),
    "dispatch_bf16_staged": ("dispatch BF16, through staging", "#d1495b", True),
    "combine_bf16": ("combine BF16", "#2e8b57", False),
}
LOW_LATENCY = {
    "dispatch_fp8": ("dispatch FP8", "#1f6fb4", False),
    "dispatch_bf16": ("dispatch BF16", "#d1495b", False),
    "combine": ("combine BF16", "#2e8b57", False),
    "graph_round": ("dispatch FP8 + combine in a graph", "#555555", False),
}


def read(paths: Iterable[Path]) -> tuple[list[Point], list[Point], float]:
    """Points of normal mode, points of low latency, and the greatest rate of a push in GB/s (0 if none was told)."""
    normal: list[Point] = []
    low_latency: list[Point] = []
    rate = 0.0
    for path in paths:
        names: list[str] = []
        for line in path.read_text(errors="replace").splitlines():
            if found := re.search(r"all-pairs push,.*: ([0-9.]+) GB/s", line):
                rate = max(rate, float(found[1]))
            if not line.startswith("csv,"):
                continue
            fields = next(csv.reader([line]))[1:]
            if fields[0] == "sweep":
                names = fields
            elif len(fields) == len(LOW_LATENCY_FIELDS) and fields[0].isdigit():
                low_latency.append(dict(zip(LOW_LATENCY_FIELDS, fields, strict=True)))
            elif len(fields) == len(names):
                normal.append(dict(zip(names, fields, strict=True)))
            else:
                raise SystemExit(f"{path}: a line of {len(fields)} fields, {names or 'no head'} before it: {line}")
    return normal, low_latency, rate


def in_kernel(point: Point) -> float:
    """Time in us inside the kernel; a graph's rounds have only the time of their share."""
    inside = float(point["in_kernel_us"])
    return inside if inside == inside else float(point["median_us"])


def series(points: Iterable[Point], x: str, value: Any) -> dict[str, list[tuple[float, float]]]:
    """For each operation its (x, value), sorted; of points measured twice the last."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for point in points:
        found[point["operation"]][float(point[x])] = value(point)
    return {operation: sorted(values.items()) for operation, values in found.items()}


def draw(
    path: Path,
    lines: dict[str, list[tuple[float, float]]],
    styles: dict[str, tuple[str, str, bool]],
    title: str,
    x: str,
    y: str,
    limits: dict[str, float] | None = None,
) -> None:
    """One picture. `limits`: a fine dotted line at this height for an operation, or for all ("")."""
    matplotlib.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}  # the same figures give the same file
    figure, axes = plt.subplots(figsize=(8, 4.6))
    ticks = sorted({at for operation in styles for at, _ in lines.get(operation, [])})
    for operation, (label, colour, dashed) in styles.items():
        if operation not in lines:
            continue
        at, values = zip(*lines[operation], strict=True)
        face = "none" if dashed else colour
        axes.plot(at, values, "--o" if dashed else "-o", color=colour, markerfacecolor=face, markersize=4, label=label)
        if limits and operation in limits:
            axes.axhline(limits[operation], color=colour, linewidth=0.8, linestyle=":")
    if limits and "" in limits:
        axes.axhline(limits[""], color="#555555", linewidth=0.8, linestyle=":", label="all pairs push")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
    print(path)


def of_most_ranks(points: list[Point]) -> list[Point]:
    """A picture is of one number of ranks: the greatest that was measured."""
    most = max((int(p["ranks"]) for p in points), default=0)
    return [p for p in points if int(p["ranks"]) == most]


def draw_normal(points: list[Point], rate: float, out: Path) -> None:
    """Time over SMs and rate over tokens."""
    shown = of_most_ranks([p for p in points if p["routing"] == "uniform" and p["isa"] == "0"])
    over_sms = [p for p in shown if p["sweep"] == "sms"]
    if over_sms:
        some = over_sms[0]
        limits = {
            p["operation"]: float(p["link_bytes"]) / rate / 1e3 for p in over_sms if "staged" not in p["operation"]
        }
        title = f"{some['ranks']} GPUs, {some['tokens']} tokens x {some['hidden']} a rank"
        title += "; dotted: rows at the rate of all pairs pushing" if rate else ""
        lines = series(over_sms, "sms", in_kernel)
        draw(out / "cuda_sms.svg", lines, NORMAL, title, "SMs", "us in the kernel", limits if rate else None)
    over_tokens = [p for p in shown if p["sweep"] == "tokens"]
    if over_tokens:
        some = over_tokens[0]
        title = f"{some['ranks']} GPUs, hidden {some['hidden']}, {some['sms']} SMs"
        lines = series(over_tokens, "tokens", lambda p: float(p["link_bytes"]) / in_kernel(p) / 1e3)
        limit = {"": rate} if rate else None
        draw(out / "cuda_tokens.svg", lines, NORMAL, title, "tokens a rank", "GB/s over the links of a GPU", limit)


def draw_low_latency(points: list[Point], out: Path) -> None:
    """Time over tokens, at the hidden size that was measured with most numbers of tokens."""
    uniform = of_most_ranks([p for p in points if float(p["zipf"]) == 0])
    if not uniform:
        return
    tokens: dict[str, set[str]] = defaultdict(set)
    for point in uniform:
        tokens[point["hidden"]].add(point["tokens"])
    hidden = max(tokens, key=lambda size: len(tokens[size]))
    lines = series([p for p in uniform if p["hidden"] == hidden], "tokens", in_kernel)
    title = f"{uniform[0]['ranks']} GPUs, hidden {hidden}, median of the slowest rank"
    draw(out / "cuda_low_latency.svg", lines, LOW_LATENCY, title, "tokens a rank", "us in the kernel; graph: a round")


def main() -> int:
    """Reads and draws; status 1 if there was nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="output of bench_ops")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/pictures"), help="folder of the pictures (docs/pictures)"
    )
    options = parser.parse_args()
    normal, low_latency, rate = read(options.files)
    if not normal and not low_latency:
        print("pictures: no line begins with csv,", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    draw_normal(normal, rate, options.out)
    draw_low_latency(low_latency, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
