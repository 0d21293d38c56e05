"""Operators of PyTorch over named buffers: ``torch.ops.deep_ep.*``, made by importing this module."""

from __future__ import annotations

from ._normal import combine, dispatch, dispatch_cached, dispatch_worst_case, handle_tensors, layout

__all__ = [
    "combine",
    "dispatch",
    "dispatch_cached",
    "dispatch_worst_case",
    "handle_tensors",
    "layout",
]
