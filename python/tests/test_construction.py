"""The constructor, the statics and Config: attributes, defaults, and what they refuse."""

from __future__ import annotations

import pytest
import torch

import cases
import normal
from cases import Case
from wrong import judge, refusals

CASE = Case((12, 7), experts=8, topk=3, hidden=64)
FRAMEWORK_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


class Gathered(Exception):
    """Raised by the tests' all-gather."""


def rank_allgather(ctx):
    """What the caller's all-gather raises is raised, with its causes; what it returns is checked."""
    from deep_ep import DeepEPError
    from deep_ep._native import group_from_allgather

    def raises(_):
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise Gathered("outer") from inner

    with pytest.raises(Gathered) as found:
        group_from_allgather(0, 1, raises)
    assert isinstance(found.value.__cause__, KeyError)
    for given, said in (
        (lambda b: [b[1:]], "bytes of its blobs"),
        (lambda b: [None], "NoneType"),
        (lambda b: [b, b], "1 ranks"),
    ):
        with pytest.raises(DeepEPError, match=said):
            group_from_allgather(0, 1, given)


def test_exceptions_of_the_allgather(pool):
    pool.run(1, rank_allgather)


def rank_attributes(ctx):
    with normal.buffer_of(ctx, 1 << 20, 1 << 21, enable_shrink=True, low_latency_mode=True) as buffer:
        assert buffer.group is ctx.group
        assert (buffer.group_size, buffer.rank) == (ctx.size, ctx.rank)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 1 << 21)
        assert buffer.low_latency_mode is True and buffer.enable_shrink is True
        assert buffer.explicitly_destroy is True
        runtime = buffer.runtime
        assert runtime.is_available() is True
        peers = min(ctx.size, cases.node_size())
        assert (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (ctx.size // peers, ctx.rank // peers)
        assert (runtime.get_root_rdma_rank(True), runtime.get_root_rdma_rank(False)) == (ctx.rank % peers, 0)
        assert type(runtime.get_local_device_id()) is int


def test_attributes(pool):
    pool.run(3, rank_attributes)


def rank_construction(ctx):
    from deep_ep import Buffer

    good = {"group": ctx.group, "num_nvl_bytes": 1 << 16, "engine": ctx.engine}
    wrong = [
        ("no group", {"group": None}, ("group", "comm", "init_process_group")),
        ("a group without this rank", {"group": -100}, ("group", "NON_GROUP_MEMBER", "new_group")),
        ("a group of another kind", {"group": "world"}, ("group", "str")),
        ("comm of another kind", {"group": None, "comm": 5}, ("comm", "int")),
        ("unknown keyword", {"nonsense": 1}, ("nonsense",)),
        ("negative bytes", {"num_nvl_bytes": -1}, ("num_nvl_bytes", "-1")),
        ("bytes as text", {"num_nvl_bytes": "1024"}, ("num_nvl_bytes", "1024")),
        ("bytes as float", {"num_rdma_bytes": 1.5}, ("num_rdma_bytes", "1.5")),
        ("negative RDMA bytes", {"num_rdma_bytes": -5}, ("num_rdma_bytes", "-5")),
        ("negative queue pairs", {"num_qps_per_rank": -1}, ("num_qps_per_rank", "-1")),
        ("unknown engine", {"engine": "tpu"}, ("engine", "tpu", "cpu", "cuda")),
        ("negative timeout", {"timeout": -1}, ("timeout", "-1")),
        ("timeout as text", {"timeout": "soon"}, ("timeout", "soon")),
        ("no peers", {"num_nvl_peers": -1}, ("num_nvl_peers", "-1")),
        ("too much memory", {"num_nvl_bytes": 1 << 60}, ("num_nvl_bytes", str(1 << 60))),
    ]
    complaints = refusals(Buffer, good, wrong)
    with pytest.raises(ValueError, match="init_process_group"):  # V1's kind
        Buffer(None)
    with normal.buffer_of(ctx) as buffer:
        normal.dispatch_and_check(ctx, buffer, CASE)
    return complaints


def test_wrong_arguments(pool):
    for complaints in pool.run(2, rank_construction):
        assert not complaints, "\n".join(complaints)


def rank_missing_engine(ctx):
    from deep_ep import Buffer, DeepEPError

    with pytest.raises(DeepEPError) as caught:
        Buffer(ctx.group, 1 << 16, engine="cuda")
    assert "cuda" in str(caught.value).lower()


def test_missing_cuda_engine_says_why(pool):
    if torch.cuda.device_count():
        pytest.skip("needs a machine without a GPU")
    pool.run(2, rank_missing_engine)


def rank_destroy_needs_flag(ctx):
    from deep_ep import Buffer, DeepEPError

    buffer = Buffer(ctx.group, 1 << 16, engine=ctx.engine)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        buffer.destroy()
    del buffer
    buffer = Buffer(ctx.group, 1 << 20, 1 << 20, engine=ctx.engine, explicitly_destroy=True)
    exchange = normal.dispatch_and_check(ctx, buffer, CASE)
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None or not buffer.runtime.is_available()
    for call in (
        lambda: normal.dispatch(ctx, buffer, CASE),
        lambda: buffer.combine(exchange.recv_x, exchange.handle),
        lambda: buffer.get_dispatch_layout(exchange.own.topk_idx, 8),
        lambda: buffer.low_latency_dispatch(exchange.own.x, exchange.own.topk_idx, 16, 8),
        lambda: buffer.get_local_buffer_tensor(torch.int8),
        lambda: buffer.stats(),
    ):
        with pytest.raises(DeepEPError, match="destroy"):
            call()


def test_destroy(pool):
    pool.run(2, rank_destroy_needs_flag)


def rank_low_latency_on_normal_buffer(ctx):
    from deep_ep import DeepEPError

    with normal.buffer_of(ctx) as buffer:
        x = torch.zeros((4, 512), dtype=torch.bfloat16, device=ctx.device)
        idx = torch.zeros((4, 2), dtype=torch.int64, device=ctx.device)
        with pytest.raises(DeepEPError, match="low_latency_mode"):
            buffer.low_latency_dispatch(x, idx, 16, 8)
        with pytest.raises(DeepEPError, match="low_latency_mode"):
            buffer.clean_low_latency_buffer(16, 512, 8)
        normal.dispatch_and_check(ctx, buffer, CASE)


def test_low_latency_needs_its_mode(pool):
    pool.run(2, rank_low_latency_on_normal_buffer)


def test_num_sms():
    from deep_ep import Buffer

    before = Buffer.num_sms
    assert before == 20
    try:
        Buffer.set_num_sms(new_num_sms=24)
        assert Buffer.num_sms == 24
        for wrong in (7, -2, "8", 8.0, None):
            with pytest.raises((AssertionError, TypeError)) as caught:
                Buffer.set_num_sms(wrong)
            assert not judge(caught.value, ("num_sms", str(wrong)))
        assert Buffer.num_sms == 24
    finally:
        Buffer.set_num_sms(before)


def test_config():
    from deep_ep import Config

    Config()
    Config(24, 8, 288, 20, 128)
    Config(
        num_sms=0,
        num_max_nvl_chunked_send_tokens=1,
        num_max_nvl_chunked_recv_tokens=2,
        num_max_rdma_chunked_send_tokens=6,
        num_max_rdma_chunked_recv_tokens=13,
    )
    wrong = [
        ("odd SMs", {"num_sms": 7}, ("num_sms", "7")),
        ("negative SMs", {"num_sms": -2}, ("num_sms", "-2")),
        ("SMs as text", {"num_sms": "20"}, ("num_sms", "20")),
        ("no send chunk", {"num_max_nvl_chunked_send_tokens": 0}, ("num_max_nvl_chunked_send_tokens", "0")),
        ("send = recv", {"num_max_nvl_chunked_send_tokens": 9, "num_max_nvl_chunked_recv_tokens": 9},
         ("num_max_nvl_chunked", "9")),
        ("negative recv", {"num_max_nvl_chunked_recv_tokens": -1}, ("num_max_nvl_chunked_recv_tokens", "-1")),
        ("no RDMA chunk", {"num_max_rdma_chunked_send_tokens": 0}, ("num_max_rdma_chunked_send_tokens", "0")),
        ("RDMA recv = send", {"num_max_rdma_chunked_send_tokens": 8, "num_max_rdma_chunked_recv_tokens": 8},
         ("num_max_rdma_chunked", "8")),
        ("unknown keyword", {"nonsense": 1}, ("nonsense",)),
    ]  # fmt: skip
    complaints = refusals(Config, {}, wrong)
    assert not complaints, "\n".join(complaints)
    with pytest.raises(ValueError, match="hidden_bytes"):
        Config().get_nvl_buffer_size_hint(-16, 4)
    with pytest.raises(ValueError, match="num_ranks"):
        Config().get_nvl_buffer_size_hint(1024, 0)


def test_config_for_every_number_of_ranks():
    from deep_ep import Buffer, Config

    for ranks in (*FRAMEWORK_SIZES, *range(1, 40), 72, 320):
        for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
            assert isinstance(config, Config)
            nvl = config.get_nvl_buffer_size_hint(7168 * 2, ranks)
            rdma = config.get_rdma_buffer_size_hint(7168 * 2, ranks)
            assert type(nvl) is int and nvl >= 0 and type(rdma) is int
            assert (rdma == 0) == (ranks <= cases.node_size()), f"{ranks} ranks: {rdma} RDMA bytes"
    for wrong in (0, -1, "8", None):
        with pytest.raises((ValueError, TypeError)):
            Buffer.get_dispatch_config(wrong)


def test_low_latency_size_hint():
    from deep_ep import Buffer

    by_name = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=128, hidden=7168, num_ranks=8, num_experts=256
    )
    assert type(by_name) is int and by_name == Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert Buffer.get_low_latency_rdma_size_hint(256, 7168, 8, 256) > by_name
    for name, values in {
        "num_max_dispatch_tokens_per_rank": (-1, 7168, 8, 256),
        "num_max_dispatch_tokens": (2**40, 7168, 8, 256),
        "hidden": (128, -1, 8, 256),
        "num_ranks": (128, 7168, 0, 256),
        "num_experts": (128, 7168, 8, 255),
    }.items():
        with pytest.raises(ValueError, match=name):
            Buffer.get_low_latency_rdma_size_hint(*values)


def test_sm90_compiled_is_a_bool():
    from deep_ep import Buffer

    assert type(Buffer.is_sm90_compiled()) is bool
