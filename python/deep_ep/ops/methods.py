"""Buffer's methods while torch.compile traces their caller: the same results, by operators.

What operators cannot say (events, rows in the buffer's own memory) breaks the graph, and the method runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _abi, errors
from .._torch import opaque
from ..config import Config
from ..utils import EventOverlap
from . import elastic
from ._normal import handle_tensors

if TYPE_CHECKING:
    from .._elastic import Combined as ElasticCombined
    from .._elastic import Dispatched as ElasticDispatched
    from .._elastic import EPHandle
    from .._low_latency import Combined as LowLatencyCombined
    from .._low_latency import Dispatched as LowLatencyDispatched
    from .._low_latency import Fp4Dispatched
    from .._normal import Dispatched
    from ..buffer import Buffer
    from ..elastic import ElasticBuffer

OptionalTensor = Tensor | None
Hook = Callable[[], None]


@opaque
def break_graph(method: str, what: str, kind: str = "Buffer") -> None:
    """A graph break for dynamo. It is reached where nothing can run between graphs, as in torch.export."""
    text = f"{kind}.{method}: there is no operator for {what}, which torch.export needs"
    raise errors.DeepEPNotImplementedError(errors.UNSUPPORTED, text)


def _check_order(method: str, previous_event: Any, async_finish: Any, allocate_on_comm_stream: Any = False) -> None:
    if previous_event is not None or async_finish or allocate_on_comm_stream:
        break_graph(method, "events (previous_event, async_finish, allocate_on_comm_stream)")


def _numbers(config: Config | None) -> list[int] | None:
    return None if config is None else list(config.numbers)


def get_dispatch_layout(
    buffer: Buffer,
    topk_idx: Tensor,
    num_experts: int,
    previous_event: Any,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> tuple[Tensor, OptionalTensor, Tensor, Tensor, EventOverlap]:
    """Buffer.get_dispatch_layout."""
    _check_order("get_dispatch_layout", previous_event, async_finish, allocate_on_comm_stream)
    per_rank, per_node, per_expert, in_rank = torch.ops.deep_ep.layout(topk_idx, num_experts, buffer.name)
    return per_rank, per_node if buffer.num_nodes > 1 else None, per_expert, in_rank, EventOverlap()


def dispatch(
    buffer: Buffer,
    x: Any,
    handle: Sequence[Any] | None,
    num_tokens_per_rank: OptionalTensor,
    num_tokens_per_rdma_rank: OptionalTensor,
    is_token_in_rank: OptionalTensor,
    num_tokens_per_expert: OptionalTensor,
    topk_idx: OptionalTensor,
    topk_weights: OptionalTensor,
    expert_alignment: int,
    num_worst_tokens: int,
    config: Config | None,
    previous_event: Any,
    async_finish: bool,
    allocate_on_comm_stream: bool,
    global_expert_id_offset: int,
) -> Dispatched:
    """Buffer.dispatch."""
    _check_order("dispatch", previous_event, async_finish, allocate_on_comm_stream)
    rows, scales = x if isinstance(x, (tuple, list)) else (x, None)
    if handle is not None:
        if topk_idx is not None or topk_weights is not None:
            raise errors.value_error("topk_idx", "top-k with handle", "no topk_idx and no topk_weights with a handle")
        with torch.no_grad():
            recv_x, recv_scales = torch.ops.deep_ep.dispatch_cached(
                rows, scales, *handle_tensors(handle), buffer.name, _numbers(config)
            )
        received = recv_x if scales is None else (recv_x, recv_scales)
        return received, None, None, None, None, EventOverlap()
    inputs = (
        *(rows, scales, topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank),
        *(num_tokens_per_expert, buffer.name),
    )
    counts: list[int] = []
    with torch.no_grad():
        if num_worst_tokens > 0:
            outputs = torch.ops.deep_ep.dispatch_worst_case(*inputs, num_worst_tokens, _numbers(config))
        else:
            outputs = torch.ops.deep_ep.dispatch(*inputs, expert_alignment, None, _numbers(config))
            counts = outputs[4].tolist()
    recv_x, recv_scales, idx, weights = outputs[:4]
    if topk_idx is None:
        idx = weights = None
    elif global_expert_id_offset:
        idx = torch.where(idx >= 0, idx + global_expert_id_offset, idx)
    received = recv_x if scales is None else (recv_x, recv_scales)
    matrix, source, head = outputs[-3:]
    entries = full_handle(buffer, matrix, source, head, is_token_in_rank)
    return received, idx, weights, counts, entries, EventOverlap()


def full_handle(buffer: Buffer, matrix: Tensor, source: Tensor, head: Tensor, in_rank: Any) -> tuple[Tensor, ...]:
    """The handle of Buffer.dispatch, of the tensors that operators return; see HandleTensors.to_tuple."""
    from .._normal import HandleTensors

    return HandleTensors(matrix, head, source, in_rank).to_tuple(buffer.num_nodes, buffer.num_nvl_peers, buffer.rank)


def combine(
    buffer: Buffer,
    x: Tensor,
    handle: Sequence[Any],
    topk_weights: OptionalTensor,
    bias: Any,
    config: Config | None,
    previous_event: Any,
    async_finish: bool,
    allocate_on_comm_stream: bool,
) -> tuple[Tensor, OptionalTensor, EventOverlap]:
    """Buffer.combine."""
    _check_order("combine", previous_event, async_finish, allocate_on_comm_stream)
    bias_0, bias_1 = bias if isinstance(bias, (tuple, list)) else (bias, None)
    with torch.no_grad():
        combined, weights = torch.ops.deep_ep.combine(
            x, bias_0, bias_1, topk_weights, *handle_tensors(handle), buffer.name, False, _numbers(config)
        )
    return combined, None if topk_weights is None else weights, EventOverlap()


def low_latency_dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    bound: int,
    num_experts: int,
    recv_stats: OptionalTensor,
    wait_stats: OptionalTensor,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    async_finish: bool,
    return_recv_hook: bool,
    topk_weights: OptionalTensor,
) -> LowLatencyDispatched:
    """Buffer.low_latency_dispatch."""
    _check_order("low_latency_dispatch", None, async_finish)
    formats = bool(use_fp8), bool(round_scale), bool(use_ue8m0)
    inputs = (x, topk_idx, bound, num_experts, buffer.name, topk_weights, recv_stats, wait_stats, *formats)
    hook: Hook | None = None
    with torch.no_grad():
        if return_recv_hook:
            *outputs, ticket = torch.ops.deep_ep.low_latency_dispatch_send(*inputs)

            def hook() -> None:
                torch.ops.deep_ep.low_latency_dispatch_recv(
                    *outputs, ticket, x, topk_idx, buffer.name, topk_weights, recv_stats, wait_stats
                )
        else:
            outputs = torch.ops.deep_ep.low_latency_dispatch(*inputs)
    rows, scales, recv_count, src_info, layout_range = outputs
    handle = (src_info, layout_range, bound, x.shape[1], num_experts)
    return (rows, scales) if use_fp8 else rows, recv_count, handle, EventOverlap(), hook


def low_latency_dispatch_fp4(
    buffer: Buffer,
    x: Tensor,
    scales: OptionalTensor,
    topk_idx: Tensor,
    bound: int,
    num_experts: int,
    recv_stats: OptionalTensor,
    wait_stats: OptionalTensor,
    async_finish: bool,
    return_recv_hook: bool,
    topk_weights: OptionalTensor,
    fp4: int,
) -> Fp4Dispatched:
    """Buffer.low_latency_dispatch_fp4, and with FP4_CAST low_latency_dispatch of NVFP4: `scales` is the factor."""
    packed = fp4 == _abi.FP4_PACKED
    _check_order("low_latency_dispatch_fp4" if packed else "low_latency_dispatch", None, async_finish)
    ops = torch.ops.deep_ep
    inputs = (x, scales, topk_idx, bound, num_experts, buffer.name, topk_weights, recv_stats, wait_stats)
    hook: Hook | None = None
    with torch.no_grad():
        if return_recv_hook:
            send = ops.low_latency_dispatch_fp4_send if packed else ops.low_latency_dispatch_nvfp4_send
            *outputs, ticket = send(*inputs)

            def hook() -> None:
                ops.low_latency_dispatch_recv(
                    *outputs, ticket, x, topk_idx, buffer.name, topk_weights, recv_stats, wait_stats, scales
                )
        else:
            outputs = (ops.low_latency_dispatch_fp4 if packed else ops.low_latency_dispatch_nvfp4)(*inputs)
    rows, recv_scales, recv_count, src_info, layout_range = outputs
    hidden = x.shape[1] * 2 if packed else x.shape[1]
    handle = (src_info, layout_range, bound, hidden, num_experts)
    return rows, recv_scales, recv_count, handle, EventOverlap(), hook


def low_latency_combine(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: Sequence[Any],
    use_logfmt: bool,
    zero_copy: bool,
    async_finish: bool,
    return_recv_hook: bool,
    out: OptionalTensor,
    wait_stats: OptionalTensor,
    unreduced: bool,
) -> LowLatencyCombined:
    """Buffer.low_latency_combine."""
    _check_order("low_latency_combine", None, async_finish)
    if zero_copy:
        break_graph("low_latency_combine", "rows in the buffer's own memory (zero_copy)")
    if return_recv_hook and out is not None:
        break_graph("low_latency_combine", "halves with out")
    flags = bool(use_logfmt), bool(unreduced)
    inputs = (x, topk_idx, topk_weights, *handle, buffer.name, wait_stats, *flags)
    hook: Hook | None = None
    with torch.no_grad():
        if return_recv_hook:
            combined, ticket = torch.ops.deep_ep.low_latency_combine_send(*inputs)

            def hook() -> None:
                torch.ops.deep_ep.low_latency_combine_recv(
                    combined, ticket, x, topk_idx, topk_weights, handle[0], handle[1], buffer.name, wait_stats
                )
        else:  # torch 2.11's inductor refuses low_latency_combine: a result beside optional statistics that it adds to
            combined = x.new_empty((topk_idx.shape[0], x.shape[2]), dtype=torch.bfloat16) if out is None else out
            torch.ops.deep_ep.low_latency_combine_out(combined, *inputs)
    return combined, EventOverlap(), hook


def elastic_dispatch(
    buffer: ElasticBuffer,
    x: Any,
    topk_idx: OptionalTensor,
    topk_weights: OptionalTensor,
    stats: OptionalTensor,
    num_experts: int | None,
    num_max_tokens: int | None,
    alignment: int | None,
    num_sms: int,
    num_qps: int,
    previous_event: Any,
    before_epilogue: Any,
    is_async: bool,
    on_comm: bool,
    handle: EPHandle | None,
    copies_topk: bool,
    cpu_sync: bool | None,
    expand: bool,
    padding: bool,
    columns: bool,
) -> ElasticDispatched:
    """ElasticBuffer.dispatch."""
    _check_elastic_order("dispatch", previous_event, before_epilogue, is_async, on_comm)
    with torch.no_grad():
        recv_x, idx, weights, made = elastic.elastic_dispatch(
            buffer, x, topk_idx, topk_weights, num_experts=num_experts, num_max_tokens_per_rank=num_max_tokens,
            expert_alignment=alignment, handle=handle, do_cpu_sync=cpu_sync, do_expand=expand, do_zero_padding=padding,
            use_tma_aligned_col_major_sf=columns, cumulative_local_expert_recv_stats=stats, num_sms=num_sms,
        )  # fmt: skip
        if copies_topk and handle is None:
            made.topk_idx = made.topk_idx.clone()
    return recv_x, idx, weights, made, EventOverlap()


def elastic_combine(
    buffer: ElasticBuffer,
    x: Tensor,
    handle: EPHandle,
    topk_weights: OptionalTensor,
    bias: Any,
    num_sms: int,
    num_qps: int,
    previous_event: Any,
    before_epilogue: Any,
    is_async: bool,
    on_comm: bool,
) -> ElasticCombined:
    """ElasticBuffer.combine."""
    _check_elastic_order("combine", previous_event, before_epilogue, is_async, on_comm)
    with torch.no_grad():
        combined, weights = elastic.elastic_combine(buffer, x, handle, topk_weights, bias, num_sms=num_sms)
    return combined, weights, EventOverlap()


def _check_elastic_order(method: str, previous: Any, before_epilogue: Any, is_async: Any, on_comm: Any) -> None:
    if previous is not None or before_epilogue is not None or is_async or on_comm:
        text = "previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream"
        break_graph(method, f"events ({text})", "ElasticBuffer")
