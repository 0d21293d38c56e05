"""What real clients do beyond the plain call: compile it, bring their own groups, pass lists and other integers."""

from __future__ import annotations

import types
import warnings
from contextlib import contextmanager

import numpy
import pytest
import torch
import torch.distributed as dist

import cases
import checks
import lowlat
import normal
import reference
from cases import Case

CASE = Case((12, 7, 0, 9), experts=8, topk=3, hidden=512)
B = 16


def round_trip(buffer, x, idx, weights):
    """Layout, dispatch and combine as a compiled model has them, between operations of torch."""
    per_rank, per_node, per_expert, table, _ = buffer.get_dispatch_layout(idx, CASE.experts)
    rows, _, row_weights, counts, handle, _ = buffer.dispatch(
        x * 1, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=table,
        num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights,
    )  # fmt: skip
    sums, sum_weights, event = buffer.combine(rows * 2, handle, topk_weights=row_weights)
    return sums + 1, sum_weights, counts, event.event is None


def low_latency_round_trip(buffer, x, idx, weights):
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, B, CASE.experts, use_fp8=False, return_recv_hook=True
    )
    hook()
    sums, event, hook = buffer.low_latency_combine(rows * 2, idx, weights, handle, async_finish=True)
    event.current_stream_wait()
    return sums + 1, counts


def rank_compiled(ctx, body):
    inputs = CASE.inputs()[ctx.rank]
    given = ctx.to_device(inputs.x), ctx.to_device(inputs.topk_idx), ctx.to_device(inputs.topk_weights)
    with lowlat.buffer_of(ctx, CASE, B, num_nvl_bytes=1 << 22) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        torch._dynamo.reset()
        compiled = torch.compile(body, backend="eager")
        for _ in range(3):
            wants, gots = body(buffer, *given), compiled(buffer, *given)
            for want, got in zip(wants, gots, strict=True):
                assert torch.equal(want, got) if isinstance(want, torch.Tensor) else want == got


@pytest.mark.parametrize("body", [round_trip, low_latency_round_trip])
def test_compiled_caller(pool, body):
    """torch.compile stays out of the package: each call is a graph break, and the results are the same."""
    pool.run(4, rank_compiled, body)


@contextmanager
def operator_over(buffer):
    """An opaque operator over a dispatch and combine, as clients hide them from torch.compile."""
    name = "deepep_tests::exchange"
    with torch.library._scoped_library("deepep_tests", "FRAGMENT") as library:
        library.define("exchange(Tensor x, Tensor idx, Tensor weights) -> Tensor")
        library.impl("exchange", lambda x, i, w: round_trip(buffer, x, i, w)[0], "CompositeExplicitAutograd")
        torch.library.register_fake(name, lambda x, i, w: torch.empty_like(x), lib=library)
        yield torch.ops.deepep_tests.exchange


def rank_below_operator(ctx):
    inputs = CASE.inputs()[ctx.rank]
    given = ctx.to_device(inputs.x), ctx.to_device(inputs.topk_idx), ctx.to_device(inputs.topk_weights)
    with normal.buffer_of(ctx) as buffer, operator_over(buffer) as operator:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, i, w: operator(x * 1, i, w) * 2, backend="eager")
        assert torch.equal(compiled(*given), round_trip(buffer, *given)[0] * 2)


def test_below_an_operator(pool):
    pool.run(4, rank_below_operator)


def rank_unregistered_group(ctx, folder):
    """A ProcessGroup that torch.distributed has not made: it is asked for rank and size itself."""
    from deep_ep import Buffer

    group = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/store", ctx.size), ctx.rank, ctx.size)
    with pytest.raises(ValueError, match="not registered|not part of"):
        dist.get_rank(group)
    buffer = Buffer(group, 1 << 22, engine=ctx.engine, explicitly_destroy=True)
    assert (buffer.rank, buffer.group_size, buffer.group) == (ctx.rank, ctx.size, group)
    normal.combine(ctx, buffer, normal.dispatch_and_check(ctx, buffer, CASE))
    buffer.destroy()


def test_unregistered_group(pool, tmp_path):
    pool.run(4, rank_unregistered_group, str(tmp_path))


class Communicator:
    """What an mpi4py communicator offers, over the rank's group."""

    def __init__(self, ctx):
        self.ctx = ctx

    def Get_rank(self):
        return self.ctx.rank

    def Get_size(self):
        return self.ctx.size

    def allgather(self, value):
        values = [None] * self.ctx.size
        dist.all_gather_object(values, value, group=self.ctx.group)
        return values


def rank_communicator(ctx):
    from deep_ep import Buffer

    comm = Communicator(ctx)
    buffer = Buffer(None, 1 << 20, comm=comm, engine=ctx.engine, explicitly_destroy=True)
    assert buffer.group is comm
    buffer.destroy()


def test_group_is_the_communicator(pool):
    pool.run(2, rank_communicator)


def rank_other_hidden(ctx, factor):
    """FP8 bytes travel as BF16 of half the hidden; the answers have all of it."""
    with lowlat.buffer_of(ctx, CASE.but(hidden=CASE.hidden * 2), B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B, use_fp8=False)
        wider = CASE.but(hidden=int(CASE.hidden * factor))
        call.case, call.x = wider, [lowlat.make_x(wider, rank, False) for rank in range(ctx.size)]
        lowlat.combine_and_check(ctx, buffer, call)
        out = torch.empty((wider.tokens[ctx.rank], wider.hidden), dtype=torch.bfloat16, device=ctx.device)
        lowlat.combine_and_check(ctx, buffer, call, out=out)


@pytest.mark.parametrize("factor", [2, 0.5])
def test_combine_takes_hidden_from_x(pool, factor):
    pool.run(4, rank_other_hidden, factor)


def rank_handle_list(ctx):
    with lowlat.buffer_of(ctx, CASE, B, num_nvl_bytes=1 << 22) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        rows, *_ = buffer.dispatch(normal.x_of(ctx, exchange.own), handle=list(exchange.handle))
        checks.same_rows("recv_x", rows, exchange.want.x)
        exchange.handle = list(exchange.handle)
        normal.combine(ctx, buffer, exchange)
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B, use_fp8=False)
        call.handle = list(call.handle)
        lowlat.combine_and_check(ctx, buffer, call)
        buffer.get_next_low_latency_combine_buffer(call.handle)


def test_handle_as_a_list(pool):
    pool.run(4, rank_handle_list)


def rank_events(ctx):
    """previous_event is any object with an event; the event that a low-latency call returns is the caller's own."""
    from deep_ep import EventHandle, EventOverlap

    with lowlat.buffer_of(ctx, CASE, B, num_nvl_bytes=1 << 22) as buffer:
        for event in (EventHandle(), None):
            exchange = normal.dispatch_and_check(ctx, buffer, CASE, previous_event=types.SimpleNamespace(event=event))
            normal.combine(ctx, buffer, exchange, previous_event=types.SimpleNamespace(event=event))
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B, use_fp8=False)
        call.event.event = EventHandle()
        done = lowlat.combine_and_check(ctx, buffer, call)
        assert done.event is not call.event and done.event.event is None and EventOverlap().event is None


def test_events(pool):
    pool.run(4, rank_events)


def rank_integers(ctx):
    """NumPy's integers are integers, and a whole float will do for the number of queue pairs."""
    from deep_ep import Buffer, Config

    number = numpy.int64
    size = Buffer.get_low_latency_rdma_size_hint(number(B), number(512), number(ctx.size), number(CASE.experts))
    before = Buffer.num_sms
    Buffer.set_num_sms(number(24))
    assert Buffer.num_sms == 24 and type(Buffer.num_sms) is int
    Buffer.set_num_sms(before)
    assert Config(number(20), number(6)).get_nvl_buffer_size_hint(number(1024), number(4)) > 0
    buffer = Buffer(
        ctx.group, number(1 << 22), number(size), low_latency_mode=True, num_qps_per_rank=CASE.experts / 4,
        explicitly_destroy=True, engine=ctx.engine,
    )  # fmt: skip
    normal.dispatch_and_check(ctx, buffer, CASE)
    idx = ctx.to_device(cases.routing(CASE, ctx.rank))
    assert buffer.get_dispatch_layout(idx, numpy.int32(CASE.experts))[2].shape == (CASE.experts,)
    x = ctx.to_device(lowlat.make_x(CASE, ctx.rank, False))
    _, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, number(B), number(CASE.experts), use_fp8=False)
    assert handle[2:] == (B, 512, CASE.experts) and all(type(size) is int for size in handle[2:])
    want = reference.low_latency_dispatch(CASE.routings(), ctx.rank, CASE.experts, B)
    checks.same_bits("recv_count", counts, want.counts)
    buffer.clean_low_latency_buffer(number(B), number(512), number(CASE.experts))
    buffer.destroy()


def test_integers(pool):
    pool.run(4, rank_integers)


TOO_LARGE = 2**32


def rank_integers_that_do_not_fit(ctx):
    """A number that a C field would cut off is refused by name; so are bools."""
    from deep_ep import Buffer

    with lowlat.buffer_of(ctx, CASE, B, num_nvl_bytes=1 << 22) as buffer:
        own = normal.expect(CASE, ctx.rank).own
        idx, weights = ctx.to_device(own.topk_idx), ctx.to_device(own.topk_weights)
        layout = buffer.get_dispatch_layout(idx, CASE.experts)
        given = {
            "x": normal.x_of(ctx, own), "num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3],
            "num_tokens_per_expert": layout[2], "topk_idx": idx, "topk_weights": weights,
        }  # fmt: skip
        x = ctx.to_device(lowlat.make_x(CASE, ctx.rank, False))
        calls = {
            "num_worst_tokens": lambda n: buffer.dispatch(**given, num_worst_tokens=n),
            "expert_alignment": lambda n: buffer.dispatch(**given, expert_alignment=n),
            "num_experts": lambda n: buffer.get_dispatch_layout(idx, n),
            "num_max_dispatch_tokens_per_rank": lambda n: buffer.low_latency_dispatch(x, idx, n, CASE.experts),
            "hidden": lambda n: buffer.clean_low_latency_buffer(B, n, CASE.experts),
            "num_tokens": lambda n: buffer.warmup(n, 512, 3, CASE.experts),
            "num_topk": lambda n: buffer.warmup(4, 512, n, CASE.experts),
            "num_qps_per_rank": lambda n: Buffer(ctx.group, 1 << 20, num_qps_per_rank=n),
        }
        for name, call in calls.items():
            for number in (TOO_LARGE + 5, TOO_LARGE + CASE.experts, True):
                with pytest.raises((ValueError, TypeError), match=f"argument {name}: got {number}, allowed an int"):
                    call(number)
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        normal.combine(ctx, buffer, exchange)


def test_integers_that_do_not_fit(pool):
    pool.run(4, rank_integers_that_do_not_fit)


@pytest.mark.parametrize("wrong", [2.5, float("inf"), float("nan"), "24", True])
def test_queue_pairs_that_are_no_number(wrong):
    from deep_ep import Buffer

    with pytest.raises(TypeError, match="num_qps_per_rank"):
        Buffer(None, num_qps_per_rank=wrong)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), 1e10, 0, True])
def test_timeouts_that_do_not_fit(wrong):
    from deep_ep import Buffer

    with pytest.raises(ValueError, match="timeout"):
        Buffer(None, timeout=wrong)
