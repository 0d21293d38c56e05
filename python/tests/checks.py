"""Comparisons that name the wrong row and where its content came from. Moves bit for bit, sums with a bound."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

import cases
import reference


def needs(there: object, what: str) -> pytest.MarkDecorator:
    """Skips a test of what an older torch has not."""
    return pytest.mark.skipif(not there, reason=f"needs {what}; here is torch {torch.__version__}")


def _traces_methods() -> bool:
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return False
    return hasattr(eval_frame, "set_code_exec_strategy")


needs_traced_methods = needs(_traces_methods(), "a torch that compiles through Buffer's methods (docs/operators.md)")
needs_checkpoint_policies = needs(hasattr(torch.utils.checkpoint, "CheckpointPolicy"), "torch 2.5")
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
# 2.4 asks whether a count that only the run knows is 1 (Eq(u0, 1)), and gives up; 2.6 does not.
needs_traced_gradients = needs(_RELEASE >= (2, 6), "torch 2.6 to trace gradients of outputs of unknown length")
needs_face = needs(_RELEASE >= (2, 10), "torch 2.10's C ABI")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes on the CPU, one row a row."""
    if not tensor.numel():
        return torch.zeros(0, dtype=torch.uint8)
    # A copy: contiguous() leaves odd strides of dimensions of length one, which view() then refuses.
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(flat.shape[0], -1)


def same_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Shape, dtype and every bit."""
    assert tuple(got.shape) == tuple(want.shape), f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    if want.numel() == 0:
        return
    wrong = (raw(got) != raw(want)).any(dim=1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} of {len(want)} rows wrong, first is row {row}: "
            f"got {got[row].flatten()[:8].cpu()}, expected {want[row].flatten()[:8]}"
        )


def same_rows(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Like ``same_bits``, and names the token whose payload lies in the wrong row."""
    assert tuple(got.shape) == tuple(want.shape), f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    if want.numel() == 0:
        return
    wrong = (raw(got) != raw(want)).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        first = [
            f"row {row} holds {_name(got[row])}, expected {_name(want[row])}, "
            f"{int((raw(got[row : row + 1]) != raw(want[row : row + 1])).sum())} bytes differ"
            for row in wrong[:5]
        ]
        raise AssertionError(f"{name}: {len(wrong)} of {len(want)} rows wrong: " + "; ".join(first))


def _name(row: torch.Tensor) -> str:
    values = row.cpu()
    return cases.name_row(values.view(torch.uint8) if values.dtype == cases.FP8 else values)


def same_ints(name: str, got: list[int], want: list[int]) -> None:
    assert type(got) is list, f"{name}: {type(got)}, expected a list"
    assert all(type(value) is int for value in got), f"{name}: {got} must hold Python ints"
    assert got == want, f"{name}: {got}, expected {want}"


def same_layout(got: tuple[object, ...], want: reference.Layout) -> None:
    """The first four results of ``get_dispatch_layout``."""
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
    for field, value in zip(names, got, strict=False):
        expected = getattr(want, field)
        if expected is None:
            assert value is None, f"{field}: {value}, expected None on one node"
        else:
            same_bits(field, value, expected)
    same_bits("is_token_in_rank", got[3], want.is_token_in_rank)


def same_received(
    recv_x: object,
    idx: torch.Tensor | None,
    weights: torch.Tensor | None,
    want: reference.Received,
    worst_tokens: int = 0,
) -> None:
    """Rows, scales, indices and weights of one dispatch."""
    count = len(want.src_idx)
    rows = worst_tokens or count
    x, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    assert len(x) == rows, f"recv_x has {len(x)} rows, expected {rows}"
    same_rows("recv_x", x[:count], want.x)
    assert (scales is None) == (want.scales is None), f"scales {scales}, expected {want.scales}"
    if want.scales is not None:
        assert scales.is_contiguous(), f"received scales have strides {scales.stride()}"
        assert len(scales) == rows
        same_bits("recv_x scales", scales[:count], want.scales)
    for name, got, expected in (
        ("recv_topk_idx", idx, want.topk_idx),
        ("recv_topk_weights", weights, want.topk_weights),
    ):
        assert (got is None) == (expected is None), f"{name}: {got}, expected {expected}"
        if expected is not None:
            assert len(got) == rows, f"{name} has {len(got)} rows, expected {rows}"
            same_bits(name, got[:count], expected)
    if worst_tokens and idx is not None:
        assert bool((idx[count:] == -1).all()), f"indices past row {count} must be -1, are {idx[count:]}"


def close_sums(
    name: str, got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, slack: torch.Tensor | float = 0.0
) -> None:
    """``got`` is ``exact`` (float64) after FP32 accumulation and one rounding to its own dtype.

    ``magnitude`` is the sum of the absolute values that were added; 2^-20 of it covers a dozen FP32 additions.
    ``slack`` is what may come on top of it.
    """
    assert tuple(got.shape) == tuple(exact.shape), f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    value = got.detach().cpu().to(torch.float64)
    rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-23
    bound = exact.abs() * rounding + magnitude.to(torch.float64) * 2.0**-20 + slack
    within_bound(name, value, exact, bound)


def within_bound(name: str, value: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """|value - exact| <= bound everywhere; NaN never passes."""
    good = (value.cpu().to(torch.float64) - exact).abs() <= bound
    if not bool(good.all()):
        where = tuple(int(i) for i in (~good).nonzero()[0])
        raise AssertionError(
            f"{name}: {int((~good).sum())} of {good.numel()} values wrong, first at {where}: "
            f"{value[where].item()}, expected {exact[where].item()} +- {bound[where].item()}"
        )


def small_diff(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """``calc_diff`` below ``limit``; a NaN fails."""
    diff = reference.calc_diff(got, want)
    assert diff < limit, f"{name}: calc_diff {diff}, allowed below {limit}"
