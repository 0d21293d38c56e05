"""What the documents and the sources say twice is the same."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
SPELT = re.compile(r"libdeepep\.so\.\d|(?<![\d.])%s(?![\d.]*\d)")


def version() -> str:
    header = (ROOT / "include" / "deepep.h").read_text()
    return ".".join(re.findall(r"^#define DEEPEP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header, re.M))


def tracked() -> list[pathlib.Path]:
    """The files of the repository; in an unpacked source archive, those of the folders that it has."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_the_version_stands_in_the_header_alone() -> None:
    """Documents may name a version: the one that was measured, or released. core restates it, and has a test."""
    spelt = re.compile(SPELT.pattern % re.escape(version()))
    sums = {ROOT / "go.sum", ROOT / "go.mod"}
    for path in tracked():
        if path.suffix in (".md", ".png", ".svg", ".release") or path in sums:
            continue
        found = spelt.search(path.read_text(errors="replace"))
        assert not found, f"{path.relative_to(ROOT)} spells {found[0]}: take it from include/deepep.h"


def test_a_spelt_version_is_seen() -> None:
    spelt, name = re.compile(SPELT.pattern % re.escape("7.8.9")), "libdeepep.so"
    assert spelt.search(f'load("{name}.1")') and spelt.search("version = 7.8.9;")
    assert not spelt.search(f"{name} {name}.$(MAJOR) 17.8.9 7.8.91")


def test_new_paths_of_the_table_of_renames_are_there() -> None:
    text = (ROOT / "docs" / "renames.md").read_text().split("\n## Names")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    for line in rows:
        new = re.search(r"`([^`]+)`[^`]*\|$", line)
        assert new and (ROOT / new[1]).exists(), line


def figures(text: str) -> list[list[Decimal]]:
    """The figures of each row of the README's table, without its first column."""
    section = text.split("\n## Figures\n")[1].split("\n## ")[0]
    rows = [line.split("|")[2:] for line in section.splitlines() if line.startswith("|")][2:]
    return [[Decimal(found) for found in NUMBER.findall(" ".join(cells))] for cells in rows]


def stands_in(line: str, figure: Decimal) -> bool:
    """True where a number of the line is the figure, or becomes it when it is rounded."""
    numbers = [Decimal(found) for found in NUMBER.findall(line)]
    return any(number.quantize(figure, rounding=ROUND_HALF_UP) == figure for number in numbers)


def without_source(readme: str, performance: str) -> list[list[Decimal]]:
    """Rows of the README's table whose figures do not stand in one line of a table of docs/performance.md."""
    lines = [line for line in performance.splitlines() if line.startswith("|")]
    return [row for row in figures(readme) if not any(all(stands_in(line, f) for f in row) for line in lines)]


def test_figures_of_the_readme() -> None:
    performance = (ROOT / "docs" / "performance.md").read_text()
    assert len(figures(README)) >= 5 and all(figures(README))
    assert without_source(README, performance) == []


def test_a_figure_without_a_source_is_seen() -> None:
    performance = "| dispatch | 20.61 ms | 83.30 ms |\n| combine | 471 / 480 | 459 |\n"
    table = "\n## Figures\n| | ours | other |\n|---|---|---|\n"
    good = [f"{table}| 512 x 7168 | 20.6 ms | gloo 83.3 ms |\n", f"{table}| combine | 471 us | 459 us |\n"]
    wrong = [
        f"{table}| dispatch | 20.7 ms | |\n",
        f"{table}| dispatch | 20.6 ms | 459 us |\n",
        f"{table}| c | 71 | |\n",
    ]
    assert [without_source(text, performance) for text in good] == [[], []]
    assert all(without_source(text, performance) for text in wrong)


def snippet(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    assert len(found) == 1, f"README has {len(found)} blocks of {language}"
    return str(found[0])


def run(command: list[str], **options: object) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_the_python_of_the_readme(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    check = "assert y.shape == x.shape and (y - x).abs().max() < 0.05, (y - x).abs().max()\n"
    program.write_text(f"{snippet('python')}{check}dist.destroy_process_group()\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "DEEPEP_ENGINE": "cpu", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*launch, str(program)], cwd=tmp_path, env=env)


CPP = """
#include <vector>
#include "deepep.hpp"
#include "ranks.h"
constexpr int tokens = 16, hidden = 128, topk = 2, experts = 4;
static int one_rank(int rank, int ranks, const char *directory) {
  auto where = deepep::group_options();
  where.bootstrap = DEEPEP_BOOTSTRAP_FILE;
  where.directory = directory;
  where.rank = rank;
  where.size = ranks;
  const int local = experts / ranks;
  std::vector<uint16_t> x(tokens * hidden, to_bf16(1.0f)), rows(local * ranks * tokens * hidden);
  std::vector<int64_t> topk_idx(tokens * topk), ranges(local * ranks);
  std::vector<int32_t> counts(local), sources(local * ranks * tokens);
  for (int i = 0; i < tokens * topk; i++) topk_idx[i] = i % experts;
// README
  int total = 0;
  for (int count : counts) total += count;
  return total == tokens * topk && rows[0] == x[0] ? 0 : 1;
}
int main(int argc, char **argv) { return run_ranks(argc, argv, 2, one_rank); }
"""


def test_the_cpp_of_the_readme(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.cpp").write_text(CPP.replace("// README\n", snippet("cpp")))
    library = ROOT / "build" / "lib"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", f"-I{ROOT}/cpp_examples"]
    link = [f"-L{library}", "-ldeepep", f"-Wl,-rpath,{library}"]
    program = str(tmp_path / "program")
    run([os.environ.get("CXX", "g++"), *flags, "-o", program, str(tmp_path / "program.cpp"), *link])
    run([program], env={**os.environ, "DEEPEP_ENGINE": "cpu"})


GO = """package main

import (
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/deepep-go/deepep/core"
)

%s
func main() {
	var all sync.WaitGroup
	for rank, exchanger := range core.NewLocal(2) {
		all.Go(func() {
			in := &core.Tokens{Hidden: 8, NumTopK: 1, NumExperts: 2, X: make([]uint16, 2*8)}
			in.TopKIdx, in.TopKWeights = []int64{0, 1}, []float32{1, 1}
			for i := range in.X {
				in.X[i] = core.ToBF16(float32(rank + 1))
			}
			sums, err := step(context.Background(), exchanger, in)
			if err != nil || len(sums.X) != len(in.X) || sums.X[0] != in.X[0] || sums.X[15] != in.X[15] {
				fmt.Println(rank, err, sums)
				os.Exit(1)
			}
		})
	}
	all.Wait()
}
"""


@pytest.fixture
def in_the_module() -> Iterator[pathlib.Path]:
    """A folder inside the Go module, so that the program is built from these sources."""
    folder = ROOT / "build" / "readme_go"
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    shutil.rmtree(folder)


def test_the_go_of_the_readme(in_the_module: pathlib.Path) -> None:
    (in_the_module / "main.go").write_text(GO % snippet("go"))
    env = {**os.environ, "CGO_ENABLED": "0", "DEEPEP_KERNELS": str(ROOT / "build" / "lib")}
    run([os.environ.get("GO", "go"), "run", "./build/readme_go"], cwd=ROOT, env=env)


def test_prose_is_wrapped_at_140_columns() -> None:
    """Tables, code and links aside."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        fenced = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            fenced ^= line.startswith("```")
            if not (fenced or line.startswith(("|", "    ", "```"))):
                assert len(line) <= 140, f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"


def test_links_of_documents_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            assert "://" in target or (path.parent / target).exists(), f"{path.name}: {target}"


def test_paths_in_documents_are_there() -> None:
    tops = "bench|capi|cmake|core|cpp_examples|docs|include|internal|kernels|nvshmem|python|tools"
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        if path.name in ("renames.md", "gpu-runs.md", "CHANGELOG.md"):  # they name old states
            continue
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
        for named in re.findall(rf"(?<![\w./])((?:{tops})/[\w./*-]*\w)", text):
            assert any(True for _ in ROOT.glob(f"{named}*")), f"{path.name}: {named}"
