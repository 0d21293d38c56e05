"""Which experts a token goes to: from a router's scores to indices and weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import value_error


class Routing(NamedTuple):
    """The experts of T tokens.

    Attributes:
        topk_idx: ``[T, K]`` int64; -1: none.
        topk_weights: ``[T, K]`` float32, 0 there.
        probabilities: ``[T, E]`` float32: of the score function, each row divided by its sum.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    probabilities: Tensor


def route(
    scores: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    score_function: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Chooses the K experts of each token with the highest probability.

    Args:
        scores: ``[T, E]``: the router's logits.
        top_k: K.
        bias: ``[E]``: added to the probabilities for the choice, not to the weights.
        score_function: "softmax" over the experts, or "sigmoid" of each.
        renormalize: weights of a token sum to `scale`.
        scale: factor of the weights.

    Raises:
        DeepEPError (also a ValueError): another score function.
    """
    logits = scores.float()
    if score_function == "softmax":
        values = probabilities = logits.softmax(-1)
    elif score_function == "sigmoid":
        values = logits.sigmoid()
        probabilities = values / (values.sum(-1, keepdim=True) + 1e-20)
    else:
        raise value_error("score_function", repr(score_function), "'softmax' or 'sigmoid'")
    if bias is None:
        weights, idx = values.topk(top_k, dim=-1)
    else:
        idx = (values.detach() + bias).topk(top_k, dim=-1).indices
        weights = values.gather(1, idx)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(idx, weights * scale, probabilities)


def balance_loss(routing: Routing) -> Tensor:
    """A scalar that grows with the imbalance of the experts' load: 1 where all have the same share.

    E times the sum, over the experts, of the share of choices and the mean probability, of this rank's tokens. Its
    gradient goes through the probabilities.
    """
    tokens, experts = routing.probabilities.shape
    chosen = torch.zeros_like(routing.probabilities).scatter_add(
        1, routing.topk_idx.clamp(min=0), (routing.topk_idx >= 0).float()
    )
    share = chosen.sum(0) / chosen.sum().clamp(min=1)
    return experts * (share * (routing.probabilities.sum(0) / max(tokens, 1))).sum()


def limit_to_capacity(routing: Routing, capacity: int) -> Routing:
    """Drops choices: each expert keeps the `capacity` tokens of this rank that give it the greatest weight.

    Of equal weights any may stay. A dropped choice has index -1 and weight 0; the token's other weights stay as they
    are.
    """
    idx, weights, probabilities = routing
    tokens, experts = probabilities.shape
    if capacity >= tokens:
        return routing
    given = weights.detach().masked_fill(idx < 0, 0)
    by_expert = torch.zeros_like(probabilities).scatter_add(1, idx.clamp(min=0), given + (idx >= 0).float() * 1e-30)
    kept = torch.zeros_like(by_expert, dtype=torch.bool)
    kept.scatter_(0, by_expert.topk(capacity, dim=0).indices, True)
    stays = kept.gather(1, idx.clamp(min=0)) & (idx >= 0)
    return Routing(torch.where(stays, idx, -1), torch.where(stays, weights, 0.0), probabilities)
