"""Builds the wheel: tools/build_native.py has make build the libraries and the program, this file puts them into it.

Everything else stands in pyproject.toml. The wheel fits any Python 3, hence its tag: the package works through ctypes,
and its one extension module, which only saves time, is built for Python's stable ABI.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent
BUILD = ROOT / "build"
sys.path.insert(0, str(ROOT / "tools"))
import build_native  # noqa: E402


def set_modes(folder: pathlib.Path) -> None:
    """The modes of a wheel: they are not those that the umask gave the sources."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


class BuildWithMake(build_py):
    """Has make build, then adds what it built: lib/ (shared libraries), bin/ (the program), include/ (headers)."""

    def native_files(self) -> "dict[pathlib.Path, list[pathlib.Path]]":
        # The soname alone: a wheel cannot hold the link libdeepep.so. A library that was built before and is not
        # wanted now stays out.
        wanted = build_native.chosen()
        names = [f"libdeepep.so.{build_native.version().split('.')[0]}", "libdeepep_cpu.so", "deepep_torch.abi3.so"]
        names += [] if wanted == "cpu" else [build_native.CUDA]
        names += [] if wanted in ("cpu", "cuda") else [build_native.NVSHMEM]
        names += [build_native.OLDER_CUDA] if wanted == "release" else []
        libraries = [FROM / "lib" / name for name in names]
        package = pathlib.Path(self.build_lib) / "deep_ep"
        return {
            package / "lib": [path for path in libraries if path.exists()] + [FROM / "left_out.txt"],
            package / "bin": [FROM / "bin" / "deepep"],
            package / "include": sorted((ROOT / "include").glob("deepep.h*")),
        }

    def run(self) -> None:
        build_native.build(FROM.relative_to(ROOT))
        if self.editable_mode:  # the package finds build/lib beside its source
            return super().run()
        shutil.rmtree(self.build_lib, ignore_errors=True)  # a module that is gone must not stay in the wheel
        super().run()
        for folder, files in self.native_files().items():
            folder.mkdir(parents=True)
            for path in files:
                shutil.copy2(path, folder / path.name)
        set_modes(pathlib.Path(self.build_lib))

    def get_outputs(self, include_bytecode: bool = True) -> "list[str]":
        native = [str(folder / path.name) for folder, files in self.native_files().items() for path in files]
        return super().get_outputs(include_bytecode) + ([] if self.editable_mode else native)


class PlatformDistribution(Distribution):
    """No extension module, and yet of one platform."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> "tuple[str, str, str]":
        return "py3", "none", super().get_tag()[2]

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """Adds the bill of materials that DEEPEP_SBOM names, where PEP 770 wants it; `make wheel` makes one."""
        super().egg2dist(egginfo_path, distinfo_path)
        if name := os.environ.get("DEEPEP_SBOM"):
            folder = pathlib.Path(distinfo_path) / "sboms"
            folder.mkdir()
            shutil.copy(name, folder / "deepep-go.cdx.json")
        set_modes(pathlib.Path(distinfo_path))


if __name__ == "__main__":
    try:
        wanted = build_native.chosen()
        build_native.check_system()
        if wanted != "release" and not {"sdist", "egg_info", "dist_info", "--version"} & set(sys.argv):
            build_native.check_tools()
    except build_native.Impossible as error:
        sys.exit(str(error))
    FROM = BUILD / "release" if wanted == "release" else BUILD
    (BUILD / "wheel").mkdir(parents=True, exist_ok=True)
    try:
        setup(
            version=build_native.version(),
            distclass=PlatformDistribution,
            package_dir={"": "python"},
            py_modules=["deep_ep_cpp"] if (ROOT / "python" / "deep_ep_cpp.py").exists() else [],
            cmdclass={"build_py": BuildWithMake, "bdist_wheel": AnyPythonWheel},
            # setuptools' own habit of working in build/lib would mix with the libraries there.
            options={"build": {"build_base": "build/wheel"}, "egg_info": {"egg_base": "build/wheel"}},
        )
    except build_native.Impossible as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"make failed (exit status {error.returncode}), see above; DEEPEP_BUILD=cpu installs without GPUs")
