"""Training text that every machine has: the sources of Python's standard library.

A corpus is one flat tensor of bytes. Batches are a pure function of (seed, step, shard), so that any process
can make the batch of any shard: the single-process proof relies on that.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Enough for some thousand distinct windows, small enough to be read in a few milliseconds.
CORPUS_BYTES = 1 << 20
# Below this the library is stripped or packed (zipped or frozen): too little text to learn from.
LEAST_BYTES = 100_000


@dataclass(frozen=True)
class Batch:
    """Windows of text of one shard: `inputs[b, t]` predicts `targets[b, t]` (both int64, values 0 to 255)."""

    inputs: Tensor
    targets: Tensor


def load_corpus(max_bytes: int = CORPUS_BYTES) -> Tensor:
    """Joins the standard library's top-level modules in name order, cut at `max_bytes`.

    Returns:
        uint8 tensor of at most `max_bytes` elements.

    Raises:
        RuntimeError: fewer than LEAST_BYTES were found.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py"), key=lambda p: p.name):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= max_bytes:
            break
    if size < LEAST_BYTES:
        raise RuntimeError(
            f"{folder} holds {size} bytes of Python sources, at least {LEAST_BYTES} are needed: "
            "is this a Python with a zipped or stripped standard library?"
        )
    text = bytearray(b"".join(parts)[:max_bytes])
    return torch.frombuffer(text, dtype=torch.uint8)


def make_batch(corpus: Tensor, seed: int, step: int, shard: int, windows: int, context: int) -> Batch:
    """Draws the windows that shard `shard` sees in step `step`; the same arguments give the same batch anywhere."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(((seed * 1_000_003 + step) * 1_009 + shard) & 0x7FFF_FFFF_FFFF_FFFF)
    starts = torch.randint(0, corpus.numel() - context - 1, (windows, 1), generator=generator)
    text = corpus[starts + torch.arange(context + 1)].to(torch.int64)
    return Batch(inputs=text[:, :-1].contiguous(), targets=text[:, 1:].contiguous())
