"""Makes and destroys buffers through the callback bootstrap, over and over in the same processes: a hunt for crashes.

    python python/tests/start_loop.py --ranks 2 --rounds 5000 --device cuda

Each round makes groups and a buffer over torch.distributed (gloo), counts a layout, now and then sends a batch there
and back, and destroys them. The processes are like those of the test suite: faulthandler is on, threads come and go,
Go and Python collect garbage. Core dumps are on; where a rank dies, its signal, its round and the core's place are
printed, and the exit status is 1. Needs torch and the built package alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def layout_and_batch(buffer, device, size, rank, whole):
    experts = 4 * size
    topk = torch.randint(0, experts, (32, 2), device=device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, experts)
    assert int(in_rank.sum()) == int(per_rank.sum()), "a wrong layout"
    if whole:
        x = torch.full((32, 256), float(rank + 1), dtype=torch.bfloat16, device=device)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert
        )
        back = buffer.combine(rows, handle)[0]
        assert torch.equal(back.float(), x.float() * in_rank.sum(1, keepdim=True)), "a wrong sum"


def rank_main(rank, options, folder, notes):
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    os.chdir(folder)
    faulthandler.enable()
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    device = torch.device(options.device, rank % torch.cuda.device_count()) if options.device == "cuda" else "cpu"
    from deep_ep import Buffer

    draw = random.Random(options.seed + rank)
    for number in range(options.rounds):
        notes[rank] = number
        buffer = Buffer(dist.group.WORLD, 1 << 22, 0, engine=options.device, explicitly_destroy=True)
        layout_and_batch(buffer, device, options.ranks, rank, number % 10 == 0)
        if draw.random() < 0.2:
            threading.Thread(target=buffer.check).start()
        if draw.random() < 0.1:
            gc.collect()
        buffer.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="deepep-start-loop-")
    with open("/proc/sys/kernel/core_pattern") as pattern:
        print(f"core dumps: {pattern.read().strip()}, from {folder}", flush=True)
    notes = mp.get_context("spawn").Array("q", options.ranks)
    began = time.monotonic()
    ranks = mp.spawn(rank_main, (options, folder, notes), nprocs=options.ranks, join=False)
    failed = []
    while not failed and any(p.is_alive() for p in ranks.processes):
        time.sleep(0.2)
        failed = [r for r, p in enumerate(ranks.processes) if p.exitcode not in (None, 0)]
    for rank in failed:
        code = ranks.processes[rank].exitcode
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        print(f"FAILED rank {rank} in round {notes[rank]}: {how}; a core may be in {folder}", flush=True)
    for process in ranks.processes:
        process.kill() if failed else process.join()
    print(f"{min(notes) + 1} rounds of {options.ranks} ranks on {options.device} in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
