"""What the package asks torch for: types, devices, streams, views of memory, and checks of tensors.

Only this module, _memory and the self-test import torch.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import torch

from . import _abi
from .errors import type_error, value_error

Tensor = torch.Tensor
CPU = torch.device("cpu")
OptionalTensor = Tensor | None
DType = torch.dtype
Device = torch.device
Size = torch.Size
Function = TypeVar("Function", bound=Callable[..., Any])
topk_idx_t = torch.int64
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
FLOAT32, INT32, INT64, BOOL = torch.float32, torch.int32, torch.int64, torch.bool
UINT8 = torch.uint8
INDEX_TYPES = {torch.int32: _abi.INT32, torch.int64: _abi.INT64}
ITEM_TYPES = {torch.bfloat16: _abi.BF16, torch.float8_e4m3fn: _abi.FP8_E4M3}
# Of torch's stable C ABI, in the order of the struct in python/face/face.c.
_C_ABI = (
    *("aoti_torch_get_data_ptr", "aoti_torch_get_layout", "aoti_torch_get_dim"),
    *("aoti_torch_get_sizes", "aoti_torch_get_strides"),
    *("aoti_torch_get_dtype", "aoti_torch_get_device_type", "aoti_torch_get_device_index"),
    *("aoti_torch_get_storage_size", "aoti_torch_get_storage_offset", "aoti_torch_dtype_element_size"),
    *("aoti_torch_empty_strided", "aoti_torch__reinterpret_tensor", "aoti_torch_delete_tensor_object"),
)
_VIEWS = ("aoti_torch_cpu_view_dtype", "aoti_torch_cuda_view_dtype")  # a torch may lack these, and the next four
_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"  # an object for a tensor, by the name that C++ compilers give it
_STREAMS = ("aoti_torch_create_cuda_stream_guard", "aoti_torch_delete_cuda_stream_guard")
_RECORD = "_ZN2at6native18record_stream_cudaERNS_6TensorEN3c106StreamE"  # at::native::record_stream_cuda, likewise
_C_ABI_SINCE = (2, 10)
_current_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
gpu_in_use: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # for who knows that CUDA is in use


# A context without torch's modes (set_default_device is one): under a mode every method of a tensor runs Python code.
without_modes: Callable[[], Any] = torch._C.DisableTorchFunction

# A context without torch's dispatch modes (FakeTensorMode is one): tensors that are made in it have memory.
without_dispatch_modes: Callable[[], Any] = torch._C._DisableTorchDispatch


def c_abi() -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The addresses of torch's C functions, and torch's objects, that the compiled face works with.

    Raises:
        ImportError, OSError, AttributeError: this torch does not have them.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _C_ABI_SINCE:
        raise ImportError(f"torch {torch.__version__} is older than {_C_ABI_SINCE[0]}.{_C_ABI_SINCE[1]}")
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _C_ABI]
    cuda = "libtorch_cuda.so"
    files = "libtorch_cpu.so", cuda, "libtorch_python.so", cuda, cuda, cuda
    addresses += map(_address_of, files, (*_VIEWS, _WRAP, *_STREAMS, _RECORD))
    c = torch._C
    make_object = c._aoti.alloc_tensor_by_stealing_from_void_ptr
    modes = (c._len_torch_function_stack, c.DisableTorchFunction)
    return tuple(addresses), (Tensor, make_object, *modes, torch.is_inference_mode_enabled, c._InferenceMode)


def _address_of(file: str, name: str) -> int:
    """The address of a function in one of torch's libraries; 0 if it is not there."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / file))
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def holders(tensor: Any) -> int:
    """How many references to its implementation a tensor has; 0 where torch does not tell."""
    count = getattr(tensor, "_use_count", None)
    return int(count()) if count is not None else 0


def cuda_available() -> bool:
    """True if torch can use a GPU."""
    return torch.cuda.is_available()


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch's allocator has raised it: that of the host raises a bare RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def device_of(engine: str, ordinal: int) -> torch.device:
    """The device on which an engine's tensors live."""
    return torch.device("cuda", ordinal) if engine == "cuda" else torch.device("cpu")


def current_cuda_device() -> int:
    """torch's current GPU; -1 without one."""
    return int(torch.cuda.current_device()) if cuda_available() else -1


def no_stream() -> int:
    """The CPU's only stream."""
    return 0


def stream_getter(device: torch.device) -> Callable[[], int]:
    """A function that gives the caller's current stream as an address; 0 on the CPU."""
    if device.type != "cuda" or _current_raw_stream is None:
        return no_stream
    return functools.partial(_current_raw_stream, device.index)


def stream_in_use() -> int:
    """The current stream of the current GPU as an address, for who knows that CUDA is in use."""
    return _current_raw_stream(gpu_in_use()) if _current_raw_stream is not None else 0


def external_stream(address: int, device: torch.device) -> Any:
    """A torch stream over the buffer's communication stream; on the CPU torch's own notion of a stream."""
    if device.type == "cuda":
        return torch.cuda.ExternalStream(address, device=device)  # type: ignore[no-untyped-call]
    return torch.cpu.Stream()


def torch_stream(index: int | None) -> Any:
    """The caller's current stream of a GPU as a torch object; torch.cuda.current_stream takes 10 times as long."""
    where = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice() if index is None else index)
    stream = _streams.get(where)
    if stream is None:
        if len(_streams) >= _MAX_STREAMS:
            _streams.clear()
        stream_id, device, kind = where
        stream = torch.cuda.Stream(stream_id=stream_id, device_index=device, device_type=kind)  # type: ignore[no-untyped-call]
        _streams[where] = stream
    return stream


_MAX_STREAMS = 256
_streams: dict[tuple[int, ...], Any] = {}  # torch's objects, by what torch's C functions say of the current stream


def numbers_of(stream: Any) -> tuple[int, int, int]:
    """By what torch knows a stream."""
    return int(stream.stream_id), int(stream.device_index), int(stream.device_type)


class stream_context:  # noqa: N801 - in place of torch.cuda.stream, which takes 10 times as long
    """Makes a CUDA stream current for a while."""

    __slots__ = ("_stream", "_device", "_before")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._device = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def __exit__(self, *_: object) -> None:
        stream_id, device, kind = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device, device_type=kind)
        if device != self._device:  # to set a stream sets its device too
            torch._C._cuda_setDevice(self._device)


def add_where_not_negative(indices: torch.Tensor, number: int) -> None:
    """Adds to every entry but the negative ones, in place, on the current stream."""
    indices.add_(indices.ge(0).to(indices.dtype), alpha=number)


def recorded_event() -> Any:
    """A torch event at the end of the current CUDA stream; None where there is no GPU in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch._C._CudaEventBase()  # torch.cuda.Event adds Python code to each of its methods
    event.record(torch_stream(None))
    return event


def wait_for(event: Any, stream: Any = None) -> None:
    """A stream waits for such an event; None: the caller's current one."""
    event.wait(torch_stream(None) if stream is None else stream)


def items(rows: Tensor) -> tuple[int, int]:
    """The library's type of rows that dispatch moves as they are, and their length in that type: else bytes."""
    known, width = ITEM_TYPES.get(rows.dtype), int(rows.shape[1])
    if known is not None:
        return known, width
    if rows.is_quantized:  # what they mean is not in their bytes
        raise type_error("x", f"a quantized tensor ({rows.dtype})", "a tensor whose bytes are its values: int_repr()")
    return _abi.UINT8, width * rows.dtype.itemsize


def has_views(*tensors: Tensor | None) -> bool:
    """Whether contiguous tensors of such a dtype may be views that do not mean their bytes, as torch's C ABI hides."""
    return any(tensor is not None and tensor.dtype.is_complex for tensor in tensors)


def meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def can_take_memory(tensor: torch.Tensor) -> bool:
    """Whether torch can put another tensor in this one's place: it has no view and no weak reference."""
    return not weakref.getweakrefs(tensor) and holders(tensor) <= 1


def take_memory(tensor: torch.Tensor, storage: torch.Tensor, begin: int) -> None:
    """A meta tensor becomes a view of `storage` from byte `begin` on; it stays the same object."""
    count = tensor.numel() * tensor.itemsize
    view = storage.view(torch.uint8)[begin : begin + count].view(tensor.dtype).view(tensor.shape)
    torch.utils.swap_tensors(tensor, view)  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    """The host waits for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record_all(values: Sequence[Any], device: torch.device) -> None:
    """Tells torch's allocator that the current CUDA stream uses the tensors among `values`, and in its pairs."""
    current = torch_stream(device.index)
    with without_modes():
        for value in values:
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Tensor):
                    one.record_stream(current)


def register_pytree(
    cls: type[Any], flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Has torch's tree functions see the tensors of a class."""
    torch.utils._pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}"
    )


is_compiling = torch.compiler.is_compiling
is_capturing = torch.cuda.is_current_stream_capturing
in_inference_mode = torch.is_inference_mode_enabled


def outside_inference_mode() -> Any:
    """A context in which new tensors are ordinary ones, whatever mode the caller is in."""
    return torch.inference_mode(False)


def opaque(function: Function) -> Function:
    """Keeps torch.compile out of a function and of what it calls: a call is a graph break.

    It does what torch.compiler.disable does, which costs 0.3 us a call and an import of torch._dynamo, and which takes
    its place where this torch has no mark of code objects.
    """
    marked = native(function)
    marked._torchdynamo_disable = True  # type: ignore[attr-defined]  # what dynamo asks before it traces into a call
    return marked


def native(function: Function) -> Function:
    """Keeps torch.compile from compiling a function by itself, and what it calls; compiled callers may trace into it.

    Without a mark of code objects it does what `opaque` does.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError):
        return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]
    return function


def full(shape: Sequence[int], value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that holds a value; names dtype and device, since callers change torch's defaults."""
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory; names dtype and device, since callers change torch's defaults."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def prototype(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one element in this shape, for `empty_like`: half as long as to name shape, dtype and device.

    It outlives the modes that its maker is in, and is an ordinary tensor whatever they are.
    """
    with torch.inference_mode(False), without_dispatch_modes():
        return torch.empty((1,), dtype=dtype, device=device).expand(tuple(shape))


empty_like: Callable[[Tensor], Tensor] = torch.empty_like


def like(tensor: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory of a tensor's dtype and device, which takes half the time of naming them."""
    return tensor.new_empty(*shape) if type(tensor) is Tensor else empty(shape, tensor.dtype, tensor.device)


def check(
    name: str,
    tensor: object,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    *,
    contiguous: bool = True,
) -> Tensor:
    """`tensor` if it has this device, one of these dtypes, this shape (None: any length) and memory; else an error."""
    try:
        if isinstance(tensor, Tensor) and tensor.dtype in dtypes and tensor.device == device:
            got = tensor.shape
            if len(got) == len(shape):
                for have, want in zip(got, shape, strict=True):
                    if have != want and want is not None:
                        break
                else:
                    if (not contiguous or tensor.is_contiguous()) and whole(tensor):
                        return tensor
        error = _refusal(name, tensor, device, dtypes, shape, contiguous)
    except RuntimeError as unknown:  # sparse, nested, of a transform: torch does not know its strides or its memory
        text = f"a tensor whose elements are not plain memory ({str(unknown).splitlines()[0][:120]})"
        error = type_error(name, text, "an ordinary tensor")
    try:
        raise error
    finally:
        del error  # whose frames have the caller's tensors and the buffer: a cycle would keep them


def length(tensor: object) -> int:
    """A tensor's first length; 0 for what has none, which `check` refuses."""
    try:
        return int(tensor.shape[0]) if isinstance(tensor, Tensor) and tensor.dim() else 0
    except RuntimeError:  # as in check
        return 0


def whole(tensor: Tensor) -> bool:
    """Whether a tensor's elements are in its memory, as they are: no caller has freed or cut that since, the type has
    some, and it is no view that negates or conjugates."""
    if tensor.is_neg() or tensor.is_conj():
        return False
    begin = tensor.storage_offset() * tensor.itemsize
    if tensor.data_ptr() == begin:  # the storage begins at address 0: a tracer's, or freed
        return tensor.numel() == 0
    if tensor.is_contiguous():
        end = begin + tensor.nbytes
    else:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.itemsize if tensor.numel() else 0
    return end <= tensor.untyped_storage().nbytes()


def _without_memory(name: str, tensor: Tensor) -> Exception:
    for is_view, kind, resolve in ((tensor.is_neg(), "negative", "neg"), (tensor.is_conj(), "conjugate", "conj")):
        if is_view:
            return type_error(name, f"a {kind} view", f"a tensor whose bytes are its values: resolve_{resolve}()")
    begin = tensor.storage_offset() * tensor.itemsize
    held = tensor.untyped_storage().nbytes() if tensor.data_ptr() != begin else 0
    given = f"shape {list(tensor.shape)} in {held} bytes of memory"
    return value_error(name, given, f"a tensor that has its {tensor.numel() * tensor.itemsize} bytes")


def _refusal(
    name: str,
    tensor: object,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    contiguous: bool,
) -> Exception:
    """The error for the first thing that is wrong with an argument."""
    if not isinstance(tensor, Tensor):
        return type_error(name, type(tensor).__name__, "a torch.Tensor")
    if tensor.layout is not torch.strided:
        return type_error(name, f"a tensor of layout {tensor.layout}", "an ordinary tensor")
    if tensor.dtype not in dtypes:
        return type_error(name, f"dtype {tensor.dtype}", " or ".join(str(d) for d in dtypes))
    if tensor.device != device:
        return value_error(name, f"a tensor on {tensor.device}", f"a tensor on {device}, where the buffer is")
    got = list(tensor.shape)
    if len(got) != len(shape) or any(want is not None and have != want for have, want in zip(got, shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        return value_error(name, f"shape {got}", f"[{wanted}]")
    if contiguous and not tensor.is_contiguous():
        return value_error(name, f"strides {list(tensor.stride())} for shape {got}", "a contiguous tensor")
    return _without_memory(name, tensor)


def check_indices(name: str, tensor: Tensor, num_experts: int) -> None:
    """Raises if a CPU tensor holds an index outside [-1, num_experts)."""
    if tensor.numel() == 0:
        return
    smallest, largest = (int(value) for value in torch.aminmax(tensor))
    if smallest < -1 or largest >= num_experts:
        bad = smallest if smallest < -1 else largest
        raise value_error(name, f"an index {bad}", f"-1 to num_experts - 1 = {num_experts - 1}")


def plain(tensor: object, dtype: torch.dtype, ordinal: int, shape: tuple[int, ...]) -> TypeGuard[Tensor]:
    """True for a contiguous tensor of this dtype and shape on GPU `ordinal` (-1: on the CPU), which has its memory.

    For hot paths. If False, `check` raises the error, or accepts another dtype.
    """
    try:
        return (
            type(tensor) is Tensor
            and tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.is_contiguous()
            and tensor.get_device() == ordinal
            and whole(tensor)
        )
    except RuntimeError:  # as in check
        return False


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element, for ctypes."""
    return tensor.data_ptr() if tensor is not None else None


class _CudaMemory:
    """Raw device memory for torch.as_tensor; keeps its owner alive."""

    def __init__(self, pointer: int, count: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def view_of(pointer: int, count: int, device: torch.device, owner: object) -> Tensor:
    """`count` bytes at `pointer` as a uint8 tensor that keeps `owner` alive."""
    if count == 0:
        return empty((0,), torch.uint8, device)
    if device.type == "cuda":
        return torch.as_tensor(_CudaMemory(pointer, count, owner), device=device)
    memory = (ctypes.c_uint8 * count).from_address(pointer)
    memory._owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def not_a_group(group: object) -> Exception:
    """The error for a group that is none."""
    import torch.distributed as dist

    if group is None:
        allowed = "a torch.distributed group (dist.group.WORLD is None before init_process_group), or another way"
        return value_error("group", "None", f"{allowed} for the ranks to meet: comm of Buffer, or bootstrap")
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        allowed = "a group that this rank is in: new_group() of other ranks gives it this"
        return type_error("group", "GroupMember.NON_GROUP_MEMBER", allowed)
    missing = [name for name in ("rank", "size") if not callable(getattr(group, name, None))]
    given = f"{type(group).__name__}{' without ' if missing else ''}{', '.join(missing)}"
    return type_error("group", given, "a torch.distributed.ProcessGroup or the like")


def gather_function(group: Any) -> tuple[int, int, Callable[[bytes], list[bytes]]]:
    """Rank, size and an all-gather of bytes over a torch.distributed group (object all-gather only)."""
    import torch.distributed as dist

    def allgather(blob: bytes) -> list[bytes]:
        blobs: list[Any] = [None] * size
        dist.all_gather_object(blobs, blob, group=group)
        return cast(list[bytes], blobs)

    if any(not callable(getattr(group, name, None)) for name in ("rank", "size")):
        raise not_a_group(group)
    # Asked of the group itself: it need not be registered with torch.distributed.
    rank, size = int(group.rank()), int(group.size())
    return rank, size, allgather
