"""Dispatch and combine of V2. ElasticBuffer has the documentation of each call."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
from dataclasses import dataclass, field
from typing import Any

from . import _abi, _torch
from ._core import Core
from ._normal import NormalMode
from ._normal_face import EXCHANGE
from ._ordering import Ordering
from ._structs import Writer
from ._torch import BF16, FLOAT32, INDEX_TYPES, INT32, OptionalTensor, Tensor
from .errors import assertion, check_flag, check_int, type_error, value_error
from .utils import EventHandle, EventOverlap

MAX_ALIGNMENT = 1 << 24
MAX_ROWS = 2**31 - 1
SCALE_ALIGNMENT = 4  # rows of a column of scales: 16 bytes
Rows = Tensor | tuple[Tensor, Tensor]
Event = EventHandle | EventOverlap | None
Dispatched = tuple[Rows, OptionalTensor, OptionalTensor, "EPHandle", EventOverlap]  # what dispatch returns
Combined = tuple[Tensor, OptionalTensor, EventOverlap]  # what combine returns

TENSORS = (
    "topk_idx",
    "psum_num_recv_tokens_per_scaleup_rank",
    "psum_num_recv_tokens_per_expert",
    "num_unaligned_recv_tokens_per_expert",
    "recv_src_metadata",
    "dst_buffer_slot_idx",
    "token_metadata_at_forward",
    "channel_linked_list",
)


REFERENCE = "_reference"  # attribute of a handle that holds the caller's topk_idx: the tensor, and its version


def refer(handle: EPHandle) -> None:
    """Notes which contents of topk_idx the handle is of, where torch counts a tensor's versions."""
    idx = handle.topk_idx
    if not idx.is_inference():
        setattr(handle, REFERENCE, (idx, idx._version))


def check_reference(handle: object) -> None:
    """Raises where topk_idx, of which the handle has no copy, was written to since the dispatch."""
    idx, version = getattr(handle, REFERENCE, (None, 0))
    if idx is not None and idx is handle.topk_idx and idx._version != version:  # type: ignore[attr-defined]
        assertion(False, "handle.topk_idx was written to after the dispatch, whose indices it holds without a copy")


# Numbers of a handle that its calls pass on, and the least that each may be.
_NUMBERS = (
    ("num_experts", 0),
    ("expert_alignment", 0),
    ("num_max_tokens_per_rank", 0),
    ("num_recv_tokens", 0),
    ("num_expanded_tokens", 0),
)

_HANDLE = Writer(
    _abi.Handle,
    "magic version num_ranks num_tokens num_recv_tokens rank_prefix_matrix send_head exchange routing num_topk "
    "num_experts index_type num_max_tokens expert_alignment num_expanded_tokens topk_idx dst_slot "
    "psum_recv_tokens_per_rank psum_recv_tokens_per_expert num_recv_tokens_per_expert recv_src_metadata",
)
_NOTIFY = Writer(
    _abi.Notify,
    "num_tokens num_topk num_experts expert_alignment num_worst_tokens x_type num_scales hidden handle routing "
    "index_type num_max_tokens num_worst_expanded topk_idx cumulative_recv_stats num_scaleup_ranks topk_idx_copy",
)
_DISPATCH = Writer(
    _abi.DispatchArgs,
    "cached token x_type num_scales hidden num_tokens index_type num_worst_tokens recv_segment recv_segment_offset x "
    "x_scales scale_token_stride scale_stride topk_weights handle recv_x recv_x_scales recv_topk_idx recv_topk_weights "
    "recv_scale_token_stride recv_scale_stride do_zero_padding",
)
_COMBINE = Writer(
    _abi.CombineArgs,
    "num_topk hidden x_segment x topk_weights bias handle combined_x combined_topk_weights num_x_rows unreduced",
)


def _at(tensor: OptionalTensor) -> int:
    """The address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


class EPHandle:
    """What a dispatch leaves for combine and for cached dispatch. Data only: valid on any buffer of the same ranks.

    T tokens of this rank, K choices, R ranks, L local experts, M `num_max_tokens_per_rank`, n rows received in the
    plain layout. Attributes may be assigned: a call uses what the handle holds then.

    Attributes:
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        topk_idx: ``[T, K]``, the dispatch's or a copy of it.
        num_recv_tokens, num_expanded_tokens: rows of recv_x, both in both layouts: exact, or without CPU sync a bound.
        num_recv_tokens_per_expert_list: ints ``[L]``, rounded up to `expert_alignment`; empty without CPU sync.
        psum_num_recv_tokens_per_scaleup_rank: int32 ``[U]``, U ranks of a logical domain: rows from the ranks with
            places 0..i in their domains; the last entry is n.
        psum_num_recv_tokens_per_expert: int32 ``[L]``. Plain: sum of the rounded counts of experts 0..e. Expanded: the
            first row of the expert plus its count.
        num_unaligned_recv_tokens_per_expert: int32 ``[L]``, the counts.
        recv_src_metadata: int32 ``[n or M*R, K+2]``: of plain row i the source rank * M + token; the rank * K + the
            token's last choice here; expanded: the row of each choice, -1 where that is not here (plain: undefined).
        dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list: int32, for the library alone.
        cached_recv_src_metadata_before_sort: None: rows come in order.
    """

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        num_unaligned_recv_tokens_per_expert: Tensor,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: OptionalTensor = None,
        channel_linked_list: OptionalTensor = None,
    ) -> None:
        assertion(topk_idx is not None, "argument topk_idx: got None, allowed a tensor")
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward  # rank_prefix_matrix of deepep_handle
        self.channel_linked_list = channel_linked_list  # send_head of deepep_handle
        self.cached_recv_src_metadata_before_sort: OptionalTensor = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this handle's own topk_idx, for copies and pickles."""
        return {name: value for name, value in vars(self).items() if name != REFERENCE}

    def deterministic_sort(self, *_tensors: Any, **_named: Any) -> None:
        """Nothing is left to sort: rows come in the order of (source rank, token)."""


def _flatten_handle(handle: EPHandle) -> tuple[list[Any], Any]:
    fields = handle.__getstate__()
    return [fields.pop(name) for name in TENSORS], fields


def _unflatten_handle(tensors: Any, fields: Any) -> EPHandle:
    handle = EPHandle.__new__(EPHandle)
    vars(handle).update(fields)
    vars(handle).update(zip(TENSORS, tensors, strict=True))
    return handle


_torch.register_pytree(EPHandle, _flatten_handle, _unflatten_handle)


def check_beside_handle(
    handle: EPHandle, topk_idx: Any, cpu_sync: Any, stats: Any, num_experts: Any, alignment: Any, num_max_tokens: Any
) -> None:
    """Raises where arguments beside a handle say something else than it, or ask for counts."""
    assertion(topk_idx is None, "argument topk_idx: got a tensor, allowed None with a handle")
    assertion(not check_flag("do_cpu_sync", cpu_sync), "argument do_cpu_sync: got True, allowed False with a handle")
    if stats is not None:
        raise value_error("cumulative_local_expert_recv_stats", "a tensor", "None with a handle")
    for name, value in (
        ("num_experts", num_experts),
        ("expert_alignment", alignment),
        ("num_max_tokens_per_rank", num_max_tokens),
    ):
        own = getattr(handle, name, None)
        if value is not None and check_int(name, value) != own:
            assertion(False, f"argument {name}: got {value}, allowed {own}, as in the handle")


def event_of(name: str, event: object) -> EventHandle | None:
    """The point in the stream of an EventHandle, an EventOverlap, or None."""
    if event is None or isinstance(event, EventHandle):
        return event
    inner = getattr(event, "event", event)
    if inner is not None and not isinstance(inner, EventHandle):
        raise type_error(name, type(event).__name__, "an EventHandle, an EventOverlap or None")
    return inner


def avoids_record_stream() -> bool:
    """Whether events keep tensors, in place of torch's allocator (EP_AVOID_RECORD_STREAM)."""
    return os.environ.get("EP_AVOID_RECORD_STREAM", "0") not in ("", "0")


class Order(Ordering):
    """V2's rules of ordering: any call may have its outputs in the communication stream's memory."""

    def __init__(self, core: Core, previous_event: Event, is_async: bool, on_comm: bool) -> None:
        previous = event_of("previous_event", previous_event)
        on_comm = check_flag("allocate_on_comm_stream", on_comm)
        is_async = check_flag("async_with_compute_stream", is_async)
        assertion(previous is None or on_comm, "previous_event needs allocate_on_comm_stream=True")
        if not core.host_stream:
            same = core.current_stream() == core.comm_stream_address
            assertion(not same, "the current stream is the buffer's communication stream, which would wait for itself")
        super().__init__(core, None if previous is None else EventOverlap(previous), is_async, False)
        if on_comm and not core.host_stream:
            self.on_comm = True
        self.extra: tuple[OptionalTensor, ...] = ()

    def wait_too(self, event: Event) -> None:
        """The stream of the call waits for another event before it; with the CPU engine the caller does."""
        handle = event_of("previous_event_before_epilogue", event)
        if handle is None:
            return
        if self.core.host_stream or not (self.async_finish or self.on_comm):  # such a call runs on the caller's stream
            handle.current_stream_wait()
            return
        with _torch.stream_context(self.core.comm_stream):
            handle.current_stream_wait()

    def finish(
        self, function: Any, values: tuple[Any, ...], config: Any, held: tuple[OptionalTensor, ...]
    ) -> EventOverlap:
        """Launches the call that ends the operation."""
        event = self.last(function, *values, config=config, held=held)
        if self.extra and event.event is not None:
            event.extra_tensors = event.event._held = self.extra  # whichever of the two the caller keeps
        return event

    def _keep(self, tensors: tuple[OptionalTensor, ...]) -> None:
        if self.async_finish and avoids_record_stream():
            self.extra = tensors  # the event keeps them, as the variable asks
            return
        super()._keep(tensors)


class Payload:
    """x of dispatch: rows of any dtype, which are moved as bytes, and scales if it is a pair."""

    __slots__ = ("x", "scales", "num_tokens", "num_scales", "x_type", "hidden")

    def __init__(self, x: object, core: Core) -> None:
        self.scales: OptionalTensor = None
        self.num_scales = 0
        pair = isinstance(x, (tuple, list))
        if pair and len(x) != 2:  # type: ignore[arg-type]
            raise value_error("x", f"a {type(x).__name__} of {len(x)}", "a tensor, or a pair (rows, scales)")  # type: ignore[arg-type]
        rows = x[0] if pair else x  # type: ignore[index]
        dtype = rows.dtype if isinstance(rows, Tensor) else BF16
        self.x = _torch.check("x[0]" if pair else "x", rows, core.device, (dtype,), (None, None))
        self.num_tokens = int(self.x.shape[0])
        self.x_type, self.hidden = _torch.items(self.x)
        if pair:
            scales = x[1]  # type: ignore[index]
            kind = scales.dtype if isinstance(scales, Tensor) else FLOAT32
            if kind.itemsize != 4:
                raise type_error("x[1]", f"dtype {kind}", "a dtype of 4 bytes")
            shape = (self.num_tokens, None)
            self.scales = _torch.check("x[1]", scales, core.device, (kind,), shape, contiguous=False)
            self.num_scales = int(self.scales.shape[1])


class Shape:
    """The numbers of a dispatch, checked."""

    __slots__ = ("num_topk", "num_experts", "num_local", "alignment", "num_max", "expand", "ranks")

    def __init__(self, num_topk: int, num_experts: int, alignment: int, num_max: int, expand: bool, ranks: int) -> None:
        self.num_topk, self.num_experts, self.num_local = num_topk, num_experts, num_experts // ranks
        self.alignment, self.num_max, self.expand, self.ranks = alignment, max(1, num_max), expand, ranks

    def bound(self) -> int:
        """Tokens that may come, whatever the routing."""
        return self.ranks * self.num_max

    def expanded_bound(self) -> int:
        """Rows of the expanded layout, whatever the routing."""
        most = self.bound() * min(self.num_topk, self.num_local) + (self.alignment - 1) * self.num_local
        return -(-most // self.alignment) * self.alignment

    def worst_rows(self) -> int:
        """Rows of recv_x that has room for any routing."""
        return self.expanded_bound() if self.expand else self.bound()

    def most_rows(self) -> int:
        """Rows that a dispatch with counts may bring, tokens that name an expert twice among them."""
        most = self.bound() * max(1, self.num_topk) + (self.alignment - 1) * self.num_local
        return -(-most // max(1, self.alignment)) * max(1, self.alignment) if self.expand else self.bound()

    def check_worst(self) -> None:
        """Raises where room for any routing is more than the library can number, before memory for it is asked for."""
        most = MAX_ROWS // max(self.ranks, self.num_topk)
        if self.num_max > most:
            raise value_error("num_max_tokens_per_rank", self.num_max, f"at most {most}")
        rows = self.worst_rows()
        if rows > MAX_ROWS:
            raise value_error(
                "do_cpu_sync", f"False, with room for {rows} rows", f"True where over {MAX_ROWS} may come"
            )


@dataclass
class Sending:
    """One dispatch: what it sends and how, and how far it is."""

    payload: Payload
    weights: OptionalTensor
    shape: Shape
    order: Order
    config: Any
    padding: bool  # rows between the experts' groups become 0
    columns: bool  # received scales are column-major
    topk_idx: OptionalTensor = None  # without a handle: the caller's
    copies_topk: bool = False
    stats: OptionalTensor = None
    worst: bool = False  # outputs have room for any routing, and no host waits for counts
    exchange: Any = field(default_factory=ctypes.c_uint64)  # the library writes its number here; 0 with a handle
    notify: Any = None  # deepep_notify of one that the last call brings with it

    @property
    def token(self) -> int:
        """The number of the exchange of counts."""
        return int(self.exchange.value)


class ElasticMode:
    """The calls of one ElasticBuffer."""

    def __init__(self, core: Core, normal: NormalMode, multiple_reduction: bool, hybrid: bool) -> None:
        self._core = core
        self._normal, self.row_cache = normal, normal.row_cache
        self.rows_for = functools.partial(normal.row_cache.place, core)
        self._unreduced = not multiple_reduction
        self._direct = not hybrid

    # ---- dispatch

    def send(self, sending: Sending, num_sms: int) -> Dispatched:
        """A dispatch without a handle. `num_sms` is for its handle."""
        try:
            return self.finish(sending, self._begin(sending, num_sms))
        except BaseException as error:
            cut_short(sending, error)
            raise

    def begin(self, sending: Sending, num_sms: int) -> EPHandle:
        """The first half of one: launches the exchange of counts, and returns the handle."""
        try:
            return self._begin(sending, num_sms)
        except BaseException as error:
            cut_short(sending, error)
            raise

    def _begin(self, sending: Sending, num_sms: int) -> EPHandle:
        """Launches the exchange of counts, unless no host waits for them: it goes with the rows then."""
        core, shape, payload, order = self._core, sending.shape, sending.payload, sending.order
        topk_idx = sending.topk_idx
        assert topk_idx is not None
        ranks, num_tokens, local = core.group_size, payload.num_tokens, shape.num_local
        core.open_rows()
        with order.context:
            matrix = _torch.empty((ranks, ranks), INT32, core.device)
            head, slots = _torch.like(matrix, num_tokens, ranks), _torch.like(matrix, num_tokens, shape.num_topk)
            per_rank = _torch.like(matrix, self.num_scaleup())
            per_expert, unaligned = _torch.like(matrix, local), _torch.like(matrix, local)
            metadata = _torch.like(matrix, shape.bound() if sending.worst else 0, shape.num_topk + 2)
            kept = _torch.empty(topk_idx.shape, topk_idx.dtype, core.device) if sending.copies_topk else topk_idx
        rows = shape.worst_rows() if sending.worst else 0
        handle = EPHandle(
            shape.expand, shape.num_experts, shape.alignment, shape.num_max, num_sms, kept, rows, rows, [],
            per_rank, per_expert, unaligned, metadata, slots, matrix, head,
        )  # fmt: skip
        native = self._native(handle, 0, 0)
        native.topk_idx = topk_idx.data_ptr()
        notify = _NOTIFY(
            num_tokens, shape.num_topk, shape.num_experts, shape.alignment, shape.bound() if sending.worst else 0,
            payload.x_type, payload.num_scales, payload.hidden, ctypes.addressof(native), native.routing,
            native.index_type, shape.num_max, rows if shape.expand else 0, topk_idx.data_ptr(), _at(sending.stats),
            self.num_scaleup(), kept.data_ptr() if sending.copies_topk else 0,
        )  # fmt: skip
        if sending.worst:
            sending.notify = notify
            return handle
        function = core.native.lib.with_gil.deepep_notify_counts
        held = (topk_idx, sending.stats, kept, *library_tensors(handle))
        order.first(function, ctypes.byref(notify), ctypes.byref(sending.exchange), config=sending.config, held=held)
        setattr(matrix, EXCHANGE, native.exchange)
        return handle

    def finish(self, sending: Sending, handle: EPHandle) -> Dispatched:
        """The second half: waits for the counts, unless the outputs have room for any routing, and sends the rows.

        An exception is for the caller to follow by cut_short.
        """
        order, shape, topk_idx = sending.order, sending.shape, sending.topk_idx
        assert topk_idx is not None
        tokens = shape.bound()
        if not sending.worst:
            tokens, per_expert = self._core.native.wait_counts(sending.token, shape.num_local)
            handle.num_recv_tokens_per_expert_list = per_expert
            handle.num_recv_tokens = handle.num_expanded_tokens = sum(per_expert) if shape.expand else tokens
            with order.context:
                handle.recv_src_metadata = _torch.like(handle.recv_src_metadata, tokens, shape.num_topk + 2)
        rows = handle.num_recv_tokens
        native = self._native(handle, tokens, rows if shape.expand else 0)
        native.topk_idx = topk_idx.data_ptr()
        return self._send(sending, handle, native, rows)

    def resend(self, sending: Sending, handle: EPHandle) -> Dispatched:
        """Sends other rows as the handle says."""
        expand = sending.shape.expand
        num_tokens, arrived = int(handle.topk_idx.shape[0]), int(handle.recv_src_metadata.shape[0])
        if num_tokens != sending.payload.num_tokens:
            raise value_error("x", f"{sending.payload.num_tokens} rows", f"{num_tokens} rows, as in the handle")
        allowed = "allowed False with the handle of a dispatch without do_expand"
        assertion(not expand or bool(handle.do_expand), f"argument do_expand: got True, {allowed}")
        rows = handle.num_recv_tokens if expand or not handle.do_expand else arrived
        most = max(arrived, sending.shape.most_rows())
        if rows > most:  # before memory is asked for
            raise value_error("handle.num_recv_tokens", rows, f"at most {most}, from the handle's other numbers")
        native = self._native(handle, arrived if expand else rows, rows if expand else 0)
        native.routing = _abi.ROUTING_EXPANDED if expand else _abi.ROUTING_PLAIN
        return self._send(sending, handle, native, rows)

    def _send(self, sending: Sending, handle: EPHandle, native: Any, rows: int) -> Dispatched:
        """The second step: allocates what is received, and launches."""
        core, shape, payload, order = self._core, sending.shape, sending.payload, sending.order
        weights, num_topk = sending.weights, shape.num_topk
        with order.context:
            x, segment, offset = self._rows(payload.x, rows)
            scales, strides = _received_scales(payload, rows, sending.columns)
            topk_idx = None if shape.expand else _torch.like(handle.topk_idx, rows, num_topk)
            recv_weights = None
            if weights is not None:
                recv_weights = _torch.like(weights, rows) if shape.expand else _torch.like(weights, rows, num_topk)
        args = _DISPATCH(
            int(sending.token == 0 and sending.notify is None), sending.token, payload.x_type, payload.num_scales,
            payload.hidden, payload.num_tokens, native.index_type, shape.bound() if sending.worst else 0,
            segment, offset, payload.x.data_ptr(), _at(payload.scales),
            *(payload.scales.stride() if payload.scales is not None else (0, 0)), _at(weights),
            ctypes.addressof(native), x.data_ptr(), _at(scales), _at(topk_idx), _at(recv_weights), *strides,
            int(sending.padding),
        )  # fmt: skip
        held = (
            payload.x, payload.scales, weights, sending.topk_idx, sending.stats, handle.topk_idx,
            *library_tensors(handle), x, scales, topk_idx, recv_weights,
        )  # fmt: skip
        if sending.notify is None:
            function = core.native.lib.with_gil.deepep_dispatch
            values: tuple[Any, ...] = (ctypes.byref(args),)
        else:
            sending.notify.handle = ctypes.addressof(native)
            function = core.native.lib.with_gil.deepep_dispatch_at_once
            values = ctypes.byref(sending.notify), ctypes.byref(args)
        event = order.finish(function, values, sending.config, held)
        if sending.notify is not None:
            setattr(handle.token_metadata_at_forward, EXCHANGE, native.exchange)
        return (x if scales is None else (x, scales)), topk_idx, recv_weights, handle, event

    # ---- combine

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: OptionalTensor,
        bias: object,
        num_sms: int,
        order: Order,
    ) -> Combined:
        """ElasticBuffer.combine; the handle is checked."""
        core = self._core
        num_tokens, num_topk = (int(n) for n in handle.topk_idx.shape)
        arrived = int(handle.recv_src_metadata.shape[0])
        expand = bool(handle.do_expand)
        _torch.check("x", x, core.device, (BF16,), (None if expand else arrived, None))
        rows, hidden = (int(n) for n in x.shape)
        biases = self._biases(bias, num_tokens, hidden)
        if topk_weights is not None:
            shape = (rows,) if expand else (rows, num_topk)
            _torch.check("topk_weights", topk_weights, core.device, (FLOAT32,), shape)
        config = self.config(1, num_sms)
        with order.context:
            combined = self._normal.output_like(x, num_tokens, hidden)
            weights = None if topk_weights is None else _torch.like(topk_weights, num_tokens, num_topk)
        native = self._native(handle, arrived, rows if expand else 0)
        args = _COMBINE(
            0 if topk_weights is None else num_topk, hidden, -1, x.data_ptr(), _at(topk_weights), _at(biases[0]),
            _at(biases[1]), ctypes.addressof(native), combined.data_ptr(), _at(weights), rows if expand else 0,
            self.apart(expand),
        )  # fmt: skip
        held = (x, topk_weights, *biases, combined, weights, handle.topk_idx, *library_tensors(handle))
        event = order.finish(core.native.lib.with_gil.deepep_combine, (ctypes.byref(args),), config, held)
        return combined, weights, event

    # ---- helpers

    def num_scaleup(self) -> int:
        """Ranks of a logical domain."""
        core = self._core
        return core.group_size if self._direct else core.group_size // core.num_nodes

    def check_handle(self, handle: object) -> None:
        """Raises unless every tensor of the handle is as a dispatch makes it."""
        if not isinstance(handle, EPHandle):
            raise type_error("handle", type(handle).__name__, "the EPHandle that dispatch returned")
        core = self._core
        ranks, device, ordinal = core.group_size, core.device, core.ordinal
        check_flag("handle.do_expand", handle.do_expand)
        for name, least in _NUMBERS:
            check_int(f"handle.{name}", getattr(handle, name), least)
        local = handle.num_experts // ranks
        idx = handle.topk_idx
        if not (
            type(idx) is Tensor
            and idx.dtype in INDEX_TYPES
            and idx.dim() == 2
            and _torch.plain(idx, idx.dtype, ordinal, idx.shape)
        ):
            _torch.check("handle.topk_idx", idx, device, tuple(INDEX_TYPES), (None, None))
        num_tokens, num_topk = idx.shape
        arrived = _torch.length(handle.recv_src_metadata)
        psum = handle.psum_num_recv_tokens_per_scaleup_rank  # of the mode of the buffer that made it
        num_psum = psum.numel() if isinstance(psum, Tensor) else 0
        if num_psum not in (ranks, ranks // core.num_nodes):
            num_psum = self.num_scaleup()
        shapes = (
            (num_psum,), (local,), (local,), (arrived, num_topk + 2), (num_tokens, num_topk), (ranks, ranks),
            (num_tokens, ranks),
        )  # fmt: skip
        for name, shape in zip(TENSORS[1:], shapes, strict=True):
            tensor = getattr(handle, name)
            if not _torch.plain(tensor, INT32, ordinal, shape):
                _torch.check(f"handle.{name}", tensor, device, (INT32,), shape)

    def _native(self, handle: EPHandle, num_recv_tokens: int, num_expanded_tokens: int) -> Any:
        """deepep_handle over the handle's tensors."""
        matrix, head = handle.token_metadata_at_forward, handle.channel_linked_list
        assert matrix is not None and head is not None
        num_tokens, num_topk = handle.topk_idx.shape
        return _HANDLE(
            _abi.HANDLE_MAGIC, _abi.HANDLE_VERSION, self._core.group_size, num_tokens, num_recv_tokens,
            matrix.data_ptr(), head.data_ptr(), getattr(matrix, EXCHANGE, 0),
            _abi.ROUTING_EXPANDED if handle.do_expand else _abi.ROUTING_PLAIN, num_topk, handle.num_experts,
            INDEX_TYPES[handle.topk_idx.dtype], max(1, handle.num_max_tokens_per_rank), handle.expert_alignment,
            num_expanded_tokens, handle.topk_idx.data_ptr(), handle.dst_buffer_slot_idx.data_ptr(),
            handle.psum_num_recv_tokens_per_scaleup_rank.data_ptr(),
            handle.psum_num_recv_tokens_per_expert.data_ptr(),
            handle.num_unaligned_recv_tokens_per_expert.data_ptr(), handle.recv_src_metadata.data_ptr(),
        )  # fmt: skip

    def config(self, kind: int, num_sms: int) -> Any:
        """deepep_config; on the CPU engine the number of SMs means nothing."""
        return self._normal._config(None, kind, 0 if self._core.host_stream else num_sms)

    def _rows(self, x: Tensor, rows: int) -> tuple[Tensor, int, int]:
        recv_x, segment, offset = self.rows_for(x, rows)
        return _torch.like(x, rows, int(x.shape[1])) if recv_x is None else recv_x, segment, offset

    def apart(self, expand: bool) -> int:
        """`unreduced` of deepep_combine_args: which rows are added at the token's rank alone."""
        if expand and self._unreduced:
            return 1
        return 2 if self._core.num_nodes > 1 and (self._unreduced or self._direct) else 0

    def _biases(self, bias: object, num_tokens: int, hidden: int) -> tuple[OptionalTensor, OptionalTensor]:
        given = bias if isinstance(bias, (tuple, list)) else (bias, None)
        assertion(len(given) == 2, f"argument bias: got {len(given)} of them, allowed None, a tensor or a pair")
        for number, one in enumerate(given):
            if one is not None:
                _torch.check(f"bias[{number}]", one, self._core.device, (BF16,), (num_tokens, hidden))
        return given[0], given[1]


def cut_short(sending: Sending, error: BaseException) -> None:
    """An exception ended a dispatch without a handle: its peers may wait for it, the exchange may still be writing."""
    if sending.token:
        sending.order.cancel(sending.token, error)
    sending.order.leave()


_library_tensors = operator.attrgetter(*TENSORS[1:])


def library_tensors(handle: EPHandle) -> tuple[OptionalTensor, ...]:
    """What the library reads and writes of a handle, beside topk_idx."""
    return _library_tensors(handle)


def scale_column(rows: int) -> int:
    """Elements of a column of scales, which begins on 16 bytes."""
    return max(1, -(-rows // SCALE_ALIGNMENT)) * SCALE_ALIGNMENT


def _received_scales(payload: Payload, rows: int, columns: bool) -> tuple[OptionalTensor, tuple[int, int]]:
    """The tensor for received scales, and its strides; `columns`: column-major, each column on 16 bytes."""
    if payload.scales is None:
        return None, (0, 0)
    count = payload.num_scales
    if not columns:
        return _torch.like(payload.scales, rows, count), (max(1, count), 1)
    stride = scale_column(rows)
    return _torch.like(payload.scales, count, stride).t()[:rows], (1, stride)
