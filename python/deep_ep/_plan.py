"""plan: what a buffer would be, without a GPU and without peers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

from . import _abi, _elastic_sizes
from ._lib import library
from .buffer import MAX_BYTES, Buffer, milliseconds
from .errors import check_flag, check_int, value_error


@dataclass(frozen=True)
class Plan:
    """What a rank's buffer would be, and what its calls take. Sizes are bytes of one rank.

    Attributes:
        engine: "cpu" or "cuda".
        library: file of the kernel library; "": none can be loaded, and `control_bytes` and `wire_bytes` are 0.
        reason: why none can be loaded.
        num_rdma_ranks: nodes (NVLink domains).
        num_nvl_peers: ranks of a node.
        rdma_rank: node of this rank.
        nvl_rank: its place in the node.
        num_local_experts: experts of a rank.
        nvl_hint: num_nvl_bytes for the normal-mode calls; 0 without them.
        rdma_hint: num_rdma_bytes for the normal-mode calls; 0 on one node.
        low_latency_hint: num_rdma_bytes for the low-latency calls; 0 without them.
        num_nvl_bytes: of the buffer.
        num_rdma_bytes: of the buffer.
        control_bytes: flags and counts that the kernel library adds.
        wire_bytes: staging that it adds.
        total_bytes: the buffer's memory; a device rounds it up to its unit (2 MiB).
        row_segment_bytes: memory for received rows of normal mode, beside the buffer (CUDA).
        elastic_bytes: num_bytes of an ElasticBuffer for its calls; 0 without them. Calls add no memory. With a row
            segment, num_nvl_bytes and row_segment_bytes are 12 MiB more, as V2.1 has a workspace of 15 MiB beside
            num_bytes.
        elastic_sms: its get_theoretical_num_sms; 0 for a Buffer.
        elastic_qps: get_theoretical_num_qps of so many SMs; 0 for a Buffer.
        output_bytes_fp8: rows and scales that one low-latency dispatch returns.
        output_bytes_bf16: the same without the cast.
        dispatch_sms_fp8: SMs of a normal-mode dispatch of FP8 rows without a config.
        dispatch_sms_bf16: the same of BF16 rows.
        combine_sms: SMs of a normal-mode combine without a config.
        num_channels: pairs of SMs for which the hints have room.
        num_qp_peers: ranks that this one reaches through queue pairs.
        num_qps_per_peer: queue pairs toward each of them.
        num_qps_used: how many of those the calls have use for.
        qp_depth: operations in flight on one of them.
        qp_depth_for_tokens: depth with which no low-latency call waits for room; 0: none is so deep, or none is needed.
        num_nics: of a rank.
        num_qps_per_nic: queue pairs toward a peer on each of them (NVSHMEM_IBGDA_NUM_RC_PER_PE).
        num_qps: of a rank in all; NVSHMEM makes them toward all other ranks.
        qp_order: the peers with queue pairs in the order in which those are made.
        timeout_ms: longest wait for a peer.
        first_timeout_ms: the same in the first call of an operation.
    """

    engine: str
    library: str
    reason: str
    num_rdma_ranks: int
    num_nvl_peers: int
    rdma_rank: int
    nvl_rank: int
    num_local_experts: int
    nvl_hint: int
    rdma_hint: int
    low_latency_hint: int
    num_nvl_bytes: int
    num_rdma_bytes: int
    control_bytes: int
    wire_bytes: int
    total_bytes: int
    row_segment_bytes: int
    output_bytes_fp8: int
    output_bytes_bf16: int
    dispatch_sms_fp8: int
    dispatch_sms_bf16: int
    combine_sms: int
    num_channels: int
    num_qp_peers: int
    num_qps_per_peer: int
    num_qps_used: int
    qp_depth: int
    qp_depth_for_tokens: int
    num_nics: int
    num_qps_per_nic: int
    num_qps: int
    qp_order: tuple[int, ...]
    timeout_ms: int
    first_timeout_ms: int
    elastic_bytes: int = 0
    elastic_sms: int = 0
    elastic_qps: int = 0

    @property
    def rdma_team(self) -> list[int]:
        """The RDMA sub-team: the rank of this one's index on each node, itself among them; see Buffer.rdma_team."""
        return [self.nvl_rank + node * self.num_nvl_peers for node in range(self.num_rdma_ranks)]


def plan(
    num_ranks: int,
    *,
    num_tokens: int = 0,
    num_max_dispatch_tokens_per_rank: int = 0,
    num_max_tokens_per_rank: int = 0,
    hidden: int = 0,
    num_topk: int = 0,
    num_experts: int = 0,
    num_sms: int | None = None,
    rank: int = 0,
    num_nvl_bytes: int = 0,
    num_rdma_bytes: int = 0,
    low_latency_mode: bool = False,
    num_qps_per_rank: int = 24,
    allow_nvlink_for_low_latency_mode: bool = True,
    enable_shrink: bool = False,
    engine: str | None = None,
    timeout: float | None = None,
    num_nvl_peers: int | None = None,
    num_nics: int | None = None,
    num_local_ranks: int | None = None,
    compute_capability: int | None = None,
    use_fp8_dispatch: bool = False,
    allow_multiple_reduction: bool = True,
) -> Plan:
    """Says what Buffer(...) or ElasticBuffer(...) would make, by the same arguments and settings of the environment.

    It needs neither a GPU nor other ranks, and refuses what the constructor or the calls would refuse.

    Args:
        num_ranks: ranks of the group.
        num_tokens: tokens a rank of normal-mode calls; 0: there are none.
        num_max_dispatch_tokens_per_rank: B of low-latency calls, for which the buffer is then made; 0: there are none.
        num_max_tokens_per_rank: M of an ElasticBuffer, for which the plan is then; 0: the plan is for a Buffer.
        hidden: H, elements of a row (BF16).
        num_topk: K.
        num_experts: E, of all ranks together.
        num_sms: SMs of normal-mode calls; None: what Buffer.set_num_sms said, else the library's choice.
        rank: whose plan.
        num_nvl_bytes, num_rdma_bytes: as for Buffer; both 0: the hints for the calls.
        low_latency_mode, num_qps_per_rank, allow_nvlink_for_low_latency_mode, enable_shrink: as for Buffer.
        engine: as for Buffer; "cuda" also where there is no GPU.
        timeout, num_nvl_peers: as for Buffer.
        num_nics: NICs of a rank; None: as the settings say, else 1 (docs/internode.md#nics).
        num_local_ranks: ranks that share a host's NICs; None: as many as a node has.
        compute_capability: of the GPUs, 10 * major + minor; None: 90.
        use_fp8_dispatch, allow_multiple_reduction: as for ElasticBuffer.

    Returns:
        The plan of that rank's buffer.

    Raises:
        DeepEPError: also a ValueError or TypeError: an argument or a setting is not allowed; the text names it.
    """
    elastic = None
    if num_max_tokens_per_rank:
        if num_nvl_bytes or num_rdma_bytes or low_latency_mode or num_max_dispatch_tokens_per_rank:
            raise value_error("num_max_tokens_per_rank", num_max_tokens_per_rank, "0 with arguments of a Buffer")
        flags = {"use_fp8_dispatch": use_fp8_dispatch, "allow_multiple_reduction": allow_multiple_reduction}
        shape = (num_max_tokens_per_rank, hidden, num_topk)
        elastic = _elastic_sizes.options(*shape, *(check_flag(name, value) for name, value in flags.items()))
    buffer = _abi.sized(
        _abi.BufferOptions,
        device=-1,
        engine=_engine(engine),
        num_nvl_bytes=check_int("num_nvl_bytes", num_nvl_bytes, 0, MAX_BYTES),
        num_rdma_bytes=check_int("num_rdma_bytes", num_rdma_bytes, 0, MAX_BYTES),
        low_latency_mode=int(bool(low_latency_mode)),
        num_qps_per_rank=check_int("num_qps_per_rank", num_qps_per_rank, 0),
        allow_nvlink_for_low_latency_mode=int(bool(allow_nvlink_for_low_latency_mode)),
        enable_shrink=int(bool(enable_shrink)),
        timeout_ms=milliseconds(timeout),
    )
    numbers = {
        "rank": rank,
        "size": num_ranks,
        "num_nvl_peers": _or_zero("num_nvl_peers", num_nvl_peers),
        "num_nics": _or_zero("num_nics", num_nics),
        "num_local_ranks": _or_zero("num_local_ranks", num_local_ranks),
        "compute_capability": _or_zero("compute_capability", compute_capability),
        "num_tokens": num_tokens,
        "num_max_tokens": num_max_dispatch_tokens_per_rank,
        "hidden": hidden,
        "num_topk": num_topk,
        "num_experts": num_experts,
        "num_sms": Buffer._sms_of_calls() if num_sms is None else num_sms,
    }
    options = _abi.sized(
        _abi.PlanOptions,
        buffer=ctypes.addressof(buffer),
        elastic=0 if elastic is None else ctypes.addressof(elastic),
        **{name: check_int("num_ranks" if name == "size" else name, value) for name, value in numbers.items()},
    )
    info = _abi.sized(_abi.PlanInfo)
    order = (ctypes.c_int32 * max(1, options.size))()
    lib = library()
    lib.check(lib.without_gil.deepep_plan(ctypes.byref(options), ctypes.byref(info), order))
    found = {field.name: getattr(info, field.name) for field in fields(Plan) if field.name != "qp_order"}
    found |= {name: value.decode() for name, value in found.items() if isinstance(value, bytes)}
    return Plan(qp_order=tuple(order[: info.num_qp_peers]), **found)


def _or_zero(name: str, value: int | None) -> int:
    """A number from 1 on; 0 for None."""
    return 0 if value is None else check_int(name, value, 1)


def _engine(engine: str | None) -> bytes:
    if engine not in (None, "auto", "cpu", "cuda"):
        raise value_error("engine", repr(engine), "None, 'auto', 'cpu' or 'cuda'")
    return (engine or "auto").encode()
