#!/usr/bin/env python3
"""Checks what a wheel promises, from outside and without installing it.

    tools/check_wheel.py FILE.whl

* Its tag is py3-none-manylinux_2_28 of its machine, and auditwheel, where it is installed, agrees.
* It holds the engine, all kernel libraries (on x86-64 that for drivers of CUDA 12, too), the program and the headers;
  it is smaller than 60 MB.
* No library needs a symbol newer than glibc 2.28, nor any library but the C library's and libgcc_s: not torch, not
  CPython, nothing of NVIDIA's.
* The GPU libraries hold machine code for every GPU that is promised, and the CUDA libraries PTX for later ones.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import abi_check  # noqa: E402

GLIBC, LARGEST = (2, 28), 60_000_000
OLDER_CUDA = "libdeepep_cuda12.so"  # nvcc 12.4 knows no newer GPUs
CODES = {name: {80, 90, 100, 103, 120} for name in ("libdeepep_cuda.so", "libdeepep_nvshmem.so")} | {
    OLDER_CUDA: {80, 90}
}
PTX = {"libdeepep_cuda.so": 90, OLDER_CUDA: 90}
FATBIN, KIND_PTX, KIND_CODE = 0xBA55ED50, 1, 2


def device_code(data: bytes) -> tuple[set[int], set[int]]:
    """Architectures of the machine code, and of the PTX, in a library's containers of device code."""
    found: dict[int, set[int]] = {KIND_PTX: set(), KIND_CODE: set()}
    for match in re.finditer(re.escape(struct.pack("<I", FATBIN)), data):
        header, size = struct.unpack_from("<6xHQ", data, match.start())
        at, end = match.start() + header, match.start() + header + size
        while at + 64 <= min(end, len(data)):
            kind, entry_header, entry_size, arch = struct.unpack_from("<H2xIQ12xI", data, at)
            if kind in found:
                found[kind].add(arch)
            if entry_header == 0:
                break
            at += entry_header + entry_size
    return found[KIND_CODE], found[KIND_PTX]


def library_problems(path: pathlib.Path) -> list[str]:
    lines = []
    if needed := [name for name in abi_check.dynamic(path, "NEEDED") if not abi_check.ALLOWED.match(name)]:
        lines.append(f"needs {', '.join(needed)}")
    if (newest := abi_check.newest_glibc(path)) > GLIBC:
        lines.append(f"needs glibc {newest[0]}.{newest[1]}, promised is {GLIBC[0]}.{GLIBC[1]}")
    code, ptx = device_code(path.read_bytes()) if path.name in CODES else (set(), set())
    if missing := CODES.get(path.name, set()) - code:
        lines.append(f"has no machine code for sm_{', sm_'.join(map(str, sorted(missing)))}")
    if path.name in PTX and PTX[path.name] not in ptx:
        lines.append(f"has no PTX for compute_{PTX[path.name]}")
    return lines


def problems(wheel: pathlib.Path) -> list[str]:
    """What is wrong with a wheel, a line each."""
    lines = []
    tag = re.fullmatch(r"deepep_go-[\d.]+-py3-none-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name)
    if not tag:
        lines.append(f"{wheel.name}: the tag is not py3-none-manylinux_2_28")
    if wheel.stat().st_size >= LARGEST:
        lines.append(f"{wheel.stat().st_size} bytes, {LARGEST} are promised")
    names = ["lib/libdeepep_cpu.so", "lib/libdeepep_cuda.so", "lib/libdeepep_nvshmem.so"]
    names += [f"lib/{OLDER_CUDA}"] if tag and tag[1] == "x86_64" else []
    names += [f"lib/{abi_check.soname()}", "bin/deepep", "include/deepep.h", "include/deepep.hpp"]
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        held = set(archive.namelist())
        lines += [f"holds no deep_ep/{name}" for name in names if f"deep_ep/{name}" not in held]
        for name in sorted(held):
            if re.search(r"\.so(\.\d+)*$", name):
                path = pathlib.Path(archive.extract(name, folder))
                lines += [f"{name}: {line}" for line in library_problems(path)]
    if tag and importlib.util.find_spec("auditwheel"):
        done = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True)
        text = " ".join(done.stdout.split())
        found = re.search(r'constrains the platform tag to "manylinux_2_(\d+)_', text) or re.search(
            r'consistent with the following platform tag: "manylinux_2_(\d+)_', text
        )
        if found is None or int(found[1]) > GLIBC[1]:
            lines.append(f"auditwheel: {text or done.stderr}")
    return lines


def main(wheel: pathlib.Path) -> int:
    lines = problems(wheel)
    for line in lines:
        print(f"{wheel.name}: {line}")
    if not lines:
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, as promised")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
