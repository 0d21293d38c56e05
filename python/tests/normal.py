"""Normal mode as a rank of the pool runs it: make a buffer, dispatch a case, check everything that came back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import cases
import checks
import reference

RDMA_BYTES = 1 << 24  # of a buffer of several nodes, where a test gives no number


@contextmanager
def buffer_of(ctx: Any, num_nvl_bytes: int = 1 << 24, num_rdma_bytes: int = 0, **options: Any) -> Iterator[Any]:
    """A buffer of the rank's group that is destroyed at the end, also after an error."""
    from deep_ep import Buffer

    options.setdefault("engine", ctx.engine)
    if not num_rdma_bytes and ctx.size > options.get("num_nvl_peers", cases.node_size()):
        num_rdma_bytes = RDMA_BYTES
    buffer = Buffer(ctx.group, num_nvl_bytes, num_rdma_bytes, explicitly_destroy=True, **options)
    try:
        yield buffer
    finally:
        buffer.destroy()


@dataclass
class Exchange:
    """A dispatched case on one rank: what went in, what must come out, what came out."""

    case: cases.Case
    inputs: list[reference.Tokens]
    layouts: list[reference.Layout]
    received: list[reference.Received]  # of every rank
    rank: int
    recv_x: Any = None
    recv_topk_idx: torch.Tensor | None = None
    recv_topk_weights: torch.Tensor | None = None
    counts: Any = None
    handle: Any = None
    event: Any = None

    @property
    def own(self) -> reference.Tokens:
        return self.inputs[self.rank]

    @property
    def want(self) -> reference.Received:
        return self.received[self.rank]

    @property
    def num_nodes(self) -> int:
        return max(1, self.case.ranks // cases.node_size())

    def sums(self, rows: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
        """What combine must give on this rank, float64."""
        num_tokens = self.case.tokens[self.rank]
        return reference.combine(rows, self.received, self.rank, num_tokens, biases, cases.node_size())


def expect(case: cases.Case, rank: int, lost: frozenset[int] = frozenset(), masked: bool = True) -> Exchange:
    """Everything that is known before the library is called.

    lost: ranks that take no part; masked: the layout knows them already.
    """
    inputs, layouts = case.inputs(), case.layouts()
    if lost:
        layouts, asked = [reference.without(one, r, lost) for r, one in enumerate(layouts)], layouts
        received = [reference.dispatch(inputs, layouts, r, case.experts) for r in range(case.ranks)]
        return Exchange(case, inputs, layouts if masked else asked, received, rank)
    received = [reference.dispatch(inputs, layouts, r, case.experts) for r in range(case.ranks)]
    return Exchange(case, inputs, layouts, received, rank)


def x_of(ctx: Any, tokens: reference.Tokens) -> Any:
    """The first argument of dispatch: a tensor, or a pair with scales."""
    if tokens.scales is None:
        return ctx.to_device(tokens.x)
    return ctx.to_device(tokens.x), ctx.to_device(tokens.scales)


def layout_arguments(ctx: Any, buffer: Any, exchange: Exchange) -> dict[str, Any]:
    """Asks for the layout, checks it, returns it as keyword arguments of dispatch."""
    idx = ctx.to_device(cases.routing(exchange.case, exchange.rank))
    got = buffer.get_dispatch_layout(idx, exchange.case.experts)
    checks.same_layout(got, exchange.layouts[exchange.rank])
    return {
        "num_tokens_per_rank": got[0],
        "num_tokens_per_rdma_rank": got[1],
        "num_tokens_per_expert": got[2],
        "is_token_in_rank": got[3],
    }


def dispatch(
    ctx: Any, buffer: Any, case: cases.Case, lost: frozenset[int] = frozenset(), masked: bool = True, **extra: Any
) -> Exchange:
    """Dispatches the case; nothing of the result is checked yet. lost, masked: as in ``expect``."""
    exchange = expect(case, ctx.rank, lost, masked)
    own = exchange.own
    (
        exchange.recv_x,
        exchange.recv_topk_idx,
        exchange.recv_topk_weights,
        exchange.counts,
        exchange.handle,
        exchange.event,
    ) = buffer.dispatch(
        x_of(ctx, own),
        **layout_arguments(ctx, buffer, exchange),
        topk_idx=ctx.to_device(own.topk_idx),
        topk_weights=ctx.to_device(own.topk_weights),
        expert_alignment=case.alignment,
        num_worst_tokens=case.worst_tokens,
        **extra,
    )
    return exchange


def check(exchange: Exchange) -> None:
    """Everything that dispatch returned, the handle's readable entries included."""
    case, want = exchange.case, exchange.want
    checks.same_received(exchange.recv_x, exchange.recv_topk_idx, exchange.recv_topk_weights, want, case.worst_tokens)
    counts = [] if case.worst else reference.align(want.expert_counts, case.alignment)
    checks.same_ints("num_recv_tokens_per_expert_list", exchange.counts, counts)
    check_handle(exchange)


def check_handle(exchange: Exchange) -> None:
    """The entries of a handle that callers read: six on one node, ten on several."""
    handle, case, want = exchange.handle, exchange.case, exchange.want
    entries = 6 if exchange.num_nodes == 1 else 10
    assert type(handle) is tuple and len(handle) == entries, f"handle is {type(handle)} of {len(handle)}"
    assert all(isinstance(entry, torch.Tensor) for entry in handle), f"handle: {handle}"
    if entries == 6:
        prefix, channels, recv_channels, src_idx, in_rank, send_head = handle
        assert prefix.dtype == torch.int32 and tuple(prefix.shape) == (case.ranks, case.ranks)
        checks.same_bits("rank_prefix_matrix", prefix[:, exchange.rank], want.rank_prefix)
        for name, matrix in (("channel_prefix_matrix", channels), ("recv_channel_prefix_matrix", recv_channels)):
            assert matrix.dtype == torch.int32, f"{name}: {matrix}"
    else:
        in_rank, src_idx, send_head = handle[0], handle[-3], handle[-2]
        checks.same_bits("handle[-4], rows of ranks 0..i", handle[-4], want.rank_prefix)
    rows = case.worst_tokens or len(want.src_idx)
    assert src_idx.shape == (rows,), f"recv_src_idx has shape {tuple(src_idx.shape)}, expected ({rows},)"
    checks.same_bits("recv_src_idx", src_idx[: len(want.src_idx)], want.src_idx)
    checks.same_bits("is_token_in_rank", in_rank, exchange.layouts[exchange.rank].is_token_in_rank)
    assert send_head.dtype == torch.int32
    assert tuple(send_head.shape) == (case.tokens[exchange.rank], case.ranks)


def dispatch_and_check(ctx: Any, buffer: Any, case: cases.Case, **extra: Any) -> Exchange:
    exchange = dispatch(ctx, buffer, case, **extra)
    if extra.get("async_finish"):
        exchange.event.current_stream_wait()
    check(exchange)
    return exchange


def expert_rows(exchange: Exchange, exact: bool, seed: int = 0) -> list[torch.Tensor]:
    """What every rank hands to combine: [N_j,H] BF16, normal numbers, or integers whose sums are exact in FP32."""
    rows = []
    for rank, want in enumerate(exchange.received):
        gen = cases.generator(exchange.case.seed, rank, 3 + seed)
        shape = (len(want.src_idx), want.x.shape[1])
        rows.append(values_of(shape, gen, exact))
    return rows


def values_of(shape: tuple[int, ...], gen: torch.Generator, exact: bool) -> torch.Tensor:
    """BF16 values. Integers up to 2000: no sum of some dozens is rounded in FP32, most are when they become BF16."""
    if exact:
        return torch.randint(-2000, 2001, shape, generator=gen).to(torch.bfloat16)
    return torch.randn(shape, generator=gen).to(torch.bfloat16)


def biases_of(exchange: Exchange, count: int, exact: bool) -> list[torch.Tensor]:
    """``count`` tensors [T,H] BF16 for this rank."""
    gen = cases.generator(exchange.case.seed, exchange.rank, 99)
    shape = (exchange.case.tokens[exchange.rank], exchange.own.x.shape[1])
    return [values_of(shape, gen, exact) for _ in range(count)]


def pad_rows(exchange: Exchange, rows: torch.Tensor, fill: float = float("nan")) -> torch.Tensor:
    """Rows up to ``num_worst_tokens``: those past N must never be read, so they are NaN."""
    missing = exchange.case.worst_tokens - len(rows)
    if missing <= 0:
        return rows
    return torch.cat([rows, torch.full((missing, rows.shape[1]), fill, dtype=rows.dtype)])


def combine(
    ctx: Any,
    buffer: Any,
    exchange: Exchange,
    *,
    exact: bool = True,
    bias: int = 0,
    with_weights: bool = False,
    seed: int = 0,
    handle: Any = None,
    **extra: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """Combines rows made by ``expert_rows`` and checks sums and weights."""
    rows = expert_rows(exchange, exact, seed)
    biases = biases_of(exchange, bias, exact)
    given = [ctx.to_device(b) for b in biases]
    weights = exchange.recv_topk_weights if with_weights else None
    combined, combined_weights, event = buffer.combine(
        ctx.to_device(pad_rows(exchange, rows[ctx.rank])),
        handle if handle is not None else exchange.handle,
        topk_weights=weights,
        bias=(None, *given)[bias] if bias < 2 else tuple(given),
        **extra,
    )
    if extra.get("async_finish"):
        event.current_stream_wait()
    check_combined(exchange, rows, biases, combined, exact)
    check_weights(exchange, combined_weights, with_weights)
    return combined, combined_weights, event


def check_combined(
    exchange: Exchange, rows: list[torch.Tensor], biases: list[torch.Tensor], got: torch.Tensor, exact: bool
) -> None:
    """The sums: bit for bit where integers make FP32 exact, else within the roundings, and calc_diff < 5e-6."""
    want = exchange.sums(rows, biases)
    assert got.dtype == torch.bfloat16
    if exact:
        checks.same_bits("combined_x", got + 0.0, want.to(torch.bfloat16) + 0.0)
        return
    magnitude = exchange.sums([r.abs() for r in rows], [b.abs() for b in biases])
    checks.close_sums("combined_x", got, want, magnitude, node_roundings(exchange, rows))
    plain = reference.combine(rows, exchange.received, exchange.rank, len(want), biases, peers=len(rows))
    checks.small_diff("combined_x", got, plain, 5e-6)


def node_roundings(exchange: Exchange, rows: list[torch.Tensor]) -> torch.Tensor | float:
    """One BF16 step of each remote node: a sum in FP32 may be rounded to the other side than ours in float64."""
    if exchange.num_nodes == 1:
        return 0.0
    peers, num_tokens = cases.node_size(), exchange.case.tokens[exchange.rank]
    parts = reference.combine_in_nodes(rows, exchange.received, exchange.rank, num_tokens, peers)
    del parts[exchange.rank // peers]
    return sum(part.abs() for part in parts) * 2.0**-7


def check_weights(exchange: Exchange, got: torch.Tensor | None, given: bool) -> None:
    if not given:
        assert got is None, f"combined_topk_weights {got}, expected None"
        return
    all_weights = [want.topk_weights for want in exchange.received]
    want = exchange.sums(all_weights, [])
    assert got.dtype == torch.float32
    checks.small_diff("combined_topk_weights", got, want, 1e-9)
    checks.same_bits("combined_topk_weights", got, want.to(torch.float32))  # no sum here has two non-zero terms
