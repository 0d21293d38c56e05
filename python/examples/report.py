"""What the run shows: progress, the loss curve in the terminal and as a picture, and the table of communication."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import plotext
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Without a terminal nothing is redrawn, and lines are as long as they need to be.
_console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


# Without a terminal a line is printed at most this often, in seconds.
LINE_EVERY = 10.0


class Training:
    """A bar with loss and tokens a second; redrawn in place in a terminal, else a line now and then."""

    def __init__(self, title: str, steps: int, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._bar = Progress(
            TextColumn(f"{title:<15}"), BarColumn(24), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:6.4f}  {task.fields[speed]:>8,.0f} tokens/s"), TimeElapsedColumn(),
            console=_console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=steps, loss=math.nan, speed=0.0)
        self._title, self._lines = title, 1

    def __enter__(self) -> Training:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, done: int, loss: float) -> None:
        """Reports that `done` steps are over, the last with `loss`."""
        seconds = self._bar.tasks[0].elapsed or 0.0
        speed = done * self._tokens / max(1e-9, seconds)
        self._bar.update(self._task, completed=done, loss=loss, speed=speed)
        if not _console.is_terminal and seconds >= self._lines * LINE_EVERY:
            self._lines = int(seconds / LINE_EVERY) + 1
            _console.print(f"{self._title:<15} step {done}, loss {loss:.4f}, {speed:,.0f} tokens/s")


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


def curve(values: Sequence[float], width: int = 76, height: int = 14) -> str:
    """Draws values over their index, from 1, axes labelled; values that are not finite leave a gap."""
    finite = [(step, value) for step, value in enumerate(values, start=1) if math.isfinite(value)]
    if len(finite) < 2:
        return "  ".join(f"{v:.4f}" for v in values)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.frame(False)
    plotext.plotsize(width, height)
    plotext.plot(*zip(*finite, strict=True), marker="braille" if glyph("\u28ff", "") else "dot")
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))


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


def show_communication(stats: Sequence[dict[str, Any]]) -> None:
    """Prints what was communicated, from `Buffer.stats()` of every rank, in rank order.

    Bytes are those that rank 0 sent to each rank; calls are rank 0's; the times are the slowest rank's.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("operation")
    for name in ("calls", *[f"0 {glyph('→', '>')} {r}" for r in range(len(stats))], "p50 us", "p99 us"):
        table.add_column(name, justify="right", no_wrap=True)
    for operation, own in stats[0].items():
        if own["calls"] == 0:
            continue
        times = [max(rank[operation][key] for rank in stats) for key in ("p50_us", "p99_us")]
        sent = [size(count) if count else "-" for count in own["bytes_to_peer"]]
        table.add_row(operation, f"{own['calls']:,}", *sent, *[f"{us:,.0f}" for us in times])
    _console.print(table)


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
