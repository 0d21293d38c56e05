"""Fixtures: the device under test and the pools of rank processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
for _path in (HERE, os.path.dirname(HERE)):
    if _path not in sys.path:
        sys.path.insert(0, _path)
# The fork server and every process that a test starts must find the package and the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [os.path.dirname(HERE), HERE] + [p for p in [os.environ.get("PYTHONPATH", "")] if p]
)
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

from pool import Outcome, RankPool  # noqa: E402 - needs the paths above

LARGEST_POOL = 8


def test_device() -> str:
    """``cpu`` or ``cuda``, from DEEPEP_TEST_DEVICE."""
    return os.environ.get("DEEPEP_TEST_DEVICE", "cpu")


test_device.__test__ = False  # type: ignore[attr-defined]


def full() -> bool:
    """True where the long versions of the tests are asked for."""
    return os.environ.get("DEEPEP_TEST_FULL", "") not in ("", "0")


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test; skips where it is missing."""
    name = test_device()
    if name not in ("cpu", "cuda"):
        raise pytest.UsageError(f"DEEPEP_TEST_DEVICE is {name!r}; allowed: cpu, cuda")
    if name == "cuda":
        import torch

        if torch.cuda.device_count() == 0:
            pytest.skip("needs at least one CUDA GPU that torch can see (torch.cuda.device_count() is 0)")
    return name


def joins_gpus() -> bool:
    """True where GPUs are tested as several nodes, which NVSHMEM joins: nvshmem/tests/run_nodes_gpu.sh."""
    return test_device() == "cuda" and os.environ.get("DEEPEP_TEST_NODES", "") not in ("", "0")


@pytest.fixture(scope="session")
def nodes(device: str) -> None:
    """Skips where nothing joins nodes."""
    if device != "cpu" and not joins_gpus():
        pytest.skip("needs the CPU engine, whose library has the software RDMA, or nvshmem/tests/run_nodes_gpu.sh")


@pytest.fixture(scope="session")
def _shared_pool(device: str) -> Iterator[RankPool]:
    size = int(os.environ.get("DEEPEP_TEST_RANKS") or 0)
    if size == 0 and joins_gpus():
        import torch

        size = torch.cuda.device_count()  # more ranks than GPUs need MPS
    size = size or LARGEST_POOL
    pool = RankPool(size, device)
    yield pool
    pool.stop()


@pytest.fixture
def pool(_shared_pool: RankPool) -> RankPool:
    """Eight ranks (DEEPEP_TEST_RANKS) that all tests share; a test uses the first R of them and leaves them usable."""
    _shared_pool.start()
    return _shared_pool


@pytest.fixture(scope="session")
def _mended_pools(device: str) -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for each in pools.values():
        each.stop()


@pytest.fixture
def fresh_pool(device: str, _mended_pools: dict[int, RankPool]) -> Iterator[Callable[..., RankPool]]:
    """``fresh_pool(n)``: a pool of its own for a test that kills ranks, spoils them or gives them ``settings``.

    On GPUs survivors of one test serve in the next, beside new processes in place of the dead, unless they have
    settings; but NVSHMEM starts in all of them or in none.
    """
    pools: list[RankPool] = []

    def make(size: int, settings: dict[str, str] | None = None) -> RankPool:
        if device == "cuda" and not joins_gpus() and settings is None:
            _mended_pools.setdefault(size, RankPool(size, device, mends=True)).mend()
            return _mended_pools[size]
        pools.append(RankPool(size, device, settings=settings))
        pools[-1].start()
        return pools[-1]

    yield make
    for each in pools:
        each.stop()


@pytest.fixture
def side_by_side(device: str, fresh_pool: Callable[..., RankPool]) -> Callable[..., list[list[Outcome]]]:
    """``side_by_side(n, *calls)``: what each call returns for a pool of n ranks of its own.

    They run at the same time, for tests in which ranks mostly sleep; one after the other on GPUs, where such pools
    share their processes.
    """

    def run(size: int, *calls: Callable[[RankPool], list[Outcome]]) -> list[list[Outcome]]:
        if device == "cuda":
            return [call(fresh_pool(size)) for call in calls]
        pools = [fresh_pool(size) for _ in calls]
        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(lambda call, pool: call(pool), calls, pools))

    return run
