"""Runs files of real clients, unchanged, over this package, and compares with plain torch. See `make clients`.

The files come from the wheels that requirements.txt names; they are unpacked below build/ and none is installed. What
they import besides and do not need is replaced while they run. Everything runs on the CPU engine, 4 ranks; with
DEEPEP_TEST_DEVICE=cuda on GPUs; with DEEPEP_NUM_MAX_NVL_PEERS=2 as two nodes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = ROOT / "build" / "clients"
RANKS = 4
PYTHON_OF_WHEELS = "3.12"  # whose wheels are taken, whatever Python runs here: only .py files are used
for _path in (HERE, ROOT / "python" / "tests", ROOT / "python"):
    sys.path.insert(0, str(_path))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3] + [p for p in [os.environ.get("PYTHONPATH", "")] if p])
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"


def pins() -> dict[str, str]:
    """Client: its pinned requirement. A second release of a client has its name behind it."""
    lines = [line for line in (HERE / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    parts = [line.partition("#") for line in lines if line]
    return {name.strip() or pin.split("==")[0]: pin.strip() for pin, _, name in parts}


def fetch(name: str, requirement: str) -> None:
    """Unpacks the Python files of a client's wheel, unless that version is there."""
    mark = FILES / name / "VERSION"
    if mark.exists() and mark.read_text() == requirement:
        return
    print(f"fetching {requirement}", flush=True)
    shutil.rmtree(mark.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory() as there:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--python-version", PYTHON_OF_WHEELS]
        subprocess.run([*command, "--dest", there, requirement], check=True)
        (wheel,) = Path(there).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(mark.parent, [each for each in archive.namelist() if each.endswith(".py")])
    mark.write_text(requirement)


def run(name: str, only: str) -> dict[str, str]:
    """A client's cases: for each its error, or nothing."""
    import importlib

    from pool import RankPool, RanksFailed, RanksLate

    module = importlib.import_module(f"real_{name.replace('-', '_')}")
    pool = RankPool(RANKS, os.environ.get("DEEPEP_TEST_DEVICE", "cpu"))
    results = {}
    try:
        for case, (function, *arguments) in module.CASES.items():
            if only not in case:
                continue
            try:
                pool.run(RANKS, function, *arguments, deadline=300.0)
                results[case] = ""
            except (RanksFailed, RanksLate) as error:
                results[case] = str(error)
                pool.stop()  # its ranks may still be inside of a call
            print(f"  {'FAILED' if results[case] else 'ok':7}{name}: {case}", flush=True)
            if results[case]:
                print(results[case], flush=True)
    finally:
        pool.stop()
    return results


def main() -> int:
    pinned = pins()
    parser = argparse.ArgumentParser(description="Runs files of real clients over this package.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(pinned)}; all without one")
    parser.add_argument("-k", dest="only", default="", metavar="TEXT", help="only cases with this text in their name")
    options = parser.parse_args()
    if wrong := set(options.clients) - set(pinned):
        parser.error(f"no such client: {', '.join(sorted(wrong))}")
    failed = total = 0
    for name in options.clients or pinned:
        fetch(name, pinned[name])
        results = run(name, options.only)
        failed, total = failed + sum(map(bool, results.values())), total + len(results)
        print(f"{pinned[name]}: {sum(not text for text in results.values())} of {len(results)} cases pass", flush=True)
    print(f"{total - failed} of {total} cases pass")
    return 1 if failed or not total else 0


if __name__ == "__main__":
    sys.exit(main())
