"""Low-latency mode: what calls are checked for once, and what is kept for later calls of the same kind."""

from __future__ import annotations

import ctypes
from typing import Any

from . import _abi, errors
from . import _torch as tt
from ._base import BufferBase
from .errors import assertion, value_error

SEND, RECV, SEND_RECV = 1, 2, 3
ROUND_SCALE, UE8M0, LOGFMT, ZERO_COPY, UNREDUCED = 1, 2, 4, 8, 16
MOST_PLANS = 1024  # a plan for each number of tokens is likely
MOST_OUTPUTS = 8  # of a shape; what is beyond is not used again


class DispatchPlan:
    """What follows from a dispatch's kind: types, shapes and options of its arguments, all of them right."""

    __slots__ = ("numbers", "bound", "hidden", "num_experts", "use_fp8", "tokens", "local", "key", "pool")

    def __init__(self, tokens: tuple[int, int, int], bound: int, num_experts: int, local: int) -> None:
        self.tokens = tokens  # T, H, K
        self.hidden = tokens[1]
        self.bound, self.num_experts, self.local = bound, num_experts, local
        self.numbers: tuple[int, ...] = ()  # fields of the C struct
        self.use_fp8 = False
        self.key: tuple[int, int, int, bool, bool] = (local, bound, self.hidden, False, False)  # of its outputs
        self.pool: list[tt.Outputs] = []


class CombinePlan:
    """What follows from a combine's kind."""

    __slots__ = ("numbers", "shape", "combined", "from_rows")

    def __init__(self, numbers: tuple[int, ...], shape: tuple[int, int, int], combined: tuple[int, int]) -> None:
        self.numbers = numbers  # fields of the C struct
        self.shape = shape  # B, H, E
        self.combined = combined  # T, H
        self.from_rows = False  # x is a plain tensor: combined_x may be made like it


class CombineCall:
    """The C struct of a combine, to be filled again."""

    __slots__ = ("args", "reference", "numbers")

    def __init__(self) -> None:
        self.args = _abi.sized(_abi.LlCombineArgs)
        self.reference = ctypes.byref(self.args)
        self.numbers: tuple[int, ...] = ()  # what its number fields hold


class LowLatencyPlans(BufferBase):
    """Plans of low-latency calls, the outputs of dispatch, and the checks of both."""

    low_latency_mode: bool
    _ll_dispatches: dict[tuple[Any, ...], DispatchPlan]
    _ll_combines: dict[tuple[Any, ...], CombinePlan]
    _outputs: dict[tuple[Any, ...], list[tt.Outputs]]  # by shape
    _ll_known: dict[int, tt.Outputs]  # by the id of src_info: whose handles need no checks
    _ll_call: Any  # deepep_call of calls that their stream waits for
    _ll_reference: Any
    _ll_stream: int  # what _ll_call says
    _ll_async: Any
    _ll_async_reference: Any
    _ll_combine: CombineCall
    _ll_spare: list[CombineCall]  # of hooks that are through
    _where: int  # the GPU's number; -1: the CPU

    def _forget_low_latency(self) -> None:
        """Nothing of earlier calls is kept."""
        self._ll_dispatches, self._ll_combines, self._outputs, self._ll_known = {}, {}, {}, {}
        self._ll_call = _abi.sized(_abi.Call)
        self._ll_reference, self._ll_stream = ctypes.byref(self._ll_call), 0
        self._ll_async = _abi.sized(_abi.Call, is_async=1)
        self._ll_async_reference = ctypes.byref(self._ll_async)
        self._ll_combine, self._ll_spare = CombineCall(), []

    def _plan_dispatch(
        self,
        key: tuple[Any, ...] | None,
        x: tt.Tensor,
        topk_idx: tt.Tensor,
        bound: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> DispatchPlan:
        """Checks a dispatch and keeps the plan under `key`, unless that is None."""
        bound, num_experts = self._check_shape(bound, num_experts)
        tokens = self._check_tokens(x, topk_idx, bound)
        if use_ue8m0:
            self._check_ue8m0(use_fp8, round_scale, tokens[1])
        plan = DispatchPlan(tokens, bound, num_experts, num_experts // self.group_size)
        flags = (ROUND_SCALE if round_scale else 0) | (UE8M0 if use_ue8m0 else 0)
        plan.numbers = (SEND_RECV, flags, tokens[0], tokens[2], tt.INDEX_TYPES[topk_idx.dtype])
        plan.use_fp8 = bool(use_fp8)
        plan.key = (plan.local, bound, plan.hidden, plan.use_fp8, bool(use_ue8m0))
        plan.pool = self._outputs.setdefault(plan.key, [])
        _keep(self._ll_dispatches, key, plan)
        return plan

    def _plan_combine(
        self,
        key: tuple[Any, ...] | None,
        x: tt.Tensor,
        topk_idx: tt.Tensor,
        topk_weights: tt.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool,
        zero_copy: bool,
        unreduced: bool,
    ) -> CombinePlan:
        """Checks a combine but for its handle's tensors, and keeps the plan under `key`, unless that is None."""
        if use_logfmt and zero_copy:
            raise value_error("zero_copy", "True with use_logfmt=True", "one of them")
        self._check_handle(handle)
        _, _, bound, hidden, num_experts = handle
        tt.check("topk_idx", topk_idx, self.device, tuple(tt.INDEX_TYPES), (None, None))
        num_tokens, num_topk = topk_idx.shape
        if num_tokens > bound:
            raise value_error("topk_idx", f"{num_tokens} tokens", f"at most B = {bound}")
        tt.check("topk_weights", topk_weights, self.device, (tt.FLOAT32,), (num_tokens, num_topk))
        if not zero_copy:
            rows = (num_experts // self.group_size, self.group_size * bound, hidden)
            tt.check("x", x, self.device, (tt.BF16,), rows)
        flags = (LOGFMT if use_logfmt else 0) | (ZERO_COPY if zero_copy else 0) | (UNREDUCED if unreduced else 0)
        sizes = (num_tokens, bound, hidden, num_topk, num_experts)
        numbers = (SEND_RECV, flags, *sizes, tt.INDEX_TYPES[topk_idx.dtype])
        plan = CombinePlan(numbers, (bound, hidden, num_experts), (num_tokens, hidden))
        plan.from_rows = not zero_copy and type(x) is tt.Tensor
        _keep(self._ll_combines, key, plan)
        return plan

    def _take_outputs(self, key: tuple[int, int, int, bool, bool], pool: list[tt.Outputs], stream: int) -> tt.Outputs:
        """Outputs of this shape that nobody holds, made anew if there are none.

        In a capture they are new and stay out of the pool: it is the graph's own memory, and replays write there.
        """
        captured = stream != 0 and tt.is_capturing()
        for candidate in pool if not captured else ():
            if candidate.stream == stream and candidate.unused():
                return candidate
        outputs = self._new_outputs(*key)
        outputs.stream = stream
        if len(pool) < MOST_OUTPUTS and not captured:
            pool.append(outputs)
            self._ll_known[id(outputs.tensors[2])] = outputs  # which live as long as the buffer
        return outputs

    def _touch_outputs(self, bound: int, hidden: int, num_experts: int, use_fp8: bool) -> None:
        """Makes the outputs of two calls, which may be under way at once, and brings in their memory."""
        key = (num_experts // self.group_size, bound, hidden, use_fp8, False)
        pool, stream = self._outputs.setdefault(key, []), self.raw_stream()
        first = self._take_outputs(key, pool, stream)
        held = first.tensors[0]  # so that the second is another
        for outputs in (first, self._take_outputs(key, pool, stream)):
            outputs.touch()
        del held

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
        outputs.shape, outputs.sources = (bound, hidden, local * self.group_size), (pointers[2], pointers[3])
        return outputs

    # ---- checks

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
        tt.check("x", x, self.device, (tt.BF16,), (None, None))
        num_tokens, hidden = x.shape
        if num_tokens > bound:
            raise value_error("x", f"{num_tokens} tokens", f"at most num_max_dispatch_tokens_per_rank = {bound}")
        if hidden == 0 or hidden % 128:
            raise value_error("x", f"hidden {hidden}", "a hidden that is a multiple of 128")
        tt.check("topk_idx", topk_idx, self.device, tuple(tt.INDEX_TYPES), (num_tokens, None))
        return num_tokens, hidden, topk_idx.shape[1]

    def _check_more(self, plan: DispatchPlan, weights: object, received: object, waited: object) -> None:
        """The optional tensors of a dispatch."""
        if weights is not None:
            shape = (plan.tokens[0], plan.tokens[2])
            if not tt.plain(weights, tt.FLOAT32, self._where, shape):
                tt.check("topk_weights", weights, self.device, (tt.FLOAT32,), shape)
        if received is not None and not tt.plain(received, tt.INT32, self._where, (plan.local,)):
            tt.check("cumulative_local_expert_recv_stats", received, self.device, (tt.INT32,), (plan.local,))
        if waited is not None:
            self._check_wait_stats("dispatch_wait_recv_cost_stats", waited)

    def _check_wait_stats(self, name: str, tensor: object) -> None:
        if not tt.plain(tensor, tt.INT64, self._where, (self.group_size,)):
            tt.check(name, tensor, self.device, (tt.INT64,), (self.group_size,))

    def _check_handle(self, handle: object) -> tuple[int, int]:
        """The addresses of src_info and layout_range."""
        if not isinstance(handle, tuple) or len(handle) != 5:
            given = f"a tuple of {len(handle)}" if isinstance(handle, tuple) else type(handle).__name__
            raise errors.type_error("handle", given, "the handle that low_latency_dispatch returned")
        src_info, layout_range, bound, _, num_experts = handle
        bound, num_experts = self._check_shape(bound, num_experts)
        local, ranks = num_experts // self.group_size, self.group_size
        if not tt.plain(src_info, tt.INT32, self._where, (local, ranks * bound)):
            tt.check("handle: src_info", src_info, self.device, (tt.INT32,), (local, ranks * bound))
        if not tt.plain(layout_range, tt.INT64, self._where, (local, ranks)):
            tt.check("handle: layout_range", layout_range, self.device, (tt.INT64,), (local, ranks))
        return src_info.data_ptr(), layout_range.data_ptr()


def _keep(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...] | None, plan: Any) -> None:
    if key is None:
        return
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
