"""ExpertParallel: the whole layer, from scores to mixed outputs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch
from ..buffer import Buffer
from ..errors import check_int, type_error, value_error
from ..ops import functional
from . import float32, fp8
from .experts import apply_to_groups, dtype_of
from .routing import Routing, balance_loss, limit_to_capacity, route

Phases = Generator[None, None, Tensor]
_shared: weakref.WeakValueDictionary[tuple[Any, ...], Buffer] = weakref.WeakValueDictionary()


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by a factor."""
    return x if factor == 1 else _Scale.apply(x, factor)  # type: ignore[no-untyped-call]


def _rows_of(name: str, tensor: Tensor, width: int | None = None) -> Tensor:
    """``[..., width]`` as rows.

    Raises:
        DeepEPError (also a ValueError or TypeError): it is none such.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        kind = f"a tensor of layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise type_error(name, kind, "an ordinary tensor")
    shape = tuple(tensor.shape)
    if not shape or shape[-1] == 0 or (width is not None and shape[-1] != width):
        raise value_error(name, f"shape {list(shape)}", f"[..., {'any' if width is None else width}]")
    return tensor.reshape(-1, shape[-1])


class _Shared:
    """What copies of a layer have in common."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class ExpertParallel(nn.Module):
    """A mixture of experts over the ranks of a group: dispatch, this rank's experts, combine.

    ``forward`` is for training and prefill (normal mode, differentiable), ``decode`` for small batches without
    gradients (low-latency mode). Both are collective: every rank calls them in the same order, with any number of
    tokens.

    Gradients of the experts are divided by the number of ranks, since each expert has those of every rank's tokens:
    they are then as those of replicated parameters that DDP or FSDP average. Such wrappers must leave the experts alone
    (`ignore_in_ddp`, `expert_parameters`). `gradient_scale` is another factor: 1 where losses are summed over ranks.

    Args:
        experts: this rank's L = E / R experts, in the order of their numbers: an nn.ModuleList of modules
            ``[n, H] -> [n, H]``, or a module that is called as GroupedExperts.
        group: a torch.distributed group; rank r has the experts from r * L on.
        num_experts: E.
        top_k: K.
        shared_experts: a module ``[T, H] -> [T, H]`` whose result is added.
        hidden: H, if buffers are to be made now; else the first call makes them. Needed before torch.compile.
        max_decode_tokens: tokens a rank of `decode` calls; 0: there are none.
        use_fp8: rows travel to the experts in FP8 e4m3 with a scale for 128 channels; gradients and answers in BF16.
        use_float32: rows, answers and gradients travel in float32 and are added in float32: twice the bytes. Only
            `forward`; not with use_fp8, num_worst_tokens or max_decode_tokens.
        capacity_factor: each rank gives an expert at most ceil(factor * T * K / E) tokens; None: no bound.
        score_function, renormalize, scale: of `route`.
        router_bias: the choice of experts adds the buffer `router_bias`; see `update_router_bias`.
        num_worst_tokens: > 0: room for so many received rows in `forward`, whose host then waits for no counts, if the
            experts wait for none either, as GroupedExperts do where torch has a grouped product.
        gradient_scale: factor of the experts' gradients; None: 1 / R.
        buffer: a Buffer of the group for both modes, which the caller cleans between them where there are several nodes
            (clean_low_latency_buffer); None: one for each mode, which all layers of the group and size share.

    Attributes:
        balance_loss: of the last forward, or None: a scalar to add to the loss; see deep_ep.nn.balance_loss.
        router_bias: ``[E]`` float32, or None.
        tokens_per_expert: ``[E]`` float32: choices of this rank's tokens in training since the last update, or None.

    Raises:
        DeepEPError (also a ValueError or TypeError): an argument is wrong.
    """

    router_bias: Tensor | None
    tokens_per_expert: Tensor | None

    def __init__(
        self,
        experts: nn.Module,
        group: Any,
        num_experts: int,
        top_k: int,
        *,
        shared_experts: nn.Module | None = None,
        hidden: int | None = None,
        max_decode_tokens: int = 0,
        use_fp8: bool = False,
        use_float32: bool = False,
        capacity_factor: float | None = None,
        score_function: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        router_bias: bool = False,
        num_worst_tokens: int = 0,
        gradient_scale: float | None = None,
        buffer: Buffer | None = None,
    ) -> None:
        super().__init__()
        self._group, self.num_ranks = _Shared(group), int(group.size())
        self.num_experts = check_int("num_experts", num_experts, 1)
        if self.num_experts % self.num_ranks:
            raise value_error("num_experts", num_experts, f"a multiple of the {self.num_ranks} ranks")
        self.num_local_experts = self.num_experts // self.num_ranks
        if isinstance(experts, nn.ModuleList) and len(experts) != self.num_local_experts:
            raise value_error("experts", f"{len(experts)} modules", f"this rank's {self.num_local_experts} experts")
        self.top_k = check_int("top_k", top_k, 1, self.num_experts)
        self.max_decode_tokens = check_int("max_decode_tokens", max_decode_tokens, 0)
        self.num_worst_tokens = check_int("num_worst_tokens", num_worst_tokens, 0)
        if gradient_scale is not None and not gradient_scale > 0:
            raise value_error("gradient_scale", gradient_scale, "a number > 0, or None")
        if capacity_factor is not None and not capacity_factor > 0:
            raise value_error("capacity_factor", capacity_factor, "a number > 0, or None")
        others = {"use_fp8": use_fp8, "num_worst_tokens": num_worst_tokens, "max_decode_tokens": max_decode_tokens}
        for name, given in others.items():
            if use_float32 and given:
                raise value_error(name, given, f"{type(given)()} with use_float32")
        self.experts, self.shared_experts = experts, shared_experts
        self.use_fp8, self.use_float32, self.capacity_factor = use_fp8, use_float32, capacity_factor
        self.score_function, self.renormalize, self.scale = score_function, renormalize, scale
        self.gradient_scale = 1 / self.num_ranks if gradient_scale is None else gradient_scale
        zeros = torch.zeros(self.num_experts, dtype=torch.float32) if router_bias else None
        self.register_buffer("router_bias", zeros)
        self.register_buffer("tokens_per_expert", None if zeros is None else zeros.clone(), persistent=False)
        self.balance_loss: Tensor | None = None
        self._given = _Shared(buffer)
        self._buffer: Buffer | None = None
        self._decoder: Buffer | None = None
        self._kind, self._hidden = "", 0  # of the device that the buffers serve, and their rows
        if hidden is not None or buffer is not None:
            device = next((each.device for each in experts.parameters()), torch.device("cpu"))
            self.prepare(hidden or 0, device)

    @property
    def group(self) -> Any:
        """The torch.distributed group."""
        return self._group.value

    def extra_repr(self) -> str:
        """The sizes, for print()."""
        return f"num_experts={self.num_experts}, num_ranks={self.num_ranks}, top_k={self.top_k}"

    # ---- buffers

    @_torch.opaque
    def prepare(self, hidden: int, device: torch.device) -> None:
        """Makes the buffers for rows of `hidden` elements on a device, or finds those of another layer. Collective."""
        given = self._given.value
        if given is not None:
            self._buffer = self._decoder = given
            return
        self._kind, self._hidden = device.type, hidden
        if self.use_float32:
            hidden = float32.elements(hidden, self.top_k)
        engine = "cuda" if device.type == "cuda" else "cpu"
        self._buffer = self._find(("normal", self.group, engine, hidden))
        if self.max_decode_tokens:  # memory of its own: normal mode between nodes writes where low-latency slots lie
            sizes = (self.max_decode_tokens, self.num_experts)
            self._decoder = self._find(("low latency", self.group, engine, hidden, *sizes))

    def _find(self, key: tuple[Any, ...]) -> Buffer:
        buffer = _shared.get(key)
        # Asked of all ranks: one whose layers are gone may have lost a buffer that the others still have.
        _, _, allgather = _torch.gather_function(self.group)
        lives = allgather(b"1" if buffer is not None and buffer._core.native.alive else b"")
        if buffer is None or not all(lives):
            kind, _, engine, hidden, *_ = key
            buffer = _shared[key] = self._make_buffer(hidden, engine, kind == "low latency")
        return buffer

    def _make_buffer(self, hidden: int, engine: str, low_latency: bool) -> Buffer:
        ranks, row = self.num_ranks, 2 * hidden
        if low_latency:
            sizes = (self.max_decode_tokens, hidden, ranks, self.num_experts)
            rdma = Buffer.get_low_latency_rdma_size_hint(*sizes)
            return Buffer(self.group, 0, rdma, low_latency_mode=True, engine=engine)
        configs = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
        nvl = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs)
        return Buffer(self.group, nvl, rdma, engine=engine)

    def _normal_buffer(self, x: Tensor) -> Buffer:
        if self._buffer is None or self._is_elsewhere(x):
            self.prepare(x.shape[-1], x.device)
        assert self._buffer is not None
        return self._buffer

    def _is_elsewhere(self, x: Tensor) -> bool:
        """Whether the layer's own buffers serve another kind of device: its experts were moved after it was made."""
        return self._given.value is None and self._kind != x.device.type

    def _low_latency_buffer(self, x: Tensor) -> Buffer:
        if not self.max_decode_tokens:
            raise value_error("max_decode_tokens", 0, "the most tokens of a call, for decode()")
        if self._decoder is None or self._is_elsewhere(x):
            self.prepare(x.shape[-1], x.device)
        assert self._decoder is not None
        return self._decoder

    def __getstate__(self) -> dict[str, Any]:
        """Copies find their buffers again."""
        return {**self.__dict__, "_buffer": None, "_decoder": None, "balance_loss": None}

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertParallel:
        """Torch moves the layer with this: its buffers follow the experts. Collective then."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next((each.device for each in self.experts.parameters()), None)
        if self._kind and device is not None and device.type in ("cpu", "cuda") and device.type != self._kind:
            self.prepare(self._hidden, device)
        return self

    # ---- routing

    def route(self, scores: Tensor) -> Routing:
        """The experts of each token, within the capacity: see deep_ep.nn.route and limit_to_capacity.

        Args:
            scores: ``[T, E]``: the router's logits.
        """
        routing = route(
            scores,
            self.top_k,
            bias=self.router_bias,
            score_function=self.score_function,
            renormalize=self.renormalize,
            scale=self.scale,
        )
        if self.capacity_factor is not None:
            share = scores.shape[0] * self.top_k / self.num_experts
            routing = limit_to_capacity(routing, math.ceil(self.capacity_factor * share))
        return routing

    def _count(self, routing: Routing, by_layer: bool) -> None:
        self.balance_loss = balance_loss(routing) if by_layer else None
        if self.training and self.tokens_per_expert is not None:
            chosen = (routing.topk_idx >= 0).float().flatten()
            with torch.no_grad():
                self.tokens_per_expert.scatter_add_(0, routing.topk_idx.clamp(min=0).flatten(), chosen)

    @torch.no_grad()
    def update_router_bias(self, rate: float = 1e-3) -> None:
        """Raises the bias of experts with less than the mean load since the last update, lowers that of others.

        Collective over the group. Call it after each optimizer step.

        Args:
            rate: by how much.

        Raises:
            DeepEPError (also a ValueError): the layer was made without router_bias.
        """
        if self.router_bias is None or self.tokens_per_expert is None:
            raise value_error("router_bias", False, "True, for update_router_bias()")
        load = self.tokens_per_expert
        torch.distributed.all_reduce(load, group=self.group)
        self.router_bias += rate * torch.sign(load.mean() - load)
        load.zero_()

    # ---- training and prefill

    def forward(
        self,
        x: Tensor,
        scores: Tensor | None = None,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Tensor:
        """Mixes the answers of each token's experts. Collective, differentiable.

        Args:
            x: ``[..., H]``, floating point; BF16 travels, or float32 with use_float32.
            scores: ``[..., E]``: the router's logits; or None with
            topk_idx, topk_weights: ``[..., K]`` int64 or int32 and float32: a routing of the caller's own.

        Returns:
            The same shape and dtype as x.

        Raises:
            DeepEPError: a rank is late, dead or disagrees. Also a ValueError or TypeError for a wrong argument.
        """
        rows = _rows_of("x", x)
        buffer = self._normal_buffer(x)
        routing = self._routed(scores, topk_idx, topk_weights)
        self._count(routing, scores is not None)
        idx, weights = routing[:2]
        if self.use_float32:
            arrived = float32.send(rows.float(), idx, weights, self.num_experts, buffer)
            shared = 0 if self.shared_experts is None else self.shared_experts(rows)
            return (float32.send_back(self._compute(arrived), arrived.way) + shared).to(x.dtype).view(x.shape)
        sent = rows.to(torch.bfloat16).contiguous()
        if self.use_fp8:
            received = fp8.dispatch(sent, idx, weights, self.num_experts, buffer, self.num_worst_tokens)
        else:
            received = functional.dispatch(
                sent, idx, weights, self.num_experts, buffer, num_worst_tokens=self.num_worst_tokens
            )
        bias = None if self.shared_experts is None else self.shared_experts(rows).to(torch.bfloat16).contiguous()
        mixed, _ = functional.combine(self._compute(received).to(torch.bfloat16), received.handle, buffer, bias=bias)
        return mixed.to(x.dtype).view(x.shape)

    def _routed(self, scores: Tensor | None, idx: Tensor | None, weights: Tensor | None) -> Routing:
        """The layer's routing, or the caller's, which has no probabilities."""
        if scores is not None:
            for name, given in (("topk_idx", idx), ("topk_weights", weights)):
                if given is not None:
                    raise value_error(name, "a routing beside scores", "None, or scores=None")
            return self.route(_rows_of("scores", scores, self.num_experts))
        if idx is None or weights is None:
            raise value_error("scores", "None", "scores, or topk_idx and topk_weights")
        idx = _rows_of("topk_idx", idx)
        weights = _rows_of("topk_weights", weights, idx.shape[-1])
        return Routing(idx, weights, weights.new_empty((0, self.num_experts)))

    def _compute(self, received: functional.Received | float32.Received) -> Tensor:
        """float32 ``[N, H]``: for each received row the weighted sum over the experts here that it was sent to.

        No branch depends on the number of rows: backward has to reach the exchange on every rank.
        """
        rows, idx, weights = received.x, received.topk_idx, received.topk_weights
        num_rows, top_k = idx.shape
        counts = received.num_recv_tokens_per_expert
        local = torch.where(idx >= 0, idx, self.num_local_experts).flatten()
        order = local.sort(stable=True).indices
        if counts is None:  # worst case: entries of no expert stay, at the end
            counts = torch.zeros(self.num_local_experts + 1, dtype=torch.int64, device=idx.device)
            counts = counts.scatter_add(0, local.long(), torch.ones_like(local, dtype=torch.int64))[:-1]
            valid = torch.arange(order.shape[0], device=idx.device) < counts.sum()
            weights = torch.where(idx >= 0, weights, 0.0)  # past the received rows they are anything
        else:
            num_answers = int(counts.sum())
            # torch 2.9's compiler has to be told.
            torch._check(num_answers >= 0)  # type: ignore[no-untyped-call]
            torch._check(num_answers <= order.shape[0])  # type: ignore[no-untyped-call]
            order, valid = order[:num_answers], None
        source = torch.div(order, top_k, rounding_mode="floor")
        rows = self._as_experts(rows)  # before rows are repeated: gradients of the copies are added in this type
        inputs = rows.index_select(0, source)
        if valid is not None:
            inputs = torch.where(valid.unsqueeze(1), inputs, 0)
        # The experts' gradients are scaled, and those of their inputs are not.
        inputs = _scale_gradient(inputs, 1 / self.gradient_scale)
        answers = _scale_gradient(apply_to_groups(self.experts, inputs, counts), self.gradient_scale)
        answers = answers.float() * weights.flatten().index_select(0, order).unsqueeze(1)
        if valid is not None:
            answers = torch.where(valid.unsqueeze(1), answers, 0)
        mixed = torch.zeros((num_rows, rows.shape[1]), dtype=torch.float32, device=rows.device)
        return mixed.index_add(0, source, answers)

    def _as_experts(self, rows: Tensor) -> Tensor:
        """Rows in the experts' own type; torch.autocast chooses it itself."""
        if torch.is_autocast_enabled(rows.device.type):
            return rows
        return rows.to(dtype_of(self.experts.parameters(), rows.dtype))

    # ---- decoding

    @torch.no_grad()
    def decode(
        self,
        x: Tensor,
        scores: Tensor | None = None,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_micro_batches: int = 2,
    ) -> Tensor:
        """The same for at most `max_decode_tokens` tokens, through the low-latency mode. Collective.

        Two micro-batches take turns: while the rows of one are on the way, the experts compute the other. Nothing waits
        on the host and no shape depends on the routing, so that CUDA graphs can capture it.

        Args:
            x, scores, topk_idx, topk_weights: as in forward.
            num_micro_batches: 1 or 2, the same on all ranks.

        Returns:
            The same shape and dtype as x.
        """
        if num_micro_batches not in (1, 2):
            raise value_error("num_micro_batches", num_micro_batches, "1 or 2")
        rows = _rows_of("x", x)
        idx, weights, _ = self._routed(scores, topk_idx, topk_weights)
        half = -(-rows.shape[0] // num_micro_batches)
        parts = [slice(first * half, (first + 1) * half) for first in range(num_micro_batches)]
        mixed = take_turns(*(self.phases(rows[part], topk_idx=idx[part], topk_weights=weights[part]) for part in parts))
        return torch.cat(mixed).view(x.shape)

    @torch.no_grad()
    def phases(
        self,
        x: Tensor,
        scores: Tensor | None = None,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Phases:
        """`decode` of one micro-batch in steps, for callers that compute something else between them.

        Yields after each: dispatch sent, received, experts computed, combine sent; then receives, and returns the
        result. Every rank takes the steps of its micro-batches in the same order; see take_turns.
        """
        rows = _rows_of("x", x)
        buffer = self._low_latency_buffer(x)
        idx, weights, _ = self._routed(scores, topk_idx, topk_weights)
        idx, weights = idx.contiguous(), weights.float().contiguous()
        sent = rows.to(torch.bfloat16).contiguous()
        received, _, handle, _, receive = buffer.low_latency_dispatch(
            sent, idx, self.max_decode_tokens, self.num_experts, use_fp8=self.use_fp8, return_recv_hook=True
        )
        assert receive is not None
        yield
        receive()
        yield
        arrived = received if isinstance(received, Tensor) else fp8.uncast(*received)
        answers = apply_to_groups(self.experts, self._as_experts(arrived), None).to(torch.bfloat16).contiguous()
        shared = None if self.shared_experts is None else self.shared_experts(rows)
        yield
        mixed, _, receive = buffer.low_latency_combine(answers, idx, weights, handle, return_recv_hook=True)
        assert receive is not None
        yield
        receive()
        result = mixed if shared is None else mixed.float() + shared.float()
        return result.to(x.dtype).view(x.shape)


def take_turns(*generators: Phases) -> list[Tensor]:
    """Runs micro-batches step by step in turn, each a step behind the one before it; returns their results.

    Of two micro-batches that yield as `ExpertParallel.phases` does, at most two sends of a kind wait for their receive,
    as low-latency mode allows.
    """
    results: dict[int, Tensor] = {}
    started = 0
    while len(results) < len(generators):
        started = min(started + 1, len(generators))
        for number, generator in enumerate(generators[:started]):
            if number not in results:
                try:
                    next(generator)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(generators))]


HELD = "_deep_ep_layer"  # of an experts module of a framework: the ExpertParallel that computes it, no submodule of it


def _expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, ExpertParallel):
            yield f"{name}.experts" if name else "experts", module.experts
        elif HELD in module.__dict__:
            yield name, module


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of the experts of all ExpertParallel layers, e.g. for ``fully_shard(…, ignored_params=)``."""
    return {parameter for _, experts in _expert_modules(model) for parameter in experts.parameters()}


def ignore_in_ddp(model: nn.Module) -> nn.Module:
    """Tells DistributedDataParallel to leave the experts alone; call it before DDP wraps the model. Returns the model.

    Else DDP gives every rank the experts of rank 0 and adds up gradients of different experts.
    """
    names = [
        f"{prefix}.{name}"
        for prefix, experts in _expert_modules(model)
        for name, _ in [*experts.named_parameters(), *experts.named_buffers()]
    ]
    tell = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    tell(model, names)  # type: ignore[no-untyped-call]
    return model
