"""The command line and the parent process of the self-test: starts the ranks, runs every case, prints the report."""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .cases import list_cases
from .rank import Figures
from .worker import serve

# Defaults: (GPUs, CPU).
DEFAULTS = {
    "intranode": {"num_tokens": (4096, 128), "hidden": (7168, 2048), "num_topk": (8, 4), "num_experts": (256, 32)},
    "low_latency": {"num_tokens": (128, 32), "hidden": (7168, 2048), "num_topk": (8, 4), "num_experts": (288, 288)},
}
DEFAULTS["internode"] = DEFAULTS["intranode"]
TITLES = {
    "intranode": "normal mode inside one node",
    "low_latency": "low-latency mode",
    "internode": "both modes over several nodes",
}
CPU_PROCESSES = 4
PRESSURE_ROUNDS = 100


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m deep_ep.selftest", description="Checks an installation of deep_ep.")
    modes = top.add_subparsers(dest="mode", required=True, metavar="|".join(TITLES))
    for mode, text in TITLES.items():
        one = modes.add_parser(mode, help=text, formatter_class=argparse.RawTextHelpFormatter)
        gpu = {name: values[0] for name, values in DEFAULTS[mode].items()}
        cpu = {name: values[1] for name, values in DEFAULTS[mode].items()}
        one.add_argument("--num-processes", type=_count, help=f"ranks (default: one a GPU; CPU: {CPU_PROCESSES})")
        for name, words in (
            ("num_tokens", "tokens of each rank"),
            ("hidden", "hidden size"),
            ("num_topk", "experts of each token"),
            ("num_experts", "experts of all ranks together"),
        ):
            flag = "--" + name.replace("_", "-")
            one.add_argument(flag, type=_count, help=f"{words} (default {gpu[name]}, CPU: {cpu[name]})")
        one.add_argument("--engine", "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
        one.add_argument("--seed", type=int, default=0, help="of routing and weights (default 0)")
        one.add_argument("--iterations", type=_count, default=10, help="timed calls for each figure (default 10)")
        one.add_argument("--timeout", type=float, default=60.0, help="seconds a call waits for a rank (default 60)")
        one.add_argument(
            "--pressure-test", type=_count, nargs="?", const=PRESSURE_ROUNDS, default=0, metavar="ROUNDS",
            help=f"random rounds, each repeated and compared bit for bit (default {PRESSURE_ROUNDS} if given)",
        )  # fmt: skip
        one.add_argument("--allow-mnnvl", action="store_true", help="make every buffer with allow_mnnvl=True")
        if mode == "intranode":
            one.set_defaults(disable_nvlink=False)
        else:
            one.add_argument("--disable-nvlink", action="store_true", help="low-latency rows by RDMA inside nodes too")
        if mode == "internode":
            _add_node_options(one)
        else:
            one.set_defaults(num_nvl_peers=0, num_topk_groups=0, num_hosts=1, host_rank=0, master="")
        if mode == "low_latency":
            one.add_argument("--use-logfmt", action="store_true", help="also combine with LogFMT-10 on the wire")
            one.add_argument("--shrink-test", action="store_true", help="also mask a rank, and lose one")
    return top


def _add_node_options(one: argparse.ArgumentParser) -> None:
    """Options that place ranks on nodes and hosts."""
    one.add_argument(
        "--num-nvl-peers", type=_count, metavar="N",
        help="ranks of one node (default: those of a host; on one host alone half of them)",
    )  # fmt: skip
    one.add_argument(
        "--num-topk-groups", type=_count, metavar="N", help="nodes that one token's experts lie in (default: at most 4)"
    )
    one.add_argument("--num-hosts", type=_count, default=1, help="hosts that run this command (default 1)")
    one.add_argument("--host-rank", type=int, default=0, help="which of them this is, from 0 (default 0)")
    one.add_argument(
        "--master", default="", metavar="HOST:PORT", help="where the ranks of several hosts meet: on host 0"
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: an integer >= 1 is needed")
    return value


def complete(options: argparse.Namespace) -> argparse.Namespace:
    """Fills in what depends on the machine.

    Raises:
        SystemExit: the numbers do not fit together; the text says which.
    """
    gpus = torch.cuda.device_count()
    if options.engine == "auto":
        options.engine = "cuda" if gpus else "cpu"
    if options.engine == "cuda" and not gpus:
        raise SystemExit("selftest: --engine cuda needs a GPU that torch can see; there is none")
    column = 0 if options.engine == "cuda" else 1
    if options.num_processes is None:
        options.num_processes = gpus if options.engine == "cuda" else CPU_PROCESSES
    for name, values in DEFAULTS[options.mode].items():
        if getattr(options, name) is None:
            setattr(options, name, values[column])
    options.num_ranks = options.num_processes * options.num_hosts
    options.first_rank = options.num_processes * options.host_rank
    experts, ranks = options.num_experts, options.num_ranks
    if experts % ranks:
        raise SystemExit(f"selftest: --num-experts {experts} must be a multiple of the {ranks} ranks")
    if options.num_topk > experts:
        raise SystemExit(f"selftest: --num-topk {options.num_topk} must not exceed --num-experts {experts}")
    if options.mode == "internode":
        _complete_nodes(options)
    elif options.mode == "intranode":
        options.num_nvl_peers = ranks  # the environment may have another number
    multiple = 16 if options.mode == "intranode" else 128
    if options.hidden % multiple:
        raise SystemExit(f"selftest: --hidden {options.hidden} must be a multiple of {multiple} in this mode")
    if options.mode == "low_latency" and options.shrink_test and ranks < 2:
        raise SystemExit("selftest: --shrink-test needs at least two ranks")
    return options


def _complete_nodes(options: argparse.Namespace) -> None:
    """Nodes and hosts: fills in and checks."""
    ranks, hosts = options.num_ranks, options.num_hosts
    if not 0 <= options.host_rank < hosts:
        raise SystemExit(f"selftest: --host-rank {options.host_rank} must be from 0 to {hosts - 1}: see --num-hosts")
    if (hosts > 1) != bool(options.master):
        raise SystemExit("selftest: --num-hosts and --master HOST:PORT belong together")
    if options.num_nvl_peers is None:
        options.num_nvl_peers = options.num_processes if hosts > 1 else max(1, ranks // 2)
    peers = options.num_nvl_peers
    if ranks % peers or ranks == peers:
        raise SystemExit(f"selftest: --num-nvl-peers {peers} must divide the {ranks} ranks into two nodes or more")
    if options.num_topk_groups is None:
        options.num_topk_groups = min(4, ranks // peers)
    room = options.num_experts // (ranks // peers) * options.num_topk_groups
    if options.num_topk > room:
        groups = f"--num-topk-groups {options.num_topk_groups}"
        raise SystemExit(f"selftest: --num-topk {options.num_topk} must not exceed the {room} experts of {groups}")


class Ranks:
    """The rank processes, seen from the parent."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._directory = tempfile.mkdtemp(prefix="deepep-selftest-")
        context = multiprocessing.get_context("forkserver")
        # torch is imported once, not once for each rank
        context.set_forkserver_preload(["deep_ep.selftest.worker"])
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for rank in range(options.first_rank, options.first_rank + options.num_processes):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, options, self._directory, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def run(self, number: int, seconds: float) -> list[tuple[str, Any]]:
        """Runs one case on all ranks: for each ("ok", figures) or ("failed", text)."""
        answers: list[tuple[str, Any]] = [("failed", f"no answer within {seconds:.0f} s")] * len(self._connections)
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        for connection, rank in list(waiting.items()):
            try:
                connection.send(number)
            except OSError:
                answers[rank] = ("failed", "the process has ended")
                del waiting[connection]
        end = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for each in ready:
                assert isinstance(each, Connection)
                rank = waiting.pop(each)
                try:
                    answers[rank] = each.recv()
                except (EOFError, OSError):
                    answers[rank] = ("failed", "the process has ended")
        return answers

    def stop(self) -> None:
        """Ends what still runs and removes the folder."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(5)
        shutil.rmtree(self._directory, ignore_errors=True)


def report(name: str, seconds: float, answers: Sequence[tuple[str, Any]], first_rank: int) -> bool:
    """Prints the line of a case, and beneath it what failed where. Returns whether all ranks passed."""
    failures = [(rank, text) for rank, (kind, text) in enumerate(answers, first_rank) if kind == "failed"]
    print(f"{name:<72} {'FAILED' if failures else 'ok':<6} {seconds * 1000:9.1f} ms", flush=True)
    for rank, text in failures:
        print(f"    rank {rank}: {text}", flush=True)
    return not failures


def print_figures(answers: Sequence[tuple[str, Any]], options: argparse.Namespace) -> None:
    """The slowest rank's time, and the bytes that a rank receives per second."""
    figures: list[Figures] = [figures for kind, figures in answers if kind == "ok"]
    names = figures[0] if figures else {}
    shape = f"{options.num_tokens} tokens x {options.hidden}, top-{options.num_topk} of {options.num_experts} experts"
    nodes = f" in nodes of {options.num_nvl_peers}" if options.mode == "internode" else ""
    print(f"\n{options.num_ranks} ranks{nodes}, engine {options.engine}, {shape}")
    print(f"median of {options.iterations} calls as the host sees them")
    if options.disable_nvlink:
        print("low latency without NVLink: every row to another rank by RDMA")
    if options.engine == "cpu" and (options.mode == "internode" or options.disable_nvlink):
        print("RDMA in software: its times are not those of a network")
    width = max((len(name) for name in names), default=0)
    for name in names:
        slowest = max(one[name][0] for one in figures)
        received = sum(one[name][1] for one in figures) / len(figures)
        print(f"  {name:<{width}} {slowest * 1e6:12.1f} us {received / slowest / 1e9:10.2f} GB/s")
    print("us: the slowest rank; GB/s = payload bytes that a rank receives (mean of the ranks) / that time")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    options = complete(parser().parse_args(arguments))
    cases = list_cases(options)
    ranks = Ranks(options)
    failed, measured = 0, None
    try:
        for number, case in enumerate(cases):
            start = time.monotonic()
            answers = ranks.run(number, options.timeout * 2 + 60 + 2 * options.pressure_test)
            failed += not report(case.name, time.monotonic() - start, answers, options.first_rank)
            if case.name == "speed" and not any(kind == "failed" for kind, _ in answers):
                measured = answers
            if any(text == "the process has ended" for _, text in answers):
                break
    finally:
        ranks.stop()
    if measured is not None:
        print_figures(measured, options)
    print(f"\n{len(cases) - failed} of {len(cases)} cases passed" if not failed else f"\n{failed} cases FAILED")
    return 1 if failed else 0
