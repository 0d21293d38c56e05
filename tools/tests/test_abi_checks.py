"""The checks of symbols and layouts see what they are there to see."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import types

import pytest

import abi_check
import abi_layout

SONAME = abi_check.soname()
HEADER = """
#include <stdint.h>
/* dk_in_a_comment(int) */
#define DK_MACRO(x) dk_in_a_macro(x)
typedef void (*dk_callback_fn)(int);
typedef struct dk_one_params { uint32_t size; int32_t a, b[3]; const char *c; } dk_one_params;
int32_t dk_one(dk_one_params *p);
int32_t dk_two(
    int32_t x);
"""


def library(folder: pathlib.Path, source: str, *options: str, name: str = "libdeepep_x.so") -> pathlib.Path:
    path = folder / name
    command = ["gcc", "-shared", "-fPIC", "-o", str(path), "-xc", "-", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_declared_functions() -> None:
    assert abi_check.declared("dk", HEADER) == {"dk_one", "dk_two"}


def test_an_exact_library_has_no_problem(tmp_path: pathlib.Path) -> None:
    path = library(tmp_path, "int dk_one(void) { return 1; }", name=SONAME)
    assert abi_check.problems(path, {"dk_one"}) == [f"has soname [], wanted {SONAME}"]
    path = library(tmp_path, "int dk_one(void) { return 1; }", f"-Wl,-soname,{SONAME}", name=SONAME)
    assert abi_check.problems(path, {"dk_one"}) == []


def test_symbols_too_many_and_too_few(tmp_path: pathlib.Path) -> None:
    path = library(tmp_path, "int dk_one(void) { return 1; } int helper(void) { return 2; }")
    assert abi_check.problems(path, {"dk_one", "dk_two"}) == [
        "does not export dk_two",
        "exports what no header declares: helper",
    ]


def test_an_optional_group_is_there_as_a_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    wanted = {"dk_one"}.union(*abi_check.OPTIONAL)
    path = library(tmp_path, "int dk_one(void) { return 1; }")
    assert abi_check.problems(path, wanted) == []
    path = library(tmp_path, "int dk_one(void) { return 1; } int dk_transport_free(void) { return 2; }")
    (line,) = abi_check.problems(path, wanted)
    assert "dk_transport_attach" in line and "dk_transport_open" not in line


def test_a_needed_library_is_seen(tmp_path: pathlib.Path) -> None:
    path = library(tmp_path, "int dk_one(void) { return 1; }", "-Wl,--no-as-needed", "-lstdc++")
    assert "needs libstdc++.so.6" in "".join(abi_check.problems(path, {"dk_one"}))


def test_a_newer_c_library_is_seen(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library(tmp_path, '#include <stdio.h>\nint dk_one(void) { return puts(""); }')
    assert abi_check.problems(path, {"dk_one"}) == []
    monkeypatch.setattr(abi_check, "GLIBC_NEWEST", (2, 1))
    assert "needs glibc 2." in "".join(abi_check.problems(path, {"dk_one"}))


def test_layout_of_a_struct(tmp_path: pathlib.Path) -> None:
    header = tmp_path / "x.h"
    header.write_text(HEADER)
    golden = abi_layout.layout(header)
    assert golden == "dk_one_params 32\n  size 0 4\n  a 4 4\n  b 8 12\n  c 24 8\n"
    header.write_text(HEADER.replace("b[3]", "b[4]"))
    assert "+  b 8 16" in abi_layout.difference(golden, abi_layout.layout(header), "golden", "header")


def test_a_widened_ctypes_field_is_seen() -> None:
    class OneParams(ctypes.Structure):
        _fields_ = [("size", ctypes.c_uint32), ("a", ctypes.c_int64)]

    module = types.ModuleType("mirror")
    module.OneParams = OneParams  # type: ignore[attr-defined]
    want = abi_layout.as_ctypes_names("deepep_one_params 8\n  size 0 4\n  a 4 4\n")
    assert "+  a 8 8" in abi_layout.difference(want, abi_layout.ctypes_layout(module), "header", "ctypes")
