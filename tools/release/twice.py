"""Makes the release of this tree's commit twice, in two folders, and compares it file by file, for `make test-full`.

    python -m release.twice [MAKE_VARIABLE=VALUE ...]        (in tools/)

Each folder is a clone with a .venv of its own over this tree's. SM90=0 is quick: no code but for sm_80. Settings of the
user that must not matter differ: the length of the path, the umask, the time zone, the language.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from .facts import ROOT, ReleaseError, run

SETTINGS = (
    {"folder": "a", "umask": "0022", "TZ": "UTC", "LC_ALL": "C"},
    {"folder": "a-longer-name/b", "umask": "0077", "TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"},
)


def release(commit: str, folder: pathlib.Path, settings: dict[str, str], variables: list[str]) -> dict[str, bytes]:
    """Clones `commit` into `folder`, makes its release there; name and contents of each file of dist/."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    umask, names = settings["umask"], ("TZ", "LC_ALL")
    drop = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    env |= {name: settings[name] for name in names}
    env["PATH"] = f"{ROOT}/.venv/bin:{env['PATH']}"
    clone = f"umask {umask} && git clone --quiet --no-local '{ROOT}' '{folder}' && git -C '{folder}' checkout --quiet "
    clone += commit
    make = f"umask {umask} && make --no-print-directory release PYTHON='{ROOT}/.venv/bin/python' {' '.join(variables)}"
    for command, where in ((clone, ROOT), (make, folder)):
        done = subprocess.run(["sh", "-c", command], cwd=where, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            raise ReleaseError(f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {path.name: path.read_bytes() for path in sorted((folder / "dist").iterdir())}


def main(variables: list[str]) -> int:
    top = pathlib.Path(tempfile.mkdtemp(prefix="deepep-twice-"))
    # The clones' environments stand on this one: of NVIDIA's packages it must have all, since they share a folder.
    run("make", "venv", *(f".venv/.stamp-{name}" for name in ("cuda", "cuda12", "nvshmem", "release")))
    commit = run("git", "rev-parse", "HEAD").strip()
    one, other = (release(commit, top / settings["folder"], settings, variables) for settings in SETTINGS)
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    print(one["SHA256SUMS"].decode(), end="")
    if different:
        print(f"different: {', '.join(different)} (both releases are in {top})")
        return 1
    shutil.rmtree(top)
    print(f"{len(one)} files, the same in both folders")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ReleaseError as error:
        sys.exit(f"twice: {error}")
