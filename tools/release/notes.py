"""The release notes: what changed, from CHANGELOG.md; figures, from docs/performance.md; the files and their sizes."""

from __future__ import annotations

import pathlib
import re

from .facts import ROOT, Commit, ReleaseError, version

# Headings of docs/performance.md whose first table goes into the notes, and at most how many of its rows.
FIGURES = (
    ("## CPU engine", "### Normal mode, dispatch", 4),
    ("## CPU engine", "### Normal mode, combine", 4),
    ("## CUDA engine", "### Normal mode", 9),
    ("## CUDA engine", "### Low-latency mode", 9),
)


def section(text: str, heading: str) -> str:
    """What stands below the first heading that begins with `heading`, up to the next heading of its level or above.

    Raises:
        ReleaseError: there is no such heading.
    """
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}[^\n]*\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.M | re.S)
    if not found:
        raise ReleaseError(f"no heading '{heading}'")
    return found[1].strip("\n")


def changes(changelog: str, number: str) -> str:
    """CHANGELOG's section of the version; the Unreleased one stands above it, if anything has changed since."""
    parts = []
    for heading in ("## Unreleased", f"## {number}"):
        if re.search(rf"^{re.escape(heading)}\b", changelog, re.M) and (body := section(changelog, heading)):
            title = f"### {number}" if heading != "## Unreleased" else f"### After {number}, in this build"
            parts.append(f"{title}\n\n{body}")
    if not parts:
        raise ReleaseError(f"CHANGELOG.md has no section on {number}")
    return "\n\n".join(parts)


def first_table(text: str, rows: int) -> str:
    """The first table of a text, with at most `rows` rows."""
    found = re.search(r"(?:^\|.*\n?)+", text, re.M)
    if not found:
        raise ReleaseError("docs/performance.md: a section without a table")
    return "\n".join(found[0].splitlines()[: 2 + rows])


def figures(performance: str) -> str:
    """The tables that FIGURES names, each with its heading, and under each engine the machine it was measured on."""
    out, engine = [], ""
    for top, heading, rows in FIGURES:
        chapter = section(performance, top)
        if top != engine:
            engine = top
            machine = re.search(r"^Measured on: .*?(?=\n\n)", chapter, re.M | re.S)
            if not machine:
                raise ReleaseError(f"docs/performance.md: '{top}' does not say what it was measured on")
            out.append(f"### {top[3:]}\n\n{machine[0]}")
        title = re.search(rf"^{re.escape(heading)}[^\n]*", chapter, re.M)
        assert title, heading  # section() has found it, or raised
        out.append(f"{title[0][4:]}:\n\n{first_table(section(chapter, heading), rows)}")
    return "\n\n".join(out)


def sizes(files: list[pathlib.Path]) -> str:
    lines = [f"| `{path.name}` | {path.stat().st_size / 1e6:.2f} MB |" for path in sorted(files)]
    return "\n".join(["| file | size |", "|---|---:|", *lines])


def write_notes(files: list[pathlib.Path], commit: Commit, dist: pathlib.Path) -> pathlib.Path:
    """Writes RELEASE_NOTES.md to `dist`."""
    log, performance = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "docs/performance.md"))
    text = f"# deepep-go {version()}\n\nCommit {commit.name}. `make release` with the same compilers, Go and dpkg\n"
    text += "makes the same bytes in any folder: `sha256sum --check SHA256SUMS`.\n\n"
    text += f"## Files\n\n{sizes(files)}\n\n## Changes\n\n{changes(log, version())}\n\n"
    text += f"## Figures\n\nFrom docs/performance.md, which says how they were measured.\n\n{figures(performance)}\n"
    target = dist / "RELEASE_NOTES.md"
    target.write_text(text)
    return target
