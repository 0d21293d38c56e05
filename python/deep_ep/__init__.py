"""Expert-parallel dispatch and combine. Importing needs no GPU and loads no shared library of this package."""

try:
    from ._torch import topk_idx_t
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise ImportError("deep_ep needs PyTorch 2.4 or newer: pip install torch", name="torch") from None

from ._lib import header_version
from ._plan import Plan, plan
from .bootstrap import Bootstrap
from .buffer import Buffer
from .config import Config
from .errors import DeepEPError
from .utils import EventHandle, EventOverlap

__version__ = header_version()

__all__ = [
    "Bootstrap",
    "Buffer",
    "Config",
    "DeepEPError",
    "EventHandle",
    "EventOverlap",
    "Plan",
    "__version__",
    "plan",
    "topk_idx_t",
]
