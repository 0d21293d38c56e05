"""The operators of normal mode as functions: what a layer calls, with gradients, compiled or not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _names, errors
from ..config import Config
from . import _normal  # noqa: F401 - defines the operators

if TYPE_CHECKING:
    from ..buffer import Buffer

OptionalTensor = Tensor | None
_here = threading.local()  # .stream: of the region that this thread is in


class Handle(NamedTuple):
    """What dispatch leaves for combine: data only, good for any buffer of the same ranks.

    Attributes:
        rank_prefix_matrix: ``[R, R]`` int32.
        recv_src_idx: ``[N]`` int32.
        send_head: ``[T, R]`` int32.
        worst_case: the rows past those received hold anything.
    """

    rank_prefix_matrix: Tensor
    recv_src_idx: Tensor
    send_head: Tensor
    worst_case: bool


class Received(NamedTuple):
    """What dispatch delivers: N rows, by source rank, then by the token's index there.

    Attributes:
        x: ``[N, H]``, or with scales the pair of FP8 rows and scales ``[N, S]``.
        topk_idx: ``[N, K]``: local experts, -1 where another rank has the expert.
        topk_weights: ``[N, K]`` float32, 0 there.
        num_recv_tokens_per_expert: ``[L]`` int32 on the CPU; None in the worst case.
        handle: for combine.
    """

    x: Any
    topk_idx: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: OptionalTensor
    handle: Handle


def dispatch(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    buffer: Buffer | str,
    *,
    num_worst_tokens: int = 0,
    max_recv_tokens: int | None = None,
    config: Config | None = None,
) -> Received:
    """Sends each token once to every rank that holds one of its experts. Collective.

    Differentiable in BF16 rows and in the weights: backward is a combine.

    Args:
        x: BF16 ``[T, H]``, or a pair (FP8 e4m3 ``[T, H]``, scales ``[T, S]``).
        topk_idx: ``[T, K]`` int64 or int32; -1 selects nothing.
        topk_weights: ``[T, K]`` float32.
        num_experts: E, a multiple of the number of ranks.
        buffer: a Buffer, or its name.
        num_worst_tokens: > 0: outputs have that many rows, and the host does not wait for their number.
        max_recv_tokens: a bound of N, which a compiler may use; more rows are an error.
        config: None: the default.

    Raises:
        DeepEPError: a rank is late, dead or disagrees. Also a ValueError or TypeError for a wrong argument.
    """
    name = buffer if isinstance(buffer, str) else buffer.name
    rows, scales = x if isinstance(x, (tuple, list)) else (x, None)
    _mark(rows, scales, topk_idx, topk_weights)
    ops = torch.ops.deep_ep
    per_rank, per_node, per_expert, in_rank = ops.layout(topk_idx, num_experts, name)
    nodes = per_node if per_node.shape[0] else None
    given = (rows, scales, topk_idx, topk_weights, per_rank, nodes, in_rank, per_expert, name)
    numbers = None if config is None else list(config.numbers)
    counts = None
    if num_worst_tokens > 0:
        outputs = ops.dispatch_worst_case(*given, num_worst_tokens, numbers)
    else:
        outputs = ops.dispatch(*given, 1, max_recv_tokens, numbers)
        counts = outputs[4]
    recv_x, recv_scales, idx, weights = outputs[:4]
    handle = Handle(outputs[-3], outputs[-2], outputs[-1], num_worst_tokens > 0)
    return Received(recv_x if scales is None else (recv_x, recv_scales), idx, weights, counts, handle)


def combine(
    x: Tensor,
    handle: Handle,
    buffer: Buffer | str,
    topk_weights: OptionalTensor = None,
    bias: Tensor | tuple[OptionalTensor, OptionalTensor] | None = None,
    *,
    config: Config | None = None,
) -> tuple[Tensor, OptionalTensor]:
    """Sums, for each token, the rows that came from it. Collective.

    Differentiable in rows, weights and biases: backward is a cached dispatch.

    Args:
        x: BF16 ``[N, H]``, one row for each row that dispatch delivered.
        handle: of that dispatch.
        buffer: a Buffer, or its name.
        topk_weights: ``[N, K]`` float32, summed likewise, or None.
        bias: BF16 ``[T, H]``, or a pair of such; added to the sum.
        config: None: the default.

    Returns:
        BF16 ``[T, H]``, and ``[T, K]`` float32 or None.

    Raises:
        DeepEPError: a rank is late, dead or disagrees. Also a ValueError or TypeError for a wrong argument.
    """
    name = buffer if isinstance(buffer, str) else buffer.name
    biases = bias if isinstance(bias, (tuple, list)) else (bias, None)
    matrices = (handle.rank_prefix_matrix, handle.recv_src_idx, handle.send_head)  # torch 2.6 traces no slice of it
    _mark(x, topk_weights, *biases, *matrices)
    numbers = None if config is None else list(config.numbers)
    tail = name, handle.worst_case, numbers
    combined, weights = torch.ops.deep_ep.combine(x, *biases, topk_weights, *matrices, *tail)
    return combined, None if topk_weights is None else weights


class Overlap:
    """A stream beside the caller's; see `overlap`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def wait(self, *tensors: OptionalTensor) -> None:
        """Makes the current stream wait for the calls of the region.

        Args:
            tensors: results of those calls that the current stream is going to use.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(current)


_streams: dict[str, Any] = {}  # of buffers, by name


@contextlib.contextmanager
def overlap(buffer: Buffer | str) -> Iterator[Overlap]:
    """``with overlap(buffer) as region``: dispatch and combine inside run beside the caller's stream, backward too.

    They wait for what the caller's stream holds on entering. The caller goes on without them, and calls
    ``region.wait(results)`` before it uses their results. autograd runs the backward of each call on the stream of its
    forward, and lets only those wait for it that use its gradients: it runs beside the backward of what the caller did
    in between (shared experts, another micro-batch). In a compiled caller this is a graph break.

    On the CPU engine the caller's stream is its thread: calls return when they are done, and nothing runs beside them.
    """
    found = _names.find(buffer) if isinstance(buffer, str) else buffer
    if found.engine == "cpu":
        yield Overlap(None)
        return
    stream = _streams.get(found.name)
    if stream is None or stream.device != found.device:
        stream = _streams[found.name] = torch.cuda.Stream(found.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(found.device))
    before = getattr(_here, "stream", None)
    with torch.cuda.stream(stream):
        _here.stream = stream
        try:
            yield Overlap(stream)
        finally:
            _here.stream = before


def _mark(*tensors: OptionalTensor) -> None:
    """Inside of `overlap`: torch's allocator learns that the region's stream uses the caller's tensors."""
    if torch.compiler.is_compiling():
        return
    stream = getattr(_here, "stream", None)
    if stream is not None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


def communicate_once() -> Any:
    """For ``torch.utils.checkpoint.checkpoint(…, use_reentrant=False, context_fn=communicate_once)``.

    Results of dispatch and combine are kept; everything else is computed again in backward. Without it the exchanges
    of the recomputed part are made again, on all ranks alike.

    Raises:
        NotImplementedError: torch is older than 2.5, which has no policies of checkpoints.
    """
    try:
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    except ImportError:
        text = f"communicate_once: torch {torch.__version__} has no policies of checkpoints: use torch 2.5 or newer"
        raise errors.DeepEPNotImplementedError(errors.UNSUPPORTED, text) from None

    def policy(_: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        kept = getattr(operator, "namespace", "") == "deep_ep"
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
