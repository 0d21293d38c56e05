"""What the run shows: progress, the loss curve in the terminal and as a picture, and the table of communication."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Without a terminal a line is printed at most this often, in seconds.
LINE_EVERY = 5.0
# In a terminal the line is redrawn at most this often, in seconds.
REDRAW_EVERY = 0.1


class Progress:
    """A line with a bar, loss, and tokens a second; redrawn in place in a terminal, else printed now and then."""

    def __init__(self, title: str, steps: int, tokens_per_step: int) -> None:
        self._title, self._steps, self._tokens = title, steps, tokens_per_step
        self._live = sys.stdout.isatty()
        self._start = self._shown = time.monotonic()

    def update(self, done: int, loss: float) -> None:
        """Tells that `done` steps are over, the last with `loss`."""
        now, last = time.monotonic(), done >= self._steps
        if not last and now - self._shown < (REDRAW_EVERY if self._live else LINE_EVERY):
            return
        self._shown = now
        speed = done * self._tokens / max(1e-9, now - self._start)
        width = 24
        full = width * done // max(1, self._steps)
        bar = glyph("━", "#") * full + glyph("─", ".") * (width - full)
        line = (
            f"{self._title:<15} {bar} {done:>4}/{self._steps}  loss {loss:6.4f}  "
            f"{speed:>8,.0f} tokens/s  {now - self._start:5.1f} s"
        )
        print(f"\r{line}" if self._live else line, end="" if self._live and not last else "\n", flush=True)


def glyph(fancy: str, plain: str) -> str:
    """`fancy` where standard output can print it, else `plain`."""
    try:
        fancy.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return plain
    return fancy


def visible(text: str) -> str:
    """`text` with a dot for what a terminal would not print, or would obey."""
    return "".join(c if c == "\n" or (c.isprintable() and c != "\ufffd") else glyph("·", ".") for c in text)


def curve(values: Sequence[float], width: int = 64, height: int = 12) -> str:
    """Draws values over their index with braille dots (stars where the terminal has none), axes labelled.

    Values that are not finite leave a gap.
    """
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return "  ".join(f"{v:.4f}" for v in values)
    low, high = min(finite), max(finite)
    cells = _dots([_at(values, i / (2 * width - 1)) for i in range(2 * width)], low, high, width, height)
    lines = []
    for i, row in enumerate(cells):
        label = f"{high - (high - low) * i / (height - 1):6.2f}" if i % 3 == 0 or i == height - 1 else " " * 6
        text = "".join(glyph(chr(0x2800 + cell), "*") if cell else " " for cell in row)
        lines.append(f"{label} {glyph('┤', '|')}{text}".rstrip())
    lines.append(f"{'':6} {glyph('└', '+')}{glyph('─', '-') * width}")
    lines.append(f"{'':8}1{'step':^{width - 2 - len(str(len(values)))}}{len(values)}")
    return "\n".join(lines)


def _at(values: Sequence[float], part: float) -> float:
    """The value at that part (0 to 1) of the way, between two values in proportion."""
    place = part * (len(values) - 1)
    left = min(int(place), len(values) - 2)
    return values[left] + (values[left + 1] - values[left]) * (place - left)


def _dots(values: Sequence[float], low: float, high: float, width: int, height: int) -> list[list[int]]:
    """Braille cells [height][width], each 2 dots wide and 4 high, of a line through one value per column of dots."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(values):
        if not math.isfinite(value):
            before = None
            continue
        row = round((high - value) / ((high - low) or 1.0) * (4 * height - 1))
        start = row if before is None else before
        for y in range(min(row, start), max(row, start) + 1):
            cells[y // 4][column // 2] |= bits[y % 4][column % 2]
        before = row
    return cells


def picture(path: Path, losses: Sequence[float], proof: Sequence[float], title: str) -> bool:
    """Writes both runs' losses as a PNG, the single process's as circles; False if matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#1f6fb4", linewidth=1.8, label="expert-parallel, through deep_ep")
    if proof:
        every = max(1, len(proof) // 20)
        axes.plot(
            range(1, len(proof) + 1, every), list(proof)[::every], "o", markersize=6, markerfacecolor="none",
            markeredgecolor="#d1495b", markeredgewidth=1.4, label="one process, no deep_ep",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="cross entropy (nats a byte)", title=title, xlim=(0, len(losses) + 1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True


def size(count: float) -> str:
    """Bytes with a unit of 1024: '3.4 MiB'."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )

    return "\n".join([line(head), glyph("─", "-") * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)])


def communication(stats: Sequence[dict[str, Any]]) -> str:
    """The table of what was communicated, from `Buffer.stats()` of every rank, in rank order.

    Bytes are those that rank 0 sent to each rank; calls are rank 0's; the times are the slowest rank's.
    """
    ranks = len(stats)
    rows = []
    for operation, own in stats[0].items():
        if own["calls"] == 0:
            continue
        p50 = max(rank[operation]["p50_us"] for rank in stats)
        p99 = max(rank[operation]["p99_us"] for rank in stats)
        rows.append(
            [operation, f"{own['calls']:,}", *[size(b) if b else "-" for b in own["bytes_to_peer"]],
             f"{p50:,.0f}", f"{p99:,.0f}"]
        )  # fmt: skip
    head = ["operation", "calls", *[f"0 {glyph('→', '>')} {r}" for r in range(ranks)], "p50 us", "p99 us"]
    return table(head, rows)


def largest_difference(losses: Sequence[float], proof: Sequence[float]) -> tuple[float, int]:
    """The largest |difference| between two runs' losses and the step (from 1) it is at; a NaN counts as infinite."""
    worst, where = 0.0, 1
    for step, (a, b) in enumerate(zip(losses, proof, strict=False), start=1):
        difference = abs(a - b)
        if math.isnan(difference):
            difference = math.inf
        if difference > worst:
            worst, where = difference, step
    return worst, where
