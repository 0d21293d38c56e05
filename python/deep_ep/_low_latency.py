"""Low-latency mode: dispatch straight into per-expert rows and combine back, with hooks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from . import _abi, errors
from . import _torch as tt
from ._base import BufferBase, Ordering, refuse_keywords
from .errors import assertion, value_error
from .utils import EventHandle, EventOverlap

SEND, RECV, SEND_RECV = 1, 2, 3
ROUND_SCALE, UE8M0, LOGFMT, ZERO_COPY, UNREDUCED = 1, 2, 4, 8, 16
Hook = Callable[[], None]
NO_EVENT = EventOverlap()  # what every call without an event returns


class LowLatencyMode(BufferBase):
    """low_latency_dispatch, low_latency_combine, cleaning and masks."""

    low_latency_mode: bool
    enable_shrink: bool
    _outputs: dict[tuple[Any, ...], list[tt.Outputs]]
    _zero_copy: tt.Tensor | None

    def low_latency_dispatch(
        self,
        x: tt.Tensor,
        topk_idx: tt.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: tt.Tensor | None = None,
        dispatch_wait_recv_cost_stats: tt.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: tt.Tensor | None = None,
        **fork_keywords: Any,
    ) -> tuple[Any, tt.Tensor, tuple[Any, ...], EventOverlap, Hook | None]:
        """Sends each token to its experts' ranks, into rows by local expert.

        Args:
            x: ``[T, H]`` BF16, T <= B, H a multiple of 128.
            topk_idx: ``[T, K]`` int64 or int32, K <= 32; -1 is skipped, a repeated expert gets one row.
            num_max_dispatch_tokens_per_rank: B, the same on all ranks.
            num_experts: E, the same on all ranks, a multiple of their number.
            cumulative_local_expert_recv_stats: ``[L]`` int32, += received tokens, or None.
            dispatch_wait_recv_cost_stats: ``[R]`` int64, += nanoseconds waited for each rank, or None.
            use_fp8: cast to e4m3 with one scale a token and 128 channels.
            round_scale: scales are powers of two.
            use_ue8m0: scales are packed exponent bytes; needs round_scale and H a multiple of 512.
            async_finish: True: the caller waits through the returned event.
            return_recv_hook: True: only send now; the hook receives, on the stream that is current now.
            topk_weights: ``[T, K]`` float32 sent along, so that combine may sum at the experts' rank; or None.

        Returns:
            ``recv_x``: ``[L, R*B, H]`` BF16, or with FP8 the pair (e4m3, scales ``[L, R*B, H/128]`` float32, column-
            major in the last two axes; with use_ue8m0 ``[L, R*B, H/512]`` int32); ``recv_count [L]`` int32; the handle
            ``(src_info [L, R*B], layout_range [L, R], B, H, E)``; the event; the hook or None.

        Raises:
            DeepEPError: a third send without its receive; a rank is late, dead or disagrees. Also a ValueError or
                TypeError for a wrong argument.
        """
        if fork_keywords:
            refuse_keywords("low_latency_dispatch", fork_keywords)
        if self._kept or not self._ready:
            self.enter()
        if (num_max_dispatch_tokens_per_rank, num_experts) != self._ll_shape:
            self._ll_shape = self._check_shape(num_max_dispatch_tokens_per_rank, num_experts)
        bound, num_experts = self._ll_shape
        if async_finish and return_recv_hook:
            assertion(False, "async_finish and return_recv_hook exclude each other")
        shape = tt.token_shape(x, topk_idx, self._where)
        if shape is None or shape[0] > bound or shape[1] % 128 or not shape[1]:
            shape = self._check_tokens(x, topk_idx, bound)
        num_tokens, hidden, num_topk = shape
        if use_ue8m0:
            self._check_ue8m0(use_fp8, round_scale, hidden)
        local = num_experts // self.group_size
        if topk_weights is not None:
            tt.check("topk_weights", topk_weights, self.device, (tt.FLOAT32,), (num_tokens, num_topk))
        if cumulative_local_expert_recv_stats is not None:
            self._check_stats("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, tt.INT32, local)
        if dispatch_wait_recv_cost_stats is not None:
            self._check_wait_stats("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats)
        outputs = self._take_outputs((local, bound, hidden, bool(use_fp8), bool(use_ue8m0)))
        args, received, waited = outputs.args, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        flags = (ROUND_SCALE if round_scale else 0) | (UE8M0 if use_ue8m0 else 0)
        numbers = (flags, num_tokens, num_topk, 1 if topk_idx.dtype is tt.INT64 else 0)
        if numbers != outputs.numbers:  # setting a field costs more than comparing all of them
            outputs.numbers = numbers
            args.flags, args.num_tokens, args.num_topk, args.index_type = numbers
        args.x, args.topk_idx = x.data_ptr(), topk_idx.data_ptr()
        more = topk_weights is not None or received is not None or waited is not None
        if more or outputs.more:
            outputs.more = more
            args.topk_weights, args.cumulative_recv_stats = tt.address(topk_weights), tt.address(received)
            args.wait_recv_cost_stats = tt.address(waited)
        recv_x, recv_count, src_info, layout_range, scales = outputs.tensors
        handle = (src_info, layout_range, bound, hidden, num_experts)
        function, reference = self.native.lib.quick.deepep_low_latency_dispatch, outputs.reference
        event, hook = NO_EVENT, None
        if async_finish or return_recv_hook or self.host_stream:
            # Whoever keeps this keeps the outputs from being used again.
            held = (x, topk_idx, topk_weights, received, waited, outputs, recv_x)
            event, hook = self._issue(function, args, reference, async_finish, return_recv_hook, held)
        else:
            self._call_now(function, args, reference)
        return ((recv_x, scales) if use_fp8 else recv_x), recv_count, handle, event, hook

    def low_latency_combine(
        self,
        x: tt.Tensor,
        topk_idx: tt.Tensor,
        topk_weights: tt.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: tt.Tensor | None = None,
        combine_wait_recv_cost_stats: tt.Tensor | None = None,
        *,
        unreduced: bool = False,
        **fork_keywords: Any,
    ) -> tuple[tt.Tensor, EventOverlap, Hook | None]:
        """Sums each token's rows, weighted, back at its own rank.

        Args:
            x: ``[L, R*B, H]`` BF16: the experts' outputs, row by row as dispatch delivered them.
            topk_idx: ``[T, K]`` as given to dispatch.
            topk_weights: ``[T, K]`` float32.
            handle: of the dispatch.
            use_logfmt: rows cross the wire in LogFMT-10.
            zero_copy: the rows are in get_next_low_latency_combine_buffer(); x is ignored. Not with use_logfmt.
            async_finish, return_recv_hook: as in low_latency_dispatch.
            out: ``[T, H]`` BF16 to fill, or None.
            combine_wait_recv_cost_stats: ``[R]`` int64, += nanoseconds waited for each rank, or None.
            unreduced: every expert's row crosses the wire, even where its rank knows the weights.

        Returns:
            ``combined_x [T, H]`` BF16 (FP32 sums of weight x row), the event, the hook or None.
        """
        if fork_keywords:
            refuse_keywords("low_latency_combine", fork_keywords)
        if self._kept or not self._ready:
            self.enter()
        if async_finish and return_recv_hook:
            assertion(False, "async_finish and return_recv_hook exclude each other")
        if use_logfmt and zero_copy:
            raise value_error("zero_copy", "True with use_logfmt=True", "one of them")
        src_info, layout_range, bound, hidden, num_experts = self._check_handle(handle)
        local, rows, where = num_experts // self.group_size, self.group_size * bound, self._where
        if not tt.plain(topk_idx, tt.INT64, where):
            tt.check("topk_idx", topk_idx, self.device, tuple(tt.INDEX_TYPES), (None, None))
        num_tokens, num_topk = topk_idx.shape
        if num_tokens > bound:
            raise value_error("topk_idx", f"{num_tokens} tokens", f"at most B = {bound}")
        if not tt.plain(topk_weights, tt.FLOAT32, where, (num_tokens, num_topk)):
            tt.check("topk_weights", topk_weights, self.device, (tt.FLOAT32,), (num_tokens, num_topk))
        if combine_wait_recv_cost_stats is not None:
            self._check_wait_stats("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats)
        if not zero_copy and not tt.plain(x, tt.BF16, where, (local, rows, hidden)):
            tt.check("x", x, self.device, (tt.BF16,), (local, rows, hidden))
        if out is None:
            out = tt.empty((num_tokens, hidden), tt.BF16, self.device)
        elif not tt.plain(out, tt.BF16, where, (num_tokens, hidden)):
            tt.check("out", out, self.device, (tt.BF16,), (num_tokens, hidden))
        flags = (LOGFMT if use_logfmt else 0) | (ZERO_COPY if zero_copy else 0) | (UNREDUCED if unreduced else 0)
        numbers = (
            *(flags, num_tokens, bound, hidden, num_topk, num_experts),
            1 if topk_idx.dtype is tt.INT64 else 0,
        )
        args, reference, before = self._ll_combine, self._ll_combine_reference, self._ll_combine_numbers
        if return_recv_hook:
            # A hook's second half finds the struct as the first left it, so only calls that end here may share one.
            args, before = _abi.sized(_abi.LlCombineArgs), ()
            reference = ctypes.byref(args)
        else:
            self._ll_combine_numbers = numbers
        if numbers != before:
            args.flags, args.num_tokens, args.num_max_tokens, args.hidden = numbers[:4]
            args.num_topk, args.num_experts, args.index_type = numbers[4:]
        args.x = None if zero_copy else x.data_ptr()
        args.topk_idx, args.topk_weights = topk_idx.data_ptr(), topk_weights.data_ptr()
        args.src_info, args.layout_range = src_info.data_ptr(), layout_range.data_ptr()
        args.combined_x = out.data_ptr()
        args.wait_recv_cost_stats = tt.address(combine_wait_recv_cost_stats)
        function = self.native.lib.quick.deepep_low_latency_combine
        if not (async_finish or return_recv_hook or self.host_stream):
            self._call_now(function, args, reference)
            return out, NO_EVENT, None
        held = (x, topk_idx, topk_weights, src_info, layout_range, out, combine_wait_recv_cost_stats)
        event, hook = self._issue(function, args, reference, async_finish, return_recv_hook, held)
        return out, event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> tt.Tensor:
        """Where the rows of the next combine may be written for ``zero_copy=True``.

        Peers read the rows in place, so no rank may leave two zero-copy combines sent and not received.

        Returns:
            ``[L, R*B, H]`` BF16, rows contiguous, a view of the buffer for the next low-latency call only.
        """
        self.enter()
        _, _, bound, hidden, num_experts = self._check_handle(handle)
        lib, pointer, stride = self.native.lib, ctypes.c_void_p(), ctypes.c_uint64()
        lib.check(
            lib.quick.deepep_next_low_latency_combine_buffer(
                self.native, bound, hidden, num_experts, ctypes.byref(pointer), ctypes.byref(stride)
            )
        )
        local, rows, step = num_experts // self.group_size, self.group_size * bound, stride.value // 2
        flat = tt.view_of(pointer.value or 0, local * rows * stride.value, self.device, self).view(tt.BF16)
        return flat.as_strided((local, rows, hidden), (rows * step, step, 1))

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Empties the low-latency slots of every rank, e.g. after normal mode used the same memory. Collective."""
        self.enter()
        bound, num_experts = self._check_shape(num_max_dispatch_tokens_per_rank, num_experts)
        function = self.native.lib.quick.deepep_clean_low_latency_buffer
        self._on_current_stream(function, bound, hidden, num_experts)

    def barrier(self) -> None:
        """Waits, on the current stream, until every rank has come here. Collective."""
        self.enter()
        self._on_current_stream(self.native.lib.quick.deepep_barrier)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks (True) or unmasks a rank: nothing is sent to or awaited from a masked one. Needs enable_shrink."""
        self._check_shrink()
        if not isinstance(rank_to_mask, int) or not 0 <= rank_to_mask < self.group_size:
            raise value_error("rank_to_mask", rank_to_mask, f"0 <= rank < {self.group_size}")
        self.enter()
        self._on_current_stream(self.native.lib.quick.deepep_update_mask, rank_to_mask, int(bool(mask)))

    def low_latency_query_mask_buffer(self, mask_status: tt.Tensor) -> None:
        """Writes 1 for each masked rank into ``mask_status [R] int32``. Needs enable_shrink."""
        self._check_shrink()
        tt.check("mask_status", mask_status, self.device, (tt.INT32,), (self.group_size,))
        self.enter()
        self._on_current_stream(self.native.lib.quick.deepep_query_mask, mask_status.data_ptr(), held=(mask_status,))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks every rank. Needs enable_shrink."""
        self._check_shrink()
        self.enter()
        self._on_current_stream(self.native.lib.quick.deepep_clean_mask)

    # ---- helpers

    def _issue(
        self,
        function: Any,
        args: Any,
        reference: Any,
        async_finish: bool,
        return_recv_hook: bool,
        held: tuple[Any, ...],
    ) -> tuple[EventOverlap, Hook | None]:
        stream = self.raw_stream()
        if not return_recv_hook:
            args.phases = SEND_RECV
            return self._call(function, reference, async_finish, held, stream), None
        args.phases = SEND
        self._call(function, reference, False, held, stream)

        done = False

        def hook() -> None:
            nonlocal done, held
            if done:
                raise errors.DeepEPError(errors.INVALID_STATE, "the hook was called already")
            done = True
            args.phases = RECV
            self._call(function, reference, False, held, stream)
            held = ()

        return NO_EVENT, hook

    def _call_now(self, function: Any, args: Any, reference: Any) -> None:
        """Both halves, on the caller's stream, which orders everything: nothing has to be kept."""
        args.phases = SEND_RECV
        self._ll_call.stream = self.raw_stream()
        status = function(self.native._as_parameter_, reference, self._ll_reference)
        if status:
            raise self.native.lib.error(status)

    _ll_shape: tuple[int, int]
    _ll_known: dict[int, tt.Outputs]  # by the id of src_info: whose handles need no checks
    _ll_call: Any
    _ll_reference: Any
    _ll_async: Any
    _ll_async_reference: Any
    _ll_combine: Any
    _ll_combine_reference: Any
    _ll_combine_numbers: tuple[int, ...]
    _where: int

    def _call(
        self, function: Any, reference: Any, async_finish: bool, held: tuple[Any, ...], stream: int
    ) -> EventOverlap:
        native = self.native
        if async_finish and self.host_stream:
            call = self._ll_async
            call.event = event = native._events.pop() if native._events else native.take_event()
            status = function(native._as_parameter_, reference, self._ll_async_reference)
            if status:
                native.give_event(event)
                raise native.lib.error(status)
            handle = EventHandle._of_call(self, event)  # the caller may drop it unwaited
            self.keep(handle, held)
            return EventOverlap(handle)
        if async_finish:
            order = Ordering(self, None, True, False)
            native.lib.check(function(native, reference, order.call(None, True)))
            tensors = [t for entry in held for t in (entry.tensors if isinstance(entry, tt.Outputs) else (entry,))]
            return order.finish(tuple(tensors))
        call = self._ll_call
        call.stream = stream
        if self.host_stream and not call.event:
            call.event = native.take_event()
            call.__setattr__("async", 1)
        status = function(native._as_parameter_, reference, self._ll_reference)
        if status:
            raise native.lib.error(status)
        if self.host_stream:
            try:
                native.wait_event(call.event)
            except BaseException:  # the work may still go on: its tensors stay, and the event is not used again
                self.keep(EventHandle._of_call(self, call.event), held)
                call.event = None
                raise
        return NO_EVENT

    def _on_current_stream(self, function: Any, *values: Any, held: tuple[Any, ...] = ()) -> None:
        order = Ordering(self, None, False, False)
        self.native.lib.check(function(self.native, *values, order.call(None, True)))
        order.finish(held)

    def _take_outputs(self, key: tuple[int, int, int, bool, bool]) -> tt.Outputs:
        """Outputs of this shape that nobody holds, made anew if there are none."""
        pool = self._outputs.get(key)
        if pool is None:
            pool = self._outputs[key] = []
        stream = self.raw_stream()
        for candidate in pool:
            if candidate.stream == stream and candidate.unused():
                return candidate
        outputs = self._new_outputs(*key)
        outputs.stream = stream
        if len(pool) < 8:
            pool.append(outputs)
            self._ll_known[id(outputs.tensors[2])] = outputs  # which live as long as the buffer
        return outputs

    def _new_outputs(self, local: int, bound: int, hidden: int, use_fp8: bool, ue8m0: bool) -> tt.Outputs:
        rows, i32 = self.group_size * bound, tt.INT32
        scales = ((local, hidden // 512, rows), i32) if ue8m0 else ((local, hidden // 128, rows), tt.FLOAT32)
        specs: list[Any] = [
            ((local, rows, hidden), tt.FP8 if use_fp8 else tt.BF16),
            ((local,), i32),
            ((local, rows), i32),
            ((local, self.group_size), tt.INT64),
            scales if use_fp8 else ((0, 0, 0), tt.FLOAT32),
        ]
        outputs = tt.Outputs(specs, self.device)
        pointers = [tensor.data_ptr() for tensor in outputs.tensors]
        outputs.tensors[4] = outputs.tensors[4].transpose(1, 2)
        outputs.ready()
        outputs.args = _abi.sized(
            _abi.LlDispatchArgs,
            num_max_tokens=bound,
            hidden=hidden,
            num_experts=local * self.group_size,
            use_fp8=int(use_fp8),
            recv_x=pointers[0],
            recv_count=pointers[1],
            src_info=pointers[2],
            layout_range=pointers[3],
            recv_x_scales=pointers[4] if use_fp8 else None,
        )
        outputs.reference = ctypes.byref(outputs.args)
        outputs.shape = (bound, hidden, local * self.group_size)
        return outputs

    def _check_ue8m0(self, use_fp8: bool, round_scale: bool, hidden: int) -> None:
        if not (use_fp8 and round_scale):
            raise value_error(
                "use_ue8m0", f"True with use_fp8={use_fp8}, round_scale={round_scale}", "both of them True"
            )
        if hidden % 512:
            raise value_error("use_ue8m0", f"True with hidden {hidden}", "a hidden that is a multiple of 512")

    def _check_shape(self, bound: object, num_experts: object) -> tuple[int, int]:
        assertion(self.low_latency_mode, "the buffer was made with low_latency_mode=False")
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
            raise value_error("num_max_dispatch_tokens_per_rank", repr(bound), "an int >= 1")
        if (
            isinstance(num_experts, bool)
            or not isinstance(num_experts, int)
            or num_experts < 1
            or num_experts % self.group_size
        ):
            raise value_error("num_experts", repr(num_experts), f"a positive multiple of the {self.group_size} ranks")
        return bound, num_experts

    def _check_tokens(self, x: tt.Tensor, topk_idx: tt.Tensor, bound: int) -> tuple[int, int, int]:
        if not tt.plain(x, tt.BF16, self._where):
            tt.check("x", x, self.device, (tt.BF16,), (None, None))
        num_tokens, hidden = x.shape
        if num_tokens > bound:
            raise value_error("x", f"{num_tokens} tokens", f"at most num_max_dispatch_tokens_per_rank = {bound}")
        if hidden == 0 or hidden % 128:
            raise value_error("x", f"hidden {hidden}", "a hidden that is a multiple of 128")
        if not (tt.plain(topk_idx, tt.INT64, self._where) and topk_idx.shape[0] == num_tokens):
            tt.check("topk_idx", topk_idx, self.device, tuple(tt.INDEX_TYPES), (num_tokens, None))
        return num_tokens, hidden, topk_idx.shape[1]

    def _check_stats(self, name: str, tensor: object, dtype: Any, length: int) -> None:
        tt.check(name, tensor, self.device, (dtype,), (length,))

    def _check_wait_stats(self, name: str, tensor: object) -> None:
        self._check_stats(name, tensor, tt.INT64, self.group_size)

    def _check_handle(self, handle: object) -> tuple[Any, Any, int, int, int]:
        if not isinstance(handle, tuple) or len(handle) != 5:
            given = f"a tuple of {len(handle)}" if isinstance(handle, tuple) else type(handle).__name__
            raise errors.type_error("handle", given, "the handle that low_latency_dispatch returned")
        src_info, layout_range, bound, hidden, num_experts = handle
        ours = self._ll_known.get(id(src_info))
        if ours is not None and ours.made(src_info, layout_range, bound, hidden, num_experts):
            return handle
        if (bound, num_experts) != self._ll_shape:
            bound, num_experts = self._check_shape(bound, num_experts)
        local, ranks = num_experts // self.group_size, self.group_size
        if not tt.plain(src_info, tt.INT32, self._where, (local, ranks * bound)):
            tt.check("handle: src_info", src_info, self.device, (tt.INT32,), (local, ranks * bound))
        if not tt.plain(layout_range, tt.INT64, self._where, (local, ranks)):
            tt.check("handle: layout_range", layout_range, self.device, (tt.INT64,), (local, ranks))
        return src_info, layout_range, bound, hidden, num_experts

    def _check_shrink(self) -> None:
        if not self.enable_shrink:
            raise errors.DeepEPError(errors.INVALID_STATE, "masks need a buffer made with enable_shrink=True")
