"""The low-latency calls that follow plans: synchronous, in halves, or asynchronous."""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn

from . import _abi, _face, errors
from ._core import Core
from ._face import HANDLE, Program, Site, address, constant, size
from ._low_latency_plan import CombinePlan, DispatchPlan
from ._memory import RowCache
from ._ordering import Held
from ._torch import BF16, FLOAT32, FP8, INT32, INT64, opaque
from .utils.event import EventOverlap

X, IDX, WEIGHTS, RECV_STATS, WAIT_STATS = range(5)  # the tensors of a dispatch
ANSWERS, TOPK_IDX, TOPK_WEIGHTS, SRC_INFO, RANGES, OUT, COMBINE_WAIT_STATS = range(7)  # of a combine
NUM_ENTRIES = 5  # of a handle


class Second:
    """How the second half of a call follows from the structs that the first has left: what its hook does."""

    def __init__(self, core: Core, kind: Any, function: Any) -> None:
        """For a function of the C API whose arguments are a struct of type `kind`."""
        self._core, self._call_again, self._function = core, _face.load().call_again, _face.address_of(function)
        self._call = -(-ctypes.sizeof(kind) // 16) * 16  # where the deepep_call lies
        self._event = self._call + _abi.Call.event.offset
        self._receives = ctypes.sizeof(kind) | _abi.RECV << 32  # struct_size and phases
        # On GPUs the caller's stream orders all, so that the hook needs no Python.
        self._direct = None if core.host_stream else function

    def hook(self) -> _face.SecondHalf:
        """For a plan, which holds this object; this one must not hold it: a cycle would keep the buffer."""
        return _face.SecondHalf(self, self._direct, self._receives, self._call, self._core.runs_beside)

    @opaque
    def run(self, structs: bytes, held: Held) -> None:
        """CPU engine: issues it, and waits for its end.

        Raises:
            DeepEPError: the library refused the call, or it failed.
        """
        core = self._core
        launch = core.take_launch_with_event()
        assert launch is not None
        try:
            launch.left = False
            core.kept[launch] = held
            changes = 0, self._receives, self._event, launch.event
            buffer = core.native._as_parameter_.value or 0
            status = self._call_again(self._function, buffer, structs, self._call, *changes)
            if status:
                core.kept.pop(launch, None)
                self.refuse(status)
            core.wait_on_host(launch)
        except BaseException:
            launch.left = True
            raise
        core.idle.append(launch)

    @opaque
    def let_go(self, held: tuple[Any, ...]) -> None:
        """Nobody will call the hook of a call that may still run: its tensors' memory waits for its end.

        Args:
            held: what the call gave (its structs, its outputs), and its tensors.
        """
        made, *given = held
        self._core.record_on_comm_stream((*made[1:], *given))

    @opaque
    def refuse(self, status: int | None) -> NoReturn:
        """Raises what the library said of the second half; None: the hook was called before."""
        raise hook_was_called() if status is None else second_half_error(self._core.native.error(status))


def hook_was_called() -> errors.DeepEPError:
    """What a hook raises when it is called again."""
    return errors.DeepEPError(errors.INVALID_STATE, "the hook was called already")


def second_half_error(error: errors.DeepEPError) -> errors.DeepEPError:
    """The error of a second half in the words of one who has a hook."""
    if not isinstance(error, errors.DeepEPValueError) or "argument ticket" not in error.message:
        return error
    text = "the send of this hook is forgotten: clean_low_latency_buffer() was called after it"
    return errors.DeepEPError(errors.INVALID_STATE, text)


class LowLatencyFace:
    """The sites of one buffer's low-latency calls. Of the lengths all but the number of tokens are part of a plan."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lib = core.native.lib.with_gil
        tokens, fixed = (0,), ()
        self.dispatch = Site(core, (tokens,) * 3 + (fixed,) * 2, 6, 0, ordinary=True)
        self.combine = Site(core, (fixed, *(tokens,) * 2, *(fixed,) * 2, tokens, fixed), 7, 0, ordinary=True)
        self.second_of_dispatch = Second(core, _abi.LlDispatchArgs, self._lib.deepep_low_latency_dispatch)
        self.second_of_combine = Second(core, _abi.LlCombineArgs, self._lib.deepep_low_latency_combine)

    @classmethod
    def of(cls, core: Core) -> LowLatencyFace | None:
        """For a buffer that is ready; None where there is no compiled face."""
        return cls(core) if core.compiled and _face.load() is not None else None

    def missing(self, got: Any) -> bytes | None:
        """The key of a plan that is missing; None if there can be none.

        Raises:
            DeepEPError: the library refused the call.
        """
        if type(got) is list:
            raise self._core.native.error(got[0])
        return got if type(got) is bytes else None

    # ---- plans, from a call of their kind that has passed every check

    def add_dispatch(self, key: bytes, plan: DispatchPlan, weighted: bool, halved: bool) -> None:
        """`plan` is Python's; `weighted`: the weights go along; `halved`: the call is the first of two halves."""
        core = self._core
        per_expert, local = core.group_size * plan.bound, plan.local
        recv_x = plan.recv_x
        if core.host_stream and core.recycle and recv_x.numel() * recv_x.itemsize >= RowCache.MIN_BYTES:
            self.dispatch.add(key, None)  # its rows lie in recycled memory
            return
        p = Program(core.device)
        tokens = size(X, 0)
        p.same(tokens, size(IDX, 0))
        if weighted:
            p.same(tokens, size(WEIGHTS, 0))
        sources = {"x": address(X), "topk_idx": address(IDX), "topk_weights": address(WEIGHTS), "num_tokens": tokens}
        lengths = (constant(local), constant(per_expert))
        sources["recv_x"] = p.output(FP8 if plan.use_fp8 else BF16, *lengths, constant(plan.hidden))
        if plan.use_fp8:
            columns = constant(plan.scales_shape[2])
            dtype = INT32 if plan.scales.dtype is INT32 else FLOAT32
            sources["recv_x_scales"] = p.output(dtype, *lengths, columns, strides=plan.scales_strides)
        else:
            p.none()
        sources["recv_count"] = p.output(INT32, constant(local), slab=HANDLE)
        sources["src_info"] = p.output(INT32, *lengths, slab=HANDLE)
        sources["layout_range"] = p.output(INT64, constant(local), constant(core.group_size), slab=HANDLE)
        sources |= {"cumulative_recv_stats": address(RECV_STATS), "wait_recv_cost_stats": address(WAIT_STATS)}
        self._finish(p, _abi.LlDispatchArgs, plan.numbers, sources, self._lib.deepep_low_latency_dispatch, halved)
        first = 1 if halved else 0
        rows, scales, count, source, ranges = (_face.Entry(first + i) for i in range(5))
        received: Any = (rows, scales) if plan.use_fp8 else rows
        handle = (source, ranges, plan.bound, plan.hidden, plan.num_experts)
        hook = self.second_of_dispatch.hook() if halved else None
        p.result((received, count, handle, _face.New(EventOverlap), hook))
        self.dispatch.add(key, p)

    def add_combine(self, key: bytes, plan: CombinePlan, into_out: bool, halved: bool) -> None:
        """`plan` is Python's; `into_out`: the call was given a tensor to fill; `halved`: as for a dispatch."""
        p = Program(self._core.device)
        tokens, out = size(TOPK_IDX, 0), address(OUT)
        p.same(tokens, size(TOPK_WEIGHTS, 0))
        if into_out:
            p.same(tokens, size(OUT, 0))
        else:
            out = p.output(BF16, tokens, constant(plan.combined_shape[1]))
        sources = {
            "x": address(ANSWERS), "topk_idx": address(TOPK_IDX), "topk_weights": address(TOPK_WEIGHTS),
            "src_info": address(SRC_INFO), "layout_range": address(RANGES), "combined_x": out,
            "wait_recv_cost_stats": address(COMBINE_WAIT_STATS), "num_tokens": tokens,
        }  # fmt: skip
        self._finish(p, _abi.LlCombineArgs, plan.numbers, sources, self._lib.deepep_low_latency_combine, halved)
        combined = _face.Given(OUT) if into_out else _face.Entry(1 if halved else 0)
        p.result((combined, _face.New(EventOverlap), self.second_of_combine.hook() if halved else None))
        self.combine.add(key, p)

    def _finish(
        self, p: Program, kind: Any, numbers: tuple[int, ...], sources: Any, function: Any, halved: bool
    ) -> None:
        """The struct of the arguments, whose fields from phases on hold a plan's numbers, and the call.

        Second finds both at the beginning of the structs.
        """
        args = _abi.sized(kind)
        names = [field[0] for field in kind._fields_]
        for name, value in zip(names[names.index("phases") :], numbers, strict=False):
            setattr(args, name, value)
        if halved:
            args.phases = _abi.SEND
            p.read_structs()
        place = p.struct(args, **sources)
        p.call(function, place, _face.call_struct(p, constant(0), 0))
