"""FP4 rows in low-latency dispatch: packed ones as bytes, rows cast to NVFP4; TensorRT-LLM's names for both halves."""

from __future__ import annotations

import pytest
import torch

import cases
import checks
import lowlat
import reference_formats as formats
from cases import Case

BASE = Case((16, 9, 0, 12), hidden=512, experts=8, topk=3, routing="duplicates")
TILES = Case((33, 40, 7, 12), hidden=384, experts=8, topk=4, index_dtype=torch.int32, seed=3)  # 160 rows: two tiles
WAITS = ({}, {"return_recv_hook": True}, {"async_finish": True})


def packed_rows(case, rank, dtype):
    """[T, H/2] and [T, H/16] bytes, and among them every value."""
    gen = cases.generator(case.seed, rank, 31)
    x, scales = (torch.randint(0, 256, (case.tokens[rank], case.hidden // n), generator=gen) for n in (2, 16))
    return x.to(torch.uint8).view(dtype), scales.to(torch.uint8).view(dtype)


def check_handle(call):
    """Counts and handle, as of any dispatch; returns the sources of the rows of each local expert."""
    checks.same_bits("recv_count", call.counts, call.want.counts)
    src_info, ranges, *shape = call.handle
    assert shape == [call.num_max, call.case.hidden, call.case.experts], f"handle ends with {shape}"
    checks.same_bits("layout_range", ranges, call.want.layout_range)
    for local, rows in enumerate(call.want.rows):
        checks.same_bits(f"src_info of expert {local}", src_info[local, : len(rows)], call.want.src_info(local))
    return call.want.rows


def gather(rows, tensors):
    """The rows of one expert from the tensors of all ranks, as bytes."""
    width = tensors[0].shape[1]
    if not rows:
        return torch.empty((0, width), dtype=torch.uint8)
    return torch.stack([tensors[rank].view(torch.uint8)[token] for rank, token in rows])


def rank_packed(ctx, case, num_max, dtype):
    with lowlat.buffer_of(ctx, case, num_max) as buffer:
        given = [packed_rows(case, rank, dtype) for rank in range(case.ranks)]
        for waiting in WAITS:
            call = lowlat.expect(case, ctx.rank, num_max, frozenset(), use_fp8=False)
            x, scales = (ctx.to_device(tensor) for tensor in given[ctx.rank])
            idx = ctx.to_device(call.topk_idx[ctx.rank])
            got = buffer.low_latency_dispatch_fp4(x, scales, idx, num_max, case.experts, **waiting)
            recv_x, recv_scales, call.counts, call.handle, call.event, call.hook = got
            lowlat.finish(call)
            shape = (case.experts // case.ranks, case.ranks * num_max)
            assert recv_x.shape == (*shape, case.hidden // 2) and recv_scales.shape == (*shape, case.hidden // 16)
            assert recv_x.dtype == recv_scales.dtype == dtype and recv_x.is_contiguous() and recv_scales.is_contiguous()
            for local, rows in enumerate(check_handle(call)):
                for name, received, sent in (("recv_x", recv_x, 0), ("recv_scales", recv_scales, 1)):
                    want = gather(rows, [pair[sent] for pair in given])
                    checks.same_bits(f"{name} of expert {local}", received[local, : len(rows)].view(torch.uint8), want)
            lowlat.combine_and_check(ctx, buffer, call, **waiting)


@pytest.mark.parametrize(("case", "num_max", "dtype"), [(BASE, 16, torch.uint8), (TILES, 40, torch.float8_e4m3fn)])
def test_packed(pool, case, num_max, dtype):
    pool.run(4, rank_packed, case, num_max, dtype)


def numbers(case, rank):
    """[T, H] BF16 of many magnitudes, and some that are none or too large."""
    x = lowlat.make_x(case, rank, True)
    for token, special in enumerate((float("nan"), float("inf"), -float("inf"), -float("nan"), 0.0, -0.0)):
        if token < len(x):
            x[token, 16 * token : 16 * token + 3] = special
    return x


def rank_cast(ctx, case, num_max, factors):
    with lowlat.buffer_of(ctx, case, num_max) as buffer:
        inputs = [numbers(case, rank) for rank in range(case.ranks)]
        for factor, waiting in zip(factors, WAITS, strict=True):
            sent = [formats.nvfp4(x, 1.0 if factor is None else factor) for x in inputs]
            call = lowlat.expect(case, ctx.rank, num_max, frozenset(), use_fp8=False)
            scale = None if factor is None else ctx.to_device(torch.full((1,), factor))
            (recv_x, scales), call.counts, call.handle, call.event, call.hook = buffer.low_latency_dispatch(
                ctx.to_device(inputs[ctx.rank]), ctx.to_device(call.topk_idx[ctx.rank]), num_max, case.experts,
                use_nvfp4=True, x_global_scale=scale, **waiting,
            )  # fmt: skip
            lowlat.finish(call)
            local, rows = case.experts // case.ranks, case.ranks * num_max
            assert recv_x.dtype == torch.uint8 and recv_x.shape == (rows, case.hidden // 2, local)
            tiles = -(-rows // 128)
            assert scales.dtype == cases.FP8 and scales.shape == (32, 4, tiles, 4, case.hidden // 64, local)
            assert recv_x.permute(2, 0, 1).is_contiguous() and scales.permute(5, 2, 4, 0, 1, 3).is_contiguous()
            plain = formats.without_tiles(scales.view(torch.uint8))
            for expert, places in enumerate(check_handle(call)):
                got = recv_x[: len(places), :, expert], plain[expert, : len(places)]
                for name, received, index in (("recv_x", got[0], 0), ("scales", got[1], 1)):
                    want = gather(places, [pair[index] for pair in sent])
                    checks.same_bits(f"{name} of expert {expert}, factor {factor}", received.contiguous(), want)
            lowlat.combine_and_check(ctx, buffer, call, **waiting)


@pytest.mark.parametrize(("case", "num_max"), [(BASE, 16), (TILES, 40)])
def test_cast(pool, case, num_max):
    """Bit for bit the reference's NVFP4, in the tiles that GEMM kernels read."""
    pool.run(4, rank_cast, case, num_max, (None, 17.5, 2.0**-9))


def test_reference_of_nvfp4():
    """Each magnitude of e2m1 is exact, and what lies halfway between two goes to the even code."""
    halves = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6])
    packed, scales = formats.nvfp4(torch.stack([halves, -halves]).to(torch.bfloat16), 1.0)
    codes = torch.stack([packed & 15, packed >> 4], -1).view(2, 16).tolist()
    assert codes[0] == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7]
    assert codes[1] == [code and code + 8 for code in codes[0]]
    assert scales.view(cases.FP8).float().tolist() == [[1.0], [1.0]]


def rank_low_precision(ctx):
    with lowlat.buffer_of(ctx, BASE, 16) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, BASE, 16)
        rows = ctx.to_device(lowlat.answer_rows(call, False, 20))
        idx, weights = ctx.to_device(call.topk_idx[ctx.rank]), ctx.to_device(lowlat.make_weights(BASE, ctx.rank))
        given = {"topk_idx": idx, "topk_weights": weights, "handle": call.handle}
        want, _, _ = buffer.low_latency_combine(rows, use_logfmt=True, **given)
        exact, _, _ = buffer.low_latency_combine(rows, **given)
        low, event, hook = buffer.low_latency_combine_low_precision("fp8", rows, None, *given.values())
        assert event.event is None and hook is None
        checks.same_bits("combined_x", low, want)
        assert not len(low) or not torch.equal(low, exact), "nothing was coded"
        want, _, hook = buffer.low_latency_combine(rows, use_logfmt=True, return_recv_hook=True, **given)
        hook()  # halves on GPUs code each row, whole calls the sums of a rank
        out = torch.empty_like(low)
        _, _, hook = buffer.low_latency_combine_low_precision(
            "fp8", rows, None, *given.values(), return_recv_hook=True, out=out
        )
        hook()
        checks.same_bits("out", out, want)
        with pytest.raises(NotImplementedError, match="nvfp4"):
            buffer.low_latency_combine_low_precision("nvfp4", rows, torch.ones(1), *given.values())
        with pytest.raises(ValueError, match="precision"):
            buffer.low_latency_combine_low_precision("int8", rows, None, *given.values())
        with pytest.raises(ValueError, match="global_scales"):
            buffer.low_latency_combine_low_precision("fp8", rows, torch.ones(1), *given.values())


def test_combine_low_precision(pool):
    pool.run(4, rank_low_precision)
