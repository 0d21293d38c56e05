"""Which distribution deep_ep is: answers importlib.metadata, and warns of another one that brings the package too."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

OURS = "deepep-go"
# Folders of metadata of distributions that may bring deep_ep, by their names: deep_ep, sgl-deep-ep, deepinfer-ep ...
# Their files are asked then. To ask those of every distribution takes 200 ms from a cold disk.
_CANDIDATE = re.compile(
    r"^(?P<name>.*deep[a-z]*[-_.]?ep(?![a-z]).*?)(?:-(?P<version>\d[^-]*))?(?:-py[\d.]+)?\.(?:dist|egg)-info$", re.I
)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Alias(importlib.metadata.Distribution):
    """A distribution that consists of its name and version."""

    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return Path(__file__).resolve().parent.parent / path


class _Finder(importlib.metadata.DistributionFinder):
    """Finds the alias where it is asked for by name; the list of all distributions does not have it."""

    def __init__(self, name: str, version: str) -> None:
        self._name, self._alias = _normal(name), _Alias(name, version)

    def find_spec(self, *_values: Any) -> None:
        """No module."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """The alias, if it is the one in question."""
        if context is not None and context.name is not None and _normal(context.name) == self._name:
            yield self._alias


def register(name: str, version: str) -> None:
    """importlib.metadata.version(name) is `version` from now on, unless a distribution of this name is installed."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(name, version))


def others(package: Path, path: Sequence[str]) -> list[str]:
    """Who else provides deep_ep on a search path: "name version in folder", in the order of the path.

    Args:
        package: the folder of this package.
        path: as sys.path.
    """
    found: dict[str, str] = {}
    for entry in dict.fromkeys(os.path.realpath(each or ".") for each in path):
        folder = os.path.join(entry, "deep_ep")
        try:
            names = os.listdir(entry)
        except OSError:
            continue
        owners = [f"{match['name']} {match['version'] or ''}".strip() for match in _owners(entry, names)]
        if owners:
            found[folder] = ", ".join(owners)
        elif "deep_ep" in names and not os.path.samefile(folder, package) and _is_foreign(folder):
            found[folder] = "a copy of no known distribution"
    return [f"{owner} in {folder}" for folder, owner in found.items()]


def _owners(entry: str, names: list[str]) -> Iterator[re.Match[str]]:
    """The distributions of a folder, but ours, whose files are those of deep_ep."""
    for name in names:
        match = _CANDIDATE.match(name) if name.endswith("-info") else None
        if match and _normal(match["name"]) != OURS and _provides(os.path.join(entry, name)):
            yield match


def _provides(metadata: str) -> bool:
    for file, line in (("RECORD", r"^deep_ep/__init__\.py,"), ("top_level.txt", r"^deep_ep\s*$")):
        try:
            text = Path(metadata, file).read_text(errors="replace")
        except OSError:
            continue
        if re.search(line, text, re.M):
            return True
    return False


def _is_foreign(folder: str) -> bool:
    """A package that Python would import, and that is no other copy of this one."""
    module, ours = os.path.join(folder, "__init__.py"), os.path.join(folder, os.path.basename(__file__))
    return os.path.exists(module) and not os.path.exists(ours)


def warn_of_others(version: str) -> None:
    """Warns, at the import, if another distribution brings a package of this name: which one is imported is chance."""
    package = Path(__file__).resolve().parent
    rivals = others(package, sys.path)
    if rivals:
        warnings.warn(
            f"this deep_ep is {OURS} {version} in {package}; the package is also provided by {'; '.join(rivals)}. "
            "Uninstall one of them: which one is imported depends on the order of installation and of sys.path",
            stacklevel=3,
        )
