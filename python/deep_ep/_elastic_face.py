"""V2's calls that follow plans: which arguments a kind of call has, and where they go in the C structs.

As in normal mode (_normal_face) these are synchronous calls without events, whose outputs are the caller's stream's,
and on CUDA asynchronous ones.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from typing import Any

from . import _abi, _face, _torch
from ._core import Core
from ._elastic import TENSORS, Combined, Dispatched, ElasticMode, EPHandle, Order, Sending, Shape, scale_column
from ._face import DATA, HANDLE, Entry, Given, New, Program, Site, Source, address, constant, number, size, stride
from ._normal_face import EXCHANGE, Missing, cancel, counts_waiter, deliver
from ._ordering import Ordered
from ._torch import FLOAT32, INDEX_TYPES, INT32, OptionalTensor, Tensor
from .utils.event import EventOverlap, no_event

_ROWS = (0,)  # the dimensions that may have any length: the first
_MADE = ((), (), (), _ROWS, _ROWS, (), _ROWS)  # library_tensors of a handle
_FIELDS = (
    "psum_recv_tokens_per_rank", "psum_recv_tokens_per_expert", "num_recv_tokens_per_expert", "recv_src_metadata",
    "dst_slot", "rank_prefix_matrix", "send_head",
)  # of deepep_handle, in their order  # fmt: skip
MOST_ROWS = 1 << 22  # of a cached call's outputs; more may be a handle that was changed, which Python judges
METADATA, SLOTS, MATRIX, HEAD = range(3, 7)
X, SCALES, IDX, WEIGHTS, STATS = range(5)  # the tensors of a dispatch without a handle, in front in its sites
_FRESH = (_ROWS, _ROWS, _ROWS, _ROWS, ())
_CHOSEN = ("do_expand", "num_sms", "num_experts", "expert_alignment", "num_max_tokens_per_rank")
_of_handle = operator.attrgetter(*TENSORS, *_CHOSEN)
Inputs = tuple[Any, ...]


class Kind:
    """The numbers of a dispatch that has passed the checks."""

    __slots__ = ("shape", "padding", "columns", "copies_topk", "worst", "config", "num_sms", "scalars")

    def __init__(self, sending: Sending, num_sms: int) -> None:
        """`num_sms` is for a new handle."""
        shape = self.shape = sending.shape
        self.padding, self.columns = sending.padding, sending.columns
        self.copies_topk, self.worst = sending.copies_topk, sending.worst
        self.config, self.num_sms = sending.config, num_sms
        self.scalars = (
            shape.num_experts, shape.num_max, shape.alignment, shape.expand, self.padding, self.columns,
        )  # fmt: skip


class ElasticFace:
    """The sites of one buffer's calls."""

    @classmethod
    def of(cls, core: Core, mode: ElasticMode) -> ElasticFace | None:
        """For a buffer that is ready; None where there is no compiled face."""
        return cls(core, mode) if core.compiled and _face.load() is not None else None

    def __init__(self, core: Core, mode: ElasticMode) -> None:
        self._core, self._mode = core, mode
        self._lib = core.native.lib.with_gil
        self._wait_counts = counts_waiter(core)
        self._notify = Site(core, _FRESH, 7, 1, strided=(SCALES,))
        self._send = Site(core, (*_FRESH, _ROWS, *_MADE[:METADATA], *_MADE[SLOTS:], _ROWS), 6, 8, strided=(SCALES,))
        self._worst = Site(core, (*_FRESH, _ROWS), 7, 3, strided=(SCALES,))
        of_handle = _ROWS, *_MADE  # topk_idx and library_tensors; with _CHOSEN what _of_handle gives
        self._again = Site(core, (_ROWS, _ROWS, _ROWS, _ROWS, *of_handle), len(_CHOSEN) + 10, 5, strided=(SCALES,))
        self._combine = Site(core, (_ROWS, _ROWS, _ROWS, _ROWS, _ROWS, *of_handle), len(_CHOSEN) + 2, 1)

    # ---- calls. They return the result of ElasticBuffer's method, or why there is none: nothing was launched then

    def fresh(self, order: Order | None, inputs: Inputs, kind: Kind) -> Dispatched | Missing | None:
        """ElasticBuffer.dispatch without a handle; `order`: of an asynchronous call, on CUDA."""
        x = inputs[X]
        if type(x) is not Tensor or x.dim() != 2 or not 0 <= x.shape[0] <= kind.shape.num_max:
            return None
        core, shape = self._core, kind.shape
        core.open_rows()
        token, launch = 0, core.take_launch_with_event() if order is None else order.launch
        alone = launch is None  # as in NormalFace.fresh
        config = ctypes.addressof(kind.config)
        try:
            given = (*inputs, *kind.scalars, kind.copies_topk, config)
            if alone:
                got = self._notify.checked(self._notify.issue(*given))
            elif order is None:
                got = self._notify.run(launch, *given, ends=False)
            else:
                got = self._notify.run_behind(order, *given, steps=2)
            if type(got) is not tuple:
                return Missing.of(got)
            token, exchange, kept, *made = got
            setattr(made[MATRIX - 1], EXCHANGE, exchange)
            tokens, per_expert = self._wait_counts(token, shape.num_local)
            rows = sum(per_expert) if shape.expand else tokens
            place, segment, offset = self._mode.rows_for(x, rows)
            if order is not None:
                order.made_on_comm(place)
            args = (
                *inputs, kept, *made, place, *kind.scalars, tokens, rows, token, exchange, segment, offset,
                scale_column(rows), config,
            )  # fmt: skip
            got = self._send.checked(self._send.issue(*args)) if alone else None
            if type(got) is not tuple:
                got = deliver(self._send, launch, order, args, (self._add_send, inputs, kind, made, place), x, rows)
            metadata, recv_x, *received = got
            event = no_event() if order is None else order.ended()
        except BaseException as error:
            cancel(core, token, error, order, launch)
            if order is not None:
                order.leave()
            elif launch is not None:
                launch.left = True
            raise
        if order is None and launch is not None:
            core.idle.append(launch)
        made.insert(METADATA, metadata)
        received = [place if recv_x is None else recv_x, *received]
        return self._dispatched(inputs, kind, kept, made, rows, per_expert, received, event)

    def worst(self, ordered: Ordered, inputs: Inputs, kind: Kind) -> Dispatched | Missing | None:
        """The same without CPU sync: both steps in one."""
        core, x = self._core, inputs[X]
        if type(x) is not Tensor or x.dim() != 2 or not 0 <= x.shape[0] <= kind.shape.num_max:
            return None
        core.open_rows()
        rows = kind.shape.worst_rows()
        given, segment, offset = core.rows_behind(ordered, self._mode.rows_for, x, rows)
        args = (*inputs, given, *kind.scalars, kind.copies_topk, segment, offset, ctypes.addressof(kind.config))
        got = self._worst.run_ordered(ordered, *args)
        if type(got) is not tuple:
            return Missing.of(got, given)
        event, exchange, kept, *made = got[: 3 + len(_MADE)]
        recv_x, *others = got[3 + len(_MADE) :]
        setattr(made[MATRIX], EXCHANGE, exchange)
        recv_x = given if recv_x is None else recv_x
        return self._dispatched(inputs, kind, kept, made, rows, [], [recv_x, *others], event)

    def _dispatched(
        self,
        inputs: Inputs,
        kind: Kind,
        kept: OptionalTensor,
        made: Sequence[Tensor],
        rows: int,
        per_expert: list[int],
        received: list[Any],
        event: EventOverlap,
    ) -> Dispatched:
        shape = kind.shape
        handle = EPHandle(
            shape.expand, shape.num_experts, shape.alignment, shape.num_max, kind.num_sms,
            inputs[IDX] if kept is None else kept, rows, rows, per_expert, *made,
        )  # fmt: skip
        return self._received(handle, kind.columns, rows, event, *received)

    @staticmethod
    def _received(
        handle: EPHandle, columns: bool, rows: int, event: EventOverlap, x: Tensor, scales: Any, idx: Any, weights: Any
    ) -> Dispatched:
        if scales is not None and columns:
            scales = scales.t()[:rows]
        return x if scales is None else (x, scales), idx, weights, handle, event

    def again(
        self,
        ordered: Ordered,
        x: Any,
        scales: Any,
        topk_weights: Any,
        handle: EPHandle,
        expand: object,
        *chosen: Any,
    ) -> Dispatched | Missing | None:
        """ElasticBuffer.dispatch with a handle; `chosen`: its other arguments, those that are numbers or flags."""
        metadata, expanded = handle.recv_src_metadata, handle.do_expand
        if type(x) is not Tensor or x.dim() != 2 or type(metadata) is not Tensor or type(expanded) is not bool:
            return None
        if expand is True or expand is False and not expanded:
            rows = handle.num_recv_tokens
        elif expand is False:
            rows = _torch.length(metadata)
        else:
            return None
        if type(rows) is not int or not 0 <= rows <= MOST_ROWS:
            return None
        held = _of_handle(handle)
        given, segment, offset = self._core.rows_behind(ordered, self._mode.rows_for, x, rows)
        got = self._again.run_ordered(
            ordered, x, scales, topk_weights, given, *held, expand, *chosen, rows,
            getattr(handle.token_metadata_at_forward, EXCHANGE, 0), segment, offset, scale_column(rows),
        )  # fmt: skip
        return self._received(handle, chosen[-1], rows, *got) if type(got) is tuple else Missing.of(got, given)

    def combine(
        self,
        ordered: Ordered,
        x: Any,
        handle: EPHandle,
        topk_weights: Any,
        bias: Any,
        num_sms: object,
        num_qps: object,
    ) -> Combined | Missing | None:
        """ElasticBuffer.combine."""
        first, second = bias if type(bias) is tuple and len(bias) == 2 else (bias, None)
        held = _of_handle(handle)
        exchange = getattr(handle.token_metadata_at_forward, EXCHANGE, 0)
        given = self._mode.row_cache.sums_like(x, held[0]) if self._core.host_stream else None
        got = self._combine.run_ordered(
            ordered, x, topk_weights, first, second, given, *held, num_sms, num_qps, exchange
        )
        return got if type(got) is tuple else Missing.of(got, given)

    # ---- plans, from a call of their kind that has passed every check

    def add_fresh(self, missing: Missing, inputs: Inputs, kind: Kind) -> None:
        """The first step of a dispatch, or both where outputs have room for any routing."""
        if _torch.has_views(inputs[X], inputs[SCALES]):
            (self._worst if kind.worst else self._notify).add(missing.key, None)
        elif kind.worst:
            self._add_worst(missing.key, inputs, kind, missing.out)
        else:
            self._add_notify(missing.key, inputs, kind)

    def _add_notify(self, key: bytes, inputs: Inputs, kind: Kind) -> None:
        """Results: token, exchange, the copy of topk_idx, library_tensors of the handle without recv_src_metadata."""
        p = self._start(inputs)
        kept = self._copy_of_indices(p, inputs, kind)
        made = self._make(p, kind, None)
        handle = self._handle(p, inputs[IDX], kind.shape, address(IDX), made, size(X, 0))
        notify = self._notify_args(p, inputs, kind, handle, kept)
        token = p.struct(ctypes.c_uint64())
        call = _face.call_struct(p, number(0), 1)
        p.call(self._lib.deepep_notify_counts, notify, call, token)
        p.read(token)
        p.read(handle + _abi.Handle.exchange.offset)
        self._notify.add(key, p)

    def _add_send(self, key: bytes, inputs: Inputs, kind: Kind, made: Sequence[Tensor], recv_x: OptionalTensor) -> None:
        """The rows, once the counts are known; results: recv_src_metadata, and what is received."""
        p = self._start(inputs)
        tokens, rows, token, exchange, segment, offset, column, config = map(number, range(8))
        metadata = p.output(INT32, tokens, constant(kind.shape.num_topk + 2), slab=DATA)
        first = STATS + 2  # behind the copy of topk_idx, which the first step writes
        given = [address(first + i) for i in range(len(made))]
        p.same(size(first + SLOTS - 1, 0), size(X, 0))
        p.same(size(first + HEAD - 1, 0), size(X, 0))
        sources = [*given[:METADATA], metadata, *given[METADATA:]]
        expanded = rows if kind.shape.expand else constant(0)
        handle = self._handle(p, inputs[IDX], kind.shape, address(IDX), sources, size(X, 0), tokens, expanded, exchange)
        place = first + len(made)
        args = self._dispatch_args(p, inputs[:SCALES + 1], inputs[WEIGHTS], WEIGHTS, inputs[IDX], kind, rows, handle,
                                   recv_x, place, segment, offset, column)  # fmt: skip
        p.write(args, _abi.DispatchArgs, "token", token)
        p.call(self._lib.deepep_dispatch, args, _face.call_struct(p, config, 8))
        self._send.add(key, p)

    def _add_worst(self, key: bytes, inputs: Inputs, kind: Kind, recv_x: OptionalTensor) -> None:
        """Results: exchange, the copy of topk_idx, library_tensors of the handle, what is received."""
        p, shape = self._start(inputs), kind.shape
        segment, offset, config = map(number, range(3))
        rows, tokens = constant(shape.worst_rows()), constant(shape.bound())
        kept = self._copy_of_indices(p, inputs, kind)
        made = self._make(p, kind, tokens)
        expanded = rows if shape.expand else constant(0)
        handle = self._handle(p, inputs[IDX], shape, address(IDX), made, size(X, 0), tokens, expanded)
        notify = self._notify_args(p, inputs, kind, handle, kept)
        column = constant(scale_column(shape.worst_rows()))
        args = self._dispatch_args(p, inputs[:SCALES + 1], inputs[WEIGHTS], WEIGHTS, inputs[IDX], kind, rows, handle,
                                   recv_x, STATS + 1, segment, offset, column)  # fmt: skip
        p.call(self._lib.deepep_dispatch_at_once, notify, args, _face.call_struct(p, config, 3))
        p.read(handle + _abi.Handle.exchange.offset)
        p.result((New(EventOverlap), *(Entry(i) for i in range(2 + len(_MADE) + 4))))
        self._worst.add(key, p)

    def add_again(
        self,
        missing: Missing,
        x: Tensor,
        scales: OptionalTensor,
        topk_weights: OptionalTensor,
        handle: EPHandle,
        kind: Kind,
    ) -> None:
        """Results: what is received."""
        if _torch.has_views(x, scales):
            self._again.add(missing.key, None)
            return
        p = Program(self._core.device)
        rows, exchange, segment, offset, column = map(number, range(5))
        weights, given, idx, first = 2, 3, 4, 5
        present = [place for place, tensor in ((SCALES, scales), (weights, topk_weights)) if tensor is not None]
        for place in (*present, idx, first + SLOTS, first + HEAD):
            p.same(size(place, 0), size(X, 0))
        expand = kind.shape.expand
        arrived, expanded = (size(first + METADATA, 0), rows) if expand else (rows, constant(0))
        made = [address(first + i) for i in range(len(_MADE))]
        native = self._handle(p, handle.topk_idx, kind.shape, address(idx), made, size(idx, 0), arrived, expanded,
                              exchange)  # fmt: skip
        args = self._dispatch_args(p, (x, scales), topk_weights, weights, handle.topk_idx, kind, rows, native,
                                   missing.out, given, segment, offset, column)  # fmt: skip
        p.write(args, _abi.DispatchArgs, "cached", constant(1))
        config = constant(ctypes.addressof(kind.config))
        p.call(self._lib.deepep_dispatch, args, _face.call_struct(p, config, 5))
        received = Entry(0) if missing.out is None else Given(given)
        p.result((New(EventOverlap), received, *(Entry(i) for i in range(1, 4))))
        self._again.add(missing.key, p)

    def add_combine(
        self,
        missing: Missing,
        x: Tensor,
        handle: EPHandle,
        topk_weights: OptionalTensor,
        biases: Sequence[OptionalTensor],
        config: Any,
    ) -> None:
        """Results: combined_x and combined_topk_weights. `config` lives as long as the buffer."""
        core, p = self._core, Program(self._core.device)
        num_topk, hidden, expand = int(handle.topk_idx.shape[1]), int(x.shape[1]), bool(handle.do_expand)
        idx, first = 5, 6
        rows, tokens, arrived = size(0, 0), size(idx, 0), size(first + METADATA, 0)
        for place in (first + SLOTS, first + HEAD):
            p.same(size(place, 0), tokens)
        if not expand:
            p.same(rows, arrived)
        if topk_weights is not None:
            p.same(size(1, 0), rows)
        for place, bias in enumerate(biases, start=2):
            if bias is not None:
                p.same(size(place, 0), tokens)
        combined = p.rows(x, tokens, missing.out, 4)
        weights = p.none() if topk_weights is None else p.output(FLOAT32, tokens, constant(num_topk))
        shape = Shape(
            num_topk, handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank, expand,
            core.group_size,
        )  # fmt: skip
        made = [address(first + i) for i in range(len(_MADE))]
        native = self._handle(p, handle.topk_idx, shape, address(idx), made, tokens, arrived,
                              rows if expand else constant(0), number(0))  # fmt: skip
        args = _abi.sized(
            _abi.CombineArgs, num_topk=0 if topk_weights is None else num_topk, hidden=hidden, x_segment=-1,
            unreduced=self._mode.apart(expand),
        )  # fmt: skip
        place = p.struct(
            args, x=address(0), topk_weights=address(1), handle=p.blob(native), combined_x=combined,
            combined_topk_weights=weights, num_x_rows=rows if expand else constant(0),
        )  # fmt: skip
        bias_at = place + _abi.CombineArgs.bias.offset
        p.write_at(bias_at, address(2))
        p.write_at(bias_at + 8, address(3))
        chosen = constant(ctypes.addressof(config))
        p.call(self._lib.deepep_combine, place, _face.call_struct(p, chosen, 1))
        p.result((Entry(0) if missing.out is None else Given(4), Entry(1), New(EventOverlap)))
        self._combine.add(missing.key, p)

    # ---- parts of plans

    def _start(self, inputs: Inputs) -> Program:
        """A plan whose tensors have as many rows as x."""
        p = Program(self._core.device)
        for place in (SCALES, IDX, WEIGHTS):
            if inputs[place] is not None:
                p.same(size(place, 0), size(X, 0))
        return p

    def _copy_of_indices(self, p: Program, inputs: Inputs, kind: Kind) -> Source:
        if kind.copies_topk:
            return p.output(inputs[IDX].dtype, size(X, 0), constant(kind.shape.num_topk), slab=HANDLE)
        return p.none()

    def _make(self, p: Program, kind: Kind, tokens: Source | None) -> list[Source]:
        """The outputs for a handle, as library_tensors; without `tokens`, the rows of recv_src_metadata, not that."""
        shape, ranks, of_handle = kind.shape, constant(self._core.group_size), functools.partial(p.output, slab=HANDLE)
        local = constant(shape.num_local)
        made = [of_handle(INT32, constant(self._mode.num_scaleup())), of_handle(INT32, local), of_handle(INT32, local)]
        if tokens is None:
            made.append(constant(0))
        else:
            made.append(of_handle(INT32, tokens, constant(shape.num_topk + 2)))
        made.append(of_handle(INT32, size(X, 0), constant(shape.num_topk)))
        return [*made, of_handle(INT32, ranks, ranks), of_handle(INT32, size(X, 0), ranks)]

    def _handle(
        self,
        p: Program,
        topk_idx: Tensor,
        shape: Shape,
        indices: Source,
        made: Sequence[Source],
        tokens: Source,
        arrived: Source = (0, 0, 0),
        expanded: Source = (0, 0, 0),
        exchange: Source = (0, 0, 0),
    ) -> int:
        """deepep_handle; `made`: where library_tensors are."""
        fixed = _abi.sized(
            _abi.Handle, magic=_abi.HANDLE_MAGIC, version=_abi.HANDLE_VERSION, num_ranks=self._core.group_size,
            routing=_abi.ROUTING_EXPANDED if shape.expand else _abi.ROUTING_PLAIN, num_topk=shape.num_topk,
            num_experts=shape.num_experts, index_type=INDEX_TYPES[topk_idx.dtype], num_max_tokens=shape.num_max,
            expert_alignment=shape.alignment,
        )  # fmt: skip
        return p.struct(
            fixed, num_tokens=tokens, num_recv_tokens=arrived, num_expanded_tokens=expanded, exchange=exchange,
            topk_idx=indices, **dict(zip(_FIELDS, made, strict=True)),
        )  # fmt: skip

    def _notify_args(self, p: Program, inputs: Inputs, kind: Kind, handle: int, kept: Source) -> int:
        shape, (x, scales, idx, *_) = kind.shape, inputs
        x_type, hidden = _torch.items(x)
        expanded = shape.worst_rows() if kind.worst and shape.expand else 0
        fixed = _abi.sized(
            _abi.Notify, num_topk=shape.num_topk, num_experts=shape.num_experts, expert_alignment=shape.alignment,
            num_worst_tokens=shape.bound() if kind.worst else 0, x_type=x_type,
            num_scales=0 if scales is None else scales.shape[1], hidden=hidden,
            routing=_abi.ROUTING_EXPANDED if shape.expand else _abi.ROUTING_PLAIN, index_type=INDEX_TYPES[idx.dtype],
            num_max_tokens=shape.num_max, num_worst_expanded=expanded, num_scaleup_ranks=self._mode.num_scaleup(),
        )  # fmt: skip
        return p.struct(
            fixed, num_tokens=size(X, 0), handle=p.blob(handle), topk_idx=address(IDX),
            cumulative_recv_stats=address(STATS), topk_idx_copy=kept,
        )  # fmt: skip

    def _dispatch_args(
        self,
        p: Program,
        sent: tuple[Any, ...],
        topk_weights: OptionalTensor,
        weights_at: int,
        topk_idx: Tensor,
        kind: Kind,
        rows: Source,
        handle: int,
        recv_x: OptionalTensor,
        recv_at: int,
        segment: Source,
        offset: Source,
        column: Source,
    ) -> int:
        """deepep_dispatch_args, and the outputs: recv_x unless it is given, its scales, topk_idx and topk_weights.

        Args:
            sent: x and its scales.
            weights_at, recv_at: places of topk_weights and of the given recv_x among the tensors.
            column: elements from one column of received scales to the next.
        """
        (x, scales), shape, slab = sent, kind.shape, HANDLE if kind.worst else DATA
        x_type, hidden = _torch.items(x)
        args = _abi.sized(
            _abi.DispatchArgs, x_type=x_type, hidden=hidden, index_type=INDEX_TYPES[topk_idx.dtype],
            num_worst_tokens=shape.bound() if kind.worst else 0, do_zero_padding=int(kind.padding),
        )  # fmt: skip
        sources = {"num_tokens": size(X, 0), "x": address(X), "handle": p.blob(handle)}
        sources |= {"recv_segment": segment, "recv_segment_offset": offset, "topk_weights": address(weights_at)}
        sources["recv_x"] = p.rows(x, rows, recv_x, recv_at)
        if scales is None:
            p.none()
        else:
            count, step = constant(scales.shape[1]), constant(max(1, scales.shape[1]))
            args.num_scales = scales.shape[1]
            sources |= {"x_scales": address(SCALES), "scale_token_stride": stride(SCALES, 0)}
            sources |= {"scale_stride": stride(SCALES, 1)}
            sizes, strides = (
                ((count, column), (constant(1), column)) if kind.columns else ((rows, count), (step, constant(1)))
            )
            sources["recv_x_scales"] = p.output(scales.dtype, *sizes)
            sources |= {"recv_scale_token_stride": strides[0], "recv_scale_stride": strides[1]}
        if shape.expand:
            p.none()
        else:
            sources["recv_topk_idx"] = p.output(topk_idx.dtype, rows, constant(shape.num_topk), slab=slab)
        if topk_weights is None:
            p.none()
        else:
            choices = () if shape.expand else (constant(shape.num_topk),)
            sources["recv_topk_weights"] = p.output(FLOAT32, rows, *choices, slab=slab)
        return p.struct(args, **sources)
