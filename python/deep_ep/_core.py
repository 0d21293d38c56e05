"""What both modes of a Buffer share: the library's buffer, streams, events, and the tensors that running calls use."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from . import _face, _torch, errors
from ._lib import watch_exit
from ._memory import HAS_ROW_POOLS, ROUTING, RowPool, give_back_rows
from ._native import DESTROYED, SLICE_MS, Launch, NativeBuffer, NativeGroup
from ._ordering import Held, Ordered, Ordering, event_of
from ._torch import Device, OptionalTensor
from .utils import EventHandle, EventOverlap
from .utils.event import points_on

User = tuple[Any, int, int, int]  # a stream: torch's object, and its numbers in torch
MAX_USERS = 256  # streams of callers whose torch objects a buffer keeps
Placed = tuple[OptionalTensor, int, int]  # recv_x, or None if the compiled face makes it; its segment, its offset there


class Core:
    """One buffer of the library with its streams and events. Both modes of a Buffer hold it; it holds neither.

    It lives as long as anything that may still need the buffer: the Buffer, an event or a hook that the caller has, or
    a view of the buffer's memory. Then the finalizer frees the buffer.

    A signal handler may raise between any two steps of a call, and its exception drops whatever the call's frame holds.
    So a call puts its tensors into `kept` before it launches (CPU engine; on CUDA it marks them for torch's allocator,
    or the stream's order protects them), and takes them out when the library is through with them.
    """

    def __init__(
        self,
        engine: str,
        native: NativeBuffer,
        group: NativeGroup,
        zero_copy_bytes: int | None,
        recycle: bool,
        rows_at_once: bool,
    ) -> None:
        self.engine = engine
        self.recycle = recycle  # memory of outputs may be used again (CPU engine)
        self.native = native
        self.host_stream = engine == "cpu"  # the calling thread is the stream
        self.comm_stream: Any = None
        self.comm_stream_address = 0
        self.is_ready = False
        self._unfinished: tuple[Callable[[], None], bool, bool] | None = None  # see _carry_out
        self.compiled = True  # calls may go through the compiled face; asked at the first one of a mode
        self.stream_wait: Any = None  # deepep_event_stream_wait; None on the CPU engine
        self.in_comm_memory: Any = None  # calls a function, whose outputs are in the communication stream's memory
        self.record: Any = None  # tells torch's allocator that a stream, of user_of, uses a tensor
        self.users: dict[int, User] = {}  # see user_of
        self._points: Points | None = None
        self.kept: dict[Launch, Held] = {}
        self.idle: list[Launch] = []
        self._zero_copy_bytes = zero_copy_bytes  # None: as the settings say
        self._rows_at_once = rows_at_once  # start-up opens the segment for rows, not the first dispatch
        self._room = 0  # bytes of that segment; 0: there is none
        self._finalizer = weakref.finalize(self, _free, native, group, os.getpid())
        watch_exit()
        self._adopt(native.info())

    def _adopt(self, info: Any) -> None:
        self.rank, self.group_size = int(info.rank), int(info.size)
        self.num_nvl_peers = int(info.num_nvl_peers)
        self.ll_transfer = "copy" if info.ll_copies else "stream" if info.ll_on_stream else "sm"
        self.runs_beside = bool(info.ll_on_stream)  # a low-latency call in halves, on the communication stream
        self.normal_transfer = "copy" if info.normal_copies else "sm"
        self.num_nodes = max(1, self.group_size // self.num_nvl_peers) if self.num_nvl_peers else 1
        first, stride = int(info.rdma_team_start), int(info.rdma_team_stride)
        self.rdma_team = [first + stride * node for node in range(int(info.rdma_team_size))]
        self.device: Device = _torch.device_of(self.engine, max(0, int(info.device)))
        self.ordinal = -1 if self.host_stream else int(self.device.index)
        self.raw_stream = _torch.stream_getter(self.device)  # the caller's current stream; 0 on the CPU engine

    def ensure_ready(self) -> None:
        """Waits for start-up.

        Raises:
            DeepEPError: start-up failed, or the buffer is destroyed.
        """
        if not self.native.alive:
            raise errors.DeepEPError(errors.INVALID_STATE, DESTROYED)
        self._finish()
        if not self.is_ready:
            self._learn()
            self.is_ready = True
            if self._rows_at_once:
                self.open_rows()

    def _learn(self) -> None:
        """Waits for start-up, and takes what the library knows of the group and the device."""
        native = self.native
        native.wait_ready()
        info = native.info()
        self._adopt(info)
        address = int(info.comm_stream or 0)
        if self.comm_stream is None or address != self.comm_stream_address:
            self.comm_stream_address = address
            self.comm_stream = _torch.external_stream(address, self.device)
        if not self.host_stream:
            self.follow_streams()
        if info.peer_rows and not self.host_stream and HAS_ROW_POOLS:
            self._room = int(info.row_segment_bytes) if self._zero_copy_bytes is None else self._zero_copy_bytes

    def follow_streams(self) -> None:
        """CUDA engine: what events and points in the streams of the device need of the buffer."""
        lib = self.native.lib.with_gil
        self.users.clear()
        self.stream_wait = _face.of_event(lib.deepep_event_stream_wait)
        self.record = _face.recorder()
        self.in_comm_memory = _face.inside(self.comm_stream_address, self.ordinal, self.comm_stream)
        self._points = points_on[self.ordinal] = Points(self)

    def open_rows(self) -> None:
        """Makes the segment for rows that peers write in place, unless it is there or a graph is being captured.

        Collective, so a call with a handle leaves it alone: some ranks may refuse theirs. Where a rank has no memory
        for it, rows are copied on all ranks from then on.
        """
        native = self.native
        if not self._room or native.rows is not None or _torch.is_capturing():
            return
        try:
            index, pointer = native.open_segment(self._room)
        except errors.DeepEPError as error:
            if error.status != errors.OUT_OF_MEMORY:
                raise
            warnings.warn(f"no memory to receive rows in place, they are copied: {error.message}", stacklevel=2)
            self._room = 0
            return
        lib = native.lib.with_gil
        native.rows = RowPool(native.lib.path, lib.deepep_pool_select, index, pointer, self._room)
        if self.compiled:
            native.rows.set_placer(lambda pool: _face.row_placer(lib, pointer, self.device.index, pool, ROUTING))

    def enter(self) -> None:
        """Begins a call: waits for start-up, and lets go of the tensors of calls that have ended."""
        if not self.is_ready:
            self.ensure_ready()
        self._let_go_of_ended()

    def _let_go_of_ended(self) -> None:
        for launch in list(self.kept):
            if launch.left:
                if not self.native.event_done(launch.event):
                    break  # so are those of later calls
                self.let_go(launch)

    def destroy(self) -> None:
        """Frees the buffer and lets go of every tensor. Twice is fine."""
        self.is_ready = False
        self._unfinished = None
        self._finalizer()
        self.kept.clear()
        self.idle.clear()
        if self._points is not None:
            self._points.idle.clear()
            if points_on.get(self.ordinal) is self._points:
                del points_on[self.ordinal]

    def release(self) -> None:
        """Buffer.release."""
        self.enter()

        def step() -> None:
            self.native.release()
            self.native.close_rows()
            self._let_go_of_ended()
            give_back_rows()

        self._carry_out(step, True, True)

    def restore(self) -> None:
        """Buffer.restore."""
        self._finish()
        self.native.wait_ready()
        self._carry_out(self.native.restore, self.is_ready, self.is_ready)

    def regroup(self, members: list[int], renumber: bool, timeout_ms: int, then: Callable[[], None]) -> None:
        """Buffer.regroup; `then` brings what others know of the group up to date."""
        self._finish()
        work = self.native.regroup(members, renumber, timeout_ms)

        def step() -> None:
            work.wait()
            self.native.close_rows()
            self.kept.clear()  # calls of before have ended, well or not
            self._learn()
            then()
            if self._rows_at_once:
                self.open_rows()

        self._carry_out(step, True, False)

    def _carry_out(self, step: Callable[[], None], ready: bool, otherwise: bool) -> None:
        """Does what changes the buffer for all later calls.

        Ctrl-C ends the wait for it alone: the next call does what is left, and raises what it raises.

        Args:
            step: may be done again from its beginning.
            ready: is_ready afterwards.
            otherwise: is_ready where the step has failed.
        """
        self.is_ready = False
        self._unfinished = step, ready, otherwise
        self._finish()

    def _finish(self) -> None:
        unfinished = self._unfinished
        if unfinished is None:
            return
        step, ready, otherwise = unfinished
        try:
            step()
        except errors.DeepEPError:
            self._unfinished = None
            self.is_ready = otherwise
            raise
        self._unfinished = None
        self.is_ready = ready

    def is_usable(self) -> bool:
        """True once start-up is complete, until destroy(); False in a forked child."""
        native = self.native
        return native.alive and os.getpid() == native.owner and (self.is_ready or native.wait_ready(0))

    # ---- streams and events

    def current_stream(self) -> int | None:
        """The caller's current stream as an address; None on the CPU engine."""
        return self.raw_stream() or None

    def torch_current_stream(self) -> Any:
        """The caller's current CUDA stream as a torch object."""
        return _torch.torch_stream(self.ordinal)

    def synchronize(self) -> None:
        """CUDA engine: the host waits for the caller's current stream."""
        if not self.host_stream:
            self.torch_current_stream().synchronize()

    # ---- calls

    def ordered(
        self, previous_event: EventOverlap | None, async_finish: object, allocate_on_comm_stream: object
    ) -> Ordered | None:
        """How the compiled face orders a call of V1; None: such calls, also wrong ones, are Python's."""
        if async_finish is False:
            return False if previous_event is None and allocate_on_comm_stream is False else None
        if async_finish is not True or self.host_stream:
            return None
        previous = None if previous_event is None else event_of(previous_event)
        if previous is None:
            return True if allocate_on_comm_stream is False else None
        return (previous,) if type(allocate_on_comm_stream) is bool else None

    def user_of(self, stream: int) -> User:
        """The caller's stream, which uses what is in the communication stream's memory, for `record`.

        Args:
            stream: its address.
        """
        user = self.users.get(stream)
        if user is None:
            if len(self.users) >= MAX_USERS:
                self.users.clear()
            current = self.torch_current_stream()
            user = self.users[stream] = current, *_torch.numbers_of(current)
        return user

    def rows_behind(self, ordered: Ordered, rows_for: Callable[[Any, int], Placed], x: Any, rows: int) -> Placed:
        """`rows_for(x, rows)`, in the communication stream's memory where the call's outputs are."""
        if type(ordered) is bool or self.native.rows is None:
            return rows_for(x, rows)
        found: Placed = self.in_comm_memory(rows_for, x, rows)
        if found[0] is not None:
            self.record(found[0], self.user_of(self.raw_stream()))
        return found

    def take_launch(self) -> Launch:
        """A launch of its own for each call; it may have the event of an earlier one."""
        try:
            launch = self.idle.pop()
        except IndexError:
            return Launch(self.native.lib)
        launch.left = False
        return launch

    def launch_with_event(self) -> Launch:
        """The same, with an event."""
        launch = self.take_launch()
        launch.create_event(self.native)
        return launch

    def take_launch_with_event(self) -> Launch | None:
        """CPU engine: a launch with an event. None on CUDA: for a synchronous call the caller's stream orders all."""
        return self.launch_with_event() if self.host_stream else None

    def let_go(self, launch: Launch) -> None:
        """Takes a launch out of `kept`: the library is through with its tensors."""
        if self.kept.pop(launch, None) is not None and launch.home is not None:
            home, launch.home = launch.home, None
            home.append(launch)

    def run_on_host(self, launch: Launch, held: Held, function: Any, args: Any, call: Any) -> None:
        """CPU engine: launches, with `launch`'s event in `call`, and waits for the end."""
        native, kept = self.native, self.kept
        launch.left = False
        try:
            kept[launch] = held
            status = function(native._as_parameter_, args, call)
            if status:
                kept.pop(launch, None)
                raise native.error(status)
            self.wait_on_host(launch)
        except BaseException:
            launch.left = True
            raise

    def wait_on_host(self, launch: Launch) -> None:
        """CPU engine: waits for the end of a call, and lets go of its tensors."""
        native = self.native
        status = native.event_wait(launch.event, SLICE_MS)
        if status == errors.PENDING or not native.alive:
            native.wait_event(launch.event)
        elif status:  # a refused call says so once: a second wait would find it done
            raise native.during_wait(native.lib.error(status))
        self.kept.pop(launch, None)

    def run_asynchronously(
        self, launch: Launch, home: list[Any], held: Held, function: Any, args: Any, call: Any
    ) -> EventOverlap:
        """CPU engine: launches, and returns the event; `launch` goes home once it is passed and nobody has it."""
        native, kept = self.native, self.kept
        launch.left = False
        try:
            kept[launch] = held
            status = function(native._as_parameter_, args, call)
            if status:
                kept.pop(launch, None)
                raise native.error(status)
            event = EventOverlap(EventHandle._of_call(self, launch, home))
            launch.left = True
            return event
        except BaseException:
            launch.left = True
            raise

    def wait_for(self, launch: Launch) -> None:
        """CPU engine: blocks until the event of a call."""
        self.native.wait_event(launch.event)
        self.let_go(launch)

    def after(self, previous: EventHandle | None, stream: int | None) -> tuple[int | None, int | None]:
        """The stream and the previous_event of a library call on `stream`, the caller's, that follows an event."""
        if previous is None or self.host_stream and type(previous._core) is Points:
            return stream, None
        if previous._launch is not None:
            return stream, previous._launch.event
        if self.host_stream:
            return stream, None
        _torch.wait_for(previous._torch, self.comm_stream)  # the library knows no torch event: the call follows this
        return self.comm_stream_address, None

    def leave(self, launch: Launch, stream: int | None = None) -> None:
        """CUDA engine: an operation was cut short: its tensors are kept until what was launched has ended.

        The library's last error is another one afterwards.

        Args:
            launch: of the tensors.
            stream: where it was launched; None: on the communication stream.
        """
        try:
            launch.create_event(self.native)
            self.native.record_event(launch.event, self.comm_stream_address if stream is None else stream)
        except errors.DeepEPError:
            return  # they are kept until destroy()
        launch.left = True

    def record_on_comm_stream(self, tensors: Held) -> None:
        """CUDA engine: torch's allocator learns of tensors that the communication stream uses."""
        if self.native.alive:  # a buffer that was destroyed has ended its calls
            with _torch.without_modes():
                for tensor in tensors:
                    if tensor is not None:
                        tensor.record_stream(self.comm_stream)

    def on_current_stream(self, function: Any, *values: Any, held: Held = ()) -> None:
        """Issues a call that only the caller's current stream orders."""
        Ordering(self, None, False, False).last(function, *values, held=held)


class Points:
    """Makes points in the streams of a GPU, for whoever has no call at hand, by the events of one of its buffers.

    An event of torch's would be made and freed for each point, and be waited for outside of the library.
    """

    __slots__ = ("native", "idle", "raw_stream", "stream_wait", "again", "_record", "_marked")
    host_stream, kept = False, ()

    def __init__(self, core: Core) -> None:
        self.native, self.stream_wait = core.native, core.stream_wait
        self.raw_stream = _torch.stream_in_use  # who waits for a point may be on another GPU
        self.idle: list[Launch] = []  # events that nobody has
        record = core.native.lib.with_gil.deepep_event_record
        self._record, self._marked = _face.of_event(record), core.raw_stream
        # An EventOverlap with a point; None: take() has to make it.
        self.again = _face.mark_again(record, self.idle, core.raw_stream)

    def take(self) -> Launch | None:
        """The present end of the caller's current stream; None: the buffer is destroyed."""
        native = self.native
        if not native.alive:
            return None
        try:
            launch = self.idle.pop()
        except IndexError:
            launch = Launch(native.lib)
            launch.create_event(native)
        status = self._record(launch.event, self._marked())
        if status:
            raise native.error(status)
        return launch


def _free(native: NativeBuffer, group: NativeGroup, owner: int) -> None:
    if os.getpid() == owner:
        native.destroy()
        group.destroy()
