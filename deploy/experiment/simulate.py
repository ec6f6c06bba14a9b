"""What N sessions, this draft, this target and these links would do: the service in virtual time, without models or machines.

    python -m deploy.experiment.simulate --sessions 1,16,64 --target-us 20000 --target-row-us 500 --draft-us 2000 \
        --draft-link-us 500,20000 --acceptance 0.7

Law. The controller, the schedules, what goes into a step and when an engine lingers are the product's own code; only models, links
and clocks are of paper. Nothing sleeps and chance is seeded, so a run can be repeated. A run is measured once it is warm.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.bench import tool
from deploy.experiment.meter import Results
from deploy.experiment.runs import Compared, Fixed, best_fixed, compare, fix, simulate
from deploy.experiment.world import CHOICES, Acceptance, Steps, World
from specwire.law.errors import InvalidArgument

_OPTIONS = {"target": "--target-us", "draft": "--draft-us", "linger": "--no-linger", "profiled": "--no-profile"}
"""Settings whose option is called otherwise."""
_WIDE = 180
"""Columns where nobody looks at a terminal."""

__all__ = ["Compared", "Fixed", "Results", "Steps", "World", "best_fixed", "compare", "fix", "simulate"]


def worlds(args: argparse.Namespace) -> Iterator[World]:
    """One for each combination of the lists that were given."""
    target = Steps.line(args.target_us, args.target_row_us)
    draft = Steps.line(args.draft_us, args.draft_session_us)
    acceptance: Acceptance = args.acceptance[0] if len(args.acceptance) == 1 else tuple(args.acceptance)
    same = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(World)
        if field.name not in ("target", "draft", "acceptance", "sessions", "draft_link_us", "target_link_us")
    }
    for sessions, draft_link_us, target_link_us in itertools.product(
        args.sessions, args.draft_link_us, args.target_link_us
    ):
        try:
            yield World(
                target=target,
                draft=draft,
                acceptance=acceptance,
                sessions=sessions,
                draft_link_us=draft_link_us,
                target_link_us=target_link_us,
                **same,
            )
        except InvalidArgument as error:
            raise InvalidArgument(_OPTIONS.get(error.field, option(error.field)), error.value, error.limit) from None


def option(field: str) -> str:
    """What a setting is called on the command line."""
    return f"--{field.replace('_', '-')}"


def table(found: Sequence[tuple[World, Results, Compared | None]]) -> Table:
    """A row a world. *a block*: tokens that a round brings; *rows*: of a step; *target*, *draft*: their share of time at work."""
    same = {
        name: f"{values.pop():g} ms"
        for name, values in (
            ("r_d", {world.draft_link_us / 1e3 for world, _, _ in found}),
            ("r_t", {world.target_link_us / 1e3 for world, _, _ in found}),
        )
        if len(values) == 1
    }
    made = Table(title=", ".join(["Simulated", *(f"{name} {value}" for name, value in same.items())]))
    rows = [_cells(*each) for each in found]
    for name in rows[0]:
        if name.removesuffix(", ms") not in same and any(cells[name] for cells in rows):
            made.add_column(name, justify="left" if name in ("schedule", "which is") else "right")
    for cells in rows:
        made.add_row(*(cells[str(column.header)] for column in made.columns))
    return made


def _cells(world: World, got: Results, against: Compared | None) -> dict[str, str]:
    """A row by column; a column that is empty in every row is left out."""
    return {
        "sessions": str(world.sessions),
        "r_d, ms": f"{world.draft_link_us / 1e3:g}",
        "r_t, ms": f"{world.target_link_us / 1e3:g}",
        "tokens/s": f"{got.tokens_per_s:.1f}",
        "token ms, p50": f"{got.token_p50_us / 1e3:.2f}",
        "p95": f"{got.token_p95_us / 1e3:.2f}",
        "a block": f"{got.acceptance_length:.2f}",
        "k": f"{got.k:.1f}",
        "rows": f"{got.step_rows:.1f}",
        "target": f"{100 * got.target_busy:.0f} %",
        "draft": f"{100 * got.draft_busy:.0f} %",
        "turn, ms": f"{got.period_us / 1e3:.1f}",
        "hits": f"{100 * got.hits / got.asked_ahead:.0f} %" if got.asked_ahead else "",
        "schedule": max(got.schedules, key=got.schedules.__getitem__),
        "of the best": f"{100 * against.ratio:.1f} %" if against else "",
        "which is": str(against.best) if against else "",
    }


def parser() -> argparse.ArgumentParser:
    """All options and what they mean."""
    made = argparse.ArgumentParser(
        "python -m deploy.experiment.simulate",
        description=f"{__doc__.partition(chr(10))[0]} Times are microseconds; links are round trips. Lists are separated by "
        "commas, and every combination is simulated.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    world = World()
    number = made.add_argument
    number("--sessions", default="1,4,16,64", help="list: sessions at work, each asking again at once")
    number(
        "--arrivals-per-s",
        type=float,
        default=0.0,
        help="requests a second, at random, instead; --sessions is the limit",
    )
    number("--target-us", type=float, default=20_000.0, help="the target's step of one row")
    number("--target-row-us", type=float, default=500.0, help="what each further row adds")
    number("--draft-us", type=float, default=2_000.0, help="the draft's step of one session: a token")
    number("--draft-session-us", type=float, default=0.0, help="what each further session in it adds")
    number("--acceptance", default="0.7", help="chance of a token; a list: by position, the last goes on")
    number("--draft-link-us", default="500", help="list: round trip to the draft")
    number("--target-link-us", default="500", help="list: round trip to the target")
    number("--coordinator-us", type=float, default=0.0, help="the coordinator's work for a frame that it receives")
    number("--coordinator-answer-us", type=float, default=0.0, help="the same for each answer in it")
    number("--schedule", choices=CHOICES, default="auto", help="how sessions share draft and target")
    number("--groups", type=int, default=world.groups, help="of a rotation that --schedule asks for")
    number("--k", default="auto", help="block length, 0 for plain decoding, or auto")
    number("--longest", type=int, default=world.longest, help="longest block")
    number("--answer-tokens", type=int, default=world.answer_tokens, help="tokens of an answer")
    number("--prompt-tokens", type=int, default=world.prompt_tokens, help="tokens of a prompt")
    number("--target-read-us", type=float, default=0.0, help="the target's time for a token that it only reads")
    number("--draft-read-us", type=float, default=0.0, help="the draft's")
    number("--stretch", type=float, default=1.0, help="times longer that steps take while draft and target both work")
    number("--targets", type=int, default=1, help="targets; a session stays with one")
    number("--drafts", type=int, default=1, help="drafts; the same")
    number("--token-budget", type=int, default=world.token_budget, help="rows of one step")
    number("--step-sessions", type=int, default=world.step_sessions, help="sessions of one step")
    number("--jitter", type=float, default=0.05, help="steps and ways vary by this part")
    number("--no-linger", dest="linger", action="store_false", help="the target never waits for company")
    number("--no-profile", dest="profiled", action="store_false", help="nothing was measured at start")
    number("--seed", type=int, default=0, help="of chance")
    number("--rounds", type=int, help="rounds of each session that are measured; enough if left out")
    number("--warm-up", type=int, help="rounds of each session before that; enough if left out")
    number("--best", action="store_true", help="compare with the best fixed length and schedule, tried one by one")
    number("--json", metavar="FILE", help="file for the numbers")
    return made


def _length(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise InvalidArgument("--k", text, "auto or a whole number of at least 0") from None


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for a setting that cannot be, 130 when interrupted."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    args = parser().parse_args(argv)
    args.sessions = [int(each) for each in tool.numbers("--sessions", args.sessions, 1, whole=True)]
    for field in ("acceptance", "draft_link_us", "target_link_us"):
        setattr(args, field, tool.numbers(option(field), getattr(args, field), 0))
    args.k = _length(args.k)
    for field, least in (("rounds", 1), ("warm_up", 0)):
        if (given := getattr(args, field)) is not None:
            tool.count(option(field), given, least)
    for field in ("target_us", "target_row_us", "draft_us", "draft_session_us"):
        if not 0 <= (us := getattr(args, field)) < math.inf:
            raise InvalidArgument(option(field), us, "finite and at least 0")
    if args.schedule == "rotation" and args.groups < 2:
        raise InvalidArgument("--groups", args.groups, "at least 2 with --schedule rotation")
    output = tool.writable("--json", args.json)
    run = {"seed": args.seed, "rounds": args.rounds, "warm_up": args.warm_up}
    found: list[tuple[World, Results, Compared | None]] = []
    for world in worlds(args):
        against = compare(world, **run) if args.best else None
        found.append((world, against.auto if against else simulate(world, **run), against))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table(found))
    if output is not None:
        output.write_text(json.dumps([report(*each) for each in found], indent=1))
    return 0


def report(world: World, results: Results, against: Compared | None) -> dict[str, Any]:
    """For JSON."""
    said: dict[str, Any] = {"world": dataclasses.asdict(world), "results": dataclasses.asdict(results)}
    if against is not None:
        said |= {"ratio": against.ratio, "best": str(against.best)}
        said["fixed"] = {str(each): each.results.tokens_per_s for each in against.fixed}
    return said


if __name__ == "__main__":
    sys.exit(main())
