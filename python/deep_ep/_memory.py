"""Memory that outlives a call: outputs and rows that are used again, and rows that peers write into."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _torch
from ._torch import Tensor

_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
_use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_references = sys.getrefcount


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
        arena = _torch.empty((max(total, 1),), torch.uint8, device)
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
        _torch.empty((0,), torch.uint8, self.tensors[0].device).set_(self._storage).zero_()

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
        self.storage = _torch.empty((count,), torch.uint8, torch.device("cpu")).untyped_storage()
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
            return _torch.empty(shape, dtype, device)
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
        if _torch.is_capturing():
            return None  # memory of a captured graph must come from the graph's own pool
        self._select(self.pointer)
        try:
            with torch.cuda.use_mem_pool(self._pool, device):
                tensor = _torch.empty(shape, dtype, device)
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
    if _ended_pools and not _torch.is_capturing():
        torch.cuda.empty_cache()
        _ended_pools[:] = [pool for pool in _ended_pools if _segments(pool)]
