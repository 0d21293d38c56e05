"""Expert-parallel dispatch and combine. Importing needs no GPU and loads no shared library of this package."""

try:
    from ._torch import topk_idx_t
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise ImportError("deep_ep needs PyTorch 2.4 or newer: pip install torch", name="torch") from None

from typing import TYPE_CHECKING, Any

from . import _distribution, comm
from ._absent import BucketBuffer, BucketSession, BufferBase, EngramBuffer, PPBuffer
from ._lib import header_version
from ._plan import Plan, plan
from .bootstrap import Bootstrap
from .buffer import Buffer
from .comm import destroy_all_managed_nccl_comm
from .config import Config
from .elastic import (
    ElasticBuffer,
    EPHandle,
    get_logical_domain_size,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
    get_physical_domain_size,
)
from .epbuffer import BufferAllocator, EPBuffer
from .errors import DeepEPError
from .utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from . import nn as nn
    from . import ops as ops

__version__ = header_version()
_distribution.register("deep_ep", __version__)
_distribution.warn_of_others(__version__)

__all__ = [
    "Bootstrap",
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
    "DeepEPError",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "PPBuffer",
    "Plan",
    "__version__",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "plan",
    "topk_idx_t",
]


def __getattr__(name: str) -> Any:
    """deep_ep.ops and deep_ep.nn are imported when they are asked for."""
    if name in ("nn", "ops"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
