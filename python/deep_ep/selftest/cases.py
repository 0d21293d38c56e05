"""The cases of each mode of the self-test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import internode, intranode, low_latency
from .rank import Case

_CASES: dict[str, Callable[[Any], list[Case]]] = {
    "intranode": intranode.cases,
    "low_latency": low_latency.cases,
    "internode": internode.cases,
}


def list_cases(options: Any) -> list[Case]:
    """The cases of ``options.mode``, the same list in every process."""
    return _CASES[options.mode](options)
