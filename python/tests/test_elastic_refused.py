"""V2: wrong arguments and ranks that disagree end in an error that names them, and the buffer works on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
from unittest import mock

import pytest
import torch

import elastic
import internode
import wrong
from cases import Case
from test_mismatch import error_of, judge

M = 40
CASE = Case((12, 7), experts=8, topk=3, hidden=64, routing="random", alignment=4)
TRIPLE = Case((12, 7, 5), experts=6, topk=3, hidden=64, routing="random")


def wrong_dispatches(x, idx, weights, handle, expanded):
    """Without a handle, then with one."""
    long = torch.zeros(M + 1, 64, dtype=x.dtype, device=x.device)
    fresh = [
        ("x no tensor", {"x": 3}, ("x", "int", "torch.Tensor")),
        ("x of 1-D", {"x": x[0]}, ("x", "shape")),
        ("x with strides", {"x": x[:, ::2]}, ("x", "strides")),
        ("a triple", {"x": (x, x, x)}, ("x", "tuple of 3")),
        ("odd row", {"x": x[:, :7].contiguous()}, ("hidden", "16")),
        ("scales of 2 bytes", {"x": (x, x)}, ("x[1]", "bfloat16", "4 bytes")),
        ("too many rows", {"x": long, "topk_idx": idx[:1].expand(M + 1, 3).contiguous()}, ("x", f"{M + 1}", f"{M}")),
        ("no topk_idx", {"topk_idx": None}, ("topk_idx", "None")),
        ("topk_idx of floats", {"topk_idx": weights}, ("topk_idx", "float32")),
        ("topk_idx of other rows", {"topk_idx": idx[1:]}, ("topk_idx", "shape")),
        (
            "no choice",
            {"topk_idx": idx[:, :0], "topk_weights": None, "do_cpu_sync": 0},
            ("num_topk", "got 0", "1 to 32"),
        ),
        ("129 choices", {"topk_idx": idx.repeat(1, 43), "topk_weights": None}, ("num_topk", "got 129", "1 to 32")),
        ("weights as BF16", {"topk_weights": weights.bfloat16()}, ("topk_weights", "bfloat16")),
        ("weights of other width", {"topk_weights": weights[:, :1].contiguous()}, ("topk_weights", "shape")),
        ("no num_experts", {"num_experts": None}, ("num_experts", "None")),
        ("num_experts 7", {"num_experts": 7}, ("num_experts", "7", "multiple")),
        ("alignment 0", {"expert_alignment": 0}, ("expert_alignment", "0")),
        ("alignment 2^31", {"expert_alignment": 2**31 - 1, "do_cpu_sync": 0}, ("expert_alignment", "2147483647")),
        (
            "padded rows past int32",
            {"expert_alignment": 1 << 24, "num_experts": 1024, "do_cpu_sync": 0, "do_expand": 1},
            ("do_cpu_sync", "8589934"),
        ),
        (
            "rows past int32",
            {"num_max_tokens_per_rank": 2**31 - 1, "do_cpu_sync": 0},
            ("num_max_tokens_per_rank", "2147483647", "715827882"),
        ),
        ("M -1", {"num_max_tokens_per_rank": -1}, ("num_max_tokens_per_rank", "-1")),
        ("SMs -2", {"num_sms": -2}, ("num_sms", "-2")),
        ("QPs", {"num_qps": 1000}, ("num_qps", "1000", "num_allocated_qps")),
        ("stats of int64", {"cumulative_local_expert_recv_stats": idx[0]}, ("cumulative_local_expert_recv_stats",)),
        ("padding without expand", {"do_zero_padding": 1}, ("do_zero_padding", "do_expand")),
        ("event of another kind", {"previous_event": 3, "allocate_on_comm_stream": 1}, ("previous_event", "int")),
        ("a flag as text", {"do_expand": "no"}, ("do_expand", "'no'")),
        ("handle of V1", {"handle": (1, 2), "topk_idx": None}, ("handle", "tuple", "EPHandle")),
    ]
    base = {"topk_idx": None, "num_experts": None, "handle": handle}
    cached = [
        ("indices with handle", base | {"topk_idx": idx}, ("topk_idx", "handle")),
        ("CPU sync with handle", base | {"do_cpu_sync": 1}, ("do_cpu_sync", "handle")),
        ("stats with handle", base | {"cumulative_local_expert_recv_stats": idx}, ("recv_stats", "handle")),
        ("other experts", base | {"num_experts": 16}, ("num_experts", "16", "8")),
        ("other alignment", base | {"expert_alignment": 8}, ("expert_alignment", "8", "4")),
        ("other M", base | {"num_max_tokens_per_rank": M - 1}, ("num_max_tokens_per_rank", f"{M}")),
        ("other rows", base | {"x": x[1:], "topk_weights": None}, ("x", "as in the handle")),
        ("plain handle, do_expand", base | {"do_expand": True}, ("do_expand", "handle")),
        ("expanded handle, no tensor", base | {"handle": expanded}, ("handle.recv_src_metadata", "NoneType")),
    ]
    return fresh + cached


def wrong_combines(rows, handle):
    bias = torch.zeros_like(rows)
    return [
        ("x as float32", {"x": rows.float()}, ("x", "float32")),
        ("x of other rows", {"x": rows[1:]}, ("x", "shape")),
        ("weights 1-D", {"topk_weights": rows[:, 0].float()}, ("topk_weights", "shape")),
        ("three biases", {"bias": (bias, bias, bias)}, ("bias", "3")),
        ("bias of other rows", {"bias": bias[:0]}, ("bias[0]", "shape")),
        ("no handle", {"handle": None}, ("handle", "NoneType")),
        ("QPs", {"num_qps": 1000}, ("num_qps", "1000")),
    ]


def rank_wrong(ctx):
    exchange = elastic.expect(CASE, M)
    own = exchange.inputs[ctx.rank]
    x, idx, weights = (ctx.to_device(t) for t in (own.x, own.topk_idx, own.topk_weights))
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        call = elastic.dispatch(ctx, buffer, exchange, CASE)
        expanded = elastic.dispatch(ctx, buffer, exchange, CASE, expand=True).handle
        expanded.recv_src_metadata = None
        good = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": 8, "expert_alignment": 4}
        complaints = wrong.refusals(buffer.dispatch, good, wrong_dispatches(x, idx, weights, call.handle, expanded))
        rows = torch.zeros(len(call.recv_x), CASE.hidden, dtype=torch.bfloat16, device=x.device)
        complaints += wrong.refusals(
            buffer.combine, {"x": rows, "handle": call.handle}, wrong_combines(rows, call.handle)
        )
        elastic.round_trip(ctx, buffer, CASE, exchange, expand=True, sync=True)
        return complaints


def test_wrong_arguments(pool):
    for complaints in pool.run(2, rank_wrong):
        assert not complaints, "\n".join(complaints)


def rank_constructor(ctx):
    from deep_ep import ElasticBuffer, EPBuffer

    good = {"group": ctx.group, "num_max_tokens_per_rank": 8, "hidden": 64, "engine": ctx.engine}
    complaints = wrong.refusals(
        ElasticBuffer,
        good,
        [
            ("no size", {"num_max_tokens_per_rank": 0}, ("num_max_tokens_per_rank", "0")),
            ("no hidden", {"hidden": 0}, ("hidden", "0")),
            ("bytes 3", {"num_bytes": 3}, ("num_bytes", "3", "2097152")),
            ("no group", {"group": None}, ("group", "None", "init_process_group", "bootstrap")),
            ("a group without this rank", {"group": -100}, ("group", "NON_GROUP_MEMBER")),
            ("timeout 0", {"num_gpu_timeout_secs": 0}, ("num_gpu_timeout_secs", "0")),
            ("timeout nan", {"num_gpu_timeout_secs": float("nan")}, ("num_gpu_timeout_secs", "nan")),
            ("timeout inf", {"num_cpu_timeout_secs": float("inf")}, ("num_cpu_timeout_secs", "inf")),
            ("Engram", {"num_cpu_bytes": 2 << 20}, ("num_cpu_bytes", "Engram", "not supported")),
            ("a flag", {"deterministic": "yes"}, ("deterministic", "'yes'")),
        ],
    )
    name = "lb_allocation_plan_or_num_bytes"
    balancing = [(f"balancing {value}", {name: value}, (name, str(value))) for value in (5, -1, None)]
    complaints += wrong.refusals(EPBuffer, good, balancing)
    with elastic.buffer_of(ctx, 8, 64) as buffer, elastic.buffer_of(ctx, 8, 64, kind="EPBuffer") as ep:
        with pytest.raises(AssertionError, match="num_experts"):
            buffer.get_theoretical_num_sms(num_experts=7, num_topk=2)
        for owner, names in (
            (buffer, ("agrs_set_config", "agrs_new_session", "all_gather", "pp_send", "pp_recv", "engram_write")),
            (ep, ("create_agrs_session", "engram_fetch")),
        ):
            for name in names:
                with pytest.raises(NotImplementedError, match=f"{name}: .* of V2 are not supported"):
                    getattr(owner, name)(1, 2, key=3)
        gone = elastic.dispatch(ctx, buffer, elastic.expect(CASE, 16), CASE)
    with elastic.buffer_of(ctx, 8, 64) as buffer:
        buffer.destroy()
        buffer.destroy()
        assert buffer.runtime is None and buffer.nccl_comm_handle is None and buffer.num_bytes > 0
        for call in (
            lambda: elastic.dispatch(ctx, buffer, elastic.expect(CASE, 16), CASE),
            lambda: buffer.combine(gone.recv_x, gone.handle),
            buffer.barrier,
        ):
            with pytest.raises(RuntimeError, match="destroyed"):
                call()
    unnamed = ElasticBuffer(**good)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        unnamed.destroy()
    return complaints


def test_wrong_constructors(pool):
    for complaints in pool.run(2, rank_constructor):
        assert not complaints, "\n".join(complaints)


def test_names_that_are_not_there():
    import deep_ep

    for name in ("EngramBuffer", "PPBuffer", "BucketBuffer", "BucketSession"):
        with pytest.raises(NotImplementedError, match="not supported"):
            getattr(deep_ep, name)()
    with pytest.raises(NotImplementedError, match="NCCL"):
        deep_ep.comm.get_nccl_comm_handle(None)
    deep_ep.destroy_all_managed_nccl_comm()


# ---- contents, and ranks that disagree

CONTENTS = {
    "index": (lambda call: call.own.topk_idx.fill_(99), ("topk_idx", "99")),
    "M": ({"num_max": M + 1}, ("tokens_per_rank", f"{M}", f"{M + 1}")),
    "layout": ({"expand": True}, ("layout", "plain", "expanded")),
    "alignment": ({"alignment": 8}, ("expert_alignment", "1", "8")),
    "experts": ({"experts": 9}, ("num_experts", "6", "9")),
    "top-k": ({"topk": 2}, ("topk", "3", "2")),
    "hidden": ({"hidden": 128}, ("hidden", "128", "256")),
}
ODD = 1


def rank_disagrees(ctx, name):
    changes, _ = CONTENTS[name]
    with elastic.buffer_of(ctx, 2 * M, 64, num_gpu_timeout_secs=20, num_cpu_timeout_secs=20) as buffer:
        case, num_max, expand = TRIPLE, M, False
        if ctx.rank == ODD and isinstance(changes, dict):
            changes = dict(changes)
            num_max, expand = changes.pop("num_max", M), changes.pop("expand", False)
            case = case.but(**changes)
        exchange = elastic.expect(case, num_max)
        if ctx.rank == ODD and callable(changes):
            exchange.inputs[ctx.rank].topk_idx[0, 0] = 99
        answer = error_of(buffer, lambda: elastic.dispatch(ctx, buffer, exchange, case, expand=expand))
        again = elastic.expect(TRIPLE, M)
        if name == "index":
            elastic.round_trip(ctx, buffer, TRIPLE, again, expand=True, sync=True)
        else:
            with pytest.raises(RuntimeError, match="the buffer failed before: .*ranks disagree"):
                elastic.dispatch(ctx, buffer, again, TRIPLE)
        return answer


@pytest.mark.parametrize("name", CONTENTS)
def test_ranks_disagree(pool, name):
    """Every rank names the odd one. A shape fails the buffer, as in V1; contents fail the call alone."""
    judge(pool.run(3, rank_disagrees, name), CONTENTS[name][1])


# ---- sizes and names


def rank_sizes(ctx):
    with internode.environment(DEEPEP_NUM_MAX_NVL_PEERS=8):  # the suite may run with another
        sizes(ctx)


def sizes(ctx):
    import deep_ep
    from deep_ep import ElasticBuffer

    hint = ElasticBuffer.get_buffer_size_hint(ctx.group, 64, 256, num_topk=4)
    assert type(hint) is int and hint > 0 and hint % (2 << 20) == 0
    bigger = [
        ElasticBuffer.get_buffer_size_hint(ctx.group, 640, 256, 4),
        ElasticBuffer.get_buffer_size_hint(ctx.group, 64, 25600, 4),
        ElasticBuffer.get_buffer_size_hint(ctx.group, 64, 256, 32),
        ElasticBuffer.get_buffer_size_hint(ctx.group, 64, 256, 4, allow_multiple_reduction=False),
    ]
    assert min(bigger) >= hint
    options = {"explicitly_destroy": 1, "engine": ctx.engine}
    made = ElasticBuffer(ctx.group, num_max_tokens_per_rank=64, hidden=256, num_topk=4, **options)
    plain = ElasticBuffer(ctx.group, 4 << 20, num_allocated_qps=5, allow_hybrid_mode=0, **options)
    try:
        assert (made.num_bytes, plain.num_bytes) == (hint, 4 << 20)
        assert (made.group, made.rank_idx, made.num_ranks) == (ctx.group, ctx.rank, ctx.size)
        for buffer in (made, plain):
            assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, ctx.size)
            assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, ctx.rank)
            assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, ctx.size)
            sms = buffer.get_theoretical_num_sms(256, 8)
            assert sms == buffer.get_theoretical_num_sms(num_experts=256, num_topk=8) and sms % 2 == 0 and sms >= 4
        assert deep_ep.get_physical_domain_size(ctx.group) == deep_ep.get_logical_domain_size(made) == (1, ctx.size)
        assert deep_ep.get_logical_domain_size(ctx.group, False) == (1, ctx.size)
        assert (made.get_theoretical_num_qps(4), made.get_theoretical_num_qps(40)) == (4, 9)
        assert plain.get_theoretical_num_qps(40) == 5 == plain.num_allocated_qps
        with pytest.raises(ValueError, match="at most num_max_tokens_per_rank = 0"):
            x, idx = torch.zeros(1, 8, device=ctx.device), torch.zeros(1, 1, dtype=torch.int64, device=ctx.device)
            plain.dispatch(x, idx, num_experts=ctx.size)
        planned = deep_ep.plan(
            ctx.size, num_max_tokens_per_rank=64, hidden=256, num_topk=4, engine=ctx.engine, num_local_ranks=ctx.size
        )
        info = made._core.native.info()
        for name in ("num_nvl_bytes", "num_rdma_bytes", "control_bytes", "wire_bytes"):
            assert getattr(planned, name) == getattr(info, name), name
        assert planned.elastic_bytes == hint
        if ctx.engine == "cuda":
            assert planned.row_segment_bytes == made._core._room  # opened by the first dispatch
            beside = planned.num_nvl_bytes + planned.row_segment_bytes - hint
            assert beside == (12 << 20 if planned.row_segment_bytes else 0)
    finally:
        made.destroy()
        plain.destroy()


def rank_environment(ctx):
    with mock.patch.dict(os.environ, {"EP_BUFFER_DEBUG": "1", "EP_OVERRIDE_RDMA_SL": "5"}):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), elastic.buffer_of(ctx, M, 64, sl_idx=2) as buffer:
            assert buffer.sl_idx == 5
    assert f"[rank {ctx.rank}] staging 2.0 MiB" in printed.getvalue()
    with elastic.buffer_of(ctx, M, 64, sl_idx=2) as buffer:
        assert buffer.sl_idx == 2


def test_environment(pool):
    pool.run(2, rank_environment)


def test_sizes(pool):
    pool.run(2, rank_sizes)


CONSTRUCTOR = (
    "deterministic allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute sl_idx num_allocated_qps "
    "num_cpu_timeout_secs num_gpu_timeout_secs explicitly_destroy"
)
DISPATCH = (
    "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts num_max_tokens_per_rank expert_alignment "
    "num_sms num_qps previous_event previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream "
    "handle do_handle_copy do_cpu_sync do_expand do_zero_padding use_tma_aligned_col_major_sf"
)
COMBINE = (
    "x handle topk_weights bias num_sms num_qps previous_event previous_event_before_epilogue "
    "async_with_compute_stream allocate_on_comm_stream"
)
HANDLE = (
    "do_expand num_experts expert_alignment num_max_tokens_per_rank num_sms topk_idx num_recv_tokens "
    "num_expanded_tokens num_recv_tokens_per_expert_list psum_num_recv_tokens_per_scaleup_rank "
    "psum_num_recv_tokens_per_expert num_unaligned_recv_tokens_per_expert recv_src_metadata dst_buffer_slot_idx "
    "token_metadata_at_forward channel_linked_list"
)


def test_signatures():
    """Arguments in the contract's order: callers pass some by position."""
    import deep_ep

    def names(function):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return " ".join([p.name for p in inspect.signature(function).parameters.values() if p.kind is kind][1:])

    sizes = "num_max_tokens_per_rank hidden num_topk use_fp8_dispatch"
    assert names(deep_ep.ElasticBuffer.__init__) == f"group num_bytes num_cpu_bytes {sizes} {CONSTRUCTOR}"
    balancing = "lb_allocation_plan_or_num_bytes"
    assert names(deep_ep.EPBuffer.__init__) == f"group num_bytes {sizes} {balancing} {CONSTRUCTOR}"
    epilogue = "previous_event_before_epilogue "
    assert names(deep_ep.ElasticBuffer.dispatch) == DISPATCH
    assert names(deep_ep.EPBuffer.dispatch) == DISPATCH.replace(epilogue, "") + " defer_epilogue"
    assert names(deep_ep.ElasticBuffer.combine) == COMBINE
    assert names(deep_ep.EPBuffer.combine) == COMBINE.replace(epilogue, "") + " defer_epilogue"
    assert names(deep_ep.EPHandle.__init__) == HANDLE


# ---- handles with other contents, and callers that compile

BIG = 10**6
MUTATED = {
    "row beyond x": ("recv_src_metadata", lambda t: t[:1, 2:].fill_(BIG)),
    "matrix huge": ("token_metadata_at_forward", lambda t: t.fill_(BIG)),
    "matrix backwards": ("token_metadata_at_forward", lambda t: t[:-1].fill_(BIG)),
    "head huge": ("channel_linked_list", lambda t: t[:1].fill_(BIG)),
    "metadata cut": ("recv_src_metadata", lambda t: t[:-1]),
}


def rank_mutated(ctx):
    """Every rank's call has an error; the next one with the true handle is right."""
    exchange = elastic.expect(CASE, M)
    texts = {}
    with elastic.buffer_of(ctx, M, CASE.hidden, num_gpu_timeout_secs=20) as buffer:
        call = elastic.dispatch(ctx, buffer, exchange, CASE, expand=True)
        rows = torch.zeros(call.rows, CASE.hidden, dtype=torch.bfloat16, device=ctx.device)
        for name, (attribute, change) in MUTATED.items():
            handle = copy.copy(call.handle)
            tensor = getattr(handle, attribute).clone()
            changed = change(tensor)
            setattr(handle, attribute, changed if name == "metadata cut" else tensor)
            texts[name] = error_of(buffer, lambda h=handle: buffer.combine(rows, h))[0]
            elastic.combine(ctx, buffer, call)
    return texts


def test_mutated_handles(pool, device):
    if device != "cpu":
        pytest.skip("needs the CPU engine, which refuses before a row moves; on GPUs: kernels/tests")
    for texts in pool.run(2, rank_mutated):
        assert all(texts.values()), texts


def rank_numbers(ctx):
    """Numbers of a handle that are none, or fit no field: named, on the call that was given it."""
    import deep_ep.ops  # noqa: F401 - defines the operators
    from deep_ep._elastic import TENSORS

    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        call = elastic.dispatch(ctx, buffer, exchange, CASE, expand=True)
        rows = torch.zeros(call.rows, CASE.hidden, dtype=torch.bfloat16, device=ctx.device)
        own = ctx.to_device(exchange.inputs[ctx.rank].x)
        for name in ("num_experts", "expert_alignment", "num_max_tokens_per_rank", "num_recv_tokens"):
            for value in (None, "4", 1.5, -1, 2**31, 2**70):
                handle = copy.copy(call.handle)
                setattr(handle, name, value)
                for use in (
                    lambda h=handle: buffer.combine(rows, h),
                    lambda h=handle: buffer.dispatch(own, handle=h, do_expand=True),
                ):
                    with pytest.raises((ValueError, TypeError), match=f"handle.{name}"):
                        use()
        handle = copy.copy(call.handle)
        handle.topk_idx = handle.topk_idx[0, 0].clone()
        with pytest.raises(ValueError, match="handle.topk_idx"):
            buffer.combine(rows, handle)
        ops, tensors = torch.ops.deep_ep, [getattr(call.handle, name) for name in TENSORS]
        for wrong, numbers, word in ((tensors[:5], [1] * 7, "handle"), (tensors, [1] * 3, "numbers")):
            with pytest.raises(ValueError, match=f"argument {word}"):
                ops.elastic_combine(rows, None, None, None, wrong, numbers, buffer.name)
        elastic.combine(ctx, buffer, call)


def test_numbers_of_a_handle(pool):
    pool.run(2, rank_numbers)


def rank_without_memory(ctx):
    """Rank 1 has no memory for the rows once it has the counts; then a signal comes just there."""
    texts = []
    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden, num_gpu_timeout_secs=20) as buffer:
        for error in (torch.OutOfMemoryError("no memory"), KeyboardInterrupt()):
            if ctx.rank == 1:
                with mock.patch.object(buffer._mode, "_rows", side_effect=error), pytest.raises(type(error)):
                    elastic.dispatch(ctx, buffer, exchange, CASE, expand=True)
                buffer.check()  # it has been told
            else:
                texts.append(error_of(buffer, lambda: elastic.dispatch(ctx, buffer, exchange, CASE, expand=True))[0])
            elastic.round_trip(ctx, buffer, CASE, exchange, expand=True, sync=True)
    return texts


def test_a_rank_without_memory_tells_its_peers(pool):
    for texts in pool.run(2, rank_without_memory)[:1]:
        assert all("rank 1 has cancelled it" in text and "works on" in text for text in texts), texts
        assert "out of memory" in texts[0] and "its program gave it up" in texts[1], texts


def rank_released(ctx):
    """The buffer's memory is given back and had again; handles of before are refused, as V1's."""
    exchange = elastic.expect(CASE, M)
    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        call = elastic.dispatch(ctx, buffer, exchange, CASE, expand=True)
        buffer.release()
        with pytest.raises(RuntimeError, match="released"):
            elastic.dispatch(ctx, buffer, exchange, CASE)
        buffer.restore()
        elastic.check(call)
        with pytest.raises(RuntimeError, match="before release"):
            elastic.again(ctx, buffer, call)
        elastic.round_trip(ctx, buffer, CASE, exchange, expand=True, sync=True)


def test_released(pool):
    pool.run(2, rank_released)


def rank_compiled(ctx):
    """What has no operator (events, counts that the graph cannot hold) breaks the graph; the results are the same."""
    exchange = elastic.expect(CASE, M)
    own = exchange.inputs[ctx.rank]
    given = [ctx.to_device(t) for t in (own.x, own.topk_idx, own.topk_weights)]

    def layer(buffer, x, idx, weights):
        rows, _, row_weights, handle, _ = buffer.dispatch(x * 1, idx, weights, num_experts=8, do_expand=True)
        event = buffer.combine(rows * 2, handle, row_weights, async_with_compute_stream=True)
        event[2].current_stream_wait()
        return event[0] + 1, event[1]

    with elastic.buffer_of(ctx, M, CASE.hidden) as buffer:
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="eager")
        for _ in range(2):
            for want, got in zip(layer(buffer, *given), compiled(buffer, *given), strict=True):
                assert torch.equal(want, got)


def test_compiled_caller(pool):
    pool.run(2, rank_compiled)
