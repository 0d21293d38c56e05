"""Ranks of one machine as several nodes: settings that a rank function runs under, and what is checked besides.

Whatever runs on one node runs here too: ``split`` calls any rank function with the node size set, and reference and
checks follow the setting (``cases.node_size``).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cases
import hosts
from cases import Case
from conftest import full, test_device

SHAPES = ("2x2", "2x4", "4x2", "3x2", "4x1") if cases.RANKS > 2 else ("2x1",)  # nodes x ranks of a node
SOFTWARE_RDMA = "DEEPEP_SOFTWARE_RDMA"


def rdma_of(seed: int) -> dict[str, object]:
    """The software RDMA's setting for a seed: every second one delivers as late as it may. GPUs have none."""
    if test_device() != "cpu":
        return {}
    return {SOFTWARE_RDMA: f"{seed}:late" if seed % 2 else seed}


def numbers_of(shape: str) -> tuple[int, int]:
    """Nodes, and ranks of each."""
    nodes, _, peers = shape.partition("x")
    return int(nodes), int(peers)


def ranks_of(shape: str) -> int:
    nodes, peers = numbers_of(shape)
    return nodes * peers


@contextmanager
def environment(**values: object) -> Iterator[None]:
    """Sets variables of this process, and puts back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def split(ctx: Any, peers: int, seed: int | None, function: str, *args: Any) -> Any:
    """Runs ``module:function`` with nodes of ``peers`` ranks and a seed of the software RDMA."""
    module, _, name = function.partition(":")
    with environment(**{cases.NODE_SIZE: peers}, **(rdma_of(seed) if seed is not None else {})):
        if ctx.device.type == "cuda":
            hosts.keep_nvshmem(ctx.rank, ctx.size, peers, group=ctx.group)
        return getattr(importlib.import_module(module), name)(ctx, *args)


def arguments(shape: str, function: Callable[..., Any], seed: int | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What ``RankPool.run`` is given. Skips where ranks would share a GPU, unless DEEPEP_TEST_RANKS has them do so."""
    shares = "DEEPEP_TEST_RANKS" in os.environ
    if test_device() == "cuda" and not shares and ranks_of(shape) > torch.cuda.device_count():
        pytest.skip(f"nodes of {shape} ranks need {ranks_of(shape)} GPUs; there are {torch.cuda.device_count()}")
    return (ranks_of(shape), split, numbers_of(shape)[1], seed, f"{function.__module__}:{function.__qualname__}", *args)


def run(pool: Any, shape: str, function: Callable[..., Any], *args: Any, seed: int | None = None, **keys: Any) -> Any:
    """``pool.run`` of a rank function on the nodes of a shape."""
    return pool.run(*arguments(shape, function, seed, args), **keys)


def outcomes(pool: Any, shape: str, function: Callable[..., Any], *args: Any, **keys: Any) -> Any:
    """``pool.outcomes`` of a rank function on the nodes of a shape."""
    return pool.outcomes(*arguments(shape, function, None, args), **keys)


def unless_full(names: Iterable[str], left_out: Iterable[str]) -> list[str]:
    """The names, in the short version without some: what they check is checked on one node, or by their neighbours."""
    names, left_out = list(names), set(left_out)
    assert left_out <= set(names), f"not among the names: {left_out - set(names)}"
    return names if full() else [name for name in names if name not in left_out]


def case_of(shape: str, **changes: Any) -> Case:
    """A case of a few tokens: one rank without any, different numbers on the others."""
    ranks = ranks_of(shape)
    tokens = tuple(0 if rank == 2 else 11 + 17 * rank % 29 for rank in range(ranks))
    return Case(tokens, **{"hidden": 72, "experts": 4 * ranks, "topk": 4, **changes})


def low_latency_case_of(shape: str, **changes: Any) -> Case:
    """Likewise with few enough tokens for a bound of 16."""
    ranks = ranks_of(shape)
    tokens = tuple(0 if rank == 2 else 16 - 5 * rank % 13 for rank in range(ranks))
    return Case(tokens, **{"hidden": 512, "experts": 2 * ranks, "topk": 3, **changes})
