"""How one operation is ordered among streams and events."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _abi, _torch, errors
from ._torch import OptionalTensor
from .errors import assertion, check_flag, type_error
from .utils import EventHandle, EventOverlap
from .utils.event import no_event

if TYPE_CHECKING:
    from ._core import Core

Held = tuple[OptionalTensor, ...]  # what a call reads and writes
# How the compiled face orders a call. False: it is synchronous. On CUDA, True: asynchronous; a tuple: asynchronous,
# with outputs in the communication stream's memory, behind an event, or (None) behind the caller's current stream.
Ordered = bool | tuple[EventHandle | None]

_ABSENT = object()
_NO_CONTEXT = contextlib.nullcontext()


class Ordering:
    """How one operation is ordered among streams, and what it keeps alive."""

    __slots__ = (
        *("core", "async_finish", "previous", "on_comm", "stream", "caller", "struct", "launch", "begun"),
        *("given_back", "user", "followed"),
    )

    def __init__(
        self, core: Core, previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
    ) -> None:
        asynchronous = check_flag("async_finish", async_finish)
        previous = None if previous_event is None else event_of(previous_event)
        assertion(
            not check_flag("allocate_on_comm_stream", allocate_on_comm_stream)
            or (previous is not None and asynchronous),
            "allocate_on_comm_stream needs both previous_event and async_finish",
        )
        self._begin(core, asynchronous, previous)

    @classmethod
    def of(cls, core: Core, ordered: Ordered) -> Ordering:
        """CUDA engine: of an asynchronous call that Core.ordered has looked at."""
        order = cls.__new__(cls)
        order._begin(core, True, ordered[0] if type(ordered) is tuple else None)
        return order

    def _begin(self, core: Core, async_finish: bool, previous: EventHandle | None) -> None:
        self.core, self.async_finish, self.previous = core, async_finish, previous
        # Memory from the caller's stream may still be in use there; a call that was given an event does not wait for
        # that stream, so its outputs come from the communication stream's pool.
        self.on_comm = not core.host_stream and self.previous is not None
        self.launch = core.take_launch()
        self.begun = self.given_back = self.followed = False
        self.caller = core.raw_stream()
        self.stream: int | None = self.caller or None
        self.struct: Any = None  # a deepep_call, for calls that do not go through the compiled face
        self.user: Any = None  # of Core.user_of: the stream that uses the outputs of a compiled call beside their own

    @property
    def context(self) -> Any:
        """Outputs are allocated in it."""
        return _torch.stream_context(self.core.comm_stream) if self.on_comm else _NO_CONTEXT

    def first(self, function: Any, args: Any, *after: Any, config: Any, held: Held) -> None:
        """Launches a call that does not end the operation; for every exception from here on: leave().

        Args:
            function: of the C API; takes the buffer, `args`, the deepep_call, `after`.
            config: deepep_config.
            held: every tensor that the call reads or writes. They are kept until the operation's last call.
        """
        core, launch = self.core, self.launch
        call = self._call(config, False)
        core.kept[launch] = held
        self.begun = True
        status = function(core.native, args, call, *after)
        if status:
            core.kept.pop(launch, None)
            raise core.native.error(status)

    def last(self, function: Any, *values: Any, config: Any = None, held: Held) -> EventOverlap:
        """Launches the call that ends the operation, and waits on the CPU engine unless it is asynchronous.

        Args:
            function: of the C API; takes the buffer, `values`, the deepep_call.
            config: deepep_config.
            held: every tensor that the operation reads or writes.
        """
        core, launch = self.core, self.launch
        call = self._call(config, True)
        try:
            if core.host_stream:
                core.kept[launch] = held
            else:
                self._keep(held)
            status = function(core.native, *values, call)
            if status:
                if not self.begun:
                    core.kept.pop(launch, None)
                raise core.native.error(status)
            return self._finish()
        except BaseException:
            self.leave()
            raise

    def cancel(self, token: int, error: BaseException) -> None:
        """An exception came between the exchange of counts and its dispatch: the peers are told why."""
        native = self.core.native
        reason = error.status if isinstance(error, errors.DeepEPError) else 0
        if isinstance(error, MemoryError) or _torch.is_out_of_memory(error):
            reason = errors.OUT_OF_MEMORY
        if native.alive:  # refused where the dispatch was issued, or the exchange has failed: the peers know
            call = self._call(None, False)
            native.lib.with_gil.deepep_cancel_dispatch(native, token, reason, call)

    def leave(self) -> None:
        """The operation was cut short: its tensors are kept until the library is through with them."""
        if self.given_back:
            return  # another call may have the launch by now
        core, launch = self.core, self.launch
        if not core.host_stream and launch in core.kept:  # the end of the first call: nothing recorded an event there
            core.leave(launch, None if self.async_finish or self.on_comm else self.stream or 0)
        else:
            launch.left = True

    def _call(self, config: Any, last: bool) -> Any:
        """The deepep_call of the next library call; `last`: its end is the end of the whole operation."""
        core = self.core
        if self.struct is None:
            self.struct = _abi.sized(_abi.Call)
        struct = self.struct
        struct.config = ctypes.addressof(config) if config is not None else None
        struct.stream, struct.previous_event = self.behind()
        struct.event = None
        if core.host_stream or (last and self.async_finish):
            self.launch.create_event(core.native)
            struct.event = self.launch.event
        later = self.async_finish or self.on_comm and not last
        if self.on_comm and self.previous is None and not later:  # on the caller's stream, in the other's memory
            core.torch_current_stream().wait_stream(core.comm_stream)
        struct.is_async = 1 if core.host_stream or later else 0
        return ctypes.byref(struct)

    def behind(self) -> tuple[int | None, int | None]:
        """The stream and the previous_event of the next library call."""
        core = self.core
        if self.followed:  # an earlier call waits on the communication stream for all that this one needs
            return core.comm_stream_address, None
        self.followed = self.async_finish and self.on_comm
        self.stream, event = core.after(self.previous, self.stream)
        return self.stream, event

    def made_on_comm(self, output: OptionalTensor) -> None:
        """CUDA engine: torch's allocator learns that the caller's stream uses an output, where it is in the
        communication stream's memory."""
        if output is not None and self.user is not None:
            self.core.record(output, self.user)

    def append(self, event: EventOverlap, work: Callable[[], None]) -> None:
        """Runs torch calls behind the ended operation, and has `event`, which `last` returned, stand for them too.

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
        core.native.record_event(self.launch.event, core.comm_stream_address)

    def _keep(self, tensors: Held) -> None:
        """CUDA engine: torch's allocator learns, before the launch, which tensors another stream than theirs uses.

        An asynchronous call's event has them until the caller's stream waits for it; behind a synchronous one it waits
        at once. Outputs in the communication stream's memory live on, and the caller's stream uses them.
        """
        core = self.core
        if self.async_finish:
            core.kept[self.launch] = tensors
        if self.on_comm:
            streams = core.comm_stream, core.torch_current_stream()  # inputs and outputs are not told apart here
            for tensor in tensors:
                if tensor is not None:
                    for stream in streams:
                        tensor.record_stream(stream)

    def ended(self) -> EventOverlap:
        """CUDA engine: the event of an asynchronous operation whose last call was launched."""
        core, launch = self.core, self.launch
        held = core.kept.pop(launch, None)  # the last call's end is that of the first too
        overlap = no_event()
        overlap.event = EventHandle._of_call(core, launch, core.idle, held, self.caller)
        return overlap

    def _finish(self) -> EventOverlap:
        core, launch = self.core, self.launch
        if core.host_stream:
            if self.async_finish:
                event = EventOverlap(EventHandle._of_call(core, launch, core.idle))
                launch.left = True
                return event
            core.native.wait_event(launch.event)
            core.kept.pop(launch, None)
            self._give_back()
            return EventOverlap()
        if self.async_finish:
            return self.ended()
        core.kept.pop(launch, None)
        if self.stream == core.comm_stream_address:  # after a torch event; the library knew no other stream
            core.torch_current_stream().wait_stream(core.comm_stream)
        self._give_back()
        return EventOverlap()

    def _give_back(self) -> None:
        self.given_back = True
        self.core.idle.append(self.launch)


def call_in_order(call: Callable[..., Any], order: Ordering | None, *args: Any) -> Any:
    """`call(order, *args)` of the compiled face; outputs of an asynchronous call are made in its context."""
    if order is None or not order.on_comm:
        return call(order, *args)
    core = order.core
    order.user = core.user_of(order.caller)
    return core.in_comm_memory(call, order, *args)


def event_of(previous_event: object) -> EventHandle | None:
    """The event of an EventOverlap, or of any object with such an attribute."""
    event = getattr(previous_event, "event", _ABSENT)
    if event is not None and not isinstance(event, EventHandle):
        raise type_error("previous_event", type(previous_event).__name__, "an EventOverlap or None")
    return event
