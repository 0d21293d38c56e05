"""Draws what runs when: low latency with hooks over a network, and normal mode on two streams, from traced runs.

    make lib kernels program && .venv/bin/python bench/timelines.py --out docs/pictures

Two ranks of the CPU engine are two nodes (a node size of 1), joined by the software RDMA with delays (`1:late`). Each
program runs its rounds in two ways, without overlap and with it, with the same work; `deepep trace` gives the times of
the library's calls, the program's own clock those of its computing, and both read CLOCK_MONOTONIC. Of each way the
shortest round of rank 0 is drawn, since a busy machine only makes rounds longer. Writes low_latency_hooks.svg and
two_streams.svg.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - after the choice of the backend
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
EXPERTS, TOP_K = 16, 4
DELAYS = "1:late"  # DEEPEP_SOFTWARE_RDMA: operations take effect late, by this seed
SETTLE = 3  # rounds of each way before those that count
PATIENCE = 100  # looks at the trace, 0.1 s apart
READ_EVERY = 50  # rounds; the trace holds 1024 calls, a round has at most 16


@dataclass
class Span:
    """Something that ran on rank 0, in ns of CLOCK_MONOTONIC.

    Attributes:
        lane: "caller": the program's thread; "library": a call of the library, from its trace.
        waited: ns of it, at its end for a call in one piece, spent waiting for rows.
    """

    name: str
    lane: str
    start: int
    end: int
    waited: int = 0


class Recorder:
    """The program's own clock."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.calls: dict[int, Span] = {}  # by start
        self.rounds: list[tuple[str, int, int]] = []  # way, start, end

    @contextmanager
    def span(self, name: str) -> Iterator[Span]:
        """Records what runs inside."""
        span = Span(name, "caller", time.monotonic_ns(), 0)
        yield span
        span.end = time.monotonic_ns()
        self.spans.append(span)

    def read(self, program: str) -> None:
        """Adds the calls that the library's trace of this process holds: the last 1024.

        Other processes see a call up to 50 ms later, so this waits until those of the last round are there.
        """
        way, start, _ = self.rounds[-1]
        for _ in range(PATIENCE):
            time.sleep(0.1)
            self.add_calls(program)
            if sum(call >= start for call in self.calls) >= CALLS[way]:
                return
        raise RuntimeError(f"the trace lacks calls of the last round: {sorted(self.calls)[-CALLS[way] :]} from {start}")

    def add_calls(self, program: str) -> None:
        """Adds the calls of the trace as it is now."""
        done = subprocess.run([program, "trace", "--output", "-"], capture_output=True, text=True, check=True)
        events = json.loads(done.stdout)["traceEvents"]
        heads = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
        mine = {number for name, number in heads.items() if f"(pid {os.getpid()}," in name}
        for event in events:
            if event["ph"] == "X" and event["pid"] in mine:
                start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
                self.calls[start] = Span(event["name"], "library", start, end)

    def all(self) -> list[dict[str, Any]]:
        """Every span as a dict."""
        return [asdict(span) for span in [*self.spans, *self.calls.values()]]

    @contextmanager
    def round(self, way: str) -> Iterator[None]:
        """Records one round of a way."""
        start = time.monotonic_ns()
        yield
        self.rounds.append((way, start, time.monotonic_ns()))


class Computing:
    """A fixed amount of arithmetic on one core, in place of attention or experts."""

    def __init__(self, recorder: Recorder, rows: int) -> None:
        self.recorder = recorder
        self.a, self.b = torch.randn(rows, 768), torch.randn(768, 768)

    def __call__(self, name: str) -> None:
        with self.recorder.span(name):
            self.a @ self.b


def routing(tokens: int, rank: int, batch: str) -> Any:
    """``[tokens, TOP_K]``, different for each rank and micro-batch."""
    generator = torch.Generator().manual_seed(ord(batch) * 100 + rank)
    return torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices


class LowLatency:
    """Micro-batches A and B through dispatch, experts, combine and attention: A's is that of the next layer."""

    tokens, hidden = 128, 2048
    ways = ("in one piece", "by hooks")

    def __init__(self, deep_ep: Any, meeting: Any, rank: int, recorder: Recorder) -> None:
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(self.tokens, self.hidden, RANKS, EXPERTS)
        self.buffer = deep_ep.Buffer(
            None, 0, size, low_latency_mode=True, bootstrap=meeting, engine="cpu", explicitly_destroy=True
        )
        self.recorder, self.compute = recorder, Computing(recorder, 640)
        self.x = torch.randn(self.tokens, self.hidden).bfloat16()
        self.idx = {batch: routing(self.tokens, rank, batch) for batch in "AB"}
        self.weights = torch.full((self.tokens, TOP_K), 1 / TOP_K)
        self.rows = {
            batch: torch.randn(EXPERTS // RANKS, RANKS * self.tokens, self.hidden).bfloat16() for batch in "AB"
        }
        self.handle: dict[str, Any] = {}

    def dispatch(self, batch: str, hook: bool) -> Callable[[], None]:
        """The whole call, or its sending half; returns the rest."""
        waited = torch.zeros(RANKS, dtype=torch.int64)
        with self.recorder.span(f"dispatch {batch}") as span:
            _, _, self.handle[batch], _, rest = self.buffer.low_latency_dispatch(
                self.x,
                self.idx[batch],
                self.tokens,
                EXPERTS,
                dispatch_wait_recv_cost_stats=waited,
                return_recv_hook=hook,
            )
        return self.receiving(f"dispatch {batch}", span, waited, rest)

    def combine(self, batch: str, hook: bool) -> Callable[[], None]:
        """Likewise."""
        waited = torch.zeros(RANKS, dtype=torch.int64)
        with self.recorder.span(f"combine {batch}") as span:
            _, _, rest = self.buffer.low_latency_combine(
                self.rows[batch], self.idx[batch], self.weights, self.handle[batch],
                combine_wait_recv_cost_stats=waited, return_recv_hook=hook,
            )  # fmt: skip
        return self.receiving(f"combine {batch}", span, waited, rest)

    def receiving(self, name: str, span: Span, waited: Any, rest: Callable[[], None] | None) -> Callable[[], None]:
        """Runs the receiving half, if there is one, and records what the call waited for its peer."""
        if rest is None:
            span.waited = int(waited.max())
            return lambda: None

        def receive() -> None:
            with self.recorder.span(name) as half:
                rest()
            half.waited = int(waited.max())

        return receive

    def run(self, way: str) -> None:
        """One round: the same work in either way."""
        hook = way == self.ways[1]
        if not hook:
            for batch in "AB":
                if batch == "B":
                    self.compute("attention B")
                self.dispatch(batch, hook)
                self.compute(f"experts {batch}")
                self.combine(batch, hook)
                if batch == "A":
                    self.compute("attention A")
            return
        receive_a = self.dispatch("A", hook)
        self.compute("attention B")
        receive_a()
        receive_b = self.dispatch("B", hook)
        self.compute("experts A")
        receive_b()
        receive_a = self.combine("A", hook)
        self.compute("experts B")
        receive_a()
        receive_b = self.combine("B", hook)
        self.compute("attention A")
        receive_b()


class Normal:
    """Likewise in normal mode, asynchronous: the calls run on the buffer's communication stream."""

    tokens, hidden = 64, 2048
    ways = ("one after the other", "on two streams")

    def __init__(self, deep_ep: Any, meeting: Any, rank: int, recorder: Recorder) -> None:
        config = deep_ep.Buffer.get_dispatch_config(RANKS)
        row = self.hidden * 2
        self.buffer = deep_ep.Buffer(
            None, config.get_nvl_buffer_size_hint(row, RANKS), config.get_rdma_buffer_size_hint(row, RANKS),
            bootstrap=meeting, engine="cpu", explicitly_destroy=True,
        )  # fmt: skip
        self.recorder, self.compute = recorder, Computing(recorder, 640)
        self.x = torch.randn(self.tokens, self.hidden).bfloat16()
        self.idx = {batch: routing(self.tokens, rank, batch) for batch in "AB"}
        self.weights = torch.full((self.tokens, TOP_K), 1 / TOP_K)
        self.layout = {batch: self.buffer.get_dispatch_layout(self.idx[batch], EXPERTS) for batch in "AB"}

    def dispatch(self, batch: str) -> tuple[Any, Any, Any]:
        """Returns (rows, handle, event) once the counts are here."""
        ranks, nodes, experts, in_rank, _ = self.layout[batch]
        with self.recorder.span(f"wait for counts {batch}"):
            rows, _, _, _, handle, event = self.buffer.dispatch(
                self.x, num_tokens_per_rank=ranks, num_tokens_per_rdma_rank=nodes, is_token_in_rank=in_rank,
                num_tokens_per_expert=experts, topk_idx=self.idx[batch], topk_weights=self.weights, async_finish=True,
            )  # fmt: skip
        return rows, handle, event

    def combine(self, rows: Any, handle: Any) -> Any:
        """Returns the event."""
        return self.buffer.combine(rows, handle, async_finish=True)[2]

    def wait(self, event: Any, name: str) -> None:
        """The compute stream waits for the communication stream."""
        with self.recorder.span(f"wait for {name}"):
            event.current_stream_wait()

    def run(self, way: str) -> None:
        """One round: the same work in either way."""
        if way == self.ways[0]:
            for batch in "AB":
                if batch == "B":
                    self.compute("attention B")
                rows, handle, event = self.dispatch(batch)
                self.wait(event, f"dispatch {batch}")
                self.compute(f"experts {batch}")
                self.wait(self.combine(rows, handle), f"combine {batch}")
                if batch == "A":
                    self.compute("attention A")
            return
        rows_a, handle_a, dispatched_a = self.dispatch("A")
        self.compute("attention B")
        self.wait(dispatched_a, "dispatch A")
        rows_b, handle_b, dispatched_b = self.dispatch("B")
        self.compute("experts A")
        combined_a = self.combine(rows_a, handle_a)
        self.wait(dispatched_b, "dispatch B")
        self.compute("experts B")
        combined_b = self.combine(rows_b, handle_b)
        self.wait(combined_a, "combine A")
        self.compute("attention A")
        self.wait(combined_b, "combine B")


# Calls of the library in a round: a low-latency call by a hook has two halves; a dispatch of normal mode notifies.
CALLS = {LowLatency.ways[0]: 4, LowLatency.ways[1]: 8, Normal.ways[0]: 6, Normal.ways[1]: 6}
PROGRAMS: dict[str, type[LowLatency] | type[Normal]] = {"low_latency_hooks": LowLatency, "two_streams": Normal}


def rank_body(rank: int, rounds: int, folder: str, program: str) -> None:
    """Runs both programs on one rank; rank 0 leaves <folder>/<name>.json for each."""
    os.environ |= {"DEEPEP_NUM_MAX_NVL_PEERS": "1", "DEEPEP_SOFTWARE_RDMA": DELAYS, "DEEPEP_ENGINE": "cpu"}
    sys.path.insert(0, str(ROOT / "python"))
    import deep_ep

    torch.set_num_threads(1)
    for name, kind in PROGRAMS.items():
        recorder = Recorder()
        job = kind(deep_ep, deep_ep.Bootstrap.file(rank, RANKS, folder, name), rank, recorder)
        run_rounds(job, recorder, rounds, program if rank == 0 else "")
        if rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps({"rounds": recorder.rounds, "spans": recorder.all()}))
        job.buffer.barrier()
        job.buffer.destroy()


def run_rounds(job: LowLatency | Normal, recorder: Recorder, rounds: int, program: str) -> None:
    """The rounds of both ways in turn; with a program the trace is read, while the other rank waits."""
    for number in range(-SETTLE, rounds):
        if program and number > 0 and number % READ_EVERY == 0:
            recorder.read(program)
        for way in job.ways:
            job.buffer.barrier()
            if number < 0:
                job.run(way)
            else:
                with recorder.round(way):
                    job.run(way)
    job.buffer.barrier()
    if program:
        recorder.read(program)


def measure(rounds: int, program: str) -> dict[str, Any]:
    """Of each program the spans of the shortest round of each way, times from the round's start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["matplotlib.pyplot", "deep_ep"])  # imported once, not once for each rank
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_body, args=(r, rounds, folder, program)) for r in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise SystemExit("timelines: a rank failed")
        return {name: shortest(name, json.loads(Path(folder, f"{name}.json").read_text())) for name in PROGRAMS}


def shortest(name: str, found: dict[str, Any]) -> dict[str, list[Span]]:
    """The spans of the shortest round of each way."""
    spans = [Span(**each) for each in found["spans"]]
    result = {}
    for way in PROGRAMS[name].ways:
        _, start, end = min((end - start, start, end) for w, start, end in found["rounds"] if w == way)
        inside = sorted((s for s in spans if start <= s.start <= end), key=lambda s: s.start)
        calls = [s for s in inside if s.lane == "library"]
        if len(calls) != CALLS[way]:
            raise SystemExit(f"timelines: {way}: {CALLS[way]} calls expected in a round, the trace has {calls}")
        result[way] = [Span(s.name, s.lane, s.start - start, s.end - start, s.waited) for s in inside]
    return result


# ---- Drawing

COMPUTING = {"A": "#a9c9e8", "B": "#f6cf9b"}
OPERATIONS = {"notify": "#8c6bb1", "dispatch": "#2e7d4f", "combine": "#b5473c"}
IN_FLIGHT = {"dispatch": "#cfe8d6", "combine": "#f3d3cf"}
TEXT, WIDTH = "#222222", 10.5  # inches
LETTER = 0.07  # inches, of the font of 8 points


class Panel:
    """One way of a program: lanes over time."""

    def __init__(self, axes: Axes, title: str, lanes: list[str], length: float) -> None:
        self.axes, self.length = axes, length
        axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(0, length * 1.08)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)

    def bar(self, lane: int, start: int, end: int, colour: str, text: str = "", ink: str = TEXT) -> None:
        """A bar from start to end, in ns, with its text where that fits."""
        width = (end - start) / 1e6
        self.axes.barh(lane, width, left=start / 1e6, height=0.7, color=colour, edgecolor="white", linewidth=0.6)
        if len(text) * LETTER < width / self.length * WIDTH * 0.8:
            ground = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
            at, options = (start + end) / 2e6, {"ha": "center", "va": "center", "fontsize": 8, "zorder": 5}
            self.axes.text(at, lane, text, color=ink, bbox=ground, **options)

    def waiting(self, lane: int, start: int, end: int) -> None:
        """Hatches a part of a bar."""
        options = {"color": "none", "edgecolor": "white", "hatch": "/////", "linewidth": 0}
        self.axes.barh(lane, (end - start) / 1e6, left=start / 1e6, height=0.7, **options)

    def end(self, at: int, lanes: int) -> None:
        """A line where the round ends, with its time."""
        self.axes.axvline(at / 1e6, color=TEXT, linewidth=0.8)
        self.axes.text(at / 1e6, lanes - 0.5, f" {at / 1e6:.1f} ms", fontsize=9, va="bottom")


def finish(figure: Figure, axes: Axes, legend: list[Any], path: Path) -> None:
    """Legend, scale, file."""
    axes.set_xlabel("ms", fontsize=9)
    figure.legend(handles=legend, loc="lower center", ncols=len(legend), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, format=path.suffix[1:], dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(path)


def last(spans: list[Span]) -> int:
    """When the last one of the caller ended."""
    return max(span.end for span in spans if span.lane == "caller")


def computing(panel: Panel, lane: int, spans: list[Span]) -> None:
    """The bars of attention and experts."""
    for span in spans:
        if span.name.startswith(("attention", "experts")):
            panel.bar(lane, span.start, span.end, COMPUTING[span.name[-1]], span.name)


def draw_low_latency(found: dict[str, list[Span]], path: Path) -> None:
    """A lane for the thread that computes and calls, one for what is between the halves of a call."""
    figure, both = plt.subplots(2, 1, figsize=(WIDTH, 4.4), sharex=True)
    length = max(last(spans) for spans in found.values()) / 1e6
    titles = (
        "Each call in one piece: the rank waits while rows cross the network",
        "Send half, other micro-batch, hook: the rows cross meanwhile",
    )
    for axes, title, (_, spans) in zip(both, titles, found.items(), strict=True):
        panel = Panel(axes, title, ["rank 0", "rows under way"], length)
        computing(panel, 0, spans)
        sent: dict[str, int] = {}  # when the sending half ended
        for call in (s for s in spans if s.lane == "library"):
            issued = next(s for s in spans if s.lane == "caller" and s.start <= call.start <= s.end)
            operation = issued.name.split()[0]
            waiting = max(call.start, call.end - issued.waited)  # at its end, but for the copy of the last rows
            panel.bar(0, call.start, call.end, OPERATIONS[operation], issued.name, "white")
            panel.waiting(0, waiting, call.end)
            if call.name.endswith(" send"):
                sent[issued.name] = call.end
            elif call.name.endswith(" receive"):
                panel.bar(1, sent[issued.name], call.start, IN_FLIGHT[operation], issued.name)
            else:
                panel.bar(1, waiting, call.end, IN_FLIGHT[operation], issued.name)
        panel.end(last(spans), 2)
    legend = [
        Patch(color=COMPUTING["A"], label="computing, micro-batch A"),
        Patch(color=COMPUTING["B"], label="computing, B"),
        Patch(color=OPERATIONS["dispatch"], label="dispatch, or a half"),
        Patch(color=OPERATIONS["combine"], label="combine, or a half"),
        Patch(facecolor="#999999", edgecolor="white", hatch="/////", label="waiting for rows"),
    ]
    finish(figure, both[1], legend, path)


def draw_streams(found: dict[str, list[Span]], path: Path) -> None:
    """A lane for each of the two streams."""
    figure, both = plt.subplots(2, 1, figsize=(WIDTH, 4.4), sharex=True)
    length = max(last(spans) for spans in found.values()) / 1e6
    titles = ("Every call is waited for at once", "A call is waited for where its result is needed")
    for axes, title, (_, spans) in zip(both, titles, found.items(), strict=True):
        panel = Panel(axes, title, ["compute stream", "communication\nstream"], length)
        computing(panel, 0, spans)
        for span in spans:
            if span.name.startswith("wait"):
                panel.bar(0, span.start, span.end, "#999999")
                panel.waiting(0, span.start, span.end)
        number: dict[str, int] = {}
        for span in (s for s in spans if s.lane == "library"):
            batch = "AB"[number.get(span.name, 0)]
            number[span.name] = number.get(span.name, 0) + 1
            panel.bar(1, span.start, span.end, OPERATIONS[span.name], f"{span.name} {batch}", "white")
        panel.end(last(spans), 2)
    legend = [
        Patch(color=COMPUTING["A"], label="computing, micro-batch A"),
        Patch(color=COMPUTING["B"], label="computing, B"),
        *(Patch(color=colour, label=operation) for operation, colour in OPERATIONS.items()),
        Patch(facecolor="#999999", edgecolor="white", hatch="/////", label="waiting for counts or an event"),
    ]
    finish(figure, both[1], legend, path)


DRAWINGS = {"low_latency_hooks": draw_low_latency, "two_streams": draw_streams}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both programs and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each way (60)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg", help="of the pictures (svg)")
    parser.add_argument("--program", default=str(ROOT / "build" / "bin" / "deepep"), help="the deepep program")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    measured = measure(options.rounds, options.program)
    for name, draw in DRAWINGS.items():
        found = measured[name]
        matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none"}  # the same spans give the same file
        draw(found, options.out / f"{name}.{options.format}")
        for way, spans in found.items():
            busy = sum(span.end - span.start for span in spans if span.name.startswith(("attention", "experts")))
            print(f"  {way}: {last(spans) / 1e6:.1f} ms, computing {busy / 1e6:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
