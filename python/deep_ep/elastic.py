"""ElasticBuffer: V2 of the API, over the same engine as Buffer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from . import _elastic_sizes, _names, _startup, _torch, errors
from ._absent import AGRS, ENGRAM, PP, BufferBase, absent
from ._elastic import (
    MAX_ALIGNMENT,
    Combined,
    Dispatched,
    ElasticMode,
    EPHandle,
    Event,
    Order,
    Payload,
    Rows,
    Sending,
    Shape,
    avoids_record_stream,
    check_beside_handle,
    event_of,
)
from ._elastic_face import ElasticFace, Kind
from ._face import MAX_PLANS
from ._memory import HAS_ROW_POOLS
from ._native import MAX_RANKS
from ._normal_face import Missing
from ._ordering import Ordered, call_in_order
from ._plan import plan
from ._torch import FLOAT32, INDEX_TYPES, INT32, OptionalTensor, Tensor, is_compiling, native, opaque
from .bootstrap import Bootstrap
from .buffer import MAX_SECONDS, Buffer, Runtime, _choose_engine
from .errors import assertion, check_flag, check_int, type_error, value_error
from .utils import EventHandle
from .utils.event import captured

__all__ = [
    "EPHandle",
    "ElasticBuffer",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
]

CPU_SECONDS, GPU_SECONDS = 300, 100
KEY_MARK = "@"  # between V1's join key and the ranks for which the buffer has memory
USUAL_SMS = 20
MOST_TOPK = 128
COMPUTE_CAPABILITY = 90  # for which SMs are chosen
Group = Any


class ElasticBuffer(BufferBase):
    """Expert-parallel dispatch and combine of one group, as in DeepEP 2.1. The constructor is collective.

    Beside V1's Buffer in the same process: each has memory and a communication stream of its own.

    Args:
        group: a torch.distributed group of any backend, or None with `bootstrap`.
        num_bytes: memory of the buffer, a multiple of 2 MiB; None: what get_buffer_size_hint says. A size that is too
            small for a call costs time; the call succeeds.
        num_cpu_bytes: memory for Engram tables; only 0.
        num_max_tokens_per_rank: M, the most tokens that a rank dispatches; a default that each dispatch may override.
        hidden: H, elements of a row.
        num_topk: K; 0: 32.
        use_fp8_dispatch: `num_bytes` for FP8 rows. Dispatch takes rows of any dtype.
        deterministic: accepted; outputs are ordered and repeat bit for bit in any case.
        allow_hybrid_mode: the logical domain is the physical one, and a node adds its ranks' rows before they cross;
            False: one domain of all ranks.
        allow_multiple_reduction: a rank sums the rows of its own experts before it sends them back.
        prefer_overlap_with_compute: accepted; calls take few SMs in any case.
        sl_idx: accepted.
        num_allocated_qps: queue pairs that num_qps may name; 0: 129 on several domains, else 17.
        num_cpu_timeout_secs, num_gpu_timeout_secs: longest wait for a living peer; the lower one counts. With both at
            their defaults it is DEEPEP_TIMEOUT_MS, or 100 s.
        explicitly_destroy: True: destroy() may be called; False: the finalizer frees.
        enable_shrink: calls go on without ranks that are masked, dead or late, as with Buffer; masks are allowed.
        engine: "cpu", "cuda", or "auto" or None: DEEPEP_ENGINE, or CUDA where a device and its library are there.
        bootstrap: where ranks meet without torch.distributed; see deep_ep.Bootstrap.
        num_nvl_peers: ranks of one NVLink domain; None: DEEPEP_NUM_MAX_NVL_PEERS, or 8.
        join: the `join_key` of a buffer of V2, whose group takes this process in with its next `regroup`; the
            constructor returns after that. `group` is None, the other arguments are those of the group's buffers.
        join_rank: with `join`: the lost rank whose place the process asks for; None: any.

    Attributes:
        rank_idx, num_ranks: this rank's number and R.
        num_rdma_ranks, num_nvlink_ranks: the physical domains: nodes, and ranks of one.
        num_scaleout_ranks, num_scaleup_ranks: the logical domains, and ranks of one.
        scaleout_rank_idx, scaleup_rank_idx: this rank's logical domain, and its place in it.
        num_bytes, num_allocated_qps: as given, or what was chosen.
        group, num_max_tokens_per_rank, hidden, num_topk and the flags: as given.
        name: as of Buffer.
        nccl_comm_handle: None.

    Raises:
        DeepEPError: also a ValueError or TypeError where an argument is wrong; names the ranks that disagree, are late
            or dead.
    """

    def __init__(
        self,
        group: Group,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = CPU_SECONDS,
        num_gpu_timeout_secs: float = GPU_SECONDS,
        explicitly_destroy: bool = False,
        *,
        enable_shrink: bool = False,
        engine: str | None = None,
        bootstrap: Bootstrap | None = None,
        num_nvl_peers: int | None = None,
        join: str | None = None,
        join_rank: int | None = None,
    ) -> None:
        if num_cpu_bytes:
            absent("num_cpu_bytes", ENGRAM)()
        flags = {
            "use_fp8_dispatch": use_fp8_dispatch,
            "deterministic": deterministic,
            "allow_hybrid_mode": allow_hybrid_mode,
            "allow_multiple_reduction": allow_multiple_reduction,
            "prefer_overlap_with_compute": prefer_overlap_with_compute,
            "explicitly_destroy": explicitly_destroy,
            "enable_shrink": enable_shrink,
        }
        flags = {name: check_flag(name, value) for name, value in flags.items()}
        self.num_max_tokens_per_rank = check_int("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        self.hidden, self.num_topk = check_int("hidden", hidden, 0, 1 << 20), check_int("num_topk", num_topk, 0)
        key, num_ranks = (None, _size_of(group, bootstrap)) if join is None else _read_key(join)
        self._made_for = num_ranks  # memory keeps the sizes of so many ranks
        sizes = _elastic_sizes.sizes(
            _elastic_sizes.options(
                self.num_max_tokens_per_rank, self.hidden, self.num_topk, flags["use_fp8_dispatch"],
                flags["allow_multiple_reduction"], num_ranks=num_ranks, is_direct=int(not flags["allow_hybrid_mode"]),
                num_nvl_peers=0 if num_nvl_peers is None else check_int("num_nvl_peers", num_nvl_peers, 1),
                num_allocated_qps=check_int("num_allocated_qps", num_allocated_qps, 0),
                num_bytes=0 if num_bytes is None else _elastic_sizes.check_bytes("num_bytes", num_bytes),
            )
        )  # fmt: skip
        self.num_bytes, self.num_allocated_qps = int(sizes.num_bytes), int(sizes.num_allocated_qps)
        staging, segment = int(sizes.num_nvl_bytes), int(sizes.row_segment_bytes)
        seconds = _timeout(num_cpu_timeout_secs, num_gpu_timeout_secs)
        self._base = Buffer(
            group, staging, int(sizes.num_rdma_bytes), explicitly_destroy=True, engine=engine,
            timeout=seconds, num_nvl_peers=num_nvl_peers, bootstrap=bootstrap, num_tokens=self.num_max_tokens_per_rank,
            hidden=self.hidden, num_topk=self.num_topk, zero_copy_bytes=_segment(engine, segment),
            enable_shrink=flags["enable_shrink"], join=key, join_rank=join_rank,
        )  # fmt: skip
        core = self._core = self._base._core
        core.open_rows()  # now, so that the first call is as fast as later ones
        self._mode = ElasticMode(
            core, self._base._normal, flags["allow_multiple_reduction"], flags["allow_hybrid_mode"]
        )
        self._deferred: Any = None  # a weak reference to the SecondHalf that is still to come
        self._seat = 0  # regroups so far
        self.name = self._base.name
        _names.adopt(self.name, self)
        self.group = group
        self.use_fp8_dispatch = flags["use_fp8_dispatch"]
        self.deterministic, self.explicitly_destroy = flags["deterministic"], flags["explicitly_destroy"]
        self.allow_hybrid_mode = flags["allow_hybrid_mode"]
        self.allow_multiple_reduction = flags["allow_multiple_reduction"]
        self.prefer_overlap_with_compute = flags["prefer_overlap_with_compute"]
        service_level = os.environ.get("EP_OVERRIDE_RDMA_SL")
        self.sl_idx = int(service_level) if service_level else sl_idx
        self._take_seat()
        self.nccl_comm_handle: Any = None  # there is no NCCL below
        self.runtime: Runtime | None = self._base.runtime
        if os.environ.get("EP_BUFFER_DEBUG", "0") not in ("", "0"):
            self.print_memory_usage()

    def _take_seat(self) -> None:
        """This rank's place in the group, and what depends on the group's size."""
        core = self._core
        self.rank_idx, self.num_ranks = core.rank, core.group_size
        self.num_rdma_ranks, self.num_nvlink_ranks = core.num_nodes, core.group_size // core.num_nodes
        logical = (core.num_nodes, self.num_nvlink_ranks) if self.allow_hybrid_mode else (1, core.group_size)
        self.num_scaleout_ranks, self.num_scaleup_ranks = logical
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(core.rank, self.num_scaleup_ranks)
        self._sms_of: dict[int, int] = {}  # by choices of a token
        self._face: ElasticFace | None = None
        self._has_face = True  # until the first call knows
        self._kinds: dict[Any, Any] = {}

    # ---- life

    def warmup(
        self,
        num_experts: int,
        num_tokens: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8: bool | None = None,
        *,
        do_expand: bool = False,
        do_cpu_sync: bool = True,
    ) -> None:
        """Makes calls as the program will make them, so that its first call is as fast as a later one. Collective.

        Dispatch, dispatch with the handle, and combine, a few times, of rows of zeros; not in upstream's API. A program
        that calls in several ways warms each. The current stream's work is done when it returns.

        Args:
            num_experts: E.
            num_tokens: T, tokens a rank; 0: the buffer's `num_max_tokens_per_rank`, which it may not pass.
            hidden: H; 0: the buffer's.
            num_topk: K; 0: the buffer's.
            use_fp8: FP8 rows with a scale for 128 channels, or BF16 rows; None: as the buffer's `use_fp8_dispatch`.
            do_expand: the layout.
            do_cpu_sync: False: outputs have room for any routing.

        Raises:
            DeepEPError: a rank is late, dead or disagrees. Also a ValueError or TypeError for a wrong argument.
        """
        shape = _startup.elastic_shape(self, num_tokens, hidden, num_topk, num_experts)
        fp8 = self.use_fp8_dispatch if use_fp8 is None else check_flag("use_fp8", use_fp8)
        expand, sync = check_flag("do_expand", do_expand), check_flag("do_cpu_sync", do_cpu_sync)
        with _torch.without_modes():
            _startup.warm_up_elastic(self, shape, fp8, expand, sync)

    def destroy(self) -> None:
        """Frees everything here; local, bounded, waits for no peer. Twice is fine.

        Raises:
            DeepEPError (also an AssertionError): the buffer was made without explicitly_destroy.
        """
        assertion(self.explicitly_destroy, "destroy() needs a buffer made with explicitly_destroy=True")
        self._base.destroy()
        self.runtime = None

    def release(self) -> None:
        """Gives back the buffer's memory and keeps its addresses and the group; see Buffer.release."""
        self._enter()
        self._base.release()

    def restore(self) -> None:
        """Has the memory again. Collective; see Buffer.restore."""
        self._base.restore()

    def lost_ranks(self) -> list[int]:
        """The ranks that have died or left, as far as this rank has heard; ascending. Local."""
        return self._base.lost_ranks()

    @property
    def join_key(self) -> str:
        """The text by which a process of this host and user joins: ``ElasticBuffer(None, join=...)`` of theirs.

        As Buffer.join_key; a Buffer of V1 does not take it.

        Raises:
            DeepEPError: the buffer is destroyed.
        """
        return f"{self._base.join_key}{KEY_MARK}{self._made_for}"

    def pending_joins(self, *, agreed: bool = False) -> list[int]:
        """The processes that wait to be let in, at this rank or, `agreed`, on all alike; see Buffer.pending_joins."""
        return self._base.pending_joins(agreed=agreed)

    def regroup(self, members: Sequence[int], *, renumber: bool = True, timeout: float | None = None) -> None:
        """Goes on without ranks that are lost, and with processes that join. Collective; see Buffer.regroup.

        Afterwards `rank_idx`, `num_ranks` and the domains are those of the new group, and `num_experts` of each call
        places the experts anew. The memory stays as it is. Handles of before are refused if ranks were renumbered, and
        so is the second half of a deferred call of before.

        Args:
            members: ranks of the new group, by their present numbers. A lost one (or with `renumber` a number from
                num_ranks on) stands for a process that waits to join.
            renumber: True: a member's place in `members` is its new rank, and `num_ranks` their number. False: numbers
                stay; a rank that is left out stays as a masked place, which needs enable_shrink.
            timeout: seconds to wait for the other members; None: DEEPEP_FIRST_TIMEOUT_MS, or 300.

        Raises:
            DeepEPError: as Buffer.regroup; it may be called again. Also a ValueError or TypeError for a wrong argument.
        """

        def adopt() -> None:
            self._seat += 1
            self._deferred = None
            self._take_seat()
            self._core.open_rows()

        self._base._regroup(members, renumber, timeout, adopt)

    def update_mask(self, rank: int, masked: bool = True) -> None:
        """Masks a rank, or lifts its mask; see Buffer.low_latency_update_mask_buffer. Needs enable_shrink."""
        self._base.low_latency_update_mask_buffer(rank, masked)

    def query_mask(self, mask_status: Tensor) -> None:
        """Fills int32 ``[R]``: 1 for a masked rank; see Buffer.low_latency_query_mask_buffer. Needs enable_shrink."""
        self._base.low_latency_query_mask_buffer(mask_status)

    def clean_mask(self) -> None:
        """Lifts all masks. Ranks take each other back by this on every rank, then barrier(). Needs enable_shrink."""
        self._base.low_latency_clean_mask_buffer()

    def check(self) -> None:
        """Asks whether the buffer can be used.

        Raises:
            DeepEPError: the failure that made it unusable.
        """
        self._base.check()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of the calls; see Buffer.stats."""
        return self._base.stats()

    def print_memory_usage(self) -> None:
        """Prints the bytes of the buffer's parts."""
        info = self._core.native.info()
        pool = self._core.native.rows
        parts = {"staging": info.num_nvl_bytes, "rows": pool.count if pool is not None else 0}
        parts |= {"RDMA": info.num_rdma_bytes, "workspace": info.control_bytes + info.wire_bytes}
        sizes = ", ".join(f"{name} {count / 2**20:.1f} MiB" for name, count in parts.items())
        print(f"[rank {self.rank_idx}] {sizes}")

    @opaque
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits, on the current stream, until every rank has come here. Collective.

        Args:
            use_comm_stream, sequential: accepted; a buffer's calls run in the order in which they were issued, and the
                current stream waits in any case.
            with_cpu_sync: the host waits for the device, before and after.

        Raises:
            DeepEPError: a rank is late or dead; the text names it.
        """
        core = self._core
        core.enter()
        if check_flag("with_cpu_sync", with_cpu_sync):
            _torch.synchronize(core.device)
        self._base.barrier()
        if with_cpu_sync:
            _torch.synchronize(core.device)

    # ---- sizes and numbers

    @staticmethod
    def get_buffer_size_hint(
        group: Group,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of a buffer for calls of this shape, a multiple of 2 MiB: `num_bytes` of one made so.

        Args:
            group: the ranks of the buffer, whose number counts.
            num_max_tokens_per_rank: the largest number of tokens of a rank's dispatch.
            hidden: channels of a token.
            num_topk: K; 0: not known, taken as 32.
            use_fp8_dispatch: rows of a dispatch are FP8 with scales, else BF16.
            allow_hybrid_mode: accepted; the size is the same.
            allow_multiple_reduction: False: combine has room for an answer of each of a token's K choices.

        Raises:
            DeepEPError (also a ValueError): a number is not allowed.
        """
        fp8 = check_flag("use_fp8_dispatch", use_fp8_dispatch)
        multiple = check_flag("allow_multiple_reduction", allow_multiple_reduction)
        shape = (num_max_tokens_per_rank, hidden, num_topk, fp8, multiple)
        return int(_elastic_sizes.sizes(_elastic_sizes.options(*shape, num_ranks=_size_of(group, None))).num_bytes)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(NVLink domains, ranks of one)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks): the physical domains, or without allow_hybrid_mode (1, R)."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """SMs that calls of this shape take at most where they are given 0: an even number, 4 or more.

        Args:
            num_experts: E, a multiple of the ranks.
            num_topk: K.
            num_scaleout_topk: 0.
            rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs: accepted; the library has measured its own.

        Raises:
            DeepEPError (also an AssertionError): `num_experts` or `num_scaleout_topk` is not allowed.
        """
        self._check_experts(num_experts)
        assertion(num_scaleout_topk == 0, f"argument num_scaleout_topk: got {num_scaleout_topk}, allowed 0")
        return self._usual_sms(check_int("num_topk", num_topk))

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs for so many SMs, at most num_allocated_qps."""
        return int(self._sizes_for(0, check_int("num_sms", num_sms, 0)).num_qps)

    def get_comm_stream(self) -> Any:
        """The buffer's communication stream: a torch.cuda.Stream; on the CPU engine a torch.cpu.Stream."""
        return self._base.get_comm_stream()

    @staticmethod
    @opaque
    def capture() -> EventHandle:
        """The present end of the current stream."""
        point = captured().event
        assert point is not None
        return point

    # ---- dispatch and combine

    @native
    def dispatch(
        self,
        x: Rows,
        topk_idx: OptionalTensor = None,
        topk_weights: OptionalTensor = None,
        cumulative_local_expert_recv_stats: OptionalTensor = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Dispatched:
        """Sends each token once to every rank that holds one of its experts.

        Args:
            x: ``[T, H]`` of any dtype, contiguous, or a pair with scales ``[T, P]`` of 4 bytes, any strides. Bytes of a
                row are a multiple of 16, T is at most M.
            topk_idx: ``[T, K]`` int64 or int32, global experts; a negative number selects nothing. None with a handle.
            topk_weights: ``[T, K]`` float32, or None; also with a handle.
            cumulative_local_expert_recv_stats: int32 ``[E/R]``: tokens received for each local expert are added.
            num_experts: E; with a handle None or the handle's.
            num_max_tokens_per_rank: M, the same on all ranks; None: the handle's, else the buffer's.
            expert_alignment: each expert's count is rounded up to a multiple; None: the handle's, else 1.
            num_sms: at most so many SMs, rounded up to even; 0: the library's choice.
            num_qps: accepted, up to num_allocated_qps.
            previous_event: what the work waits for instead of the current stream; needs allocate_on_comm_stream.
            previous_event_before_epilogue: the work waits for this one too.
            async_with_compute_stream: True: the caller waits through the returned event.
            allocate_on_comm_stream: outputs belong to the communication stream.
            handle: of an earlier dispatch: the same routing again, without counts.
            do_handle_copy: the handle has a copy of `topk_idx`; False: the tensor itself.
            do_cpu_sync: the host waits for the counts, and outputs have their exact size; False: outputs have room for
                any routing, rows past the real ones are undefined; with do_expand, of tokens that name no expert twice,
                and others are refused on every rank. None: True, with a handle False.
            do_expand: a row for each token and local expert, grouped by expert; else for each token.
            do_zero_padding: expanded: rows between the experts' groups are 0.
            use_tma_aligned_col_major_sf: received scales are column-major, each column on 16 bytes.

        Returns:
            ``recv_x [rows, H]`` (a pair for a pair), ``recv_topk_idx [rows, K]`` with local experts, -1 where the
            choice is another rank's (None if expanded), ``recv_topk_weights [rows, K]`` as sent (expanded ``[rows]``;
            None if none were given), the handle, the event. Rows are in the order of source rank and token;
            expanded, within each expert.

        Raises:
            DeepEPError: a rank is late, dead or disagrees. Also a ValueError, TypeError or AssertionError for a wrong
                argument.
        """
        given = (
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
            expert_alignment, num_sms, num_qps, previous_event, previous_event_before_epilogue,
            async_with_compute_stream, allocate_on_comm_stream, handle, do_handle_copy, do_cpu_sync, do_expand,
            do_zero_padding, use_tma_aligned_col_major_sf,
        )  # fmt: skip
        if is_compiling():
            from .ops import methods

            return methods.elastic_dispatch(self, *given)
        with _torch.without_modes():
            return self._dispatch(*given)

    @native
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: OptionalTensor = None,
        bias: Tensor | tuple[OptionalTensor, OptionalTensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Combined:
        """Brings the rows of each token back to its rank and adds them.

        Args:
            x: ``[rows, H]`` BF16. Plain: as many rows as the handle's recv_src_metadata; expanded: those that it names.
                Other rows are not read.
            handle: of the dispatch; not consumed.
            topk_weights: plain ``[rows, K]``, expanded ``[rows]`` float32: carried back, not applied.
            bias: BF16 ``[T, H]``, or a pair of such.
            num_sms: 0: the handle's.
            num_qps, previous_event, previous_event_before_epilogue: as in dispatch.
            async_with_compute_stream, allocate_on_comm_stream: as in dispatch.

        Returns:
            ``combined_x [T, H]`` BF16, ``combined_topk_weights [T, K]`` float32 or None, the event. Sums are in FP32:
            the biases, then the ranks' rows in the order of the token's last choice of each, rounded once. Expanded: a
            rank first adds the token's rows in the order of the choices and rounds; without allow_multiple_reduction
            all rows are added at the token's rank.

        Raises:
            DeepEPError: a rank is late, dead or disagrees. Also a ValueError, TypeError or AssertionError for a wrong
                argument.
        """
        given = (
            x, handle, topk_weights, bias, num_sms, num_qps, previous_event, previous_event_before_epilogue,
            async_with_compute_stream, allocate_on_comm_stream,
        )  # fmt: skip
        if is_compiling():
            from .ops import methods

            return methods.elastic_combine(self, *given)
        with _torch.without_modes():
            return self._combine(*given)

    # ---- not there

    get_agrs_num_max_session_bytes = staticmethod(absent("get_agrs_num_max_session_bytes", AGRS))
    get_agrs_buffer_size_hint = staticmethod(absent("get_agrs_buffer_size_hint", AGRS))
    agrs_set_config = absent("agrs_set_config", AGRS)
    create_agrs_session = absent("create_agrs_session", AGRS)
    destroy_agrs_session = absent("destroy_agrs_session", AGRS)
    agrs_new_session = absent("agrs_new_session", AGRS)
    agrs_get_inplace_tensor = absent("agrs_get_inplace_tensor", AGRS)
    all_gather = absent("all_gather", AGRS)
    get_pp_buffer_size_hint = staticmethod(absent("get_pp_buffer_size_hint", PP))
    pp_set_config = absent("pp_set_config", PP)
    pp_send = absent("pp_send", PP)
    pp_recv = absent("pp_recv", PP)
    get_engram_storage_size_hint = staticmethod(absent("get_engram_storage_size_hint", ENGRAM))
    engram_write = absent("engram_write", ENGRAM)
    engram_fetch = absent("engram_fetch", ENGRAM)

    # ---- helpers

    def _enter(self) -> None:
        self._core.enter()
        second = None if self._deferred is None else self._deferred()
        if second is not None and second.is_due:
            text = f"the deferred {second.what} of this buffer was not waited for: call wait() of its event first"
            raise errors.DeepEPError(errors.INVALID_STATE, text)

    def _dispatch(
        self,
        x: object,
        topk_idx: OptionalTensor,
        topk_weights: OptionalTensor,
        stats: OptionalTensor,
        num_experts: int | None,
        num_max_tokens: int | None,
        alignment: int | None,
        num_sms: int,
        num_qps: int,
        previous_event: Event,
        before_epilogue: Event,
        is_async: bool,
        on_comm: bool,
        handle: EPHandle | None,
        copies_topk: bool,
        cpu_sync: bool | None,
        expand: bool,
        padding: bool,
        columns: bool,
    ) -> Dispatched:
        self._enter()
        key, missing, kind = None, None, None
        data: Any
        data, scales = x if type(x) is tuple and len(x) == 2 else (x, None)
        face, ordered, order = *self._face_for(previous_event, before_epilogue, is_async, on_comm), None
        numbers = num_experts, num_max_tokens, alignment, num_sms, num_qps, copies_topk, cpu_sync, padding, columns
        if face is None:
            pass
        elif handle is not None:
            if type(handle) is EPHandle and topk_idx is None and stats is None:
                missing = face.again(ordered, data, scales, topk_weights, handle, expand, *numbers)
        else:
            key = _key(topk_idx, expand, *numbers)
            kind = None if key is None else self._kinds.get(key)
            if kind is not None and (kind.worst or self._core.host_stream or not _torch.is_capturing()):
                inputs = (data, scales, topk_idx, topk_weights, stats)
                if kind.worst:
                    missing = face.worst(ordered, inputs, kind)
                else:
                    if ordered is not False:
                        order = Order(self._core, previous_event, True, on_comm)
                    missing = call_in_order(face.fresh, order, inputs, kind)
        if type(missing) is tuple:
            return missing
        sending, known = self._prepare(
            x, topk_idx, topk_weights, stats, num_experts, num_max_tokens, alignment, num_sms, num_qps, previous_event,
            is_async, on_comm, handle, copies_topk, cpu_sync, expand, padding, columns, order,
        )  # fmt: skip
        sending.order.wait_too(before_epilogue)
        result = self._mode.send(sending, known) if handle is None else self._mode.resend(sending, handle)
        if face is not None and isinstance(missing, Missing):
            if handle is not None:
                face.add_again(missing, data, scales, topk_weights, handle, Kind(sending, known))
            elif kind is not None:
                face.add_fresh(missing, (data, scales, topk_idx, topk_weights, stats), kind)
        elif key is not None and kind is None:
            if len(self._kinds) >= MAX_PLANS:
                self._kinds.clear()
            self._kinds[key] = Kind(sending, known)  # what the checks have found, for calls with the same numbers
        return result

    def _face_for(
        self, previous_event: Event, before_epilogue: Event, is_async: bool, on_comm: bool
    ) -> tuple[ElasticFace | None, Ordered]:
        """The compiled face, if it takes calls that are ordered so, and how it orders this one."""
        if before_epilogue is not None:
            return None, False
        if is_async is False:
            return (self._opened_face() if previous_event is None and on_comm is False else None), False
        if is_async is not True or self._core.host_stream or avoids_record_stream():
            return None, False
        previous = event_of("previous_event", previous_event)
        if on_comm is True:
            return self._opened_face(), (previous,)
        return (self._opened_face() if previous is None and on_comm is False else None), True

    def _opened_face(self) -> ElasticFace | None:
        """The compiled face; None where there is none, and in the communication stream, which Order refuses."""
        core = self._core
        if self._face is None and self._has_face:
            self._face = ElasticFace.of(core, self._mode)
            self._has_face = self._face is not None
        own = not core.host_stream and core.raw_stream() == core.comm_stream_address
        return None if own else self._face

    def _prepare(
        self,
        x: object,
        topk_idx: OptionalTensor,
        topk_weights: OptionalTensor,
        stats: OptionalTensor,
        num_experts: int | None,
        num_max_tokens: int | None,
        alignment: int | None,
        num_sms: int,
        num_qps: int,
        previous_event: Event,
        is_async: bool,
        on_comm: bool,
        handle: EPHandle | None,
        copies_topk: bool,
        cpu_sync: bool | None,
        expand: bool,
        padding: bool,
        columns: bool,
        order: Order | None = None,
    ) -> tuple[Sending, int]:
        """Everything of a dispatch that can be checked, and the SMs for its handle."""
        self._enter()
        core = self._core
        expand = check_flag("do_expand", expand)
        padding = check_flag("do_zero_padding", padding)
        assertion(expand or not padding, "argument do_zero_padding: got True, allowed False without do_expand")
        payload = Payload(x, core)
        if handle is not None:
            self._mode.check_handle(handle)
            check_beside_handle(handle, topk_idx, cpu_sync, stats, num_experts, alignment, num_max_tokens)
            num_experts, alignment = handle.num_experts, handle.expert_alignment
            num_max_tokens, num_topk = handle.num_max_tokens_per_rank, int(handle.topk_idx.shape[1])
            worst = False
        else:
            if topk_idx is None or num_experts is None:
                missing = "topk_idx" if topk_idx is None else "num_experts"
                raise type_error(missing, "None", "a value, without a handle")
            _torch.check("topk_idx", topk_idx, core.device, tuple(INDEX_TYPES), (payload.num_tokens, None))
            num_topk = int(topk_idx.shape[1])
            num_experts = self._check_experts(num_experts)
            alignment = 1 if alignment is None else check_int("expert_alignment", alignment, 1, MAX_ALIGNMENT)
            if num_max_tokens is None:
                num_max_tokens = self.num_max_tokens_per_rank
            check_int("num_max_tokens_per_rank", num_max_tokens, 0)
            if payload.num_tokens > num_max_tokens:
                allowed = f"at most num_max_tokens_per_rank = {num_max_tokens}"
                raise value_error("x", f"{payload.num_tokens} rows", allowed)
            worst = cpu_sync is not None and not check_flag("do_cpu_sync", cpu_sync)
            if stats is not None:
                name = "cumulative_local_expert_recv_stats"
                _torch.check(name, stats, core.device, (INT32,), (num_experts // core.group_size,))
            capturing = not worst and not core.host_stream and _torch.is_capturing()
            assertion(not capturing, "argument do_cpu_sync: got True, allowed False while a CUDA graph is captured")
        if topk_weights is not None:
            _torch.check("topk_weights", topk_weights, core.device, (FLOAT32,), (payload.num_tokens, num_topk))
        given, known = self._resolve_sms(num_sms, num_qps, num_topk, handle)
        if order is None:
            order = Order(core, previous_event, is_async, on_comm)
        shape = Shape(num_topk, num_experts, alignment, num_max_tokens, expand, core.group_size)
        if worst:
            shape.check_worst()
        sending = Sending(
            payload, topk_weights, shape, order, self._mode.config(0, given), padding,
            check_flag("use_tma_aligned_col_major_sf", columns), topk_idx,
            handle is None and check_flag("do_handle_copy", copies_topk), stats, worst,
        )  # fmt: skip
        return sending, known

    def _combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: OptionalTensor,
        bias: object,
        num_sms: int,
        num_qps: int,
        previous_event: Event,
        before_epilogue: Event,
        is_async: bool,
        on_comm: bool,
    ) -> Combined:
        self._enter()
        missing = None
        face, ordered = self._face_for(previous_event, before_epilogue, is_async, on_comm)
        if face is not None and type(handle) is EPHandle:
            missing = face.combine(ordered, x, handle, topk_weights, bias, num_sms, num_qps)
            if type(missing) is tuple:
                return missing
        self._mode.check_handle(handle)
        given, _ = self._resolve_sms(num_sms, num_qps, int(handle.topk_idx.shape[1]), handle)
        order = Order(self._core, previous_event, is_async, on_comm)
        order.wait_too(before_epilogue)
        result = self._mode.combine(x, handle, topk_weights, bias, given, order)
        if face is not None and isinstance(missing, Missing):
            biases = bias if isinstance(bias, tuple) else (bias, None)
            face.add_combine(missing, x, handle, topk_weights, biases, self._mode.config(1, given))
        return result

    def _resolve_sms(self, num_sms: int, num_qps: int, num_topk: int, handle: EPHandle | None) -> tuple[int, int]:
        """SMs for the library (0: its choice), and for the handle."""
        allocated = self.num_allocated_qps
        assertion(
            0 <= check_int("num_qps", num_qps) <= allocated,
            f"argument num_qps: got {num_qps}, allowed 0 to num_allocated_qps = {allocated}",
        )
        usual = self._usual_sms(num_topk)
        asked = check_int("num_sms", num_sms, 0)
        if not asked and handle is not None:
            found = check_int("handle.num_sms", handle.num_sms, 0)
            asked = 0 if found == usual else found
        asked += asked % 2
        return asked, asked or usual

    def _usual_sms(self, num_topk: int) -> int:
        found = self._sms_of.get(num_topk)
        if found is None:  # a number of choices that no call has is refused by the call itself
            found = int(self._sizes_for(min(max(num_topk, 0), MOST_TOPK)).num_sms)
            self._sms_of[num_topk] = found
        return found

    def _sizes_for(self, num_topk: int, num_sms: int = 0) -> Any:
        """deepep_elastic_info of this buffer for calls with so many choices (0: not known) and SMs (0: its own)."""
        core = self._core
        device_sms = 0 if core.engine == "cpu" else int(core.native.info().num_device_sms)
        given = _elastic_sizes.options(
            self.num_max_tokens_per_rank, self.hidden, num_topk, num_ranks=self.num_ranks,
            num_nvl_peers=self.num_nvlink_ranks, is_direct=int(not self.allow_hybrid_mode), num_bytes=self.num_bytes,
            num_allocated_qps=self.num_allocated_qps, num_sms=num_sms, num_device_sms=device_sms,
            compute_capability=0 if core.engine == "cpu" else COMPUTE_CAPABILITY,
        )  # fmt: skip
        return _elastic_sizes.sizes(given)

    def _check_experts(self, num_experts: object) -> int:
        number, ranks = check_int("num_experts", num_experts), self.num_ranks
        fits = number >= 1 and number % ranks == 0
        assertion(fits, f"argument num_experts: got {number}, allowed a positive multiple of the {ranks} ranks")
        return number


def _key(topk_idx: object, *values: Any) -> Any:
    """Under which what the checks of a dispatch without a handle find is kept; None where they alone can judge.

    Types are part of it: True is no number.
    """
    if type(topk_idx) is not Tensor or topk_idx.dim() != 2:
        return None
    key = (topk_idx.shape[1], *values)
    try:
        hash(key)
    except TypeError:
        return None
    return key, tuple(map(type, key))


def get_physical_domain_size(group: Group) -> tuple[int, int]:
    """(NVLink domains, ranks of one) of a group or of a buffer of V2."""
    if isinstance(group, ElasticBuffer):
        return group.get_physical_domain_size()
    found = plan(_size_of(group, None), engine="cpu")
    return found.num_rdma_ranks, found.num_nvl_peers


def get_logical_domain_size(group: Group, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks) of a group or of a buffer of V2."""
    if isinstance(group, ElasticBuffer):
        return group.get_logical_domain_size()
    nodes, peers = get_physical_domain_size(group)
    return (nodes, peers) if check_flag("allow_hybrid_mode", allow_hybrid_mode) else (1, nodes * peers)


def get_num_allocation_alignment() -> int:
    """2 MiB: sizes of buffers are multiples of it."""
    return _elastic_sizes.UNIT


def get_num_rdma_alignment() -> int:
    """Bytes on which V2.5 aligns what travels by RDMA."""
    return 64


def get_num_tma_alignment() -> int:
    """Bytes on which V2.5 aligns rows."""
    return 32


def _size_of(group: Group, bootstrap: Bootstrap | None) -> int:
    if group is None and isinstance(bootstrap, Bootstrap):
        return bootstrap.size
    size = getattr(group, "size", None)
    if isinstance(group, Tensor) or not callable(size):
        raise _torch.not_a_group(group)
    return check_int("group.size()", size(), 1)


def _read_key(join: object) -> tuple[str, int]:
    """Of a join_key: V1's, and the ranks for which the group's buffers have memory."""
    if not isinstance(join, str):
        raise type_error("join", type(join).__name__, "the join_key of a buffer of V2")
    key, mark, ranks = join.rpartition(KEY_MARK)
    is_number = ranks.isascii() and ranks.isdigit() and len(ranks) <= len(str(MAX_RANKS))
    if not mark or not is_number or not 1 <= int(ranks) <= MAX_RANKS:
        raise value_error("join", repr(join), "the join_key of a buffer of V2")
    return key, int(ranks)


def _segment(engine: str | None, count: int) -> int | None:
    """Bytes of the row segment; None where there is none."""
    return count if HAS_ROW_POOLS and _choose_engine(engine) == "cuda" else None


def _timeout(cpu: float, gpu: float) -> float | None:
    """Seconds of a wait; None, as the settings say, where neither was chosen."""
    for name, value in (("num_cpu_timeout_secs", cpu), ("num_gpu_timeout_secs", gpu)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
            raise value_error(name, repr(value), f"seconds > 0 and <= {MAX_SECONDS}")
    return None if (cpu, gpu) == (CPU_SECONDS, GPU_SECONDS) else min(cpu, gpu)
