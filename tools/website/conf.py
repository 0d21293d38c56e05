"""Settings of Sphinx for the site. build.py makes the sources that it reads."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from docutils import nodes

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
import build_native  # noqa: E402

project = "deepep-go"
author = "DeepEP-Go authors"
project_copyright = author
version = release = build_native.version()
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
language = "en"

# Markdown as a code host shows it: anchors of headings, no substitutions of quotes.
myst_heading_anchors = 6
myst_enable_extensions: list[str] = []
smartquotes = False

# Docstrings: `name` is a reference where there is such a name, and code elsewhere.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"deepep-go {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _colons(_app: Any, doctree: nodes.document, _page: str) -> None:
    """Between a parameter and what it means Sphinx puts two hyphens: a colon is what the docstring has."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(": "))


def _letters(_app: Any, _what: str, _name: str, _of: Any, _options: Any, lines: list[str]) -> None:
    """An argument that is "K." would begin a list that counts in letters."""
    lines[:] = [re.sub(r"^(\s*[\w, ]+: )([A-Z]\.)$", r"\1\\\2", line) for line in lines]


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _letters, priority=400)  # before napoleon
    app.connect("doctree-resolved", _colons)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
