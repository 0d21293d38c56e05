"""Parts of two versions, or of two builds, work together or refuse by name (docs/compatibility.md).

The long versions build the library from a copy of the sources with another version; the short ones change a header or
the bytes of a library.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIB, HEADER = ROOT / "build" / "lib", ROOT / "include" / "deepep.h"
NEWER, MAJOR = "0.98.7", "98.0.0"
PROGRAM = r"""
#include <deepep.h>
#include <stdio.h>
#include <stdlib.h>
/* A rank: joins the group in a folder, makes a buffer and meets the others in a barrier. */
static deepep_group_t group;
static int failed(deepep_status_t status) {
  printf("%s: %s\n", deepep_status_name(status), deepep_last_error());
  deepep_group_destroy(group); /* so that the other rank has the last message of this one */
  return 1;
}
int main(int argc, char **argv) {
  deepep_group_options options = DEEPEP_GROUP_OPTIONS_INIT;
  deepep_buffer_options wanted = DEEPEP_BUFFER_OPTIONS_INIT;
  deepep_buffer_t buffer;
  deepep_status_t status;
  options.bootstrap = DEEPEP_BOOTSTRAP_FILE;
  options.directory = argv[1];
  options.rank = atoi(argv[2]);
  options.size = 2;
  options.timeout_ms = 120000;
#ifdef LATER
  options.later = LATER;
#endif
  wanted.engine = "cpu";
  wanted.num_nvl_bytes = 1 << 20;
  if ((status = deepep_group_create(&options, &group)) != DEEPEP_OK) return failed(status);
  if ((status = deepep_buffer_create(group, &wanted, &buffer)) != DEEPEP_OK) return failed(status);
  if ((status = deepep_barrier(buffer, NULL)) != DEEPEP_OK) return failed(status);
  printf("met as %d\n", deepep_version());
  deepep_buffer_destroy(buffer);
  deepep_group_destroy(group);
  return argc != 3;
}
"""
OPTIONS, DEFAULTS = "deepep_group_options", "NULL, NULL, NULL, NULL, NULL, 0, 0, 0, NULL, -1, 0"
CHANGES = {  # what a later version does to a struct, in the header and in the library
    "include/deepep.h": [
        (
            f"  int32_t device, reserved0;\n}} {OPTIONS};",
            f"  int32_t device, reserved0;\n  int64_t later;\n}} {OPTIONS};",
        ),
        (f"{DEFAULTS}}}", f"{DEFAULTS}, 0}}"),
    ],
    "capi/shim.c": [
        (
            'TRY(take(&full, sizeof full, options, "options"));\n  TRY(dpgo_group_create',
            f'TRY(take_struct(&full, sizeof full, offsetof({OPTIONS}, later), options, "options"));\n'
            "  TRY(dpgo_group_create",
        ),
    ],
}
full = pytest.mark.skipif(os.environ.get("DEEPEP_TEST_FULL") != "1", reason="builds the library: make test-full")


def version(text: str) -> str:
    return ".".join(re.findall(r"^#define DEEPEP_VERSION_\w+ (\d+)", text, re.M))


OURS = version(HEADER.read_text())
SONAME = f"libdeepep.so.{OURS.split('.')[0]}"


def with_version(text: str, wanted: str) -> str:
    """A header's text with another version."""
    for part, number in zip(("MAJOR", "MINOR", "PATCH"), wanted.split("."), strict=True):
        text = re.sub(rf"(?<=DEEPEP_VERSION_{part} )\d+", number, text)
    assert version(text) == wanted
    return text


def grown(path: str, text: str) -> str:
    for before, after in CHANGES.get(path, []):
        assert text.count(before) == 1, f"{path} has changed: {before}"
        text = text.replace(before, after)
    return text


def compile_rank(folder: pathlib.Path, include: pathlib.Path, *options: str) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / "rank.c").write_text(PROGRAM)
    command = [os.environ.get("CC", "gcc"), "-Wall", "-Werror", f"-I{include}", *options, "rank.c", "-o", "rank"]
    subprocess.run([*command, f"-L{LIB}", f"-l:{SONAME}"], cwd=folder, check=True)
    return folder / "rank"


def run_ranks(folder: pathlib.Path, program: pathlib.Path, *environments: dict[str, str]) -> list[str]:
    """What two ranks print, each in its own environment; what the loader says of a rank that does not start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEEPEP_")}
    base = {**kept, "LD_LIBRARY_PATH": str(LIB), "DEEPEP_KERNELS": str(LIB)}
    ranks = [
        subprocess.Popen(
            [program, str(folder), str(rank)],
            env={**base, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, environment in enumerate(environments)
    ]
    try:
        printed = [rank.communicate(timeout=200) for rank in ranks]
        return [out.strip() or error.strip() for out, error in printed]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A program of this version."""
    return compile_rank(tmp_path_factory.mktemp("program") / "ours", HEADER.parent)


@pytest.fixture(scope="module")
def later_header(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a header in which deepep_group_options has grown."""
    folder = tmp_path_factory.mktemp("header")
    text = with_version(grown("include/deepep.h", HEADER.read_text()), NEWER)
    (folder / "deepep.h").write_text(text)
    return folder


def met(version: str) -> str:
    major, minor, patch = map(int, version.split("."))
    return f"met as {major * 10000 + minor * 100 + patch}"


def test_a_program_of_a_later_version(tmp_path: pathlib.Path, later_header: pathlib.Path) -> None:
    """Its structs are longer. It works with this library as long as it uses nothing of what is new."""
    program = compile_rank(tmp_path / "unused", later_header)
    assert run_ranks(tmp_path, program, {}, {}) == [met(OURS)] * 2
    program = compile_rank(tmp_path / "used", later_header, "-DLATER=1")
    for text in run_ranks(tmp_path, program, {}, {}):
        assert text.startswith("DEEPEP_ERROR_INVALID_ARGUMENT: ") and "fields this version does not know" in text


WRAPPER = r"""
#include <abi/kernels.h>
#include <dlfcn.h>
#include <string.h>
/* The kernel library, all of whose functions are found behind this one, says that it is another. */
int32_t dk_info(dk_info_params *p) {
  void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
  int32_t (*info)(dk_info_params *) = (int32_t (*)(dk_info_params *))dlsym(library, "dk_info");
  int32_t code = info(p);
  CHANGE;
  return code;
}
"""


def other_kernels(folder: pathlib.Path, change: str) -> dict[str, str]:
    """The environment of a rank whose CPU library differs in what it says of itself."""
    folder.mkdir()
    library = LIB / "libdeepep_cpu.so"
    options = [f"-I{ROOT / 'kernels'}", f'-DLIBRARY="{library}"', f"-DCHANGE={change}", "-Wl,--no-as-needed"]
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", *options, "-xc", "-", "-xnone", str(library), "-ldl"]
    subprocess.run([*command, "-o", str(folder / library.name)], input=WRAPPER, text=True, check=True)
    return {"DEEPEP_KERNELS": str(folder)}


def test_ranks_with_two_builds_of_the_kernel_library(tmp_path: pathlib.Path, rank: pathlib.Path) -> None:
    other = other_kernels(tmp_path / "kernels", 'strcpy(p->build, "98.7.6-abc")')
    for text in run_ranks(tmp_path, rank, {}, other):
        assert text.startswith("DEEPEP_ERROR_MISMATCH: ") and "build of the kernel library" in text
        assert re.search(rf"rank 0 has {re.escape(OURS)}-\w+, rank 1 has 98\.7\.6-abc", text), text


def test_a_kernel_library_of_another_interface(tmp_path: pathlib.Path, rank: pathlib.Path) -> None:
    """The other rank, which waits for it, gets its name."""
    other = other_kernels(tmp_path / "kernels", "p->abi_version = 99")
    here, there = run_ranks(tmp_path, rank, {}, other)
    assert there.startswith("DEEPEP_ERROR_VERSION: "), there
    assert re.search(r"kernels/libdeepep_cpu.so: .*has kernel interface version 99, this library needs \d+", there)
    assert here.startswith("DEEPEP_ERROR_") and "rank 1" in here, here


def load_by_python(folder: pathlib.Path, package: str, **environment: str) -> str:
    """What a Python package of a version says when it loads the library: without torch, which it needs later."""
    home = folder / "deep_ep"
    (home / "include").mkdir(parents=True)
    for name in ("_lib.py", "_abi.py", "errors.py"):
        shutil.copy(ROOT / "python" / "deep_ep" / name, home)
    (home / "__init__.py").touch()
    (home / "include" / "deepep.h").write_text(with_version(HEADER.read_text(), package))
    code = (
        "from deep_ep import _lib\ntry: print('loaded', _lib.library().path)\nexcept Exception as e: print(e.args, e)"
    )
    env = {**os.environ, "PYTHONPATH": str(folder), "DEEPEP_LIBRARY": "", "LD_LIBRARY_PATH": str(LIB), **environment}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_python_package_of_another_version(tmp_path: pathlib.Path) -> None:
    library = str(LIB / SONAME)
    assert load_by_python(tmp_path / "same", OURS) == f"loaded {SONAME}\n"
    for number, other in enumerate((NEWER, ".".join([*OURS.split(".")[:2], "99"]))):
        said = load_by_python(tmp_path / str(number), other, DEEPEP_LIBRARY=library)
        assert f"{library} is version {OURS}, the Python package is {other}" in said
    said = load_by_python(tmp_path / "major", MAJOR)
    assert "could not be loaded" in said and SONAME.replace(OURS.split(".")[0], MAJOR.split(".")[0]) in said


Change = Callable[[str, str], str]


def build(folder: pathlib.Path, wanted: str, change: Change) -> pathlib.Path:
    """libdeepep.so of another version, from a copy of the sources; the folder of the library."""
    folder.mkdir()
    sources = [
        "go.mod",
        "go.sum",
        "Makefile",
        "include",
        "capi",
        "core",
        "internal",
        "kernels",
        "nvshmem",
        "python",
        "tools",
    ]
    for name in sources:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    for path in ("include/deepep.h", "capi/shim.c", "kernels/abi/kernels.h"):
        text = (folder / path).read_text()
        text = with_version(text, wanted) if path.endswith("deepep.h") else text
        (folder / path).write_text(change(path, text))
    for command in (
        [sys.executable, "tools/generate_abi.py"],
        ["make", "--no-print-directory", f"build/lib/libdeepep.so.{wanted.split('.')[0]}"],
    ):
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
        result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1200)
        assert result.returncode == 0, result.stdout + result.stderr
    return folder / "build" / "lib"


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A later minor version, in which a struct has grown."""
    return build(tmp_path_factory.mktemp("newer") / "tree", NEWER, grown)


@full
@pytest.mark.timeout(1500)
def test_a_program_of_an_older_version(tmp_path: pathlib.Path, rank: pathlib.Path, newer: pathlib.Path) -> None:
    """Its structs are shorter; the library completes them."""
    later = {"LD_LIBRARY_PATH": str(newer)}
    assert run_ranks(tmp_path, rank, later, later) == [met(NEWER)] * 2


@full
@pytest.mark.timeout(1500)
def test_ranks_of_two_versions(tmp_path: pathlib.Path, rank: pathlib.Path, newer: pathlib.Path) -> None:
    for text in run_ranks(tmp_path, rank, {}, {"LD_LIBRARY_PATH": str(newer)}):
        assert text.startswith("DEEPEP_ERROR_MISMATCH: ") and "library version" in text
        assert f'rank 0 has "{OURS}"' in text and f'rank 1 has "{NEWER}"' in text


@full
@pytest.mark.timeout(1500)
def test_this_python_package_with_a_newer_library(tmp_path: pathlib.Path, newer: pathlib.Path) -> None:
    said = load_by_python(tmp_path, OURS, DEEPEP_LIBRARY=str(newer / SONAME))
    assert f"is version {NEWER}, the Python package is {OURS}" in said


@full
@pytest.mark.timeout(1500)
def test_another_major_version_and_kernel_interface(tmp_path: pathlib.Path, rank: pathlib.Path) -> None:
    def change(path: str, text: str) -> str:
        return re.sub(r"(?<=DK_ABI_VERSION )\d+", "99", text) if path.endswith("kernels.h") else text

    folder = build(tmp_path / "tree", MAJOR, change)
    soname = f"libdeepep.so.{MAJOR.split('.')[0]}"
    for text in run_ranks(tmp_path, rank, *[{"LD_LIBRARY_PATH": str(folder)}] * 2):
        assert SONAME in text and "cannot open shared object file" in text  # the loader's word
    (folder / SONAME).symlink_to(soname)  # against all signs
    for text in run_ranks(tmp_path, rank, *[{"LD_LIBRARY_PATH": str(folder)}] * 2):
        assert text.startswith("DEEPEP_ERROR_VERSION: "), text
        assert re.search(r"kernel interface version \d+, this library needs 99", text)
