"""Memory that outlives a call: rows of the CPU engine that are used again, and rows that peers write into."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from ._torch import CPU, Tensor
from .errors import switch

if TYPE_CHECKING:
    from ._core import Core, Placed

RECYCLE = "DEEPEP_RECYCLE_OUTPUTS"
_storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def recycling() -> bool:
    """Whether memory of outputs may be used again: DEEPEP_RECYCLE_OUTPUTS, 1 unless it is set."""
    return switch(RECYCLE) and _every_holder_counts()


class _Block:
    """A storage, with checks that it is as it was made and who holds it."""

    __slots__ = ("storage", "_address", "_size", "_idle", "_taken")

    def __init__(self, count: int) -> None:
        self.storage = _torch.empty((count,), torch.uint8, CPU).untyped_storage()
        self._address, self._size = self.storage.data_ptr(), count
        self._idle = self._holders()
        tensor = self.tensor((count,), torch.uint8)
        self._taken = self._holders()
        del tensor

    def _holders(self) -> tuple[int, int]:
        # Python's references to the storage object, of which torch has one for all who ask; and torch's own.
        assert _storage_uses is not None
        return sys.getrefcount(self.storage), _storage_uses(self.storage._cdata)

    def unchanged(self) -> bool:
        """False once a caller has resized the storage or given it other memory: it is the caller's then."""
        return self.storage.nbytes() == self._size and self.storage.data_ptr() == self._address

    def idle(self) -> bool:
        """True while no tensor, view, array or storage object of a caller has the memory."""
        return self._holders() == self._idle

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A new tensor in the block, whose only holder it is; None if there are others.

        Without a lock, for a signal handler may come in between and take one too: of two who take at the same time at
        most one sees a single holder.
        """
        if not self.idle():
            return None
        tensor = self.tensor(shape, dtype)
        return tensor if self._holders() == self._taken else None

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor at the beginning of the block."""
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return torch.empty((0,), dtype=dtype, device=CPU).set_(self.storage, 0, tuple(shape), strides)


def _array(tensor: Tensor) -> object:
    """NumPy's view of a tensor. torch does without NumPy: then no array can hold one, and a tensor stands in for it."""
    try:
        return tensor.numpy()
    except RuntimeError:
        return tensor


@functools.cache
def _every_holder_counts() -> bool:
    """True if this torch counts each kind of holder of a storage, and counts it no longer once it is gone.

    The counts are no promise of torch's. Where one of these holders is not seen, nothing is used again.
    """
    if _storage_uses is None:
        return False
    weight = torch.ones((1,), dtype=torch.float32, device=CPU, requires_grad=True)
    holders: list[Callable[[Tensor], object]] = [
        lambda t: t,
        lambda t: t[1:],
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.view(torch.int32),
        lambda t: t.untyped_storage(),
        _array,
        lambda t: torch.utils.dlpack.from_dlpack(t),
        lambda t: torch.empty((0,), dtype=torch.uint8, device=CPU).set_(t.untyped_storage()),
        lambda t: t * weight,  # autograd saves t
        lambda t: torch.nn.Parameter(t),
    ]
    with torch.inference_mode(False), torch.enable_grad():
        block = _Block(64)
        for hold in holders:
            held = hold(block.tensor((16,), torch.float32))
            if block.idle():
                return False
            del held
            if not block.idle():
                return False
    return block.unchanged()


class RowCache:
    """Large CPU outputs, in memory that no caller has any more: new pages cost more than the rows' copy into them.

    Only storages are kept, at most `max_blocks`; each output is a new tensor. DEEPEP_RECYCLE_OUTPUTS=0: all memory is
    torch's own.
    """

    MIN_BYTES = 1 << 20  # the C library's allocator keeps smaller blocks by itself

    def __init__(self, max_blocks: int) -> None:
        """Keeps up to `max_blocks`; 0: none."""
        self._blocks: list[_Block] = []
        self._max_blocks = max_blocks

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor of undefined content."""
        count = math.prod(shape) * dtype.itemsize
        if not self.serves(count):
            return _torch.empty(shape, dtype, CPU)
        tensor = self._used_again(count, shape, dtype)
        return self._new(count, shape, dtype) if tensor is None else tensor

    def empty_like(self, prototype: Tensor) -> Tensor:
        """The same, of a prototype's shape and dtype."""
        if not self.serves(prototype.numel() * prototype.itemsize):
            return _torch.empty_like(prototype)
        return self.empty(prototype.shape, prototype.dtype)

    def place(self, core: Core, x: Tensor, rows: int) -> Placed:
        """recv_x where torch's allocator alone will not do, and the segment and the offset there of its rows."""
        pool = core.native.rows
        if pool is not None and rows:
            recv_x, offset = pool.place(x, rows) or (None, None)
            return (recv_x, -1, 0) if offset is None else (recv_x, pool.index, offset)
        return self.rows_like(x, rows) if core.host_stream else None, -1, 0

    def rows_like(self, x: Tensor, count: int) -> Tensor | None:
        """`count` rows like those of a matrix; None for the caller to allocate outputs that lie in no block."""
        hidden = x.size(1)
        return self.empty((count, hidden), x.dtype) if self.serves(count * hidden * x.itemsize) else None

    def sums_like(self, x: object, tokens: object) -> Tensor | None:
        """The same, a row for each of another matrix; None also where one of them is no matrix."""
        if type(x) is not Tensor or type(tokens) is not Tensor or x.dim() != 2 or tokens.dim() != 2:
            return None
        return self.rows_like(x, tokens.size(0))

    def serves(self, count: int) -> bool:
        """Whether outputs of so many bytes lie in blocks."""
        return count >= self.MIN_BYTES and self._max_blocks > 0

    def _used_again(self, count: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A tensor in a block that nobody has, and that is not much larger than needed."""
        for block in self._blocks:
            if count <= block.storage.nbytes() <= 4 * count and block.unchanged():
                tensor = block.take(shape, dtype)
                if tensor is not None:
                    return tensor
        return None

    def _new(self, count: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a block of its own, which is kept for later ones."""
        kept = [block for block in self._blocks if block.unchanged()]
        if len(kept) >= self._max_blocks:  # a call takes blocks of several sizes: only a full cache drops one
            idle = next((block for block in kept if block.idle()), None)
            if idle is not None:
                kept.remove(idle)
        block = _Block(count + count // 8)
        tensor = block.tensor(shape, dtype)  # before others find the block
        if len(kept) < self._max_blocks:
            kept.append(block)
        self._blocks = kept  # a new list: another thread may be going through the old one
        return tensor


@functools.cache
def _row_allocator(library: str) -> Any:
    """The functions that all row pools allocate with. Never let go of: torch keeps a bare pointer to it for each pool.

    A pool outlives its buffer as long as a tensor, or torch's cache, has memory of it.
    """
    return torch.cuda.memory.CUDAPluggableAllocator(library, "deepep_pool_allocate", "deepep_pool_free")


_begin_allocating: Any = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)
_end_allocating: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
_release_pool: Any = getattr(torch._C, "_cuda_releasePool", None)


class _Routed:
    """torch.cuda.use_mem_pool, in a third of its time: one class in place of a generator, two checks and a lookup."""

    __slots__ = ("_device", "_id")

    def __init__(self, pool: Any, device: int) -> None:
        self._device, self._id = device, pool.id

    def __enter__(self) -> None:
        _begin_allocating(self._device, self._id)

    def __exit__(self, *_: object) -> None:
        _end_allocating(self._device, self._id)
        _release_pool(self._device, self._id)


_routed: Callable[[Any, int], Any] | None = _Routed
ROUTING: tuple[Any, Any, Any] | None = (_begin_allocating, _end_allocating, _release_pool)
if _begin_allocating is None or _end_allocating is None or _release_pool is None:  # another torch
    _routed, ROUTING = getattr(torch.cuda, "use_mem_pool", None), None
# torch 2.4 has no pools of memory. Received rows are copied there: the same rows, in more time.
HAS_ROW_POOLS = _routed is not None and hasattr(torch.cuda, "MemPool")


class RowPool:
    """Rows that peers can write into: a torch memory pool over a segment of the buffer.

    torch's own rules hold for its tensors (streams, record_stream, reuse). Where the segment is full the caller takes
    memory of the default pool, and the rows are copied instead.
    """

    def __init__(self, library: str, select: Callable[[int], object], index: int, pointer: int, count: int) -> None:
        """Takes over segment `index` of `count` bytes at `pointer`; `select` makes it the segment to allocate from."""
        self._pool: Any = torch.cuda.MemPool(_row_allocator(library).allocator())
        self._select = select
        self.index, self.pointer, self.count = index, pointer, count
        self._pause = self._patience = 0
        self._placer: Callable[..., tuple[Tensor, int] | None] | None = None

    def set_placer(self, make: Callable[[Any], Any]) -> None:
        """Rows are placed by what `make` gives for torch's number of the pool, as far as it can."""
        self._placer = make(self._pool.id)

    def rows_like(self, x: Tensor, rows: int) -> Tensor | None:
        """`rows` rows like those of x, which was checked, in the segment; None if there is no room now."""
        placed = self._place(x, rows, self._like)
        return None if placed is None else placed[0]

    def place(self, x: Tensor, rows: int) -> tuple[Tensor, int | None] | None:
        """The same of any x that says it has two dimensions, and where the rows begin in the segment, in bytes.

        None there if they do not lie in it.
        """
        return self._place(x, rows, self._plain)

    def _place(self, x: Tensor, rows: int, make: Callable[..., Tensor | None]) -> tuple[Tensor, int | None] | None:
        if not self._may_allocate():
            return None
        if self._placer is not None:
            try:
                placed = self._placer(x, x.element_size(), rows)
            except torch.OutOfMemoryError:
                self._ask_less()
                return None
            except RuntimeError:  # of an x that will be refused
                placed = None
            if placed is not None:
                self._patience = 0
                return placed if placed[1] < self.count else (placed[0], None)
        tensor = make(x, rows)
        return None if tensor is None else (tensor, self.offset(tensor))

    def _like(self, x: Tensor, rows: int) -> Tensor | None:
        return self._allocate(x.get_device(), _torch.like, x, rows, x.shape[1])

    def _plain(self, x: Tensor, rows: int) -> Tensor | None:
        if x.device.type != "cuda" or x.is_quantized:  # it will be refused
            return None
        return self._allocate(x.get_device(), _torch.empty, (rows, x.shape[1]), x.dtype, x.device)

    def _may_allocate(self) -> bool:
        if self._pause > 0:
            self._pause -= 1
            return False
        return not _torch.is_capturing()  # memory of a captured graph must come from the graph's own pool

    def _allocate(self, device: int, make: Callable[..., Tensor], *args: Any) -> Tensor | None:
        self._select(self.pointer)
        try:
            with _routed(self._pool, device):  # type: ignore[misc] # made only where HAS_ROW_POOLS
                tensor = make(*args)
        except torch.OutOfMemoryError:
            self._ask_less()
            return None
        finally:
            self._select(0)
        self._patience = 0
        return tensor

    def _ask_less(self) -> None:
        """The pool is full, and asking is costly then, for torch gives cached memory back first."""
        self._patience = min(max(1, 2 * self._patience), 64)
        self._pause = self._patience

    def offset(self, tensor: Tensor) -> int | None:
        """Where a tensor begins in the segment, in bytes; None if it does not lie in it."""
        at = tensor.data_ptr() - self.pointer
        return at if tensor.numel() and 0 <= at < self.count else None

    def close(self) -> None:
        """Lets go of the pool; its tensors stay valid, and the segment stays with them."""
        if self._pool is not None and self._pool.id not in _ended_pools:
            _ended_pools.append(self._pool.id)
        self._pool = None


_ended_pools: list[tuple[int, int]] = []  # of destroyed buffers: tensors may still lie in them


_snapshot_of_pools = "mempool_id" in inspect.signature(torch.cuda.memory_snapshot).parameters


def _segments(pool: tuple[int, int]) -> Any:
    """What torch's allocator still holds of a memory pool."""
    if _snapshot_of_pools:
        return torch.cuda.memory_snapshot(pool)  # type: ignore[no-untyped-call]
    everything: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return [segment for segment in everything if tuple(segment["segment_pool_id"]) == pool]


def give_back_rows() -> None:
    """Frees the segments of destroyed buffers whose tensors are all gone.

    torch keeps a freed tensor's memory until it is short of memory or empty_cache() is called. So the next buffer asks
    for that, since it takes memory that torch does not count.
    """
    if _ended_pools and not _torch.is_capturing():
        torch.cuda.empty_cache()
        _ended_pools[:] = [pool for pool in _ended_pools if _segments(pool)]
