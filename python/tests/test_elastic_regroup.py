"""V2: a buffer goes on without a lost rank; results afterwards, and what of before is refused."""

from __future__ import annotations

import os
import pathlib
import signal
import time

import pytest
import torch

import cases
import elastic
import victims
from cases import Case

M, HIDDEN = 40, 64


class Seat:
    """What the checks ask of a rank: its present number in the buffer's group, which is not that in the pool."""

    def __init__(self, ctx, buffer):
        self.rank, self.size = buffer.rank_idx, buffer.num_ranks
        self.device, self.engine, self.to_device = ctx.device, ctx.engine, ctx.to_device


def domain(size):
    """Ranks of a logical domain."""
    return min(size, cases.node_size())


def case_of(size):
    return Case((16, 9, 7)[:size], experts=12, topk=3, hidden=HIDDEN, routing="holes", alignment=4)


def serve(ctx, buffer):
    """Both layouts, cached dispatch and combine, whose results are checked."""
    case = case_of(buffer.num_ranks)
    for expand in (False, True):
        call = elastic.round_trip(Seat(ctx, buffer), buffer, case, elastic.expect(case, M), expand=expand, sync=True)
    return call


def rank_swapped(ctx):
    case = case_of(2)
    with elastic.buffer_of(ctx, M, HIDDEN, "EPBuffer") as buffer:
        call = serve(ctx, buffer)
        with pytest.raises(ValueError, match="each rank once"):
            buffer.regroup([0, 0, 1])
        own = call.own
        event = buffer.dispatch(
            elastic.x_of(ctx, own), ctx.to_device(own.topk_idx), num_experts=case.experts,
            num_max_tokens_per_rank=M, async_with_compute_stream=1, defer_epilogue=1,
        )  # fmt: skip
        buffer.regroup([1, 0])
        assert (buffer.rank_idx, buffer.num_ranks, buffer.scaleup_rank_idx) == (
            1 - ctx.rank,
            2,
            (1 - ctx.rank) % domain(2),
        )
        with pytest.raises(RuntimeError, match=r"deferred dispatch is one of before regroup\(\)"):
            event.wait()
        with pytest.raises(RuntimeError, match=r"handle: .*of before regroup\(\) renumbered the ranks"):
            elastic.again(ctx, buffer, call)
        serve(ctx, buffer)


def test_renumbered(pool):
    pool.run(2, rank_swapped)


def rank_left(ctx):
    """Rank 1 of 3 dies; the others go on."""
    with elastic.buffer_of(ctx, M, HIDDEN) as buffer:
        call = serve(ctx, buffer)
        ctx.barrier()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _, text, _ = victims.first_error(lambda: elastic.again(ctx, buffer, call))
        assert "rank 1" in text, text
        assert buffer.lost_ranks() == [1]
        buffer.regroup([0, 2])
        assert (buffer.rank_idx, buffer.num_ranks, buffer.num_scaleup_ranks) == (ctx.rank // 2, 2, domain(2))
        with pytest.raises(ValueError, match="handle"):
            elastic.again(ctx, buffer, call)
        serve(ctx, buffer)
        buffer.barrier()
    return text


def test_a_rank_dies(fresh_pool):
    outcomes = fresh_pool(3).outcomes(3, rank_left)
    assert outcomes[1].died and not outcomes[0].error and not outcomes[2].error, [o.traceback for o in outcomes]


def make(ctx, folder, **options):
    """A buffer of V2 without torch's groups."""
    import deep_ep

    if "join" not in options:
        options["bootstrap"] = deep_ep.Bootstrap.file(ctx.rank, 2, folder)
    return deep_ep.EPBuffer(
        None, num_max_tokens_per_rank=M, hidden=HIDDEN, engine=ctx.engine, explicitly_destroy=True,
        lb_allocation_plan_or_num_bytes=2 << 20, **options,
    )  # fmt: skip


def rank_joined(ctx, folder):
    """Ranks 0 and 1 take a third process in, which has memory for two ranks as they have."""
    path = pathlib.Path(folder, "key")
    if ctx.rank == 2:
        while not path.exists():
            time.sleep(0.01)
        buffer = make(ctx, folder, join=path.read_text())
    else:
        buffer = make(ctx, folder)
        serve(ctx, buffer)
        key = buffer.join_key  # every rank looks at it, so that the process may come to any
        if ctx.rank == 0:
            path.with_suffix(".new").write_text(key)
            path.with_suffix(".new").rename(path)
        end = time.monotonic() + 60
        while buffer.pending_joins(agreed=True) != [-1]:
            assert time.monotonic() < end, "no process has come"
            time.sleep(0.01)
        size = buffer.num_bytes
        buffer.regroup(range(3))
        assert buffer.num_bytes == size
    assert (buffer.rank_idx, buffer.num_ranks, buffer.num_scaleup_ranks) == (ctx.rank, 3, domain(3))
    assert buffer.join_key == path.read_text() and buffer.join_key.endswith("@2")
    serve(ctx, buffer)
    mapping = ctx.to_device(torch.tensor([[2], [0], [1]], dtype=torch.int32))
    copies, own = ctx.to_device(torch.zeros(1, 8)), ctx.to_device(torch.full((1, 8), float(ctx.rank)))
    buffer.lb_prefetch_weights(copies, own, mapping).wait()
    assert copies.tolist() == [[float((ctx.rank + 2) % 3)] * 8]
    buffer.barrier()
    buffer.destroy()


def test_a_process_joins(pool, tmp_path):
    pool.run(3, rank_joined, str(tmp_path), deadline=90)


def test_join_keys():
    import deep_ep

    for key in (3, "a-1", "a-1@0", "a-1@x", "a-1@" + 5000 * "1"):  # int() reads no such text
        kind = TypeError if key == 3 else ValueError
        with pytest.raises(kind, match="join"):
            deep_ep.ElasticBuffer(None, num_max_tokens_per_rank=M, hidden=HIDDEN, engine="cpu", join=key)
