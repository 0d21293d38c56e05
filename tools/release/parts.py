"""What of others is linked into our files: Go modules, the CUDA runtime, NVSHMEM's device part, libstdc++.

The SBOM names each part, and the binary archive and the packages carry its licence. Go modules are read from the files
that were built; a licence text that is not recognised ends the release.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re

from packageurl import PackageURL

from .facts import Paths, ReleaseError, run

LICENCE_FILES = re.compile(r"(LICEN[CS]E|COPYING|NOTICE)[\w.-]*$", re.I)
NOT_LICENCES = {".sh", ".go", ".py"}  # a script that checks licences
# Words of a text that tell which licence it is; the first line that fits wins.
MARKS = (
    ("FTL OR GPL-2.0-or-later", ("FreeType License", "GNU General Public License")),
    ("Apache-2.0", ("Apache License", "Version 2.0")),
    ("OFL-1.1", ("SIL OPEN FONT LICENSE",)),
    ("BSD-3-Clause", ("Redistribution and use in source and binary forms", "the names? of")),
    ("BSD-3-Clause", ("Redistribution and use in source and binary forms", "[Nn]either the names?")),
    ("BSD-2-Clause", ("Redistribution and use in source and binary forms",)),
    ("CC-BY-4.0", ("Creative Commons Attribution 4.0",)),
    ("MIT", ("Permission is hereby granted, free of charge",)),
)
# Distributions of PyPI whose code nvcc compiles or links into a library: name, library.
NVIDIA = (
    ("nvidia-cuda-runtime", ("libdeepep_cuda.so", "libdeepep_nvshmem.so")),
    ("nvidia-cuda-cccl", ("libdeepep_cuda.so", "libdeepep_nvshmem.so")),
    ("nvidia-cuda-runtime-cu12", ("libdeepep_cuda12.so",)),
    ("nvidia-cuda-cccl-cu12", ("libdeepep_cuda12.so",)),
    ("nvidia-nvshmem-cu13", ("libdeepep_nvshmem.so",)),
)
GCC_EXCEPTION = "GPL-3.0-or-later WITH GCC-exception-3.1"


@dataclasses.dataclass
class Part:
    """A part made by others. `files` are the names of our files that hold it, `texts` its licences by file name."""

    name: str
    version: str
    purl: PackageURL
    licence: str
    texts: dict[str, str]
    files: set[str] = dataclasses.field(default_factory=set)
    sums: str = ""  # go.sum's hash of a module


def licence_of(text: str) -> str | None:
    """The SPDX expression of a licence text; None if it is not among those that we know."""
    flat = " ".join(text.split())
    return next((name for name, words in MARKS if all(re.search(word, flat) for word in words)), None)


def licence_texts(folder: pathlib.Path) -> dict[str, str]:
    """The licence and notice files of a module's or distribution's folder, also those in a folder `licenses`."""
    found = [path for path in sorted(folder.iterdir()) if LICENCE_FILES.match(path.name) and path.is_file()]
    inner = folder / "licenses"
    found += sorted(path for path in inner.iterdir() if path.is_file()) if inner.is_dir() else []
    return {path.name: path.read_text(errors="replace") for path in found if path.suffix not in NOT_LICENCES}


def _joined(names: set[str]) -> str:
    return " AND ".join(f"({name})" if " OR " in name and len(names) > 1 else name for name in sorted(names))


def licence_of_module(name: str, texts: dict[str, str]) -> str:
    licences = {licence_of(text) for file, text in texts.items() if not file.upper().startswith("NOTICE")}
    if "FTL OR GPL-2.0-or-later" in licences:  # the other files are the two texts between which it lets choose
        licences = {"FTL OR GPL-2.0-or-later"}
    known = {licence for licence in licences if licence}
    if not known:
        raise ReleaseError(f"the licence of {name} is not recognised: see MARKS in tools/release/parts.py")
    return _joined(known)


def _go() -> str:
    return os.environ.get("GO", "go")


def _modules_of(path: pathlib.Path) -> tuple[str, list[tuple[str, str, str]]]:
    """Version of Go, and module, version and sum of each module that is linked into a file."""
    lines = run(_go(), "version", "-m", path).splitlines()
    modules = [line.split("\t")[2:5] for line in lines if line.startswith("\tdep\t")]
    if not modules:
        raise ReleaseError(f"{path}: names no Go module")
    return lines[0].rpartition("go")[2].split()[0], [(name, number, sums) for name, number, sums in modules]


def go_parts(files: list[pathlib.Path]) -> list[Part]:
    """The Go modules in our Go files, and Go's own library."""
    known = run(_go(), "list", "-m", "-json", "all")
    decoder, at, folders = json.JSONDecoder(), 0, {}
    while at < len(known.rstrip()):
        module, at = decoder.raw_decode(known, at)
        at += len(known[at:]) - len(known[at:].lstrip())
        folders[module["Path"]] = module.get("Dir", "")
    parts: dict[str, Part] = {}
    for path in files:
        release, modules = _modules_of(path)
        root = pathlib.Path(run(_go(), "env", "GOROOT").strip())
        found = [("stdlib", release, "", root), *((name, v, s, pathlib.Path(folders[name])) for name, v, s in modules)]
        for name, number, sums, folder in found:
            if name not in parts:
                space, _, last = name.rpartition("/")
                purl = PackageURL("golang", space or None, last, number)
                texts = {"LICENSE": (root / "LICENSE").read_text()} if name == "stdlib" else licence_texts(folder)
                parts[name] = Part(name, number, purl, licence_of_module(name, texts), texts, sums=sums)
            parts[name].files.add(path.name)
    return [parts[name] for name in sorted(parts)]


def nvidia_parts(libraries: list[str]) -> list[Part]:
    """What of NVIDIA's is linked into those of `libraries` that were built: all from pinned distributions of PyPI."""
    parts = []
    for name, holders in NVIDIA:
        files = {holder for holder in holders if holder in libraries}
        if not files:
            continue
        distribution = importlib.metadata.distribution(name)
        folder = pathlib.Path(
            str(distribution.locate_file("")), f"{name.replace('-', '_')}-{distribution.version}.dist-info"
        )
        texts = licence_texts(folder)
        if not texts:
            raise ReleaseError(f"{name} {distribution.version} has no licence file")
        purl = PackageURL("pypi", None, name, distribution.version)
        parts.append(Part(name, distribution.version, purl, "LicenseRef-NVIDIA-Proprietary", texts, files))
    return parts


def cxx_part(libraries: list[str]) -> Part:
    """libstdc++, which goes into each kernel library in its static form."""
    compiler = os.environ.get("CXX", "g++")
    number = run(compiler, "-dumpfullversion", "-dumpversion").strip()
    text = (
        "libstdc++ is a part of GCC, under the GNU General Public License, version 3 or later, with the GCC Runtime\n"
    )
    text += "Library Exception, version 3.1, which lets programs hold it under terms of their own choice.\n"
    text += "https://www.gnu.org/licenses/gcc-exception-3.1.html\n"
    purl = PackageURL("generic", None, "libstdc++", number)
    return Part("libstdc++", number, purl, GCC_EXCEPTION, {"LICENSE": text}, set(libraries))


def parts(paths: Paths) -> list[Part]:
    """All parts of the build, sorted within their kinds."""
    libraries = [path.name for path in paths.kernel_libraries()]
    return [*go_parts([paths.library, paths.program]), *nvidia_parts(libraries), cxx_part(libraries)]


def write_licences(found: list[Part], target: pathlib.Path) -> None:
    """Writes each part's licence texts to `target`/NAME/, NAME being the part's name with _ for /."""
    for part in found:
        folder = target / part.name.replace("/", "_")
        folder.mkdir(parents=True)
        for name, text in part.texts.items():
            (folder / name).write_text(text)
