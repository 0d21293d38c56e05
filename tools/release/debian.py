"""Debian packages, made by dpkg's own tools: libdeepep0, libdeepep-dev and deepep-tools.

dpkg-shlibdeps finds what the libraries depend on, dpkg-gensymbols writes the symbols, dpkg-deb packs. The kernel
libraries lie beside libdeepep.so, where the engine and the dynamic loader look for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
import shutil
import tempfile
import textwrap
import time

from .archives import compress, set_modes_and_times
from .facts import ROOT, Commit, ReleaseError, elf_machine, run, version
from .parts import Part

ARCHITECTURES = {"x86_64": ("amd64", "x86_64-linux-gnu"), "aarch64": ("arm64", "aarch64-linux-gnu")}
TOOLS = ("dpkg-deb", "dpkg-shlibdeps", "dpkg-gensymbols")
MAINTAINER = "DeepEP-Go authors <deepep-go@users.noreply.github.com>"
HOMEPAGE = "https://github.com/deepep-go/deepep"
REVISION = "1"
WHAT = "DeepEP moves the tokens of a mixture-of-experts model to the ranks of their experts and back."
# NVIDIA's package repositories have it, Debian has not: the dynamic loader finds libnvshmem_host.so.3 there.
NVSHMEM_PACKAGE = "libnvshmem3-cuda-13"


@dataclasses.dataclass(frozen=True)
class Package:
    """A binary package: its fields, and which of the installed files (below usr/) go into it."""

    name: str
    section: str
    fields: dict[str, str]
    title: str
    text: str
    files: str  # a regular expression over paths below usr/


def soname() -> str:
    return f"libdeepep.so.{version().split('.')[0]}"


def packages() -> list[Package]:
    """The three packages; `libdeepep0` is named after the soname, as Debian's policy asks."""
    library = "libdeepep" + version().split(".")[0]
    same = f"{library} (= {version()}-{REVISION})"
    return [
        Package(
            library,
            "libs",
            {"Depends": "${shlibs:Depends}", "Suggests": NVSHMEM_PACKAGE, "Multi-Arch": "same"},
            "expert-parallel dispatch and combine (libraries)",
            f"{WHAT} This package holds the engine behind the C API and its kernel libraries: for CPUs, and where they "
            "were built for GPUs (driver 580 or later) and several nodes (with NVSHMEM of NVIDIA's repositories).",
            r"lib/[^/]+/libdeepep(\.so\.\d+|_\w+\.so)",
        ),
        Package(
            "libdeepep-dev",
            "libdevel",
            {"Depends": same, "Multi-Arch": "same"},
            "expert-parallel dispatch and combine (development files)",
            f"{WHAT} This package holds the headers for C and C++, and the files of pkg-config and CMake.",
            r"include/.*|lib/[^/]+/(libdeepep\.so|pkgconfig/.*|cmake/.*)",
        ),
        Package(
            "deepep-tools",
            "utils",
            {"Depends": "${shlibs:Depends}, " + same},
            "expert-parallel dispatch and combine (command-line program)",
            f"{WHAT} This package holds the program deepep, which examines a host, shows what running jobs wait for, "
            "plans sizes, simulates networks, and measures.",
            r"bin/deepep",
        ),
    ]


def move_to_multiarch(usr: pathlib.Path, triplet: str) -> None:
    """Moves an installed usr/lib to usr/lib/TRIPLET; pkg-config's file then names its folders, as Debian's do."""
    away = usr / "multiarch"
    (usr / "lib").rename(away)
    (usr / "lib").mkdir()
    away.rename(usr / "lib" / triplet)
    file = usr / "lib" / triplet / "pkgconfig" / "deepep.pc"
    places = {"prefix": "/usr", "libdir": f"${{prefix}}/lib/{triplet}", "includedir": "${prefix}/include"}
    text = file.read_text()
    for name, place in places.items():
        text, count = re.subn(rf"^{name}=.*$", f"{name}={place}", text, flags=re.M)
        if count != 1:
            raise ReleaseError(f"cmake/deepep.pc.in: has {count} lines {name}=, wanted 1")
    file.write_text(text)


def changelog(name: str, commit: Commit) -> str:
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(commit.epoch))
    head = f"{name} ({version()}-{REVISION}) unstable; urgency=medium\n\n"
    return head + f"  * Release {version()}: see CHANGELOG.md and the release notes.\n\n -- {MAINTAINER}  {date}\n"


def indented(text: str) -> str:
    """Text as the body of a multi-line field: one space before each line, a dot for an empty one."""
    return "".join(f" {line.rstrip()}\n" if line.strip() else " .\n" for line in text.expandtabs().splitlines())


def copyright_file(found: list[Part]) -> str:
    """The licence of ours, and those of the parts by others: debian/copyright in its machine-readable form."""
    text = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
    text += f"Upstream-Name: deepep-go\nSource: {HOMEPAGE}\n"
    text += "Comment: The parts below are linked into the libraries and the program; their texts are in\n"
    text += " /usr/share/doc/PACKAGE/licenses.\n\nFiles: *\nCopyright: DeepEP-Go authors\nLicense: MIT\n"
    text += indented((ROOT / "LICENSE").read_text())
    for part in found:
        text += f"\nFiles: linked/{part.name}\nCopyright: the authors of {part.name} {part.version}\n"
        text += f"License: {part.licence.replace(' OR ', ' or ').replace(' AND ', ' and ')}\n"
        text += f" See licenses/{part.name.replace('/', '_')}.\n"
    return text


def shared_library_dependencies(files: list[pathlib.Path], package: Package) -> str:
    """What dpkg-shlibdeps says that `files` depend on."""
    with tempfile.TemporaryDirectory() as folder:
        debian = pathlib.Path(folder, "debian")
        debian.mkdir()
        (debian / "control").write_text(f"Source: deepep\n\nPackage: {package.name}\nArchitecture: any\n")
        printed = run("dpkg-shlibdeps", "-O", "--warnings=0", *files, cwd=pathlib.Path(folder))
    found = re.search(r"^shlibs:Depends=(.*)$", printed, re.M)
    if not found or "libc6" not in found[1]:
        raise ReleaseError(f"dpkg-shlibdeps found no dependency on libc6: {printed}")
    return found[1]


def write_symbols(library: pathlib.Path, package: Package, control: pathlib.Path) -> None:
    """Writes the control files `symbols` and `shlibs`, by which dpkg-shlibdeps of other packages find this one."""
    with tempfile.TemporaryDirectory() as folder:
        debian = pathlib.Path(folder, "debian")
        debian.mkdir()
        (debian / "control").write_text(f"Source: deepep\n\nPackage: {package.name}\nArchitecture: any\n")
        options = [f"-p{package.name}", f"-v{version()}", f"-e{library}", f"-O{control / 'symbols'}"]
        run("dpkg-gensymbols", *options, cwd=pathlib.Path(folder))
    name, number = re.fullmatch(r"(\w+)\.so\.(\d+)", library.name).groups()  # type: ignore[union-attr]
    (control / "shlibs").write_text(f"{name} {number} {package.name} (>= {version()})\n")


# The program's own help is the manual: a copy of its texts would be one more to keep true.
MANUAL = """\
.Dd {date}
.Dt DEEPEP 1
.Os
.Sh NAME
.Nm deepep
.Nd examine a host for expert parallelism, and watch it at work
.Sh SYNOPSIS
.Nm
.Ar command
.Op Ar options
.Nm
.Cm help
.Op Ar command
.Sh DESCRIPTION
.Nm
examines a host, shows what running jobs wait for, plans sizes, simulates networks, and measures.
.Cm help
lists the commands, and
.Cm help Ar command
describes one with its options.
.Sh EXIT STATUS
0 if all is well, 1 if the command found something wrong, 2 if it could not run.
.Sh EXAMPLES
.Dl deepep doctor
.Sh SEE ALSO
.Lk {homepage}
"""

NOT_UPLOADED = """\
# A package of the project's own, not uploaded to Debian: there is no bug that asks for it.
{name}: initial-upload-closes-no-bugs *
"""
OVERRIDES = {
    "libs": """\
# Opened by name at run time, beside libdeepep.so: they are not linked against, and have no soname.
{name}: sharedobject-in-library-directory-missing-soname *
{name}: shared-library-lacks-version *
# The GPU libraries hold device code of NVIDIA's compiler; NVSHMEM's host part is searched beside a Python package.
{name}: custom-library-search-path *
# libstdc++ goes in, so that one build serves every distribution.
{name}: embedded-library *
# Go's linker marks what may be hardened itself.
{name}: hardening-no-bindnow *
""",
    "libdevel": "",
    "utils": """\
# Go links the program by itself, without a C compiler: not position independent.
{name}: hardening-no-pie *
{name}: hardening-no-relro *
""",
}


def write_documents(package: Package, root: pathlib.Path, commit: Commit, found: list[Part]) -> None:
    documents = root / "usr" / "share" / "doc" / package.name
    documents.mkdir(parents=True)
    inside = {path.name for path in (root / "usr").rglob("*")}
    ours = [part for part in found if part.files & inside]
    (documents / "copyright").write_text(copyright_file(ours))
    compress(changelog("deepep", commit).encode(), documents / "changelog.Debian.gz")
    for part in ours:
        folder = documents / "licenses" / part.name.replace("/", "_")
        folder.mkdir(parents=True)
        for name, text in part.texts.items():
            (folder / name).write_text(text)
    if package.section == "utils":
        manual = root / "usr" / "share" / "man" / "man1"
        manual.mkdir(parents=True)
        date = time.strftime("%B %-d, %Y", time.gmtime(commit.epoch))
        compress(MANUAL.format(date=date, homepage=HOMEPAGE).encode(), manual / "deepep.1.gz")
    overrides = root / "usr" / "share" / "lintian" / "overrides"
    overrides.mkdir(parents=True)
    (overrides / package.name).write_text((NOT_UPLOADED + OVERRIDES[package.section]).format(name=package.name))


def write_control(package: Package, root: pathlib.Path, architecture: str) -> None:
    control = root / "DEBIAN"
    control.mkdir()
    fields = dict(package.fields)
    libraries = sorted((root / "usr" / "lib").rglob("libdeepep*.so*"))
    if "${shlibs:Depends}" in fields["Depends"]:
        needed = shared_library_dependencies([*(root / "usr" / "bin").glob("*"), *libraries], package)
        fields["Depends"] = fields["Depends"].replace("${shlibs:Depends}", needed)
    if package.section == "libs":
        (library,) = (path for path in libraries if path.name == soname())
        write_symbols(library, package, control)
        (control / "triggers").write_text("activate-noawait ldconfig\n")
    files = sorted(path for path in (root / "usr").rglob("*") if path.is_file() and not path.is_symlink())
    size = sum(-(-path.stat().st_size // 1024) for path in files)
    sums = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files]
    (control / "md5sums").write_text("".join(sums))
    head = {"Package": package.name, "Source": "deepep", "Version": f"{version()}-{REVISION}"}
    head |= {"Architecture": architecture, "Maintainer": MAINTAINER, "Installed-Size": str(size), **fields}
    head |= {"Section": package.section, "Priority": "optional", "Homepage": HOMEPAGE}
    text = "".join(f"{name}: {value}\n" for name, value in head.items())
    text += f"Description: {package.title}\n" + indented("\n".join(textwrap.wrap(package.text, 78)))
    (control / "control").write_text(text)


def need_tools() -> None:
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        raise ReleaseError(f"needed for the Debian packages: {', '.join(missing)} (apt-get install dpkg-dev)")


def write_packages(usr: pathlib.Path, found: list[Part], commit: Commit, dist: pathlib.Path) -> list[pathlib.Path]:
    """Makes the packages of what `make install PREFIX=/usr` has put into `usr`, and writes them to `dist`."""
    need_tools()
    architecture, triplet = ARCHITECTURES[elf_machine(usr / "bin" / "deepep")]
    made = []
    with tempfile.TemporaryDirectory() as folder:
        whole = pathlib.Path(folder, "whole")
        shutil.copytree(usr, whole, symlinks=True)
        move_to_multiarch(whole, triplet)
        rest = {path for path in whole.rglob("*") if path.is_symlink() or not path.is_dir()}
        for package in packages():
            root = pathlib.Path(folder, package.name)
            for path in sorted(rest):
                name = path.relative_to(whole)
                if re.fullmatch(package.files, name.as_posix()):
                    target = root / "usr" / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, target, follow_symlinks=False)
                    rest.remove(path)
            for path in root.rglob("*.so*"):  # Debian's libraries are not executable
                if not path.is_symlink():
                    path.chmod(0o644)
            write_documents(package, root, commit, found)
            write_control(package, root, architecture)
            set_modes_and_times(root, commit.epoch)
            target = dist / f"{package.name}_{version()}-{REVISION}_{architecture}.deb"
            options = ["--root-owner-group", "-Zxz", "-z6", "--threads-max=1", "--build"]
            run("dpkg-deb", *options, root, target, SOURCE_DATE_EPOCH=str(commit.epoch))
            made.append(target)
        if rest:
            raise ReleaseError(f"in no package: {', '.join(sorted(str(path.relative_to(whole)) for path in rest))}")
    return made
