"""libdeepep_nvshmem.so and the test transport as they are built, and what they return without a GPU."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import struct
import subprocess
import sys

import nvidia.nvshmem
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "lib" / "libdeepep_nvshmem.so"
OUT = ROOT / "build" / "nvshmem"
PROBE, PLUGIN = OUT / "probe", OUT / "nvshmem_transport_ibdevx.so.3"
NVSHMEM = pathlib.Path(next(iter(nvidia.nvshmem.__path__)))
HOST = "libnvshmem_host.so.3"
EINVAL, ESTATE, EVERSION = 1, 2, 11

sys.path.insert(0, str(ROOT / "tools"))
import abi_check  # noqa: E402


def run(*command: object, **env: str) -> tuple[int, str]:
    """Exit status and output, with no variable of this process but PATH."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(NVSHMEM / "lib"), **env},
    )
    return done.returncode, done.stdout + done.stderr


def probe(*words: object, **env: str) -> dict[str, str]:
    code, text = run(PROBE, LIBRARY, *words, **env)
    assert code == 0, text
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def output(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def header_version() -> str:
    text = (NVSHMEM / "include" / "non_abi" / "nvshmem_version.h").read_text()
    return ".".join(re.search(rf"VENDOR_{part}_VERSION (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def undefined(library: pathlib.Path) -> set[str]:
    """Undefined symbols of a library, without those of the C library."""
    lines = output("nm", "-D", "--undefined-only", library).splitlines()
    return {line.split()[-1] for line in lines if " U " in line and "GLIBC_" not in line and "GCC_" not in line}


def test_exports_exactly_the_interface() -> None:
    wanted = abi_check.declared("dk", abi_check.HEADERS["dk"].read_text())
    assert abi_check.problems(LIBRARY, wanted) == []
    assert abi_check.exported(LIBRARY) == wanted  # the optional functions too


def forwarded() -> list[str]:
    """NVSHMEM's functions that the library calls; those in nvshmemid_* are called by NVSHMEM's device part."""
    return re.findall(r"^  X\([\w *]+, (nvshmem\w+),", (ROOT / "nvshmem" / "host_part.cpp").read_text(), re.M)


def test_needs_only_the_c_library() -> None:
    assert undefined(LIBRARY) == set()
    assert HOST not in abi_check.dynamic(LIBRARY, "NEEDED")
    assert abi_check.dynamic(LIBRARY, "RUNPATH") == ["$ORIGIN/../../nvidia/nvshmem/lib"]
    public = {"nvshmem_align", "nvshmem_free", "nvshmem_ptr", "nvshmem_my_pe", "nvshmem_n_pes"}
    assert {name for name in forwarded() if not name.startswith(("nvshmemx_", "nvshmemid_"))} == public


def test_nothing_needs_a_team() -> None:
    """No collective of NVSHMEM's: the RDMA sub-team needs no team of NVSHMEM's own (docs/internode.md)."""
    collective = re.compile(
        r"\bnvshmemx?_(\w*_)?(barrier|sync|team|broadcast|alltoall|fcollect|collect|reduce|and|or|sum|max|min)\w*\("
    )
    sources = [path for path in (ROOT / "nvshmem").rglob("*.cu*") if "tests" not in path.parts]
    assert len(sources) > 10
    found = {f"{path.name}: {match[0]}" for path in sources for match in collective.finditer(path.read_text())}
    assert not found
    assert collective.search("nvshmemx_barrier_all_block()") and collective.search("nvshmem_team_split_strided(")


def test_version_text_is_that_of_the_headers() -> None:
    words = re.findall(rb"built with NVSHMEM ([\d.]+)\0", LIBRARY.read_bytes())
    assert words == [header_version().encode()]


def test_device_part_is_of_the_same_release_as_the_headers(tmp_path: pathlib.Path) -> None:
    """The archive has its version in three integers without a public function: read from its object file."""
    subprocess.run(["ar", "x", NVSHMEM / "lib" / "libnvshmem_device.a", "init_device.cu.o"], check=True, cwd=tmp_path)
    path = tmp_path / "init_device.cu.o"
    symbol = re.search(r"^(\w+) \w (_ZL27nvshmemi_device_lib_version)$", output("nm", path), re.M)
    assert symbol, "no version in the device part"
    section = re.search(r"\.rodata +PROGBITS +\w+ (\w+)", output("readelf", "-SW", path))
    assert section
    at = int(section[1], 16) + int(symbol[1], 16)
    assert ".".join(map(str, struct.unpack_from("<3i", path.read_bytes(), at))) == header_version()


def test_info_without_a_device() -> None:
    found = probe("info")
    assert (found["code"], found["kind"], found["devices"]) == ("0", "nvshmem", "0") or int(found["devices"]) > 0
    assert found["build"].endswith(header_version())
    if found["devices"] == "0":
        assert "no CUDA device" in found["reason"] and found["open"] != "0"
    assert found["old struct"] == str(EVERSION)
    # top-k, B and local experts, of kernels/cuda/layout/low_latency.cuh
    assert found["low-latency limits"] == "32 65535 8192"


def test_an_old_driver_is_named() -> None:
    """On emulated GPUs, whose driver supports CUDA 12.4."""
    library = ROOT / "build" / "test" / "libdeepep_emulated.so"
    if not library.exists():
        pytest.skip("needs the emulated library: make emulated")
    # The program asks for the transport's functions afterwards, which this library has not.
    _, text = run(PROBE, library, "info", DEEPEP_EMULATE="driver=12040")
    assert "the driver supports CUDA 12.4, this library is built with CUDA 13." in text
    assert "needs driver 580 or later (error 35)" in text and "devices: 0" in text


def test_without_nvshmem_the_reason_names_it() -> None:
    found = probe("info", LD_LIBRARY_PATH="")
    assert found["devices"] == "0" and HOST in found["reason"] and "cannot open shared object file" in found["reason"]
    code, text = run(PROBE, LIBRARY, "start", 1, 1, 8, 16, LD_LIBRARY_PATH="")
    assert code == 0 and text.count(f"built with NVSHMEM {header_version()}") >= 1 and "id: 0" not in text


def test_a_host_part_without_a_function_is_refused(tmp_path: pathlib.Path) -> None:
    version = header_version().replace(".", ", *c = ", 1).replace(".", ", *d = ")
    (tmp_path / "fake.c").write_text(
        "void nvshmemx_vendor_get_version_info(int *b, int *c, int *d) { *b = " + version + "; }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", HOST, "fake.c"], check=True, cwd=tmp_path)
    assert f"{HOST} has no function nvshmem_align" in probe("info", LD_LIBRARY_PATH=str(tmp_path))["reason"]


@pytest.mark.parametrize(("version", "refused"), [("3.4.5", False), ("3.4.6", True), ("3.3.24", True), ("3.2.5", True)])
def test_another_host_part_is_refused_before_anything_runs(tmp_path: pathlib.Path, version: str, refused: bool) -> None:
    """A stand-in for the host part that aborts in every function but the one for its version."""
    names = forwarded()
    asks = "nvshmemx_vendor_get_version_info"
    source = "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names if name != asks)
    major, minor, patch = version.split(".")
    source += f"void {asks}(int *a, int *b, int *c) {{ *a = {major}; *b = {minor}; *c = {patch}; }}\n"
    (tmp_path / "fake.c").write_text(source)
    (tmp_path / "fake.map").write_text("NVSHMEM { global: *; };\n")
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{HOST}", "-Wl,--version-script=fake.map"]
    subprocess.run(["gcc", *flags, "-o", HOST, "fake.c"], check=True, cwd=tmp_path)
    found = probe("info", LD_LIBRARY_PATH=str(tmp_path))
    code, text = run(PROBE, LIBRARY, "start", 1, 1, 8, 16, LD_LIBRARY_PATH=str(tmp_path))
    if not refused:
        assert "built with" not in found["reason"] and code != 0  # it called the stand-in, which aborted
        return
    for said in (found["reason"], text):
        assert f"built with NVSHMEM {header_version()}" in said and f"is NVSHMEM {version}" in said
        assert str(LIBRARY) in said and str(tmp_path / HOST) in said
    assert ("3.3.9 is the oldest" in text) == (version == "3.2.5")
    assert found["devices"] == "0" and code == 0 and f"id: {EVERSION}" in text and f"attach: {EVERSION}" in text


def test_start_sets_the_environment() -> None:
    found = probe("start", 24, 1000, 8, 16)
    assert found["id"] == "0" and found["reason"] == "" and found["bytes of the id that are set"] == "some"
    wanted = {
        "NVSHMEM_REMOTE_TRANSPORT": "(none)",
        "NVSHMEM_IB_ENABLE_IBGDA": "1",
        "NVSHMEM_IBGDA_NUM_RC_PER_PE": "24",
        "NVSHMEM_QP_DEPTH": "1024",
        "NVSHMEM_IBGDA_RC_MAP_BY": "cta",
        "NVSHMEM_DISABLE_NCCL": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NVSHMEM_DISABLE_MNNVL": "1",
        "CUDA_MODULE_LOADING": "EAGER",
    }
    assert {name: found[name] for name in wanted} == wanted


def test_a_plan_for_several_nodes_asks_this_library() -> None:
    """What each kernel library keeps for itself, and the queue pairs on each NIC that the start is given."""
    shape = "num_tokens=64, num_max_dispatch_tokens_per_rank=8, hidden=512, num_topk=2, num_experts=16, engine='cuda'"
    show = "print(p.library, p.num_qps_per_nic, p.num_qps, p.control_bytes, p.wire_bytes, p.total_bytes)"
    found = {}
    for ranks in (8, 16):
        program = f"import deep_ep; p = deep_ep.plan({ranks}, {shape}); {show}"
        settings = {"PYTHONPATH": str(ROOT / "python"), "DEEPEP_KERNELS": str(LIBRARY.parent), "DEEPEP_NUM_NICS": "2"}
        code, text = run(sys.executable, "-c", program, **settings)
        assert code == 0, text
        found[ranks] = text.split()
    assert found[8][:3] == ["libdeepep_cuda.so", "0", "0"]
    assert found[16][:3] == ["libdeepep_nvshmem.so", "12", str(24 * 15)]
    assert int(found[16][3]) > int(found[8][3]) > 0 and int(found[16][5]) > int(found[16][3]) + int(found[16][4])


def test_start_allows_nvlink_between_hosts() -> None:
    allowed = 4  # DK_TRANSPORT_MNNVL
    assert probe("start", 1, 128, 8, 16, allowed)["NVSHMEM_DISABLE_MNNVL"] == "0"
    assert probe("start", 1, 128, 8, 8, allowed)["NVSHMEM_DISABLE_MNNVL"] == "(none)"
    found = probe("start", 1, 128, 8, 16, NVSHMEM_DISABLE_MNNVL="0")
    assert "NVSHMEM_DISABLE_MNNVL=0 is set, 1 is wanted" in found["reason"]


def test_start_on_one_node_looks_for_no_nic() -> None:
    found = probe("start", 24, 1000, 8, 8)
    assert found["NVSHMEM_REMOTE_TRANSPORT"] == "none" and found["NVSHMEM_IB_ENABLE_IBGDA"] == "(none)"


def test_start_keeps_the_users_settings_and_reports_conflicts() -> None:
    mine = {"NVSHMEM_QP_DEPTH": "64", "NVSHMEM_IBGDA_QP_DEPTH": "77", "NVSHMEM_REMOTE_TRANSPORT": "ibrc"}
    found = probe("start", 24, 1000, 8, 16, **mine)
    assert found["NVSHMEM_QP_DEPTH"] == "64" and found["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"
    assert found["NVSHMEM_IB_ENABLE_IBGDA"] == "(none)"
    assert "NVSHMEM_QP_DEPTH=64 is set, 1024 is wanted" in found["reason"]
    assert "NVSHMEM_IBGDA_QP_DEPTH=77 has no effect" in found["reason"]
    assert "NVSHMEM_QP_DEPTH=64 applies" in found["reason"]


def test_start_passes_settings_on() -> None:
    """Lines NAME=VALUE reach NVSHMEM's environment; the user's own stay; a later start's replace them."""
    both = "NVSHMEM_IB_SL=3\nNVSHMEM_HCA_LIST=mlx5_0:1,mlx5_1"
    found = probe("start", 1, 128, 8, 16, 0, both, "NVSHMEM_IB_SL=5")
    assert found["reason"] == "" and found["NVSHMEM_IB_TRAFFIC_CLASS"] == "(none)"
    assert (found["NVSHMEM_IB_SL"], found["NVSHMEM_HCA_LIST"]) == ("3", "mlx5_0:1,mlx5_1")
    assert (found["second NVSHMEM_IB_SL"], found["second NVSHMEM_HCA_LIST"]) == ("5", "(none)")
    found = probe("start", 1, 128, 8, 16, 0, both, NVSHMEM_IB_SL="4")
    assert found["NVSHMEM_IB_SL"] == "4" and found["NVSHMEM_HCA_LIST"] == "mlx5_0:1,mlx5_1"
    assert "NVSHMEM_IB_SL=4 is set, 3 is wanted: the value that is set stays" in found["reason"]
    found = probe("start", 1, 128, 8, 16, 0, both, NVSHMEM_IB_SL="3")
    assert found["reason"] == ""


def test_nvshmem_reads_the_settings_of_nics() -> None:
    """The variables that carry them stand in this NVSHMEM, whole, without the prefix that it puts before all names."""
    read = b"".join(
        (NVSHMEM / "lib" / name).read_bytes() for name in ("libnvshmem_host.so.3", "nvshmem_transport_ibgda.so.3")
    )
    names = re.findall(r'"NVSHMEM_(\w+)"', (ROOT / "internal" / "env" / "nics.go").read_text())
    assert len(names) >= 7
    known = {name for name in names if b"\0%s\0" % name.encode() in read}
    later = {"ENABLE_MULTI_PORT"}  # the name that releases after 3.4.5 read
    assert set(names) - known <= later and (known & {"IBGDA_ENABLE_MULTI_PORT", *later})


@pytest.mark.parametrize("ranks", [16, 256, 512, 1024])
def test_low_latency_of_many_ranks_fits(ranks: int) -> None:
    """A buffer of the size hint has room for calls of one expert a rank, and of several: the hint's own shape."""
    for tokens, hidden, each in ((128, 7168, 1), (128, 2048, 1), (1, 128, 1), (128, 7168, 4)):
        rows = 4 * ranks * each * tokens
        sizes = probe("layout", ranks, 8, tokens, hidden, ranks * each, rows * (2 * hidden + 4 * (hidden // 128)) + 64)
        wanted, there = map(int, sizes["wire"].split(" of "))
        assert sizes["layout"] == sizes["sizes"] == "0" and wanted <= there, (tokens, hidden, each, sizes)


def test_memory_of_a_rank_grows_with_the_ranks() -> None:
    """Twice the ranks need at most twice the flags, counts and headers. The matrix of counts is not in it: as on one
    node 12 bytes a pair of ranks, and between nodes as much again for messages and their sources."""
    rdma = 4 * 1024 * 128 * (2 * 7168 + 4 * 56)
    found = []
    for ranks in (64, 128, 256, 512, 1024):
        sizes = probe("layout", ranks, 8, 128, 7168, ranks, rdma)
        assert sizes["layout"] == sizes["sizes"] == "0"
        found.append((int(sizes["control"]) - 24 * ranks**2, int(sizes["wire"].split(" of ")[0])))
    for half, whole in itertools.pairwise(found):
        assert all(0 < large <= 2.1 * small for small, large in zip(half, whole, strict=True)), found


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((24, 40000, 8, 16), "at most 32768"),
        ((0, 1000, 8, 16), "num_qps_per_nic = 0"),
        ((1, 1, 0, 2), "num_nvl_peers = 0"),
    ],
)
def test_impossible_plans_are_refused(numbers: tuple[int, ...], said: str) -> None:
    found = probe("start", *numbers)
    assert found["id"] == str(EINVAL) and said in found["reason"]


def test_calls_before_attach_are_refused() -> None:
    found = probe("start", 1, 1, 8, 16)
    assert found["attach"] == str(EINVAL) and "device = 0" in found["attach says"]
    assert found["alloc"] == str(EINVAL) and found["open"] == str(ESTATE)
    assert found["detach"] == str(EINVAL) and found["free nothing"] == "0"


def test_plugin_accepts_interface_3_only() -> None:
    assert abi_check.dynamic(PLUGIN, "SONAME") == ["nvshmem_transport_ibdevx.so.3"]
    assert abi_check.exported(PLUGIN) == {
        "nvshmemt_init",
        "testtransport_count",
        "testtransport_lose",
        "testtransport_read_nic",
        "testtransport_worker",
    }
    code, text = run(PROBE, PLUGIN, "interface", 30000)
    assert code == 0 and "init: 0" in text and "says version: 30000" in text
    code, text = run(PROBE, PLUGIN, "interface", 40000)
    assert "init: 1" in text and "interface 3" in text and "interface 4" in text


@pytest.mark.parametrize(("program", "count"), [("wire_test", 10), ("memory_test", 11)])
def test_parts_of_the_plugin(program: str, count: int) -> None:
    code, text = run(OUT / program)
    assert code == 0 and f"{count} passed, 0 failed" in text, text


@pytest.mark.parametrize("seed", range(1, 41 if os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0") else 2))
def test_the_worker_that_plays_a_nic_on_the_host(seed: int) -> None:
    """Its kernel lane by lane: rate, latency, order and turns; posts of the host and of kernels; losses, its end."""
    code, text = run(OUT / "worker_test", seed)
    assert code == 0 and text.count(": ok") == 1, text


@pytest.mark.parametrize("first", range(1, 61 if os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0") else 4, 3))
def test_kernels_of_normal_mode_on_the_host(first: int) -> None:
    """All kernels of normal mode across nodes, lane by lane, over a network that delays every put."""
    code, text = run(OUT / "internode_test", first, 3)
    assert code == 0 and text.count(": ok") == 5 + 3, text


@pytest.mark.parametrize(
    "first", range(1, 1601 if os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0") else 61, 20)
)
def test_kernels_of_masks_on_the_host(first: int) -> None:
    """Normal mode goes on without a rank that is masked, dies or is late anywhere in a call, and takes it back."""
    code, text = run(OUT / "internode_shrink_test", first, 20)
    assert code == 0 and text.count(": ok") == 20, text


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6, 7, 15, 16])
def test_masks_that_a_rank_hears_of_late(seed: int) -> None:
    """While a rank is dead no mask is lifted over a notice that is still on its way."""
    code, text = run(OUT / "internode_shrink_test", "told", seed)
    assert code == 0 and re.search(r"told late by [1-9]\d*: ok", text), text


@pytest.mark.parametrize("seed", range(1, 201 if os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0") else 13))
def test_masks_of_ranks_that_wait_for_rows(seed: int) -> None:
    """A rank whose puts stop among rows is left out, and none of those that wait for its rows meanwhile."""
    code, text = run(OUT / "internode_shrink_test", "stay", seed)
    assert code == 0 and text.count(": ok") == 1, text


@pytest.mark.parametrize("seed", [1, 2])
def test_changed_heads_of_masks(seed: int) -> None:
    """A combine whose send_head lacks a row ends on all ranks."""
    code, text = run(OUT / "internode_shrink_test", "heads", seed)
    assert code == 0 and text == "changed heads: ok\n", text


@pytest.mark.parametrize("first", range(1, 201 if os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0") else 21, 10))
def test_kernels_with_a_routing_on_the_host(first: int) -> None:
    """Notify, dispatch and combine with a routing, plain and expanded; a lost rank, wrong indices."""
    code, text = run(OUT / "internode_routed_test", first, 10)
    assert code == 0 and text.count(": ok") == 17, text


@pytest.mark.parametrize(
    "first", range(1, 1601 if os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0") else 61, 20)
)
def test_kernels_of_masks_with_a_routing_on_the_host(first: int) -> None:
    """The same with a routing; and a handle that a caller has changed masks nobody."""
    code, text = run(OUT / "internode_routed_shrink_test", first, 20)
    assert code == 0 and text.count(": ok") == 20, text


@pytest.mark.parametrize("first", range(1, 601 if os.environ.get("DEEPEP_TEST_FULL", "0") not in ("", "0") else 13, 12))
def test_kernels_of_low_latency_on_the_host(first: int) -> None:
    """Formats, halves, overlapping batches, zero copy, LogFMT, sums with weights from dispatch or combine, late ranks.

    Ranks run ahead as far as the kernels let them; rows are counted as they cross.
    """
    code, text = run(OUT / "internode_low_latency_test", first, 12)
    assert code == 0 and text.count(": ok") == 12, text


@pytest.mark.parametrize(
    ("planted", "noticed"), [("planted-weight", "combined_x["), ("planted-rows", "rows that crossed[")]
)
@pytest.mark.parametrize("seed", [5, 13, 29])
def test_wrong_sums_of_low_latency_are_noticed(planted: str, noticed: str, seed: int) -> None:
    """A wrong weight in the table of a dispatch; tables that are lost, so that each expert's row crosses by itself."""
    code, text = run(OUT / "internode_low_latency_test", planted, seed)
    assert code == 1 and noticed in text, text


def test_gpu_program_refuses_impossible_arguments() -> None:
    uneven = [LIBRARY, "--ranks", 3, "--hosts", 2, "--plugin", PLUGIN]
    for words in ([], [LIBRARY, "--ranks", 1], [LIBRARY, "--hosts", 2], uneven):
        code, text = run(OUT / "transport_test", *words)
        assert code == 2 and "usage" in text
