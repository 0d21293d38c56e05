"""`python -m deep_ep.selftest`: it passes here, its checker sees faults, and it says what it cannot do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from deep_ep import _selftest_check as sc

SHAPE = sc.Shape(ranks=3, tokens=20, hidden=128, topk=2, experts=6, seed=1)
TINY = ["--num-processes", "2", "--num-tokens", "12", "--hidden", "512", "--num-topk", "2", "--num-experts", "4"]


def selftest(device, *arguments, expected=0):
    done = subprocess.run(
        [sys.executable, "-m", "deep_ep.selftest", *arguments, "--engine", device],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


def test_intranode(device):
    text = selftest(device, "intranode", *TINY, "--pressure-test", "3", "--iterations", "3")
    assert "FAILED" not in text and "GB/s" in text
    lines = text.splitlines()
    assert sum(" ok " in line for line in lines) == 21, text
    assert any("combine BF16" in line for line in lines) and "21 of 21 cases passed" in lines[-1]


def test_low_latency(device):
    options = ["--use-logfmt", "--shrink-test", "--pressure-test", "3", "--iterations", "3"]
    text = selftest(device, "low_latency", *TINY, *options)
    assert "FAILED" not in text and "GB/s" in text
    for word in ("LogFMT-10", "UE8M0", "killed", "zero copy", "hook"):
        assert word in text, text


def test_failure_is_a_line_and_an_exit_status(device):
    """Without the library nothing can pass: every case is a FAILED line that says why."""
    environment = {**os.environ, "DEEPEP_LIBRARY": "/nowhere/libdeepep.so"}
    done = subprocess.run(
        [sys.executable, "-m", "deep_ep.selftest", "intranode", *TINY, "--engine", device],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 1, done.stdout
    assert "FAILED" in done.stdout and "/nowhere/libdeepep.so" in done.stdout and "cases FAILED" in done.stdout


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["intranode", "--num-experts", "7", "--num-processes", "2"], "--num-experts"),
        (["intranode", "--num-topk", "9", "--num-experts", "8", "--num-processes", "2"], "--num-topk"),
        (["low_latency", "--hidden", "200"], "--hidden"),
        (["low_latency", "--num-processes", "0"], "--num-processes"),
        (["somewhere"], "somewhere"),
    ],
)
def test_wrong_options(arguments, word):
    done = subprocess.run(
        [sys.executable, "-m", "deep_ep.selftest", *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0 and word in done.stderr


def rows_of(rank, token):
    return sc.payload(rank, token, SHAPE.hidden).to(torch.bfloat16)


FAULTS = {
    "shifted by a row": lambda rows: rows.roll(1, 0),
    "one bit": lambda rows: rows.view(torch.int16).index_fill(1, torch.tensor([127]), 3).view(torch.bfloat16),
    "a row missing": lambda rows: rows[:-1],
    "not a number": lambda rows: torch.where(rows == rows[2, 9], torch.nan, rows),
    "columns moved": lambda rows: rows.roll(8, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checker_sees_a_fault(fault):
    rank, token = sc.sources(SHAPE, 1)
    rows = rows_of(rank, token)
    sc.expect_rows("x", rows, rank, token)
    with pytest.raises(sc.CheckError):
        sc.expect_rows("x", FAULTS[fault](rows.clone()), rank, token)


def test_checker_names_the_wrong_row():
    rank, token = sc.sources(SHAPE, 1)
    with pytest.raises(sc.CheckError, match=r"row 0 holds token \d+ of rank \d, expected token \d+ of rank 0"):
        sc.expect_rows("x", rows_of(rank, token).roll(-1, 0), rank, token)


def test_cast_check():
    import reference_formats as formats

    source = torch.randn((30, 256), generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    for rounded in (False, True):
        values, scales = formats.fp8_cast(source, rounded)
        sc.expect_cast("x", values, scales, source.float(), rounded)
        with pytest.raises(sc.CheckError, match="scales"):
            sc.expect_cast("x", values, scales * 1.01, source.float(), rounded)
        wrong = values.view(torch.uint8).clone()
        wrong[3, 7] ^= 2
        with pytest.raises(sc.CheckError, match="1 values"):
            sc.expect_cast("x", wrong.view(torch.float8_e4m3fn), scales, source.float(), rounded)


def test_close_check_never_passes_nan():
    with pytest.raises(sc.CheckError):
        sc.expect_close("x", torch.full((3,), torch.nan), torch.zeros(3), 1e-5)


def test_digest_sees_order():
    x = torch.arange(100, dtype=torch.float32)
    assert sc.digest(x) != sc.digest(x.flip(0)) and sc.digest(x) == sc.digest(x.clone())
