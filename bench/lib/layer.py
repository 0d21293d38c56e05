"""A small mixture-of-experts layer, forward and backward, over this library and over all_to_all_single.

Both have the same router and experts (deep_ep.nn.GroupedExperts) and compute the same. The rival is what is usually
written by hand: a row for each token and expert, sorted by expert, counts and rows by all_to_all_single.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from deep_ep import nn as ep

from .ranks import Team
from .tables import Table, duration, median, p99

WARMUP = 3


@dataclass(frozen=True)
class Sizes:
    """Of the layer, and of a rank's batch."""

    tokens: int
    hidden: int = 2048
    intermediate: int = 1024
    experts: int = 64
    top_k: int = 8


class AllToAll(nn.Module):
    """Experts over all ranks of a group: called as ExpertParallel is."""

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup, sizes: Sizes) -> None:
        super().__init__()
        self.experts, self.group, self.sizes, self.num_ranks = experts, group, sizes, group.size()

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        sizes, ranks = self.sizes, self.num_ranks
        routing = ep.route(scores, sizes.top_k)
        chosen = routing.topk_idx.flatten()
        order = chosen.sort(stable=True).indices
        token = torch.div(order, sizes.top_k, rounding_mode="floor")
        sent = torch.zeros(sizes.experts, dtype=torch.int64, device=x.device)
        sent = sent.scatter_add(0, chosen, torch.ones_like(chosen))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        local = received.view(ranks, -1)
        to, of = torch.stack([sent.view(ranks, -1).sum(1), local.sum(1)]).tolist()
        rows = all_to_all_single_autograd(x.index_select(0, token), of, to, self.group)
        expert = torch.arange(local.shape[1], device=x.device).repeat(ranks).repeat_interleave(received)
        by_expert = expert.sort(stable=True).indices
        answers = self.experts(rows.index_select(0, by_expert), local.sum(0))
        back = torch.zeros_like(answers).index_copy(0, by_expert, answers)
        returned = all_to_all_single_autograd(back, to, of, self.group).float()
        returned = returned * routing.topk_weights.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, returned).to(x.dtype)


class Layer(nn.Module):
    """A router and the mixture."""

    def __init__(self, router: nn.Module, mixture: nn.Module) -> None:
        super().__init__()
        self.router, self.mixture = router, mixture

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.mixture(x, self.router(x).float())
        return answer


def measure(team: Team, tokens: int, steps: int) -> dict[str, Any]:
    """For each way, eager and compiled: microseconds of each step and memory of the rank that has most."""
    sizes = Sizes(tokens)
    torch.manual_seed(1 + team.rank)
    at = {"device": team.device, "dtype": torch.bfloat16}
    experts = ep.GroupedExperts(sizes.experts // team.size, sizes.hidden, sizes.intermediate, **at)
    torch.manual_seed(0)
    router = nn.Linear(sizes.hidden, sizes.experts, bias=False, **at)
    x = torch.randn(tokens, sizes.hidden, device=team.device).to(torch.bfloat16)
    x += team.rank  # ranks have batches of their own
    x.requires_grad_()
    makers: dict[str, Callable[[], nn.Module]] = {
        "all_to_all_single": lambda: AllToAll(experts, team.rival or team.group, sizes),
        "deep_ep.nn.ExpertParallel": lambda: ep.ExpertParallel(
            experts, team.group, sizes.experts, sizes.top_k, hidden=sizes.hidden
        ),
    }
    found: dict[str, Any] = {"sizes": vars(sizes), "ranks": team.size, "ways": {}}
    wanted: Tensor | None = None
    for name, make in makers.items():
        layer = Layer(router, make())
        for way in ("eager", "compiled"):
            call = layer if way == "eager" else torch.compile(layer)
            with torch._dynamo.config.patch(capture_scalar_outputs=True):  # else each count breaks the graph
                answer = call(x).detach()
                if wanted is None:
                    wanted = answer
                torch.testing.assert_close(answer, wanted, rtol=3e-2, atol=3e-2)
                found["ways"][f"{name}, {way}"] = time_steps(team, call, x, steps)
        del layer, call
        gc.collect()
    return found


def time_steps(team: Team, call: Callable[[Tensor], Tensor], x: Tensor, steps: int) -> dict[str, Any]:
    """Steps of forward and backward. Each begins together on all ranks, and its time is the slowest rank's."""
    own = []
    for step in range(WARMUP + steps):
        if step == WARMUP and team.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for tensor in (x, *call.parameters()):  # type: ignore[attr-defined]
            tensor.grad = None
        team.meet()
        start = time.perf_counter()
        call(x).float().square().mean().backward()
        team.finish()
        own.append((time.perf_counter() - start) * 1e6)
    peak = torch.cuda.max_memory_allocated() if team.device.type == "cuda" else 0
    return {"us": team.slowest(own[WARMUP:]), "peak": max(team.gather(peak))}


def table(found: dict[str, Any]) -> Table:
    """For each way a step's time, tokens a second of all ranks, and memory."""
    sizes, ranks = found["sizes"], found["ranks"]
    shown = Table(
        "A mixture-of-experts layer, forward and backward",
        f"Router, exchange, experts, exchange, in BF16: {ranks} ranks x {sizes['tokens']} tokens x {sizes['hidden']}, "
        f"top-{sizes['top_k']} of {sizes['experts']} experts of {sizes['intermediate']} channels (gated). Host view: a "
        "step of the slowest rank, median and p99. Memory: the most that torch's allocator had in use on a rank; the "
        "buffer's own, which torch does not count, comes on top.",
        ["way", "step", "p99", "tokens/s", "memory"],
    )
    for name, seen in found["ways"].items():
        us = median(seen["us"])
        tokens = sizes["tokens"] * ranks / us * 1e6
        memory = f"{seen['peak'] / 2**20:.0f} MiB" if seen["peak"] else "-"
        shown.rows.append([name, duration(us), duration(p99(seen["us"])), f"{tokens:,.0f}", memory])
    return shown
