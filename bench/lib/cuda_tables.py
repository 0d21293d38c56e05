"""The tables of bench/gpu.py. Aims hold for 4 GPUs with NVLink, hidden 7168, 4096 tokens a rank (low latency: 128)."""

from __future__ import annotations

import argparse
import math
from typing import Any

from lib import hostcost
from lib.tables import Table, duration, median, p99, ratio

# (operation, kind, path, SMs) -> us
NORMAL_AIMS = {
    ("dispatch", "FP8", "direct", 10): 260.0,
    ("dispatch", "FP8", "direct", 16): 250.0,
    ("dispatch", "FP8", "copied", 24): 285.0,
    ("dispatch", "BF16", "direct", 16): 475.0,
    ("dispatch", "BF16", "copied", 24): 540.0,
    ("combine", "BF16", "", 20): 480.0,
    ("layout", "", "", 0): 8.0,
}
HOST_VIEW_AIM = 40.0  # us over the dispatch kernel
# call -> (median, p99)
LOW_LATENCY_AIMS = {
    "dispatch FP8": (16.0, 20.0),
    "combine BF16": (23.0, 27.0),
    "combine BF16, weights known": (21.0, math.nan),
    "dispatch BF16": (24.0, math.nan),
    "dispatch FP8 + combine in a graph": (36.0, math.nan),
}
HALVES_AIM = 4.0  # us over the call in one
HOST_AIMS = {"dispatch FP8": 6.0, "combine": 5.0}
HOST_AIM_C = 4.0
FIRST_AIM = 1.1  # times the steady call, after preinitialize and warmup
CONSTRUCT_AIMS = {"plain": 150_000.0, "background": 5_000.0, "background + warmup": 5_000.0}


def aim(value: float) -> str:
    """An aim's cell."""
    return "" if math.isnan(value) else f"≤ {duration(value)}"


def make(found: dict[str, Any], options: argparse.Namespace) -> list[Table]:
    """All tables of what was run."""
    limit = found["limit"].get("rate", math.nan)
    told = f"{limit:.0f} GB/s out of each GPU" if limit == limit else f"not measured: {found['limit']['missing']}"
    full = options.hidden == 7168 and options.ranks == 4
    tables = []
    if "normal" in found:
        aims = full and options.tokens == 4096
        normal = found["normal"] | {"found": found["normal"]["found"] + found["views"]}
        tables.append(normal_table(normal, options, limit, told, aims))
    if "lowlatency" in found:
        tables.append(low_latency_table(found["lowlatency"], options, limit, told, full and options.ll_tokens == 128))
    if "hostcost" in found:
        tables.append(host_table(found["hostcost"], found["hostcost_c"], options))
    if found["first"] or "startup" in found:
        tables.append(startup_table(found, options))
    return tables


def normal_table(found: dict[str, Any], options: argparse.Namespace, limit: float, told: str, aims: bool) -> Table:
    """Kernels of normal mode, and the host's view."""
    hidden = options.hidden
    row_bytes = {"FP8": hidden + hidden // 128 * 4, "BF16": hidden * 2}
    nccl = {(e["operation"], e["kind"]): median(e["times"]) for e in found["found"] if e["path"] == "nccl"}
    table = Table(
        f"Normal mode, {found['case']} (ranks x tokens x hidden)",
        f"Kernel time of the operation by torch's profiler, L2 cold, all ranks begin together; the slowest rank of "
        f"each of {options.rounds} calls, median and p99. Top-8 of 256 experts, uniform. Direct: peers write into the "
        "rows that the caller gets; copied: through staging memory. Dispatch with top-k and scales, in one step "
        "(num_worst_tokens). Limit: bytes of rows that leave the busiest GPU ÷ what all-pairs pushes of plain stores "
        f"moved in the same run ({told}). NCCL: kernel of all_to_all_single of the rows alone, already in order. "
        "Layout + dispatch: host view, from the call until the device is done, with the counts awaited.",
        ["operation", "SMs", "median", "p99", "aim", "limit", "÷ limit", "NCCL"],
    )
    entries = [entry for entry in found["found"] if entry["path"] != "nccl"]
    best: dict[tuple[str, str], float] = {}
    for entry in entries:
        if entry["operation"] == "dispatch":
            key = (entry["kind"], entry["path"])
            best[key] = min(best.get(key, math.inf), median(entry["times"]))
    for entry in entries:
        operation, kind, path, sms = (entry[name] for name in ("operation", "kind", "path", "sms"))
        us = median(entry["times"])
        wanted = NORMAL_AIMS.get((operation, kind, path, sms), math.nan) if aims else math.nan
        if operation == "layout + dispatch" and aims:
            wanted = best.get((kind, path), math.nan) + HOST_VIEW_AIM
        floor = found["rows"] * row_bytes[kind] / limit / 1e3 if operation in ("dispatch", "combine") else math.nan
        rival = nccl.get((operation, kind), math.nan)
        table.rows.append(
            [" ".join(filter(None, (operation, kind, path))), str(sms) if sms else "", duration(us),
             duration(p99(entry["times"])), aim(wanted), duration(floor), ratio(us, floor), duration(rival)]
        )  # fmt: skip
    return table


def low_latency_table(found: dict[str, Any], options: argparse.Namespace, limit: float, told: str, aims: bool) -> Table:
    """Kernels of a decoding step."""
    table = Table(
        f"Low-latency mode, {found['case']} (ranks x tokens x hidden)",
        f"Kernel time of the call by torch's profiler, all ranks begin together; the slowest rank of each of "
        f"{options.calls} calls, median and p99. Top-8 of 256 experts, uniform. Halves: send, a pause in which the "
        "rows cross, receive. Graph: a round's share of a replay of 20, by events. Limit: one row a rank that a token "
        f"goes to, at what all-pairs pushes moved in the same run ({told}). NCCL: the same rows in BF16.",
        ["call", "median", "p99", "aim", "aim p99", "limit"],
    )
    times: dict[str, list[float]] = found["times"]
    floors = {"dispatch FP8": options.hidden + options.hidden // 128 * 4, "NCCL": 0}
    for name, values in times.items():
        wanted, wanted_p99 = LOW_LATENCY_AIMS.get(name, (math.nan, math.nan)) if aims else (math.nan, math.nan)
        if name.endswith("both halves"):
            wanted = median(times[name.removesuffix(", both halves")]) + HALVES_AIM
        row = floors.get(name, options.hidden * 2 if name in ("dispatch BF16", "combine BF16") else 0)
        floor = found["rows"] * row / limit / 1e3 if row else math.nan
        table.rows.append(
            [name, duration(median(values)), duration(p99(values)), aim(wanted), aim(wanted_p99), duration(floor)]
        )
    return table


def host_table(found: dict[str, list[float]], c: dict[str, Any], options: argparse.Namespace) -> Table:
    """What a call costs its caller."""
    table = Table(
        "CPU time of a low-latency call",
        f"Time from call to return at {options.ll_tokens} tokens of {options.hidden}, outputs recycled, the host waits "
        f"for the device every 8 calls; the rank whose median is greatest, {options.calls} calls. C: one rank, one "
        "token of 128.",
        ["call", "median", "p99", "aim"],
    )
    for name, values in found.items():
        wanted = HOST_AIMS.get(name, math.nan)
        table.rows.append([f"Python, {name}", duration(median(values)), duration(p99(values)), aim(wanted)])
    if "missing" in c:
        table.rows.append([f"C: {c['missing']}", "-", "-", aim(HOST_AIM_C)])
        return table
    for name in ("dispatch", "combine"):
        awake = hostcost.split(c[name])[1]
        table.rows.append([f"C, {name}", duration(median(awake)), duration(p99(awake)), aim(HOST_AIM_C)])
    return table


def startup_table(found: dict[str, Any], options: argparse.Namespace) -> Table:
    """Construction, first and steady call, first graph."""
    table = Table(
        "Start-up",
        "Construction = time in Buffer() without the time in the caller's all_gather_object, which stands beside it; "
        "ready = what a background start takes after that. Calls: host view, from the call until the device is done: "
        "normal = layout + dispatch + combine, low latency = FP8 dispatch + combine, shapes as above. First graph: "
        "capture, instantiation and one replay of such a call. Slowest rank, median of "
        f"{options.lives} buffers; first of its process: one, which loads all kernels. Aim of the first call and the "
        f"first graph after preinitialize + warmup: {FIRST_AIM} x the steady one.",
        ["mode, variant", "construction", "aim", "group exchange", "ready", "warmup", "first call", "steady call",
         "first ÷ steady", "graph, first ÷ steady"],
    )  # fmt: skip
    rows = [(row, ", first of its process") for row in found["first"]] + [(row, "") for row in found.get("startup", [])]
    for row, note in rows:
        shown = {name: duration(row[name]) if row[name] else "-" for name in ("exchange", "warmup", "first", "steady")}
        wanted = CONSTRUCT_AIMS.get(row["variant"], math.nan) if row["mode"] == "low latency" else math.nan
        ready = duration(row["ready"]) if "background" in row["variant"] else "-"
        graph = ratio(row["first_graph"], row["steady_graph"]) if "first_graph" in row else "-"
        title = f"{row['mode']}, {row['variant']}{note}"
        table.rows.append(
            [title, duration(row["construct"]), aim(wanted), shown["exchange"], ready, shown["warmup"], shown["first"],
             shown["steady"], ratio(row["first"], row["steady"]), graph]
        )  # fmt: skip
    return table
