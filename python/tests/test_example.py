"""python/examples/train_moe.py: a short run's proof holds, and one damaged row makes it fail."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from conftest import HERE

SCRIPT = pathlib.Path(HERE).parent / "examples" / "train_moe.py"
STEPS = 6
TOLERANCE = 2e-6  # the example's own
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Two imports of torch, one after the other, on a machine that does other things besides.
LIMIT_SECONDS = 240


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the example; its exit status is the caller's to judge."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )


def train(out: pathlib.Path, device: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A short run with two ranks."""
    return run("--ranks", "2", "--steps", str(STEPS), "--engine", device, "--out", str(out), *arguments)


def largest_difference(text: str) -> float:
    """The figure in the proof's line."""
    found = re.search(r"largest difference of the loss (\S+) at step", text)
    assert found, f"no proof in the output:\n{text}"
    return float(found.group(1))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory, device: str) -> tuple[pathlib.Path, str]:
    """A short run that ended well: its folder and what it printed."""
    out = tmp_path_factory.mktemp("train_moe")
    done = train(out, device)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def saved_run(out: pathlib.Path) -> dict[str, Any]:
    """What the run left in run.json."""
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def test_short_run_is_proved(short_run: tuple[pathlib.Path, str]) -> None:
    out, printed = short_run
    assert "holds" in printed
    assert largest_difference(printed) <= TOLERANCE
    saved = saved_run(out)
    assert len(saved["losses"]) == len(saved["proof"]) == STEPS
    assert saved["losses"][-1] < saved["losses"][0], "the model learned nothing"
    assert (out / "loss.png").read_bytes().startswith(PNG_MAGIC)


def test_short_run_counts_its_communication(short_run: tuple[pathlib.Path, str]) -> None:
    layers, positions = 2, 127
    for rank in saved_run(short_run[0])["ranks"]:
        stats, warm = rank["stats"], rank["warm_calls"]
        calls = {name: found["calls"] - warm[name] for name, found in stats.items()}
        assert all(warm[name] > 0 for name in ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine"))
        # A step dispatches and combines once a layer, and once more the other way round in the backward pass.
        assert calls["dispatch"] == calls["combine"] == 2 * layers * STEPS
        # Two micro-batches write 127 bytes after the first one. The two halves of a call with a hook count as one.
        assert calls["low_latency_dispatch"] == calls["low_latency_combine"] == 2 * layers * positions
        assert sum(stats["dispatch"]["bytes_to_peer"]) > 0
        assert all(operation["errors"] == 0 for operation in stats.values())
        assert len(rank["texts"]) == 4
        assert all(len(text) >= 100 for text in rank["texts"])


def test_damaged_row_is_noticed(tmp_path: pathlib.Path, device: str) -> None:
    damaged = 3
    done = train(tmp_path, device, "--corrupt-row", str(damaged))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILS" in done.stdout
    assert largest_difference(done.stdout) > TOLERANCE
    saved = saved_run(tmp_path)
    pairs = list(zip(saved["losses"], saved["proof"], strict=True))
    assert all(abs(a - b) <= TOLERANCE for a, b in pairs[: damaged - 1]), "differs before the damage"
    assert abs(pairs[damaged - 1][0] - pairs[damaged - 1][1]) > TOLERANCE, "the damaged step itself looks right"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--steps", "-1"], "--steps"),
        (["--seed", "-3"], "--seed"),
        (["--steps", "5", "--corrupt-row", "6"], "--corrupt-row"),
        (["--engine", "cpu", "--device", "tpu"], "--device"),
    ],
)
def test_wrong_argument_is_named(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import train_moe

    with pytest.raises(SystemExit) as end:
        train_moe.parse_arguments(arguments)
    assert end.value.code == 2
    assert named in capsys.readouterr().err
