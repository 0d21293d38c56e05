"""Writes deepep.h for ctypes: constants, structs and prototypes."""

from __future__ import annotations

import re

from c_header import Enum, Field, Header

SCALARS = {
    "uint32_t": "U32", "int32_t": "I32", "uint64_t": "U64", "int64_t": "I64", "deepep_status_t": "I32",
    "size_t": "ctypes.c_size_t", "double": "ctypes.c_double", "char": "ctypes.c_char",
}  # fmt: skip
FUNCTION_TYPES = {"deepep_allgather_fn": "ALLGATHER", "deepep_log_fn": "LOG"}
# By torch's allocator alone, from C: their types are those of CUDAPluggableAllocator.
NOT_BOUND = {"deepep_pool_allocate", "deepep_pool_free"}

HEAD = '''"""deepep.h for ctypes: constants, structs and prototypes. Written by tools/generate_abi.py; do not edit."""

from __future__ import annotations

import ctypes
from typing import Any

VP = ctypes.c_void_p
I32, I64 = ctypes.c_int32, ctypes.c_int64
U32, U64 = ctypes.c_uint32, ctypes.c_uint64

ALLGATHER = ctypes.CFUNCTYPE(I32, VP, VP, ctypes.c_size_t, VP)
LOG = ctypes.CFUNCTYPE(None, I32, ctypes.c_char_p, VP)

# Constants, without the prefix DEEPEP_.
'''
STRUCTS = """
# Structs. Without a __dict__: a field that C does not have cannot be set.

"""
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


def ctype(kind: str) -> str:
    """The ctypes name for a C type such as ``const void *``."""
    base = kind.replace("const ", "").split()[0]
    if base in FUNCTION_TYPES:
        return FUNCTION_TYPES[base]
    if "*" in kind:
        return "ctypes.c_char_p" if base == "char" else "VP"
    if re.fullmatch(r"deepep_(group|buffer|event)_t", base):
        return "VP"
    return SCALARS[base]


def _field(field: Field) -> str:
    length = f" * {field.length}" if field.length else ""
    return f'        ("{field.name}", {ctype(field.type)}{length}),'


def _constants(header: Header) -> list[str]:
    def line(name: str, literal: str) -> str:
        return f"{name.removeprefix('DEEPEP_')} = {literal}"

    lines = [line(c.name, c.literal) for c in header.defines]
    for enum in header.enums:
        lines += ["", *(line(c.name, c.literal) for c in enum.constants)]
        if enum.mapped:
            lines += _texts(enum)
    return lines


def _texts(enum: Enum) -> list[str]:
    """What an X-macro says beside the numbers: each constant's text, at its number."""
    mapped = [c for c in enum.constants if c.text]
    assert [c.value for c in mapped] == list(range(len(mapped))), "the place in the tuple is the number"
    if mapped[0].name == "DEEPEP_OK":
        return [_tuple("STATUS_NAMES", [c.name for c in mapped]), _tuple("STATUS_TEXTS", [c.text for c in mapped])]
    return [_tuple("OP_NAMES", [c.text for c in mapped])]


def _tuple(name: str, texts: list[str]) -> str:
    inside = "".join(f'    "{text}",\n' for text in texts)
    return f"{name} = (\n{inside})"


def emit(header: Header) -> str:
    """The text of _abi.py."""
    out = [HEAD.rstrip("\n"), *_constants(header), STRUCTS.rstrip("\n")]
    for struct in header.structs:
        cls = "".join(word.capitalize() for word in struct.name.split("_")[1:])
        fields = "\n".join(map(_field, struct.fields))
        out.append(f"\n\nclass {cls}(ctypes.Structure):\n    # {struct.name}")
        out.append(f"    __slots__ = ()\n    _fields_ = [\n{fields}\n    ]")
    out.append(
        "\n\n# name: (result, arguments), each below its C prototype\nPROTOTYPES: dict[str, tuple[Any, list[Any]]] = {"
    )
    for function in header.functions:
        if function.name in NOT_BOUND:
            continue
        kinds = [ctype(a.strip()) for a in function.arguments.split(",") if a.strip() != "void"]
        out.append(f"    # {function.result}{function.name}({function.arguments})")
        out.append(f'    "{function.name}": ({ctype(function.result)}, [{", ".join(kinds)}]),')
    out.append("}\n" + TAIL)
    return "\n".join(out)
