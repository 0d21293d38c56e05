"""Where the commands of tools/matrix.py run: a virtual environment of this machine, or a Debian system in a folder.

    python matrix_place.py ROOT [--folder FOLDER] [--user UID] [--offline] [--read-only] -- COMMAND …

is how a place runs a command in a Debian system: chroot in namespaces of its own, which `unshare` has made.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import fcntl
import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def run(command: Sequence[object], log: Any, timeout: float = 3600, **options: Any) -> str:
    """Runs a command, its output to the log as well. Raises CalledProcessError."""
    text = [str(part) for part in command]
    print(f"{datetime.datetime.now():%H:%M:%S} +", " ".join(text), file=log, flush=True)
    done = subprocess.run(
        text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        **options,
    )  # fmt: skip
    print(done.stdout, file=log, flush=True)
    done.check_returncode()
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    """Of the commands: none of the caller's settings of Python, DEEPEP_* and pip, but where the network's CA is."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG", "http_proxy", "https_proxy") if name in os.environ
    }
    threads = {"OMP_NUM_THREADS": "1"}
    return {**kept, **threads, "PIP_CERT": CERTIFICATES, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def enter(arguments: argparse.Namespace) -> None:
    """Mounts what a system needs, in namespaces of this process alone, then becomes the command.

    The mounts go with the namespace. Offline there is a loopback device and nothing else.
    """
    root = arguments.root.resolve()
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    if arguments.offline:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            up, set_flags = 1, 0x8914  # IFF_UP, SIOCSIFFLAGS
            fcntl.ioctl(sock, set_flags, struct.pack("16sh14x", b"lo", up))
    if root != pathlib.Path("/"):
        mount(str(root), str(root), "", MS_BIND | MS_REC)
        mount("/dev", f"{root}/dev", "", MS_BIND | MS_REC)
    mount("proc", f"{root}/proc", "proc", 0)
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", 0)
    if arguments.read_only:
        mount("tmpfs", f"{root}/tmp", "tmpfs", 0)
        mount("none", str(root), "", MS_BIND | MS_REMOUNT | MS_RDONLY)
    os.chroot(root)
    os.chdir(arguments.folder)
    if arguments.user:
        os.setgroups([])
        os.setgid(arguments.user)
        os.setuid(arguments.user)
    os.execvp(arguments.command[0], arguments.command)


MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def mount(source: str, target: str, kind: str, flags: int) -> None:
    """mount(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


class Place:
    """An environment on disk: its root (/ or Debian's folder), its Python, and a copy of the tests outside the tree."""

    def __init__(self, folder: pathlib.Path, debian: bool, log: Any) -> None:
        self.folder, self.debian, self.log = folder, debian, log
        self.root = folder if debian else pathlib.Path("/")
        self.venv = "/venv" if debian else str(folder / "venv")
        self.tree = self.folder / "tree"

    def inside(self, path: pathlib.Path) -> str:
        """A path as the environment sees it."""
        return "/" + str(path.relative_to(self.root))

    def run(self, *command: object, offline: bool = False, user: int = 0, read_only: bool = False, **env: str) -> str:
        """Runs a command in the environment, in the folder of the tests."""
        if not self.debian:
            return run(command, self.log, cwd=self.tree, env=environment(**env))
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *(["--net"] if offline else [])]
        options = [self.root, "--folder", self.inside(self.tree), "--user", user]
        options += ["--offline"] * offline + ["--read-only"] * read_only
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        whole = [*namespaces, sys.executable, __file__, *options, "--", *command]
        return run(whole, self.log, env=environment(**{"HOME": "/root", "LANG": "C.UTF-8", **env, "PATH": path}))

    def pip(self, *arguments: object) -> None:
        """Installs by pip; bytecode is made by what runs, not of torch's thousands of modules that nothing imports."""
        options = ["--quiet", "--no-cache-dir", "--no-compile"]
        self.run(f"{self.venv}/bin/python", "-m", "pip", "install", *options, *arguments)

    def probe(self, check: str, **how: Any) -> dict[str, Any]:
        """The answer to one check; its whole output is in the log."""
        try:
            output = self.run(f"{self.venv}/bin/python", f"{self.inside(self.tree)}/matrix_probe.py", check, **how)
            found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
            return found
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
            return {"ok": False, "text": f"{type(error).__name__}: see the log"}


def remove(folder: pathlib.Path) -> None:
    """Removes an environment, unless something is still mounted in it: that is this machine's /dev or /proc."""
    mounts = [line.split()[1] for line in pathlib.Path("/proc/mounts").read_text().splitlines()]
    inside = [place for place in mounts if pathlib.Path(place).is_relative_to(folder)]
    if inside:
        raise SystemExit(
            f"{folder} is left there: {', '.join(inside)} is mounted in it: umount, then remove the folder"
        )
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Become a command in a Debian system, in namespaces that are there.")
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--folder", default="/", help="where the command begins, below the root")
    parser.add_argument("--user", type=int, default=0)
    parser.add_argument("--offline", action="store_true", help="with a loopback device and no other")
    parser.add_argument("--read-only", action="store_true", help="but for /tmp and /dev/shm")
    parser.add_argument("command", nargs="+")
    enter(parser.parse_args())


if __name__ == "__main__":
    main()
