"""Facts of the tree that is released, and the one way in which the release's tools run programs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess

from build_native import version

__all__ = ["ROOT", "Commit", "Paths", "ReleaseError", "changed_files", "elf_machine", "head", "run", "version"]

ROOT = pathlib.Path(__file__).resolve().parents[2]
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file


class ReleaseError(Exception):
    """Why no release can be made, in one line for the person who asked for it."""


def run(*command: object, cwd: pathlib.Path = ROOT, **env: str) -> str:
    """Runs a program that has to succeed and returns what it printed.

    Raises:
        ReleaseError: the program is missing, or failed; with its last words.
    """
    text = [str(part) for part in command]
    try:
        done = subprocess.run(text, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ReleaseError(f"needed: the program '{text[0]}'") from error
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(text)}: exit status {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def elf_machine(path: pathlib.Path) -> str:
    """The machine that an ELF file is for, as `uname -m` names it."""
    head = path.read_bytes()[:20]
    machine = MACHINES.get(int.from_bytes(head[18:20], "little")) if head[:4] == b"\x7fELF" else None
    if machine is None:
        raise ReleaseError(f"{path}: not a library or program for {' or '.join(MACHINES.values())}")
    return machine


def changed_files() -> list[str]:
    """Paths that differ from the commit, as `git status` lists them; files that git ignores do not count."""
    return [line[3:] for line in run("git", "status", "--porcelain", "--untracked-files=all").splitlines()]


@dataclasses.dataclass(frozen=True)
class Commit:
    """The commit that is released; `epoch` is its time in seconds, the time of everything in the release.

    In an unpacked source archive the name is empty, and the time is that of its files, which have it of the commit.
    """

    name: str
    epoch: int


def head() -> Commit:
    if not (ROOT / ".git").exists():
        return Commit("", int((ROOT / "LICENSE").stat().st_mtime))
    name, epoch = run("git", "log", "-1", "--format=%H %ct").split()
    return Commit(name, int(epoch))


@dataclasses.dataclass(frozen=True)
class Paths:
    """Where a build lies, and where its release goes."""

    build: pathlib.Path
    dist: pathlib.Path

    @property
    def library(self) -> pathlib.Path:
        return self.build / "lib" / f"libdeepep.so.{version().split('.')[0]}"

    @property
    def program(self) -> pathlib.Path:
        return self.build / "bin" / "deepep"

    def kernel_libraries(self) -> list[pathlib.Path]:
        """The kernel libraries that were built, libdeepep_cpu.so and others."""
        return sorted((self.build / "lib").glob("libdeepep_*.so"))
