"""Names of the extension module that V1 had, for code that imports it."""

from deep_ep._torch import topk_idx_t
from deep_ep.buffer import is_sm90_compiled
from deep_ep.config import Config
from deep_ep.config import low_latency_size_hint as get_low_latency_rdma_size_hint
from deep_ep.utils import EventHandle

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
