"""Measures a running service against its own plain decoding and against the bare engine.

    specwire up
    python -m deploy.bench.bars --prompts prompts.jsonl

Law. Every ratio comes from interleaved runs: for each prompt the variants run one after the other, in turn from the front and
from the back, so that a machine that slows down slows all of them. Ratios are of sums over all prompts, intervals by resampling
prompts. d, v and t come from a bare engine loop in this process, run between the prompts. Greedy answers are compared by id.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deploy import lifecycle, ready
from deploy.bench import tool
from deploy.bench.engine_loop import EngineLoop
from deploy.bench.passes import Record, ask
from deploy.bench.statistics import bootstrap, median_ratio, shown, total_ratio
from deploy.bench.workload import Item, load
from specwire.client import Client, Final
from specwire.law.errors import Unavailable
from specwire.process import prepare_to_compute

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "both": {"num_speculative_tokens": "auto", "method": "auto"},
    "draft": {"num_speculative_tokens": "auto", "method": "draft_model"},
}
ROWS = (1, 2, 3, 4, 5, 7, 9)
COPYING = ("edit", "extract", "repeat")


@dataclass
class Bars:
    """Everything measured, by variant and prompt."""

    runs: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    kinds: list[str] = field(default_factory=list)
    differing: int = 0
    token_pairs: list[tuple[float, float]] = field(default_factory=list)
    """Per prompt: median seconds of a plain token through the service, and of a bare step right after."""


def decoding(record: Record) -> float:
    """Seconds from the first token to the final event."""
    return record.total_s - record.ttft_s


def told(record: Record) -> Final:
    """What the service says of it."""
    assert record.final is not None
    return record.final


def limit_seconds(run: Record, loop: EngineLoop) -> float:
    """What the run's rounds would have taken with nothing but draft and target steps of the bare engine."""
    total = 0.0
    for each in told(run).rounds[1:]:  # the first one reads the prompt
        total += loop.seconds("target", each.drafted + 1)
        if each.source == "draft_model" and loop.draft is not None:
            total += each.drafted * loop.seconds("draft", 1)
    return total


def idle_shares(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Share of one core that each process used while nothing was asked."""
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    time.sleep(seconds)
    return {name: (sum(p.cpu_times()[:2]) - before[name]) / seconds for name, p in processes.items()}


def listening(port: int) -> int:
    """The process that serves a port of this machine."""
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid is not None:
            return each.pid
    raise SystemExit(f"nothing listens at port {port} of this machine")


def loopback_bytes() -> int:
    """Bytes that went over this machine's loopback so far, headers of TCP and HTTP/2 included."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


async def measure(args: argparse.Namespace, items: list[Item], console: Console) -> dict[str, Any]:
    """Runs everything."""
    report: dict[str, Any] = {
        "cores": os.cpu_count(),
        "prompts": len(items),
        "known": args.known,
        "max_tokens": args.max_tokens,
    }
    bars = Bars()
    async with Client(args.address) as client:
        stats = await client.stats()
        report["precision"] = {worker.name: worker.info.precision for worker in stats.workers}
        pids = {w.name: int(w.info.node.rpartition(":")[2] or w.info.node.split()[-1]) for w in stats.workers}
        pids["coordinator"] = listening(int(args.address.rpartition(":")[2]))
        report["idle_cores"] = idle_shares(pids, 5.0)
        loop = EngineLoop(json.loads(args.target), json.loads(args.draft) if args.draft else None)
        await ask(client, dataclasses.replace(items[0], max_tokens=16), {})
        names = list(VARIANTS)
        shared = {"private_prompt": not args.known, "return_rounds": True}
        with Progress(console=console) as progress:
            task = progress.add_task("prompts", total=len(items) * args.repeats)
            for repeat in range(args.repeats):
                for index, item in enumerate(items):
                    order = names if (index + repeat) % 2 == 0 else names[::-1]
                    answers = {}
                    if args.known:  # read by both workers, for whoever comes first
                        await ask(client, dataclasses.replace(item, max_tokens=2), VARIANTS["draft"] | shared)
                    for name in order:
                        answers[name] = await ask(client, item, VARIANTS[name] | shared)
                        bars.runs[name].append(answers[name])
                        if name == "plain" and answers[name].gaps:
                            bare = loop.plain_steps(told(answers[name]).usage.prompt_tokens, 48)
                            bars.token_pairs.append((statistics.median(answers[name].gaps), statistics.median(bare)))
                    bars.differing += sum(run.ids != answers["plain"].ids for run in answers.values())
                    bars.kinds.append(item.kind)
                    loop.measure(200, ROWS)
                    progress.advance(task)
        summarise(bars, loop, report)
        report["batch"] = await batch(
            client, [dataclasses.replace(each, max_tokens=args.max_tokens // 2) for each in items], args.batch_pairs
        )
        report["bytes"] = await wire(client, items[0])
    return report


def summarise(bars: Bars, loop: EngineLoop, report: dict[str, Any]) -> None:
    """Ratios, the formula's limit, and where the time went."""
    plain = bars.runs["plain"]
    report["differing"] = bars.differing
    report["step_ms"] = {f"target {rows}": 1e3 * loop.seconds("target", rows) for rows in ROWS}
    if loop.draft is not None:
        report["step_ms"]["draft"] = 1e3 * loop.seconds("draft", 1)
    for name in ("both", "draft"):
        runs = bars.runs[name]
        pairs = [(p.total_s, r.total_s) for p, r in zip(plain, runs, strict=True)]
        alone = [(decoding(p), decoding(r)) for p, r in zip(plain, runs, strict=True)]
        copies = [kind in COPYING for kind in bars.kinds]
        limits = [
            ((len(p.ids) - 1) * loop.seconds("target", 1), limit_seconds(r, loop))
            for p, r in zip(plain, runs, strict=True)
        ]
        rounds = sum(told(run).speculation.rounds for run in runs)
        report[name] = {
            "speedup": bootstrap(pairs, total_ratio).plain(),
            "speedup_median": bootstrap(pairs, median_ratio).plain(),
            "speedup_copying": _of(pairs, copies),
            "decoding": bootstrap(alone, total_ratio).plain(),
            "decoding_copying": _of(alone, copies),
            "by_kind": {
                kind: total_ratio([pair for pair, k in zip(pairs, bars.kinds, strict=True) if k == kind])
                for kind in dict.fromkeys(bars.kinds)
            },
            "tokens_per_round": sum(len(run.ids) for run in runs) / rounds,
            "formula": total_ratio(limits),
            "of_formula": total_ratio(alone) / total_ratio(limits),
        }
    for name, runs in bars.runs.items():
        timing = [told(run).timing for run in runs]
        total = sum(t.total_us for t in timing)
        compute = sum(t.draft_compute_us + t.target_compute_us for t in timing)
        report[f"{name}_path"] = {
            "tokens_per_s": sum(len(run.ids) for run in runs) / sum(run.total_s for run in runs),
            "unattributed": sum(t.unattributed_us for t in timing) / total,
            "outside_compute": 1 - compute / total,
            "transfer": sum(t.draft_transfer_us + t.target_transfer_us for t in timing) / total,
        }
    service_ms, bare_ms = (1e3 * statistics.median(column) for column in zip(*bars.token_pairs, strict=True))
    report["plain_token"] = {
        "service_ms": service_ms,
        "bare_ms": bare_ms,
        "ratio": bootstrap(bars.token_pairs, median_ratio).plain(),
        "difference_ms": 1e3 * statistics.median(service - bare for service, bare in bars.token_pairs),
    }


def _of(pairs: list[tuple[float, float]], chosen: list[bool]) -> dict[str, float | None] | None:
    """Ratio of the chosen pairs; None when there are none."""
    found = list(itertools.compress(pairs, chosen))
    return bootstrap(found, total_ratio).plain() if found else None


async def batch(client: Client, items: list[Item], pairs: int) -> dict[str, Any]:
    """Eight at a time against one at a time, and whether each answer is its solo answer."""
    chosen = (items * 8)[:8]
    seconds = []
    differing = 0
    for _ in range(pairs):
        alone = [await ask(client, item, {}) for item in chosen]
        begun = time.perf_counter()
        together = await asyncio.gather(*(ask(client, item, {}) for item in chosen))
        seconds.append((sum(run.total_s for run in alone), time.perf_counter() - begun))
        differing += sum(a.ids != b.ids for a, b in zip(alone, together, strict=True))
    return {"speedup_of_8": bootstrap(seconds, median_ratio).plain(), "differing": differing, "of": pairs * len(chosen)}


async def wire(client: Client, item: Item) -> dict[str, float]:
    """Bytes at a block length of four."""
    before = loopback_bytes()
    run = await ask(client, item, {"num_speculative_tokens": 4, "method": "draft_model"})
    on_socket = loopback_bytes() - before
    rounds = told(run).speculation.rounds
    return {
        "payload_per_round": told(run).timing.wire_bytes / rounds,
        "socket_per_token": on_socket / len(run.ids),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The report as a table."""
    table = Table("measure", "value", title="Bars")

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and "low" in value:
            table.add_row(prefix, f"{shown(value, 3)}, n={value['pairs']}")
        elif isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix} {key}".strip(), inner)
        else:
            table.add_row(prefix, f"{value:.4g}" if isinstance(value, float) else str(value))

    add("", report)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = tool.parser("deploy.bench.bars", __doc__, " Thirty prompts take five minutes.")
    parser.add_argument(
        "--prompts", required=True, help="JSONL: an object a line with prompt, and kind and max_tokens if wanted"
    )
    parser.add_argument("--address", help="host:port; default: the service that was started here")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--repeats", type=int, default=1, help="times through all prompts; each is one interleaved set")
    parser.add_argument("--batch-pairs", type=int, default=5, help="eight requests together and alone, so many times")
    parser.add_argument(
        "--known", action="store_true", help="each prompt was read before, as in a chat; default: none was"
    )
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--target", help="JSON of the target's model settings; default: the shipped topology's")
    parser.add_argument("--draft", help="JSON of the draft's model settings; default: the shipped topology's")
    parser.add_argument("--json", help="file for the report")
    args = parser.parse_args(argv)
    for option in ("max_tokens", "repeats", "batch_pairs", "every"):
        tool.count(f"--{option.replace('_', '-')}", getattr(args, option), 2 if option == "max_tokens" else 1)
    output = tool.writable("--json", args.json)
    if args.target is None:
        args.target, args.draft = (json.dumps(part) for part in shipped())
    console = Console(stderr=True)
    items = load([args.prompts], args.max_tokens)[:: args.every]
    args.address = lifecycle.endpoint(args.address)
    try:
        report = asyncio.run(measure(args, items, console))
    except Unavailable as error:
        raise ready.explained(error, args.address) from None
    show(report, console)
    tool.save(output, report)
    return 0


def shipped() -> tuple[dict[str, Any], dict[str, Any]]:
    """Model settings of the shipped topology: the target's and the draft's."""
    from deploy.configs import service_configs
    from deploy.models import resolve
    from deploy.topology import load as load_topology

    configs = service_configs(load_topology(None), resolve)
    return configs["target-0"]["model"], configs["draft-0"]["model"]


if __name__ == "__main__":
    prepare_to_compute()  # before torch loads: the bare loop must not spin on the service's cores
    sys.exit(main())
