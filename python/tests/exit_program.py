"""Programs that end in awkward ways, for test_exit.

Run as a script it imports torch once, then for each line of standard input (a JSON list: mode, folder, engine) forks
two ranks. Each of them runs `program` and ends through the interpreter's own way out; a line of JSON reports how.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import torch

from deep_ep import Bootstrap, Buffer

LIMIT = 60  # seconds for one program


def exchange(buffer, **options):
    """One dispatch and combine; returns the sums and the handle."""
    x = torch.full((4, 64), float(buffer.rank + 1), dtype=torch.bfloat16, device=buffer.device)
    idx = torch.tensor([[0, 1]] * 4, device=buffer.device)
    per_rank, _, per_expert, table, _ = buffer.get_dispatch_layout(idx, 2)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": table, "num_tokens_per_expert": per_expert}
    rows, _, _, _, handle, _ = buffer.dispatch(x, **layout)
    return buffer.combine(rows, handle, **options)[0], handle


def program(rank, mode, folder, engine):
    torch.set_num_threads(1)
    if mode == "closed output":
        os.environ["DEEPEP_LOG"] = "debug"
        os.close(1)
        os.close(2)
    if engine == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    background = mode == "background start"
    where = Bootstrap.file(rank, 2, folder)
    buffer = Buffer(None, 1 << 20, 1 << 20, bootstrap=where, engine=engine, background=background)
    if background:
        sys.exit(0)
    sums, handle = exchange(buffer)
    right = sums.float().mean().item() == 2 * (rank + 1)
    if mode == "closed output":
        sys.exit(7 if right else 1)
    assert right, sums
    if mode == "exception in flight":
        exchange(buffer, async_finish=True)
        raise ValueError("the program's own error")
    if mode == "peer never comes" and rank == 0:
        rows = torch.zeros((8, 64), dtype=torch.bfloat16, device=buffer.device)
        buffer.combine(rows, handle, async_finish=True)
    if mode == "held by a module":
        sys.keeper = buffer
    if mode == "thread still inside":
        if rank == 0:
            threading.Thread(target=exchange, args=(buffer,), daemon=True).start()
        time.sleep(0.3 if rank == 0 else 1.5)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def start(rank, mode, folder, engine):
    """Forks a rank that writes into files of its own; the parent gets its process id."""
    pid = os.fork()
    if pid:
        return pid
    for number in (1, 2):
        path = os.path.join(folder, f"output{number}.{rank}")
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), number)
    program(rank, mode, folder, engine)
    sys.exit(0)


def wait(pid):
    """The exit code of a rank, negative for a signal; None if it had to be killed."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main():
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        mode, folder, engine = json.loads(line)
        began = time.monotonic()
        ranks = [start(rank, mode, folder, engine) for rank in range(2)]
        codes = [wait(pid) for pid in ranks]
        print(json.dumps({"pids": ranks, "codes": codes, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
