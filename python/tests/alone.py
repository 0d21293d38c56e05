"""Calls of a group of one rank, each with a check of its result: for tests of what happens around a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXPERTS, TOPK, HIDDEN, BOUND = 4, 2, 256, 64
NORMAL = ("layout", "dispatch", "worst case", "asynchronous", "cached", "combine", "asynchronous combine")
LOW_LATENCY = ("low latency", "halves", "asynchronous low latency", "clean")
KINDS = (*NORMAL, *LOW_LATENCY, "barrier")
ELASTIC = ("expanded", "bound", "resent", "expanded combine")


@contextmanager
def buffer_of(ctx: Any, **options: Any) -> Iterator[Any]:
    """A buffer for both modes, destroyed at the end."""
    from deep_ep import Buffer

    rdma = Buffer.get_low_latency_rdma_size_hint(BOUND, HIDDEN, ctx.size, EXPERTS * ctx.size)
    options = {"low_latency_mode": True, "num_qps_per_rank": EXPERTS, "engine": ctx.engine, **options}
    buffer = Buffer(ctx.group, 1 << 22, rdma, explicitly_destroy=True, **options)
    try:
        yield buffer
    finally:
        buffer.destroy()


@contextmanager
def elastic_of(ctx: Any) -> Iterator[Any]:
    """A buffer of V2, destroyed at the end."""
    from deep_ep import ElasticBuffer

    options = {"num_max_tokens_per_rank": BOUND, "hidden": HIDDEN, "engine": ctx.engine, "explicitly_destroy": True}
    buffer = ElasticBuffer(ctx.group, **options)
    try:
        yield buffer
    finally:
        buffer.destroy()


class ElasticCalls:
    """One call of each of ELASTIC on a buffer of one rank; token t has expert t % EXPERTS and the next one."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        device = buffer._core.device
        self.idx = (torch.arange(BOUND).unsqueeze(1) + torch.arange(TOPK)) % EXPERTS
        self.order = torch.cat([(self.idx == expert).any(1).nonzero().flatten() for expert in range(EXPERTS)])
        self.idx, self.weights = self.idx.to(device), torch.ones(BOUND, TOPK, device=device)
        self.x = (
            (torch.arange(BOUND).reshape(-1, 1) % 61).expand(BOUND, HIDDEN).to(torch.bfloat16).contiguous().to(device)
        )
        self.rows, _, self.row_weights, self.handle, _ = self._dispatch(do_expand=True)

    def _dispatch(self, **options: Any) -> Any:
        return self.buffer.dispatch(self.x, self.idx, self.weights, num_experts=EXPERTS, **options)

    def expanded(self, **options: Any) -> None:
        rows = self._dispatch(do_expand=True, **options)[0]
        assert torch.equal(rows[: len(self.order)], self.x[self.order])

    def bound(self) -> None:
        self.expanded(do_cpu_sync=False)

    def resent(self) -> None:
        rows = self.buffer.dispatch(self.x, handle=self.handle, do_expand=True)[0]
        assert torch.equal(rows, self.x[self.order])

    def expanded_combine(self) -> None:
        sums, weights, _ = self.buffer.combine(self.rows, self.handle, self.row_weights, bias=self.x)
        assert torch.equal(sums, 3 * self.x) and torch.equal(weights, self.weights)

    def of(self, kind: str) -> Callable[[], None]:
        """The call of one of ELASTIC."""
        return getattr(self, kind.replace(" ", "_"))  # type: ignore[no-any-return]


class Calls:
    """One call of each kind on a buffer of one rank; every token comes back TOPK or one times."""

    def __init__(self, buffer: Any, tokens: int = BOUND, seed: int = 0, hidden: int = HIDDEN) -> None:
        self.buffer = buffer
        device = buffer.device
        numbers = torch.arange(tokens * TOPK).reshape(tokens, TOPK)
        self.idx = ((numbers + seed) % EXPERTS).to(torch.int64).to(device)
        self.weights = torch.ones(tokens, TOPK, device=device)
        self.x = (torch.arange(tokens).reshape(-1, 1) % 61 + seed % 61).expand(tokens, hidden)
        self.x = self.x.to(torch.bfloat16).contiguous().to(device)
        self.layout_arguments = self._layout()
        self.dispatched = self._dispatch()

    def _layout(self) -> dict[str, Any]:
        got = self.buffer.get_dispatch_layout(self.idx, EXPERTS)
        names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
        return dict(zip(names, got, strict=False))

    def _dispatch(self, **options: Any) -> Any:
        given = {**self.layout_arguments, "topk_idx": self.idx, "topk_weights": self.weights}
        return self.buffer.dispatch(self.x, **given, **options)

    def layout(self) -> None:
        assert self._layout()["num_tokens_per_rank"].tolist() == [len(self.x)]

    def dispatch(self, **options: Any) -> None:
        rows, _, _, _, _, event = self._dispatch(**options)
        if event.event is not None:
            event.current_stream_wait()
        assert torch.equal(rows[: len(self.x)], self.x)

    def worst_case(self) -> None:
        self.dispatch(num_worst_tokens=2 * len(self.x))

    def asynchronous(self) -> None:
        self.dispatch(async_finish=True)

    def cached(self) -> None:
        assert torch.equal(self.buffer.dispatch(self.x, handle=self.dispatched[4])[0], self.x)

    def combine(self, **options: Any) -> None:
        rows, _, weights, _, handle, _ = self.dispatched
        sums, _, event = self.buffer.combine(rows, handle, topk_weights=weights, bias=self.x, **options)
        if event.event is not None:
            event.current_stream_wait()
        assert torch.equal(sums, 2 * self.x)

    def asynchronous_combine(self) -> None:
        self.combine(async_finish=True)

    def low_latency(self, **options: Any) -> None:
        given = {"use_fp8": False, **options}
        rows, count, handle, event, hook = self.buffer.low_latency_dispatch(self.x, self.idx, BOUND, EXPERTS, **given)
        finish(event, hook)
        assert int(count.sum()) == self.idx.numel()
        sums, event, hook = self.buffer.low_latency_combine(rows, self.idx, self.weights, handle, **options)
        finish(event, hook)
        assert torch.equal(sums, TOPK * self.x)

    def halves(self) -> None:
        self.low_latency(return_recv_hook=True)

    def asynchronous_low_latency(self) -> None:
        self.low_latency(async_finish=True)

    def clean(self) -> None:
        self.buffer.clean_low_latency_buffer(BOUND, HIDDEN, EXPERTS)

    def barrier(self) -> None:
        self.buffer.barrier()

    def of(self, kind: str) -> Callable[[], None]:
        """The call of one of KINDS."""
        return getattr(self, kind.replace(" ", "_"))  # type: ignore[no-any-return]


def finish(event: Any, hook: Any) -> None:
    """Waits for an asynchronous call, or calls the hook."""
    if hook is not None:
        hook()
    elif event.event is not None:
        event.current_stream_wait()
