"""Events, where V1 and V2 of the API have them."""

from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
