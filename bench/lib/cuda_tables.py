"""The tables of bench/gpu.py."""

from __future__ import annotations

import argparse
import math
from typing import Any

from lib import decode_step, elastic_calls, hostcost, layer, overlap, sms
from lib.tables import Table, duration, median, p99, ratio, spread


def make(found: dict[str, Any], options: argparse.Namespace) -> list[Table]:
    """All tables of what was run."""
    limit = found["limit"].get("rate", math.nan)
    shown = f"{limit:.0f} GB/s out of each GPU" if limit == limit else f"not measured: {found['limit']['missing']}"
    tables = []
    if "normal" in found:
        entries = found["normal"]["found"] + found.get("elastic kernels", []) + found["views"]
        tables.append(normal_table(found["normal"] | {"found": entries}, options, limit, shown))
    if "lowlatency" in found:
        tables.append(low_latency_table(found["lowlatency"], options, limit, shown))
    if "hostcost" in found:
        tables.append(host_table(found["hostcost"], found["hostcost_c"], options))
    if "calls" in found:
        tables.append(calls_table(found["calls"]))
    if "elastic" in found:
        tables.append(elastic_calls.table(found["elastic"]))
    if found.get("dense"):
        tables.append(dense_table(found["dense"]))
    if "sms" in found:
        tables.append(sms.table(found["sms"], options.hidden, options.rounds))
    if "decode" in found:
        tables.append(decode_step.table(found["decode"], options.rounds))
    if "overlap" in found:
        tables += overlap.tables(found["overlap"], options.rounds)
    if "layer" in found:
        tables.append(layer.table(found["layer"]))
    if found["first"] or "startup" in found:
        tables.append(startup_table(found, options))
    return tables


def normal_table(found: dict[str, Any], options: argparse.Namespace, limit: float, shown: str) -> Table:
    """Kernels of normal mode, and the host's view."""
    hidden = options.hidden
    row_bytes = {"FP8": hidden + hidden // 128 * 4, "BF16": hidden * 2}
    nccl = {(e["operation"], e["kind"]): median(e["times"]) for e in found["found"] if e["path"] == "nccl"}
    table = Table(
        f"Normal mode, {found['case']} (ranks x tokens x hidden)",
        f"Kernel time of the operation by torch's profiler, L2 cold, all ranks begin together; the slowest rank of "
        f"each of {options.rounds} calls, median and p99. Top-8 of 256 experts, uniform. Direct: peers write into the "
        "rows that the caller gets; copied: through staging memory. Dispatch with top-k and scales, in one step "
        "(num_worst_tokens); V2's without CPU sync, FP8's scales by columns. "
        "Limit: bytes of rows that leave the busiest GPU ÷ what all-pairs pushes of plain stores "
        f"moved in the same run ({shown}). NCCL: kernel of all_to_all_single of the rows alone, already in order. "
        "Layout + dispatch: host view, from the call until the device is done, with the counts awaited.",
        ["operation", "SMs", "median", "p99", "limit", "÷ limit", "NCCL"],
    )
    entries = [entry for entry in found["found"] if entry["path"] != "nccl"]
    for entry in entries:
        operation, kind, path, sms = (entry[name] for name in ("operation", "kind", "path", "sms"))
        us = median(entry["times"])
        floor = found["rows"] * row_bytes[kind] / limit / 1e3 if operation in ("dispatch", "combine") else math.nan
        rival = nccl.get((operation, kind), math.nan)
        table.rows.append(
            [" ".join(filter(None, (operation, kind, path))), str(sms) if sms else "", duration(us),
             duration(p99(entry["times"])), duration(floor), ratio(us, floor), duration(rival)]
        )  # fmt: skip
    return table


def low_latency_table(found: dict[str, Any], options: argparse.Namespace, limit: float, shown: str) -> Table:
    """Kernels of a decoding step."""
    table = Table(
        f"Low-latency mode, {found['case']} (ranks x tokens x hidden)",
        f"Kernel time of the call by torch's profiler, all ranks begin together; the slowest rank of each of "
        f"{options.calls} calls, median and p99. Top-8 of 256 experts, uniform. Halves: send, a pause in which the "
        "rows cross, receive. Graph: a round's share of a replay of 20, by events. Limit: one row a rank that a token "
        f"goes to, at what all-pairs pushes moved in the same run ({shown}). NCCL: the same rows in BF16.",
        ["call", "median", "p99", "limit"],
    )
    times: dict[str, list[float]] = found["times"]
    floors = {"dispatch FP8": options.hidden + options.hidden // 128 * 4, "NCCL": 0}
    for name, values in times.items():
        row = floors.get(name, options.hidden * 2 if name in ("dispatch BF16", "combine BF16") else 0)
        floor = found["rows"] * row / limit / 1e3 if row else math.nan
        table.rows.append([name, duration(median(values)), duration(p99(values)), duration(floor)])
    return table


def host_table(found: dict[str, list[float]], c: dict[str, Any], options: argparse.Namespace) -> Table:
    """What a call costs its caller."""
    table = Table(
        "CPU time of a low-latency call",
        f"Time from call to return at {options.ll_tokens} tokens of {options.hidden}, outputs recycled, the host waits "
        f"for the device every 8 calls; the rank whose median is greatest, {options.calls} calls. C: one rank, one "
        "token of 128.",
        ["call", "median", "p99"],
    )
    for name, values in found.items():
        table.rows.append([f"Python, {name}", duration(median(values)), duration(p99(values))])
    if "missing" in c:
        table.rows.append([f"C: {c['missing']}", "-", "-"])
        return table
    for name in ("dispatch", "combine"):
        awake = hostcost.split(c[name])[1]
        table.rows.append([f"C, {name}", duration(median(awake)), duration(p99(awake))])
    return table


def calls_table(found: dict[str, Any]) -> Table:
    """What Python calls cost."""
    table = Table(
        "Python calls",
        f"Time from call to return, and until the device is done; medians of the slowest rank, p99 in brackets. Normal "
        f"mode {found['normal']} BF16, low latency {found['decoding']}, top-8 of 256 experts; all ranks begin together "
        "with idle devices. The same under torch.set_default_device, which runs Python under each call of torch, and "
        f"beside a thread that keeps the interpreter busy (switch interval {found['switch'] * 1e3:g} ms).",
        ["call", "returns", "done"],
    )
    for way, calls in found["ways"].items():
        for name, times in calls.items():
            cells = [spread(times[what]) for what in ("call", "done")]
            table.rows.append([f"{name}, {way}" if way else name, *cells])
    return table


def dense_table(found: list[dict[str, Any]]) -> Table:
    """Dispatch and combine beside the dense way."""
    table = Table(
        "Beside the dense way",
        "Layout, dispatch and combine of BF16 rows, beside NCCL's all_gather of rows, indices and weights with "
        "reduce_scatter of partial sums in BF16 (without the work of picking one's own tokens). Host view: from the "
        "call until the device is done. Graph: a replay by events; ours with num_worst_tokens. Slowest rank, medians.",
        ["tokens a rank", "ours", "dense", "ours ÷ dense", "ours, graph", "dense, graph", "ours ÷ dense, graph"],
    )
    for entry in found:
        us = {name: median(entry[name]) for name in ("ours", "dense", "ours, graph", "dense, graph")}
        table.rows.append(
            [str(entry["tokens"]), duration(us["ours"]), duration(us["dense"]), ratio(us["ours"], us["dense"]),
             duration(us["ours, graph"]), duration(us["dense, graph"]), ratio(us["ours, graph"], us["dense, graph"])]
        )  # fmt: skip
    return table


def startup_table(found: dict[str, Any], options: argparse.Namespace) -> Table:
    """Construction, first and steady call, first graph."""
    table = Table(
        "Start-up",
        "Construction = time in Buffer() without the time in the caller's all_gather_object, which stands beside it; "
        "ready = what a background start takes after that. Calls: host view, from the call until the device is done: "
        "normal = layout + dispatch + combine, low latency = FP8 dispatch + combine, V2 = dispatch + combine, shapes "
        "as above. First graph: capture, instantiation and one replay of such a call. Slowest rank, median of "
        f"{options.lives} buffers; first of its process: one, which loads all kernels.",
        ["mode, variant", "construction", "group exchange", "ready", "warmup", "first call", "steady call",
         "first ÷ steady", "graph, first ÷ steady"],
    )  # fmt: skip
    rows = [(row, ", first of its process") for row in found["first"]] + [(row, "") for row in found.get("startup", [])]
    for row, note in rows:
        cells = {name: duration(row[name]) if row[name] else "-" for name in ("exchange", "warmup", "first", "steady")}
        ready = duration(row["ready"]) if "background" in row["variant"] else "-"
        graph = ratio(row["first_graph"], row["steady_graph"]) if "first_graph" in row else "-"
        title = f"{row['mode']}, {row['variant']}{note}"
        table.rows.append(
            [title, duration(row["construct"]), cells["exchange"], ready, cells["warmup"], cells["first"],
             cells["steady"], ratio(row["first"], row["steady"]), graph]
        )  # fmt: skip
    return table
