"""`pip install .` and `make install` build what the machine can build, and say what they left out and why."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv

import pytest

import build_native

ROOT = pathlib.Path(__file__).resolve().parents[2]
FULL = os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0")


@pytest.mark.parametrize(
    "system, machine, libc, said",
    [
        ("darwin", "arm64", "", "darwin on arm64"),
        ("win32", "AMD64", "", "win32 on AMD64"),
        ("linux", "x86_64", "", "linux on x86_64 with a C library that is not glibc"),
        ("linux", "riscv64", "glibc", "linux on riscv64 with glibc"),
    ],
)
def test_other_systems_get_one_sentence(system: str, machine: str, libc: str, said: str) -> None:
    with pytest.raises(build_native.Impossible) as raised:
        build_native.check_system(system, machine, libc)
    assert f"this is {said}: install it on such a machine" in str(raised.value)


def test_this_system_is_accepted() -> None:
    build_native.check_system()


def test_without_go_pip_gets_one_sentence() -> None:
    """As pip builds a wheel from the source archive."""
    code = "from setuptools import build_meta; build_meta.build_wheel('build/wheel')"
    env = {**os.environ, "GO": "no-such-program"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "building deepep-go from its sources needs Go 1.25 or newer ('no-such-program' not found): install"
    )
    assert "pip install --only-binary deepep-go deepep-go" in line


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_BUILD", "gpu")
    with pytest.raises(build_native.Impossible, match="DEEPEP_BUILD: got gpu, allowed auto, cpu, cuda, all"):
        build_native.chosen()


def nvcc(folder: pathlib.Path, release: str) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A source tree without .venv and build/, on a machine without nvcc in PATH."""
    monkeypatch.setattr(build_native, "ROOT", tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "build" / "lib").mkdir(parents=True)
    (tmp_path / "build" / "lib" / "deepep_torch.abi3.so").touch()
    monkeypatch.setattr(
        build_native.shutil, "which", lambda name: name if os.path.isabs(name) and os.path.exists(name) else None
    )
    monkeypatch.setattr(build_native, "check_tools", lambda: None)
    for name in ("NVCC", "NVSHMEM_HOME", "DEEPEP_BUILD"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What make is called with, in place of calling it."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(build_native, "make", lambda *words, build: calls.append(words))
    return calls


def test_nvcc_of_the_machine_is_found(machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.path.exists("/usr/local/cuda/bin/nvcc"):
        pytest.skip("this machine has /usr/local/cuda")
    assert build_native.find_nvcc() == (None, [])
    own = nvcc(machine / ".venv/lib/python3.11/site-packages/nvidia/cu13/bin", "13.0")
    assert build_native.find_nvcc() == (str(own), [])
    old = nvcc(machine / "old", "11.8")
    monkeypatch.setenv("NVCC", str(old))
    assert build_native.find_nvcc() == (str(own), [f"{old} is of CUDA 11.8, and 12.3 is needed"])
    monkeypatch.setenv("NVCC", str(machine / "nowhere"))
    with pytest.raises(build_native.Impossible, match="is no program"):
        build_native.find_nvcc()


def test_gpus_are_left_out_only_without_nvcc_and_pypi(
    machine: pathlib.Path,
    made: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build_native, "find_nvcc", lambda: (None, []))
    monkeypatch.setattr(build_native, "fetch", lambda *_: "no route to PyPI")
    (line,) = build_native.build(pathlib.Path("build"))
    assert line == (
        "libdeepep_cuda.so and libdeepep_nvshmem.so, for GPUs: no nvcc in NVCC, .venv, PATH or /usr/local/cuda; "
        "from PyPI: no route to PyPI"
    )
    assert f"left out: {line}" in capsys.readouterr().out
    assert (machine / "build" / "left_out.txt").read_text() == line + "\n"
    assert made == [("lib", "kernels", "program")]
    monkeypatch.setenv("DEEPEP_BUILD", "cuda")
    with pytest.raises(build_native.Impossible, match="DEEPEP_BUILD=cuda, and CUDA cannot be built: no nvcc"):
        build_native.build(pathlib.Path("build"))


def test_what_each_choice_builds(
    machine: pathlib.Path, made: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC", str(nvcc(machine / "bin", "12.9")))
    monkeypatch.setenv("NVSHMEM_HOME", "/opt/nvshmem")
    settings = (f"NVCC={machine}/bin/nvcc", "NVSHMEM_HOME=/opt/nvshmem")
    cuda, nodes = "build/lib/libdeepep_cuda.so", "build/lib/libdeepep_nvshmem.so"
    for choice, targets in [("", (cuda, nodes)), ("all", (cuda, nodes)), ("cuda", (cuda,)), ("cpu", ())]:
        made.clear()
        monkeypatch.setenv("DEEPEP_BUILD", choice)
        lines = build_native.build(pathlib.Path("build"))
        assert made == [("lib", "kernels", "program"), *([(*targets, *settings)] if targets else [])]
        assert (lines == []) == (len(targets) == 2)


def test_a_build_that_fails_is_an_error(machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is an nvcc, CUDA is never left out."""
    monkeypatch.setenv("NVCC", str(nvcc(machine / "bin", "13.0")))
    monkeypatch.setenv("NVSHMEM_HOME", "/opt/nvshmem")

    def make(*words: str, build: pathlib.Path) -> None:
        if "lib" not in words:
            raise subprocess.CalledProcessError(2, "make")

    monkeypatch.setattr(build_native, "make", make)
    with pytest.raises(subprocess.CalledProcessError):
        build_native.build(pathlib.Path("build"))


@pytest.mark.skipif(not FULL, reason="make test-full: makes a virtual environment and builds")
def test_unreachable_pypi_is_said(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    said = build_native.fetch(tmp_path / "toolkit", ["requirements-cuda.txt"])
    assert "failed" in said and not (tmp_path / "toolkit" / "requirements.txt").exists()


@pytest.mark.skipif(not FULL, reason="make test-full: makes a virtual environment and builds")
def test_an_editable_install_follows_the_sources(tmp_path: pathlib.Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True, system_site_packages=True)
    python = tmp_path / "venv" / "bin" / "python"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    env = {**os.environ, "DEEPEP_BUILD": "cpu", "PYTHONPATH": ""}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    subprocess.run([python, "-m", "pip", "install", *options, "--editable", ROOT], check=True, env=env, timeout=900)
    code = "import deep_ep; print(deep_ep.__file__, deep_ep.library_version())"
    if not hasattr(__import__("deep_ep"), "library_version"):
        code = "import deep_ep; print(deep_ep.__file__)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(str(ROOT / "python" / "deep_ep")), done.stdout + done.stderr
