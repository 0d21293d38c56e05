"""The site of the documents: nothing is left out of it, and the check of its links sees wrong ones."""

from __future__ import annotations

import ast
import hashlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "deep_ep"
sys.path.insert(0, str(ROOT / "tools" / "website"))
import c_pages  # noqa: E402
import links  # noqa: E402
import pages  # noqa: E402

FULL = os.environ.get("DEEPEP_TEST_FULL") == "1"
EXPORTING = {
    "deep_ep": "__init__.py",
    "deep_ep.comm": "comm.py",
    "deep_ep.ops": "ops/__init__.py",
    "deep_ep.nn": "nn/__init__.py",
    "deep_ep.integrations.transformers": "integrations/transformers.py",
}


def markdown() -> list[pathlib.Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_the_navigation_has_every_document_once() -> None:
    there = sorted(str(path.relative_to(ROOT))[:-3] for path in markdown() if path != ROOT / "README.md")
    assert sorted(pages.documents()) == there


def exports(file: str) -> set[str]:
    tree = ast.parse((PACKAGE / file).read_text())
    values = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return set(ast.literal_eval(values[0]))


def test_the_python_reference_has_every_exported_name() -> None:
    shown = {
        (module, name) for _, _, modules in pages.PYTHON.values() for module in modules for name in modules[module]
    }
    anywhere = {name for _, name in shown}
    for module, file in EXPORTING.items():
        # A module that is exported has a section of its own; a name may be shown where it comes from.
        missing = {name for name in exports(file) - anywhere if f"{module}.{name}" not in EXPORTING}
        assert not missing, f"{module}: {sorted(missing)} in no page of tools/website/pages.py"
    for module, name in shown:
        assert module not in EXPORTING or name in exports(EXPORTING[module]), f"{module} does not export {name}"


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions, classes and methods without a docstring: the reference would leave them out in silence."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    inner = [n for c in nodes if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.FunctionDef)]
    public = [
        n for n in inner if not n.name.startswith("_") and not any("setter" in ast.unparse(d) for d in n.decorator_list)
    ]
    return [node.name for node in [*nodes, *public] if not ast.get_docstring(node)]


@pytest.mark.parametrize("file", ["buffer", "config", "bootstrap", "elastic", "epbuffer", "errors", "utils/event"])
def test_what_is_public_has_a_docstring(file: str) -> None:
    names = set(undocumented(ast.parse((PACKAGE / f"{file}.py").read_text())))
    assert names - {"milliseconds"} == set()


def test_a_missing_docstring_is_seen() -> None:
    tree = ast.parse('class A:\n  """A."""\n  def f(self): pass\n  def _g(self): pass\ndef h(): pass\n')
    assert undocumented(tree) == ["h", "f"]


def test_the_c_reference_has_every_declaration(tmp_path: pathlib.Path) -> None:
    header = c_pages.Pages(ROOT / "include" / "deepep.h")
    names = set(header.write(tmp_path / "c"))
    exported = set(re.findall(r"\bdeepep_\w+", (ROOT / "capi" / "deepep.map").read_text()))
    assert exported and exported <= names
    text = "".join(path.read_text() for path in (tmp_path / "c").glob("*.rst"))
    structs = re.findall(r"^typedef struct (\w+) \{", header.text, re.M)
    assert all(f".. c:struct:: {name}\n" in text for name in structs) and len(structs) > 15
    assert all(f"{name}" in text for name in re.findall(r"\b(DEEPEP_\w+) = \d", header.text))


def slugs(text: str) -> set[str]:
    """The anchors that a code host and the site make of a page's headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def wrong_anchors(texts: dict[pathlib.Path, str]) -> list[str]:
    found = []
    for path, text in texts.items():
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", text):
            page = (path.parent / target).resolve() if target else path
            if page in texts and anchor not in slugs(texts[page]):
                found.append(f"{path.name}: {target}#{anchor}")
    return found


def test_anchors_of_documents_are_there() -> None:
    assert wrong_anchors({path: path.read_text() for path in markdown()}) == []


def test_a_wrong_anchor_is_seen() -> None:
    one, two = pathlib.Path("/d/one.md"), pathlib.Path("/d/two.md")
    texts = {one: "# A `b`, c\n[x](two.md#none) [y](#a-b-c)", two: "# T\n[z](one.md#a-b-c) [w](one.md#t)"}
    assert wrong_anchors(texts) == ["one.md: two.md#none", "two.md: one.md#t"]


def test_wrong_links_of_a_site_are_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "b.html").write_text('<p id="there"><a name="old">')
    good = '<a href="b.html#there"><a href="b.html#old"><a href="#top"><p id="top"><a href="https://example.org/x">'
    (tmp_path / "a.html").write_text(good)
    assert links.Site(tmp_path).problems() == []
    assert links.Site(tmp_path).outside() == ["https://example.org/x"]
    bad = '<a href="c.html"><a href="b.html#no"><script src="https://example.org/x.js"></script><img src="../a.png">'
    (tmp_path / "a.html").write_text(bad)
    ends = [problem.rsplit(": ", 1)[1] for problem in links.Site(tmp_path).problems()]
    assert ends == ["no such file", "no such anchor", "loaded from elsewhere", "no such file"]


def sums(folder: pathlib.Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.skipif(not FULL, reason="make test-full: the site is built twice, which takes a minute or two")
@pytest.mark.timeout(1800)
def test_the_site_is_built_and_the_same_each_time(tmp_path: pathlib.Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    built = []
    for name in ("one", "two"):
        command = ["make", "--no-print-directory", "docs", f"SITE={tmp_path / name / 'site'}"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        built.append(sums(tmp_path / name / "site"))
    assert "index.html" in built[0] and len(built[0]) > 60
    assert built[0] == built[1]
