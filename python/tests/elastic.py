"""V2 as a rank of the pool runs it: make a buffer, dispatch a case in both layouts, check everything that came back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import cases
import checks
import elastic_reference
import reference


@contextmanager
def buffer_of(ctx: Any, num_max: int = 128, hidden: int = 64, kind: str = "ElasticBuffer", **options: Any) -> Iterator:
    """A buffer of V2 over the rank's group that is destroyed at the end, also after an error."""
    import deep_ep

    options.setdefault("engine", ctx.engine)
    options.setdefault("explicitly_destroy", True)
    buffer = getattr(deep_ep, kind)(ctx.group, num_max_tokens_per_rank=num_max, hidden=hidden, **options)
    try:
        yield buffer
    finally:
        buffer.destroy()


@dataclass
class Call:
    """One dispatch of a case on this rank: how it was made, what must come and what came."""

    case: cases.Case
    exchange: elastic_reference.Exchange
    rank: int
    num_max: int
    expand: bool
    sync: bool
    columns: bool = False
    recv_x: Any = None
    recv_topk_idx: Any = None
    recv_topk_weights: Any = None
    handle: Any = None
    event: Any = None
    keep: list[Any] = field(default_factory=list)

    @property
    def own(self) -> reference.Tokens:
        return self.exchange.inputs[self.rank]

    @property
    def want(self) -> elastic_reference.Received:
        return self.exchange.received[self.rank]

    @property
    def rows(self) -> int:
        """Rows of recv_x."""
        ranks, local, k = self.exchange.ranks, self.exchange.local, self.exchange.num_topk
        if self.sync:
            return len(self.want.expanded) if self.expand else len(self.want.tokens)
        if not self.expand:
            return ranks * self.num_max
        most = ranks * self.num_max * min(k, local) + (self.exchange.alignment - 1) * local
        return -(-most // self.exchange.alignment) * self.exchange.alignment


def x_of(ctx: Any, tokens: reference.Tokens) -> Any:
    """The first argument of dispatch."""
    x = ctx.to_device(tokens.x)
    return x if tokens.scales is None else (x, ctx.to_device(tokens.scales))


def expect(case: cases.Case, num_max: int) -> elastic_reference.Exchange:
    return elastic_reference.Exchange(case.inputs(), case.experts, case.alignment, num_max)


def dispatch(
    ctx: Any,
    buffer: Any,
    exchange: elastic_reference.Exchange,
    case: cases.Case,
    *,
    expand: bool = False,
    sync: bool = True,
    columns: bool = False,
    weights: bool = True,
    **extra: Any,
) -> Call:
    """Dispatches; nothing of the result is checked yet."""
    call = Call(case, exchange, ctx.rank, exchange.num_max, expand, sync, columns)
    own = call.own
    result = buffer.dispatch(
        x=x_of(ctx, own),
        topk_idx=ctx.to_device(own.topk_idx),
        topk_weights=ctx.to_device(own.topk_weights) if weights else None,
        num_experts=case.experts,
        num_max_tokens_per_rank=exchange.num_max,
        expert_alignment=case.alignment,
        do_cpu_sync=int(sync),
        do_expand=int(expand),
        use_tma_aligned_col_major_sf=int(columns),
        **extra,
    )
    call.recv_x, call.recv_topk_idx, call.recv_topk_weights, call.handle, call.event = result
    return call


def again(ctx: Any, buffer: Any, call: Call, tokens: list[reference.Tokens] | None = None, **extra: Any) -> Call:
    """A cached dispatch, of other rows if `tokens` are given."""
    exchange = call.exchange
    if tokens is not None:
        exchange = elastic_reference.Exchange(tokens, exchange.num_experts, exchange.alignment, exchange.num_max)
    expand = extra.pop("expand", call.expand)
    new = Call(call.case, exchange, call.rank, call.num_max, expand, call.sync, bool(extra.pop("columns", False)))
    weights = extra.pop("weights", True)
    result = buffer.dispatch(
        x_of(ctx, new.own), topk_weights=ctx.to_device(new.own.topk_weights) if weights else None, handle=call.handle,
        do_expand=expand, use_tma_aligned_col_major_sf=new.columns, **extra,
    )  # fmt: skip
    new.recv_x, new.recv_topk_idx, new.recv_topk_weights, new.handle, new.event = result
    assert new.handle is call.handle
    return new


def bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """The bytes of rows."""
    checks.same_bits(name, got.contiguous().view(torch.uint8).view(len(got), -1) if got.numel() else got, want)


def same_tensor(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.is_contiguous(), f"{name} has strides {got.stride()}"
    checks.same_bits(name, got.cpu(), want)


def check(call: Call, *, padded: bool = False, weights: bool = True) -> None:
    """Everything that a dispatch returned but the handle."""
    want, exchange = call.want, call.exchange
    x, scales = call.recv_x if isinstance(call.recv_x, tuple) else (call.recv_x, None)
    assert len(x) == call.rows and x.is_contiguous(), f"recv_x {x.shape} {x.stride()}, expected {call.rows} rows"
    assert x.dtype == call.own.x.dtype and x.shape[1] == call.own.x.shape[1]
    assert (scales is None) == (call.own.scales is None)
    if call.expand:
        _check_expanded(call, x.cpu(), padded, weights)
    else:
        real = len(want.tokens)
        checks.same_rows("recv_x", x[:real].cpu(), _typed(exchange.plain(call.rank, _xs(call)), x))
        assert len(call.recv_topk_idx) == call.rows
        checks.same_bits("recv_topk_idx", call.recv_topk_idx[:real].cpu(), want.topk_idx)
        assert (call.recv_topk_weights is not None) == weights
        if weights:
            assert call.recv_topk_weights.shape == (call.rows, exchange.num_topk)
            sent = _typed(exchange.plain(call.rank, [t.topk_weights for t in exchange.inputs]), call.recv_topk_weights)
            checks.same_bits("recv_topk_weights", call.recv_topk_weights[:real].cpu(), sent)
    if scales is not None:
        _check_scales(call, scales)


def _xs(call: Call) -> list[torch.Tensor]:
    return [tokens.x for tokens in call.exchange.inputs]


def _typed(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return raw.view(like.dtype).view(len(raw), like.shape[1])


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)  # torch 2.4 selects no rows of FP8


def _check_expanded(call: Call, x: torch.Tensor, padded: bool, weights: bool) -> None:
    want, exchange = call.want, call.exchange
    total = len(want.expanded)
    real = want.expanded[:, 0] >= 0
    compared = torch.ones_like(real) if padded else real
    rows = exchange.expanded(call.rank, _xs(call))
    got, wanted = (_bytes(each)[compared.to(each.device)] for each in (x[:total], _typed(rows, x)))
    checks.same_rows("expanded recv_x", got.view(x.dtype), wanted.view(x.dtype))
    assert call.recv_topk_idx is None
    assert (call.recv_topk_weights is not None) == weights
    if weights:
        assert call.recv_topk_weights.shape == (call.rows,)
        got = call.recv_topk_weights[:total].cpu()[compared]
        checks.same_bits("expanded weights", got, exchange.expanded_weights(call.rank)[compared])


def _check_scales(call: Call, scales: torch.Tensor) -> None:
    sent = [tokens.scales for tokens in call.exchange.inputs]
    count = sent[0].shape[1]
    assert scales.shape == (call.rows, count) and scales.dtype == sent[0].dtype
    strides = (1, -(-call.rows // 4) * 4) if call.columns else (count, 1)
    if call.rows > 1 and count > 1:
        assert scales.stride() == strides, f"scales have strides {scales.stride()}, expected {strides}"
    if call.expand:
        real = call.want.expanded[:, 0] >= 0
        rows = _typed(call.exchange.expanded(call.rank, sent), scales)[real]
        checks.same_bits("expanded scales", scales[: len(real)].cpu()[real], rows)
    else:
        rows = _typed(call.exchange.plain(call.rank, sent), scales)
        checks.same_bits("scales", scales[: len(rows)].cpu(), rows)


def check_handle(call: Call, sent_idx: Any = None) -> None:
    """What section 6 of the contract says of a handle."""
    handle, want, exchange = call.handle, call.want, call.exchange
    assert (handle.do_expand, handle.num_experts) == (call.expand, exchange.num_experts)
    assert (handle.expert_alignment, handle.num_max_tokens_per_rank) == (exchange.alignment, exchange.num_max)
    assert type(handle.num_sms) is int and handle.num_sms > 0 and handle.num_sms % 2 == 0
    assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (call.rows, call.rows)
    checks.same_ints("list", handle.num_recv_tokens_per_expert_list, want.aligned if call.sync else [])
    same_tensor("topk_idx", handle.topk_idx, call.own.topk_idx)
    psum = handle.psum_num_recv_tokens_per_scaleup_rank
    rows = torch.diff(want.psum_ranks, prepend=torch.zeros(1, dtype=torch.int32)).view(-1, len(psum)).sum(0)
    same_tensor("psum per scale-up rank", psum, rows.cumsum(0).to(torch.int32))
    psum = want.psum_expanded if call.expand else want.psum_plain
    same_tensor("psum per expert", handle.psum_num_recv_tokens_per_expert, psum)
    counts = torch.tensor(want.counts, dtype=torch.int32)
    same_tensor("unaligned counts", handle.num_unaligned_recv_tokens_per_expert, counts)
    metadata, n = handle.recv_src_metadata, len(want.tokens)
    assert metadata.is_contiguous() and metadata.dtype == torch.int32
    assert metadata.shape == (n if call.sync else exchange.ranks * exchange.num_max, exchange.num_topk + 2)
    checks.same_bits("metadata", metadata[:n, :2].cpu(), want.metadata)
    if call.expand:
        checks.same_bits("metadata's rows", metadata[:n, 2:].cpu(), want.choice_rows)
    assert handle.dst_buffer_slot_idx.shape == handle.topk_idx.shape
    assert handle.dst_buffer_slot_idx.dtype == torch.int32


def given_rows(call: Call, seed: int = 0) -> list[torch.Tensor]:
    """What every rank hands to combine: BF16 numbers of sizes so different that the order of a sum shows."""
    rows = []
    for rank, want in enumerate(call.exchange.received):
        gen = cases.generator(call.case.seed, rank, 11 + seed)
        count = len(want.expanded) if call.expand else len(want.tokens)
        shape = (count, call.case.hidden)
        sizes = torch.randint(-9, 10, shape, generator=gen).to(torch.float32)
        rows.append((torch.randn(shape, generator=gen) * 2.0**sizes).to(torch.bfloat16))
    return rows


def combine(
    ctx: Any,
    buffer: Any,
    call: Call,
    *,
    biases: int = 0,
    weights: bool = True,
    seed: int = 0,
    unreduced: bool = False,
    **extra: Any,
) -> Any:
    """Combines rows made by ``given_rows`` and checks sums and weights bit for bit."""
    rows = given_rows(call, seed)
    room = call.rows if call.expand else len(call.handle.recv_src_metadata)
    own = torch.full((room, call.case.hidden), float("nan"), dtype=torch.bfloat16)
    if call.expand:
        real = call.want.expanded[:, 0] >= 0
        own[: len(real)][real] = rows[ctx.rank][real]
    else:
        own[: len(rows[ctx.rank])] = rows[ctx.rank]
    gen = cases.generator(call.case.seed, ctx.rank, 98)
    shape = (call.own.x.shape[0], call.case.hidden)
    bias = [(torch.randn(shape, generator=gen) * 100).to(torch.bfloat16) for _ in range(biases)]
    given = [ctx.to_device(one) for one in bias]
    sent_weights = _weights_of(call)
    x, back = ctx.to_device(own), None
    if weights:
        back = torch.full((room, *sent_weights[ctx.rank].shape[1:]), float("nan"), dtype=torch.float32)
        back[: len(sent_weights[ctx.rank])] = sent_weights[ctx.rank]
        back = ctx.to_device(back)
    combined, combined_weights, event = buffer.combine(
        x=x, handle=call.handle, topk_weights=back, bias=(None, *given)[biases] if biases < 2 else tuple(given), **extra
    )
    call.keep = [x, back, given]
    if event.event is not None:
        event.current_stream_wait()
    by_node = buffer.num_scaleout_ranks > 1 and not unreduced
    node = buffer.num_nvlink_ranks if by_node else 0
    want = call.exchange.combine(ctx.rank, rows, bias, call.expand, unreduced, node)
    assert combined.dtype == torch.bfloat16
    checks.same_bits("combined_x", combined.cpu() + 0.0, want + 0.0)
    if weights:
        want_weights = call.exchange.combine_weights(ctx.rank, sent_weights, call.expand)
        checks.same_bits("combined_topk_weights", combined_weights.cpu(), want_weights)
    else:
        assert combined_weights is None
    return combined, combined_weights, event


def _weights_of(call: Call) -> list[torch.Tensor]:
    """What the ranks hand to combine as weights: other numbers than dispatch's, in every column."""
    rows = []
    for rank, want in enumerate(call.exchange.received):
        count = len(want.expanded) if call.expand else len(want.tokens)
        shape = (count,) if call.expand else (count, call.exchange.num_topk)
        rows.append(torch.randn(shape, generator=cases.generator(call.case.seed, rank, 12)))
    return rows


def round_trip(
    ctx: Any,
    buffer: Any,
    case: cases.Case,
    exchange: elastic_reference.Exchange,
    *,
    expand: bool,
    sync: bool,
    **extra: Any,
) -> Call:
    """Dispatch, a cached dispatch of other rows, a repetition, and combines, all checked."""
    columns = case.kind == "fp8" and case.seed % 2 == 0
    call = dispatch(ctx, buffer, exchange, case, expand=expand, sync=sync, columns=columns, **extra)
    check(call)
    check_handle(call)
    slots = call.handle.dst_buffer_slot_idx.clone()
    other = case.but(seed=case.seed + 1).inputs()
    for tokens, rank_tokens in zip(other, exchange.inputs, strict=True):
        tokens.topk_idx = rank_tokens.topk_idx
    cached = again(ctx, buffer, call, other, columns=not columns, do_zero_padding=expand)
    check(cached, padded=expand)
    check_handle(call)
    assert torch.equal(slots, call.handle.dst_buffer_slot_idx)
    unreduced = not buffer.allow_multiple_reduction
    combine(ctx, buffer, call, biases=case.seed % 3, weights=case.seed % 2 == 0, unreduced=unreduced)
    check(call)  # outputs are no views of the buffer
    return call
