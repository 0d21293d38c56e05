"""Operators of normal mode: layout, dispatch (fresh, worst case, cached) and combine."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _names, _torch
from ..config import Config
from ..errors import value_error
from . import _autograd
from ._define import cast_under_autocast, define

# What a fresh dispatch and one into outputs of a fixed size share.
_DISPATCH_INPUTS = (
    "(Tensor x, Tensor? x_scales, Tensor? topk_idx, Tensor? topk_weights, Tensor num_tokens_per_rank, "
    "Tensor? num_tokens_per_rdma_rank, Tensor is_token_in_rank, Tensor num_tokens_per_expert, str buffer, "
)
_HANDLE = "Tensor rank_prefix_matrix, Tensor recv_src_idx, Tensor send_head"
Tensors = tuple[Tensor, ...]
OptionalTensor = Tensor | None


def _config(numbers: Sequence[int] | None) -> Config | None:
    return None if numbers is None else Config(*numbers)


def _or_empty(tensor: OptionalTensor, prototype: Tensor) -> Tensor:
    """Operators return no None: what is not there has no elements, and a prototype's dtype."""
    return _torch.like(prototype, 0) if tensor is None else tensor


def _handle(matrix: Tensor, source: Tensor, head: Tensor) -> tuple[Any, ...]:
    """A handle with the entries that calls read; either form serves any number of nodes."""
    return (matrix, None, None, source, None, head)


# ---- layout


def _layout(topk_idx: Tensor, num_experts: int, buffer: str) -> Tensors:
    found = _names.find(buffer)
    per_rank, per_node, per_expert, in_rank, _ = found._normal.layout(topk_idx, num_experts)
    return per_rank, _or_empty(per_node, per_rank), per_expert, in_rank


def _fake_layout(topk_idx: Tensor, num_experts: Any, buffer: str) -> Tensors:
    found = _names.find(buffer)
    ranks, nodes = found.group_size, found.num_nodes

    def count(length: Any) -> Tensor:
        return topk_idx.new_empty((length,), dtype=torch.int32)

    in_rank = topk_idx.new_empty((topk_idx.shape[0], ranks), dtype=torch.bool)
    return count(ranks), count(nodes if nodes > 1 else 0), count(num_experts), in_rank


# ---- dispatch


def _dispatch(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: OptionalTensor,
    topk_weights: OptionalTensor,
    num_tokens_per_rank: Tensor,
    num_tokens_per_rdma_rank: OptionalTensor,
    is_token_in_rank: Tensor,
    num_tokens_per_expert: Tensor,
    buffer: str,
    expert_alignment: int = 1,
    max_recv_tokens: int | None = None,
    config: Sequence[int] | None = None,
) -> Tensors:
    (recv_x, scales, idx, weights, matrix, source, head), counts = _run_dispatch(
        x, x_scales, topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
        num_tokens_per_expert, buffer, expert_alignment, 0, config,
    )  # fmt: skip
    if max_recv_tokens is not None and source.shape[0] > max_recv_tokens:
        raise value_error("max_recv_tokens", max_recv_tokens, f"at least the {source.shape[0]} rows that were received")
    per_expert = torch.frombuffer(array.array("i", counts), dtype=torch.int32)  # torch.tensor(list) takes 6 us more
    return recv_x, scales, idx, weights, per_expert, matrix, source, head


def _dispatch_worst_case(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_tokens_per_rank: Tensor,
    num_tokens_per_rdma_rank: OptionalTensor,
    is_token_in_rank: Tensor,
    num_tokens_per_expert: Tensor,
    buffer: str,
    num_worst_tokens: int,
    config: Sequence[int] | None = None,
) -> Tensors:
    if num_worst_tokens < 1:
        raise value_error("num_worst_tokens", num_worst_tokens, "at least 1")
    return _run_dispatch(
        x, x_scales, topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
        num_tokens_per_expert, buffer, 1, num_worst_tokens, config,
    )[0]  # fmt: skip


def _run_dispatch(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: OptionalTensor,
    topk_weights: OptionalTensor,
    per_rank: Tensor,
    per_node: OptionalTensor,
    in_rank: Tensor,
    per_expert: Tensor,
    buffer: str,
    expert_alignment: int,
    num_worst_tokens: int,
    config: Sequence[int] | None,
) -> tuple[Tensors, list[int]]:
    """recv_x, its scales, indices, weights and the handle's tensors; and the list of counts."""
    found = _names.find(buffer)
    rows: Any = x if x_scales is None else (x, x_scales)
    recv_x, idx, weights, counts, handle, _ = found._normal.dispatch(
        rows, None, per_rank, per_node, in_rank, per_expert, topk_idx, topk_weights, expert_alignment,
        num_worst_tokens, _config(config), found._sms_of_calls(), None, False, False,
    )  # fmt: skip
    assert handle is not None and counts is not None
    recv_x, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    received = recv_x, _or_empty(scales, x), _or_empty(idx, x), _or_empty(weights, x)
    return (*received, *handle_tensors(handle)), counts


def handle_tensors(handle: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """rank_prefix_matrix, recv_src_idx and send_head of a handle of Buffer.dispatch: what operators take."""
    if len(handle) == 6:
        return handle[0], handle[3], handle[5]
    return handle[1], handle[-3], handle[-2]


def _fake_received(
    x: Tensor, x_scales: OptionalTensor, topk_idx: OptionalTensor, topk_weights: OptionalTensor, rows: Any
) -> Tensors:
    def like(tensor: OptionalTensor) -> Tensor:
        if tensor is None:
            return x.new_empty((0,))
        width = tensor.shape[1] if tensor.dim() == 2 else 1
        return tensor.new_empty((rows, width))

    return x.new_empty((rows, x.shape[1])), like(x_scales), like(topk_idx), like(topk_weights)


def _fake_handle(x: Tensor, num_tokens_per_rank: Tensor, rows: Any) -> Tensors:
    ranks = num_tokens_per_rank.shape[0]
    shapes = (ranks, ranks), (rows,), (x.shape[0], ranks)
    matrix, source, head = (num_tokens_per_rank.new_empty(shape) for shape in shapes)
    return matrix, source, head


def _fake_dispatch(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: OptionalTensor,
    topk_weights: OptionalTensor,
    num_tokens_per_rank: Tensor,
    num_tokens_per_rdma_rank: OptionalTensor,
    is_token_in_rank: Tensor,
    num_tokens_per_expert: Tensor,
    buffer: str,
    expert_alignment: Any = 1,
    max_recv_tokens: Any = None,
    config: Any = None,
) -> Tensors:
    rows: Any = torch.library.get_ctx().new_dynamic_size()
    if max_recv_tokens is not None:
        torch._check(rows <= max_recv_tokens)  # type: ignore[no-untyped-call]
    received = _fake_received(x, x_scales, topk_idx, topk_weights, rows)
    local = num_tokens_per_expert.shape[0] // num_tokens_per_rank.shape[0]
    counts = torch.empty((local,), dtype=torch.int32, device="cpu")
    return (*received, counts, *_fake_handle(x, num_tokens_per_rank, rows))


def _fake_dispatch_worst_case(
    x: Tensor,
    x_scales: OptionalTensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_tokens_per_rank: Tensor,
    num_tokens_per_rdma_rank: OptionalTensor,
    is_token_in_rank: Tensor,
    num_tokens_per_expert: Tensor,
    buffer: str,
    num_worst_tokens: Any,
    config: Any = None,
) -> Tensors:
    received = _fake_received(x, x_scales, topk_idx, topk_weights, num_worst_tokens)
    return (*received, *_fake_handle(x, num_tokens_per_rank, num_worst_tokens))


def _dispatch_cached(
    x: Tensor,
    x_scales: OptionalTensor,
    rank_prefix_matrix: Tensor,
    recv_src_idx: Tensor,
    send_head: Tensor,
    buffer: str,
    config: Sequence[int] | None = None,
) -> Tensors:
    found = _names.find(buffer)
    rows: Any = x if x_scales is None else (x, x_scales)
    recv_x, *_ = found._normal.dispatch(
        rows, _handle(rank_prefix_matrix, recv_src_idx, send_head), None, None, None, None, None, None, 1, 0,
        _config(config), found._sms_of_calls(), None, False, False,
    )  # fmt: skip
    if isinstance(recv_x, tuple):
        return recv_x
    return recv_x, _torch.like(x, 0)


def _fake_dispatch_cached(
    x: Tensor,
    x_scales: OptionalTensor,
    rank_prefix_matrix: Tensor,
    recv_src_idx: Tensor,
    send_head: Tensor,
    buffer: str,
    config: Any = None,
) -> Tensors:
    return _fake_received(x, x_scales, None, None, recv_src_idx.shape[0])[:2]


# ---- combine


def _combine(
    x: Tensor,
    bias_0: OptionalTensor,
    bias_1: OptionalTensor,
    topk_weights: OptionalTensor,
    rank_prefix_matrix: Tensor,
    recv_src_idx: Tensor,
    send_head: Tensor,
    buffer: str,
    worst_case: bool = False,
    config: Sequence[int] | None = None,
) -> Tensors:
    found = _names.find(buffer)
    handle = _handle(rank_prefix_matrix, recv_src_idx, send_head)
    combined, weights, _ = found._normal.combine(
        x, handle, topk_weights, (bias_0, bias_1), _config(config), found._sms_of_calls(), None, False, False
    )
    return combined, _or_empty(weights, x)


def _fake_combine(
    x: Tensor,
    bias_0: OptionalTensor,
    bias_1: OptionalTensor,
    topk_weights: OptionalTensor,
    rank_prefix_matrix: Tensor,
    recv_src_idx: Tensor,
    send_head: Tensor,
    buffer: str,
    worst_case: bool = False,
    config: Any = None,
) -> Tensors:
    num_tokens = send_head.shape[0]
    combined = x.new_empty((num_tokens, x.shape[1]))
    if topk_weights is None:
        return combined, x.new_empty((0,))
    return combined, topk_weights.new_empty((num_tokens, topk_weights.shape[1]))


layout = define(
    "layout",
    "(Tensor topk_idx, SymInt num_experts, str buffer) -> (Tensor, Tensor, Tensor, Tensor)",
    _layout,
    _fake_layout,
    _autograd.not_differentiable("layout"),
)
dispatch = define(
    "dispatch",
    _DISPATCH_INPUTS + "int expert_alignment=1, SymInt? max_recv_tokens=None, int[]? config=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _fake_dispatch,
    _autograd.dispatch,
)
dispatch_worst_case = define(
    "dispatch_worst_case",
    _DISPATCH_INPUTS + "SymInt num_worst_tokens, int[]? config=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch_worst_case,
    _fake_dispatch_worst_case,
    _autograd.dispatch_worst_case,
)
dispatch_cached = define(
    "dispatch_cached",
    f"(Tensor x, Tensor? x_scales, {_HANDLE}, str buffer, int[]? config=None) -> (Tensor, Tensor)",
    _dispatch_cached,
    _fake_dispatch_cached,
    _autograd.dispatch_cached,
)
combine = define(
    "combine",
    f"(Tensor x, Tensor? bias_0, Tensor? bias_1, Tensor? topk_weights, {_HANDLE}, str buffer, bool worst_case=False, "
    "int[]? config=None) -> (Tensor, Tensor)",
    _combine,
    _fake_combine,
    _autograd.combine,
)
cast_under_autocast(dispatch, 1)
cast_under_autocast(dispatch_worst_case, 1)
cast_under_autocast(dispatch_cached, 1)
cast_under_autocast(combine, 3)
