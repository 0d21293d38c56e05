"""Names of buffers: how operators, whose arguments are data, say which buffer they mean. No torch here."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from .buffer import Buffer
    from .elastic import ElasticBuffer

UNNAMED = "deep_ep"  # of buffers whose group has no name
_buffers: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()
_elastic: weakref.WeakValueDictionary[str, ElasticBuffer] = weakref.WeakValueDictionary()  # V2's have both
_lock = threading.Lock()


def register(buffer: Buffer, group: Any) -> str:
    """Gives a buffer its group's name, with a number behind it while another buffer of the group has that name."""
    try:
        base = str(group.group_name) or UNNAMED
    except (AttributeError, RuntimeError):  # a group that torch.distributed does not know, or none
        base = UNNAMED
    with _lock:
        name, number = base, 1
        while _is_used(name):
            name, number = f"{base}:{number}", number + 1
        _buffers[name] = buffer
    return name


def find(name: str) -> Buffer:
    """The buffer of a name.

    Raises:
        DeepEPError (also a ValueError): there is none; the text lists the names that there are.
    """
    buffer = _buffers.get(name)
    if buffer is None:
        known = ", ".join(repr(known) for known in sorted(_buffers.keys())) or "none: there is no buffer"
        raise errors.value_error("buffer", repr(name), f"the name of a buffer of this process ({known})")
    return buffer


def adopt(name: str, buffer: ElasticBuffer) -> None:
    """A buffer of V2 has the name of the Buffer in it."""
    _elastic[name] = buffer


def find_elastic(name: str) -> ElasticBuffer:
    """The ElasticBuffer of a name.

    Raises:
        DeepEPError (also a ValueError): there is none; the text lists the names that there are.
    """
    buffer = _elastic.get(name)
    if buffer is None or buffer._base is not _buffers.get(name):
        known = ", ".join(repr(known) for known in sorted(_elastic.keys())) or "none: there is no ElasticBuffer"
        raise errors.value_error("buffer", repr(name), f"the name of an ElasticBuffer of this process ({known})")
    return buffer


def _is_used(name: str) -> bool:
    """Whether a buffer that can still be used has the name."""
    buffer = _buffers.get(name)
    return buffer is not None and buffer._core.native.alive
