"""Operators of low-latency mode: dispatch and combine, whole and in halves.

The halves of a call are two operators. The sending one returns the outputs and a ticket, the number of a call whose
receive is outstanding. The receiving one declares the outputs as mutated; they are undefined until it has filled them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _abi, _names, _torch, errors
from . import _autograd
from ._define import cast_under_autocast, define

if TYPE_CHECKING:
    from ..buffer import Buffer

OptionalTensor = Tensor | None
Tensors = tuple[Tensor, ...]
MOST_PENDING = 8  # sends of a buffer that are remembered; two of a kind can be outstanding, older ones are lost

_tickets = itertools.count(1)
# For each buffer the calls whose receive is outstanding: the hook, the outputs it fills and its own statistics.
_pending: weakref.WeakKeyDictionary[Buffer, dict[int, tuple[Any, Tensors, tuple[OptionalTensor, ...]]]] = (
    weakref.WeakKeyDictionary()
)


def _remember(buffer: Buffer, hook: Any, outputs: Tensors, stats: tuple[OptionalTensor, ...]) -> Tensor:
    """Keeps a call whose receive is outstanding; returns its ticket."""
    calls = _pending.setdefault(buffer, {})
    ticket = next(_tickets)
    calls[ticket] = (hook, outputs, stats)
    if len(calls) > MOST_PENDING:
        calls.pop(next(iter(calls)))
    return torch.tensor([ticket], dtype=torch.int64, device="cpu")


def _receive(name: str, buffer: str, ticket: Tensor, into: Tensors, stats: tuple[OptionalTensor, ...]) -> None:
    """Receives into `into`, which a compiler may have made of the outputs that the send returned."""
    call = _pending.get(_names.find(buffer), {}).pop(int(ticket), None)
    if call is None:
        text = f"torch.ops.deep_ep.{name}: no send with ticket {int(ticket)} waits for its receive"
        raise errors.DeepEPError(errors.INVALID_STATE, text)
    hook, outputs, own_stats = call
    hook()
    for given, filled in zip(into, outputs, strict=True):
        if given.data_ptr() != filled.data_ptr():
            given.copy_(filled)
    for given_stats, added in zip(stats, own_stats, strict=True):
        if given_stats is not None and added is not None:
            given_stats.add_(added)


def _zeros_like(stats: OptionalTensor) -> OptionalTensor:
    """Statistics of one call: the caller's may be another tensor by the time of the receive."""
    return None if stats is None else torch.zeros_like(stats)


# ---- dispatch


def _run_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    bound: int,
    num_experts: int,
    buffer: str,
    topk_weights: OptionalTensor,
    recv_stats: OptionalTensor,
    wait_stats: OptionalTensor,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    half: bool,
) -> tuple[Tensors, Any]:
    found = _names.find(buffer)
    recv_x, recv_count, (src_info, layout_range, *_), _, hook = found._low_latency.dispatch(
        x, topk_idx, bound, num_experts, recv_stats, wait_stats, use_fp8, round_scale, use_ue8m0, False, half,
        topk_weights,
    )  # fmt: skip
    if isinstance(recv_x, tuple):
        rows, scales = recv_x
    else:
        rows, scales = recv_x, _torch.like(x, 0)
    return (rows, scales, recv_count, src_info, layout_range), hook


def _dispatch(
    x: Tensor,
    topk_idx: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    buffer: str,
    topk_weights: OptionalTensor = None,
    cumulative_local_expert_recv_stats: OptionalTensor = None,
    dispatch_wait_recv_cost_stats: OptionalTensor = None,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> Tensors:
    return _run_dispatch(
        x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, buffer, topk_weights,
        cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, use_fp8, round_scale, use_ue8m0, False,
    )[0]  # fmt: skip


def _dispatch_send(
    x: Tensor,
    topk_idx: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    num_experts: int,
    buffer: str,
    topk_weights: OptionalTensor = None,
    cumulative_local_expert_recv_stats: OptionalTensor = None,
    dispatch_wait_recv_cost_stats: OptionalTensor = None,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> Tensors:
    stats = _zeros_like(cumulative_local_expert_recv_stats), _zeros_like(dispatch_wait_recv_cost_stats)
    outputs, hook = _run_dispatch(
        x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, buffer, topk_weights, *stats, use_fp8, round_scale,
        use_ue8m0, True,
    )  # fmt: skip
    return (*outputs, _remember(_names.find(buffer), hook, outputs, stats))


def _dispatch_recv(
    recv_x: Tensor,
    recv_x_scales: Tensor,
    recv_count: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    ticket: Tensor,
    x: Tensor,
    topk_idx: Tensor,
    buffer: str,
    topk_weights: OptionalTensor = None,
    cumulative_local_expert_recv_stats: OptionalTensor = None,
    dispatch_wait_recv_cost_stats: OptionalTensor = None,
    x_scales: OptionalTensor = None,
) -> None:
    outputs = recv_x, recv_x_scales, recv_count, src_info, layout_range
    stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
    _receive("low_latency_dispatch_recv", buffer, ticket, outputs, stats)


def _fake_dispatch(
    x: Tensor,
    topk_idx: Tensor,
    num_max_dispatch_tokens_per_rank: Any,
    num_experts: Any,
    buffer: str,
    topk_weights: OptionalTensor = None,
    cumulative_local_expert_recv_stats: OptionalTensor = None,
    dispatch_wait_recv_cost_stats: OptionalTensor = None,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> Tensors:
    ranks, hidden = _names.find(buffer).group_size, x.shape[1]
    local, rows = num_experts // ranks, ranks * num_max_dispatch_tokens_per_rank
    scales = x.new_empty((0,))
    if use_fp8:
        columns = hidden // (512 if use_ue8m0 else 128)
        dtype = torch.int32 if use_ue8m0 else torch.float32
        scales = x.new_empty_strided((local, rows, columns), (rows * columns, 1, rows), dtype=dtype)
    return (
        x.new_empty((local, rows, hidden), dtype=_torch.FP8 if use_fp8 else torch.bfloat16),
        scales,
        x.new_empty((local,), dtype=torch.int32),
        x.new_empty((local, rows), dtype=torch.int32),
        x.new_empty((local, ranks), dtype=torch.int64),
    )


def _fake_dispatch_send(*args: Any) -> Tensors:
    return (*_fake_dispatch(*args), torch.empty((1,), dtype=torch.int64, device="cpu"))


def _fills(*args: Any) -> None:
    """The fake kernel of a receive, which has no results."""


# ---- dispatch of FP4 rows: packed ones with their scales, or BF16 rows that it casts to NVFP4


def _fp4_kernels(fp4: int) -> tuple[Any, Any, Any, Any]:
    """Kernel and fake kernel of the whole call and of the send; `scales` are the packed rows', or the cast's factor."""

    def run(
        x: Tensor,
        scales: OptionalTensor,
        topk_idx: Tensor,
        bound: int,
        num_experts: int,
        buffer: str,
        topk_weights: OptionalTensor,
        recv_stats: OptionalTensor,
        wait_stats: OptionalTensor,
        half: bool,
    ) -> tuple[Tensors, Any]:
        found = _names.find(buffer)
        rows, recv_scales, recv_count, (src_info, layout_range, *_), _, hook = found._low_latency.dispatch_fp4(
            x, scales, topk_idx, bound, num_experts, recv_stats, wait_stats, False, half, topk_weights, fp4
        )
        return (rows, recv_scales, recv_count, src_info, layout_range), hook

    def whole(
        x: Tensor,
        scales: OptionalTensor,
        topk_idx: Tensor,
        bound: int,
        num_experts: int,
        buffer: str,
        topk_weights: OptionalTensor = None,
        recv_stats: OptionalTensor = None,
        wait_stats: OptionalTensor = None,
    ) -> Tensors:
        given = x, scales, topk_idx, bound, num_experts, buffer, topk_weights
        return run(*given, recv_stats, wait_stats, False)[0]

    def send(
        x: Tensor,
        scales: OptionalTensor,
        topk_idx: Tensor,
        bound: int,
        num_experts: int,
        buffer: str,
        topk_weights: OptionalTensor = None,
        recv_stats: OptionalTensor = None,
        wait_stats: OptionalTensor = None,
    ) -> Tensors:
        stats = _zeros_like(recv_stats), _zeros_like(wait_stats)
        outputs, hook = run(x, scales, topk_idx, bound, num_experts, buffer, topk_weights, *stats, True)
        return (*outputs, _remember(_names.find(buffer), hook, outputs, stats))

    def fake(
        x: Tensor, scales: OptionalTensor, topk_idx: Tensor, bound: Any, num_experts: Any, buffer: str, *_: Any
    ) -> Tensors:
        ranks = _names.find(buffer).group_size
        local, rows = num_experts // ranks, ranks * bound
        if fp4 == _abi.FP4_PACKED:
            assert scales is not None
            received = x.new_empty((local, rows, x.shape[1])), scales.new_empty((local, rows, scales.shape[1]))
        else:  # as Fp4Plan.shaped has them
            hidden, tiles = x.shape[1], (rows + 127) // 128
            by_expert = x.new_empty((local, rows, hidden // 2), dtype=torch.uint8)
            in_tiles = x.new_empty((local, tiles, hidden // 64, 32, 4, 4), dtype=_torch.FP8)
            received = by_expert.permute(1, 2, 0), in_tiles.permute(3, 4, 1, 5, 2, 0)
        return (
            *received,
            x.new_empty((local,), dtype=torch.int32),
            x.new_empty((local, rows), dtype=torch.int32),
            x.new_empty((local, ranks), dtype=torch.int64),
        )

    def fake_send(*args: Any) -> Tensors:
        return (*fake(*args), torch.empty((1,), dtype=torch.int64, device="cpu"))

    return whole, fake, send, fake_send


# ---- combine


def _run_combine(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    handle: tuple[Any, ...],
    buffer: str,
    wait_stats: OptionalTensor,
    use_logfmt: bool,
    unreduced: bool,
    half: bool,
    out: OptionalTensor,
) -> tuple[Tensor, Any]:
    found = _names.find(buffer)
    combined, _, hook = found._low_latency.combine(
        x, topk_idx, topk_weights, handle, use_logfmt, False, False, half, out, wait_stats, unreduced
    )
    return combined, hook


def _combine(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    hidden: int,
    num_experts: int,
    buffer: str,
    combine_wait_recv_cost_stats: OptionalTensor = None,
    use_logfmt: bool = False,
    unreduced: bool = False,
) -> Tensor:
    handle = (src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts)
    stats = combine_wait_recv_cost_stats
    return _run_combine(x, topk_idx, topk_weights, handle, buffer, stats, use_logfmt, unreduced, False, None)[0]


def _combine_out(
    out: Tensor,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    hidden: int,
    num_experts: int,
    buffer: str,
    combine_wait_recv_cost_stats: OptionalTensor = None,
    use_logfmt: bool = False,
    unreduced: bool = False,
) -> None:
    handle = (src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts)
    stats = combine_wait_recv_cost_stats
    _run_combine(x, topk_idx, topk_weights, handle, buffer, stats, use_logfmt, unreduced, False, out)


def _combine_send(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    num_max_dispatch_tokens_per_rank: int,
    hidden: int,
    num_experts: int,
    buffer: str,
    combine_wait_recv_cost_stats: OptionalTensor = None,
    use_logfmt: bool = False,
    unreduced: bool = False,
) -> Tensors:
    handle = (src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts)
    stats = _zeros_like(combine_wait_recv_cost_stats)
    out, hook = _run_combine(x, topk_idx, topk_weights, handle, buffer, stats, use_logfmt, unreduced, True, None)
    return out, _remember(_names.find(buffer), hook, (out,), (stats,))


def _combine_recv(
    combined_x: Tensor,
    ticket: Tensor,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_info: Tensor,
    layout_range: Tensor,
    buffer: str,
    combine_wait_recv_cost_stats: OptionalTensor = None,
) -> None:
    _receive("low_latency_combine_recv", buffer, ticket, (combined_x,), (combine_wait_recv_cost_stats,))


def _fake_combine(x: Tensor, topk_idx: Tensor, *args: Any) -> Tensor:
    return x.new_empty((topk_idx.shape[0], x.shape[2]))


def _fake_combine_send(x: Tensor, topk_idx: Tensor, *args: Any) -> Tensors:
    return _fake_combine(x, topk_idx), torch.empty((1,), dtype=torch.int64, device="cpu")


def _define(name: str, signature: str, kernel: Any, fake: Any) -> Any:
    return define(name, signature, kernel, fake, _autograd.not_differentiable(name))


_DISPATCH = (
    "(Tensor x, Tensor topk_idx, SymInt num_max_dispatch_tokens_per_rank, SymInt num_experts, str buffer, "
    "Tensor? topk_weights=None, Tensor{a}? cumulative_local_expert_recv_stats=None, "
    "Tensor{b}? dispatch_wait_recv_cost_stats=None, bool use_fp8=True, bool round_scale=False, bool use_ue8m0=False) "
)
_FP4_DISPATCH = (
    "(Tensor x, {scales}, Tensor topk_idx, SymInt num_max_dispatch_tokens_per_rank, SymInt num_experts, str buffer, "
    "Tensor? topk_weights=None, Tensor{a}? cumulative_local_expert_recv_stats=None, "
    "Tensor{b}? dispatch_wait_recv_cost_stats=None) "
)
_COMBINE = (
    "Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor src_info, Tensor layout_range, "
    "SymInt num_max_dispatch_tokens_per_rank, SymInt hidden, SymInt num_experts, str buffer, "
    "Tensor{a}? combine_wait_recv_cost_stats=None, bool use_logfmt=False, bool unreduced=False) "
)

dispatch = _define(
    "low_latency_dispatch",
    _DISPATCH.format(a="(a!)", b="(b!)") + "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch,
    _fake_dispatch,
)
dispatch_send = _define(
    "low_latency_dispatch_send",
    _DISPATCH.format(a="", b="") + "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _dispatch_send,
    _fake_dispatch_send,
)
dispatch_recv = _define(
    "low_latency_dispatch_recv",
    "(Tensor(a!) recv_x, Tensor(b!) recv_x_scales, Tensor(c!) recv_count, Tensor(d!) src_info, "
    "Tensor(e!) layout_range, Tensor ticket, Tensor x, Tensor topk_idx, str buffer, Tensor? topk_weights=None, "
    "Tensor(f!)? cumulative_local_expert_recv_stats=None, Tensor(g!)? dispatch_wait_recv_cost_stats=None, "
    "Tensor? x_scales=None) -> ()",
    _dispatch_recv,
    _fills,
)
for _name, _scales, _fp4 in (
    ("low_latency_dispatch_fp4", "Tensor x_scales", _abi.FP4_PACKED),
    ("low_latency_dispatch_nvfp4", "Tensor? x_global_scale", _abi.FP4_CAST),
):
    _whole, _fake, _send, _fake_send = _fp4_kernels(_fp4)
    _signature = _FP4_DISPATCH.format(scales=_scales, a="(a!)", b="(b!)")
    _define(_name, _signature + "-> (Tensor, Tensor, Tensor, Tensor, Tensor)", _whole, _fake)
    _signature = _FP4_DISPATCH.format(scales=_scales, a="", b="")
    _define(f"{_name}_send", _signature + "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _send, _fake_send)
combine = _define("low_latency_combine", f"({_COMBINE.format(a='(a!)')}-> Tensor", _combine, _fake_combine)
combine_out = _define(
    "low_latency_combine_out", f"(Tensor(o!) out, {_COMBINE.format(a='(a!)')}-> ()", _combine_out, _fills
)
combine_send = _define(
    "low_latency_combine_send", f"({_COMBINE.format(a='')}-> (Tensor, Tensor)", _combine_send, _fake_combine_send
)
combine_recv = _define(
    "low_latency_combine_recv",
    "(Tensor(a!) combined_x, Tensor ticket, Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor src_info, "
    "Tensor layout_range, str buffer, Tensor(b!)? combine_wait_recv_cost_stats=None) -> ()",
    _combine_recv,
    _fills,
)
_of_casts = (getattr(torch.ops.deep_ep, f"low_latency_dispatch_nvfp4{half}").default for half in ("", "_send"))
for _operator in (dispatch, dispatch_send, combine, combine_send, *_of_casts):
    cast_under_autocast(_operator, 1)
