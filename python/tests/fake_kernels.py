"""The kernel library of the engine's own tests, which does nothing, for whole interpreters."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a kernel library")


def build(folder: Path, *options: str) -> dict[str, str]:
    """Builds it into `folder` as the CPU engine's. Returns the environment of a process that is to load it."""
    root = Path(__file__).parents[2]
    headers, source = f"-I{root / 'kernels' / 'abi'}", str(root / "internal" / "engine" / "testdata" / "fake.c")
    library = str(folder / "libdeepep_cpu.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", *options, headers, "-o", library, source], check=True)
    return {**os.environ, "DEEPEP_KERNELS": str(folder)}
