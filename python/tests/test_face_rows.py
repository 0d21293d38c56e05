"""Rows that the compiled face places in a pool of torch's."""

from __future__ import annotations

import contextlib
import ctypes
import weakref

import pytest
import torch

import checks


class Pool:
    """Stands for torch's functions of memory pools, and for the library's of the segment; notes what is called."""

    def __init__(self, room):
        self.seen = []
        self.select = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(self.selected)
        self.room = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(lambda segment: room)
        self.begin, self.end, self.release = (self.noted(name) for name in ("begin", "end", "release"))

    def selected(self, segment):
        self.seen.append("select" if segment else "none")
        return 0

    def noted(self, name):
        return lambda *pool: self.seen.append((name, *pool))

    def place(self, x, rows, **functions):
        from deep_ep import _face

        used = [functions.get(name, getattr(self, name)) for name in ("begin", "end", "release")]
        addresses = (ctypes.cast(f, ctypes.c_void_p).value for f in (self.select, self.room))
        return _face.load().place_rows(*addresses, 4096, *used, 3, (0, 7), x, x.element_size(), rows)


@checks.needs_face
def test_rows_are_placed_in_a_pool():
    x = torch.ones(5, 256, dtype=torch.bfloat16)
    pool = Pool(1 << 30)
    rows, place = pool.place(x, 40)
    assert (
        rows.shape == (40, 256) and rows.dtype == x.dtype and rows.is_contiguous() and rows.data_ptr() == place + 4096
    )
    whole = ["select", *((name, 3, (0, 7)) for name in ("begin", "end", "release")), "none"]
    assert pool.seen == whole
    with torch.device("cpu"):  # a mode of torch's: Python code at each of its functions
        assert pool.place(x, 40)[0].shape == (40, 256)
    held = weakref.ref(rows.untyped_storage())
    del rows
    assert held() is None


@checks.needs_face
def test_rows_for_which_a_segment_may_have_no_room_are_of_a_method(monkeypatch):
    """The pool may have memory that is free: torch says so, or raises what its C ABI would print."""
    x = torch.ones(5, 256, dtype=torch.float8_e4m3fn)
    whole = ["select", *((name, 3, (0, 7)) for name in ("begin", "end", "release")), "none"]
    asked = []

    def full(self, *shape):
        asked.append(shape)
        raise torch.OutOfMemoryError("no room")

    for room, short in ((0, 1), (20 << 20, 1), ((20 << 20) + 2 * 40 * 256 - 1, 1), ((20 << 20) + 2 * 40 * 256, 0)):
        pool = Pool(room)
        rows, place = pool.place(x, 40)
        assert rows.shape == (40, 256) and rows.dtype == x.dtype and rows.data_ptr() == place + 4096
        assert pool.seen == whole
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", full)
            pool.seen.clear()
            with pytest.raises(torch.OutOfMemoryError) if short else contextlib.nullcontext():
                pool.place(x, 40)
            assert pool.seen == whole and len(asked) == short
            asked.clear()
    pool = Pool(1 << 30)
    assert pool.place(x, 0) is None and pool.place(x[0], 4) is None and pool.seen == []


@checks.needs_face
def test_rows_of_a_pool_that_fails_are_pythons():
    def fails(*_):
        raise RuntimeError("no pool")

    x, pool = torch.ones(5, 256, dtype=torch.bfloat16), Pool(1 << 30)
    assert pool.place(x, 40, begin=fails) is None and pool.seen == ["select", "none"]
