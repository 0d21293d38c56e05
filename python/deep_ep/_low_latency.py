"""Low-latency mode: dispatch into rows by local expert, and combine. Buffer has the documentation of each call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import _abi, _torch, errors
from ._core import Core
from ._face import Site
from ._low_latency_face import NUM_ENTRIES, LowLatencyFace, hook_was_called, second_half_error
from ._low_latency_plan import (
    COMBINE_ADDRESSES,
    COMBINE_NUMBERS,
    DISPATCH_ADDRESSES,
    DISPATCH_NUMBERS,
    FP4_NUMBERS,
    CallPool,
    CallStructs,
    CombinePlan,
    DispatchPlan,
    Fp4Plan,
    Outputs,
    Plans,
    write_combine_addresses,
    write_dispatch_addresses,
    write_fp4_addresses,
)
from ._ordering import Held, Ordering
from ._torch import BF16, INT32, OptionalTensor, Tensor, opaque
from .errors import assertion, check_flag, check_int
from .utils.event import EventOverlap, no_event

Handle = tuple[Tensor, Tensor, int, int, int]  # src_info, layout_range, B, H, E
Rows = Tensor | tuple[Tensor, Tensor]  # BF16 rows, or FP8 rows with their scales
Hook = Callable[[], None]
Dispatched = tuple[Rows, Tensor, Handle, EventOverlap, "Hook | None"]  # what low_latency_dispatch returns
# What dispatch_fp4 returns: rows, scales, counts, handle, event, hook.
Fp4Dispatched = tuple[Tensor, Tensor, Tensor, Handle, EventOverlap, "Hook | None"]
Combined = tuple[Tensor, EventOverlap, "Hook | None"]  # what low_latency_combine returns
# What the lookup of a plan raises for the first call of a kind, and for arguments that are wrong.
_NO_PLAN = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)


class LowLatencyMode:
    """The low-latency calls of one Buffer.

    Dispatch and combine look for the plan of calls of their kind first: what it was made from is right and need not be
    checked again.
    """

    def __init__(self, core: Core, low_latency_mode: bool, enable_shrink: bool) -> None:
        self._core = core
        self._low_latency_mode, self._enable_shrink = low_latency_mode, enable_shrink
        self.forget()

    def forget(self) -> None:
        """Lets go of what earlier calls have left."""
        self._face: LowLatencyFace | None = None
        self._has_face = True  # until the first call knows
        # On GPUs, once there is a face: make calls that follow a plan, without async_finish and with it.
        self.issue_dispatch: Any = None
        self.issue_combine: Any = None
        self.start_dispatch: Any = None
        self.start_combine: Any = None
        self.plans = Plans(self._core, self._low_latency_mode)
        self._outputs = Outputs(self._core)
        self._dispatches = CallPool(_abi.LlDispatchArgs, DISPATCH_NUMBERS, self._core)
        self._fp4_dispatches = CallPool(_abi.LlDispatchArgs, FP4_NUMBERS, self._core)
        self._combines = CallPool(_abi.LlCombineArgs, COMBINE_NUMBERS, self._core)

    def dispatch(
        self,
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
    ) -> Dispatched:
        """Buffer.low_latency_dispatch."""
        core, key = self._core, None
        if core.kept or not core.is_ready:
            core.enter()
        if self._follows_plans(async_finish, return_recv_hook):
            face = self._opened_face()
            if face is not None:
                given = (
                    x, topk_idx, topk_weights, recv_stats, wait_stats, bound, num_experts, use_fp8, round_scale,
                    use_ue8m0, return_recv_hook,
                )  # fmt: skip
                got = self._follow(face.dispatch, async_finish, given)
                if type(got) is tuple:
                    return got
                key = face.missing(got)
        with _torch.without_modes():
            result, plan = self._dispatch_in_python(
                x, topk_idx, bound, num_experts, recv_stats, wait_stats, use_fp8, round_scale, use_ue8m0, async_finish,
                return_recv_hook, topk_weights,
            )  # fmt: skip
            if key is not None and self._face is not None:
                self._face.add_dispatch(key, plan, topk_weights is not None, return_recv_hook)
        return result

    def _dispatch_in_python(
        self,
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
    ) -> tuple[Dispatched, DispatchPlan]:
        core = self._core
        if async_finish is not False or return_recv_hook is not False:
            async_finish, return_recv_hook = _check_returns(async_finish, return_recv_hook)
        key = None
        try:
            key = (
                type(x), x.shape, x.dtype, x.get_device(), x.is_contiguous(), _torch.whole(x),
                type(topk_idx), topk_idx.shape, topk_idx.dtype, topk_idx.get_device(), topk_idx.is_contiguous(),
                _torch.whole(topk_idx), bound, num_experts, use_fp8, round_scale, use_ue8m0,
            )  # fmt: skip
            plan = self.plans.dispatches[key]
        except _NO_PLAN:
            plan = self.plans.add_dispatch(key, x, topk_idx, bound, num_experts, use_fp8, round_scale, use_ue8m0)
        weights = stats = waited = 0
        if topk_weights is not None or recv_stats is not None or wait_stats is not None:
            weights, stats, waited = self.plans.check_optional(plan, topk_weights, recv_stats, wait_stats)
        recv_x, scales, recv_count, src_info, layout_range = outputs = self._outputs.make(plan)
        call = self._dispatches.take(plan)
        write_dispatch_addresses(
            call.args, DISPATCH_ADDRESSES, x.data_ptr(), topk_idx.data_ptr(), weights, recv_x.data_ptr(),
            0 if scales is None else scales.data_ptr(), recv_count.data_ptr(), src_info.data_ptr(),
            layout_range.data_ptr(), stats, waited,
        )  # fmt: skip
        event, hook, native = None, None, core.native
        if core.host_stream or async_finish or return_recv_hook:
            held = (x, topk_idx, topk_weights, recv_stats, wait_stats, *outputs)
            pool = self._dispatches
            event, hook = self._issue(native.low_latency_dispatch, call, pool, async_finish, return_recv_hook, held)
        else:  # both halves, on the caller's stream, which orders everything: nothing has to be kept
            stream = core.raw_stream()
            if stream != call.stream:
                call.stream = call.call.stream = stream
            status = native.low_latency_dispatch(native._as_parameter_, call.args_reference, call.call_reference)
            if status:
                raise native.error(status)
            self._dispatches.idle.append(call)
        received = recv_x if scales is None else (recv_x, scales)
        handle = (src_info, layout_range, plan.bound, plan.hidden, plan.num_experts)
        return (received, recv_count, handle, event or no_event(), hook), plan

    def dispatch_fp4(
        self,
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
        core = self._core
        if core.kept or not core.is_ready:
            core.enter()
        with _torch.without_modes():
            async_finish, return_recv_hook = _check_returns(async_finish, return_recv_hook)
            key = None
            try:
                tensors = [x, topk_idx] if scales is None else [x, topk_idx, scales]
                kinds = [(type(t), t.shape, t.dtype, t.get_device(), t.is_contiguous()) for t in tensors]
                key = (*kinds, *map(_torch.whole, tensors), bound, num_experts, fp4)
                plan = self.plans.dispatches[key]
            except _NO_PLAN:
                plan = self.plans.add_fp4(key, x, scales, topk_idx, bound, num_experts, fp4)
            assert isinstance(plan, Fp4Plan)
            weights, stats, waited = self.plans.check_optional(plan, topk_weights, recv_stats, wait_stats)
            outputs = self._outputs.make(plan)
            recv_x, recv_scales, recv_count, src_info, layout_range = outputs
            assert recv_scales is not None
            call = self._fp4_dispatches.take(plan)
            write_fp4_addresses(
                call.args, DISPATCH_ADDRESSES, x.data_ptr(), topk_idx.data_ptr(), weights, recv_x.data_ptr(),
                recv_scales.data_ptr(), recv_count.data_ptr(), src_info.data_ptr(), layout_range.data_ptr(), stats,
                waited, 0 if scales is None else scales.data_ptr(),
            )  # fmt: skip
            held = (x, scales, topk_idx, topk_weights, recv_stats, wait_stats, *outputs)
            function, pool = core.native.low_latency_dispatch, self._fp4_dispatches
            event, hook = self._issue(function, call, pool, async_finish, return_recv_hook, held)
            handle = (src_info, layout_range, plan.bound, plan.hidden, plan.num_experts)
            return (*plan.shaped(recv_x, recv_scales), recv_count, handle, event, hook)

    def combine(
        self,
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
    ) -> Combined:
        """Buffer.low_latency_combine."""
        core, key = self._core, None
        if core.kept or not core.is_ready:
            core.enter()
        follows = self._follows_plans(async_finish, return_recv_hook)
        if follows and type(handle) is tuple and len(handle) == NUM_ENTRIES:
            face = self._opened_face()
            if face is not None:
                src_info, layout_range, bound, hidden, num_experts = handle
                given = (
                    None if zero_copy is True else x, topk_idx, topk_weights, src_info, layout_range, out, wait_stats,
                    bound, hidden, num_experts, use_logfmt, zero_copy, unreduced, return_recv_hook,
                )  # fmt: skip
                got = self._follow(face.combine, async_finish, given)
                if type(got) is tuple:
                    return got
                key = face.missing(got)
        with _torch.without_modes():
            result, plan = self._combine_in_python(
                x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out,
                wait_stats, unreduced,
            )  # fmt: skip
            if key is not None and self._face is not None:
                self._face.add_combine(key, plan, out is not None, return_recv_hook)
        return result

    def _combine_in_python(
        self,
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
    ) -> tuple[Combined, CombinePlan]:
        core = self._core
        if async_finish is not False or return_recv_hook is not False:
            async_finish, return_recv_hook = _check_returns(async_finish, return_recv_hook)
        key = None
        try:
            rows = topk_idx if zero_copy else x  # x is ignored then
            src_info, layout_range, bound, hidden, num_experts = handle
            key = (
                type(topk_idx), topk_idx.shape, topk_idx.dtype, topk_idx.get_device(), topk_idx.is_contiguous(),
                type(topk_weights), topk_weights.shape, topk_weights.dtype, topk_weights.get_device(),
                topk_weights.is_contiguous(), type(rows), rows.shape, rows.dtype, rows.get_device(),
                rows.is_contiguous(), type(handle), bound, hidden, num_experts, use_logfmt, zero_copy, unreduced,
                _torch.whole(topk_idx), _torch.whole(topk_weights), _torch.whole(rows),
            )  # fmt: skip
            plan = self.plans.combines[key]
        except _NO_PLAN:
            plan = self.plans.add_combine(key, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, unreduced)
            src_info, layout_range = handle[:2]
        sources, ranges = self.plans.sources(plan, src_info, layout_range)
        waited = 0
        if wait_stats is not None:
            waited = self.plans.wait_stats("combine_wait_recv_cost_stats", wait_stats)
        if out is None:
            out = self._outputs.make_combined(plan)
        elif not _torch.plain(out, BF16, core.ordinal, plan.combined_shape):
            _torch.check("out", out, core.device, (BF16,), plan.combined_shape)
        call = self._combines.take(plan)
        write_combine_addresses(
            call.args, COMBINE_ADDRESSES, 0 if zero_copy else x.data_ptr(), topk_idx.data_ptr(),
            topk_weights.data_ptr(), sources, ranges, out.data_ptr(), waited,
        )  # fmt: skip
        native = core.native
        if core.host_stream or async_finish or return_recv_hook:
            held = (x, topk_idx, topk_weights, src_info, layout_range, out, wait_stats)
            pool = self._combines
            event, hook = self._issue(native.low_latency_combine, call, pool, async_finish, return_recv_hook, held)
            return (out, event, hook), plan
        stream = core.raw_stream()
        if stream != call.stream:
            call.stream = call.call.stream = stream
        status = native.low_latency_combine(native._as_parameter_, call.args_reference, call.call_reference)
        if status:
            raise native.error(status)
        self._combines.idle.append(call)
        return (out, no_event(), None), plan

    def next_combine_buffer(self, handle: Sequence[Any]) -> Tensor:
        """Buffer.get_next_low_latency_combine_buffer."""
        core = self._core
        core.enter()
        bound, hidden, num_experts = self.plans.check_handle(handle)
        native, pointer, stride = core.native, ctypes.c_void_p(), ctypes.c_uint64()
        native.check(
            native.lib.with_gil.deepep_next_low_latency_combine_buffer(
                native, bound, hidden, num_experts, ctypes.byref(pointer), ctypes.byref(stride)
            )
        )
        local, rows, step = num_experts // core.group_size, core.group_size * bound, stride.value // 2
        flat = _torch.view_of(pointer.value or 0, local * rows * stride.value, core.device, core).view(BF16)
        return flat.as_strided((local, rows, hidden), (rows * step, step, 1))

    def clean(self, bound: int, hidden: int, num_experts: int) -> None:
        """Buffer.clean_low_latency_buffer."""
        core = self._core
        core.enter()
        bound, num_experts = self.plans.check_sizes(bound, hidden, num_experts)
        core.on_current_stream(
            core.native.lib.with_gil.deepep_clean_low_latency_buffer, bound, int(hidden), num_experts
        )

    def update_mask(self, rank_to_mask: int, mask: bool) -> None:
        """Buffer.low_latency_update_mask_buffer."""
        core = self._core
        self._check_shrink()
        rank = check_int("rank_to_mask", rank_to_mask, 0, core.group_size - 1)
        core.enter()
        core.on_current_stream(core.native.lib.with_gil.deepep_update_mask, rank, int(check_flag("mask", mask)))

    def query_mask(self, mask_status: Tensor) -> None:
        """Buffer.low_latency_query_mask_buffer."""
        core = self._core
        self._check_shrink()
        _torch.check("mask_status", mask_status, core.device, (INT32,), (core.group_size,))
        core.enter()
        function = core.native.lib.with_gil.deepep_query_mask
        core.on_current_stream(function, mask_status.data_ptr(), held=(mask_status,))

    def clean_mask(self) -> None:
        """Buffer.low_latency_clean_mask_buffer."""
        core = self._core
        self._check_shrink()
        core.enter()
        core.on_current_stream(core.native.lib.with_gil.deepep_clean_mask)

    # ---- helpers

    def _issue(
        self,
        function: Any,
        call: CallStructs,
        pool: CallPool,
        async_finish: bool,
        return_recv_hook: bool,
        held: Held,
    ) -> tuple[EventOverlap, Hook | None]:
        """Issues a call, or its first half; `held` is kept until it is done."""
        stream = self._core.raw_stream()
        if return_recv_hook:
            call.numbers = ()  # its phases are the halves'
            call.args.phases = _abi.SEND
            self._run(function, call, stream, held)
            receive = functools.partial(self._receive, function, call, pool, stream, held)
            return EventOverlap(), _Hook(receive, (self._core, held) if self._core.runs_beside else None)
        if async_finish:
            return self._run_asynchronously(function, call, pool, held), None
        self._run(function, call, stream, held)
        pool.idle.append(call)
        return EventOverlap(), None

    def _run_asynchronously(self, function: Any, call: CallStructs, pool: CallPool, held: Held) -> EventOverlap:
        core = self._core
        if core.host_stream:
            references = call.args_reference, call.call_reference
            return core.run_asynchronously(call, pool.idle, held, function, *references)
        event = Ordering(core, None, True, False).last(function, call.args_reference, held=held)
        pool.idle.append(call)
        return event

    def _run(self, function: Any, call: CallStructs, stream: int, held: Held) -> None:
        """Issues a call that `stream` orders; the CPU engine waits for it."""
        core = self._core
        if core.host_stream:
            core.run_on_host(call, held, function, call.args_reference, call.call_reference)
            return
        if stream != call.stream:
            call.stream = call.call.stream = stream
        status = function(core.native._as_parameter_, call.args_reference, call.call_reference)
        if status:
            raise core.native.error(status)

    def _receive(self, function: Any, call: CallStructs, pool: CallPool, stream: int, held: Held) -> None:
        """The second half of a call."""
        call.args.phases = _abi.RECV
        self._run(function, call, stream, held)
        pool.idle.append(call)

    def _follows_plans(self, async_finish: object, return_recv_hook: object) -> bool:
        """Whether such calls may go through the compiled face; flags of a wrong type are Python's to refuse."""
        if async_finish is False:
            return return_recv_hook is False or return_recv_hook is True
        return async_finish is True and return_recv_hook is False

    def _follow(self, site: Site, async_finish: bool, given: tuple[Any, ...]) -> Any:
        """Makes a call by its plan. Returns what the call returns, or why there is no plan."""
        if not self._core.host_stream:
            return (site.start if async_finish else site.issue)(*given)
        if not async_finish:
            return site.run(self._core.take_launch_with_event(), *given)
        got, handle = site.start_on_host(*given)
        if handle is not None:
            next(one for one in got if type(one) is EventOverlap).event = handle
        return got

    def refused(self, got: Any) -> None:
        """After one of these has made no call.

        Raises:
            DeepEPError: since the library refused it.
        """
        if type(got) is list:
            raise self._core.native.error(got[0])

    def _opened_face(self) -> LowLatencyFace | None:
        if self._face is None and self._has_face:
            self._face = LowLatencyFace.of(self._core)
            self._has_face = self._face is not None
            if self._face is not None and not self._core.host_stream:
                dispatch, combine = self._face.dispatch, self._face.combine
                self.issue_dispatch, self.start_dispatch = dispatch.issue, dispatch.start
                self.issue_combine, self.start_combine = combine.issue, combine.start
        return self._face

    def _check_shrink(self) -> None:
        if not self._enable_shrink:
            raise errors.DeepEPError(errors.INVALID_STATE, "masks need a buffer made with enable_shrink=True")


def _check_returns(async_finish: object, return_recv_hook: object) -> tuple[bool, bool]:
    """The two flags that say when a call returns."""
    later, half = check_flag("async_finish", async_finish), check_flag("return_recv_hook", return_recv_hook)
    assertion(not (later and half), "async_finish and return_recv_hook exclude each other")
    return later, half


class _Hook:
    """Issues the second half of a call, on the stream that was current when the first was issued. Once."""

    __slots__ = ("_issue", "_used")

    def __init__(self, issue: Callable[[], None], used: tuple[Core, Held] | None) -> None:
        """`used`: tensors that the call may use until the hook is called, and whose communication stream it is on."""
        self._issue: Callable[[], None] | None = issue
        self._used = used

    def __del__(self) -> None:
        if self._issue is not None and self._used is not None:
            core, tensors = self._used
            core.record_on_comm_stream(tensors)

    @opaque
    def __call__(self) -> None:
        issue, self._issue = self._issue, None
        if issue is None:
            raise hook_was_called()
        try:
            issue()
        except errors.DeepEPError as error:
            if self._used is not None:
                self._issue = issue  # as it was: it may be called again
            raise second_half_error(error) from None
