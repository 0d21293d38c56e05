"""Builds the site of the documents: build.py FOLDER. Same sources, same bytes: nothing in it tells when it was made.

Gathers README, the project's documents and docs/ with the references of Python, C, C++ and Go into a tree of sources,
lets Sphinx make pages of them, any warning an error, and checks the links of the pages.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ROOT / "tools" / "website"
MODULE = "github.com/deepep-go/deepep"
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(ROOT / "python"))
import c_pages  # noqa: E402
import cpp_page  # noqa: E402
import links  # noqa: E402
import pages  # noqa: E402


def toctree(caption: str, names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def gather(source: pathlib.Path) -> None:
    """The documents as they are in the repository: links among them stay, README is the start page."""
    (source / "docs").mkdir(parents=True)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"(\]\((?:\.\./)?)README\.md\b", r"\1index.md", text)
        name = "index.md" if path == ROOT / "README.md" else str(path.relative_to(ROOT))
        if name == "index.md":
            api = ["api/python/index", "api/c/index", "api/cpp", *(f"api/go/{name}" for name in pages.GO)]
            groups = {**pages.GUIDES, "Reference": api, "Project": pages.PROJECT}
            text += "\n" + "\n".join(toctree(caption, names) for caption, names in groups.items())
        (source / name).write_text(text, encoding="utf-8")
    for picture in [*(ROOT / "docs").rglob("*.svg"), *(ROOT / "docs").rglob("*.png")]:
        copy = source / picture.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, copy)


def entry(module: str, name: str) -> str:
    """The directive of Sphinx that documents a name."""
    if name in pages.DATA:
        return f".. py:data:: {name}\n\n   {pages.DATA[name]}\n"
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, type) and issubclass(value, tuple):  # its fields are in the docstring
        fields = ", ".join(getattr(value, "_fields", ()))
        return f".. autoclass:: {module}.{name}\n   :members:\n   :exclude-members: {fields}\n"
    if isinstance(value, type):
        bases = "" if value.__bases__ == (object,) else "   :show-inheritance:\n"
        return f".. autoclass:: {module}.{name}\n   :members:\n{bases}"
    if callable(value):
        return f".. autofunction:: {module}.{name}\n"
    return f".. autodata:: {module}.{name}\n   :no-value:\n"


def python_pages(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for page, (title, purpose, modules) in pages.PYTHON.items():
        lines = [title, "=" * len(title), "", purpose, ""]
        for module, names in modules.items():
            lines += [f".. py:currentmodule:: {module}", "", *(entry(module, name) for name in names)]
        (folder / f"{page}.rst").write_text("\n".join(lines))
    rows = []
    for page, (_, _, modules) in pages.PYTHON.items():
        shown = [f"`{module}.{name}`" for module, names in modules.items() for name in names]
        rows.append(f"   * - :doc:`{page}`\n     - {', '.join(shown)}")
    tree = "\n".join(f"   {page}" for page in pages.PYTHON)
    (folder / "index.rst").write_text(
        "Python: deep_ep\n===============\n\nImporting ``deep_ep`` needs no GPU and loads no library of its own; "
        "``deep_ep.ops`` and ``deep_ep.nn`` are imported when they are asked for.\n\n"
        f".. toctree::\n   :hidden:\n\n{tree}\n\n.. list-table::\n   :widths: 30 70\n\n" + "\n".join(rows) + "\n"
    )


def go_pages(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    go = os.environ.get("GO", "go")
    for name, package in pages.GO.items():
        command = [go, "run", "./tools/godoc", package, f"{MODULE}/{package.removeprefix('./')}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (folder / f"{name}.md").write_text(done.stdout)


def build(site: pathlib.Path) -> int:
    """Makes the site; returns the number of wrong links."""
    work = site.with_name(site.name + "-sources")
    for folder in (site, work):
        shutil.rmtree(folder, ignore_errors=True)
    source = work / "source"
    gather(source)
    python_pages(source / "api" / "python")
    c_pages.Pages(ROOT / "include" / "deepep.h").write(source / "api" / "c")
    (source / "api" / "cpp.rst").write_text(cpp_page.page(ROOT / "include" / "deepep.hpp"))
    go_pages(source / "api" / "go")
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning", "--quiet"]
    command += ["--conf-dir", str(HERE), "--doctree-dir", str(work / "doctrees"), str(source), str(site)]
    fixed = {"SOURCE_DATE_EPOCH": "0", "PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **fixed}).returncode
    if status != 0:
        sys.exit(status)
    (site / ".buildinfo").unlink(missing_ok=True)
    shutil.rmtree(site / "_sources", ignore_errors=True)
    shutil.rmtree(work)
    return links.check(site)


if __name__ == "__main__":
    sys.exit(1 if build(pathlib.Path(sys.argv[1]).resolve()) else 0)
