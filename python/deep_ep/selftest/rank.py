"""What a case of the self-test gets: its rank, with buffers, meetings of all ranks and timing of calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..bootstrap import Bootstrap
from ..buffer import Buffer
from . import check as sc

Figures = dict[str, tuple[float, int]]  # name: (seconds of a call, bytes received)


@dataclass(frozen=True)
class Case:
    """A named check.

    Attributes:
        run: returns None or figures; raises if something is wrong.
        loses_rank: the last rank ends in this case, and that is right.
    """

    name: str
    run: Callable[[Rank], Figures | None]
    loses_rank: bool = False


class Rank:
    """What a case gets: its rank, device, shape and options."""

    def __init__(self, rank: int, options: Any, directory: str, report_end: Callable[[], None]) -> None:
        self.rank = rank
        self.options = options
        self.shape = sc.Shape(
            ranks=options.num_ranks,
            tokens=options.num_tokens,
            hidden=options.hidden,
            topk=options.num_topk,
            experts=options.num_experts,
            seed=options.seed,
            peers=options.num_nvl_peers,
            groups=options.num_topk_groups,
        )
        self.device = torch.device("cpu")
        if options.engine == "cuda":
            ordinal = (rank - options.first_rank) % torch.cuda.device_count()
            torch.cuda.set_device(ordinal)
            self.device = torch.device("cuda", ordinal)
        self._directory = directory
        self._made = self._meetings = 0
        self._report_end = report_end

    @contextlib.contextmanager
    def buffer(self, **arguments: Any) -> Iterator[Buffer]:
        """A buffer of all ranks; destroyed at the end."""
        self._made += 1
        name, ranks, master = f"selftest{self._made}", self.shape.ranks, self.options.master
        meeting = (
            Bootstrap.tcp(self.rank, ranks, master, name)
            if master
            else Bootstrap.file(self.rank, ranks, self._directory, name)
        )
        arguments.setdefault("timeout", self.options.timeout)
        arguments.setdefault("allow_mnnvl", self.options.allow_mnnvl)
        buffer = Buffer(None, bootstrap=meeting, engine=self.options.engine, explicitly_destroy=True, **arguments)
        try:
            yield buffer
        finally:
            buffer.destroy()

    def synchronize(self) -> None:
        """Waits until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any]) -> float:
        """Median seconds of a call as the host sees it, first calls left out."""
        for _ in range(2):
            call()
        samples = []
        for _ in range(self.options.iterations):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            samples.append(time.perf_counter() - start)
        return sorted(samples)[len(samples) // 2]

    def meet(self) -> None:
        """Waits for all ranks without the library under test: each leaves a file, and looks for the others'."""
        self._meetings += 1
        names = [f"meeting{self._meetings}.{rank}" for rank in range(self.shape.ranks)]
        Path(self._directory, names[self.rank]).touch()
        end = time.monotonic() + self.options.timeout
        while not all(Path(self._directory, name).exists() for name in names):
            sc.expect(time.monotonic() < end, "the other ranks did not come to a meeting")
            time.sleep(0.01)

    def last_words(self) -> None:
        """Reports to the parent that this process is about to end on purpose."""
        self._report_end()
