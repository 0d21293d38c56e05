"""What the site holds, in the order of its navigation. A test compares it with docs/ and with what deep_ep exports."""

from __future__ import annotations

# Caption of the navigation: pages, as paths in the repository without ".md"; "title <path>" where the page has another.
GUIDES: dict[str, list[str]] = {
    "Start": ["docs/migrating", "docs/selftest", "docs/frameworks", "docs/troubleshooting", "中文 <README.zh>"],
    "Use": [
        *("docs/overlap", "docs/streams", "docs/ownership", "docs/errors", "docs/operators", "docs/elastic"),
        *("docs/plan", "docs/memory", "docs/transformers", "docs/c", "docs/go"),
    ],
    "Operate": [
        *("docs/environment", "docs/startup", "docs/tuning", "docs/doctor", "docs/monitoring", "docs/reliability"),
        *("docs/internode", "docs/ampere", "docs/tenants", "docs/versions"),
        "docs/compatibility",
    ],
    "Measured": ["docs/performance", "docs/gpu-runs", "docs/simulation", "docs/scale"],
}
PROJECT = ["ARCHITECTURE", "RATIONALE", "CONTRIBUTING", "SECURITY", "CHANGELOG", "docs/renames"]

# Page of the Python reference: title, what it is for, and the names on it by their modules.
PYTHON: dict[str, tuple[str, str, dict[str, list[str]]]] = {
    "buffer": (
        "Buffer (V1)",
        "Normal mode and low-latency mode of one group of ranks.",
        {"deep_ep": ["Buffer", "Config", "EventOverlap", "EventHandle"], "deep_ep.buffer": ["Runtime"]},
    ),
    "elastic": (
        "ElasticBuffer and EPBuffer (V2)",
        "The same engine behind the names and results of V2.",
        {
            "deep_ep": [
                *("ElasticBuffer", "EPHandle", "EPBuffer", "BufferAllocator", "get_physical_domain_size"),
                *("get_logical_domain_size", "get_num_allocation_alignment", "get_num_rdma_alignment"),
                "get_num_tma_alignment",
            ]
        },
    ),
    "start": (
        "Bootstrap and plan",
        "How ranks meet without torch.distributed, and what a buffer would be, without a GPU and without peers.",
        {"deep_ep": ["Bootstrap", "plan", "Plan"]},
    ),
    "ops": (
        "deep_ep.ops",
        "Operators for torch.compile, torch.export and gradients: see :doc:`/docs/operators`.",
        {
            "deep_ep.ops": [
                *("dispatch", "combine", "Received", "Handle", "overlap", "Overlap", "communicate_once"),
                *("elastic_dispatch", "elastic_combine"),
            ]
        },
    ),
    "nn": (
        "deep_ep.nn",
        "A mixture-of-experts layer whose experts are spread over the ranks: see :doc:`/docs/operators`.",
        {
            "deep_ep.nn": [
                *("ExpertParallel", "GroupedExperts", "apply_to_groups", "Routing", "route", "balance_loss"),
                *("limit_to_capacity", "take_turns", "expert_parameters", "ignore_in_ddp"),
            ]
        },
    ),
    "transformers": (
        "deep_ep.integrations.transformers",
        "Stock models of Hugging Face transformers over the ranks of a group: see :doc:`/docs/transformers`.",
        {
            "deep_ep.integrations.transformers": [
                *("expert_parallel", "average_gradients", "clip_grad_norm_", "MODEL_TYPES", "VERSION"),
            ]
        },
    ),
    "errors": (
        "Errors",
        "What each status means and what to do: see :doc:`/docs/errors`.",
        {
            "deep_ep": ["DeepEPError"],
            "deep_ep.errors": [
                *("DeepEPValueError", "DeepEPTypeError", "DeepEPAssertionError", "DeepEPNotImplementedError"),
            ],
        },
    ),
    "names": (
        "Other names",
        "Names that code for V1 and V2 imports. Those for which nothing stands behind raise NotImplementedError.",
        {
            "deep_ep": [
                *(
                    "__version__",
                    "topk_idx_t",
                    "destroy_all_managed_nccl_comm",
                    "BufferBase",
                    "EngramBuffer",
                    "PPBuffer",
                ),
                *("BucketBuffer", "BucketSession"),
            ],
            "deep_ep.comm": ["NCCLCommHandle", "get_nccl_comm_handle", "barrier", "get_comm_stream"],
        },
    ),
}
# Values that have no docstring of their own.
DATA = {
    "__version__": "Version of the package, which is that of ``deepep.h``.",
    "topk_idx_t": "``torch.int64``: the type of expert indices in V1 and V2. Calls take int32 too.",
}

# Packages of the Go reference.
GO = {"core": "./core", "op": "./core/op"}


def documents() -> list[str]:
    """The pages that are written by hand, but the start page."""
    entries = [page for group in GUIDES.values() for page in group] + PROJECT
    return [entry.partition("<")[2].removesuffix(">") or entry for entry in entries]
