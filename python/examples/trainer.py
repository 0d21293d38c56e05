"""The training step, the same code for the distributed and for the single-process run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import Batch, make_batch
from mixture import Mixture
from model import Shape, Trunk, forward

LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
# Weight of the loss that evens the experts' load: small beside the cross entropy (1.5 to 5.5), as is usual.
BALANCE_WEIGHT = 0.01
# Experts grow with the ranks, so that any number of ranks divides them.
EXPERTS_PER_RANK = 4
# 4 windows × 128 bytes = 512 tokens a rank and step.
WINDOWS_PER_RANK = 4


@dataclass(frozen=True)
class Plan:
    """What both runs must agree on."""

    ranks: int
    steps: int  # of the whole training: the learning rate's schedule spans them
    seed: int

    @property
    def shape(self) -> Shape:
        return Shape(num_experts=EXPERTS_PER_RANK * self.ranks)

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.ranks * WINDOWS_PER_RANK * self.shape.context


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


class Trainer:
    """Trains the shards `shards` of the plan, and the experts `groups` of the same ranks, in this process."""

    def __init__(
        self,
        plan: Plan,
        shards: list[int],
        groups: list[nn.ModuleList],
        mixture: Mixture,
        corpus: Tensor,
        device: torch.device,
    ) -> None:
        self.plan, self.shards, self.groups, self.mixture, self.device = plan, shards, groups, mixture, device
        self._corpus = corpus
        trunk = Trunk(plan.shape, plan.seed).to(device)
        self.trunks = [trunk] + [_alias(trunk) for _ in shards[1:]]
        owned = list(trunk.parameters()) + [p for group in self.groups for p in group.parameters()]
        self._optimizer = torch.optim.AdamW(owned, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, step: int) -> float:
        """One step over all shards of the plan; returns its cross entropy in nats a byte, equal on all ranks."""
        batches = [self._batch(step, shard) for shard in self.shards]
        logits, balance = forward(self.trunks, self.mixture, [b.inputs for b in batches])
        losses = [
            F.cross_entropy(z.flatten(0, 1), b.targets.flatten(), reduction="sum") / self.plan.tokens_per_step
            for z, b in zip(logits, batches, strict=True)
        ]
        self._clear_gradients()
        total = torch.stack(losses).sum() + BALANCE_WEIGHT / self.plan.ranks * torch.stack(balance).sum()
        total.backward()  # type: ignore[no-untyped-call]
        self._reduce_trunk_gradients()
        for options in self._optimizer.param_groups:
            options["lr"] = learning_rate(step, self.plan.steps)
        self._optimizer.step()
        return sum(float(part) for part in self.mixture.gather([loss.detach() for loss in losses]))

    def _batch(self, step: int, shard: int) -> Batch:
        batch = make_batch(self._corpus, self.plan.seed, step, shard, WINDOWS_PER_RANK, self.plan.shape.context)
        return Batch(batch.inputs.to(self.device), batch.targets.to(self.device))

    def _clear_gradients(self) -> None:
        for module in [*self.trunks, *self.groups]:
            module.zero_grad(set_to_none=True)

    def _reduce_trunk_gradients(self) -> None:
        """Sums the trunk's gradients over all shards, in rank order.

        An all-reduce may add in any order, which moves the last bit and, after some steps, the loss. Gathering
        and adding one by one costs R times the traffic for these 0.2 million parameters and is exact.
        """
        parts = self.mixture.gather([_flat_gradient(trunk) for trunk in self.trunks])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        offset = 0
        for parameter in self.trunks[0].parameters():
            parameter.grad = total[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()


def _alias(trunk: Trunk) -> Trunk:
    """A trunk on the same parameter memory with gradients of its own: what another rank's copy would be."""
    other = copy.deepcopy(trunk)
    for mine, theirs in zip(other.parameters(), trunk.parameters(), strict=True):
        mine.data = theirs.data
    return other


def _flat_gradient(trunk: Trunk) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trunk.parameters()])


def train(
    trainer: Trainer, steps: int, before: Callable[[int], None], after: Callable[[int, float], None]
) -> list[float]:
    """Runs steps 0 to `steps` - 1 and returns their losses; `before(step)` and `after(step, loss)` look on."""
    losses = []
    for step in range(steps):
        before(step)
        losses.append(trainer.step(step))
        after(step, losses[-1])
    return losses
