"""Scenes of test_limits.py: forks of this process, which has imported torch and never loaded the library.

Usage: limits_program.py SCENE...; prints a line of JSON for each: its name, exit status (negative: a signal) and text.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import deep_ep

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # of system calls, x86_64
    "fallocate": 285,
    "memfd_create": 319,
    "clone3": 435,
    "epoll_create1": 291,
    "flock": 73,
    "statfs": 137,
    "pidfd_open": 434,
    "membarrier": 324,
    "madvise": 28,
    "sched_getaffinity": 204,
}
EPERM, ENOSYS = 1, 38
OTHER_USER = 4003


class Alone:
    """A communicator of one rank."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, blob: bytes) -> list[bytes]:
        return [blob]


def work() -> str:
    buffer = deep_ep.Buffer(None, 1 << 20, 0, comm=Alone(), engine="cpu", timeout=5, explicitly_destroy=True)
    buffer.barrier()
    buffer.stats()
    buffer.destroy()
    return "works"


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def forbid(name: str, error: int) -> None:
    """Lets a system call fail from now on (seccomp)."""
    ld, jeq, ret = 0x20, 0x15, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | error
    steps = [(ld, 0, 0, 0), (jeq, 0, 1, NUMBERS[name]), (ret, 0, 0, fail), (ret, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def hide(*paths: str) -> None:
    """Puts an empty read-only folder over each path, in a mount namespace of this process."""
    check(LIBC.unshare(0x20000), "unshare")
    check(LIBC.mount(None, b"/", None, 0x44000, None), "private mounts")
    for path in paths:
        check(LIBC.mount(b"none", path.encode(), b"tmpfs", 1, None), f"mount {path}")


def forbidden(name: str, error: int) -> Callable[[], str]:
    def scene() -> str:
        forbid(name, error)
        return work()

    return scene


def limited(kind: int, soft: int, user: int = 0) -> Callable[[], str]:
    def scene() -> str:
        bound = soft
        if kind == resource.RLIMIT_AS:
            bound += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(kind, (bound, bound))
        if user:
            os.setgid(user)
            os.setuid(user)
        return work()

    return scene


def without(*paths: str) -> Callable[[], str]:
    def scene() -> str:
        hide(*paths)
        return work()

    return scene


def without_shm() -> str:
    """The pages have no file then; no folder is left where they were looked for."""
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="deepep-limits-")
    hide("/dev/shm")
    text = work()
    left = [str(p) for p in Path(os.environ["TMPDIR"]).iterdir()]
    os.rmdir(os.environ["TMPDIR"])
    return text if not left else f"left {left}"


SECRET = "correct-horse-battery-staple-7319"


def secret_stays() -> str:
    """The secret of a TCP start is in no log, error, page or file of the process."""
    folder = tempfile.mkdtemp(prefix="deepep-limits-")
    log = os.path.join(folder, "log")
    os.environ["DEEPEP_LOG"] = f"debug:{log}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    seen = b""
    for ranks, secret in (((0, 1), (SECRET, SECRET)), ((0, 1), (SECRET, "another"))):
        pids = []
        out, into = os.pipe()
        for rank in ranks:
            pid = os.fork()
            if pid == 0:
                os.close(out)
                try:
                    where = deep_ep.Bootstrap.tcp(rank, 2, address, name=secret[rank])
                    buffer = deep_ep.Buffer(
                        None, 1 << 20, 0, bootstrap=where, engine="cpu", timeout=1, explicitly_destroy=True
                    )
                    buffer.barrier()
                    os.write(into, repr((buffer, buffer.stats())).encode())
                    for page in Path(f"/dev/shm/deepep-{os.geteuid()}").glob(f"{os.getpid()}-*.page"):
                        os.write(into, page.read_bytes()[:32768])
                    buffer.destroy()
                except deep_ep.DeepEPError as error:
                    os.write(into, f"DeepEPError: {error}".encode())
                finally:
                    os._exit(0)
            pids.append(pid)
        os.close(into)
        while piece := os.read(out, 1 << 16):
            seen += piece
        os.close(out)
        for pid in pids:
            os.waitpid(pid, 0)
    if os.path.exists(log):
        seen += Path(log).read_bytes()
    shutil.rmtree(folder)
    if b"DeepEPError" not in seen or b"another secret" not in seen:
        return f"the wrong secret was not refused: {seen[-500:]!r}"
    return "works" if SECRET.encode() not in seen else "the secret was seen"


def page_cut_short() -> str:
    """A clean-up script truncates the statistics page; calls go on."""
    buffer = deep_ep.Buffer(None, 1 << 20, 0, comm=Alone(), engine="cpu", timeout=5, explicitly_destroy=True)
    for page in Path(f"/dev/shm/deepep-{os.geteuid()}").glob(f"{os.getpid()}-*.page"):
        os.truncate(page, 0)
    for _ in range(100):
        buffer.barrier()
    buffer.destroy()
    return "works"


GIB = 1 << 30
SCENES: dict[str, Callable[[], str]] = {
    "fallocate EPERM": forbidden("fallocate", EPERM),
    "fallocate ENOSYS": forbidden("fallocate", ENOSYS),
    "flock EPERM": forbidden("flock", EPERM),
    "statfs EPERM": forbidden("statfs", EPERM),
    "pidfd_open ENOSYS": forbidden("pidfd_open", ENOSYS),
    "membarrier EPERM": forbidden("membarrier", EPERM),
    "madvise EPERM": forbidden("madvise", EPERM),
    "sched_getaffinity EPERM": forbidden("sched_getaffinity", EPERM),
    "memfd_create ENOSYS": forbidden("memfd_create", ENOSYS),
    "clone3 EPERM": forbidden("clone3", EPERM),
    "clone3 ENOSYS": forbidden("clone3", ENOSYS),
    "epoll EPERM": forbidden("epoll_create1", EPERM),
    "address space 0.5": limited(resource.RLIMIT_AS, GIB // 2),
    "address space 1.6": limited(resource.RLIMIT_AS, GIB * 16 // 10),
    "address space 2.2": limited(resource.RLIMIT_AS, GIB * 22 // 10),
    "processes 2": limited(resource.RLIMIT_NPROC, 2, OTHER_USER),
    "processes 5": limited(resource.RLIMIT_NPROC, 5, OTHER_USER),
    "descriptors 8": limited(resource.RLIMIT_NOFILE, 8),
    "descriptors 16": limited(resource.RLIMIT_NOFILE, 16),
    "descriptors 65": limited(resource.RLIMIT_NOFILE, 65),
    "no /proc": without("/proc"),
    "no /sys": without("/sys"),
    "no /dev/shm": without_shm,
    "page cut short": page_cut_short,
    "secret stays": secret_stays,
}


def play(name: str) -> dict[str, object]:
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(out)
            os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
            try:
                text = SCENES[name]()
            except deep_ep.DeepEPError as error:
                text = f"DeepEPError: {error}"
            except OSError as error:
                text = f"not here: {error}"
            os.write(into, text.encode())
        finally:
            os._exit(0)
    os.close(into)
    text = b""
    while piece := os.read(out, 1 << 16):
        text += piece
    os.close(out)
    return {"name": name, "status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "text": text.decode()}


if __name__ == "__main__":
    for scene in sys.argv[1:] or SCENES:
        print(json.dumps(play(scene)), flush=True)
