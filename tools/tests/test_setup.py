"""Set-up: missing tools are named in one line, and a second run builds nothing."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def check_tools(*tools: str, **programs: str) -> subprocess.CompletedProcess[str]:
    command = ["tools/check_tools.sh", *tools]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **programs}, capture_output=True, text=True)


def program(folder: pathlib.Path, text: str) -> str:
    """An executable script that says `text`."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


def test_present_tools_pass_in_silence() -> None:
    result = check_tools("go", "cc", "cxx", "python", PYTHON=sys.executable)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "tool, variable, description",
    [
        ("go", "GO", "Go 1.25 or newer"),
        ("cc", "CC", "a C compiler"),
        ("cxx", "CXX", "a C++ compiler"),
        ("python", "PYTHON", "Python 3.10 or newer"),
    ],
)
def test_a_missing_tool_is_named(tool: str, variable: str, description: str) -> None:
    result = check_tools(tool, **{variable: "no-such-program"})
    assert result.returncode == 1
    assert result.stderr == f"make: needed: {description} ('no-such-program' not found)\n"


def test_a_missing_cross_compiler_is_named_with_its_package() -> None:
    result = check_tools("cxx", CXX="riscv64-linux-gnu-g++")
    hint = "; on Debian: apt-get install g++-riscv64-linux-gnu"
    assert result.stderr == f"make: needed: a C++ compiler ('riscv64-linux-gnu-g++' not found{hint})\n"


@pytest.mark.parametrize(
    "version, good", [("go1.24.11", False), ("go1.9", False), ("go1.25", True), ("go1.30.1", True)]
)
def test_go_versions(tmp_path: pathlib.Path, version: str, good: bool) -> None:
    result = check_tools("go", GO=program(tmp_path, version))
    assert result.returncode == (0 if good else 1)
    assert good or f"is {version[2:]})" in result.stderr


@pytest.mark.parametrize("version, good", [("3.9", False), ("2.7", False)])
def test_python_versions(tmp_path: pathlib.Path, version: str, good: bool) -> None:
    result = check_tools("python", PYTHON=program(tmp_path, version))
    assert result.returncode == (0 if good else 1)
    assert f"is {version})" in result.stderr


def test_all_problems_come_in_one_line() -> None:
    result = check_tools("go", "cxx", GO="no-go", CXX="no-cxx")
    assert len(result.stderr.splitlines()) == 1
    assert "no-go" in result.stderr and "no-cxx" in result.stderr


def test_make_stops_at_a_missing_tool_before_it_builds() -> None:
    command = ["make", "--no-print-directory", "test", "GO=no-such-go"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode != 0
    assert result.stdout == ""
    assert result.stderr.startswith("make: needed: Go 1.25 or newer ('no-such-go' not found)\n")


PARTS = ["venv", "lib", "kernels", "program", "kernel-tests"]  # what `make test` builds


def made(*options: str) -> str:
    """What make says for the parts that are there already."""
    command = ["make", "--no-print-directory", *options, *PARTS]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_second_run_builds_nothing() -> None:
    assert re.sub(r"make: Nothing to be done for .*\n", "", made()) == ""


def test_a_changed_source_is_built() -> None:
    """The check above can fail: with a header that is newer than the library, make has something to do."""
    header = ROOT / "include" / "deepep.h"
    before = header.stat()
    try:
        os.utime(header)
        assert "-buildmode=c-shared" in made("--dry-run")
    finally:
        os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "-buildmode=c-shared" not in made("--dry-run")


def test_the_environment_imports_the_source_tree() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('deep_ep').origin)"
    python = str(ROOT / ".venv" / "bin" / "python")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    origin = subprocess.run([python, "-c", code], cwd="/", env=clean, capture_output=True, text=True, check=True).stdout
    assert origin.strip() == str(ROOT / "python" / "deep_ep" / "__init__.py")


def test_the_program_is_in_the_environment() -> None:
    """As after `source .venv/bin/activate`, and it finds the kernel libraries of the tree."""
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DEEPEP_")} | {"PATH": path}
    command = "deepep bench dispatch --engine cpu --ranks 1 --tokens 4 --hidden 64 --experts 2 --top-k 1 --iterations 1"
    done = subprocess.run(command.split(), cwd="/", env=clean, capture_output=True, text=True)
    assert done.returncode == 0 and "dispatch" in done.stdout, done.stderr
