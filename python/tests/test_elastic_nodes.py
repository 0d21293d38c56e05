"""V2 over several nodes, on the CPU engine by its software RDMA: hybrid and direct mode, bit for bit as on one node."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
import torch

import cases
import elastic
import internode
from cases import Case
from conftest import test_device
from test_ops import opcheck, operators

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "build" / "nvshmem" / "internode_routed_test"
SHRINKING = KERNELS.with_name("internode_routed_shrink_test")
TYPES = {
    "x": torch.bfloat16, "scales": torch.int32, "topk_idx": torch.int64, "topk_weights": torch.float32,
    "recv_x": torch.bfloat16, "recv_scales": torch.int32, "recv_topk_idx": torch.int64,
    "recv_topk_weights": torch.float32, "metadata": torch.int32, "slots": torch.int32, "psum_experts": torch.int32,
    "y": torch.bfloat16, "y_weights": torch.float32, "bias0": torch.bfloat16, "bias1": torch.bfloat16,
    "combined": torch.bfloat16, "combined_weights": torch.float32, "src": torch.int32,
}  # fmt: skip

CASES = (
    Case((9, 0, 14, 5), experts=8, topk=4, hidden=64, routing="holes", seed=0),
    Case((6, 11, 3, 8), experts=16, topk=6, hidden=520, routing="random", alignment=4, seed=1),
    Case((7, 7, 7, 7), experts=8, topk=3, hidden=128, kind="fp8", num_scales=4, seed=2),
)
MODES = ((True, True), (False, True), (True, False), (False, False))  # hybrid, multiple reduction


def rank_cases(ctx, some, modes, shrink=False):
    for case in some:
        exchange = elastic.expect(case, 32)
        for hybrid, multiple in modes:
            options = {"allow_hybrid_mode": hybrid, "allow_multiple_reduction": multiple, "enable_shrink": shrink}
            with elastic.buffer_of(ctx, 32, case.hidden, **options) as buffer:
                nodes = buffer.num_rdma_ranks
                assert nodes > 1 and buffer.get_logical_domain_size()[0] == (nodes if hybrid else 1)
                for expand in (False, True):
                    for sync in (False, True):
                        elastic.round_trip(ctx, buffer, case, exchange, expand=expand, sync=sync)
                    call = elastic.dispatch(ctx, buffer, exchange, case, expand=expand)
                    assert len(call.handle.psum_num_recv_tokens_per_scaleup_rank) == buffer.num_scaleup_ranks
                    elastic.combine(ctx, buffer, call, biases=2, weights=True, seed=3, unreduced=not multiple)


def rank_traced(ctx):
    """A compiler is told the shapes that come."""
    x, idx = ctx.to_device(torch.ones(4, 64).bfloat16()), ctx.to_device(torch.arange(4).unsqueeze(1) % ctx.size)
    for hybrid in (True, False):
        with elastic.buffer_of(ctx, 8, allow_hybrid_mode=hybrid) as buffer:
            given = x, None, idx, None, None, ctx.size, 8, buffer.name
            for name in ("elastic_dispatch", "elastic_dispatch_worst_case"):
                opcheck(getattr(operators(), name), *given, tests=("test_faketensor",))


def test_traced(pool):
    internode.run(pool, "2x1", rank_traced, seed=1, deadline=120)


@pytest.mark.skipif(cases.RANKS < 4, reason="needs 4 ranks")
@pytest.mark.parametrize(
    ("shape", "some", "modes"), [("2x2", CASES[:2], MODES), ("4x1", CASES[2:], MODES[:2])], ids=["2x2", "4x1"]
)
def test_cases(pool, shape, some, modes):
    internode.run(pool, shape, rank_cases, some, modes, seed=1, deadline=120)


@pytest.mark.skipif(cases.RANKS < 4, reason="needs 4 ranks")
@pytest.mark.parametrize(
    ("shape", "some", "modes"), [("2x2", CASES[:2], MODES), ("4x1", CASES[2:], MODES[:2])], ids=["2x2", "4x1"]
)
def test_cases_with_shrink(pool, shape, some, modes):
    """Rows go from rank to rank, and the sums of nodes are made where they are added: the same bits."""
    internode.run(pool, shape, rank_cases, some, modes, True, seed=1, deadline=120)


def read_dump(path: str, rank: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The numbers of a case that a test program has written, and the rank's tensors."""
    data = pathlib.Path(path).read_bytes()
    line, _, rest = data.partition(b"\n")
    found = {}
    while rest:
        head, _, rest = rest.partition(b"\n")
        name, owner, size = head.decode().split()
        if int(owner) == rank:
            found[name] = torch.frombuffer(bytearray(rest[: int(size)]) or bytearray(8), dtype=TYPES[name])
            found[name] = found[name][:0] if int(size) == 0 else found[name]
        rest = rest[int(size) :]
    return [int(word) for word in line.split()], found


def rank_same_bits(ctx, path, expand, flags, shrink):
    (hidden, topk, experts, scales, alignment, num_max, lost), its = read_dump(path, ctx.rank)

    def same(name: str, tensor: torch.Tensor) -> None:
        wanted = its[name].view(tensor.dtype) if its[name].numel() else its[name].to(tensor.dtype)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        got, wanted = tensor.contiguous().reshape(-1).view(bits), wanted.reshape(-1).view(bits)
        assert torch.equal(got, wanted), f"{name}: {int((got != wanted).sum())} of {got.numel()} differ"

    options = {"allow_hybrid_mode": flags != 2, "allow_multiple_reduction": flags != 1, "num_topk": topk}
    with elastic.buffer_of(ctx, num_max, hidden, enable_shrink=shrink, **options) as buffer:
        ctx.barrier()
        if ctx.rank == lost:
            ctx.barrier()
            return
        if lost >= 0:
            buffer.update_mask(lost)
        recv_x, idx, weights, handle, _ = buffer.dispatch(
            x=(its["x"].view(-1, hidden), its["scales"].view(-1, scales)),
            topk_idx=its["topk_idx"].view(-1, topk), topk_weights=its["topk_weights"].view(-1, topk),
            num_experts=experts, expert_alignment=alignment, do_cpu_sync=1, do_expand=int(expand),
            do_zero_padding=int(expand),
        )  # fmt: skip
        same("recv_x", recv_x[0])
        its["recv_scales"] = its["recv_scales"][: recv_x[1].numel()]  # it has room for columns of 4 rows
        same("recv_scales", recv_x[1])
        same("recv_topk_weights", weights)
        same("slots", handle.dst_buffer_slot_idx)
        same("psum_experts", handle.psum_num_recv_tokens_per_expert)
        if expand:
            same("metadata", handle.recv_src_metadata)
        else:
            same("recv_topk_idx", idx)
            its["metadata"] = its["metadata"].view(-1, topk + 2)[:, :2].contiguous()
            same("metadata", handle.recv_src_metadata[:, :2])
        y_weights = its["y_weights"] if expand else its["y_weights"].view(-1, topk)
        alone = expand and flags == 1  # a combine that adds nothing before takes no weights
        out, back, _ = buffer.combine(
            its["y"].view(-1, hidden), handle, topk_weights=None if alone else y_weights,
            bias=(its["bias0"].view(-1, hidden), its["bias1"].view(-1, hidden)),
        )  # fmt: skip
        same("combined", out)
        if not alone:
            same("combined_weights", back)
        ctx.barrier()


@pytest.mark.skipif(test_device() != "cpu", reason="compares with the CPU engine")
@pytest.mark.skipif(not KERNELS.exists(), reason="needs `make nvshmem`")
@pytest.mark.parametrize("flags", [0, 1, 2], ids=["hybrid", "unreduced", "direct"])
@pytest.mark.parametrize("expand", [False, True], ids=["plain", "expanded"])
@pytest.mark.parametrize("shape", ["2x2", "2x4", "4x1"] if cases.RANKS > 2 else ["2x1"])
def test_same_bits_as_kernels_of_gpus(pool, tmp_path, shape, expand, flags):
    """The kernels across GPU nodes, run on the host, and the CPU engine: outputs and handles are equal bit for bit."""
    nodes, peers = internode.numbers_of(shape)
    for seed in (3, 4):
        path = tmp_path / str(seed)
        words = [KERNELS, "dump", path, seed, nodes, peers, int(expand), flags]
        subprocess.run([str(word) for word in words], check=True, timeout=120)
        internode.run(pool, shape, rank_same_bits, str(path), expand, flags, False, seed=seed, deadline=120)


@pytest.mark.skipif(test_device() != "cpu", reason="compares with the CPU engine")
@pytest.mark.skipif(not SHRINKING.exists(), reason="needs `make nvshmem`")
@pytest.mark.parametrize("flags", [0, 1, 2], ids=["hybrid", "unreduced", "direct"])
@pytest.mark.parametrize("expand", [False, True], ids=["plain", "expanded"])
@pytest.mark.parametrize("shape", ["2x2", "3x2"] if cases.RANKS > 2 else ["2x1"])
def test_same_bits_as_kernels_of_gpus_with_shrink(pool, tmp_path, shape, expand, flags):
    """With all ranks, and with one that all others have masked."""
    nodes, peers = internode.numbers_of(shape)
    for seed, lost in ((3, -1), (4, 1), (5, nodes * peers - 1)):
        path = tmp_path / str(seed)
        words = [SHRINKING, "dump", path, seed, nodes, peers, int(expand), flags, lost]
        subprocess.run([str(word) for word in words], check=True, timeout=120)
        internode.run(pool, shape, rank_same_bits, str(path), expand, flags, True, seed=seed, deadline=120)
