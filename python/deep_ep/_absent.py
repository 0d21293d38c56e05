"""Names of V2 that this library does not have: each says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import errors


def absent(name: str, what: str) -> Callable[..., Any]:
    """A name of V2 that this library does not have."""

    def call(*_values: Any, **_named: Any) -> Any:
        raise errors.DeepEPNotImplementedError(errors.UNSUPPORTED, f"{name}: {what} of V2 are not supported")

    call.__name__ = name
    call.__doc__ = f"Raises NotImplementedError: {what} of V2 are not supported."
    return call


AGRS, PP, ENGRAM, BUCKETS = "all-gather sessions", "pipeline sends", "Engram tables", "bucket collectives"


class BufferBase:
    """What the buffers of V2 have in common: a name to test for."""


class EngramBuffer(BufferBase):
    """Raises NotImplementedError: Engram tables of V2.5 are not supported."""

    def __init__(self, *_values: Any, **_named: Any) -> None:
        absent("EngramBuffer", ENGRAM)()


class PPBuffer(BufferBase):
    """Raises NotImplementedError: pipeline sends of V2.5 are not supported."""

    def __init__(self, *_values: Any, **_named: Any) -> None:
        absent("PPBuffer", PP)()


class BucketBuffer(BufferBase):
    """Raises NotImplementedError: bucket collectives of V2.5 are not supported."""

    def __init__(self, *_values: Any, **_named: Any) -> None:
        absent("BucketBuffer", BUCKETS)()


class BucketSession:
    """Raises NotImplementedError: bucket collectives of V2.5 are not supported."""

    def __init__(self, *_values: Any, **_named: Any) -> None:
        absent("BucketSession", BUCKETS)()
