"""GPUs of one machine as nodes: what a rank process does before NVSHMEM starts in it, and between tests.

With ``DEEPEP_TEST_PLUGIN`` (the path of NVSHMEM's test transport) the nodes are hosts that only that transport joins:
NVSHMEM distinguishes hosts by their names, and each process takes a name of its node in a UTS namespace of its own.
Without it nodes are a setting, and NVSHMEM moves everything by NVLink.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch

PLUGIN = "DEEPEP_TEST_PLUGIN"
CLONE_NEWUTS = 0x04000000

_kept: tuple[tuple[int, int], Any] | None = None  # (ranks, ranks of a node), a buffer


def leave_host() -> None:
    """This process may have a host name of its own; to be called before it has threads. Without a plugin: nothing."""
    plugin = os.environ.get(PLUGIN)
    if not plugin:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) != 0:
        number = ctypes.get_errno()
        raise OSError(
            number, f"unshare(CLONE_NEWUTS): {os.strerror(number)}: a host name of its own needs CAP_SYS_ADMIN"
        )
    ctypes.CDLL(plugin, mode=ctypes.RTLD_GLOBAL)  # NVSHMEM finds it by its soname
    os.environ["NVSHMEM_REMOTE_TRANSPORT"] = "ibdevx"


def enter_node(node: int) -> None:
    """This process is on the node's host, for the next start of NVSHMEM. Without a plugin: nothing."""
    if not os.environ.get(PLUGIN):
        return
    name = f"deepep-node{node}".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sethostname(name, len(name)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"sethostname: {os.strerror(number)}")


def wait_before_copies() -> None:
    """From now on copies between a GPU and pageable memory wait for their stream first.

    One that waits by itself, for a kernel that waits for other ranks, keeps this process's other threads from CUDA
    meanwhile. Where those have what the other ranks wait for, no rank gets any further.
    """

    def waiting(copy: Any) -> Any:
        @functools.wraps(copy)
        def wait_and_copy(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(tensor.device).synchronize()
            return copy(tensor, *args, **options)

        return wait_and_copy

    for name in ("cpu", "item", "tolist", "copy_"):
        setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name)))


def keep_nvshmem(rank: int, size: int, peers: int, **meeting: Any) -> None:
    """NVSHMEM runs for nodes of ``peers`` ranks until another size is asked for: a start and an end take seconds.

    Buffers of a process share it, so a small one that stays keeps it running. ``meeting``: how Buffer's ranks meet.
    """
    global _kept
    from deep_ep import Buffer

    if size <= peers or (_kept is not None and _kept[0] == (size, peers)):
        return
    if _kept is not None:
        _kept[1].destroy()
        _kept = None
    enter_node(rank // peers)
    sizes = {"num_nvl_bytes": 1 << 20, "num_rdma_bytes": 1 << 20, "num_nvl_peers": peers}
    _kept = (size, peers), Buffer(**meeting, **sizes, engine="cuda", explicitly_destroy=True)
