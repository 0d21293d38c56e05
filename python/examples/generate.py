"""Writes text with the trained model, one byte at a time, through the low-latency mode.

Each rank continues prompts of its own in two micro-batches that take turns: while the rows of one are on the wire,
the other computes. `ExpertParallel.phases` takes a micro-batch through the steps of a layer

    attention, send | receive | experts | send | receive, attention of the next layer, send | …

and `take_turns` has the other one follow a step later.

Every rank makes the same calls in the same order, whatever its tokens are: low-latency calls are collective.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deep_ep.nn import ExpertParallel, take_turns
from model import Shape, Trunk

# Sequences in each of a rank's two micro-batches; also the low-latency mode's tokens per rank.
SEQUENCES = 2
TEMPERATURE = 0.7
PROMPTS = (
    b"def __init__(self, ",
    b"import ",
    b"class ",
    b"    for line in ",
    b"    return ",
    b"    if not ",
    b'    """Return ',
    b"        self.",
)

# A micro-batch's work on one position: yields at the end of each phase, returns logits [SEQUENCES, 256].
Phases = Generator[None, None, Tensor]


@dataclass
class MicroBatch:
    """Sequences that go through the model together, with the keys and values of the positions seen so far."""

    prompts: list[bytes]
    text: Tensor  # [SEQUENCES, context] int64, filled from the left
    keys: list[Tensor] = field(default_factory=list)  # per layer [SEQUENCES, heads, positions, H / heads]
    values: list[Tensor] = field(default_factory=list)

    def decoded(self) -> list[str]:
        """The sequences as text."""
        return [bytes(row.tolist()).decode("utf-8", errors="replace") for row in self.text.cpu()]


class Writer:
    """Continues prompts with the model whose experts are spread over the ranks: `layers` of the trunk's layers."""

    def __init__(
        self, trunk: Trunk, layers: list[ExpertParallel], shape: Shape, seed: int, device: torch.device
    ) -> None:
        self._trunk, self._layers, self._shape, self._device = trunk, layers, shape, device
        self._rank = layers[0].group.rank()
        self._random = torch.Generator().manual_seed(seed * 1_009 + self._rank)

    @torch.no_grad()
    def write(self) -> list[str]:
        """Fills two micro-batches up to the model's context; returns their texts. Collective."""
        pair = [self._micro_batch(first) for first in (0, SEQUENCES)]
        for position in range(self._shape.context - 1):
            logits = take_turns(*[self._phases(batch, position) for batch in pair])
            for batch, scores in zip(pair, logits, strict=True):
                self._append(batch, position + 1, scores)
        return [text for batch in pair for text in batch.decoded()]

    def _micro_batch(self, first: int) -> MicroBatch:
        offset = 2 * SEQUENCES * self._rank + first
        prompts = [PROMPTS[(offset + i) % len(PROMPTS)] for i in range(SEQUENCES)]
        text = torch.zeros(SEQUENCES, self._shape.context, dtype=torch.int64, device=self._device)
        for row, prompt in zip(text, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(list(prompt), dtype=torch.int64)
        return MicroBatch(prompts, text)

    def _append(self, batch: MicroBatch, position: int, logits: Tensor) -> None:
        """Puts a byte drawn from the logits at `position` of each sequence whose prompt has ended by then."""
        chance = (logits / TEMPERATURE).softmax(-1).cpu()
        drawn = torch.multinomial(chance, 1, generator=self._random)
        for row, prompt, byte in zip(batch.text, batch.prompts, drawn.flatten().tolist(), strict=True):
            if position >= len(prompt):
                row[position] = byte

    def _phases(self, batch: MicroBatch, position: int) -> Phases:
        x = self._trunk.embed(batch.text[:, position : position + 1], first=position)
        for index, mixture in enumerate(self._layers):
            x = self._attend(batch, index, x, position)
            rows, experts, weights, _ = self._trunk.layer(index).route(x.flatten(0, 1))
            mixed = yield from mixture.phases(rows, topk_idx=experts, topk_weights=weights)
            x = x + mixed.view_as(x)
        return self._trunk.logits(x[:, 0])

    def _attend(self, batch: MicroBatch, index: int, x: Tensor, position: int) -> Tensor:
        layer = self._trunk.layer(index)
        q, k, v = layer.project(x)
        if position == 0:
            batch.keys.append(k)
            batch.values.append(v)
        else:
            batch.keys[index] = torch.cat([batch.keys[index], k], dim=2)
            batch.values[index] = torch.cat([batch.values[index], v], dim=2)
        return layer.attend(x, q, batch.keys[index], batch.values[index], first=position)
