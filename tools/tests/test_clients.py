"""`make clients` fetches files of clients and so runs by hand: here what it needs of this tree is looked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tools" / "clients"


def test_modules_of_clients_find_what_they_import():
    """Each name that a file imports from this tree, when it is loaded, is there."""
    places = [str(CLIENTS), str(ROOT / "python" / "tests"), str(ROOT / "python")]
    imports = 0
    for path in sorted(CLIENTS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in (name.split(".")[0] for name in names):
                if name in sys.stdlib_module_names or name == "torch":
                    continue
                spec = PathFinder.find_spec(name, places)
                assert spec is not None and spec.origin, f"{path.name} imports {name}, which is not there"
                if isinstance(node, ast.ImportFrom):
                    text = Path(spec.origin).read_text()
                    missing = [alias.name for alias in node.names if alias.name not in text]
                    assert not missing, f"{path.name}: {name} has no {', '.join(missing)}"
                imports += 1
    assert imports > 20


def test_every_pin_has_its_cases():
    program = "import run; print(*run.pins())"
    pins = subprocess.run([sys.executable, "-c", program], cwd=CLIENTS, check=True, capture_output=True, text=True)
    modules = {path.stem.removeprefix("real_") for path in CLIENTS.glob("real_*.py")}
    assert {name.replace("-", "_") for name in pins.stdout.split()} == modules
