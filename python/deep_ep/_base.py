"""What both modes of a Buffer share: order of calls, events, and keeping tensors alive."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

from . import _abi, errors
from . import _torch as tt
from ._native import NativeBuffer
from .errors import assertion, type_error
from .utils import EventHandle, EventOverlap

# Keywords of forks of the API: asking for one of them is an error that names it, passing its "off" value is not.
FORK_KEYWORDS = frozenset(
    ("use_nvfp4", "x_global_scale", "overlap", "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms",
     "src_signals", "src_signal_expect_value")
)  # fmt: skip


def refuse_keywords(function: str, keywords: dict[str, Any]) -> None:
    """Raises TypeError for unknown keywords and NotImplementedError for a fork's keyword that asks for something."""
    for name, value in keywords.items():
        if name not in FORK_KEYWORDS:
            raise errors.DeepEPTypeError(
                errors.INVALID_ARGUMENT, f"{function}() got an unexpected keyword argument '{name}'"
            )
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            raise errors.DeepEPNotImplementedError(
                errors.UNSUPPORTED, f"{function}(): the keyword {name}={value!r} belongs to a fork and is not supported"
            )


class Ordering:
    """How one call is ordered among streams, and what it must keep alive."""

    __slots__ = ("buffer", "async_finish", "previous", "on_comm", "struct", "event", "context")

    def __init__(
        self, buffer: BufferBase, previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
    ) -> None:
        self.buffer = buffer
        self.async_finish = async_finish
        if previous_event is not None and not isinstance(previous_event, EventOverlap):
            raise type_error("previous_event", type(previous_event).__name__, "an EventOverlap or None")
        self.previous = None if previous_event is None else previous_event.event
        assertion(
            not allocate_on_comm_stream or (self.previous is not None and async_finish),
            "allocate_on_comm_stream needs both previous_event and async_finish",
        )
        # Memory from the caller's stream may still be in use there; a call that was given an event does not wait for
        # that stream, so its outputs come from the communication stream's pool.
        self.on_comm = not buffer.host_stream and self.previous is not None
        self.event = 0
        self.struct = _abi.sized(_abi.Call, stream=buffer.current_stream())
        self.context: Any = tt.stream_context(buffer.comm_stream) if self.on_comm else contextlib.nullcontext()

    def call(self, config: Any, last: bool) -> Any:
        """The deepep_call of the next library call; `last`: the one whose end is the end of the whole operation."""
        struct, buffer = self.struct, self.buffer
        struct.config = ctypes.addressof(config) if config is not None else None
        struct.previous_event = None
        if self.previous is not None:
            if self.previous._native:
                struct.previous_event = self.previous._native
            elif not buffer.host_stream:
                buffer.comm_stream.wait_event(self.previous._torch)
                struct.stream = buffer.comm_stream_address
        if last and (buffer.host_stream or self.async_finish):
            self.event = struct.event = buffer.native.take_event()
        struct.is_async = 1 if buffer.host_stream or self.async_finish or not last else 0
        return ctypes.byref(struct)

    def finish(self, tensors: tuple[Any, ...]) -> EventOverlap:
        """Ends the operation: waits on the CPU engine unless asynchronous, and keeps `tensors` alive until then."""
        buffer, event = self.buffer, self.event
        if not buffer.host_stream:
            return self._finish_on_stream(event, tensors)
        if not event:
            return EventOverlap()
        if self.async_finish:
            # The handle may be dropped unwaited; the buffer keeps the tensors until the work is done.
            handle = EventHandle._of_call(buffer, event)
            buffer.keep(handle, tensors)
            return EventOverlap(handle)
        self.event = 0
        buffer.finish_on_host(event, tensors)
        return EventOverlap()

    def _finish_on_stream(self, event: int, tensors: tuple[Any, ...]) -> EventOverlap:
        """CUDA engine: orders the caller's stream, and tells torch which streams use `tensors`."""
        if not event and not self.on_comm:
            return EventOverlap()  # the caller's stream waits for the work, and all the memory belongs to that stream
        buffer = self.buffer
        current = buffer.torch_current_stream()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(buffer.comm_stream)
                if self.on_comm:
                    tensor.record_stream(current)
        if event:
            return EventOverlap(EventHandle._of_call(buffer, event))
        if self.struct.stream == buffer.comm_stream_address:  # after a torch event; the library knew no other stream
            current.wait_stream(buffer.comm_stream)
        return EventOverlap()


class BufferBase:
    """State of a Buffer that its modes use."""

    native: NativeBuffer
    group_size: int
    rank: int
    num_nvl_peers: int
    device: Any
    host_stream: bool
    comm_stream: Any
    comm_stream_address: int
    raw_stream: Callable[[], int]  # the caller's current stream as an address; 0 on the CPU engine
    _kept: deque[tuple[EventHandle, tuple[Any, ...]]]
    _ready: bool

    def current_stream(self) -> int | None:
        """The caller's current stream as an address; None on the CPU engine."""
        return self.raw_stream() or None

    def torch_current_stream(self) -> Any:
        """The caller's current CUDA stream as a torch object."""
        return tt.torch_stream(self.device)

    def enter(self) -> None:
        """Before every call: start-up is complete, the buffer is alive, and what is done is let go of."""
        if not self._ready:
            self.ensure_ready()
        kept = self._kept
        while kept and self.native.event_done(kept[0][0]._native):
            kept.popleft()

    def ensure_ready(self) -> None:
        """Waits for start-up."""
        raise NotImplementedError

    def keep(self, handle: EventHandle, tensors: tuple[Any, ...]) -> None:
        """Holds `tensors` until `handle` is passed."""
        self._kept.append((handle, tensors))

    def finish_on_host(self, event: int, tensors: tuple[Any, ...]) -> None:
        """CPU engine: blocks until `event`; if that is interrupted the tensors are kept until it is passed."""
        try:
            self.native.wait_event(event)
        except BaseException:
            self.keep(EventHandle._of_call(self, event), tensors)
            raise
        self.native.give_event(event)

    def current_stream_wait(self, event: int) -> None:
        """The caller's current stream waits for a native event; the CPU engine blocks."""
        if self.host_stream:
            self.native.wait_event(event)
        else:
            lib = self.native.lib
            lib.check(lib.quick.deepep_event_stream_wait(event, self.current_stream()))

    def give_event(self, event: int) -> None:
        """Takes back an event that nobody holds any more, once it is passed."""
        self.native.give_event(event)
