"""`python -m deep_ep.selftest`: it passes here, its checker sees faults, and it names what it cannot do."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import types

import pytest
import torch

from conftest import full
from deep_ep.selftest import check as sc

SHAPE = sc.Shape(ranks=3, tokens=20, hidden=128, topk=2, experts=6, seed=1)
TINY = ["--num-processes", "2", "--num-tokens", "12", "--hidden", "512", "--num-topk", "2", "--num-experts", "4"]


NODES = ["--num-processes", "4", "--num-tokens", "12", "--hidden", "512", "--num-topk", "2", "--num-experts", "8"]


def selftest(device, *arguments, expected=0, env=None):
    done = subprocess.run(
        [sys.executable, "-m", "deep_ep.selftest", *arguments, "--engine", device],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
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


def test_internode(device, nodes):
    """Two nodes of two ranks, over the software RDMA."""
    text = selftest(device, "internode", *NODES, "--pressure-test", "2", "--iterations", "1")
    assert "FAILED" not in text and "32 of 32 cases passed" in text
    for word in (
        "4 ranks in nodes of 2",
        "internode_dispatch",
        "hook",
        "RDMA inside nodes",
        "by RDMA",
        "low latency, 12",
    ):
        assert word in text, text


def test_two_jobs_at_once(device):
    """Groups that know nothing of each other, on the same host and devices."""
    command = [sys.executable, "-m", "deep_ep.selftest"]
    options = [*TINY, "--iterations", "1", "--engine", device]
    jobs = [
        subprocess.Popen([*command, mode, *options], stdout=subprocess.PIPE, text=True)
        for mode in ("intranode", "low_latency")
    ]
    for job in jobs:
        text = job.communicate(timeout=200)[0]
        assert job.returncode == 0 and "FAILED" not in text and "cases passed" in text, text


@pytest.mark.skipif(not full(), reason="a long test: DEEPEP_TEST_FULL=1 runs it")
def test_internode_by_two_commands(device, nodes):
    """Each command starts the ranks of what it takes for its host; they meet at a TCP address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    arguments = [*TINY, "--iterations", "3", "--num-hosts", "2", "--master", master, "--engine", device]
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "deep_ep.selftest", "internode", *arguments, "--host-rank", str(host)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in (1, 0)
    ]
    for command in commands:
        text = command.communicate(timeout=200)[0]
        assert command.returncode == 0 and "4 ranks in nodes of 2" in text and "FAILED" not in text, text


RECORDING = """
import os, sys

if "forkserver" in " ".join(sys.orig_argv):  # whose children are the ranks
    from deep_ep.buffer import Buffer

    make, destroy = Buffer.__init__, Buffer.destroy
    def made(self, group, **keywords):
        self.keywords = keywords
        make(self, group, **keywords)
    def destroyed(self):
        threads = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
        with open(os.environ["BUFFERS"], "a") as file:
            words = ("low_latency_mode" in self.keywords, self.keywords["allow_mnnvl"], "deepep-nic" in threads)
            file.write("{} {} {}\\n".format(*words))
        destroy(self)
    Buffer.__init__, Buffer.destroy = made, destroyed
"""


@pytest.mark.parametrize(
    "mode, arguments, seen",
    [("intranode", [], "False False False"), ("low_latency", ["--disable-nvlink", "--allow-mnnvl"], "True True True")],
)
def test_options_about_links(mode, arguments, seen, tmp_path):
    """Each has its effect on every buffer: whether it is low-latency, allows MNNVL, and has a (software) NIC."""
    (tmp_path / "sitecustomize.py").write_text(RECORDING)  # read as Python starts, in the rank processes too
    record = tmp_path / "buffers"
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "BUFFERS": str(record)}
    text = selftest("cpu", mode, *TINY, "--iterations", "1", *arguments, env=environment)
    lines = record.read_text().splitlines()
    assert len(lines) >= 20 and set(lines) == {seen}, lines
    assert ("every row to another rank by RDMA" in text) == ("--disable-nvlink" in arguments)


def test_nvlink_of_internode_low_latency():
    from deep_ep.selftest import internode, program

    for arguments, allowed in (([], True), (["--disable-nvlink"], False)):
        options = program.complete(program.parser().parse_args(["internode", "--engine", "cpu", *arguments]))
        rank = types.SimpleNamespace(options=options)
        assert internode.low_latency_buffer(rank, SHAPE)["allow_nvlink_for_low_latency_mode"] is allowed


def test_defaults_are_those_of_the_programs_they_stand_for():
    from deep_ep.selftest import program

    given = {mode: program.parser().parse_args([mode, "--engine", "cpu"]) for mode in program.DEFAULTS}
    assert program.complete(given["low_latency"]).num_experts == 288
    assert {mode: program.DEFAULTS[mode]["num_experts"][0] for mode in program.DEFAULTS} == {
        "intranode": 256, "low_latency": 288, "internode": 256,
    }  # fmt: skip


CORRUPTED = """
import sys

def corrupted(call, when):
    count = 0
    def run(self, *arguments, **keywords):
        nonlocal count
        result = call(self, *arguments, **keywords)
        rows = result[0][0] if isinstance(result[0], tuple) else result[0]
        count += 1
        if self.rank == 1 and count == when:
            rows.view(torch.uint8)[..., 0, -1] ^= 1
        return result
    return run

if "forkserver" in " ".join(sys.orig_argv):  # whose children are the ranks
    import torch
    from deep_ep.buffer import Buffer

    for name, when in dict(dispatch=1, combine=2, low_latency_dispatch=1, low_latency_combine=5).items():
        setattr(Buffer, name, corrupted(getattr(Buffer, name), when))
"""


def test_a_corrupted_row_fails(device, tmp_path, nodes):
    """One bit of one row, in four calls of rank 1 that wait: each makes one case fail, and no other case does."""
    (tmp_path / "sitecustomize.py").write_text(CORRUPTED)  # read as Python starts, in the rank processes too
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    options = [*TINY, "--iterations", "1", "--timeout", "2"]
    text = selftest(device, "internode", *options, expected=1, env={**os.environ, "PYTHONPATH": path})
    assert text.count(" FAILED ") == 4 and "4 cases FAILED" in text, text
    for fault in (
        r"    rank 1: recv_x: row 0 holds token \d+ of rank \d, expected token \d+ of rank \d; 1 values differ",
        r"    rank 1: combined_x: 1 of 12 rows differ, the first is 0",
        r"    rank 1: expert 0: row 0 holds token",
        r"    rank 1: combined_x: differs by",
    ):
        assert re.search(fault, text), f"no line like {fault!r} in {text}"


def test_failure_is_a_line_and_an_exit_status(device):
    """Without the library nothing can pass: every case is a FAILED line with the reason."""
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


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--num-processes", "4", "--num-nvl-peers", "3"], "--num-nvl-peers 3"),
        (["--num-processes", "4", "--num-nvl-peers", "4"], "--num-nvl-peers 4"),
        (["--num-processes", "1"], "--num-nvl-peers 1"),
        (["--num-processes", "4", "--num-topk-groups", "1", "--num-topk", "17"], "--num-topk 17"),
        (["--num-hosts", "2"], "--master"),
        (["--master", "localhost:1"], "--num-hosts"),
        (["--host-rank", "1"], "--host-rank 1"),
        (["--hidden", "200"], "--hidden 200"),
    ],
)
def test_wrong_nodes(arguments, word):
    from deep_ep.selftest import program

    with pytest.raises(SystemExit, match=re.escape(word)):
        program.complete(program.parser().parse_args(["internode", "--engine", "cpu", *arguments]))


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


def test_checker_knows_nodes():
    """Groups bound the nodes of a token; what crosses is counted once a node."""
    shape = sc.Shape(ranks=8, tokens=30, hidden=128, topk=3, experts=16, seed=2, peers=2, groups=2)
    for rank in range(8):
        chosen = shape.routing(rank)
        for row in chosen.tolist():
            assert len({expert // 4 for expert in row if expert >= 0}) <= 2, row
    table = [sc.nodes_of(shape, rank) for rank in range(8)]
    assert bool((table[0].sum(dim=1) <= 2).all()) and table[0].shape == (30, 4)
    arriving = [sc.crossings(shape, rank)[0] for rank in range(8)]
    returning = [sc.crossings(shape, rank)[1] for rank in range(8)]
    assert sum(arriving) == sum(returning) == sum(int(t.sum() - t[:, r // 2].sum()) for r, t in enumerate(table))
    assert arriving[3] == sum(int(table[rank][:, 1].sum()) for rank in (1, 5, 7))


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
