"""EPBuffer: ElasticBuffer as DeepEP 2.5 has it, with results that wait, and load balancing of weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from . import _elastic_sizes, _torch, errors
from ._balance import Balancing, BufferAllocator, Tensors
from ._balance import sms as _even
from ._elastic import EPHandle, Event, Rows, Sending, check_reference, cut_short, refer
from ._torch import UINT8, OptionalTensor, Tensor, is_compiling, native, opaque
from .bootstrap import Bootstrap
from .elastic import CPU_SECONDS, GPU_SECONDS, USUAL_SMS, ElasticBuffer, Group
from .errors import assertion, check_flag, check_int
from .utils import EventHandle, EventOverlap

__all__ = ["BufferAllocator", "EPBuffer"]


class _SecondHalf:
    """What the first wait for a deferred call does. It lives as long as the event has it."""

    def __init__(self, buffer: EPBuffer, what: str, rest: Callable[[], Any], begun: Sending | None = None) -> None:
        """`begun`: a dispatch of which only the counts were exchanged, which `rest` finishes."""
        self.what, self.is_due = what, True
        self._buffer, self._seat, self._rest, self._begun = buffer, buffer._seat, rest, begun

    def __call__(self) -> Any:
        """Makes it."""
        if self._seat != self._buffer._seat:
            text = f"the deferred {self.what} is one of before regroup(): its second half cannot be made"
            raise errors.DeepEPError(errors.INVALID_STATE, text)
        try:
            return self._rest()
        except BaseException as error:
            if self._begun is not None:
                cut_short(self._begun, error)
            raise
        finally:
            self.is_due, self._begun = False, None

    def __del__(self) -> None:
        if self._begun is not None and self._seat == self._buffer._seat:  # nobody can finish it: the peers are told
            cut_short(self._begun, RuntimeError("nobody waited for the event"))


class EPBuffer(ElasticBuffer):
    """ElasticBuffer with the names and arguments of DeepEP 2.5. The constructor is collective.

    Arguments that are not listed here are those of ElasticBuffer.

    Args:
        group: a torch.distributed group of any backend.
        lb_allocation_plan_or_num_bytes: memory for redundant experts, ``runtime.lb_storage``: bytes, a multiple of
            2 MiB, or a BufferAllocator, whose tensors lie in it then.

    Raises:
        DeepEPError: as ElasticBuffer.
    """

    def __init__(
        self,
        group: Group,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = CPU_SECONDS,
        num_gpu_timeout_secs: float = GPU_SECONDS,
        explicitly_destroy: bool = False,
        *,
        enable_shrink: bool = False,
        engine: str | None = None,
        bootstrap: Bootstrap | None = None,
        num_nvl_peers: int | None = None,
        join: str | None = None,
        join_rank: int | None = None,
    ) -> None:
        plan_of = lb_allocation_plan_or_num_bytes
        if isinstance(plan_of, BufferAllocator):
            assertion(not plan_of.materialized, "lb_allocation_plan_or_num_bytes: got a plan that is materialized")
            plan_of.check()
            num_lb_bytes = plan_of.num_bytes
        else:
            name = "lb_allocation_plan_or_num_bytes"
            num_lb_bytes = check_int(name, plan_of, 0, _elastic_sizes.MAX_BYTES) and _elastic_sizes.check_bytes(
                name, plan_of
            )
        super().__init__(
            group, num_bytes, 0, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, deterministic,
            allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute, sl_idx, num_allocated_qps,
            num_cpu_timeout_secs, num_gpu_timeout_secs, explicitly_destroy, enable_shrink=enable_shrink, engine=engine,
            bootstrap=bootstrap, num_nvl_peers=num_nvl_peers, join=join, join_rank=join_rank,
        )  # fmt: skip
        self.num_lb_bytes = num_lb_bytes
        storage = _torch.empty((num_lb_bytes,), UINT8, self._core.device)
        self.runtime.lb_storage = storage  # type: ignore[union-attr]
        if isinstance(plan_of, BufferAllocator):
            plan_of.materialize(storage)
        self._balancing = Balancing(self._core, self._mode)
        self.context: Any = None  # NCCL's in 2.5
        self.main_context: Any = None

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """ElasticBuffer.barrier; `wait_comm_stream` and `context_idx` are accepted."""
        super().barrier(wait_comm_stream, with_cpu_sync, sequential)

    @native
    def dispatch(  # type: ignore[override]
        self,
        x: Rows,
        topk_idx: OptionalTensor = None,
        topk_weights: OptionalTensor = None,
        cumulative_local_expert_recv_stats: OptionalTensor = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """ElasticBuffer.dispatch, whose second half may be left to the event.

        Args:
            do_handle_copy: False: the handle keeps `topk_idx` itself, which must not be written to while the handle is
                used.
            defer_epilogue: needs async_with_compute_stream. Only the event is returned; its first ``wait()`` returns
                the received rows, indices, weights and the handle, and the buffer takes no other call until then. With
                do_cpu_sync the counts are exchanged before it, the rows sent in it; if the event is dropped without,
                the peers' dispatch ends with an error that names this rank, and all buffers work on.

        Returns:
            What ElasticBuffer.dispatch returns; with `defer_epilogue` an EventOverlap.

        Raises:
            DeepEPError: as ElasticBuffer.dispatch.
        """
        assertion(not check_flag("do_handle_copy", do_handle_copy), "argument do_handle_copy: got True, allowed False")
        defer = check_flag("defer_epilogue", defer_epilogue)
        assertion(not defer or bool(async_with_compute_stream), "defer_epilogue needs async_with_compute_stream=True")
        if is_compiling():
            from .ops import methods

            return methods.elastic_dispatch(
                self, x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts,
                num_max_tokens_per_rank, expert_alignment, num_sms, num_qps, previous_event, None,
                async_with_compute_stream, allocate_on_comm_stream, handle, False, do_cpu_sync, do_expand,
                do_zero_padding, use_tma_aligned_col_major_sf,
            )  # fmt: skip
        with _torch.without_modes():
            check_reference(handle)
            sending, known = self._prepare(
                x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
                expert_alignment, num_sms, num_qps, previous_event, async_with_compute_stream, allocate_on_comm_stream,
                handle, False, do_cpu_sync, do_expand, do_zero_padding, use_tma_aligned_col_major_sf,
            )  # fmt: skip
            if handle is not None:
                result = self._mode.resend(sending, handle)
            elif defer and not sending.worst:
                second = _SecondHalf(self, "dispatch", lambda: self._finish(sending, made), sending)
                made = self._mode.begin(sending, known)
                refer(made)
                return self._defer(second, EventOverlap(EventHandle()))
            else:
                result = self._mode.send(sending, known)
                refer(result[3])
        if not defer:
            return result
        *received, event = result
        return self._defer(_SecondHalf(self, "dispatch", lambda: self._given(tuple(received))), event)

    @native
    def combine(  # type: ignore[override]
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: OptionalTensor = None,
        bias: Tensor | tuple[OptionalTensor, OptionalTensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """ElasticBuffer.combine, whose results may be left to the event.

        Args:
            defer_epilogue: needs async_with_compute_stream. Only the event is returned; its first ``wait()`` returns
                combined_x and combined_topk_weights, and the buffer takes no other call until then.

        Returns:
            What ElasticBuffer.combine returns; with `defer_epilogue` an EventOverlap.

        Raises:
            DeepEPError: as ElasticBuffer.combine.
        """
        defer = check_flag("defer_epilogue", defer_epilogue)
        assertion(not defer or bool(async_with_compute_stream), "defer_epilogue needs async_with_compute_stream=True")
        if is_compiling():
            from .ops import methods

            return methods.elastic_combine(
                self, x, handle, topk_weights, bias, num_sms, num_qps, previous_event, None, async_with_compute_stream,
                allocate_on_comm_stream,
            )  # fmt: skip
        with _torch.without_modes():
            check_reference(handle)
            result = self._combine(
                x, handle, topk_weights, bias, num_sms, num_qps, previous_event, None, async_with_compute_stream,
                allocate_on_comm_stream,
            )  # fmt: skip
        if not defer:
            return result
        *sums, event = result
        return self._defer(_SecondHalf(self, "combine", lambda: self._given(tuple(sums))), event)

    def lb_get_theoretical_num_sms(self) -> int:
        """SMs that the two calls below take at most where they are given 0: an even number."""
        return USUAL_SMS

    @opaque
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensors,
        expert_weights: Tensors,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Event = None,
    ) -> EventOverlap:
        """Copies experts' weights to other ranks, for servers with redundant experts. Collective.

        Asynchronous always; no host waits, and a graph may capture it. The bytes of an expert cross to a rank once for
        up to 32 / R slots, straight into them.

        Args:
            redundant_expert_weights: ``[slots, ...]``, written; or up to 16 such tensors. Slots without an expert stay.
            expert_weights: ``[E/R, ...]``, equally many; a multiple of 16 bytes an expert, as many as in a slot.
            redundancy_mapping: ``[R, slots]`` int32, equal on all ranks: the expert, rank * E/R + local, that comes to
                a rank's slot; any other number, such as -1: none.
            num_sms: at most so many SMs; 0: the library's choice.
            previous_event: what the work waits for instead of the current stream.

        Returns:
            The event at its end, on the communication stream.

        Raises:
            DeepEPError: a rank is late, dead or disagrees. Also a ValueError, TypeError or AssertionError for a wrong
                argument.
        """
        self._enter()
        with _torch.without_modes():
            return self._balancing.move(
                redundant_expert_weights, expert_weights, redundancy_mapping, False, _even(num_sms), previous_event
            )

    @opaque
    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensors,
        expert_grads: Tensors,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Event = None,
    ) -> EventOverlap:
        """Adds the gradients of copies to those of the experts that they are copies of. Collective.

        They are added in the order of rank and slot, so that the result repeats bit for bit. Asynchronous as
        lb_prefetch_weights; the copies that arrive need up to 128 MiB meanwhile.

        Args:
            redundant_expert_grads: ``[slots, ...]`` float32, read; or up to 16 such tensors.
            expert_grads: ``[E/R, ...]`` float32, equally many, added to.
            redundancy_mapping, num_sms, previous_event: as in lb_prefetch_weights.

        Returns:
            The event at its end, on the communication stream.

        Raises:
            DeepEPError: as lb_prefetch_weights.
        """
        self._enter()
        with _torch.without_modes():
            return self._balancing.move(
                redundant_expert_grads, expert_grads, redundancy_mapping, True, _even(num_sms), previous_event
            )

    def _defer(self, second: _SecondHalf, event: EventOverlap) -> EventOverlap:
        """The event of a call whose results its first wait gives; until then the buffer takes no other."""
        event.register_hook_after_wait(second)
        self._deferred = weakref.ref(second)
        return event

    def _finish(self, sending: Sending, handle: EPHandle) -> tuple[Any, ...]:
        if not sending.order.on_comm:  # outputs are allocated on the stream that waits, so that one is waited for
            sending.order.stream = self._core.current_stream()
        with _torch.without_modes():
            result = self._mode.finish(sending, handle)
        result[4].current_stream_wait()
        return self._given(result[:4])

    def _given(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Results that were allocated on the stream of the call, for the stream that waited."""
        if not self._core.host_stream:
            _torch.record_all(result, self._core.device)
        return result
