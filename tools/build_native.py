#!/usr/bin/env python3
"""Builds the shared libraries and the program for `pip install .` and `make install`: what this machine can build.

    tools/build_native.py [--build FOLDER]      default: build

DEEPEP_BUILD says what: `cpu` (the engine and the CPU library), `cuda` (and libdeepep_cuda.so), `all` (and
libdeepep_nvshmem.so, for several nodes). Without it the same as `all`, except that the GPU libraries are left out where
neither nvcc nor PyPI can be had; what was left out and why is printed, and kept in FOLDER/left_out.txt. A library that
could be built and fails to is an error, never left out.

nvcc is that of NVCC, of .venv (`make cuda`), of PATH, of /usr/local/cuda, or comes from PyPI into build/toolkit.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHOICES = ("auto", "cpu", "cuda", "all", "release")
OLDEST_NVCC = (12, 3)
CUDA, NVSHMEM = "libdeepep_cuda.so", "libdeepep_nvshmem.so"
OLDER_CUDA = "libdeepep_cuda12.so"  # of releases alone


def version() -> str:
    """The version, which stands in include/deepep.h alone."""
    text = (ROOT / "include" / "deepep.h").read_text()
    return ".".join(re.findall(r"^#define DEEPEP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", text, re.M))


class Impossible(Exception):
    """Why something cannot be built, in one sentence with what to do."""


def chosen() -> str:
    value = os.environ.get("DEEPEP_BUILD", "auto") or "auto"
    if value not in CHOICES:
        raise Impossible(f"DEEPEP_BUILD: got {value}, allowed {', '.join(CHOICES)}")
    return value


def check_system(system: str = sys.platform, machine: str | None = None, libc: str | None = None) -> None:
    """Raises Impossible on a system that the engine does not run on."""
    machine = machine or platform.machine()
    libc = platform.libc_ver()[0] if libc is None else libc
    if system != "linux" or machine not in ("x86_64", "aarch64") or libc != "glibc":
        here = f"{system} on {machine}" + (
            f" with {libc or 'a C library that is not glibc'}" if system == "linux" else ""
        )
        raise Impossible(
            f"deepep-go needs Linux with glibc on x86-64 or aarch64, and this is {here}: "
            "install it on such a machine, or in a container of Debian or Ubuntu (on Windows in WSL 2)"
        )


def check_tools() -> None:
    """Raises Impossible without Go or a compiler."""
    done = subprocess.run([ROOT / "tools" / "check_tools.sh", "go", "cc", "cxx"], capture_output=True, text=True)
    missing = done.stderr.strip().removeprefix("make: needed: ")
    if done.returncode == 0 and shutil.which("make") is None:
        missing = "make ('make' not found)"
    if missing:
        raise Impossible(
            f"building deepep-go from its sources needs {missing}: install that (Go: https://go.dev/dl), "
            "or take a wheel, which needs none of it: pip install --only-binary deepep-go deepep-go"
        )


def _nvcc_version(nvcc: str) -> tuple[int, int]:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _in_wheels(folder: pathlib.Path, part: str) -> pathlib.Path | None:
    """A part of NVIDIA's wheels (cu13, nvshmem) in a virtual environment."""
    return next(iter(sorted(folder.glob(f"lib/python3*/site-packages/nvidia/{part}"))), None)


def find_nvcc() -> tuple[str | None, list[str]]:
    """nvcc of this machine, and what was passed over and why."""
    venv = _in_wheels(ROOT / ".venv", "cu13")
    named = os.environ.get("NVCC")
    in_venv = str(venv / "bin" / "nvcc") if venv else None
    places = [named, in_venv, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    passed: list[str] = []
    for place in dict.fromkeys(filter(None, places)):
        path = shutil.which(place)
        version = _nvcc_version(path) if path else (0, 0)
        if path and version >= OLDEST_NVCC:
            return path, passed
        if path:
            passed.append(
                f"{path} is of CUDA {version[0]}.{version[1]}, and {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} is needed"
            )
        elif place == named:
            raise Impossible(f"NVCC={named} is no program: name nvcc's file, or unset NVCC")
    return None, passed


def fetch(folder: pathlib.Path, requirements: Iterable[str]) -> str:
    """Installs requirement files from PyPI into a virtual environment of its own; "" or why that failed."""
    files = [ROOT / "tools" / name for name in requirements]
    stamp, text = folder / "requirements.txt", "".join(file.read_text() for file in files)
    if stamp.exists() and stamp.read_text() == text:
        return ""
    print("deepep: getting CUDA's compiler and libraries from PyPI (once)", flush=True)
    # pip's isolation of a build is not for the new environment.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    words = [word for file in files for word in ("-r", str(file))]
    commands += [
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    ]
    for command in commands:
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
            return f"`{' '.join(command[-3:] if '-m' in command[:-3] else command)}` failed: {lines[-1]}"
    stamp.write_text(text)
    return ""


def make(*words: str, build: pathlib.Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "--no-print-directory", f"--jobs={os.cpu_count()}", f"BUILD={build}", *words]
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def gpu_settings(wanted: str) -> tuple[list[str], str]:
    """make's settings for the GPU libraries, or no setting and why there can be none."""
    nvcc, passed = find_nvcc()
    nvshmem = os.environ.get("NVSHMEM_HOME") or _in_wheels(ROOT / ".venv", "nvshmem")
    missing = ([] if nvcc else ["requirements-cuda.txt"]) + (
        [] if nvshmem or wanted == "cuda" else ["requirements-nvshmem.txt"]
    )
    if missing:
        # All in one: NVSHMEM's headers want CUDA's, which may be the machine's.
        failed = fetch(ROOT / "build" / "toolkit", missing)
        if failed:
            tried = "; ".join(
                [*passed, "no nvcc in NVCC, .venv, PATH or /usr/local/cuda"] if not nvcc else ["no NVSHMEM"]
            )
            return [], f"{tried}; from PyPI: {failed}"
        toolkit = ROOT / "build" / "toolkit"
        if nvcc is None:
            fetched = _in_wheels(toolkit, "cu13")
            if fetched is None:
                return [], f"tools/requirements-cuda.txt has brought no nvidia/cu13 into {toolkit}"
            nvcc = str(fetched / "bin" / "nvcc")
        nvshmem = nvshmem or _in_wheels(toolkit, "nvshmem")
    return [f"NVCC={nvcc}", *([f"NVSHMEM_HOME={nvshmem}"] if nvshmem else [])], ""


def build(folder: pathlib.Path) -> list[str]:
    """Builds into FOLDER/lib and FOLDER/bin; returns what was left out and why, a line each."""
    wanted = chosen()
    check_system()
    lines: list[str] = []
    if wanted != "release":  # `make wheel` has built everything
        check_tools()
        make("lib", "kernels", "program", build=folder)
        if wanted == "cpu":
            lines = [f"{CUDA} and {NVSHMEM}: DEEPEP_BUILD=cpu"]
        else:
            settings, why = gpu_settings(wanted)
            if not settings:
                if wanted != "auto":
                    raise Impossible(f"DEEPEP_BUILD={wanted}, and CUDA cannot be built: {why}")
                lines = [f"{CUDA} and {NVSHMEM}, for GPUs: {why}"]
            else:
                print("deepep: building for GPUs, which takes minutes; DEEPEP_BUILD=cpu leaves it out", flush=True)
                targets = [f"{folder}/lib/{name}" for name in ((CUDA,) if wanted == "cuda" else (CUDA, NVSHMEM))]
                make(*targets, *settings, build=folder)
                lines = [f"{NVSHMEM}: DEEPEP_BUILD=cuda"] if wanted == "cuda" else []
        if not (ROOT / folder / "lib" / "deepep_torch.abi3.so").exists():
            lines.append(
                "deepep_torch.abi3.so, which saves Python time in a call: this Python has no headers (Python.h)"
            )
    (ROOT / folder / "left_out.txt").write_text("".join(f"{line}\n" for line in lines))
    for line in lines:
        print(f"deepep: left out: {line}", flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds what this machine can build.")
    parser.add_argument("--build", default="build", type=pathlib.Path)
    try:
        build(parser.parse_args().build)
    except Impossible as error:
        print(f"deepep: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            f"deepep: make failed (exit status {error.returncode}); DEEPEP_BUILD=cpu builds without GPUs",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
