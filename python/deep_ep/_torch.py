"""Everything that asks torch for something: devices, streams, memory, views. The only module that imports torch."""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .errors import type_error, value_error

Tensor = torch.Tensor
DType = torch.dtype
topk_idx_t = torch.int64
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
FLOAT32, INT32, INT64, BOOL = torch.float32, torch.int32, torch.int64, torch.bool
INDEX_TYPES = {torch.int32: 0, torch.int64: 1}
ITEM_TYPES = {torch.bfloat16: 2, torch.float8_e4m3fn: 3}
_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
_use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_references = sys.getrefcount
_current_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def cuda_available() -> bool:
    """True if torch can use a GPU."""
    return torch.cuda.is_available()


def device_of(engine: str, ordinal: int) -> torch.device:
    """The device on which an engine's tensors live."""
    return torch.device("cuda", ordinal) if engine == "cuda" else torch.device("cpu")


def current_cuda_device() -> int:
    """torch's current GPU; -1 without one."""
    return int(torch.cuda.current_device()) if cuda_available() else -1


def no_stream() -> int:
    """The CPU's only stream."""
    return 0


def stream_getter(device: torch.device) -> Callable[[], int]:
    """A function that gives the caller's current stream as an address; 0 on the CPU."""
    if device.type != "cuda" or _current_raw_stream is None:
        return no_stream
    return functools.partial(_current_raw_stream, device.index)


def external_stream(address: int, device: torch.device) -> Any:
    """A torch stream over the buffer's communication stream; on the CPU torch's own notion of a stream."""
    if device.type == "cuda":
        return torch.cuda.ExternalStream(address, device=device)  # type: ignore[no-untyped-call]
    return torch.cpu.Stream()


def torch_stream(device: torch.device) -> Any:
    """The caller's current CUDA stream as a torch object."""
    return torch.cuda.current_stream(device)


def stream_context(stream: Any) -> Any:
    """Makes `stream` (CUDA) current for a while."""
    return torch.cuda.stream(stream)


def recorded_event(device: torch.device | None = None) -> torch.cuda.Event | None:
    """A torch event at the end of the current CUDA stream; None where there is no GPU in use."""
    if not cuda_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


is_capturing = torch.cuda.is_current_stream_capturing


def full(shape: Sequence[int], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that holds a value; names dtype and device, since callers change torch's defaults."""
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory; names dtype and device, since callers change torch's defaults."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def like(tensor: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory of a tensor's dtype and device, which takes half the time of naming them."""
    return tensor.new_empty(*shape) if type(tensor) is Tensor else empty(shape, tensor.dtype, tensor.device)


def check(
    name: str,
    tensor: object,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    *,
    contiguous: bool = True,
) -> Tensor:
    """`tensor` if it has this device, one of these dtypes and this shape (None: any length); else an error."""
    if isinstance(tensor, Tensor) and tensor.dtype in dtypes and tensor.device == device:
        got = tensor.shape
        if len(got) == len(shape):
            for have, want in zip(got, shape, strict=True):
                if have != want and want is not None:
                    break
            else:
                if not contiguous or tensor.is_contiguous():
                    return tensor
    raise _refusal(name, tensor, device, dtypes, shape)


def _refusal(
    name: str, tensor: object, device: torch.device, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
) -> Exception:
    """The error for the first thing that is wrong with an argument."""
    if not isinstance(tensor, Tensor):
        return type_error(name, type(tensor).__name__, "a torch.Tensor")
    if tensor.dtype not in dtypes:
        return type_error(name, f"dtype {tensor.dtype}", " or ".join(str(d) for d in dtypes))
    if tensor.device != device:
        return value_error(name, f"a tensor on {tensor.device}", f"a tensor on {device}, where the buffer is")
    got = list(tensor.shape)
    if len(got) != len(shape) or any(want is not None and have != want for have, want in zip(got, shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        return value_error(name, f"shape {got}", f"[{wanted}]")
    return value_error(name, f"strides {list(tensor.stride())} for shape {got}", "a contiguous tensor")


def check_indices(name: str, tensor: Tensor, num_experts: int) -> None:
    """Raises if a CPU tensor holds an index outside [-1, num_experts)."""
    if tensor.numel() == 0:
        return
    least, greatest = (int(value) for value in torch.aminmax(tensor))
    if least < -1 or greatest >= num_experts:
        bad = least if least < -1 else greatest
        raise value_error(name, f"an index {bad}", f"-1 to num_experts - 1 = {num_experts - 1}")


def plain(tensor: object, dtype: torch.dtype, where: int, shape: tuple[int, ...] | None = None) -> bool:
    """True for a contiguous tensor of this dtype and shape (None: any matrix) on GPU `where` (-1: on the CPU).

    A quick yes for hot paths. On a no, `check` says what is wrong (or that another dtype is fine too).
    """
    return (
        type(tensor) is Tensor
        and tensor.dtype is dtype
        and (tensor.dim() == 2 if shape is None else tensor.shape == shape)
        and tensor.is_contiguous()
        and tensor.get_device() == where
    )


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element, for ctypes."""
    return tensor.data_ptr() if tensor is not None else None


def int_list(values: Any) -> list[int]:
    """A ctypes array as a list."""
    return list(values)


class _CudaMemory:
    """Raw device memory for torch.as_tensor; keeps its owner alive."""

    def __init__(self, pointer: int, count: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def view_of(pointer: int, count: int, device: torch.device, owner: object) -> Tensor:
    """`count` bytes at `pointer` as a uint8 tensor that keeps `owner` alive."""
    if count == 0:
        return empty((0,), torch.uint8, device)
    if device.type == "cuda":
        return torch.as_tensor(_CudaMemory(pointer, count, owner), device=device)
    memory = (ctypes.c_uint8 * count).from_address(pointer)
    memory._owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def gather_function(group: Any) -> tuple[int, int, Callable[[bytes], list[bytes]]]:
    """Rank, size and an all-gather of bytes over a torch.distributed group (object all-gather only)."""
    import torch.distributed as dist

    def allgather(blob: bytes) -> list[bytes]:
        blobs: list[Any] = [None] * size
        dist.all_gather_object(blobs, blob, group=group)
        return cast(list[bytes], blobs)

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return rank, size, allgather


class Outputs:
    """Five output tensors cut from one allocation, and a way to tell that nobody holds any of them any more."""

    __slots__ = (
        *("tensors", "_storage", "_number", "_storage_idle", "_idle", "_ask_uses"),
        *("args", "reference", "stream", "numbers", "more", "shape", "sources"),
    )

    def __init__(self, specs: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> None:
        """Allocates tensors of these (shape, dtype); each begins at a multiple of 256 bytes."""
        offsets, total = [], 0
        for shape, dtype in specs:
            offsets.append(total)
            total += (math.prod(shape) * dtype.itemsize + 255) // 256 * 256
        arena = empty((max(total, 1),), torch.uint8, device)
        self._storage = arena.untyped_storage()
        self._number = self._storage._cdata
        self.tensors: list[Any] = []
        for (shape, dtype), offset in zip(specs, offsets, strict=True):
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            view = torch.empty((0,), dtype=dtype, device=device)
            view.set_(self._storage, offset // dtype.itemsize, tuple(shape), tuple(strides))
            self.tensors.append(view)
        self.args: Any = None  # the C struct of the call that fills them
        self.reference: Any = None  # the same, as ctypes passes it
        self.stream = 0
        self.numbers: tuple[int, ...] = ()  # what the struct's number fields hold
        self.more = False  # its optional addresses are not all absent
        self.shape: tuple[int, ...] = ()  # B, H, E
        self.sources = (0, 0)  # addresses of src_info and layout_range
        del arena, view
        self._storage_idle = self._idle = 0
        self._ask_uses = not _holders_are_references()

    def ready(self) -> None:
        """Remembers what the counts are while nobody but this object holds anything."""
        self._idle, self._storage_idle = self._holders(), _storage_uses(self._number)

    def touch(self) -> None:
        """Brings in the memory, so that no page is new in the first call."""
        empty((0,), torch.uint8, self.tensors[0].device).set_(self._storage).zero_()

    def _holders(self) -> int:
        # A sum will do: no single count can be below what it is when nobody holds anything.
        a, b, c, d, e = self.tensors
        count = _references(a) + _references(b) + _references(c) + _references(d) + _references(e)
        if self._ask_uses:
            count += _use_count(a) + _use_count(b) + _use_count(c) + _use_count(d) + _use_count(e)
        return count + _references(self._storage)  # torch has one object of it for all who ask

    def unused(self) -> bool:
        """True if every tensor, view and storage handed out is gone."""
        return self._holders() == self._idle and _storage_uses(self._number) == self._storage_idle


@functools.cache
def _holders_are_references() -> bool:
    """True if a tensor that something else than Python holds, such as autograd, has one reference more for it.

    So it is since torch 2.10. Before, the tensor's own count of uses had to be asked too.
    """
    with torch.inference_mode(False):
        held, holder = torch.ones(1, device="cpu"), torch.ones(1, device="cpu")
        before = _references(held), _use_count(held)
        holder.grad = held
        after = _references(held), _use_count(held)
    return after[0] > before[0] and after[1] > before[1]


class _Block:
    """Plain memory, and a way to tell that no tensor lies in it."""

    __slots__ = ("storage", "idle")

    def __init__(self, count: int) -> None:
        self.storage = empty((count,), torch.uint8, torch.device("cpu")).untyped_storage()
        self.idle = self.usage()

    def usage(self) -> tuple[int, int]:
        return sys.getrefcount(self.storage), _storage_uses(self.storage._cdata)


class RowCache:
    """Plain memory of received rows that nobody holds any more, used again: new pages cost more than the copy."""

    SMALLEST = 1 << 20  # bytes; the C library's allocator keeps smaller blocks by itself
    MOST = 4  # blocks kept; what is beyond is ordinary memory

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A CPU tensor of undefined content."""
        device, count = torch.device("cpu"), math.prod(shape) * dtype.itemsize
        if count < self.SMALLEST:
            return empty(shape, dtype, device)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return torch.empty((0,), dtype=dtype, device=device).set_(self._block(count).storage, 0, tuple(shape), strides)

    def _block(self, count: int) -> _Block:
        for at, block in enumerate(self._blocks):
            if block.usage() != block.idle:
                continue
            if count <= block.storage.nbytes() <= 4 * count:
                return block
            del self._blocks[at]  # free and of another size: sizes have changed
            break
        block = _Block(count + count // 8)
        if len(self._blocks) < self.MOST:
            self._blocks.append(block)
        return block


@functools.cache
def _row_allocator(library: str) -> Any:
    """The functions that all row pools allocate with. Never let go of: torch keeps a bare pointer to it for each pool.

    A pool outlives its buffer as long as a tensor, or torch's cache, has memory of it.
    """
    return torch.cuda.memory.CUDAPluggableAllocator(library, "deepep_pool_allocate", "deepep_pool_free")


class RowPool:
    """Rows that peers can write into: a torch memory pool over a segment of the buffer.

    torch's own rules hold for its tensors (streams, record_stream, reuse). Where the segment is full the caller takes
    memory of the default pool, and the rows are copied instead.
    """

    def __init__(self, library: str, select: Callable[[int], object], index: int, pointer: int, count: int) -> None:
        """Takes over segment `index` of `count` bytes at `pointer`; `select` tells the library before an allocation."""
        self._pool: Any = torch.cuda.MemPool(_row_allocator(library).allocator())
        self._select = select
        self.index, self.pointer, self.count = index, pointer, count
        self._pause = self._patience = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A tensor in the segment, or None if there is no room now."""
        if self._pause > 0:
            self._pause -= 1
            return None
        if is_capturing():
            return None  # memory of a captured graph must come from the graph's own pool
        self._select(self.pointer)
        try:
            with torch.cuda.use_mem_pool(self._pool, device):
                tensor = empty(shape, dtype, device)
        except torch.OutOfMemoryError:
            # Asking is costly when the pool is full (torch gives cached memory back first): ask less and less often.
            self._patience = min(max(1, 2 * self._patience), 64)
            self._pause = self._patience
            return None
        finally:
            self._select(0)
        self._patience = 0
        return tensor

    def offset(self, tensor: Tensor) -> int | None:
        """Where a tensor begins in the segment, in bytes; None if it does not lie in it."""
        at = tensor.data_ptr() - self.pointer
        return at if tensor.numel() and 0 <= at < self.count else None

    def close(self) -> None:
        """Lets go of the pool; its tensors stay valid, and the segment stays with them."""
        _ended_pools.append(self._pool.id)
        self._pool = None


_ended_pools: list[tuple[int, int]] = []  # of destroyed buffers: tensors may still lie in them


def _segments(pool: tuple[int, int]) -> Any:
    """What torch's allocator still holds of a memory pool."""
    return torch.cuda.memory_snapshot(pool)  # type: ignore[no-untyped-call]


def give_back_rows() -> None:
    """Frees the segments of destroyed buffers whose tensors are all gone.

    torch keeps a freed tensor's memory until it is short of memory or empty_cache() is called. So the next buffer asks
    for that, since it takes memory that torch does not count.
    """
    if _ended_pools and not is_capturing():
        torch.cuda.empty_cache()
        _ended_pools[:] = [pool for pool in _ended_pools if _segments(pool)]
