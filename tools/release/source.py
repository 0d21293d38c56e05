"""The source archive: what git has of the commit, and the metadata that Python's installers look for.

It is git's archive and not setuptools' sdist: git's holds every file that the build, the tests and the documents need,
where an sdist holds what a list names, and its bytes follow from the commit. With PKG-INFO and the name and folder that
Python prescribes it is a source distribution as well: `pip install deepep_go-X.Y.Z.tar.gz` builds it.
"""

from __future__ import annotations

import pathlib
import tempfile
import zipfile

from .archives import compress
from .facts import ROOT, ReleaseError, run, version


def metadata_of(wheel: pathlib.Path) -> str:
    """The core metadata of a wheel; a source distribution has the same, under the name PKG-INFO."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def write_source(metadata: str, dist: pathlib.Path, commit: str = "HEAD") -> pathlib.Path:
    """Writes deepep_go-VERSION.tar.gz of `commit` to `dist`."""
    top = f"deepep_go-{version()}"
    with tempfile.TemporaryDirectory() as folder:
        info, archive = pathlib.Path(folder, "PKG-INFO"), pathlib.Path(folder, "archive.tar")
        info.write_text(metadata)
        info.chmod(0o644)
        # tar.umask: git's own default, but a user may have set another.
        options = ["--format=tar", f"--prefix={top}/", f"--add-file={info}", f"--output={archive}"]
        run("git", "-c", "tar.umask=0022", "archive", *options, commit, cwd=ROOT)
        target = dist / f"{top}.tar.gz"
        compress(archive.read_bytes(), target)
    if target.stat().st_size == 0:
        raise ReleaseError(f"{target}: empty")
    return target
