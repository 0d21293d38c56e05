#!/usr/bin/env python3
"""Writes the mirrors of deepep.h and kernels.h: for ctypes, for Go, and the table of kernel functions.

    tools/generate_abi.py [--check]

The two headers are written by hand; nothing that they say is written a second time. ``--check`` writes nothing and
fails where a file is not what the headers make it.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import c_header
import emit_go
import emit_python

ROOT = Path(__file__).resolve().parent.parent
PUBLIC, KERNELS = Path("include/deepep.h"), Path("kernels/abi/kernels.h")


def generate(public: c_header.Header, kernels: c_header.Header) -> dict[Path, str]:
    """The text of every generated file."""
    agree(public, kernels)
    return {
        Path("python/deep_ep/_abi.py"): emit_python.emit(public),
        Path("core/op/args.go"): emit_go.op_args(public),
        Path("core/op/constants.go"): emit_go.op_constants(public),
        Path("internal/status/codes.go"): emit_go.status_codes(public),
        Path("internal/abi/constants.go"): emit_go.abi_constants(kernels),
        Path("internal/abi/structs.go"): emit_go.abi_structs(kernels),
        Path("internal/kern/functions.go"): emit_go.kern_functions(kernels),
    }


# Constants that both headers have.
SHARED = {"DEEPEP_OP_": "DK_OP_", "DEEPEP_LL_": "DK_LL_", "DEEPEP_ROUTING_": "DK_ROUTING_"}
ALSO_SHARED = {
    "DEEPEP_SEND": "DK_PHASE_SEND",
    "DEEPEP_RECV": "DK_PHASE_RECV",
    "DEEPEP_SEND_RECV": "DK_PHASE_BOTH",
    "DEEPEP_OP_COUNT": "DK_NUM_OPS",
}


def agree(public: c_header.Header, kernels: c_header.Header) -> None:
    """Ends the program where a constant that both headers have has two values."""
    here, there = public.constants(), kernels.constants()
    for name, value in here.items():
        shared = [theirs + name.removeprefix(ours) for ours, theirs in SHARED.items() if name.startswith(ours)]
        twin = ALSO_SHARED.get(name) or (shared[0] if shared else None)
        if twin and there.get(twin) != value:
            sys.exit(f"{name} is {value} in deepep.h, {twin} is {there.get(twin)} in kernels.h")


def current() -> dict[Path, str]:
    """The generated files as the headers in the tree make them."""
    return generate(c_header.read(ROOT / PUBLIC), c_header.read(ROOT / KERNELS))


def stale(files: dict[Path, str]) -> str:
    """A diff of what is in the tree and what should be; empty if they are equal."""
    lines: list[str] = []
    for path, text in files.items():
        found = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        lines += difflib.unified_diff(found.splitlines(True), text.splitlines(True), str(path), f"{path}, generated")
    return "".join(lines)


def main() -> int:
    """Writes or checks the files; the exit status."""
    files = current()
    if "--check" not in sys.argv:
        for path, text in files.items():
            (ROOT / path).write_text(text, encoding="utf-8")
        return 0
    if difference := stale(files):
        print(f"{difference}\nmirrors of the headers are out of date: run `make generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
