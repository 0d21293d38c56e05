"""Writes python/deep_ep/_abi.py, the ctypes mirror, from include/deepep.h. `--check` only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER, TARGET = ROOT / "include" / "deepep.h", ROOT / "python" / "deep_ep" / "_abi.py"

SCALARS = {
    "uint32_t": "U32", "int32_t": "I32", "uint64_t": "U64", "int64_t": "I64", "deepep_status_t": "I32",
    "size_t": "ctypes.c_size_t", "double": "ctypes.c_double", "char": "ctypes.c_char",
}  # fmt: skip
FUNCTION_TYPES = {"deepep_allgather_fn": "ALLGATHER", "deepep_log_fn": "LOG"}

HEAD = '''"""Mirror of deepep.h for ctypes: structs and prototypes. Written by tools/generate_abi.py; do not edit."""

from __future__ import annotations

import ctypes
from typing import Any

VP = ctypes.c_void_p
I32, I64 = ctypes.c_int32, ctypes.c_int64
U32, U64 = ctypes.c_uint32, ctypes.c_uint64

ALLGATHER = ctypes.CFUNCTYPE(I32, VP, VP, ctypes.c_size_t, VP)
LOG = ctypes.CFUNCTYPE(None, I32, ctypes.c_char_p, VP)
'''
TAIL = '''

def sized(cls: type[Any], **values: Any) -> Any:
    """A struct of type `cls` with struct_size and the given fields set; the others are 0."""
    struct = cls()
    struct.struct_size = ctypes.sizeof(cls)
    for name, value in values.items():
        setattr(struct, name, value)
    return struct


def declare(library: Any) -> None:
    """Sets argtypes and restype of every function on a CDLL or PyDLL."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
'''


def ctype(declaration: str) -> str:
    """The ctypes name for a C declaration such as ``const void *x`` or ``char name[16]``."""
    words = declaration.replace("const ", "").replace("*", " * ").split()
    kind = words[0]
    if kind in FUNCTION_TYPES:
        return FUNCTION_TYPES[kind]
    if "*" in words:
        base = "ctypes.c_char_p" if kind == "char" else "VP"
    elif re.fullmatch(r"deepep_(group|buffer|event)_t", kind):
        base = "VP"
    else:
        base = SCALARS[kind]
    length = re.search(r"\[(\d+)\]", declaration)
    return f"{base} * {length.group(1)}" if length else base


def fields(body: str) -> list[tuple[str, str]]:
    """Name and ctypes name of every field of a struct body."""
    result = []
    for statement in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        match = re.match(r"((?:const )?\w+) (.*)", statement)
        assert match, statement
        for item in match.group(2).split(","):
            name = re.sub(r"\[\d+\]|\*", "", item).strip()
            result.append((name, ctype(f"{match.group(1)} {item}")))
    return result


def generate(header: str) -> str:
    """The text of _abi.py for a header."""
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    out = [HEAD]
    for name, body in re.findall(r"typedef struct (deepep_\w+) \{(.*?)\} \w+;", code, re.S):
        cls = "".join(word.capitalize() for word in name.split("_")[1:])
        lines = "\n".join(f'        ("{field}", {kind}),' for field, kind in fields(body))
        out.append(f"\nclass {cls}(ctypes.Structure):\n    # {name}\n    _fields_ = [\n{lines}\n    ]\n")
    out.append(
        "\n# name: (result, arguments), each below its C prototype\nPROTOTYPES: dict[str, tuple[Any, list[Any]]] = {"
    )
    functions = re.findall(r"^(const char \*|int32_t |deepep_status_t )(deepep_\w+)\((.*?)\);", code, re.S | re.M)
    for result, name, raw in functions:
        arguments = " ".join(raw.split())
        kinds = [ctype(a.strip()) for a in arguments.split(",") if a.strip() != "void"]
        out.append(f"    # {result}{name}({arguments})")
        out.append(f'    "{name}": ({ctype(result)}, [{", ".join(kinds)}]),')
    out.append("}\n" + TAIL)
    return "\n".join(out)


def main() -> int:
    """Writes or checks the file; the exit status."""
    text = generate(HEADER.read_text(encoding="utf-8"))
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET} does not mirror {HEADER}: run `make generate`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
