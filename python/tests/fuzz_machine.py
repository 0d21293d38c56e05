"""A state machine of calls on buffers of one rank, in any order, with releases and regroups between them, one wrong
argument in five: for test_fuzz.

Right calls have right results. A wrong argument ends in an error of the package that names it, and the buffer works on.
A program that does all this never dies.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

BOUND, HIDDEN, EXPERTS, TOPK = 16, 512, 4, 2
BF16 = torch.bfloat16
MANY = 6  # of each kind of thing that is kept

WRONG = [
    None, -1, 0, 3, 2**31 - 1, 2**31, 2**32 + 8, 2**64, 1.5, float("nan"), True, "x", b"x", [], (), {}, [1], object(),
    torch.int32, torch.zeros(0), torch.zeros(3, 5), torch.zeros(BOUND, HIDDEN, dtype=BF16), torch.zeros(4, 2).t(),
    torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, device="meta"), torch.zeros(4, dtype=torch.bool),
]  # fmt: skip
# Sizes with which a call would only be slow, or which torch refuses to allocate by an error of its own.
SLOW = {"num_worst_tokens", "num_experts", "num_max_tokens_per_rank", "num_bytes"}


class Named(Exception):
    """A call was refused as it should be."""


class Open:
    """A buffer, and what its calls have left."""

    def __init__(self, buffer: Any, shrinks: bool) -> None:
        self.buffer, self.shrinks = buffer, shrinks
        self.failed = self.sends = False  # a failure is no surprise once sends may be without a receive
        self.asleep = False  # released
        self.dispatched: list[Any] = []
        self.low_latency: list[Any] = []
        self.hooks: list[Any] = []

    def forget(self) -> None:
        self.dispatched.clear()
        self.low_latency.clear()
        self.hooks.clear()


def tokens_of(count: int, seed: int) -> SimpleNamespace:
    """A batch whose every token goes somewhere, once or TOPK times."""
    idx = (torch.arange(count * TOPK).reshape(count, TOPK) + seed) % EXPERTS
    x = (torch.arange(count).reshape(-1, 1) % 50 + seed % 50 + 1).expand(count, HIDDEN).to(BF16).contiguous()
    return SimpleNamespace(x=x, idx=idx, weights=torch.ones(count, TOPK), count=count)


class Program(RuleBasedStateMachine):
    """What every program does: it keeps buffers, notes its calls, and judges what they end in."""

    trace: Any = None  # a file: the calls of this example, for the case that the process dies

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Open] = []
        self.events: list[Any] = []
        if self.trace is not None:
            self.trace.seek(0)
            self.trace.truncate()

    @invariant()
    def buffers_work(self) -> None:
        """What a refused call leaves behind is a buffer that works."""
        for which in self.open:
            if not which.failed and not which.sends and not which.asleep:
                which.buffer.check()

    def teardown(self) -> None:
        for which in self.open:
            which.buffer.destroy()
        self.events.clear()

    # ---- helpers

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.write(text + "\n")
            self.trace.flush()

    def pick(self, data: Any) -> Open:
        return data.draw(st.sampled_from(self.open))  # type: ignore[no-any-return]

    def some_event(self, data: Any) -> Any:
        return data.draw(st.sampled_from([None, *self.events]))

    def wait_or_keep(self, which: Open, event: Any, data: Any) -> None:
        if event.event is not None and data.draw(st.booleans()):
            keep(self.events, event)
        else:
            self.finish(which, event)

    def finish(self, which: Open, event: Any) -> None:
        if event.event is not None:
            self.attempt(which, event.current_stream_wait, {}, "")

    def spoil(self, given: dict[str, Any], data: Any, fixed: tuple[str, ...] = ()) -> str:
        """Makes one argument in five calls wrong, or what may be wrong; its name, or nothing."""
        names = [name for name in given if name not in fixed]
        if not names or data.draw(st.integers(0, 4)):
            return ""
        name = data.draw(st.sampled_from(names))
        value = data.draw(st.sampled_from(WRONG))
        if name in SLOW and isinstance(value, int) and 2**20 < value < 2**31:
            value = 3
        for flag in ("async_finish", "async_with_compute_stream"):
            if flag in given:
                given[flag] = False  # an error comes with the call: what is drawn next depends on it
        given[name] = value
        return name

    def attempt(self, which: Open | None, call: Callable[..., Any], given: dict[str, Any], changed: str) -> Any:
        """The call's result; None if it was refused by an error that it may end in."""
        from deep_ep import DeepEPError, errors

        name = getattr(call, "__qualname__", type(call).__name__)
        self.note(f"{name} {changed}={given[changed]!r:.80}" if changed else name)
        try:
            return call(**given)
        except DeepEPError as error:
            self.note(f"    {type(error).__name__}: {error}")
            if error.status == errors.INVALID_ARGUMENT and " on rank " not in str(error):
                # A wrong pair of arguments is named by either of them.
                assert changed and ("argument " in str(error) or isinstance(error, AssertionError)), str(error)
                return None
            if error.status in (errors.INVALID_STATE, errors.UNSUPPORTED, errors.OUT_OF_MEMORY):
                return None
            assert changed or which is None or which.sends or which.failed, str(error)
            if which is not None:
                self.broken(which)
            return None

    def done(
        self, which: Open, call: Callable[..., Any], given: dict[str, Any] | None = None, changed: str = ""
    ) -> bool:
        """Whether a call that returns nothing was carried out."""

        def carried_out(**arguments: Any) -> bool:
            call(**arguments)
            return True

        carried_out.__qualname__ = call.__qualname__
        return self.attempt(which, carried_out, given or {}, changed) is not None

    def broken(self, which: Open) -> bool:
        """Whether the buffer has failed, which only data that no host can see, or a lost receive, may do."""
        from deep_ep import DeepEPError

        try:
            which.buffer.check()
        except DeepEPError:
            which.failed = True
        return which.failed


class Machine(Program):
    """What one program of V1 does."""

    # ---- buffers

    @precondition(lambda self: len(self.open) < 2)
    @rule(shrinks=st.booleans(), data=st.data())
    def make(self, shrinks: bool, data: Any) -> None:
        from deep_ep import Buffer

        rdma = Buffer.get_low_latency_rdma_size_hint(BOUND, HIDDEN, 1, EXPERTS)
        given = {
            "group": None, "comm": One(), "num_nvl_bytes": 1 << 18, "num_rdma_bytes": rdma, "low_latency_mode": True,
            "num_qps_per_rank": EXPERTS, "engine": "cpu", "timeout": 5, "explicitly_destroy": True,
            "enable_shrink": shrinks,
        }  # fmt: skip
        changed = self.spoil(given, data, fixed=("comm", "explicitly_destroy", "num_nvl_bytes", "num_rdma_bytes"))
        buffer = self.attempt(None, Buffer, given, changed)
        if changed and buffer is not None:
            buffer.destroy()
        elif buffer is not None:
            self.open.append(Open(buffer, shrinks))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def destroy(self, data: Any) -> None:
        which = self.pick(data)
        if data.draw(st.integers(0, 3)) == 0 or which.failed:
            self.note("destroy")
            which.buffer.destroy()
            self.open.remove(which)

    # ---- normal mode

    @precondition(lambda self: self.open)
    @rule(count=st.integers(0, 40), seed=st.integers(0, 3), data=st.data())
    def dispatch(self, count: int, seed: int, data: Any) -> None:
        which, batch = self.pick(data), tokens_of(count, seed)
        given = {"topk_idx": batch.idx, "num_experts": EXPERTS}
        changed = self.spoil(given, data)
        layout = self.attempt(which, which.buffer.get_dispatch_layout, given, changed)
        if layout is None or changed:
            return
        assert layout[0].tolist() == [count]
        given = {
            "x": batch.x, "num_tokens_per_rank": layout[0], "num_tokens_per_expert": layout[2],
            "is_token_in_rank": layout[3], "topk_idx": batch.idx, "topk_weights": batch.weights,
            "expert_alignment": data.draw(st.sampled_from((1, 16))), "config": None,
            "num_worst_tokens": data.draw(st.sampled_from((0, 0, 64))), "previous_event": self.some_event(data),
            "async_finish": data.draw(st.booleans()),
        }  # fmt: skip
        changed = self.spoil(given, data)
        got = self.attempt(which, which.buffer.dispatch, given, changed)
        if got is None or changed:
            return
        self.wait_or_keep(which, got[-1], data)
        if not given["async_finish"]:
            assert torch.equal(got[0][:count], batch.x) or self.broken(which)
        keep(which.dispatched, SimpleNamespace(batch=batch, rows=got[0], weights=got[2], handle=got[4], event=got[5]))

    @precondition(lambda self: any(one.dispatched for one in self.open))
    @rule(data=st.data())
    def cached_dispatch(self, data: Any) -> None:
        which = self.pick(data)
        if not which.dispatched:
            return
        done = data.draw(st.sampled_from(which.dispatched))
        given = {"x": done.batch.x, "handle": done.handle, "async_finish": data.draw(st.booleans())}
        changed = self.spoil(given, data)
        other = data.draw(st.sampled_from(self.open))  # a handle serves any buffer of the same ranks
        got = self.attempt(other, other.buffer.dispatch, given, changed)
        if got is not None and not changed:
            self.finish(other, got[-1])
            assert torch.equal(got[0][: done.batch.count], done.batch.x) or self.broken(other)

    @precondition(lambda self: any(one.dispatched for one in self.open))
    @rule(data=st.data())
    def combine(self, data: Any) -> None:
        which = self.pick(data)
        if not which.dispatched:
            return
        done = data.draw(st.sampled_from(which.dispatched))
        self.finish(which, done.event)
        given = {
            "x": done.rows, "handle": done.handle, "topk_weights": done.weights, "bias": None,
            "previous_event": self.some_event(data), "async_finish": data.draw(st.booleans()),
        }  # fmt: skip
        changed = self.spoil(given, data)
        got = self.attempt(which, which.buffer.combine, given, changed)
        if got is not None and not changed:
            self.finish(which, got[-1])
            assert torch.equal(got[0], done.batch.x) or self.broken(which)

    # ---- low-latency mode

    @precondition(lambda self: self.open)
    @rule(count=st.integers(0, BOUND), seed=st.integers(0, 3), way=st.integers(0, 2), data=st.data())
    def low_latency_dispatch(self, count: int, seed: int, way: int, data: Any) -> None:
        which, batch = self.pick(data), tokens_of(count, seed)
        given = {
            "x": batch.x, "topk_idx": batch.idx, "num_max_dispatch_tokens_per_rank": BOUND, "num_experts": EXPERTS,
            "cumulative_local_expert_recv_stats": torch.zeros(EXPERTS, dtype=torch.int32), "use_fp8": False,
            "dispatch_wait_recv_cost_stats": None, "round_scale": False, "use_ue8m0": False,
            "async_finish": way == 1, "return_recv_hook": way == 2,
        }  # fmt: skip
        changed = self.spoil(given, data)
        got = self.attempt(which, which.buffer.low_latency_dispatch, given, changed)
        if got is None:
            return
        rows, counts, handle, event, hook = got
        if hook is not None:
            which.sends = True
            keep(which.hooks, hook)
        if changed:
            return
        self.wait_or_keep(which, event, data)
        if way == 0:
            assert int(counts.sum()) == batch.idx.numel() or which.failed
        done = SimpleNamespace(batch=batch, rows=rows, handle=handle, hook=hook, event=event)
        keep(which.low_latency, done)

    @precondition(lambda self: any(one.low_latency for one in self.open))
    @rule(way=st.integers(0, 2), data=st.data())
    def low_latency_combine(self, way: int, data: Any) -> None:
        which = self.pick(data)
        done = [done for done in which.low_latency if done.hook is None or done.hook not in which.hooks]
        if not done:
            return
        chosen = data.draw(st.sampled_from(done))
        self.finish(which, chosen.event)
        given = {
            "x": chosen.rows, "topk_idx": chosen.batch.idx, "topk_weights": chosen.batch.weights,
            "handle": chosen.handle, "use_logfmt": False, "zero_copy": False, "out": None,
            "async_finish": way == 1, "return_recv_hook": way == 2,
        }  # fmt: skip
        changed = self.spoil(given, data)
        got = self.attempt(which, which.buffer.low_latency_combine, given, changed)
        if got is None:
            return
        sums, event, hook = got
        if hook is not None:
            which.sends = True
            keep(which.hooks, hook)
        elif not changed:
            self.finish(which, event)
            assert torch.equal(sums, TOPK * chosen.batch.x) or self.broken(which)

    @precondition(lambda self: any(one.hooks for one in self.open))
    @rule(data=st.data())
    def hook(self, data: Any) -> None:
        which = self.pick(data)
        if which.hooks:
            hook = data.draw(st.sampled_from(which.hooks))
            self.attempt(which, hook, {}, "")
            if data.draw(st.booleans()):  # else it may be called again, which is refused
                which.hooks.remove(hook)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def other_calls(self, data: Any) -> None:
        which = self.pick(data)
        buffer, shape = (
            which.buffer,
            {"num_max_dispatch_tokens_per_rank": BOUND, "hidden": HIDDEN, "num_experts": EXPERTS},
        )
        calls: dict[str, dict[str, Any]] = {
            "barrier": {}, "stats": {}, "check": {}, "get_comm_stream": {}, "ready": {},
            "clean_low_latency_buffer": shape,
            "get_local_buffer_tensor": {"dtype": torch.int32, "size": (4, 4), "offset": 64, "use_rdma_buffer": False},
            "low_latency_query_mask_buffer": {"mask_status": torch.zeros(1, dtype=torch.int32)},
            "low_latency_clean_mask_buffer": {},
            "warmup": {"num_tokens": 0, "hidden": HIDDEN, "num_topk": TOPK, "num_experts": EXPERTS,
                       "num_max_dispatch_tokens_per_rank": 0},
        }  # fmt: skip
        if which.low_latency:
            handle = data.draw(st.sampled_from(which.low_latency)).handle
            calls["get_next_low_latency_combine_buffer"] = {"handle": handle}
        name = data.draw(st.sampled_from(sorted(calls)))
        given = calls[name]
        self.attempt(which, getattr(buffer, name), given, self.spoil(given, data))

    # ---- release, restore, regroup

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        """Until restore() calls are refused, and afterwards the handles and hooks of before."""
        which = self.pick(data)
        if data.draw(st.integers(0, 2)):
            return
        if self.done(which, which.buffer.release):
            which.asleep = True
            which.forget()

    @precondition(lambda self: any(one.asleep for one in self.open))
    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        which = data.draw(st.sampled_from([one for one in self.open if one.asleep]))
        which.asleep = not self.done(which, which.buffer.restore)
        assert not which.asleep or which.failed

    @precondition(lambda self: self.open)
    @rule(renumber=st.booleans(), data=st.data())
    def regroup(self, renumber: bool, data: Any) -> None:
        """Failures of before are over; handles serve on, for no number changes."""
        which = self.pick(data)
        given = {"members": [0], "renumber": renumber, "timeout": 5.0}
        changed = self.spoil(given, data)
        if self.done(which, which.buffer.regroup, given, changed):
            which.hooks.clear()
            which.low_latency = [done for done in which.low_latency if done.hook is None]
            which.failed = which.sends = False

    # ---- whatever else a program does

    @precondition(lambda self: self.events)
    @rule(data=st.data())
    def wait(self, data: Any) -> None:
        event = data.draw(st.sampled_from(self.events))
        self.attempt(None, event.current_stream_wait, {}, "")
        self.events.remove(event)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def free_memory(self, data: Any) -> None:
        """Drops results, or gives their storage back as training frameworks do with activations."""
        which = self.pick(data)
        for things in (which.dispatched, which.low_latency):
            if things and data.draw(st.booleans()):
                thing = things.pop()
                if not which.hooks and data.draw(st.booleans()):
                    self.attempt(which, which.buffer.barrier, {}, "")  # calls run in order: none uses the rows now
                    self.note("resize_(0)")
                    thing.rows.untyped_storage().resize_(0)
        gc.collect()

    @precondition(lambda self: any(not one.sends and not one.asleep for one in self.open))
    @rule(seed=st.integers(0, 3), data=st.data())
    def two_threads(self, seed: int, data: Any) -> None:
        """Two threads on one buffer; each gets its own results."""
        which = data.draw(st.sampled_from([one for one in self.open if not one.sends and not one.asleep]))
        failures: list[BaseException] = []

        def work(batch: Any) -> None:
            try:
                rows, _, handle, _, _ = which.buffer.low_latency_dispatch(
                    batch.x, batch.idx, BOUND, EXPERTS, use_fp8=False
                )
                sums = which.buffer.low_latency_combine(rows, batch.idx, batch.weights, handle)[0]
                assert torch.equal(sums, TOPK * batch.x), "wrong sums in a thread"
                layout = which.buffer.get_dispatch_layout(batch.idx, EXPERTS)
                assert layout[0].tolist() == [batch.count]
            except BaseException as error:  # noqa: BLE001 - raised again below
                failures.append(error)

        self.note(f"two threads, buffer {self.open.index(which)}")
        threads = [threading.Thread(target=work, args=(tokens_of(9 + 5 * n, seed + n),)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures and not self.broken(which):
            raise failures[0]


class One:
    """A communicator of one rank."""

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's names
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1

    def allgather(self, blob: bytes) -> list[bytes]:
        return [blob]


def keep(things: list[Any], thing: Any) -> None:
    things.append(thing)
    if len(things) > MANY:
        del things[0]


def corpus() -> str:
    """Where examples that failed are kept, in the tree: they are tried first."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")
