"""What low-latency calls are checked for once: plans of calls of one kind, and the C structs that calls fill."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from . import _abi, _torch
from ._core import Core
from ._memory import RowCache
from ._native import Launch
from ._torch import BF16, FLOAT32, FP8, INDEX_TYPES, INT32, INT64, UINT8, OptionalTensor, Tensor, empty_like
from .errors import assertion, check_flag, check_handle, check_int, type_error, value_error

MAX_PLANS = 1024  # a plan for each number of tokens is likely

Key = tuple[Any, ...]  # every property of the arguments that a check looks at
# Adjacent fields of a C struct are written in one go: to set them one by one takes twice as long.
DISPATCH_NUMBERS, COMBINE_NUMBERS = "=iI8i", "=iI7i"  # from phases to use_fp8, to index_type
FP4_NUMBERS = "=iI9i"  # from phases to fp4
write_dispatch_addresses = struct.Struct("=10Q").pack_into
write_fp4_addresses = struct.Struct("=11Q").pack_into  # x_scales too
write_combine_addresses = struct.Struct("=7Q").pack_into
DISPATCH_ADDRESSES = _abi.LlDispatchArgs.x.offset
COMBINE_ADDRESSES = _abi.LlCombineArgs.x.offset


class CallStructs(Launch):
    """The C structs of one call."""

    def __init__(self, kind: Any, core: Core) -> None:
        super().__init__(core.native.lib)
        self.args = _abi.sized(kind)
        self.call = _abi.sized(_abi.Call, is_async=int(core.host_stream))
        self.args_reference, self.call_reference = ctypes.byref(self.args), ctypes.byref(self.call)
        self.numbers: tuple[int, ...] = ()  # what the number fields of `args` hold
        self.stream = 0  # what `call` holds


class CallPool:
    """Structs of calls of one kind. A call takes what no other call has, and gives it back when it is through.

    A call that an exception cuts short does not give them back.
    """

    __slots__ = ("_kind", "_core", "_offset", "_write", "idle")

    def __init__(self, kind: Any, numbers: str, core: Core) -> None:
        """`numbers` is the struct format of the fields from phases on, which a plan has in this order."""
        self._kind, self._core = kind, core
        self._offset, self._write = kind.phases.offset, struct.Struct(numbers).pack_into
        self.idle: list[CallStructs] = []

    def take(self, plan: DispatchPlan | CombinePlan) -> CallStructs:
        """Structs whose number fields are the plan's."""
        try:
            call = self.idle.pop()
        except IndexError:
            call = CallStructs(self._kind, self._core)
        if not call.event and self._core.host_stream:
            call.create_event(self._core.native)
            call.call.event = call.event
        if call.numbers is not plan.numbers:
            call.numbers = plan.numbers
            self._write(call.args, self._offset, *plan.numbers)
        return call


class DispatchPlan:
    """What follows from a dispatch's kind: the types, shapes and options of its arguments, all of them right."""

    __slots__ = (
        *("numbers", "num_tokens", "num_topk", "bound", "hidden", "num_experts", "local", "use_fp8"),
        *("recv_x", "scales", "scales_shape", "scales_strides", "recv_count", "src_info", "layout_range"),
    )

    def __init__(self, core: Core, sizes: tuple[int, int, int, int, int], use_fp8: bool, use_ue8m0: bool) -> None:
        """For T, H, K, B and E."""
        self.num_tokens, self.hidden, self.num_topk, self.bound, self.num_experts = sizes
        self.numbers: tuple[int, ...] = ()  # fields of the C struct
        self.use_fp8 = use_fp8
        rows, local, device = core.group_size * self.bound, self.num_experts // core.group_size, core.device
        self.local = local
        # Prototypes of the outputs, the scales' without its strides: they are column-major in the last two axes.
        self.recv_x = _torch.prototype((local, rows, self.hidden), FP8 if use_fp8 else BF16, device)
        columns = self.hidden // (512 if use_ue8m0 else 128)
        self.scales_shape, self.scales_strides = (local, rows, columns), (rows * columns, 1, rows)
        self.scales = _torch.prototype(self.scales_shape, INT32 if use_ue8m0 else FLOAT32, device)
        self.recv_count = _torch.prototype((local,), INT32, device)
        self.src_info = _torch.prototype((local, rows), INT32, device)
        self.layout_range = _torch.prototype((local, core.group_size), INT64, device)


class Fp4Plan(DispatchPlan):
    """What follows from the kind of a dispatch of FP4 rows: packed ones, or rows that it casts."""

    __slots__ = ("fp4",)

    def __init__(
        self, core: Core, sizes: tuple[int, int, int, int, int], fp4: int, types: Sequence[_torch.DType]
    ) -> None:
        """For T, H, K, B and E. types: of the received rows and scales."""
        super().__init__(core, sizes, False, False)
        self.fp4 = fp4
        rows, scales = self.recv_x.shape[1], self.hidden // 16
        self.recv_x = _torch.prototype((self.local, rows, self.hidden // 2), types[0], core.device)
        shape: tuple[int, ...] = (self.local, rows, scales)
        if fp4 == _abi.FP4_CAST:  # tiles of 128 rows x 4 scales
            shape = (self.local, -(-rows // 128), scales // 4, 32, 4, 4)
        self.scales = _torch.prototype(shape, types[1], core.device)

    def shaped(self, recv_x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The received rows and scales with the axes that their readers expect."""
        if self.fp4 == _abi.FP4_PACKED:
            return recv_x, scales
        return recv_x.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)


class CombinePlan:
    """What follows from a combine's kind."""

    __slots__ = ("numbers", "combined", "combined_shape", "source_shape", "ranges_shape")

    def __init__(self, core: Core, sizes: tuple[int, int, int, int, int]) -> None:
        """For T, H, K, B and E."""
        num_tokens, hidden, _, bound, num_experts = sizes
        self.numbers: tuple[int, ...] = ()  # fields of the C struct
        self.combined_shape = (num_tokens, hidden)
        self.combined = _torch.prototype(self.combined_shape, BF16, core.device)
        local = num_experts // core.group_size
        self.source_shape, self.ranges_shape = (local, core.group_size * bound), (local, core.group_size)


class Outputs:
    """The tensors that a low-latency dispatch fills: new ones for each call.

    On a GPU they are torch's own allocations. On the CPU engine the large ones lie in recycled memory.
    """

    __slots__ = ("_core", "_row_cache")

    BLOCKS_KEPT = 8

    def __init__(self, core: Core) -> None:
        self._core = core
        self._row_cache = RowCache(self.BLOCKS_KEPT if core.recycle else 0)

    def make(self, plan: DispatchPlan) -> tuple[Tensor, OptionalTensor, Tensor, Tensor, Tensor]:
        """recv_x, its scales or None, recv_count, src_info and layout_range."""
        if _torch.in_inference_mode():  # tensors made there could not be written to after it
            with _torch.outside_inference_mode():
                return self._make(plan)
        return self._make(plan)

    def make_combined(self, plan: CombinePlan) -> Tensor:
        """combined_x."""
        if _torch.in_inference_mode():
            with _torch.outside_inference_mode():
                return empty_like(plan.combined)
        return empty_like(plan.combined)

    def _make(self, plan: DispatchPlan) -> tuple[Tensor, OptionalTensor, Tensor, Tensor, Tensor]:
        scales, large = None, empty_like
        if self._core.host_stream:
            large = self._row_cache.empty_like
        if isinstance(plan, Fp4Plan):
            scales = large(plan.scales)
        elif plan.use_fp8:
            if self._core.host_stream and self._row_cache.serves(plan.scales.numel() * plan.scales.itemsize):
                scales = large(plan.scales.transpose(1, 2)).transpose(1, 2)
            else:  # a view of a contiguous tensor would take twice as long
                scales = plan.scales.new_empty_strided(plan.scales_shape, plan.scales_strides)
        small = empty_like(plan.recv_count), large(plan.src_info), empty_like(plan.layout_range)
        return (large(plan.recv_x), scales, *small)


class Plans:
    """The plans of a buffer's low-latency calls, and the checks that make them."""

    def __init__(self, core: Core, low_latency_mode: bool) -> None:
        self._core = core
        self._low_latency_mode = low_latency_mode
        self.dispatches: dict[Key, DispatchPlan] = {}
        self.combines: dict[Key, CombinePlan] = {}

    def add_dispatch(
        self,
        key: Key | None,
        x: Tensor,
        topk_idx: Tensor,
        bound: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> DispatchPlan:
        """Checks a dispatch and keeps its plan under `key`, unless that is None."""
        core = self._core
        assertion(self._low_latency_mode, "the buffer was made with low_latency_mode=False")
        num_tokens, hidden = _torch.check("x", x, core.device, (BF16,), (None, None)).shape
        _check_channels(hidden)
        num_topk = _torch.check("topk_idx", topk_idx, core.device, tuple(INDEX_TYPES), (num_tokens, None)).shape[1]
        bound, num_experts = self.check_sizes(bound, hidden, num_experts)
        use_fp8, round_scale = check_flag("use_fp8", use_fp8), check_flag("round_scale", round_scale)
        use_ue8m0 = check_flag("use_ue8m0", use_ue8m0)
        if use_ue8m0 and not (use_fp8 and round_scale):
            given = f"True with use_fp8={use_fp8}, round_scale={round_scale}"
            raise value_error("use_ue8m0", given, "both of them True")
        plan = DispatchPlan(core, (num_tokens, hidden, num_topk, bound, num_experts), use_fp8, use_ue8m0)
        flags = (_abi.LL_ROUND_SCALE if round_scale else 0) | (_abi.LL_UE8M0 if use_ue8m0 else 0)
        sizes = (num_tokens, bound, hidden, num_topk, num_experts)
        plan.numbers = (_abi.SEND_RECV, 0, flags, *sizes, INDEX_TYPES[topk_idx.dtype], int(plan.use_fp8))
        _keep(self.dispatches, key, plan)
        return plan

    def add_fp4(
        self, key: Key | None, x: Tensor, scales: object, topk_idx: Tensor, bound: int, num_experts: int, fp4: int
    ) -> Fp4Plan:
        """Checks a dispatch of FP4 rows and keeps its plan under `key`, unless that is None."""
        device, packed = self._core.device, fp4 == _abi.FP4_PACKED
        assertion(self._low_latency_mode, "the buffer was made with low_latency_mode=False")
        types = (_byte_type("x", x), _byte_type("scales", scales)) if packed else (UINT8, FP8)
        width = 2 if packed else 1  # channels of a column
        num_tokens, columns = _torch.check("x", x, device, types[:1] if packed else (BF16,), (None, None)).shape
        hidden = columns * width
        if hidden == 0 or hidden % 128:
            allowed = f"a multiple of {128 // width}: a hidden that is a multiple of 128"
            raise value_error("x", f"rows of {columns}", allowed)
        if packed:
            _torch.check("scales", scales, device, types[1:], (num_tokens, hidden // 16))
        elif scales is not None:
            _check_scalar("x_global_scale", scales, device)
        num_topk = _torch.check("topk_idx", topk_idx, device, tuple(INDEX_TYPES), (num_tokens, None)).shape[1]
        bound, num_experts = self.check_sizes(bound, hidden, num_experts)
        plan = Fp4Plan(self._core, (num_tokens, hidden, num_topk, bound, num_experts), fp4, types)
        sizes = (num_tokens, bound, hidden, num_topk, num_experts)
        plan.numbers = (_abi.SEND_RECV, 0, 0, *sizes, INDEX_TYPES[topk_idx.dtype], 0, fp4)
        _keep(self.dispatches, key, plan)
        return plan

    def add_combine(
        self,
        key: Key | None,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        use_logfmt: bool,
        zero_copy: bool,
        unreduced: bool,
    ) -> CombinePlan:
        """Checks a combine but for its handle's tensors, and keeps the plan under `key`, unless that is None."""
        core = self._core
        use_logfmt, zero_copy = check_flag("use_logfmt", use_logfmt), check_flag("zero_copy", zero_copy)
        unreduced = check_flag("unreduced", unreduced)
        if use_logfmt and zero_copy:
            raise value_error("zero_copy", "True with use_logfmt=True", "one of them")
        bound, hidden, num_experts = self.check_handle(handle)
        _torch.check("topk_idx", topk_idx, core.device, tuple(INDEX_TYPES), (None, None))
        num_tokens, num_topk = topk_idx.shape
        _torch.check("topk_weights", topk_weights, core.device, (FLOAT32,), (num_tokens, num_topk))
        if not zero_copy:  # H of the answers is theirs: it may be another than that of the rows dispatched
            rows = (num_experts // core.group_size, core.group_size * bound, None)
            hidden = _torch.check("x", x, core.device, (BF16,), rows).shape[2]
            _check_channels(hidden)
        plan = CombinePlan(core, (num_tokens, hidden, num_topk, bound, num_experts))
        flags = (_abi.LL_LOGFMT if use_logfmt else 0) | (_abi.LL_ZERO_COPY if zero_copy else 0)
        flags |= _abi.LL_UNREDUCED if unreduced else 0
        sizes = (num_tokens, bound, hidden, num_topk, num_experts)
        plan.numbers = (_abi.SEND_RECV, 0, flags, *sizes, INDEX_TYPES[topk_idx.dtype])
        _keep(self.combines, key, plan)
        return plan

    # ---- checks

    def check_sizes(self, bound: object, hidden: object, num_experts: object) -> tuple[int, int]:
        """B and E, after the library's plan has looked at them: outputs are allocated before the call itself."""
        assertion(self._low_latency_mode, "the buffer was made with low_latency_mode=False")
        sizes = (
            check_int("num_max_dispatch_tokens_per_rank", bound),
            check_int("hidden", hidden),
            self._core.group_size,
            check_int("num_experts", num_experts),
        )
        lib, bytes_needed = self._core.native.lib, ctypes.c_uint64()
        lib.check(lib.with_gil.deepep_low_latency_size_hint(*sizes, ctypes.byref(bytes_needed)))
        return sizes[0], sizes[3]

    def check_optional(
        self, plan: DispatchPlan, topk_weights: object, recv_stats: object, wait_stats: object
    ) -> tuple[int, int, int]:
        """The addresses of the optional tensors of a dispatch; 0 for None."""
        weights = stats = waited = 0
        if topk_weights is not None:
            weights = self.address("topk_weights", topk_weights, FLOAT32, (plan.num_tokens, plan.num_topk))
        if recv_stats is not None:
            stats = self.address("cumulative_local_expert_recv_stats", recv_stats, INT32, (plan.local,))
        if wait_stats is not None:
            waited = self.wait_stats("dispatch_wait_recv_cost_stats", wait_stats)
        return weights, stats, waited

    def wait_stats(self, name: str, tensor: object) -> int:
        """The address of a ``[R]`` int64 tensor."""
        return self.address(name, tensor, INT64, (self._core.group_size,))

    def address(self, name: str, tensor: object, dtype: _torch.DType, shape: tuple[int, ...]) -> int:
        """The address of a tensor after its check."""
        if not _torch.plain(tensor, dtype, self._core.ordinal, shape):
            tensor = _torch.check(name, tensor, self._core.device, (dtype,), shape)
        return tensor.data_ptr()

    def check_handle(self, handle: Any) -> tuple[int, int, int]:
        """B, H and E of a handle, whose tensors `sources` checks."""
        _, _, bound, hidden, num_experts = check_handle(handle, (5,), "low_latency_dispatch")
        bound, num_experts = self.check_sizes(bound, hidden, num_experts)
        return bound, hidden, num_experts

    def sources(self, plan: CombinePlan, src_info: object, layout_range: object) -> tuple[int, int]:
        """The addresses of a handle's tensors."""
        return (
            self.address("handle: src_info", src_info, INT32, plan.source_shape),
            self.address("handle: layout_range", layout_range, INT64, plan.ranges_shape),
        )


def _check_channels(hidden: int) -> None:
    if hidden == 0 or hidden % 128:
        raise value_error("x", f"hidden {hidden}", "a hidden that is a multiple of 128")


def _byte_type(name: str, tensor: object) -> _torch.DType:
    """The dtype of a tensor of bytes, whatever they mean."""
    if isinstance(tensor, Tensor) and tensor.dtype.itemsize != 1:
        raise type_error(name, f"dtype {tensor.dtype}", "torch.uint8, or another dtype of 1 byte")
    return tensor.dtype if isinstance(tensor, Tensor) else UINT8


def _check_scalar(name: str, tensor: object, device: _torch.Device) -> None:
    """One float32, in a tensor of any number of axes."""
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) and tensor.numel() == 1 else (1,)
    _torch.check(name, tensor, device, (FLOAT32,), shape)


def _keep(plans: dict[Key, Any], key: Key | None, plan: Any) -> None:
    if key is None:
        return
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
