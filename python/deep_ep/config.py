"""Config: how many SMs and how large chunks a normal-mode call uses, and how large a buffer that needs."""

from __future__ import annotations

import ctypes

from . import _abi
from ._lib import library
from .errors import check_int


class Config:
    """Tuning of one normal-mode call.

    Args:
        num_sms: SMs to use; even, 0 lets the library choose.
        num_max_nvl_chunked_send_tokens: tokens of one chunk within a node; > 0.
        num_max_nvl_chunked_recv_tokens: tokens of a receive queue within a node; more than the send chunk.
        num_max_rdma_chunked_send_tokens: the same between nodes.
        num_max_rdma_chunked_recv_tokens: the same between nodes; rounded up to a multiple of the send
            chunk, at least twice it.

    Raises:
        DeepEPError (also a ValueError): a value is not allowed; the text names it.
    """

    __slots__ = ("_native", "numbers")
    numbers: tuple[int, ...]  # of the constructor, in its order, as the library has understood them

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        values = {
            "num_sms": num_sms,
            "num_max_nvl_chunked_send_tokens": num_max_nvl_chunked_send_tokens,
            "num_max_nvl_chunked_recv_tokens": num_max_nvl_chunked_recv_tokens,
            "num_max_rdma_chunked_send_tokens": num_max_rdma_chunked_send_tokens,
            "num_max_rdma_chunked_recv_tokens": num_max_rdma_chunked_recv_tokens,
        }
        self._native = _abi.Config(*(check_int(name, value) for name, value in values.items()))
        lib = library()
        lib.check(lib.with_gil.deepep_config_check(ctypes.byref(self._native)))
        self._read()

    def _read(self) -> None:
        """Keeps the numbers in Python too: code that torch.compile traces cannot read those of C."""
        self.numbers = tuple(int(getattr(self._native, field[0])) for field in _abi.Config._fields_)

    @classmethod
    def default(cls, kind: int, num_ranks: int) -> Config:
        """The library's choice for `num_ranks` >= 1; kind 0 is dispatch, 1 combine."""
        config = cls()
        num_ranks = check_int("num_ranks", num_ranks)
        lib = library()
        lib.check(lib.with_gil.deepep_config_default(kind, num_ranks, ctypes.byref(config._native)))
        config._read()
        return config

    @property
    def num_sms(self) -> int:
        """SMs to use; 0: the library's choice."""
        return int(self._native.num_sms)

    @property
    def num_max_nvl_chunked_send_tokens(self) -> int:
        """Tokens of one chunk within a node."""
        return int(self._native.nvl_send_chunk)

    @property
    def num_max_nvl_chunked_recv_tokens(self) -> int:
        """Tokens of a receive queue within a node."""
        return int(self._native.nvl_recv_chunk)

    @property
    def num_max_rdma_chunked_send_tokens(self) -> int:
        """Tokens of one chunk between nodes."""
        return int(self._native.rdma_send_chunk)

    @property
    def num_max_rdma_chunked_recv_tokens(self) -> int:
        """Tokens of a receive queue between nodes."""
        return int(self._native.rdma_recv_chunk)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of `num_nvl_bytes` that serve calls with this config.

        Args:
            hidden_bytes: bytes of one token's row.
            num_ranks: ranks of the group, >= 1.
        """
        return self._size_hint(hidden_bytes, num_ranks, 0)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of `num_rdma_bytes` that serve calls with this config; 0 where the ranks are one node."""
        return self._size_hint(hidden_bytes, num_ranks, 1)

    def _size_hint(self, hidden_bytes: int, num_ranks: int, rdma: int) -> int:
        row_bytes, ranks = check_int("hidden_bytes", hidden_bytes, maximum=2**63 - 1), check_int("num_ranks", num_ranks)
        lib, out = library(), ctypes.c_uint64()
        config = ctypes.byref(self._native)
        lib.check(lib.with_gil.deepep_config_size_hint(config, row_bytes, ranks, rdma, ctypes.byref(out)))
        return int(out.value)

    def __repr__(self) -> str:
        return f"Config({', '.join(map(str, self.numbers))})"


def low_latency_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of `num_rdma_bytes` for low-latency calls of this shape."""
    sizes = (
        check_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank),
        check_int("hidden", hidden),
        check_int("num_ranks", num_ranks),
        check_int("num_experts", num_experts),
    )
    lib, out = library(), ctypes.c_uint64()
    lib.check(lib.with_gil.deepep_low_latency_size_hint(*sizes, ctypes.byref(out)))
    return int(out.value)
