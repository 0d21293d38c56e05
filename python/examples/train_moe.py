"""Trains a small mixture-of-experts language model over several ranks, and proves that the result is right.

One process a rank. Each holds a copy of the trunk, its share of the experts, and its share of the tokens. Token rows
reach their experts through `deep_ep.nn.ExpertParallel`: forward by dispatch and combine, backward by combine and cached
dispatch. The trained model then writes a few lines through the low-latency mode. Last, the same model is trained again
in a single process that does not use `deep_ep` at all: the losses must be the same.

    python python/examples/train_moe.py                        # 4 ranks, on this machine's CPU
    python python/examples/train_moe.py --engine cuda          # rank r on GPU r % number of GPUs
    python python/examples/train_moe.py --corrupt-row 5        # damage one received row: the proof must fail

Needs matplotlib, plotext and rich, which `make run` installs; elsewhere pip install '.[examples]' in a checkout.

Exit status: 0 if the proof holds, 1 if not (or if the run failed), 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import deep_ep
import report
from data import load_corpus
from generate import SEQUENCES, Writer
from mixture import LocalMixture, SpreadMixture
from model import expert_group
from trainer import Plan, Trainer, train

# The proof, fixed before any run. Both runs compute every piece with the same shapes, in the same order, on one
# thread, and round to BF16 in the same places; the only sums that may be taken in another order are those of at most
# R BF16 values in FP32, which are exact unless their exponents lie 2^14 apart. So the expected difference is 0.
# Allowed are four units in the last place of a loss near ln 256 = 5.5 (2^-21 each). That is narrow on purpose: one
# row with its sign flipped was seen to move the loss of its step by 4e-5 to 3e-4, and one BF16 element that is off
# by its last bit by 3e-7 at once, but by 3e-6 two steps later and 6e-4 after sixteen.
PROOF_STEPS = 40
PROOF_TOLERANCE = 2e-6
# For the first message among the processes: a slow machine takes seconds to import torch in all of them.
START_TIMEOUT = timedelta(minutes=5)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; exits with status 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(
        description="Train a mixture-of-experts model through deep_ep and prove the result against one process.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes, each with 4 experts and 512 tokens a step")
    parser.add_argument("--steps", type=int, default=120, help="training steps")
    parser.add_argument("--engine", choices=("auto", "cpu", "cuda"), default="auto", help="which kernels to use")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the tensors are; chooses the engine too, as an engine chooses the device",
    )
    parser.add_argument("--seed", type=int, default=1, help="of parameters, batches and the sample")
    parser.add_argument("--out", type=Path, default=Path("build/train_moe"), help="folder for loss.png and run.json")
    parser.add_argument(
        "--corrupt-row",
        type=int,
        metavar="STEP",
        help="flip the sign of one row that rank 0 receives in this step (from 1)",
    )
    options = parser.parse_args(arguments)
    for name in ("ranks", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; it must not be negative")
    proved = min(options.steps, PROOF_STEPS)
    if options.corrupt_row is not None and not 1 <= options.corrupt_row <= proved:
        parser.error(f"--corrupt-row is {options.corrupt_row}; the proof covers steps 1 to {proved}")
    check_engine(parser, options)
    return options


def check_engine(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Checks that --engine and --device agree and that the GPU is there; --device alone decides the engine."""
    if options.engine == "auto":
        options.engine = options.device
    if options.device not in ("auto", options.engine):
        parser.error(f"--engine {options.engine} does not take tensors on --device {options.device}")
    if options.engine == "cuda" and not torch.cuda.is_available():
        parser.error("the cuda engine needs a GPU that torch can use; torch.cuda.is_available() is False here")


def prepare_torch(engine: str, rank: int) -> None:
    """One thread and deterministic kernels, in both runs: the proof compares last bits. Rank r takes GPU r % n.

    With deterministic algorithms torch also fills new tensors with NaN: a row that was never delivered would show.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it with deterministic algorithms
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if engine != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def make_buffer(group: dist.ProcessGroup, plan: Plan, engine: str) -> deep_ep.Buffer:
    """One buffer for training (normal mode) and for writing (low-latency mode)."""
    hidden, ranks, experts = plan.shape.hidden, plan.ranks, plan.shape.num_experts
    row_bytes = hidden * 2  # BF16
    configs = (deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks))
    return deep_ep.Buffer(
        group,
        num_nvl_bytes=max(c.get_nvl_buffer_size_hint(row_bytes, ranks) for c in configs),
        num_rdma_bytes=max(
            deep_ep.Buffer.get_low_latency_rdma_size_hint(SEQUENCES, hidden, ranks, experts),
            *[c.get_rdma_buffer_size_hint(row_bytes, ranks) for c in configs],
        ),
        low_latency_mode=True,
        explicitly_destroy=True,
        engine=None if engine == "auto" else engine,
        preinitialize=True,
        num_tokens=plan.tokens_per_step // ranks,
        hidden=hidden,
        num_topk=plan.shape.top_k,
        num_experts=experts,
    )


def headline(plan: Plan, engine: str) -> str:
    """What is about to run."""
    return (
        f"deep_ep {deep_ep.__version__}, {engine} engine: {plan.ranks} ranks, {plan.shape.num_experts} experts, "
        f"top {plan.shape.top_k}, {plan.tokens_per_step:,} tokens a step"
    )


def run_rank(rank: int, options: argparse.Namespace, rendezvous: str, result: str) -> None:
    """One rank's process: trains, writes, and (rank 0) leaves what it saw in the file `result`."""
    plan = Plan(options.ranks, options.steps, options.seed)
    prepare_torch(options.engine, rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, whatever its name resolves to
    dist.init_process_group("gloo", f"file://{rendezvous}", START_TIMEOUT, plan.ranks, rank)
    group = dist.group.WORLD
    assert group is not None
    buffer = make_buffer(group, plan, options.engine)
    buffer.warmup()
    warm_calls = {name: found["calls"] for name, found in buffer.stats().items()}
    device = torch.device("cpu") if buffer.engine == "cpu" else torch.device("cuda", torch.cuda.current_device())
    experts = expert_group(plan.shape, plan.seed, rank, plan.ranks).to(device)
    mixture = SpreadMixture(group, buffer, experts, plan.shape.num_experts, plan.shape.top_k, SEQUENCES)
    trainer = Trainer(plan, [rank], [experts], mixture, load_corpus(), device)
    progress: report.Training | None = None
    if rank == 0:
        print(headline(plan, buffer.engine), flush=True)
        progress = report.Training(f"{plan.ranks} ranks", plan.steps, plan.tokens_per_step)

    def before(step: int) -> None:
        if rank == 0 and options.corrupt_row == step + 1:
            mixture.corrupt_next_dispatch()

    def after(step: int, loss: float) -> None:
        if progress:
            progress.update(step + 1, loss)

    with progress or contextlib.nullcontext():
        losses = train(trainer, plan.steps, before, after)
    buffer.clean_low_latency_buffer(SEQUENCES, plan.shape.hidden, plan.shape.num_experts)
    started = time.monotonic()
    texts = Writer(trainer.trunks[0], mixture.layers, plan.shape, plan.seed, device).write()
    seconds = time.monotonic() - started
    gathered: list[Any] = [None] * plan.ranks
    dist.all_gather_object(gathered, {"stats": buffer.stats(), "warm_calls": warm_calls, "texts": texts})
    if rank == 0:
        found = {"engine": buffer.engine, "losses": losses, "writing_seconds": seconds, "ranks": gathered}
        Path(result).write_text(json.dumps(found))
    buffer.destroy()
    dist.destroy_process_group()


def run_distributed(options: argparse.Namespace) -> dict[str, Any]:
    """Trains over `--ranks` processes and returns what rank 0 saw."""
    with tempfile.TemporaryDirectory(prefix="train_moe_") as folder:
        result = Path(folder, "result.json")
        arguments = options, str(Path(folder, "rendezvous")), str(result)
        mp.set_forkserver_preload(["deep_ep.nn"])  # torch is imported once, not once for each rank
        mp.start_processes(run_rank, arguments, nprocs=options.ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def run_single(options: argparse.Namespace, engine: str) -> list[float]:
    """The losses of the same training in this process, on the same kind of device, without deep_ep."""
    plan = Plan(options.ranks, options.steps, options.seed)
    prepare_torch(engine, 0)
    steps = min(plan.steps, PROOF_STEPS)
    shards = list(range(plan.ranks))
    groups = [expert_group(plan.shape, plan.seed, shard, plan.ranks).to(engine) for shard in shards]
    mixture = LocalMixture(groups, plan.shape.num_experts)
    trainer = Trainer(plan, shards, groups, mixture, load_corpus(), torch.device(engine))
    with report.Training("one process", steps, plan.tokens_per_step) as progress:
        return train(trainer, steps, lambda step: None, lambda step, loss: progress.update(step + 1, loss))


def show_run(options: argparse.Namespace, run: dict[str, Any]) -> None:
    """Prints the curve, the table, and what the model wrote."""
    ranks, losses = run["ranks"], run["losses"]
    print(f"\nLoss in nats a byte ({losses[0]:.3f} at first, {losses[-1]:.3f} at last; guessing is 5.545)\n")
    print(report.curve(losses))
    print("\nWhat was communicated: calls and bytes sent by rank 0, times of the slowest rank\n")
    report.show_communication([rank["stats"] for rank in ranks])
    written = sum(len(text) for rank in ranks for text in rank["texts"])
    rate = written / run["writing_seconds"]
    print(f"\nWritten through the low-latency mode, two micro-batches in turn ({rate:,.0f} bytes/s):\n")
    for rank in ranks[:2]:
        for line in report.visible(rank["texts"][0]).splitlines():
            print(f"  {report.glyph('│', '|')} {line}")
        print()


def prove(options: argparse.Namespace, losses: list[float], proof: list[float]) -> bool:
    """Prints the proof's verdict; True if it holds."""
    worst, step = report.largest_difference(losses, proof)
    holds = worst <= PROOF_TOLERANCE
    print(
        f"\nProof: {options.ranks} ranks against one process, {len(proof)} steps: largest difference of the loss "
        f"{worst:.2e} at step {step} (allowed {PROOF_TOLERANCE:.0e}): {'holds' if holds else 'FAILS'}"
    )
    return holds


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns the exit status."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(options.ranks, options.steps, options.seed)
    try:
        run = run_distributed(options)
    except (ProcessRaisedException, ProcessExitedException) as error:
        print(f"train_moe: a rank failed: {error}", file=sys.stderr)
        return 1
    proof = run_single(options, run["engine"])
    show_run(options, run)
    title = f"Byte-level MoE, {plan.shape.num_experts} experts over {plan.ranks} ranks ({run['engine']} engine)"
    drawn = report.picture(options.out / "loss.png", run["losses"], proof, title)
    print(f"Picture: {options.out / 'loss.png'}" if drawn else "No picture: matplotlib is not installed")
    (options.out / "run.json").write_text(json.dumps({**run, "proof": proof}, indent=1) + "\n")
    return 0 if prove(options, run["losses"], proof) else 1


if __name__ == "__main__":
    sys.exit(main())
