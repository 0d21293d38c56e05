"""Cases of `python -m deep_ep.selftest internode`: both modes where ranks are on several nodes.

Normal mode is checked by the cases of intranode, which follow the node size; what only several nodes have is here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ..buffer import Buffer
from . import check as sc
from . import intranode, low_latency
from .rank import Case, Figures, Rank

LOW_LATENCY_TOKENS = 128  # at most: a low-latency buffer has room for this many of every rank
WITHOUT_NVLINK = {"allow_nvlink_for_low_latency_mode": False}


def cases(options: Any) -> list[Case]:
    """Everything that one run checks, in order."""
    *result, speed = intranode.cases(options)
    assert speed.run is intranode.measure
    result.append(Case("internode_dispatch, internode_combine", check_names))
    for form in ("BF16", "FP8"):
        for words, waiting in low_latency.WAITS.items():
            result.append(Case(f"low latency: {form}{words}", exchange(form, waiting, {}, {})))
    result.append(Case("low latency: zero copy", exchange("BF16", {}, {"zero_copy": True}, {})))
    result.append(Case("low latency: LogFMT-10", exchange("BF16", {}, {"use_logfmt": True}, {})))
    result.append(Case("low latency: RDMA inside nodes too", exchange("FP8", {}, {}, WITHOUT_NVLINK)))
    result.append(Case("normal and low-latency mode in turn on one buffer", check_both_modes))
    return [*result, Case("speed", measure)]


def low_latency_shape(rank: Rank) -> sc.Shape:
    """The shape of low-latency rounds: fewer tokens."""
    return dataclasses.replace(rank.shape, tokens=min(rank.shape.tokens, LOW_LATENCY_TOKENS))


def low_latency_buffer(rank: Rank, shape: sc.Shape) -> dict[str, Any]:
    """Arguments of a buffer for low-latency rounds."""
    size = Buffer.get_low_latency_rdma_size_hint(shape.tokens, shape.hidden, shape.ranks, shape.experts)
    arguments = {"num_rdma_bytes": size, "low_latency_mode": True, "num_qps_per_rank": max(1, shape.local_experts)}
    return {"allow_nvlink_for_low_latency_mode": not rank.options.disable_nvlink, **arguments}


def exchange(
    form: str, waiting: dict[str, Any], combining: dict[str, Any], links: dict[str, Any]
) -> Callable[[Rank], None]:
    """A case: two rounds of low-latency dispatch and combine."""

    def run(rank: Rank) -> None:
        shape = low_latency_shape(rank)
        with rank.buffer(**low_latency_buffer(rank, shape) | links) as buffer:
            for turn in range(2):
                again = dataclasses.replace(shape, seed=shape.seed + turn)
                batch = low_latency.Batch(rank, again, small=combining.get("use_logfmt", False))
                _, handle = batch.dispatch(buffer, low_latency.FORMATS[form], waiting)
                batch.combine(buffer, handle, waiting, combining)

    return run


def check_names(rank: Rank) -> None:
    """The calls by their internode names, fresh and cached."""
    ranks = rank.shape.ranks
    with rank.buffer(**intranode.make_buffer(rank.options)) as buffer:
        batch = intranode.Batch(rank, rank.shape, buffer)
        config = Buffer.get_dispatch_config(ranks)
        received, idx, weights, _, handle, _ = buffer.internode_dispatch(batch.x, **batch.arguments(), config=config)
        assert handle is not None
        batch.check_rows(received)
        batch.check_topk(idx, weights)
        again, *_ = buffer.internode_dispatch(batch.x, handle, config=config)
        batch.check_rows(again)
        rows = batch.rows_for_combine(len(batch.source_token))
        combined, sums, _ = buffer.internode_combine(rows, handle, weights, config=Buffer.get_combine_config(ranks))
        batch.check_combined(combined, sums)


def check_both_modes(rank: Rank) -> None:
    """Normal rounds and low-latency rounds, the buffer cleaned in between."""
    shape = low_latency_shape(rank)
    both, normal = low_latency_buffer(rank, shape), intranode.make_buffer(rank.options)
    both |= {name: max(size, both.get(name, 0)) for name, size in normal.items()}
    with rank.buffer(**both) as buffer:
        for turn in range(2):
            batch = intranode.Batch(rank, dataclasses.replace(rank.shape, seed=rank.shape.seed + turn), buffer)
            intranode.round_trip(rank, batch, buffer)
            buffer.clean_low_latency_buffer(shape.tokens, shape.hidden, shape.experts)
            again = low_latency.Batch(rank, dataclasses.replace(shape, seed=shape.seed + turn))
            _, handle = again.dispatch(buffer, low_latency.FORMATS["FP8"], {})
            again.combine(buffer, handle, {}, {})


def measure(rank: Rank) -> Figures:
    """intranode's figures, what of them RDMA brought to this rank, and low-latency calls."""
    figures = intranode.measure(rank)
    arriving, returning = sc.crossings(rank.shape, rank.rank)
    hidden = rank.shape.hidden
    for name, count in {
        "dispatch BF16": arriving * 2 * hidden,
        "dispatch FP8": arriving * hidden,
        "combine BF16": returning * 2 * hidden,
    }.items():
        figures[f"{name}: by RDMA"] = figures[name][0], count
    return figures | measure_low_latency(rank)


def measure_low_latency(rank: Rank) -> Figures:
    """Time of low-latency calls; bytes of rows received and given back."""
    shape = low_latency_shape(rank)
    with rank.buffer(**low_latency_buffer(rank, shape)) as buffer:
        batch = low_latency.Batch(rank, shape)
        count = sum(len(tokens) for _, tokens in batch.sources)
        dispatch = functools.partial(
            buffer.low_latency_dispatch, batch.x, batch.idx, shape.tokens, shape.experts, use_fp8=True
        )
        received, _, handle, _, _ = buffer.low_latency_dispatch(
            batch.x, batch.idx, shape.tokens, shape.experts, use_fp8=False
        )
        assert not isinstance(received, tuple)
        rows = received.clone()
        combine = functools.partial(buffer.low_latency_combine, rows, batch.idx, batch.weights, handle)
        name = f"low latency, {shape.tokens} tokens"
        return {
            f"{name}: dispatch FP8": (rank.time(dispatch), count * (shape.hidden + shape.hidden // 128 * 4)),
            f"{name}: combine BF16": (rank.time(combine), int((batch.idx >= 0).sum()) * shape.hidden * 2),
        }
