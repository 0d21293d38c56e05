"""How calls are ordered among streams on CUDA, without a GPU: over a kernel library that writes its calls down.

    python ordering_program.py FOLDER STREAM RECORDS

STREAM is the address of the caller's stream, 0 the default one. RECORDS says who tells torch's allocator of streams for
the compiled face: "torch", a function of torch's libraries, or "Python", where a torch lacks that. FOLDER, which
DEEPEP_KERNELS names, holds that library as libdeepep_cpu.so; its streams are queues as on a GPU. torch's streams are
stand-ins. Prints a line of JSON for each call: what the kernel library was asked in which order, with each event by the
record that it is of; what torch's stand-ins saw; and how often torch's allocator was not told of a stream that uses a
tensor.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMM, CURRENT = "communication", "current"
STREAM_IDS = {COMM: 8, CURRENT: 1 << 40}
REFUSALS = 4
OTHER_GPU = -2
gpu = [-1]  # the last one is the current GPU; that of the buffers is -1
streams = {-1: int(sys.argv[2]), OTHER_GPU: 0x3000}  # that are current there
seen: list[str] = []  # of torch's stand-ins
told: set[tuple[int, str]] = set()  # storages and streams
asked: list[str] = []  # of Core, by whoever orders a call


class Stream:
    """Stands for a torch stream."""

    device_index, device_type = 3, 1

    def __init__(self, name: str) -> None:
        self.name, self.stream_id = name, STREAM_IDS[name]

    def __enter__(self) -> None:
        seen.append(f"in {self.name}")

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """Stands for an event that torch recorded."""

    def wait(self, stream: Stream) -> None:
        seen.append(f"{stream.name} waits for torch's event")


def held_by(event: Any) -> set[int]:
    """The storages of the tensors that an event keeps."""
    return storages(event.event._users or ())


class NoMemoryError(Exception):
    """What torch's allocator raises in the end."""


def refuse_after(number: int) -> Callable[[Any, Any], None]:
    """Stands for a record_stream that fails after so many times."""
    left = iter(range(number))

    def record(tensor: object, stream: object) -> None:
        if next(left, None) is None:
            raise NoMemoryError

    return record


def count_taken() -> list[int]:
    """A 1 for each step of an asynchronous call that follows a plan, from now on."""
    from deep_ep import _face

    taken: list[int] = []

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            got = run(*args, **options)
            taken.append(int(type(got) is tuple))
            return got

        return call

    for name in ("run_behind", "run_ordered"):
        setattr(_face.Site, name, counted(getattr(_face.Site, name)))
    return taken


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def enter_stream(stream: int, device: int, guard: Any) -> int:
    """Stands for torch's guard of a stream, which is the communication stream."""
    seen.append(f"in {COMM}")
    guard[0] = 1
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
def leave_stream(guard: int) -> int:
    """Stands for the end of such a guard."""
    return 0


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64)
def record_stream(tensor: int, device: int, stream: int) -> None:
    """Stands for the function of torch's that record_stream comes to, which takes a stream by value."""
    import torch as whole

    torch = ctypes.CDLL(str(Path(whole.__file__).with_name("lib") / "libtorch_cpu.so"))
    address, offset, dtype = ctypes.c_void_p(), ctypes.c_int64(), ctypes.c_int32()
    torch.aoti_torch_get_data_ptr(ctypes.c_void_p(tensor), ctypes.byref(address))
    torch.aoti_torch_get_storage_offset(ctypes.c_void_p(tensor), ctypes.byref(offset))
    torch.aoti_torch_get_dtype(ctypes.c_void_p(tensor), ctypes.byref(dtype))
    width = torch.aoti_torch_dtype_element_size(dtype)
    if device & 0xFFFF == Stream.device_index << 8 | Stream.device_type:
        names = [name for name, number in STREAM_IDS.items() if number == stream]
        told.add(((address.value or 0) - offset.value * width, *names))


def with_stand_ins(c_abi: Callable[[], Any]) -> Callable[[], Any]:
    """What the compiled face asks of torch, with these in place of torch's."""

    def found() -> Any:
        addresses, objects = c_abi()
        guards = [ctypes.cast(one, ctypes.c_void_p).value for one in (enter_stream, leave_stream)]
        record = ctypes.cast(record_stream, ctypes.c_void_p).value if sys.argv[3] == "torch" else 0
        return (*addresses[:-3], *guards, record), objects

    return found


def storages(value: Any) -> set[int]:
    """Of all tensors in nested sequences and V2's handles, but for empty ones."""
    if hasattr(value, "untyped_storage"):
        return {value.untyped_storage().data_ptr()} - {0}
    if type(value).__name__ == "EPHandle":
        value = (
            list(vars(value).values())
            if hasattr(value, "__dict__")
            else [getattr(value, name) for name in value.__slots__]
        )
    return set().union(*map(storages, value)) if isinstance(value, (tuple, list)) else set()


def without_numbers(trace: str) -> list[str]:
    """The lines, each event named by how many records ago it was recorded."""
    recorded: list[str] = []
    lines = []
    for line in trace.splitlines():
        ages = {
            event: recorded[::-1].index(event) if event in recorded else -1 for event in re.findall(r"\be\d+", line)
        }
        lines.append(re.sub(r"([#x])[+]?\d+", r"\1", re.sub(r"\be\d+", lambda one: f"e<{ages[one[0]]}>", line)))  # noqa: B023
        recorded += re.findall(r"record (e\d+)", line)
    return lines


class Recorder:
    """The kernel library's record of what it was asked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(os.environ["DEEPEP_KERNELS"], "libdeepep_cpu.so")))
        self._text = ctypes.create_string_buffer(1 << 16)

    def cannot_dispatch(self, on: bool) -> None:
        """The kernel library cannot launch dispatches, or can again."""
        self._library.fake_cannot_dispatch(ctypes.byref(ctypes.c_int(on)))

    def take(self) -> list[str]:
        """The lines since the last time."""
        self._library.fake_trace(self._text)
        return without_numbers(self._text.value.decode())


def as_on_gpus(core: Any) -> None:
    """Has a buffer's calls follow the caller's stream, and its streams be stand-ins."""
    core.ensure_ready()
    core.host_stream, core.raw_stream = False, functools.partial(operator.index, int(sys.argv[2]))
    core.comm_stream = Stream(COMM)
    kind = type(core)

    def after(self: Any, *args: Any) -> Any:
        asked.append("after")
        return kind.after(self, *args)

    methods = {"torch_current_stream": lambda self: Stream(CURRENT), "after": after}
    core.__class__ = type("Core", (kind,), methods)
    core.follow_streams()


Calls = dict[str, tuple[Callable[..., Any], Any]]  # name: the call, and the tensors that it reads
Orders = dict[str, Callable[[], tuple[dict[str, Any], set[str]]]]  # name: keywords, and the streams that use tensors


def play(version: str, core: Any, recorder: Recorder, calls: Calls, orders: Orders) -> None:
    """Makes each call in each order, three times: the last two may follow a plan."""
    for order, make in orders.items():
        for name, (call, inputs) in calls.items():
            for turn in range(3):
                how, streams = make()
                recorder.take()
                for notes in (seen, told, asked):
                    notes.clear()
                outputs = call(**how)
                found: dict[str, Any] = {"torch": sorted(set(seen)), "asked": len(asked)}
                used = storages((inputs, outputs))
                held, own = held_by(outputs[-1]), storages(outputs) - storages(inputs)
                users = {(one, COMM) for one in used} | {(one, CURRENT) for one in own if CURRENT in streams}
                found["untold"] = len(users - told - {(one, COMM) for one in held})
                found["told of others"] = len({to for _, to in told} - streams)
                found["held"] = bool(held)
                if turn == 2 and held:  # another stream waits, and then nobody has the event any more
                    core.raw_stream = functools.partial(operator.index, 0x2000)
                    outputs[-1].current_stream_wait()
                    core.raw_stream = functools.partial(operator.index, int(sys.argv[2]))
                    found["told late"] = held_by(outputs[-1]) == held
                    del outputs
                    found["told late"] &= {(one, COMM) for one in held} <= told
                else:
                    outputs[-1].current_stream_wait()
                    found["held on"] = bool(held_by(outputs[-1]))
                found |= {"trace": recorder.take(), "version": version, "order": order, "call": name, "turn": turn}
                outputs = how = None
                print(json.dumps({**found, "kept": len(core.kept)}))


def refused(buffer: Any, recorder: Recorder, name: str, call: Callable[..., Any], make: Callable[..., Any]) -> Any:
    """A dispatch that the kernel library cannot launch, after the exchange of counts where there is one."""
    from deep_ep.errors import DeepEPError

    how, core = make()[0], buffer._core
    recorder.take()
    recorder.cannot_dispatch(True)
    line: dict[str, Any] = {"refused": name}
    try:
        call(**how)
    except DeepEPError as error:
        line["error"] = str(error)
    line["kept at once"] = len(core.kept)
    recorder.cannot_dispatch(False)
    core.enter()
    return {**line, "trace": recorder.take(), "kept": len(core.kept)}


def of_v1(buffer: Any, x: Any, rows: Any, idx: Any, weights: Any) -> tuple[Calls, Orders]:
    """The calls of Buffer."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    fresh = {**counts, "topk_idx": idx, "topk_weights": weights}
    handle = buffer.dispatch(x, **fresh)[4]
    of_handle = handle[0], handle[3], handle[5]
    calls: Calls = {
        "layout": (lambda **how: buffer.get_dispatch_layout(idx, 4, **how), idx),
        "dispatch": (lambda **how: buffer.dispatch(x, **fresh, **how), (x, *fresh.values())),
        "dispatch fp8": (lambda **how: buffer.dispatch(rows, **counts, **how), (rows, *counts.values())),
        "dispatch, worst": (
            lambda **how: buffer.dispatch(x, **fresh, num_worst_tokens=16, **how),
            tuple(fresh.values()),
        ),
        "dispatch, cached": (lambda **how: buffer.dispatch(x, handle=handle, **how), (x, of_handle)),
        "combine": (lambda **how: buffer.combine(x, handle, **how), (x, of_handle)),
    }
    import deep_ep

    behind = {"async_finish": True}
    orders: Orders = {
        "asynchronous": lambda: (behind, {COMM}),
        "behind a call": lambda: (
            {**behind, "previous_event": buffer.combine(x, handle, async_finish=True)[2]}, {COMM, CURRENT}
        ),
        "behind a point": lambda: (
            {**behind, "previous_event": deep_ep.Buffer.capture(), "allocate_on_comm_stream": True}, {COMM, CURRENT}
        ),
        "behind torch": lambda: (
            {**behind, "previous_event": event_of_torch(), "allocate_on_comm_stream": True}, {COMM, CURRENT}
        ),
    }  # fmt: skip
    return calls, orders


def of_low_latency(buffer: Any, x: Any, rows: Any, idx: Any, weights: Any) -> tuple[Calls, Orders]:
    """The low-latency calls of Buffer."""
    handle = buffer.low_latency_dispatch(x, idx, 16, 4)[2]
    answers = x.new_zeros(4, 16, 512)

    def dispatch(**how: Any) -> Any:
        received, count, new, event, _ = buffer.low_latency_dispatch(x, idx, 16, 4, **how)
        return received, count, new, event

    calls: Calls = {
        "ll_dispatch": (dispatch, (x, idx)),
        "ll_combine": (
            lambda **how: buffer.low_latency_combine(answers, idx, weights, handle, **how)[:2],
            (answers, idx, weights, handle),
        ),
    }
    return calls, {"asynchronous": lambda: ({"async_finish": True}, {COMM})}


def kinds(value: Any) -> Any:
    """What a result is made of."""
    if isinstance(value, tuple):
        return [kinds(one) for one in value]
    if hasattr(value, "untyped_storage"):
        return [str(value.dtype), *value.shape, *value.stride()]
    return value if value is None or isinstance(value, int) else "hook" if callable(value) else type(value).__name__


def issue_low_latency(buffer: Any, recorder: Recorder, x: Any, idx: Any, weights: Any) -> None:
    """Makes low-latency calls in one and in halves, three times: the last two may follow a plan."""
    from deep_ep.errors import DeepEPError

    handle = buffer.low_latency_dispatch(x, idx, 16, 4)[2]
    answers, out = x.new_zeros(4, 16, 512), x.new_zeros(16, 512)
    calls: dict[str, Callable[..., Any]] = {
        "ll_dispatch": functools.partial(buffer.low_latency_dispatch, x, idx, 16, 4),
        "ll_dispatch BF16": functools.partial(buffer.low_latency_dispatch, x, idx, 16, 4, use_fp8=False),
        "ll_combine": functools.partial(buffer.low_latency_combine, answers, idx, weights, handle),
        "ll_combine out": functools.partial(buffer.low_latency_combine, answers, idx, weights, handle, out=out),
    }
    for name, call in calls.items():
        for turn in range(3):
            line: dict[str, Any] = {"issued": name, "turn": turn}
            recorder.take()
            line["whole"] = [kinds(call()), recorder.take()]
            *result, hook = call(return_recv_hook=True)
            line["first half"] = [kinds((*result, hook)), recorder.take()]
            line["returned"] = [hook(), recorder.take()]
            line["through the face"] = type(hook).__module__ == "deepep_torch"
            with contextlib.suppress(TypeError):
                hook(1)
                line["took an argument"] = True
            forgotten = call(return_recv_hook=True)[-1]
            buffer.clean_low_latency_buffer(16, 512, 4)
            for what, one in (("again", hook), ("forgotten", forgotten), ("forgotten again", forgotten)):
                try:
                    one()
                except DeepEPError as error:
                    line[what] = [type(error).__name__, str(error)]
            print(json.dumps({**line, "kept": len(buffer._core.kept)}))


def of_v2(buffer: Any, x: Any, rows: Any, idx: Any, weights: Any) -> tuple[Calls, Orders]:
    """The calls of ElasticBuffer."""
    import deep_ep

    calls: Calls = {}
    for layout, expand in (("plain", False), ("expanded", True)):
        given = {"topk_idx": idx, "topk_weights": weights, "num_experts": 4, "do_expand": expand}
        received, _, received_weights, handle, _ = buffer.dispatch(x, **given)
        again = functools.partial(buffer.dispatch, x, handle=handle, do_expand=expand)
        back = functools.partial(buffer.combine, received, handle, received_weights)
        inputs = (received, received_weights, handle)
        calls |= {
            f"dispatch, {layout}": (functools.partial(buffer.dispatch, x, **given), (x, idx, weights)),
            f"dispatch fp8, {layout}": (functools.partial(buffer.dispatch, rows, **given), (rows, idx, weights)),
            f"dispatch, worst, {layout}": (
                functools.partial(buffer.dispatch, x, **given, do_handle_copy=False, do_cpu_sync=False),
                (x, idx, weights),
            ),
            f"dispatch, cached, {layout}": (again, (x, handle)),
            f"combine, {layout}": (back, inputs),
        }
    behind = {"async_with_compute_stream": True}
    orders: Orders = {
        "asynchronous": lambda: (behind, {COMM}),
        "on the communication stream": lambda: ({**behind, "allocate_on_comm_stream": True}, {COMM, CURRENT}),
        "behind a point": lambda: (
            {**behind, "previous_event": deep_ep.Buffer.capture(), "allocate_on_comm_stream": True}, {COMM, CURRENT}
        ),
        "behind torch": lambda: (
            {**behind, "previous_event": event_of_torch(), "allocate_on_comm_stream": True}, {COMM, CURRENT}
        ),
    }  # fmt: skip
    return calls, orders


def event_of_torch() -> Any:
    """An event that torch recorded."""
    from deep_ep.utils import EventHandle, EventOverlap

    gpu.append(OTHER_GPU)
    event = EventHandle()
    gpu.pop()
    event._torch = Event()
    return EventOverlap(event)


def mark_points(core: Any, recorder: Recorder, destroy: Callable[[], None]) -> None:
    """Makes points in the caller's stream and has it wait for them: with a buffer, on another GPU, without a buffer."""
    from deep_ep import Buffer

    core._points.idle.clear()
    for name in ("first", "waited for on another GPU", "on another GPU", "without a buffer"):
        if name == "without a buffer":
            destroy()
        gpu.append(OTHER_GPU if name == "on another GPU" else -1)
        recorder.take()
        event = Buffer.capture()
        gpu[-1] = OTHER_GPU if name == "waited for on another GPU" else -1
        event.current_stream_wait()
        gpu.pop()
        line = {"point": name, "event": event.event._launch.event if event.event._launch else 0}
        core.host_stream = True
        line["for the CPU engine"] = core.after(event.event, 0)
        core.host_stream = False
        print(json.dumps({**line, "trace": recorder.take()}))
        del event


def main(folder: str) -> None:
    """Plays both versions' calls, then calls that are cut short by torch."""
    import torch

    import deep_ep
    from deep_ep import _torch

    recorder, taken = Recorder(), count_taken()
    _torch.is_capturing = bool
    _torch.gpu_in_use, _torch.stream_in_use = lambda: gpu[-1], lambda: streams[gpu[-1]]
    _torch.stream_context = lambda stream: stream
    _torch.c_abi = with_stand_ins(_torch.c_abi)
    torch.Tensor.record_stream = lambda self, to: told.add((self.untyped_storage().data_ptr(), to.name))  # type: ignore
    x, idx = torch.zeros(16, 512, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.int64)
    weights, rows = torch.ones(16, 8), (torch.zeros(16, 512, dtype=torch.float8_e4m3fn), torch.ones(16, 4))
    shape: dict[str, Any] = {"num_max_tokens_per_rank": 16, "hidden": 512, "num_topk": 8}
    region = {"num_rdma_bytes": deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 512, 1, 4), "low_latency_mode": True}
    for version, kind, sizes, of in (
        ("V1", deep_ep.Buffer, {"num_nvl_bytes": 1 << 20}, of_v1),
        ("V1 low latency", deep_ep.Buffer, region, of_low_latency),
        ("V2", deep_ep.ElasticBuffer, shape, of_v2),
    ):
        where = Path(folder, version)
        where.mkdir()
        bootstrap = deep_ep.Bootstrap.file(0, 1, str(where))
        buffer: Any = kind(None, **sizes, explicitly_destroy=True, engine="cpu", bootstrap=bootstrap)
        core = buffer._core
        as_on_gpus(core)
        if of is of_low_latency:
            issue_low_latency(buffer, recorder, x, idx, weights)
        calls, orders = of(buffer, x, rows, idx, weights)
        play(version, core, recorder, calls, orders)
        record = torch.Tensor.record_stream
        for name, (call, _) in calls.items() if "behind torch" in orders and sys.argv[3] == "Python" else ():
            for number in range(REFUSALS):
                recorder.take()
                torch.Tensor.record_stream = refuse_after(number)  # type: ignore
                line = {"cut short": f"{version} {name}", "number": number, "raised": True}
                with contextlib.suppress(NoMemoryError):
                    call(**orders["behind torch"]()[0])
                    line["raised"] = False
                core.enter()
                trace = recorder.take()
                for what in ("notify", "dispatch"):
                    line[what] = sum(one.startswith(f"{what} # on") for one in trace)
                print(json.dumps({**line, "kept": len(core.kept)}))
        torch.Tensor.record_stream = record  # type: ignore
        for order in ("asynchronous", "behind torch") if "behind torch" in orders else ():
            for name, (call, _) in calls.items():
                if name.startswith("dispatch"):
                    print(json.dumps(refused(buffer, recorder, f"{version} {order} {name}", call, orders[order])))
        mark_points(core, recorder, buffer.destroy)
    print(json.dumps({"through the face": sum(taken)}))


if __name__ == "__main__":
    main(sys.argv[1])
