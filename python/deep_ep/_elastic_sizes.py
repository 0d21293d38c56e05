"""Sizes of V2: what a size hint says, and how a buffer of so many bytes is divided."""

from __future__ import annotations

from .config import Config
from .errors import check_int, value_error

UNIT = 2 << 20  # bytes; sizes are multiples of it
MAX_BYTES = 2**62
DEFAULT_TOPK = 32  # where num_topk is not known
ROW_ALIGNMENT = 32
SCALE_CHANNELS = 32  # the smallest number of channels that share a scale
# The NVL region: all of a small buffer, whose calls are short and often in graphs, where no row lies in the segment;
# of a large one what keeps the links busy, so that the row segment has room for a dispatch's rows.
LEAST_STAGING, STAGING_SHARE = 16 << 20, 16


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def buffer_bytes(
    num_ranks: int, num_max_tokens: int, hidden: int, num_topk: int, use_fp8_dispatch: bool, multiple_reduction: bool
) -> int:
    """get_buffer_size_hint: what V2.1 takes on one NVLink domain. A row segment of it holds one dispatch's rows."""
    check_int("num_max_tokens_per_rank", num_max_tokens, 1, 1 << 24)
    check_int("hidden", hidden, 1, 1 << 20)
    num_topk = check_int("num_topk", num_topk, 0, 128) or DEFAULT_TOPK
    scales = 4 * _up(hidden, SCALE_CHANNELS) // SCALE_CHANNELS if use_fp8_dispatch else 0
    row = _up(hidden if use_fp8_dispatch else 2 * hidden, ROW_ALIGNMENT)
    dispatch = row + _up(scales, ROW_ALIGNMENT) + _up(12 * num_topk + 4, ROW_ALIGNMENT)
    combine = _up(2 * hidden, ROW_ALIGNMENT) + _up(8 * num_topk, ROW_ALIGNMENT)
    returned = min(num_ranks, num_topk) if multiple_reduction else num_topk
    return _up(max(num_ranks * dispatch, returned * combine) * num_max_tokens, UNIT)


def check_bytes(name: str, value: object) -> int:
    """`value` if it is a positive multiple of 2 MiB."""
    number = check_int(name, value, 1, MAX_BYTES)
    if number % UNIT:
        raise value_error(name, number, f"a multiple of {UNIT}")
    return number


def regions(num_bytes: int, num_ranks: int, hidden: int) -> tuple[int, int]:
    """Divides `num_bytes` into num_nvl_bytes (staging) and the row segment (GPUs)."""
    wanted = Config.default(0, num_ranks).get_nvl_buffer_size_hint(2 * (hidden or 7168), num_ranks)
    staging = min(_up(wanted, UNIT), max(LEAST_STAGING, num_bytes // STAGING_SHARE // UNIT * UNIT), num_bytes)
    return staging, num_bytes - staging


def rdma_bytes(num_ranks: int, hidden: int) -> int:
    """num_rdma_bytes of the buffer; 0 on one node."""
    return Config.default(0, num_ranks).get_rdma_buffer_size_hint(2 * (hidden or 7168), num_ranks)
