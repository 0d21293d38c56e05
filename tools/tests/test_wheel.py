"""What the wheel promises is checked by tools/check_wheel.py; here that check is checked, and a wheel that is there."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sysconfig
import zipfile

import pytest

import abi_check
import check_wheel

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIB, RELEASE = ROOT / "build" / "lib", ROOT / "build" / "release" / "lib"
CUDA = LIB / "libdeepep_cuda.so"
TAG = "py3-none-manylinux_2_28_x86_64"
NAMES = ["bin/deepep", "include/deepep.h", "include/deepep.hpp"]


def test_wheels_that_are_there_keep_their_promises() -> None:
    wheels = sorted((ROOT / "dist").glob(f"deepep_go-*-{TAG}.whl"))
    if not wheels:
        pytest.skip("no wheel in dist: `make wheel` makes one")
    assert {wheel.name: check_wheel.problems(wheel) for wheel in wheels} == {wheel.name: [] for wheel in wheels}


def test_release_libraries_that_are_there_keep_their_promises() -> None:
    libraries = [path for path in sorted(RELEASE.glob("lib*.so*")) if not path.is_symlink()]
    if not libraries:
        pytest.skip("no build/release: `make wheel-libraries` makes it")
    assert {path.name: check_wheel.library_problems(path) for path in libraries} == {
        path.name: [] for path in libraries
    }


@pytest.mark.skipif(not CUDA.exists(), reason="needs libdeepep_cuda.so: make cuda")
def test_device_code_is_read_as_cuobjdump_reads_it() -> None:
    wheels = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "cuobjdump")
    tool = shutil.which("cuobjdump") or (str(wheels) if wheels.exists() else None)
    if tool is None:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump")
    for library in (CUDA, RELEASE / CUDA.name):
        if not library.exists():
            continue
        code, ptx = check_wheel.device_code(library.read_bytes())
        for option, found in (("--list-elf", code), ("--list-ptx", ptx)):
            text = subprocess.run([tool, option, library], check=True, capture_output=True, text=True).stdout
            assert {int(number) for number in re.findall(r"\.sm_(\d+)", text)} == found
        assert found and code >= {80, 90}


def made_wheel(folder: pathlib.Path, name: str, libraries: list[pathlib.Path], names: list[str]) -> pathlib.Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for library in libraries:
            archive.write(library, f"deep_ep/lib/{library.name}")
        for other in names:
            archive.writestr(f"deep_ep/{other}", b"")
    return path


def test_what_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    wheel = made_wheel(tmp_path, "deepep_go-0.0.0-py3-none-linux_x86_64.whl", [], NAMES[1:])
    lines = check_wheel.problems(wheel)
    assert "the tag is not py3-none-manylinux_2_28" in lines[0]
    missing = ["lib/libdeepep_cpu.so", "lib/libdeepep_cuda.so", "lib/libdeepep_nvshmem.so", f"lib/{abi_check.soname()}"]
    assert lines[1:] == [f"holds no deep_ep/{name}" for name in [*missing, "bin/deepep"]]


def test_a_library_that_asks_for_more_is_named(tmp_path: pathlib.Path) -> None:
    """A library of a C library of its own version, one that needs another library, one without machine code."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to make libraries")
    (tmp_path / "a.c").write_text(
        'int newer(void); __asm__(".symver newer, newer@GLIBC_2.29"); int f(void) { return newer(); }\n'
    )
    (tmp_path / "c.c").write_text("int newer(void) { return 1; }\n")
    (tmp_path / "c.map").write_text("GLIBC_2.29 { newer; };\n")
    shared = ["gcc", "-shared", "-fPIC", "-nostdlib"]
    subprocess.run(
        [*shared, "-Wl,-soname,libtorch.so", "-Wl,--version-script=c.map", "-o", "libtorch.so", "c.c"],
        check=True,
        cwd=tmp_path,
    )
    subprocess.run([*shared, "-o", "libdeepep_cuda.so", "a.c", "libtorch.so"], check=True, cwd=tmp_path)
    assert check_wheel.library_problems(tmp_path / "libdeepep_cuda.so") == [
        "needs libtorch.so",
        "needs glibc 2.29, promised is 2.28",
        "has no machine code for sm_80, sm_90, sm_100, sm_103, sm_120",
        "has no PTX for compute_90",
    ]
