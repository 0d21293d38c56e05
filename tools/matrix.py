"""make matrix: installs the wheel into one environment after another, tries it there, and writes docs/versions.md.

    .venv/bin/python tools/matrix.py [--wheel FILE] [--only ROW …] [--list] [--keep] [--work FOLDER]

An environment is a Python of this machine with torch from PyPI, or a Debian system in a folder (made by mmdebstrap,
entered by chroot, which needs root), with torch from Debian or PyPI. Each is removed before the next one is made: at
most 12 GB of disk at a time, and some 15 GB of downloads in all. Rows that do not run this time stay in the table as
they are; what every check said lies in build/matrix, a file a row, with a log.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from matrix_place import CERTIFICATES, Place, remove, run  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "build" / "matrix"
BEGIN, END = "<!-- matrix: written by make matrix -->", "<!-- end of matrix -->"
TEST_TOOLS = ("pytest==9.2.0", "pytest-timeout==2.4.0", "numpy==2.2.6")
MIRROR = "http://deb.debian.org/debian"
# CPython of Maven Central for a Debian whose own is too old: it needs no newer glibc than 2.17.
PORTABLE = (
    "https://repo1.maven.org/maven2/org/bytedeco/cpython/3.10.8-1.5.8/cpython-3.10.8-1.5.8-linux-x86_64.jar",
    "2f101b1aa06effdbda3c318c1728b13f22b571707c7b7704abaf5d19a33aa981",
)
PORTABLE_HOME = "org/bytedeco/cpython/linux-x86_64"
NOBODY = 65534


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment. Without a suite it is a virtual environment of a Python of this machine.

    Attributes:
        name: of the row, for --only.
        python: the version; with a suite the one that Debian has there, unless portable.
        torch: pinned, from PyPI; empty: what pip takes, or Debian's, if python3-torch is among the packages.
        suite: of Debian.
        packages: of Debian, beside the smallest system.
        portable: Python from Maven Central.
        why: what the row is for.
    """

    name: str
    why: str
    python: str
    torch: str = ""
    suite: str = ""
    packages: tuple[str, ...] = ()
    portable: bool = False

    @property
    def debian_torch(self) -> bool:
        return "python3-torch" in self.packages


VENV = ("ca-certificates", "python3-venv")
ROWS = (
    Row("oldest", "the oldest torch and Python", "3.10", "2.4.1"),
    Row("2.9", "a torch before the compiled face", "3.12", "2.9.1"),
    Row("2.11", "the torch that the tests run with", "3.11", "2.11.0"),
    Row("newest", "the newest torch on PyPI", "3.13", "2.15.0"),
    Row("trixie", "Debian 13 with its own torch, a CPU build", "3.13", "", "trixie", (*VENV, "python3-torch")),
    Row("sid", "Debian unstable with its own torch, a CPU build", "3.14", "", "sid", (*VENV, "python3-torch")),
    Row("fresh", "a bare Debian 12: python3-venv, then `pip install` of the wheel", "3.11", "", "bookworm", VENV),
    Row("bullseye", "glibc 2.31", "3.10", "2.4.1", "bullseye", ("ca-certificates", "libgomp1"), True),
)

# A check of tools/matrix_probe.py, its column, and how it is entered: offline, and as whom.
CHECKS = {
    "without_torch": "import without torch",
    "imported": "import",
    "intranode": "normal mode",
    "low_latency": "low latency",
    "internode": "two nodes",
    "tests": "tests",
    "another_user": "as nobody, all read-only",
    "bare": "no compiler, no network",
}


# ---- One row ---------------------------------------------------------------------------------------------------------


def python_of(version: str) -> str | None:
    """This machine's Python of a version."""
    found = sorted(pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def missing(row: Row) -> str | None:
    """What this machine lacks for a row."""
    if not row.suite:
        return None if python_of(row.python) else f"no python{row.python}"
    if os.getuid():
        return "chroot needs root"
    return next((f"no {tool}: apt-get install {tool}" for tool in ("mmdebstrap",) if not shutil.which(tool)), None)


def copy_tests(place: Place, wheel: pathlib.Path) -> None:
    """The tests and what they read, without the package."""
    names = subprocess.check_output(
        ["git", "ls-files", "python/tests", "python/examples", "python/face", "docs", "include", "pyproject.toml"],
        cwd=ROOT, text=True,
    )  # fmt: skip
    for name in names.split():
        target = place.tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for path in (ROOT / "tools" / "matrix_probe.py", wheel):
        shutil.copy2(path, place.tree / path.name)


def portable_python(place: Place, version: str) -> str:
    """Unpacks CPython from Maven Central into the system; returns its path inside."""
    url, digest = PORTABLE
    with urllib.request.urlopen(url, timeout=300) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{url}: another file than expected")
    jar = place.folder / "python.jar"
    jar.write_bytes(data)
    home = place.folder / "opt"
    with zipfile.ZipFile(jar) as archive:
        archive.extractall(home, [name for name in archive.namelist() if name.startswith(PORTABLE_HOME)])
    jar.unlink()
    python = home / PORTABLE_HOME / "bin" / f"python{version}"
    python.chmod(0o755)
    return place.inside(python)


def make(row: Row, place: Place, wheel: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Makes the environment and installs torch and the wheel; the answers that are had on the way."""
    answers = {}
    if row.suite:
        options = ["--variant=minbase", f"--include={','.join(row.packages)}"]
        options += ["--aptopt=Acquire::Check-Valid-Until false"]  # a mirror may lag behind; signatures are checked
        run(["mmdebstrap", "--quiet", *options, row.suite, place.folder, MIRROR], place.log)
        shutil.copy2("/etc/resolv.conf", place.folder / "etc" / "resolv.conf")
        shutil.copy2(CERTIFICATES, str(place.folder) + CERTIFICATES)  # a network may have a certificate of its own
    copy_tests(place, wheel)
    python = portable_python(place, row.python) if row.portable else "python3" if row.suite else python_of(row.python)
    system = ["--system-site-packages"] * row.debian_torch
    place.run(python, "-m", "venv", *system, place.venv)
    file = f"{place.inside(place.tree)}/{wheel.name}"
    if not row.debian_torch:
        place.pip("--no-deps", file)
        answers["without_torch"] = place.probe("without_torch")
        place.run(f"{place.venv}/bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", "deepep-go")
    place.pip(file, *([f"torch=={row.torch}"] if row.torch else []))
    return answers


def save(result: dict[str, Any]) -> None:
    """Writes a row's result for this table and later ones."""
    (RESULTS / f"{result['row']}.json").write_text(json.dumps(result, indent=1) + "\n")


def try_row(row: Row, wheel: pathlib.Path, work: pathlib.Path, keep: bool) -> dict[str, Any]:
    """Makes the environment, asks every check, removes it; the result as docs/versions.md shows it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "row": row.name, "date": datetime.date.today().isoformat(), "wheel": wheel.name, "checks": {},
        "source": "Debian" if row.debian_torch else "PyPI",
    }  # fmt: skip
    with open(RESULTS / f"{row.name}.log", "w") as log:
        place = Place(work / row.name, bool(row.suite), log)
        remove(place.folder)
        try:
            result["checks"] = make(row, place, wheel)
            result.update(place.probe("about"))
            alone = {"offline": True} if row.suite else {}
            for check in ("imported", "intranode", "low_latency", "internode"):
                result["checks"][check] = place.probe(check, **alone)
                save(result)  # what was tried stays, whatever comes between
            if row.suite:
                user = {"user": NOBODY, "read_only": True, "HOME": "/root"}
                result["checks"]["another_user"] = place.probe("another_user", **alone, **user)
                result["checks"]["bare"] = place.probe("bare", **alone)
            place.pip(*TEST_TOOLS[: 2 if row.debian_torch else 3])  # Debian's torch comes with NumPy
            result["checks"]["tests"] = place.probe("tests", **alone)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            print(error, file=log)
            result["failed"] = f"not made: {error}".splitlines()[0]
        finally:
            if not keep:
                remove(place.folder)
    return result


# ---- The page --------------------------------------------------------------------------------------------------------


def cell(result: dict[str, Any], check: str) -> str:
    """What one environment answered."""
    answer = result["checks"].get(check)
    if answer is None:
        return "–"
    text = re.sub(r"^ImportError: .*", "says so", answer["text"]).replace("|", "\\|")
    return text if answer["ok"] else f"**no**: {text}"


def line(result: dict[str, Any]) -> str:
    """A row's result as a line of the table."""
    source = "Debian's" if result["source"] == "Debian" else "PyPI's"
    cells = [result["row"], f"{result['torch']}, {source}", result["python"]]
    cells += [f"{result['glibc']}, {result['system']}", result["date"]]
    cells += [cell(result, check) for check in ("imported", "intranode", "low_latency", "internode", "tests")]
    cells += [cell(result, "another_user")]
    return "| " + " | ".join(cells) + " |"


def table(results: Sequence[dict[str, Any]], old: str = "") -> str:
    """The results as Markdown, a line for each row, in the order of ROWS; rows without a result keep their old line."""
    head = ["row", "torch", "Python", "glibc, system", "made", "import; calls by"]
    head += ["normal mode", "low latency", "two nodes", "tests", "other user, all read-only"]
    found = {text.split("|")[1].strip(): text for text in old.splitlines() if text.startswith("| ")}
    found |= {result["row"]: line(result) for result in results if "torch" in result}
    lines = [found[row.name] for row in ROWS if row.name in found]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def write_page(page: pathlib.Path, results: Sequence[dict[str, Any]]) -> None:
    """Puts the results into the table between the page's markers."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(results, old)}\n{END}{after}")


def failures(result: dict[str, Any]) -> list[str]:
    """What a row found wrong."""
    wrong = [f"{name}: {answer['text']}" for name, answer in result["checks"].items() if not answer["ok"]]
    return wrong + ([result["failed"]] if "failed" in result else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=pathlib.Path, help="default: the newest of dist/")
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--keep", action="store_true", help="leave the environments there")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/var/tmp/deepep-matrix"))
    arguments = parser.parse_args()
    if arguments.list:
        for row in ROWS:
            print(f"{row.name:10} Python {row.python:5} torch {row.torch or '(not pinned)':13} {row.why}")
        return 0
    wheels = sorted((ROOT / "dist").glob("deepep_go-*.whl"), key=lambda path: path.stat().st_mtime)
    wheel = arguments.wheel or (wheels[-1] if wheels else None)
    if wheel is None or not wheel.exists():
        sys.exit("no wheel: run `make wheel`, or give one by WHEEL=")
    arguments.work.mkdir(parents=True, exist_ok=True)
    failed = False
    results = []
    for row in ROWS:
        if row.name not in arguments.only:
            continue
        if lacking := missing(row):
            print(f"{row.name}: left out: {lacking}", flush=True)
            continue
        result = try_row(row, wheel.resolve(), arguments.work, arguments.keep)
        save(result)
        results.append(result)
        wrong = failures(result)
        failed |= bool(wrong)
        print(f"{row.name}: {'; '.join(wrong) if wrong else 'ok'}", flush=True)
    write_page(PAGE, results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
