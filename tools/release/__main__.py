"""The steps of `make release` around the build: `begin` refuses a tree with changes, `finish` makes the rest.

python -m release begin --dist dist
python -m release finish --build build --stage build/stage --dist dist       (in tools/, or with it in PYTHONPATH)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import sys
import zipfile

from .binary import write_binary
from .debian import need_tools, write_packages
from .facts import Paths, ReleaseError, changed_files, head, version
from .notes import write_notes
from .parts import parts
from .sbom import make_sbom
from .source import metadata_of, write_source

NAMED = 5  # of the changed files


def begin(dist: pathlib.Path) -> None:
    """Refuses what could not be made again, and empties `dist`, so that it holds one release."""
    if changed := changed_files():
        more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
        raise ReleaseError(f"the tree has changes that are in no commit: {', '.join(changed[:NAMED])}{more}")
    need_tools()
    if dist.exists():
        for path in dist.iterdir():
            if path.is_file():
                path.unlink()


def the_wheel(dist: pathlib.Path) -> pathlib.Path:
    wheels = sorted(dist.glob(f"deepep_go-{version()}-*.whl"))
    if len(wheels) != 1:
        raise ReleaseError(f"wanted one wheel in {dist}, found {len(wheels)}")
    return wheels[0]


def write_sums(files: list[pathlib.Path], dist: pathlib.Path) -> None:
    """Writes SHA256SUMS, as `sha256sum --check` reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files)]
    (dist / "SHA256SUMS").write_text("".join(lines))


def finish(paths: Paths, stage: pathlib.Path) -> None:
    """Makes from the wheel in `dist`, the build and the installed files in `stage` all that a release has besides."""
    commit, found = head(), parts(paths)
    wheel = the_wheel(paths.dist)
    sbom = make_sbom(paths, commit, found)
    with zipfile.ZipFile(wheel) as archive:
        if not any(".dist-info/sboms/" in name and archive.read(name).decode() == sbom for name in archive.namelist()):
            raise ReleaseError(f"{wheel.name} does not hold the SBOM of this build")
    bill = paths.dist / f"deepep-{version()}.cdx.json"
    bill.write_text(sbom)
    usr = stage / "usr"
    files = [wheel, bill, write_source(metadata_of(wheel), paths.dist)]
    files += [write_binary(usr, sbom, found, commit, paths.dist), *write_packages(usr, found, commit, paths.dist)]
    files.append(write_notes(files, commit, paths.dist))
    write_sums(files, paths.dist)
    if changed := changed_files():
        raise ReleaseError(f"the tree has changed while the release was made: {', '.join(changed[:NAMED])}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description="Make what a release carries.")
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("begin", "finish"):
        step = steps.add_parser(name)
        step.add_argument("--dist", type=pathlib.Path, required=True)
        if name == "finish":
            step.add_argument("--build", type=pathlib.Path, required=True)
            step.add_argument("--stage", type=pathlib.Path, required=True)
    options = parser.parse_args()
    os.umask(0o022)
    options.dist.mkdir(exist_ok=True)
    if options.step == "begin":
        begin(options.dist.resolve())
    else:
        finish(Paths(options.build.resolve(), options.dist.resolve()), options.stage.resolve())
        print((options.dist / "SHA256SUMS").read_text(), end="")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        sys.exit(f"make release: {error}")
