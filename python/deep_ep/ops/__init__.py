"""Operators of PyTorch over named buffers, ``torch.ops.deep_ep.*``: importing this module defines them.

They can be traced by torch.compile and torch.export; those of normal mode are differentiable. A buffer is named by
``Buffer.name``. `dispatch` and `combine` here are the same operators with fewer arguments. More: docs/operators.md.
"""

from __future__ import annotations

from . import _low_latency  # noqa: F401 - defines operators
from .elastic import elastic_combine, elastic_dispatch
from .functional import Handle, Overlap, Received, combine, communicate_once, dispatch, overlap

__all__ = [
    "Handle",
    "Overlap",
    "Received",
    "combine",
    "communicate_once",
    "dispatch",
    "elastic_combine",
    "elastic_dispatch",
    "overlap",
]
