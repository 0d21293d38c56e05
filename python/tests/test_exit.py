"""Whole interpreters that end in awkward ways: no hang, the right exit status, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

import pytest

PROGRAM = """
import os, sys, time
rank, folder, mode, engine = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
import torch
torch.set_num_threads(1)
from deep_ep import Bootstrap, Buffer
if mode == "closed output":
    os.environ["DEEPEP_LOG"] = "debug"
    os.close(1); os.close(2)
if engine == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
where = Bootstrap.file(rank, 2, folder)
buffer = Buffer(None, 1 << 20, bootstrap=where, engine=engine, background=mode == "background start")
if mode == "background start":
    sys.exit(0)
def exchange(**options):
    x = torch.full((4, 64), float(rank + 1), dtype=torch.bfloat16, device=buffer.device)
    idx = torch.tensor([[0, 1]] * 4, device=buffer.device)
    per_rank, _, per_expert, table, _ = buffer.get_dispatch_layout(idx, 2)
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=table, num_tokens_per_expert=per_expert)
    recv, _, _, _, handle, _ = buffer.dispatch(x, **layout)
    return buffer.combine(recv, handle, **options)[0], handle
sums, handle = exchange()
assert sums.float().mean().item() == 2 * (rank + 1)
if mode == "exception in flight":
    exchange(async_finish=True)
    raise ValueError("the program's own error")
if mode == "peer never comes":
    if rank == 0:
        buffer.combine(torch.zeros((8, 64), dtype=torch.bfloat16, device=buffer.device), handle, async_finish=True)
if mode == "held by a module":
    sys.modules["keeper"] = type(sys)("keeper")
    sys.modules["keeper"].buffer = buffer
if mode == "thread still inside":
    import threading
    if rank == 0:
        threading.Thread(target=lambda: exchange(), daemon=True).start()
        time.sleep(0.3)
    else:
        time.sleep(1.5)
if mode == "closed output":
    os._exit(7 if sums.float().mean().item() == 2 * (rank + 1) else 1)
"""
STATUS = {
    "without destroy": 0,
    "exception in flight": 1,
    "peer never comes": 0,
    "held by a module": 0,
    "thread still inside": 0,
    "background start": 0,
    "closed output": 7,
}


def left_behind():
    """Files of the library that outlive a process."""
    return {
        os.path.join(folder, name)
        for folder in ("/dev/shm", tempfile.gettempdir())
        for name in os.listdir(folder)
        if "deepep" in name and "pool" not in name
    }


@pytest.mark.parametrize("mode", STATUS)
def test_exit(device, tmp_path, mode):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    before = left_behind()
    start = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path), mode, device],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    took = time.monotonic() - start
    for process, (_, errors) in zip(ranks, results, strict=True):
        assert process.returncode == STATUS[mode], f"exit status {process.returncode}\n{errors}"
        if mode == "exception in flight":
            assert errors.rstrip().endswith("ValueError: the program's own error"), errors
        elif mode == "thread still inside":
            assert errors == "" or "the buffer was destroyed while a call was waiting" in errors, errors
        elif mode == "background start":
            assert "Traceback" not in errors, errors  # the log may say that the start was given up
        else:
            assert errors == "", errors
    assert took < 40, f"{took:.1f} s"
    assert left_behind() <= before, f"left behind: {left_behind() - before}"
