"""Calls in any order, with wrong arguments: for a time, or DEEPEP_TEST_FUZZ_SECONDS. See fuzz_machine, fuzz_elastic.

Hypothesis keeps an example that fails in python/tests/corpus and tries it first in the next run: it is committed with
the mend.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time

import pytest

import cases
from conftest import full

pytest.importorskip("hypothesis", reason="needs hypothesis: make venv")
import fuzz_elastic  # noqa: E402
import fuzz_machine  # noqa: E402

SECONDS = float(os.environ.get("DEEPEP_TEST_FUZZ_SECONDS") or (600 if full() else 20))
MEMORY = 12 << 30  # address space of the process, so that absurd sizes are refused as on a small machine


MACHINES = {"v1": (fuzz_machine.Machine, 0.6), "v2": (fuzz_elastic.ElasticMachine, 0.4)}  # and their shares of the time


def rank_fuzz(ctx, kind, trace):
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.database import DirectoryBasedExampleDatabase
    from hypothesis.errors import FlakyStrategyDefinition
    from hypothesis.stateful import run_state_machine_as_test

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    options = settings(
        max_examples=20,
        stateful_step_count=40,
        deadline=None,
        database=DirectoryBasedExampleDatabase(fuzz_machine.corpus()),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        phases=[Phase.reuse, Phase.generate, *([Phase.shrink] if full() else [])],  # to shrink an example takes minutes
        report_multiple_bugs=False,
    )
    machine, share = MACHINES[kind]
    programs, end = 0, time.monotonic() + share * SECONDS
    with open(trace, "w", encoding="utf-8") as fuzz_machine.Program.trace:
        while time.monotonic() < end:
            # When an asynchronous call's error comes is a matter of time, and so is then what the machine may do next.
            with contextlib.suppress(FlakyStrategyDefinition):
                run_state_machine_as_test(machine, settings=options)
            programs += options.max_examples
    return programs


@pytest.mark.timeout(120 + 2 * SECONDS)
@pytest.mark.parametrize("kind", MACHINES)
def test_calls_in_any_order(fresh_pool, device, tmp_path, kind):
    if device != "cpu":
        pytest.skip("needs the CPU engine, whose calls end with their errors")
    if cases.node_size() == 1:
        pytest.skip("needs nothing of nodes, for its groups have one rank: it runs in the suite of one node")
    trace = tmp_path / "calls"
    try:
        programs = fresh_pool(1).run(1, rank_fuzz, kind, str(trace), deadline=60 + 2 * SECONDS)[0]
    except AssertionError as error:
        calls = trace.read_text() if trace.exists() else "none"
        raise AssertionError(f"{error}\n--- the calls of the last program\n{calls[-4000:]}") from None
    assert programs > 0
    print(f"{programs} programs of up to 40 calls")
