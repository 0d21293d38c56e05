"""A buffer goes on without lost ranks, and takes new processes in: results afterwards, what stays, what is refused."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import lowlat
import normal
from cases import Case

TOKENS = (16, 9, 7, 12)
B = 16
HIDDEN = 512
SOON = 2.0
GAP = 0.2  # s: the longest regroup of a survivor, on the CPU engine


class Seat:
    """What the checks ask of a rank: its present number in the buffer's group, which is not that in the pool."""

    def __init__(self, ctx, buffer):
        self.rank, self.size = buffer.rank, buffer.group_size
        self.device, self.engine, self.to_device = ctx.device, ctx.engine, ctx.to_device
        self.barrier = buffer.barrier


def case_of(size, seed=0):
    return Case(TOKENS[:size], hidden=HIDDEN, experts=12, topk=3, routing="holes", seed=seed)


def make(ctx, folder, ranks, rank=None, **options):
    """A buffer of the first processes, or with join= of one that takes a place, without torch's groups."""
    from deep_ep import Bootstrap, Buffer

    size = max(Buffer.get_low_latency_rdma_size_hint(B, HIDDEN, n, 12) for n in range(1, 5))
    if "join" not in options:
        options["bootstrap"] = Bootstrap.file(ctx.rank, ranks, folder)
    return Buffer(
        None, 1 << 24, size, low_latency_mode=True, num_qps_per_rank=6, explicitly_destroy=True, engine=ctx.engine,
        **options,
    )  # fmt: skip


@contextmanager
def destroyed(buffer):
    try:
        yield buffer
    finally:
        buffer.destroy()


def serve(ctx, buffer, seed=0, lost=None):
    """Calls of both modes, whose results are checked; with masks low latency alone."""
    seat = Seat(ctx, buffer)
    case = case_of(seat.size, seed)
    options = {} if lost is None else {"lost": lost}
    call = lowlat.dispatch_and_check(seat, buffer, case, B, **options)
    lowlat.combine_and_check(seat, buffer, call)
    if lost is None:
        return normal.dispatch_and_check(seat, buffer, case)
    return None


def settle(ctx):
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()


def until_dead(ctx, buffer):
    """Calls until a survivor is told of the death; returns the seconds."""
    begin = time.monotonic()
    seat, case = Seat(ctx, buffer), case_of(buffer.group_size)
    with pytest.raises(RuntimeError, match="rank .* died|is dead"):
        while time.monotonic() < begin + 10:
            lowlat.finish(lowlat.dispatch(seat, buffer, case, B))
            settle(ctx)
            buffer.check()  # on a GPU it is this that tells of a call that the death has ended
    return time.monotonic() - begin


def wait_for_join(buffer, want, limit=60):
    end = time.monotonic() + limit
    while buffer.pending_joins(agreed=True) != want:
        assert time.monotonic() < end, f"{buffer.pending_joins()} wait, not {want}"
        time.sleep(0.01)


def timed(ctx, buffer, members, **options):
    begin = time.monotonic()
    buffer.regroup(members, **options)
    took = time.monotonic() - begin
    ctx.report(("regroup", took))
    return took


def read_key(folder):
    path = pathlib.Path(folder, "key")
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def write_key(folder, key):
    path = pathlib.Path(folder, "key.new")
    path.write_text(key)
    path.rename(pathlib.Path(folder, "key"))


def rank_rejoin(ctx, folder):
    """Process 0, the root, dies; process 3 takes a place later."""
    if ctx.rank == 3:
        key = read_key(folder)
        with destroyed(make(ctx, folder, 3, join=key)) as buffer:
            assert (buffer.rank, buffer.group_size) == (2, 3) and buffer.join_key == key
            serve(ctx, buffer, seed=3)
            buffer.barrier()
        return None
    with destroyed(make(ctx, folder, 3)) as buffer:
        view = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)
        stream = buffer.get_comm_stream()
        key = buffer.join_key
        exchange = serve(ctx, buffer)
        buffer.barrier()
        settle(ctx)
        if ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        assert until_dead(ctx, buffer) < SOON
        timed(ctx, buffer, [1, 2], renumber=True)
        assert (buffer.rank, buffer.group_size) == (ctx.rank - 1, 2)
        assert buffer.get_comm_stream() == stream
        assert buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).data_ptr() == view.data_ptr()
        with pytest.raises(ValueError, match="handle"):
            buffer.dispatch(normal.x_of(ctx, exchange.own), handle=exchange.handle)
        assert buffer.join_key == key
        again = serve(ctx, buffer, seed=1)
        if ctx.rank == 1:
            write_key(folder, key)
        wait_for_join(buffer, [-1])
        serve(ctx, buffer, seed=2)
        took = timed(ctx, buffer, [0, 1, 2], renumber=True)
        assert (buffer.rank, buffer.group_size) == (ctx.rank - 1, 3)
        with pytest.raises(ValueError, match="handle"):
            buffer.dispatch(normal.x_of(ctx, again.own), handle=again.handle)
        serve(ctx, buffer, seed=3)
        assert buffer.stats()["dispatch"]["calls"] == 1  # anew
        buffer.barrier()
        assert int(view.numel()) > 0 and int(view[-1]) >= 0  # views of before stay valid
        return took


def test_regroup_and_rejoin(fresh_pool, tmp_path):
    outcomes = fresh_pool(4).outcomes(4, rank_rejoin, str(tmp_path))
    assert outcomes[0].died
    for outcome in outcomes[1:]:
        assert not outcome.error and not outcome.died, outcome.traceback


def rank_masked_place(ctx, folder):
    """With kept numbers the place of a dead rank stays masked until a process asks for it."""
    if ctx.rank == 3:
        with destroyed(make(ctx, folder, 3, join=read_key(folder), join_rank=1, enable_shrink=True)) as buffer:
            assert (buffer.rank, buffer.group_size) == (1, 3)
            serve(ctx, buffer, seed=2)
            buffer.barrier()
        return
    with destroyed(make(ctx, folder, 3, enable_shrink=True, timeout=5.0)) as buffer:
        exchange = serve(ctx, buffer)
        buffer.barrier()
        settle(ctx)
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        lost = frozenset((rank, 1) for rank in (0, 2))
        serve(ctx, buffer, lost=lost)  # goes on by a mask
        mask = torch.zeros(3, dtype=torch.int32, device=ctx.device)
        buffer.regroup([0, 2])
        assert (buffer.rank, buffer.group_size) == (ctx.rank, 3)
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0, 1, 0]
        serve(ctx, buffer, seed=1, lost=lost)
        key = buffer.join_key
        if ctx.rank == 0:
            write_key(folder, key)
        wait_for_join(buffer, [1])
        timed(ctx, buffer, [0, 1, 2])
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0, 0, 0]
        serve(ctx, buffer, seed=2)
        assert exchange.handle is not None
        buffer.barrier()


def test_masked_place_is_taken(fresh_pool, tmp_path):
    outcomes = fresh_pool(4).outcomes(4, rank_masked_place, str(tmp_path))
    assert outcomes[1].died
    for rank in (0, 2, 3):
        assert not outcomes[rank].error and not outcomes[rank].died, outcomes[rank].traceback


def rank_gap(ctx, folder):
    """A rank dies and comes back while the others serve; returns the longest time between two completed calls."""
    x = torch.ones(8, HIDDEN, dtype=torch.bfloat16, device=ctx.device)

    def call(buffer):
        size = buffer.group_size
        idx = torch.arange(8 * 2, device=ctx.device).view(8, 2) % size * (12 // size)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, B, 12, use_fp8=False)
        weights = torch.full((8, 2), 0.5, device=ctx.device)
        out, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
        settle(ctx)
        buffer.check()  # on a GPU a call ends without an error, and without results
        assert float(out.sum()) == 8 * HIDDEN

    if ctx.rank == 3:
        with destroyed(make(ctx, folder, 3, join=read_key(folder))) as buffer:
            for _ in range(50):
                call(buffer)
            buffer.barrier()
        return None
    with destroyed(make(ctx, folder, 3)) as buffer:
        key, ends = buffer.join_key, []
        for _ in range(20):
            call(buffer)
        buffer.barrier()
        settle(ctx)
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                call(buffer)
        except RuntimeError:
            ends.append(time.monotonic())  # detection is shown apart
        buffer.regroup([0, 2], renumber=True)
        for step in range(400):
            call(buffer)
            ends.append(time.monotonic())
            if step == 20 and ctx.rank == 0:
                write_key(folder, key)
            if step % 10 == 0 and buffer.group_size == 2 and buffer.pending_joins(agreed=True):
                buffer.regroup([0, 1, 2], renumber=True)
                break
        else:
            wait_for_join(buffer, [-1])
            buffer.regroup([0, 1, 2], renumber=True)
        for _ in range(50):
            call(buffer)
            ends.append(time.monotonic())
        buffer.barrier()
        return max(b - a for a, b in zip(ends, ends[1:], strict=False))


def test_the_gap_is_short(fresh_pool, tmp_path, device):
    gaps = []
    for attempt in range(3):  # a busy machine only makes it longer
        folder = tmp_path / str(attempt)
        folder.mkdir()
        outcomes = fresh_pool(4).outcomes(4, rank_gap, str(folder))
        for rank in (0, 2, 3):
            assert not outcomes[rank].error and not outcomes[rank].died, outcomes[rank].traceback
        gaps.append(max(outcomes[0].value, outcomes[2].value))
        if device != "cpu" or gaps[-1] < GAP:
            return
    raise AssertionError(f"a regroup kept survivors from serving for {gaps} s")


def rank_refused(ctx, folder):
    with destroyed(make(ctx, folder, 2)) as buffer:
        for members, kind, text in (
            ("01", TypeError, "members"), ([], ValueError, "members"), ([0, 0, 1], ValueError, "each rank once"),
            ([1 - ctx.rank], ValueError, "a list with this rank"), ([0, 1, 7], ValueError, "members: got 7"),
            ([0, -1], ValueError, "members"),
        ):  # fmt: skip
            with pytest.raises(kind, match=text):
                buffer.regroup(members)
        with pytest.raises(RuntimeError, match=r"no process waits to join in the place of rank 2 \(new\)"):
            buffer.regroup([0, 1, 2], renumber=True)
        with pytest.raises(RuntimeError, match=f"rank {ctx.rank} .*gave up|disagree"):
            buffer.regroup([0, 1] if ctx.rank else [1, 0], renumber=True)
        serve(ctx, buffer)  # nobody had stopped
        buffer.barrier()
        if ctx.rank == 0:
            with pytest.raises(RuntimeError, match=r"nothing from rank 1 \("):
                buffer.regroup([1, 0], renumber=True, timeout=0.3)
            pathlib.Path(folder, "late").touch()
        while not pathlib.Path(folder, "late").exists():
            time.sleep(0.01)
        buffer.regroup([1, 0], renumber=True)
        assert buffer.rank == 1 - ctx.rank
        serve(ctx, buffer)
        buffer.barrier()
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.regroup([0, 1])


def test_refused_by_name(pool, tmp_path):
    pool.run(2, rank_refused, str(tmp_path))


def test_join_arguments():
    from deep_ep import Bootstrap, Buffer

    for arguments, kind, text in (
        ({"join": "no key!"}, ValueError, "join"), ({"join": 3}, TypeError, "join"),
        ({"join": "a-1", "bootstrap": Bootstrap.file(0, 1, "/tmp")}, ValueError, "join"),
        ({"join": "a-1", "join_rank": -2}, ValueError, "join_rank"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            Buffer(None, 1 << 20, engine="cpu", **arguments)


def rank_graphs(ctx, folder):
    """A graph of before a regroup leaves at once when it is replayed, and harms nobody."""
    with destroyed(make(ctx, folder, 2)) as buffer:
        x = torch.ones(8, HIDDEN, dtype=torch.bfloat16, device=ctx.device)
        idx = torch.arange(16, device=ctx.device).view(8, 2) % 12
        for _ in range(2):
            buffer.low_latency_dispatch(x, idx, B, 12, use_fp8=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, counts, _, _, _ = buffer.low_latency_dispatch(x, idx, B, 12, use_fp8=False)
        graph.replay()
        torch.cuda.synchronize()
        buffer.barrier()
        torch.cuda.synchronize()
        buffer.regroup([1, 0], renumber=True)
        begin = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 1.0 and int(counts.abs().sum()) == 0
        with pytest.raises(RuntimeError, match="graph of before regroup"):
            buffer.check()
        buffer.check()  # once
        for turn in range(3):
            serve(ctx, buffer, seed=turn)
            graph.replay()
        buffer.barrier()
        torch.cuda.synchronize()
    graph.replay()  # the memory of the calls is gone, their addresses are not
    torch.cuda.synchronize()


def test_graphs_of_before(pool, tmp_path, device):
    if device != "cuda":
        pytest.skip("needs CUDA graphs, which only GPUs have")
    pool.run(2, rank_graphs, str(tmp_path))


def interrupted(buffer, members, **options):
    """A regroup whose wait Ctrl-C ends."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        buffer.regroup(members, **options)
    timer.join()


def rank_interrupted(ctx, folder):
    """Ctrl-C in a regroup: it goes on, and the next call, or another regroup, waits for it and has its result."""
    from deep_ep import DeepEPError

    with destroyed(make(ctx, folder, 3)) as buffer:
        serve(ctx, buffer)
        backwards = [2, 1, 0]
        if ctx.rank == 0:
            interrupted(buffer, backwards, renumber=True)
            assert buffer.rank == 0
        else:
            time.sleep(0.6)  # later than the interrupt
            buffer.regroup(backwards, renumber=True)
        buffer.barrier()
        assert (buffer.rank, buffer.group_size) == (2 - ctx.rank, 3)
        serve(ctx, buffer, seed=1)
        ctx.barrier()
        if ctx.rank == 0:  # one that fails says so in the next call, once
            interrupted(buffer, [0, 1, 2], timeout=0.6)
            with pytest.raises(DeepEPError, match=r"regroup.*rank 0.*rank 1"):
                buffer.barrier()
        ctx.barrier()
        serve(ctx, buffer, seed=2)
        if ctx.rank == 0:  # one that never ends does not hold up destroy()
            interrupted(buffer, [0, 1, 2], timeout=60)
            start = time.monotonic()
            buffer.destroy()
            assert time.monotonic() - start < SOON
            with pytest.raises(DeepEPError, match="destroyed"):
                buffer.barrier()
        ctx.barrier()


def test_interrupted(pool, tmp_path):
    pool.run(3, rank_interrupted, str(tmp_path))
