"""What a call costs its caller, without a GPU: Python, C API and engine, over kernels that do nothing.

The kernel library is that of the engine's own tests: its streams are queues as on a GPU, its calls return at once. So
what is left is the host's share of a call, CUDA's own apart, and two states of the code compare on any machine:

    python bench/call_cost.py [--package python] [--calls 10000]
    python bench/call_cost.py --operators                   # torch.ops.deep_ep beside the methods, in turns
    go test -run xxx -bench Launch ./internal/engine        # the engine alone

Times are of batches of 50 calls, the fastest twentieth of them, which other programs on the machine disturb least.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import operator
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAKE = ROOT / "internal" / "engine" / "testdata" / "fake.c"
TOKENS, BOUND, HIDDEN, TOPK, EXPERTS = 16, 16, 512, 8, 4  # small: a CPU gives large memory back and takes it anew
BATCH, STREAM = 50, 0x1000


def build_kernels(folder: str) -> None:
    """Makes the kernel library that does nothing, in place of the CPU engine's."""
    library = Path(folder, "libdeepep_cpu.so")
    headers = f"-I{ROOT / 'kernels' / 'abi'}"
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", headers, "-o", str(library), str(FAKE)], check=True)
    os.environ["DEEPEP_KERNELS"] = folder
    ctypes.CDLL(str(library)).fake_quiet(ctypes.byref(ctypes.c_int(1)))  # it would write down every call


def make_buffer(folder: str) -> Any:
    """A buffer of one rank that takes its calls as on a GPU: in the order of the caller's stream, without waiting."""
    import deep_ep

    buffer = deep_ep.Buffer(
        None, 1 << 20, 1 << 20, low_latency_mode=True, num_qps_per_rank=1, explicitly_destroy=True, engine="cpu",
        bootstrap=deep_ep.Bootstrap.file(0, 1, folder),
    )  # fmt: skip
    as_on_gpus(buffer)
    return buffer


class Stream:
    """Stands for a stream of torch's, and for an event that it has recorded."""

    stream_id = device_index = device_type = 0

    def wait(self, stream: object) -> None:
        """Costs nothing."""


def as_on_gpus(buffer: Any) -> None:
    """Has a buffer's calls follow the caller's stream, which is never captured. Torch's streams cost nothing."""
    import torch

    from deep_ep import _torch

    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    core, current = buffer._core, Stream()
    core.host_stream, core.comm_stream = False, Stream()
    core.raw_stream = functools.partial(operator.index, STREAM)
    _torch.is_capturing = bool
    _torch.stream_context = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,misc]
    _torch.torch_stream = lambda index: current
    _torch.recorded_event = Stream
    _torch.gpu_in_use, _torch.stream_in_use = lambda: core.ordinal, core.raw_stream
    library = ctypes.CDLL(str(Path(os.environ["DEEPEP_KERNELS"], "libdeepep_cpu.so")))
    names = ["fake_enter_stream", "fake_leave_stream"]
    names += ["fake_record_stream"] if hasattr(_torch, "_RECORD") else []  # a package of before has none
    stand_ins = [ctypes.cast(library[name], ctypes.c_void_p).value for name in names]
    addresses, objects = _torch.c_abi()
    _torch.c_abi = lambda: ((*addresses[: -len(names)], *stand_ins), objects)
    if hasattr(core, "follow_streams"):  # a package of before has no such function
        core.follow_streams()


def behind_event() -> dict[str, Any]:
    """Options of an asynchronous call as training makes it: after an event, in the communication stream's memory."""
    import deep_ep

    event = deep_ep.EventOverlap(deep_ep.utils.EventHandle())
    return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}


def waited(call: Callable[..., Any], at: int = -1, **options: Any) -> Callable[[], None]:
    """An asynchronous call and the wait of the caller's stream for its event, the result's entry `at`."""

    def both() -> None:
        call(**options)[at].current_stream_wait()

    return both


def elastic_cases_of(folder: str) -> dict[str, Callable[[], Any]]:
    """V2's calls, as training and prefill make them, on a buffer of one rank that lives as long as they."""
    import torch

    import deep_ep

    buffer = deep_ep.ElasticBuffer(
        None, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True, engine="cpu",
        bootstrap=deep_ep.Bootstrap.file(0, 1, folder),
    )  # fmt: skip
    as_on_gpus(buffer)
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    weights = torch.ones(TOKENS, TOPK)
    cases = {}
    for layout, expand in (("plain", False), ("expanded", True)):
        dispatch = functools.partial(buffer.dispatch, x, do_expand=expand)
        fresh = functools.partial(dispatch, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS)
        received, _, received_weights, handle, _ = fresh(do_cpu_sync=False)
        cases |= {
            f"V2 dispatch, {layout}": fresh,
            f"V2 dispatch without CPU sync, {layout}": functools.partial(fresh, do_cpu_sync=False),
            f"V2 dispatch with a handle, {layout}": functools.partial(dispatch, handle=handle),
            f"V2 combine, {layout}": functools.partial(buffer.combine, received, handle, received_weights),
            f"V2 dispatch, async, {layout}": waited(fresh, async_with_compute_stream=True),
            f"V2 combine, async, {layout}": waited(
                functools.partial(buffer.combine, received, handle, received_weights), async_with_compute_stream=True
            ),
        }
    return cases


def normal_cases_of(buffer: Any) -> dict[str, Callable[[], Any]]:
    """Normal mode's calls, as training and prefill make them."""
    import torch

    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    weights = torch.ones(TOKENS, TOPK)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)

    def dispatch(**options: Any) -> Any:
        return buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=idx, topk_weights=weights, **options,
        )  # fmt: skip

    received, _, received_weights, _, handle, _ = dispatch()
    return {
        "get_dispatch_layout": lambda: buffer.get_dispatch_layout(idx, EXPERTS),
        "dispatch (waits for counts)": dispatch,
        "dispatch, num_worst_tokens": functools.partial(dispatch, num_worst_tokens=TOKENS),
        "dispatch, cached handle": lambda: buffer.dispatch(x, handle=handle),
        "combine": lambda: buffer.combine(received, handle),
        "combine with weights": lambda: buffer.combine(received, handle, received_weights),
        "layout, async": waited(functools.partial(buffer.get_dispatch_layout, idx, EXPERTS), async_finish=True),
        "dispatch, async": waited(dispatch, async_finish=True),
        "dispatch, num_worst_tokens, async": waited(dispatch, num_worst_tokens=TOKENS, async_finish=True),
        "dispatch, cached handle, async": waited(
            functools.partial(buffer.dispatch, x, handle=handle), async_finish=True
        ),
        "combine, async": waited(functools.partial(buffer.combine, received, handle), async_finish=True),
        "layout, behind an event": waited(
            functools.partial(buffer.get_dispatch_layout, idx, EXPERTS), **behind_event()
        ),
        "dispatch, behind an event": waited(dispatch, **behind_event()),
        "dispatch, num_worst_tokens, behind an event": waited(dispatch, num_worst_tokens=TOKENS, **behind_event()),
        "dispatch, cached handle, behind an event": waited(
            functools.partial(buffer.dispatch, x, handle=handle), **behind_event()
        ),
        "combine, behind an event": waited(functools.partial(buffer.combine, received, handle), **behind_event()),
    }


def cases_of(buffer: Any) -> dict[str, Callable[[], Any]]:
    """The calls that are timed."""
    import torch

    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    weights, out = torch.ones(TOKENS, TOPK), torch.empty_like(x)
    answers = torch.zeros(EXPERTS, BOUND, HIDDEN, dtype=torch.bfloat16)
    handle = buffer.low_latency_dispatch(x, idx, BOUND, EXPERTS)[2]  # held, as between dispatch and combine

    def dispatch(**options: Any) -> Any:
        return buffer.low_latency_dispatch(x, idx, BOUND, EXPERTS, **options)

    def combine(**options: Any) -> Any:
        return buffer.low_latency_combine(answers, idx, weights, handle, **options)

    return {
        "low-latency dispatch": dispatch,
        "ll dispatch, weights sent along": functools.partial(dispatch, topk_weights=weights),
        "ll dispatch, async": waited(dispatch, at=3, async_finish=True),
        "ll dispatch, hook": lambda: dispatch(return_recv_hook=True)[4](),
        "low-latency combine": combine,
        "ll combine into out": functools.partial(combine, out=out),
        "ll combine, async": waited(combine, at=1, async_finish=True),
        "ll combine, hook": lambda: combine(return_recv_hook=True)[2](),
        "new_empty alone": lambda: x.new_empty(TOKENS, HIDDEN),
    }


def operator_cases_of(buffer: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each operator a call of the method and one of the operator, with the same arguments."""
    import torch

    import deep_ep.ops  # noqa: F401 - defines them

    ops, name = torch.ops.deep_ep, buffer.name
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    weights = torch.ones(TOKENS, TOPK)
    packed, scales = (torch.zeros(TOKENS, HIDDEN // size, dtype=torch.uint8) for size in (2, 16))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    received, _, received_weights, _, handle, _ = normal_cases_of(buffer)["dispatch (waits for counts)"]()
    entries = handle[0], handle[3], handle[5]
    given = x, None, idx, weights, per_rank, None, in_rank, per_expert, name
    answers = torch.zeros(EXPERTS, BOUND, HIDDEN, dtype=torch.bfloat16)
    source, ranges, *shape = buffer.low_latency_dispatch(x, idx, BOUND, EXPERTS)[2]
    sent = (source, ranges, *shape)
    methods = normal_cases_of(buffer) | cases_of(buffer)
    return {
        "layout": (methods["get_dispatch_layout"], lambda: ops.layout(idx, EXPERTS, name)),
        "dispatch": (methods["dispatch (waits for counts)"], lambda: ops.dispatch(*given)),
        "dispatch_worst_case": (
            methods["dispatch, num_worst_tokens"], lambda: ops.dispatch_worst_case(*given, TOKENS),
        ),
        "dispatch_cached": (methods["dispatch, cached handle"], lambda: ops.dispatch_cached(x, None, *entries, name)),
        "combine": (
            methods["combine with weights"],
            lambda: ops.combine(received, None, None, received_weights, *entries, name),
        ),
        "low_latency_dispatch": (
            methods["low-latency dispatch"], lambda: ops.low_latency_dispatch(x, idx, BOUND, EXPERTS, name),
        ),
        "low_latency_dispatch_fp4": (
            lambda: buffer.low_latency_dispatch_fp4(packed, scales, idx, BOUND, EXPERTS),
            lambda: ops.low_latency_dispatch_fp4(packed, scales, idx, BOUND, EXPERTS, name),
        ),
        "low_latency_dispatch_nvfp4": (
            lambda: buffer.low_latency_dispatch(x, idx, BOUND, EXPERTS, use_nvfp4=True),
            lambda: ops.low_latency_dispatch_nvfp4(x, None, idx, BOUND, EXPERTS, name),
        ),
        "low_latency_combine": (
            methods["low-latency combine"],
            lambda: ops.low_latency_combine(answers, idx, weights, *sent, name),
        ),
    }  # fmt: skip


def measure_in_turns(calls: tuple[Callable[[], Any], ...], count: int) -> list[float]:
    """Microseconds of each call; batches of them alternate, so that what else runs meets all alike."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(max(40, count // BATCH)):
        for call, times in zip(calls, found, strict=True):
            start = time.perf_counter_ns()
            for _ in range(BATCH):
                call()
            times.append((time.perf_counter_ns() - start) / BATCH / 1e3)
    return [sorted(times)[len(times) // 20] for times in found]


def measure(call: Callable[[], Any], calls: int) -> float:
    """Microseconds of a call."""
    found = []
    for _ in range(max(20, calls // BATCH)):
        start = time.perf_counter_ns()
        for _ in range(BATCH):
            call()
        found.append((time.perf_counter_ns() - start) / BATCH / 1e3)
    return sorted(found)[len(found) // 20]


def wait_share(call: Callable[[], Any], seconds: float = 1.0) -> float:
    """The share of calls in which another thread took the interpreter's lock: such a call takes a millisecond more."""
    took = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - start)
    return sum(one > 1_000_000 for one in took) / len(took)


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A second thread that always wants the interpreter's lock."""
    over = threading.Event()

    def count() -> None:
        number = 0
        while not over.is_set():
            for _ in range(1000):
                number += 1

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> int:
    """Prints a line for each kind of call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT / "python", help="folder that holds deep_ep")
    parser.add_argument("--calls", type=int, default=10000, help="calls of each kind (10000)")
    parser.add_argument("--mode", action="store_true", help="under torch.set_default_device, a mode of torch functions")
    parser.add_argument("--busy", action="store_true", help="beside a busy thread: calls that lose the lock to it, %%")
    parser.add_argument("--operators", action="store_true", help="the methods, the operators, and what these take more")
    options = parser.parse_args()
    sys.path.insert(0, str(options.package))
    with tempfile.TemporaryDirectory(prefix="call_cost_") as folder:
        build_kernels(folder)
        buffer = make_buffer(folder)
        import torch

        if options.operators:
            with torch.no_grad():
                for name, pair in operator_cases_of(buffer).items():
                    measure_in_turns(pair, 2000)
                    method, operator_ = measure_in_turns(pair, options.calls)
                    print(f"{name:28} {method:6.2f} {operator_:6.2f} {operator_ - method:6.2f} us", flush=True)
            buffer.destroy()
            return 0
        under = torch.device("cpu") if options.mode else contextlib.nullcontext()
        second = Path(folder, "second")
        second.mkdir()
        cases = normal_cases_of(buffer) | cases_of(buffer) | elastic_cases_of(str(second))
        for name, call in cases.items():
            with under:
                measure(call, 1000)
                if options.busy:
                    with busy_thread():
                        print(f"{name:40} {100 * wait_share(call):5.1f} %", flush=True)
                    continue
                print(f"{name:40} {measure(call, options.calls):6.2f} us", flush=True)
        buffer.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
