"""The normal-mode calls that follow plans: which arguments a kind of call has, and where they go in the C structs.

Synchronous calls without a previous_event need nothing but the order of the caller's stream (CUDA), or an event that
the call waits for (CPU engine). On CUDA asynchronous calls are here too: their Ordering says on which streams they are,
and of which streams torch's allocator has to know.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from . import _abi, _face, _torch, errors
from ._core import Core
from ._face import DATA, HANDLE, Entry, Given, New, Program, Site, Source, address, constant, number, size, stride
from ._memory import RowCache
from ._native import Launch
from ._ordering import Ordered, Ordering
from ._torch import BOOL, FLOAT32, INDEX_TYPES, INT32, INT64, OptionalTensor, Tensor
from .utils.event import EventOverlap, no_event

# Attribute of a handle's matrix: the exchange of counts that it is from. A copy of the tensor has none: not compared.
EXCHANGE = "_deep_ep_exchange"
NUM_ENTRIES = 6  # of a handle
HANDLE_AT = 4  # in the results of a dispatch
POLL_NS = 300_000  # how long a call waits for its counts before it lets other Python threads run

# The tensors of a fresh dispatch, in the order of its sites.
X, SCALES, PER_RANK, IN_RANK, PER_EXPERT, IDX, WEIGHTS = range(7)
_ROWS = (0,)  # the dimensions that may have any length: the first
_FRESH = (_ROWS, _ROWS, (), _ROWS, (), _ROWS, _ROWS)


class Missing:
    """A plan that is not there: its key, and the call's recv_x or combined_x."""

    __slots__ = ("key", "out")

    def __init__(self, key: bytes, out: OptionalTensor) -> None:
        self.key, self.out = key, out

    @classmethod
    def of(cls, key: bytes | None, out: OptionalTensor = None) -> Missing | None:
        """None for a call of which there can be no plan."""
        return None if key is None else cls(key, out)


def counts_waiter(core: Core) -> Callable[[int, int], tuple[int, list[int]]]:
    """A function of an exchange's token and the number of local experts, which waits for the counts: rows, experts'."""
    native, waits = core.native, _face.address_of(core.native.lib.with_gil.deepep_wait_counts)
    poll = functools.partial(_face.load().poll_counts, waits, native._as_parameter_.value or 0)

    def wait(token: int, num_local_experts: int) -> tuple[int, list[int]]:
        if not core.host_stream:
            got = poll(token, num_local_experts, POLL_NS)
            if type(got) is tuple:
                return got
            if got != errors.PENDING:
                raise native.during_wait(native.lib.error(got))
        return native.wait_counts(token, num_local_experts)

    return wait


def deliver(
    site: Site,
    launch: Launch | None,
    order: Ordering | None,
    args: tuple[Any, ...],
    plan: tuple[Any, ...],
    x: Tensor,
    rows: int,
) -> tuple[Any, ...]:
    """The second step of a dispatch, and its plan if there is none.

    Args:
        site, args: of the step.
        launch: of a synchronous call.
        order: of an asynchronous one.
        plan: a function that adds the plan of a key, and what it takes behind the key.
        x, rows: what is sent, and how many rows are received.
    """
    for _ in range(3):
        got = site.run(launch, *args, begun=True) if order is None else site.run_behind(order, *args, steps=2, step=2)
        if type(got) is tuple:
            return got
        if got is not None:
            add, *of_plan = plan
            add(got, *of_plan)
            continue
        _torch.like(x, max(1, rows), x.shape[1])  # torch's own error, where memory is short
    raise errors.DeepEPError(errors.INTERNAL, "the compiled face does not take the second step of a dispatch")


def cancel(
    core: Core,
    token: int,
    error: BaseException,
    order: Ordering | None = None,
    launch: Launch | None = None,
) -> None:
    """Tells the peers of a dispatch that ended after its exchange of counts (`token`; 0: not begun).

    Args:
        order: of an asynchronous call; `launch`: of a synchronous one.
    """
    if not token:
        return
    if order is None:
        order = Ordering(core, None, False, False)
        if launch is not None:
            order.launch = launch
    order.cancel(token, error)


class NormalFace:
    """The sites of one buffer's normal-mode calls."""

    @classmethod
    def of(cls, core: Core, row_cache: RowCache) -> NormalFace | None:
        """For a buffer that is ready; None where there is no compiled face, and on several nodes."""
        wanted = core.compiled and core.num_nodes == 1
        return cls(core, row_cache) if wanted and _face.load() is not None else None

    def __init__(self, core: Core, row_cache: RowCache) -> None:
        self._core, self._row_cache = core, row_cache
        self._rows_for = functools.partial(row_cache.place, core)
        self._lib = core.native.lib.with_gil
        self._wait_counts = counts_waiter(core)
        handle = (), _ROWS, _ROWS  # rank_prefix_matrix, send_head, recv_src_idx
        self._layout = Site(core, (_ROWS,), 1, 0)
        self._notify = Site(core, _FRESH, 2, 1, strided=(SCALES,))
        self._dispatch = Site(core, (*_FRESH, (), _ROWS, _ROWS), 0, 6, strided=(SCALES,))
        self._worst = Site(core, (*_FRESH, _ROWS), 2, 3, strided=(SCALES,))
        self._cached = Site(core, (_ROWS, _ROWS, *handle, _ROWS), 0, 4, strided=(SCALES,))
        self._combine = Site(core, (_ROWS, _ROWS, _ROWS, _ROWS, *handle, _ROWS), 0, 2)

    # ---- calls. They return the result of Buffer's method, or why there is none: nothing was launched then

    def layout(self, ordered: Ordered, topk_idx: object, num_experts: object) -> Any:
        """Buffer.get_dispatch_layout, whose indices were looked at where that is possible."""
        got = self._layout.run_ordered(ordered, topk_idx, num_experts)
        return got if type(got) is tuple else Missing.of(got)

    def fresh(self, order: Ordering | None, inputs: tuple[Any, ...], alignment: object, config: int) -> Any:
        """Buffer.dispatch without a handle.

        Args:
            order: of an asynchronous call, on CUDA.
            inputs: the tensors from x to topk_weights.
            alignment: expert_alignment.
            config: an address.
        """
        x, per_expert, core = inputs[X], inputs[PER_EXPERT], self._core
        if type(x) is not Tensor or x.dim() != 2:
            return None
        core.open_rows()
        token, launch = 0, core.take_launch_with_event() if order is None else order.launch
        alone = launch is None  # the caller's stream orders all: neither step needs more than the call
        try:
            given = (*inputs, alignment, 0, config)
            if alone:
                got = self._notify.checked(self._notify.issue(*given))
            elif order is None:
                got = self._notify.run(launch, *given, ends=False)
            else:
                got = self._notify.run_behind(order, *given, steps=2)
            if type(got) is not tuple:
                return Missing.of(got)
            token, exchange, matrix, head, sent_to, received_from = got
            rows, per_local_expert = self._wait_counts(token, per_expert.shape[0] // core.group_size)
            place, segment, offset = self._rows_for(x, rows)
            if order is not None:
                order.made_on_comm(place)
            args = (*inputs, matrix, head, place, rows, token, exchange, segment, offset, config)
            got = self._dispatch.checked(self._dispatch.issue(*args)) if alone else None
            if type(got) is not tuple:
                got = deliver(self._dispatch, launch, order, args, (self._add_dispatch, inputs, place), x, rows)
            recv_x, source, scales, idx, weights = got
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
        setattr(matrix, EXCHANGE, exchange)
        recv_x = place if recv_x is None else recv_x
        handle = (matrix, sent_to, received_from, source, inputs[IN_RANK], head)
        return recv_x if scales is None else (recv_x, scales), idx, weights, per_local_expert, handle, event

    def worst(self, ordered: Ordered, inputs: tuple[Any, ...], alignment: object, worst: int, config: int) -> Any:
        """The same with num_worst_tokens, `worst`: both steps in one."""
        core, x = self._core, inputs[X]
        if type(x) is not Tensor or not 0 < worst < 2**31 or x.dim() != 2:
            return None
        core.open_rows()
        given, segment, offset = core.rows_behind(ordered, self._rows_for, x, worst)
        got = self._worst.run_ordered(ordered, *inputs, given, alignment, worst, segment, offset, config)
        if type(got) is not tuple:
            return Missing.of(got, given)
        result, exchange = got
        setattr(result[HANDLE_AT][0], EXCHANGE, exchange)
        return result

    def cached(self, ordered: Ordered, x: Any, scales: OptionalTensor, handle: Any, config: int) -> Any:
        """Buffer.dispatch with a handle."""
        if type(handle) is not tuple or len(handle) != NUM_ENTRIES or type(x) is not Tensor or x.dim() != 2:
            return None
        matrix, _, _, source, _, head = handle
        if type(source) is not Tensor or source.dim() != 1:
            return None
        given, segment, offset = self._core.rows_behind(ordered, self._rows_for, x, source.shape[0])
        exchange = getattr(matrix, EXCHANGE, 0)
        got = self._cached.run_ordered(
            ordered, x, scales, matrix, head, source, given, exchange, segment, offset, config
        )
        return got if type(got) is tuple else Missing.of(got, given)

    def combine(self, ordered: Ordered, x: object, handle: Any, topk_weights: object, bias: Any, config: int) -> Any:
        """Buffer.combine."""
        if type(handle) is not tuple or len(handle) != NUM_ENTRIES:
            return None
        matrix, _, _, source, _, head = handle
        first, second = bias if type(bias) is tuple and len(bias) == 2 else (bias, None)
        given = None
        if self._core.host_stream:
            with _torch.without_modes():
                given = self._row_cache.sums_like(x, head)
        exchange = getattr(matrix, EXCHANGE, 0)
        got = self._combine.run_ordered(
            ordered, x, topk_weights, first, second, matrix, head, source, given, exchange, config
        )
        return got if type(got) is tuple else Missing.of(got, given)

    # ---- plans, from a call of their kind that has passed every check

    def add_layout(self, key: bytes, topk_idx: Tensor, num_experts: int) -> None:
        """`key` is what the site's call returned; the arguments are those of the call."""
        core, p = self._core, Program(self._core.device)
        ranks = constant(core.group_size)
        per_rank = p.output(INT32, ranks, slab=HANDLE)
        p.none()  # num_tokens_per_rdma_rank
        per_expert = p.output(INT32, constant(num_experts), slab=HANDLE)
        in_rank = p.output(BOOL, size(0, 0), ranks, slab=HANDLE)
        layout = _abi.sized(
            _abi.Layout, num_topk=topk_idx.shape[1], num_experts=num_experts, index_type=INDEX_TYPES[topk_idx.dtype]
        )
        args = p.struct(
            layout, num_tokens=size(0, 0), topk_idx=address(0), num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert, is_token_in_rank=in_rank,
        )  # fmt: skip
        p.call(self._lib.deepep_get_layout, args, _face.call_struct(p, constant(0), 0))
        p.result((*(Entry(i) for i in range(4)), New(EventOverlap)))
        self._layout.add(key, p)

    def add_fresh(self, missing: Missing, inputs: tuple[OptionalTensor, ...], alignment: int, worst: int) -> None:
        """The first step of a dispatch, or both of a worst case."""
        x = inputs[X]
        if _torch.has_views(x):
            (self._worst if worst else self._notify).add(missing.key, None)
        elif worst:
            self._add_worst(missing.key, inputs, missing.out, alignment, worst)
        else:
            self._add_notify(missing.key, inputs, alignment)

    def _add_notify(self, key: bytes, inputs: tuple[OptionalTensor, ...], alignment: int) -> None:
        """The exchange of counts; results: token, rank_prefix_matrix, send_head, views of the matrix (on one node)."""
        p = self._fresh(inputs)
        matrix, head = self._matrices(p)
        handle = self._handle(p, constant(0), size(X, 0), matrix, head, constant(0), constant(0))
        notify = self._notify_args(p, inputs, alignment, 0, handle)
        token = p.struct(ctypes.c_uint64())
        call = _face.call_struct(p, number(0), 1)
        p.call(self._lib.deepep_notify_counts, notify, call, token)
        p.read(token)
        p.read(handle + _abi.Handle.exchange.offset)
        self._views(p, matrix)
        self._notify.add(key, p)

    def _add_dispatch(self, key: bytes, inputs: tuple[OptionalTensor, ...], recv_x: OptionalTensor) -> None:
        """The rows, once the counts are known; results: recv_x if none was given, recv_src_idx, and the others."""
        p = self._fresh(inputs)
        rows, token, exchange, segment, offset, config = (number(i) for i in range(6))
        p.same(size(8, 0), size(X, 0))
        x_out = p.rows(inputs[X], rows, recv_x, 9)
        source = p.output(INT32, rows, slab=DATA)
        handle = self._handle(p, rows, size(X, 0), address(7), address(8), source, exchange)
        args = self._dispatch_args(p, inputs, rows, handle, x_out, segment, offset)
        p.write(args, _abi.DispatchArgs, "token", token)
        p.call(self._lib.deepep_dispatch, args, _face.call_struct(p, config, 6))
        self._dispatch.add(key, p)

    def _add_worst(
        self,
        key: bytes,
        inputs: tuple[OptionalTensor, ...],
        recv_x: OptionalTensor,
        alignment: int,
        worst: int,
    ) -> None:
        """Both steps of a worst case; results: exchange, the matrices, recv_x if none was given, recv_src_idx, …"""
        p = self._fresh(inputs)
        segment, offset, config = (number(i) for i in range(3))
        rows = constant(worst)
        matrix, head = self._matrices(p)
        x_out = p.rows(inputs[X], rows, recv_x, 7)
        source = p.output(INT32, rows, slab=HANDLE)
        handle = self._handle(p, rows, size(X, 0), matrix, head, source, constant(0))
        notify = self._notify_args(p, inputs, alignment, worst, handle)
        args = self._dispatch_args(p, inputs, rows, handle, x_out, segment, offset, HANDLE)
        p.write(args, _abi.DispatchArgs, "num_worst_tokens", rows)
        p.call(self._lib.deepep_dispatch_at_once, notify, args, _face.call_struct(p, config, 3))
        p.read(handle + _abi.Handle.exchange.offset)
        self._views(p, matrix)
        exchange, made, heads, given, sources, scales, idx, weights, sent_to, received_from = map(Entry, range(10))
        received: Any = given if recv_x is None else Given(7)
        p.result((
            (
                received if inputs[SCALES] is None else (received, scales), idx, weights, New(list),
                (made, sent_to, received_from, sources, Given(IN_RANK), heads), New(EventOverlap),
            ),
            exchange,
        ))  # fmt: skip
        self._worst.add(key, p)

    def add_cached(self, missing: Missing, x: Tensor, scales: OptionalTensor) -> None:
        """Results: those of Buffer.dispatch."""
        if _torch.has_views(x):
            self._cached.add(missing.key, None)
            return
        p = Program(self._core.device)
        exchange, segment, offset, config = (number(i) for i in range(4))
        rows = size(4, 0)
        p.same(size(3, 0), size(0, 0))
        if scales is not None:
            p.same(size(1, 0), size(0, 0))
        x_out = p.rows(x, rows, missing.out, 5)
        handle = self._handle(p, rows, size(3, 0), address(2), address(3), address(4), exchange)
        inputs = (x, scales, None, None, None, None, None)
        args = self._dispatch_args(p, inputs, rows, handle, x_out, segment, offset)
        p.write(args, _abi.DispatchArgs, "cached", constant(1))
        p.call(self._lib.deepep_dispatch, args, _face.call_struct(p, config, 4))
        received: Any = Entry(0) if missing.out is None else Given(5)
        p.result((received if scales is None else (received, Entry(1)), None, None, None, None, New(EventOverlap)))
        self._cached.add(missing.key, p)

    def add_combine(
        self, missing: Missing, x: Tensor, topk_weights: OptionalTensor, biases: tuple[OptionalTensor, OptionalTensor]
    ) -> None:
        """Results: those of Buffer.combine."""
        p = Program(self._core.device)
        tokens, rows, hidden = size(5, 0), size(6, 0), int(x.shape[1])
        p.same(size(0, 0), rows)
        if topk_weights is not None:
            p.same(size(1, 0), rows)
        for place, bias in enumerate(biases, start=2):
            if bias is not None:
                p.same(size(place, 0), tokens)
        combined = p.rows(x, tokens, missing.out, 7)
        num_topk = 0 if topk_weights is None else int(topk_weights.shape[1])
        weights = p.none() if topk_weights is None else p.output(FLOAT32, tokens, constant(num_topk))
        handle = self._handle(p, rows, tokens, address(4), address(5), address(6), number(0))
        args = p.struct(
            _abi.sized(_abi.CombineArgs, num_topk=num_topk, hidden=hidden, x_segment=-1), x=address(0),
            topk_weights=address(1), handle=p.blob(handle), combined_x=combined, combined_topk_weights=weights,
        )  # fmt: skip
        first = args + _abi.CombineArgs.bias.offset
        p.write_at(first, address(2))
        p.write_at(first + 8, address(3))
        p.call(self._lib.deepep_combine, args, _face.call_struct(p, number(1), 2))
        p.result((Entry(0) if missing.out is None else Given(7), Entry(1), New(EventOverlap)))
        self._combine.add(missing.key, p)

    # ---- parts of plans

    def _fresh(self, inputs: tuple[OptionalTensor, ...]) -> Program:
        """A plan whose tensors have as many rows as x."""
        p = Program(self._core.device)
        for place in (SCALES, IN_RANK, IDX, WEIGHTS):
            if inputs[place] is not None:
                p.same(size(place, 0), size(X, 0))
        return p

    def _matrices(self, p: Program) -> tuple[Source, Source]:
        ranks = constant(self._core.group_size)
        return p.output(INT32, ranks, ranks, slab=HANDLE), p.output(INT32, size(X, 0), ranks, slab=HANDLE)

    def _views(self, p: Program, matrix: Source) -> None:
        """The views of rank_prefix_matrix in the handle: see HandleTensors.to_tuple."""
        size, rank = self._core.group_size, self._core.rank
        p.view(matrix, (size, 1), (1, 1), rank * size)
        p.view(matrix, (size, 1), (size, 1), rank)

    def _handle(
        self, p: Program, rows: Source, tokens: Source, matrix: Source, head: Source, source: Source, exchange: Source
    ) -> int:
        fixed = {"magic": _abi.HANDLE_MAGIC, "version": _abi.HANDLE_VERSION, "num_ranks": self._core.group_size}
        return p.struct(
            _abi.sized(_abi.Handle, **fixed), num_tokens=tokens, num_recv_tokens=rows, exchange=exchange,
            rank_prefix_matrix=matrix, send_head=head, recv_src_idx=source,
        )  # fmt: skip

    def _notify_args(
        self, p: Program, inputs: tuple[OptionalTensor, ...], alignment: int, worst: int, handle: int
    ) -> int:
        x, scales, _, _, per_expert, idx, _ = inputs
        assert x is not None and per_expert is not None
        x_type, hidden = _torch.items(x)
        notify = _abi.sized(
            _abi.Notify,
            num_topk=0 if idx is None else idx.shape[1],
            num_experts=per_expert.shape[0],
            expert_alignment=alignment,
            num_worst_tokens=worst,
            x_type=x_type,
            num_scales=0 if scales is None else scales.shape[1],
            hidden=hidden,
        )
        return p.struct(
            notify, num_tokens=size(X, 0), num_tokens_per_rank=address(PER_RANK), handle=p.blob(handle),
            num_tokens_per_expert=address(PER_EXPERT), is_token_in_rank=address(IN_RANK),
        )  # fmt: skip

    def _dispatch_args(
        self,
        p: Program,
        inputs: tuple[OptionalTensor, ...],
        rows: Source,
        handle: int,
        recv_x: Source,
        segment: Source,
        offset: Source,
        slab: int = DATA,
    ) -> int:
        """deepep_dispatch_args, and the outputs beside recv_x: scales, topk_idx and topk_weights (these of `slab`)."""
        x, scales, _, _, per_expert, idx, weights = inputs
        assert x is not None
        x_type, hidden = _torch.items(x)
        args = _abi.sized(_abi.DispatchArgs, x_type=x_type, hidden=hidden, index_type=INDEX_TYPES[INT64])
        sources = {"num_tokens": size(X, 0), "x": address(X), "handle": p.blob(handle), "recv_x": recv_x}
        sources |= {"recv_segment": segment, "recv_segment_offset": offset}
        if per_expert is not None:
            args.num_experts = per_expert.shape[0]
        if scales is None:
            p.none()
        else:
            args.num_scales = scales.shape[1]
            sources |= {"x_scales": address(SCALES), "scale_token_stride": stride(SCALES, 0)}
            sources |= {"scale_stride": stride(SCALES, 1)}
            sources["recv_x_scales"] = p.output(scales.dtype, rows, constant(scales.shape[1]))
        if idx is None or weights is None:
            p.none()
            p.none()
        else:
            args.num_topk, args.index_type = idx.shape[1], INDEX_TYPES[idx.dtype]
            sources |= {"topk_idx": address(IDX), "topk_weights": address(WEIGHTS)}
            sources["recv_topk_idx"] = p.output(idx.dtype, rows, constant(idx.shape[1]), slab=slab)
            sources["recv_topk_weights"] = p.output(FLOAT32, rows, constant(idx.shape[1]), slab=slab)
        return p.struct(args, **sources)
