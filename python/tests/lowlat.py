"""Low-latency mode as a rank of the pool runs it: dispatch, check rows and handle, combine, check sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import cases
import checks
import normal
import reference
import reference_formats as formats

NAN = float("nan")
Lost = frozenset[tuple[int, int]]  # pairs (a, b): rank a has masked rank b


@contextmanager
def buffer_of(ctx: Any, case: cases.Case, num_max: int, **options: Any) -> Iterator[Any]:
    """A low-latency buffer of exactly the hinted size."""
    from deep_ep import Buffer

    size = Buffer.get_low_latency_rdma_size_hint(num_max, case.hidden, ctx.size, case.experts)
    options.setdefault("num_qps_per_rank", max(1, case.experts // ctx.size))
    with normal.buffer_of(ctx, options.pop("num_nvl_bytes", 0), size, low_latency_mode=True, **options) as buffer:
        yield buffer


@dataclass
class Call:
    """One dispatched case on one rank."""

    case: cases.Case
    num_max: int
    rank: int
    x: list[torch.Tensor]  # of every rank
    topk_idx: list[torch.Tensor]  # of every rank
    want: reference.LowLatencyReceived
    fp8: bool
    round_scale: bool
    ue8m0: bool
    lost: Lost = frozenset()
    recv_x: Any = None
    counts: Any = None
    handle: Any = None
    event: Any = None
    hook: Any = None
    kept: list[Any] = field(default_factory=list)


def make_x(case: cases.Case, rank: int, fp8: bool) -> torch.Tensor:
    """[T,H] BF16: the payload that names its row, or numbers of many magnitudes for the FP8 cast."""
    if not fp8:
        return cases.payload(rank, case.tokens[rank], case.hidden).to(torch.bfloat16)
    gen = cases.generator(case.seed, rank, 11)
    shape = (case.tokens[rank], case.hidden)
    magnitude = torch.exp2(torch.randint(-12, 12, (shape[0], shape[1] // 128, 1), generator=gen).to(torch.float32))
    return (
        (torch.randn(shape, generator=gen).view(*magnitude.shape[:2], 128) * magnitude).view(shape).to(torch.bfloat16)
    )


def expect(case: cases.Case, rank: int, num_max: int, lost: Lost, **options: Any) -> Call:
    fp8 = options.get("use_fp8", True)
    idx = case.routings()
    return Call(
        case,
        num_max,
        rank,
        [make_x(case, r, fp8) for r in range(case.ranks)],
        idx,
        reference.low_latency_dispatch(idx, rank, case.experts, num_max, lost),
        fp8,
        options.get("round_scale", False),
        options.get("use_ue8m0", False),
        lost,
    )


def dispatch(ctx: Any, buffer: Any, case: cases.Case, num_max: int, lost: Lost = frozenset(), **options: Any) -> Call:
    """Issues the dispatch; neither hook nor event is waited for."""
    call = expect(case, ctx.rank, num_max, lost, **options)
    call.recv_x, call.counts, call.handle, call.event, call.hook = buffer.low_latency_dispatch(
        ctx.to_device(call.x[ctx.rank]), ctx.to_device(call.topk_idx[ctx.rank]), num_max, case.experts, **options
    )
    return call


def finish(call: Any) -> None:
    """Waits as the options of the call ask for: the hook, or the event."""
    if call.hook is not None:
        call.hook()
    elif call.event is not None and call.event.event is not None:
        call.event.current_stream_wait()


def check(call: Call) -> None:
    """Shapes, counts, handle and every valid row."""
    case, want = call.case, call.want
    num_local, rows = case.experts // case.ranks, case.ranks * call.num_max
    x, scales = call.recv_x if call.fp8 else (call.recv_x, None)
    assert tuple(x.shape) == (num_local, rows, case.hidden), f"recv_x {tuple(x.shape)}"
    assert x.dtype == (cases.FP8 if call.fp8 else torch.bfloat16)
    checks.same_bits("recv_count", call.counts, want.counts)
    assert type(call.handle) is tuple and len(call.handle) == 5
    src_info, ranges, *shape = call.handle
    assert shape == [call.num_max, case.hidden, case.experts], f"handle ends with {shape}"
    checks.same_bits("layout_range", ranges, want.layout_range)
    assert tuple(src_info.shape) == (num_local, rows) and src_info.dtype == torch.int32
    for local in range(num_local):
        count = int(want.counts[local])
        checks.same_bits(f"src_info of expert {local}", src_info[local, :count], want.src_info(local))
        source = source_rows(call.x, want.rows[local], case.hidden)
        if call.fp8:
            check_fp8(call, local, x[local, :count].cpu(), scales[local, :count].cpu(), source)
        else:
            checks.same_rows(f"recv_x of expert {local}", x[local, :count], source)
    if call.fp8:
        check_scale_storage(call, scales)


def source_rows(x: list[torch.Tensor], rows: list[tuple[int, int]], hidden: int) -> torch.Tensor:
    if not rows:
        return torch.empty((0, hidden), dtype=torch.bfloat16)
    return torch.stack([x[rank][token] for rank, token in rows])


def check_scale_storage(call: Call, scales: torch.Tensor) -> None:
    """[L, R*B, H/128] float32 or [L, R*B, H/512] int32, the row axis contiguous."""
    num_local, rows = call.case.experts // call.case.ranks, call.case.ranks * call.num_max
    width = call.case.hidden // (512 if call.ue8m0 else 128)
    assert scales.dtype == (torch.int32 if call.ue8m0 else torch.float32)
    assert tuple(scales.shape) == (num_local, rows, width)
    assert scales.stride(1) == 1 and (width == 1 or scales.stride(2) == rows), f"strides {scales.stride()}"


def check_fp8(call: Call, local: int, values: torch.Tensor, scales: torch.Tensor, source: torch.Tensor) -> None:
    """Bytes are the correctly rounded ones (either neighbour beside a tie), scales equal to one float32 step."""
    low, high = formats.fp8_cast_bounds(source, call.round_scale)
    matches = (checks.raw(values) == checks.raw(low)) | (checks.raw(values) == checks.raw(high))
    assert bool(matches.all()), f"expert {local}: {int((~matches).sum())} of {matches.numel()} FP8 bytes wrong"
    exact = formats.fp8_scales(source, call.round_scale)
    if call.ue8m0:
        checks.same_bits(f"scales of expert {local}", scales, formats.pack_ue8m0(exact))
    elif call.round_scale:
        checks.same_bits(f"scales of expert {local}", scales, exact)
    else:
        checks.within_bound(f"scales of expert {local}", scales, exact.double(), exact.double() * 2.0**-23)


def dispatch_and_check(ctx: Any, buffer: Any, case: cases.Case, num_max: int, **options: Any) -> Call:
    call = dispatch(ctx, buffer, case, num_max, **options)
    finish(call)
    check(call)
    return call


def make_weights(case: cases.Case, rank: int) -> torch.Tensor:
    """[T,K] float32, multiples of 1/8 up to 2: products with small integers and their sums are exact."""
    gen = cases.generator(case.seed, rank, 12)
    return torch.randint(1, 17, (case.tokens[rank], case.topk), generator=gen).to(torch.float32) / 8


def row_of_expert(case: cases.Case, expert: int, source: int, token: int, exact: bool, salt: int) -> torch.Tensor:
    """[H] BF16: what ``expert`` answers for a token."""
    gen = cases.generator(case.seed, expert, source, token, salt)
    if exact:
        return torch.randint(-8, 9, (case.hidden,), generator=gen).to(torch.bfloat16)
    return (torch.randn(case.hidden, generator=gen) / 8).clamp(-0.97, 0.97).to(torch.bfloat16)


def answer_rows(call: Call, exact: bool, salt: int) -> torch.Tensor:
    """[L, R*B, H] BF16 of this rank; rows that combine must never read are NaN."""
    case = call.case
    num_local = case.experts // case.ranks
    x = torch.full((num_local, case.ranks * call.num_max, case.hidden), NAN, dtype=torch.bfloat16)
    for local, rows in enumerate(call.want.rows):
        for row, (source, token) in enumerate(rows):
            x[local, row] = row_of_expert(case, call.rank * num_local + local, source, token, exact, salt)
    return x


def wanted_sums(
    call: Call,
    exact: bool,
    salt: int,
    weights: torch.Tensor,
    absolute: bool = False,
    use_logfmt: bool = False,
    by_rank: bool = False,
) -> torch.Tensor:
    """float64 sums for this rank's tokens; with ``absolute`` the sums of absolute values.

    With ``by_rank`` each rank's experts are summed first, and rounded to BF16, with ``use_logfmt`` then coded.
    """
    if by_rank:
        parts = sums_by_rank(call, exact, salt, weights)
        return torch.stack([through_logfmt(part) if use_logfmt else part for part in parts]).to(torch.float64).sum(0)
    answers = _answers(call, exact, salt, absolute)
    case, idx = call.case, call.topk_idx[call.rank]
    return reference.low_latency_combine(answers, idx, weights, call.rank, case.experts, case.hidden, use_logfmt)


def sums_by_rank(call: Call, exact: bool, salt: int, weights: torch.Tensor) -> list[torch.Tensor]:
    """BF16 ``[T, H]`` for each rank: the sums of its experts' rows alone."""
    answers, case, idx = _answers(call, exact, salt), call.case, call.topk_idx[call.rank]
    alone = [[rows if owner == rank else {} for owner in range(case.ranks)] for rank, rows in enumerate(answers)]
    return [
        reference.low_latency_combine(rows, idx, weights, call.rank, case.experts, case.hidden).to(torch.bfloat16)
        for rows in alone
    ]


def through_logfmt(rows: torch.Tensor) -> torch.Tensor:
    """What arrives of BF16 ``[T, H]`` that are sent in LogFMT."""
    return torch.stack([formats.logfmt_round_trip(row) for row in rows]) if len(rows) else rows


def _answers(
    call: Call, exact: bool, salt: int, absolute: bool = False
) -> list[dict[tuple[int, int, int], torch.Tensor]]:
    """For each rank the rows that it returns to this rank's tokens, by (local expert, source, token)."""
    case, num_local = call.case, call.case.experts // call.case.ranks
    answers: list[dict[tuple[int, int, int], torch.Tensor]] = [{} for _ in range(case.ranks)]
    for token, chosen in enumerate(call.topk_idx[call.rank].tolist()):
        for expert in set(chosen) - {-1}:
            owner = expert // num_local
            if (call.rank, owner) in call.lost or (owner, call.rank) in call.lost:
                continue
            row = row_of_expert(case, expert, call.rank, token, exact, salt)
            answers[owner][expert % num_local, call.rank, token] = row.abs() if absolute else row
    return answers


@dataclass
class Combined:
    """A combine that was issued."""

    call: Call
    exact: bool
    salt: int
    use_logfmt: bool
    may_sum: bool  # the experts' rank may sum and round first, where it has the weights
    weights: torch.Tensor
    x: torch.Tensor
    got: torch.Tensor
    event: Any
    hook: Any


def combine(ctx: Any, buffer: Any, call: Call, exact: bool = True, salt: int = 20, **options: Any) -> Combined:
    """Issues a combine of the rows of ``answer_rows``; neither hook nor event is waited for."""
    use_logfmt = options.get("use_logfmt", False)
    weights = make_weights(call.case, ctx.rank)
    rows = ctx.to_device(answer_rows(call, exact, salt))
    x = rows
    if options.get("zero_copy"):
        place = buffer.get_next_low_latency_combine_buffer(call.handle)
        assert place.shape == rows.shape and place.dtype == torch.bfloat16 and place.stride(2) == 1
        place.copy_(rows)
        x = torch.full_like(rows, NAN)
    got, event, hook = buffer.low_latency_combine(
        x, ctx.to_device(call.topk_idx[ctx.rank]), ctx.to_device(weights), call.handle, **options
    )
    may_sum = ctx.device.type == "cuda" and not options.get("unreduced", False)
    return Combined(call, exact, salt, use_logfmt, may_sum, weights, rows, got, event, hook)


def check_combined(done: Combined) -> None:
    """Bit for bit where integers make sums exact; else within one rounding, or LogFMT's own error.

    Where ranks may sum first, a token's sum is that one or the other.
    """
    call = done.call
    want = wanted_sums(call, done.exact, done.salt, done.weights)
    assert done.got.dtype == torch.bfloat16
    if done.use_logfmt:
        check_logfmt(done)
    elif done.exact:
        wanted = want.to(torch.bfloat16) + 0.0
        if done.may_sum and wanted.numel():
            first = wanted_sums(call, done.exact, done.salt, done.weights, by_rank=True).to(torch.bfloat16) + 0.0
            plain = (checks.raw(done.got + 0.0) == checks.raw(wanted)).all(1, keepdim=True)
            wanted = torch.where(plain, wanted, first)
        checks.same_bits("combined_x", done.got + 0.0, wanted)
    else:
        magnitude = wanted_sums(call, done.exact, done.salt, done.weights, absolute=True)
        checks.close_sums("combined_x", done.got, want, magnitude, magnitude * 2.0**-8 if done.may_sum else 0.0)
        checks.small_diff("combined_x", done.got, want, 1e-5)


def check_logfmt(done: Combined) -> None:
    """Each value is off by no more than half a code of each row that crossed, and one BF16 rounding.

    A rank's sum may cross instead of its rows. The rank's own sum may differ from the reference's by an ulp, and with
    it its range of codes, or whether its block is coded.
    """
    call, case = done.call, done.call.case
    want = wanted_sums(call, done.exact, done.salt, done.weights)
    of_rows = [torch.zeros_like(want) for _ in range(case.ranks)]
    for token, chosen in enumerate(call.topk_idx[call.rank].tolist()):
        for k, expert in enumerate(chosen):
            if expert >= 0:
                row = row_of_expert(case, expert, call.rank, token, done.exact, done.salt)
                weight = float(done.weights[token, k])
                of_rows[expert * case.ranks // case.experts][token] += weight * formats.logfmt_error_bound(row)
    if done.may_sum:
        for bound, part in zip(of_rows, sums_by_rank(call, done.exact, done.salt, done.weights), strict=True):
            for token, row in enumerate(part):
                coded = torch.maximum(formats.logfmt_error_bound(row), formats.logfmt_error_bound(row * 0.98))
                bound[token] = torch.maximum(bound[token], 1.5 * coded + row.abs().to(torch.float64) * 2.0**-8)
    bound = want.abs() * 2.0**-8 + torch.stack(of_rows).sum(0)
    checks.within_bound("combined_x after LogFMT", done.got, want, bound + 1e-9)
    ways = (False, True) if done.may_sum else (False,)
    coded_sums = [wanted_sums(call, done.exact, done.salt, done.weights, use_logfmt=True, by_rank=way) for way in ways]
    nearest = min(coded_sums, key=lambda sums: reference.calc_diff(done.got, sums))
    checks.small_diff("combined_x against the reference's LogFMT", done.got, nearest, 1e-5)


def combine_and_check(ctx: Any, buffer: Any, call: Call, **options: Any) -> Combined:
    done = combine(ctx, buffer, call, **options)
    finish(done)
    check_combined(done)
    return done
