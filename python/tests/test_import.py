"""Importing the package: every name in its module, no GPU, no shared library, no threads."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest

NAMES = {
    "deep_ep": [
        "Buffer",
        "Config",
        "EventOverlap",
        "EventHandle",
        "topk_idx_t",
        "__version__",
        "DeepEPError",
        "ElasticBuffer",
        "EPBuffer",
        "EPHandle",
        "BufferBase",
        "comm",
        "get_num_allocation_alignment",
        "get_num_rdma_alignment",
        "get_num_tma_alignment",
    ],  # fmt: skip
    "deep_ep.elastic": ["ElasticBuffer", "EPHandle"],
    "deep_ep.epbuffer": ["EPBuffer", "BufferAllocator"],
    "deep_ep.buffers.elastic": ["ElasticBuffer", "EPBuffer", "EPHandle", "EventOverlap", "EventHandle"],
    "deep_ep.utils": ["EventOverlap", "EventHandle"],
    "deep_ep.utils.event": ["EventOverlap", "EventHandle"],
    "deep_ep.comm": ["get_physical_domain_size", "get_logical_domain_size", "destroy_all_managed_nccl_comm"],
    "deep_ep.buffer": ["Buffer", "Config", "EventOverlap", "EventHandle"],
    "deep_ep.legacy": ["Buffer"],
    "deep_ep.buffers.legacy": ["Buffer"],
    "deep_ep_cpp": ["Config", "EventHandle", "topk_idx_t", "get_low_latency_rdma_size_hint", "is_sm90_compiled"],
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    import deep_ep

    loaded = importlib.import_module(module)
    for name in NAMES[module]:
        assert hasattr(loaded, name), f"{module} has no {name}"
        if hasattr(deep_ep, name) and name != "__version__":
            assert getattr(loaded, name) is getattr(deep_ep, name), f"{module}.{name} is another object"


def test_index_type_and_version():
    import torch

    import deep_ep

    assert deep_ep.topk_idx_t is torch.int64
    assert all(part.isdigit() for part in deep_ep.__version__.split(".")) and deep_ep.__version__.count(".") == 2


def test_distribution_by_the_name_that_clients_ask_for():
    """importlib.metadata answers for deep_ep once it is imported; the list of distributions stays as it is."""
    code = """
import importlib.metadata as metadata
import deep_ep
assert metadata.version("deep_ep") == metadata.version("deep-ep") == deep_ep.__version__, metadata.version("deep_ep")
assert metadata.distribution("Deep.EP").metadata["Name"] == "deep_ep"
assert not [d for d in metadata.distributions() if d.metadata["Name"] == "deep_ep"]
try:
    metadata.version("deep_epp")
except metadata.PackageNotFoundError:
    print("ok")
"""
    assert python(code).strip() == "ok"


def test_another_distribution_of_the_same_package(tmp_path):
    """The import says which one it is and names the others: in other folders of the path, and in its own."""
    import deep_ep
    from deep_ep import _distribution

    def install(place: str, metadata: str, file: str, line: str, package: bool = True) -> pathlib.Path:
        (tmp_path / place / metadata).mkdir(parents=True)
        (tmp_path / place / metadata / file).write_text(f"{line}\n")
        if package:
            (tmp_path / place / "deep_ep").mkdir()
            (tmp_path / place / "deep_ep" / "__init__.py").write_text("")
        return tmp_path / place

    fork = install("fork", "sgl_deep_ep-0.1.2.post1.dist-info", "RECORD", "deep_ep/__init__.py,sha256=0,0")
    install("egg", "deep_ep-1.2.1+abc-py3.10.egg-info", "top_level.txt", "deep_ep")
    install("other", "deepepoch-2.11.dist-info", "RECORD", "deepepoch/__init__.py,sha256=0,0", package=False)
    install("ours", "deepep_go-9.9.9.dist-info", "RECORD", "deep_ep/__init__.py,sha256=0,0", package=False)
    (tmp_path / "copy" / "deep_ep").mkdir(parents=True)
    (tmp_path / "copy" / "deep_ep" / "__init__.py").write_text("")
    package = pathlib.Path(deep_ep.__file__).parent
    path = ["/nowhere", *(str(tmp_path / name) for name in ("fork", "egg", "other", "ours", "copy", "fork"))]
    assert _distribution.others(package, path) == [
        f"sgl_deep_ep 0.1.2.post1 in {tmp_path}/fork/deep_ep",
        f"deep_ep 1.2.1+abc in {tmp_path}/egg/deep_ep",
        f"a copy of no known distribution in {tmp_path}/copy/deep_ep",
    ]
    assert _distribution.others(package, [str(package.parent)]) == []
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(fork)!r}); import deep_ep"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        f"this deep_ep is deepep-go {deep_ep.__version__} in {package}; the package is also provided by " in done.stderr
    )
    assert f"sgl_deep_ep 0.1.2.post1 in {fork}/deep_ep" in done.stderr and done.stderr.count("UserWarning") == 1


def test_torch_without_numpy_and_without_pools_of_memory():
    """torch needs no NumPy; torch 2.4 has neither pools of memory nor numbers of dispatch keys.

    The count of a storage's holders, without which no memory is used again, was once in CUDA builds of torch alone.
    """
    code = """
import sys
sys.modules["numpy"] = None
import torch
for module, names in (
    (torch.cuda, ("MemPool", "use_mem_pool")),
    (torch._C, ("_cuda_beginAllocateCurrentThreadToPool", "_any_requires_grad")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
import deep_ep
from deep_ep import _memory
from deep_ep.ops import _define
x = torch.ones(1, requires_grad=True)
assert _define._any_requires_grad(1, [x], None) and not _define._any_requires_grad(x.detach(), [2], "text")
assert not _memory.HAS_ROW_POOLS
print(_memory.recycling(), hasattr(torch._C, "_storage_Use_Count"), torch.version.cuda is None)
"""
    recycles, counts, cpu_build = python(code, DEEPEP_RECYCLE_OUTPUTS="1").split()
    assert recycles == counts
    assert counts == "True" or cpu_build == "True", "this torch is built with CUDA and does not count holders"


def test_modules_of_a_harness():
    """V2's own test programs bring modules below deep_ep.utils, which a harness puts there."""
    code = """
import sys, types, deep_ep
for name in ("math", "gate", "envs", "refs", "testing", "comm"):
    module = types.ModuleType(f"deep_ep.utils.{name}")
    module.here = name
    sys.modules[module.__name__] = module
sys.modules["deep_ep._C"] = types.ModuleType("deep_ep._C")
import deep_ep._C
from deep_ep.utils.math import here
from deep_ep.utils.event import EventOverlap
assert here == "math" and EventOverlap is deep_ep.EventOverlap and deep_ep.utils.EventHandle is deep_ep.EventHandle
print("ok")
"""
    assert python(code).strip() == "ok"


def test_alignments():
    import deep_ep

    assert deep_ep.get_num_allocation_alignment() == 2 << 20
    assert (deep_ep.get_num_rdma_alignment(), deep_ep.get_num_tma_alignment()) == (64, 32)


def test_error_kinds():
    from deep_ep import DeepEPError

    assert issubclass(DeepEPError, RuntimeError)


def python(code: str, **environment: str) -> str:
    """Standard output of a new interpreter that runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROBE = """
import os, sys, threading
modules = {modules}
import torch
threads = len(os.listdir("/proc/self/task"))
for name in modules:
    __import__(name)
maps = open("/proc/self/maps").read()
files = [line.split("/")[-1] for line in maps.splitlines()]
print([file for file in files if "deepep" in file and ".so" in file])
print(len(os.listdir("/proc/self/task")) - threads)
print(torch.cuda.is_initialized())
print([name for name in sys.modules if name.startswith(("deep_ep.selftest", "deep_ep.ops", "deep_ep.nn"))])
"""


def test_import_loads_nothing():
    lines = python(PROBE.format(modules=list(NAMES)), CUDA_VISIBLE_DEVICES="").splitlines()
    assert lines == ["[]", "0", "False", "[]"], f"import loaded, started or initialised something: {lines}"


def test_import_without_the_library():
    """A missing library is the first use's business, and the error lists what was tried."""
    code = """
import deep_ep
try:
    deep_ep.Config()
except deep_ep.DeepEPError as error:
    print("DEEPEP_LIBRARY" in str(error), "/nowhere/libdeepep.so" in str(error), "No such file" in str(error))
"""
    assert python(code, DEEPEP_LIBRARY="/nowhere/libdeepep.so").split() == ["True", "True", "True"]


@pytest.mark.parametrize("module", ["deep_ep", "deep_ep.utils", "deep_ep_cpp"])
def test_import_without_torch(module):
    """The last line is a sentence that says what to install, and the error is the one that clients catch."""
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "ImportError: deep_ep needs PyTorch 2.4 or newer: pip install torch"
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr


def test_alias_for_tensorrt_llm(tmp_path):
    """The line of docs/migrating.md, and then the import that TensorRT-LLM has."""
    migrating = pathlib.Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
    alias = re.search(r"`(import sys, deep_ep; [^`]*)`", migrating.read_text())
    assert alias
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("from tensorrt_llm.deep_ep import Buffer\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {alias[1]}; import tensorrt_llm"
    assert python(f"{code}; print(tensorrt_llm.Buffer is deep_ep.Buffer)").strip() == "True"


def test_keywords_of_forks_stand_in_the_signatures():
    """SGLang asks inspect.signature what a call takes; **keywords would read as everything."""
    from deep_ep import Buffer

    for call in (Buffer.dispatch, Buffer.low_latency_dispatch, Buffer.low_latency_combine):
        kinds = {parameter.kind for parameter in inspect.signature(call).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert "opt_level" in inspect.signature(Buffer.low_latency_dispatch).parameters


def test_unknown_keyword_is_a_type_error():
    """LMDeploy probes so, with no group at hand."""
    import deep_ep

    with pytest.raises(TypeError, match="num_local_experts"):
        deep_ep.Buffer(None, 0, 0, num_local_experts=8)
