"""Which releases of NVSHMEM on PyPI libdeepep_nvshmem.so can be built with, and which it loads (make nvshmem-versions).

Fetches each release's wheel into a temporary folder and reports

- whether its host part has every function that the library calls (nvshmem/host_part.cpp),
- whether the library's sources that call NVSHMEM compile with its headers (--compile),
- what the built library says of that host part: loads, or the refusal's text,
- the machine code of its device part, which bounds that of the library's kernels across nodes.

Nothing is installed, and no GPU is needed. A release is about 60 to 280 MB.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "build" / "lib" / "libdeepep_nvshmem.so"
PROBE = ROOT / "build" / "nvshmem" / "probe"
PARTS = re.compile(r"nvidia/nvshmem/(include/.*|lib/libnvshmem_host\.so\.3|lib/libnvshmem_device\.a)")
HOST = "libnvshmem_host.so.3"
OLDEST = (3, 3, 9)  # nvshmem/version.cu: kOldest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help="releases, as 3.4.5; none: all from 3.3.9 on")
    parser.add_argument("--package", default="nvidia-nvshmem-cu13", help="nvidia-nvshmem-cu13 or nvidia-nvshmem-cu12")
    parser.add_argument(
        "--compile", action="store_true", help="compile the sources with each release's headers too (nvcc)"
    )
    parser.add_argument("--wheels", type=pathlib.Path, help="a folder with wheels that were fetched before")
    options = parser.parse_args()
    for needed in (LIBRARY, PROBE):
        if not needed.exists():
            parser.error(f"{needed.relative_to(ROOT)} is not there: make nvshmem")
    failed = 0
    print("| release | functions | sources | the built library says | device part |")
    print("|---|---|---|---|---|")
    for version in options.versions or published(options.package):
        with tempfile.TemporaryDirectory(prefix="deepep-nvshmem-") as folder:
            try:
                home = fetch(options.package, version, pathlib.Path(folder), options.wheels)
                columns = examine(home, options.compile)
            except subprocess.CalledProcessError as error:
                failed += 1
                columns = [f"failed: {last_line(error.stderr or error.stdout)}", "", "", ""]
        print(f"| {version} | {' | '.join(columns)} |", flush=True)
    return 1 if failed else 0


def published(package: str) -> list[str]:
    """The package's releases from the oldest that is supported on, oldest first."""
    text = run(sys.executable, "-m", "pip", "index", "versions", package)
    names = re.search(r"Available versions: (.*)", text)
    if names is None:
        raise SystemExit(f"pip shows no version of {package}")
    numbers = [
        tuple(int(n) for n in name.split(".")) for name in names[1].split(", ") if re.fullmatch(r"\d+\.\d+\.\d+", name)
    ]
    return [".".join(map(str, number)) for number in sorted(numbers) if number >= OLDEST]


def fetch(package: str, version: str, folder: pathlib.Path, wheels: pathlib.Path | None) -> pathlib.Path:
    """The release's headers and libraries, unpacked: its nvidia/nvshmem."""
    name = f"{package.replace('-', '_')}-{version}-*.whl"
    here = sorted(wheels.glob(name)) if wheels else []
    if not here:
        run(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-cache-dir",
            "--no-deps",
            "--dest",
            str(folder),
            f"{package}=={version}",
        )
        here = sorted(folder.glob(name))
    with zipfile.ZipFile(here[0]) as wheel:
        for member in wheel.namelist():
            if PARTS.fullmatch(member) and not member.endswith("/"):
                wheel.extract(member, folder)
    return folder / "nvidia" / "nvshmem"


def examine(home: pathlib.Path, compiling: bool) -> list[str]:
    """The columns of one release."""
    return [missing_functions(home), compiled(home) if compiling else "-", loaded(home), device_code(home)]


def called() -> list[str]:
    """NVSHMEM's functions that the library looks up."""
    return re.findall(r"^  X\([\w *]+, (nvshmem\w+),", (ROOT / "nvshmem" / "host_part.cpp").read_text(), re.M)


def missing_functions(home: pathlib.Path) -> str:
    text = run("nm", "-D", "--defined-only", str(home / "lib" / "libnvshmem_host.so.3"))
    there = {line.split()[-1].split("@")[0] for line in text.splitlines() if line.strip()}
    missing = sorted(set(called()) - there)
    return f"lacks {', '.join(missing)}" if missing else f"all {len(set(called()))}"


def loaded(home: pathlib.Path) -> str:
    """What dk_info of the built library says with this host part."""
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(home / "lib")}
    done = subprocess.run(
        [str(PROBE), str(LIBRARY), "info"], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    reason = re.search(r"^reason: (.*)", done.stdout, re.M)
    if reason is None:
        return last_line(done.stdout + done.stderr)
    if HOST not in reason[1]:  # without a GPU the reason is that there is none
        return "loads"
    return "refused: " + re.sub(r"(?:\S*/)(lib\w+\.so)", r"\1", reason[1].split(";")[0])


def device_code(home: pathlib.Path) -> str:
    tool = next(iter(sorted(ROOT.glob(".venv/lib/python*/site-packages/**/bin/cuobjdump"))), "cuobjdump")
    archive = str(home / "lib" / "libnvshmem_device.a")
    try:
        code = {int(n) for n in re.findall(r"\bsm_(\d+)", run(str(tool), "-lelf", archive))}
        ptx = {int(n) for n in re.findall(r"\bsm_(\d+)", run(str(tool), "-lptx", archive))}
    except FileNotFoundError:
        return "cuobjdump is not here"
    return f"{', '.join(map(str, sorted(code)))}; PTX {', '.join(map(str, sorted(ptx))) or 'none'}"


def compiled(home: pathlib.Path) -> str:
    """Whether the sources that call NVSHMEM compile with its headers."""
    with tempfile.TemporaryDirectory(prefix="deepep-nvshmem-build-") as build:
        objects = [f"{build}/obj/nvshmem/{name}.o" for name in ("host_part", "version", "attach", "heap", "transport")]
        command = ["make", "--silent", f"BUILD={build}", f"NVSHMEM_HOME={home}", *objects]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "compile"
    return "fail: " + next((line for line in done.stderr.splitlines() if "error" in line), last_line(done.stderr))


def last_line(text: str) -> str:
    lines = [line for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else "no word of why"


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
