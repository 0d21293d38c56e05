"""deep_ep.plan: what it says of a buffer is what the constructor makes; and who chooses the SMs of a call."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
import torch

import internode
import normal

SHAPE = {"hidden": 256, "num_topk": 2, "num_experts": 8}
SETTINGS = (
    {},
    {"NUM_MAX_NVL_PEERS": "2", "DEEPEP_NUM_QPS_PER_RANK": "3"},
    {"NUM_MAX_NVL_PEERS": "2", "DEEP_EP_NUM_MAX_RDMA_TOKENS": "700", "DEEPEP_TIMEOUT_MS": "33000"},
)
CALLS = (
    {"num_tokens": 40},
    {"num_max_dispatch_tokens_per_rank": 6},
    {"num_tokens": 9, "num_max_dispatch_tokens_per_rank": 3, "num_qps_per_rank": 5, "enable_shrink": True},
    {"num_nvl_bytes": 1 << 20, "num_rdma_bytes": 1 << 20, "timeout": 44.0},
)
OF_THE_BUFFER = (
    "num_nvl_peers", "rdma_rank", "num_rdma_ranks", "nvl_rank", "num_nvl_bytes", "num_rdma_bytes", "control_bytes",
    "wire_bytes", "num_qp_peers", "num_qps_per_peer", "qp_depth", "num_nics", "num_qps_per_nic", "num_qps",
    "timeout_ms", "first_timeout_ms",
)  # fmt: skip
BESIDE_NUM_BYTES = 12 << 20  # with the library's own memory less than V2.1's workspace
ELASTIC = (
    {"num_max_tokens_per_rank": 40, "num_topk": 2},
    {"num_max_tokens_per_rank": 7000, "num_topk": 8, "use_fp8_dispatch": True, "allow_multiple_reduction": False},
)


def rank_elastic_plans(ctx, peers):
    with internode.environment(DEEPEP_NUM_MAX_NVL_PEERS=peers):
        return elastic_plans(ctx, peers)


def elastic_plans(ctx, peers):
    import deep_ep

    found = []
    for shape in ELASTIC:
        planned = deep_ep.plan(
            ctx.size, rank=ctx.rank, num_local_ranks=ctx.size, engine=ctx.engine, hidden=256, **shape
        )
        buffer = deep_ep.ElasticBuffer(ctx.group, hidden=256, engine=ctx.engine, explicitly_destroy=True, **shape)
        try:
            x = torch.ones(3, 256, dtype=torch.bfloat16, device=ctx.device)
            topk = torch.zeros(3, shape["num_topk"], dtype=torch.int64, device=ctx.device)
            for expand in (False, True):
                rows, _, _, handle, _ = buffer.dispatch(x, topk, num_experts=2 * ctx.size, do_expand=expand)
                buffer.combine(rows, handle)
            made = buffer._core.native.info()  # after the first calls
            assert made.num_nvl_peers == min(peers, ctx.size)
            for name in OF_THE_BUFFER:
                assert getattr(planned, name) == getattr(made, name), (shape, name)
            assert 0 <= made.total_bytes - planned.total_bytes < 2 << 20
            assert (
                planned.elastic_bytes
                == buffer.num_bytes
                == deep_ep.ElasticBuffer.get_buffer_size_hint(ctx.group, hidden=256, **shape)
            )
            pool = buffer._core.native.rows
            assert planned.row_segment_bytes == (pool.count if pool is not None else 0)
            assert planned.elastic_bytes + BESIDE_NUM_BYTES >= planned.num_nvl_bytes + planned.row_segment_bytes
            sms = buffer.get_theoretical_num_sms(2 * ctx.size, shape["num_topk"])
            found.append((planned.elastic_sms, planned.elastic_qps, sms, buffer.get_theoretical_num_qps(sms)))
        finally:
            buffer.destroy()
    return found


@pytest.mark.parametrize("peers", [8, 2], ids=["one node", "nodes"])
def test_plan_is_what_elastic_buffer_is_after_its_first_calls(pool, device, peers):
    if peers < 4 and device != "cpu":
        pytest.skip("calls of V2 between nodes need the CPU engine")
    for found in pool.run(4, rank_elastic_plans, peers):
        for planned_sms, planned_qps, sms, qps in found:
            assert sms <= planned_sms and qps <= planned_qps  # a device has fewer where it is small


def rank_plans(ctx, settings):
    import deep_ep

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NVSHMEM_QP_DEPTH", raising=False)  # a machine may have one, too few for some settings
        for name, value in settings.items():
            patch.setenv(name, value)
        for call in CALLS:
            planned = deep_ep.plan(ctx.size, rank=ctx.rank, num_local_ranks=ctx.size, engine=ctx.engine, **SHAPE | call)
            low_latency = "num_max_dispatch_tokens_per_rank" in call
            options = {name: call[name] for name in ("num_qps_per_rank", "enable_shrink", "timeout") if name in call}
            buffer = deep_ep.Buffer(
                ctx.group, planned.num_nvl_bytes, planned.num_rdma_bytes, low_latency, engine=ctx.engine,
                explicitly_destroy=True, **options,
            )  # fmt: skip
            try:
                made = buffer._core.native.info()
                for name in (*OF_THE_BUFFER, "row_segment_bytes"):
                    assert getattr(planned, name) == getattr(made, name), (call, name)
                assert 0 <= made.total_bytes - planned.total_bytes < 2 << 20
                assert planned.engine == ctx.engine and planned.library.startswith("libdeepep_") and not planned.reason
                assert len(planned.qp_order) == planned.num_qp_peers and ctx.rank not in planned.qp_order
            finally:
                buffer.destroy()


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings) or "none")
def test_plan_is_what_the_constructor_makes(pool, settings):
    pool.run(4, rank_plans, settings)


def test_plan_needs_neither_a_gpu_nor_ranks(monkeypatch):
    import deep_ep

    shape = {"num_tokens": 4096, "hidden": 7168, "num_topk": 8, "num_experts": 256, "engine": "cuda"}
    monkeypatch.setenv("DEEPEP_NUM_NICS", "2")
    monkeypatch.setenv("DEEPEP_NUM_MAX_NVL_PEERS", "8")  # the suite may run with another
    monkeypatch.setattr(deep_ep.Buffer, "_num_sms_given", False)  # another test may have said a number
    planned = deep_ep.plan(16, num_max_dispatch_tokens_per_rank=128, **shape)
    assert planned.engine == "cuda" and planned.num_rdma_ranks == 2 and bool(planned.library) != bool(planned.reason)
    assert (planned.num_qps_per_peer, planned.num_qps_per_nic, planned.num_qps) == (24, 12, 24 * 15)
    assert planned.low_latency_hint == deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 16, 256)
    one = deep_ep.plan(4, **shape)
    assert (one.dispatch_sms_fp8, one.dispatch_sms_bf16, one.combine_sms) == (12, 10, 16)
    assert deep_ep.plan(4, **shape | {"num_tokens": 64}).dispatch_sms_bf16 < 10
    assert deep_ep.plan(4, **shape, compute_capability=80).combine_sms > 16
    assert deep_ep.plan(4, **shape, num_sms=6).combine_sms == 6


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"num_ranks": 3, "num_nvl_peers": 2}, "num_ranks.*multiple of 2"),
        ({"num_ranks": 2, "rank": 2}, "rank.*0 to 1"),
        ({"num_ranks": 2, "engine": "tpu"}, "engine.*tpu"),
        ({"num_ranks": 2, "num_qps_per_rank": 2000}, "num_qps_per_rank.*1024"),
        ({"num_ranks": 2, "num_tokens": 3, "hidden": 7, "num_topk": 1, "num_experts": 2}, "hidden.*got 7"),
        ({"num_ranks": 2, "num_sms": 3, "num_tokens": 3, "hidden": 8, "num_topk": 1, "num_experts": 2}, "num_sms.*3"),
        ({"num_ranks": 2, "timeout": -1}, "timeout.*-1"),
        ({"num_ranks": 2, "hidden": 2.5}, "hidden.*2.5|hidden.*float"),
    ],
)
def test_plan_refuses_what_the_constructor_refuses(arguments, names):
    import deep_ep

    with pytest.raises((ValueError, TypeError), match=names):
        deep_ep.plan(engine=arguments.pop("engine", "cpu"), **arguments)


def test_every_field_is_documented_and_mirrors_the_header():
    import deep_ep
    from deep_ep import _abi

    documented = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(deep_ep.Plan), re.M))
    names = {field.name for field in dataclasses.fields(deep_ep.Plan)}
    assert names <= documented
    assert names - {"qp_order"} == {name for name, _ in _abi.PlanInfo._fields_} - {"struct_size"}


def rank_sms(ctx):
    """The number that each call hands to the library: 0 is the library's choice."""
    from deep_ep import Buffer, Config

    seen = []
    with normal.buffer_of(ctx) as buffer:
        original = buffer._normal._config
        buffer._normal._config = lambda *given: seen.append(original(*given)) or seen[-1]
        x = torch.ones(4, 64, dtype=torch.bfloat16, device=buffer.device)
        topk = torch.arange(8, device=buffer.device).view(4, 2) % ctx.size
        weights = torch.ones(topk.shape, device=buffer.device)
        counts = buffer.get_dispatch_layout(topk, ctx.size)

        def call(config=None):
            seen.clear()
            per_rank, per_node, per_expert, in_rank, _ = counts
            rows, _, _, _, handle, _ = buffer.dispatch(
                x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert, topk_idx=topk, topk_weights=weights,
                config=config,
            )  # fmt: skip
            buffer.combine(rows, handle, config=config)
            return {int(native.num_sms) for native in seen}

        Buffer.num_sms, Buffer._num_sms_given = 20, False  # another test may have said a number
        try:
            found = [Buffer.num_sms, call(), call(Config(num_sms=12)), call(Buffer.get_dispatch_config(ctx.size))]
            Buffer.set_num_sms(20)
            found.append(call())
            Buffer.set_num_sms(0)
            found.append(call())
        finally:
            Buffer.num_sms, Buffer._num_sms_given = 20, False
        Buffer.num_sms = 16
        found.append(call())
        Buffer.num_sms = 20
    return found


def test_sms_are_the_librarys_choice_until_someone_speaks(pool):
    assert pool.run(2, rank_sms) == [[20, {0}, {12}, {20}, {20}, {0}, {16}]] * 2
