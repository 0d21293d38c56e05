"""The test of the tests: what fails is counted, in whatever way it fails."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
import time

import pytest

import run_process
import run_tests
import test_suites
from test_suites import Counts, Suite


@pytest.fixture(autouse=True)
def logs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_suites, "LOGS", tmp_path)


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


@pytest.mark.parametrize(
    "script, expected",
    [
        ("echo '3 passed, 0 failed'", Counts(3, 0, 0)),
        ("echo '3 passed, 2 failed, 1 skipped'; exit 1", Counts(3, 2, 1)),
        ("echo 'part: 1 passed, 1 failed'; echo 'all: 4 passed, 0 failed'", Counts(4, 0, 0)),
        ("echo '3 passed, 0 failed'; exit 1", Counts(3, 1, 0)),  # a crash after the closing line
        ("echo '3 passed, 0 failed'; kill -SEGV $$", Counts(3, 1, 0)),
        ("exit 3", Counts(0, 1, 0)),
    ],
)
def test_plain(script: str, expected: Counts) -> None:
    assert test_suites.plain("x", shell(script), full=False) == expected


@pytest.mark.parametrize(
    "script, told",
    [
        ("echo ok; echo 'FAILED a/b: why'; echo '1 passed, 1 failed'; exit 1", ["FAILED a/b: why"]),
        ("echo 'seed 3: signal 11'; echo '0 passed, 1 failed'; exit 1", ["seed 3: signal 11"]),
        ("echo fine; echo '1 passed, 0 failed'", []),
    ],
)
def test_plain_tells_what_failed(script: str, told: list[str]) -> None:
    assert test_suites.plain("x", shell(script), full=False).failures == told


def test_the_end_tells_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    bad = functools.partial(test_suites.checks, "x", {"first": shell("true"), "second": shell("false")})
    result = run_tests.run_suite(Suite("x", "none", (), bad), full=False)
    assert run_tests.report([result], 1.0) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == ["FAILED x: second", "", "1 passed, 1 failed"]


def test_a_suite_without_tests_fails() -> None:
    suite = Suite("x", "none", (), functools.partial(test_suites.plain, "x", shell("true")))
    assert run_tests.run_suite(suite, full=False).counts == Counts(0, 1, 0)


def test_a_missing_command_fails() -> None:
    suite = Suite("x", "none", (), functools.partial(test_suites.plain, "x", ["/no/such/program"]))
    assert run_tests.run_suite(suite, full=False).counts == Counts(0, 1, 0)


def test_checks_go_on_after_a_failure() -> None:
    assert test_suites.checks("x", {"a": shell("false"), "b": shell("true")}, full=False) == Counts(1, 1, 0)


def go_tests() -> Counts:
    return test_suites.go_tests("x", ["./..."], {"CGO_ENABLED": "0", "GOWORK": "off"}, full=False)


def test_go_end_to_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "go.mod").write_text("module m\n\ngo 1.25.0\n")
    (tmp_path / "m_test.go").write_text(
        'package m\n\nimport (\n\t"os"\n\t"testing"\n)\n\n'
        "func TestGood(t *testing.T) {}\n\nfunc TestBad(t *testing.T) { t.Error(1) }\n\n"
        "func TestSkip(t *testing.T) { t.Skip() }\n\nfunc TestCrash(t *testing.T) { os.Exit(3) }\n"
    )
    monkeypatch.setattr(test_suites, "ROOT", tmp_path)
    counts = go_tests()
    assert counts == Counts(1, 2, 1)
    assert counts.failures == ["m.TestBad", "m.TestCrash"]


def test_go_package_that_does_not_build_fails(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(test_suites, "ROOT", tmp_path)
    (tmp_path / "go.mod").write_text("module m\n\ngo 1.25.0\n")
    (tmp_path / "m_test.go").write_text("package m\n\nvar _ = undefinedName\n")
    assert go_tests().failed >= 1
    assert "undefinedName" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, expected",
    [
        ("def test_a(): pass\ndef test_b(): assert 0\n", Counts(1, 1, 0)),
        ("import pytest\n@pytest.fixture\ndef f(): raise OSError\ndef test_a(f): pass\n", Counts(0, 1, 0)),
        ("syntax error\n", Counts(0, 1, 0)),
        ("import os\ndef test_a(): os._exit(0)\n", Counts(0, 1, 0)),
        ("import pytest\ndef test_a(): pytest.skip('no')\ndef test_b(): pass\n", Counts(1, 0, 1)),
    ],
)
def test_pytest(tmp_path: pathlib.Path, text: str, expected: Counts) -> None:
    (tmp_path / "test_it.py").write_text(text)
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # their imports take a second
    assert test_suites.pytest("x", [str(tmp_path), "-q", "-p", "no:cacheprovider"], env, full=False) == expected


TWO = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}


def test_pytest_in_two_runs(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each waits for the other; both count, and what failed in either is told."""
    meet = "import os, time\ndef meet(me, other):\n    open(me, 'w').close()\n    end = time.monotonic() + 30\n"
    meet += "    while not os.path.exists(other): assert time.monotonic() < end; time.sleep(0.01)\n"
    here, there = (repr(str(tmp_path / name)) for name in ("here", "there"))
    (tmp_path / "test_a.py").write_text(f"{meet}def test_a(): meet({here}, {there})\n")
    (tmp_path / "test_b.py").write_text(f"{meet}def test_b():\n    meet({there}, {here})\n    assert 0, 'wrong'\n")
    counts = test_suites.pytest_in_two("x", str(tmp_path), ["test_b.py"], TWO, full=False)
    assert counts == Counts(1, 1, 0) and len(counts.failures) == 1 and "test_b" in counts.failures[0]
    assert "wrong" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_a_failure(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    assert test_suites.pytest_in_two("x", str(tmp_path), ["test_b.py"], TWO, full=False).failed == 1


def gone(pid: int) -> bool:
    """True once the process has ended; whether its parent has asked for its status does not matter."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_hang_ends_at_the_limit_with_all_its_processes(tmp_path: pathlib.Path) -> None:
    # The child would outlive its parent, and it holds the output open.
    command = shell(f"sleep 600 & echo $! >{tmp_path}/pid; wait")
    start = time.monotonic()
    assert run_process.run_process(command, tmp_path, tmp_path / "log", 2.0, {}) == run_process.TIMED_OUT
    pid = int((tmp_path / "pid").read_text())
    while not gone(pid):
        assert time.monotonic() - start < 60
        time.sleep(0.02)


def test_output_is_kept_and_input_is_empty(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = run_process.run_process(shell("read x || echo end of $NAME"), tmp_path, tmp_path / "log", 30, {"NAME": "n"})
    assert (code, (tmp_path / "log").read_text(), capfd.readouterr().out) == (0, "end of n\n", "end of n\n")


def test_summary_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    suites = [Suite(name, "", (), lambda full: Counts()) for name in ("a", "b")]
    results = [
        run_tests.Result(suites[0], Counts(2, 0, 1), 1.0, 0.5),
        run_tests.Result(suites[1], Counts(3, 1, 0), 1.0, 0.5),
    ]
    assert run_tests.report(results, 2.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 1 failed, 1 skipped"
    assert run_tests.report(results[:1], 2.0) == 0


def test_cpu_seconds_of_a_suite_are_those_of_its_processes(tmp_path: pathlib.Path) -> None:
    """Also of a process that outlives its parent, as the ranks of a fork server do."""
    done = tmp_path / "done"
    work = "import sys, time; [0 for _ in iter(lambda: time.process_time() < 0.5, False)]; open(sys.argv[1], 'w')"
    program = f'{sys.executable} -c "{work}; time.sleep(4)" {done} >/dev/null 2>&1'
    commands = {
        "waited": f"{program.replace('; time.sleep(4)', '')}; rm {done}",
        "left": f"{program} & while [ ! -e {done} ]; do sleep 0.1; done; sleep 1.2",
        "idle": "true",
    }
    used = {}
    for name, command in commands.items():
        suite = Suite(name, "", (), functools.partial(test_suites.checks, "x", {"a": shell(command)}))
        used[name] = run_tests.run_suite(suite, full=False).cpu_seconds
    assert used["waited"] > 0.4 and used["left"] > 0.4 and used["idle"] < 0.3, used


def test_an_absent_folder_is_left_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_suites, "ROOT", tmp_path)
    suite = Suite("x", "", ("folder/*.c",), lambda full: Counts())
    assert not suite.present()
    os.makedirs(tmp_path / "folder")
    (tmp_path / "folder" / "a.c").touch()
    assert suite.present()


def test_unknown_suites_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "nonsense"])
    with pytest.raises(SystemExit) as ended:
        run_tests.main()
    assert ended.value.code == 2
    assert "no suite nonsense" in capsys.readouterr().err
