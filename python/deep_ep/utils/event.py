"""EventHandle and EventOverlap: the points in a stream that asynchronous calls return."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .. import _torch
from .._torch import opaque
from ..errors import assertion, type_error


class EventHandle:
    """A point in a stream. Without arguments: the present end of the caller's current stream.

    On the CPU engine the current stream is the calling thread, so such a point is already passed.
    """

    __slots__ = ("_core", "_launch", "_home", "_torch", "_held", "_users", "_stream", "__weakref__")
    _held: tuple[Any, ...]  # tensors of the call, if the caller asked for that
    _users: tuple[Any, ...] | None
    _stream: int | None
    _torch: Any

    @opaque
    def __init__(self) -> None:
        points: Any = points_on.get(_torch.gpu_in_use()) if points_on else None
        self._users = self._stream = self._torch = None
        self._core: Any = points
        self._home: Any = None if points is None else points.idle
        launch: Any = None if points is None else points.take()
        if launch is None:
            self._torch = _torch.recorded_event()
        self._launch: Any = launch

    @classmethod
    def _of_call(
        cls, core: Any, launch: Any, home: list[Any], users: tuple[Any, ...] | None = None, stream: int | None = None
    ) -> EventHandle:
        """The end of a call.

        Args:
            core: of the buffer.
            launch, home: the call's launch, and who takes it back.
            users: CUDA: tensors that the communication stream uses. They live until the stream to whom their memory
                belongs waits for this point. Torch's allocator is told of them only if it never does: that costs
                each tensor an event when it is freed.
            stream: the address of that stream, the caller's.
        """
        handle = cls.__new__(cls)
        handle._torch, handle._core, handle._home = None, core, home
        handle._users, handle._stream = users, stream
        handle._launch = launch  # last: __del__ needs the others
        return handle

    @opaque
    def current_stream_wait(self) -> None:
        """Makes the caller's current stream wait for this point; on the CPU engine blocks until it is passed.

        Raises:
            DeepEPError: the call that this point ends failed.
        """
        launch = self._launch
        if launch is not None:
            core = self._core
            if core.host_stream:
                core.wait_for(launch)
                return
            stream = core.raw_stream()  # 0: the default stream
            status = core.stream_wait(launch.event, stream)
            if status:
                raise core.native.error(status)
            if self._users is not None and stream == self._stream:
                self._users = None  # what is freed now is used again behind the wait
        elif self._torch is not None:
            _torch.wait_for(self._torch)

    def __del__(self) -> None:
        try:
            launch = self._launch
        except AttributeError:  # to make it was interrupted
            return
        if launch is not None:
            core = self._core
            try:
                if self._users is not None:
                    core.record_on_comm_stream(self._users)
            finally:
                if launch in core.kept:
                    launch.home = self._home
                elif core.native.alive:
                    self._home.append(launch)


class EventOverlap:
    """An EventHandle (or None) with the tensors that must live until it is passed.

    A context manager: on leaving, the current stream waits for the event if there is one.

    Attributes:
        event: the point in the stream, or None.
        extra_tensors: kept alive as long as this object.
        hook_after_wait: what the next wait calls and forgets, or None.

    Args:
        event: the point in the stream, or None.
        extra_tensors: kept alive as long as this object.

    Raises:
        DeepEPError (also a TypeError): `event` is something else.
    """

    event: EventHandle | None = None
    extra_tensors: tuple[Any, ...] | None = None
    hook_after_wait: Callable[[], Any] | None = None
    _release_handle = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        if event is not None and not isinstance(event, EventHandle):
            raise type_error("event", type(event).__name__, "an EventHandle or None")
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait = None
        self._release_handle = False

    @opaque
    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes the current stream wait for the event, then calls the hook, if there is one, for the only time.

        Args:
            release_handle: forget the event.

        Returns:
            What the hook returns; None without one.

        Raises:
            DeepEPError (also an AssertionError): there is no event.
        """
        event, result = self.event, None
        if event is None:
            assertion(False, "current_stream_wait() of an EventOverlap without an event")
        else:
            event.current_stream_wait()
        if self.hook_after_wait is not None:
            hook, self.hook_after_wait = self.hook_after_wait, None
            result = hook()
        if release_handle:
            self.event = None
        return result

    def wait(self, release_handle: bool = False) -> Any:
        """The same as current_stream_wait."""
        return self.current_stream_wait(release_handle)

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Has the next wait call `hook`.

        Raises:
            DeepEPError (also an AssertionError): there is a hook already.
        """
        assertion(self.hook_after_wait is None, "register_hook_after_wait() of an EventOverlap that has a hook")
        self.hook_after_wait = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For ``with event(release_handle=True):``; leaving then forgets the event."""
        self._release_handle = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    @opaque
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        release, self._release_handle = self._release_handle, False
        if self.event is not None:
            self.current_stream_wait(release)


def no_event() -> EventOverlap:
    """EventOverlap() in a third of the time."""
    return _new(EventOverlap)


_new = object.__new__


@opaque
def captured() -> EventOverlap:
    """The present end of the current stream."""
    points = points_on.get(_torch.gpu_in_use()) if points_on else None
    overlap: EventOverlap | None = None if points is None else points.again(points)
    if overlap is None:
        overlap = no_event()
        overlap.event = EventHandle()
    return overlap


# Of each GPU with a buffer: who makes points in its streams for an EventHandle without arguments.
points_on: dict[int, Any] = {}
_of_parent: list[dict[int, Any]] = []


def _leave_to_parent() -> None:
    """In a forked child, which has no CUDA, and must not destroy the parent's events."""
    _of_parent.append(dict(points_on))
    points_on.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
