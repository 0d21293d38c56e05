"""Asynchronous calls of the compiled face: ordered among streams as Python's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import checks
import fake_kernels


def check_points(lines, stream):
    """A point is an event of the library's that was recorded on the caller's stream, as long as a buffer is there."""
    assert len(lines) == 3 * 4
    waits = {"first": stream, "waited for on another GPU": 0x3000}
    for line in lines:
        waiting = waits.get(line["point"])
        want = [] if waiting is None else [f"record e<-1> on {stream}", f"{waiting} waits e<0>"]
        assert (line["trace"], line["for the CPU engine"]) == (want, [0, None]), line
    for first, second, *others in zip(*(lines[i::4] for i in range(4)), strict=True):
        assert first["event"] == second["event"] != 0 and not any(line["event"] for line in others)


@checks.needs_face
@fake_kernels.needs_gcc
@pytest.mark.parametrize("records", ("torch", "Python"))
@pytest.mark.parametrize("stream", (0, 0x1000), ids=("default stream", "another"))
def test_asynchronous_calls_are_ordered_as_pythons(tmp_path, stream, records):
    """As on a GPU: the same calls, waits and records on the same streams, and every tensor's streams are known."""
    tests, kernels = Path(__file__).parent, fake_kernels.build(tmp_path)
    lines = {}
    for compiled in "01":
        folder = tmp_path / compiled
        folder.mkdir()
        env = {**kernels, "DEEPEP_TORCH_FACE": compiled}
        program = [sys.executable, str(tests / "ordering_program.py"), str(folder), str(stream), records]
        done = subprocess.run(program, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines[compiled] = [json.loads(line) for line in done.stdout.splitlines()]
    issued = {compiled: [line for line in some if "issued" in line] for compiled, some in lines.items()}
    assert len(issued["0"]) == 4 * 3
    for python, face in zip(issued["0"], issued["1"], strict=True):
        assert (python.pop("through the face"), face.pop("through the face")) == (False, face["turn"] > 0)
        assert python == face
        assert "already" in face["again"][1] and "forgotten" in face["forgotten"][1], face
        assert face["forgotten again"] == face["again"] and "took an argument" not in face and face["kept"] == 0, face
        for what in ("whole", "first half", "returned"):
            assert sum(one.startswith(face["issued"].split()[0]) for one in face[what][1]) == 1, face
    for some in lines.values():
        check_points([line for line in some if "point" in line], stream)
    lines = {compiled: [line for line in some if "point" not in line] for compiled, some in lines.items()}
    refused = {compiled: [line for line in some if "refused" in line] for compiled, some in lines.items()}
    assert len(refused["0"]) == 2 * (4 + 8)
    for python, face in zip(refused["0"], refused["1"], strict=True):
        assert "could not be launched" in face["error"]
        traces = python.pop("trace"), face.pop("trace")
        # Where the library makes both steps itself it is through with the tensors when the call is refused.
        begun, apart = "cached" not in face["refused"], "worst" not in face["refused"]
        assert python == face and face["kept at once"] == int(begun and apart) and not face["kept"]
        assert [sum(line.startswith("notify") for line in trace) for trace in traces] == [int(begun)] * 2
    lines = {compiled: [line for line in some if "issued" not in line] for compiled, some in lines.items()}
    lines = {compiled: [line for line in some if "refused" not in line] for compiled, some in lines.items()}
    cut_short = 4 * (6 + 10) if records == "Python" else 0  # torch's function fails in no way that can be caught
    assert len(lines["0"]) == 3 * (4 * (6 + 10) + 2) + cut_short + 1
    for python, face in zip(lines["0"], lines["1"], strict=True):
        if "trace" in python:
            asked = python.pop("asked"), face.pop("asked")
            whole = face["call"].split(",")[0] not in ("dispatch", "dispatch fp8") or re.search(
                "worst|cach", face["call"]
            )
            if whole and face["order"] in ("behind a point", "behind a call"):  # the module has it from the event
                assert asked[0] and not (face["turn"] and asked[1]), (asked, face)
            assert python == face
            if python["order"] == "behind a point":  # by an event of the library, which nothing asks torch for
                assert python["torch"] == ["in communication"], python
                assert python["trace"][0] == "100 waits e<-1>", python
            assert (python["untold"], python["told of others"], python["kept"]) == (0, 0, 0), python
            assert python["held"], python
            assert python.get("told late", True) and not python.get("held on", False), python
            assert any(line.startswith(python["call"].split(",")[0].split()[0]) for line in python["trace"]), python
        for line in (python, face) if "cut short" in python else ():  # peers are told; tensors are let go of
            assert line["kept"] == 0 and line["raised"] >= (line["number"] == 0), line
            assert not line["raised"] or not line["notify"] or line["dispatch"] == line["notify"], line
    assert lines["0"][-1] == {"through the face": 0}
    for version in ("V1", "V2") if cut_short else ():
        begun = [line for line in lines["1"] if line.get("raised") and line["notify"] and version in line["cut short"]]
        assert begun, "no dispatch of the compiled face was cut short between its steps"
    # All but the first of a kind, dispatches in two steps.
    assert lines["1"][-1]["through the face"] >= 2 * (4 * (6 + 10) + 2)
