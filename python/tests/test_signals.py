"""Signal handlers that raise, or that call: they may run between any two steps of a call.

An exception that a handler raises (Ctrl-C, a time limit of a test, a launcher's SIGTERM) drops what the call's frames
hold. Memory that a launch still touches must outlive it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import gc
import os
import random
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch

import alone
from conftest import full

STRUCTS = {
    "get_layout": "Layout", "notify_counts": "Notify", "dispatch": "DispatchArgs", "combine": "CombineArgs",
    "low_latency_dispatch": "LlDispatchArgs", "low_latency_combine": "LlCombineArgs",
}  # fmt: skip
LAUNCHES = (*STRUCTS, "clean_low_latency_buffer", "barrier")
FACED = (
    "layout",
    "dispatch",
    "worst case",
    "cached",
    "combine",
    "low latency",
    "asynchronous low latency",
    *alone.ELASTIC,
)  # calls of the compiled face
BOOKKEEPING = (
    "PUSH_EXC_INFO",
    "POP_EXCEPT",
    "COPY",
    "RERAISE",
)  # of the interpreter's exceptions: no signal comes there
STRIDE = 1 if full() else 3  # of the instructions at which a test raises
SECONDS = 6.0 if full() else 0.5  # for each kind of call


class Stop(Exception):
    """What the handlers raise."""


class RaisesAt:
    """A trace function: raises Stop before the n-th instruction that the package's own code executes; 0: nowhere."""

    def __init__(self, package, n):
        self.package, self.n, self.count, self.where = package, n, 0, ""

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(self.package) or code.co_name == "__del__":
            return None  # Python ignores what __del__ raises
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, event, arg):
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]] not in BOOKKEEPING:
            self.count += 1
            if self.count == self.n:
                self.where = f"{frame.f_code.co_name} line {frame.f_lineno}"
                raise Stop
        return self.step


class Spy:
    """Notes the addresses that launches give to the library, until a wait for an event has returned."""

    def __init__(self):
        self.addresses = set()
        self.spies = []  # held: plans have their addresses
        self.open_events = 0

    @contextlib.contextmanager
    def watching(self, native):
        lib = native.lib.with_gil
        with contextlib.ExitStack() as stack:
            for name in LAUNCHES:
                function = self.launch(f"deepep_{name}", getattr(lib, f"deepep_{name}"))
                stack.enter_context(mock.patch.object(lib, f"deepep_{name}", function))
                if name.startswith("low_latency"):
                    stack.enter_context(mock.patch.object(native, name, function))
            stack.enter_context(mock.patch.object(native, "event_wait", self.wait(native.event_wait)))
            for name, step in (("deepep_event_create", 1), ("deepep_event_destroy", -1)):
                stack.enter_context(mock.patch.object(lib, name, self.count(getattr(lib, name), step)))
            yield self

    def launch(self, name, function):
        """A function of C that notes what it is given: the compiled face enters it by its address."""
        from deep_ep import _abi

        result, arguments = _abi.PROTOTYPES[name]
        kind = STRUCTS.get(name.removeprefix("deepep_"))

        def spy(buffer, *args):
            status = function(buffer, *args)
            if status == 0 and kind is not None:
                self.addresses |= addresses_in(getattr(_abi, kind).from_address(args[0]))
            return status

        self.spies.append(ctypes.PYFUNCTYPE(result, *arguments)(spy))
        return self.spies[-1]

    def wait(self, function):
        def spy(event, slice_ms):
            status = function(event, slice_ms)
            if status == 0:
                self.addresses.clear()
            return status

        return spy

    def count(self, function, step):
        def spy(*args):
            self.open_events += step
            return function(*args)

        return spy


def addresses_in(struct):
    """The addresses in a struct of arguments, those of its handle included."""
    from deep_ep import _abi

    found = set()
    for name, *_ in getattr(struct, "_fields_", ()):
        value = getattr(struct, name)
        if name == "handle" and value:
            found |= addresses_in(_abi.Handle.from_address(value))
        elif name == "bias":
            found |= set(value)
        elif isinstance(value, int) and value > 1 << 32 and name != "exchange":  # a number with a maker's in front
            found.add(value)
    return found - {None}


def rank_instructions(ctx, kind, stride, compiled):
    """Whatever a launch was given is kept when an exception comes; what is kept is let go once the launch is over."""
    import deep_ep

    package, lost, spy = deep_ep.__path__[0], [], Spy()
    gc.collect()  # events of an earlier test, in cycles with its tracebacks, are not to be counted here
    v2 = kind in alone.ELASTIC
    with alone.elastic_of(ctx) if v2 else alone.buffer_of(ctx) as buffer:
        core = buffer._core
        core.compiled = compiled
        with spy.watching(core.native):
            call = (alone.ElasticCalls if v2 else alone.Calls)(buffer).of(kind)
            call()
            n, counting = 1, RaisesAt(package, 0)
            traced(counting, call)
            assert counting.count > 30, "the call is not traced"
            opened = buffer._face if v2 else buffer._normal._face or buffer._low_latency._face
            assert (opened is not None) == (compiled and kind in FACED), "the compiled face"
            while n <= counting.count:
                tracer = RaisesAt(package, n)
                spy.addresses.clear()
                with contextlib.suppress(Stop):
                    traced(tracer, call)
                kept = {t.data_ptr() for held in core.kept.values() for t in held if t is not None}
                lost += [f"kept for ever after {tracer.where}" for launch in core.kept if not launch.left]
                if not spy.addresses <= kept:
                    lost.append(f"{len(spy.addresses - kept)} after {tracer.where}")
                if kind == "halves":  # the hook may be lost, and its receive with it
                    buffer.clean_low_latency_buffer(0, 0, 0)
                n += stride
            call()
            end = time.monotonic() + 5
            while core.kept and time.monotonic() < end:
                core.enter()
            assert not core.kept, lost or f"{len(core.kept)} calls are kept for ever"
            del call
            buffer.destroy()
            assert spy.open_events == 0, f"{spy.open_events} events were not given back"
    assert not lost, f"{kind}: tensors of a launch were dropped: {lost[:10]}"


def traced(tracer, call):
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("compiled", (True, False), ids=("compiled", "ctypes"))
@pytest.mark.parametrize("kind", (*alone.KINDS, *alone.ELASTIC))
def test_exception_at_every_instruction(pool, device, kind, compiled):
    if device != "cpu":
        pytest.skip("needs the CPU engine: on GPUs the order of streams protects most tensors, and torch's allocator")
    if compiled and kind not in FACED:
        pytest.skip("such calls do not go through the compiled face")
    pool.run(1, rank_instructions, kind, STRIDE, compiled)


def rank_random(ctx, kind, seconds):
    """A timer interrupts calls at random moments; in between, calls give right results."""

    armed = False

    def stop(*_):
        nonlocal armed
        if armed:  # a signal that another thread took may come here late
            armed = False
            raise Stop

    rng, before, interrupted = random.Random(kind), signal.signal(signal.SIGALRM, stop), 0
    try:
        v2 = kind in alone.ELASTIC
        with alone.elastic_of(ctx) if v2 else alone.buffer_of(ctx) as buffer:
            calls = alone.ElasticCalls(buffer) if v2 else alone.Calls(buffer, tokens=alone.BOUND)
            call = calls.of(kind)
            times = []
            for _ in range(5):
                start = time.monotonic()
                call()
                times.append(time.monotonic() - start)
            usual = sorted(times)[2]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                try:
                    try:
                        armed = True
                        signal.setitimer(signal.ITIMER_REAL, 1e-6 + 1.1 * usual * rng.random())
                        call()
                    finally:
                        armed = False
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Stop:
                    interrupted += 1
                if kind == "halves":
                    buffer.clean_low_latency_buffer(0, 0, 0)
                if v2:
                    calls.resent()
                    calls.expanded_combine()
                else:
                    calls.cached()
                    calls.low_latency()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return interrupted


@pytest.mark.parametrize(
    "kind", ("layout", "dispatch", "worst case", "combine", "low latency", "halves", "expanded", "expanded combine")
)
def test_interrupted_at_random_moments(pool, kind):
    assert pool.run(1, rank_random, kind, SECONDS, deadline=SECONDS + 60)[0] > 0, "no call was interrupted"


def rank_calling_handler(ctx, seconds):
    """The handler makes whole exchanges on the buffer whose call it interrupts; both get their own results."""
    nested, ended = [], []

    def handler(*_):
        if len(nested) < 2:  # a handler may interrupt a handler
            nested.append(1)
            try:
                inner.combine()
                inner.low_latency()
            finally:
                nested.pop()
        if not ended:  # else a handler that runs after the timer is off would start it again
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 4e-4 * rng.random())

    rng, turns = random.Random(1), 0
    with alone.buffer_of(ctx) as buffer:
        outer = alone.Calls(buffer)
        inner = alone.Calls(buffer, tokens=40, seed=7)
        before = signal.signal(signal.SIGALRM, handler)
        try:
            handler()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for kind in ("dispatch", "combine", "low latency", "asynchronous low latency", "asynchronous"):
                    outer.of(kind)()
                turns += 1
        finally:
            ended.append(1)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    return turns


def test_handler_that_calls(pool):
    assert pool.run(1, rank_calling_handler, 2 * SECONDS, deadline=2 * SECONDS + 60)[0] > 5


def rank_blocks_taken_twice(ctx):
    """A handler that takes a block of received rows while the call that it interrupts takes one: two blocks."""
    from deep_ep import _memory

    cache = _memory.RowCache(4)
    shape = (1024, 1024)
    kept = cache.empty(shape, torch.bfloat16)
    where = kept.data_ptr()
    del kept
    real, taken = _memory._Block.tensor, []

    def tensor(block, *args):
        if not taken and block.storage.data_ptr() == where:
            taken.append(None)  # the call below comes here again
            taken.append(cache.empty(shape, torch.bfloat16))
        return real(block, *args)

    with mock.patch.object(_memory._Block, "tensor", tensor):
        outer = cache.empty(shape, torch.bfloat16)
    assert taken[1].data_ptr() != outer.data_ptr()


def test_blocks_are_not_taken_twice(pool):
    pool.run(1, rank_blocks_taken_twice)


def test_small_signal_stack(device, tmp_path):
    """The Go runtime uses a thread's alternate signal stack: one that has little room is replaced."""
    if device != "cpu":
        pytest.skip("the host code is the same")
    program = os.path.join(os.path.dirname(__file__), "signal_stack_program.py")
    done = subprocess.run(
        [sys.executable, program, str(tmp_path), "60"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "GOGC": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-600:]


def test_signals_are_for_the_host(device, tmp_path):
    """A signal that a host waits for (sigwait), or handles, does not come to a thread of the library."""
    if device != "cpu":
        pytest.skip("the host code is the same")
    program = os.path.join(os.path.dirname(__file__), "signal_mask_program.py")
    done = subprocess.run([sys.executable, program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-600:]
