"""Serves while a rank is killed and comes back: tokens per second over time, as a picture.

    python python/examples/serve_elastic.py --out elastic.svg

Each rank decodes batches in a loop: low-latency dispatch, an expert, combine. One process is killed; the others learn
it from an error, regroup without it and go on, its experts now on other ranks. A supervisor starts a new process, which
imports torch, finds the group by its key and joins; the loop takes it in between two steps. The picture has the tokens
per second of all ranks, and the times between completed steps of rank 0. Exit status 0 means that each step's sums were
right and that no change of the group took a survivor longer than --gap seconds, from step to step, detection apart.
The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import deep_ep

EXPERTS, TOP_K, TOKENS, HIDDEN = 12, 4, 32, 2048
LOOK_EVERY = 8  # steps: how often the ranks ask, together, whether a process wants to join
PATIENCE = 2000  # attempts to agree on who is lost, a millisecond apart
SECONDS = 2.0  # served before the death, and between it and the new process's start


class Server:
    """One rank of the serving group."""

    def __init__(self, engine: str, **where: Any) -> None:
        size = max(deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, r, EXPERTS) for r in range(1, 5))
        self.buffer = deep_ep.Buffer(
            None, 0, size, low_latency_mode=True, num_qps_per_rank=EXPERTS, engine=engine, explicitly_destroy=True,
            timeout=20, **where,
        )  # fmt: skip
        self.device = self.buffer.device
        self.x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=self.device)
        self.weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, device=self.device)
        self.joined = False  # in place of a lost rank
        self.turn = 0  # steps since the group was made: the same on all ranks, unlike the number of all steps
        self.steps: list[float] = []  # when each was completed
        self.changes: list[tuple[str, float, float]] = []  # what, begin and end

    def step(self) -> None:
        """One batch: expert e multiplies by e + 1, so that the sums show whose experts answered."""
        number = torch.arange(TOKENS, device=self.device).unsqueeze(1) + len(self.steps)
        idx = (number + torch.arange(TOP_K, device=self.device) * 3) % EXPERTS
        rows, counts, handle, _, _ = self.buffer.low_latency_dispatch(self.x, idx, TOKENS, EXPERTS, use_fp8=False)
        local = EXPERTS // self.buffer.group_size
        factors = torch.arange(1, local + 1, device=self.device) + self.buffer.rank * local
        answers = rows * factors.to(rows.dtype).view(-1, 1, 1)
        out, _, _ = self.buffer.low_latency_combine(answers, idx, self.weights, handle)
        want = ((idx + 1).float() * self.weights).sum(1)
        if not torch.equal(out[:, 0].float(), want.bfloat16().float()):
            raise SystemExit(f"rank {self.buffer.rank}: wrong sums at step {len(self.steps)}")
        self.steps.append(time.monotonic())
        self.turn += 1

    def regroup(self, what: str, members: list[int]) -> None:
        """Moves to another group between two steps."""
        begin = time.monotonic()
        self.buffer.regroup(members, renumber=True, timeout=20)
        self.changes.append((what, begin, time.monotonic()))
        self.turn = 0

    def serve(self, steps: int, everyone: int) -> None:
        """The loop of a serving program; it ends so many steps after the last process has joined."""
        left = steps
        while left:
            try:
                waiting = []
                if self.buffer.group_size < everyone and self.turn % LOOK_EVERY == 0:
                    waiting = self.buffer.pending_joins(agreed=True)
                if waiting:
                    self.regroup("joined", list(range(self.buffer.group_size + 1)))
                self.step()
                if self.buffer.group_size == everyone and (self.joined or self.changes):
                    left -= 1
            except deep_ep.DeepEPError as error:
                self.recover(error)

    def recover(self, error: deep_ep.DeepEPError) -> None:
        """Goes on without the dead. Survivors may hear of a death at different times: they agree a little later."""
        self.changes.append(("lost", time.monotonic(), time.monotonic()))
        for _ in range(PATIENCE):
            lost = self.buffer.lost_ranks()
            try:
                if lost:
                    self.regroup("left", [rank for rank in range(self.buffer.group_size) if rank not in lost])
                    return
            except deep_ep.DeepEPError as again:
                error = again
            time.sleep(0.001)
        raise error


def rank_body(rank: int, size: int, folder: str, engine: str, steps: int) -> None:
    """A process of the group, or with a number from `size` on one that joins."""
    torch.set_num_threads(1)
    if engine == "cuda":
        torch.cuda.set_device(min(rank, size - 1) % torch.cuda.device_count())
    path = Path(folder, "key")
    if rank < size:
        server = Server(engine, bootstrap=deep_ep.Bootstrap.file(rank, size, folder))
        key = server.buffer.join_key
        if rank == 0:
            path.write_text(key)
    else:
        server = Server(engine, join=path.read_text())
        server.joined = True
    try:
        server.serve(steps, size)
        server.buffer.barrier()
    finally:
        server.buffer.destroy()
    Path(folder, f"rank{rank}.json").write_text(json.dumps({"steps": server.steps, "changes": server.changes}))


def run(ranks: int, engine: str, steps: int) -> dict[str, Any]:
    """Starts the ranks, kills the last one, starts another; returns what each has written down."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        start = lambda rank: context.Process(target=rank_body, args=(rank, ranks, folder, engine, steps))  # noqa: E731
        processes = [start(rank) for rank in range(ranks)]
        for each in processes:
            each.start()
        while not Path(folder, "key").exists() and all(each.is_alive() for each in processes):
            time.sleep(0.05)
        time.sleep(SECONDS)
        victim = processes[-1]
        os.kill(victim.pid or 0, signal.SIGKILL)
        killed = time.monotonic()
        time.sleep(SECONDS)
        processes.append(start(ranks))
        processes[-1].start()
        restarted = time.monotonic()
        for each in processes:
            each.join()
        if any(each.exitcode for each in processes if each is not victim):
            raise SystemExit("serve_elastic: a rank failed")
        found = {rank: json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in (*range(ranks - 1), ranks)}
    return {"killed": killed, "restarted": restarted, "ranks": found}


def gaps(found: dict[str, Any]) -> dict[str, float]:
    """Of the survivors, the longest of each kind, in seconds.

    Returns:
        ``detection``: from the death to the error; ``change``: between two completed steps with a change of the group
        between them, without the detection; ``elsewhere``: between others, where processes wait for a core alone.
    """
    longest = {"detection": 0.0, "change": 0.0, "elsewhere": 0.0}
    for rank in found["ranks"].values():
        steps, changes = rank["steps"], rank["changes"]
        for before, after in zip(steps, steps[1:], strict=False):
            inside = [(what, begin) for what, begin, _ in changes if before < begin < after]
            lost = [begin for what, begin in inside if what == "lost"]
            kind = "change" if inside else "elsewhere"
            longest[kind] = max(longest[kind], after - max([before, *lost]))
            if lost:
                longest["detection"] = max(longest["detection"], lost[0] - found["killed"])
    return longest


def draw(found: dict[str, Any], path: Path) -> None:
    """Tokens per second of all ranks, and below the times between rank 0's steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = found["ranks"].values()
    zero = min(rank["steps"][0] for rank in ranks)
    end = max(rank["steps"][-1] for rank in ranks)
    width = 0.1
    bins = [0.0] * (int((end - zero) / width) + 1)
    for rank in ranks:
        for at in rank["steps"]:
            bins[int((at - zero) / width)] += TOKENS / width
    figure, (rate, gaps) = plt.subplots(2, 1, figsize=(10.5, 4.6), sharex=True, height_ratios=(2, 1))
    rate.step([i * width for i in range(len(bins))], [n / 1000 for n in bins], where="post", color="#2e7d4f")
    rate.set_ylabel("1000 tokens/s")
    rate.set_ylim(bottom=0)
    first = next(iter(ranks))
    steps = first["steps"]
    pairs = list(zip(steps, steps[1:], strict=False))
    dots = {"markersize": 3, "color": "#b5473c", "rasterized": True}
    gaps.plot([b - zero for _, b in pairs], [(b - a) * 1000 for a, b in pairs], ".", **dots)
    gaps.set_ylabel("ms between steps\nof rank 0")
    gaps.set_yscale("log")
    gaps.set_xlabel("seconds")
    marks = [("killed", found["killed"]), ("new process started", found["restarted"])]
    marks += [("joined", begin) for what, begin, _ in first["changes"] if what == "joined"]
    for name, at in marks:
        for axes in (rate, gaps):
            axes.axvline(at - zero, color="#222222", linewidth=0.8, linestyle=":")
        rate.text(at - zero, rate.get_ylim()[1], f" {name}", fontsize=8, va="top")
    for axes in (rate, gaps):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes of the group: 2, 3 or 4")
    parser.add_argument("--engine", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=2000, help="to serve after the new process has joined")
    parser.add_argument("--gap", type=float, default=0.2, help="seconds: the longest that is allowed")
    parser.add_argument("--out", type=Path, help="picture (svg or png); needs matplotlib")
    options = parser.parse_args()
    if options.ranks not in (2, 3, 4):
        parser.error("--ranks: 2, 3 or 4, which divide the experts")
    found = run(options.ranks, options.engine, options.steps)
    longest = {kind: seconds * 1000 for kind, seconds in gaps(found).items()}
    print(f"the death was seen after {longest['detection']:.1f} ms at most")
    print(f"longest time between two completed steps of a survivor, detection apart: {longest['change']:.1f} ms")
    print(f"without a change of the group between them: {longest['elsewhere']:.1f} ms")
    if options.out:
        draw(found, options.out)
    return int(longest["change"] > 1000 * options.gap)


if __name__ == "__main__":
    sys.exit(main())
