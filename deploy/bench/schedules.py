"""What schedules bring, against their formulas and against each other, on pairs whose speed is set.

    python -m deploy.bench.schedules

Law. Each world starts one service per schedule at once; passes are interleaved, in turn from the front and from the back. What a
block and a step take is what the engines say of them; what the ways and the service add is measured with one session alone. A
session's round lies between two turns of its group. Answers of all schedules are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from coordinator.schedule import ahead_us, rotation_us
from deploy.bench import tool
from deploy.bench.set_speed import Pair, Speeds, Told, mean, sessions_at_once
from deploy.bench.statistics import bootstrap, median_ratio, shown
from deploy.experiment.rig import rig
from specwire.client import Client

SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, slots=True)
class World:
    """One comparison."""

    name: str
    pair: Pair
    sessions: int
    k: int
    groups: tuple[int, ...] = ()
    """Rotations to try."""
    ahead: bool = False
    draft_round_trip_ms: float = 0.0

    def schedules(self) -> dict[str, dict[str, Any]]:
        """Settings by name."""
        found: dict[str, dict[str, Any]] = {SYNCHRONOUS: {"schedule": "synchronous"}}
        for groups in self.groups:
            found[f"rotation of {groups}"] = {"schedule": "rotation", "rotation_groups": groups}
        if self.ahead:
            found["run-ahead"] = {"schedule": "run_ahead"}
        return found


_STEEP, _DRAFT = Speeds(10.0, 1.5), Speeds(2.5, 0.5)
WORLDS = (
    World("target is the bottleneck", Pair(_STEEP, _DRAFT, 0.8), 8, 4, groups=(2,)),
    World("draft is the bottleneck", Pair(Speeds(10.0, 1.0), Speeds(1.5, 1.5), 0.8), 9, 4, groups=(2, 3)),
    World("the way is the bottleneck", Pair(_STEEP, _DRAFT, 0.8), 9, 4, groups=(2, 3), draft_round_trip_ms=100.0),
    World("one request, d = v / 5, acceptance 0.9", Pair(Speeds(20.0), Speeds(4.0), 0.9), 1, 4, ahead=True),
    World("one request, d = v / 10, acceptance 0.8", Pair(Speeds(20.0), Speeds(2.0), 0.8), 1, 4, ahead=True),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """The passes of one schedule in one world."""

    passes: list[Told]
    hit: float
    """Of blocks drafted ahead, the share that was right."""


def _groups(schedule: str) -> int:
    return int(schedule.rpartition(" ")[2]) if schedule.startswith("rotation") else 1


def way_ms(alone: Told) -> float:
    """r_d + r_t and all else that a round takes beside its two computations, as one session alone sees it."""
    return mean(
        [
            (each.total_us - each.draft_compute_us - each.target_compute_us) / 1e3
            for each in alone.rounds()
            if each.drafted
        ]
    )


def formula_ms(world: World, schedule: str, seen: Seen, ways: float) -> float:
    """A session's round, by what a block and a step took the engines in these passes and by the ways that were measured."""
    rounds = [each for told in seen.passes for each in told.rounds() if each.drafted == world.k]
    verify = mean([each.target_compute_us for each in rounds]) / 1e3
    if schedule == "run-ahead":  # most of a draft's time is hidden there: it is as set
        whole = mean([each.accepted == each.drafted for each in rounds])
        token = world.pair.draft.ms(1)
        return ahead_us(whole, min(whole, seen.hit), world.k, token, ways / 2, verify, ways / 2)
    return rotation_us(_groups(schedule), mean([each.draft_compute_us for each in rounds]) / 1e3, ways, verify)


def measure(world: World, pairs: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one world."""
    with contextlib.ExitStack() as stack:
        addresses = {}
        for name, settings in world.schedules().items():
            say(f"{world.name}: {name} starts")
            topology = world.pair.topology(world.sessions, num_speculative_tokens=world.k, **settings)
            up = stack.enter_context(rig(topology, ["draft-0"] if world.draft_round_trip_ms else []))
            for relay in up.relays.values():
                relay.set_round_trip(world.draft_round_trip_ms)
            addresses[name] = up.address
        passes, guesses, alone = asyncio.run(_passes(world, addresses, pairs, say))
    return evaluate(world, passes, guesses, way_ms(alone))


async def _passes(
    world: World, addresses: Mapping[str, str], pairs: int, say: Callable[[str], None]
) -> tuple[dict[str, list[Told]], dict[str, dict[str, int]], Told]:
    """By schedule: what was seen, and what became of blocks drafted ahead. And what one session alone saw."""
    names = list(addresses)
    passes: dict[str, list[Told]] = {name: [] for name in names}
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(address)) for name, address in addresses.items()}
        for client in clients.values():
            await sessions_at_once(client, world.sessions, 16)
        alone = await sessions_at_once(clients[SYNCHRONOUS], 1, world.pair.max_tokens)
        before = {name: dict((await client.stats()).draft_guesses) for name, client in clients.items()}
        for turn in range(pairs):
            for name in names if turn % 2 == 0 else reversed(names):
                say(f"{world.name}: {name}, pass {turn + 1} of {pairs}")
                passes[name].append(await sessions_at_once(clients[name], world.sessions, world.pair.max_tokens))
        after = {name: dict((await client.stats()).draft_guesses) for name, client in clients.items()}
        guesses = {
            name: {result: count - before[name].get(result, 0) for result, count in after[name].items()}
            for name in names
        }
        return passes, guesses, alone


def evaluate(
    world: World, passes: Mapping[str, list[Told]], guesses: Mapping[str, Mapping[str, int]], ways: float
) -> dict[str, Any]:
    """Measured against the formulas, and against the synchronous schedule."""
    names = list(passes)
    found = {}
    reference = passes[SYNCHRONOUS]
    for name in names:
        told = guesses[name]
        seen = Seen(passes[name], told.get("hit", 0) / max(1, sum(told.values())))
        rounds = [each.total_us for told in seen.passes for each in told.rounds() if each.drafted == world.k]
        measured, formula = mean(rounds) / 1e3, formula_ms(world, name, seen, ways)
        pairs_of = [(mine.tokens_per_s, other.tokens_per_s) for mine, other in zip(seen.passes, reference, strict=True)]
        found[name] = {
            "round_ms": measured,
            "formula_ms": formula,
            "of_formula": measured / formula,
            "hit": seen.hit if told else None,
            "against_synchronous": bootstrap(pairs_of, median_ratio).plain(),
            "differing": sum(mine.ids != other.ids for mine, other in zip(passes[name], reference, strict=True)),
        }
    return {"world": world.name, "sessions": world.sessions, "k": world.k, "ways_ms": ways, "schedules": found}


def show(results: list[dict[str, Any]], console: Console) -> None:
    """As a table."""
    columns = (
        "world",
        "schedule",
        "round ms",
        "formula",
        "measured / formula",
        "tokens/s against synchronous",
        "differing",
    )
    table = Table(*columns, title="Schedules, set speeds")
    for result in results:
        for name, each in result["schedules"].items():
            ratio = each["against_synchronous"]
            table.add_row(
                result["world"] if name == SYNCHRONOUS else "",
                name + (f", {100 * each['hit']:.0f} % hits" if each["hit"] is not None else ""),
                f"{each['round_ms']:.1f}",
                f"{each['formula_ms']:.1f}",
                f"{each['of_formula']:.3f}",
                shown(ratio),
                str(each["differing"]),
            )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    listed = "; ".join(f"{number} {world.name}" for number, world in enumerate(WORLDS, start=1))
    everyone = ",".join(str(number) for number in range(1, len(WORLDS) + 1))
    parser = tool.parser("deploy.bench.schedules", __doc__, " A world takes a minute.")
    parser.add_argument("--pairs", type=int, default=5, help="passes of each schedule in each world")
    parser.add_argument("--worlds", default=everyone, help=f"with commas: {listed}")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    chosen = tool.chosen("--worlds", args.worlds, WORLDS)
    pairs, output = tool.count("--pairs", args.pairs), tool.writable("--json", args.json)
    with console.status("starting") as status:
        results = [measure(world, pairs, status.update) for world in chosen]
    show(results, console)
    tool.save(output, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
