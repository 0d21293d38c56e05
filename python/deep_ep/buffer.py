"""Buffer: what moves tokens to their experts and back."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from typing import Any

from . import _abi, _native, errors
from . import _torch as tt
from ._lib import library
from ._low_latency import LowLatencyMode
from ._normal import NormalMode
from .bootstrap import Bootstrap
from .config import Config, low_latency_size_hint
from .errors import assertion, type_error, value_error
from .utils import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

ZERO_COPY_BYTES = 512 << 20  # two batches of 4096 tokens of 7168 BF16 over 4 ranks


class Runtime:
    """``buffer.runtime``: what code written for V1 asks of the extension object."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = weakref.ref(buffer)

    def _info(self) -> Any:
        buffer = self._buffer()
        if buffer is None or not buffer.native.alive:
            raise errors.DeepEPError(errors.INVALID_STATE, "the buffer is destroyed")
        return buffer.native.info()

    def is_available(self) -> bool:
        """True while the buffer can be used."""
        buffer = self._buffer()
        return buffer is not None and buffer.native.alive and buffer.ready()

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


class Buffer(NormalMode, LowLatencyMode):
    """Expert-parallel communication of one group. The constructor is collective.

    Args:
        group: a torch.distributed group of any backend, or None with `comm` or `bootstrap`.
        num_nvl_bytes: bytes for normal mode inside a node; see Config.get_nvl_buffer_size_hint.
        num_rdma_bytes: bytes for low-latency mode and between nodes; see get_low_latency_rdma_size_hint.
        low_latency_mode: allow the low-latency calls.
        num_qps_per_rank: queue pairs toward each rank, between nodes.
        allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: which links may be used.
        explicitly_destroy: True: destroy() may be called; False: the finalizer frees.
        enable_shrink: low-latency calls go on without ranks that are lost; masks are allowed.
        comm: an mpi4py communicator (or anything with Get_rank, Get_size and allgather) instead of `group`.
        preinitialize: do everything now that the first call would do.
        background: return after one exchange on the group; the first call waits for the rest.
        engine: "cpu", "cuda" or None: DEEPEP_ENGINE, or CUDA where a device and its library are there.
        timeout: seconds that a call waits for a living peer; None: DEEPEP_TIMEOUT_MS, or 100.
        num_nvl_peers: ranks of one NVLink domain; None: DEEPEP_NUM_MAX_NVL_PEERS, or 8.
        bootstrap: where ranks meet without torch.distributed; see deep_ep.Bootstrap.
        zero_copy_bytes: CUDA: memory for rows of normal-mode dispatch that peers write without a copy; what does not
            fit is copied. None: DEEPEP_ZERO_COPY_BYTES, or 512 MiB where num_nvl_bytes > 0. The same on all ranks.

    Raises:
        DeepEPError: also a ValueError or TypeError where an argument is wrong; names the ranks that disagree, are late
            or dead.
    """

    num_sms: int = 20

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
    ) -> None:
        numbers = {
            "num_nvl_bytes": num_nvl_bytes,
            "num_rdma_bytes": num_rdma_bytes,
            "num_qps_per_rank": num_qps_per_rank,
        }
        for name, value in numbers.items():
            _check_int(name, value, 0)
        if num_nvl_peers is not None:
            _check_int("num_nvl_peers", num_nvl_peers, 1)
        self._zero_copy_bytes = _zero_copy_bytes(zero_copy_bytes, num_nvl_bytes)
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise value_error("timeout", repr(timeout), "seconds > 0, or None")
        if engine not in (None, "auto", "cpu", "cuda"):
            raise value_error("engine", repr(engine), "None, 'auto', 'cpu' or 'cuda'")
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._kept: deque[Any] = deque()
        self._default_configs: dict[tuple[int, int], Any] = {}
        self._row_cache = tt.RowCache()
        self._forget_low_latency()
        milliseconds = 0 if timeout is None else max(1, round(timeout * 1000))
        self.engine = _choose_engine(engine)
        if self.engine == "cuda":
            tt.give_back_rows()
        options = _abi.sized(
            _abi.BufferOptions,
            device=tt.current_cuda_device() if self.engine == "cuda" else -1,
            engine=self.engine.encode(),
            timeout_ms=milliseconds,
            low_latency_mode=int(bool(low_latency_mode)),
            allow_nvlink_for_low_latency_mode=int(bool(allow_nvlink_for_low_latency_mode)),
            allow_mnnvl=int(bool(allow_mnnvl)),
            use_fabric=int(bool(use_fabric)),
            enable_shrink=int(bool(enable_shrink)),
            preinitialize=int(bool(preinitialize)),
            background=1,  # the rest is waited for in slices, so that Ctrl-C is seen
            **numbers,
        )
        shared = {"num_nvl_peers": num_nvl_peers or 0, "background": 1, "timeout_ms": milliseconds}
        native_group = _make_group(group, comm, bootstrap, shared)
        try:
            self.native = _native.NativeBuffer(native_group, options)
        except BaseException:
            native_group.destroy()
            raise
        self._finalizer = weakref.finalize(self, _free, self.native, native_group, os.getpid())
        self._adopt(self.native.info())
        self._ready = False
        self.runtime = Runtime(self)
        if not background:
            try:
                self.ensure_ready()
            except BaseException:
                self._finalizer()
                raise

    def _adopt(self, info: Any) -> None:
        self.rank, self.group_size = int(info.rank), int(info.size)
        self.num_nvl_peers = int(info.num_nvl_peers)
        self.host_stream = self.engine == "cpu"
        self.device = tt.device_of(self.engine, max(0, int(info.device)))
        self._where = -1 if self.host_stream else int(self.device.index)
        self.raw_stream = tt.stream_getter(self.device)

    def ensure_ready(self) -> None:
        """Waits for start-up; raises its failure, or says that the buffer is destroyed."""
        if not self.native.alive:
            raise errors.DeepEPError(errors.INVALID_STATE, "the buffer is destroyed")
        self.native.wait_ready()
        info = self.native.info()
        self._adopt(info)
        self.comm_stream_address = int(info.comm_stream or 0)
        self.comm_stream = tt.external_stream(self.comm_stream_address, self.device)
        if info.peer_rows and self._zero_copy_bytes and not self.host_stream and self.native.rows is None:
            index, pointer = self.native.open_segment(self._zero_copy_bytes)
            lib = self.native.lib
            self.native.rows = tt.RowPool(lib.path, lib.quick.deepep_pool_select, index, pointer, self._zero_copy_bytes)
        self._ready = True

    def ready(self) -> bool:
        """True once start-up is complete; never blocks."""
        return self._ready or (self.native.alive and self.native.wait_ready(0))

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits for start-up, at most `timeout` seconds. Returns whether it is complete; raises why it failed."""
        if not self._ready and not self.native.wait_ready(timeout):
            return False
        self.ensure_ready()
        return True

    def warmup(
        self,
        num_tokens: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        num_experts: int = 0,
        num_max_dispatch_tokens_per_rank: int = 0,
        use_fp8: bool = True,
    ) -> None:
        """Runs the planned shapes once, so that the first real call is as fast as the steady one. Collective.

        Args:
            num_tokens: tokens a rank of normal-mode calls; 0: none are planned.
            hidden: H.
            num_topk: K.
            num_experts: E.
            num_max_dispatch_tokens_per_rank: B of low-latency calls; 0: none are planned.
            use_fp8: whether low-latency dispatch casts to FP8.
        """
        self.enter()
        bound = num_max_dispatch_tokens_per_rank
        options = _abi.sized(_abi.WarmupOptions, use_fp8=int(bool(use_fp8)))
        if num_tokens:
            options.num_tokens, options.hidden, options.num_topk, options.num_experts = (
                num_tokens,
                hidden,
                num_topk,
                num_experts,
            )
        if bound:
            options.ll_num_max_tokens, options.ll_hidden = bound, hidden
            options.ll_num_topk, options.ll_num_experts = num_topk, num_experts
        lib = self.native.lib
        lib.check(lib.slow.deepep_buffer_warmup(self.native, ctypes.byref(options)))
        if num_tokens:
            self._run_normal(hidden, num_experts)
        if bound:
            self._touch_outputs(bound, hidden, num_experts, bool(use_fp8))
            self._run_low_latency(bound, hidden, num_topk, num_experts, bool(use_fp8))
        self.check()

    def check(self) -> None:
        """Raises the failure that made the buffer unusable, if there was one."""
        lib = self.native.lib
        lib.check(lib.quick.deepep_buffer_check(self.native))

    def destroy(self) -> None:
        """Frees everything here; local, bounded, waits for no peer. Twice is fine. Needs explicitly_destroy."""
        assertion(self.explicitly_destroy, "destroy() needs a buffer made with explicitly_destroy=True")
        self._ready = False
        self._finalizer()
        self._kept.clear()
        self._forget_low_latency()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics since the buffer was made.

        Returns:
            For each operation ("layout", "notify", "dispatch", "combine", "low_latency_dispatch",
            "low_latency_combine", "clean", "barrier", "mask"): ``calls``, ``errors``, ``bytes`` (payload sent),
            ``wait_ns``, ``total_ns``, ``mean_us``, ``p50_us``, ``p99_us``, ``p999_us``, ``max_us``,
            ``bytes_to_peer [R]`` and ``wait_ns_per_peer [R]``. Times are of the operation's kernels.
        """
        self.enter()
        return _native.stats(self.native, self.group_size)

    def hold_until_idle(self, tensors: tuple[Any, ...]) -> None:
        """Keeps tensors until everything issued so far is done (an interrupted call may still write to them)."""
        self._finalizer_keep = (getattr(self, "_finalizer_keep", ()), tensors)

    def get_local_buffer_tensor(
        self, dtype: Any, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> tt.Tensor:
        """A view of the raw buffer, valid until destroy().

        Args:
            dtype: of the view.
            size: its shape (torch.Size); None: all that is left, one-dimensional.
            offset: where it begins, in bytes; a multiple of the item size.
            use_rdma_buffer: the RDMA region instead of the NVLink region.
        """
        self.enter()
        if not isinstance(dtype, tt.DType):
            raise type_error("dtype", repr(dtype), "a torch.dtype")
        lib, pointer, total = self.native.lib, ctypes.c_void_p(), ctypes.c_uint64()
        rdma = int(bool(use_rdma_buffer))
        lib.check(lib.quick.deepep_buffer_region(self.native, rdma, ctypes.byref(pointer), ctypes.byref(total)))
        item = dtype.itemsize
        if offset < 0 or offset > total.value or offset % item:
            raise value_error("offset", offset, f"a multiple of {item} from 0 to {total.value}")
        count = (total.value - offset) // item
        if size is not None:
            wanted = 1
            for length in size:
                wanted *= length
            if wanted > count:
                raise value_error("size", list(size), f"at most {count} items from this offset")
            count = wanted
        flat = tt.view_of((pointer.value or 0) + offset, count * item, self.device, self).view(dtype)
        return flat if size is None else flat.view(size)

    def get_comm_stream(self) -> Any:
        """The communication stream as a torch stream."""
        self.enter()
        return self.comm_stream

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs that normal-mode calls without a config use; even.

        Raises:
            DeepEPError (also an AssertionError): the number is odd or negative.
        """
        valid = isinstance(new_num_sms, int) and not isinstance(new_num_sms, bool)
        assertion(
            valid and new_num_sms >= 0 and new_num_sms % 2 == 0,
            f"new_num_sms: got {new_num_sms!r}, allowed an even int >= 0",
        )
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The present end of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True if the CUDA kernels contain code for compute capability 9.0."""
        return is_sm90_compiled()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of `num_rdma_bytes` that low-latency calls of this shape need."""
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
    status = lib.slow.deepep_engine_query(b"cuda", ctypes.byref(info))
    return bool(status == errors.OK and info.sm90_compiled)


def _default_config(kind: int, num_ranks: int) -> Config:
    config = Config.default(kind, num_ranks)
    config._native.num_sms = Buffer.num_sms
    return config


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(name, repr(value), "an int")
    if value < least:
        raise value_error(name, value, f"an int >= {least}")


def _zero_copy_bytes(given: int | None, num_nvl_bytes: int) -> int:
    """Bytes of the row pool."""
    name, value = "zero_copy_bytes", given
    if value is None and "DEEPEP_ZERO_COPY_BYTES" in os.environ:
        name, text = "DEEPEP_ZERO_COPY_BYTES", os.environ["DEEPEP_ZERO_COPY_BYTES"]
        if not text.isdecimal():
            raise value_error(name, repr(text), "a number of bytes, 0 or more")
        value = int(text)
    if value is None:
        return ZERO_COPY_BYTES if num_nvl_bytes else 0
    _check_int(name, value, 0)
    return value


def _choose_engine(engine: str | None) -> str:
    """The engine's name; what is not said here is said by DEEPEP_ENGINE or the machine."""
    if engine in ("cpu", "cuda"):
        return engine
    info, lib = _abi.sized(_abi.EngineInfo), library()
    lib.check(lib.slow.deepep_engine_query(b"auto", ctypes.byref(info)))
    return str(info.name.decode())


def _make_group(group: Any, comm: Any, bootstrap: Bootstrap | None, options: dict[str, int]) -> _native.NativeGroup:
    given = [name for name, value in (("group", group), ("comm", comm), ("bootstrap", bootstrap)) if value is not None]
    if not given:
        raise value_error("group", "None without comm", "a torch.distributed group, or comm (mpi4py), or bootstrap")
    if group is not None:
        rank, size, allgather = tt.gather_function(group)
        return _native.group_from_allgather(rank, size, allgather, **options)
    if comm is not None:
        missing = [name for name in ("Get_rank", "Get_size", "allgather") if not callable(getattr(comm, name, None))]
        if missing:
            given_type, methods = type(comm).__name__, ", ".join(missing)
            raise type_error("comm", f"{given_type} without {methods}", "an mpi4py communicator or the like")
        return _native.group_from_allgather(
            int(comm.Get_rank()), int(comm.Get_size()), lambda blob: list(comm.allgather(blob)), **options
        )
    assert bootstrap is not None
    return _native.group_from_bootstrap(bootstrap, **options)


def _free(native: _native.NativeBuffer, group: _native.NativeGroup, owner: int) -> None:
    if os.getpid() == owner:
        native.destroy()
        group.destroy()
