"""Wrong arguments: each is refused before anything is launched, by a text that names it, what came and what is
allowed; the buffer works on afterwards. One process group of two ranks; only rank 0 asks for nonsense."""

from __future__ import annotations

import pytest
import torch

import cases
import lowlat
import normal
import victims
from cases import Case
from wrong import refusals

CASE = Case((12, 7), experts=8, topk=3, hidden=512)
B = 16
bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
ALLOWED = "allowed"


class Odd:
    """A value that no argument accepts."""

    def __repr__(self) -> str:
        return "Odd()"


def z(*shape, dtype=bf16):
    return torch.zeros(shape, dtype=dtype)


def on(ctx, wrong):
    """The table with its tensors on the rank's device."""

    def move(value):
        if isinstance(value, torch.Tensor):
            return ctx.to_device(value)
        if isinstance(value, tuple):
            return tuple(move(v) for v in value)
        return value

    return [(label, {k: move(v) for k, v in changes.items()}, words) for label, changes, words in wrong]


def layout_wrong():
    return [
        ("no tensor", {"topk_idx": [[1, 2]]}, ("topk_idx", "list", ALLOWED)),
        ("None", {"topk_idx": None}, ("topk_idx", "None", ALLOWED)),
        ("float indices", {"topk_idx": z(12, 3, dtype=f32)}, ("topk_idx", "float32", ALLOWED)),
        ("one dimension", {"topk_idx": z(12, dtype=i64)}, ("topk_idx", "[12]", ALLOWED)),
        ("three dimensions", {"topk_idx": z(2, 3, 4, dtype=i64)}, ("topk_idx", "[2, 3, 4]", ALLOWED)),
        ("transposed", {"topk_idx": z(3, 12, dtype=i64).t()}, ("topk_idx", "contiguous")),
        ("K of 0", {"topk_idx": z(12, 0, dtype=i64)}, ("topk", "0", ALLOWED)),
        ("no experts", {"num_experts": 0}, ("num_experts", "0", ALLOWED)),
        ("negative experts", {"num_experts": -8}, ("num_experts", "-8", ALLOWED)),
        ("experts not divisible", {"num_experts": 7}, ("num_experts", "7", "2", ALLOWED)),
        ("experts as float", {"num_experts": 8.0}, ("num_experts", "8.0", ALLOWED)),
        ("experts as None", {"num_experts": None}, ("num_experts", "None", ALLOWED)),
        ("a foreign event", {"previous_event": Odd()}, ("previous_event", "Odd", ALLOWED)),
        ("unknown keyword", {"nonsense": 1}, ("nonsense",)),
    ]


def dispatch_wrong(with_handle):
    fp8 = z(12, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wrong = [
        ("None", {"x": None}, ("x", "None", ALLOWED)),
        ("rows of 12 bytes", {"x": z(12, 3, dtype=f32)}, ("hidden", "12", ALLOWED)),
        ("one dimension", {"x": z(512)}, ("x", "[512]", ALLOWED)),
        ("transposed", {"x": z(512, 12).t()}, ("x", "contiguous")),
        ("rows of 8 bytes", {"x": z(12, 4)}, ("hidden", "got 4", "multiple of 16 bytes")),
        ("rows of 40 bytes", {"x": z(12, 20)}, ("hidden", "got 20", "multiple of 16 bytes")),
        ("rows of 0 bytes", {"x": z(12, 0)}, ("hidden", "got 0", "multiple of 16 bytes")),
        ("a triple", {"x": (fp8, z(12, 4, dtype=f32), None)}, ("x", "3", ALLOWED)),
        ("BF16 with scales", {"x": (z(12, 512), z(12, 4, dtype=f32))}, ("x", "bfloat16", ALLOWED)),
        ("float64 scales", {"x": (fp8, z(12, 4, dtype=torch.float64))}, ("x", "float64", ALLOWED)),
        ("scales of other length", {"x": (fp8, z(11, 4, dtype=f32))}, ("x", "[11, 4]", ALLOWED)),
        ("scales of three dimensions", {"x": (fp8, z(12, 4, 1, dtype=f32))}, ("x", "[12, 4, 1]", ALLOWED)),
        ("other T", {"x": z(13, 512)}, ("13", ALLOWED)),
        ("config of another kind", {"config": {"num_sms": 20}}, ("config", "dict", ALLOWED)),
        ("a foreign event", {"previous_event": Odd()}, ("previous_event", "Odd", ALLOWED)),
        ("unknown keyword", {"nonsense": 1}, ("nonsense",)),
    ]
    if with_handle:
        return wrong + [
            ("handle of three", {"handle": (1, 2, 3)}, ("handle", "3", ALLOWED)),
            ("handle of six strings", {"handle": tuple("abcdef")}, ("handle", "str", ALLOWED)),
            ("handle a list of numbers", {"handle": [1, 2, 3, 4, 5, 6]}, ("rank_prefix_matrix", "int", ALLOWED)),
            ("handle a list of three", {"handle": [1, 2, 3]}, ("handle", "list of 3", ALLOWED)),
            ("handle a string", {"handle": "yes"}, ("handle", "str", ALLOWED)),
            ("top-k beside a handle", {"topk_idx": z(12, 3, dtype=i64), "topk_weights": z(12, 3, dtype=f32)},
             ("topk_idx", "handle")),
        ]  # fmt: skip
    return wrong + [
        ("no counts", {"num_tokens_per_rank": None}, ("num_tokens_per_rank", "None", ALLOWED)),
        ("int64 counts", {"num_tokens_per_rank": z(2, dtype=i64)}, ("num_tokens_per_rank", "int64", ALLOWED)),
        ("counts of three ranks", {"num_tokens_per_rank": z(3, dtype=i32)}, ("num_tokens_per_rank", "[3]", ALLOWED)),
        ("no table", {"is_token_in_rank": None}, ("is_token_in_rank", "None", ALLOWED)),
        ("table of bytes", {"is_token_in_rank": z(12, 2, dtype=torch.uint8)}, ("is_token_in_rank", "uint8", ALLOWED)),
        ("short table", {"is_token_in_rank": z(11, 2, dtype=torch.bool)}, ("is_token_in_rank", "[11, 2]", ALLOWED)),
        ("no expert counts", {"num_tokens_per_expert": None}, ("num_tokens_per_expert", "None", ALLOWED)),
        ("7 experts", {"num_tokens_per_expert": z(7, dtype=i32)}, ("num_", "expert", "7", ALLOWED)),
        ("indices without weights", {"topk_weights": None}, ("topk_weights", "topk_idx")),
        ("weights without indices", {"topk_idx": None}, ("topk_idx", "topk_weights")),
        ("indices of other T", {"topk_idx": z(11, 3, dtype=i64)}, ("topk_idx", "[11, 3]", ALLOWED)),
        ("int16 indices", {"topk_idx": z(12, 3, dtype=torch.int16)}, ("topk_idx", "int16", ALLOWED)),
        ("weights of other K", {"topk_weights": z(12, 4, dtype=f32)}, ("topk_weights", "[12, 4]", ALLOWED)),
        ("half weights", {"topk_weights": z(12, 3, dtype=bf16)}, ("topk_weights", "bfloat16", ALLOWED)),
        ("alignment 0", {"expert_alignment": 0}, ("expert_alignment", "0", ALLOWED)),
        ("alignment beyond 32 bits", {"expert_alignment": 2**32 + 1}, ("expert_alignment", str(2**32 + 1), ALLOWED)),
        ("worst case beyond 32 bits", {"num_worst_tokens": 2**32 + 8}, ("num_worst_tokens", str(2**32 + 8), ALLOWED)),
        ("async_finish a text", {"async_finish": "later"}, ("async_finish", "'later'", ALLOWED)),
        ("alignment 1.5", {"expert_alignment": 1.5}, ("expert_alignment", "1.5", ALLOWED)),
        ("negative worst case", {"num_worst_tokens": -1}, ("num_worst_tokens", "-1", ALLOWED)),
        ("negative offset", {"global_expert_id_offset": -1}, ("global_expert_id_offset", "-1", ALLOWED)),
        ("offset as text", {"global_expert_id_offset": "9"}, ("global_expert_id_offset", "'9'", ALLOWED)),
        ("worst case as text", {"num_worst_tokens": "9"}, ("num_worst_tokens", "'9'", ALLOWED)),
        ("worst case without top-k", {"num_worst_tokens": 99, "topk_idx": None, "topk_weights": None},
         ("num_worst_tokens", "99", "topk_idx")),
    ]  # fmt: skip


def combine_wrong(rows):
    return [
        ("float32 rows", {"x": z(rows, 512, dtype=f32)}, ("x", "float32", ALLOWED)),
        ("a row too few", {"x": z(rows - 1, 512)}, ("x", str(rows - 1), ALLOWED)),
        ("a row too many", {"x": z(rows + 1, 512)}, ("x", str(rows + 1), ALLOWED)),
        ("rows of 8 bytes", {"x": z(rows, 4)}, ("hidden", "got 4", "multiple of 16 bytes")),
        ("a pair", {"x": (z(rows, 512), z(rows, 4))}, ("x", "tuple", ALLOWED)),
        ("transposed", {"x": z(512, rows).t()}, ("x", "contiguous")),
        ("no handle", {"handle": None}, ("handle", "None", ALLOWED)),
        ("handle of one", {"handle": (1,)}, ("handle", "1", ALLOWED)),
        ("weights of other length", {"topk_weights": z(rows - 1, 3, dtype=f32)}, ("topk_weights", ALLOWED)),
        ("weights in BF16", {"topk_weights": z(rows, 3)}, ("topk_weights", "bfloat16", ALLOWED)),
        ("bias of other T", {"bias": z(11, 512)}, ("bias", "[11, 512]", ALLOWED)),
        ("bias of other H", {"bias": z(12, 256)}, ("bias", "[12, 256]", ALLOWED)),
        ("float32 bias", {"bias": z(12, 512, dtype=f32)}, ("bias", "float32", ALLOWED)),
        ("three biases", {"bias": (z(12, 512),) * 3}, ("bias", "3", ALLOWED)),
        ("bias a number", {"bias": 1.0}, ("bias", "float", ALLOWED)),
        ("config of another kind", {"config": 20}, ("config", "int", ALLOWED)),
        ("a foreign event", {"previous_event": Odd()}, ("previous_event", "Odd", ALLOWED)),
        ("unknown keyword", {"nonsense": 1}, ("nonsense",)),
    ]


def rank_normal(ctx):
    with normal.buffer_of(ctx) as buffer:
        exchange = normal.dispatch_and_check(ctx, buffer, CASE)
        complaints = []
        if ctx.rank == 0:
            own = exchange.own
            idx = ctx.to_device(cases.routing(CASE, 0))
            complaints += refusals(
                buffer.get_dispatch_layout, {"topk_idx": idx, "num_experts": 8}, on(ctx, layout_wrong())
            )
            layout = buffer.get_dispatch_layout(idx, 8)
            good = {
                "x": ctx.to_device(own.x),
                "num_tokens_per_rank": layout[0],
                "num_tokens_per_expert": layout[2],
                "is_token_in_rank": layout[3],
                "topk_idx": idx,
                "topk_weights": ctx.to_device(own.topk_weights),
            }
            complaints += refusals(buffer.dispatch, good, on(ctx, dispatch_wrong(False)))
            cached = {"x": ctx.to_device(own.x), "handle": exchange.handle}
            complaints += refusals(buffer.dispatch, cached, on(ctx, dispatch_wrong(True)))
            rows = len(exchange.want.x)
            good = {"x": ctx.to_device(z(rows, 512)), "handle": exchange.handle}
            complaints += refusals(buffer.combine, good, on(ctx, combine_wrong(rows)))
            for call in (buffer.internode_dispatch, buffer.internode_combine):
                complaints += refusals(call, good, [("no config", {}, ("config", "None", ALLOWED))])
        ctx.barrier()
        exchange = normal.dispatch_and_check(ctx, buffer, CASE.but(seed=4))
        normal.combine(ctx, buffer, exchange, with_weights=True, bias=2)
        return complaints


def test_normal_mode(pool):
    complaints = pool.run(2, rank_normal)[0]
    assert not complaints, "\n".join(complaints)


def ll_dispatch_wrong():
    return [
        ("FP8 rows", {"x": z(12, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)}, ("x", "float8", ALLOWED)),
        ("a pair", {"x": (z(12, 512), z(12, 4))}, ("x", "tuple", ALLOWED)),
        ("more than B tokens", {"x": z(17, 512), "topk_idx": z(17, 3, dtype=i64)}, ("17", "16")),
        ("other T", {"topk_idx": z(11, 3, dtype=i64)}, ("topk_idx", "[11, 3]", ALLOWED)),
        ("float indices", {"topk_idx": z(12, 3, dtype=f32)}, ("topk_idx", "float32", ALLOWED)),
        ("H not of 128", {"x": z(12, 520)}, ("520", "128")),
        ("transposed", {"x": z(512, 12).t()}, ("x", "contiguous")),
        ("B of 0", {"num_max_dispatch_tokens_per_rank": 0}, ("num_max_dispatch_tokens_per_rank", "0", ALLOWED)),
        ("B as float", {"num_max_dispatch_tokens_per_rank": 1.5}, ("num_max_dispatch_tokens_per_rank", "1.5", ALLOWED)),
        ("B beyond the buffer", {"num_max_dispatch_tokens_per_rank": 5000},
         ("num_max_dispatch_tokens_per_rank", "5000", "num_rdma_bytes", "get_low_latency_rdma_size_hint")),
        ("E not divisible", {"num_experts": 7}, ("num_experts", "7", ALLOWED)),
        ("E of 0", {"num_experts": 0}, ("num_experts", "0", ALLOWED)),
        ("E beyond 32 bits", {"num_experts": 2**32 + 8}, ("num_experts", str(2**32 + 8), ALLOWED)),
        ("use_fp8 a list", {"use_fp8": []}, ("use_fp8", "[]", ALLOWED)),
        ("round_scale a text", {"round_scale": "no"}, ("round_scale", "'no'", ALLOWED)),
        ("async_finish an object", {"async_finish": Odd()}, ("async_finish", "Odd", ALLOWED)),
        ("UE8M0 without round_scale", {"use_ue8m0": True}, ("use_ue8m0", "round_scale")),
        ("UE8M0 with H not of 512", {"x": z(12, 384), "use_ue8m0": True, "round_scale": True}, ("384", "512")),
        ("hook and async", {"return_recv_hook": True, "async_finish": True}, ("return_recv_hook", "async_finish")),
        ("int64 statistics", {"cumulative_local_expert_recv_stats": z(4, dtype=i64)},
         ("cumulative_local_expert_recv_stats", "int64", ALLOWED)),
        ("short statistics", {"cumulative_local_expert_recv_stats": z(3, dtype=i32)},
         ("cumulative_local_expert_recv_stats", "[3]", ALLOWED)),
        ("int32 costs", {"dispatch_wait_recv_cost_stats": z(2, dtype=i32)},
         ("dispatch_wait_recv_cost_stats", "int32", ALLOWED)),
        ("costs of three ranks", {"dispatch_wait_recv_cost_stats": z(3, dtype=i64)},
         ("dispatch_wait_recv_cost_stats", "[3]", ALLOWED)),
        ("a factor without NVFP4", {"x_global_scale": torch.ones(1)}, ("x_global_scale", "use_nvfp4=False", ALLOWED)),
        ("two factors", {"use_nvfp4": True, "x_global_scale": torch.ones(2)}, ("x_global_scale", "[2]", ALLOWED)),
        ("a factor in BF16", {"use_nvfp4": True, "x_global_scale": z(1)}, ("x_global_scale", "bfloat16", ALLOWED)),
        ("a factor that is none", {"use_nvfp4": True, "x_global_scale": 2.0}, ("x_global_scale", "float", ALLOWED)),
        ("use_nvfp4 a text", {"use_nvfp4": "no"}, ("use_nvfp4", "'no'", ALLOWED)),
        ("NVFP4 with UE8M0", {"use_nvfp4": True, "use_ue8m0": True}, ("use_ue8m0", "use_nvfp4=True", ALLOWED)),
        ("NVFP4, rounded", {"use_nvfp4": True, "round_scale": True}, ("round_scale", "use_nvfp4=True", ALLOWED)),
        ("NVFP4, H not of 128", {"use_nvfp4": True, "x": z(12, 192)}, ("192", "128")),
        ("NVFP4 of bytes", {"use_nvfp4": True, "x": z(12, 512, dtype=torch.uint8)}, ("x", "uint8", ALLOWED)),
        ("unknown keyword", {"nonsense": 1}, ("nonsense",)),
    ]  # fmt: skip


def fp4_wrong():
    u8 = torch.uint8
    return [
        ("BF16 rows", {"x": z(12, 512)}, ("x", "bfloat16", ALLOWED)),
        ("BF16 scales", {"scales": z(12, 32)}, ("scales", "bfloat16", ALLOWED)),
        ("scales None", {"scales": None}, ("scales", "None", ALLOWED)),
        ("scales of 32 channels", {"scales": z(12, 16, dtype=u8)}, ("scales", "[12, 16]", ALLOWED)),
        ("scales of other T", {"scales": z(11, 32, dtype=u8)}, ("scales", "[11, 32]", ALLOWED)),
        ("transposed", {"x": z(256, 12, dtype=u8).t()}, ("x", "contiguous")),
        ("H of 192", {"x": z(12, 96, dtype=u8), "scales": z(12, 12, dtype=u8)}, ("96", "128")),
        ("other T", {"topk_idx": z(11, 3, dtype=i64)}, ("topk_idx", "[11, 3]", ALLOWED)),
        ("more than B tokens", {"x": z(17, 256, dtype=u8), "scales": z(17, 32, dtype=u8),
                                "topk_idx": z(17, 3, dtype=i64)}, ("17", "16")),
        ("E not divisible", {"num_experts": 7}, ("num_experts", "7", ALLOWED)),
        ("hook and async", {"return_recv_hook": True, "async_finish": True}, ("return_recv_hook", "async_finish")),
    ]  # fmt: skip


def ll_combine_wrong():
    shape = (4, 2 * B, 512)
    return [
        ("float32 rows", {"x": z(*shape, dtype=f32)}, ("x", "float32", ALLOWED)),
        ("other rows", {"x": z(4, 2 * B - 1, 512)}, ("x", "[4, 31, 512]", ALLOWED)),
        ("other L", {"x": z(3, 2 * B, 512)}, ("x", "[3, 32, 512]", ALLOWED)),
        ("H not of 128", {"x": z(4, 2 * B, 200)}, ("x", "200", "128")),
        ("H beyond the buffer", {"x": z(4, 2 * B, 8192)}, ("8192", "num_rdma_bytes")),
        ("indices of other K", {"topk_idx": z(12, 4, dtype=i64)}, ("topk", "[12,")),
        ("BF16 weights", {"topk_weights": z(12, 3)}, ("topk_weights", "bfloat16", ALLOWED)),
        ("weights of other T", {"topk_weights": z(11, 3, dtype=f32)}, ("topk_weights", "[11, 3]", ALLOWED)),
        ("transposed rows", {"x": z(4, 512, 2 * B).transpose(1, 2)}, ("x", "contiguous")),
        ("transposed indices", {"topk_idx": z(3, 12, dtype=i64).t()}, ("topk_idx", "contiguous")),
        ("transposed weights", {"topk_weights": z(3, 12, dtype=f32).t()}, ("topk_weights", "contiguous")),
        ("weights in a list", {"topk_weights": [1.0]}, ("topk_weights", "list", ALLOWED)),
        ("no handle", {"handle": None}, ("handle", "None", ALLOWED)),
        ("handle of two", {"handle": (1, 2)}, ("handle", "2", ALLOWED)),
        ("handle a list of two", {"handle": [1, 2]}, ("handle", "list of 2", ALLOWED)),
        ("handle a list of numbers", {"handle": [1, 2, B, 512, 8]}, ("handle", "src_info", "int", ALLOWED)),
        ("handle with odd sizes", {"handle": (1, 2, 3, 4, 5)}, ("num_experts", "5", ALLOWED)),
        ("handle of numbers", {"handle": (1, 2, B, 512, 8)}, ("handle", "src_info", "int", ALLOWED)),
        ("use_logfmt a list", {"use_logfmt": [True]}, ("use_logfmt", "[True]", ALLOWED)),
        ("zero_copy a tensor", {"zero_copy": z(2)}, ("zero_copy", "tensor", ALLOWED)),
        ("LogFMT and zero copy", {"use_logfmt": True, "zero_copy": True}, ("use_logfmt", "zero_copy")),
        ("hook and async", {"return_recv_hook": True, "async_finish": True}, ("return_recv_hook", "async_finish")),
        ("float32 out", {"out": z(12, 512, dtype=f32)}, ("out", "float32", ALLOWED)),
        ("out of other T", {"out": z(11, 512)}, ("out", "[11, 512]", ALLOWED)),
        ("transposed out", {"out": z(512, 12).t()}, ("out", "contiguous")),
        ("costs of three ranks", {"combine_wait_recv_cost_stats": z(3, dtype=i64)},
         ("combine_wait_recv_cost_stats", "[3]", ALLOWED)),
        ("unknown keyword", {"nonsense": 1}, ("nonsense",)),
    ]  # fmt: skip


FORK_DISPATCH = {"pertoken_quant": True}
FORK_COMBINE = {
    "overlap": True, "packed_recv_count": torch.ones(4, dtype=i32), "comp_signal": torch.ones(4, dtype=i32),
    "block_m": 64, "threshold": 3, "num_sms": 4, "src_signals": torch.ones(4), "src_signal_expect_value": 2,
}  # fmt: skip
OFF_DISPATCH = {"use_nvfp4": False, "x_global_scale": None, "pertoken_quant": False, "opt_level": 2}
OFF_COMBINE = {"overlap": False, "packed_recv_count": None, "comp_signal": None, "src_signals": None, "opt_level": 2}


def fork_refusals(call, good, keywords):
    complaints = []
    for name, value in keywords.items():
        try:
            call(**good, **{name: value})
        except NotImplementedError as error:
            if name not in str(error):
                complaints.append(f"{name}: not named in {error}")
        except Exception as error:  # noqa: BLE001
            complaints.append(f"{name}: {type(error).__name__}: {error}")
        else:
            complaints.append(f"{name}: accepted")
    return complaints


def rank_low_latency(ctx):
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        call = lowlat.dispatch_and_check(ctx, buffer, CASE, B, **OFF_DISPATCH)
        lowlat.combine_and_check(ctx, buffer, call, **OFF_COMBINE)
        complaints = []
        if ctx.rank == 0:
            good = {"x": ctx.to_device(z(12, 512)), "topk_idx": ctx.to_device(call.topk_idx[0])}
            good |= {"num_max_dispatch_tokens_per_rank": B, "num_experts": 8}
            complaints += refusals(buffer.low_latency_dispatch, good, on(ctx, ll_dispatch_wrong()))
            complaints += fork_refusals(buffer.low_latency_dispatch, good, FORK_DISPATCH)
            bytes_of = {name: ctx.to_device(z(12, n, dtype=torch.uint8)) for name, n in (("x", 256), ("scales", 32))}
            complaints += refusals(buffer.low_latency_dispatch_fp4, good | bytes_of, on(ctx, fp4_wrong()))
            good = {"x": ctx.to_device(z(4, 2 * B, 512)), "topk_idx": good["topk_idx"]}
            good |= {"topk_weights": ctx.to_device(z(12, 3, dtype=f32)), "handle": call.handle}
            complaints += refusals(buffer.low_latency_combine, good, on(ctx, ll_combine_wrong()))
            complaints += fork_refusals(buffer.low_latency_combine, good, FORK_COMBINE)
            complaints += refusals(buffer.clean_low_latency_buffer, CLEAN, CLEAN_WRONG)
            complaints += refusals(buffer.get_next_low_latency_combine_buffer, {}, NEXT_WRONG)
        ctx.barrier()
        lowlat.combine_and_check(ctx, buffer, lowlat.dispatch_and_check(ctx, buffer, CASE.but(seed=1), B))
        return complaints


CLEAN = {"num_max_dispatch_tokens_per_rank": B, "hidden": 512, "num_experts": 8}
CLEAN_WRONG = [
    ("B of 0", {"num_max_dispatch_tokens_per_rank": 0}, ("num_max_dispatch_tokens_per_rank", "0")),
    ("B beyond the buffer", {"num_max_dispatch_tokens_per_rank": 5000}, ("5000", "num_rdma_bytes")),
    ("negative H", {"hidden": -1}, ("hidden", "-1")),
    ("E not divisible", {"num_experts": 7}, ("num_experts", "7")),
]
NEXT_WRONG = [("no handle", {"handle": None}, ("handle", "None")), ("short", {"handle": (1, 2)}, ("handle", "2"))]


def test_low_latency_mode(pool):
    complaints = pool.run(2, rank_low_latency)[0]
    assert not complaints, "\n".join(complaints)


def rank_view(ctx):
    with normal.buffer_of(ctx, 1 << 16) as buffer:
        view = buffer.get_local_buffer_tensor(torch.int8)
        assert view.numel() >= 1 << 16 and view.dtype == torch.int8
        part = buffer.get_local_buffer_tensor(torch.float32, torch.Size([4, 8]), offset=256)
        assert part.shape == (4, 8) and part.data_ptr() == view.data_ptr() + 256
        part.fill_(1.5)
        assert view.view(torch.float32)[64:96].tolist() == [1.5] * 32
        assert buffer.get_local_buffer_tensor(torch.bfloat16, use_rdma_buffer=True).numel() == 0
        wrong = [
            ("dtype as text", {"dtype": "int8"}, ("dtype", "int8")),
            ("negative offset", {"offset": -4}, ("offset", "-4")),
            ("beyond the end", {"size": torch.Size([1 << 30])}, ("size", str(1 << 30))),
            ("offset beyond the end", {"offset": 1 << 40}, ("offset", str(1 << 40))),
            ("unaligned offset", {"offset": 3}, ("offset", "3")),
            ("offset beyond 64 bits", {"offset": 2**70}, ("offset", str(2**70))),
            ("size a number", {"size": 7}, ("size", "7", ALLOWED)),
            ("size of texts", {"size": ["a"]}, ("size", "'a'", ALLOWED)),
            ("a negative size", {"size": (-1, 4)}, ("size", "-1", ALLOWED)),
            ("use_rdma_buffer a list", {"use_rdma_buffer": [1]}, ("use_rdma_buffer", "[1]", ALLOWED)),
        ]
        complaints = refusals(buffer.get_local_buffer_tensor, {"dtype": torch.float32}, wrong)
        assert not complaints, "\n".join(complaints)


def test_local_buffer_tensor(pool):
    pool.run(1, rank_view)


@pytest.mark.parametrize("wrong_index", [8, 99, -2, 2**40])
def test_index_out_of_range(pool, wrong_index):
    """Only the running call sees data: the error names the index. On the CPU the buffer works on afterwards."""
    pool.run(2, rank_wrong_index, wrong_index)


def rank_wrong_index(ctx, wrong_index):
    from deep_ep import DeepEPError

    idx = cases.routing(CASE, ctx.rank)
    idx[3, 1] = wrong_index
    with normal.buffer_of(ctx) as buffer:
        with pytest.raises(DeepEPError) as caught:
            victims.settled(ctx, buffer, lambda: buffer.get_dispatch_layout(ctx.to_device(idx), 8))()
        assert "topk_idx" in str(caught.value) and str(wrong_index) in str(caught.value)
        if ctx.device.type == "cpu":
            normal.dispatch_and_check(ctx, buffer, CASE)
    if ctx.device.type == "cuda":  # a kernel saw it, when the call had returned: that buffer has failed
        with normal.buffer_of(ctx) as buffer:
            normal.dispatch_and_check(ctx, buffer, CASE)


BOOTSTRAPS = [
    ("rank a text", {"rank": "0"}, ("rank", "'0'", ALLOWED)),
    ("rank beyond the group", {"rank": 2}, ("rank", "2", ALLOWED)),
    ("rank a bool", {"rank": True}, ("rank", "True", ALLOWED)),
    ("size 0", {"size": 0}, ("size", "0", ALLOWED)),
    ("size beyond 32 bits", {"size": 2**32 + 2}, ("size", str(2**32 + 2), ALLOWED)),
    ("size a float", {"size": 2.0}, ("size", "2.0", ALLOWED)),
    ("name of bytes", {"name": b"a"}, ("name", "b'a'", ALLOWED)),
    ("name with NUL", {"name": "a\0b"}, ("name", "NUL")),
]


def test_bootstrap():
    from deep_ep import Bootstrap, Buffer

    good = {"rank": 0, "size": 2}
    complaints = refusals(Bootstrap.tcp, {**good, "address": "localhost:1"}, BOOTSTRAPS)
    complaints += refusals(Bootstrap.tcp, good, [("address a number", {"address": 7}, ("address", "7", ALLOWED))])
    complaints += refusals(Bootstrap.file, {**good, "directory": "/tmp"}, BOOTSTRAPS)
    complaints += refusals(Bootstrap.file, good, [("no folder", {"directory": None}, ("directory", "None", ALLOWED))])
    wrong = [("a text", {"bootstrap": "/tmp"}, ("bootstrap", "str", ALLOWED))]
    complaints += refusals(Buffer, {"group": None, "engine": "cpu"}, wrong)
    assert not complaints, "\n".join(complaints)


def test_bootstrap_from_environment(monkeypatch):
    from deep_ep import Bootstrap

    for name, value in {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not refusals(Bootstrap.from_env, {}, [("RANK a word", {}, ("RANK", "'one'", ALLOWED))])


def test_event_overlap():
    from deep_ep import EventOverlap

    assert EventOverlap().event is None
    assert not refusals(EventOverlap, {}, [("a text", {"event": "x"}, ("event", "str", ALLOWED))])


TIMEOUTS = (float("inf"), float("nan"), 1e300, 1e16, 1e10, 2**80, 0, -1, True, "5")


def rank_switches(ctx):
    from deep_ep import Buffer

    good = {"group": ctx.group, "num_nvl_bytes": 1 << 16, "engine": ctx.engine}
    wrong = [(f"timeout {value!r}", {"timeout": value}, ("timeout", repr(value), ALLOWED)) for value in TIMEOUTS]
    wrong += [
        ("enable_shrink a text", {"enable_shrink": "yes"}, ("enable_shrink", "'yes'", ALLOWED)),
        ("bytes beyond 64 bits", {"num_nvl_bytes": 2**64 + 5}, ("num_nvl_bytes", str(2**64 + 5), ALLOWED)),
        ("queue pairs beyond 32 bits", {"num_qps_per_rank": 2**32 + 24}, ("num_qps_per_rank", ALLOWED)),
    ]
    return refusals(Buffer, good, wrong)


def test_constructor(pool):
    complaints = pool.run(1, rank_switches)[0]
    assert not complaints, "\n".join(complaints)
