"""The binary archive for C and C++: what `make install` puts below a prefix, and the licences of all that is in it."""

from __future__ import annotations

import pathlib
import shutil
import tempfile

from .archives import pack_tree
from .facts import ROOT, Commit, elf_machine, version
from .parts import Part, write_licences

README = """\
deepep-go {version} for C and C++, Linux on {machine}.

Unpack it anywhere; the files find each other.

  pkg-config:  PKG_CONFIG_PATH=THIS/lib/pkgconfig pkg-config --cflags --libs deepep
  CMake:       find_package(deepep) with -DCMAKE_PREFIX_PATH=THIS, then link deepep::deepep
  program:     THIS/bin/deepep doctor

LICENSE is ours; licenses/ has those of the parts that are linked in; sbom.cdx.json lists them.
"""


def write_binary(usr: pathlib.Path, sbom: str, found: list[Part], commit: Commit, dist: pathlib.Path) -> pathlib.Path:
    """Packs what `make install` has put into `usr` as deepep-VERSION-linux-MACHINE.tar.gz in `dist`."""
    machine = elf_machine(usr / "bin" / "deepep")
    name = f"deepep-{version()}-linux-{machine}"
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder, name)
        shutil.copytree(usr, root, symlinks=True)
        shutil.copy(ROOT / "LICENSE", root / "LICENSE")
        write_licences(found, root / "licenses")
        (root / "sbom.cdx.json").write_text(sbom)
        (root / "README.txt").write_text(README.format(version=version(), machine=machine))
        target = dist / f"{name}.tar.gz"
        pack_tree(root, name, commit.epoch, target)
    return target
