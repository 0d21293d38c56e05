"""Masks of normal mode between nodes: GPU kernels across nodes, run on the host, and the CPU engine, bit for bit."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
import torch

import cases
import internode
import normal
from conftest import test_device
from test_elastic_nodes import read_dump

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "build" / "nvshmem" / "internode_shrink_test"


def rank_same_bits(ctx, path):
    (hidden, topk, experts, lost), its = read_dump(path, ctx.rank)

    def same(name: str, tensor: torch.Tensor) -> None:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        got, wanted = tensor.contiguous().reshape(-1), its[name].to(tensor.dtype)
        if tensor.is_floating_point():
            got, wanted = got + 0.0, wanted + 0.0  # no zero has a sign
        assert got.shape == wanted.shape, f"{name}: {got.numel()} elements, {wanted.numel()} there"
        got, wanted = got.view(bits), wanted.view(bits)
        assert torch.equal(got, wanted), f"{name}: {int((got != wanted).sum())} of {got.numel()} differ"

    with normal.buffer_of(ctx, enable_shrink=True) as buffer:
        ctx.barrier()
        if ctx.rank != lost:
            if lost >= 0:
                buffer.low_latency_update_mask_buffer(lost, True)
            idx, weights = its["topk_idx"].view(-1, topk), its["topk_weights"].view(-1, topk)
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
            recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
                its["x"].view(-1, hidden), num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights,
            )  # fmt: skip
            same("recv_x", recv_x)
            same("recv_topk_idx", recv_idx)
            same("recv_topk_weights", recv_weights)
            same("src", handle[-3])
            out, back, _ = buffer.combine(
                its["y"].view(-1, hidden), handle, topk_weights=its["y_weights"].view(-1, topk)
            )
            same("combined", out)
            same("combined_weights", back)
        ctx.barrier()


@pytest.mark.skipif(test_device() != "cpu", reason="compares with the CPU engine")
@pytest.mark.skipif(not KERNELS.exists(), reason="needs `make nvshmem`")
@pytest.mark.parametrize("masked", [False, True], ids=["all ranks", "one masked"])
@pytest.mark.parametrize("shape", ["2x2", "2x4", "4x1", "3x2"] if cases.RANKS > 2 else ["2x1"])
def test_same_bits_as_kernels_of_gpus(pool, tmp_path, shape, masked):
    nodes, peers = internode.numbers_of(shape)
    for seed in (3, 4, 5):
        path = tmp_path / str(seed)
        words = [KERNELS, "dump", path, seed, nodes, peers, seed % (nodes * peers) if masked else -1]
        subprocess.run([str(word) for word in words], check=True, timeout=120)
        internode.run(pool, shape, rank_same_bits, str(path), seed=seed, deadline=120)
