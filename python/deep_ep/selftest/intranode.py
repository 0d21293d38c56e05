"""Cases of `python -m deep_ep.selftest intranode`: layout, dispatch, cached dispatch and combine."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ..buffer import Buffer
from ..config import Config
from . import check as sc
from .rank import Case, Figures, Rank

KINDS = ("BF16", "FP8")


def cases(options: Any) -> list[Case]:
    """Everything that one run checks, in order."""
    result = [Case("layout", check_layout)]
    for kind, topk, previous, asynchronous in itertools.product(KINDS, (True, False), (False, True), (False, True)):
        words = [kind, "top-k" if topk else "no top-k"]
        words += ["previous event"] * previous + ["asynchronous"] * asynchronous
        result.append(Case("dispatch, combine: " + ", ".join(words), exchange(kind, topk, previous, asynchronous)))
    result.append(Case("dispatch, combine: worst case, no wait for counts", check_worst_case))
    result.append(Case("dispatch, combine: buffer of the smallest size", check_small_buffer))
    if options.pressure_test:
        result.append(Case(f"{options.pressure_test} random rounds, each twice, bit for bit the same", check_pressure))
    result.append(Case("speed", measure))
    return result


def make_buffer(options: Any, config: Config | None = None) -> dict[str, Any]:
    """Arguments of the buffer under test: large enough for the default configs, or for ``config``."""
    ranks, row = options.num_ranks, options.hidden * 2
    configs = (config,) if config else (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
    return {
        "num_nvl_bytes": max(each.get_nvl_buffer_size_hint(row, ranks) for each in configs),
        "num_rdma_bytes": max(each.get_rdma_buffer_size_hint(row, ranks) for each in configs),
    }


class Batch:
    """Inputs of one round on one rank, and the layout that the library gave for them."""

    def __init__(self, rank: Rank, shape: sc.Shape, buffer: Buffer, kind: str = "BF16") -> None:
        values = sc.own_payload(shape, rank.rank, rank.device)
        self.shape, self.rank, self.kind = shape, rank, kind
        self.idx = shape.routing(rank.rank).to(rank.device)
        self.weights = shape.weights(rank.rank).to(rank.device)
        self.x: Any = values.to(torch.bfloat16)
        if kind == "FP8":
            count = max(1, shape.hidden // 128)
            scales = sc.payload(values[:, 0], torch.arange(len(values), dtype=torch.int32, device=rank.device), count)
            columns_first = scales.to(torch.float32).t().contiguous().t()  # the strides that quantisers produce
            self.x = (values.to(torch.uint8).view(torch.float8_e4m3fn), columns_first)
        self.layout = buffer.get_dispatch_layout(self.idx, shape.experts)
        self.source_rank, self.source_token = sc.sources(shape, rank.rank)

    def arguments(self, with_topk: bool = True) -> dict[str, Any]:
        """Keywords of dispatch."""
        per_rank, per_node, per_expert, table, _ = self.layout
        keywords: dict[str, Any] = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_node,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": table,
        }
        if with_topk:
            keywords |= {"topk_idx": self.idx, "topk_weights": self.weights}
        return keywords

    def check_rows(self, received: Any) -> None:
        """Every received row, and its scales."""
        rows, scales = received if isinstance(received, tuple) else (received, None)
        count = len(self.source_token)
        raw = rows[:count].view(torch.uint8) if self.kind == "FP8" else rows[:count]
        sc.expect_rows("recv_x", raw, self.source_rank, self.source_token)
        if scales is not None:
            claimed = (self.source_rank + 1, self.source_token)
            want = sc.payload(claimed[0], claimed[1].to(torch.int32), scales.shape[1])
            sc.expect_equal("scales", scales[:count], want.to(torch.float32).to(scales.device))

    def check_topk(self, idx: Any, weights: Any) -> None:
        """Received indices and weights."""
        shape, rank = self.shape, self.rank.rank
        low = rank * shape.local_experts
        chosen = torch.stack([shape.routing(r) for r in range(shape.ranks)])[self.source_rank, self.source_token]
        given = torch.stack([shape.weights(r) for r in range(shape.ranks)])[self.source_rank, self.source_token]
        local = (chosen >= low) & (chosen < low + shape.local_experts)
        count = len(self.source_token)
        want_idx = torch.where(local, chosen - low, torch.full_like(chosen, -1))
        want_weights = torch.where(local, given, torch.zeros_like(given))
        sc.expect_equal("recv_topk_idx", idx[:count].cpu(), want_idx)
        sc.expect_equal("recv_topk_weights", weights[:count].cpu(), want_weights)

    def check_counts(self, counts: list[int]) -> None:
        """The list of rows for each local expert."""
        want = [len(tokens) for _, tokens in sc.expert_sources(self.shape, self.rank.rank)]
        sc.expect(counts == want, f"num_recv_tokens_per_expert_list: {counts}, expected {want}")

    def check_handle(self, handle: Any, rows: int) -> None:
        """Number of entries, and those that callers read."""
        several = self.shape.nodes > 1
        sc.expect(len(handle) == (10 if several else 6), f"handle has {len(handle)} entries")
        per_rank = torch.bincount(self.source_rank, minlength=self.shape.ranks).cumsum(0).to(torch.int32)
        running = handle[-4] if several else handle[0][:, self.rank.rank]
        sc.expect_equal("handle: received rows by source rank", running.cpu(), per_rank)
        table = handle[0] if several else handle[4]
        sc.expect_equal("handle: is_token_in_rank", table, self.layout[3])
        source = handle[-3]
        sc.expect(source.shape[0] == rows, f"handle: sources of {source.shape[0]} rows, expected {rows}")

    def rows_for_combine(self, total: int) -> Any:
        """What this rank hands to combine: its rows times (1 + rank), rounded to BF16; padded to ``total`` rows."""
        shape, device = self.shape, self.rank.device
        rows = torch.zeros((total, shape.hidden), dtype=torch.bfloat16, device=device)
        source_rank, source_token = self.source_rank.to(device), self.source_token.to(device)
        for part in sc.chunks(len(source_token)):
            values = sc.payload(source_rank[part], source_token[part], shape.hidden)
            rows[part] = (values * (1 + self.rank.rank)).to(torch.bfloat16)
        return rows

    def check_combined(self, combined: Any, weights: Any) -> None:
        """Sums are exact: integers below 2^24, rounded to BF16 once, and once more where a node's sum crosses."""
        shape = self.shape
        values = sc.own_payload(shape, self.rank.rank, self.rank.device).to(torch.float32)
        total = torch.zeros_like(values)
        for node in range(shape.nodes):
            part = torch.zeros_like(values)
            for rank in range(node * shape.node_size, (node + 1) * shape.node_size):
                sent = self.layout[3][:, rank].unsqueeze(1)
                part += (values * (1 + rank)).to(torch.bfloat16).to(torch.float32) * sent
            crosses = node != self.rank.rank // shape.node_size
            total += part.to(torch.bfloat16).to(torch.float32) if crosses else part
        sc.expect_equal("combined_x", combined, total.to(torch.bfloat16))
        if weights is not None:
            named = (self.idx >= 0).to(torch.float32)
            sc.expect_close("combined_topk_weights", weights, self.weights * named, 1e-9)


def check_layout(rank: Rank) -> None:
    """Counts and table of get_dispatch_layout."""
    shape = rank.shape
    with rank.buffer(**make_buffer(rank.options)) as buffer:
        idx = shape.routing(rank.rank)
        per_rank, per_node, per_expert, table, _ = buffer.get_dispatch_layout(idx.to(rank.device), shape.experts)
        owner = torch.where(idx >= 0, idx // shape.local_experts, torch.full_like(idx, -1))
        want = torch.stack([(owner == r).any(dim=1) for r in range(shape.ranks)], dim=1)
        sc.expect_equal("is_token_in_rank", table.cpu(), want)
        sc.expect_equal("num_tokens_per_rank", per_rank.cpu(), want.sum(dim=0, dtype=torch.int32))
        counts = torch.stack([(idx == e).any(dim=1).sum(dtype=torch.int32) for e in range(shape.experts)])
        sc.expect_equal("num_tokens_per_expert", per_expert.cpu(), counts)
        sc.expect((per_node is None) == (shape.nodes == 1), "num_tokens_per_rdma_rank must be None on one node alone")
        if per_node is not None:
            want = sc.nodes_of(shape, rank.rank).sum(dim=0, dtype=torch.int32)
            sc.expect_equal("num_tokens_per_rdma_rank", per_node.cpu(), want)


def exchange(kind: str, with_topk: bool, previous: bool, asynchronous: bool) -> Callable[[Rank], None]:
    """A case: dispatch, cached dispatch and combine in one way of waiting."""

    def run(rank: Rank) -> None:
        with rank.buffer(**make_buffer(rank.options)) as buffer:
            batch = Batch(rank, rank.shape, buffer, kind)

            def order() -> dict[str, Any]:
                return {"async_finish": asynchronous, **({"previous_event": Buffer.capture()} if previous else {})}

            given = batch.arguments(with_topk)
            received, idx, weights, counts, handle, event = buffer.dispatch(batch.x, **given, **order())
            assert counts is not None and handle is not None
            wait(event)
            batch.check_rows(received)
            batch.check_counts(counts)
            batch.check_handle(handle, len(batch.source_token))
            if with_topk:
                batch.check_topk(idx, weights)
            again, *_, event = buffer.dispatch(batch.x, handle=handle, **order())
            wait(event)
            batch.check_rows(again)
            rows = batch.rows_for_combine(len(batch.source_token))
            combined, sums, event = buffer.combine(rows, handle, topk_weights=weights, **order())
            wait(event)
            batch.check_combined(combined, sums)

    return run


def wait(event: Any) -> None:
    """Waits if there is something to wait for."""
    if event.event is not None:
        event.current_stream_wait()


def round_trip(rank: Rank, batch: Batch, buffer: Buffer, worst: int = 0, **keywords: Any) -> list[Any]:
    """Dispatch and combine, checked; returns the outputs."""
    received, idx, weights, _, handle, _ = buffer.dispatch(
        batch.x, **batch.arguments(), num_worst_tokens=worst, **keywords
    )
    assert idx is not None and weights is not None and handle is not None
    batch.check_rows(received)
    batch.check_topk(idx, weights)
    count = len(batch.source_token)
    batch.check_handle(handle, worst or count)
    sc.expect(worst == 0 or bool((idx[count:] == -1).all()), "rows beyond the received ones must have index -1")
    combined, sums, _ = buffer.combine(batch.rows_for_combine(worst or count), handle, topk_weights=weights, **keywords)
    batch.check_combined(combined, sums)
    rows = received[0] if isinstance(received, tuple) else received
    return [rows[:count], idx[:count], weights[:count], combined, sums]


def check_worst_case(rank: Rank) -> None:
    """num_worst_tokens: the host does not wait for counts."""
    with rank.buffer(**make_buffer(rank.options)) as buffer:
        round_trip(rank, Batch(rank, rank.shape, buffer), buffer, worst=rank.shape.tokens * rank.shape.ranks)


def check_small_buffer(rank: Rank) -> None:
    """A buffer for chunks of one token: slow, but right."""
    config = Config(2, 1, 2, 1, 2)
    with rank.buffer(**make_buffer(rank.options, config)) as buffer:
        round_trip(rank, Batch(rank, rank.shape, buffer), buffer, config=config)


def check_pressure(rank: Rank) -> None:
    """Random rounds; a repetition must give the same bits."""
    with rank.buffer(**make_buffer(rank.options)) as buffer:
        for number in range(rank.options.pressure_test):
            shape = dataclasses.replace(rank.shape, seed=rank.shape.seed + 1 + number)
            batch = Batch(rank, shape, buffer)
            first = [sc.digest(part) for part in round_trip(rank, batch, buffer)]
            second = [sc.digest(part) for part in round_trip(rank, batch, buffer)]
            sc.expect(first == second, f"round {number}: a repetition gave other bits")


def measure(rank: Rank) -> Figures:
    """Time of one call on this rank; bytes of payload that it received."""
    figures: Figures = {}
    with rank.buffer(**make_buffer(rank.options)) as buffer:
        for kind in KINDS:
            batch = Batch(rank, rank.shape, buffer, kind)
            fresh = functools.partial(buffer.dispatch, batch.x, **batch.arguments())
            received, _, _, _, handle, _ = fresh()
            assert handle is not None
            rows = received[0] if isinstance(received, tuple) else received
            count = rows.numel() * rows.element_size()
            figures[f"dispatch {kind}"] = rank.time(fresh), count
            cached = functools.partial(buffer.dispatch, batch.x, handle=handle)
            figures[f"cached dispatch {kind}"] = rank.time(cached), count
        assert handle is not None
        rows = batch.rows_for_combine(len(batch.source_token))
        returned = int(batch.layout[0].sum()) * rank.shape.hidden * 2
        figures["combine BF16"] = rank.time(functools.partial(buffer.combine, rows, handle)), returned
    return figures
