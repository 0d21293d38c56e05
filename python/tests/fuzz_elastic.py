"""V2's state machine for test_fuzz: calls of ElasticBuffer and EPBuffer in any order, as fuzz_machine has V1's.

Handles are changed as well: an attribute is assigned something else, or its tensor is written to.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import threading
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from fuzz_machine import EXPERTS, HIDDEN, TOPK, WRONG, Open, Program, keep, tokens_of

MOST = 40  # tokens
ATTRIBUTES = (
    "do_expand", "num_experts", "expert_alignment", "num_max_tokens_per_rank", "num_sms", "topk_idx",
    "num_recv_tokens", "num_expanded_tokens", "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert", "recv_src_metadata",
    "dst_buffer_slot_idx", "token_metadata_at_forward", "channel_linked_list",
)  # fmt: skip


def combined(done: Any) -> torch.Tensor:
    """What combine makes of the rows as they came: the token once, or once for each of its experts."""
    return done.batch.x * (TOPK if done.expand else 1)


class ElasticMachine(Program):
    """What one program of V2 does."""

    @precondition(lambda self: len(self.open) < 2)
    @rule(kind=st.sampled_from(("ElasticBuffer", "EPBuffer")), flags=st.integers(0, 3), data=st.data())
    def make(self, kind: str, flags: int, data: Any) -> None:
        import deep_ep

        with tempfile.TemporaryDirectory(prefix="deepep-fuzz-") as folder:
            given = {
                "group": None, "num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOPK,
                "use_fp8_dispatch": False, "allow_multiple_reduction": bool(flags & 1), "num_allocated_qps": 0,
                "num_gpu_timeout_secs": 5, "explicitly_destroy": True, "enable_shrink": bool(flags & 2),
                "engine": "cpu", "bootstrap": deep_ep.Bootstrap.file(0, 1, folder),
            }  # fmt: skip
            changed = self.spoil(given, data, fixed=("bootstrap", "explicitly_destroy", "engine"))
            buffer = self.attempt(None, getattr(deep_ep, kind), given, changed)
        if changed and buffer is not None:
            buffer.destroy()
        elif buffer is not None:
            self.open.append(Open(buffer, bool(flags & 2)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def destroy(self, data: Any) -> None:
        which = self.pick(data)
        if data.draw(st.integers(0, 3)) == 0 or which.failed:
            self.note("destroy")
            which.buffer.destroy()
            self.open.remove(which)

    @precondition(lambda self: self.open)
    @rule(count=st.integers(0, MOST), seed=st.integers(0, 3), expand=st.booleans(), data=st.data())
    def dispatch(self, count: int, seed: int, expand: bool, data: Any) -> None:
        which, batch = self.pick(data), tokens_of(count, seed)
        sync = data.draw(st.booleans())
        given = {
            "x": batch.x, "topk_idx": batch.idx, "topk_weights": batch.weights, "num_experts": EXPERTS,
            "num_max_tokens_per_rank": data.draw(st.sampled_from((None, MOST, 64))),
            "expert_alignment": data.draw(st.sampled_from((None, 1, 16))), "num_sms": 0, "do_cpu_sync": sync,
            "do_expand": expand, "do_zero_padding": expand, "async_with_compute_stream": data.draw(st.booleans()),
            "cumulative_local_expert_recv_stats": torch.zeros(EXPERTS, dtype=torch.int32),
        }  # fmt: skip
        changed = self.spoil(given, data)
        got = self.attempt(which, which.buffer.dispatch, given, changed)
        if got is None or changed:
            return
        rows, _, weights, handle, event = got
        self.finish(which, event)
        if not expand:
            assert torch.equal(rows[:count], batch.x) or self.broken(which)
        assert not sync or handle.num_recv_tokens == len(rows)
        keep(which.dispatched, SimpleNamespace(batch=batch, rows=rows, weights=weights, handle=handle, expand=expand))

    def chosen(self, which: Open, data: Any) -> Any:
        return data.draw(st.sampled_from(which.dispatched))

    @precondition(lambda self: any(one.dispatched for one in self.open))
    @rule(data=st.data())
    def cached_dispatch(self, data: Any) -> None:
        which = self.pick(data)
        if not which.dispatched:
            return
        done = self.chosen(which, data)
        given = {
            "x": done.batch.x, "handle": done.handle, "do_expand": done.expand, "topk_weights": done.batch.weights,
            "num_experts": None, "do_zero_padding": False,
        }  # fmt: skip
        changed = self.spoil(given, data)
        other = data.draw(st.sampled_from(self.open))  # a handle serves any buffer of the same ranks
        got = self.attempt(other, other.buffer.dispatch, given, changed)
        if got is not None and not changed:
            count = done.batch.count
            assert got[3] is done.handle
            assert done.expand or torch.equal(got[0][:count], done.batch.x) or self.broken(other)

    @precondition(lambda self: any(one.dispatched for one in self.open))
    @rule(data=st.data())
    def combine(self, data: Any) -> None:
        which = self.pick(data)
        if not which.dispatched:
            return
        done = self.chosen(which, data)
        given = {
            "x": done.rows, "handle": done.handle, "topk_weights": None, "bias": None,
            "async_with_compute_stream": data.draw(st.booleans()),
        }  # fmt: skip
        changed = self.spoil(given, data)
        got = self.attempt(which, which.buffer.combine, given, changed)
        if got is not None and not changed:
            self.finish(which, got[-1])
            assert torch.equal(got[0], combined(done)) or self.broken(which)

    @precondition(lambda self: any(one.dispatched for one in self.open))
    @rule(data=st.data())
    def changed_handle(self, data: Any) -> None:
        """Whatever a handle holds, its calls end in an error or in some result, and the next one works."""
        which = self.pick(data)
        if not which.dispatched:
            return
        done = self.chosen(which, data)
        handle = copy.copy(done.handle)
        name = data.draw(st.sampled_from(ATTRIBUTES))
        value = getattr(handle, name)
        if isinstance(value, torch.Tensor) and data.draw(st.booleans()):
            value = value.clone()
            if value.numel():
                place = data.draw(st.integers(0, value.numel() - 1))
                value.view(-1)[place] = data.draw(st.sampled_from((-1, -(2**31), 1, 7, 1 << 20, 2**31 - 1)))
        else:
            value = data.draw(st.sampled_from(WRONG))
        setattr(handle, name, value)
        self.note(f"handle.{name} = {value!r:.200}")
        if data.draw(st.booleans()):
            given = {"x": done.rows, "handle": handle}
            self.attempt(which, which.buffer.combine, given, "handle")
        else:
            given = {"x": done.batch.x, "handle": handle, "do_expand": done.expand}
            self.attempt(which, which.buffer.dispatch, given, "handle")

    @precondition(lambda self: any(hasattr(one.buffer, "lb_prefetch_weights") for one in self.open))
    @rule(count=st.integers(0, MOST), sync=st.booleans(), data=st.data())
    def deferred(self, count: int, sync: bool, data: Any) -> None:
        """EPBuffer: until the event is waited for, every other call is refused, whatever its arguments are."""
        which = data.draw(st.sampled_from([one for one in self.open if hasattr(one.buffer, "lb_prefetch_weights")]))
        batch = tokens_of(count, count)
        given = {
            "x": batch.x, "topk_idx": batch.idx, "num_experts": EXPERTS, "do_cpu_sync": sync,
            "async_with_compute_stream": True, "defer_epilogue": True,
        }  # fmt: skip
        event = self.attempt(which, which.buffer.dispatch, given, "")
        if event is None:
            return
        refused = self.attempt(which, which.buffer.dispatch, given, "")
        assert refused is None
        got = self.attempt(which, event.wait, {}, "")
        if got is not None:
            assert torch.equal(got[0][:count], batch.x) or self.broken(which)
            assert event.wait() is None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def other_calls(self, data: Any) -> None:
        which = self.pick(data)
        calls: dict[str, dict[str, Any]] = {
            "barrier": {"with_cpu_sync": False, "sequential": True}, "check": {}, "stats": {}, "lost_ranks": {},
            "get_theoretical_num_sms": {"num_experts": EXPERTS, "num_topk": TOPK},
            "get_theoretical_num_qps": {"num_sms": 20}, "get_logical_domain_size": {}, "get_comm_stream": {},
            "clean_mask": {}, "query_mask": {"mask_status": torch.zeros(1, dtype=torch.int32)},
        }  # fmt: skip
        if hasattr(which.buffer, "lb_prefetch_weights"):
            calls["lb_prefetch_weights"] = {
                "redundant_expert_weights": torch.zeros(2, 8), "expert_weights": torch.ones(EXPERTS, 8),
                "redundancy_mapping": torch.tensor([[1, -1]], dtype=torch.int32), "num_sms": 0,
            }  # fmt: skip
        name = data.draw(st.sampled_from(sorted(calls)))
        self.attempt(which, getattr(which.buffer, name), calls[name], self.spoil(calls[name], data))

    # ---- release, restore, regroup

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        which = self.pick(data)
        if not data.draw(st.integers(0, 2)) and self.done(which, which.buffer.release):
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
        which = self.pick(data)
        given = {"members": [0], "renumber": renumber, "timeout": 5.0}
        changed = self.spoil(given, data)
        if self.done(which, which.buffer.regroup, given, changed):
            which.failed = False

    # ---- whatever else a program does

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def free_memory(self, data: Any) -> None:
        """Drops results, or gives their storage back as training frameworks do with activations."""
        which = self.pick(data)
        if which.dispatched and data.draw(st.booleans()):
            done = which.dispatched.pop()
            if data.draw(st.booleans()):
                self.note("resize_(0)")
                done.rows.untyped_storage().resize_(0)
                self.attempt(which, which.buffer.combine, {"x": done.rows, "handle": done.handle}, "handle")
        gc.collect()

    @precondition(lambda self: any(not one.asleep for one in self.open))
    @rule(seed=st.integers(0, 3), data=st.data())
    def two_threads(self, seed: int, data: Any) -> None:
        """Two threads, each with handles of its own, on one buffer."""
        which = data.draw(st.sampled_from([one for one in self.open if not one.asleep]))
        failures: list[BaseException] = []

        def work(batch: Any) -> None:
            try:
                for expand in (False, True):
                    rows, _, _, handle, _ = which.buffer.dispatch(
                        batch.x, batch.idx, num_experts=EXPERTS, do_expand=expand
                    )
                    sums = which.buffer.combine(rows, handle)[0]
                    assert torch.equal(sums, batch.x * (TOPK if expand else 1)), "wrong sums in a thread"
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
