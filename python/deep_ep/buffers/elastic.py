"""The place where some frameworks look for ElasticBuffer first."""

from ..elastic import ElasticBuffer, EPHandle
from ..epbuffer import EPBuffer
from ..utils import EventHandle, EventOverlap

__all__ = ["EPBuffer", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
