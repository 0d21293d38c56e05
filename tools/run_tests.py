#!/usr/bin/env python3
"""Runs test suites one after another, shows what they print, and counts.

    tools/run_tests.py [--full | --gpu] [SUITE ...]

Every suite runs, also after another has failed. Its output also goes to build/test/NAME.log. At the end stands a table,
then what failed in each suite; the last line is ``N passed, N failed`` (``, N skipped`` where some were) over all
suites; the exit status is 1 if any failed. A suite whose folder does not exist is left out; one that runs no test, or
ends badly without a failed test, counts as a failure. The table has each suite's time and the CPU seconds of its
processes, which other work on the machine changes little. ``--full`` sets DEEPEP_TEST_FULL=1, which every suite knows.
The build comes before: see the Makefile. Where everything is built already, this needs only Python (a GPU machine
without Go, say).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import threading
import time

import test_suites
from test_suites import Counts, Suite

MOST_FAILURES = 10  # of a suite, told again at the end


@dataclasses.dataclass
class Result:
    suite: Suite
    counts: Counts
    seconds: float
    cpu_seconds: float  # of all processes below this one


class CPUMeter:
    """User and system time of the processes below this one: what a suite costs, whatever else the machine does.

    Of a process whose parent ends first (a fork server, with its ranks) what it had used at the last look counts.
    """

    EVERY = 0.5  # seconds between two looks

    def __init__(self) -> None:
        self._last = self._lost = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CPUMeter:
        self._first = self._last = below(os.getpid())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._end.wait(self.EVERY):
            self._look()

    def _look(self) -> None:
        now = below(os.getpid())
        self._lost += max(0.0, self._last - now)
        self._last = now

    def seconds(self) -> float:
        return self._last + self._lost - self._first


def below(root: int) -> float:
    """Seconds that the processes below `root` have used, those included that have ended and were waited for."""
    parents, used, ended = {}, {}, {}
    for entry in os.listdir("/proc"):
        try:
            fields = (
                pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split() if entry.isdigit() else []
            )
        except OSError:  # it has ended
            continue
        if fields:
            utime, stime, cutime, cstime = map(int, fields[11:15])
            parents[int(entry)], used[int(entry)], ended[int(entry)] = int(fields[1]), utime + stime, cutime + cstime
    total = ended.get(root, 0)
    for pid in used:
        at = pid
        while (at := parents.get(at, 0)) not in (0, root):
            pass
        total += used[pid] + ended[pid] if at == root else 0
    return total / os.sysconf("SC_CLK_TCK")


def run_suite(suite: Suite, full: bool) -> Result:
    """Runs one suite to its end; what goes wrong in running it is a failed test of that suite."""
    print(f"\n==== {suite.name}: {suite.title}", flush=True)
    start = time.monotonic()
    with CPUMeter() as cpu:
        try:
            counts = suite.run(full)
        except OSError as error:
            print(f"{suite.name}: cannot run: {error}", flush=True)
            counts = Counts(failed=1)
    if counts.passed + counts.failed == 0:
        print(f"{suite.name}: ran no test", flush=True)
        counts.failed += 1
    return Result(suite, counts, time.monotonic() - start, cpu.seconds())


def report(results: list[Result], seconds: float) -> int:
    """Prints the table and the closing line. Returns the exit status."""
    total = Counts()
    print(f"\n==== summary ({seconds:.0f} s, {sum(result.cpu_seconds for result in results):.0f} CPU seconds)")
    for result in results:
        counts = result.counts
        total.add(counts)
        mark = "FAILED" if counts.failed else "ok"
        print(
            f"  {result.suite.name:12s} {mark:6s} {counts.passed:6d} passed {counts.failed:4d} failed "
            f"{counts.skipped:4d} skipped {result.seconds:7.1f} s {result.cpu_seconds:7.1f} CPU s"
        )
    for result in results:
        for failure in result.counts.failures[:MOST_FAILURES]:
            print(f"FAILED {result.suite.name}: {failure[:200]}")
    print(f"\n{total}", flush=True)
    return 1 if total.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the test suites and count.")
    names = list(test_suites.SUITES)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of: {', '.join(names)}; default: the usual ones")
    parser.add_argument("--full", action="store_true", help="the long versions")
    parser.add_argument("--gpu", action="store_true", help="the suites that need a CUDA device")
    options = parser.parse_args()
    unknown = [name for name in options.suites if name not in names]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}; there are: {', '.join(names)}")
    usual = test_suites.FULL if options.full else test_suites.USUAL
    chosen = options.suites or (test_suites.GPU if options.gpu else usual)
    os.environ["DEEPEP_TEST_FULL"] = "1" if options.full else os.environ.get("DEEPEP_TEST_FULL", "0")
    start = time.monotonic()
    present = [test_suites.SUITES[name] for name in chosen if test_suites.SUITES[name].present() or options.suites]
    results = [run_suite(suite, options.full) for suite in present]
    return report(results, time.monotonic() - start)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
