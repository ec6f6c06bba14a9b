"""Speculation against plain decoding over links of known length: relays stand between the coordinator and its workers.

    python -m deploy.bench.links                # a pair of set speed, which waits and does not compute
    python -m deploy.bench.links --real         # the demo models

Law. Both variants ask the same service over the same links, in passes that run next to each other, in turn from the front and from
the back. What the controller learnt over one length of the link it has to unlearn over the next, so each length begins with passes
that do not count, as many as it takes to generate a few hundred tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy import topology
from deploy.bench import tool, workload
from deploy.bench.passes import Load, run
from deploy.bench.set_speed import Pair, Speeds, Told, sessions_at_once
from deploy.bench.statistics import bootstrap, median_ratio, shown
from deploy.experiment.relay import Relay
from deploy.experiment.rig import rig
from specwire.client import Client
from specwire.law.errors import InvalidArgument

PAIR = Pair(Speeds(20.0, 0.5), Speeds(2.0, 0.1), 0.7)
LINKS = {"draft": "draft-0", "target": "target-0"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "auto": {"num_speculative_tokens": "auto"},
}
Ask = Callable[[Client, int, dict[str, Any]], Any]


async def _table(client: Client, sessions: int, options: dict[str, Any]) -> Told:
    return await sessions_at_once(client, sessions, PAIR.max_tokens, **options)


def _real(path: str | None, count: int) -> Ask:
    """Prompts of a workload, in closed loop."""
    items = workload.load([path] if path else workload.SHIPPED)[:count]

    async def ask(client: Client, sessions: int, options: dict[str, Any]) -> Told:
        mine = list(itertools.islice(itertools.cycle(items), max(sessions, len(items))))
        done = await run(client, "", options, Load(concurrency=sessions), mine, lambda: None)
        finals = tuple(record.final for record in done.records if record.final is not None)
        return Told(done.wall_s, finals, tuple(record.ids for record in done.records))

    return ask


async def measure(
    address: str,
    relays: dict[str, Relay],
    ask: Ask,
    round_trips: Sequence[float],
    sessions: Sequence[int],
    pairs: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Each link at each length, at each number of sessions."""
    found = []
    async with Client(address) as client:
        for link, worker in LINKS.items():
            for trip, count in itertools.product(round_trips, sessions):
                if link == "target" and trip == 0:
                    continue  # the same as no relay on the other
                for each in relays.values():
                    each.set_round_trip(0.0)
                relays[worker].set_round_trip(trip)
                say(f"{link} link {trip:g} ms, {count} at once")
                for options in (VARIANTS["auto"], VARIANTS["plain"], VARIANTS["auto"]):
                    await ask(client, count, options)
                passes: dict[str, list[Told]] = {name: [] for name in VARIANTS}
                for turn in range(pairs):
                    for name in VARIANTS if turn % 2 == 0 else reversed(VARIANTS):
                        passes[name].append(await ask(client, count, VARIANTS[name]))
                found.append(point(link, trip, count, passes))
    return found


def point(link: str, trip: float, sessions: int, passes: dict[str, list[Told]]) -> dict[str, Any]:
    """One row."""
    both = list(zip(passes["auto"], passes["plain"], strict=True))
    blocks = [final.speculation for told in passes["auto"] for final in told.finals]
    rounds = sum(each.rounds for each in blocks)
    return {
        "link": link,
        "round_trip_ms": trip,
        "sessions": sessions,
        "against_plain": bootstrap([(a.tokens_per_s, p.tokens_per_s) for a, p in both], median_ratio).plain(),
        "plain_tokens_per_s": sum(p.tokens_per_s for _, p in both) / len(both),
        "drafted_per_round": sum(each.drafted for each in blocks) / max(1, rounds),
        "differing": sum(a.ids != p.ids for a, p in both),
    }


def show(found: Sequence[dict[str, Any]], console: Console, title: str) -> None:
    """As a table."""
    columns = ("link", "round trip", "at once", "auto against plain", "plain tokens/s", "drafted a round", "differing")
    table = Table(*columns, title=title)
    for each in found:
        ratio = each["against_plain"]
        table.add_row(
            each["link"],
            f"{each['round_trip_ms']:g} ms",
            str(each["sessions"]),
            shown(ratio),
            f"{each['plain_tokens_per_s']:.1f}",
            f"{each['drafted_per_round']:.1f}",
            str(each["differing"]),
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = tool.parser("deploy.bench.links", __doc__, " All points take a quarter of an hour.")
    parser.add_argument("--round-trips", default="0,1,5,20,80", help="milliseconds, with commas")
    parser.add_argument("--sessions", default="1,8", help="how many at once, with commas")
    parser.add_argument("--pairs", type=int, default=5, help="passes of each variant at each point")
    parser.add_argument("--real", action="store_true", help="the demo models instead of set speeds")
    parser.add_argument("--prompts", help="JSONL with prompts, for --real; the shipped workloads without")
    parser.add_argument("--count", type=int, default=4, help="prompts of a pass, for --real")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    sessions = [int(n) for n in tool.numbers("--sessions", args.sessions, 1, whole=True)]
    trips = tool.numbers("--round-trips", args.round_trips, 0)
    pairs, output = tool.count("--pairs", args.pairs), tool.writable("--json", args.json)
    if args.prompts is not None and not args.real:
        raise InvalidArgument("--prompts", args.prompts, "used with --real")
    tool.count("--count", args.count)
    plan = topology.load() if args.real else PAIR.topology(max(sessions))
    ask = _real(args.prompts, args.count) if args.real else _table
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("starting"))
        up = stack.enter_context(rig(plan, tuple(LINKS.values())))
        run_all = measure(up.address, dict(up.relays), ask, trips, sessions, pairs, status.update)
        found = asyncio.run(run_all)
    show(found, console, "Links, " + ("demo models" if args.real else "set speeds"))
    tool.save(output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
