"""The checks of symbols and layouts see what they are there to see."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import types

import pytest

import abi_check
import abi_layout
import c_header
import emit_go
import emit_python
import generate_abi

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


SOURCES = {"public": generate_abi.PUBLIC, "kernels": generate_abi.KERNELS}


def library(folder: pathlib.Path, source: str, *options: str, name: str = "libdeepep_x.so") -> pathlib.Path:
    path = folder / name
    command = ["gcc", "-shared", "-fPIC", "-o", str(path), "-xc", "-", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_declared_functions() -> None:
    assert abi_check.declared("dk", HEADER) == {"dk_one", "dk_two"}


def test_an_exact_library_has_no_problem(tmp_path: pathlib.Path) -> None:
    path = library(tmp_path, "int dk_one(void) { return 1; }", name="libdeepep.so.1")
    assert abi_check.problems(path, {"dk_one"}) == ["has soname [], wanted libdeepep.so.1"]
    path = library(tmp_path, "int dk_one(void) { return 1; }", "-Wl,-soname,libdeepep.so.1", name="libdeepep.so.1")
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


def test_generated_files_are_what_the_headers_make_them() -> None:
    assert generate_abi.stale(generate_abi.current()) == ""


@pytest.mark.parametrize(
    ("header", "before", "after", "path"),
    [
        ("public", "a peer died", "a peer is dead", "internal/status/codes.go"),
        ("public", '"low_latency_combine"', '"ll_combine"', "core/op/constants.go"),
        ("public", "int32_t num_max_tokens; ", "int64_t num_max_tokens; ", "core/op/args.go"),
        ("public", "DEEPEP_HANDLE_VERSION 1u", "DEEPEP_HANDLE_VERSION 2u", "python/deep_ep/_abi.py"),
        ("kernels", "DK_STATUS_BYTES 4096", "DK_STATUS_BYTES 8192", "internal/abi/constants.go"),
        ("kernels", "uint64_t progress;", "uint32_t progress;", "internal/abi/structs.go"),
        ("kernels", "int32_t dk_mask(dk_mask_params *p);", "", "internal/kern/functions.go"),
    ],
)
def test_a_changed_header_is_seen(header: str, before: str, after: str, path: str) -> None:
    text = {name: (generate_abi.ROOT / file).read_text() for name, file in SOURCES.items()}
    assert before in text[header]
    text[header] = text[header].replace(before, after)
    files = generate_abi.generate(*(c_header.parse(text[name], name) for name in SOURCES))
    assert path in generate_abi.stale(files)


def test_constants_of_both_headers_are_compared() -> None:
    text = {name: (generate_abi.ROOT / file).read_text() for name, file in SOURCES.items()}
    changed = text["kernels"].replace("DK_OP_BARRIER = 8", "DK_OP_BARRIER = 18")
    with pytest.raises(SystemExit, match="DEEPEP_OP_BARRIER is 8 in deepep.h, DK_OP_BARRIER is 18 in kernels.h"):
        generate_abi.generate(c_header.parse(text["public"], "deepep.h"), c_header.parse(changed, "kernels.h"))


def test_fields_constants_and_functions_of_a_header() -> None:
    text = """
    /* Words of the section. */

    /* How many. */
    enum { DK_A = 1, /* one */ DK_B_LL = 0x10 };
    #define DK_N 4u /* of them */
    /* What it is. */
    typedef struct dk_x_params {
      uint32_t size; /* bytes */
      /* above */
      const char *a, b[DK_N]; /* beside */
    } dk_x_params;
    int32_t dk_x(dk_x_params *p); /* what it does */
    """
    header = c_header.parse(text, "x.h")
    assert header.enums[0].comment == "How many."
    assert [(c.name, c.value, c.comment) for c in header.enums[0].constants] == [
        ("DK_A", 1, "one"),
        ("DK_B_LL", 16, ""),
    ]
    assert [(c.name, c.value, c.comment) for c in header.defines] == [("DK_N", 4, "of them")]
    assert header.structs[0].comment == "What it is."
    assert [(f.name, f.type, f.length, f.comment) for f in header.structs[0].fields] == [
        ("size", "uint32_t", None, "bytes"),
        ("a", "const char *", None, "above beside"),
        ("b", "const char", "DK_N", "above beside"),
    ]
    assert [(f.name, f.arguments, f.comment) for f in header.functions] == [("dk_x", "dk_x_params *p", "what it does")]
    with pytest.raises(AssertionError, match="cannot read"):
        c_header.parse("static int x = 3;", "x.h")


def test_go_names() -> None:
    names = {
        "dk_ll_dispatch_params": "LLDispatchParams",
        "num_topk": "NumTopK",
        "min_nvl_bytes": "MinNVLBytes",
        "use_ue8m0": "UseUE8M0",
        "num_qps": "NumQPs",
    }
    assert {c: emit_go.name(c, "dk_") for c in names} == names


def test_a_misspelt_field_of_a_ctypes_struct_is_refused() -> None:
    header = c_header.parse("typedef struct deepep_one { uint32_t struct_size; int32_t is_async; } deepep_one;", "x.h")
    module: dict[str, object] = {"__name__": "mirror"}
    exec(emit_python.emit(header), module)
    one = module["sized"](module["One"], is_async=1)  # type: ignore[operator]
    assert (one.struct_size, one.is_async) == (8, 1)
    with pytest.raises(AttributeError):
        one.is_asinc = 1
    with pytest.raises(AttributeError):
        module["sized"](module["One"], async_=1)  # type: ignore[operator]
