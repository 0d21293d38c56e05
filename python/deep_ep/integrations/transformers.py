"""Stock models of Hugging Face transformers whose experts are spread over the ranks of a group.

The library's own interface of expert implementations calls us: routers, shared experts, attention and everything else
of a model stay as they are. See docs/transformers.md.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import INVALID_STATE, UNSUPPORTED, DeepEPError, type_error, value_error
from ..nn import ExpertParallel, expert_parameters, ignore_in_ddp
from ..nn.experts import grouped_product
from ..nn.layer import HELD

__all__ = ["MODEL_TYPES", "VERSION", "average_gradients", "clip_grad_norm_", "expert_parallel", "ignore_in_ddp"]

VERSION = "5.23"
"""The series of transformers that this module knows."""

MODEL_TYPES = {
    "deepseek_v3": "DeepseekV3Experts",
    "gpt_oss": "GptOssExperts",
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
}
"""Supported model types, with the class that holds a layer's experts."""

_INSTALL = f"pip install 'transformers=={VERSION}.*'"
_NAME = "deep_ep"  # of our implementation, in transformers' interface
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STACKED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")  # [E, …]


class _LocalExperts(nn.Module):
    """This rank's experts, called as deep_ep.nn.GroupedExperts: the stacked parameters of transformers' module."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """``[M, H]`` for rows ``[M, H]`` that are sorted by expert, counts ``[L]`` of each."""
        source: Any = self.source
        inner = source._apply_gate(self._linear(rows, counts, "gate_up_proj"))
        answers: Tensor = self._linear(inner, counts, "down_proj")
        return answers

    def _linear(self, rows: Tensor, counts: Tensor, name: str) -> Tensor:
        source: Any = self.source
        weight = getattr(source, name)
        product = grouped_product(rows, weight if source.is_transposed else weight.transpose(1, 2), counts)
        if not source.has_bias:
            return product
        numbers = torch.arange(weight.shape[0], device=rows.device)
        each = numbers.repeat_interleave(counts.to(rows.device), output_size=rows.shape[0])
        bias: Tensor = getattr(source, f"{name}_bias")
        return product + bias.index_select(0, each).to(product.dtype)


def _experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of its own experts."""
    layer: ExpertParallel | None = module.__dict__.get(HELD)
    if layer is None:
        raise DeepEPError(INVALID_STATE, "the experts are not spread over ranks: call expert_parallel(model, group)")
    mixed: Tensor = layer(hidden_states, topk_idx=top_k_index, topk_weights=top_k_weights.float())
    return mixed


def _interface() -> Any:
    """transformers' table of expert implementations, with ours in it."""
    try:
        version: str = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise DeepEPError(UNSUPPORTED, f"transformers is not installed: {_INSTALL}") from error
    if version.split(".")[:2] != VERSION.split("."):
        raise value_error("transformers", f"version {version}", f"{VERSION}: {_INSTALL}")
    table = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    table.register(_NAME, _experts_forward)
    return table


def _experts_of(model: Any) -> list[tuple[str, Any]]:
    """The modules that hold the experts of a supported model; refuses any other by name."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, nn.Module) or kind is None:
        raise type_error("model", type(model).__name__, "a model of transformers")
    supported = f"a model of type {', '.join(MODEL_TYPES)}"
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]
    if kind not in MODEL_TYPES or not found:
        raise value_error("model", f"{type(model).__name__} of type {kind} with {len(found)} mixtures", supported)
    for name, module in found:
        if type(module).__name__ != MODEL_TYPES[kind]:
            raise value_error("model", f"{type(module).__name__} in {name}", MODEL_TYPES[kind])
        if HELD in module.__dict__:
            raise value_error("model", "a model whose experts are spread over ranks already", "a stock model")
        if module._is_expert_parallel or getattr(model, "hf_quantizer", None) is not None:
            raise value_error("model", "a model that transformers shards or quantizes itself", "a stock model")
        if module.down_proj.dtype not in _DTYPES:
            allowed = ", ".join(map(str, _DTYPES))
            raise type_error("model", f"experts of {module.down_proj.dtype} in {name}", allowed)
    return found


def expert_parallel(model: Any, group: Any, *, gradient_scale: float | None = None) -> Any:
    """Keeps this rank's experts of a stock model, and computes its mixtures of experts over the ranks of a group.

    Collective. Changes the model in place. From then on `forward`, `backward`, `generate` and `save_pretrained` are
    collective: each rank calls them in the same order with a batch of its own. `generate` needs ``synced_gpus=True``.
    `save_pretrained` gathers the experts on rank 0, which writes a stock checkpoint.

    Rows of BF16 models travel and are added in BF16, those of float32 and float16 models in float32.

    Gradients of the experts are those of all ranks' tokens times `gradient_scale`: 1 / R makes them as
    DistributedDataParallel and `average_gradients` leave the other parameters.

    Args:
        model: of one of MODEL_TYPES, with the same weights on every rank, on the CPU or on the device it is to run on.
        group: a torch.distributed group of R ranks; R divides the number of experts E, and rank r keeps experts r * E/R
            to (r + 1) * E/R - 1.
        gradient_scale: factor of the experts' gradients; None: 1 / R. 1 where the ranks' losses are summed.

    Returns:
        The model.

    Raises:
        DeepEPError: transformers is missing, or a rank is late or dead. Also a ValueError or TypeError: another version
            of transformers, a model that is not supported, E not a multiple of R.
    """
    _interface()
    modules = _experts_of(model)
    rank, ranks = group.rank(), group.size()
    for name, module in modules:
        experts = module.down_proj.shape[0]
        if experts % ranks:
            raise value_error("model", f"{experts} experts in {name}", f"a multiple of the {ranks} ranks")
    top_k = int(model.config.num_experts_per_tok)
    for _, module in modules:
        experts = module.down_proj.shape[0]
        _keep(module, rank * (experts // ranks), experts // ranks)
        module.__dict__[HELD] = ExpertParallel(
            _LocalExperts(module),
            group,
            experts,
            top_k,
            hidden=int(model.config.hidden_size),
            use_float32=module.down_proj.dtype is not torch.bfloat16,
            gradient_scale=gradient_scale,
        )
    model.set_experts_implementation(_NAME)
    model.save_pretrained = types.MethodType(_save_pretrained, model)
    return model


def _keep(module: nn.Module, first: int, count: int) -> None:
    """Cuts the stacked parameters down to some experts; what is left shares no memory with the whole."""
    for name in _STACKED:
        whole = getattr(module, name, None)
        if whole is not None:
            part = whole.detach()[first : first + count].clone()
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _group_of(model: nn.Module) -> Any:
    for module in model.modules():
        if HELD in module.__dict__:
            return module.__dict__[HELD].group
    raise value_error("model", "a model whose experts are not spread", "one that went through expert_parallel()")


# ---- saving


def _expert_names(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        if HELD in module.__dict__:
            for name, _ in module.named_parameters(recurse=False):
                yield f"{prefix}.{name}"


def _gather(part: Tensor, group: Any) -> Tensor | None:
    """``[E, …]`` on the CPU of rank 0, of every rank's ``[L, …]``; holds one rank's part besides."""
    through_host = part.is_cuda and "nccl" not in dist.get_backend(group)
    part = (part.detach().cpu() if through_host else part.detach()).contiguous()
    if group.rank():
        dist.send(part, dist.get_global_rank(group, 0), group=group)
        return None
    whole = torch.empty((part.shape[0] * group.size(), *part.shape[1:]), dtype=part.dtype)
    arrived = torch.empty_like(part)
    for rank in range(group.size()):
        if rank:
            dist.recv(arrived, dist.get_global_rank(group, rank), group=group)
        whole[rank * part.shape[0] : (rank + 1) * part.shape[0]] = arrived if rank else part
    return whole


def _save_pretrained(
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """transformers' save_pretrained of the whole model. Collective over the group, whose rank 0 writes.

    Args:
        save_directory, options: as transformers takes them.
        is_main_process: has no meaning here: the group's rank 0 writes.
        state_dict: this rank's state instead of the model's own.

    Raises:
        DeepEPError: rank 0 could not write; there, what went wrong.
    """
    group = _group_of(self)
    state = dict(self.state_dict() if state_dict is None else state_dict)
    for name in _expert_names(self):
        whole = _gather(state[name], group)
        if whole is not None:
            state[name] = whole
    failure: list[Any] = [None]
    error: Exception | None = None
    if group.rank() == 0:
        try:
            type(self).save_pretrained(self, save_directory, True, state, **options)
        except Exception as raised:  # the other ranks wait for its end
            error, failure = raised, [f"{type(raised).__name__}: {raised}"]
    dist.broadcast_object_list(failure, dist.get_global_rank(group, 0), group=group)
    if error is not None:
        raise error
    if failure[0] is not None:
        raise DeepEPError(INVALID_STATE, f"rank 0 could not save the model: {failure[0]}")


# ---- training


def average_gradients(model: nn.Module) -> None:
    """Averages the gradients of everything but the experts over the ranks, as DistributedDataParallel does. Collective.

    For training without a wrapper: call it after backward, before the optimizer's step. A rank whose backward gave a
    parameter no gradient counts as zero.

    Args:
        model: that went through expert_parallel().
    """
    group, local = _group_of(model), expert_parameters(model)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in local:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their norm, over the experts of all ranks, is at most max_norm. Collective.

    torch's own function sees one rank's experts alone: ranks would scale what they share by different factors.

    Args:
        model: that went through expert_parallel(), with gradients that are averaged already.
        max_norm: > 0.

    Returns:
        The norm before: a float32 scalar, the same on every rank.
    """
    group, local = _group_of(model), expert_parameters(model)
    device = next(iter(local)).device
    squares = torch.zeros(2, dtype=torch.float32, device=device)
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            squares[int(parameter in local)] += parameter.grad.float().pow(2).sum()
    dist.all_reduce(squares[1:], group=group)
    norm = squares.sum().sqrt()
    for gradient in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
