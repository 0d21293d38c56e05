"""Times of a call by the host's clock. It imports neither torch nor deep_ep: a rival's process has it too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WARMUP = 10


def clocked(
    meet: Callable[[], Any], call: Callable[[], Any], finish: Callable[[], Any], rounds: int, warmup: int = WARMUP
) -> tuple[list[float], list[float]]:
    """Times in us of a rank: until the call returns, and until the device is done.

    Args:
        meet: returns on all ranks together, with idle devices.
        finish: waits for the device.
        warmup: calls before those that count.
    """
    clock = time.perf_counter
    returned, done = [], []
    for number in range(warmup + rounds):
        meet()
        start = clock()
        call()
        first = clock()
        finish()
        if number >= warmup:
            done.append((clock() - start) * 1e6)
            returned.append((first - start) * 1e6)
    return returned, done
