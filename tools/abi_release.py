#!/usr/bin/env python3
"""Compares the two headers with the goldens of the last release: what is gone, moved or changed fails, additions pass.

    tools/abi_release.py [--write]

A golden (include/deepep.release, kernels/abi/kernels.release) lists constants, types of functions, functions, and
structs with offset, size and type of each field. A public struct that begins with struct_size may grow at its end.
Everything else that a program was built with stays, unless the version allows a break: of deepep.h another minor
version before 1.0 and another major one from then on, of kernels.h a higher DK_ABI_VERSION. The promise:
docs/compatibility.md.

``--write`` makes the goldens anew, for a release; it refuses where the check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import abi_layout
import c_header

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = {
    ROOT / "include" / "deepep.h": ROOT / "include" / "deepep.release",
    ROOT / "kernels" / "abi" / "kernels.h": ROOT / "kernels" / "abi" / "kernels.release",
}
VERSION = re.compile(r"DEEPEP_VERSION_(MAJOR|MINOR|PATCH)|DK_ABI_VERSION")
COUNT = re.compile(r"DEEPEP_\w*COUNT|DK_NUM_\w+")  # of a list, which may grow
RESERVED = re.compile(r"reserved\d*")  # what a later version may give a name


@dataclasses.dataclass
class Interface:
    """`names` has constants, types and functions with what they are; `structs` size, and fields with place and type."""

    version: str
    names: dict[str, str]
    structs: dict[str, tuple[int, dict[str, tuple[int, int, str]]]]

    def text(self) -> str:
        lines = [f"version {self.version}", *(f"{name}: {what}" for name, what in self.names.items())]
        for name, (size, fields) in self.structs.items():
            lines += [f"{name} {size}", *(f"  {field} {at} {n} {kind}" for field, (at, n, kind) in fields.items())]
        return "\n".join(lines) + "\n"


def parse(text: str) -> Interface:
    """Reads a golden."""
    first, *lines = text.splitlines()
    found = Interface(first.removeprefix("version "), {}, {})
    fields: dict[str, tuple[int, int, str]] = {}
    for line in lines:
        if line.startswith("  "):
            name, offset, size, kind = line.split(maxsplit=3)
            fields[name] = (int(offset), int(size), kind)
        elif ": " in line:
            name, what = line.split(": ", 1)
            found.names[name] = what
        else:
            name, size = line.split()
            fields = {}
            found.structs[name] = (int(size), fields)
    return found


def _types(arguments: str) -> str:
    """The types of a function's arguments: names may change."""
    parts = [" ".join(part.split()) for part in arguments.split(",")]
    return ", ".join(re.sub(r"(?<=[\s*])\w+((?:\[\w*\])?)$", r"\1", part).strip() for part in parts)


def _kinds(header: c_header.Header, struct: c_header.Struct) -> dict[str, str]:
    """The types of a struct's fields, those of the macros that it begins with among them."""
    found = {}
    for macro in struct.macros:
        name = macro.rstrip(";")
        found.update(_kinds(header, header.macros[name]))
    return {**found, **{field.name: field.type for field in struct.fields}}


def interface(path: Path) -> Interface:
    """What a header declares, as the C compiler lays it out."""
    header = c_header.read(path)
    constants = header.constants()
    numbers = [str(constants[name]) for name in constants if VERSION.fullmatch(name)]
    names = {name: str(value) for name, value in constants.items() if not VERSION.fullmatch(name)}
    comments = re.compile(r"/\*.*?\*/", re.S)
    code = comments.sub(" ", path.read_text(encoding="utf-8"))
    for result, name, arguments in re.findall(r"^typedef ([\w ]+\*?)\(\*(\w+)\)\(([^)]*)\);", code, re.M):
        names[name] = f"{result.strip()} (*)({_types(arguments)})"
    for result, name in re.findall(r"^typedef ((?:struct )?\w+ \*?)(\w+);", code, re.M):
        names[name] = result.strip()
    for function in header.functions:
        names[function.name] = f"{function.result.strip()} ({_types(function.arguments)})"
    kinds = {struct.name: _kinds(header, struct) for struct in header.structs}
    structs: dict[str, tuple[int, dict[str, tuple[int, int, str]]]] = {}
    for line in abi_layout.layout(path).splitlines():
        name, *places = line.split()
        if len(places) == 1:
            struct = name
            structs[struct] = (int(places[0]), {})
        else:
            structs[struct][1][name] = (int(places[0]), int(places[1]), kinds[struct][name])
    return Interface(".".join(numbers), names, structs)


def compare(old: Interface, new: Interface) -> tuple[list[str], list[str]]:
    """What callers of the old interface lose, and what is new."""
    broken, added = [], []
    for name, what in old.names.items():
        now = new.names.get(name)
        if now is None:
            broken.append(f"{name} is gone; it was {what}")
        elif now != what and not (COUNT.fullmatch(name) and int(now) > int(what)):
            broken.append(f"{name} was {what}, is {now}")
    added += [f"{name}: {what}" for name, what in new.names.items() if name not in old.names]
    for name, (size, fields) in old.structs.items():
        if name in new.structs:
            lost, more = _compare_struct(name, size, fields, *new.structs[name])
            broken += lost
            added += more
        else:
            broken.append(f"struct {name} is gone")
    added += [f"struct {name}" for name in new.structs if name not in old.structs]
    return broken, added


Fields = dict[str, tuple[int, int, str]]


def _compare_struct(name: str, size: int, fields: Fields, now: int, place: Fields) -> tuple[list[str], list[str]]:
    broken, added = [], []
    for field, (offset, length, kind) in fields.items():
        if field in place and place[field] != (offset, length, kind):
            broken.append(f"{name}.{field} was {kind} at {offset} of {length} bytes, is {_shown(place[field])}")
        elif field not in place and not (RESERVED.fullmatch(field) and (offset, length) in _places(place.values())):
            broken.append(f"{name}.{field} is gone")
    reserved = _places(place for field, place in fields.items() if RESERVED.fullmatch(field))
    grows = "struct_size" in fields
    for field, (offset, length, kind) in place.items():
        if field in fields:
            continue
        if offset < size and (offset, length) not in reserved:
            broken.append(f"{name}.{field} lies inside the struct of before: fields are only appended")
        elif not grows:
            broken.append(f"{name}.{field} is new, in a struct without struct_size")
        else:
            added.append(f"{name}.{field}: {kind} at {offset}")
    if now < size or (now != size and not grows):
        broken.append(f"{name} was {size} bytes, is {now}")
    return broken, added


def _places(fields: Iterable[tuple[int, int, str]]) -> set[tuple[int, int]]:
    return {(offset, length) for offset, length, _ in fields}


def _shown(field: tuple[int, int, str]) -> str:
    return f"{field[2]} at {field[0]} of {field[1]} bytes"


def allows_a_break(old: str, new: str) -> bool:
    """Whether a version may break what one of before promised."""
    before, after = ([int(part) for part in version.split(".")] for version in (old, new))
    if len(before) == 1:  # the kernel interface
        return after > before
    length = 2 if before[0] == 0 else 1
    return after[:length] > before[:length]


def check(golden: str, new: Interface, name: str) -> tuple[list[str], bool]:
    """What to print of one header, and whether it may be released with this version."""
    old = parse(golden)
    broken, added = compare(old, new)
    if "." not in old.version:  # both sides of the kernel interface are ours: nothing changes under one number
        broken, added = broken + [f"{line} (new)" for line in added], []
    allowed = allows_a_break(old.version, new.version)
    lines = [f"{name}: new since {old.version}: {line}" for line in added]
    lines += [f"{name}: {'changed' if allowed else 'BROKEN'} since {old.version}: {line}" for line in broken]
    if broken and not allowed:
        lines.append(f"{name}: version {new.version} promises what {old.version} had (docs/compatibility.md)")
    lines.append(f"{name}: {len(new.names)} names, {len(new.structs)} structs, {len(added)} new since {old.version}")
    return lines, allowed or not broken


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the headers with the goldens of the last release.")
    parser.add_argument("--write", action="store_true", help="make the goldens anew, for a release")
    options = parser.parse_args()
    found = {path: interface(path) for path in GOLDENS}
    good = True
    for path, golden in GOLDENS.items():
        if golden.exists():
            lines, fits = check(golden.read_text(encoding="utf-8"), found[path], path.name)
            print("\n".join(lines))
        else:  # before the first release, and never after
            fits = options.write
            print(f"{path.name}: no golden {golden.relative_to(ROOT)}")
        good = good and fits
    if options.write and good:
        for path, golden in GOLDENS.items():
            golden.write_text(found[path].text(), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
