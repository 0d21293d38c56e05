#!/usr/bin/env python3
"""Compares the structs of the two headers, as the C compiler lays them out, with the golden files and with ctypes.

    tools/abi_layout.py [--write]

A golden file (kernels/abi/kernels.layout, include/deepep.layout) has a line ``struct size`` and below it a line
``  field offset size`` for each field. A difference from it breaks callers that were built before: give the interface
a new version, then write the golden anew with ``make generate``.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from types import ModuleType

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAIRS = {  # header: golden file
    ROOT / "kernels" / "abi" / "kernels.h": ROOT / "kernels" / "abi" / "kernels.layout",
    ROOT / "include" / "deepep.h": ROOT / "include" / "deepep.layout",
}
CTYPES = ROOT / "python" / "deep_ep" / "_abi.py"
STRUCT = re.compile(r"typedef struct (\w+)\s*\{([^{}]*)\}\s*\1\s*;")


def structs(header: pathlib.Path) -> dict[str, list[str]]:
    """Structs of a header with their fields' declarators, macros expanded."""
    text = subprocess.run([_cc(), "-E", "-P", str(header)], check=True, capture_output=True, text=True).stdout
    found = {}
    for name, body in STRUCT.findall(text):
        declarations = [" ".join(part.split()) for part in body.split(";") if part.strip()]
        # "uint64_t a, b[64]" declares a and b[64]; the type is everything before the first one's name.
        found[name] = [re.sub(r"^.*[\s*]", "", item.strip()) for part in declarations for item in part.split(",")]
    return found


def layout(header: pathlib.Path) -> str:
    """The golden text of a header, from a C program that is compiled and run."""
    lines = [f'#include "{header}"', "#include <stdio.h>", "int main(void) {"]
    for name, declarators in structs(header).items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for declarator in declarators:
            field = declarator.split("[")[0]
            size = "(size_t)0" if declarator.endswith("[]") else f"sizeof((({name} *)0)->{field})"
            lines.append(f'printf("  {field} %zu %zu\\n", offsetof({name}, {field}), {size});')
    lines += ["return 0;", "}"]
    with tempfile.TemporaryDirectory() as folder:
        source, program = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
        source.write_text("#include <stddef.h>\n" + "\n".join(lines))
        subprocess.run([_cc(), "-o", str(program), str(source)], check=True)
        return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


def ctypes_layout(module: ModuleType) -> str:
    """The same text from the ctypes mirror, whose structs carry the C name in a comment's form: CamelCase of it."""
    lines = []
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, ctypes.Structure) and cls is not ctypes.Structure:
            lines.append(f"{cls.__name__} {ctypes.sizeof(cls)}")
            for field in cls._fields_:
                place = getattr(cls, field[0])
                lines.append(f"  {field[0]} {place.offset} {place.size}")
    return "\n".join(lines) + "\n"


def as_ctypes_names(golden: str) -> str:
    """A golden text with deepep_buffer_options written BufferOptions, as the mirror names it."""
    return re.sub(r"^deepep_(\w+)", lambda m: "".join(w.capitalize() for w in m[1].split("_")), golden, flags=re.M)


def difference(want: str, have: str, want_name: str, have_name: str) -> str:
    """A unified diff, empty if the texts are equal."""
    return "".join(difflib.unified_diff(want.splitlines(True), have.splitlines(True), want_name, have_name))


def _cc() -> str:
    return os.environ.get("CC", "gcc")


def _load_mirror() -> ModuleType:
    """_abi.py alone: the package itself would bring in torch."""
    spec = importlib.util.spec_from_file_location("deep_ep_abi_mirror", CTYPES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(write: bool) -> int:
    found = []
    for header, golden in PAIRS.items():
        text = layout(header)
        if write:
            golden.write_text(text)
        shown = str(golden.relative_to(ROOT))
        found.append(difference(golden.read_text() if golden.exists() else "", text, shown, header.name))
        print(f"{header.name}: {len(re.findall(r'^[a-z]', text, re.M))} structs")
    mirror = ctypes_layout(_load_mirror())
    found.append(difference(as_ctypes_names(layout(ROOT / "include" / "deepep.h")), mirror, "deepep.h", CTYPES.name))
    print("".join(found), end="")
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
