"""Normal mode: layout, dispatch and combine of whole batches."""

from __future__ import annotations

import ctypes
from typing import Any

from . import _abi, _memory, _torch, errors
from ._base import BufferBase, Ordering
from .config import Config
from .errors import assertion, type_error, value_error
from .utils import EventOverlap

INTRANODE_ENTRIES, INTERNODE_ENTRIES = 6, 10


class Route:
    """The parts of a handle that the library needs, whichever tuple they came in."""

    __slots__ = ("rank_prefix_matrix", "send_head", "recv_src_idx", "is_token_in_rank")

    def __init__(self, rank_prefix_matrix: Any, send_head: Any, recv_src_idx: Any, is_token_in_rank: Any) -> None:
        self.rank_prefix_matrix = rank_prefix_matrix
        self.send_head = send_head
        self.recv_src_idx = recv_src_idx
        self.is_token_in_rank = is_token_in_rank

    @classmethod
    def of_tuple(cls, handle: object, num_ranks: int, device: Any) -> Route:
        """Takes apart what dispatch returned; checks it."""
        if not isinstance(handle, tuple) or len(handle) not in (INTRANODE_ENTRIES, INTERNODE_ENTRIES):
            given = f"a tuple of {len(handle)}" if isinstance(handle, tuple) else type(handle).__name__
            raise type_error("handle", given, "the handle that dispatch returned")
        if len(handle) == INTRANODE_ENTRIES:
            matrix, _, _, source, in_rank, head = handle
        else:
            in_rank, matrix, source, head = handle[0], handle[1], handle[-3], handle[-2]
        _torch.check("handle: rank_prefix_matrix", matrix, device, (_torch.INT32,), (num_ranks, num_ranks))
        _torch.check("handle: send_head", head, device, (_torch.INT32,), (None, num_ranks))
        _torch.check("handle: recv_src_idx", source, device, (_torch.INT32,), (None,))
        return cls(matrix, head, source, in_rank)

    def to_tuple(self, nodes: int, peers: int, rank: int) -> tuple[Any, ...]:
        """The handle as callers see it: six entries on one node, ten on several. Views only: nothing runs for them."""
        matrix, head, in_rank = self.rank_prefix_matrix, self.send_head, self.is_token_in_rank
        sent_to = matrix[rank].unsqueeze(1)  # [R, 1]: where this rank's rows end at each rank
        received_from = matrix[:, rank].unsqueeze(1)  # [R, 1]: where each rank's rows end here
        if nodes == 1:
            return (matrix, sent_to, received_from, self.recv_src_idx, in_rank, head)
        per_rank = matrix[:, rank]  # [R]: running sum of received rows over global source ranks
        per_node = per_rank[peers - 1 :: peers]
        return (
            in_rank,
            matrix,
            sent_to,
            received_from,
            per_node,
            received_from,
            per_rank,
            self.recv_src_idx,
            head,
            head,
        )

    def native(self, num_recv_tokens: int) -> Any:
        """deepep_handle over these tensors."""
        return _abi.sized(
            _abi.Handle,
            magic=0x44504548,
            version=1,
            num_ranks=self.rank_prefix_matrix.shape[0],
            num_tokens=self.send_head.shape[0],
            num_recv_tokens=num_recv_tokens,
            rank_prefix_matrix=self.rank_prefix_matrix.data_ptr(),
            send_head=self.send_head.data_ptr(),
            recv_src_idx=self.recv_src_idx.data_ptr() if self.recv_src_idx is not None else None,
        )


class Payload:
    """x of dispatch: the rows, and their scales if it is a pair."""

    __slots__ = ("x", "scales", "is_pair", "num_scales")

    def __init__(self, x: object, device: Any) -> None:
        self.is_pair = isinstance(x, (tuple, list))
        if self.is_pair:
            assert isinstance(x, (tuple, list))
            if len(x) != 2:
                raise value_error("x", f"a tuple of {len(x)}", "a tensor, or a pair (FP8 rows, scales)")
            self.x = _torch.check("x[0]", x[0], device, (_torch.FP8,), (None, None))
            scales = x[1]
            if isinstance(scales, _torch.Tensor) and scales.dim() == 1:
                scales = scales.view(-1, 1)
            dtypes = (_torch.FLOAT32, _torch.INT32)
            self.scales: Any = _torch.check("x[1]", scales, device, dtypes, (self.x.shape[0], None), contiguous=False)
            self.num_scales = int(self.scales.shape[1])
        else:
            self.x = _torch.check("x", x, device, (_torch.BF16, _torch.FP8), (None, None))
            self.scales, self.num_scales = None, 0
        row_bytes = self.x.shape[1] * self.x.element_size()
        if row_bytes == 0 or row_bytes % 16:
            raise value_error("x", f"rows of {row_bytes} bytes", "rows whose bytes are a multiple of 16")


class NormalMode(BufferBase):
    """get_dispatch_layout, dispatch, combine and their internode names."""

    num_sms: int

    def get_dispatch_layout(
        self,
        topk_idx: _torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_torch.Tensor, _torch.Tensor | None, _torch.Tensor, _torch.Tensor, EventOverlap]:
        """Counts what a dispatch of these indices sends where.

        Args:
            topk_idx: ``[T, K]`` int64 or int32; -1 selects nothing.
            num_experts: E, a multiple of the number of ranks.
            previous_event: what the work waits for; None or without an event: the caller's current stream.
            async_finish: True: the caller waits through the returned event.
            allocate_on_comm_stream: outputs belong to the communication stream; needs both of the above.

        Returns:
            ``num_tokens_per_rank [R] int32``, ``num_tokens_per_rdma_rank [nodes] int32`` (None on one node),
            ``num_tokens_per_expert [E] int32``, ``is_token_in_rank [T, R] bool`` and the event.
        """
        self.enter()
        _torch.check("topk_idx", topk_idx, self.device, tuple(_torch.INDEX_TYPES), (None, None))
        self._check_experts(num_experts)
        if self.host_stream:  # plain memory can be read here, before anything runs; a kernel could only fail the buffer
            _torch.check_indices("topk_idx", topk_idx, num_experts)
        order = Ordering(self, previous_event, async_finish, allocate_on_comm_stream)
        i32, ranks, nodes = _torch.INT32, self.group_size, self.num_nodes
        with order.context:
            per_rank = _torch.empty((ranks,), i32, self.device)
            per_node = _torch.empty((nodes,), i32, self.device) if nodes > 1 else None
            per_expert = _torch.empty((num_experts,), i32, self.device)
            in_rank = _torch.empty((topk_idx.shape[0], ranks), _torch.BOOL, self.device)
        struct = _abi.sized(
            _abi.Layout,
            num_tokens=topk_idx.shape[0],
            num_topk=topk_idx.shape[1],
            num_experts=num_experts,
            index_type=_torch.INDEX_TYPES[topk_idx.dtype],
            topk_idx=topk_idx.data_ptr(),
            num_tokens_per_rank=per_rank.data_ptr(),
            num_tokens_per_rdma_rank=_torch.address(per_node),
            num_tokens_per_expert=per_expert.data_ptr(),
            is_token_in_rank=in_rank.data_ptr(),
        )
        lib = self.native.lib
        lib.check(lib.with_gil.deepep_get_layout(self.native, ctypes.byref(struct), order.call(None, True)))
        event = order.finish((topk_idx, per_rank, per_node, per_expert, in_rank))
        return per_rank, per_node, per_expert, in_rank, event

    def _run_normal(self, hidden: int, num_experts: int) -> None:
        """Layout, dispatch and combine of one token, so that Python's part of them is warm too. Collective; waits."""
        x = _torch.full((1, hidden), 0, _torch.BF16, self.device)
        own = _torch.full((1, 1), self.rank * num_experts // self.group_size, _torch.INT64, self.device)
        weights = _torch.full((1, 1), 0, _torch.FLOAT32, self.device)
        per_rank, per_node, per_expert, in_rank, _ = self.get_dispatch_layout(own, num_experts)
        rows, _, back, _, handle, _ = self.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=own,
            topk_weights=weights,
        )
        self.combine(rows, handle, topk_weights=back)
        if not self.host_stream:
            self.torch_current_stream().synchronize()

    def dispatch(
        self,
        x: Any,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: _torch.Tensor | None = None,
        num_tokens_per_rdma_rank: _torch.Tensor | None = None,
        is_token_in_rank: _torch.Tensor | None = None,
        num_tokens_per_expert: _torch.Tensor | None = None,
        topk_idx: _torch.Tensor | None = None,
        topk_weights: _torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, Any, Any, Any, EventOverlap]:
        """Sends each token once to every rank that holds one of its experts.

        Args:
            x: BF16 ``[T, H]``, or a pair (FP8 e4m3 ``[T, H]``, scales ``[T, S]`` float32 or int32 with any strides).
            handle: of an earlier dispatch: the same routing again, without top-k, counts and host wait.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: what
                get_dispatch_layout returned.
            topk_idx: ``[T, K]`` int64 or int32, or None; together with
            topk_weights: ``[T, K]`` float32.
            expert_alignment: the counts of the list are rounded up to multiples of it.
            num_worst_tokens: > 0: outputs have that many rows and nobody waits on the host; needs top-k.
            config: None: the default for this many ranks.
            previous_event, async_finish, allocate_on_comm_stream: as in get_dispatch_layout.

        Returns:
            ``recv_x [N, H]`` (a pair for a pair), rows by source rank, then by token; ``recv_topk_idx [N, K]``: local
            experts or -1; ``recv_topk_weights [N, K]``, 0 there; a list of L counts; the handle; the event. With a
            handle given: ``(recv_x, None, None, None, None, event)``.

        Raises:
            DeepEPError: a rank is late, dead or disagrees; the text names it. Also a ValueError or TypeError for a
                wrong argument.
        """
        self.enter()
        payload = Payload(x, self.device)
        order = Ordering(self, previous_event, async_finish, allocate_on_comm_stream)
        native_config = self._config(config, 0)
        if handle is not None:
            return self._cached_dispatch(payload, handle, topk_idx, topk_weights, native_config, order)
        counts = self._check_counts(payload, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        if self.num_nodes > 1 and num_tokens_per_rdma_rank is not None:
            _torch.check(
                "num_tokens_per_rdma_rank", num_tokens_per_rdma_rank, self.device, (_torch.INT32,), (self.num_nodes,)
            )
        self._check_topk(payload.x.shape[0], topk_idx, topk_weights)
        if isinstance(expert_alignment, bool) or not isinstance(expert_alignment, int) or expert_alignment < 1:
            raise value_error("expert_alignment", repr(expert_alignment), "an int >= 1")
        if isinstance(num_worst_tokens, bool) or not isinstance(num_worst_tokens, int) or num_worst_tokens < 0:
            raise value_error("num_worst_tokens", repr(num_worst_tokens), "an int >= 0")
        if num_worst_tokens > 0 and topk_idx is None:
            raise value_error(
                "num_worst_tokens", f"{num_worst_tokens} without topk_idx", "topk_idx and topk_weights beside it"
            )
        return self._fresh_dispatch(
            payload, counts, topk_idx, topk_weights, expert_alignment, num_worst_tokens, native_config, order
        )

    def _fresh_dispatch(
        self,
        payload: Payload,
        counts: tuple[Any, Any, Any],
        topk_idx: Any,
        topk_weights: Any,
        alignment: int,
        worst: int,
        config: Any,
        order: Ordering,
    ) -> tuple[Any, Any, Any, Any, Any, EventOverlap]:
        per_rank, in_rank, per_expert = counts
        lib, ranks = self.native.lib, self.group_size
        num_tokens, num_topk = payload.x.shape[0], 0 if topk_idx is None else int(topk_idx.shape[1])
        with order.context:
            route = Route(
                _torch.like(per_rank, ranks, ranks),
                _torch.like(per_rank, num_tokens, ranks),
                None,
                in_rank,
            )
        native_handle = route.native(0)
        notify = _abi.sized(
            _abi.Notify,
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=per_expert.shape[0],
            expert_alignment=alignment,
            num_worst_tokens=worst,
            x_type=_torch.ITEM_TYPES[payload.x.dtype],
            num_scales=payload.num_scales,
            hidden=payload.x.shape[1],
            num_tokens_per_rank=per_rank.data_ptr(),
            num_tokens_per_expert=per_expert.data_ptr(),
            is_token_in_rank=in_rank.data_ptr(),
            handle=ctypes.addressof(native_handle),
        )
        token = ctypes.c_uint64()
        lib.check(
            lib.with_gil.deepep_notify_counts(
                self.native, ctypes.byref(notify), order.call(config, False), ctypes.byref(token)
            )
        )
        held = (per_rank, in_rank, per_expert, route.rank_prefix_matrix, route.send_head)
        rows, per_local_expert = (
            (worst, []) if worst else self._wait_counts(token.value, int(per_expert.shape[0]) // ranks, held)
        )
        with order.context:
            route.recv_src_idx = _torch.like(per_rank, rows)
            received, recv_scales, recv_idx, recv_weights = self._allocate(payload, rows, topk_idx, topk_weights)
        native_handle = route.native(rows)
        args = self._dispatch_args(payload, native_handle, received, recv_scales)
        args.token, args.num_worst_tokens = token.value, worst
        args.num_experts = per_expert.shape[0]
        if topk_idx is not None:
            args.num_topk, args.index_type = num_topk, _torch.INDEX_TYPES[topk_idx.dtype]
            args.topk_idx, args.topk_weights = topk_idx.data_ptr(), topk_weights.data_ptr()
            args.recv_topk_idx, args.recv_topk_weights = recv_idx.data_ptr(), recv_weights.data_ptr()
        lib.check(lib.with_gil.deepep_dispatch(self.native, ctypes.byref(args), order.call(config, True)))
        event = order.finish(
            (*held, payload.x, payload.scales, topk_idx, topk_weights, received, recv_scales, recv_idx, recv_weights,
             route.recv_src_idx)
        )  # fmt: skip
        recv_x = (received, recv_scales) if payload.is_pair else received
        handle = route.to_tuple(self.num_nodes, self.num_nvl_peers, self.rank)
        return recv_x, recv_idx, recv_weights, per_local_expert, handle, event

    def _cached_dispatch(
        self, payload: Payload, handle: tuple[Any, ...], topk_idx: Any, topk_weights: Any, config: Any, order: Ordering
    ) -> tuple[Any, Any, Any, Any, Any, EventOverlap]:
        if topk_idx is not None or topk_weights is not None:
            raise value_error("topk_idx", "top-k together with handle", "no topk_idx and no topk_weights with a handle")
        route = Route.of_tuple(handle, self.group_size, self.device)
        if route.send_head.shape[0] != payload.x.shape[0]:
            raise value_error("x", f"{payload.x.shape[0]} rows", f"{route.send_head.shape[0]} rows, as in the handle")
        rows = int(route.recv_src_idx.shape[0])
        with order.context:
            received, recv_scales, _, _ = self._allocate(payload, rows)
        native_handle = route.native(rows)
        args = self._dispatch_args(payload, native_handle, received, recv_scales)
        args.cached = 1
        lib = self.native.lib
        lib.check(lib.with_gil.deepep_dispatch(self.native, ctypes.byref(args), order.call(config, True)))
        event = order.finish(
            (
                payload.x,
                payload.scales,
                received,
                recv_scales,
                route.rank_prefix_matrix,
                route.send_head,
                route.recv_src_idx,
            )
        )
        return ((received, recv_scales) if payload.is_pair else received), None, None, None, None, event

    def combine(
        self,
        x: _torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: _torch.Tensor | None = None,
        bias: _torch.Tensor | tuple[_torch.Tensor | None, _torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_torch.Tensor, _torch.Tensor | None, EventOverlap]:
        """Sums, for each token, the rows that came from it.

        Args:
            x: ``[N, H]`` BF16, one row for each row that dispatch received.
            handle: of that dispatch.
            topk_weights: ``[N, K]`` float32, summed likewise, or None.
            bias: ``[T, H]`` BF16, or a pair of such; added to the sum.
            config, previous_event, async_finish, allocate_on_comm_stream: as in dispatch.

        Returns:
            ``combined_x [T, H]`` BF16 (accumulated in FP32; 0 plus biases for a token that went nowhere),
            ``combined_topk_weights [T, K]`` float32 or None, and the event.
        """
        self.enter()
        route = Route.of_tuple(handle, self.group_size, self.device)
        rows, num_tokens = int(route.recv_src_idx.shape[0]), int(route.send_head.shape[0])
        _torch.check("x", x, self.device, (_torch.BF16,), (rows, None))
        hidden = int(x.shape[1])
        if hidden == 0 or hidden % 8:
            raise value_error("x", f"rows of {2 * hidden} bytes", "rows whose bytes are a multiple of 16")
        biases = bias if isinstance(bias, (tuple, list)) else (bias, None)
        if len(biases) != 2:
            raise value_error("bias", f"a tuple of {len(biases)}", "None, a tensor or a pair of tensors")
        for number, one in enumerate(biases):
            if one is not None:
                _torch.check(f"bias[{number}]", one, self.device, (_torch.BF16,), (num_tokens, hidden))
        order = Ordering(self, previous_event, async_finish, allocate_on_comm_stream)
        num_topk = 0
        with order.context:
            combined = _torch.like(x, num_tokens, hidden)
            weights = None
            if topk_weights is not None:
                _torch.check("topk_weights", topk_weights, self.device, (_torch.FLOAT32,), (rows, None))
                num_topk = int(topk_weights.shape[1])
                weights = _torch.like(topk_weights, num_tokens, num_topk)
        native_handle = route.native(rows)
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
        lib = self.native.lib
        lib.check(
            lib.with_gil.deepep_combine(self.native, ctypes.byref(args), order.call(self._config(config, 1), True))
        )
        event = order.finish(
            (x, topk_weights, *biases, combined, weights, route.rank_prefix_matrix, route.send_head, route.recv_src_idx)
        )
        return combined, weights, event

    def internode_dispatch(self, x: Any, *args: Any, **keywords: Any) -> tuple[Any, Any, Any, Any, Any, EventOverlap]:
        """dispatch() with `config` required; the name that internode code calls."""
        self._require_config(args[9] if len(args) > 9 else keywords.get("config"))
        return self.dispatch(x, *args, **keywords)

    def internode_combine(
        self, x: _torch.Tensor, handle: tuple[Any, ...], *args: Any, **keywords: Any
    ) -> tuple[_torch.Tensor, _torch.Tensor | None, EventOverlap]:
        """combine() with `config` required; the name that internode code calls."""
        self._require_config(args[2] if len(args) > 2 else keywords.get("config"))
        return self.combine(x, handle, *args, **keywords)

    # ---- helpers

    @property
    def num_nodes(self) -> int:
        """NVLink domains of the group."""
        return max(1, self.group_size // self.num_nvl_peers)

    def _require_config(self, config: object) -> None:
        assertion(config is not None, "argument config: got None, allowed a Config (internode calls need one)")

    def _wait_counts(self, token: int, num_local_experts: int, held: tuple[Any, ...]) -> tuple[int, list[int]]:
        lib = self.native.lib
        rows, per_expert = ctypes.c_int32(), (ctypes.c_int32 * num_local_experts)()
        while True:
            try:
                status = lib.without_gil.deepep_wait_counts(self.native, token, 50, ctypes.byref(rows), per_expert)
            except BaseException:
                self.hold_until_idle(held)
                raise
            if status == errors.OK:
                return rows.value, list(per_expert)
            if status != errors.PENDING:
                error = lib.error(status)
                self.hold_until_idle(held)  # the stream may still be writing to them
                raise self.native.during_wait(error)

    def hold_until_idle(self, tensors: tuple[Any, ...]) -> None:
        """Keeps tensors until everything issued so far is done."""
        raise NotImplementedError

    def _allocate(
        self, payload: Payload, rows: int, topk_idx: Any = None, topk_weights: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        shape, pool = (rows, payload.x.shape[1]), self.native.rows
        received = pool.empty(shape, payload.x.dtype, self.device) if pool is not None and rows else None
        if received is None and self.host_stream:
            received = self._row_cache.empty(shape, payload.x.dtype)
        elif received is None:
            received = _torch.like(payload.x, *shape)
        scales = None
        if payload.scales is not None:
            scales = _torch.like(payload.scales, rows, payload.num_scales)
        if topk_idx is None:
            return received, scales, None, None
        num_topk = topk_idx.shape[1]
        return received, scales, _torch.like(topk_idx, rows, num_topk), _torch.like(topk_weights, rows, num_topk)

    def _dispatch_args(self, payload: Payload, native_handle: Any, received: Any, recv_scales: Any) -> Any:
        args = _abi.sized(
            _abi.DispatchArgs,
            x_type=_torch.ITEM_TYPES[payload.x.dtype],
            num_scales=payload.num_scales,
            hidden=payload.x.shape[1],
            num_tokens=payload.x.shape[0],
            index_type=1,
            recv_segment=-1,
            x=payload.x.data_ptr(),
            handle=ctypes.addressof(native_handle),
            recv_x=received.data_ptr(),
        )
        pool = self.native.rows
        offset = pool.offset(received) if pool is not None else None
        if offset is not None:
            args.recv_segment, args.recv_segment_offset = pool.index, offset
        if payload.scales is not None:
            args.x_scales, args.recv_x_scales = payload.scales.data_ptr(), recv_scales.data_ptr()
            args.scale_token_stride, args.scale_stride = payload.scales.stride()
        return args

    def _config(self, config: Config | None, kind: int) -> Any:
        if config is not None and not isinstance(config, Config):
            raise type_error("config", type(config).__name__, "a deep_ep.Config or None")
        if config is not None:
            return config._native
        cached = self._default_configs.get((kind, self.num_sms))
        if cached is None:
            cached = Config.default(kind, self.group_size)._native
            cached.num_sms = self.num_sms
            self._default_configs[(kind, self.num_sms)] = cached
        return cached

    _default_configs: dict[tuple[int, int], Any]
    _row_cache: _memory.RowCache

    def _check_experts(self, num_experts: object) -> None:
        if isinstance(num_experts, bool) or not isinstance(num_experts, int):
            raise type_error("num_experts", repr(num_experts), "an int")
        if num_experts < 1 or num_experts % self.group_size:
            raise value_error("num_experts", num_experts, f"a positive multiple of the {self.group_size} ranks")

    def _check_counts(self, payload: Payload, per_rank: Any, in_rank: Any, per_expert: Any) -> tuple[Any, Any, Any]:
        i32, num_tokens = (_torch.INT32,), payload.x.shape[0]
        for name, value in (
            ("num_tokens_per_rank", per_rank), ("is_token_in_rank", in_rank), ("num_tokens_per_expert", per_expert),
        ):  # fmt: skip
            assertion(
                value is not None, f"argument {name}: got None, allowed what get_dispatch_layout returned (or a handle)"
            )
        _torch.check("num_tokens_per_rank", per_rank, self.device, i32, (self.group_size,))
        _torch.check("is_token_in_rank", in_rank, self.device, (_torch.BOOL,), (num_tokens, self.group_size))
        _torch.check("num_tokens_per_expert", per_expert, self.device, i32, (None,))
        self._check_experts(int(per_expert.shape[0]))
        return per_rank, in_rank, per_expert

    def _check_topk(self, num_tokens: int, topk_idx: Any, topk_weights: Any) -> None:
        if (topk_idx is None) != (topk_weights is None):
            missing = "topk_weights" if topk_weights is None else "topk_idx"
            raise value_error(missing, "None", "topk_idx and topk_weights together, or neither")
        if topk_idx is None:
            return
        _torch.check("topk_idx", topk_idx, self.device, tuple(_torch.INDEX_TYPES), (num_tokens, None))
        _torch.check("topk_weights", topk_weights, self.device, (_torch.FLOAT32,), tuple(topk_idx.shape))
