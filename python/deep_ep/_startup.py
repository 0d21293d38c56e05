"""Warm-up in Python, and what start-up took."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _abi, _torch
from ._torch import BF16, FLOAT32, FP8, INT64, Tensor
from .errors import check_flag, check_int, value_error

if TYPE_CHECKING:
    from .buffer import Buffer
    from .elastic import ElasticBuffer

MAX_SECONDS, MAX_BYTES = 2**31 // 1000, 2**63 - 1
SHAPE_FROM = (None, "given", "constructor", "hint", "region")
STAGES = {"load": "load_ns", "memory": "memory_ns", "connect": "connect_ns", "launch": "launch_ns"}
# Where T was not known: warmed with T, T/4, T/16 and T/64 tokens, since a block of memory serves outputs down to a
# quarter of its size.
LADDER = (1, 4, 16, 64)
MOST_TOKENS = 4096  # of a rank, as in the library
ROUNDS = 2  # of normal mode: the first one's memory goes back to the allocators, which the second takes it from
MOST_INT = 2**31 - 1
CHANNELS_OF_SCALE = 128  # of V2's FP8 rows
FAST_ROUNDS = 4  # where calls take microseconds: Python's own code has its speed from about the fourth call on


class Shape(NamedTuple):
    """The shape of a mode's calls."""

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int


def shape_options(num_tokens: object, hidden: object, num_topk: object, num_experts: object) -> dict[str, int]:
    """The fields of a C struct that say a shape; 0: not known."""
    given = {"num_tokens": num_tokens, "hidden": hidden, "num_topk": num_topk, "num_experts": num_experts}
    return {name: check_int(name, value, 0) for name, value in given.items()}


def warm_up_options(
    shape: dict[str, int], bound: object, use_fp8: object, max_seconds: object, max_bytes: object
) -> Any:
    """deepep_warmup_options of Buffer.warmup's arguments.

    With T alone normal mode is planned, with B alone low-latency mode; H, K and E go to each mode that is planned.
    """
    options = _abi.sized(_abi.WarmupOptions, use_fp8=int(check_flag("use_fp8", use_fp8)), part=_abi.WARMUP_BEGIN)
    bound = check_int("num_max_dispatch_tokens_per_rank", bound, 0)
    if shape["num_tokens"] or not bound:
        for name, value in shape.items():
            setattr(options, name, value)
    if bound or not shape["num_tokens"]:
        options.ll_num_max_tokens, options.ll_hidden = bound, shape["hidden"]
        options.ll_num_topk, options.ll_num_experts = shape["num_topk"], shape["num_experts"]
    if max_seconds is not None:
        number = isinstance(max_seconds, (int, float)) and not isinstance(max_seconds, bool)
        if not number or not 0 < max_seconds <= MAX_SECONDS:  # type: ignore[operator]
            raise value_error("max_seconds", repr(max_seconds), f"seconds > 0 and <= {MAX_SECONDS}, or None")
        options.max_ms = max(1, round(max_seconds * 1000))  # type: ignore[operator]
    if max_bytes is not None:
        options.max_bytes = check_int("max_bytes", max_bytes, 1, MAX_BYTES)
    return options


def warm_up(buffer: Buffer, options: Any) -> None:
    """Warms the library, then Python's own path with the shapes that the library found."""
    core = buffer._core
    core.enter()
    native = core.native
    call = native.lib.without_gil.deepep_buffer_warmup
    # Python takes about as long as the library: each has half of the time.
    wanted, options.max_ms = options.max_ms, max(1, (options.max_ms or 2000) // 2)
    native.check(call(native, ctypes.byref(options)))
    options.max_ms = wanted
    found = native_report(buffer)
    if found.ll_num_max_tokens:
        shape = Shape(found.ll_num_max_tokens, found.ll_hidden, found.ll_num_topk, found.ll_num_experts)
        _low_latency(buffer, shape, bool(found.use_fp8))
    if found.num_tokens:
        known = found.shape_from != _abi.SHAPE_REGION
        for divisor in (1,) if known else LADDER:
            tokens = max(1, found.num_tokens // divisor)
            _normal(buffer, Shape(tokens, found.hidden, found.num_topk, found.num_experts), known)
        if not known and core.host_stream:
            _larger_blocks(buffer, found)
    core.synchronize()
    options.part = _abi.WARMUP_END
    native.check(call(native, ctypes.byref(options)))
    buffer.check()


def _routing(shape: Shape, device: Any) -> tuple[Tensor, Tensor]:
    """Experts, spread evenly, and weights."""
    stride = max(1, shape.num_experts // shape.num_topk)
    token = _torch.full((shape.num_tokens, 1), 1, INT64, device).cumsum(0)
    choice = _torch.full((1, shape.num_topk), stride, INT64, device).cumsum(1)
    weights = _torch.full((shape.num_tokens, shape.num_topk), 1, FLOAT32, device)
    return ((token + choice) % shape.num_experts), weights


def _normal(buffer: Buffer, shape: Shape, twice: bool) -> None:
    """Layout, dispatch and combine, in the end as a backward makes them, too.

    `twice`: with memory for the rows of two dispatches, the second before the first one's rows are gone.
    """
    device = buffer._core.device
    x = _torch.full((shape.num_tokens, shape.hidden), 0, BF16, device)
    experts, weights = _routing(shape, device)
    for _ in range(ROUNDS if buffer._core.host_stream else FAST_ROUNDS):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(experts, shape.num_experts)
        rows, _, row_weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=experts,
            topk_weights=weights,
        )
        assert isinstance(rows, Tensor) and handle is not None
        buffer.combine(rows, handle, topk_weights=row_weights)
        if not twice:  # one block of each size is kept
            del rows
    rows = buffer.dispatch(x, handle=handle)[0]
    assert isinstance(rows, Tensor) and handle is not None
    buffer.combine(rows, handle)


def _larger_blocks(buffer: Buffer, found: Any) -> None:
    """Brings in memory for the rows of more tokens than there was time to run, up to MOST_TOKENS."""
    core = buffer._core
    tokens, held = found.num_tokens * LADDER[1], []
    while tokens <= MOST_TOKENS:
        rows = tokens * min(core.group_size, found.num_topk)
        held.append(buffer._normal.row_cache.empty((rows, found.hidden), BF16).zero_())
        tokens *= LADDER[1]


def _low_latency(buffer: Buffer, shape: Shape, use_fp8: bool) -> None:
    """Dispatch and combine, whole and in halves. Rows of two calls are held: two may be in flight."""
    core = buffer._core
    bound, device = shape.num_tokens, core.device
    x = _torch.full((bound, shape.hidden), 0, BF16, device)
    experts, weights = _routing(shape, device)
    # Each expert's block is filled from its beginning; uneven routing fills more of some than this even one does.
    rows = core.group_size * bound
    filled = min(rows, 2 * (rows * shape.num_topk // shape.num_experts) + 32)
    for halves in (False, True, False):
        held: deque[Any] = deque(maxlen=2)
        for _ in range(FAST_ROUNDS):
            received, _, handle, _, hook = buffer.low_latency_dispatch(
                x, experts, bound, shape.num_experts, use_fp8=use_fp8, return_recv_hook=halves
            )
            if hook:
                hook()
            held.append(received)
            answers = buffer.get_next_low_latency_combine_buffer(handle)  # nobody reads the sums
            in_place = not answers.is_contiguous()
            combined, _, hook = buffer.low_latency_combine(
                answers, experts, weights, handle, zero_copy=in_place, return_recv_hook=halves
            )
            if hook:
                hook()
        if core.host_stream:
            for received in held:
                for tensor in received if isinstance(received, tuple) else (received,):
                    tensor[:, :filled].zero_()


# ---- V2


def elastic_shape(
    buffer: ElasticBuffer, num_tokens: object, hidden: object, num_topk: object, num_experts: object
) -> Shape:
    """The shape of a warm-up's calls: what is 0 is the constructor's."""
    most = buffer.num_max_tokens_per_rank
    shape = Shape(
        check_int("num_tokens", num_tokens, 0, most or MOST_INT) or most,
        check_int("hidden", hidden, 0) or buffer.hidden,
        check_int("num_topk", num_topk, 0) or buffer.num_topk,
        buffer._check_experts(num_experts),
    )
    for name in ("num_tokens", "hidden", "num_topk"):
        if getattr(shape, name) == 0:
            raise value_error(name, 0, "a number, since the buffer was made without it")
    return shape


def warm_up_elastic(buffer: ElasticBuffer, shape: Shape, use_fp8: bool, expand: bool, cpu_sync: bool) -> None:
    """Dispatch, the same again with its handle, and combine: as a step forward and one back make them."""
    from .elastic import ElasticBuffer

    core = buffer._core
    device, rows_of = core.device, (shape.num_tokens, shape.hidden)
    x: Any = _torch.full(rows_of, 0, BF16, device)
    if use_fp8:
        scales = _torch.full((shape.num_tokens, -(-shape.hidden // CHANNELS_OF_SCALE)), 1, FLOAT32, device)
        x = (x.to(FP8), scales)
    experts, weights = _routing(shape, device)
    for _ in range(ROUNDS if core.host_stream else FAST_ROUNDS):
        received, _, row_weights, handle, _ = ElasticBuffer.dispatch(
            buffer, x, experts, weights, num_experts=shape.num_experts, do_expand=expand, do_cpu_sync=cpu_sync,
            num_max_tokens_per_rank=buffer.num_max_tokens_per_rank or shape.num_tokens,
        )  # fmt: skip
        ElasticBuffer.dispatch(buffer, x, handle=handle, do_expand=expand)
        payload = received[0] if isinstance(received, tuple) else received
        rows = _torch.full(payload.shape, 0, BF16, device)
        ElasticBuffer.combine(buffer, rows, handle)
        if not expand:  # expanded, weights come back only if a rank sums its experts' rows
            ElasticBuffer.combine(buffer, rows, handle, topk_weights=row_weights)
    core.synchronize()
    buffer.check()


# ---- the report


def native_report(buffer: Buffer) -> Any:
    """deepep_startup_report of now."""
    native, found = buffer._core.native, _abi.sized(_abi.StartupReport)
    native.check(native.lib.without_gil.deepep_buffer_startup_report(native, ctypes.byref(found)))
    return found


def report(buffer: Buffer) -> dict[str, Any]:
    """See Buffer.startup_report."""
    buffer._core.enter()
    found = native_report(buffer)
    result: dict[str, Any] = {
        "preinitialized": bool(found.preinitialized),
        "num_warmups": int(found.num_warmups),
        "shape": _shape(found, ""),
        "low_latency_shape": _shape(found, "ll_"),
    }
    for index, name in enumerate(("construction", "warmup", "first_calls")):
        stages: dict[str, Any] = {f"{stage}_ms": getattr(found, field)[index] / 1e6 for stage, field in STAGES.items()}
        result[name] = {**stages, "bytes": int(found.bytes[index]), "page_faults": int(found.page_faults[index])}
    result["warmup"]["python_ms"] = found.language_ns / 1e6
    result["operations"] = {
        name: {"first_us": found.first_ns[number] / 1e3, "later_us": found.later_ns[number] / 1e3}
        for number, name in enumerate(_abi.OP_NAMES)
        if found.first_ns[number]
    }
    return result


def _shape(found: Any, prefix: str) -> dict[str, Any] | None:
    origin = SHAPE_FROM[getattr(found, f"{prefix}shape_from")]
    tokens = "ll_num_max_tokens" if prefix else "num_tokens"
    if origin is None:
        return None
    names = ("hidden", "num_topk", "num_experts")
    sizes = {name: int(getattr(found, prefix + name)) for name in names}
    return {"num_tokens": int(getattr(found, tokens)), **sizes, "from": origin}
