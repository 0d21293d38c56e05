"""Load balancing of weights in V2.5: experts' copies on other ranks, and their gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from . import _abi, _torch
from ._core import Core
from ._elastic import ElasticMode, Event, Order
from ._torch import FLOAT32, INT32, UINT8, Tensor
from .errors import assertion, check_int, type_error, value_error
from .utils import EventHandle, EventOverlap

UNIT = 2 << 20  # bytes on which allocations begin
MOST_TENSORS = _abi.MAX_BALANCED
Tensors = Tensor | Sequence[Tensor]


class BufferAllocator:
    """Plans tensors in an EPBuffer's load-balancing region: shapes first, memory with the buffer.

    Attributes:
        num_bytes: of the region, a multiple of 2 MiB.
        materialized: whether the tensors have memory.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.materialized = False
        self._planned: list[tuple[Tensor, int]] = []

    def allocate(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Reserves a tensor.

        Returns:
            A meta tensor, which gets its memory when the plan is materialized.

        Raises:
            DeepEPError (also an AssertionError): the plan is materialized.
        """
        assertion(not self.materialized, "allocate() of a BufferAllocator that is materialized")
        tensor = _torch.meta(shape, dtype)
        self._planned.append((tensor, self.num_bytes))
        self.num_bytes += -(-tensor.numel() * tensor.itemsize // UNIT) * UNIT
        return tensor

    def check(self) -> None:
        """Raises a DeepEPError (also an AssertionError) unless materialize() can turn every tensor."""
        assertion(not self.materialized, "materialize() of a BufferAllocator that is materialized")
        for number, (tensor, _) in enumerate(self._planned):
            text = f"tensor {number} of a BufferAllocator ({list(tensor.shape)}) has a view or a weak reference"
            assertion(_torch.can_take_memory(tensor), f"{text}: take it once the tensors have memory")

    def materialize(self, storage: Tensor) -> None:
        """Turns the tensors into views of `storage`, uint8 of `num_bytes` bytes; once.

        Raises:
            DeepEPError: also a ValueError, TypeError or AssertionError: not this size, not for the first time, or a
                tensor cannot be turned. Nothing has changed then.
        """
        self.check()
        is_tensor = isinstance(storage, Tensor)
        if is_tensor and storage.numel() * storage.itemsize != self.num_bytes:
            raise value_error("storage", f"{storage.numel() * storage.itemsize} bytes", f"{self.num_bytes} bytes")
        device, dtype = (storage.device, storage.dtype) if is_tensor else (_torch.CPU, UINT8)
        _torch.check("storage", storage, device, (dtype,), (None,))
        offset, unit = storage.storage_offset() * dtype.itemsize, max((t.itemsize for t, _ in self._planned), default=1)
        if offset % unit:  # torch refuses such views one by one, when others have been turned
            raise value_error("storage", f"a view {offset} bytes into its memory", f"one at a multiple of {unit} bytes")
        self.materialized = True
        for tensor, begin in self._planned:
            _torch.take_memory(tensor, storage, begin)
        self._planned.clear()


class Balancing:
    """The calls of one EPBuffer."""

    def __init__(self, core: Core, mode: ElasticMode) -> None:
        self._core, self._mode = core, mode

    def move(
        self, copies: Tensors, own: Tensors, mapping: Tensor, reduce: bool, num_sms: int, previous_event: Event
    ) -> EventOverlap:
        """EPBuffer.lb_prefetch_weights, or with `reduce` lb_reduce_grads."""
        core, native = self._core, self._core.native
        core.enter()
        first, second = self._check(copies, own, mapping, FLOAT32 if reduce else None)
        slots, local = int(mapping.shape[1]), len(second[0])
        args = _abi.sized(_abi.BalanceArgs, num_tensors=len(first), num_slots=slots, num_local_experts=local)
        if not slots or not local:  # there is nothing to move
            return EventOverlap(EventHandle())
        for number, (copy, one) in enumerate(zip(first, second, strict=True)):
            args.expert_bytes[number] = one[0].numel() * one.itemsize
            args.copies[number], args.experts[number] = copy.data_ptr(), one.data_ptr()
        needs = native.balance_workspace(args, reduce)
        order = Order(core, previous_event, True, previous_event is not None)
        with order.context:
            workspace = _torch.empty((needs,), UINT8, core.device)
        args.mapping, args.workspace, args.workspace_bytes = mapping.data_ptr(), workspace.data_ptr(), needs
        lib = native.lib.with_gil
        function = lib.deepep_reduce_grads if reduce else lib.deepep_prefetch_weights
        return order.last(
            function,
            ctypes.byref(args),
            config=self._mode.config(0, num_sms),
            held=(mapping, workspace, *first, *second),
        )

    def _check(
        self, copies: Tensors, own: Tensors, mapping: Tensor, dtype: Any
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What only Python sees: types, devices, shapes against each other."""
        core = self._core
        first, second = _several("redundant_expert", copies), _several("expert", own)
        equal = len(first) == len(second) and 1 <= len(first) <= MOST_TENSORS
        assertion(equal, f"got {len(first)} and {len(second)} tensors, allowed equally many, 1 to {MOST_TENSORS}")
        _torch.check("redundancy_mapping", mapping, core.device, (INT32,), (core.group_size, None))
        slots, local = int(mapping.shape[1]), _torch.length(second[0])
        for number, (copy, one) in enumerate(zip(first, second, strict=True)):
            for name, tensor, count in (("redundant_expert", copy, slots), ("expert", one, local)):
                is_tensor = isinstance(tensor, Tensor)
                kinds = (tensor.dtype,) if is_tensor and dtype is None else (dtype,)
                shape = (count, *[None] * (tensor.dim() - 1 if is_tensor else 0))
                _torch.check(f"{name}[{number}]", tensor, core.device, kinds, shape)
            sizes = [tensor[0].numel() * tensor.itemsize if len(tensor) else 0 for tensor in (copy, one)]
            if min(sizes) and sizes[0] != sizes[1]:
                raise value_error(f"expert[{number}]", f"{sizes} bytes", "equally many of an expert and of a copy")
        return first, second


def _several(name: str, value: Any) -> list[Any]:
    """The tensors of an argument that is one, or several."""
    try:
        return [value] if isinstance(value, Tensor) else list(value)
    except TypeError:
        raise type_error(name, type(value).__name__, "a tensor, or a list of tensors") from None


def sms(value: object) -> int:
    """An even number of SMs; 0: the library's choice."""
    number = check_int("num_sms", value, 0)
    return number + number % 2
