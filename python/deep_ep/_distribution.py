"""Answers importlib.metadata for the name that clients ask for: the distribution itself is called deepep-go."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
