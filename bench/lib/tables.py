"""Figures as text: medians, percentiles, aligned tables for a terminal and for Markdown."""

from __future__ import annotations

import math
import os
import platform
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def p99(values: Sequence[float]) -> float:
    """The 99th percentile by nearest rank: of fewer than 100 values the largest."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else math.nan


def duration(us: float) -> str:
    """Microseconds with a fitting unit."""
    if math.isnan(us):
        return "-"
    if us < 1000:
        return f"{us:.2f} us" if us < 100 else f"{us:.0f} us"
    return f"{us / 1000:.2f} ms" if us < 100_000 else f"{us / 1000:.0f} ms"


def spread(values: Sequence[float]) -> str:
    """The median of times in us, and their 99th percentile in brackets."""
    return f"{duration(median(values))} ({duration(p99(values))})"


def ratio(a: float, b: float) -> str:
    """a ÷ b, as '8.2 x'."""
    return "-" if not b or math.isnan(a) or math.isnan(b) else f"{a / b:.2f} x"


@dataclass
class Table:
    """A titled table with the formula that its figures follow."""

    title: str
    formula: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def text(self) -> str:
        """For a terminal."""
        widths = [max(len(row[i]) for row in [self.head, *self.rows]) for i in range(len(self.head))]
        lines = [self.title, "=" * len(self.title), *textwrap.wrap(self.formula, 110), ""]
        for number, row in enumerate([self.head, *self.rows]):
            cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
            if number == 0:
                lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        """For a document."""
        head = "| " + " | ".join(self.head) + " |"
        rule = "|---|" + "---:|" * (len(self.head) - 1)
        rows = ["| " + " | ".join(row) + " |" for row in self.rows]
        formula = textwrap.fill(self.formula, 140, break_long_words=False, break_on_hyphens=False)
        return "\n".join([f"### {self.title}", "", formula, "", head, rule, *rows]) + "\n"


def machine(versions: dict[str, str]) -> str:
    """One line on where this was measured."""
    model, flags = platform.processor() or platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() == "flags":
                flags = value
    except OSError:
        pass
    vector = next((name for name in ("avx512bw", "avx2") if name in flags.split()), "no AVX2")
    parts = [f"{os.cpu_count()} cores", model, vector, f"Linux {platform.release().split('-')[0]}"]
    return ", ".join(parts + [f"{name} {version}" for name, version in versions.items()])
