"""What tools/matrix.py asks of one environment: run with that environment's Python, outside of the source tree.

    python matrix_probe.py CHECK

Prints one line of JSON: {"ok": true or false, "text": what was seen}. Standard library only, and no torch where the
check is about its absence.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

SENTENCE = "ImportError: deep_ep needs PyTorch 2.4 or newer: pip install torch"
COMPILERS = ("cc", "gcc", "g++", "clang", "nvcc", "go")
# Tests of what the package takes from torch and Python; everything else is the same library in each environment.
TESTS = ("import", "plan", "arguments", "ops", "autograd", "nn", "elastic", "face")


def answer(ok: bool, text: str) -> None:
    """The last line of the output."""
    print(json.dumps({"ok": ok, "text": text}), flush=True)


def about() -> None:
    """Versions of what runs."""
    import torch

    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', Path("/etc/os-release").read_text(), re.M)
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION").split()[-1],  # type: ignore[union-attr]
        "system": re.sub(r"^Debian GNU/Linux ", "Debian ", system[1] if system else "Linux"),
    }
    print(json.dumps(versions))


def without_torch() -> None:
    """Importing says what is missing."""
    done = subprocess.run([sys.executable, "-c", "import deep_ep"], capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    answer(last == SENTENCE, last)


def imported() -> None:
    """The installed package, which loads no library yet, and whether its compiled face opens."""
    import deep_ep

    loaded = "libdeepep" in Path("/proc/self/maps").read_text()
    import deep_ep.nn
    import deep_ep.ops
    from deep_ep import _face

    home = Path(deep_ep.__file__).parent
    face = _face.load() is not None
    ok = not loaded and "site-packages" in str(home) and (home / "bin" / "deepep").exists()
    answer(ok, "compiled face" if face else "ctypes")


def another_user() -> None:
    """Import and a round trip of two ranks by a user who may write nowhere but in /tmp and /dev/shm."""
    home, user = os.environ["HOME"], os.getuid()
    writable = [place for place in (home, os.path.dirname(__file__), sys.prefix, "/") if os.access(place, os.W_OK)]
    command = [sys.executable, "-m", "deep_ep.selftest", "low_latency", "--num-processes", "2", "--iterations", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr)
    answer(not done.returncode and user != 0 and not writable, f"uid {user}, {passed(done.stdout)}")


def passed(output: str) -> str:
    """The sentence in which the self-test counts."""
    found = re.findall(r"(\d+) of (\d+) cases passed", output)
    return " of ".join(found[-1]) if found else "no case"


def selftest(mode: str) -> None:
    """Four ranks, on the CPU engine."""
    command = [sys.executable, "-m", "deep_ep.selftest", mode, "--engine", "cpu", "--num-processes", "4"]
    done = subprocess.run([*command, "--timeout", "300"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout)
    answer(done.returncode == 0, passed(done.stdout))


def tests() -> None:
    """The quick tests against the installed package."""
    files = [f"python/tests/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=280", *files]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    summary = re.search(r"^(.*(?:passed|failed|error).*) in [\d.]+s", done.stdout, re.M)
    answer(done.returncode == 0, summary[1].strip("= ") if summary else "no summary")


def bare() -> None:
    """Nothing here compiles, and nothing beyond this machine can be reached."""
    import shutil
    import socket

    found = [name for name in COMPILERS if shutil.which(name)]
    try:
        socket.create_connection(("pypi.org", 443), timeout=5).close()
        found.append("network")
    except OSError:
        pass
    answer(not found, "found " + ", ".join(found) if found else "no compiler, no network")


CHECKS = {
    "about": about,
    "without_torch": without_torch,
    "imported": imported,
    "another_user": another_user,
    "intranode": lambda: selftest("intranode"),
    "low_latency": lambda: selftest("low_latency"),
    "internode": lambda: selftest("internode"),
    "tests": tests,
    "bare": bare,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
