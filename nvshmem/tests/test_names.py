"""No name is defined twice in one namespace of the sources that libdeepep_nvshmem.so links.

Two definitions that differ break the one-definition rule without a word from compiler or linker: each file sees one of
them, and inline functions of either are merged.
"""

from __future__ import annotations

import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
# libdeepep_cuda.so alone links these: nvshmem/ defines the same functions.
CUDA_ALONE = {"info.cu", "internode_none.cu"}

LITERAL_OR_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
NAMESPACE = re.compile(r"\bnamespace\s*([\w:]*)\s*$")
TYPE = re.compile(
    r"\b(?:struct|class|union|enum(?:\s+class)?)\s+(?:alignas\s*\([^)]*\)\s*)?(\w+)\s*(?:final\s*)?(?::[^:].*)?$", re.S
)
FUNCTION = re.compile(r"([\w:~]+)\s*\(([^{}]*)\)\s*(?:const\s*)?(?:noexcept\s*)?(?::[^:].*)?$", re.S)
CONSTANT = re.compile(r"\bconstexpr\b[^=(]*?(\w+)\s*=")


def signature(parameters: str) -> str:
    """Their types: overloads are no duplicates."""
    return ",".join(re.sub(r"\s*\b\w+\s*$", "", one.split("=")[0]).replace(" ", "") for one in parameters.split(","))


def definitions(text: str) -> set[tuple[str, str]]:
    """(namespace, name) of each type, function with a body, and constant at namespace level; unnamed namespaces not."""
    text = re.sub(r"__launch_bounds__\([^)]*\)", "", text)
    text = DIRECTIVE.sub("", LITERAL_OR_COMMENT.sub(lambda m: '""' if m[0][0] == '"' else " ", text))
    found: set[tuple[str, str]] = set()
    scopes: list[str | None] = []  # of open braces: a namespace's name, "" if it has none, or None: no namespace
    head = ""
    for part in re.split(r"([{};])", text):
        at_namespace = None not in scopes and "" not in scopes
        where = "::".join(name for name in scopes if name)
        if part == "{":
            opened = NAMESPACE.search(head)
            scopes.append(opened[1] if opened else None)
            if not opened and at_namespace and 'extern ""' not in head and "DK_EXPORT" not in head:
                if defined := TYPE.search(head):
                    found.add((where, defined[1]))
                elif defined := FUNCTION.search(head):
                    *inner, name = defined[1].split("::")
                    found.add(("::".join([where, *inner]), f"{name}({signature(defined[2])})"))
        elif part == "}":
            scopes.pop()
        elif part != ";" and at_namespace:
            found |= {(where, name) for name in CONSTANT.findall(part)}
        head = part if part not in "{};" else ""
    assert not scopes
    return found


def sources() -> list[pathlib.Path]:
    trees = [
        ROOT / "kernels" / "cuda",
        *(path for path in (ROOT / "nvshmem").iterdir() if path.name not in ("tests", "testtransport")),
    ]
    files = [file for tree in trees for file in ([tree] if tree.is_file() else sorted(tree.rglob("*")))]
    return [file for file in files if file.suffix in (".cu", ".cuh", ".h") and file.name not in CUDA_ALONE]


def test_each_name_has_one_definition_in_its_namespace() -> None:
    where = collections.defaultdict(set)
    for file in sources():
        for key in definitions(file.read_text()):
            where[key].add(str(file.relative_to(ROOT)))
    assert ("deepep", "Scratch") in where and ("deepep::internode", "TokenRows") in where  # it sees both trees
    assert {"::".join(key): files for key, files in where.items() if len(files) > 1} == {}


def test_the_check_sees_what_it_is_for() -> None:
    text = """
    #define OPEN {
    namespace a { namespace b { enum : int { kOne };
    template <class T> struct List : Base<T> { int inner() { return 1; } };
    struct Declared; int declared(int); constexpr int kMax = 3; inline int f(int x) { return x; } } }
    namespace a { namespace { struct Hidden {}; } int b::g() { return 2; } }
    """
    assert definitions(text) == {("a::b", "List"), ("a::b", "kMax"), ("a::b", "f(int)"), ("a::b", "g()")}
