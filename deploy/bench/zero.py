"""What a draft that is of no use costs: a service whose controller decodes plainly against one that has no draft at all.

    python -m deploy.bench.zero

Law. Both services run the demo target on the same machine, one at work at a time; the draft is the demo's with its tokens renamed,
so that it works as long and guesses nothing. For each prompt the variants run one after the other, in turn from the front and from
the back. A token's time is that of an answer's tokens after the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deploy import models, topology
from deploy.bench import tool, workload
from deploy.bench.passes import Record, ask
from deploy.bench.statistics import bootstrap, median_ratio, shown
from deploy.experiment.rig import rig
from specwire.client import Client
from specwire.law.errors import InvalidArgument, OurFault

NONE, ZERO, AUTO = "no draft", "zero asked for", "auto"
VARIANTS: dict[str, dict[str, Any]] = {
    NONE: {"num_speculative_tokens": 0},
    ZERO: {"num_speculative_tokens": 0},
    AUTO: {"num_speculative_tokens": "auto", "method": "draft_model"},
}
_COLUMNS = "d2t"


def useless_draft(draft: Path, folder: Path) -> Path:
    """A copy of a draft of reduced vocabulary that takes as long and means other tokens. Raises InvalidArgument for drafts that
    have no map of their tokens, or too many of them to be named otherwise."""
    made = folder / "useless"
    shutil.copytree(draft, made)
    weights = made / "model.safetensors"
    with weights.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        if _COLUMNS not in header or header[_COLUMNS]["dtype"] != "I64":
            raise InvalidArgument("draft", str(draft), f"a checkpoint with a 64-bit {_COLUMNS}")
        begin, end = header[_COLUMNS]["data_offsets"]
        count = (end - begin) // 8
        file.seek(8 + size + begin)
        kept = np.frombuffer(file.read(end - begin), dtype="<i8") + np.arange(count)
        others = np.setdiff1d(np.arange(json.loads((draft / "config.json").read_text())["vocab_size"]), kept)[:count]
        if len(others) < count:
            raise InvalidArgument("draft", str(draft), "one that knows at most half of the vocabulary")
        file.seek(8 + size + begin)
        file.write((others - np.arange(count)).astype("<i8").tobytes())
    return made


async def measure(addresses: dict[str, str], items: Sequence[workload.Item], progress: Progress) -> dict[str, Any]:
    """Every prompt by every variant."""
    runs: dict[str, list[Record]] = {name: [] for name in VARIANTS}
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(address)) for name, address in addresses.items()}
        for name, client in clients.items():  # and the controller learns that this draft is no good
            for item in items[:4]:
                await ask(client, item, VARIANTS[name])
        task = progress.add_task("prompts", total=len(items))
        for turn, item in enumerate(items):
            for name in VARIANTS if turn % 2 == 0 else reversed(VARIANTS):
                runs[name].append(await ask(clients[name], item, VARIANTS[name]))
            progress.advance(task)
    return summary(runs)


def summary(runs: dict[str, list[Record]]) -> dict[str, Any]:
    """Each variant against the service without a draft."""
    found: dict[str, Any] = {}
    for name in (ZERO, AUTO):
        both = zip(runs[name], runs[NONE], strict=True)
        pairs = [(mine.tpot_s, other.tpot_s) for mine, other in both if mine.tpot_s and other.tpot_s]
        if not pairs:
            raise OurFault("no prompt was answered with more than one token by both")
        finals = [record.final.speculation for record in runs[name] if record.final is not None]
        found[name] = {
            "token_ms": 1e3 * statistics.median(mine for mine, _ in pairs),
            "without_ms": 1e3 * statistics.median(other for _, other in pairs),
            "ratio": bootstrap(pairs, median_ratio).plain(),
            "difference_ms": 1e3 * statistics.median(mine - other for mine, other in pairs),
            "rounds_with_a_block": sum(each.drafts for each in finals) / sum(each.rounds for each in finals),
            "differing": sum(mine.ids != other.ids for mine, other in zip(runs[name], runs[NONE], strict=True)),
        }
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """As a table."""
    columns = (
        "variant",
        "a token, ms",
        "without a draft",
        "ratio",
        "difference, ms",
        "rounds with a block",
        "differing",
    )
    table = Table(*columns, title="A draft of no use against none")
    for name, each in found.items():
        table.add_row(
            name,
            f"{each['token_ms']:.2f}",
            f"{each['without_ms']:.2f}",
            shown(each["ratio"], 3),
            f"{each['difference_ms']:+.2f}",
            f"{100 * each['rounds_with_a_block']:.1f} %",
            str(each["differing"]),
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = tool.parser("deploy.bench.zero", __doc__, " Takes some minutes.")
    parser.add_argument("--prompts", help="JSONL with prompts; the shipped workloads if left out")
    parser.add_argument("--count", type=int, default=10, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    count, tokens = tool.count("--count", args.count), tool.count("--max-tokens", args.max_tokens, 2)
    output = tool.writable("--json", args.json)
    items = workload.load([args.prompts] if args.prompts else workload.SHIPPED, tokens)[:count]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specwire-")))
        draft = useless_draft(Path(models.resolve("demo-draft")), folder)
        plan = topology.load()
        assert plan.draft is not None
        plan = plan.model_copy(update={"draft": plan.draft.model_copy(update={"model": str(draft)})})
        with console.status("starting"):
            without = stack.enter_context(rig(topology.load(Path("plain"))))
            useless = stack.enter_context(rig(plan))
        addresses = {NONE: without.address, ZERO: useless.address, AUTO: useless.address}
        progress = stack.enter_context(Progress(console=console))
        found = asyncio.run(measure(addresses, items, progress))
    show(found, console)
    tool.save(output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
