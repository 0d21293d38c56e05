"""torch.ops.deep_ep: the operators against Buffer's methods, torch's own checks of operators, compile and export."""

from __future__ import annotations

import warnings

import pytest
import torch

import cases
import checks
import lowlat
import normal
import test_fp4
import test_graphs
from cases import Case
from conftest import full

CASE = Case((12, 7), experts=8, topk=3, hidden=512)
B = 16
ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# Symbols for sizes that are not known before the run, which torch leaves to graph breaks unless it is told.
DYNAMIC = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def operators():
    import deep_ep.ops  # noqa: F401 - defines them

    return torch.ops.deep_ep


def inputs_of(ctx, buffer, case=CASE):
    """Arguments of deep_ep::dispatch up to the buffer's name."""
    own = normal.expect(case, ctx.rank).own
    idx, weights = ctx.to_device(own.topk_idx), ctx.to_device(own.topk_weights)
    return inputs_of_tensors(buffer, normal.x_of(ctx, own), idx, weights)


def inputs_of_tensors(buffer, x, idx, weights):
    rows, scales = x if isinstance(x, tuple) else (x, None)
    per_rank, per_node, per_expert, in_rank = operators().layout(idx, CASE.experts, buffer.name)
    return [rows, scales, idx, weights, per_rank, per_node if len(per_node) else None, in_rank, per_expert, buffer.name]


def rank_same_results(ctx, case):
    """Operators and methods: the same results bit for bit, fresh, cached and into outputs of a fixed size."""
    with normal.buffer_of(ctx) as buffer:
        given, ops = inputs_of(ctx, buffer, case), operators()
        exchange = normal.expect(case, ctx.rank)
        counts = [given[4], given[5] if given[5] is not None else None, given[7], given[6]]
        checks.same_layout((*counts, None), exchange.layouts[ctx.rank])
        pair = case.kind == "fp8"
        for bound in (None, 100):
            rows, scales, idx, weights, per_expert, *handle = ops.dispatch(*given, 4, bound)
            exchange.recv_x = (rows, scales) if pair else rows
            checks.same_received(exchange.recv_x, idx, weights, exchange.want)
            checks.same_ints("counts", per_expert.tolist(), normal.reference.align(exchange.want.expert_counts, 4))
        again, again_scales = ops.dispatch_cached(given[0], given[1], *handle, buffer.name)
        checks.same_rows("cached rows", again, exchange.want.x)
        if pair:
            checks.same_bits("cached scales", again_scales, exchange.want.scales)
        rows, scales, idx, weights, *fixed = ops.dispatch_worst_case(*given, 64)
        checks.same_received((rows, scales) if pair else rows, idx, weights, exchange.want, 64)
        answers, biases = normal.expert_rows(exchange, True), normal.biases_of(exchange, 2, True)
        own = ctx.to_device(answers[ctx.rank])
        for each in (handle, fixed):
            mine = torch.cat([own, own.new_full((len(each[1]) - len(own), own.shape[1]), float("nan"))])
            combined, _ = ops.combine(mine, *map(ctx.to_device, biases), None, *each, buffer.name)
            normal.check_combined(exchange, answers, biases, combined, True)
        got, sums = ops.combine(own, None, None, weights[: len(own)].contiguous(), *handle, buffer.name)
        normal.check_combined(exchange, answers, [], got, True)
        normal.check_weights(exchange, sums, True)
        with pytest.raises(ValueError, match=r"argument max_recv_tokens: got 0, allowed at least the \d+ rows"):
            ops.dispatch(*given, 1, 0)
        with torch.inference_mode():
            checks.same_rows("rows in inference mode", ops.dispatch(*given)[0], exchange.want.x)


@pytest.mark.parametrize("case", [CASE, CASE.but(kind="fp8", num_scales=4)], ids=["bf16", "fp8"])
def test_same_results_as_methods(pool, case):
    pool.run(2, rank_same_results, case)


def opcheck(operator, *args, **options):
    torch.library.opcheck(operator.default, args, test_utils=options.get("tests", ALL_CHECKS))


def rank_opcheck(ctx):
    """torch's own checks of schema, autograd registration, fake kernels and tracing with dynamic shapes."""
    with normal.buffer_of(ctx) as buffer:
        case = CASE.but(topk=CASE.experts)  # every token goes to every rank, so that no row of the worst case is left
        given, ops = inputs_of(ctx, buffer, case), operators()
        _, _, _, weights, _, *handle = ops.dispatch(*given)
        x, rows = given[0], torch.randn(len(handle[1]), 512).bfloat16().to(ctx.device)
        grads = [each.clone().requires_grad_() for each in (x, given[3])]
        opcheck(ops.layout, given[2], CASE.experts, buffer.name)
        opcheck(ops.dispatch, *given)
        opcheck(ops.dispatch, grads[0], None, given[2], grads[1], *given[4:], 2, 64)
        opcheck(ops.dispatch_worst_case, grads[0], None, given[2], grads[1], *given[4:], sum(CASE.tokens))
        opcheck(ops.dispatch_cached, grads[0], None, *handle, buffer.name)
        bias = torch.randn_like(x).requires_grad_()
        answers = rows.requires_grad_(), bias, None, weights.clone().requires_grad_()
        opcheck(ops.combine, *answers, *handle, buffer.name)


def test_opcheck(pool):
    pool.run(2, rank_opcheck, deadline=120)


class Resending(dict):
    """Calls that wait for their receive, of which there is always one more: torch's checks repeat a receive."""

    def __init__(self, send):
        super().__init__()
        self.send = send

    def pop(self, ticket, default=None):
        if ticket != 0:
            return super().pop(ticket, default)
        *_, made = self.send()
        return super().pop(int(made))


def check_halves(buffer, send, recv, given, outputs=None, inputs=()):
    """opcheck of both halves: a send is forgotten after each check, a receive has one of its own."""
    from deep_ep.ops import _low_latency

    for test in ALL_CHECKS:
        # What no rank has sent or received yet holds anything, and this check compares it.
        if test != "test_aot_dispatch_dynamic":
            opcheck(send, *given, tests=test)
            buffer.clean_low_latency_buffer(B, 512, CASE.experts)
    if outputs is None:
        return
    _low_latency._pending[buffer] = Resending(lambda: send(*given))
    opcheck(recv, *outputs, torch.zeros(1, dtype=torch.int64), *inputs)
    del _low_latency._pending[buffer]


def rank_low_latency_opcheck(ctx):
    idx = ctx.to_device(cases.routing(CASE, ctx.rank))
    x, weights = ctx.to_device(lowlat.make_x(CASE, ctx.rank, False)), ctx.to_device(lowlat.make_weights(CASE, ctx.rank))
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        ops, name = operators(), buffer.name
        received, waited = (torch.zeros(n, dtype=d, device=ctx.device) for n, d in ((4, torch.int32), (2, torch.int64)))
        tests = ALL_CHECKS[:3]  # rows past the counts hold anything, and the last check compares them
        given = x, idx, B, CASE.experts, name, weights, received, waited
        for formats in ((False,), (True, True, True)):
            opcheck(ops.low_latency_dispatch, *given, *formats, tests=tests)
        rows, scales, *handle = ops.low_latency_dispatch(*given, False)
        check_halves(
            buffer, ops.low_latency_dispatch_send, ops.low_latency_dispatch_recv, (*given, False),
            (rows, scales, *handle), (x, idx, name, weights, received),
        )  # fmt: skip
        _, source, ranges = handle
        answers = torch.zeros_like(rows), idx, weights, source, ranges, B, 512, CASE.experts, name
        opcheck(ops.low_latency_combine, *answers)
        opcheck(ops.low_latency_combine_out, torch.empty_like(x), *answers)
        check_halves(
            buffer, ops.low_latency_combine_send, ops.low_latency_combine_recv, answers, (torch.empty_like(x),),
            (*answers[:5], name),
        )  # fmt: skip


def test_low_latency_opcheck(pool):
    pool.run(2, rank_low_latency_opcheck, deadline=120)


def fp4_inputs(ctx, case=CASE):
    """x and scales of deep_ep::low_latency_dispatch_fp4, x and the factor of …_nvfp4."""
    packed = tuple(map(ctx.to_device, test_fp4.packed_rows(case, ctx.rank, torch.uint8)))
    x = ctx.to_device(lowlat.make_x(case, ctx.rank, True))
    return {"fp4": packed, "nvfp4": (x, torch.full((1,), 3.5, device=ctx.device))}


def rank_fp4_opcheck(ctx, kind):
    idx, weights = ctx.to_device(cases.routing(CASE, ctx.rank)), ctx.to_device(lowlat.make_weights(CASE, ctx.rank))
    with lowlat.buffer_of(ctx, CASE, B) as buffer:
        name, (x, scales) = buffer.name, fp4_inputs(ctx)[kind]
        whole, send = (getattr(operators(), f"low_latency_dispatch_{kind}{half}") for half in ("", "_send"))
        received, waited = (torch.zeros(n, dtype=d, device=ctx.device) for n, d in ((4, torch.int32), (2, torch.int64)))
        given = x, scales, idx, B, CASE.experts, name, weights, received, waited
        opcheck(whole, *given, tests=ALL_CHECKS[:3])
        if kind == "nvfp4":
            opcheck(whole, x, None, *given[2:6], tests=ALL_CHECKS[:3])
        receives = {"inputs": (x, idx, name, weights, received, None, scales), "outputs": whole(*given)}
        # torch's checks compare tensors that are mutated, which it cannot do with e4m3 scales.
        check_halves(buffer, send, operators().low_latency_dispatch_recv, given, **receives if kind == "fp4" else {})
        if kind == "nvfp4":
            with torch.autocast(ctx.device.type):  # casts the rows first
                checks.same_bits("counts", whole(x.float(), *given[1:6])[2], whole(x, *given[1:6])[2])


@pytest.mark.parametrize("kind", ["fp4", "nvfp4"])
def test_fp4_opcheck(pool, kind):
    pool.run(2, rank_fp4_opcheck, kind, deadline=120)


def fp4_answers(rows, scales, kind):
    """What experts answer: rows of H channels of the received bytes, each with that of its scale."""
    if kind == "nvfp4":
        tiles = scales.view(torch.uint8).permute(5, 2, 1, 0, 4, 3)  # [L, M, 4, 32, H/64, 4], in the order of rows
        rows, scales = rows.permute(2, 0, 1), tiles.flatten(1, 3).flatten(2)
    codes = torch.stack([rows & 15, rows >> 4], -1).flatten(2)
    return (codes + scales[:, : rows.shape[1]].repeat_interleave(16, dim=2).float()).bfloat16()


def fp4_round_trip(buffer, x, scales, idx, weights, kind, halves, received):
    """Dispatch, experts and combine, as TensorRT-LLM (packed rows) and vLLM (a cast) have them."""
    options = {"return_recv_hook": halves, "cumulative_local_expert_recv_stats": received}
    if kind == "fp4":
        rows, row_scales, counts, handle, _, receive = buffer.low_latency_dispatch_fp4(
            x, scales, idx, B, CASE.experts, **options
        )
    else:
        (rows, row_scales), counts, handle, _, receive = buffer.low_latency_dispatch(
            x, idx, B, CASE.experts, use_nvfp4=True, x_global_scale=scales, **options
        )
    if halves:
        receive()
    given = fp4_answers(rows, row_scales, kind), None, idx, weights, handle
    sums, _, receive = buffer.low_latency_combine_low_precision("fp8", *given, return_recv_hook=halves)
    if halves:
        receive()
    return sums * 2, counts, handle[1], rows.stride(), row_scales.stride(), rows.dtype, row_scales.dtype, *handle[2:]


def rank_fp4_compile(ctx, backend):
    with lowlat.buffer_of(ctx, CASE.but(tokens=(B, B)), B) as buffer:
        traced = compiled(fp4_round_trip, backend, dynamic=True)
        for tokens in ((12, 7), (5, 16)):
            case = CASE.but(tokens=tokens)
            idx, weights = cases.routing(case, ctx.rank), lowlat.make_weights(case, ctx.rank)
            for kind, inputs in fp4_inputs(ctx, case).items():
                for halves in (False, True):
                    stats = [torch.full((4,), 3, dtype=torch.int32, device=ctx.device) for _ in "ab"]
                    given = *inputs, ctx.to_device(idx), ctx.to_device(weights), kind, halves
                    want = fp4_round_trip(buffer, *given, stats[0])
                    assert want[0].any() and want[0].isfinite().all()
                    same(traced(buffer, *given, stats[1]), want)
                    assert torch.equal(*stats) and stats[0].sum() > 12
                    with torch.inference_mode():
                        same(fp4_round_trip(buffer, *given, None), want)
                program = torch.export.export(Fp4RoundTrip(buffer, kind), given[:4])
                # On GPUs the sums of halves are rounded elsewhere than those of a whole call.
                same(program.module()(*given[:4]), fp4_round_trip(buffer, *given[:4], kind, False, None)[:2])
        with pytest.raises(ValueError, match="argument round_scale: got True with use_nvfp4=True"):
            torch.compile(wrong_nvfp4, backend=backend)(buffer, *given[:4])


def wrong_nvfp4(buffer, x, scale, idx, weights):
    return buffer.low_latency_dispatch(x, idx, B, CASE.experts, use_nvfp4=True, x_global_scale=scale, round_scale=True)


class Fp4RoundTrip(torch.nn.Module):
    def __init__(self, buffer, kind):
        super().__init__()
        self.buffer, self.kind = buffer, kind

    def forward(self, x, scales, idx, weights):
        return fp4_round_trip(self.buffer, x, scales, idx, weights, self.kind, False, None)[:2]


@checks.needs_traced_methods
def test_fp4_compile(pool):
    pool.run(2, rank_fp4_compile, "aot_eager", deadline=120)


@checks.needs_traced_methods
@pytest.mark.skipif(not full(), reason="takes minutes: make test-full")
def test_fp4_compile_by_inductor(pool):
    pool.run(2, rank_fp4_compile, "inductor", deadline=280)


def low_latency_round_trip(buffer, x, idx, weights, halves, fp8, received, waited):
    """Two micro-batches in turn, each through dispatch, an expert and combine."""

    def experts(rows):
        values = (rows[0].float() * rows[1].repeat_interleave(128, dim=2)).bfloat16() if fp8 else rows
        return values * 2

    if not halves:
        rows, counts, handle, event, _ = buffer.low_latency_dispatch(
            x, idx, B, CASE.experts, received, waited, use_fp8=fp8, topk_weights=weights
        )
        sums, _, _ = buffer.low_latency_combine(experts(rows), idx, weights, handle)
        out = torch.empty_like(x)
        buffer.low_latency_combine(experts(rows), idx, weights, handle, out=out, combine_wait_recv_cost_stats=waited)
        return sums + 1, out, counts, handle[1], event.event is None
    options = {"use_fp8": fp8, "return_recv_hook": True}
    rows_a, counts_a, handle_a, _, receive_a = buffer.low_latency_dispatch(
        x, idx, B, CASE.experts, received, waited, **options
    )
    rows_b, counts_b, handle_b, _, receive_b = buffer.low_latency_dispatch(x * 2, idx, B, CASE.experts, **options)
    receive_a()
    answers_a = experts(rows_a)
    receive_b()
    sums_a, _, receive_a = buffer.low_latency_combine(
        answers_a, idx, weights, handle_a, return_recv_hook=True, combine_wait_recv_cost_stats=waited
    )
    answers_b = experts(rows_b)
    receive_a()
    sums_b, _, receive_b = buffer.low_latency_combine(answers_b, idx, weights, handle_b, return_recv_hook=True)
    receive_b()
    return sums_a + sums_b, counts_a, counts_b, handle_a[1], handle_b[1]


def rank_low_latency_compile(ctx, backend):
    with lowlat.buffer_of(ctx, CASE.but(tokens=(B, B)), B) as buffer:
        traced = compiled(low_latency_round_trip, backend, dynamic=True)
        for tokens in ((12, 7), (5, 16)):
            case = CASE.but(tokens=tokens)
            x = ctx.to_device(lowlat.make_x(case, ctx.rank, True))
            idx, weights = (
                ctx.to_device(cases.routing(case, ctx.rank)),
                ctx.to_device(lowlat.make_weights(case, ctx.rank)),
            )
            for halves in (False, True):
                for fp8 in (False, True):
                    stats = [(torch.full((4,), 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)) for _ in "ab"]
                    stats = [tuple(map(ctx.to_device, pair)) for pair in stats]
                    want = low_latency_round_trip(buffer, x, idx, weights, halves, fp8, *stats[0])
                    same(traced(buffer, x, idx, weights, halves, fp8, *stats[1]), want)
                    assert torch.equal(stats[0][0], stats[1][0]) and stats[1][0].sum() > 12
                    assert (stats[1][1] >= 0).all()


@checks.needs_traced_methods
def test_low_latency_compile(pool):
    pool.run(2, rank_low_latency_compile, "aot_eager", deadline=120)


def round_trip(buffer, x, idx, weights, worst, config):
    """Layout, dispatch, cached dispatch and combine as a compiled model has them, between operations of torch."""
    per_rank, per_node, per_expert, table, event = buffer.get_dispatch_layout(idx, CASE.experts)
    rows, row_idx, row_weights, counts, handle, _ = buffer.dispatch(
        x * 1, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=table,
        num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=weights, num_worst_tokens=worst,
        global_expert_id_offset=2, config=config,
    )  # fmt: skip
    again = buffer.dispatch(x + 1, handle=handle)[0]
    sums, sum_weights, _ = buffer.combine(rows * 2, handle, topk_weights=row_weights, bias=x)
    local = torch.where(row_idx >= 0, row_weights, 0).sum()
    return sums + 1, sum_weights * 2, local, again.shape[0], sum(counts), event.event is None


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, f"{one} is not {other}"


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def rank_compile(ctx, backend, options=None):
    """fullgraph: Buffer's methods leave no break, whatever the number of tokens and of received rows."""
    from deep_ep import Buffer

    config = Buffer.get_dispatch_config(ctx.size)
    with normal.buffer_of(ctx) as buffer, torch._dynamo.config.patch(DYNAMIC), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # torch's own
        traced = compiled(round_trip, backend, dynamic=True, **(options or {}))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for seed, tokens in enumerate([(12, 7), (5, 20), (8, 3)]):
            own = normal.expect(CASE.but(tokens=tokens, seed=seed), ctx.rank).own
            given = [ctx.to_device(each) for each in (own.x, own.topk_idx, own.topk_weights)]
            for worst in (0, 64):
                want = round_trip(buffer, *given, worst, config)
                same(traced(buffer, *given, worst, config), want)
        with normal.buffer_of(ctx) as other:  # the graph names its buffer
            same(traced(other, *given, 64, config), want)
            # Nobody uses the rows of the cached dispatch: the compiler leaves it out.
            assert other.name != buffer.name and other.stats()["dispatch"]["calls"] == 1
        # As many graphs as there are kinds of call: worst and fresh.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 5


@checks.needs_traced_methods
def test_compile(pool):
    pool.run(2, rank_compile, "aot_eager", deadline=120)


@checks.needs_traced_methods
@pytest.mark.skipif(not full(), reason="takes minutes: make test-full")
@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune-no-cudagraphs"}], ids=["default", "max-autotune"])
def test_compile_by_inductor(pool, options):
    pool.run(2, rank_compile, "inductor", options, deadline=280)


class RoundTrip(torch.nn.Module):
    def __init__(self, buffer, worst):
        super().__init__()
        self.buffer, self.worst = buffer, worst

    def forward(self, x, idx, weights):
        return round_trip(self.buffer, x, idx, weights, self.worst, None)[:3]


def rank_captured(ctx):
    """In a CUDA graph; on the CPU engine the calls are repeated."""
    case = CASE.but(worst=True)
    with normal.buffer_of(ctx) as buffer, lowlat.buffer_of(ctx, CASE, B) as decoder:
        given, ops = inputs_of(ctx, buffer, case), operators()
        x, idx, weights = given[0], given[2], given[3]
        fp4 = fp4_inputs(ctx)

        def calls():
            layout = ops.layout(idx, CASE.experts, buffer.name)
            rows, _, _, sums, *handle = ops.dispatch_worst_case(*given, 32)
            combined = ops.combine(rows, None, None, sums, *handle, buffer.name)
            whole = low_latency_calls(ops, decoder.name, x, idx, weights, halves=False)
            halves = low_latency_calls(ops, decoder.name, x, idx, weights, halves=True)
            return layout[2], *combined, whole, halves, *fp4_calls(decoder, fp4, idx, weights)

        want = [each.clone() for each in calls()]
        replay = test_graphs.capture(ctx, calls)
        for _ in range(3):
            same([each.cpu() for each in replay()], [each.cpu() for each in want])
        x.mul_(2)
        same([each.cpu() for each in replay()[1:2]], [2 * want[1].cpu()])


def low_latency_calls(ops, name, x, idx, weights, halves):
    given = x, idx, B, CASE.experts, name, None, None, None, False
    if not halves:
        rows, _, _, *handle = ops.low_latency_dispatch(*given)
        return ops.low_latency_combine(rows, idx, weights, *handle, B, 512, CASE.experts, name)
    *outputs, ticket = ops.low_latency_dispatch_send(*given)
    ops.low_latency_dispatch_recv(*outputs, ticket, x, idx, name)
    rows, _, _, *handle = outputs
    combined, ticket = ops.low_latency_combine_send(rows, idx, weights, *handle, B, 512, CASE.experts, name)
    ops.low_latency_combine_recv(combined, ticket, rows, idx, weights, *handle, name)
    return combined


def fp4_calls(buffer, inputs, idx, weights):
    """Sums of answers to packed rows and to cast ones, whole and in halves."""
    ops, name, sums = operators(), buffer.name, []
    for kind, (x, scales) in inputs.items():
        for halves in (False, True):
            given = x, scales, idx, B, CASE.experts, name
            if halves:
                *outputs, ticket = getattr(ops, f"low_latency_dispatch_{kind}_send")(*given)
                ops.low_latency_dispatch_recv(*outputs, ticket, x, idx, name, None, None, None, scales)
            else:
                outputs = getattr(ops, f"low_latency_dispatch_{kind}")(*given)
            answers = fp4_answers(*outputs[:2], kind)
            sums.append(
                ops.low_latency_combine(answers, idx, weights, *outputs[3:], B, CASE.hidden, CASE.experts, name)
            )
    return sums


def test_captured(pool):
    pool.run(2, rank_captured)


def rank_export(ctx):
    """An exported program names its buffer, and runs for another number of tokens."""
    own = [normal.expect(CASE.but(tokens=tokens), ctx.rank).own for tokens in ((12, 7), (9, 15))]
    first, second = ([ctx.to_device(each) for each in (o.x, o.topk_idx, o.topk_weights)] for o in own)
    with normal.buffer_of(ctx) as buffer:
        tokens = torch.export.Dim("tokens", min=2, max=64)
        for worst in (0, 40):
            model = RoundTrip(buffer, worst)
            shapes = {"x": {0: tokens}, "idx": {0: tokens}, "weights": {0: tokens}}
            program = torch.export.export(model, tuple(first), dynamic_shapes=shapes)
            graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
            names = {str(node.target) for graph in graphs for node in graph.nodes}
            assert f"deep_ep.dispatch{'_worst_case' if worst else ''}.default" in names
            for given in (first, second):
                same(program.module()(*given), model(*given))
        with pytest.raises(Exception, match="Buffer.combine: there is no operator for events"):
            torch.export.export(Asynchronous(buffer), (*first, 40), strict=False)


class Asynchronous(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.buffer = buffer

    def forward(self, x, idx, weights, worst):
        given = inputs_of_tensors(self.buffer, x, idx, weights)
        rows, *_, matrix, source, head = operators().dispatch_worst_case(*given, worst)
        handle = (matrix, None, None, source, None, head)
        return self.buffer.combine(rows, handle, async_finish=True)[0]


@checks.needs_traced_methods
def test_export(pool):
    pool.run(2, rank_export, deadline=120)


def rank_refused(ctx):
    """What operators do not do ends in an error that names the operator, before anything is sent."""
    with normal.buffer_of(ctx) as buffer:
        given, ops = inputs_of(ctx, buffer), operators()
        *_, matrix, source, head = ops.dispatch(*given)

        def combine(rows):
            return ops.combine(rows, None, None, None, matrix, source, head, buffer.name)[0]

        rows = torch.ones((len(source), 512), dtype=torch.bfloat16, device=ctx.device)
        before = combine(rows)
        with pytest.raises(NotImplementedError, match="deep_ep.combine: torch.func.vmap is not supported"):
            torch.func.vmap(combine)(torch.stack([rows, rows]))
        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(NotImplementedError, match="deep_ep.combine: a transform of torch.func is not"):
                transform(lambda rows: combine(rows).sum())(rows)
        forward = torch.autograd.forward_ad
        with forward.dual_level(), pytest.raises(NotImplementedError, match="deep_ep.combine: forward-mode diff"):
            combine(forward.make_dual(rows, rows))
        with forward.dual_level():
            assert torch.equal(combine(rows), before)
        for on_meta in (0, 1, 4):  # torch takes the fake kernel then, whose results hold anything
            mixed = [rows, torch.zeros_like(given[0]), None, None, matrix, source, head, buffer.name]
            mixed[on_meta] = mixed[on_meta].to("meta")
            with pytest.raises(ValueError, match="argument .*: got a tensor on c.*, allowed one on meta"):
                ops.combine(*mixed)
        with pytest.raises(ValueError, match=r"argument buffer: got 'nobody', allowed the name of a buffer .*'.+'"):
            ops.layout(given[2], CASE.experts, "nobody")
        with pytest.raises(TypeError, match="argument x: got dtype torch.float32, allowed torch.bfloat16"):
            combine(rows.float())
        if ctx.device.type == "cpu":
            with torch.autocast("cpu", dtype=torch.float16):
                assert torch.equal(combine(rows.float()), combine(rows))
        checks.same_rows("rows after the refusals", ops.dispatch(*given)[0], normal.expect(CASE, ctx.rank).want.x)


def test_refused(pool):
    pool.run(2, rank_refused)


def rank_names(ctx):
    """A buffer has its group's name; a second one of the group a number more, until the first is gone."""
    with normal.buffer_of(ctx) as first:
        assert first.name == ctx.group.group_name
        with normal.buffer_of(ctx) as second:
            assert second.name == f"{first.name}:1"
            own = normal.expect(CASE, ctx.rank).own
            idx = ctx.to_device(own.topk_idx)
            same(operators().layout(idx, CASE.experts, first.name), operators().layout(idx, CASE.experts, second.name))
    with normal.buffer_of(ctx) as third:
        assert third.name == first.name  # as where Megatron replaces its buffer


def test_names(pool):
    pool.run(2, rank_names)
