"""Hosts that forbid or lack something: the library works, or says what is missing. The process never dies of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

import limits_program
from deep_ep import Bootstrap, DeepEPError

PROGRAM = os.path.join(os.path.dirname(__file__), "limits_program.py")
REFUSED = "libdeepep is not loaded: "
ERRORS = {  # of the scenes that do not work: what the error says
    "memfd_create ENOSYS": "memfd_create",
    "clone3 EPERM": REFUSED + "only 0 of 6 threads can be started",
    "epoll EPERM": REFUSED + "epoll",
    "address space 0.5": REFUSED + "address space is limited to",
    "address space 1.6": REFUSED + "address space is limited to",
    "processes 2": REFUSED + "only 1 of 6 threads can be started",
    "processes 5": REFUSED + "only 4 of 6 threads can be started",
    "descriptors 8": REFUSED + "epoll, or 8 descriptors",
}


@pytest.fixture(scope="module")
def scenes(device):
    if device != "cpu":
        pytest.skip("limits of the process, which the CPU engine shows")
    done = subprocess.run([sys.executable, PROGRAM], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", limits_program.SCENES)
def test_limit(scenes, name):
    if platform.machine() != "x86_64" and name.split()[0] in limits_program.NUMBERS:
        pytest.skip("the numbers of system calls are those of x86_64")
    scene = scenes[name]
    if scene["text"].startswith("not here: "):
        pytest.skip(f"needs root or a newer kernel: {scene['text']}")
    assert scene["status"] == 0, f"the process ended by {scene['status']}"
    if name in ERRORS:
        assert scene["text"].startswith("DeepEPError: ")
        assert ERRORS[name] in scene["text"]
    else:
        assert scene["text"] == "works"


@pytest.mark.parametrize("field", ["address", "name", "directory"])
def test_texts_end_at_no_nul(field):
    """C reads a text up to its first NUL: two names that differ after it would be one secret."""
    with pytest.raises(DeepEPError, match=f"argument {field}.*without NUL"):
        if field == "directory":
            Bootstrap.file(0, 2, "/tmp\0/x")
        else:
            Bootstrap.tcp(0, 2, **{"address": "127.0.0.1:9", "name": "abc", field: "abc\0one"})
