"""Has Python import a client's own files, unchanged, without the packages around them that they do not need here."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "build" / "clients"


def folder(name: str) -> Path:
    """Where the files of a client of requirements.txt are."""
    return FILES / name


def use(name: str) -> None:
    """Makes a client's packages importable."""
    path = str(folder(name))
    if path not in sys.path:
        sys.path.insert(0, path)


class StandIn(types.ModuleType):
    """A module with every name: each is a class that does nothing, since clients inherit from some."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (mock.MagicMock,), {}) if name[:1].isupper() else mock.MagicMock(name=name)
        setattr(self, name, value)
        return value


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a StandIn for every module below `package` but those that are to be real, whose parents run no code."""

    def __init__(self, package: str, base: Path, real: set[str], whole: tuple[str, ...] = ()) -> None:
        self.package, self.base, self.real, self.whole = package, base, real, whole

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.package and not name.startswith(self.package + "."):
            return None
        if name in self.real or name.startswith(self.whole or ("\0",)):
            return None  # as it is
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module: types.ModuleType
        if any(each.startswith(spec.name + ".") for each in self.real):
            module = types.ModuleType(spec.name)
            module.__path__ = [str(self.base.joinpath(*spec.name.split(".")))]  # type: ignore[attr-defined]
        else:
            module = StandIn(spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(package: str, client: str, *real: str, whole: tuple[str, ...] = ()) -> None:
    """Imports of `package` take the modules `real` from the client's files, and a StandIn for every other."""
    use(client)
    sys.meta_path.insert(0, StandIns(package, folder(client), set(real), whole))


def load(name: str, path: Path) -> types.ModuleType:
    """One file as a module, without its package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
