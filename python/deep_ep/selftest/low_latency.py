"""Cases of `python -m deep_ep.selftest low_latency`: dispatch and combine in every format and way of waiting."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from ..buffer import Buffer
from . import check as sc
from .rank import Case, Figures, Rank

Options = dict[str, Any]  # keywords of a call
FORMATS: dict[str, Options] = {
    "BF16": {"use_fp8": False},
    "FP8": {"use_fp8": True},
    "FP8, power-of-two scales": {"use_fp8": True, "round_scale": True},
    "FP8, UE8M0 scales": {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
}
WAITS: dict[str, Options] = {
    "": {},
    ", hook": {"return_recv_hook": True},
    ", asynchronous": {"async_finish": True},
}
SMALL = 2.0**-11  # LogFMT codes blocks below 1: payload and factors stay below that


def cases(options: Any) -> list[Case]:
    """Everything that one run checks, in order."""
    result = []
    for (form, casting), (words, waiting) in itertools.product(FORMATS.items(), WAITS.items()):
        if "UE8M0" not in form or options.hidden % 512 == 0:
            result.append(Case(f"dispatch, combine: {form}{words}", exchange(casting, waiting, {})))
    result.append(Case("combine: zero copy", exchange(FORMATS["BF16"], {}, {"zero_copy": True})))
    if options.use_logfmt:
        for words, waiting in WAITS.items():
            result.append(Case(f"combine: LogFMT-10{words}", exchange(FORMATS["BF16"], waiting, {"use_logfmt": True})))
    if options.pressure_test:
        result.append(Case(f"{options.pressure_test} random rounds, each twice, bit for bit the same", check_pressure))
    result.append(Case("speed", measure))
    if options.shrink_test:
        result.append(Case("the last rank masked by the others, and back", check_masked))
        result.append(Case("the last rank killed, the others go on", check_killed, loses_rank=True))
    return result


def make_buffer(options: Any, **more: Any) -> dict[str, Any]:
    """Arguments of the buffer under test."""
    size = Buffer.get_low_latency_rdma_size_hint(
        options.num_tokens, options.hidden, options.num_ranks, options.num_experts
    )
    qps = max(1, options.num_experts // options.num_ranks)
    links = {"allow_nvlink_for_low_latency_mode": not options.disable_nvlink}
    return {"num_rdma_bytes": size, "low_latency_mode": True, "num_qps_per_rank": qps, **links, **more}


class Batch:
    """One low-latency round on one rank."""

    def __init__(self, rank: Rank, shape: sc.Shape, small: bool = False, masked: frozenset[int] = frozenset()) -> None:
        self.rank, self.shape, self.masked = rank, shape, masked
        self.factor = SMALL if small else 1.0
        self.idx = shape.routing(rank.rank).to(rank.device)
        self.weights = shape.weights(rank.rank).to(rank.device)
        self.values = sc.own_payload(shape, rank.rank, rank.device).to(torch.float32)
        self.x = self.values.to(torch.bfloat16)
        self.sources = sc.expert_sources(shape, rank.rank, masked)

    def dispatch(self, buffer: Buffer, casting: Options, waiting: Options) -> tuple[Any, Any]:
        """Dispatches, waits, checks; returns (received, handle)."""
        shape = self.shape
        received, counts, handle, event, hook = buffer.low_latency_dispatch(
            self.x, self.idx, shape.tokens, shape.experts, **casting, **waiting
        )
        finish(event, hook)
        want = torch.tensor([len(tokens) for _, tokens in self.sources], dtype=torch.int32, device="cpu")
        sc.expect_equal("recv_count", counts.cpu(), want)
        ranges = handle[1].cpu()
        for local, (source_rank, source_token) in enumerate(self.sources):
            name = f"expert {local}"
            self.check_rows(name, received, local, source_rank, source_token, casting)
            sc.expect_equal(
                f"{name}: src_info", handle[0][local, : len(source_token)].cpu(), source_token.to(torch.int32)
            )
            per_rank = torch.bincount(source_rank, minlength=shape.ranks)
            begin = per_rank.cumsum(0) - per_rank
            sc.expect_equal(f"{name}: layout_range", ranges[local], (begin << 32) | per_rank)
        return received, handle

    def check_rows(
        self, name: str, received: Any, local: int, source_rank: Any, source_token: Any, casting: Options
    ) -> None:
        """The valid rows of one expert."""
        count = len(source_token)
        if not casting["use_fp8"]:
            sc.expect_rows(name, received[local, :count], source_rank, source_token)
            return
        values, scales = received[0][local, :count], received[1][local, :count]
        if casting.get("use_ue8m0"):
            scales = sc.unpack_ue8m0(scales)
        device = values.device
        for part in sc.chunks(count):
            source = sc.payload(source_rank[part].to(device), source_token[part].to(device), self.shape.hidden)
            rounded = casting.get("round_scale", False)
            sc.expect_cast(name, values[part], scales[part], source.to(torch.float32), rounded)

    def fill(self, place: Any) -> None:
        """Writes what the experts answer: payload times a factor of the expert, rounded to BF16. Other rows stay."""
        for local, (source_rank, source_token) in enumerate(self.sources):
            expert = self.rank.rank * self.shape.local_experts + local
            source_rank, source_token = source_rank.to(place.device), source_token.to(place.device)
            for part in sc.chunks(len(source_token)):
                values = sc.payload(source_rank[part], source_token[part], self.shape.hidden).to(torch.float32)
                place[local, part] = (values * self.factor_of(expert)).to(torch.bfloat16)

    def factor_of(self, expert: int) -> float:
        """What an expert multiplies its rows with."""
        return (1 + expert % 4) * self.factor

    def combine(self, buffer: Buffer, handle: Any, waiting: Options, combining: Options) -> Any:
        """Combines, waits, checks; returns the sums."""
        shape = self.shape
        if combining.get("zero_copy"):
            x = buffer.get_next_low_latency_combine_buffer(handle)
        else:
            rows = (shape.local_experts, shape.ranks * shape.tokens, shape.hidden)
            x = torch.empty(rows, dtype=torch.bfloat16, device=self.rank.device)
        self.fill(x)
        sums, event, hook = buffer.low_latency_combine(x, self.idx, self.weights, handle, **waiting, **combining)
        finish(event, hook)
        sc.expect_close("combined_x", sums, self.wanted_sums(), 1e-5)
        return sums

    def wanted_sums(self) -> Any:
        """``[T, H]`` float64."""
        total = torch.zeros(self.values.shape, dtype=torch.float64, device=self.values.device)
        for k in range(self.shape.topk):
            expert = self.idx[:, k : k + 1]
            factor = (1 + expert % 4).to(torch.float32) * self.factor
            rows = (self.values * factor).to(torch.bfloat16).to(torch.float64)
            used = expert >= 0
            for masked in self.masked:
                used = used & (expert // self.shape.local_experts != masked)
            total += rows * self.weights[:, k : k + 1] * used
        return total


def finish(event: Any, hook: Any) -> None:
    """Waits as the call wants it."""
    if hook is not None:
        hook()
    elif event.event is not None:
        event.current_stream_wait()


def exchange(casting: Options, waiting: Options, combining: Options) -> Callable[[Rank], None]:
    """A case: two rounds of dispatch and two combines each, in one format and way of waiting."""

    def run(rank: Rank) -> None:
        with rank.buffer(**make_buffer(rank.options)) as buffer:
            for turn in range(2):
                shape = dataclasses.replace(rank.shape, seed=rank.shape.seed + turn)
                batch = Batch(rank, shape, small=combining.get("use_logfmt", False))
                _, handle = batch.dispatch(buffer, casting, waiting)
                for _ in range(2):
                    batch.combine(buffer, handle, waiting, combining)

    return run


def check_pressure(rank: Rank) -> None:
    """Random rounds; a repetition must give the same bits."""
    with rank.buffer(**make_buffer(rank.options)) as buffer:
        for number in range(rank.options.pressure_test):
            batch = Batch(rank, dataclasses.replace(rank.shape, seed=rank.shape.seed + 1 + number))
            waiting = list(WAITS.values())[number % len(WAITS)]
            results = []
            for _ in range(2):
                received, handle = batch.dispatch(buffer, FORMATS["BF16"], waiting)
                sums = batch.combine(buffer, handle, waiting, {})
                parts = [received[local, : len(tokens)] for local, (_, tokens) in enumerate(batch.sources)]
                results.append([sc.digest(part) for part in (*parts, sums)])
            sc.expect(results[0] == results[1], f"round {number}: a repetition gave other bits")


def check_masked(rank: Rank) -> None:
    """The others mask the last rank, go on without it, and take it back."""
    last = rank.shape.ranks - 1
    with rank.buffer(**make_buffer(rank.options, enable_shrink=True)) as buffer:
        run_rounds(rank, buffer, frozenset())
        rank.synchronize()
        rank.meet()
        if rank.rank != last:
            buffer.low_latency_update_mask_buffer(last, True)
            run_rounds(rank, buffer, frozenset({last}))
            buffer.low_latency_clean_mask_buffer()
        rank.synchronize()
        rank.meet()
        buffer.clean_low_latency_buffer(rank.shape.tokens, rank.shape.hidden, rank.shape.experts)
        run_rounds(rank, buffer, frozenset())


def check_killed(rank: Rank) -> None:
    """The last rank ends as if killed; each survivor masks it and completes."""
    last = rank.shape.ranks - 1
    with rank.buffer(**make_buffer(rank.options, enable_shrink=True, timeout=2.0)) as buffer:
        run_rounds(rank, buffer, frozenset())
        if rank.rank == last:
            rank.synchronize()
            rank.last_words()
            os.kill(os.getpid(), signal.SIGKILL)
        run_rounds(rank, buffer, frozenset({last}))
        status = torch.zeros((rank.shape.ranks,), dtype=torch.int32, device=rank.device)
        buffer.low_latency_query_mask_buffer(status)
        want = [int(r == last) for r in range(rank.shape.ranks)]
        sc.expect(status.tolist() == want, f"mask is {status.tolist()}, expected {want}")
        run_rounds(rank, buffer, frozenset({last}))


def run_rounds(rank: Rank, buffer: Buffer, masked: frozenset[int]) -> None:
    """Three checked round trips."""
    for turn in range(3):
        batch = Batch(rank, dataclasses.replace(rank.shape, seed=rank.shape.seed + turn), masked=masked)
        _, handle = batch.dispatch(buffer, FORMATS["BF16"], {})
        batch.combine(buffer, handle, {}, {})


def measure(rank: Rank) -> Figures:
    """Time of one call on this rank; bytes of rows that it received (dispatch) or gets back (combine)."""
    figures: Figures = {}
    shape = rank.shape
    with rank.buffer(**make_buffer(rank.options)) as buffer:
        batch = Batch(rank, shape)
        count = sum(len(tokens) for _, tokens in batch.sources)
        for form in ("FP8", "BF16"):
            row = shape.hidden * 2 if form == "BF16" else shape.hidden + shape.hidden // 128 * 4

            def dispatch(casting: Options = FORMATS[form]) -> Any:
                return buffer.low_latency_dispatch(batch.x, batch.idx, shape.tokens, shape.experts, **casting)

            figures[f"dispatch {form}"] = rank.time(dispatch), count * row
        handle = dispatch()[2]
        rows = (shape.local_experts, shape.ranks * shape.tokens, shape.hidden)
        x = torch.empty(rows, dtype=torch.bfloat16, device=rank.device)
        batch.fill(x)
        back = int((batch.idx >= 0).sum()) * shape.hidden * 2
        kinds = {"combine BF16": {}, **({"combine LogFMT-10": {"use_logfmt": True}} if rank.options.use_logfmt else {})}
        for name, combining in kinds.items():

            def combine(combining: Options = combining) -> Any:
                return buffer.low_latency_combine(x, batch.idx, batch.weights, handle, **combining)

            figures[name] = rank.time(combine), back
    return figures
