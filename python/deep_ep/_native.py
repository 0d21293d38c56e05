"""A group, a buffer and events of the C API as Python objects. No torch here."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from . import _abi, bootstrap, errors
from ._lib import Library, library, stay_at_exit

SLICE_MS = 50  # a waiting call returns to Python this often, so that Ctrl-C is seen
DESTROYED = "the buffer is destroyed"
MAX_RANKS = 1024  # of a group, as in the library

AllGather = Callable[[bytes], list[bytes]]
T = TypeVar("T")


class NativeGroup:
    """deepep_group_t."""

    def __init__(self, options: Any, keep: tuple[object, ...] = ()) -> None:
        self.lib = library()
        self._as_parameter_ = ctypes.c_void_p()
        self._keep = keep
        self.lib.check(
            self.lib.without_gil.deepep_group_create(ctypes.byref(options), ctypes.byref(self._as_parameter_))
        )

    def destroy(self) -> None:
        """Lets go of the group; twice is fine."""
        handle, self._as_parameter_ = self._as_parameter_, ctypes.c_void_p()
        if handle:
            self.lib.without_gil.deepep_group_destroy(handle)


def group_from_allgather(rank: int, size: int, allgather: AllGather, **options: Any) -> NativeGroup:
    """A group whose first exchange goes through `allgather`; an exception in it is raised here."""
    failure: list[BaseException] = []

    def exchange(send: int, recv: int, count: int, _user: int) -> int:
        try:
            blobs = allgather(ctypes.string_at(send, count))
            sizes = [len(blob) if isinstance(blob, (bytes, bytearray)) else type(blob).__name__ for blob in blobs]
            if sizes != [count] * size:
                raise errors.DeepEPError(
                    errors.MISMATCH,
                    f"the group's all-gather gave {sizes} as bytes of its blobs, allowed {count} from each of "
                    f"{size} ranks",
                )
            ctypes.memmove(recv, b"".join(blobs), count * size)
            return 0
        except BaseException as error:  # it must not cross C; raised again below
            failure.append(error)
            return 1

    function = _abi.ALLGATHER(exchange)
    struct = _abi.sized(
        _abi.GroupOptions, bootstrap=bootstrap.CALLBACK, rank=rank, size=size, allgather=function, **options
    )
    try:
        return NativeGroup(struct, keep=(function,))
    except errors.DeepEPError:
        if not failure:
            raise
    raise failure.pop()  # outside the handler: with the causes that it has itself


def group_from_bootstrap(where: bootstrap.Bootstrap, **options: Any) -> NativeGroup:
    """A group that meets at a TCP address or in a folder."""
    kinds = {"tcp": bootstrap.TCP, "file": bootstrap.FILE}
    struct = _abi.sized(_abi.GroupOptions, bootstrap=kinds[where.kind], rank=where.rank, size=where.size, **options)
    struct.address = where.address.encode() or None
    struct.directory = os.fsencode(where.directory) or None
    struct.name = where.name.encode()
    return _in_thread(lambda: NativeGroup(struct), NativeGroup.destroy)


def group_by_join(key: str, rank: int, engine: str, device: int) -> NativeGroup:
    """The group of a buffer that regroups and lets this process in."""
    struct = _abi.sized(
        _abi.GroupOptions, bootstrap=bootstrap.JOIN, rank=rank, name=key.encode(), engine=engine.encode(), device=device
    )
    return _in_thread(lambda: NativeGroup(struct), NativeGroup.destroy)


def _in_thread(make: Callable[[], T], undo: Callable[[T], None]) -> T:
    """`make()` in a thread, so that Ctrl-C is seen here while it waits for other ranks; a late result is undone."""
    made: list[T] = []
    failure: list[BaseException] = []
    abandoned: list[bool] = []
    done, lock = threading.Event(), threading.Lock()

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # raised again below
            failure.append(error)
        with lock:
            done.set()
            if abandoned and made:
                undo(made[0])

    threading.Thread(target=run, name="deepep-start", daemon=True).start()
    try:
        done.wait()
    except BaseException:
        with lock:
            abandoned.append(True)
            if made and done.is_set():
                undo(made[0])
        raise
    if failure:
        raise failure.pop()
    return made[0]


class Background:
    """Work in a thread of its own. Ctrl-C ends a wait for it and not the work, which may be waited for again."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._claim, self._done = threading.Lock(), threading.Event()

    def wait(self) -> None:
        """Starts the work unless it runs, and waits for its end. Raises what it raised."""
        if not self._claim.locked():
            threading.Thread(target=self._run, name="deepep-work", daemon=True).start()
        self._done.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):  # of two threads, where the start of the first was interrupted
            return
        try:
            self._work()
        except BaseException as error:  # raised by wait()
            self._failure = error
        self._done.set()


class Launch:
    """A call of the library and the event at its end. Core.kept has the call's tensors under it."""

    # What an object has whose __init__ was interrupted.
    event = 0  # the event's address; 0: there is none
    left = False  # the call has returned or was cut short: from now on the event says when the library is through
    home: list[Any] | None = None  # for the one who takes it out of Core.kept: the pool that it belongs to

    def __init__(self, lib: Library) -> None:
        self._lib = lib
        self._handle = ctypes.c_void_p()

    def create_event(self, buffer: NativeBuffer) -> None:
        """Makes the event, unless there is one. The library writes it into this object: no exception can lose it."""
        if not self.event:
            buffer.check(self._lib.with_gil.deepep_event_create(buffer, ctypes.byref(self._handle)))
            self.event = int(self._handle.value or 0)

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            address, handle.value, self.event = handle.value, None, 0
            self._lib.with_gil.deepep_event_destroy(address)
            # In a cycle of garbage an EventHandle's finalizer may put this object into a pool: it has no event there.


class NativeBuffer:
    """deepep_buffer_t."""

    def __init__(self, group: NativeGroup, options: Any) -> None:
        self.lib = group.lib
        self.owner = os.getpid()  # a forked child has this object too, and no buffer
        self.alive = False  # between creation and destroy()
        self._as_parameter_ = ctypes.c_void_p()
        self.event_wait = self.lib.without_gil.deepep_event_wait
        self.low_latency_dispatch, self.low_latency_combine = (
            self.lib.low_latency_dispatch,
            self.lib.low_latency_combine,
        )
        self.rows: Any = None  # a RowPool over a segment of this buffer
        self.lib.check(
            self.lib.without_gil.deepep_buffer_create(group, ctypes.byref(options), ctypes.byref(self._as_parameter_))
        )
        self.alive = True

    def info(self) -> Any:
        """deepep_buffer_info of now."""
        struct = _abi.sized(_abi.BufferInfo)
        self.check(self.lib.without_gil.deepep_buffer_info_get(self, ctypes.byref(struct)))
        return struct

    def wait_ready(self, seconds: float | None = None) -> bool:
        """Waits for start-up, in slices; False if `seconds` passed first."""
        left = None if seconds is None else max(0, int(seconds * 1000))
        while True:
            step = SLICE_MS if left is None else min(SLICE_MS, left)
            status = self.lib.without_gil.deepep_buffer_wait_ready(self, step)
            if status == errors.OK:
                return True
            if status != errors.PENDING:
                raise self.error(status)
            if left is not None:
                left -= step
                if left <= 0:
                    return False

    def release(self) -> None:
        """Gives the buffer's memory back, once this rank's calls have ended."""
        self._in_slices(self.lib.without_gil.deepep_buffer_release)

    def restore(self) -> None:
        """Has the buffer's memory again. Collective."""
        self._in_slices(self.lib.without_gil.deepep_buffer_restore)

    def _in_slices(self, function: Any) -> None:
        while (status := function(self, SLICE_MS)) == errors.PENDING:
            pass
        self.check(status)

    def check(self, status: int) -> None:
        """Raises the exception for the status of a call on this buffer unless it is OK."""
        if status != errors.OK:
            raise self.error(status)

    def error(self, status: int) -> errors.DeepEPError:
        """The exception for the status of a call that was refused, with this thread's last message."""
        if status == errors.INVALID_ARGUMENT and not self.alive:  # the library knows no destroyed buffer
            stay_at_exit()
            return errors.DeepEPError(errors.INVALID_STATE, DESTROYED)
        return self.lib.error(status)

    def record_event(self, event: int, stream: int) -> None:
        """Marks the present end of a CUDA stream."""
        self.check(self.lib.with_gil.deepep_event_record(event, stream))

    def wait_counts(self, token: int, num_local_experts: int) -> tuple[int, list[int]]:
        """Blocks until the counts of an exchange are there: the rows that arrive, and those of each local expert."""
        rows, per_expert = ctypes.c_int32(), (ctypes.c_int32 * num_local_experts)()
        wait = self.lib.without_gil.deepep_wait_counts
        while True:
            status = wait(self, token, SLICE_MS, ctypes.byref(rows), per_expert)
            if status == errors.OK:
                return rows.value, list(per_expert)
            if status != errors.PENDING:
                raise self.during_wait(self.lib.error(status))

    def balance_workspace(self, args: Any, reduce: bool) -> int:
        """Bytes of workspace for a deepep_balance_args."""
        found = ctypes.c_uint64()
        function = self.lib.with_gil.deepep_balance_workspace
        self.check(function(self, ctypes.byref(args), int(reduce), ctypes.byref(found)))
        return int(found.value)

    def wait_event(self, event: int) -> None:
        """Blocks until the event is done; raises the buffer's failure."""
        before, wait = self.alive, self.event_wait
        status = wait(event, SLICE_MS)
        while status == errors.PENDING:
            status = wait(event, SLICE_MS)
        if status != errors.OK:
            raise self.during_wait(self.lib.error(status))
        if before and not self.alive:  # destroy() in another thread has cut the work short
            raise self.during_wait(None)

    def during_wait(self, error: errors.DeepEPError | None) -> errors.DeepEPError:
        """What to raise for a wait that failed: another thread may have destroyed the buffer meanwhile."""
        stay_at_exit()
        if self.alive and error is not None:
            return error
        return errors.DeepEPError(errors.INVALID_STATE, "the buffer was destroyed while a call was waiting")

    def event_done(self, event: int) -> bool:
        """True once the event is done. After a failure never: its work may still be writing until destroy()."""
        return bool(self.lib.with_gil.deepep_event_wait(event, 0) == errors.OK)

    def open_segment(self, count: int) -> tuple[int, int]:
        """Makes a segment for a pool. Collective. Returns its number and address."""
        index, pointer = ctypes.c_int32(), ctypes.c_void_p()
        create = self.lib.without_gil.deepep_segment_create
        self.check(create(self, count, ctypes.byref(index), ctypes.byref(pointer)))
        self.lib.check(self.lib.with_gil.deepep_pool_open(pointer))
        return int(index.value), int(pointer.value or 0)

    def join_key(self) -> str:
        """deepep_buffer_join_key."""
        text = ctypes.create_string_buffer(_abi.JOIN_KEY_BYTES)
        self.check(self.lib.without_gil.deepep_buffer_join_key(self, text, len(text)))
        return text.value.decode()

    def pending_joins(self, agreed: bool) -> list[int]:
        """deepep_buffer_pending_joins."""
        ranks, count = (ctypes.c_int32 * 256)(), ctypes.c_int32()
        function = self.lib.without_gil.deepep_buffer_pending_joins
        self.check(function(self, int(agreed), len(ranks), ranks, ctypes.byref(count)))
        return list(ranks[: count.value])

    def lost_ranks(self) -> list[int]:
        """deepep_buffer_lost_ranks."""
        ranks, count = (ctypes.c_int32 * MAX_RANKS)(), ctypes.c_int32()
        self.check(self.lib.without_gil.deepep_buffer_lost_ranks(self, len(ranks), ranks, ctypes.byref(count)))
        return list(ranks[: count.value])

    def regroup(self, members: list[int], renumber: bool, timeout_ms: int) -> Background:
        """deepep_buffer_regroup, in a thread that wait() starts."""
        struct = _abi.sized(
            _abi.RegroupOptions, num_members=len(members), renumber=int(renumber), timeout_ms=timeout_ms
        )
        array = (ctypes.c_int32 * len(members))(*members)
        struct.members = ctypes.addressof(array)

        def run() -> bool:
            self.check(self.lib.without_gil.deepep_buffer_regroup(self, ctypes.byref(struct)))
            return len(array) > 0

        return Background(run)

    def close_rows(self) -> None:
        """Lets go of the rows of before a regroup or a release. Twice is fine."""
        rows = self.rows
        if rows is not None:
            rows.close()
            self.lib.without_gil.deepep_pool_close(rows.pointer)
            self.rows = None

    def destroy(self) -> None:
        """Frees everything; twice is fine."""
        self.alive = False
        handle, self._as_parameter_ = self._as_parameter_, ctypes.c_void_p()
        rows, self.rows = self.rows, None
        if handle:
            self.lib.without_gil.deepep_buffer_destroy(handle)
        if rows is not None:  # last: giving rows back waits for their streams, which may hold calls that only now ended
            rows.close()
            self.lib.without_gil.deepep_pool_close(rows.pointer)


def stats(buffer: NativeBuffer, size: int) -> dict[str, dict[str, Any]]:
    """Every operation's statistics; see Buffer.stats."""
    result: dict[str, dict[str, Any]] = {}
    for op, name in enumerate(_abi.OP_NAMES[1:], start=1):
        struct = _abi.sized(_abi.OpStats, op=op)
        sent, waited = (ctypes.c_uint64 * size)(), (ctypes.c_uint64 * size)()
        buffer.check(buffer.lib.without_gil.deepep_stats(buffer, ctypes.byref(struct), sent, waited))
        entry = {field[0]: getattr(struct, field[0]) for field in _abi.OpStats._fields_[2:]}
        entry["bytes_to_peer"], entry["wait_ns_per_peer"] = list(sent), list(waited)
        result[name] = entry
    return result
