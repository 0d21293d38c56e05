"""The compiled face: calls of a kind that was checked before, in one step of C. Without it only time is lost.

`deepep_torch` (python/face) follows plans. A plan is made here after a call of its kind has passed all checks and the
library; a call with the same properties (types, dtypes, devices, and all lengths but those that a plan leaves open)
follows it, and any other call is Python's. So the rules stand in Python and in the library alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _abi, _torch
from ._lib import library
from ._native import Launch
from ._torch import DType, OptionalTensor
from .errors import switch
from .utils.event import EventHandle, EventOverlap

SETTING = "DEEPEP_TORCH_FACE"
FILE = "deepep_torch.abi3.so"
MAX_PLANS = 1024  # of a kind of call

Source = tuple[int, int, int]  # where a number comes from: one of the kinds below, and what that needs
_CONSTANT, _SIZE, _NUMBER, _STRIDE, _ADDRESS, _OUTPUT, _BLOB = range(7)
_STRUCTS = -1  # among the places to read
_ENTRY, _GIVEN, _THING, _NEW, _HOOK, _TUPLE = range(6)  # steps of a shape
ALONE, HANDLE, DATA = -1, -2, -3  # outputs that share an allocation: none; of a handle; beside rows


def constant(value: int) -> Source:
    """A number that is the same in all calls."""
    return _CONSTANT, value, 0


def size(tensor: int, dimension: int) -> Source:
    """A length of a tensor of the call."""
    return _SIZE, tensor, dimension


def number(index: int) -> Source:
    """A number of the call."""
    return _NUMBER, index, 0


def stride(tensor: int, dimension: int) -> Source:
    """A stride of a tensor of the call, in elements."""
    return _STRIDE, tensor, dimension


def address(tensor: int) -> Source:
    """The address of a tensor of the call; 0 for None."""
    return _ADDRESS, tensor, 0


def output(index: int) -> Source:
    """The address of an output; 0 for None."""
    return _OUTPUT, index, 0


class Entry(int):
    """In the shape of results: so many-th of what was read and made."""


class Given(int):
    """In the shape of results: so many-th tensor of the call."""


class New:
    """In the shape of results: a new object of a class, as its __new__ leaves it."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


class SecondHalf:
    """In the shape of results: a hook that makes the call again with the structs as it has left them.

    Its plan reads them first (Program.read_structs), of which the struct of the arguments is the first.
    """

    def __init__(self, owner: Any, function: Any, receives: int, second: int, goes_on: bool) -> None:
        """For a call that is one of two halves.

        Args:
            owner: `refuse(status)` raises for a status that is not OK, and for None: the hook was called before.
                Without a function `run(structs, held)` makes the call.
            function: of the C API, or None.
            receives: the first 8 bytes of the arguments then.
            second: where the deepep_call lies.
            goes_on: the call uses its tensors until the hook is called: `let_go(held)` is told of one that nobody
                will call any more.
        """
        self.constants = owner, 0 if function is None else address_of(function), receives, second, goes_on


@functools.cache
def load() -> Any:
    """The module, or None if it is turned off, is not there, or does not fit this torch. `missing` says why."""
    if not switch(SETTING):
        missing.append(f"{SETTING}=0")
        return None
    try:
        path = Path(library().path).with_name(FILE)
        loader = importlib.machinery.ExtensionFileLoader("deepep_torch", str(path))
        spec = importlib.util.spec_from_file_location("deepep_torch", path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        if module.version != int(library().with_gil.deepep_version()):
            raise ImportError(f"{path} is of another version than libdeepep")
        functions, objects = _torch.c_abi()
        module.start(functions, objects)
        with _torch.without_dispatch_modes():
            _check(module)
    except (ImportError, OSError, AttributeError) as error:
        missing.append(str(error))
        return None
    return module


missing: list[str] = []  # why there is no module


def _check(module: Any) -> None:
    """Compares what the module sees of a tensor with what torch says of it."""
    for dtype in (_torch.BF16, _torch.INT64):
        tensor = _torch.empty((3, 5), dtype, _torch.CPU)
        seen = module.properties(tensor)
        if seen is None or seen[1:] != (tensor.data_ptr(), 5) or seen[0][1:] != (0, -1):
            raise ImportError(f"torch's C ABI gives {seen} for a tensor of shape [3, 5]")
    holders = _torch.holders(module.probe(False))
    if holders == 2:  # of which one is a handle that torch has not taken over
        holders = _torch.holders(module.probe(True))
    if holders != 1:
        raise ImportError(f"torch counts {holders} holders of a tensor that has one")


def row_placer(lib: Any, segment: int, device: int, pool: Any, routing: Any) -> Any:
    """A function of a tensor, the bytes of its elements and a number of rows, which holds the interpreter's lock.

    Args:
        lib: the library's functions.
        segment: its address.
        device: of the pool.
        pool: torch's number of the pool over the segment.
        routing: torch's functions that lead a thread's allocations into a pool: begin, end, release; or None.

    Returns:
        A function that returns so many rows like those of the tensor, and their place in the segment; or None if
        Python has to allocate them. None where there is no compiled face.
    """
    module = load()
    if module is None or routing is None:
        return None
    addresses = address_of(lib.deepep_pool_select), address_of(lib.deepep_pool_room)
    return functools.partial(module.place_rows, *addresses, segment, *routing, device, pool)


def of_event(function: Any) -> Any:
    """A function of the C API that takes an event and a stream: of their addresses."""
    module = load()
    return function if module is None else functools.partial(module.of_event, address_of(function))


def address_of(function: Any) -> int:
    """The address of a function of ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def mark_again(record: Any, idle: list[Launch], raw_stream: Any) -> Any:
    """A function that makes a point by the event of a launch in `idle`; its argument is the Points.

    It returns an EventOverlap with the present end of the caller's stream, or None if Python has to make it.

    Args:
        record: deepep_event_record.
        idle: launches with events.
        raw_stream: gives the address of the caller's stream.
    """
    module = load()
    if module is None:
        return _nothing
    return functools.partial(module.mark_again, address_of(record), idle, raw_stream, EventHandle, EventOverlap)


def _nothing(points: Any) -> None:
    pass


def recorder() -> Any:
    """A function that tells torch's allocator of a tensor that a stream (of Core.user_of) uses."""
    module = load()
    return _record if module is None else module.record


def _record(tensor: Any, user: tuple[Any, ...]) -> None:
    tensor.record_stream(user[0])


def inside(address: int, device: int, stream: Any) -> Any:
    """A function that calls another one with its arguments, while a CUDA stream is current.

    Args:
        address, device: of the stream.
        stream: torch's object of it.
    """
    module = load()
    if module is not None and module.has_guards():
        return functools.partial(module.inside, address, device)
    return functools.partial(_inside, stream)


def _inside(stream: Any, function: Any, *args: Any) -> Any:
    with _torch.stream_context(stream):
        return function(*args)


class Program:
    """A plan in the making."""

    def __init__(self, device: _torch.Device) -> None:
        self._device = device
        self._blob = bytearray()
        self._same: list[int] = []
        self._outputs: list[list[int]] = []
        self._writes: list[list[int]] = []
        self._call: list[int] = []
        self._reads: list[int] = []
        self._shape: tuple[bytes, tuple[Any, ...]] | None = None

    def same(self, one: Source, other: Source) -> None:
        """Only calls in which both are equal follow the plan."""
        self._same += (*one, *other)

    def struct(self, value: Any, **sources: Source) -> int:
        """Adds a struct of the C API whose fields are those of `value`, but for `sources`. Returns its place."""
        place = -(-len(self._blob) // 16) * 16
        self._blob += bytes(place - len(self._blob)) + bytes(value)
        for name, source in sources.items():
            self.write(place, type(value), name, source)
        return place

    def write(self, place: int, kind: Any, name: str, source: Source) -> None:
        """Has a field of the struct of type `kind` at `place` written in each call."""
        field = getattr(kind, name)
        self._writes.append([place + field.offset, field.size, *source])

    def write_at(self, offset: int, source: Source) -> None:
        """Has 8 bytes written in each call."""
        self._writes.append([offset, 8, *source])

    def blob(self, place: int) -> Source:
        """The address of a struct."""
        return _BLOB, place, 0

    def output(self, dtype: DType, *sizes: Source, strides: Sequence[int] = (), slab: int = ALONE) -> Source:
        """Adds a new tensor to the outputs. Returns its address.

        Args:
            dtype, sizes, strides: of the tensor.
            slab: HANDLE or DATA: it shares an allocation with the outputs that name the same, and with them alone.
        """
        kinds = *_code(dtype, self._device), dtype.itemsize
        lengths = [value for source in sizes for value in source]
        self._outputs.append(
            [slab, *kinds, len(sizes), int(bool(strides)), *lengths, *strides, *([0] if strides else [])]
        )
        return output(len(self._outputs) - 1)

    def rows(self, x: OptionalTensor, count: Source, given: OptionalTensor, place: int) -> Source:
        """Adds `count` rows like those of x to the outputs, or None where the call has them at `place`: `given`, such a
        call's. Returns their address.
        """
        assert x is not None
        if given is None:
            return self.output(x.dtype, count, constant(x.shape[1]))
        self.none()
        self.same(size(place, 0), count)
        return address(place)

    def none(self) -> Source:
        """Adds None to the outputs. Returns 0."""
        self._outputs.append([ALONE, 0, 0, 0, 0, -1, 0])
        return constant(0)

    def view(self, base: Source, sizes: Sequence[int], strides: Sequence[int], offset: int) -> None:
        """Adds a view of an output to the outputs."""
        lengths = [value for length in sizes for value in constant(length)]
        self._outputs.append([base[1], 0, 0, 0, 0, len(sizes), 1, *lengths, *strides, offset])

    def call(self, function: Any, *places: int) -> None:
        """Names the call: a function of the C API, which takes the buffer and the addresses of two or three structs."""
        self._call = [address_of(function), *places, *([-1] if len(places) == 2 else [])]

    def read(self, offset: int) -> None:
        """Has 8 bytes of the structs among the results, before the outputs."""
        self._reads.append(offset)

    def read_structs(self) -> None:
        """Has all structs, as the call leaves them, among the results: bytes that Site.again takes."""
        self._reads.append(_STRUCTS)

    def result(self, value: Any) -> None:
        """Has the results come in a shape: nested tuples of Entry, Given, New, SecondHalf and constants."""
        steps: list[int] = []
        constants: list[Any] = []
        _push(value, steps, constants)
        self._shape = struct.pack(f"={len(steps)}q", *steps), tuple(constants)

    def finish(self) -> tuple[bytes, bytes, Any]:
        """The plan."""
        numbers = [len(self._same) // 6, *self._same]
        for group in (self._outputs, self._writes):
            numbers += [len(group), *(value for entry in group for value in entry)]
        numbers += [*self._call, len(self._reads), *self._reads]
        return bytes(self._blob), struct.pack(f"={len(numbers)}q", *numbers), self._shape


def _push(one: Any, steps: list[int], constants: list[Any]) -> None:
    """Adds the steps that make a part of a shape. No inner function: one that names itself would keep the buffer."""
    if isinstance(one, tuple):
        for part in one:
            _push(part, steps, constants)
        steps.extend((_TUPLE, len(one)))
    elif isinstance(one, (Entry, Given)):
        steps.extend((_ENTRY if isinstance(one, Entry) else _GIVEN, int(one)))
    else:
        kind = _NEW if isinstance(one, New) else _HOOK if isinstance(one, SecondHalf) else _THING
        steps.extend((kind, len(constants)))
        constants.append(one.kind if kind == _NEW else one.constants if kind == _HOOK else one)


@functools.cache
def _code(dtype: DType, device: _torch.Device) -> tuple[int, int, int]:
    """A dtype and a device as torch's C ABI numbers them."""
    found: tuple[int, int, int] = load().properties(_torch.prototype((1,), dtype, device))[0]
    return found


class Site:
    """One kind of call of one buffer, and its plans."""

    # Of the module. `issue`, `start` and `start_behind` are for calls on GPUs, and take the site's own numbers alone:
    # `issue` makes a call behind the caller's stream. Where a call has one step and its plan a shape with an
    # EventOverlap, `start` makes it asynchronously, `start_behind` behind an EventHandle or None, its first argument.
    __slots__ = ("call", "issue", "start", "start_behind", "_core", "_plans")

    def __init__(
        self,
        core: Any,
        tensors: Sequence[Sequence[int]],
        num_scalars: int,
        num_numbers: int,
        *,
        strided: Sequence[int] = (),
        ordinary: bool = False,
    ) -> None:
        """For a buffer that is ready.

        Args:
            core: the buffer.
            tensors: for each tensor of the call the dimensions that may have any length.
            num_scalars: arguments on which a plan depends: None, bools, ints.
            num_numbers: ints on which it does not, without those of call_struct.
            strided: tensors that need not be contiguous.
            ordinary: outputs are no inference tensors in inference mode either.
        """
        self._core = core
        self._plans: dict[bytes, Any] = {}
        free = tuple(sum(1 << dimension for dimension in open_dimensions) for open_dimensions in tensors)
        mask = sum(1 << index for index in strided)
        handle = int(core.native._as_parameter_.value or 0)
        numbers = num_numbers + _OF_CALL
        site = load().Site(
            handle, core.kept, self._plans, free, num_scalars, numbers, mask, ordinary, core, core.raw_stream,
            EventHandle, core.idle, core.users, core.comm_stream_address, core.ordinal,
        )  # fmt: skip
        self.call, self.issue, self.start, self.start_behind = site.call, site.issue, site.start, site.start_behind

    def checked(self, got: Any) -> Any:
        """What `issue` has returned.

        Raises:
            DeepEPError: the library refused the call.
        """
        if type(got) is list:
            raise self._core.native.error(got[0])
        return got

    def run(self, launch: Launch | None, *args: Any, begun: bool = False, ends: bool = True) -> Any:
        """Makes the call, and waits for its end on the CPU engine.

        Args:
            launch: of Core.take_launch_with_event.
            args: of the site, without the numbers of call_struct.
            begun: an earlier call of the operation was launched.
            ends: the call ends the operation.

        Returns:
            A tuple of the results; else nothing was launched: the key of a plan that is missing, or None.

        Raises:
            DeepEPError: the library refused the call, or it failed.
        """
        core = self._core
        if launch is None:
            return self.checked(self.issue(*args))
        try:
            launch.left = False
            got = self.call(launch, None, *args, 0, launch.event, 1, 0)
            if type(got) is list:
                try:
                    raise core.native.error(got[0])
                finally:
                    if not begun:
                        core.kept.pop(launch, None)
            if ends and type(got) is tuple:
                core.wait_on_host(launch)
        except BaseException:
            launch.left = True
            raise
        if not begun and (ends or type(got) is not tuple):
            core.idle.append(launch)
        return got

    def run_ordered(self, ordered: bool | tuple[EventHandle | None], *args: Any) -> Any:
        """Makes a call whose plan has a shape with an EventOverlap.

        Args:
            ordered: as _core has it.
            args: of the site, without the numbers of call_struct.

        Returns:
            The results in their shape; else nothing was launched: the key of a plan that is missing, or None.

        Raises:
            DeepEPError: the library refused the call, or it failed.
        """
        core = self._core
        if core.host_stream:
            return self.run(core.take_launch_with_event(), *args)
        if type(ordered) is tuple:
            got = self.start_behind(*ordered, *args)
        else:
            got = self.start(*args) if ordered else self.issue(*args)
        if type(got) is list:
            raise core.native.error(got[0])
        return got

    def start_on_host(self, *args: Any) -> tuple[Any, EventHandle | None]:
        """CPU engine: makes an asynchronous call.

        Returns:
            What `run` returns, and the event if it was launched.
        """
        core = self._core
        launch = core.launch_with_event()
        try:
            launch.left = False
            got = self.call(launch, None, *args, 0, launch.event, 1, 0)
            if type(got) is list:
                try:
                    raise core.native.error(got[0])
                finally:
                    core.kept.pop(launch, None)
            if type(got) is tuple:
                handle = EventHandle._of_call(core, launch, core.idle)
                launch.left = True
                return got, handle
        except BaseException:
            launch.left = True
            raise
        core.idle.append(launch)
        return got, None

    def run_behind(self, order: Any, *args: Any, steps: int = 1, step: int = 1) -> Any:
        """CUDA engine: makes an asynchronous call, or a step of one.

        Args:
            order: its Ordering, within which this runs.
            args: of the site, without the numbers of call_struct.
            steps, step: of the operation, whose tensors are in `kept`, under the launch of `order`.

        Returns:
            What `run` returns.

        Raises:
            DeepEPError: the library refused the call.
        """
        core, launch, last = self._core, order.launch, step == steps
        if last and not launch.event:
            launch.create_event(core.native)
        stream, previous = order.behind()
        got = self.call(launch, order.user, *args, stream or 0, launch.event if last else 0, 1, previous or 0)
        if type(got) is list:
            error = core.native.error(got[0])
            if step == 1:
                core.kept.pop(launch, None)
            else:
                order.leave()
            raise error
        return got

    def add(self, key: bytes, program: Program | None) -> None:
        """Keeps a plan under the key that `call` returned. None: such calls are Python's for ever."""
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = program.finish() if program is not None else None


_OF_CALL = 4  # the numbers of call_struct, behind those of the site


def call_struct(program: Program, config: Source, first: int, *, ends: bool = True) -> int:
    """Adds a deepep_call; its numbers, from `first` on: stream, event, is_async, previous_event.

    On the CPU engine each call returns at once, and a synchronous one's caller waits for the event, in slices. Without
    `ends` the operation goes on after this call, which has no event.
    """
    value = _abi.sized(_abi.Call)
    stream, event, is_async, previous = (number(first + i) for i in range(_OF_CALL))
    sources = {"stream": stream, "is_async": is_async, "previous_event": previous} | ({"event": event} if ends else {})
    return program.struct(value, config=config, **sources)
