"""Dispatch and combine of V2 as functions with gradients: what a layer calls, compiled or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._elastic import EPHandle, Shape, check_beside_handle
from ..errors import type_error
from . import _elastic

if TYPE_CHECKING:
    from ..elastic import ElasticBuffer

OptionalTensor = Tensor | None


def elastic_dispatch(
    buffer: ElasticBuffer,
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: OptionalTensor = None,
    topk_weights: OptionalTensor = None,
    *,
    num_experts: int | None = None,
    num_max_tokens_per_rank: int | None = None,
    expert_alignment: int | None = None,
    handle: EPHandle | None = None,
    do_cpu_sync: bool | None = None,
    do_expand: bool = True,
    do_zero_padding: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    cumulative_local_expert_recv_stats: OptionalTensor = None,
    num_sms: int = 0,
) -> tuple[Any, OptionalTensor, OptionalTensor, EPHandle]:
    """ElasticBuffer.dispatch without events, differentiable in BF16 rows and in the weights. Collective.

    Backward is an elastic_combine. In the plain layout a weight has its gradient from the rank of its expert alone.

    Args:
        buffer: an ElasticBuffer.
        x, topk_idx, topk_weights, num_experts, num_max_tokens_per_rank, expert_alignment, handle, do_cpu_sync,
            do_zero_padding, use_tma_aligned_col_major_sf, cumulative_local_expert_recv_stats, num_sms: as in
            ElasticBuffer.dispatch. The handle keeps `topk_idx` itself.
        do_expand: a row for each token and local expert, grouped by expert; False: one for each token.

    Returns:
        The rows (a pair for a pair), the local experts (None if expanded), the weights (None if none were given), and
        the handle. A handle that a compiled graph made has num_sms 0 where none was given: the library's choice.

    Raises:
        DeepEPError: as ElasticBuffer.dispatch. Also a TypeError: rows that require grad are not BF16.
    """
    ops: Any = torch.ops.deep_ep
    rows, scales = x if isinstance(x, (tuple, list)) else (x, None)
    flags = bool(do_expand), bool(do_zero_padding), bool(use_tma_aligned_col_major_sf)
    if handle is not None:
        given = (num_experts, expert_alignment, num_max_tokens_per_rank)
        check_beside_handle(handle, topk_idx, do_cpu_sync, cumulative_local_expert_recv_stats, *given)
        outputs = ops.elastic_dispatch_cached(
            rows, scales, topk_weights, _elastic.tensors_of(handle), _elastic.numbers_of(handle), buffer.name, *flags,
            num_sms,
        )  # fmt: skip
        return *_given(outputs, scales, flags[0], topk_weights), handle
    if topk_idx is None or num_experts is None:
        raise type_error("topk_idx" if topk_idx is None else "num_experts", "None", "a value, without a handle")
    most = buffer.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
    alignment = 1 if expert_alignment is None else expert_alignment
    worst = do_cpu_sync is not None and not do_cpu_sync
    inputs = (
        rows, scales, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, most, buffer.name,
        alignment, *flags, num_sms,
    )  # fmt: skip
    counts: list[int] = []
    if worst:
        outputs = ops.elastic_dispatch_worst_case(*inputs)
        arrived = _elastic.worst_rows(
            Shape(topk_idx.shape[1], num_experts, alignment, most, flags[0], buffer.num_ranks)
        )
    else:
        outputs = ops.elastic_dispatch(*inputs)
        counts, arrived = outputs[4].tolist(), outputs[0].shape[0]
    tensors = [topk_idx, *outputs[-7:]]
    numbers = [num_experts, alignment, most, num_sms + num_sms % 2, arrived, flags[0], worst]
    return *_given(outputs, scales, flags[0], topk_weights), _elastic.handle_of(tensors, numbers, counts)


def _given(outputs: Any, scales: Any, expand: bool, weights: Any) -> tuple[Any, OptionalTensor, OptionalTensor]:
    recv_x, recv_scales, idx, recv_weights = outputs[:4]
    return (
        recv_x if scales is None else (recv_x, recv_scales),
        None if expand else idx,
        None if weights is None else recv_weights,
    )


def elastic_combine(
    buffer: ElasticBuffer,
    x: Tensor,
    handle: EPHandle,
    topk_weights: OptionalTensor = None,
    bias: Tensor | tuple[OptionalTensor, OptionalTensor] | None = None,
    *,
    num_sms: int = 0,
) -> tuple[Tensor, OptionalTensor]:
    """ElasticBuffer.combine without events, differentiable in rows, weights and biases. Collective.

    Backward is a cached dispatch of the handle's layout; rows that no token has get zeros.

    Args:
        buffer: an ElasticBuffer.
        x, handle, topk_weights, bias, num_sms: as in ElasticBuffer.combine.

    Returns:
        The sums ``[T, H]``, and the weights ``[T, K]``, or None if none were given.

    Raises:
        DeepEPError: as ElasticBuffer.combine.
    """
    bias_0, bias_1 = bias if isinstance(bias, (tuple, list)) else (bias, None)
    combined, weights = torch.ops.deep_ep.elastic_combine(
        x, bias_0, bias_1, topk_weights, _elastic.tensors_of(handle), _elastic.numbers_of(handle), buffer.name, num_sms
    )
    return combined, None if topk_weights is None else weights
