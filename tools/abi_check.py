#!/usr/bin/env python3
"""Checks the built libraries from outside: what they export, what they need, and from which C library on they run.

    tools/abi_check.py [FOLDER]      default: build/lib

* libdeepep.so exports exactly the functions of include/deepep.h, each kernel library those of kernels/abi/kernels.h;
  optional groups are there as a whole or not at all.
* They need nothing but the C library and libgcc_s, and no symbol of a C library newer than GLIBC_NEWEST.
* The soname of libdeepep.so ends in the major version that deepep.h states.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
GLIBC_NEWEST = (2, 34)  # what prebuilt wheels promise to run on
ALLOWED = re.compile(r"^(libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux-[\w-]+)\.so\.\d+$")
OPTIONAL = (  # groups of functions that a kernel library may do without
    {f"dk_transport_{name}" for name in ("open", "close", "put", "quiet", "query", "lose")},
    {f"dk_transport_{name}" for name in ("unique_id", "attach", "detach", "alloc", "free")},
)
HEADERS = {"deepep": ROOT / "include" / "deepep.h", "dk": ROOT / "kernels" / "abi" / "kernels.h"}


def declared(prefix: str, text: str) -> set[str]:
    """Names of the functions that a header declares; macros and types of functions are not among them."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", " ", text, flags=re.M)
    return set(re.findall(rf"\b({prefix}_\w+)\s*\(", text))


def soname() -> str:
    """The file name of libdeepep.so, which ends in the major version of deepep.h."""
    found = re.search(r"^#define DEEPEP_VERSION_MAJOR (\d+)$", HEADERS["deepep"].read_text(), re.M)
    assert found, f"{HEADERS['deepep']} states no DEEPEP_VERSION_MAJOR"
    return f"libdeepep.so.{found[1]}"


def exported(library: pathlib.Path) -> set[str]:
    """Names that a shared library defines for others."""
    lines = _output("nm", "-D", "--defined-only", str(library)).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if " A " not in line}


def dynamic(library: pathlib.Path, tag: str) -> list[str]:
    """Values of a tag (NEEDED, SONAME) of the dynamic section."""
    return re.findall(rf"\({tag}\).*\[(.+)\]", _output("readelf", "--dynamic", "--wide", str(library)))


def newest_glibc(library: pathlib.Path) -> tuple[int, int]:
    """The newest C library version that an imported symbol asks for."""
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", _output("nm", "-D", "--undefined-only", str(library)))
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def problems(library: pathlib.Path, wanted: set[str]) -> list[str]:
    """What is wrong with one library, a line each."""
    have, lines = exported(library), []
    for group in OPTIONAL:
        wanted = wanted - group if not group & have else wanted
    if missing := wanted - have:
        lines.append(f"does not export {', '.join(sorted(missing))}")
    if extra := have - wanted:
        lines.append(f"exports what no header declares: {', '.join(sorted(extra))}")
    if needed := [name for name in dynamic(library, "NEEDED") if not ALLOWED.match(name)]:
        lines.append(f"needs {', '.join(needed)}; allowed are the C library and libgcc_s")
    if (newest := newest_glibc(library)) > GLIBC_NEWEST:
        lines.append(f"needs glibc {newest[0]}.{newest[1]}; allowed up to {GLIBC_NEWEST[0]}.{GLIBC_NEWEST[1]}")
    if library.name.startswith("libdeepep.so") and dynamic(library, "SONAME") != [library.name]:
        lines.append(f"has soname {dynamic(library, 'SONAME')}, wanted {library.name}")
    return lines


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(folder: pathlib.Path) -> int:
    libraries = [path for path in [folder / soname(), *sorted(folder.glob("libdeepep_*.so"))] if path.exists()]
    if not libraries:
        print(f"no library in {folder}; build with `make lib kernels`")
        return 1
    status = 0
    for library in libraries:
        prefix = "deepep" if library.name.startswith("libdeepep.so") else "dk"
        wanted = declared(prefix, HEADERS[prefix].read_text())
        lines = problems(library, wanted)
        for line in lines:
            print(f"{library.name}: {line}")
            status = 1
        if not lines:
            glibc = ".".join(map(str, newest_glibc(library)))
            print(f"{library.name}: {len(exported(library))} functions, as declared; needs glibc {glibc}")
    return status


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "lib"))
