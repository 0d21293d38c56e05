"""What the documents and the sources say twice is the same."""

from __future__ import annotations

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPELT = re.compile(r"libdeepep\.so\.\d|(?<![\d.])%s(?![\d.]*\d)")


def version() -> str:
    header = (ROOT / "include" / "deepep.h").read_text()
    return ".".join(re.findall(r"^#define DEEPEP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header, re.M))


def tracked() -> list[pathlib.Path]:
    """The files of the repository; in an unpacked source archive, those of the folders that it has."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_the_version_stands_in_the_header_alone() -> None:
    """Documents may name a version: the one that was measured, or released. core restates it, and has a test."""
    spelt = re.compile(SPELT.pattern % re.escape(version()))
    sums = {ROOT / "go.sum", ROOT / "go.mod"}
    for path in tracked():
        if path.suffix in (".md", ".png", ".svg") or path in sums:
            continue
        found = spelt.search(path.read_text(errors="replace"))
        assert not found, f"{path.relative_to(ROOT)} spells {found[0]}: take it from include/deepep.h"


def test_a_spelt_version_is_seen() -> None:
    spelt, name = re.compile(SPELT.pattern % re.escape("7.8.9")), "libdeepep.so"
    assert spelt.search(f'load("{name}.1")') and spelt.search("version = 7.8.9;")
    assert not spelt.search(f"{name} {name}.$(MAJOR) 17.8.9 7.8.91")


def test_new_paths_of_the_table_of_renames_are_there() -> None:
    text = (ROOT / "docs" / "renames.md").read_text().split("\n## Names")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for line in rows:
        new = re.search(r"`([^`]+)`[^`]*\|$", line)
        assert new and (ROOT / new[1]).exists(), line
