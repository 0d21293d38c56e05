"""`python -m deep_ep.selftest internode` with nodes as python/tests/hosts.py makes them: arguments as there."""

from __future__ import annotations

import sys
from typing import Any

import torch

import hosts
from deep_ep.bootstrap import Bootstrap
from deep_ep.selftest import program
from deep_ep.selftest.worker import serve


def serve_on_node(rank: int, options: Any, directory: str, connection: Any) -> None:
    """The body of a rank process."""
    hosts.leave_host()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    hosts.wait_before_copies()
    meeting = Bootstrap.file(rank, options.num_ranks, directory, "kept")
    hosts.keep_nvshmem(rank, options.num_ranks, options.num_nvl_peers, group=None, bootstrap=meeting)
    serve(rank, options, directory, connection)


if __name__ == "__main__":
    import selftest_nodes  # by its name, so that rank processes find the function

    program.serve = selftest_nodes.serve_on_node
    sys.exit(program.main())
