"""The compiled face: what goes through it, that it gives what Python gives, and what it leaves to Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import alone
import checks

SYNCHRONOUS = ("layout", "dispatch", "worst case", "cached", "combine", "low latency", "halves")
SHORT = 3  # tokens fewer, in a call of the same kind


def sites_of(buffer):
    """The sites that have plans, by name."""
    faces = [face for face in (buffer._normal._face, buffer._low_latency._face) if face is not None]
    return {
        name.strip("_"): site for face in faces for name, site in vars(face).items() if getattr(site, "_plans", None)
    }


class Counted:
    """Stands for a function of a Site, and notes what comes back."""

    def __init__(self, call, got):
        self.call, self.got = call, got

    def __call__(self, *args):
        self.got.append(self.call(*args))
        return self.got[-1]


def count(site):
    """What comes back of the site's calls from now on: of `call` on the CPU engine, of the others on GPUs."""
    got = []
    for way in ("call", "issue", "start", "start_behind"):
        setattr(site, way, Counted(getattr(site, way), got))
    return got


def counted(buffer):
    mode = buffer._low_latency
    got = {name: count(site) for name, site in sites_of(buffer).items()}
    for name in ("dispatch", "combine"):  # of low latency, as GPUs make them
        for way in ("issue", "start"):
            if (call := getattr(mode, f"{way}_{name}")) is not None:
                setattr(mode, f"{way}_{name}", Counted(call, got[name]))
    return got


def rank_used(ctx):
    """Calls of a kind that was seen go through the face whole, whatever their number of tokens is."""
    with alone.buffer_of(ctx) as buffer:
        for tokens in (alone.BOUND, alone.BOUND):
            calls = alone.Calls(buffer, tokens=tokens)
            for kind in SYNCHRONOUS:
                calls.of(kind)()
        got = counted(buffer)
        fewer = alone.Calls(buffer, tokens=alone.BOUND - SHORT)
        for kind in ("layout", "dispatch", "cached", "combine"):
            fewer.of(kind)()
        for kind in SYNCHRONOUS:
            calls.of(kind)()
        assert set(got) == {"layout", "notify", "dispatch", "worst", "cached", "combine"} | {"dispatch", "combine"}
        wrong = {name: [type(one) for one in results if type(one) is not tuple] for name, results in got.items()}
        assert all(results for results in got.values()), {name: len(results) for name, results in got.items()}
        assert not any(wrong.values()), wrong


@checks.needs_face
def test_calls_go_through_it(pool):
    pool.run(1, rank_used)


def rank_same(ctx, fp8):
    """What the face returns is what Python returns: values, shapes, strides, dtypes; and each tensor has one holder."""
    torch.manual_seed(ctx.rank)
    tokens, experts, topk, hidden = 24 + ctx.rank, 4 * ctx.size, 3, 256
    x = torch.randn(tokens, hidden).to(torch.bfloat16)
    scales = torch.rand(2, tokens).t()  # column-major
    idx = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)])
    idx[0] = -1
    weights = torch.rand(tokens, topk)
    x, scales, idx, weights = (tensor.to(ctx.device) for tensor in (x, scales, idx, weights))
    data = (x.to(torch.float8_e4m3fn), scales) if fp8 else x
    seen = {}
    for compiled in (True, False):
        with alone.buffer_of(ctx) as buffer:
            buffer._core.compiled = compiled
            for _ in range(3):
                layout = buffer.get_dispatch_layout(idx, experts)
                counts = {
                    "num_tokens_per_rank": layout[0],
                    "num_tokens_per_expert": layout[2],
                    "is_token_in_rank": layout[3],
                }
                fresh = buffer.dispatch(data, **counts, topk_idx=idx, topk_weights=weights, expert_alignment=2)
                worst = buffer.dispatch(
                    data, **counts, topk_idx=idx, topk_weights=weights, num_worst_tokens=64 * ctx.size
                )
                cached = buffer.dispatch(data, handle=fresh[4])
                answers = torch.ones(fresh[4][3].shape[0], hidden, dtype=torch.bfloat16, device=ctx.device)
                combined = buffer.combine(answers, fresh[4], topk_weights=fresh[2], bias=(x, None))
            rows = fresh[4][3].shape[0]
            valid = [part[:rows] for part in flat(worst[:3])]
            seen[compiled] = flat((layout, fresh, valid, worst[4][0], cached[0], combined))
            if compiled:
                assert buffer._normal._face is not None, "the compiled face is not built"
                held = [tensor._use_count() for tensor in flat((fresh[:3], combined))]
                assert set(held) == {1}, held
    same_tensors(seen)


def flat(value):
    """The tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in flat(one)] if isinstance(value, (tuple, list)) else []


@checks.needs_face
@pytest.mark.parametrize("fp8", (False, True), ids=("bf16", "fp8 with scales"))
def test_gives_what_python_gives(pool, fp8):
    pool.run(2, rank_same, fp8)


def rank_same_elastic(ctx, fp8, expand):
    """The same of V2's calls: with counts and without, resent, and combined."""
    torch.manual_seed(ctx.rank)
    tokens, experts, topk, hidden = 24 + ctx.rank, 4 * ctx.size, 3, 256
    x = torch.randn(tokens, hidden).to(torch.bfloat16)
    scales = torch.rand(2, tokens).t()
    idx = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)])
    idx[0] = -1
    weights, stats = torch.rand(tokens, topk), torch.zeros(4, dtype=torch.int32)
    x, scales, idx, weights, stats = (tensor.to(ctx.device) for tensor in (x, scales, idx, weights, stats))
    data = (x.to(torch.float8_e4m3fn), scales) if fp8 else x
    options = {"do_expand": expand, "do_zero_padding": expand, "use_tma_aligned_col_major_sf": fp8}
    chosen = {"num_experts": experts, "expert_alignment": 2, "num_max_tokens_per_rank": 32}
    seen = {}
    for compiled in (True, False):
        with alone.elastic_of(ctx) as buffer:
            buffer._core.compiled = compiled
            for turn in range(4):
                if turn == 3 and compiled:
                    got = {name: count(site) for name, site in vars(buffer._face).items() if hasattr(site, "run")}
                fresh = buffer.dispatch(data, idx, weights, stats, **chosen, **options)
                worst = buffer.dispatch(data, idx, None, do_cpu_sync=False, do_handle_copy=False, **chosen, **options)
                again = buffer.dispatch(data, None, weights, handle=fresh[3], **options)
                rows = fresh[3].num_recv_tokens
                answers = torch.ones(rows, hidden, dtype=torch.bfloat16, device=ctx.device)
                combined = buffer.combine(answers, fresh[3], fresh[2], bias=(x, None))
            assert worst[3].topk_idx is idx and fresh[3].topk_idx is not idx and torch.equal(fresh[3].topk_idx, idx)
            handles = [
                (h.psum_num_recv_tokens_per_scaleup_rank, h.psum_num_recv_tokens_per_expert,
                 h.num_unaligned_recv_tokens_per_expert, h.topk_idx) for h in (fresh[3], worst[3])
            ]  # fmt: skip
            metadata = fresh[3].recv_src_metadata[:, : None if expand else 2]
            counted = torch.tensor([rows, *fresh[3].num_recv_tokens_per_expert_list])
            first = [part[:1] for part in flat(worst[:3])]
            seen[compiled] = flat((fresh[:3], again[:3], first, combined, handles, metadata, stats, counted))
            if compiled:
                assert all(type(one) is tuple for results in got.values() for one in results)
                assert all(got.values()), {name: len(results) for name, results in got.items()}
                held = [tensor._use_count() for tensor in flat((fresh[1:3], again[1:3], combined))]
                assert set(held) == {1}, held
            stats.zero_()
    same_tensors(seen)


def same_tensors(seen):
    """Those that the face returned are those that Python returned."""
    assert len(seen[True]) == len(seen[False]) > 15
    for mine, pythons in zip(*seen.values(), strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (pythons.dtype, pythons.shape, pythons.stride())
        is_fp8 = mine.dtype is torch.float8_e4m3fn
        assert torch.equal(*(t.view(torch.uint8) if is_fp8 else t for t in (mine, pythons)))


@checks.needs_face
@pytest.mark.parametrize("expand", (False, True), ids=("plain", "expanded"))
@pytest.mark.parametrize("fp8", (False, True), ids=("bf16", "fp8 with scales"))
def test_gives_what_python_gives_in_v2(pool, fp8, expand):
    pool.run(2, rank_same_elastic, fp8, expand)


def rank_refusals(ctx):
    """A call that differs from those of a plan is checked as ever."""
    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer)
        for kind in SYNCHRONOUS:
            calls.of(kind)()
            calls.of(kind)()
        rows, _, weights, _, handle, _ = calls.dispatched
        matrix, first, second, source, in_rank, head = handle
        few = calls.x[:-1]
        wrong = {
            "argument x: got shape": lambda: buffer.combine(rows[:-1], handle),
            "argument topk_weights: got shape": lambda: buffer.combine(rows, handle, weights[:-1]),
            r"argument bias\[0\]: got shape": lambda: buffer.combine(rows, handle, bias=few),
            "argument x: got 63 rows": lambda: buffer.dispatch(few, handle=handle),
            "argument x: got dtype": lambda: buffer.combine(rows.float(), handle),
            "argument handle: send_head: got": lambda: buffer.combine(
                rows, (matrix, first, second, source, in_rank, head.long())
            ),
            "argument is_token_in_rank: got shape": lambda: buffer.dispatch(
                few, **calls.layout_arguments, topk_idx=calls.idx[:-1], topk_weights=calls.weights[:-1]
            ),
            "argument topk_idx: got strides": lambda: buffer.get_dispatch_layout(calls.idx.t().contiguous().t(), 4),
            "argument num_experts: got True": lambda: buffer.get_dispatch_layout(calls.idx, True),
            "argument num_worst_tokens: got -1": lambda: buffer.dispatch(
                calls.x, **calls.layout_arguments, topk_idx=calls.idx, topk_weights=calls.weights, num_worst_tokens=-1
            ),
            "argument x: got shape .*, allowed": lambda: buffer.low_latency_dispatch(
                calls.x[0], calls.idx, alone.BOUND, alone.EXPERTS, use_fp8=False
            ),
        }
        from deep_ep.errors import DeepEPError

        for text, call in wrong.items():
            with pytest.raises(DeepEPError, match=text):
                call()
        for kind in SYNCHRONOUS:
            calls.of(kind)()
        assert not buffer._core.kept


def test_other_calls_are_checked(pool):
    pool.run(1, rank_refusals)


def rank_elastic_refusals(ctx):
    """The same of V2: a handle, a flag or a number that is another one is looked at, whatever plan its tensors have."""
    from deep_ep.errors import DeepEPError

    with alone.elastic_of(ctx) as buffer:
        calls = alone.ElasticCalls(buffer)
        rows, weights, handle, few = calls.rows, calls.row_weights, calls.handle, calls.x[:-1]

        def rounds(times):
            for _ in range(times):
                for kind in alone.ELASTIC:
                    calls.of(kind)()
                buffer.combine(rows, handle, weights)

        def changed(call, **values):
            before = {name: getattr(handle, name) for name in values}
            vars(handle).update(values)
            try:
                call()
            finally:
                vars(handle).update(before)

        def resent(x=calls.x, **options):
            buffer.dispatch(x, handle=handle, **{"do_expand": True, **options})

        def combined(**options):
            buffer.combine(rows, handle, weights, **options)

        rounds(2)
        fresh = {"topk_idx": calls.idx, "topk_weights": calls.weights, "num_experts": alone.EXPERTS, "do_expand": True}
        metadata, several = handle.recv_src_metadata, buffer.num_allocated_qps + 1
        wrong = {
            "argument x: got 63 rows": lambda: resent(few),
            "argument do_cpu_sync: got True": lambda: resent(do_cpu_sync=True),
            "argument do_expand: got 'yes'": lambda: resent(do_expand="yes"),
            "argument num_experts: got 8, allowed": lambda: resent(num_experts=8),
            "argument expert_alignment: got 3, allowed": lambda: resent(expert_alignment=3),
            "argument topk_idx: got a tensor": lambda: resent(topk_idx=calls.idx),
            "argument num_sms: got -2": lambda: resent(num_sms=-2),
            "argument num_qps: got": lambda: resent(num_qps=several),
            "argument num_sms: got -4": lambda: combined(num_sms=-4),
            f"argument num_qps: got {several}": lambda: combined(num_qps=several),
            r"argument bias\[0\]: got shape": lambda: combined(bias=few),
            "argument topk_weights: got shape": lambda: buffer.combine(rows, handle, weights[:-1]),
            "argument x: got dtype": lambda: buffer.combine(rows.float(), handle),
            "argument handle.recv_src_metadata: got dtype": lambda: changed(
                combined, recv_src_metadata=metadata.long()
            ),
            "argument handle.psum_num_recv_tokens_per_expert": lambda: changed(resent, num_experts=alone.EXPERTS - 1),
            "argument handle.num_sms: got True": lambda: changed(combined, num_sms=True),
            "argument handle.num_recv_tokens: got 2147483647, allowed at most": lambda: changed(
                resent, num_recv_tokens=2**31 - 1
            ),
            "argument handle: got tuple": lambda: buffer.combine(rows, (handle,)),
            "argument topk_weights: got shape .*": lambda: buffer.dispatch(
                calls.x, **{**fresh, "topk_weights": calls.weights[:-1]}
            ),
            "argument x: got 64 rows": lambda: buffer.dispatch(calls.x, **fresh, num_max_tokens_per_rank=63),
            "argument do_zero_padding: got True": lambda: buffer.dispatch(
                calls.x, **{**fresh, "do_expand": False}, do_zero_padding=True
            ),
        }
        for text, call in wrong.items():
            with pytest.raises(DeepEPError, match=text):
                call()
        rounds(1)
        assert not buffer._core.kept


def test_other_calls_are_checked_in_v2(pool):
    pool.run(1, rank_elastic_refusals)


def rank_token_counts(ctx):
    """Any number of tokens follows the plan of another; lengths that do not fit each other are looked at."""
    from deep_ep.errors import DeepEPError

    def plans(site):
        return len(site._plans)

    with alone.buffer_of(ctx) as buffer:
        calls, sizes = alone.Calls(buffer), (alone.BOUND, alone.EXPERTS)
        x, idx, weights, out = calls.x, calls.idx, calls.weights, torch.zeros_like(calls.x)

        def exchange(tokens, halves, **into):
            given = x[:tokens], idx[:tokens]
            rows, count, handle, _, hook = buffer.low_latency_dispatch(
                *given, *sizes, use_fp8=False, return_recv_hook=halves, topk_weights=weights[:tokens]
            )
            if halves:
                hook()
            into = {name: one[:tokens] for name, one in into.items()}
            sums, _, hook = buffer.low_latency_combine(
                rows, given[1], weights[:tokens], handle, return_recv_hook=halves, **into
            )
            if halves:
                hook()
            assert int(count.sum()) == tokens * alone.TOPK and torch.equal(sums, alone.TOPK * x[:tokens])
            return handle, rows

        for tokens in (5, alone.BOUND, 0, 1, 5, 17):
            for halves in (False, True):
                for into in ({}, {"out": out}):
                    handle, rows = exchange(tokens, halves, **into)
            face = buffer._low_latency._face
            assert (plans(face.dispatch), plans(face.combine)) == (2, 4), tokens
        more = torch.cat([x, x]), torch.cat([idx, idx]), torch.cat([weights, weights])
        wrong = {
            "argument topk_idx: got shape": lambda: buffer.low_latency_dispatch(
                x[:5], idx[:4], *sizes, use_fp8=False, topk_weights=weights[:5]
            ),
            "argument topk_weights: got shape": lambda: buffer.low_latency_dispatch(
                x[:5], idx[:5], *sizes, use_fp8=False, topk_weights=weights[:4]
            ),
            "got 128": lambda: buffer.low_latency_dispatch(*more[:2], *sizes, use_fp8=False, topk_weights=more[2]),
            "argument topk_weights: got shape .*": lambda: buffer.low_latency_combine(
                rows, idx[:5], weights[:6], handle
            ),
            "argument out: got shape": lambda: buffer.low_latency_combine(
                rows, idx[:5], weights[:5], handle, out=out[:4]
            ),
        }
        for text, call in wrong.items():
            with pytest.raises(DeepEPError, match=text):
                call()
        exchange(9, True, out=out)
        assert (plans(face.dispatch), plans(face.combine)) == (2, 4) and not buffer._core.kept


@checks.needs_face
def test_any_number_of_tokens_follows_one_plan(pool):
    pool.run(1, rank_token_counts)


def rank_without_memory(ctx, folder):
    """A tensor that has no memory of its own is refused in words, without the trace that torch would write."""
    from deep_ep.errors import DeepEPTypeError

    with alone.elastic_of(ctx) as buffer, alone.buffer_of(ctx) as older:
        calls, plain = alone.ElasticCalls(buffer), alone.Calls(older)
        for _ in range(3):
            for kind in alone.ELASTIC:
                calls.of(kind)()
            plain.layout()
        sparse, indices = calls.x.to_sparse(), calls.idx.to_sparse()
        shown, before = os.open(os.path.join(folder, "stderr"), os.O_CREAT | os.O_RDWR), os.dup(2)
        os.dup2(shown, 2)
        try:
            for call in (
                lambda: buffer.dispatch(sparse, calls.idx, calls.weights, num_experts=alone.EXPERTS),
                lambda: buffer.dispatch(calls.x, indices, calls.weights, num_experts=alone.EXPERTS),
                lambda: buffer.dispatch(sparse, handle=calls.handle, do_expand=True),
                lambda: buffer.combine(sparse, calls.handle),
                lambda: older.get_dispatch_layout(indices, alone.EXPERTS),
            ):
                with pytest.raises(DeepEPTypeError, match=r"got a tensor of layout torch.sparse_coo"):
                    call()
        finally:
            os.dup2(before, 2)
            os.close(before)
        assert os.pread(shown, 1 << 16, 0) == b""
        os.close(shown)
        buffer.check()
        older.check()


def test_tensors_without_memory(pool, tmp_path):
    pool.run(1, rank_without_memory, str(tmp_path))


def rank_hooks(ctx):
    """Halves, through the face and in Python: a hook is for once, for its own send, and holds what it needs."""
    from deep_ep.errors import DeepEPError

    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer)
        sizes = alone.BOUND, alone.EXPERTS
        for compiled in (True, True, False):
            buffer._core.compiled = compiled
            if not compiled:
                buffer._low_latency.forget()
            x = calls.x.clone()
            rows, count, handle, event, hook = buffer.low_latency_dispatch(
                x, calls.idx, *sizes, use_fp8=False, return_recv_hook=True
            )
            assert event.event is None
            watched = weakref.ref(x)
            del x
            assert watched() is not None, "the hook lets go of what its send reads"
            hook()
            assert watched() is None and not buffer._core.kept
            out = torch.empty_like(calls.x)
            sums, _, second = buffer.low_latency_combine(
                rows, calls.idx, calls.weights, handle, out=out, return_recv_hook=True
            )
            second()
            assert sums is out and torch.equal(out, alone.TOPK * calls.x) and int(count.sum()) == calls.idx.numel()
            for used in (hook, second):
                with pytest.raises(DeepEPError, match="the hook was called already"):
                    used()
            forgotten = buffer.low_latency_dispatch(calls.x, calls.idx, *sizes, use_fp8=False, return_recv_hook=True)
            calls.clean()
            with pytest.raises(DeepEPError, match=r"the send of this hook is forgotten"):
                forgotten[4]()
            assert not buffer._core.kept
            calls.halves()


@checks.needs_face
def test_hooks(pool):
    pool.run(1, rank_hooks)


def rank_compiled_hooks(ctx):
    """A compiled function that calls a hook has one graph break there; torch.compile looks at nothing of ours."""
    from torch._dynamo.utils import counters

    def around(x, hook):
        before = x + 1
        hook()
        return before + 1

    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer)
        frames = {}
        for compiled in (True, False):
            buffer._core.compiled = compiled
            if not compiled:
                buffer._low_latency.forget()
            for _ in range(3):
                calls.halves()
            options = {"use_fp8": False, "return_recv_hook": True}
            hook = buffer.low_latency_dispatch(calls.x, calls.idx, alone.BOUND, alone.EXPERTS, **options)[4]
            torch._dynamo.reset()
            counters.clear()
            assert torch.equal(torch.compile(around, backend="eager")(calls.weights, hook), calls.weights + 2)
            frames[compiled] = dict(counters["frames"])
            calls.halves()
        assert frames == {way: {"total": 2, "ok": 2} for way in (True, False)}, frames


@checks.needs_face
def test_hooks_in_compiled_functions(pool):
    pool.run(1, rank_compiled_hooks)


def rank_modes(ctx):
    """Under a mode of torch functions none of our tensor methods runs Python; outputs are where the buffer is."""
    from torch.overrides import TorchFunctionMode

    seen = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    with alone.buffer_of(ctx) as buffer:
        for compiled in (True, False):
            buffer._core.compiled = compiled
            buffer._normal._face, buffer._normal._has_face = None, True
            buffer._low_latency.forget()
            calls = alone.Calls(buffer)
            rows, _, weights, _, handle, _ = calls.dispatched
            given = {**calls.layout_arguments, "topk_idx": calls.idx, "topk_weights": calls.weights}
            most, bound, experts = len(calls.x), alone.BOUND, alone.EXPERTS
            for turn in range(2):
                with Notes(), torch.device("meta"):
                    seen.clear()
                    layout = buffer.get_dispatch_layout(calls.idx, experts)
                    fresh = buffer.dispatch(calls.x, **given)
                    worst = buffer.dispatch(calls.x, **given, num_worst_tokens=most)
                    cached = buffer.dispatch(calls.x, handle=handle)
                    combined = buffer.combine(rows, handle, topk_weights=weights, bias=calls.x)
                    got = buffer.low_latency_dispatch(calls.x, calls.idx, bound, experts, use_fp8=False)
                    sums = buffer.low_latency_combine(got[0], calls.idx, calls.weights, got[2])
                    half = buffer.low_latency_dispatch(calls.x, calls.idx, bound, experts, return_recv_hook=True)
                    half[4]()
                    methods = seen[:]
                assert not methods, f"compiled {compiled}, turn {turn}: {methods}"
                tensors = flat((layout, fresh, worst, cached, combined, got, sums, half))
                assert {tensor.device for tensor in tensors} == {calls.x.device}


def test_modes_cost_nothing(pool):
    pool.run(1, rank_modes)


def rank_inference(ctx):
    """In inference mode low-latency outputs are ordinary tensors, from the face too."""
    with alone.buffer_of(ctx) as buffer:
        calls = alone.Calls(buffer)
        with torch.inference_mode():
            for _ in range(2):
                rows, count, handle, _, _ = buffer.low_latency_dispatch(
                    calls.x, calls.idx, alone.BOUND, alone.EXPERTS, use_fp8=False
                )
                sums = buffer.low_latency_combine(rows, calls.idx, calls.weights, handle)[0]
        assert not any(t.is_inference() for t in flat((rows, count, handle, sums)))


def test_inference_mode(pool):
    pool.run(1, rank_inference)


def rank_shared(ctx):
    """Small outputs that are made together share one allocation and do not overlap; rows have memory of their own."""
    tokens, experts = 24, 4 * ctx.size
    x = torch.ones(tokens, 256, dtype=torch.bfloat16, device=ctx.device)
    idx = (torch.arange(tokens * 2, device=ctx.device) % experts).view(tokens, 2)
    weights = torch.ones(tokens, 2, device=ctx.device)
    with alone.buffer_of(ctx) as buffer:
        for _ in range(2):
            layout = buffer.get_dispatch_layout(idx, experts)
            per_rank, _, per_expert, in_rank, _ = layout
            counts = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
            fresh = buffer.dispatch(x, **counts, topk_idx=idx, topk_weights=weights)
            worst = buffer.dispatch(x, **counts, topk_idx=idx, topk_weights=weights, num_worst_tokens=64 * ctx.size)
            ll = buffer.low_latency_dispatch(x, idx, tokens, experts, use_fp8=True)
        matrix, _, _, source, _, head = fresh[4]
        at_once = [worst[4][0], worst[4][3], worst[4][5], *worst[1:3]]
        together = flat(layout), [matrix, head], [source, *fresh[1:3]], at_once, [ll[1], *ll[2][:2]]
        for group in together:
            assert len({one.untyped_storage().data_ptr() for one in group}) == 1
            places = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in group)
            assert all(place % 64 == 0 for place, _ in places)
            assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False)), places
        alone_ones = [fresh[0], worst[0], *ll[0]]
        storages = {one.untyped_storage().data_ptr() for group in (*together, alone_ones) for one in group}
        assert len(storages) == len(together) + len(alone_ones)


@checks.needs_face
def test_small_outputs_share_an_allocation(pool):
    pool.run(2, rank_shared)


@checks.needs_face
def test_a_torch_that_lacks_some_functions(tmp_path):
    program = "\n".join(
        (
            "import torch",
            "from deep_ep import _face, _torch",
            "_torch._WRAP, _torch._VIEWS, _torch._STREAMS = 'not there', ('no', 'no'), ('no', 'no')",
            "_torch._RECORD = 'not there'",
            "from deep_ep import Bootstrap, Buffer",
            "buffer = Buffer(None, 1 << 20, engine='cpu', bootstrap=Bootstrap.file(0, 1, folder))",
            "idx = torch.arange(8).view(4, 2)",
            "first = buffer.get_dispatch_layout(idx, 8)",
            "again = buffer.get_dispatch_layout(idx, 8)",
            "assert _face.load() is not None and buffer._normal._face._layout._plans, _face.missing",
            "assert all(torch.equal(first[i], again[i]) for i in (0, 2, 3)), again",
            "assert all(type(again[i]) is torch.Tensor and again[i]._use_count() == 1 for i in (0, 2, 3))",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", f"folder = {str(tmp_path)!r}\n{program}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("text", "want"), (("0", "DEEPEP_TORCH_FACE=0"), ("2", "variable DEEPEP_TORCH_FACE: got '2'")))
def test_setting(text, want):
    program = "from deep_ep import _face\nassert _face.load() is None\nprint(_face.missing)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "DEEPEP_TORCH_FACE": text}, capture_output=True, text=True
    )
    assert want in done.stdout + done.stderr


@checks.needs_face
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to read torch's header")
def test_functions_of_torch_are_what_the_module_takes_them_for(tmp_path):
    """Against torch's own header: their addresses are looked up, so no compiler sees the two together."""
    import sysconfig

    root = Path(__file__).parents[2]
    text = (root / "python" / "face" / "face.c").read_text()
    body = text[text.index("static struct {\n") : text.index("} torch;")]
    fields = re.findall(r"(\w+) \(\*\w+\)\(([^;]*)\);", body)
    from deep_ep import _torch

    names = (*_torch._C_ABI, *_torch._VIEWS, *_torch._STREAMS, "at::native::record_stream_cuda")
    assert len(fields) == len(names)
    shim = "torch/csrc/inductor/aoti_torch"
    headers = [f"{shim}/c/shim.h", *(f"{shim}/generated/c_shim_{device}.h" for device in ("cpu", "cuda"))]
    headers.append("ATen/ops/record_stream_native.h")
    lines = [*(f"#include <{header}>" for header in headers), "using Tensor = AtenTensorHandle;"]
    lines.append("using StreamGuard = CUDAStreamGuardHandle;")
    lines.append("using TensorRef = at::Tensor &; using Stream = at::Stream;")
    lines.append("namespace at { class TensorBase; }")
    lines.append("PyObject *THPVariable_Wrap(const at::TensorBase &);")
    for (result, arguments), name in zip(fields, names, strict=True):
        lines.append(f'static_assert(std::is_same<decltype(&{name}), {result} (*)({arguments})>::value, "");')
    fields = text[text.index("typedef struct Stream {") : text.index("} Stream;")].replace("Stream", "Copy")
    lines.append(f"""
        {fields}}} Copy;
        int main() {{
          at::Stream stream(at::Stream::UNSAFE, at::Device(at::kCUDA, 3), 1ll << 40);
          static_assert(sizeof(Copy) == sizeof stream && std::is_trivially_copyable<at::Stream>::value, "");
          Copy copy;
          memcpy(&copy, &stream, sizeof copy);
          return copy.type == 1 && copy.index == 3 && copy.id == 1ll << 40 ? 0 : 1;
        }}""")
    source, program = tmp_path / "check.cpp", tmp_path / "check"
    source.write_text("#include <Python.h>\n#include <cstring>\n#include <type_traits>\n" + "\n".join(lines) + "\n")
    include = Path(torch.__file__).parent / "include"
    of_python = sysconfig.get_paths()["include"]
    command = ["g++", "-std=c++17", "-DNDEBUG", "-DUSE_CUDA", f"-I{include}", f"-I{of_python}", "-o", str(program)]
    libraries = [f"-L{include.parent / 'lib'}", f"-Wl,-rpath,{include.parent / 'lib'}", "-lc10"]
    done = subprocess.run([*command, str(source), *libraries], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([str(program)]).returncode == 0, "another layout of at::Stream"


def rank_modes_of_v2(ctx):
    """The same for V2: its methods run nothing of the mode, with and without the compiled face."""
    from torch.overrides import TorchFunctionMode

    from deep_ep import ElasticBuffer, EPBuffer

    seen = []

    class Notes(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    options = {"num_max_tokens_per_rank": alone.BOUND, "hidden": alone.HIDDEN, "engine": ctx.engine}
    for cls in (ElasticBuffer, EPBuffer):
        for compiled in (True, False):
            buffer = cls(ctx.group, **options, explicitly_destroy=True)
            buffer._core.compiled = compiled
            calls = alone.ElasticCalls(buffer)
            own, mapping = torch.ones(2, 16, device=calls.x.device), torch.zeros(1, 2, dtype=torch.int32)
            copies, mapping = torch.zeros_like(own), mapping.to(own.device)
            for _ in range(2):
                with Notes(), torch.device("meta"):
                    seen.clear()
                    given = {"num_experts": alone.EXPERTS, "do_expand": True}
                    got = buffer.dispatch(calls.x, calls.idx, calls.weights, **given)
                    sums = buffer.combine(got[0], got[3], got[2], bias=calls.x)
                    if cls is EPBuffer:
                        buffer.lb_prefetch_weights(copies, own, mapping)
                        deferred = {"async_with_compute_stream": True, "defer_epilogue": True}
                        buffer.dispatch(calls.x, calls.idx, **given, **deferred).wait()
                    methods = seen[:]
                assert not methods, f"{cls.__name__}, compiled {compiled}: {methods}"
                assert torch.equal(sums[0], 3 * calls.x)
            buffer.destroy()


def test_modes_cost_nothing_in_v2(pool):
    pool.run(1, rank_modes_of_v2)
