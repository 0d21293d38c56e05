"""Expert-parallel dispatch and combine. Importing needs no GPU and loads no shared library of this package."""

from ._lib import header_version
from ._torch import topk_idx_t
from .bootstrap import Bootstrap
from .buffer import Buffer
from .config import Config
from .errors import DeepEPError
from .utils import EventHandle, EventOverlap

__version__ = header_version()

__all__ = ["Bootstrap", "Buffer", "Config", "DeepEPError", "EventHandle", "EventOverlap", "__version__", "topk_idx_t"]
