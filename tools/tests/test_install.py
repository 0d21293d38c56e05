"""What a user gets: an installed tree that other programs build against, and a wheel."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = r"""
#include <deepep.hpp>
#include <cstdio>
int main() {
  const int wanted = DEEPEP_VERSION_MAJOR * 10000 + DEEPEP_VERSION_MINOR * 100 + DEEPEP_VERSION_PATCH;
  std::printf("%d\n", deepep_version());
  return deepep_version() == wanted ? 0 : 1;
}
"""
CMAKE = """
cmake_minimum_required(VERSION 3.16)
project(user CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(deepep @VERSION@ REQUIRED)
add_executable(user main.cpp)
target_link_libraries(user PRIVATE deepep::deepep)
"""


def run(*command: object, cwd: pathlib.Path = ROOT, **env: str) -> str:
    """Runs a command that has to succeed; returns what it printed."""
    text = [str(part) for part in command]
    result = subprocess.run(text, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(text)}\n{result.stdout}{result.stderr}"
    return result.stdout


def version() -> str:
    header = (ROOT / "include" / "deepep.h").read_text()
    return ".".join(re.findall(r"^#define DEEPEP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header, re.M))


def soname() -> str:
    return f"libdeepep.so.{version().split('.')[0]}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """`make install` into a staging folder, then moved: nothing in it may depend on its first place."""
    folder = tmp_path_factory.mktemp("install")
    run("make", "install", f"DESTDIR={folder}/stage", "PREFIX=/opt/deepep", "DEEPEP_BUILD=cpu")
    return pathlib.Path(shutil.move(folder / "stage" / "opt" / "deepep", folder / "moved"))


@pytest.fixture
def user(tmp_path: pathlib.Path) -> pathlib.Path:
    """A user's source folder outside the tree."""
    (tmp_path / "main.cpp").write_text(PROGRAM)
    return tmp_path


def test_installed_files(installed: pathlib.Path) -> None:
    files = {str(path.relative_to(installed)) for path in installed.rglob("*") if not path.is_dir()}
    assert files >= {
        *("bin/deepep", "include/deepep.h", "include/deepep.hpp"),
        *("lib/libdeepep.so", f"lib/{soname()}", "lib/libdeepep_cpu.so"),
        *("lib/pkgconfig/deepep.pc", "lib/cmake/deepep/deepep-config.cmake"),
        "lib/cmake/deepep/deepep-config-version.cmake",
    }
    assert os.readlink(installed / "lib" / "libdeepep.so") == soname()


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_build_with_pkg_config(installed: pathlib.Path, user: pathlib.Path) -> None:
    env = {"PKG_CONFIG_PATH": str(installed / "lib" / "pkgconfig")}
    assert run("pkg-config", "--modversion", "deepep", **env).strip() == version()
    flags = run("pkg-config", "--cflags", "--libs", "deepep", **env).split()
    compiler = os.environ.get("CXX", "g++")
    run(compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", user / "program", "main.cpp", *flags, cwd=user)
    run(user / "program", LD_LIBRARY_PATH=str(installed / "lib"))


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_the_page_for_c_programs(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its program, built and run by its commands, and its CMake file."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "c.md").read_text(), re.M | re.S)
    build, cmake, program, start = [text for _, text in blocks]
    assert [kind for kind, _ in blocks] == ["sh", "cmake", "cpp", "sh"]
    (tmp_path / "main.cpp").write_text(program)
    run("sh", "-ec", build.replace("/opt/deepep", str(installed)), cwd=tmp_path)
    printed = run("sh", "-ec", start, cwd=tmp_path, DEEPEP_ENGINE="cpu")
    assert sorted(printed.splitlines()) == [f"rank {rank} of 2, engine cpu" for rank in range(2)]
    if shutil.which("cmake") is not None:
        (tmp_path / "CMakeLists.txt").write_text(cmake)
        run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={installed}")
        run("cmake", "--build", tmp_path / "build")
        assert (tmp_path / "build" / "program").is_file()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_build_with_cmake(installed: pathlib.Path, user: pathlib.Path) -> None:
    (user / "CMakeLists.txt").write_text(CMAKE.replace("@VERSION@", version()))
    run("cmake", "-S", user, "-B", user / "build", f"-DCMAKE_PREFIX_PATH={installed}")
    run("cmake", "--build", user / "build")
    run(user / "build" / "user")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize("wanted, found", [("0.0.9", False), ("99", False), ("", True)])
def test_cmake_versions(installed: pathlib.Path, user: pathlib.Path, wanted: str, found: bool) -> None:
    (user / "CMakeLists.txt").write_text(CMAKE.replace("@VERSION@", wanted))
    command = ["cmake", "-S", str(user), "-B", str(user / "build"), f"-DCMAKE_PREFIX_PATH={installed}"]
    assert (subprocess.run(command, capture_output=True, timeout=300).returncode == 0) == found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT, DEEPEP_BUILD="cpu")
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_contents(wheel: pathlib.Path) -> None:
    assert re.fullmatch(rf"deepep_go-{re.escape(version())}-py3-none-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "python")) for path in (ROOT / "python").glob("deep_ep*/**/*.py")}
    modules |= {path.name for path in (ROOT / "python").glob("deep_ep*.py")}
    native = {f"lib/{soname()}", "lib/libdeepep_cpu.so", "bin/deepep", "include/deepep.h", "include/deepep.hpp"}
    native |= {"lib/left_out.txt"}
    assert not {"deep_ep/lib/libdeepep_cuda.so", "deep_ep/lib/libdeepep_nvshmem.so"} & names  # DEEPEP_BUILD=cpu
    native |= {"lib/deepep_torch.abi3.so"} if (ROOT / "build" / "lib" / "deepep_torch.abi3.so").exists() else set()
    assert modules, "python/ holds no module: the comparison below would say nothing"
    assert names >= modules | {f"deep_ep/{name}" for name in native} | {"deep_ep/py.typed"}
    allowed = re.compile(r"deep_ep(_cpp)?/|deep_ep_cpp\.py$|deepep_go-[\d.]+\.(data/scripts/deepep$|dist-info/)")
    assert [name for name in names if not allowed.match(name)] == []


def test_wheel_works_outside_the_tree(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Installed into a folder of its own: the package and the program come from there, and find their libraries."""
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel)
    env = {"PYTHONPATH": str(tmp_path / "site")}
    code = "import deep_ep, deep_ep_cpp; print(deep_ep.__file__); print(deep_ep.__version__)"
    origin, shown = run(sys.executable, "-c", code, cwd=tmp_path, **env).split()
    assert origin == str(tmp_path / "site" / "deep_ep" / "__init__.py")
    assert shown == version()
    assert version() in run(tmp_path / "site" / "bin" / "deepep", "version", cwd=tmp_path, **env)
