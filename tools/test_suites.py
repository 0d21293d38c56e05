"""The suites that run_tests.py runs: what each needs, its command, and how its tests are counted.

Ways of counting:
    check   one test: the command's exit status
    plain   the last line of the form ``N passed, N failed[, N skipped]`` that the command prints
    junit   the XML report that pytest and gotestsum (for Go) write
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import platform
import re
import shutil
import sys
import sysconfig
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Sequence

from run_process import run_process

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "test"
GO = os.environ.get("GO", "go")
PLAIN = re.compile(r"^(?:\w+: )?(\d+) passed, (\d+) failed(?:, (\d+) skipped)?\s*$")


NO_TESTS = 5  # pytest's exit status where it found none, which run_tests.py reports


def go_tool(name: str) -> list[str]:
    """The command of a Go tool that tools/tools.mod names, apart from the modules that the product needs."""
    return [GO, "tool", f"-modfile={pathlib.Path(__file__).resolve().parent}/tools.mod", name]


@dataclasses.dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = dataclasses.field(default_factory=list, compare=False)  # a line or more about each

    def add(self, other: Counts) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.failures += other.failures

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else "")


Run = Callable[[bool], Counts]


@dataclasses.dataclass
class Suite:
    """A suite is there if one of the files that ``needs`` names is. ``run(full)`` runs it and counts."""

    name: str
    title: str
    needs: tuple[str, ...]
    run: Run

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
        counts.add(Counts(passed=int(ok), failed=int(not ok), failures=[] if ok else [title]))
    return counts


def plain(
    name: str, command: list[str], full: bool, env: dict[str, str] | None = None, shown: bool = True, **options: object
) -> Counts:
    """The command's closing line counts; an exit status that the line does not explain is one more failure.

    What the command printed of its failures: its lines with FAILED, or else its last ones.
    """
    counts = Counts()
    marked: list[str] = []
    last: collections.deque[str] = collections.deque(maxlen=5)

    def line(text: str) -> bool:
        nonlocal counts
        if found := PLAIN.match(text):
            counts = Counts(*(int(number or 0) for number in found.groups()))
        elif "FAILED" in text:
            marked.append(text.strip())
        elif text.strip():
            last.append(text.strip())
        return shown

    code = _execute(name, command, full, env, on_line=line, **options)
    if code != 0 and counts.failed == 0:
        print(f"{name}: exit status {code} without a failed test", flush=True)
        counts.failed += 1
    if counts.failed:
        counts.failures = marked or list(last)
    return counts


def junit(
    name: str, command: list[str], full: bool, env: dict[str, str] | None = None, shown: bool = True, **options: object
) -> Counts:
    """Counts from the XML report that the command writes to LOGS/name.xml; no report means that it ended early."""
    report = LOGS / f"{name}.xml"
    report.unlink(missing_ok=True)
    code = _execute(name, command, full, env, on_line=lambda _: shown, **options)
    if not report.exists():
        print(f"{name}: no report (exit status {code})", flush=True)
        return Counts(failed=1)
    counts = Counts()
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        failed, skipped = bool(kinds & {"failure", "error"}), "skipped" in kinds
        names = [f"{case.get('classname')}.{case.get('name')}"] if failed else []
        counts.add(Counts(not failed and not skipped, failed, skipped and not failed, names))
    if code not in (0, NO_TESTS) and counts.failed == 0:
        print(f"{name}: exit status {code} without a failed test", flush=True)
        counts.failed += 1
    return counts


EVERY_CORE = ["--numprocesses=auto"]  # of pytest-xdist, for tests that neither wait nor measure


def pytest(name: str, arguments: list[str], env: dict[str, str], full: bool, **options: object) -> Counts:
    command = [sys.executable, "-m", "pytest", f"--junitxml={LOGS}/{name}.xml", *arguments]
    return junit(name, command, full, env, **options)


def in_two(first: Callable[..., Counts], second: Callable[..., Counts], log: str) -> Counts:
    """Two runs at the same time. What the second prints goes to its log, and stands after what the first prints.

    Ranks that wait for each other, or for a deadline, leave half of two cores idle.
    """
    kills: list[Callable[[], None]] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        beside = pool.submit(second, shown=False, on_start=kills.append)
        try:
            counts = first()
            counts.add(beside.result())
        except BaseException:  # Ctrl-C, say
            for kill in kills:
                kill()
            raise
    print((LOGS / f"{log}.log").read_text(), flush=True)
    return counts


def pytest_in_two(name: str, folder: str, apart: Sequence[str], env: dict[str, str], full: bool) -> Counts:
    """The files `apart` and, at the same time, the others."""
    files = [f"{folder}/{file}" for file in apart]
    others = [folder, *(f"--ignore={file}" for file in files)]
    return in_two(
        functools.partial(pytest, name, others, env, full),
        functools.partial(pytest, f"{name}-apart", files, env, full),
        f"{name}-apart",
    )


def go_tests(name: str, packages: list[str], env: dict[str, str], full: bool) -> Counts:
    """Runs Go tests uncached: they load the kernel library, which Go's cache does not know of."""
    shown = [f"--junitfile={LOGS}/{name}.xml", "--format=pkgname-and-test-fails", "--no-color"]
    options = ["-count=1", "-vet=off", f"-timeout={'110m' if full else '9m'}"]
    env = {"DEEPEP_KERNELS": str(BUILD / "lib"), **env}
    return junit(name, [*go_tool("gotestsum"), *shown, "--", *options, *packages], full, env)


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


PLANT = [sys.executable, "kernels/tests/mutants.py"]


def lint(full: bool) -> Counts:
    python = [sys.executable, "-m"]
    clang_format = f"{pathlib.Path(sys.executable).parent}/clang-format --dry-run -Werror"
    checked = ["python", "bench", "tools", "kernels", "nvshmem", "setup.py"]
    commands = {
        "gofmt": ["sh", "-c", 'test -z "$(gofmt -l core internal capi bench tools | tee /dev/stderr)"'],
        "go-vet": [GO, "vet", "-tags=capitest", "./..."],
        "staticcheck": [*go_tool("staticcheck"), "./..."],
        "clang-format": ["sh", "-c", "git ls-files '*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs " + clang_format],
        "ruff": [*python, "ruff", "check", "--quiet", *checked],
        "ruff-format": [*python, "ruff", "format", "--check", "--quiet", *checked],
        "mypy": [*python, "mypy", "--no-error-summary"],
        "mutants": [*PLANT, "check"],
    }
    return checks("lint", commands, full)


def abi(full: bool) -> Counts:
    commands = {
        "symbols": [sys.executable, "tools/abi_check.py"],
        "layout": [sys.executable, "tools/abi_layout.py"],
        "release": [sys.executable, "tools/abi_release.py"],
        "ctypes": [sys.executable, "tools/generate_abi.py", "--check"],
    }
    return checks("abi", commands, full)


# Builds by itself: not as a part of the make that runs the tests.
MAKE = ["env", "-u", "MAKEFLAGS", "-u", "MFLAGS", "make", "--no-print-directory", f"-j{os.cpu_count()}"]


def gpu_build(full: bool) -> Counts:
    """What can be said of the GPU libraries without a GPU: they build; symbols; how the internode one refuses."""
    commands = {"build": [*MAKE, "cuda", "nvshmem"], "symbols": [sys.executable, "tools/abi_check.py"]}
    counts = checks("gpu-build", commands, full)
    if counts.failed == 0:
        counts.add(pytest("gpu-build", [*EVERY_CORE, "nvshmem/tests"], {}, full))
    return counts


def emulated(full: bool) -> Counts:
    """The CUDA library on emulated devices: the kernel suite, and what the engine decides for GPUs."""
    counts = checks("emulated", {"build": [*MAKE, "emulated"]}, full)
    if counts.failed == 0:
        counts.add(plain("emulated", ["kernels/tests/emulated.sh"], full))
        env = {"DEEPEP_EMULATE": "cc=90,sms=8,seed=1", "DEEPEP_TEST_EMULATED": f"{BUILD}/test/libdeepep_emulated.so"}
        tests = ["-run=EmulatedGPUs|ChosenSMs", "./core"]
        counts.add(go_tests("emulated-engine", tests, {**env, "CGO_ENABLED": "0"}, full))
    return counts


def kernel_suite(
    name: str, tree: str, library: str, before: list[str], env: dict[str, str], full: bool, more: Sequence[str] = (),
    **options: object,
) -> Counts:  # fmt: skip
    """The suite of the kernel interface, built in `tree`, against one library; `more` are its options."""
    program, path = ROOT / tree / "bin" / "kernel_tests", ROOT / tree / "lib" / library
    return plain(name, [*before, str(program), str(path), *more], full, env, **options)  # type: ignore[arg-type]


def kernels(full: bool) -> Counts:
    """The CPU library, in two shares."""

    def half(name: str, share: str) -> Callable[..., Counts]:
        return functools.partial(kernel_suite, name, "build", CPU, [], {}, full, ["--share", share])

    return in_two(half("kernels", "1/2"), half("kernels-apart", "2/2"), "kernels-apart")


def gpu_mutants(full: bool) -> Counts:
    """Planted errors in the CUDA library; they are built where the machine can build."""
    if shutil.which("make") and _execute("mutants-gpu-build", [*PLANT, "gpu-build"], True) != 0:
        return Counts(failed=1)
    return plain("mutants-gpu", [*PLANT, "gpu-run"], True)


def _compute_sanitizer() -> str:
    """The one on PATH, else the one of the wheels in .venv."""
    wheels = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "compute-sanitizer")
    return shutil.which("compute-sanitizer") or str(wheels)


def faults(full: bool) -> Counts:
    """Rounds in which a rank is killed, stopped or broken (`deepep faults`); a fault that cannot be made is skipped."""
    rounds = 10_000 if full else 200
    return plain("faults", [str(BUILD / "bin" / "deepep"), "faults", "--rounds", str(rounds)], full)


KERNEL_TESTS = ("kernels/tests/*.c", "kernels/tests/*.cpp")
PYTHON_TESTS = ("python/tests/test_*.py",)
GO_FILES = ("core/**/*.go",)
# Packages with goroutines, locks or memory that other processes write.
CONCURRENT = [f"./internal/{name}" for name in ("bootstrap", "health", "engine", "monitor", "dl")]
SHARE = "^dispatch/|^combine/|^notify/|^ll dispatch/|^ll combine/|^stream/|^team/|^overlap/"
GPU_SOURCES = ("kernels/cuda/**/*.cu",)
EMULATOR = GPU_SOURCES if platform.machine() == "x86_64" else ()  # it changes stacks itself
CROSS = all(map(shutil.which, ("qemu-aarch64", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++")))
CPU, CUDA = "libdeepep_cpu.so", "libdeepep_cuda.so"
SANITIZERS = {  # build folder: SAN= of make, environment
    "asan": (
        "address,undefined",
        {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1", "DEEPEP_TEST_SANITIZER": "address"},
    ),
    "tsan": ("thread", {"TSAN_OPTIONS": "second_deadlock_stack=1", "DEEPEP_TEST_SANITIZER": "thread"}),
}


def sanitized(name: str, options: list[str], full: bool) -> Counts:
    """The suite of the kernel interface against the CPU library, both built in build/asan or build/tsan."""
    return kernel_suite(name, f"build/{name[:4]}", CPU, [], SANITIZERS[name[:4]][1], full, options)


def sanitized_share(full: bool) -> Counts:
    """What `make sanitize` runs whole: the cases of SHARE, under ASan with UBSan and under TSan."""
    counts = Counts()
    for name, (flags, _) in SANITIZERS.items():
        build = [*MAKE, f"BUILD=build/{name}", f"SAN={flags}", "kernels", "kernel-tests"]
        built = checks("sanitized-share", {f"build-{name}": build}, full)
        counts.add(built)
        if built.failed == 0:
            counts.add(sanitized(f"{name}-share", ["--threads", "--filter", SHARE], full))
    return counts


def releases(full: bool) -> Counts:
    """The commit's release, made in two folders: the same bytes. Without code for newer GPUs, which takes long."""
    command = ["env", "PYTHONPATH=tools", sys.executable, "-m", "release.twice", "SM90=0"]
    return checks("releases", {"twice": command}, full)


def _go(name: str, cgo: str, *arguments: str) -> Run:
    return functools.partial(go_tests, name, [*arguments], {"CGO_ENABLED": cgo})


def _plain(name: str, *command: str) -> Run:
    return functools.partial(plain, name, [*command])


def _pytest(name: str, *arguments: str, **env: str) -> Run:
    return functools.partial(pytest, name, [*arguments], env)


def _kernels(name: str, library: str, *options: str) -> Run:
    return functools.partial(kernel_suite, name, "build", library, [], {}, more=[*options])


def _memory_check(tool: str) -> Run:
    before = [_compute_sanitizer(), f"--tool={tool}", "--error-exitcode=1"]
    return functools.partial(kernel_suite, tool, "build", CUDA, before, {"DEEPEP_TEST_SANITIZER": tool})


def _python_gpu(full: bool) -> Counts:
    """Under the limit of the long versions: on one GPU the ranks take turns, and every rank has a context to make."""
    return pytest("python-gpu", ["python/tests"], {"DEEPEP_TEST_DEVICE": "cuda"}, True)


# Of python/tests, about half of the time, none of whose tests is about deadlines.
APART = [
    f"test_{name}.py"
    for name in ("autograd", "combine", "dispatch", "elastic_nodes", "face", "face_ordering", "fuzz",
                 "import", "internode", "internode_low_latency", "low_latency", "nn", "ops", "random", "recycling",
                 "selftest", "shrink_nodes", "transformers")
]  # fmt: skip
MUTANTS = "kernels/tests/mutants.list"
# fmt: off
_TABLE: list[tuple[str, str, tuple[str, ...], Run]] = [
    # name, title, needs, run
    ("lint", "formatting, vet, staticcheck, ruff, mypy", ("pyproject.toml",), lint),
    ("abi", "symbols and structs against the headers", ("capi/*.go",), abi),
    ("go-core", "Go, without cgo", GO_FILES, _go("go-core", "0", "./core/...", "./internal/...")),
    ("go-capi", "Go, the C API's side", ("capi/*_test.go",), _go("go-capi", "1", "-tags=capitest", "./capi/...")),
    ("go-race", "Go, under the race detector", GO_FILES, _go("go-race", "1", "-race", "./core/...", "./internal/...")),
    ("go-race-share", "the concurrent packages, under the race detector", GO_FILES,
     _go("go-race-share", "1", "-race", *CONCURRENT)),
    ("fuzz", "each Go fuzz target for a moment", GO_FILES, fuzz),
    ("kernels", "the kernel interface, CPU library", KERNEL_TESTS, kernels),
    ("asan", "the kernel suite under ASan and UBSan", KERNEL_TESTS, functools.partial(sanitized, "asan", [])),
    ("tsan", "the kernel suite under TSan", KERNEL_TESTS, functools.partial(sanitized, "tsan", [])),
    ("sanitized-share", "a share of it under ASan, UBSan and TSan", KERNEL_TESTS, sanitized_share),
    ("mutants", "the kernel suite notices planted errors", (MUTANTS,), _plain("mutants", *PLANT, "cpu")),
    ("race", "TSan notices a planted race", (MUTANTS,), _plain("race", *PLANT, "race")),
    ("header", "include/tests/run.sh", ("include/tests",), _plain("header", "include/tests/run.sh")),
    ("capi", "capi/tests/run.sh", ("capi/tests",), _plain("capi", "capi/tests/run.sh")),
    ("examples", "cpp_examples/run.sh", ("cpp_examples",), _plain("examples", "cpp_examples/run.sh")),
    ("python", "the package, on the CPU", PYTHON_TESTS,
     functools.partial(pytest_in_two, "python", "python/tests", APART, {})),
    ("python-nodes", "the same, every rank a node", PYTHON_TESTS,
     _pytest("python-nodes", "python/tests", DEEPEP_NUM_MAX_NVL_PEERS="1")),
    ("python-ctypes", "the same, without the compiled face", PYTHON_TESTS,
     _pytest("python-ctypes", "python/tests", DEEPEP_TORCH_FACE="0")),
    ("faults", "ranks that die, stop or break at random moments", GO_FILES, faults),
    ("gpu-build", "the GPU libraries, as far as no GPU is needed", GPU_SOURCES, gpu_build),
    ("releases", "two releases of the commit are the same bytes", (".git",), releases),
    ("emulated", "the kernel interface, CUDA library on emulated devices", EMULATOR, emulated),
    ("mutants-emulated", "the same notices planted errors", EMULATOR,
     _plain("mutants-emulated", *PLANT, "emulated")),
    ("packaging", "documents, set-up, install, wheel", ("tools/tests/test_*.py",),
     _pytest("packaging", *EVERY_CORE, "tools/tests")),
    ("aarch64", "a build for aarch64, under qemu", ("tools/aarch64.sh",) if CROSS else (),
     _plain("aarch64", "tools/aarch64.sh")),
    ("kernels-gpu", "the kernel interface, CUDA library", KERNEL_TESTS, _kernels("kernels-gpu", CUDA)),
    ("kernels-sm80", "the same, with the code for compute capability 8.0", KERNEL_TESTS,
     _kernels("kernels-sm80", CUDA, "--isa", "80")),
    ("python-gpu", "the package, on CUDA", PYTHON_TESTS, _python_gpu),
    ("examples-gpu", "cpp_examples/run.sh cuda", ("cpp_examples",),
     _plain("examples-gpu", "cpp_examples/run.sh", "cuda")),
    ("mutants-gpu", "the kernel suite, or bench_ops, notices planted errors on GPUs",
     (MUTANTS,), gpu_mutants),
    *((tool, f"the kernel suite under compute-sanitizer {tool}", KERNEL_TESTS, _memory_check(tool))
      for tool in ("memcheck", "racecheck", "synccheck")),
]
# fmt: on


SUITES = {name: Suite(name, title, needs, run) for name, title, needs, run in _TABLE}
USUAL = [  # what the emulated and the GPU libraries' suites build, later suites use where it is there
    *("lint", "abi", "go-core", "go-capi", "go-race-share", "fuzz", "kernels", "sanitized-share", "mutants"),
    *("header", "capi", "examples", "emulated", "gpu-build", "python", "faults", "packaging"),
]
FULL = [*USUAL, "go-race", "python-nodes", "python-ctypes", "mutants-emulated", "aarch64", "releases"]
GPU = ["kernels-gpu", "kernels-sm80", "python-gpu", "examples-gpu"]
