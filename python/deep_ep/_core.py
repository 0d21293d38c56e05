"""What both modes of a Buffer share: the library's buffer, streams, events, and the tensors that running calls use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from . import _abi, _torch, errors
from ._memory import RowPool
from ._native import NativeBuffer, NativeGroup
from ._torch import Device, OptionalTensor
from .errors import assertion, type_error
from .utils import EventHandle, EventOverlap

_ABSENT = object()


class Core:
    """One buffer of the library with its streams and events. Both modes of a Buffer hold it; it holds neither.

    It lives as long as anything that may still need the buffer: the Buffer, an event or a hook that the caller has, or
    a view of the buffer's memory. Then the finalizer frees the buffer.
    """

    def __init__(
        self, engine: str, native: NativeBuffer, group: NativeGroup, zero_copy_bytes: int, recycle: bool
    ) -> None:
        self.engine = engine
        self.recycle = recycle  # memory of outputs may be used again (CPU engine)
        self.native = native
        self.host_stream = engine == "cpu"  # the calling thread is the stream
        self.comm_stream: Any = None
        self.comm_stream_address = 0
        self.is_ready = False
        self.kept: deque[tuple[EventHandle, Iterable[OptionalTensor]]] = deque()  # until the event is passed
        self._zero_copy_bytes = zero_copy_bytes
        self._finalizer = weakref.finalize(self, _free, native, group, os.getpid())
        self._adopt(native.info())

    def _adopt(self, info: Any) -> None:
        self.rank, self.group_size = int(info.rank), int(info.size)
        self.num_nvl_peers = int(info.num_nvl_peers)
        self.num_nodes = max(1, self.group_size // self.num_nvl_peers) if self.num_nvl_peers else 1
        self.device: Device = _torch.device_of(self.engine, max(0, int(info.device)))
        self.ordinal = -1 if self.host_stream else int(self.device.index)
        self.raw_stream = _torch.stream_getter(self.device)  # the caller's current stream; 0 on the CPU engine

    def ensure_ready(self) -> None:
        """Waits for start-up.

        Raises:
            DeepEPError: start-up failed, or the buffer is destroyed.
        """
        native = self.native
        if not native.alive:
            raise errors.DeepEPError(errors.INVALID_STATE, "the buffer is destroyed")
        native.wait_ready()
        info = native.info()
        self._adopt(info)
        self.comm_stream_address = int(info.comm_stream or 0)
        self.comm_stream = _torch.external_stream(self.comm_stream_address, self.device)
        if info.peer_rows and self._zero_copy_bytes and not self.host_stream and native.rows is None:
            index, pointer = native.open_segment(self._zero_copy_bytes)
            select = native.lib.with_gil.deepep_pool_select
            native.rows = RowPool(native.lib.path, select, index, pointer, self._zero_copy_bytes)
        self.is_ready = True

    def enter(self) -> None:
        """Begins a call: waits for start-up, and lets go of the tensors of calls that have ended."""
        if not self.is_ready:
            self.ensure_ready()
        kept = self.kept
        while kept and self.native.event_done(kept[0][0]._native):
            kept.popleft()

    def destroy(self) -> None:
        """Frees the buffer and lets go of every tensor. Twice is fine."""
        self.is_ready = False
        self._finalizer()
        self.kept.clear()

    # ---- streams and events

    def current_stream(self) -> int | None:
        """The caller's current stream as an address; None on the CPU engine."""
        return self.raw_stream() or None

    def torch_current_stream(self) -> Any:
        """The caller's current CUDA stream as a torch object."""
        return _torch.torch_stream(self.device)

    def synchronize(self) -> None:
        """CUDA engine: the host waits for the caller's current stream."""
        if not self.host_stream:
            self.torch_current_stream().synchronize()

    def keep(self, event: int, tensors: Iterable[OptionalTensor]) -> EventHandle:
        """Holds `tensors` until the library's `event` is passed, or the buffer destroyed."""
        handle = EventHandle._of_call(self, event)
        self.kept.append((handle, tensors))
        return handle

    def finish_on_host(self, event: int, tensors: Iterable[OptionalTensor]) -> None:
        """CPU engine: blocks until `event`; if that is interrupted the tensors are kept until it is passed."""
        try:
            self.native.wait_event(event)
        except BaseException:
            self.keep(event, tensors)
            raise
        self.native.give_event(event)

    def current_stream_wait(self, event: int) -> None:
        """The caller's current stream waits for an event of the library; the CPU engine blocks."""
        if self.host_stream:
            self.native.wait_event(event)
        else:
            lib = self.native.lib
            lib.check(lib.with_gil.deepep_event_stream_wait(event, self.current_stream()))

    def give_event(self, event: int) -> None:
        """Takes back an event that has no holder any more."""
        self.native.give_event(event)

    def on_current_stream(self, function: Any, *values: Any, held: tuple[OptionalTensor, ...] = ()) -> None:
        """Issues a call that only the caller's current stream orders."""
        order = Ordering(self, None, False, False)
        self.native.lib.check(function(self.native, *values, order.call(None, True)))
        order.finish(held)


class Ordering:
    """How one call is ordered among streams, and what it must keep alive."""

    __slots__ = ("core", "async_finish", "previous", "on_comm", "struct", "event", "context")

    def __init__(
        self, core: Core, previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
    ) -> None:
        self.core = core
        self.async_finish = async_finish
        self.previous = None if previous_event is None else _event_of(previous_event)
        assertion(
            not allocate_on_comm_stream or (self.previous is not None and async_finish),
            "allocate_on_comm_stream needs both previous_event and async_finish",
        )
        # Memory from the caller's stream may still be in use there; a call that was given an event does not wait for
        # that stream, so its outputs come from the communication stream's pool.
        self.on_comm = not core.host_stream and self.previous is not None
        self.event = 0
        self.struct = _abi.sized(_abi.Call, stream=core.current_stream())
        self.context: Any = _torch.stream_context(core.comm_stream) if self.on_comm else contextlib.nullcontext()

    def call(self, config: Any, last: bool) -> Any:
        """The deepep_call of the next library call; `last`: its end is the end of the whole operation."""
        struct, core = self.struct, self.core
        struct.config = ctypes.addressof(config) if config is not None else None
        struct.previous_event = None
        if self.previous is not None:
            if self.previous._native:
                struct.previous_event = self.previous._native
            elif not core.host_stream:
                core.comm_stream.wait_event(self.previous._torch)
                struct.stream = core.comm_stream_address
        struct.event = None
        if core.host_stream or (last and self.async_finish):
            if not self.event:
                self.event = core.native.take_event()
            struct.event = self.event
        struct.is_async = 1 if core.host_stream or self.async_finish or not last else 0
        return ctypes.byref(struct)

    def keep(self, tensors: tuple[OptionalTensor, ...]) -> None:
        """After a call that was not the last has failed to complete: it may still write to `tensors`."""
        core, event = self.core, self.event
        self.event = 0
        if not core.host_stream:
            try:
                event = core.native.take_event()
                core.native.record_event(event, core.comm_stream_address)
            except errors.DeepEPError:
                event = 0  # never passed: destroy() lets go of the tensors
        core.keep(event, tensors)

    def finish(self, tensors: tuple[OptionalTensor, ...]) -> EventOverlap:
        """Ends the operation: waits on the CPU engine unless asynchronous, and keeps `tensors` alive until then."""
        core, event = self.core, self.event
        if not core.host_stream:
            return self._finish_on_stream(event, tensors)
        if self.async_finish:
            # The caller may drop the handle unwaited; the core keeps the tensors until the work is done.
            return EventOverlap(core.keep(event, tensors))
        self.event = 0
        core.finish_on_host(event, tensors)
        return EventOverlap()

    def append(self, event: EventOverlap, work: Callable[[], None]) -> None:
        """Runs torch calls behind the ended operation, and has `event`, which `finish` returned, stand for them too.

        The CPU engine waits here for an asynchronous operation: torch has no stream there.
        """
        core = self.core
        if event.event is None or core.host_stream:
            if event.event is not None:
                event.current_stream_wait()
            work()
            return
        with _torch.stream_context(core.comm_stream):
            work()
        core.native.record_event(event.event._native, core.comm_stream_address)

    def _finish_on_stream(self, event: int, tensors: tuple[OptionalTensor, ...]) -> EventOverlap:
        """CUDA engine: orders the caller's stream, and marks `tensors` as used on the communication stream."""
        if not event and not self.on_comm:
            return EventOverlap()  # the caller's stream waits for the work, and all the memory belongs to that stream
        core = self.core
        current = core.torch_current_stream()
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(core.comm_stream)
                if self.on_comm:
                    tensor.record_stream(current)
        if event:
            return EventOverlap(EventHandle._of_call(core, event))
        if self.struct.stream == core.comm_stream_address:  # after a torch event; the library knew no other stream
            current.wait_stream(core.comm_stream)
        return EventOverlap()


def _event_of(previous_event: object) -> EventHandle | None:
    """The event of an EventOverlap, or of any object with such an attribute."""
    event = getattr(previous_event, "event", _ABSENT)
    if event is not None and not isinstance(event, EventHandle):
        raise type_error("previous_event", type(previous_event).__name__, "an EventOverlap or None")
    return event


def _free(native: NativeBuffer, group: NativeGroup, owner: int) -> None:
    if os.getpid() == owner:
        native.destroy()
        group.destroy()
