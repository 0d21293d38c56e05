"""Waits for a signal as servers do: all its threads block it, one calls sigwait. The library's take none of them."""

from __future__ import annotations

import os
import signal
import sys

WAITED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM}
OTHERS = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE}
signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)  # for the threads of torch

import torch  # noqa: E402, F401

signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED)  # the library is opened by a thread that blocks nothing


def threads() -> set[str]:
    """Of this process."""
    return set(os.listdir("/proc/self/task"))


def blocks(thread: str) -> int:
    """The signals that a thread blocks, a bit each."""
    with open(f"/proc/self/task/{thread}/status") as status:
        return int(next(line for line in status if line.startswith("SigBlk:")).split()[1], 16)


before = threads()
from deep_ep import Buffer  # noqa: E402
from deep_ep.bootstrap import Bootstrap  # noqa: E402

buffer = Buffer(None, 1 << 20, engine="cpu", bootstrap=Bootstrap.file(0, 1, sys.argv[1]), explicitly_destroy=True)
of_library = threads() - before
for thread in of_library:
    for number in WAITED | OTHERS:
        assert blocks(thread) >> (number - 1) & 1, (thread, number)
assert len(of_library) > 2, "the Go runtime's threads are there"
assert blocks(str(os.getpid())) == 0, "the thread that opened the library has its mask again"

signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
for number in sorted(WAITED):
    os.kill(os.getpid(), number)
    assert signal.sigtimedwait(WAITED, 5) is not None, number
buffer.destroy()
print("done")
