"""Upstream's V1 beside this package, in one run: the same calls, each library in processes of its own.

    python bench/beside_v1.py --v1 FOLDER                    # FOLDER: a wheel of DeepEP 1.2 for this Python, unpacked
    python bench/beside_v1.py --v1 FOLDER --only calls --rounds 200 --passes 4
    python bench/beside_v1.py --engine cpu --rounds 5        # without V1 and a GPU: to try the program

All processes stay alive; a call is measured with one library's ranks while the other's are idle, in turns and on the
same cores, since a machine's cores run at different speeds. Sections: calls (time in us until a Python call returns,
and until the device is done), async (the same with async_finish, an event captured before and memory of the
communication stream), halves (low latency: the sending call, and its hook), kernels (by torch's profiler), sizes
(kernels of low-latency dispatch + combine) and graph (a round of both, by events). A figure is the median of the
slowest rank; of several passes the median. V1's low latency goes over NVLink.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.call_clock import WARMUP, clocked

ROOT = Path(__file__).resolve().parent.parent
EXPERTS, TOPK, HIDDEN = 256, 8, 7168
SIZES = [(hidden, tokens) for hidden in (2048, 4096, 7168) for tokens in (1, 16, 64, 128)]
SECTIONS = ("calls", "async", "halves", "kernels", "sizes", "graph")
PAUSE_CYCLES = 1_000_000  # time for the host to issue a call, also where a launch takes 20 us
GRAPH_ROUNDS = 20
PATIENCE = 240.0  # seconds for an answer
Figures = dict[str, list[list[float]]]  # by call: a list of times for each kind of time


class Worker:
    """A rank of one library: it makes the calls that it is told of."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import deep_ep

        self.torch, self.dist = torch, dist
        self.gpu = options.engine == "cuda"
        rank, ranks = options.worker, options.ranks
        if self.gpu:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.gpu else torch.device("cpu")
        dist.init_process_group("nccl" if self.gpu else "gloo", f"file://{options.rendezvous}", None, ranks, rank)
        self.ranks, self.one = ranks, torch.zeros(1, device=self.device)
        self.meet()
        self.api: Any = deep_ep.Buffer
        self.api.set_num_sms(24)
        self.tokens = 4096 if options.large else 256
        largest = HIDDEN * 2
        sizes = [config.get_nvl_buffer_size_hint(largest, ranks)
                 for config in (self.api.get_dispatch_config(ranks), self.api.get_combine_config(ranks))]  # fmt: skip
        rdma = self.api.get_low_latency_rdma_size_hint(128, HIDDEN, ranks, EXPERTS)
        group = dist.group.WORLD
        self.buffer: Any = self.api(group, max(sizes), rdma, low_latency_mode=True, num_qps_per_rank=EXPERTS // ranks,
                                    explicitly_destroy=True)  # fmt: skip
        torch.manual_seed(rank)
        self.normal = self.batch(self.tokens, HIDDEN)
        self.decoding = self.batch(128, HIDDEN)
        self.handle: Any = None
        self.low_latency_handle: Any = None
        self.layout = self.buffer.get_dispatch_layout(self.normal[1], EXPERTS)[:4]
        self.dispatch()
        self.received = self.recv.shape[0]
        self.low_latency_dispatch()
        self.answers = torch.randn(EXPERTS // ranks, ranks * 128, HIDDEN, device=self.device, dtype=torch.bfloat16)
        self.finish()

    def batch(self, tokens: int, hidden: int) -> tuple[Any, Any, Any]:
        torch = self.torch
        x = torch.randn(tokens, hidden, device=self.device).to(torch.bfloat16)
        index = torch.stack([torch.randperm(EXPERTS, device=self.device)[:TOPK] for _ in range(tokens)])
        return x, index, torch.rand(tokens, TOPK, device=self.device)

    def meet(self) -> None:
        """Returns on all ranks within microseconds, with idle devices."""
        self.dist.all_reduce(self.one)
        self.finish()

    def finish(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    # ---- Calls. Each returns what is still to be waited for, or None ----

    def dispatch(self, **options: Any) -> Any:
        x, index, weights = self.normal
        per_rank, per_rdma, per_expert, is_in_rank = self.layout
        self.recv, _, _, _, self.handle, event = self.buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma, is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert, topk_idx=index, topk_weights=weights, **options)  # fmt: skip
        return event

    def worst(self, **options: Any) -> Any:
        handle = self.handle  # the exact one serves the other calls
        event = self.dispatch(num_worst_tokens=self.tokens * self.ranks, **options)
        self.recv, self.handle = self.recv[: self.received], handle
        return event

    def cached(self, **options: Any) -> Any:
        self.recv, _, _, _, _, event = self.buffer.dispatch(self.normal[0], handle=self.handle, **options)
        return event

    def combine(self, **options: Any) -> Any:
        return self.buffer.combine(self.recv, self.handle, **options)[2]

    def make_layout(self, **options: Any) -> Any:
        return self.buffer.get_dispatch_layout(self.normal[1], EXPERTS, **options)[4]

    def low_latency_dispatch(self, batch: Any = None, **options: Any) -> Any:
        x, index, _ = batch or self.decoding
        options = {"use_fp8": True} | options
        _, _, self.low_latency_handle, event, hook = self.buffer.low_latency_dispatch(x, index, 128, EXPERTS, **options)
        return hook if options.get("return_recv_hook") else event

    def low_latency_combine(self, batch: Any = None, **options: Any) -> Any:
        x, index, weights = batch or self.decoding
        answers = self.answers
        if x.shape[1] != HIDDEN:
            answers = self.answers.flatten()[: answers.shape[0] * answers.shape[1] * x.shape[1]].view(
                *answers.shape[:2], x.shape[1]
            )
        _, event, hook = self.buffer.low_latency_combine(answers, index, weights, self.low_latency_handle, **options)
        return hook if options.get("return_recv_hook") else event

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "get_dispatch_layout": self.make_layout,
            "dispatch (waits for counts)": self.dispatch,
            "dispatch, num_worst_tokens": self.worst,
            "dispatch, cached handle": self.cached,
            "combine": self.combine,
            "low-latency dispatch FP8": self.low_latency_dispatch,
            "low-latency combine": self.low_latency_combine,
        }

    # ---- What is measured: each returns lists of times in us ----

    def time_calls(self, name: str, rounds: int) -> list[list[float]]:
        torch = self.torch
        extra: dict[str, Callable[[], Any]] = {
            "torch.empty": lambda: torch.empty((128, HIDDEN), dtype=torch.bfloat16, device=self.device),
            "a launch (add_ of one number)": lambda: self.one.add_(1),
        }
        call = self.calls().get(name) or extra[name]
        return list(clocked(self.meet, call, self.finish, rounds))

    def time_async(self, name: str, rounds: int) -> list[list[float]]:
        """Until the call returns, until the wait for its event returns, until the device is done."""
        call, clock = self.calls()[name], time.perf_counter
        low_latency = name.startswith("low-latency")
        found: list[list[float]] = [[], [], []]
        for number in range(WARMUP + rounds):
            self.meet()
            start = clock()
            if low_latency:
                event = call(async_finish=True)
            else:
                event = call(previous_event=self.api.capture(), async_finish=True, allocate_on_comm_stream=True)
            times = [clock() - start]
            event.current_stream_wait()
            times.append(clock() - start)
            self.finish()
            times.append(clock() - start)
            if number >= WARMUP:
                for which, value in zip(found, times, strict=True):
                    which.append(value * 1e6)
        return found

    def time_halves(self, name: str, rounds: int) -> list[list[float]]:
        """The sending call, and the hook."""
        call, clock = self.calls()[name], time.perf_counter
        found: list[list[float]] = [[], []]
        for number in range(WARMUP + rounds):
            self.meet()
            start = clock()
            hook = call(return_recv_hook=True)
            middle = clock()
            self.finish()
            again = clock()
            hook()
            end = clock()
            self.finish()
            if number >= WARMUP:
                found[0].append((middle - start) * 1e6)
                found[1].append((end - again) * 1e6)
        return found

    def kernel_calls(self) -> dict[str, Callable[[], Any]]:
        def in_halves(call: Callable[..., Any], **options: Any) -> None:
            hook = call(return_recv_hook=True, **options)
            if self.gpu:
                self.torch.cuda._sleep(PAUSE_CYCLES // 10)
            hook()

        dispatch, combine = self.low_latency_dispatch, self.low_latency_combine
        return {
            "normal: dispatch BF16, cached": self.cached,
            "normal: combine": self.combine,
            "dispatch FP8": dispatch,
            "dispatch BF16": lambda: dispatch(use_fp8=False),
            "combine": combine,
            "combine LogFMT": lambda: combine(use_logfmt=True),
            "dispatch FP8 in halves": lambda: in_halves(dispatch),
            "combine in halves": lambda: in_halves(combine),
            "combine LogFMT in halves": lambda: in_halves(combine, use_logfmt=True),
        }

    def profiled(self, call: Callable[[], Any], rounds: int) -> list[list[float]]:
        """A list for each kernel of a call, in their order."""
        if not self.gpu:
            call()
            return [[0.0]]
        torch = self.torch
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        def begin() -> None:
            self.finish()
            torch.cuda._sleep(PAUSE_CYCLES)
            self.dist.all_reduce(self.one)

        for _ in range(3):
            begin()
            call()
        self.finish()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(rounds):
                begin()
                call()
            self.finish()
        events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]
        events.sort(key=lambda event: event.start_ns())
        times = [event.duration_ns() / 1e3 for event in events if "deep_ep::" in event.name()]
        each = len(times) // rounds
        if each == 0 or len(times) % rounds:
            raise RuntimeError(f"{rounds} calls have {len(times)} kernels: {sorted({e.name()[:60] for e in events})}")
        return [times[number::each] for number in range(each)]

    def time_kernels(self, name: str, rounds: int) -> list[list[float]]:
        return self.profiled(self.kernel_calls()[name], min(rounds, 50))

    def time_sizes(self, name: str, rounds: int) -> list[list[float]]:
        hidden, tokens = (int(n) for n in name.split(" x "))
        batch = self.batch(tokens, hidden)
        self.meet()
        if self.gpu:
            self.buffer.clean_low_latency_buffer(128, hidden, EXPERTS)
        self.meet()

        def both() -> None:
            self.low_latency_dispatch(batch)
            self.low_latency_combine(batch)

        lists = self.profiled(both, min(rounds, 50))
        if self.gpu:
            self.meet()
            self.buffer.clean_low_latency_buffer(128, HIDDEN, EXPERTS)
        return [[sum(times) for times in zip(*lists, strict=True)]]

    def time_graph(self, name: str, rounds: int) -> list[list[float]]:
        """A round of dispatch and combine in a graph of many."""
        if not self.gpu:
            return [[0.0]]
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_ROUNDS):
                self.low_latency_dispatch()
                self.low_latency_combine()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        own = []
        for number in range(3 + min(rounds, 30)):
            self.finish()
            torch.cuda._sleep(PAUSE_CYCLES)
            self.dist.all_reduce(self.one)
            begin.record()
            graph.replay()
            end.record()
            self.finish()
            if number >= 3:
                own.append(begin.elapsed_time(end) * 1e3 / GRAPH_ROUNDS)
        return [own]

    def serve(self, channel: Any, rank: int) -> None:
        """Does what the other end of the channel says, on the core that the other library's rank has, too."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(rank + 1) * len(cores) // (self.ranks + 1)]})
        print(json.dumps({"ready": True}), file=channel, flush=True)
        for line in channel:
            task = json.loads(line)
            try:
                times = getattr(self, f"time_{task['section']}")(task["name"], task["rounds"])
                answer: dict[str, Any] = {"times": times}
            except Exception as error:  # the other library goes on
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(answer), file=channel, flush=True)


class Library:
    """The processes of one library."""

    def __init__(self, name: str, options: argparse.Namespace, folder: str) -> None:
        self.name = name
        self.broken = ""
        self._channels, self._processes = [], []
        environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"))
        if name == "V1":
            import nvidia.nvshmem

            libraries = f"{next(iter(nvidia.nvshmem.__path__))}/lib"
            environment |= {
                "PYTHONPATH": str(options.v1.resolve()),
                "LD_LIBRARY_PATH": ":".join([libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
                "NVSHMEM_REMOTE_TRANSPORT": "none",
            }
        for rank in range(options.ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(PATIENCE)
            command = [sys.executable, __file__, "--worker", str(rank), "--channel", str(theirs.fileno())]
            command += ["--rendezvous", f"{folder}/{name}", "--ranks", str(options.ranks), "--engine", options.engine]
            command += ["--large"] * options.large
            log = open(Path(folder, f"{name}.{rank}.log"), "w")  # noqa: SIM115 - the process writes it
            self._processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdout=log, stderr=log)
            )
            theirs.close()
            self._channels.append(ours.makefile("rw"))
        self._folder = folder

    def _answers(self) -> list[dict[str, Any]]:
        try:
            lines = [channel.readline() for channel in self._channels]
        except TimeoutError:
            lines = [""]
        if not all(lines):
            logs = [Path(self._folder, f"{self.name}.{rank}.log").read_text()[-1500:] for rank in range(len(lines))]
            self.broken = "a rank ended or did not answer"
            print(f"{self.name}: {self.broken}\n" + "\n".join(logs), file=sys.stderr, flush=True)
            return []
        return [json.loads(line) for line in lines]

    def start(self) -> None:
        self._answers()

    def measure(self, section: str, name: str, rounds: int) -> list[float] | None:
        """The medians of the rank whose median is greatest, for each kind of time."""
        if self.broken:
            return None
        for channel in self._channels:
            print(json.dumps({"section": section, "name": name, "rounds": rounds}), file=channel, flush=True)
        answers = self._answers()
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors or not answers:
            print(f"{self.name}, {section}, {name}: {errors}", file=sys.stderr, flush=True)
            return None
        kinds = zip(*(answer["times"] for answer in answers), strict=True)
        return [max(statistics.median(times) for times in kind) for kind in kinds]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def libraries(options: argparse.Namespace) -> Iterator[list[Library]]:
    """The processes of both libraries, ready."""
    with tempfile.TemporaryDirectory(prefix="beside_v1_") as folder:
        found: list[Library] = []
        try:
            for name in ["V1", "ours"] if options.v1 else ["ours"]:
                found.append(Library(name, options, folder))
            for library in found:
                library.start()
            yield found
        finally:
            for library in found:
                library.stop()


def names_of(section: str) -> list[str]:
    """What a section measures, in order."""
    calls = ["get_dispatch_layout", "dispatch (waits for counts)", "dispatch, num_worst_tokens",
             "dispatch, cached handle", "combine", "low-latency dispatch FP8", "low-latency combine"]  # fmt: skip
    kernels = ["normal: dispatch BF16, cached", "normal: combine", "dispatch FP8", "dispatch BF16", "combine",
               "combine LogFMT", "dispatch FP8 in halves", "combine in halves", "combine LogFMT in halves"]  # fmt: skip
    return {
        "calls": [*calls, "torch.empty", "a launch (add_ of one number)"],
        "async": calls,
        "halves": calls[-2:],
        "kernels": kernels,
        "sizes": [f"{hidden} x {tokens}" for hidden, tokens in SIZES],
        "graph": ["dispatch FP8 + combine"],
    }[section]


def shown(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values) if values else "-"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """{section: {call: {library: [[a time of each kind] of each pass]}}}; prints a line for each call."""
    found: dict[str, Any] = {}
    with libraries(options) as both:
        for section in options.only:
            print(f"\n{section}: {' | '.join(library.name for library in both)} | ratio | of the least", flush=True)
            passes = 1 if section in ("kernels", "sizes", "graph") else options.passes
            for name in names_of(section):
                entry: dict[str, list[list[float]]] = {library.name: [] for library in both}
                for _ in range(passes):
                    for library in both:
                        times = library.measure(section, name, options.rounds)
                        if times:
                            entry[library.name].append(times)
                found.setdefault(section, {})[name] = entry
                middle = {
                    who: [statistics.median(kind) for kind in zip(*runs, strict=True)] for who, runs in entry.items()
                }
                least = {who: [min(kind) for kind in zip(*runs, strict=True)] for who, runs in entry.items()}
                line = f"{name}: " + " | ".join(shown(middle[library.name]) for library in both)
                if len(both) == 2 and middle["V1"] and len(middle["V1"]) == len(middle["ours"]):
                    line += " | " + shown([b / a for a, b in zip(middle["V1"], middle["ours"], strict=True) if a])
                    line += " | " + shown([b / a for a, b in zip(least["V1"], least["ours"], strict=True) if a])
                print(line.replace("| -", "|"), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--v1", type=Path, help="folder of upstream's deep_ep and deep_ep_cpp")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections (all)")
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program (cuda)")
    parser.add_argument("--ranks", type=int, default=0, help="processes of each library (a GPU each; 2 on the CPU)")
    parser.add_argument("--rounds", type=int, default=100, help="timed calls in a pass (100)")
    parser.add_argument("--passes", type=int, default=4, help="turns of the libraries (4)")
    parser.add_argument("--large", action="store_true", help="4096 tokens in normal mode, not 256")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all passes there")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        Worker(options).serve(socket.socket(fileno=options.channel).makefile("rw"), options.worker)
        os._exit(0)  # the other ranks are going, too
    if options.ranks == 0:
        import torch

        options.ranks = torch.cuda.device_count() if options.engine == "cuda" else 2
    found = measure(options)
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
