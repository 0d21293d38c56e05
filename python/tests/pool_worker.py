"""The body of one rank process: receives (function, size, arguments), answers with a value or an exception."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import hosts

PRELOAD = ["pool_worker", "pytest", "numpy", "reference", "deep_ep", "cases", "checks", "lowlat", "normal", "elastic"]
PR_SET_PDEATHSIG = 1
MANY_OBJECTS = 10_000  # that the collector looks at
REJOIN = "rejoin"  # instead of a function's name: leave the group, and join the one of the given generation


def log_path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank{rank}.log")


class Context:
    """What a rank function gets: who it is, its group, its device."""

    def __init__(self, rank: int, size: int, device: str, connection: Connection) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.engine = "cuda" if self.device.type == "cuda" else "cpu"
        self.group: Any = None
        self._connection = connection
        # All at the start, because torch names groups by counting them: every rank must make the same ones.
        self._groups = {n: dist.new_group(list(range(n)), backend="gloo") for n in range(1, size + 1)}

    def enter(self, size: int) -> None:
        """Makes ``group`` the group of the first ``size`` ranks."""
        self.size, self.group = size, self._groups[size]

    def report(self, value: Any) -> None:
        """Sends (now, value) to the test at once; it arrives even if this rank dies right after."""
        self._connection.send(("note", (time.monotonic(), value)))

    def hang_up(self) -> None:
        """Closes the pipe to the test; a forked child does so, lest it keep a dead rank's pipe open."""
        self._connection.close()

    def barrier(self) -> None:
        """Waits for all ranks of the group, through gloo and not through the library under test."""
        dist.barrier(group=self.group)

    def to_device(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor on this rank's device, with the same strides."""
        if tensor is None or self.device.type == "cpu":
            return tensor
        shape = tensor.shape
        for axis, step in enumerate(tensor.stride()):
            if step == 0 and shape[axis] > 1:
                tensor = tensor.narrow(axis, 0, 1)
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return there.copy_(tensor).expand(shape)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def _prepare(rank: int, device: str, folder: str) -> str:
    """Sets the process up; returns its device."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(log_path(folder, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have DataLoaders
    hosts.leave_host()
    torch.set_num_threads(1)
    if device == "cuda":
        index = rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        hosts.wait_before_copies()
        torch.zeros(1, device=f"cuda:{index}")  # makes the context, which takes seconds, before any test has a deadline
        return f"cuda:{index}"
    return device


def _join(folder: str, generation: int, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{generation}", rank=rank, world_size=size)


def _describe(error: BaseException) -> tuple[str, tuple[str, ...], str, str]:
    kinds = tuple(kind.__name__ for kind in type(error).__mro__)
    return type(error).__name__, kinds, str(error) or type(error).__name__, traceback.format_exc()


def _call(context: Context, name: str, size: int, args: tuple[Any, ...]) -> Any:
    context.enter(size)
    if context.device.type == "cuda":
        gc.collect()  # a graph of an earlier test that is freed during a capture would end the capture
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)(context, *args)


def _set_aside() -> None:
    """Keeps what is there from the collector: a test that collects looks at its own objects alone.

    After tests that compile, the caches of torch hold some 100,000 objects, and a collection takes 0.1 s.
    """
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        if len(gc.get_objects()) > MANY_OBJECTS:
            gc.freeze()


def main(
    rank: int,
    size: int,
    device: str,
    folder: str,
    generation: int,
    connection: Connection,
    settings: dict[str, str],
) -> None:
    """Joins the pool's group, then serves calls until the pool hangs up."""
    sys.path[:0] = [path for path in (os.path.dirname(__file__),) if path not in sys.path]
    os.environ.update(settings)
    own_device = _prepare(rank, device, folder)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join(folder, generation, rank, size)
    context = Context(rank, size, own_device, connection)
    gc.freeze()
    connection.send(("value", None))
    while True:
        try:
            name, ranks, args = connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if name == REJOIN:
            dist.destroy_process_group()
            _join(folder, args[0], rank, size)
            context = Context(rank, size, own_device, connection)
            connection.send(("value", None))
            continue
        _set_aside()
        try:
            answer = ("value", _call(context, name, ranks, args))
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt is a result too
            answer = ("error", _describe(error))
        connection.send(answer)
