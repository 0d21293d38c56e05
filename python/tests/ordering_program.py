"""How calls are ordered among streams on CUDA, without a GPU: over a kernel library that writes its calls down.

    python ordering_program.py FOLDER

FOLDER, which DEEPEP_KERNELS names, holds that library as libdeepep_cpu.so; its streams are queues as on a GPU. torch's
streams are stand-ins. Prints a line of JSON for each call: what the kernel library was asked in which order, with each
event by the record that it is of; what torch's stand-ins saw; and how often torch's allocator was not told of a stream
that uses a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import operator
import os
import re
import sys
from pathlib import Path
from typing import Any

COMM, CURRENT = "communication", "current"
seen: list[str] = []  # of torch's stand-ins
told: set[tuple[int, str]] = set()  # storages and streams


class Stream:
    """Stands for a torch stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: object) -> None:
        seen.append(f"{self.name} waits for {event}")

    def __enter__(self) -> None:
        seen.append(f"in {self.name}")

    def __exit__(self, *_: object) -> None:
        pass


class NoMemoryError(Exception):
    """What torch's allocator raises in the end."""


def refuse(tensor: object, stream: object) -> None:
    """Stands for a record_stream that fails."""
    raise NoMemoryError


def count_taken() -> list[int]:
    """A 1 for each step of an asynchronous call that follows a plan, from now on."""
    from deep_ep import _face

    taken, run_behind = [], _face.Site.run_behind

    def counted(*args: Any, **options: Any) -> Any:
        got = run_behind(*args, **options)
        taken.append(int(type(got) is tuple))
        return got

    _face.Site.run_behind = counted  # type: ignore[method-assign]
    return taken


def storages(value: Any) -> set[int]:
    """Of all tensors in nested sequences, but for empty ones."""
    if hasattr(value, "untyped_storage"):
        return {value.untyped_storage().data_ptr()} - {0}
    return set().union(*map(storages, value)) if isinstance(value, (tuple, list)) else set()


def without_numbers(trace: str) -> list[str]:
    """The lines, each event named by how many records ago it was recorded."""
    recorded: list[str] = []
    lines = []
    for line in trace.splitlines():
        ages = {
            event: recorded[::-1].index(event) if event in recorded else -1 for event in re.findall(r"\be\d+", line)
        }
        lines.append(re.sub(r"#\d+", "#", re.sub(r"\be\d+", lambda one: f"e<{ages[one[0]]}>", line)))  # noqa: B023
        recorded += re.findall(r"record (e\d+)", line)
    return lines


def main(folder: str) -> None:
    """Makes the calls, in each order, each three times: the last two may follow a plan."""
    import torch

    import deep_ep
    from deep_ep import _torch
    from deep_ep.utils import EventHandle, EventOverlap

    fake = ctypes.CDLL(str(Path(os.environ["DEEPEP_KERNELS"], "libdeepep_cpu.so")))
    text = ctypes.create_string_buffer(1 << 16)
    buffer = deep_ep.Buffer(
        None, 1 << 20, explicitly_destroy=True, engine="cpu", bootstrap=deep_ep.Bootstrap.file(0, 1, folder)
    )  # fmt: skip
    core: Any = buffer._core
    core.ensure_ready()
    core.host_stream, core.raw_stream = False, functools.partial(operator.index, 0x1000)
    core.comm_stream, core.torch_current_stream = Stream(COMM), functools.partial(Stream, CURRENT)
    core.__class__ = type("Core", (type(core),), {"torch_current_stream": lambda self: Stream(CURRENT)})
    _torch.is_capturing = bool
    _torch.stream_context = lambda stream: stream
    torch.Tensor.record_stream = lambda self, to: told.add((self.untyped_storage().data_ptr(), to.name))  # type: ignore

    x, idx = torch.zeros(16, 512, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.int64)
    weights = torch.ones(16, 8)
    rows = torch.zeros(16, 512, dtype=torch.float8_e4m3fn), torch.ones(16, 4)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    fresh = {**counts, "topk_idx": idx, "topk_weights": weights}
    handle = buffer.dispatch(x, **fresh)[4]
    calls = {
        "layout": (lambda **how: buffer.get_dispatch_layout(idx, 4, **how), (idx,)),
        "dispatch": (lambda **how: buffer.dispatch(x, **fresh, **how), (x, *fresh.values())),
        "dispatch fp8": (lambda **how: buffer.dispatch(rows, **counts, **how), (rows, *counts.values())),
        "worst case": (lambda **how: buffer.dispatch(x, **fresh, num_worst_tokens=16, **how), (x, *fresh.values())),
        "cached": (lambda **how: buffer.dispatch(x, handle=handle, **how), (x, handle[0], handle[3], handle[5])),
        "combine": (lambda **how: buffer.combine(x, handle, **how), (x, handle[0], handle[3], handle[5])),
    }
    taken = count_taken()
    of_torch = EventOverlap(EventHandle())
    assert of_torch.event is not None
    of_torch.event._torch = "torch's event"  # type: ignore[assignment]
    orders = {
        "asynchronous": lambda: ({"async_finish": True}, {COMM}),
        "behind a call": lambda: (
            {"async_finish": True, "previous_event": buffer.combine(x, handle, async_finish=True)[2]}, {COMM, CURRENT}
        ),
        "behind torch": lambda: (
            {"async_finish": True, "previous_event": of_torch, "allocate_on_comm_stream": True}, {COMM, CURRENT}
        ),
    }  # fmt: skip
    for kind, make in orders.items():
        for name, (call, inputs) in calls.items():
            for turn in range(3):
                how, streams = make()
                fake.fake_trace(text)
                seen.clear()
                told.clear()
                outputs = call(**how)
                torchs = sorted(set(seen))
                used = storages((inputs, [one for one in outputs if not isinstance(one, EventOverlap)]))
                missing = len({(one, to) for one in used for to in streams} - told)
                strange = len({to for _, to in told} - streams)
                outputs[-1].current_stream_wait()
                fake.fake_trace(text)
                found = {"order": kind, "call": name, "trace": without_numbers(text.value.decode()), "torch": torchs}
                del outputs, how
                found |= {"turn": turn, "untold": missing, "told of others": strange, "kept": len(core.kept)}
                print(json.dumps(found))
    torch.Tensor.record_stream = refuse  # type: ignore
    for _ in range(2):
        with contextlib.suppress(NoMemoryError):
            buffer.dispatch(x, **fresh, async_finish=True)
            raise AssertionError("torch's error is lost")
    core.enter()
    fake.fake_trace(text)
    print(json.dumps({"kept": len(core.kept), "trace": without_numbers(text.value.decode())}))
    print(json.dumps({"through the face": sum(taken)}))
    buffer.destroy()


if __name__ == "__main__":
    main(sys.argv[1])
