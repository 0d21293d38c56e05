#!/usr/bin/env python3
"""A test of the test: plants errors into copies of the kernel sources and shows that the kernel suite fails for each.

    kernels/tests/mutants.py check              each error of mutants.list fits exactly one place; builds nothing
    kernels/tests/mutants.py cpu                the CPU library
    kernels/tests/mutants.py race               the CPU library under TSan, which has to report each race
    kernels/tests/mutants.py emulated           the CUDA library on emulated devices
    kernels/tests/mutants.py gpu-build [FOLDER] the CUDA library: builds the variants in FOLDER (build/mutants_gpu)
    kernels/tests/mutants.py gpu-run [FOLDER]   runs them on GPUs, without make and nvcc; PROGRAMS is the folder of
                                                kernel_tests and bench_ops (build/bin)

--only 1,21 chooses numbers. The last line is "N passed, N failed".
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = pathlib.Path(__file__).with_name("mutants.list")
SOURCES = {"cpu": "kernels/cpu", "race": "kernels/cpu", "cuda": "kernels/cuda"}
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
KEYS = {"title", "in", "find", "plant", "cases", "bench", "devices"}
# Commands and programs of this script run as if it had been started by hand.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "DEEPEP_TEST_SANITIZER")
}


class NotBuiltError(Exception):
    """A variant cannot be made; the text says why."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One entry of the list."""

    library: str
    number: int
    title: str
    where: pathlib.Path  # a file or folder of the sources
    find: str
    plant: str
    cases: str
    bench: str  # mode of bench_ops; empty: not for GPUs
    devices: str  # DEEPEP_EMULATE; empty: not for emulated devices

    @property
    def name(self) -> str:
        return f"{self.number} {self.title}"

    def pattern(self) -> re.Pattern[str]:
        """The tokens of `find` with any white space between them; @1 to @9 match anything within a statement."""
        parts: list[str] = []
        word_before = False
        for token in re.findall(r"@\d|\w+|\S", self.find):
            word = re.match(r"\w", token) is not None
            parts.append(r"\s+" if word and word_before else r"\s*" if parts else r"\b" if word else "")
            parts.append(f"(?P<hole{token[1:]}>[^;]*?)" if token[0] == "@" else re.escape(token))
            word_before = word
        return re.compile("".join(parts) + (r"\b" if word_before else ""))

    def place(self, root: pathlib.Path) -> tuple[pathlib.Path, str]:
        """The file below `root` that has the place, and its text with the error planted."""
        path = root / self.where
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        found = [(file, match) for file in files for match in self.pattern().finditer(file.read_text())]
        if len(found) != 1:
            raise NotBuiltError(f"it fits {len(found)} places of {self.where}, not one")
        file, match = found[0]
        # On a line of its own, so that no compiler finds it indented as if it belonged to what stands before it.
        holes = {"0": "\n" + match[0], **{name[-1]: text for name, text in match.groupdict().items()}}
        planted = re.sub(r"@(\d)", lambda hole: holes[hole[1]], self.plant)
        if planted.strip() == match[0]:
            raise NotBuiltError("it changes nothing")
        text = match.string
        return file, text[: match.start()] + planted + text[match.end() :]


def read_list() -> list[Mutant]:
    """All entries, in the order of the list."""
    parser = configparser.ConfigParser(
        delimiters=("=",), comment_prefixes=("#",), interpolation=None, empty_lines_in_values=False
    )
    parser.read_string(LIST.read_text())
    mutants = []
    for section in parser.sections():
        library, number = section.split()
        entry = parser[section]
        unknown, missing = set(entry) - KEYS, KEYS - {"bench", "devices"} - set(entry)
        if unknown or missing or library not in SOURCES:
            raise SystemExit(f"mutants.list: [{section}]: unknown {sorted(unknown)}, missing {sorted(missing)}")
        where = pathlib.Path(SOURCES[library], entry["in"])
        values = [entry.get(key, "") for key in ("find", "plant", "cases", "bench", "devices")]
        mutants.append(Mutant(library, int(number), entry["title"], where, *values))
    return mutants


@dataclasses.dataclass(frozen=True)
class Build:
    """How make builds the library that is varied."""

    library: str  # below `folder`
    objects: tuple[str, ...]  # below obj: what a variant takes over from the build without an error
    build_id: str  # the header with the id of the sources
    folder: str = "build"  # make's BUILD
    targets: tuple[str, ...] = ()  # what is built besides the library
    settings: tuple[str, ...] = ()

    def make(self, root: pathlib.Path, *more: str) -> None:
        """Runs make in `root`; raises NotBuiltError."""
        # The tools are those of this tree, also for a copy of it.
        command = ["make", "--no-print-directory", "--jobs=2", f"BUILD={self.folder}", f"VENV={ROOT}/.venv/bin/python"]
        made = subprocess.run(
            [*command, *self.settings, *more],
            cwd=root,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if made.returncode != 0:
            errors = [line for line in made.stdout.splitlines() if re.search(r"(?<!W)error\b", line)]
            raise NotBuiltError(next(iter(errors or made.stdout.splitlines()[-1:]), "make failed"))

    def original(self) -> pathlib.Path:
        """Builds the library without an error."""
        self.make(ROOT, f"{self.folder}/{self.library}", *self.targets)
        return ROOT / self.folder / self.library

    def variant(self, mutant: Mutant, to: pathlib.Path) -> None:
        """Builds the library with the error planted, in a copy of the tree where make finds one newer source."""
        tree = to.with_suffix(".tree")
        shutil.rmtree(tree, ignore_errors=True)
        to.unlink(missing_ok=True)
        tree.mkdir(parents=True)
        for entry in ROOT.iterdir():
            if entry.name not in ("kernels", "build", ".git"):
                (tree / entry.name).symlink_to(entry)
        shutil.copytree(ROOT / "kernels", tree / "kernels")
        objects, copied = ROOT / self.folder / "obj", tree / self.folder / "obj"
        for part in self.objects:
            shutil.copytree(objects / part, copied / part)
        for file in objects.iterdir():
            if file.is_file():
                shutil.copy2(file, copied)
        file, text = mutant.place(tree)
        file.write_text(text)
        # Else the id, which is made of the sources, would be a second difference and compile another file again.
        found = re.search(r'"(.*)"', (objects / self.build_id).read_text())
        assert found
        self.make(tree, f"build_id={found[1]}", f"{self.folder}/{self.library}")
        shutil.copy2(tree / self.folder / self.library, to)
        shutil.rmtree(tree)


CPU = Build("lib/libdeepep_cpu.so", ("kernels/cpu",), "cpu_build_id.h", targets=("kernel-tests",))
TSAN = dataclasses.replace(CPU, folder="build/tsan", settings=("SAN=thread",))
EMULATED = Build(
    "test/libdeepep_emulated.so",
    ("emulated", "kernels/tests/emulate"),
    "cuda_build_id.h",
    targets=("kernel-tests",),
)


GPU = Build(
    "lib/libdeepep_cuda.so",
    ("kernels/cuda",),
    "cuda_build_id.h",
    folder="build/mutants_gpu/original",
    settings=("SM80_CODE=", "SM90_CODE=-gencode arch=compute_90,code=sm_90", "SPILL_CHECK="),
)


@dataclasses.dataclass
class Verdicts:
    """Prints a line for each mutant and counts them."""

    passed: int = 0
    failed: int = 0

    def add(self, title: str, good: bool, text: str = "") -> None:
        self.passed += good
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'} {title}{': ' if text else ''}{text[:150]}", flush=True)

    def end(self) -> int:
        print(f"{self.passed} passed, {self.failed} failed")
        return self.failed != 0


def run(command: list[str], log: pathlib.Path, limit: float, env: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit status, 124 after `limit` seconds, and the output, which also goes to `log`."""
    try:
        with log.open("w") as file:
            status = subprocess.run(
                command,
                cwd=ROOT,
                env={**ENVIRONMENT, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit,
            ).returncode
    except subprocess.TimeoutExpired:
        status = 124
    return status, log.read_text(errors="replace")


def first_line(pattern: str, output: str, otherwise: str) -> str:
    found = re.search(f"^.*(?:{pattern}).*$", output, re.MULTILINE)
    return found[0] if found else otherwise


def failed_cases(output: str) -> list[str]:
    """Lines that say that a case failed; a library that cannot be opened fails none."""
    return [line for line in output.splitlines() if re.match(r"FAILED .*/", line) and "FAILED opening" not in line]


Attempt = Callable[[Mutant, pathlib.Path], tuple[bool, str]]


def build_and_try(
    build: Build, mutants: Iterable[Mutant], folder: pathlib.Path, workers: int, attempt: Attempt, verdicts: Verdicts
) -> None:
    """Builds each variant in `folder`, and says what attempt(mutant, library) finds."""
    folder.mkdir(parents=True, exist_ok=True)

    def each(mutant: Mutant) -> tuple[Mutant, bool, str]:
        library = folder / f"{mutant.number}.so"
        try:
            build.variant(mutant, library)
        except NotBuiltError as error:
            return mutant, False, f"it cannot be built: {error}"
        return mutant, *attempt(mutant, library)

    with ThreadPoolExecutor(workers) as pool:
        for mutant, good, text in pool.map(each, mutants):
            verdicts.add(f"mutant {mutant.name}", good, text)


def run_cpu(mutants: list[Mutant], verdicts: Verdicts) -> None:
    library, program = CPU.original(), str(ROOT / "build/bin/kernel_tests")
    folder = ROOT / "build/mutants"
    folder.mkdir(parents=True, exist_ok=True)
    status, _ = run([program, str(library), "--filter", "dispatch/BF16"], folder / "0.log", 300)
    verdicts.add("no mutant, no failure", status == 0)

    def attempt(mutant: Mutant, variant: pathlib.Path) -> tuple[bool, str]:
        command = [program, str(variant), "--filter", mutant.cases, "--patience", "0.1", "--stop"]
        _, output = run(command, variant.with_suffix(".log"), 300)
        failed = failed_cases(output)
        return (True, failed[0]) if failed else (False, "not noticed")

    build_and_try(CPU, mutants, folder, 2, attempt, verdicts)


def run_races(mutants: list[Mutant], verdicts: Verdicts) -> None:
    TSAN.original()
    tsan = {"TSAN_OPTIONS": "halt_on_error=1", "DEEPEP_TEST_SANITIZER": "thread"}  # reports are slow: the first ends it

    def attempt(mutant: Mutant, variant: pathlib.Path) -> tuple[bool, str]:
        command = [str(ROOT / "build/tsan/bin/kernel_tests"), str(variant), "--filter", mutant.cases, "--stop"]
        _, output = run(command, variant.with_suffix(".log"), 600, tsan)
        noticed = "WARNING: ThreadSanitizer: data race" in output
        return noticed, "" if noticed else "not noticed"

    build_and_try(TSAN, mutants, ROOT / "build/tsan/mutants", 1, attempt, verdicts)


def run_emulated(mutants: list[Mutant], verdicts: Verdicts) -> None:
    library, program = EMULATED.original(), str(ROOT / "build/bin/kernel_tests")
    folder = ROOT / "build/mutants_emulated"
    folder.mkdir(parents=True, exist_ok=True)
    some = [program, str(library), "--threads", "--filter", "^combine/BF16|^dispatch/BF16|^ll combine/BF16"]
    status, output = run(some, folder / "0.log", 600, {"DEEPEP_EMULATE": "cc=90,sms=3"})
    verdicts.add("no mutant, no failure", status == 0, first_line("^FAILED", output, ""))

    def attempt(mutant: Mutant, variant: pathlib.Path) -> tuple[bool, str]:
        command = [program, str(variant), "--threads", "--filter", mutant.cases, "--stop"]
        status, output = run(command, variant.with_suffix(".log"), 100, {"DEEPEP_EMULATE": mutant.devices})
        why = first_line("^FAILED|^emulate:", output, f"it ended with status {status}")
        if status == 0:
            return False, "not noticed"
        return "FAILED opening" not in why and "no case has" not in why, why

    build_and_try(EMULATED, (m for m in mutants if m.devices), folder, 2, attempt, verdicts)


def build_gpu(mutants: list[Mutant], folder: pathlib.Path, verdicts: Verdicts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(GPU.original(), folder / "0.so")
    build_and_try(GPU, (m for m in mutants if m.bench), folder, 2, lambda *_: (True, ""), verdicts)


def run_gpu(mutants: list[Mutant], folder: pathlib.Path, verdicts: Verdicts) -> None:
    programs = pathlib.Path(os.environ.get("PROGRAMS", ROOT / "build/bin"))
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, check=True).stdout
    gpus = sum(line.startswith("GPU") for line in listed.splitlines())

    def attempts(library: pathlib.Path, cases: str, bench: str) -> Iterator[tuple[int, str]]:
        """kernel_tests, whose ranks take all GPUs there are; then bench_ops, whose batches are larger."""
        log = library.with_suffix(f".{bench}.txt")
        suite = [str(programs / "kernel_tests"), str(library), "--threads", "--filter", cases, "--patience", "0.5"]
        yield run([*suite, "--stop"], log, 40)
        if gpus < 2 or not (programs / "bench_ops").exists():
            return
        shape = ["hidden=2048", "experts=64", "max_tokens=64"] if bench == "llcheck" else ["tokens=1024", "hidden=7168"]
        ops = [str(programs / "bench_ops"), str(library), f"mode={bench}", f"ranks={gpus}", f"devices={gpus}"]
        for _ in range(2):
            yield run([*ops, *shape, "nvl_mb=16"], log, 40)

    def attempt(number: int, cases: str, bench: str) -> tuple[bool | None, str]:
        """Whether a program fails for the library, None if it cannot be tried; and a line that says why."""
        library = folder / f"{number}.so"
        if not library.exists():
            return None, f"there is no {library}"
        for status, output in attempts(library, cases, bench):
            if "FAILED opening" in output:
                return None, f"{library} does not open"
            if status != 0:
                return True, first_line("^FAILED|wrong|differ|DK_E", output, f"it ended with status {status}")
        return False, "not noticed"

    with ThreadPoolExecutor(4) as pool:
        originals = {
            bench: pool.submit(attempt, 0, *bench) for bench in (("combine/", "normalcheck"), ("ll ", "llcheck"))
        }
        tried = [(m, pool.submit(attempt, m.number, m.cases, m.bench)) for m in mutants if m.bench]
        for (_, bench), original in originals.items():
            noticed, text = original.result()
            verdicts.add(f"no mutant, no failure ({bench})", noticed is False, "" if noticed is False else text)
        for mutant, future in tried:
            noticed, text = future.result()
            verdicts.add(f"mutant {mutant.name}", noticed is True, text)


def check(mutants: list[Mutant], verdicts: Verdicts) -> None:
    for mutant in mutants:
        try:
            mutant.place(ROOT)
            verdicts.passed += 1
        except NotBuiltError as error:
            verdicts.add(f"{mutant.library} {mutant.name}", False, str(error))
    numbers = [(SOURCES[m.library], m.number) for m in mutants]
    if len(set(numbers)) != len(numbers):
        verdicts.add("mutants.list", False, "a number is there twice")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "cpu", "race", "emulated", "gpu-build", "gpu-run"))
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "build/mutants_gpu")
    parser.add_argument("--only", metavar="NUMBERS", help="some of the numbers, with commas between them")
    options = parser.parse_args()
    chosen = options.only and {int(number) for number in options.only.split(",")}
    mutants = [m for m in read_list() if not chosen or m.number in chosen]
    verdicts, folder = Verdicts(), options.folder.resolve()
    of = {library: [m for m in mutants if m.library == library] for library in SOURCES}
    commands: dict[str, Callable[[], None]] = {
        "check": lambda: check(mutants, verdicts),
        "cpu": lambda: run_cpu(of["cpu"], verdicts),
        "race": lambda: run_races(of["race"], verdicts),
        "emulated": lambda: run_emulated(of["cuda"], verdicts),
        "gpu-build": lambda: build_gpu(of["cuda"], folder, verdicts),
        "gpu-run": lambda: run_gpu(of["cuda"], folder, verdicts),
    }
    try:
        commands[options.command]()
    except NotBuiltError as error:  # the library without an error
        verdicts.add("build", False, str(error))
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
