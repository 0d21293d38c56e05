"""deep_ep.comm of V2.5, as far as there is something behind it: this library uses no NCCL."""

from __future__ import annotations

from ._absent import absent
from .elastic import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "NCCLCommHandle",
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_nccl_comm_handle",
    "get_physical_domain_size",
]

_NCCL = "NCCL communicators"


class NCCLCommHandle:
    """Raises NotImplementedError: this library has no NCCL communicators."""

    def __init__(self, *_values: object, **_named: object) -> None:
        absent("NCCLCommHandle", _NCCL)()


get_nccl_comm_handle = absent("get_nccl_comm_handle", _NCCL)
barrier = absent("comm.barrier", "barriers without a buffer")
get_comm_stream = absent("comm.get_comm_stream", "communication streams without a buffer")


def destroy_all_managed_nccl_comm() -> None:
    """Does nothing: there is no NCCL communicator to destroy."""
