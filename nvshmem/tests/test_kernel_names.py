"""Tools that look for V1's kernels in a trace find ours.

They look for names like ``deep_ep::internode_ll::dispatch``. V1's own timing code asks for a word and wants one line of
torch.profiler's table with it, of which the name's first 100 characters are shown; of a trace it takes each event that
has the word after two colons.
"""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

LIB = pathlib.Path(__file__).resolve().parents[2] / "build" / "lib"
SHOWN = 97  # the table cuts longer names and adds three dots

LOW_LATENCY = ("deep_ep::internode_ll::dispatch", "deep_ep::internode_ll::combine")
ONE_NODE = ("deep_ep::intranode::dispatch", "deep_ep::intranode::combine")
NODES = ("deep_ep::internode::dispatch_with_notify", "deep_ep::internode::combine_with_notify")
NOTIFY = ("deep_ep::intranode::notify_dispatch", "deep_ep::internode::notify_dispatch")
# V2's calls launch these; V1 had none like them.
ROUTED = {
    f"deep_ep::intranode::{name}"
    for name in (
        *("notify_routed", "dispatch_routed", "dispatch_expanded", "dispatch_at_once"),
        *("combine_routed", "combine_expanded", "combine_at_once"),
    )
}
ROUTED_NODES = {f"deep_ep::internode::{name}" for name in ("notify_routed", "dispatch_routed", "combine_routed")}
# Calls of buffers with enable_shrink, whose names begin with V1's.
SHRINKING = {f"{name}_shrinking" for name in (*NODES, NOTIFY[1], *ROUTED_NODES)}
# What a call launches, and the words that V1's tests look for in it.
CALLS = [
    ("libdeepep_cuda.so", [ONE_NODE[0]], ["dispatch"]),
    ("libdeepep_cuda.so", [ONE_NODE[1]], ["combine"]),
    ("libdeepep_cuda.so", [*LOW_LATENCY], ["dispatch", "combine"]),
    ("libdeepep_nvshmem.so", [*LOW_LATENCY], ["dispatch", "combine"]),
    ("libdeepep_nvshmem.so", [NODES[0]], ["dispatch", "notify"]),
    ("libdeepep_nvshmem.so", [NODES[1]], ["combine", "notify"]),
]


def kernels(library: str) -> list[str]:
    """The names by which the library registers its kernels with the CUDA runtime, as a profiler shows them."""
    text = subprocess.run(
        ["readelf", "-W", "-p", ".rodata", LIB / library], check=True, capture_output=True, text=True, errors="replace"
    ).stdout
    mangled = "\n".join(sorted(set(re.findall(r"\b_Z\w+", text))))
    names = subprocess.run(["c++filt"], input=mangled, check=True, capture_output=True, text=True).stdout.split("\n")
    return [name for name in names if re.search(r"\bdeep_?ep::", name) and name.endswith(")")]


def function(name: str) -> str:
    """Without the result, the template's and the function's arguments."""
    return re.split(r"[<(]", name.removeprefix("void "))[0]


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        ("libdeepep_cuda.so", {*ONE_NODE, *LOW_LATENCY, NOTIFY[0]}),
        ("libdeepep_nvshmem.so", {*ONE_NODE, *LOW_LATENCY, *NODES, *NOTIFY, *ROUTED_NODES, *SHRINKING}),
    ],
)
def test_kernels_of_dispatch_and_combine(library: str, expected: set[str]) -> None:
    found = {function(name) for name in kernels(library)}
    assert found >= expected | ROUTED
    others = found - expected - ROUTED
    assert others and not [name for name in others if re.search("dispatch|combine|notify", name)]


@pytest.mark.parametrize(("library", "launched", "words"), CALLS)
def test_each_word_is_in_one_kernel_of_a_call(library: str, launched: list[str], words: list[str]) -> None:
    for wanted in launched:
        forms = [name for name in kernels(library) if function(name) == wanted]
        assert forms, f"{library} has no {wanted}"  # two forms for two architectures or teams: a call launches one
        for name in forms:
            table = [name[:SHOWN]] + [other for other in launched if other != wanted]
            for word in words:
                assert sum(word in line for line in table) == 1, f"{word} in {table}"
                if word != "notify":
                    assert sum(f"::{word}" in line for line in table) == 1, f"::{word} in {table}"


def test_notify_stands_beside_the_dispatch_whose_counts_it_exchanges() -> None:
    """As in V1 the table has two lines with "dispatch" then, the trace one event with "::dispatch"."""
    for library, kernel in (("libdeepep_cuda.so", NOTIFY[0]), ("libdeepep_nvshmem.so", NOTIFY[1])):
        name = next(name for name in kernels(library) if function(name) == kernel)
        assert "notify" in name[:SHOWN] and "::dispatch" not in name and "::combine" not in name


@pytest.mark.parametrize("folder", ["nvshmem", "kernels/cuda"])
def test_launches_call_no_function_of_the_device(folder: str) -> None:
    """nvcc gives the host a body for functions of the device that ends the process; in templates it does not warn."""
    files = (LIB.parent / "obj" / folder).rglob("*.o")
    objects = {file.stem: file for file in files if "tests" not in file.parts}
    assert "normal" in objects
    for name in objects.keys() - {"attach", "transport"}:  # in these NVSHMEM's headers do so
        symbols = subprocess.run(["nm", objects[name]], check=True, capture_output=True, text=True).stdout
        assert not re.search(r" U (_?exit|abort)\b", symbols), f"{objects[name]} ends the process"
