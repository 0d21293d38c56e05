"""deep_ep.integrations.transformers: stock models over ranks against the same models in one process."""

from __future__ import annotations

import copy
import importlib.util
import pathlib

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from conftest import full, test_device
from pool import RankPool

RANKS = 4 if test_device() == "cpu" else min(4, torch.cuda.device_count())  # a GPU each
VOCABULARY = 96
KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
# Relative to the largest value. float32 rows cross bit for bit, and only the order of sums differs; BF16 rows are
# rounded to 8 bits on their way back, and stock models round elsewhere.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.04}
MISSING = importlib.util.find_spec("transformers") is None
pytestmark = pytest.mark.skipif(MISSING, reason="needs transformers, of tools/requirements.txt (Python 3.11 or later)")


@pytest.fixture(scope="module")
def ranks(device):
    """Ranks that are all of torch's group: synced_gpus asks all processes."""
    if RANKS < 2:
        pytest.skip("needs two GPUs")
    pool = RankPool(RANKS, device)
    pool.start()
    yield pool
    pool.stop()


def config_of(kind, **changes):
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": True,
    }
    own = {
        "mixtral": {"num_local_experts": 4},
        "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
        "deepseek_v3": {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
    }[kind]
    return transformers.AutoConfig.for_model(kind, **{**common, **own, **changes})


def stock_of(kind, dtype=torch.float32, **changes):
    """A model whose parameters, biases and buffers of routers are random, the same on every rank."""
    import transformers

    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **changes))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dim() > 1:
            tensor.data.normal_(std=1.5 * tensor.shape[-1] ** -0.5)
        elif "bias" in name:
            tensor.data.normal_(std=0.1)
    return model.to(dtype).train()


def sharded_of(ctx, stock, **options):
    from deep_ep.integrations.transformers import expert_parallel

    return expert_parallel(copy.deepcopy(stock).to(ctx.device), ctx.group, **options)


def batch(rank, rows=None):
    """Each rank has sequences of its own number and length."""
    random = torch.Generator().manual_seed(100 + rank)
    shape = (1 + rank % 2 if rows is None else rows, 5 + 3 * rank)
    return torch.randint(3, VOCABULARY, shape, generator=random)


def close(name, got, want, tolerance):
    error = (got.detach().cpu().float() - want.detach().float()).abs().max() / want.detach().abs().max().clamp(min=1e-6)
    assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance}"


def check_gradients(ctx, model, want, tolerance):
    """Of each parameter; of the experts, this rank's part."""
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        wanted = want[name]
        if wanted.shape != parameter.shape:
            wanted = wanted.chunk(ctx.size)[ctx.rank]
        close(f"gradient of {name}", parameter.grad, wanted, tolerance)


def joint_gradients(ctx, stock, **options):
    """Of the mean of the ranks' losses, in one process."""
    stock.zero_grad()
    for rank in range(ctx.size):
        ids = batch(rank)
        (stock(input_ids=ids, labels=ids, **options).loss / ctx.size).backward()
    return {name: parameter.grad.clone() for name, parameter in stock.named_parameters()}


def rank_model(ctx, kind, dtype):
    """Logits, router logits, loss with the auxiliary one, gradients as of the joint batch, their norm; no tokens."""
    from deep_ep.integrations.transformers import average_gradients, clip_grad_norm_

    tolerance = TOLERANCE[dtype]
    # In BF16 each token goes to all 4 experts: a choice between nearly equal scores would turn on the last bit.
    stock = stock_of(kind, dtype, **({"num_experts_per_tok": 4} if dtype is torch.bfloat16 else {}))
    model = sharded_of(ctx, stock)
    aux = {"output_router_logits": True} if kind != "deepseek_v3" else {}
    ids = batch(ctx.rank)
    want = stock(input_ids=ids, labels=ids, **aux)
    got = model(input_ids=ctx.to_device(ids), labels=ctx.to_device(ids), **aux)
    close("logits", got.logits, want.logits, tolerance)
    close("loss", got.loss, want.loss, tolerance)
    if aux:
        assert want.aux_loss > 0 and len(got.router_logits) == len(want.router_logits) == 2
        for mine, theirs in zip(got.router_logits, want.router_logits, strict=True):
            close("router logits", mine, theirs, tolerance)
    got.loss.backward()
    average_gradients(model)
    joint = joint_gradients(ctx, stock, **aux)
    check_gradients(ctx, model, joint, 5 * tolerance)
    norm = clip_grad_norm_(model, 0.5)
    close("norm", norm, torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5), tolerance)
    check_gradients(ctx, model, {name: p.grad for name, p in stock.named_parameters()}, 5 * tolerance)
    check_no_tokens(ctx, stock, model, tolerance)


def mixture_of(model):
    """The last layer's block of a router and experts."""
    return [module for module in model.modules() if hasattr(getattr(module, "experts", None), "_is_expert_parallel")][
        -1
    ]


def check_no_tokens(ctx, stock, model, tolerance):
    """Rank 1 has none. Stock attention takes no empty batch, so that the mixture alone is called."""
    x = stock.get_input_embeddings()(batch(ctx.rank)).detach()
    x = x[:, : 0 if ctx.rank == 1 else None]
    mine = ctx.to_device(x).requires_grad_()
    outputs = [mixture(each) for mixture, each in ((mixture_of(model), mine), (mixture_of(stock), x))]
    got, want = (output[0] if isinstance(output, tuple) else output for output in outputs)
    assert got.shape == x.shape
    if ctx.rank != 1:
        close("beside a rank without tokens", got, want, tolerance)
    got.float().square().sum().backward()
    assert mine.grad.shape == x.shape


@pytest.mark.parametrize("kind", KINDS if full() else ("deepseek_v3", "gpt_oss"))
def test_float32_model(ranks, kind):
    ranks.run(RANKS, rank_model, kind, torch.float32)


@pytest.mark.parametrize("kind", ("mixtral", "gpt_oss") if full() else ("mixtral",))
def test_bfloat16_model(ranks, kind):
    ranks.run(RANKS, rank_model, kind, torch.bfloat16)


def rank_wrapped(ctx, kind):
    """DistributedDataParallel and gradient checkpointing; then the step's weights, saved, are those of one process."""
    from deep_ep.integrations.transformers import ignore_in_ddp

    stock = stock_of(kind)
    model = sharded_of(ctx, stock)
    model.gradient_checkpointing_enable()
    wrapped = DistributedDataParallel(ignore_in_ddp(model), process_group=ctx.group)
    ids = ctx.to_device(batch(ctx.rank))
    wrapped(input_ids=ids, labels=ids).loss.backward()
    check_gradients(ctx, wrapped, joint_gradients(ctx, stock), 1e-4)


@pytest.mark.parametrize("kind", KINDS if full() else KINDS[1:2])
def test_ddp_and_checkpointing(ranks, kind):
    ranks.run(RANKS, rank_wrapped, kind)


def rank_generate(ctx, kind):
    """Ranks end at different steps; tokens are those of one process."""
    stock = stock_of(kind).eval()
    model = sharded_of(ctx, stock).eval()
    options = {"do_sample": False, "synced_gpus": True, "max_new_tokens": 2 + 4 * ctx.rank}
    ids = batch(ctx.rank)
    got = model.generate(ctx.to_device(ids), attention_mask=torch.ones_like(ctx.to_device(ids)), **options)
    options["synced_gpus"] = False
    want = stock.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(got.cpu(), want), (got, want)
    return want.shape[1] - ids.shape[1]


@pytest.mark.parametrize("kind", KINDS if full() else KINDS[2:3])
def test_generate(ranks, kind):
    lengths = ranks.run(RANKS, rank_generate, kind)
    assert len(set(lengths)) > 1, lengths


def rank_save(ctx, kind, folder):
    """A checkpoint loads in stock transformers with the very same weights; its writer's failure reaches every rank."""
    import transformers

    stock = stock_of(kind)
    model = sharded_of(ctx, stock)
    before = sum(p.numel() for p in stock.parameters())
    whole = sum(p.numel() for n, p in stock.named_parameters() if ".experts." in n)
    assert sum(p.numel() for p in model.parameters()) == before - whole + whole // ctx.size
    model.save_pretrained(folder)
    ctx.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want, got = stock.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert loaded.config._experts_implementation != "deep_ep"
    file = pathlib.Path(folder) / "file"
    if ctx.rank == 0:
        file.write_text("")
    ctx.barrier()
    with pytest.raises(OSError if ctx.rank == 0 else RuntimeError, match="file"):
        model.save_pretrained(file / "below")


@pytest.mark.parametrize("kind", KINDS if full() else KINDS[:1])
def test_saved_checkpoint_is_stock(ranks, kind, tmp_path):
    ranks.run(RANKS, rank_save, kind, str(tmp_path))


def rank_refused(ctx):
    import transformers

    from deep_ep import nn as layers
    from deep_ep.integrations import transformers as integration

    def refused(text, model, kind=ValueError):
        with pytest.raises(kind, match=text):
            integration.expert_parallel(model, ctx.group)

    tiny = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    other = transformers.AutoConfig.for_model("qwen2_moe", **tiny, **heads, num_experts=4, moe_intermediate_size=16)
    refused("type qwen2_moe", transformers.AutoModelForCausalLM.from_config(other))
    dense = transformers.AutoConfig.for_model("llama", **tiny, **heads)
    refused("deepseek_v3, gpt_oss, mixtral, qwen3_moe", transformers.AutoModelForCausalLM.from_config(dense))
    refused("6 experts", stock_of("mixtral", num_local_experts=6))
    refused("spread over ranks already", sharded_of(ctx, stock_of("mixtral")))
    refused("a model of transformers", torch.nn.Linear(1, 1), TypeError)
    refused("float64", stock_of("mixtral").double(), TypeError)
    transformers = importlib.import_module("transformers")  # another object once it has imported a model
    version, transformers.__version__ = transformers.__version__, "4.57.0"
    try:
        refused(r"version 4.57.0, .*: pip install 'transformers==5.23\.\*'", stock_of("mixtral"))
    finally:
        transformers.__version__ = version
    stock = stock_of("mixtral")
    stock.set_experts_implementation("deep_ep")
    with pytest.raises(RuntimeError, match="call expert_parallel"):
        stock(input_ids=batch(0))
    for option in ("use_fp8", "num_worst_tokens", "max_decode_tokens"):
        with pytest.raises(ValueError, match=f"{option}: got"):
            layers.ExpertParallel(torch.nn.Identity(), ctx.group, RANKS, 1, use_float32=True, **{option: 1})


def test_refused(ranks):
    ranks.run(RANKS, rank_refused)
