"""Layers: a mixture of experts whose experts are spread over the ranks of a group."""

from __future__ import annotations

from .experts import GroupedExperts, apply_to_groups
from .layer import ExpertParallel, expert_parameters, ignore_in_ddp, take_turns
from .routing import Routing, balance_loss, limit_to_capacity, route

__all__ = [
    "ExpertParallel",
    "GroupedExperts",
    "Routing",
    "apply_to_groups",
    "balance_loss",
    "expert_parameters",
    "ignore_in_ddp",
    "limit_to_capacity",
    "route",
    "take_turns",
]
