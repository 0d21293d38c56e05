"""Builds the wheel: `make` makes the shared libraries and the program, this file puts them into the package.

Everything else stands in pyproject.toml. The wheel fits any Python 3, hence its tag: the package works through ctypes,
and its one extension module, which only saves time, is built for Python's stable ABI.
"""

import pathlib
import re
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent
BUILD = ROOT / "build"


def version() -> str:
    """The version, which stands in include/deepep.h alone."""
    text = (ROOT / "include" / "deepep.h").read_text()
    return ".".join(
        re.search(rf"^#define DEEPEP_VERSION_{part} (\d+)$", text, re.M)[1] for part in ("MAJOR", "MINOR", "PATCH")
    )


class BuildWithMake(build_py):
    """Runs make, then adds what it built: lib/ (shared libraries), bin/ (the program), include/ (headers)."""

    def native_files(self) -> "dict[pathlib.Path, list[pathlib.Path]]":
        # The soname alone: a wheel cannot hold the link libdeepep.so. Libraries for GPUs, and the compiled face of the
        # package, come along if they were built.
        soname = f"libdeepep.so.{version().split('.')[0]}"
        names = (soname, "libdeepep_cpu.so", "libdeepep_cuda.so", "libdeepep_nvshmem.so", "deepep_torch.abi3.so")
        libraries = [BUILD / "lib" / name for name in names]
        package = pathlib.Path(self.build_lib) / "deep_ep"
        return {
            package / "lib": [path for path in libraries if path.exists()],
            package / "bin": [BUILD / "bin" / "deepep"],
            package / "include": sorted((ROOT / "include").glob("deepep.h*")),
        }

    def run(self) -> None:
        subprocess.run(["make", "--no-print-directory", "lib", "kernels", "program"], cwd=ROOT, check=True)
        if self.editable_mode:  # the package finds build/lib beside its source
            return super().run()
        shutil.rmtree(self.build_lib, ignore_errors=True)  # a module that is gone must not stay in the wheel
        super().run()
        for folder, files in self.native_files().items():
            folder.mkdir(parents=True)
            for path in files:
                shutil.copy2(path, folder / path.name)

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


if __name__ == "__main__":
    (BUILD / "wheel").mkdir(parents=True, exist_ok=True)
    setup(
        version=version(),
        distclass=PlatformDistribution,
        package_dir={"": "python"},
        py_modules=["deep_ep_cpp"] if (ROOT / "python" / "deep_ep_cpp.py").exists() else [],
        cmdclass={"build_py": BuildWithMake, "bdist_wheel": AnyPythonWheel},
        # setuptools' own habit of working in build/lib would mix with the libraries there.
        options={"build": {"build_base": "build/wheel"}, "egg_info": {"egg_base": "build/wheel"}},
    )
