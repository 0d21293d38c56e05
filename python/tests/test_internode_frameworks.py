"""The frameworks' call patterns on two nodes of two ranks, argument for argument as on one node."""

from __future__ import annotations

import pytest

import internode
import test_clients_inference as inference
import test_clients_training as training
import test_frameworks as on_one_node

PATTERNS = {
    "vLLM, low latency": (on_one_node.rank_vllm_low_latency,),
    "vLLM, throughput": (on_one_node.rank_vllm_throughput,),
    "SGLang": (on_one_node.rank_sglang,),
    "Megatron": (on_one_node.rank_megatron, on_one_node.CASE.but(hidden=64, routing="holes")),
    "Megatron replaces its buffer": (on_one_node.rank_megatron_replaces_buffer,),
    "TensorRT-LLM": (on_one_node.rank_tensorrt, True),
    "LMDeploy": (on_one_node.rank_lmdeploy,),
    "upstream's loop": (on_one_node.rank_gpt_style,),
    **{f"inference, {name}": (rank,) for name, rank in inference.CLIENTS.items()},
    **{f"training, {name}": (rank,) for name, rank in training.CLIENTS.items()},
}

pytestmark = pytest.mark.usefixtures("nodes")


CLIENTS = (name for name in PATTERNS if name.startswith(("inference, ", "training, ")))
LONG = ("TensorRT-LLM", "LMDeploy", "upstream's loop", *CLIENTS)


@pytest.mark.parametrize("name", internode.unless_full(PATTERNS, LONG))
def test_pattern(pool, name):
    internode.run(pool, "2x2", *PATTERNS[name])
