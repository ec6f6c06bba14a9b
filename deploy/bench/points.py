"""The simulator against the service: ten points, on pairs whose speed is set.

    python -m deploy.bench.points

Law. What models and links do is set; what the service adds to it (a step's own time beyond the set one, the ways, what each answer
costs the coordinator) is measured beforehand, by plain decoding and with one session alone, and given to the simulator. No point is
among these, and nothing is fitted to a point. Rates are those of rounds, without the first and last ones of an answer;
where some answers end before others, the last rounds of these have less company than the simulator gives them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from coordinator.schedule import Choice
from deploy.bench import tool
from deploy.bench.set_speed import Pair, Speeds, Told, sessions_at_once
from deploy.experiment.rig import Rig, rig
from deploy.experiment.runs import simulate
from deploy.experiment.world import Steps, World
from specwire.client import Client

PAIR = Pair(Speeds(20.0, 0.5), Speeds(2.0, 0.1), 0.7)
WORKERS = ("draft-0", "target-0")
_ANSWERS = 16
"""To a point at least, each to a prompt of its own: what is accepted differs from text to text."""
_MANY = 16
"""Sessions of the pass that tells what an answer costs the coordinator."""


@dataclass(frozen=True, slots=True)
class Point:
    """One service under one load."""

    sessions: int
    k: int | None
    """None: auto."""
    schedule: Choice = "synchronous"
    groups: int = 2
    draft_ms: float = 0.0
    """Round trip that the relay adds."""
    target_ms: float = 0.0

    def __str__(self) -> str:
        block = "k auto" if self.k is None else f"k={self.k}" if self.k else "plain"
        schedule = f"rotation of {self.groups}" if self.schedule == "rotation" else self.schedule.replace("_", "-")
        links = [f"{name} link {ms:g} ms" for name, ms in (("draft", self.draft_ms), ("target", self.target_ms)) if ms]
        return ", ".join([f"{self.sessions} at once", block, *([schedule] if self.k != 0 else []), *links])

    def speculation(self) -> dict[str, Any]:
        """The coordinator's settings."""
        block: int | str = "auto" if self.k is None else self.k
        return {"num_speculative_tokens": block, "schedule": self.schedule, "rotation_groups": self.groups}


POINTS = (
    Point(8, 0, target_ms=20.0),
    Point(1, 4),
    Point(1, 4, "run_ahead"),
    Point(1, 8, draft_ms=20.0),
    Point(8, 4),
    Point(8, 4, "rotation", 2),
    Point(9, 4, "rotation", 3, draft_ms=40.0),
    Point(1, None, "auto", draft_ms=20.0),
    Point(8, None, "auto", draft_ms=5.0),
    Point(16, None, "auto", target_ms=20.0),
)


@dataclass(frozen=True, slots=True)
class Adds:
    """What the service adds to what is set. Microseconds."""

    target_step: float
    draft_step: float
    ways: float
    """Of a round with a block: both ways together, without what the coordinator does for an answer."""
    answer: float
    """What each answer costs the coordinator."""


def rate(told: Sequence[Told]) -> float:
    """Tokens per second of all sessions together, by their rounds."""
    rounds = [each for one in told for each in one.rounds()]
    sessions = len(told[0].ids)
    committed, total_us = sum(each.committed for each in rounds), sum(each.total_us for each in rounds)
    return float(sessions * 1e6 * committed / total_us)


def adds(pair: Pair, alone: Told, plain: Told, many: Told) -> Adds:
    """From one session with blocks, one that decodes plainly, and many that do."""
    blocks, single, crowd = (list(told.rounds()) for told in (alone, plain, many))
    blocks = [each for each in blocks if each.drafted]

    def around(rounds: Sequence[Any]) -> float:
        return statistics.fmean(each.total_us - each.draft_compute_us - each.target_compute_us for each in rounds)

    answer = max(0.0, (around(crowd) - around(single)) / (len(many.ids) - 1))
    target = statistics.fmean(each.target_compute_us - 1e3 * pair.target.ms(each.step_rows) for each in blocks)
    draft = statistics.fmean(each.draft_compute_us / each.drafted - 1e3 * pair.draft.ms(1) for each in blocks)
    return Adds(target, draft, max(0.0, around(blocks) - 2 * answer), answer)


def world(point: Point, pair: Pair, adds: Adds) -> World:
    """The point on paper."""
    return World(
        target=Steps.line(1e3 * pair.target.ms(1) + adds.target_step, 1e3 * pair.target.row),
        draft=Steps.line(1e3 * pair.draft.ms(1) + adds.draft_step, 1e3 * pair.draft.row),
        draft_link_us=1e3 * point.draft_ms + adds.ways / 2,
        target_link_us=1e3 * point.target_ms + adds.ways / 2,
        coordinator_answer_us=adds.answer,
        acceptance=pair.acceptance,
        jitter=0.02,
        sessions=point.sessions,
        answer_tokens=pair.max_tokens,
        k=point.k,
        schedule=point.schedule,
        groups=point.groups,
    )


async def _calibrate(up: Rig) -> Adds:
    async with Client(up.address) as client:
        tokens = PAIR.max_tokens
        await sessions_at_once(client, _MANY, 16)
        plain = await sessions_at_once(client, 1, tokens, num_speculative_tokens=0)
        many = await sessions_at_once(client, _MANY, tokens, num_speculative_tokens=0)
        alone = await sessions_at_once(client, 1, tokens, num_speculative_tokens=2)
    return adds(PAIR, alone, plain, many)


async def _passes(up: Rig, point: Point, passes: int) -> list[Told]:
    async with Client(up.address) as client:
        for _ in range(3 if point.k is None else 1):  # what the controller learns is not what is looked at
            await sessions_at_once(client, point.sessions, PAIR.max_tokens)
        firsts = range(0, max(passes * point.sessions, _ANSWERS), point.sessions)
        return [await sessions_at_once(client, point.sessions, PAIR.max_tokens, first=first) for first in firsts]


def measure(points: Sequence[Point], passes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All of them, one service after the other."""
    say("what the service adds")
    with rig(PAIR.topology(_MANY, schedule="synchronous"), WORKERS) as up:
        extra = asyncio.run(_calibrate(up))
    found = []
    for number, point in enumerate(points, start=1):
        say(f"point {number} of {len(points)}: {point}")
        with rig(PAIR.topology(point.sessions, **point.speculation()), WORKERS) as up:
            for name, ms in zip(WORKERS, (point.draft_ms, point.target_ms), strict=True):
                up.relays[name].set_round_trip(ms)
            told = asyncio.run(_passes(up, point, passes))
        simulated = simulate(world(point, PAIR, extra)).tokens_per_s
        rates = [rate([one]) for one in told]
        found.append(
            {
                "point": str(point),
                "tokens_per_s": rate(told),
                "least": min(rates),
                "most": max(rates),
                "simulated": simulated,
                "ratio": rate(told) / simulated,
            }
        )
    return {"adds_us": dataclasses.asdict(extra), "points": found}


def show(found: dict[str, Any], console: Console) -> None:
    """As a table."""
    extra = found["adds_us"]
    title = (
        f"Measured over simulated. The service adds to a target's step {extra['target_step'] / 1e3:.2f} ms, to a draft's "
        f"{extra['draft_step'] / 1e3:.2f}, ways {extra['ways'] / 1e3:.2f}, the coordinator {extra['answer'] / 1e3:.2f} an answer"
    )
    table = Table("point", "tokens/s", "simulated", "ratio", title=title)
    for each in found["points"]:
        spread = f"{each['tokens_per_s']:.1f} ({each['least']:.1f} to {each['most']:.1f})"
        table.add_row(each["point"], spread, f"{each['simulated']:.1f}", f"{each['ratio']:.3f}")
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    listed = "; ".join(f"{number} {point}" for number, point in enumerate(POINTS, start=1))
    parser = tool.parser("deploy.bench.points", __doc__, " All points take some minutes.")
    everyone = ",".join(str(number) for number in range(1, len(POINTS) + 1))
    parser.add_argument(
        "--passes", type=int, default=3, help=f"of each point; more where sessions are few, for {_ANSWERS} answers"
    )
    parser.add_argument("--points", default=everyone, help=f"with commas: {listed}")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    points = tool.chosen("--points", args.points, POINTS)
    passes, output = tool.count("--passes", args.passes), tool.writable("--json", args.json)
    with console.status("starting") as status:
        found = measure(points, passes, status.update)
    show(found, console)
    tool.save(output, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
