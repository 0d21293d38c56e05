"""The parts of tools/matrix.py that need no environment: its rows, its table, its page."""

from __future__ import annotations

import pathlib

import pytest

import matrix
import matrix_probe

ROOT = pathlib.Path(__file__).resolve().parents[2]
ANSWERS = {
    "imported": {"ok": True, "text": "ctypes"},
    "intranode": {"ok": True, "text": "20 of 20"},
    "low_latency": {"ok": False, "text": "13 of 14"},
    "tests": {"ok": True, "text": "61 passed, 3 skipped"},
}


def result(row: str, **more: object) -> dict[str, object]:
    base = {"row": row, "date": "2026-01-02", "source": "PyPI", "checks": ANSWERS, "torch": "2.4.1", "python": "3.10.8"}
    return {**base, "glibc": "2.31", "system": "Debian 11", **more}


def test_rows_are_pinned_and_reach_what_is_claimed() -> None:
    names = [row.name for row in matrix.ROWS]
    assert len(set(names)) == len(names)
    assert all(row.suite or row.torch for row in matrix.ROWS)
    assert {row.python for row in matrix.ROWS} >= {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert any(row.torch.startswith("2.4.") for row in matrix.ROWS)
    for name in matrix_probe.TESTS:
        assert (ROOT / "python" / "tests" / f"test_{name}.py").exists()
    assert set(matrix.CHECKS) <= set(matrix_probe.CHECKS)


def test_table() -> None:
    lines = matrix.table([result("newest"), result("oldest"), {"row": "sid", "checks": {}, "failed": "x"}]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    oldest = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert oldest[:5] == ["oldest", "2.4.1, PyPI's", "3.10.8", "2.31, Debian 11", "2026-01-02"]
    assert oldest[5:] == ["ctypes", "20 of 20", "**no**: 13 of 14", "–", "61 passed, 3 skipped", "–"]


def test_failures_are_named() -> None:
    assert matrix.failures(result("oldest")) == ["low_latency: 13 of 14"]
    assert matrix.failures({"checks": {}, "failed": "not made: no space"}) == ["not made: no space"]


def test_page_keeps_what_others_wrote(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "versions.md"
    page.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    matrix.write_page(page, [result("oldest")])
    text = page.read_text()
    assert text.startswith(f"before\n{matrix.BEGIN}\n| row |") and text.endswith(f"|\n{matrix.END}\nafter\n")
    assert "old\n" not in text and matrix.BEGIN in (ROOT / "docs" / "versions.md").read_text()


def test_rows_that_did_not_run_stay(tmp_path: pathlib.Path) -> None:
    """With nothing but the page: build/ may be another machine's, or gone."""
    page = tmp_path / "versions.md"
    page.write_text(f"{matrix.BEGIN}\n{matrix.table([result('sid', date='old'), result('oldest')])}\n{matrix.END}\n")
    matrix.write_page(page, [result("newest"), result("sid", date="new"), {"row": "oldest", "checks": {}}])
    rows = [[cell.strip() for cell in line.split("|")[1:6:4]] for line in page.read_text().splitlines()[3:-1]]
    assert rows == [["oldest", "2026-01-02"], ["newest", "2026-01-02"], ["sid", "new"]]


def test_a_missing_python_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert matrix.missing(matrix.Row("x", "", "3.99", "2.4.1")) == "no python3.99"
