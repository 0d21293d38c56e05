"""The suites that run_tests.py runs: what each needs, its command, and how its tests are counted.

Ways of counting:
    check   one test: the command's exit status
    plain   the last line of the form ``N passed, N failed[, N skipped]`` that the command prints
    go      the events of ``go test -json``; what a failed test printed is shown
    junit   pytest's XML report
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import sysconfig
import xml.etree.ElementTree
from collections.abc import Callable, Iterator

from run_process import run_process

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "test"
GO = os.environ.get("GO", "go")
PLAIN = re.compile(r"^(?:\w+: )?(\d+) passed, (\d+) failed(?:, (\d+) skipped)?\s*$")


@dataclasses.dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else "")


@dataclasses.dataclass
class Suite:
    """A suite is there if one of the files that ``needs`` names is. ``run(full)`` runs it and counts."""

    name: str
    title: str
    needs: tuple[str, ...]
    run: Callable[[bool], Counts]

    def present(self) -> bool:
        return any(True for pattern in self.needs for _ in ROOT.glob(pattern))


def _execute(name: str, command: list[str], full: bool, env: dict[str, str] | None = None, **options: object) -> int:
    """Runs a command in the root, at most 10 minutes (2 hours if full); CI=true, no input. Returns the exit status."""
    limit = 7200.0 if full else 600.0
    return run_process(command, ROOT, LOGS / f"{name}.log", limit, {"CI": "true", **(env or {})}, **options)  # type: ignore[arg-type]


def checks(name: str, commands: dict[str, list[str]], full: bool) -> Counts:
    """Each command is one test, with the exit status as its verdict."""
    counts = Counts()
    for title, command in commands.items():
        ok = _execute(f"{name}-{title}", command, full) == 0
        print(f"{'ok    ' if ok else 'FAILED'} {title}", flush=True)
        counts.add(Counts(passed=int(ok), failed=int(not ok)))
    return counts


def plain(name: str, command: list[str], full: bool, env: dict[str, str] | None = None) -> Counts:
    """The command's closing line counts; an exit status that the line does not explain is one more failure."""
    counts = Counts()

    def line(text: str) -> bool:
        nonlocal counts
        if found := PLAIN.match(text):
            counts = Counts(*(int(number or 0) for number in found.groups()))
        return True

    code = _execute(name, command, full, env, on_line=line)
    if code != 0 and counts.failed == 0:
        print(f"{name}: exit status {code} without a failed test", flush=True)
        counts.failed += 1
    return counts


class GoEvents:
    """Takes `go test -json` lines, counts tests, shows packages' verdicts and the output of failed tests."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.output: dict[tuple[str, str], list[str]] = {}

    def line(self, text: str) -> bool:
        """Returns True where the raw line is to be shown."""
        try:
            event = json.loads(text)
        except ValueError:
            return True
        key = (event.get("Package") or event.get("ImportPath", ""), event.get("Test", ""))
        action = event.get("Action", "")
        if action in ("output", "build-output"):
            self.output.setdefault(key, []).append(event["Output"])
        elif action in ("pass", "fail", "skip"):
            self.verdict(key, action, event.get("Elapsed", 0.0))
        return False

    def verdict(self, key: tuple[str, str], action: str, seconds: float) -> None:
        package, test = key
        kept = "".join(self.output.pop(key, []))
        if test:
            self.counts.add(Counts(passed=action == "pass", failed=action == "fail", skipped=action == "skip"))
            if action != "pass":
                print(kept, end="", flush=True)
            return
        if action == "fail":  # build errors are filed under the import path, with the test variant in brackets
            builds = [name for name in self.output if name[0].split(" ")[0] == package and not name[1]]
            print("".join(["".join(self.output.pop(name)) for name in builds]) + kept, end="")
            lost = sum(1 for name in self.output if name[0] == package)  # tests that were running when it ended
            self.counts.failed += max(1, lost) if lost or not self.counts.failed else 0
        print(f"{action:4s} {package} ({seconds:.1f} s)", flush=True)


def go_tests(name: str, packages: list[str], env: dict[str, str], full: bool) -> Counts:
    """Runs Go tests uncached: they load the kernel library, which Go's cache does not know of."""
    events = GoEvents()
    limit = "110m" if full else "9m"
    command = [GO, "test", "-json", "-count=1", "-vet=off", f"-timeout={limit}", *packages]
    env = {"DEEPEP_KERNELS": str(BUILD / "lib"), **env}
    code = _execute(name, command, full, env, on_line=events.line)
    if code != 0 and events.counts.failed == 0:
        print(f"{name}: go test ended with exit status {code}", flush=True)
        events.counts.failed += 1
    return events.counts


def _fuzz_targets() -> Iterator[tuple[str, str]]:
    for path in sorted(path for top in ("core", "internal", "capi") for path in ROOT.glob(f"{top}/**/*_test.go")):
        for target in re.findall(r"^func (Fuzz\w+)\(", path.read_text(), re.M):
            yield f"./{path.parent.relative_to(ROOT)}", target


def fuzz(full: bool) -> Counts:
    """Every fuzz target for a number of inputs; a finding stays in the package's testdata.

    Not for a time: go test now and then reports the end of the time itself as a failure ("context deadline exceeded").
    """
    commands = {
        f"{folder}-{target}".replace("/", "-").lstrip(".-"): [
            *(
                GO,
                "test",
                "-tags=capitest",
                "-run=^$",
                f"-fuzz=^{target}$",
                f"-fuzztime={20000 if full else 1500}x",
                "-parallel=2",
                folder,
            )
        ]
        for folder, target in _fuzz_targets()
    }
    return checks("fuzz", commands, full)


def pytest(name: str, arguments: list[str], env: dict[str, str], full: bool) -> Counts:
    """Counts from the XML report; no report means that pytest itself ended early."""
    xml_path = LOGS / f"{name}.xml"
    xml_path.unlink(missing_ok=True)
    code = _execute(name, [sys.executable, "-m", "pytest", f"--junitxml={xml_path}", *arguments], full, env)
    if not xml_path.exists():
        print(f"{name}: pytest left no report (exit status {code})", flush=True)
        return Counts(failed=1)
    counts = Counts()
    for suite in xml.etree.ElementTree.parse(xml_path).getroot().iter("testsuite"):
        total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        counts.add(Counts(total - failed - skipped, failed, skipped))
    if code not in (0, 5) and counts.failed == 0:
        print(f"{name}: pytest ended with exit status {code}", flush=True)
        counts.failed += 1
    return counts


def lint(full: bool) -> Counts:
    python = [sys.executable, "-m"]
    clang_format = f"{pathlib.Path(sys.executable).parent}/clang-format --dry-run -Werror"
    checked = ["python", "bench", "tools", "nvshmem", "setup.py"]
    commands = {
        "gofmt": ["sh", "-c", 'test -z "$(gofmt -l core internal capi bench | tee /dev/stderr)"'],
        "go-vet": [GO, "vet", "-tags=capitest", "./..."],
        "clang-format": ["sh", "-c", "git ls-files '*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs " + clang_format],
        "ruff": [*python, "ruff", "check", "--quiet", *checked],
        "ruff-format": [*python, "ruff", "format", "--check", "--quiet", *checked],
        "mypy": [*python, "mypy", "--no-error-summary"],
    }
    return checks("lint", commands, full)


def abi(full: bool) -> Counts:
    commands = {
        "symbols": [sys.executable, "tools/abi_check.py"],
        "layout": [sys.executable, "tools/abi_layout.py"],
        "mirrors": [sys.executable, "tools/generate_abi.py", "--check"],
    }
    return checks("abi", commands, full)


# Builds by itself: not as a part of the make that runs the tests.
MAKE = ["env", "-u", "MAKEFLAGS", "-u", "MFLAGS", "make", "--no-print-directory", f"-j{os.cpu_count()}"]


def gpu_build(full: bool) -> Counts:
    """What can be said of the GPU libraries without a GPU: they build; symbols; how the internode one refuses."""
    commands = {"build": [*MAKE, "cuda", "nvshmem"], "symbols": [sys.executable, "tools/abi_check.py"]}
    counts = checks("gpu-build", commands, full)
    if counts.failed == 0:
        counts.add(pytest("gpu-build", ["nvshmem/tests"], {}, full))
    return counts


def emulated(full: bool) -> Counts:
    """The kernel suite over the CUDA library on emulated devices."""
    counts = checks("emulated", {"build": [*MAKE, "emulated"]}, full)
    if counts.failed == 0:
        counts.add(plain("emulated", ["kernels/tests/emulated.sh"], full))
    return counts


def kernel_suite(name: str, tree: str, library: str, before: list[str], env: dict[str, str], full: bool) -> Counts:
    """The suite of the kernel interface, built in `tree`, against one library."""
    program, path = ROOT / tree / "bin" / "kernel_tests", ROOT / tree / "lib" / library
    return plain(name, [*before, str(program), str(path)], full, env)


def gpu_mutants(full: bool) -> Counts:
    """Planted errors in the CUDA library; they are built where the machine can build."""
    script = "kernels/tests/mutants_gpu.sh"
    if shutil.which("make") and _execute("mutants-gpu-build", [script, "build"], True) != 0:
        return Counts(failed=1)
    return plain("mutants-gpu", [script, "run"], True)


def _compute_sanitizer() -> str:
    """The one on PATH, else the one of the wheels in .venv."""
    wheels = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "compute-sanitizer")
    return shutil.which("compute-sanitizer") or str(wheels)


def _suites() -> Iterator[Suite]:
    bind = functools.partial
    kernels = ("kernels/tests/*.c", "kernels/tests/*.cpp")
    yield Suite("lint", "formatting, vet, ruff, mypy", ("pyproject.toml",), lint)
    yield Suite("abi", "symbols and structs against the headers", ("capi/*.go",), abi)
    yield Suite(
        "go-core",
        "Go, without cgo",
        ("core/**/*.go",),
        bind(go_tests, "go-core", ["./core/...", "./internal/..."], {"CGO_ENABLED": "0"}),
    )
    yield Suite(
        "go-capi",
        "Go, the C API's side",
        ("capi/*_test.go",),
        bind(go_tests, "go-capi", ["-tags=capitest", "./capi/..."], {"CGO_ENABLED": "1"}),
    )
    yield Suite(
        "go-race",
        "Go, under the race detector",
        ("core/**/*.go",),
        bind(go_tests, "go-race", ["-race", "./core/...", "./internal/..."], {"CGO_ENABLED": "1"}),
    )
    yield Suite("fuzz", "each Go fuzz target for a moment", ("core/**/*.go",), fuzz)
    yield Suite(
        "kernels",
        "the kernel interface, CPU library",
        kernels,
        bind(kernel_suite, "kernels", "build", "libdeepep_cpu.so", [], {}),
    )
    mutants = ("kernels/tests/mutants.sh",)
    yield Suite(
        "mutants",
        "the kernel suite notices planted errors",
        mutants,
        bind(plain, "mutants", ["kernels/tests/mutants.sh"]),
    )
    for name, folder in (("header", "include/tests"), ("capi", "capi/tests"), ("examples", "cpp_examples")):
        yield Suite(name, f"{folder}/run.sh", (folder,), bind(plain, name, [f"{folder}/run.sh"]))
    yield Suite(
        "python", "the package, on the CPU", ("python/tests/test_*.py",), bind(pytest, "python", ["python/tests"], {})
    )
    yield Suite(
        "python-nodes",
        "the same, every rank a node",
        ("python/tests/test_*.py",),
        bind(pytest, "python-nodes", ["python/tests"], {"DEEPEP_NUM_MAX_NVL_PEERS": "1"}),
    )
    gpu = ("kernels/cuda/**/*.cu",)
    yield Suite("gpu-build", "the GPU libraries, as far as no GPU is needed", gpu, gpu_build)
    emulator = gpu if platform.machine() == "x86_64" else ()  # it changes stacks itself
    yield Suite("emulated", "the kernel interface, CUDA library on emulated devices", emulator, emulated)
    yield Suite(
        "mutants-emulated",
        "the same notices planted errors",
        emulator,
        bind(plain, "mutants-emulated", ["kernels/tests/mutants_emulated.sh"]),
    )
    yield Suite(
        "packaging",
        "set-up, install, wheel",
        ("tools/tests/test_*.py",),
        bind(pytest, "packaging", ["tools/tests"], {}),
    )
    asan = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1", "DEEPEP_TEST_SANITIZER": "address"}
    tsan = {"TSAN_OPTIONS": "second_deadlock_stack=1", "DEEPEP_TEST_SANITIZER": "thread"}
    yield Suite(
        "asan",
        "the kernel suite under ASan and UBSan",
        kernels,
        bind(kernel_suite, "asan", "build/asan", "libdeepep_cpu.so", [], asan),
    )
    yield Suite(
        "tsan",
        "the kernel suite under TSan",
        kernels,
        bind(kernel_suite, "tsan", "build/tsan", "libdeepep_cpu.so", [], tsan),
    )
    yield Suite(
        "race", "TSan notices a planted race", mutants, bind(plain, "race", ["kernels/tests/mutants.sh", "race"])
    )
    cuda = "libdeepep_cuda.so"
    yield Suite(
        "kernels-gpu",
        "the kernel interface, CUDA library",
        kernels,
        bind(kernel_suite, "kernels-gpu", "build", cuda, [], {}),
    )
    yield Suite(
        "python-gpu",
        "the package, on CUDA",
        ("python/tests/test_*.py",),
        # The limit of the long versions: on one GPU the ranks take turns, and every rank has a context to make.
        lambda full: pytest("python-gpu", ["python/tests"], {"DEEPEP_TEST_DEVICE": "cuda"}, True),
    )
    yield Suite(
        "kernels-sm80",
        "the same, with the code for compute capability 8.0",
        kernels,
        lambda full: plain("kernels-sm80", ["build/bin/kernel_tests", f"build/lib/{cuda}", "--isa", "80"], full),
    )
    yield Suite(
        "examples-gpu",
        "cpp_examples/run.sh cuda",
        ("cpp_examples",),
        bind(plain, "examples-gpu", ["cpp_examples/run.sh", "cuda"]),
    )
    yield Suite(
        "mutants-gpu",
        "the kernel suite, or bench_ops, notices planted errors on GPUs",
        ("kernels/tests/mutants_gpu.sh",),
        gpu_mutants,
    )
    for tool in ("memcheck", "racecheck", "synccheck"):
        before = [_compute_sanitizer(), f"--tool={tool}", "--error-exitcode=1"]
        yield Suite(
            tool,
            f"the kernel suite under compute-sanitizer {tool}",
            kernels,
            bind(kernel_suite, tool, "build", cuda, before, {"DEEPEP_TEST_SANITIZER": tool}),
        )


SUITES = {suite.name: suite for suite in _suites()}
USUAL = [
    *("lint", "abi", "go-core", "go-capi", "fuzz", "kernels", "mutants"),
    *("header", "capi", "examples", "python", "gpu-build", "emulated", "packaging"),
]
FULL = [*USUAL, "go-race", "python-nodes", "mutants-emulated"]
GPU = ["kernels-gpu", "kernels-sm80", "python-gpu", "examples-gpu"]
