"""What the pages for users name is there: settings, commands and their flags, error texts, doctor's lines, figures."""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
PROGRAM = ROOT / "build" / "bin" / "deepep"
PAGES = ["overlap", "tuning", "troubleshooting", "ampere", "versions", "tenants", "selftest"]
SETTING = re.compile(r"\b(?:DEEPEP|DEEP_EP|NVSHMEM|NUM)_[A-Z][A-Z_]*\b")
KINDS = (".go", ".py", ".c", ".h", ".cpp", ".cu", ".cuh")


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text()


@functools.cache
def sources() -> str:
    """All sources but tests; a string that is written in parts is joined, and so are lines that Go wraps."""
    tops = ("bench", "capi", "core", "internal", "kernels", "nvshmem", "python")
    paths = [path for top in tops for path in sorted((ROOT / top).rglob("*")) if path.suffix in KINDS]
    named = [path for path in paths if not re.search(r"test|/examples/", str(path.relative_to(ROOT)))]
    text = "\n".join(path.read_text(errors="replace") for path in named)
    return re.sub(r'" ?\+?\s*\n\s*f?"', "", text)


def spans(text: str) -> list[str]:
    """What is set as code: in backquotes, or indented or fenced lines."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    blocks = [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    return [*re.findall(r"`([^`]+)`", prose), *blocks, *(line for block in fenced for line in block.splitlines())]


def missing_settings(text: str) -> set[str]:
    """Names of environment variables that no source reads or sets."""
    return {name for name in SETTING.findall(text) if not re.search(rf'"{name}["=]', sources())}


@pytest.mark.parametrize("page", PAGES)
def test_settings_are_read(page: str) -> None:
    assert missing_settings(text_of(page)) == set()


def undocumented_settings(page: str) -> set[str]:
    """Variables that the library reads when it runs and that the page of settings does not have."""
    paths = [*(ROOT / "internal" / "env").glob("*.go"), *(ROOT / "python" / "deep_ep").rglob("*.py")]
    text = "\n".join(path.read_text() for path in paths if not path.name.endswith("_test.go"))
    statuses = r'(?!OK"|PENDING"|ERROR_)'
    names = re.findall(rf'"((?:DEEPEP|DEEP_EP|EP|NUM)_{statuses}[A-Z_]+)"', text)
    return {name for name in names if f"`{name}`" not in page}


def test_settings_are_documented() -> None:
    assert undocumented_settings(text_of("environment")) == set()
    assert undocumented_settings("") > {"DEEPEP_ENGINE", "DEEPEP_LIBRARY", "EP_BUFFER_DEBUG"}


def wrong_make(text: str) -> list[str]:
    """Targets and settings of make commands that the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.M))
    wrong = []
    for command in (span.split("#")[0] for span in spans(text) if span.startswith("make ")):
        for word in re.sub(r"\s&&.*|;.*", "", command).split()[1:]:
            name, given, _ = word.partition("=")
            if name not in targets and not (given and re.search(rf"\b{name}\b", makefile)):
                wrong.append(f"{command}: {word}")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_make_commands(page: str) -> None:
    assert wrong_make(text_of(page)) == []


@functools.cache
def help_of(*command: str) -> str:
    done = subprocess.run([PROGRAM, *command, "--help"], capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def wrong_program(text: str) -> list[str]:
    """Commands of the deepep program that it does not have, or with flags that they do not have."""
    wrong = []
    for span in (span.split("#")[0] for span in spans(text)):
        words = span.split()
        if not words or words[0] not in ("deepep", "build/bin/deepep") or len(words) < 2:
            continue
        path = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
        path = path if path[:1] == ["sim"] else path[:1]
        shown = help_of(*path)
        if f"deepep {' '.join(path)}" not in shown:
            wrong.append(span)
        wrong += [
            f"{span}: {flag}" for flag in re.findall(r"--[a-z-]+", span) if f"{flag} " not in shown.replace("\n", " ")
        ]
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_program(page: str) -> None:
    assert wrong_program(text_of(page)) == []


def selftest_options() -> dict[str, set[str]]:
    """The options of each mode."""
    from deep_ep.selftest import program

    top = program.parser()
    modes = next(action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    return {name: {flag for a in mode._actions for flag in a.option_strings} for name, mode in modes.choices.items()}


def wrong_selftest(text: str) -> list[str]:
    """Commands of the self-test with a mode or an option that is not there."""
    options, wrong = selftest_options(), []
    for span in spans(text):
        found = re.match(r"python -m deep_ep\.selftest (\w+)(.*)", span.split("#")[0])
        if found and found[1] != "MODE" and not set(re.findall(r"--[a-z-]+", found[2])) <= options.get(found[1], set()):
            wrong.append(span)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_selftest(page: str) -> None:
    assert wrong_selftest(text_of(page)) == []


def test_the_table_of_selftest_options_is_complete() -> None:
    """Each option of each mode is on the page, and what stands in the column "here" is an option."""
    options = set().union(*selftest_options().values()) - {"-h", "--help", "--device"}
    text = text_of("selftest")
    assert options <= set(re.findall(r"--[a-z-]+", text))
    table = text.split("| V1's option |")[1].split("\n\n")[0]
    here = [line.split("|")[3] for line in table.splitlines()[2:]]
    assert len(here) >= 12 and {flag for cell in here for flag in re.findall(r"--[a-z-]+", cell)} <= options


def stands(shown: str) -> bool:
    """Whether a line of the sources makes an error text; what `…` stands for is made there.

    The form "argument X: got Y, allowed Z" has one home, so X, Y and Z alone are looked for too.
    """
    form = re.fullmatch(r"argument (.+?):? got (.+?), allowed (.+)", shown)
    for wanted in (shown, "…".join(form.groups()) if form else shown):
        parts = [re.escape(part) for part in wanted.split("…") if part.strip(" :(),")]
        if re.search(r"[^\n]*?".join(parts), sources()):
            return True
    return False


def error_texts(text: str) -> list[str]:
    """First cells of the tables that have a column of texts, and of other tables where they hold `…`."""
    texts = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        head, _, *rows = table.splitlines()
        cells = [row.split(" | ")[0] for row in rows]
        wanted = cells if head.startswith("| text |") else [cell for cell in cells if "…" in cell]
        texts += [found for cell in wanted for found in re.findall(r"`([^`]+)`", cell)]
    return texts


# Texts of others.
FOREIGN = {"CUDA out of memory", "dmesg", "ibv_reg_mr"}


def test_error_texts_stand_in_the_sources() -> None:
    texts = [text for text in error_texts(text_of("troubleshooting")) if text not in FOREIGN]
    assert len(texts) >= 30
    assert [text for text in texts if not stands(text)] == []
    assert not stands("… did not arrive in …: it is alive") and not stands(
        "argument topk_idx: got an index …, allowed 7"
    )


def test_lines_of_the_doctor() -> None:
    """`deepep doctor`, line(s) `a`, `b` and `c`: each is a check."""
    checks = set(re.findall(r'^\t\{"([a-z-]+)",', (ROOT / "internal" / "doctor" / "checks.go").read_text(), re.M))
    named = 0
    for page in PAGES:
        for words in re.findall(r"\blines? (`[a-z-]+`(?:(?:,| and) `[a-z-]+`)*)", text_of(page)):
            for name in re.findall(r"`([^`]+)`", words):
                named += 1
                assert name in checks, f"{page}: {name}"
    assert named > 8


NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")


def table_after(page: str, head: str) -> list[str]:
    rows = text_of(page).split(f"{head}\n")[1].split("\n\n")[0].splitlines()
    return rows[1:]


def test_figures_of_sms_are_those_of_performance() -> None:
    """Each row of tuning's table of SMs stands in one line of docs/performance.md."""
    performance = text_of("performance").splitlines()
    rows = table_after("tuning", "| SMs | 10 | 16 | 20 | 24 | limit of the links |")
    assert len(rows) == 4
    for row in rows:
        figures = NUMBER.findall(row.partition("|")[2].partition("|")[2])
        assert len(figures) >= 4 and any(set(figures) <= set(NUMBER.findall(line)) for line in performance), row


def test_figures_of_queue_pairs_are_the_simulators() -> None:
    head = "| queue pairs toward a peer | 1 | 2 | 4 | 8 |"
    command = next(span for span in spans(text_of("tuning")) if span.startswith("deepep sim qp"))
    done = subprocess.run([PROGRAM, *command.split()[1:], "--json"], capture_output=True, text=True, timeout=100)
    results = json.loads(done.stdout)["results"]
    found = {str(result["qps_per_peer"]): f"{result['slowest_us']:.1f}" for result in results}
    counts, figures = (NUMBER.findall(row) for row in (head, table_after("tuning", head)[0]))
    assert dict(zip(counts, figures, strict=True)) == found


def test_a_wrong_name_is_seen() -> None:
    page = (
        "`DEEPEP_TIMEOUT` `make kernel` `make cuda SM91=0` `deepep tops` `deepep top --onces`\n\n"
        "    deepep sim pq --qps 3\n    python -m deep_ep.selftest intranode --disable-nvlink\n"
    )
    assert missing_settings(page) == {"DEEPEP_TIMEOUT"}
    assert wrong_make(page) == ["make kernel: kernel", "make cuda SM91=0: SM91=0"]
    assert len(wrong_program(page)) == 4 and len(wrong_selftest(page)) == 1
    good = "`DEEPEP_TIMEOUT_MS` `make kernels` `make cuda SM90=0` `deepep top --once`\n\n    deepep sim qp --qps 3\n"
    assert not missing_settings(good) and not wrong_make(good) and not wrong_program(good) and not wrong_selftest(good)


def test_sm90_is_a_switch() -> None:
    """What docs/ampere.md says of SM90=0: code for sm_80 alone."""
    shown = {}
    for value in ("0", "1"):
        command = ["make", "-n", "-B", "-o", ".venv/.stamp-cuda", "cuda", f"SM90={value}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        shown[value] = [line for line in done.stdout.splitlines() if "arch=compute_80" in line and " -c " in line]
        assert len(shown[value]) > 5, done.stdout + done.stderr
    assert all("sm_90" not in line and "compute_90" not in line and "-DDEEPEP_SM90=0" in line for line in shown["0"])
    assert all("arch=compute_90,code=sm_90 " in line and "-DDEEPEP_SM90=1" in line for line in shown["1"])


def test_pictures_are_drawn_from_a_run(tmp_path: pathlib.Path) -> None:
    """One round of each way. Short bars have no name, so only the kept pictures are sure to have them."""
    command = [sys.executable, str(ROOT / "bench" / "timelines.py"), "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, words in {
        "low_latency_hooks": ("rows under way", "Send half", "dispatch, or a half"),
        "two_streams": ("communication", "notify", "compute stream"),
    }.items():
        drawn, kept = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, ROOT / "docs" / "pictures"))
        assert all(word in drawn and word in kept for word in words)
        assert "experts A" in kept and drawn.count("<path") > 30


# ---- README and its translation


def readmes() -> tuple[str, str]:
    return (ROOT / "README.md").read_text(), (ROOT / "README.zh.md").read_text()


def facts(readme: str) -> dict[str, list[str]]:
    """What a translation leaves as it is: code but for its comments, numbers, names in backquotes, links."""
    code = re.findall(r"^```.*?^```$", readme, re.M | re.S)
    bare = [re.sub(r"[ \t]*(?://|#(?!include)).*", "", block) for block in code]
    prose = re.sub(r"^```.*?^```$", "", readme, flags=re.M | re.S)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("README")]
    text = re.sub(r"\]\([^)]*\)", "]", prose)
    rows = [row for row in text.splitlines() if row.startswith("|")]
    tables = ["|".join([str(row.count("|")), *sorted(NUMBER.findall(row))]) for row in rows]
    names = sorted(re.findall(r"`([^`]+)`", prose))
    heads = [re.sub(r"[^#].*", "", head) for head in prose.splitlines() if head.startswith("#")]
    return {"code": bare, "links": links, "tables": tables, "names": names, "headings": heads}


def test_the_chinese_readme_says_the_same() -> None:
    english, chinese = map(facts, readmes())
    assert len(english["code"]) >= 4 and len(english["tables"]) > 15
    for kind, found in english.items():
        assert chinese[kind] == found, kind
    first, second = readmes()
    assert "](README.zh.md)" in first and "](README.md)" in second


def test_a_difference_of_translations_is_seen() -> None:
    text = readmes()[0]
    figure = re.search(r"gloo ([\d.]+) ms", text)
    assert figure is not None
    for old, new in (
        (f"{figure[1]} ms", f"{figure[1]}1 ms"),
        ("topk(2)", "topk(3)"),
        ("(docs/tuning.md)", ""),
        ("`deepep top`", "`top`"),
    ):
        assert old in text and facts(text.replace(old, new, 1)) != facts(text)


def test_every_page_is_in_the_list() -> None:
    for readme in readmes():
        for page in sorted((ROOT / "docs").glob("*.md")):
            assert f"](docs/{page.name})" in readme.split("\n## ")[-1], page.name
