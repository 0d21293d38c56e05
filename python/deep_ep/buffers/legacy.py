"""The place where some frameworks look for Buffer first."""

from ..buffer import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
