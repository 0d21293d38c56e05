"""The reference of the C++ header: a page in reStructuredText made of include/deepep.hpp."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from cxxheaderparser.simple import parse_string

TITLE = "C++: deepep.hpp"


def comment_of(item: Any) -> str:
    lines = [re.sub(r"^\s*///? ?", "", line) for line in (item.doxygen or "").split("\n")]
    return literal(" ".join(lines))


def literal(text: str) -> str:
    """reStructuredText of a comment: names and backquoted text as code."""
    parts = []
    for part in re.split(r"(`[^`]+`|\b(?:deepep|DEEPEP)_\w+\*?|\b\w+\(\))", text):
        is_code = re.fullmatch(r"`[^`]+`|(?:deepep|DEEPEP)_\w+\*?|\w+\(\)", part)
        parts.append(f"``{part.strip('`')}``\\ " if is_code else re.sub(r"([\\*|<>])", r"\\\1", part))
    return re.sub(r"``\\ (?=[\s.,;:)]|$)", "``", "".join(parts)).strip()


def signature(f: Any, name: str) -> str:
    parameters = []
    for parameter in f.parameters:
        default = f" = {parameter.default.format()}" if parameter.default else ""
        parameters.append(f"{parameter.type.format_decl(parameter.name or '')}{default}")
    result = "" if f.return_type is None else f"{f.return_type.format()} "
    ending = "".join(f" {word}" for word in ("const", "noexcept") if getattr(f, word, None))
    return f"{'explicit ' if getattr(f, 'explicit', False) else ''}{result}{name}({', '.join(parameters)}){ending}"


def function(f: Any, indent: str) -> list[str]:
    return [
        f"{indent}.. cpp:function:: {signature(f, f.name.segments[-1].name)}",
        "",
        f"{indent}   {comment_of(f)}",
        "",
    ]


def class_of(scope: Any) -> list[str]:
    item = scope.class_decl
    bases = ", ".join(f"public {base.typename.format()}" for base in item.bases if base.access == "public")
    name = item.typename.segments[-1].name
    template = ""
    if item.template:
        template = "template<typename Handle, deepep_status_t (*Destroy)(Handle)> "
    lines = [f".. cpp:class:: {template}{name}{' : ' + bases if bases else ''}", "", f"   {comment_of(item)}", ""]
    for field in scope.fields:
        if field.access == "public":
            lines += [f"   .. cpp:member:: {field.type.format_decl(field.name)}", "", f"      {comment_of(field)}", ""]
    for method in scope.methods:
        if method.access == "public" and not (method.deleted or method.destructor):
            lines += function(method, "   ")
    return lines


def page(path: pathlib.Path) -> str:
    """The page of the header."""
    text = path.read_text(encoding="utf-8")
    # The parser keeps the comments that it takes for documentation: those with three strokes.
    head, _, body = text.partition("#ifndef")
    introduction = " ".join(line.removeprefix("//").strip() for line in head.splitlines())
    body = re.sub(r"^#.*$", "", "#ifndef" + body, flags=re.M)
    body = re.sub(r"^( *)// (?!----)", r"\1/// ", body, flags=re.M)
    space = parse_string(body).namespace.namespaces["deepep"]
    lines = [TITLE, "=" * len(TITLE), "", literal(introduction), "", ".. cpp:namespace:: deepep", ""]
    for heading, part in (
        ("Classes", [line for scope in space.classes for line in class_of(scope)]),
        ("Functions", [line for f in space.functions if not inside(f) for line in function(f, "")]),
    ):
        lines += [heading, "-" * len(heading), "", *part]
    return "\n".join(lines)


def inside(f: Any) -> bool:
    """Whether a function is the body of a method that was declared in its class."""
    return len(f.name.segments) > 1
