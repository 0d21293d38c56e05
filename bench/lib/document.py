"""A benchmark's tables in a document, between two marks that name the benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path


def marks(program: str) -> tuple[str, str]:
    """The lines between which the program's tables stand."""
    return f"<!-- {program}: begin -->", f"<!-- {program}: end -->"


def check(parser: argparse.ArgumentParser, program: str, path: Path) -> None:
    """Ends the program where the document lacks the marks; a document that is yet to be made is fine."""
    begin, end = marks(program)
    if path.exists():
        text = path.read_text()
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            parser.error(f"--markdown: {path} must hold the lines {begin} and {end} once, in this order")


def write(program: str, path: Path, text: str) -> None:
    """Puts the text between the document's marks; a new document consists of them alone."""
    begin, end = marks(program)
    before, after = "", "\n"
    if path.exists():
        document = path.read_text()
        before, after = document[: document.index(begin)], document[document.index(end) + len(end) :]
    path.write_text(f"{before}{begin}\n{text}{end}{after}")
