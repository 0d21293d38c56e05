"""Whole interpreters that end in awkward ways: no hang, the right exit status, nothing left over."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time

import pytest

import fake_kernels

PROGRAM = os.path.join(os.path.dirname(__file__), "exit_program.py")
STATUS = {
    "without destroy": 0,
    "exception in flight": 1,
    "peer never comes": 0,
    "held by a module": 0,
    "thread still inside": 0,
    "background start": 0,
    "closed output": 7,
    "killed": -9,
}


@pytest.fixture(scope="module")
def programs(device):
    """Runs a program by its mode: ``programs(mode, folder)`` gives pids, exit codes and seconds."""
    child = subprocess.Popen(
        [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "ready\n"

    def run(mode, folder):
        child.stdin.write(json.dumps([mode, str(folder), device]) + "\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())

    yield run
    child.stdin.close()
    try:
        child.wait(10)
    finally:
        child.kill()


def left_behind(pids, folder):
    """What these processes have left in shared memory and in the folder where they met."""
    pages = [name for name in glob.glob("/dev/shm/deepep*/*") if int(os.path.basename(name).split("-")[0]) in pids]
    meeting = [name for name in os.listdir(folder) if not name.startswith("output")]
    return pages, meeting


@pytest.mark.parametrize("mode", STATUS)
def test_exit(programs, tmp_path, mode):
    result = programs(mode, tmp_path)
    texts = [(tmp_path / f"output2.{rank}").read_text() for rank in range(2)]
    assert result["codes"] == [STATUS[mode]] * 2, f"exit codes {result['codes']}\n{texts}"
    assert result["seconds"] < 30
    for text in texts:
        check_output(mode, text)
    pages, meeting = left_behind(result["pids"], tmp_path)
    assert not meeting, f"left over: {meeting}"
    if mode == "killed":  # a page of statistics stays for a while, so that people can see what the dead did
        assert all(os.path.getsize(page) <= 1 << 16 for page in pages), f"left over: {pages}"
    else:
        assert not pages, f"left over: {pages}"


def check_output(mode, text):
    """What a rank wrote to standard error."""
    if mode == "exception in flight":
        assert text.rstrip().endswith("ValueError: the program's own error"), text
    elif mode == "background start":
        assert "Traceback" not in text, text  # the log may hold that the start was given up
    elif mode != "killed":
        assert text == "", text


NEVER_FREES = """
import ctypes, os, sys, time
import torch.distributed as dist
import deep_ep

dist.init_process_group("gloo", f"file://{sys.argv[1]}/meet", rank=int(sys.argv[2]), world_size=2)
fake = ctypes.CDLL(os.environ["DEEPEP_KERNELS"] + "/libdeepep_cpu.so")
buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 20, 1 << 20, num_nvl_peers=1, explicitly_destroy=True)
fake.fake_heap(ctypes.byref(ctypes.c_int(6)))
buffer.destroy()
dist.destroy_process_group()
print(time.time(), flush=True)
sys.exit(3)
"""


@fake_kernels.needs_gcc
def test_the_end_waits_for_memory_that_is_being_freed(tmp_path):
    """All ranks free a transport's memory together, which may take longer than destroy().

    The end waits 2 s for it, and then has its exit status though the transport would not survive its own end.
    """
    env = fake_kernels.build(tmp_path, "-DHEAP")
    ranks = [
        subprocess.Popen([sys.executable, "-c", NEVER_FREES, tmp_path, str(rank)], env=env, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        said = rank.stdout.readline()
        assert rank.wait(30) == 3
        assert time.time() - float(said) > 1.8
