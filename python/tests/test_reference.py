"""The reference against answers worked out by hand, and the checkers against planted faults.

A checker that lets a shifted row or a flipped bit pass would make every other test worthless.
"""

from __future__ import annotations

import math

import pytest
import torch

import cases
import checks
import lowlat
import normal
import reference
import reference_formats as formats
from cases import Case

CASE = Case((5, 4), experts=4, topk=2, hidden=64)


def test_layout_by_hand():
    idx = torch.tensor([[0, 3], [2, 2], [-1, 5], [-1, -1]])
    got = reference.layout(idx, num_experts=6, num_ranks=3, peers=1)
    assert got.num_tokens_per_rank.tolist() == [1, 2, 1]
    assert got.num_tokens_per_expert.tolist() == [1, 0, 2, 1, 0, 1]
    assert got.num_tokens_per_rdma_rank.tolist() == [1, 2, 1]
    assert got.is_token_in_rank.int().tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert reference.layout(idx, 6, 3).num_tokens_per_rdma_rank is None


def test_dispatch_by_hand():
    idx = [torch.tensor([[0, 3], [1, 1]]), torch.tensor([[2, 1]])]
    inputs = [
        reference.Tokens(torch.full((len(i), 8), float(r)), None, i, torch.arange(1.0, 1 + i.numel()).view(i.shape))
        for r, i in enumerate(idx)
    ]
    layouts = [reference.layout(i, 4, 2) for i in idx]
    got = reference.dispatch(inputs, layouts, 0, 4)
    assert got.x[:, 0].tolist() == [0, 0, 1]
    assert got.src_idx.tolist() == [0, 1, 0] and got.src_rank.tolist() == [0, 0, 1]
    assert got.topk_idx.tolist() == [[0, -1], [1, 1], [-1, 1]]
    assert got.topk_weights.tolist() == [[1, 0], [3, 4], [0, 2]]
    assert got.expert_counts == [1, 3] and got.rank_prefix.tolist() == [2, 3]
    sums = reference.combine(
        [got.x + 1, torch.tensor([[5.0] * 8, [7.0] * 8])], [got, reference.dispatch(inputs, layouts, 1, 4)], 0, 2
    )
    assert sums[:, 0].tolist() == [1 + 5, 1]


def test_low_latency_by_hand():
    idx = [torch.tensor([[2, 2], [0, 3]]), torch.tensor([[3, 2]])]
    got = reference.low_latency_dispatch(idx, 1, 4, 2)
    assert got.rows == [[(0, 0), (1, 0)], [(0, 1), (1, 0)]]
    assert got.layout_range.tolist() == [[1, (1 << 32) | 1], [1, (1 << 32) | 1]]
    masked = reference.low_latency_dispatch(idx, 1, 4, 2, frozenset({(1, 0)}))
    assert masked.counts.tolist() == [1, 1] and masked.layout_range[0].tolist() == [0, 1]
    rows = [{(0, 0, 1): torch.full((8,), 4.0)}, {(0, 0, 0): torch.full((8,), 2.0)}]
    sums = reference.low_latency_combine(rows, idx[0], torch.tensor([[0.5, 0.25], [1.0, 1.0]]), 0, 4, 8)
    assert sums[:, 0].tolist() == [1.5, 4.0]


def test_fp8_by_hand():
    x = torch.zeros((2, 128), dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([448.0, -224.0, 0.0])
    values, scales = formats.fp8_cast(x)
    assert scales[0, 0] == 1 and values[0, :3].float().tolist() == [448, -224, 0]
    assert scales[1, 0] == torch.tensor(1e-4) / 448, "amax has a floor"
    assert formats.fp8_scales(x, True)[0, 0] == 1, "a power of two is not rounded up"
    assert formats.fp8_scales(x * 1.0078125, True)[0, 0] == 2
    gen = torch.Generator().manual_seed(1)
    x = torch.randn((50, 512), generator=gen).to(torch.bfloat16)
    low, high = formats.fp8_cast_bounds(x)
    assert bool((low.float() <= high.float()).all()) and (low.float() != high.float()).float().mean() < 1e-2
    for rounded in (False, True):
        values, scales = formats.fp8_cast(x, rounded)
        error = (formats.fp8_decode(values, scales) - x.float()).abs()
        assert bool((error <= x.float().abs() / 16 + scales.repeat_interleave(128, 1) * 2.0**-10 + 1e-9).all())


def test_ue8m0_by_hand():
    scales = torch.tensor([[1.0, 2.0, 0.5, 2.0**-100]])
    packed = formats.pack_ue8m0(scales)
    assert packed.dtype == torch.int32 and packed.shape == (1, 1)
    assert packed.item() == 127 | 128 << 8 | 126 << 16 | 27 << 24
    assert torch.equal(formats.unpack_ue8m0(packed), scales)


def test_logfmt_by_hand():
    block = torch.full((128,), 0.25, dtype=torch.bfloat16)
    assert formats.logfmt_table(block) is None, "all equal stays BF16"
    block[0] = 1.0
    assert formats.logfmt_table(block) is None, "1 and above stays BF16"
    block[0], block[1] = 0.5, -0.375
    table = formats.logfmt_table(block)
    assert table[0] == 0 and math.isclose(table[1], 0.25) and math.isclose(table[511], 0.5)
    codes = formats.logfmt_encode(block, table)
    assert codes[0] == 511 and codes[2] == 1 and codes[1] < 0
    back = formats.logfmt_decode(codes, table)
    assert abs(back[1] + 0.375) < 0.375 * (2 ** (1 / 510) - 1)
    block[5] = 0
    table = formats.logfmt_table(block)
    assert math.isclose(table[1], 0.5 * 2.0**-32), "a zero counts as the least value"
    assert formats.logfmt_round_trip(block)[5] == 0
    gen = torch.Generator().manual_seed(2)
    row = (torch.randn(512, generator=gen) / 8).clamp(-0.9, 0.9).to(torch.bfloat16)
    assert bool(((formats.logfmt_round_trip(row) - row.double()).abs() <= formats.logfmt_error_bound(row)).all())


@pytest.fixture(autouse=True)
def one_node(monkeypatch):
    monkeypatch.setenv(cases.NODE_SIZE, "8")


def good_exchange():
    exchange = normal.expect(CASE, 1)
    want = exchange.want
    exchange.recv_x, exchange.recv_topk_idx = want.x.clone(), want.topk_idx.clone()
    exchange.recv_topk_weights, exchange.counts = want.topk_weights.clone(), list(want.expert_counts)
    prefix = torch.zeros((2, 2), dtype=torch.int32)
    prefix[:, 1] = want.rank_prefix
    empty = torch.zeros((2, 1), dtype=torch.int32)
    layout = exchange.layouts[1]
    exchange.handle = (
        prefix,
        empty,
        empty,
        want.src_idx.clone(),
        layout.is_token_in_rank,
        torch.zeros((4, 2), dtype=torch.int32),
    )
    return exchange


def shift_rows(e):
    e.recv_x = e.recv_x.roll(1, 0)


def swap_rows(e):
    e.recv_x[[0, 1]] = e.recv_x[[1, 0]]


def flip_bit(e):
    e.recv_x.view(torch.int16)[2, 63] ^= 1


def shift_columns(e):
    e.recv_x = e.recv_x.roll(8, 1)


def drop_row(e):
    e.recv_x = e.recv_x[:-1]


def lose_weight(e):
    e.recv_topk_weights[0] = 0


def global_index(e):
    e.recv_topk_idx = torch.where(e.recv_topk_idx >= 0, e.recv_topk_idx + 2, e.recv_topk_idx)


def wrong_count(e):
    e.counts[0] += 1


def wrong_source(e):
    e.handle[3][1] += 1


def wrong_prefix(e):
    e.handle[0][0, 1] += 1


FAULTS = [
    shift_rows,
    swap_rows,
    flip_bit,
    shift_columns,
    drop_row,
    lose_weight,
    global_index,
    wrong_count,
    wrong_source,
    wrong_prefix,
]


def test_good_exchange_passes():
    normal.check(good_exchange())


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault):
    exchange = good_exchange()
    fault(exchange)
    with pytest.raises(AssertionError):
        normal.check(exchange)


def test_wrong_row_names_its_source():
    exchange = good_exchange()
    shift_rows(exchange)
    with pytest.raises(AssertionError, match=r"row 0 holds rank 1 token \d+, expected rank 0 token \d+"):
        normal.check(exchange)


@pytest.mark.parametrize("change", [0.02, float("nan"), float("inf")])
def test_wrong_sum_is_seen(change):
    exact = torch.randn((6, 64), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    good = exact.to(torch.bfloat16)
    checks.close_sums("sum", good, exact, exact.abs())
    good[3, 5] = (exact[3, 5] * (1 + change)).item()
    with pytest.raises(AssertionError, match="1 of 384 values wrong, first at \\(3, 5\\)"):
        checks.close_sums("sum", good, exact, exact.abs())


@pytest.mark.parametrize("exact", [True, False])
def test_only_ranks_that_may_sum_first_may_round_twice(exact):
    case = Case((5, 7), experts=8, topk=6, hidden=64)
    call, weights = lowlat.expect(case, 0, 16, frozenset(), use_fp8=False), lowlat.make_weights(case, 0)
    plain, twice = (
        lowlat.wanted_sums(call, exact, 20, weights, by_rank=first).to(torch.bfloat16) for first in (False, True)
    )
    wrong = twice.clone()
    wrong[2, 3] += wrong[2, 3].abs() / 16 + 1

    def check(may_sum, got):
        lowlat.check_combined(lowlat.Combined(call, exact, 20, False, may_sum, weights, got, got, None, None))

    check(False, plain)
    check(True, plain)
    check(True, twice)
    for may_sum, got in ((False, twice), (True, wrong)):
        with pytest.raises(AssertionError, match="combined_x"):
            check(may_sum, got)


def test_only_ranks_that_may_sum_first_may_code_sums():
    case = Case((5, 7), experts=8, topk=6, hidden=512)
    call, weights = lowlat.expect(case, 0, 16, frozenset(), use_fp8=False), lowlat.make_weights(case, 0)
    rows, sums = (
        lowlat.wanted_sums(call, False, 20, weights, use_logfmt=True, by_rank=first).to(torch.bfloat16)
        for first in (False, True)
    )
    wrong = sums.clone()
    wrong[2, 3] += wrong[2, 3].abs() / 8 + 1

    def check(may_sum, got):
        lowlat.check_combined(lowlat.Combined(call, False, 20, True, may_sum, weights, got, got, None, None))

    check(False, rows)
    check(True, rows)
    check(True, sums)
    with pytest.raises(AssertionError, match="combined_x"):
        check(True, wrong)


def test_calc_diff_never_passes_nan():
    nan = torch.full((4,), float("nan"))
    with pytest.raises(AssertionError):
        checks.small_diff("x", nan, torch.zeros(4), 1e-5)


def test_payload_rows_are_all_different():
    rows = torch.cat([cases.payload(rank, 300, 16) for rank in range(8)])
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert cases.name_row(rows[300 * 5 + 299].to(torch.bfloat16)) == "rank 5 token 299"
