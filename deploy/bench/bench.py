"""`specwire bench`: measures a running service against its own plain decoding, and says which block length to choose.

Law. Every variant is compared with plain decoding by the same target, with the same prompts and settings, in passes that run next
to each other; from repeat to repeat the order is turned round, so that a machine that slows down slows all of them (A B B A).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deploy import ready, state
from deploy.bench import page
from deploy.bench.hf import HuggingFace
from deploy.bench.passes import Load, Options, Pass, ask, run, run_alone
from deploy.bench.report import AUTO, PLAIN, advice, comparisons, loads, point
from deploy.bench.workload import Item
from deploy.topology import TABLE
from specwire import __version__
from specwire.client import Client
from specwire.law.errors import InvalidArgument, Unavailable

METHODS = ("auto", "draft_model", "ngram")


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    items: Sequence[Item]
    concurrency: Sequence[int]
    rates: Sequence[float]
    """Requests a second, each an open loop."""
    lengths: Sequence[int]
    """Fixed values of num_speculative_tokens, beside `auto`."""
    method: str
    repeats: int
    """Passes of each variant at each load. Intervals come from these."""
    models: tuple[Mapping[str, Any], Mapping[str, Any] | None] | None = None
    """Target's and draft's model settings, to compare with transformers' own decoding; None: do not."""

    def requests(self, load: Load) -> int:
        """How many a pass at this load asks: the workload, again from its beginning where more have to run at once."""
        return max(len(self.items), load.concurrency or 0)

    def variants(self) -> dict[str, Options]:
        """By name, plain decoding first."""
        fixed = {f"k = {k}": {"num_speculative_tokens": k, "method": self.method} for k in self.lengths}
        return {
            PLAIN: {"num_speculative_tokens": 0},
            **fixed,
            AUTO: {"num_speculative_tokens": "auto", "method": self.method},
        }


def check(settings: Settings) -> None:
    """Raises InvalidArgument for what cannot be measured."""
    for name, values, least, note in (
        ("--concurrency", settings.concurrency, 1, ""),
        ("--num-speculative-tokens", settings.lengths, 1, "; plain decoding is always measured"),
    ):
        for value in values:
            if value < least:
                raise InvalidArgument(name, value, f"at least {least}{note}")
    for rate in settings.rates:
        if not 0.0 < rate < float("inf"):
            raise InvalidArgument("--rate", rate, "requests a second, more than 0")
    if settings.method not in METHODS:
        raise InvalidArgument("--method", settings.method, "auto, draft_model or ngram")
    if not settings.concurrency and not settings.rates:
        raise InvalidArgument("--concurrency", "nothing", "at least one number, or a --rate")


def running_models(compare: str | None) -> tuple[Mapping[str, Any], Mapping[str, Any] | None] | None:
    """Model settings of what `specwire up` started here, for a comparison by that name. Raises InvalidArgument."""
    if compare is None:
        return None
    if compare != "hf":
        raise InvalidArgument("--compare", compare, "hf")
    found = {}
    for name in ("target-0", "draft-0"):
        path = state.folder().configs / f"{name}.yaml"
        if path.is_file():
            found[name] = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
    if "target-0" not in found:
        raise InvalidArgument(
            "--compare", compare, "used where `specwire up` started the service: its models are compared"
        )
    if found["target-0"]["model"] == TABLE:
        raise InvalidArgument("--compare", compare, "used with a model of weights; this target is a table")
    return found["target-0"], found.get("draft-0")


async def measure(address: str, settings: Settings, console: Console) -> dict[str, Any]:
    """Runs everything; returns the report. Raises what the service answers."""
    variants, where = settings.variants(), loads(settings.concurrency, settings.rates)
    passes: dict[Load, dict[str, list[Pass]]] = {load: {} for load in where}
    other = HuggingFace(*settings.models) if settings.models is not None else None
    items = {load: list(itertools.islice(itertools.cycle(settings.items), settings.requests(load))) for load in where}
    names = {load: [*variants, *(other.variants if other and load.concurrency == 1 else ())] for load in where}
    warm_up = Item("warm-up", settings.items[0].prompt, 8)
    async with Client(address) as client:
        stats = await client.stats()
        most = stats.max_running + stats.max_waiting
        if too_many := [n for n in settings.concurrency if n > most]:
            raise InvalidArgument("--concurrency", too_many[0], f"at most {most}, which the service runs and lets wait")
        try:
            if other is not None:
                with console.status("transformers loads the models"):
                    await other.start()
                for name in other.variants:
                    await other.ask(name, warm_up)
            for options in variants.values():
                await ask(client, warm_up, options)
            total = sum(len(names[load]) * len(items[load]) for load in where) * settings.repeats
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("requests", total=total)
                for load in where:
                    for repeat in range(settings.repeats):
                        for name in names[load] if repeat % 2 == 0 else reversed(names[load]):
                            progress.update(task, description=f"{load}, {name}")
                            if name in variants:
                                done = await run(
                                    *(client, name, variants[name], load, items[load]),
                                    lambda: progress.advance(task),
                                    seed=repeat,
                                )
                            else:
                                assert other is not None
                                done = await run_alone(name, other, load, items[load], lambda: progress.advance(task))
                            passes[load].setdefault(name, []).append(done)
        finally:
            if other is not None:
                await other.stop()
        memory, lost = resident(stats), lost_workers(stats, await client.stats())
    points = [point(here[name], here[PLAIN]) for load, here in passes.items() for name in names[load]]
    return {
        "specwire": __version__,
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "processor": platform.machine()},
        "workers": [
            {
                "name": worker.name,
                "model": worker.info.model,
                "device": worker.info.device,
                "precision": worker.info.precision,
                **({"resident_mb": memory[worker.name]} if worker.name in memory else {}),
            }
            for worker in stats.workers
        ],
        "settings": {
            "items": [asdict(item) for item in settings.items],
            "method": settings.method,
            "repeats": settings.repeats,
            "temperature": 0.0,
        },
        "points": points,
        "lost": lost,
        "advice": advice(points, lost),
        "comparisons": [each for here in passes.values() for each in comparisons(here)],
    }


def lost_workers(before: Any, after: Any) -> list[str]:
    """Workers that are not there any more, or that are other processes or on other streams than before."""
    now = {
        worker.name: (worker.info.incarnation, worker.connects) for worker in after.workers if worker.state == "ready"
    }
    return [each.name for each in before.workers if now.get(each.name) != (each.info.incarnation, each.connects)]


def resident(stats: Any) -> dict[str, float]:
    """Memory of the workers that run on this machine, in megabytes."""
    found = {}
    for worker in stats.workers:
        host, _, process = worker.info.node.rpartition(":")
        if host == platform.node() and process.isdecimal() and psutil.pid_exists(int(process)):
            found[worker.name] = psutil.Process(int(process)).memory_info().rss / 1e6
    return found


def bench(address: str, settings: Settings, output: Path | None, console: Console, progress: Console) -> dict[str, Any]:
    """Measures, prints to `console`, and writes `report.json`, `report.md` and plots into `output`. `progress`: where bars go."""
    check(settings)
    if output is not None:
        prepare(output)  # before an hour of measuring, not after
    try:
        report = asyncio.run(measure(address, settings, progress))
    except Unavailable as error:
        raise ready.explained(error, address) from None
    console.print(page.table(report))
    for each in report["advice"]:
        console.print(page.recommendation(each), soft_wrap=True)
    for each in report["comparisons"]:
        console.print(page.comparison(each), soft_wrap=True)
    if output is not None:
        (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        plots = page.plots(report, output)
        (output / "report.md").write_text(page.markdown(report, plots), encoding="utf-8")
        progress.print(f"written: {output / 'report.md'}" + ("" if plots else " (plots need matplotlib)"))
    return report


def prepare(output: Path) -> None:
    """Makes the folder, and sees that something can be written there. Raises InvalidArgument."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise InvalidArgument("--output", str(output), f"a folder that can be written ({error.strerror})") from None
