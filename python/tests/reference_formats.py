"""Number formats of the low-latency mode in plain torch: FP8 e4m3 with its three kinds of scales, NVFP4, LogFMT-10."""

from __future__ import annotations

import torch

BLOCK = 128
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
LOGFMT_CODES = 511  # sign and nine bits of magnitude, code 0 is zero
LOGFMT_RANGE = 2.0**-32


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).view(x.shape[0], x.shape[1] // BLOCK, BLOCK)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest even, saturating; torch alone would turn anything above 464 into NaN."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_scales(x: torch.Tensor, round_scale: bool = False) -> torch.Tensor:
    """[T,H] BF16 to [T,H/128] float32: amax / 448, or the next power of two at or above it."""
    amax = _blocks(x).abs().amax(dim=2).clamp(min=AMAX_FLOOR)
    scales = amax / FP8_MAX
    if not round_scale:
        return scales
    mantissa, exponent = torch.frexp(scales)  # scales = mantissa * 2^exponent with mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(scales), exponent)


def fp8_cast(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts [T,H] BF16 to (e4m3 [T,H], float32 scales [T,H/128])."""
    scales = fp8_scales(x, round_scale)
    values = _blocks(x).to(torch.float64) / _exact_divisor(x, scales, round_scale).unsqueeze(2)
    return to_e4m3(values.to(torch.float32)).view(x.shape), scales


def fp8_cast_bounds(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and highest e4m3 value that a correct float32 computation of x * 448 / amax may give.

    Two roundings (448 / amax, then the product) move the quotient by at most 2^-22 of itself, which matters only
    beside a tie. Division by a power of two is exact: there both bounds are the same.
    """
    scales = fp8_scales(x, round_scale)
    exact = _blocks(x).to(torch.float64) / _exact_divisor(x, scales, round_scale).unsqueeze(2)
    slack = 0.0 if round_scale else 2.0**-22
    one, other = exact * (1 - slack), exact * (1 + slack)
    low, high = torch.minimum(one, other), torch.maximum(one, other)
    return tuple(to_e4m3(bound.to(torch.float32)).view(x.shape) for bound in (low, high))


def _exact_divisor(x: torch.Tensor, scales: torch.Tensor, round_scale: bool) -> torch.Tensor:
    if round_scale:
        return scales.to(torch.float64)
    amax = _blocks(x).abs().amax(dim=2).clamp(min=AMAX_FLOOR)
    return amax.to(torch.float64) / FP8_MAX


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """[T,H/128] powers of two to [T,H/512] int32: four biased exponents a word, lowest first."""
    exponents = (scales.contiguous().view(torch.int32) >> 23) & 0xFF
    return exponents.to(torch.uint8).contiguous().view(torch.int32)


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``pack_ue8m0``."""
    exponents = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8).to(torch.int32)
    return (exponents << 23).view(torch.float32)


def fp8_decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(e4m3 [T,H], float32 [T,H/128] or packed int32 [T,H/512]) back to float32 [T,H]."""
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales)
    return (_blocks(values) * scales.unsqueeze(2)).view(values.shape)


def logfmt_table(block: torch.Tensor) -> torch.Tensor | None:
    """Magnitudes of codes 0..511 for one block of 128 values (float64), or None where the block stays BF16."""
    magnitude = block.to(torch.float64).abs()
    greatest = magnitude.max().item()
    least = max(magnitude.min().item(), greatest * LOGFMT_RANGE)
    if not greatest < 1 or greatest == least:
        return None
    low = torch.log2(torch.tensor(least, dtype=torch.float64))
    high = torch.log2(torch.tensor(greatest, dtype=torch.float64))
    steps = torch.arange(LOGFMT_CODES, dtype=torch.float64) / (LOGFMT_CODES - 1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.exp2(low + steps * (high - low))])


def logfmt_encode(block: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Signed codes of one block: the entry of ``table`` that is nearest in linear value."""
    magnitude = block.to(torch.float64).abs()
    above = torch.searchsorted(table, magnitude).clamp(1, LOGFMT_CODES)
    nearer_below = magnitude - table[above - 1] < table[above] - magnitude
    codes = torch.where(nearer_below, above - 1, above)
    return torch.where(block.to(torch.float64) < 0, -codes, codes)


def logfmt_decode(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.sign(codes).to(torch.float64) * table[codes.abs()]


def logfmt_round_trip(row: torch.Tensor) -> torch.Tensor:
    """One BF16 row [H] after the wire, in float64."""
    parts = []
    for block in row.view(-1, BLOCK):
        table = logfmt_table(block)
        if table is None:
            parts.append(block.to(torch.float64))
        else:
            parts.append(logfmt_decode(logfmt_encode(block, table), table))
    return torch.cat(parts)


def logfmt_error_bound(row: torch.Tensor) -> torch.Tensor:
    """[H] float64: how far a decoded value may lie from the row's: half the distance between neighbouring codes.

    A twentieth more is allowed, because a fast log2 may choose the neighbour beside a tie, and one BF16 rounding
    of the decoded value.
    """
    parts = []
    for block in row.view(-1, BLOCK):
        table = logfmt_table(block)
        if table is None:
            parts.append(torch.zeros(BLOCK, dtype=torch.float64))
            continue
        magnitude = block.to(torch.float64).abs()
        above = torch.searchsorted(table, magnitude).clamp(1, LOGFMT_CODES)
        half = (table[above] - table[above - 1]) / 2
        parts.append(half * 1.05 + magnitude * 2.0**-8)
    return torch.cat(parts)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [T, H] to uint8 [T, H/2], two e2m1 in a byte, and e4m3 scales as bytes [T, H/16]."""
    blocks = x.to(torch.float32).view(len(x), x.shape[1] // 16, 16)
    factors = torch.tensor(factor, dtype=torch.float32)
    scales = (factors * (blocks.abs().amax(2) / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    wide = scales.to(torch.float32).unsqueeze(2)
    wanted = (blocks.abs() * (factors / wide)).clamp(max=6)
    distance = (wanted.unsqueeze(3) - E2M1).abs()
    nearest = distance == distance.amin(3, keepdim=True)
    even = nearest & (torch.arange(8) % 2 == 0)
    codes = torch.where(even.any(3), even.int().argmax(3), nearest.int().argmax(3))
    codes = torch.where(wanted.isnan(), 7, codes)
    codes = torch.where(wide == 0, 0, codes)
    codes = torch.where((codes != 0) & torch.signbit(blocks), codes + 8, codes).view(len(x), x.shape[1] // 2, 2)
    return (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8), scales.view(torch.uint8)


def without_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Bytes [32, 4, M, 4, H/64, L] as [L, 128 M, H/16], each from the place that GEMM kernels give it."""
    _, _, tiles, _, words, experts = scales.shape
    row, column = torch.arange(128 * tiles).unsqueeze(1), torch.arange(4 * words).unsqueeze(0)
    plain = scales.cpu()[row % 32, row // 32 % 4, row // 128, column % 4, column // 4]
    return plain.permute(2, 0, 1).reshape(experts, 128 * tiles, 4 * words)
