"""deep_ep.nn: the layer against a plain mixture of experts in one process, forward, gradients, decoding, wrappers."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checks
from conftest import full

HIDDEN, INNER, EXPERTS, TOP_K = 128, 32, 4, 2
TOKENS = (13, 6)
B = 16


def seeded(*keys):
    return torch.Generator().manual_seed(hash(keys) % 2**31)


def expert(number, dtype=torch.float32):
    """An expert that depends on its number alone."""
    network = nn.Sequential(nn.Linear(HIDDEN, INNER, bias=False), nn.SiLU(), nn.Linear(INNER, HIDDEN, bias=False))
    for place in (0, 2):
        weight = network[place].weight
        weight.data = torch.randn(weight.shape, generator=seeded(1, number, place)) / weight.shape[1] ** 0.5
    return network.to(dtype)


class Model(nn.Module):
    """A router, a linear layer on top, and between them a mixture of experts."""

    def __init__(self, mixture):
        super().__init__()
        self.router, self.top = nn.Linear(HIDDEN, EXPERTS, bias=False), nn.Linear(HIDDEN, 8, bias=False)
        self.router.weight.data = torch.randn(EXPERTS, HIDDEN, generator=seeded(2)) / HIDDEN**0.5
        self.top.weight.data = torch.randn(8, HIDDEN, generator=seeded(3)) / HIDDEN**0.5
        self.mixture = mixture

    def forward(self, x):
        return self.top(self.mixture(x, self.router(x)))


class Plain(nn.Module):
    """All experts in one process, each token through each expert in turn; rounded to BF16 where rows travel."""

    def __init__(self, shared=None, capacity=None):
        super().__init__()
        self.experts = nn.ModuleList(expert(number) for number in range(EXPERTS))
        self.shared, self.capacity = shared, capacity

    def forward(self, x, scores):
        probabilities = scores.float().softmax(-1)
        weights, idx = probabilities.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for number, network in enumerate(self.experts):
            share = torch.where(idx == number, weights, 0).sum(1, keepdim=True)
            if self.capacity is not None:
                kept = torch.zeros_like(share, dtype=torch.bool)
                kept[share[:, 0].topk(min(self.capacity, len(x))).indices] = True
                share = torch.where(kept, share, 0)
            total = total + share * network(x.bfloat16().float())
        return total if self.shared is None else total + self.shared(x)


def batch(rank, turn=0, tokens=TOKENS):
    return torch.randn(tokens[rank], HIDDEN, generator=seeded(4, rank, turn)).bfloat16().float()


def layer_of(ctx, **options):
    from deep_ep.nn import ExpertParallel

    local = EXPERTS // ctx.size
    dtype = options.pop("dtype", torch.float32)
    experts = nn.ModuleList(expert(ctx.rank * local + number, dtype) for number in range(local))
    return ExpertParallel(experts, ctx.group, EXPERTS, TOP_K, **{"hidden": HIDDEN, **options}).to(ctx.device)


def loss_of(y):
    return (y.float() ** 2).mean()


def close(name, got, want, tolerance=0.02):
    """Relative to the largest value: rows were rounded to BF16 on their way, once forward and once back."""
    error = (got.detach().cpu().float() - want.detach().float()).abs().max() / want.abs().max()
    assert error <= tolerance, f"{name}: relative error {error:.4f}, allowed {tolerance}"


def own_gradients(ctx, model):
    """By the name in the plain model."""
    local, found = EXPERTS // ctx.size, {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        if name.startswith("mixture.experts."):
            _, _, number, rest = name.split(".", 3)
            name = f"mixture.experts.{ctx.rank * local + int(number)}.{rest}"
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def wanted_gradients(turns=1):
    """Of the mean over ranks of their losses, in one process."""
    model = Model(Plain())
    for turn in range(turns):
        for rank in range(len(TOKENS)):
            (loss_of(model(batch(rank, turn))) / len(TOKENS)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_gradients(ctx, model, turns=1, tolerance=0.02):
    want = wanted_gradients(turns)
    got = own_gradients(ctx, model)
    assert set(got) <= set(want) and len(got) == 2 + EXPERTS // ctx.size * 2
    for name, gradient in got.items():
        close(name, gradient, want[name], tolerance)


def rank_forward_and_gradients(ctx, options):
    """Outputs, and the gradients of x; then those of parameters, as the mean of the ranks' losses has them."""
    tolerance = 0.06 if options.get("use_fp8") else 0.02
    model, plain = Model(layer_of(ctx, **options)).to(ctx.device), Model(Plain())
    x, own = batch(ctx.rank), batch(ctx.rank)
    x = ctx.to_device(x).requires_grad_()
    own.requires_grad_()
    y, want = model(x), plain(own)
    close("y", y, want, tolerance)
    assert y.dtype == torch.float32
    loss_of(y).backward()
    loss_of(want).backward()
    close("gradient of x", x.grad, own.grad, tolerance)
    for parameter in (model.router.weight, model.top.weight):  # what DDP does
        gradient = parameter.grad.cpu()
        dist.all_reduce(gradient, group=ctx.group)
        parameter.grad = (gradient / ctx.size).to(ctx.device)
    check_gradients(ctx, model, tolerance=tolerance)


@pytest.mark.parametrize("options", [{}, {"use_fp8": True}, {"num_worst_tokens": 24}], ids=["bf16", "fp8", "worst"])
def test_forward_and_gradients(pool, options):
    pool.run(2, rank_forward_and_gradients, options)


def rank_ddp(ctx, amp):
    """DDP around the model, two micro-batches of which the first is not synchronised, optionally under autocast."""
    from deep_ep.nn import ignore_in_ddp

    model = DistributedDataParallel(ignore_in_ddp(Model(layer_of(ctx)).to(ctx.device)), process_group=ctx.group)
    for turn in range(2):
        with model.no_sync() if turn == 0 else contextlib.nullcontext():
            with torch.autocast(ctx.device.type, dtype=torch.bfloat16, enabled=amp):
                y = model(ctx.to_device(batch(ctx.rank, turn)))
            loss_of(y).backward()
    check_gradients(ctx, model, turns=2, tolerance=0.05 if amp else 0.02)
    numbers = [name for name, _ in model.named_parameters() if "experts" in name]
    assert len(numbers) == EXPERTS // ctx.size * 2
    own = expert(ctx.rank * EXPERTS // ctx.size)[0].weight
    assert torch.equal(model.module.mixture.experts[0][0].weight.cpu(), own), "DDP has replaced the experts"


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
def test_ddp_and_accumulation(pool, amp):
    pool.run(2, rank_ddp, amp)


def rank_fsdp(ctx):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from deep_ep.nn import expert_parameters

    model = Model(layer_of(ctx)).to(ctx.device)
    mesh = DeviceMesh.from_group(ctx.group, ctx.device.type)
    fully_shard(model, mesh=mesh, ignored_params=expert_parameters(model))
    loss_of(model(ctx.to_device(batch(ctx.rank)))).backward()
    check_gradients(ctx, model)


def test_fsdp(pool, device):
    fsdp = pytest.importorskip("torch.distributed.fsdp")  # here alone: a second of imports, in each process
    if not hasattr(fsdp, "fully_shard") or "ignored_params" not in inspect.signature(fsdp.fully_shard).parameters:
        pytest.skip(f"needs fully_shard(ignored_params=); here is torch {torch.__version__}")
    if device != "cpu":
        pytest.skip("needs a group that reduces GPU memory: the pool's back end is gloo")
    pool.run(2, rank_fsdp)


def rank_grouped(ctx):
    """Stacked experts by torch's grouped product, beside the same one by one; also without any rows."""
    from deep_ep.nn import ExpertParallel, GroupedExperts, apply_to_groups

    local = EXPERTS // ctx.size
    torch.manual_seed(5)
    grouped = GroupedExperts(local, HIDDEN, INNER, dtype=torch.bfloat16, device=ctx.device)

    class One(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, rows):
            up, gate, down = (weight[self.number] for weight in (grouped.up, grouped.gate, grouped.down))
            return (F.silu(rows @ gate) * (rows @ up)) @ down

    singles = nn.ModuleList(One(number) for number in range(local))
    for counts in ([3, 0], [0, 5], [0, 0], [2, 2]):
        rows = torch.randn(sum(counts), HIDDEN, generator=seeded(6)).bfloat16().to(ctx.device)
        for where in ("cpu", ctx.device):
            lengths = torch.tensor(counts, device=where)
            same = [apply_to_groups(experts, rows, lengths) for experts in (grouped, singles)]
            torch.testing.assert_close(*same, rtol=0.02, atol=0.02)
    three = torch.randn(local, 4, HIDDEN, generator=seeded(7)).bfloat16().to(ctx.device)
    torch.testing.assert_close(*(apply_to_groups(e, three, None) for e in (grouped, singles)), rtol=0.02, atol=0.02)
    layers = [ExpertParallel(experts, ctx.group, EXPERTS, TOP_K) for experts in (grouped, singles)]
    x, scores = batch(ctx.rank, tokens=(9, 0)), torch.randn((9, 0)[ctx.rank], EXPERTS, generator=seeded(8))
    x, scores = ctx.to_device(x), ctx.to_device(scores)
    results, gradients = [], []
    for layer in layers:
        grouped.zero_grad()
        results.append(layer(x, scores))
        loss_of(results[-1].sum() + torch.ones(1, device=ctx.device)).backward()
        gradients.append(grouped.down.grad.clone())
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)
    assert gradients[0].any(), "no expert of this rank learns"


def test_grouped_experts(pool):
    pool.run(2, rank_grouped)


def rank_decode(ctx):
    """decode gives what forward gives, in one and in two micro-batches, whatever the number of tokens."""
    shared = expert(77).to(ctx.device)
    plain = Plain(copy.deepcopy(shared).cpu())
    for use_fp8 in (False, True):
        layer = layer_of(ctx, max_decode_tokens=B, shared_experts=shared, use_fp8=use_fp8)
        for tokens in ((16, 5), (1, 0)):
            x = batch(ctx.rank, tokens=tokens)
            scores = torch.randn(len(x), EXPERTS, generator=seeded(9, ctx.rank))
            want = plain(x, scores)
            given = ctx.to_device(x), ctx.to_device(scores)
            both = layer(*given), layer.decode(*given), layer.decode(*given, num_micro_batches=1)
            for y in both:
                assert y.shape == x.shape and y.dtype == x.dtype and (y is both[0] or not y.requires_grad)
                if len(x):
                    close("decoded", y, want, 0.06 if use_fp8 else 0.02)


def test_decode(pool):
    pool.run(2, rank_decode)


def rank_routing(ctx):
    """Capacity, the balance loss, the router's bias, and a routing of the caller's own."""
    from deep_ep.nn import balance_loss, route

    bounded = layer_of(ctx, capacity_factor=0.5)
    x = batch(ctx.rank)
    scores = torch.randn(len(x), EXPERTS, generator=seeded(10, ctx.rank))
    capacity = -(-len(x) * TOP_K // (2 * EXPERTS))
    routing = bounded.route(scores)
    chosen = torch.bincount(routing.topk_idx[routing.topk_idx >= 0], minlength=EXPERTS)
    free = torch.bincount(route(scores, TOP_K).topk_idx.flatten(), minlength=EXPERTS)
    assert torch.equal(chosen, free.clamp(max=capacity)) and (free > capacity).any()
    close("bounded", bounded(ctx.to_device(x), ctx.to_device(scores)), Plain(capacity=capacity)(x, scores))
    even = route(torch.eye(EXPERTS).repeat(3, 1) * 50, 1)
    assert abs(balance_loss(even).item() - 1) < 1e-3
    assert balance_loss(route(torch.eye(EXPERTS)[:1].repeat(9, 1) * 50, 1)).item() > EXPERTS - 0.1
    layer = layer_of(ctx, router_bias=True, score_function="sigmoid", scale=2.0)
    scores[:, 0] += 9  # everybody wants expert 0
    scores = ctx.to_device(scores).requires_grad_()
    y = layer(ctx.to_device(x), scores)
    (loss_of(y) + layer.balance_loss).backward()
    assert scores.grad.isfinite().all() and scores.grad.any() and layer.balance_loss > 1.2
    with torch.no_grad():
        before = layer.route(scores)
    layer.update_router_bias(0.25)
    assert layer.router_bias[0] == -0.25 and layer.router_bias[1:].max() == 0.25
    assert not layer.tokens_per_expert.any() and "router_bias" in layer.state_dict()
    with torch.no_grad():
        layer.router_bias[0] = -9
        after = layer.route(scores)
    assert (before.topk_idx == 0).any(1).all() and not (after.topk_idx == 0).any()
    torch.testing.assert_close(after.topk_weights.sum(1), torch.full((len(x),), 2.0, device=ctx.device))
    idx, weights = after.topk_idx.view(1, len(x), TOP_K), after.topk_weights.view(1, len(x), TOP_K)
    with torch.no_grad():
        mine = layer(ctx.to_device(x)[None], topk_idx=idx, topk_weights=weights)
        assert torch.equal(mine[0], layer(ctx.to_device(x), scores))


def test_routing(pool):
    pool.run(2, rank_routing)


def rank_life(ctx):
    """Layers of a group share a buffer; copies work; wrong arguments are named."""
    from deep_ep.nn import ExpertParallel

    layer, other = layer_of(ctx), layer_of(ctx)
    decoding = layer_of(ctx, max_decode_tokens=B)
    assert layer._buffer is other._buffer is decoding._buffer is not decoding._decoder and layer._decoder is None
    x, scores = ctx.to_device(batch(ctx.rank)), torch.randn(TOKENS[ctx.rank], EXPERTS, generator=seeded(11))
    scores = ctx.to_device(scores)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(layer)(x, scores), layer(x, scores))
    lost = layer_of(ctx, hidden=2 * HIDDEN)
    if ctx.rank == 0:  # its collector was faster
        lost._buffer = None
        gc.collect()
    found = layer_of(ctx, hidden=2 * HIDDEN)
    assert found._buffer is not None and found._buffer is not lost._buffer
    layer._kind = "meta"  # as if the experts had been there when the layer was made, and were moved
    with torch.no_grad():
        assert torch.equal(layer(x, scores), other(x, scores))
    assert layer._kind == ctx.device.type and layer._buffer.engine == ctx.device.type
    own = ExpertParallel(layer.experts, ctx.group, EXPERTS, TOP_K, buffer=layer._buffer)
    assert own._buffer is layer._buffer
    for options, text in (
        ({"num_experts": 5}, r"argument num_experts: got 5, allowed a multiple of the 2 ranks"),
        ({"experts": nn.ModuleList()}, "argument experts: got 0 modules, allowed this rank's 2 experts"),
        ({"capacity_factor": 0}, "argument capacity_factor: got 0"),
        ({"gradient_scale": 0}, "argument gradient_scale: got 0"),
    ):
        given = {"experts": layer.experts, "group": ctx.group, "num_experts": EXPERTS, "top_k": TOP_K, **options}
        with pytest.raises(ValueError, match=text):
            ExpertParallel(**given)
    with pytest.raises(ValueError, match="argument score_function: got 'tanh', allowed 'softmax' or 'sigmoid'"):
        layer_of(ctx, score_function="tanh")(x, scores)
    with pytest.raises(ValueError, match="argument scores: got None"):
        layer(x)
    with pytest.raises(ValueError, match="argument max_decode_tokens: got 0"):
        layer.decode(x, scores)
    idx, weights = torch.zeros(len(x), 2, dtype=torch.int64, device=x.device), torch.ones(len(x), 2, device=x.device)
    for arguments, options, error, text in (
        ((3, scores), {}, TypeError, "argument x: got int, allowed an ordinary tensor"),
        ((x.to_sparse(), scores), {}, TypeError, "argument x: got a tensor of layout torch.sparse_coo"),
        ((x[0, 0], scores), {}, ValueError, r"argument x: got shape \[\]"),
        ((x, "scores"), {}, TypeError, "argument scores: got str"),
        ((x, scores), {"topk_idx": idx}, ValueError, "argument topk_idx: got a routing beside scores"),
        ((x, scores), {"topk_weights": weights}, ValueError, "argument topk_weights: got a routing beside scores"),
        ((x, scores[:, 1:]), {}, ValueError, rf"argument scores: got shape .*, allowed \[\.\.\., {EXPERTS}\]"),
        ((x,), {"topk_idx": idx, "topk_weights": 1}, TypeError, "argument topk_weights: got int"),
        ((x,), {"topk_idx": idx, "topk_weights": weights[:, 1:]}, ValueError, "argument topk_weights: got shape"),
    ):
        for call in (layer, layer_of(ctx, max_decode_tokens=64).decode):
            with pytest.raises(error, match=text):
                call(*arguments, **options)
    layer(x, scores)


def test_life(pool):
    pool.run(2, rank_life)


def rank_compiled(ctx, backend):
    """The whole model in one graph, forward and backward."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for options in ({"num_worst_tokens": 24}, {}):
            torch._dynamo.reset()
            model = Model(layer_of(ctx, **options)).to(ctx.device)
            traced = torch.compile(model, backend=backend, fullgraph=True)
            x = ctx.to_device(batch(ctx.rank))
            y, want = traced(x), model(x)
            checks.same_bits("compiled", y.cpu(), want.detach().cpu())
            loss_of(y).backward()
            got = own_gradients(ctx, model)
            model.zero_grad()
            loss_of(want).backward()
            for name, gradient in own_gradients(ctx, model).items():
                torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7)


@checks.needs_traced_methods
def test_compiled(pool):
    pool.run(2, rank_compiled, "aot_eager", deadline=120)


def rank_page(ctx, code):
    found = {}
    exec(code, found)  # noqa: S102 - the page's program
    assert found["z"].shape == (8, 256) and found["layer"].balance_loss > 0
    assert found["mine"].down.grad.isfinite().all() and found["router"].weight.grad.any()


def test_program_of_the_page(pool):
    """The program of docs/operators.md, but for its init_process_group, on all ranks of the pool."""
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "operators.md").read_text()
    lines = page.split("```python\n")[1].split("```")[0].splitlines()
    assert 'dist.init_process_group("gloo")' in lines
    pool.run(pool.size, rank_page, "\n".join(line for line in lines if "init_process_group" not in line))


@pytest.mark.skipif(not full(), reason="takes minutes: make test-full")
def test_compiled_by_inductor(pool):
    pool.run(2, rank_compiled, "inductor", deadline=280)
