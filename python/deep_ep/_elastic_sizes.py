"""Numbers of V2, as the library says them: what a size hint is, how a buffer is divided, what its calls take."""

from __future__ import annotations

import ctypes
from typing import Any

from . import _abi
from ._lib import library
from .errors import check_int, value_error

UNIT = _abi.ELASTIC_UNIT  # bytes; sizes are multiples of it
MAX_BYTES = 2**62


def options(
    num_max_tokens: int = 0,
    hidden: int = 0,
    num_topk: int = 0,
    use_fp8_dispatch: bool = False,
    multiple_reduction: bool = True,
    **numbers: int,
) -> Any:
    """deepep_elastic_options; `numbers` are others of its fields."""
    return _abi.sized(
        _abi.ElasticOptions,
        num_max_tokens=check_int("num_max_tokens_per_rank", num_max_tokens),
        hidden=check_int("hidden", hidden),
        num_topk=check_int("num_topk", num_topk),
        use_fp8_dispatch=int(use_fp8_dispatch),
        unreduced=int(not multiple_reduction),
        **numbers,
    )


def sizes(given: Any) -> Any:
    """deepep_elastic_info for the options."""
    lib, info = library(), _abi.sized(_abi.ElasticInfo)
    lib.check(lib.with_gil.deepep_elastic_sizes(ctypes.byref(given), ctypes.byref(info)))
    return info


def check_bytes(name: str, value: object) -> int:
    """`value` if it is a positive multiple of 2 MiB."""
    number = check_int(name, value, 1, MAX_BYTES)
    if number % UNIT:
        raise value_error(name, number, f"a multiple of {UNIT}")
    return number
