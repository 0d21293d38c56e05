#!/usr/bin/env python3
"""Trains a stock model of Hugging Face transformers whose experts are spread over ranks, writes with it, and saves it.

    python python/examples/train_transformers.py

Four processes on the CPU engine share a small Mixtral with random weights. Each trains on sequences of its own, each
continues a prompt of its own, and together they save a checkpoint, which stock transformers then loads: its loss is
compared with that of the spread model. Nothing is downloaded. Needs transformers:
pip install transformers==5.23.0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

TOLERANCE = 1e-5  # of the loss: float32 rows travel bit for bit, and sums have another order
PERIOD = 7  # the sequences count upwards modulo this number


def stock_model() -> Any:
    """A Mixtral of 0.3 million parameters, the same on every rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        bos_token_id=14,
        eos_token_id=15,
        pad_token_id=15,
    )
    return MixtralForCausalLM(config)


def sequences(rank: int, step: int) -> torch.Tensor:
    """A batch of a rank's own: of another number of sequences, and other ones, than those of its peers."""
    random = torch.Generator().manual_seed(1_000 * rank + step)
    first = torch.randint(0, PERIOD, (2 + rank, 1), generator=random)
    return (first + torch.arange(16)) % PERIOD


def megabytes(model: torch.nn.Module) -> float:
    """Of the parameters that this process holds."""
    return sum(each.numel() * each.element_size() for each in model.parameters()) / 1e6


def run_rank(rank: int, ranks: int, steps: int, folder: str) -> None:
    """Trains, writes, saves: every rank makes the same calls in the same order."""
    from deep_ep.integrations.transformers import average_gradients, clip_grad_norm_, expert_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = stock_model()
    whole = megabytes(model)
    model = expert_parallel(model, dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # made of the parameters that the rank has kept
    for step in range(steps):
        ids = sequences(rank, step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3}  loss of rank 0 {loss.item():.4f}", flush=True)
    model.eval()
    prompt = sequences(rank, steps)[:1, :4]
    text = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6 + rank, do_sample=False, synced_gpus=True
    )
    model.save_pretrained(f"{folder}/checkpoint")
    with torch.no_grad():
        ids = sequences(rank, steps + 1)
        found = {"loss": model(input_ids=ids, labels=ids).loss.item(), "text": text[0].tolist(), "MB": megabytes(model)}
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, found)
    if rank == 0:
        check(gathered, whole, steps, f"{folder}/checkpoint")
    dist.barrier()
    dist.destroy_process_group()


def check(found: list[dict[str, Any]], whole: float, steps: int, checkpoint: str) -> None:
    """Loads the checkpoint into stock transformers, and compares each rank's loss."""
    from transformers import AutoModelForCausalLM

    print(f"parameters: {whole:.2f} MB in one process, {found[0]['MB']:.2f} MB on each of {len(found)} ranks")
    stock = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    worst = 0.0
    for rank, one in enumerate(found):
        ids = sequences(rank, steps + 1)
        with torch.no_grad():
            worst = max(worst, abs(stock(input_ids=ids, labels=ids).loss.item() - one["loss"]))
        print(f"rank {rank} wrote {' '.join(map(str, one['text']))}")
    print(f"largest difference of the loss from stock transformers {worst:.1e}, allowed {TOLERANCE:.0e}")
    if not worst <= TOLERANCE:
        sys.exit("the spread model and the checkpoint differ")


def main() -> None:
    """Reads the command line and runs the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4, 8), help="processes")
    parser.add_argument("--steps", type=int, default=41, help="training steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="train_transformers_") as folder:
        Path(folder, "checkpoint").mkdir()
        spawn(run_rank, (options.ranks, options.steps, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
