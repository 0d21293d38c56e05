"""Load balancing of weights in V2.5: experts' copies on other ranks, and their gradients, by expanded dispatches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from . import _torch
from ._core import Core
from ._elastic import ElasticMode, Event, Order, Payload, Sending, Shape, event_of
from ._torch import FLOAT32, INT32, Tensor
from .errors import assertion, check_int, value_error
from .utils import EventHandle, EventOverlap

UNIT = 2 << 20  # bytes on which allocations begin
MOST_TENSORS = 16
MOST_CHOICES = 32  # destinations of one dispatch
ROW_BYTES, ROW_UNIT = 32 << 10, 16  # an expert's bytes travel as equal rows of at most so many
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

    def materialize(self, storage: Tensor) -> None:
        """Turns the tensors into views of `storage`, uint8 of `num_bytes` bytes; once.

        Raises:
            DeepEPError: also a ValueError or AssertionError: not this size, or not for the first time.
        """
        assertion(not self.materialized, "materialize() of a BufferAllocator that is materialized")
        if storage.numel() * storage.itemsize != self.num_bytes:
            raise value_error("storage", f"{storage.numel()} bytes", f"{self.num_bytes} bytes")
        self.materialized = True
        for tensor, begin in self._planned:
            _torch.take_memory(tensor, storage, begin)
        self._planned.clear()


class Balancing:
    """The calls of one EPBuffer."""

    def __init__(self, core: Core, mode: ElasticMode) -> None:
        self._core, self._mode = core, mode

    def prefetch(
        self, copies: Tensors, weights: Tensors, mapping: Tensor, num_sms: int, previous_event: Event
    ) -> EventOverlap:
        """EPBuffer.lb_prefetch_weights."""
        core = self._core
        pairs, slots, local = self._check(copies, weights, mapping, None)
        ranks = core.group_size
        assertion(ranks <= MOST_CHOICES, f"lb_prefetch_weights: got {ranks} ranks, allowed at most {MOST_CHOICES}")
        group = MOST_CHOICES // ranks  # slots of a dispatch

        def work() -> None:
            for first in range(0, slots, group):
                with self._on_comm():
                    part = mapping[:, first : first + group].reshape(1, -1)
                    own = _torch.arange(core.rank * local, local, core.device)
                    number = _torch.arange(0, part.shape[1], core.device)
                    choices = _torch.where(part.to(own.dtype) == own.unsqueeze(1), number, -1)
                for target, source in pairs:
                    width = _width(source[0].numel() * source.itemsize)
                    with self._on_comm():
                        rows = _torch.bytes_as_rows(source, width)
                        idx = choices.repeat_interleave(rows.shape[0] // local, dim=0)
                    received, counts = self._send(rows, idx, int(part.shape[1]), num_sms, previous_event)
                    begin = 0
                    with self._on_comm():
                        for slot, arrived in enumerate(counts):
                            if arrived:
                                into = _torch.bytes_as_rows(target[first + slot], width)
                                _torch.copy(into, received[begin : begin + arrived])
                                begin += arrived

        return self._run(work, previous_event, (mapping, *(tensor for pair in pairs for tensor in pair)))

    def reduce(
        self, copies: Tensors, grads: Tensors, mapping: Tensor, num_sms: int, previous_event: Event
    ) -> EventOverlap:
        """EPBuffer.lb_reduce_grads."""
        core = self._core
        pairs, slots, local = self._check(copies, grads, mapping, FLOAT32)

        def work() -> None:
            for source, target in pairs:
                width = _width(target[0].numel() * target.itemsize)
                with self._on_comm():
                    rows = _torch.bytes_as_rows(source, width)
                    each = rows.shape[0] // slots
                    idx = mapping[core.rank].unsqueeze(1).repeat_interleave(each, dim=0)
                received, counts = self._send(rows, idx, core.group_size * local, num_sms, previous_event)
                begin = 0
                with self._on_comm():
                    for expert, arrived in enumerate(counts):
                        for start in range(begin, begin + arrived, each):  # by source rank, then slot
                            part = received[start : start + each].view(FLOAT32)
                            _torch.add(target[expert], part.reshape(target[expert].shape))
                        begin += arrived

        return self._run(work, previous_event, (mapping, *(tensor for pair in pairs for tensor in pair)))

    def _check(
        self, copies: Tensors, own: Tensors, mapping: Tensor, dtype: Any
    ) -> tuple[list[tuple[Tensor, Tensor]], int, int]:
        """Pairs of (copies, own) tensors, slots of a rank, experts of a rank."""
        core = self._core
        core.enter()
        first = [copies] if isinstance(copies, Tensor) else list(copies)
        second = [own] if isinstance(own, Tensor) else list(own)
        equal = len(first) == len(second) and 1 <= len(first) <= MOST_TENSORS
        assertion(equal, f"got {len(first)} and {len(second)} tensors, allowed equally many, 1 to {MOST_TENSORS}")
        _torch.check("redundancy_mapping", mapping, core.device, (INT32,), (core.group_size, None))
        slots, local = int(mapping.shape[1]), len(second[0])
        for number, (copy, one) in enumerate(zip(first, second, strict=True)):
            for name, tensor, count in (("redundant_expert", copy, slots), ("expert", one, local)):
                kinds = (tensor.dtype,) if dtype is None else (dtype,)
                shape = (count, *(None for _ in tensor.shape[1:]))
                _torch.check(f"{name}[{number}]", tensor, core.device, kinds, shape)
            sizes = [tensor[0].numel() * tensor.itemsize if len(tensor) else 0 for tensor in (copy, one)]
            if min(sizes) and (sizes[0] != sizes[1] or sizes[0] % ROW_UNIT):
                raise value_error(
                    f"expert[{number}]", f"{sizes} bytes", f"equal multiples of {ROW_UNIT} bytes an expert"
                )
        return list(zip(first, second, strict=True)), slots, local

    def _send(
        self, rows: Tensor, idx: Tensor, num_experts: int, num_sms: int, previous_event: Event
    ) -> tuple[Tensor, list[int]]:
        """An expanded dispatch: the rows for this rank's experts, and how many each has."""
        core = self._core
        order = Order(core, previous_event, not core.host_stream, True)
        payload = Payload(rows, core)
        shape = Shape(int(idx.shape[1]), num_experts, 1, payload.num_tokens, True, core.group_size)
        config = self._mode.config(0, num_sms)
        sending = Sending(payload, None, shape, order, config, False, False, idx.contiguous())
        received, _, _, handle, _ = self._mode.send(sending, 0)
        assert isinstance(received, Tensor)
        return received, handle.num_recv_tokens_per_expert_list

    def _run(self, work: Callable[[], None], previous_event: Event, tensors: tuple[Tensor, ...]) -> EventOverlap:
        """Runs the work on the communication stream after the event, or after the current stream."""
        core, previous = self._core, event_of("previous_event", previous_event)
        if not core.host_stream:
            current = core.torch_current_stream()
            with self._on_comm():
                if previous is None:
                    core.comm_stream.wait_stream(current)
                else:
                    previous.current_stream_wait()
            for tensor in tensors:
                tensor.record_stream(core.comm_stream)
        elif previous is not None:
            previous.current_stream_wait()
        work()
        with self._on_comm():
            return EventOverlap(EventHandle())

    def _on_comm(self) -> Any:
        """A context in which torch works on the communication stream; on the CPU engine on the caller's thread."""
        core = self._core
        return contextlib.nullcontext() if core.host_stream else _torch.stream_context(core.comm_stream)


@functools.cache
def _width(count: int) -> int:
    """Bytes of a row: the longest that divides an expert's `count` bytes."""
    units = count // ROW_UNIT
    return ROW_UNIT * next(length for length in range(ROW_BYTES // ROW_UNIT, 0, -1) if units % length == 0)


def sms(value: object) -> int:
    """An even number of SMs; 0: the library's choice."""
    number = check_int("num_sms", value, 0)
    return number + number % 2
