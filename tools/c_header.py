"""Reads deepep.h and kernels.h: structs, constants, functions and the comments that belong to each.

Only what these two headers use is understood; anything else is an error, never skipped. A comment belongs to the
declaration in front of it if both are on one line, else to the declaration that follows.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path


@dataclasses.dataclass
class Field:
    """`type` is "int32_t", "const void *" and the like; `length` an array's as written, "" for "[]", None for none."""

    name: str
    type: str
    length: str | None
    comment: str


@dataclasses.dataclass
class Struct:
    """`macros` names what the body begins with (DK_HEADER;), whose fields are not among `fields`."""

    name: str
    macros: list[str]
    fields: list[Field]
    comment: str


@dataclasses.dataclass
class Constant:
    """`text` is what an X-macro gives beside name and value."""

    name: str
    value: int
    literal: str
    text: str
    comment: str


@dataclasses.dataclass
class Enum:
    """The constants of one enum; `mapped` says that they come from an X-macro."""

    constants: list[Constant]
    comment: str
    mapped: bool = False


@dataclasses.dataclass
class Function:
    result: str
    name: str
    arguments: str
    comment: str


@dataclasses.dataclass
class Header:
    name: str
    structs: list[Struct]
    enums: list[Enum]
    defines: list[Constant]  # macros whose value is a number
    macros: dict[str, Struct]  # macros whose value is a list of fields
    functions: list[Function]

    def constants(self) -> dict[str, int]:
        """Every constant of the header."""
        found = [c for e in self.enums for c in e.constants] + self.defines
        return {constant.name: constant.value for constant in found}


MARK = re.compile(r"\x01(\d+)\x01")  # a comment, by its number
NUMBER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*")


def read(path: Path) -> Header:
    """The contents of a header."""
    return parse(path.read_text(encoding="utf-8"), path.name)


def parse(text: str, name: str) -> Header:
    """The contents of a header's text."""
    return _Parser(text, name).header


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.comments: list[str] = []
        self.maps: dict[str, list[tuple[str, int, str, str]]] = {}
        self.header = Header(name, [], [], [], {}, [])
        text = re.sub(r"\\\n", " ", text)
        code = re.sub(r"/\*.*?\*/", self._keep, text, flags=re.S)
        code = self._directives(code)
        self._declarations(code)

    def _keep(self, match: re.Match[str]) -> str:
        """Puts a mark in a comment's place. Section rules and formatter marks belong to nothing."""
        body = match[0][2:-2]
        if body.strip().startswith(("----", "clang-format")):
            return ""
        self.comments.append(" ".join(re.sub(r"\n\s*\*", "\n", body).split()))
        return f"\x01{len(self.comments) - 1}\x01"

    def _comment(self, marked: str) -> str:
        return " ".join(self.comments[int(number)] for number in MARK.findall(marked))

    def _directives(self, code: str) -> str:
        """Takes the lines of the preprocessor out and keeps the macros among them that declare something."""
        rest: list[str] = []
        inside_extern = False
        for line in code.split("\n"):
            if line.strip() == 'extern "C" {':
                inside_extern = True
                rest.append("")
            elif line.strip() == "}" and inside_extern:
                inside_extern = False
            elif re.match(r"\s*#", line):
                # Marks above a macro are the macro's: what follows must not take them for its own.
                above = self._trailing_marks(rest)
                self._define(line, above)
            else:
                rest.append(line)
        return "\n".join(rest)

    def _trailing_marks(self, lines: list[str]) -> str:
        taken: list[str] = []
        while lines and MARK.fullmatch(lines[-1].strip()):
            taken.insert(0, lines.pop())
        return "".join(taken)

    def _define(self, line: str, above: str) -> None:
        match = re.match(r"\s*#define (\w+)(\(\w+\))?\s*(.*)", line)
        if not match:
            return
        name, parameter, value = match.groups()
        comment = self._comment(above + value)
        plain = MARK.sub("", value).strip()
        if parameter:
            items = re.findall(r'X\((\w+), (\d+), "([^"]*)"\)\s*((?:\x01\d+\x01)?)', value)
            self.maps[name] = [(item, int(number), text, self._comment(mark)) for item, number, text, mark in items]
        elif number := NUMBER.fullmatch(plain):
            self.header.defines.append(Constant(name, int(number[1], 0), number[1], "", comment))
        elif re.match(r"(?:\w+_t|[A-Z_]+;)", plain):
            macros, fields = self._fields(value)
            self.header.macros[name] = Struct(name, macros, fields, comment)

    def _declarations(self, code: str) -> None:
        position = 0
        while position < len(code):
            end = _statement_end(code, position)
            if end < 0:
                rest = MARK.sub("", code[position:]).strip()
                assert not rest, f"{self.header.name}: cannot read {rest!r}"
                return
            # A comment on the line on which the statement ends is the statement's.
            tail = re.match(r"(?:[ \t]*\x01\d+\x01)*", code[end:])
            assert tail
            self._declaration(code[position:end], tail[0])
            position = end + len(tail[0])

    def _declaration(self, statement: str, tail: str) -> None:
        lead = re.match(r"(?:\s*\x01\d+\x01)*\s*", statement)
        assert lead
        above = re.split(r"\n[ \t]*\n", lead[0])[-1]  # a comment with an empty line below is of the section
        code, comment = statement[lead.end() :], self._comment(above + tail)
        flat = " ".join(MARK.sub("", code).split())
        if match := re.match(r"typedef struct (\w+) \{(.*)\} \1;", flat):
            macros, fields = self._fields(code[code.index("{") + 1 : code.rindex("}")])
            self.header.structs.append(Struct(match[1], macros, fields, comment))
        elif flat.startswith("enum {"):
            self._enum(code[code.index("{") + 1 : code.rindex("}")], comment)
        elif match := re.fullmatch(r"((?:const )?\w+ \*?)(\w+)\((.*)\);", flat):
            self.header.functions.append(Function(match[1], match[2], match[3].strip(), comment))
        else:
            assert flat.startswith("typedef "), f"{self.header.name}: cannot read {flat!r}"

    def _enum(self, body: str, comment: str) -> None:
        enum = Enum([], comment)
        for name, entries in self.maps.items():
            if name in body:
                prefix, enum.mapped = _prefix(name), True
                enum.constants += [Constant(f"{prefix}{item}", n, str(n), t, c) for item, n, t, c in entries]
                body = re.sub(rf"{name}\(\w+\)", "", body)
        pattern = r"((?:\s*\x01\d+\x01)*)\s*(\w+)\s*=\s*(\w+)\s*((?:\x01\d+\x01)?)\s*,?((?:[ \t]*\x01\d+\x01)*)"
        for above, name, literal, inner, after in re.findall(pattern, body):
            number = NUMBER.fullmatch(literal)
            assert number, f"{self.header.name}: {name} = {literal}"
            comment = self._comment(above + inner + after)
            enum.constants.append(Constant(name, int(number[1], 0), number[1], "", comment))
        assert enum.constants, f"{self.header.name}: an enum without constants"
        self.header.enums.append(enum)

    def _fields(self, body: str) -> tuple[list[str], list[Field]]:
        """The fields of a struct's body, and the macros that it begins with."""
        macros: list[str] = []
        fields: list[Field] = []
        for part in re.findall(r"[^;]+(?:;(?:[ \t]*\x01\d+\x01)*|$)", body):
            lead = re.match(r"((?:\s*\x01\d+\x01)*)([^;]*);?(.*)", part, re.S)
            assert lead
            declaration = " ".join(MARK.sub("", lead[2]).split())
            comment = self._comment(part)
            if not declaration:
                continue
            if re.fullmatch(r"[A-Z_]+", declaration):
                macros.append(declaration)
                continue
            match = re.fullmatch(r"((?:const )?\w+) (.*)", declaration)
            assert match, f"{self.header.name}: cannot read field {declaration!r}"
            for item in match[2].split(","):
                field = re.fullmatch(r"(\*?)\s*(\w+)(?:\[(\w*)\])?", item.strip())
                assert field, f"{self.header.name}: cannot read field {declaration!r}"
                kind = match[1] + (" *" if field[1] else "")
                fields.append(Field(field[2], kind, field[3], comment))
        return macros, fields


def _prefix(map_name: str) -> str:
    """DEEPEP_STATUS_MAP makes DEEPEP_OK and so on, each other X-macro DEEPEP_OP_MAP makes DEEPEP_OP_LAYOUT."""
    return "DEEPEP_" if map_name == "DEEPEP_STATUS_MAP" else map_name.removesuffix("MAP")


def _statement_end(code: str, start: int) -> int:
    """The place after the semicolon that ends the statement at `start`; -1 if there is none."""
    depth = 0
    for place in range(start, len(code)):
        if code[place] in "{(":
            depth += 1
        elif code[place] in "})":
            depth -= 1
        elif code[place] == ";" and depth == 0:
            return place + 1
    return -1
