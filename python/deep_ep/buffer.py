"""Buffer: sends tokens to their experts' ranks and combines what the experts answer."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import _abi, _memory, _names, _native, _startup, _torch, errors
from ._core import Core
from ._lib import library
from ._low_latency import Fp4Dispatched, Hook, LowLatencyMode
from ._low_latency import Handle as LowLatencyHandle
from ._normal import Dispatched, NormalMode
from ._torch import DType, OptionalTensor, Size, Tensor, is_compiling, native, opaque
from .bootstrap import Bootstrap
from .config import Config, low_latency_size_hint
from .errors import assertion, check_flag, check_int, no_effect, type_error, value_error
from .utils import EventHandle, EventOverlap
from .utils.event import captured

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

MAX_BYTES = 2**63 - 1
DEFAULT_NUM_SMS = 20
MAX_SECONDS = 10**9  # what fits a number of nanoseconds, with room to add
Rows = Tensor | tuple[Tensor, Tensor]  # BF16 rows, or FP8 rows with their scales


class Runtime:
    """``buffer.runtime``: what code written for V1 asks of the extension object."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)

    def _info(self) -> Any:
        core = self._core()
        if core is None or not core.native.alive:
            raise errors.DeepEPError(errors.INVALID_STATE, _native.DESTROYED)
        return core.native.info()

    def is_available(self) -> bool:
        """True while the buffer can be used."""
        core = self._core()
        return core is not None and core.is_usable()

    def get_num_rdma_ranks(self) -> int:
        """Nodes of the group."""
        return int(self._info().num_rdma_ranks)

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        return int(self._info().rdma_rank)

    def get_root_rdma_rank(self, global_rank: bool) -> int:
        """The first rank of the low-latency team: its global rank, or its number among the nodes."""
        info = self._info()
        return int(info.nvl_rank) if global_rank else 0

    def get_local_device_id(self) -> int:
        """The device's ordinal; 0 on the CPU engine."""
        return max(0, int(self._info().device))


class Buffer:
    """Expert-parallel communication of one group. The constructor is collective.

    Args:
        group: a torch.distributed group of any backend, or None with `comm` or `bootstrap`.
        num_nvl_bytes: bytes for normal mode inside a node; see Config.get_nvl_buffer_size_hint.
        num_rdma_bytes: bytes for low-latency mode and between nodes; see get_low_latency_rdma_size_hint.
        low_latency_mode: allow the low-latency calls.
        num_qps_per_rank: queue pairs toward each rank, between nodes; a float is accepted if it is whole.
        allow_nvlink_for_low_latency_mode: False: low-latency calls reach the ranks of this node by RDMA too.
        allow_mnnvl: GPUs of several nodes: NVSHMEM may use NVLink between hosts, where there is one.
        use_fabric: refused; memory is shared by file descriptors.
        explicitly_destroy: True: destroy() may be called; False: the finalizer frees.
        enable_shrink: calls go on without ranks that are lost; masks are allowed.
        comm: an mpi4py communicator (or any object with Get_rank, Get_size and allgather) instead of `group`.
        preinitialize: bring memory in now that the first calls would bring in: on GPUs the regions, on the CPU engine
            up to DEEPEP_PREINIT_BYTES (256 MiB). What else a first call takes longer for, `warmup()` does.
        background: return after one exchange on the group; the first call waits for the rest.
        engine: "cpu", "cuda", or "auto" or None: DEEPEP_ENGINE, or CUDA where a device and its library are there.
        timeout: seconds that a call waits for a living peer; None: DEEPEP_TIMEOUT_MS, or 100.
        num_nvl_peers: ranks of one NVLink domain; None: DEEPEP_NUM_MAX_NVL_PEERS, or 8.
        bootstrap: where ranks meet without torch.distributed; see deep_ep.Bootstrap.
        zero_copy_bytes: CUDA: memory for rows of normal-mode dispatch that peers write without a copy; what does not
            fit is copied. It is taken by the first dispatch or warm-up of normal mode that no graph captures, or with
            `preinitialize` at once if low_latency_mode is not set. None: DEEPEP_ZERO_COPY_BYTES, or 512 MiB where
            num_nvl_bytes > 0. The same on all ranks.
        join: the `join_key` of a buffer, whose group takes this process in with its next `regroup`; the constructor
            returns after that. No `group` is needed; the other arguments are those of the group's buffers.
        join_rank: with `join`: the lost rank whose place the process asks for; None: any.
        num_tokens, hidden, num_topk, num_experts: T, H, K and E of the calls to come, as far as they are known, for
            `warmup()`; T is also its B of low-latency calls. 0: not known.

    Attributes:
        group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink: as given; `group` is
            `comm` where there is no group.
        rank, group_size: this rank's number and R; `regroup` changes them.
        engine: "cpu" or "cuda", also where "auto" was asked for.
        runtime: what code for V1 asks of the extension object: a Runtime.
        name: names the buffer in operators (deep_ep.ops): that of its group, with a number behind it while another
            buffer of the group has it.

    Raises:
        DeepEPError: also a ValueError or TypeError where an argument is wrong; names the ranks that disagree, are late
            or dead.
    """

    num_sms: int = DEFAULT_NUM_SMS  # of a config; calls without one leave the choice to the library (see set_num_sms)
    _num_sms_given: bool = False

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        preinitialize: bool = False,
        background: bool = False,
        engine: str | None = None,
        timeout: float | None = None,
        num_nvl_peers: int | None = None,
        bootstrap: Bootstrap | None = None,
        zero_copy_bytes: int | None = None,
        join: str | None = None,
        join_rank: int | None = None,
        num_tokens: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        num_experts: int = 0,
    ) -> None:
        numbers = {
            "num_nvl_bytes": check_int("num_nvl_bytes", num_nvl_bytes, 0, MAX_BYTES),
            "num_rdma_bytes": check_int("num_rdma_bytes", num_rdma_bytes, 0, MAX_BYTES),
            "num_qps_per_rank": _whole("num_qps_per_rank", num_qps_per_rank),
            **_startup.shape_options(num_tokens, hidden, num_topk, num_experts),
        }
        switches = {
            "low_latency_mode": low_latency_mode,
            "allow_nvlink_for_low_latency_mode": allow_nvlink_for_low_latency_mode,
            "allow_mnnvl": allow_mnnvl,
            "use_fabric": use_fabric,
            "enable_shrink": enable_shrink,
            "preinitialize": preinitialize,
        }
        self.group = comm if group is None else group
        self.num_nvl_bytes, self.num_rdma_bytes = numbers["num_nvl_bytes"], numbers["num_rdma_bytes"]
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        zero_copy = None if zero_copy_bytes is None else check_int("zero_copy_bytes", zero_copy_bytes, 0, MAX_BYTES)
        peers = 0 if num_nvl_peers is None else check_int("num_nvl_peers", num_nvl_peers, 1)
        shared = {"num_nvl_peers": peers, "background": 1, "timeout_ms": milliseconds(timeout)}
        recycle = _memory.recycling()
        self.engine = _choose_engine(engine)
        if zero_copy_bytes and self.engine == "cpu":
            no_effect("zero_copy_bytes", "peers of the CPU engine read rows where they are staged")
        elif zero_copy_bytes and not _memory.HAS_ROW_POOLS:
            no_effect("zero_copy_bytes", "this torch has no pools of memory (2.5 has), so received rows are copied")
        options = _buffer_options(engine or "auto", self.engine, shared["timeout_ms"], numbers, switches)
        if join is None:
            native_group = _make_group(group, comm, bootstrap, shared)
        else:
            if (group, comm, bootstrap) != (None, None, None):
                raise value_error("join", repr(join), "None with a group, comm or bootstrap")
            native_group = _join(join, join_rank, engine or "auto", int(options.device))
        try:
            native = _native.NativeBuffer(native_group, options)
        except BaseException:
            native_group.destroy()
            raise
        rows_at_once = bool(preinitialize and not low_latency_mode)
        self._core = Core(self.engine, native, native_group, zero_copy, recycle, rows_at_once)
        self.rank, self.group_size = self._core.rank, self._core.group_size
        self._normal = NormalMode(self._core)
        self._low_latency = LowLatencyMode(self._core, low_latency_mode, enable_shrink)
        self.runtime = Runtime(self._core)
        self.name = _names.register(self, self.group)
        if not background:
            try:
                self._core.ensure_ready()
            except BaseException:
                self._core.destroy()
                raise

    # ---- life

    def ready(self) -> bool:
        """True once start-up is complete; never blocks."""
        return self._core.is_usable()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits for start-up.

        Args:
            timeout: seconds to wait at most; None: until start-up is complete or has failed.

        Returns:
            Whether start-up is complete.

        Raises:
            DeepEPError: start-up failed; the text says why.
        """
        core = self._core
        if not core.is_ready and not core.native.wait_ready(timeout):
            return False
        core.ensure_ready()
        return True

    def warmup(
        self,
        num_tokens: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        num_experts: int = 0,
        num_max_dispatch_tokens_per_rank: int = 0,
        use_fp8: bool = True,
        *,
        max_seconds: float | None = None,
        max_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Makes calls as the program will make them, so that its first call is as fast as a later one. Collective.

        ``warmup()`` warms every mode that the buffer allows. A size that is not given is the constructor's, else that
        of the size hint which the program asked for, else the largest that the buffer's memory holds. With `num_tokens`
        alone only normal mode is warmed, with `num_max_dispatch_tokens_per_rank` alone only low-latency mode.

        Args:
            num_tokens: T, tokens a rank of normal-mode calls.
            hidden: H.
            num_topk: K.
            num_experts: E.
            num_max_dispatch_tokens_per_rank: B of low-latency calls.
            use_fp8: whether low-latency dispatch casts to FP8.
            max_seconds: of a warm-up whose T is not known, about; None: 2.
            max_bytes: of a rank's tensors. None: 1 GiB where a shape is not known, no limit where it is.

        Returns:
            The same as `startup_report`; it is logged as well (info).

        Raises:
            DeepEPError: a rank is late, dead or disagrees. Also a ValueError or TypeError for a wrong argument.
        """
        shape = _startup.shape_options(num_tokens, hidden, num_topk, num_experts)
        bound = num_max_dispatch_tokens_per_rank
        _startup.warm_up(self, _startup.warm_up_options(shape, bound, use_fp8, max_seconds, max_bytes))
        return self.startup_report()

    def startup_report(self) -> dict[str, Any]:
        """Where the time of start-up goes, on this rank.

        Returns:
            ``preinitialized``; ``num_warmups``; ``shape`` and ``low_latency_shape``: what the last warm-up ran
            (``num_tokens``, ``hidden``, ``num_topk``, ``num_experts``, and ``from``: "given", "constructor", "hint" or
            "region", of the least certain of them), or None; ``construction``, ``warmup`` and ``first_calls``, each
            with ``load_ms`` (libraries, device, kernels), ``memory_ms`` (allocated, mapped, brought in; of first calls:
            an estimate by their page faults), ``connect_ms`` (other ranks, queue pairs), ``launch_ms`` (calls; of first
            calls: the host's time in launches), ``bytes`` and ``page_faults``, and for warm-up ``python_ms``;
            ``operations``: for each that was called since, ``first_us`` and ``later_us``, time in the kernels of its
            first call and the mean of later ones (0: none yet).

        Raises:
            DeepEPError: the buffer is destroyed, or its start has failed.
        """
        return _startup.report(self)

    def check(self) -> None:
        """Asks whether the buffer can be used.

        Raises:
            DeepEPError: the failure that made it unusable; once, the refusal of an earlier call, or that a CUDA graph
                of before `regroup` was replayed.
        """
        native = self._core.native
        native.check(native.lib.with_gil.deepep_buffer_check(native))

    @property
    def join_key(self) -> str:
        """The text by which processes of this host and user find the buffer: ``Buffer(None, join=...)`` of theirs.

        The same on all ranks, and it stays with `regroup`. From the first look on this rank hears of such processes;
        each comes to one member that lives and has looked.

        Raises:
            DeepEPError: the buffer is destroyed.
        """
        return self._core.native.join_key()

    def pending_joins(self, *, agreed: bool = False) -> list[int]:
        """The processes that wait to be let in, by the lost rank that each asks for, -1 for any; ascending.

        Args:
            agreed: False: those that wait at this rank; local, and ranks see a process at different times. True: those
                of all ranks, the same list on each, so that all `regroup` at the same step; collective among the ranks
                that live, about 0.1 ms on one host.

        Raises:
            DeepEPError: a rank is late, or the buffer is destroyed.
        """
        return self._core.native.pending_joins(check_flag("agreed", agreed))

    def lost_ranks(self) -> list[int]:
        """The ranks that have died or left, or whose place is empty, as far as this rank has heard; ascending. Local.

        Raises:
            DeepEPError: the buffer is destroyed.
        """
        return self._core.native.lost_ranks()

    def regroup(self, members: Sequence[int], *, renumber: bool = False, timeout: float | None = None) -> None:
        """Goes on without ranks that are lost, and with processes that join. Collective among the members that live.

        The ranks meet over the library's own channel; `group` of the constructor is not used and still counts the dead.
        Afterwards `rank` and `group_size` are those of the new group, and num_experts of each call places the experts
        anew. Memory, views of it, the communication stream and events stay. Calls that still run are aborted. Handles
        of before are refused if ranks were renumbered, replays of CUDA graphs of before leave at once, of which `check`
        tells once; masks, statistics and hooks begin anew.

        Args:
            members: ranks of the new group, by their present numbers. A lost one (or with `renumber` a number from
                group_size on) stands for a process that waits to join.
            renumber: True: a member's place in `members` is its new rank, and group_size their number. False: numbers
                stay; a rank that is left out stays as a masked place, which needs enable_shrink.
            timeout: seconds to wait for the other members; None: DEEPEP_FIRST_TIMEOUT_MS, or 300.

        Ctrl-C ends the wait and not the regroup: the next call waits for its end, and raises its error if it failed.

        Raises:
            DeepEPError: members disagree, one is late or died meanwhile, no process waits for a lost rank's place, or
                GPUs of several nodes (UNSUPPORTED). It may be called again; the buffer may refuse calls until one
                succeeds. Also a ValueError or TypeError for a wrong argument.
        """
        self._regroup(members, renumber, timeout, lambda: None)

    def _regroup(self, members: Sequence[int], renumber: bool, timeout: float | None, then: Callable[[], None]) -> None:
        """`then` runs after it, also where Ctrl-C has ended the wait and a later call goes on with it."""
        if isinstance(members, (str, bytes)) or not isinstance(members, Sequence):
            raise type_error("members", repr(members), "a list of ranks")
        ranks = [check_int("members", rank, 0, 2**31 - 1) for rank in members]
        if not ranks:
            raise value_error("members", "[]", "at least this rank")

        def adopt() -> None:
            self.rank, self.group_size = self._core.rank, self._core.group_size
            self._normal.forget()
            self._low_latency.forget()
            then()

        self._core.regroup(ranks, check_flag("renumber", renumber), milliseconds(timeout), adopt)

    def destroy(self) -> None:
        """Frees everything here; local, bounded, waits for no peer. Twice is fine.

        Raises:
            DeepEPError (also an AssertionError): the buffer was made without explicitly_destroy.
        """
        assertion(self.explicitly_destroy, "destroy() needs a buffer made with explicitly_destroy=True")
        self._core.destroy()
        self._low_latency.forget()

    def release(self) -> None:
        """Gives back the buffer's memory, of the GPU and of the host, and keeps its addresses and the group. Local.

        For the time in which the program needs the memory for something else: an inference engine's sleep mode, the
        training step between two rollouts. All of the memory is free once every rank has called. First this rank's
        calls in flight end. Until `restore` every call is refused, and a replay of a CUDA graph that was captured
        before leaves at once (counts 0, sums NaN). Tensors that calls have returned stay. Views of
        get_local_buffer_tensor stay valid too, without meaning. Twice is fine; so is destroy(). Ctrl-C ends the wait
        and not the release: the next call waits for its end, and raises its error if it failed.

        Raises:
            DeepEPError: a low-latency call is without its hook, whose rows would be lost; a graph is being captured;
                GPUs of several nodes (UNSUPPORTED); the buffer is destroyed.
        """
        self._core.release()

    def restore(self) -> None:
        """Has the memory again, zeroed, at the addresses of before. Collective; without a `release` it does nothing.

        Handles of normal mode and hooks from before are refused; graphs from before may be replayed. Masks are lifted,
        and a failure from before is over. The pages of the CPU engine are brought in as calls touch them. Ctrl-C ends
        the wait and not the restore: the next call waits for its end, and raises its error if it failed.

        Raises:
            DeepEPError: a rank is late or dead, or has no room; the text names it. The buffer stays released, and every
                rank may call again.
        """
        self._core.restore()

    # ---- normal mode

    @native
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, OptionalTensor, Tensor, Tensor, EventOverlap]:
        """Counts what a dispatch of these indices sends where.

        Args:
            topk_idx: ``[T, K]`` int64 or int32; -1 selects nothing.
            num_experts: E, a multiple of the number of ranks.
            previous_event: what the work waits for; None or without an event: the caller's current stream.
            async_finish: True: the caller waits through the returned event.
            allocate_on_comm_stream: outputs belong to the communication stream; needs both of the above.

        Returns:
            ``num_tokens_per_rank [R] int32``, ``num_tokens_per_rdma_rank [nodes] int32`` (None on one node),
            ``num_tokens_per_expert [E] int32`` (entries of topk_idx), ``is_token_in_rank [T, R] bool`` and the event.

        Raises:
            DeepEPError: the buffer has failed or is destroyed. Also a ValueError or TypeError for a wrong argument;
                indices out of range are refused on the CPU engine and fail the buffer on a GPU.
        """
        if is_compiling():
            from .ops import methods

            return methods.get_dispatch_layout(
                self, topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream
            )
        return self._normal.layout(topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream)

    @native
    def dispatch(
        self,
        x: Rows,
        handle: Sequence[Any] | None = None,
        num_tokens_per_rank: OptionalTensor = None,
        num_tokens_per_rdma_rank: OptionalTensor = None,
        is_token_in_rank: OptionalTensor = None,
        num_tokens_per_expert: OptionalTensor = None,
        topk_idx: OptionalTensor = None,
        topk_weights: OptionalTensor = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        global_expert_id_offset: int = 0,
    ) -> Dispatched:
        """Sends each token once to every rank that holds one of its experts.

        Args:
            x: ``[T, H]`` of any dtype, whose rows are moved as bytes, a multiple of 16 of them; BF16 where a combine
                follows. Or a pair (rows of a dtype of 1 byte, scales ``[T, S]`` float32 or int32 with any strides).
            handle: of an earlier dispatch: the same routing again, without top-k, counts and host wait.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert: what
                get_dispatch_layout returned.
            topk_idx: ``[T, K]`` int64 or int32, or None; together with
            topk_weights: ``[T, K]`` float32.
            expert_alignment: the counts of the list are rounded up to multiples of it.
            num_worst_tokens: > 0: outputs have that many rows and the host does not wait; needs top-k. On all ranks
                up to 1024, which GPUs serve in one kernel, or on all above.
            config: None: the default chunks for this many ranks, with the SMs of set_num_sms or the library's choice.
            previous_event, async_finish, allocate_on_comm_stream: as in get_dispatch_layout.
            global_expert_id_offset: is added to the entries of recv_topk_idx but -1; e.g. the rank's first expert.

        Returns:
            ``recv_x [N, H]`` (a pair for a pair), rows by source rank, then by token; ``recv_topk_idx [N, K]``: local
            experts or -1; ``recv_topk_weights [N, K]``, 0 there; a list of L counts; the handle; the event. With a
            handle given: ``(recv_x, None, None, None, None, event)``.

        Raises:
            DeepEPError: a rank is late, dead or disagrees; the text names it. Also a ValueError or TypeError for a
                wrong argument.
        """
        if is_compiling():
            from .ops import methods

            return methods.dispatch(
                self, x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
                num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens, config,
                previous_event, async_finish, allocate_on_comm_stream, global_expert_id_offset,
            )  # fmt: skip
        return self._normal.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert,
            topk_idx, topk_weights, expert_alignment, num_worst_tokens, config, self._sms_of_calls(), previous_event,
            async_finish, allocate_on_comm_stream, global_expert_id_offset,
        )  # fmt: skip

    @native
    def combine(
        self,
        x: Tensor,
        handle: Sequence[Any],
        topk_weights: OptionalTensor = None,
        bias: Tensor | tuple[OptionalTensor, OptionalTensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, OptionalTensor, EventOverlap]:
        """Sums, for each token, the rows that came from it.

        Args:
            x: ``[N, H]`` BF16, one row for each row that dispatch received.
            handle: of that dispatch.
            topk_weights: ``[N, K]`` float32, summed likewise, or None.
            bias: ``[T, H]`` BF16, or a pair of such; added to the sum.
            config, previous_event, async_finish, allocate_on_comm_stream: as in dispatch.

        Returns:
            ``combined_x [T, H]`` BF16 (accumulated in FP32; 0 plus biases for a token that went nowhere),
            ``combined_topk_weights [T, K]`` float32 or None, and the event.

        Raises:
            DeepEPError: a rank is late, dead or disagrees; the text names it. Also a ValueError or TypeError for a
                wrong argument, or a handle of another shape.
        """
        if is_compiling():
            from .ops import methods

            return methods.combine(
                self, x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream
            )
        return self._normal.combine(
            x, handle, topk_weights, bias, config, self._sms_of_calls(), previous_event, async_finish,
            allocate_on_comm_stream,
        )  # fmt: skip

    def internode_dispatch(self, x: Rows, *args: Any, **keywords: Any) -> Dispatched:
        """dispatch() with `config` required; the name that internode code calls."""
        _require_config(args[9] if len(args) > 9 else keywords.get("config"))
        return self.dispatch(x, *args, **keywords)

    def internode_combine(
        self, x: Tensor, handle: Sequence[Any], *args: Any, **keywords: Any
    ) -> tuple[Tensor, OptionalTensor, EventOverlap]:
        """combine() with `config` required; the name that internode code calls."""
        _require_config(args[2] if len(args) > 2 else keywords.get("config"))
        return self.combine(x, handle, *args, **keywords)

    # ---- low-latency mode

    @native
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: OptionalTensor = None,
        dispatch_wait_recv_cost_stats: OptionalTensor = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: OptionalTensor = None,
        use_nvfp4: bool = False,
        x_global_scale: OptionalTensor = None,
        pertoken_quant: bool = False,
        opt_level: Any = None,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends each token to its experts' ranks, into rows by local expert.

        Args:
            x: ``[T, H]`` BF16, T <= B, H a multiple of 128.
            topk_idx: ``[T, K]`` int64 or int32, K <= 32; -1 is skipped, a repeated expert gets one row.
            num_max_dispatch_tokens_per_rank: B, the same on all ranks.
            num_experts: E, the same on all ranks, a multiple of their number.
            cumulative_local_expert_recv_stats: ``[L]`` int32, += received tokens, or None.
            dispatch_wait_recv_cost_stats: ``[R]`` int64, += nanoseconds waited for each rank, or None.
            use_fp8: cast to e4m3 with one scale a token and 128 channels.
            round_scale: scales are powers of two.
            use_ue8m0: scales are packed exponent bytes; needs round_scale and H a multiple of 512.
            async_finish: True: the caller waits through the returned event.
            return_recv_hook: True: only send now; the hook receives, on the stream that is current now. Where
                ll_transfer is "stream" the whole call goes on beside that stream until the hook: nothing may write to
                its tensors.
            topk_weights: ``[T, K]`` float32 sent along, so that the send half of a combine may sum at the experts' rank
                too; or None.
            use_nvfp4: cast to NVFP4, whatever use_fp8 says: two e2m1 in a byte, the lower channel in the lower half,
                and one e4m3 scale a token and 16 channels. Not with round_scale or use_ue8m0. A value is then about
                e2m1 x scale / x_global_scale.
            x_global_scale: one float32, usually 448 x 6 over the greatest magnitude of x; with use_nvfp4. None: 1.
            pertoken_quant: a format of a fork of V1: False.
            opt_level: a hint to a fork of V1: no effect, and a warning.

        Returns:
            ``recv_x``: ``[L, R*B, H]`` BF16, or with FP8 the pair (e4m3, scales ``[L, R*B, H/128]`` float32, column-
            major in the last two axes; with use_ue8m0 ``[L, R*B, H/512]`` int32), with NVFP4 the pair (uint8
            ``[R*B, H/2, L]``, scales e4m3 ``[32, 4, M, 4, H/64, L]`` with M = R*B/128 rounded up), as masked grouped
            GEMMs of CuTe take them: views of ``[L, R*B, H/2]``, and of tiles of 128 rows x 4 scales ``[L, M, H/64, 32,
            4, 4]``; ``recv_count [L]`` int32; the handle
            ``(src_info [L, R*B], layout_range [L, R], B, H, E)``; the event; the hook or None. The tensors are new in
            each call, and no inference tensors in inference mode either.

        Raises:
            DeepEPError: a third send without its receive; a rank is late, dead or disagrees. Also a ValueError or
                TypeError for a wrong argument, and a NotImplementedError for a fork's format.
        """
        if pertoken_quant:
            _refuse_fork("low_latency_dispatch", {"pertoken_quant": pertoken_quant})
        if opt_level is not None:
            no_effect("opt_level", "it is a hint to a fork of V1")
        if use_nvfp4 is not False or x_global_scale is not None:
            if check_flag("use_nvfp4", use_nvfp4):
                return self._dispatch_nvfp4(
                    x, x_global_scale, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
                    cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, async_finish, return_recv_hook,
                    topk_weights, {"round_scale": round_scale, "use_ue8m0": use_ue8m0},
                )  # fmt: skip
            if x_global_scale is not None:
                raise value_error("x_global_scale", "a scale with use_nvfp4=False", "None, or use_nvfp4=True")
        if is_compiling():
            from .ops import methods

            return methods.low_latency_dispatch(
                self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
                dispatch_wait_recv_cost_stats, use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook,
                topk_weights,
            )  # fmt: skip
        mode = self._low_latency
        issue = mode.issue_dispatch
        if async_finish is not False:
            issue = mode.start_dispatch if async_finish is True and return_recv_hook is False else None
        if issue is not None:  # most calls end here
            done = issue(
                x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats,
                num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0, return_recv_hook,
            )  # fmt: skip
            if type(done) is tuple:
                return done
            mode.refused(done)
        return mode.dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats, use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook,
            topk_weights,
        )  # fmt: skip

    @native
    def _dispatch_nvfp4(
        self,
        x: Tensor,
        factor: OptionalTensor,
        topk_idx: Tensor,
        bound: int,
        num_experts: int,
        recv_stats: OptionalTensor,
        wait_stats: OptionalTensor,
        async_finish: bool,
        return_recv_hook: bool,
        topk_weights: OptionalTensor,
        of_fp8: dict[str, Any],
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """low_latency_dispatch with use_nvfp4; of_fp8: options of its scales."""
        for name, value in of_fp8.items():
            if check_flag(name, value):
                raise value_error(name, "True with use_nvfp4=True", "False: scales of NVFP4 are e4m3")
        recv_x, scales, count, handle, event, hook = self._dispatch_fp4(
            x, factor, topk_idx, bound, num_experts, recv_stats, wait_stats, async_finish, return_recv_hook,
            topk_weights, _abi.FP4_CAST,
        )  # fmt: skip
        return (recv_x, scales), count, handle, event, hook

    @native
    def _dispatch_fp4(self, *given: Any) -> Fp4Dispatched:
        """LowLatencyMode.dispatch_fp4; compiled callers have its operators."""
        if is_compiling():
            from .ops import methods

            return methods.low_latency_dispatch_fp4(self, *given)
        return self._low_latency.dispatch_fp4(*given)

    @native
    def low_latency_dispatch_fp4(
        self,
        x: Tensor,
        scales: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        cumulative_local_expert_recv_stats: OptionalTensor = None,
        dispatch_wait_recv_cost_stats: OptionalTensor = None,
        topk_weights: OptionalTensor = None,
    ) -> tuple[Tensor, Tensor, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """low_latency_dispatch of rows that are FP4 already: their bytes are moved with those of their scales.

        TensorRT-LLM's name. A combine of BF16 rows of H channels may follow.

        Args:
            x: ``[T, H/2]`` uint8 (or another dtype of 1 byte), two channels in a byte; H a multiple of 128.
            scales: ``[T, H/16]`` uint8 (or another dtype of 1 byte), one for 16 channels.
            topk_idx, num_max_dispatch_tokens_per_rank, num_experts: as in low_latency_dispatch.
            async_finish, return_recv_hook: likewise.
            cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, topk_weights: likewise.

        Returns:
            ``recv_x [L, R*B, H/2]`` and ``recv_scales [L, R*B, H/16]`` in the dtypes of x and scales, both contiguous,
            rows of an expert one after the other; ``recv_count [L]`` int32; the handle ``(src_info [L, R*B],
            layout_range [L, R], B, H, E)``; the event; the hook or None.

        Raises:
            DeepEPError: as in low_latency_dispatch. Also a ValueError or TypeError for a wrong argument.
        """
        return self._dispatch_fp4(
            x, scales, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats, async_finish, return_recv_hook, topk_weights, _abi.FP4_PACKED,
        )  # fmt: skip

    @native
    def low_latency_combine_low_precision(
        self,
        precision: str,
        x: Tensor,
        global_scales: OptionalTensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Sequence[Any],
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: OptionalTensor = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """low_latency_combine whose rows take fewer bytes on the wire. TensorRT-LLM's name.

        Args:
            precision: "fp8": rows cross in LogFMT-10, as with use_logfmt: 1.28 bytes a channel instead of 2, and for
                usual activations a smaller error than that of e4m3.
            x, topk_idx, topk_weights, handle, async_finish, return_recv_hook, out: as in low_latency_combine.
            global_scales: None: each 128 channels have their own range.
            zero_copy: False.

        Returns:
            As low_latency_combine.

        Raises:
            NotImplementedError: precision "nvfp4".
            DeepEPError: as in low_latency_combine. Also a ValueError or TypeError for a wrong argument.
        """
        if precision == "nvfp4":
            text = 'low_latency_combine_low_precision(): precision="nvfp4" is not supported; "fp8" is'
            raise errors.DeepEPNotImplementedError(errors.UNSUPPORTED, text)
        if precision != "fp8":
            raise value_error("precision", repr(precision), '"fp8"')
        if global_scales is not None:
            raise value_error("global_scales", f"a {type(global_scales).__name__}", 'None with precision="fp8"')
        return self.low_latency_combine(
            x, topk_idx, topk_weights, handle, True, zero_copy, async_finish, return_recv_hook, out
        )

    @native
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Sequence[Any],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: OptionalTensor = None,
        combine_wait_recv_cost_stats: OptionalTensor = None,
        *,
        unreduced: bool = False,
        overlap: bool = False,
        packed_recv_count: OptionalTensor = None,
        comp_signal: OptionalTensor = None,
        block_m: int = 0,
        threshold: int = 0,
        num_sms: int = 0,
        src_signals: OptionalTensor = None,
        src_signal_expect_value: int = 0,
        opt_level: Any = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Sums each token's rows, weighted, back at its rank.

        Args:
            x: ``[L, R*B, H]`` BF16: the experts' outputs, row by row as dispatch delivered them. H is a multiple of 128
                and may differ from dispatch's.
            topk_idx: ``[T, K]`` as given to dispatch.
            topk_weights: ``[T, K]`` float32.
            handle: of the dispatch.
            use_logfmt: rows cross the wire in LogFMT-10; on GPUs, as without it, the sums of a rank's rows for a token.
            zero_copy: the rows are in get_next_low_latency_combine_buffer(); x is ignored, and H is the handle's. Not
                with use_logfmt.
            async_finish, return_recv_hook: as in low_latency_dispatch. Where ll_transfer is "copy" or "stream",
                nothing may write to x and the handle's tensors before the hook is called.
            out: ``[T, H]`` BF16 to fill, or None.
            combine_wait_recv_cost_stats: ``[R]`` int64, += nanoseconds waited for each rank, or None.
            unreduced: every expert's row crosses the wire and is summed at the token's rank. Else a rank with a GPU may
                first sum its own experts' rows for a token, and round.
            overlap, packed_recv_count, comp_signal, block_m, threshold, num_sms, src_signals, src_signal_expect_value:
                combine while the experts still compute, in forks of V1: False, None or 0.
            opt_level: a hint to a fork of V1: no effect, and a warning.

        Returns:
            ``combined_x [T, H]`` BF16 (FP32 sums of weight x row), the event, the hook or None.

        Raises:
            DeepEPError: a third send without its receive; a rank is late, dead or disagrees. Also a ValueError or
                TypeError for a wrong argument, and a NotImplementedError for a fork's overlap.
        """
        tensors = packed_recv_count is not None or comp_signal is not None or src_signals is not None
        if tensors or overlap or block_m or threshold or num_sms or src_signal_expect_value:
            asked: dict[str, Any] = {"overlap": overlap, "block_m": block_m, "threshold": threshold, "num_sms": num_sms}
            asked |= {"packed_recv_count": packed_recv_count, "comp_signal": comp_signal, "src_signals": src_signals}
            _refuse_fork("low_latency_combine", asked | {"src_signal_expect_value": src_signal_expect_value})
        if opt_level is not None:
            no_effect("opt_level", "it is a hint to a fork of V1")
        if is_compiling():
            from .ops import methods

            return methods.low_latency_combine(
                self, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out,
                combine_wait_recv_cost_stats, unreduced,
            )  # fmt: skip
        mode = self._low_latency
        issue = mode.issue_combine
        if async_finish is not False:
            issue = mode.start_combine if async_finish is True and return_recv_hook is False else None
        if issue is not None and type(handle) is tuple and len(handle) == 5:  # most calls end here
            src_info, layout_range, bound, hidden, num_experts = handle
            done = issue(
                None if zero_copy is True else x, topk_idx, topk_weights, src_info, layout_range, out,
                combine_wait_recv_cost_stats, bound, hidden, num_experts, use_logfmt, zero_copy, unreduced,
                return_recv_hook,
            )  # fmt: skip
            if type(done) is tuple:
                return done
            mode.refused(done)
        return mode.combine(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out,
            combine_wait_recv_cost_stats, unreduced,
        )  # fmt: skip

    @opaque
    def get_next_low_latency_combine_buffer(self, handle: Sequence[Any]) -> Tensor:
        """Where the rows of the next combine may be written for ``zero_copy=True``.

        Peers read the rows in place, so no rank may leave two zero-copy combines sent and not received.

        Args:
            handle: of the dispatch.

        Returns:
            ``[L, R*B, H]`` BF16, rows contiguous, a view of the buffer for the next low-latency call only.

        Raises:
            DeepEPError: the buffer has failed or is destroyed. Also a ValueError or TypeError for a wrong handle.
        """
        return self._low_latency.next_combine_buffer(handle)

    @opaque
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Empties the low-latency slots of every rank, e.g. after normal mode used the same memory. Collective.

        Args:
            num_max_dispatch_tokens_per_rank: B of the calls to come.
            hidden: H of them.
            num_experts: E of them.

        Raises:
            DeepEPError: a rank is late or dead. Also a ValueError or TypeError for a wrong argument.
        """
        self._low_latency.clean(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @opaque
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks or unmasks a rank: calls of both modes send it nothing and await nothing from it.

        Args:
            rank_to_mask: the rank, from 0 to R - 1.
            mask: True masks it, False unmasks it.

        Raises:
            DeepEPError: the buffer was made without enable_shrink, or has failed. Also a ValueError or TypeError for a
                wrong argument.
        """
        self._low_latency.update_mask(rank_to_mask, mask)

    @opaque
    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each masked rank, 0 for the others.

        Args:
            mask_status: ``[R]`` int32, written on the current stream.

        Raises:
            DeepEPError: the buffer was made without enable_shrink, or has failed. Also a ValueError or TypeError for a
                wrong argument.
        """
        self._low_latency.query_mask(mask_status)

    @opaque
    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks every rank.

        Raises:
            DeepEPError: the buffer was made without enable_shrink, or has failed.
        """
        self._low_latency.clean_mask()

    # ---- both modes

    @opaque
    def barrier(self) -> None:
        """Waits, on the current stream, until every rank has come here. Collective.

        Raises:
            DeepEPError: a rank is late or dead; the text names it.
        """
        self._core.enter()
        self._core.on_current_stream(self._core.native.lib.with_gil.deepep_barrier)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics since the buffer was made.

        Returns:
            For each operation ("layout", "notify", "dispatch", "combine", "low_latency_dispatch",
            "low_latency_combine", "clean", "barrier", "mask"): ``calls``, ``errors``, ``bytes`` (payload sent),
            ``wait_ns``, ``total_ns``, ``mean_us``, ``p50_us``, ``p99_us``, ``p999_us``, ``max_us``,
            ``bytes_to_peer [R]`` and ``wait_ns_per_peer [R]``. Times are of the operation's kernels.

        Raises:
            DeepEPError: the buffer is destroyed.
        """
        self._core.enter()
        return _native.stats(self._core.native, self.group_size)

    def get_local_buffer_tensor(
        self, dtype: DType, size: Size | Sequence[int] | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """A view of the raw buffer, valid until destroy(). Afterwards, on the CPU engine, it reads zeros.

        Args:
            dtype: of the view.
            size: its shape (torch.Size); None: all that is left, one-dimensional.
            offset: where it begins, in bytes; a multiple of the item size.
            use_rdma_buffer: the RDMA region instead of the NVLink region.

        Returns:
            A tensor of this dtype and shape over the buffer's memory; empty where the region has no bytes.

        Raises:
            DeepEPError: the buffer is destroyed. Also a ValueError or TypeError for a wrong argument.
        """
        core = self._core
        core.enter()
        if not isinstance(dtype, DType):
            raise type_error("dtype", repr(dtype), "a torch.dtype")
        native, pointer, total = core.native, ctypes.c_void_p(), ctypes.c_uint64()
        region = native.lib.with_gil.deepep_buffer_region
        rdma = int(check_flag("use_rdma_buffer", use_rdma_buffer))
        native.check(region(native, rdma, ctypes.byref(pointer), ctypes.byref(total)))
        item, begin = dtype.itemsize, check_int("offset", offset, -MAX_BYTES, MAX_BYTES)
        if begin < 0 or begin > total.value or begin % item:
            raise value_error("offset", begin, f"a multiple of {item} from 0 to {total.value}")
        count = (total.value - begin) // item
        if size is not None:
            count = _count_items(size, count)
        flat = _torch.view_of((pointer.value or 0) + begin, count * item, core.device, core).view(dtype)
        return flat if size is None else flat.view(tuple(size))

    def get_comm_stream(self) -> Any:
        """The communication stream.

        Returns:
            A torch.cuda.Stream; on the CPU engine a torch.cpu.Stream.

        Raises:
            DeepEPError: the buffer is destroyed.
        """
        self._core.enter()
        return self._core.comm_stream

    @property
    def num_nodes(self) -> int:
        """NVLink domains of the group."""
        return self._core.num_nodes

    @property
    def num_nvl_peers(self) -> int:
        """Ranks of one NVLink domain."""
        return self._core.num_nvl_peers

    @property
    def rdma_team(self) -> list[int]:
        """The RDMA sub-team: the rank of this one's index on each node, itself among them, in the order of the nodes.

        Rows of normal mode cross between these ranks alone. On one node it is this rank.
        """
        return list(self._core.rdma_team)

    @property
    def ll_transfer(self) -> str:
        """How low-latency calls in halves run: "sm", "copy" or "stream" (DEEPEP_LL_TRANSFER)."""
        return self._core.ll_transfer

    @property
    def normal_transfer(self) -> str:
        """What moves rows of normal mode inside a node where it can: "sm" or "copy" (DEEPEP_NORMAL_TRANSFER)."""
        return self._core.normal_transfer

    @property
    def device(self) -> Any:
        """The torch.device of the buffer's tensors."""
        return self._core.device

    # ---- statics

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs that normal-mode calls without a config use.

        Until this is called the library chooses for each call by its bytes, links and top-k (see deep_ep.plan), while
        Buffer.num_sms, which clients halve, and the configs of get_dispatch_config and get_combine_config say 20.

        Args:
            new_num_sms: even, 0 or more; 0: the library's choice.

        Raises:
            DeepEPError (also an AssertionError): the number is odd or negative.
        """
        try:
            number = check_int("new_num_sms", new_num_sms, 0)
        except errors.DeepEPError:
            number = 1
        assertion(number % 2 == 0, f"new_num_sms: got {new_num_sms!r}, allowed an even int >= 0")
        Buffer.num_sms, Buffer._num_sms_given = number, True

    @classmethod
    def _sms_of_calls(cls) -> int:
        """SMs of calls without a config: what set_num_sms or an assignment says; 0: the library's choice."""
        return cls.num_sms if cls._num_sms_given or cls.num_sms != DEFAULT_NUM_SMS else 0

    capture = staticmethod(captured)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True if the CUDA kernels contain code for compute capability 9.0."""
        return is_sm90_compiled()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of `num_rdma_bytes` that low-latency calls of this shape need.

        Args:
            num_max_dispatch_tokens_per_rank: B, the most tokens that a rank dispatches in one call.
            hidden: H, channels of a BF16 row.
            num_ranks: R.
            num_experts: E of all ranks together, a multiple of R.

        Raises:
            DeepEPError (also a ValueError or TypeError): a number is not allowed.
        """
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A config for dispatch among this many ranks, any number >= 1."""
        return _default_config(0, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A config for combine among this many ranks, any number >= 1."""
        return _default_config(1, num_ranks)


def is_sm90_compiled() -> bool:
    """True if the CUDA kernel library is there and contains code for compute capability 9.0."""
    info = _abi.sized(_abi.EngineInfo)
    lib = library()
    status = lib.without_gil.deepep_engine_query(b"cuda", ctypes.byref(info))
    return bool(status == errors.OK and info.sm90_compiled)


def _refuse_fork(function: str, keywords: dict[str, Any]) -> None:
    """Names the first of a fork's keywords that asks for something."""
    for name, value in keywords.items():
        if isinstance(value, Tensor) or value:
            given = "a tensor" if isinstance(value, Tensor) else repr(value)
            text = f"{function}(): the keyword {name} ({given}) belongs to a fork of V1 and is not supported"
            raise errors.DeepEPNotImplementedError(errors.UNSUPPORTED, text)


def _require_config(config: object) -> None:
    assertion(config is not None, "argument config: got None, allowed a Config (internode calls need one)")


def _count_items(size: Sequence[int], available: int) -> int:
    """The items of a shape, which must be there."""
    if not isinstance(size, (tuple, list)):
        raise type_error("size", repr(size), "a torch.Size, a tuple or a list")
    wanted = 1
    for length in size:
        wanted *= check_int("size", length, 0, MAX_BYTES)
    if wanted > available:
        raise value_error("size", list(size), f"at most {available} items from this offset")
    return wanted


def _default_config(kind: int, num_ranks: int) -> Config:
    config = Config.default(kind, num_ranks)
    config._native.num_sms = Buffer.num_sms
    config._read()
    return config


def _whole(name: str, value: object) -> int:
    """An int >= 0; clients divide to get one, so a whole float is one too."""
    return check_int(name, int(value) if isinstance(value, float) and value.is_integer() else value, 0)


def milliseconds(timeout: object) -> int:
    if timeout is None:
        return 0
    valid = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 < timeout <= MAX_SECONDS
    if not valid:
        raise value_error("timeout", repr(timeout), f"seconds > 0 and <= {MAX_SECONDS}, or None")
    assert isinstance(timeout, (int, float))
    return max(1, round(timeout * 1000))


def _choose_engine(engine: str | None) -> str:
    """The engine's name; for None and "auto" the library asks DEEPEP_ENGINE, then the machine."""
    if engine not in (None, "auto", "cpu", "cuda"):
        raise value_error("engine", repr(engine), "None, 'auto', 'cpu' or 'cuda'")
    if engine in ("cpu", "cuda"):
        return engine
    info, lib = _abi.sized(_abi.EngineInfo), library()
    lib.check(lib.without_gil.deepep_engine_query(b"auto", ctypes.byref(info)))
    return str(info.name.decode())


def _buffer_options(
    asked: str, engine: str, timeout_ms: int, numbers: dict[str, int], switches: dict[str, bool]
) -> Any:
    """deepep_buffer_options. The library gets the name that was asked for, so that it can say why it chose `engine`."""
    if engine == "cuda":
        _memory.give_back_rows()
    return _abi.sized(
        _abi.BufferOptions,
        device=_torch.current_cuda_device() if engine == "cuda" else -1,
        engine=asked.encode(),
        timeout_ms=timeout_ms,
        background=1,  # the rest is waited for in slices, so that Ctrl-C is seen
        **numbers,
        **{name: int(check_flag(name, value)) for name, value in switches.items()},
    )


def _join(key: object, rank: int | None, engine: str, device: int) -> _native.NativeGroup:
    if not isinstance(key, str) or "\0" in key:
        raise type_error("join", repr(key), "the join_key of a buffer")
    place = -1 if rank is None else check_int("join_rank", rank, 0)
    return _native.group_by_join(key, place, engine, device)


def _make_group(group: Any, comm: Any, bootstrap: Bootstrap | None, options: dict[str, int]) -> _native.NativeGroup:
    given = [name for name, value in (("group", group), ("comm", comm), ("bootstrap", bootstrap)) if value is not None]
    if not given:
        raise _torch.not_a_group(None)
    if group is not None:
        rank, size, allgather = _torch.gather_function(group)
        return _native.group_from_allgather(rank, size, allgather, **options)
    if comm is not None:
        missing = [name for name in ("Get_rank", "Get_size", "allgather") if not callable(getattr(comm, name, None))]
        if missing:
            given_type, methods = type(comm).__name__, ", ".join(missing)
            raise type_error("comm", f"{given_type} without {methods}", "an mpi4py communicator or the like")
        rank, size = check_int("comm.Get_rank()", comm.Get_rank()), check_int("comm.Get_size()", comm.Get_size())
        return _native.group_from_allgather(rank, size, lambda blob: list(comm.allgather(blob)), **options)
    if not isinstance(bootstrap, Bootstrap):
        raise type_error("bootstrap", type(bootstrap).__name__, "a deep_ep.Bootstrap or None")
    return _native.group_from_bootstrap(bootstrap, **options)
