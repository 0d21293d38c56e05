"""Structs of arguments that are written in one go: ctypes takes a fifth of a microsecond for each field by itself."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from . import _abi

_CODES = {_abi.I32: "i", _abi.U32: "I", _abi.I64: "q", _abi.U64: "Q", _abi.VP: "Q"}


class Writer:
    """Makes structs of one type; its call takes the values of the named fields, in this order, and the others are 0.

    An address is an int, 0 for NULL. A field that is an array takes a value for each entry.
    """

    def __init__(self, cls: type[Any], names: str) -> None:
        """Prepares for `names`, which are in the order of the struct and do not name struct_size."""
        named = ["struct_size", *names.split()]
        codes, end = ["="], 0
        for name, kind in cls._fields_:
            place = getattr(cls, name)
            codes.append(f"{place.offset - end}x")
            if name in named:
                count = getattr(kind, "_length_", 0)
                codes.append(f"{count}{_CODES[kind._type_]}" if count else _CODES[kind])
            else:
                codes.append(f"{place.size}x")
            end = place.offset + place.size
        known = [name for name, *_ in cls._fields_ if name in named]
        if known != named:
            raise ValueError(f"{cls.__name__}: the fields are {known}, the names {named}")
        self._cls, self._size = cls, ctypes.sizeof(cls)
        codes.append(f"{self._size - end}x")
        self._pack = struct.Struct("".join(codes)).pack_into

    def __call__(self, *values: int) -> Any:
        made = self._cls()
        self._pack(made, 0, self._size, *values)
        return made
