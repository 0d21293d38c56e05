"""Makes buffers while the thread's alternate signal stack has little room, and Go collects all the time."""

from __future__ import annotations

import ctypes
import sys


class Stack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


libc = ctypes.CDLL(None)
libc.getauxval.restype = ctypes.c_ulong
size = max(2048, libc.getauxval(51)) + 448  # AT_MINSIGSTKSZ: what the kernel itself puts there
memory = ctypes.create_string_buffer(size)
stack = Stack(ctypes.addressof(memory), 0, size)
if libc.sigaltstack(ctypes.byref(stack), None) != 0:
    sys.exit("sigaltstack failed")

from deep_ep import Buffer  # noqa: E402  after the stack is there
from deep_ep.bootstrap import Bootstrap  # noqa: E402

for turn in range(int(sys.argv[2])):
    Buffer(
        None, 1 << 20, engine="cpu", bootstrap=Bootstrap.file(0, 1, sys.argv[1], f"turn{turn}"), explicitly_destroy=True
    ).destroy()
print("done")
