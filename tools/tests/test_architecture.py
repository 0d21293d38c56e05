"""Holds the invariants of ARCHITECTURE.md that a look at the sources can hold, and the page itself."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
GO_STRING_OR_NAME = re.compile(r'"[^"\n]*"|`[^`]*`|\w+')
ENGINE_NAMES = re.compile(r"cuda|nvshmem|libdeepep_cpu", re.I)
HANDS_OVER = re.compile(r"\bgo (?:func\b|\w+(?:\.\w+)*\()|<-|\bselect \{|\bmake\(chan\b")
DEVICE_POLL = re.compile(r"\bwhile \([^{;]*(?:ptx::ld_|try_wait|volatile|nvshmem)")


def table(heading: str) -> list[list[str]]:
    """The cells of each row of the first table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def sources(*patterns: str, root: pathlib.Path = ROOT) -> Iterator[tuple[str, str]]:
    """Path and text, without comments, of each file that matches; tests are left out."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            if not re.search(r"_test\.go$|testdata|testutil|testtransport|/tests/", name):
                text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
                yield name, re.sub(r"(?m)(?<!:)//.*$", "", text)


def found(pattern: re.Pattern[str], files: Iterator[tuple[str, str]]) -> set[str]:
    """The files in which the pattern occurs."""
    return {name for name, text in files if pattern.search(text)}


def engine_names(root: pathlib.Path = ROOT) -> set[str]:
    """Packages of internal/ whose identifiers or strings name an engine."""
    return {
        str(pathlib.Path(name).parent)
        for name, text in sources("internal/**/*.go", root=root)
        if any(ENGINE_NAMES.search(word) for word in GO_STRING_OR_NAME.findall(text))
    }


def torch_importers(folder: pathlib.Path) -> set[str]:
    """Modules that import torch when they are imported or used; imports for type checkers alone do not count."""
    names = set()
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for branch in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
            if "TYPE_CHECKING" in ast.unparse(branch.test):
                branch.body = [ast.Pass()]
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            if any(module.split(".")[0] == "torch" for module in modules):
                names.add(str(path.relative_to(folder)))
    return names


def test_each_invariant_names_a_test_that_is_there() -> None:
    rows = table("Invariants")
    assert len(rows) > 10
    for invariant, held_by in rows:
        references = re.findall(r"`([^`:]+): ([^`]+)`", held_by)
        assert references, f"nothing holds: {invariant}"
        for path, name in references:
            assert name in (ROOT / path).read_text(), f"{path} has no {name}, which holds: {invariant}"


def test_the_glossary_is_short() -> None:
    words = [row[0] for row in table("Glossary")]
    assert 10 < len(words) <= 25
    assert len(set(words)) == len(words)


def test_paths_of_the_code_map_are_there() -> None:
    for row in table("Code map"):
        for path in re.findall(r"`([\w./]+)`", row[0]):
            assert (ROOT / path).exists(), path


def test_go_below_core_names_no_engine() -> None:
    assert engine_names() <= {"internal/env", "internal/doctor", "internal/doctor/libs"}


def test_launches_hand_nothing_over() -> None:
    files = sources("internal/engine/*.go", "internal/device/*.go", "internal/kern/*.go", "internal/dl/*.go")
    names = ("buffer", "build", "destroy", "heap", "release", "succession", "symmetric_heap")
    start_and_end = {f"internal/engine/{name}.go" for name in names}
    assert found(HANDS_OVER, files) <= start_and_end


def test_kernels_include_neither_go_nor_torch() -> None:
    files = sources("kernels/**/*.[ch]*", "kernels/**/*.cu*", "nvshmem/**/*.[ch]*")
    assert found(re.compile(r"#\s*include\s*[<\"](?:torch|ATen|c10|Python|_cgo|deepep)"), files) == set()


def test_inline_assembly() -> None:
    assert found(re.compile(r"\basm\b"), sources("kernels/cuda/**/*.cuh", "nvshmem/**/*.cu*")) == {
        "kernels/cuda/common/ptx.cuh"
    }


def test_device_code_polls_in_one_place() -> None:
    # send_rows.cuh: a warp waits there for warps of its own block, or for a copy that it issued itself.
    block_local = {"kernels/cuda/impl/normal/send_rows.cuh"}
    files = sources("kernels/cuda/**/*.cuh", "nvshmem/**/*.cu*")
    assert found(DEVICE_POLL, files) - {"kernels/cuda/sync/wait.cuh"} <= block_local


def test_python_modules_that_import_torch() -> None:
    importers = torch_importers(ROOT / "python" / "deep_ep")
    assert "_torch.py" in importers
    apart = ("selftest", "ops", "nn", "integrations")  # imported when they are asked for
    assert {name for name in importers if not name.startswith(apart)} <= {"_torch.py", "_memory.py"}


@pytest.mark.parametrize(
    "text, seen",
    [
        ('package x\nconst e = "cuda"\n', True),
        ("package x\nfunc isCUDA() {}\n", True),
        ("package x\n// CUDA in a comment\nvar a int\n", False),
    ],
)
def test_an_engine_name_is_seen(tmp_path: pathlib.Path, text: str, seen: bool) -> None:
    (tmp_path / "internal" / "x").mkdir(parents=True)
    (tmp_path / "internal" / "x" / "x.go").write_text(text)
    assert engine_names(tmp_path) == ({"internal/x"} if seen else set())


@pytest.mark.parametrize(
    "pattern, text",
    [
        (HANDS_OVER, "go func() {}()"),
        (HANDS_OVER, "go b.run()"),
        (HANDS_OVER, "v := <-c"),
        (DEVICE_POLL, "while (posted - ptx::ld_acquire_cta(&queue->published) >= kQueueLength) {"),
        (DEVICE_POLL, "while (!ptx::mbarrier_try_wait(&queue->arrived[stage], 1)) {"),
        (DEVICE_POLL, "while (*static_cast<volatile int *>(flag) == 0) {"),
    ],
)
def test_what_the_patterns_look_for_is_seen(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
    assert not pattern.search("while (low < high) { category = goal(x); }")


def test_an_import_of_torch_is_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from torch.cuda import Stream\n")
    (tmp_path / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n")
    assert torch_importers(tmp_path) == {"a.py"}
