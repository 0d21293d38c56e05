"""Normal mode: layout, dispatch and combine of whole batches. Buffer has the documentation of each call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from . import _abi, _torch
from ._core import Core
from ._memory import RowCache
from ._normal_face import EXCHANGE, NUM_ENTRIES, NormalFace
from ._ordering import Ordering, call_in_order
from ._torch import BF16, BOOL, FLOAT32, FP8, INDEX_TYPES, INT32, INT64, Device, OptionalTensor, Tensor
from .config import Config
from .errors import assertion, check_handle, check_int, type_error, value_error
from .utils import EventOverlap

INTRANODE_ENTRIES, INTERNODE_ENTRIES = NUM_ENTRIES, 10
MAX_OFFSET = 2**30  # an int32 index has room for any local expert beyond it
BLOCKS_KEPT = 6  # blocks of rows and sums that the CPU engine uses again

Rows = Tensor | tuple[Tensor, Tensor]  # rows of any dtype, or rows of one of 1 byte with their scales
Handle = tuple[Tensor, ...]
Dispatched = tuple[
    Rows, OptionalTensor, OptionalTensor, "list[int] | None", "Handle | None", EventOverlap
]  # what dispatch returns


class HandleTensors:
    """The tensors of a handle that the library needs, from the tuple of either form."""

    __slots__ = ("rank_prefix_matrix", "send_head", "recv_src_idx", "is_token_in_rank", "exchange")

    def __init__(
        self, rank_prefix_matrix: Tensor, send_head: Tensor, recv_src_idx: OptionalTensor, is_token_in_rank: Tensor
    ) -> None:
        self.rank_prefix_matrix = rank_prefix_matrix
        self.send_head = send_head
        self.recv_src_idx = recv_src_idx
        self.is_token_in_rank = is_token_in_rank
        self.exchange = 0  # not known

    @classmethod
    def of_sequence(cls, handle: object, num_ranks: int, device: Device) -> HandleTensors:
        """Checks and takes apart what dispatch returned."""
        entries = check_handle(handle, (INTRANODE_ENTRIES, INTERNODE_ENTRIES), "dispatch")
        if len(entries) == INTRANODE_ENTRIES:
            matrix, _, _, source, in_rank, head = entries
        else:
            in_rank, matrix, source, head = entries[0], entries[1], entries[-3], entries[-2]
        _torch.check("handle: rank_prefix_matrix", matrix, device, (INT32,), (num_ranks, num_ranks))
        _torch.check("handle: send_head", head, device, (INT32,), (None, num_ranks))
        _torch.check("handle: recv_src_idx", source, device, (INT32,), (None,))
        tensors = cls(matrix, head, source, in_rank)
        tensors.exchange = getattr(matrix, EXCHANGE, 0)
        return tensors

    def to_tuple(self, nodes: int, peers: int, rank: int) -> Handle:
        """The handle as callers see it: six entries on one node, ten on several. Views only: nothing runs for them."""
        matrix, head, in_rank, source = self.rank_prefix_matrix, self.send_head, self.is_token_in_rank, self.source()
        sent_to = matrix[rank].unsqueeze(1)  # [R, 1]: where this rank's rows end at each rank
        received_from = matrix[:, rank].unsqueeze(1)  # [R, 1]: where each rank's rows end here
        if nodes == 1:
            return (matrix, sent_to, received_from, source, in_rank, head)
        per_rank = matrix[:, rank]  # [R]: running sum of received rows over global source ranks
        per_node = per_rank[peers - 1 :: peers]
        return (in_rank, matrix, sent_to, received_from, per_node, received_from, per_rank, source, head, head)

    def source(self) -> Tensor:
        """recv_src_idx, which a fresh dispatch allocates once it has the counts."""
        assert self.recv_src_idx is not None
        return self.recv_src_idx

    def tensors(self) -> tuple[OptionalTensor, ...]:
        """What the library reads and writes."""
        return self.rank_prefix_matrix, self.send_head, self.recv_src_idx

    def native(self, num_recv_tokens: int) -> Any:
        """deepep_handle over these tensors."""
        return _abi.sized(
            _abi.Handle,
            magic=_abi.HANDLE_MAGIC,
            version=_abi.HANDLE_VERSION,
            num_ranks=self.rank_prefix_matrix.shape[0],
            num_tokens=self.send_head.shape[0],
            num_recv_tokens=num_recv_tokens,
            exchange=self.exchange,
            rank_prefix_matrix=self.rank_prefix_matrix.data_ptr(),
            send_head=self.send_head.data_ptr(),
            recv_src_idx=_torch.address(self.recv_src_idx),
        )


class Payload:
    """x of dispatch: the rows, and their scales if it is a pair."""

    __slots__ = ("x", "scales", "num_scales", "x_type", "hidden")

    def __init__(self, x: object, device: Device) -> None:
        self.scales: OptionalTensor = None
        self.num_scales = 0
        if not isinstance(x, (tuple, list)):
            dtype = x.dtype if isinstance(x, Tensor) else BF16
            self.x = _torch.check("x", x, device, (dtype,), (None, None))
            self.x_type, self.hidden = _torch.items(self.x)
            return
        if len(x) != 2:
            raise value_error("x", f"a {type(x).__name__} of {len(x)}", "a tensor, or a pair (rows, scales)")
        dtype = x[0].dtype if isinstance(x[0], Tensor) else FP8
        if dtype.itemsize != 1:
            raise type_error("x[0]", f"dtype {dtype}", "a dtype of 1 byte, beside scales")
        self.x = _torch.check("x[0]", x[0], device, (dtype,), (None, None))
        self.x_type, self.hidden = _torch.items(self.x)
        scales = x[1]
        if isinstance(scales, Tensor) and scales.dim() == 1:
            scales = scales.view(-1, 1)
        shape = (self.x.shape[0], None)
        self.scales = _torch.check("x[1]", scales, device, (FLOAT32, INT32), shape, contiguous=False)
        self.num_scales = int(self.scales.shape[1])


class Received:
    """The tensors that a dispatch fills, of `rows` rows."""

    __slots__ = ("x", "scales", "topk_idx", "topk_weights")

    def __init__(self, x: Tensor, payload: Payload, topk_idx: OptionalTensor, topk_weights: OptionalTensor) -> None:
        rows = x.shape[0]
        self.x = x
        self.scales = self.topk_idx = self.topk_weights = None
        if payload.scales is not None:
            self.scales = _torch.like(payload.scales, rows, payload.num_scales)
        if topk_idx is not None and topk_weights is not None:
            self.topk_idx = _torch.like(topk_idx, rows, topk_idx.shape[1])
            self.topk_weights = _torch.like(topk_weights, rows, topk_idx.shape[1])

    def rows(self) -> Rows:
        """recv_x as callers see it: a pair for a pair."""
        return self.x if self.scales is None else (self.x, self.scales)

    def tensors(self) -> tuple[OptionalTensor, ...]:
        """What the library writes."""
        return self.x, self.scales, self.topk_idx, self.topk_weights


class NormalMode:
    """The normal-mode calls of one Buffer."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.row_cache = RowCache(BLOCKS_KEPT if core.recycle else 0)
        self.forget()

    def forget(self) -> None:
        """Lets go of what belongs to the group's size."""
        self._default_configs: dict[tuple[int, int], Any] = {}
        self._face: NormalFace | None = None
        self._has_face = True  # until the first call knows

    def layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, OptionalTensor, Tensor, Tensor, EventOverlap]:
        """Buffer.get_dispatch_layout."""
        core, missing = self._core, None
        if core.kept or not core.is_ready:
            core.enter()
        ordered = core.ordered(previous_event, async_finish, allocate_on_comm_stream)
        face = self._face or self._opened_face()
        if face is not None and ordered is not None and not core.host_stream:
            missing = face.layout(ordered, topk_idx, num_experts)
            if type(missing) is tuple:
                return missing
        with _torch.without_modes():
            _torch.check("topk_idx", topk_idx, core.device, tuple(INDEX_TYPES), (None, None))
            num_experts = self._check_experts(num_experts)
            if core.host_stream:  # plain memory can be read here, before anything runs; a kernel could only fail
                _torch.check_indices("topk_idx", topk_idx, num_experts)
                if face is not None and ordered is not None:
                    missing = face.layout(ordered, topk_idx, num_experts)
                    if type(missing) is tuple:
                        return missing
            order = Ordering(core, previous_event, async_finish, allocate_on_comm_stream)
            result = self._layout(topk_idx, num_experts, order)
            if face is not None and missing is not None:
                face.add_layout(missing.key, topk_idx, num_experts)
        return result

    def _layout(
        self, topk_idx: Tensor, num_experts: int, order: Ordering
    ) -> tuple[Tensor, OptionalTensor, Tensor, Tensor, EventOverlap]:
        """Without the compiled face, after the checks."""
        core = self._core
        ranks, nodes = core.group_size, core.num_nodes
        with order.context:
            per_rank = _torch.empty((ranks,), INT32, core.device)
            per_node = _torch.empty((nodes,), INT32, core.device) if nodes > 1 else None
            per_expert = _torch.empty((num_experts,), INT32, core.device)
            in_rank = _torch.empty((topk_idx.shape[0], ranks), BOOL, core.device)
        struct = _abi.sized(
            _abi.Layout,
            num_tokens=topk_idx.shape[0],
            num_topk=topk_idx.shape[1],
            num_experts=num_experts,
            index_type=INDEX_TYPES[topk_idx.dtype],
            topk_idx=topk_idx.data_ptr(),
            num_tokens_per_rank=per_rank.data_ptr(),
            num_tokens_per_rdma_rank=_torch.address(per_node),
            num_tokens_per_expert=per_expert.data_ptr(),
            is_token_in_rank=in_rank.data_ptr(),
        )
        held = (topk_idx, per_rank, per_node, per_expert, in_rank)
        event = order.last(core.native.lib.with_gil.deepep_get_layout, ctypes.byref(struct), held=held)
        return per_rank, per_node, per_expert, in_rank, event

    def dispatch(
        self,
        x: object,
        handle: object,
        num_tokens_per_rank: OptionalTensor,
        num_tokens_per_rdma_rank: OptionalTensor,
        is_token_in_rank: OptionalTensor,
        num_tokens_per_expert: OptionalTensor,
        topk_idx: OptionalTensor,
        topk_weights: OptionalTensor,
        expert_alignment: int,
        num_worst_tokens: int,
        config: Config | None,
        num_sms: int,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
        global_expert_id_offset: int = 0,
    ) -> Dispatched:
        """Buffer.dispatch; `num_sms` counts where `config` is None."""
        core, missing = self._core, None
        if core.kept or not core.is_ready:
            core.enter()
        topk = topk_idx, topk_weights
        counts = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        data: Any
        data, scales = x if type(x) is tuple and len(x) == 2 else (x, None)
        ordered, order = core.ordered(previous_event, async_finish, allocate_on_comm_stream), None
        face = self._face or self._opened_face()
        native_config = self._config(config, 0, num_sms)
        with _torch.without_modes():
            if face is not None and ordered is not None and not global_expert_id_offset:
                where = ctypes.addressof(native_config)
                inputs = (data, scales, *counts, *topk)
                if handle is None and type(num_worst_tokens) is int:
                    if num_worst_tokens:
                        missing = face.worst(ordered, inputs, expert_alignment, num_worst_tokens, where)
                    else:
                        if ordered is not False:
                            order = Ordering.of(core, ordered)
                        missing = call_in_order(face.fresh, order, inputs, expert_alignment, where)
                elif handle is not None and topk_idx is None and topk_weights is None:
                    missing = face.cached(ordered, data, scales, handle, where)
                if type(missing) is tuple:
                    return missing
            if order is None:
                order = Ordering(core, previous_event, async_finish, allocate_on_comm_stream)
            result = self._dispatch(
                x, handle, counts, num_tokens_per_rdma_rank, topk, (expert_alignment, num_worst_tokens),
                native_config, order, global_expert_id_offset,
            )  # fmt: skip
            if face is not None and missing is not None:
                if handle is None:
                    face.add_fresh(missing, (data, scales, *counts, *topk), expert_alignment, num_worst_tokens)
                else:
                    face.add_cached(missing, data, scales)
        return result

    def _dispatch(
        self,
        x: object,
        handle: object,
        given_counts: tuple[object, object, object],
        num_tokens_per_rdma_rank: object,
        topk: tuple[OptionalTensor, OptionalTensor],
        given_numbers: tuple[object, object],
        native_config: Any,
        order: Ordering,
        global_expert_id_offset: object,
    ) -> Dispatched:
        """Without the compiled face."""
        core = self._core
        topk_idx, topk_weights = topk
        payload = Payload(x, core.device)
        offset = 0
        if global_expert_id_offset:
            offset = check_int("global_expert_id_offset", global_expert_id_offset, 0, MAX_OFFSET)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise value_error("topk_idx", "top-k with handle", "no topk_idx and no topk_weights with a handle")
            return self._cached_dispatch(payload, handle, native_config, order)
        counts = self._check_counts(payload, *given_counts)
        if core.num_nodes > 1 and num_tokens_per_rdma_rank is not None:
            per_node = num_tokens_per_rdma_rank
            _torch.check("num_tokens_per_rdma_rank", per_node, core.device, (INT32,), (core.num_nodes,))
        self._check_topk(payload.x.shape[0], topk_idx, topk_weights)
        names = "expert_alignment", "num_worst_tokens"
        numbers = (check_int(names[0], given_numbers[0]), check_int(names[1], given_numbers[1]))
        result = self._fresh_dispatch(payload, counts, topk_idx, topk_weights, numbers, native_config, order)
        received, event = result[1], result[5]
        if offset and received is not None:
            order.append(event, lambda: _torch.add_where_not_negative(received, offset))
        return result

    def _fresh_dispatch(
        self,
        payload: Payload,
        counts: tuple[Tensor, Tensor, Tensor],
        topk_idx: OptionalTensor,
        topk_weights: OptionalTensor,
        numbers: tuple[int, int],
        config: Any,
        order: Ordering,
    ) -> Dispatched:
        per_rank, in_rank, per_expert = counts
        core, worst = self._core, numbers[1]
        core.open_rows()
        with order.context:
            shape = (core.group_size, core.group_size), (payload.x.shape[0], core.group_size)
            tensors = HandleTensors(_torch.like(per_rank, *shape[0]), _torch.like(per_rank, *shape[1]), None, in_rank)
            # Before notify where the rows are known: peers wait for a dispatch once they have this rank's counts.
            received = None
            if worst > 0:
                tensors.recv_src_idx = _torch.like(per_rank, worst)
                received = self._receive(payload, worst, topk_idx, topk_weights)
        num_topk = 0 if topk_idx is None else int(topk_idx.shape[1])
        per_local_expert: list[int] = []
        token = 0
        notify = self._notify(payload, counts, num_topk, numbers)
        try:
            rows = worst
            if received is None:
                token = self._exchange(notify, counts, tensors, config, order)
                rows, per_local_expert = core.native.wait_counts(token, int(per_expert.shape[0]) // core.group_size)
                with order.context:
                    tensors.recv_src_idx = _torch.like(per_rank, rows)
                    received = self._receive(payload, rows, topk_idx, topk_weights)
            native_handle = tensors.native(rows)
            args = self._dispatch_args(payload, native_handle, received)
            args.token, args.num_worst_tokens, args.num_experts = token, worst, per_expert.shape[0]
            if topk_idx is not None:
                args.num_topk, args.index_type = num_topk, INDEX_TYPES[topk_idx.dtype]
                args.topk_idx, args.topk_weights = topk_idx.data_ptr(), _torch.address(topk_weights)
                args.recv_topk_idx = _torch.address(received.topk_idx)
                args.recv_topk_weights = _torch.address(received.topk_weights)
            held = (payload.x, payload.scales, topk_idx, topk_weights, *counts, *tensors.tensors(), *received.tensors())
            if worst > 0:
                notify.handle = ctypes.addressof(native_handle)
                function = core.native.lib.with_gil.deepep_dispatch_at_once
                event = order.last(function, ctypes.byref(notify), ctypes.byref(args), config=config, held=held)
                tensors.exchange = native_handle.exchange
            else:
                function = core.native.lib.with_gil.deepep_dispatch
                event = order.last(function, ctypes.byref(args), config=config, held=held)
        except BaseException as error:
            if token:
                order.cancel(token, error)  # peers wait for this rank's part of the dispatch
            order.leave()  # notify may still be writing to the handle's tensors
            raise
        setattr(tensors.rank_prefix_matrix, EXCHANGE, tensors.exchange)
        handle = tensors.to_tuple(core.num_nodes, core.num_nvl_peers, core.rank)
        return received.rows(), received.topk_idx, received.topk_weights, per_local_expert, handle, event

    def _notify(
        self,
        payload: Payload,
        counts: tuple[Tensor, Tensor, Tensor],
        num_topk: int,
        numbers: tuple[int, int],
    ) -> Any:
        """deepep_notify, without a handle."""
        per_rank, in_rank, per_expert = counts
        return _abi.sized(
            _abi.Notify,
            num_tokens=payload.x.shape[0],
            num_topk=num_topk,
            num_experts=per_expert.shape[0],
            expert_alignment=numbers[0],
            num_worst_tokens=numbers[1],
            x_type=payload.x_type,
            num_scales=payload.num_scales,
            hidden=payload.hidden,
            num_tokens_per_rank=per_rank.data_ptr(),
            num_tokens_per_expert=per_expert.data_ptr(),
            is_token_in_rank=in_rank.data_ptr(),
        )

    def _exchange(
        self,
        notify: Any,
        counts: tuple[Tensor, Tensor, Tensor],
        tensors: HandleTensors,
        config: Any,
        order: Ordering,
    ) -> int:
        """Starts the exchange of counts; returns the library's token of it. For all exceptions: order.leave()."""
        native_handle = tensors.native(0)
        notify.handle = ctypes.addressof(native_handle)
        token = ctypes.c_uint64()
        function = self._core.native.lib.with_gil.deepep_notify_counts
        held = (*counts, *tensors.tensors())
        order.first(function, ctypes.byref(notify), ctypes.byref(token), config=config, held=held)
        tensors.exchange = native_handle.exchange
        return token.value

    def _cached_dispatch(self, payload: Payload, handle: object, config: Any, order: Ordering) -> Dispatched:
        core = self._core
        tensors = HandleTensors.of_sequence(handle, core.group_size, core.device)
        if tensors.send_head.shape[0] != payload.x.shape[0]:
            raise value_error("x", f"{payload.x.shape[0]} rows", f"{tensors.send_head.shape[0]} rows, as in the handle")
        rows = int(tensors.source().shape[0])
        with order.context:
            received = self._receive(payload, rows, None, None)
        native_handle = tensors.native(rows)
        args = self._dispatch_args(payload, native_handle, received)
        args.cached = 1
        held = (payload.x, payload.scales, *received.tensors(), *tensors.tensors())
        function = core.native.lib.with_gil.deepep_dispatch
        event = order.last(function, ctypes.byref(args), config=config, held=held)
        return received.rows(), None, None, None, None, event

    def combine(
        self,
        x: Tensor,
        handle: Sequence[Any],
        topk_weights: OptionalTensor,
        bias: Tensor | tuple[OptionalTensor, OptionalTensor] | None,
        config: Config | None,
        num_sms: int,
        previous_event: EventOverlap | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> tuple[Tensor, OptionalTensor, EventOverlap]:
        """Buffer.combine; `num_sms` counts where `config` is None."""
        core, missing = self._core, None
        if core.kept or not core.is_ready:
            core.enter()
        ordered = core.ordered(previous_event, async_finish, allocate_on_comm_stream)
        face = self._face or self._opened_face()
        native_config = self._config(config, 1, num_sms)
        if face is not None and ordered is not None:
            missing = face.combine(ordered, x, handle, topk_weights, bias, ctypes.addressof(native_config))
            if type(missing) is tuple:
                return missing
        with _torch.without_modes():
            order = Ordering(core, previous_event, async_finish, allocate_on_comm_stream)
            result = self._combine(x, handle, topk_weights, bias, native_config, order)
            if face is not None and missing is not None:
                biases = bias if isinstance(bias, tuple) else (bias, None)
                face.add_combine(missing, x, topk_weights, biases)
        return result

    def _combine(
        self,
        x: Tensor,
        handle: Sequence[Any],
        topk_weights: OptionalTensor,
        bias: Tensor | tuple[OptionalTensor, OptionalTensor] | None,
        native_config: Any,
        order: Ordering,
    ) -> tuple[Tensor, OptionalTensor, EventOverlap]:
        """Without the compiled face."""
        core = self._core
        tensors = HandleTensors.of_sequence(handle, core.group_size, core.device)
        rows, num_tokens = int(tensors.source().shape[0]), int(tensors.send_head.shape[0])
        _torch.check("x", x, core.device, (BF16,), (rows, None))
        hidden, num_topk = int(x.shape[1]), 0
        biases = self._check_biases(bias, num_tokens, hidden)
        if topk_weights is not None:
            _torch.check("topk_weights", topk_weights, core.device, (FLOAT32,), (rows, None))
            num_topk = int(topk_weights.shape[1])
        with order.context:
            combined = self.output_like(x, num_tokens, hidden)
            weights = None if topk_weights is None else _torch.like(topk_weights, num_tokens, num_topk)
        native_handle = tensors.native(rows)
        args = _abi.sized(
            _abi.CombineArgs,
            num_topk=num_topk,
            hidden=hidden,
            x_segment=-1,
            x=x.data_ptr(),
            topk_weights=_torch.address(topk_weights),
            handle=ctypes.addressof(native_handle),
            combined_x=combined.data_ptr(),
            combined_topk_weights=_torch.address(weights),
        )
        args.bias[0], args.bias[1] = _torch.address(biases[0]), _torch.address(biases[1])
        held = (x, topk_weights, *biases, combined, weights, *tensors.tensors())
        function = core.native.lib.with_gil.deepep_combine
        event = order.last(function, ctypes.byref(args), config=native_config, held=held)
        return combined, weights, event

    # ---- helpers

    def output_like(self, x: Tensor, *shape: int) -> Tensor:
        """Memory of x's dtype and device: the CPU engine's may be that of earlier outputs."""
        return self.row_cache.empty(shape, x.dtype) if self._core.host_stream else _torch.like(x, *shape)

    def _receive(self, payload: Payload, rows: int, topk_idx: OptionalTensor, topk_weights: OptionalTensor) -> Received:
        core = self._core
        shape, pool, x = (rows, payload.x.shape[1]), core.native.rows, None
        if pool is not None and rows:
            x = pool.rows_like(payload.x, rows)
        if x is None:
            x = self.output_like(payload.x, *shape)
        return Received(x, payload, topk_idx, topk_weights)

    def _dispatch_args(self, payload: Payload, native_handle: Any, received: Received) -> Any:
        args = _abi.sized(
            _abi.DispatchArgs,
            x_type=payload.x_type,
            num_scales=payload.num_scales,
            hidden=payload.hidden,
            num_tokens=payload.x.shape[0],
            index_type=INDEX_TYPES[INT64],
            recv_segment=-1,
            x=payload.x.data_ptr(),
            handle=ctypes.addressof(native_handle),
            recv_x=received.x.data_ptr(),
        )
        pool = self._core.native.rows
        offset = pool.offset(received.x) if pool is not None else None
        if offset is not None:
            args.recv_segment, args.recv_segment_offset = pool.index, offset
        if payload.scales is not None:
            args.x_scales, args.recv_x_scales = payload.scales.data_ptr(), _torch.address(received.scales)
            args.scale_token_stride, args.scale_stride = payload.scales.stride()
        return args

    def _opened_face(self) -> NormalFace | None:
        if self._face is None and self._has_face:
            self._face = NormalFace.of(self._core, self.row_cache)
            self._has_face = self._face is not None
        return self._face

    def _config(self, config: object, kind: int, num_sms: int) -> Any:
        """deepep_config of a call; kind 0 is dispatch, 1 combine."""
        if config is not None:
            if not isinstance(config, Config):
                raise type_error("config", type(config).__name__, "a deep_ep.Config or None")
            return config._native
        cached = self._default_configs.get((kind, num_sms))
        if cached is None:
            cached = Config.default(kind, self._core.group_size)._native
            cached.num_sms = num_sms
            self._default_configs[(kind, num_sms)] = cached
        return cached

    def _check_experts(self, num_experts: object) -> int:
        # Asked before the plan asks it: an output has this length, and indices are compared with it.
        number, ranks = check_int("num_experts", num_experts), self._core.group_size
        if number < 1 or number % ranks:
            raise value_error("num_experts", number, f"a positive multiple of the {ranks} ranks")
        return number

    def _check_counts(
        self, payload: Payload, per_rank: object, in_rank: object, per_expert: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        for name, value in given.items():
            allowed = "what get_dispatch_layout returned (or a handle)"
            assertion(value is not None, f"argument {name}: got None, allowed {allowed}")
        device, ranks = self._core.device, self._core.group_size
        experts = _torch.check("num_tokens_per_expert", per_expert, device, (INT32,), (None,))
        if experts.shape[0] == 0:
            raise value_error("num_tokens_per_expert", "shape [0]", "an entry for each expert")
        return (
            _torch.check("num_tokens_per_rank", per_rank, device, (INT32,), (ranks,)),
            _torch.check("is_token_in_rank", in_rank, device, (BOOL,), (payload.x.shape[0], ranks)),
            experts,
        )

    def _check_topk(self, num_tokens: int, topk_idx: OptionalTensor, topk_weights: OptionalTensor) -> None:
        if topk_idx is None and topk_weights is None:
            return
        if topk_idx is None or topk_weights is None:
            missing = "topk_weights" if topk_weights is None else "topk_idx"
            raise value_error(missing, "None", "topk_idx and topk_weights together, or neither")
        _torch.check("topk_idx", topk_idx, self._core.device, tuple(INDEX_TYPES), (num_tokens, None))
        _torch.check("topk_weights", topk_weights, self._core.device, (FLOAT32,), tuple(topk_idx.shape))

    def _check_biases(self, bias: object, num_tokens: int, hidden: int) -> tuple[OptionalTensor, OptionalTensor]:
        biases = bias if isinstance(bias, (tuple, list)) else (bias, None)
        if len(biases) != 2:
            given = f"a {type(bias).__name__} of {len(biases)}"
            raise value_error("bias", given, "None, a tensor or a pair of tensors")
        for number, one in enumerate(biases):
            if one is not None:
                _torch.check(f"bias[{number}]", one, self._core.device, (BF16,), (num_tokens, hidden))
        return biases[0], biases[1]
