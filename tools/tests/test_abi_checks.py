"""The checks of symbols and layouts see what they are there to see."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import types

import pytest

import abi_check
import abi_layout
import abi_release
import c_header
import emit_go
import emit_python
import generate_abi

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


SOURCES = {"public": generate_abi.PUBLIC, "kernels": generate_abi.KERNELS}


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


RELEASED = """
#include <stdint.h>
#define DEEPEP_VERSION_MAJOR 0
#define DEEPEP_VERSION_MINOR 7
#define DEEPEP_VERSION_PATCH 0
#define DEEPEP_HANDLE_MAGIC 0x44504548u
typedef void (*deepep_log_fn)(int32_t level, const char *message);
typedef struct deepep_group *deepep_group_t;
enum { DEEPEP_ONE = 1, DEEPEP_TWO = 2, DEEPEP_COUNT = 3 };
typedef struct deepep_one { uint32_t struct_size; int32_t a, reserved0; const char *b; } deepep_one;
typedef struct deepep_config { int32_t x, y; } deepep_config;
int32_t deepep_first(deepep_group_t group, const void *send);
int32_t deepep_second(void);
"""


GOLDEN = """version 0.7.0
DEEPEP_ONE: 1
DEEPEP_TWO: 2
DEEPEP_COUNT: 3
DEEPEP_HANDLE_MAGIC: 1146111304
deepep_log_fn: void (*)(int32_t, const char *)
deepep_group_t: struct deepep_group *
deepep_first: int32_t (deepep_group_t, const void *)
deepep_second: int32_t (void)
deepep_one 24
  struct_size 0 4 uint32_t
  a 4 4 int32_t
  reserved0 8 4 int32_t
  b 16 8 const char *
deepep_config 8
  x 0 4 int32_t
  y 4 4 int32_t
"""


def released(folder: pathlib.Path, *changes: tuple[str, str]) -> abi_release.Interface:
    text = RELEASED
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "deepep.h"
    path.write_text(text)
    return abi_release.interface(path)


def test_the_golden_of_a_header(tmp_path: pathlib.Path) -> None:
    assert released(tmp_path).text() == GOLDEN


FIRST, LOG = "(deepep_group_t, const void *)", "(int32_t, const char *)"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("deepep_second: int32_t (void)\n", "", "deepep_second is gone; it was int32_t (void)"),
        (FIRST, "(deepep_group_t, void *)", f"deepep_first was int32_t {FIRST}, is int32_t (deepep_group_t, void *)"),
        (FIRST, "(deepep_group_t, const void *, int32_t)", f"deepep_first was int32_t {FIRST}, is"),
        (LOG, "(int64_t, const char *)", f"deepep_log_fn was void (*){LOG}, is void (*)(int64_t, const char *)"),
        ("DEEPEP_TWO: 2", "DEEPEP_TWO: 4", "DEEPEP_TWO was 2, is 4"),
        ("DEEPEP_TWO: 2\n", "", "DEEPEP_TWO is gone; it was 2"),
        ("DEEPEP_COUNT: 3", "DEEPEP_COUNT: 2", "DEEPEP_COUNT was 3, is 2"),
        ("MAGIC: 1146111304", "MAGIC: 5", "DEEPEP_HANDLE_MAGIC was 1146111304, is 5"),
        ("  a 4 4 int32_t\n", "  a 8 4 int32_t\n", "deepep_one.a was int32_t at 4 of 4 bytes, is int32_t at 8 of 4"),
        ("  a 4 4 int32_t\n", "", "deepep_one.a is gone"),
        ("  a 4 4 int32_t\n", "  c 4 4 int32_t\n", "deepep_one.a is gone"),
        ("  a 4 4 int32_t\n", "  a 4 4 uint32_t\n", "deepep_one.a was int32_t at 4 of 4 bytes, is uint32_t at 4 of 4"),
        ("  b 16 8 const char *\n", "  n 16 8 int64_t\n  b 24 8 const char *\n", "deepep_one.n lies inside the struct"),
        ("deepep_one 24\n", "deepep_one 16\n", "deepep_one was 24 bytes, is 16"),
        ("  y 4 4 int32_t\n", "  y 4 4 int32_t\n  z 8 4 int32_t\n", "deepep_config.z is new, in a struct without"),
        ("deepep_config 8\n  x 0 4 int32_t\n  y 4 4 int32_t\n", "", "struct deepep_config is gone"),
    ],
)
def test_what_breaks_callers_is_seen(before: str, after: str, said: str) -> None:
    """And it may be released with another minor version, or from 1.0 on with another major one."""
    assert GOLDEN.count(before) == 1
    new = abi_release.parse(GOLDEN.replace(before, after))
    broken, _ = abi_release.compare(abi_release.parse(GOLDEN), new)
    assert any(line.startswith(said) for line in broken), broken
    lines, fits = abi_release.check(GOLDEN, new, "deepep.h")
    assert not fits and f"deepep.h: BROKEN since 0.7.0: {broken[0]}" in lines
    new.version = "0.8.0"
    assert abi_release.check(GOLDEN, new, "deepep.h")[1]


def test_additions_to_a_release_pass_and_are_listed(tmp_path: pathlib.Path) -> None:
    changes = [
        ("DEEPEP_COUNT = 3", "DEEPEP_THREE = 3, DEEPEP_COUNT = 4"),
        ("int32_t a, reserved0;", "int32_t a, named;"),
        ("const char *b;", "const char *b; int64_t n;"),
        ("int32_t deepep_second(void);", "int32_t deepep_second(void); int32_t deepep_third(deepep_two *two);"),
        ("} deepep_config;", "} deepep_config; typedef struct deepep_two { int32_t a; } deepep_two;"),
        ("const void *send", "const void *from"),
    ]
    lines, fits = abi_release.check(GOLDEN, released(tmp_path, *changes), "deepep.h")
    new = [line.removeprefix("deepep.h: new since 0.7.0: ") for line in lines[:-1]]
    assert fits and new == [
        "DEEPEP_THREE: 3",
        "deepep_third: int32_t (deepep_two *)",
        "deepep_one.named: int32_t at 8",
        "deepep_one.n: int64_t at 24",
        "struct deepep_two",
    ]


def test_a_golden_is_read_as_it_was_written() -> None:
    for header, golden in abi_release.GOLDENS.items():
        text = golden.read_text()
        assert abi_release.parse(text).text() == text and header.exists()


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        ("0.7.0", "0.7.1", False),
        ("0.7.9", "0.8.0", True),
        ("0.8.0", "0.7.0", False),
        ("1.0.0", "1.1.0", False),
        ("1.1.0", "2.0.0", True),
        ("0.9.0", "1.0.0", True),
        ("5", "5", False),
        ("5", "6", True),
    ],
)
def test_versions_that_allow_a_break(old: str, new: str, allowed: bool) -> None:
    assert abi_release.allows_a_break(old, new) == allowed


def test_the_kernel_interface_changes_with_its_version_alone() -> None:
    old = abi_release.parse("version 5\ndk_one: int32_t (dk_one_params *)\n")
    new = abi_release.parse("version 5\ndk_one: int32_t (dk_one_params *)\ndk_two: int32_t (dk_two_params *)\n")
    assert not abi_release.check(old.text(), new, "kernels.h")[1]
    new.version = "6"
    assert abi_release.check(old.text(), new, "kernels.h")[1]


def test_a_tagged_commit_has_its_own_goldens() -> None:
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=abi_release.ROOT, capture_output=True, text=True)
    golden = abi_release.parse((abi_release.ROOT / "include" / "deepep.release").read_text())
    for tag in tags.stdout.split():
        assert not tag.startswith("v") or tag == f"v{golden.version}", f"{tag}: tools/abi_release.py --write"
