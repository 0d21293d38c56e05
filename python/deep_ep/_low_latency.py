"""Low-latency mode: dispatch straight into per-expert rows and combine back, with hooks."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from . import _abi, errors
from . import _torch as tt
from ._base import Ordering, refuse_keywords
from ._low_latency_plan import RECV, SEND, CombineCall, LowLatencyPlans
from .errors import assertion, value_error
from .utils import EventHandle, EventOverlap

Hook = Callable[[], None]
NO_EVENT = EventOverlap()  # what every call without an event returns
# A combine's addresses, x to wait_recv_cost_stats, are written in one go: to set the fields takes twice as long.
_write_addresses = struct.Struct("=7Q").pack_into
_ADDRESSES = _abi.LlCombineArgs.x.offset


class LowLatencyMode(LowLatencyPlans):
    """low_latency_dispatch, low_latency_combine, cleaning and masks.

    Both look for the plan of calls of their kind first: what it was made from is right and need not be checked again.
    """

    enable_shrink: bool

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
            topk_weights: ``[T, K]`` float32 sent along, so that the send half of a combine may sum at the experts' rank
                too; or None.

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
        if async_finish and return_recv_hook:
            assertion(False, "async_finish and return_recv_hook exclude each other")
        bound, received = num_max_dispatch_tokens_per_rank, cumulative_local_expert_recv_stats
        key = None
        try:
            key = (
                type(x), x.shape, x.dtype, x.get_device(), x.is_contiguous(),
                type(topk_idx), topk_idx.shape, topk_idx.dtype, topk_idx.get_device(), topk_idx.is_contiguous(),
                bound, num_experts, use_fp8, round_scale, use_ue8m0,
            )  # fmt: skip
            plan = self._ll_dispatches[key]
        except (AttributeError, KeyError, RuntimeError, TypeError):  # the first of its kind, or something is wrong
            plan = self._plan_dispatch(key, x, topk_idx, bound, num_experts, use_fp8, round_scale, use_ue8m0)
        waited = dispatch_wait_recv_cost_stats
        more = topk_weights is not None or received is not None or waited is not None
        if more:
            self._check_more(plan, topk_weights, received, waited)
        stream = self.raw_stream()
        outputs = self._take_outputs(plan.key, plan.pool, stream)
        args = outputs.args
        if outputs.numbers is not plan.numbers:  # to set a field takes longer than to ask
            outputs.numbers = plan.numbers
            args.phases, args.flags, args.num_tokens, args.num_topk, args.index_type = plan.numbers
        args.x, args.topk_idx = x.data_ptr(), topk_idx.data_ptr()
        if more or outputs.more:
            outputs.more = more
            args.topk_weights, args.cumulative_recv_stats = tt.address(topk_weights), tt.address(received)
            args.wait_recv_cost_stats = tt.address(waited)
        recv_x, recv_count, src_info, layout_range, scales = outputs.tensors
        handle = (src_info, layout_range, plan.bound, plan.hidden, plan.num_experts)
        event, hook, native = NO_EVENT, None, self.native
        if async_finish or return_recv_hook or self.host_stream:
            if return_recv_hook:
                outputs.numbers = ()  # its phases are the halves'
            # Whoever keeps this keeps the outputs from being used again.
            held = (x, topk_idx, topk_weights, received, waited, outputs, recv_x)
            function = native.low_latency_dispatch
            event, hook = self._issue(function, outputs, stream, async_finish, return_recv_hook, held)
        else:  # both halves, on the caller's stream, which orders everything: nothing has to be kept
            if stream != self._ll_stream:
                self._ll_stream = self._ll_call.stream = stream
            status = native.low_latency_dispatch(native._as_parameter_, outputs.reference, self._ll_reference)
            if status:
                raise native.lib.error(status)
        return ((recv_x, scales) if plan.use_fp8 else recv_x), recv_count, handle, event, hook

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
            unreduced: every expert's row crosses the wire and is summed at the token's rank. Else a rank with a GPU may
                first sum its own experts' rows for a token, and round.

        Returns:
            ``combined_x [T, H]`` BF16 (FP32 sums of weight x row), the event, the hook or None.
        """
        if fork_keywords:
            refuse_keywords("low_latency_combine", fork_keywords)
        if self._kept or not self._ready:
            self.enter()
        if async_finish and return_recv_hook:
            assertion(False, "async_finish and return_recv_hook exclude each other")
        rows = topk_idx if zero_copy else x  # x is ignored then
        key = None
        try:
            src_info, layout_range, bound, hidden, num_experts = handle
            key = (
                type(topk_idx), topk_idx.shape, topk_idx.dtype, topk_idx.get_device(), topk_idx.is_contiguous(),
                type(topk_weights), topk_weights.shape, topk_weights.dtype, topk_weights.get_device(),
                topk_weights.is_contiguous(), type(rows), rows.shape, rows.dtype, rows.get_device(),
                rows.is_contiguous(), type(handle), bound, hidden, num_experts, use_logfmt, zero_copy, unreduced,
            )  # fmt: skip
            plan = self._ll_combines[key]
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            plan = self._plan_combine(key, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, unreduced)
            src_info, layout_range = handle[:2]
        ours = self._ll_known.get(id(src_info))
        if ours is not None and ours.tensors[3] is layout_range and ours.shape == plan.shape:
            sources, ranges = ours.sources
        else:
            sources, ranges = self._check_handle(handle)
        waited = 0
        if combine_wait_recv_cost_stats is not None:
            self._check_wait_stats("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats)
            waited = combine_wait_recv_cost_stats.data_ptr()
        if out is None:  # like x: that takes half as long as to name dtype and device
            out = x.new_empty(*plan.combined) if plan.from_rows else tt.empty(plan.combined, tt.BF16, self.device)
        elif not tt.plain(out, tt.BF16, self._where, plan.combined):
            tt.check("out", out, self.device, (tt.BF16,), plan.combined)
        call = self._ll_combine
        if return_recv_hook:
            # A hook's second half finds the struct as the first left it, so only calls that end here may share one.
            call = self._ll_spare.pop() if self._ll_spare else CombineCall()
        if call.numbers is not plan.numbers:
            call.numbers, args = plan.numbers, call.args
            args.phases, args.flags, args.num_tokens, args.num_max_tokens, args.hidden = plan.numbers[:5]
            args.num_topk, args.num_experts, args.index_type = plan.numbers[5:]
        _write_addresses(
            call.args, _ADDRESSES, 0 if zero_copy else x.data_ptr(), topk_idx.data_ptr(), topk_weights.data_ptr(),
            sources, ranges, out.data_ptr(), waited,
        )  # fmt: skip
        stream, native = self.raw_stream(), self.native
        if not (async_finish or return_recv_hook or self.host_stream):
            if stream != self._ll_stream:
                self._ll_stream = self._ll_call.stream = stream
            status = native.low_latency_combine(native._as_parameter_, call.reference, self._ll_reference)
            if status:
                raise native.lib.error(status)
            return out, NO_EVENT, None
        held = (x, topk_idx, topk_weights, src_info, layout_range, out, combine_wait_recv_cost_stats)
        event, hook = self._issue(native.low_latency_combine, call, stream, async_finish, return_recv_hook, held)
        return out, event, hook

    def _run_low_latency(self, bound: int, hidden: int, num_topk: int, num_experts: int, use_fp8: bool) -> None:
        """Calls that send no row, whole and in halves, so that Python's part of one is warm too. Collective; waits."""
        x = tt.full((bound, hidden), 0, tt.BF16, self.device)
        nobody = tt.full((bound, num_topk), -1, tt.INT64, self.device)
        weights = tt.full((bound, num_topk), 0, tt.FLOAT32, self.device)
        for halves in (False, True):
            sent = self.low_latency_dispatch(x, nobody, bound, num_experts, use_fp8=use_fp8, return_recv_hook=halves)
            if sent[4]:
                sent[4]()
            rows = self.get_next_low_latency_combine_buffer(sent[2])  # nobody reads them
            in_place = not rows.is_contiguous()
            back = self.low_latency_combine(rows, nobody, weights, sent[2], zero_copy=in_place, return_recv_hook=halves)
            if back[2]:
                back[2]()
        if not self.host_stream:
            self.torch_current_stream().synchronize()

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> tt.Tensor:
        """Where the rows of the next combine may be written for ``zero_copy=True``.

        Peers read the rows in place, so no rank may leave two zero-copy combines sent and not received.

        Returns:
            ``[L, R*B, H]`` BF16, rows contiguous, a view of the buffer for the next low-latency call only.
        """
        self.enter()
        self._check_handle(handle)
        _, _, bound, hidden, num_experts = handle
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
        call: tt.Outputs | CombineCall,
        stream: int,
        async_finish: bool,
        return_recv_hook: bool,
        held: tuple[Any, ...],
    ) -> tuple[EventOverlap, Hook | None]:
        """Issues the call whose struct `call` has, or its first half; `held` is kept until it is done."""
        if not return_recv_hook:
            return self._call(function, call.reference, async_finish, held, stream), None
        args, reference = call.args, call.reference
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
            if isinstance(call, CombineCall):
                self._ll_spare.append(call)

        return NO_EVENT, hook

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
        self._ll_stream = call.stream = stream
        if self.host_stream and not call.event:
            call.event = native.take_event()
            call.is_async = 1
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

    def _check_shrink(self) -> None:
        if not self.enable_shrink:
            raise errors.DeepEPError(errors.INVALID_STATE, "masks need a buffer made with enable_shrink=True")
