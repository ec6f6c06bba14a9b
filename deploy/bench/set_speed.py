"""Pairs of table models with a set speed and a set acceptance, which wait and do not compute: a service whose d, v, t and
acceptance are known, on any machine.

The target follows a script; the draft leaves out a share of it, at places that depend on all of the text, so that its acceptance
at every position is one less that share.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.topology import Topology, parse
from specwire.client import Client, Final

VOCABULARY = 64
PROMPT = 4
_SEED = 11


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a step takes, in milliseconds."""

    step: float
    row: float = 0.0

    def ms(self, rows: float) -> float:
        """A step with so many rows."""
        return self.step + self.row * rows


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and a target."""

    target: Speeds
    draft: Speeds
    acceptance: float
    """Of every drafted token, given that all before it stand."""
    max_tokens: int = 96

    def topology(self, sessions: int, **speculation: Any) -> Topology:
        """As `specwire up` takes it. `speculation`: the coordinator's settings of that name."""
        dice = random.Random(_SEED)
        script = [dice.randrange(VOCABULARY) for _ in range(self.max_tokens + 64)]
        common = {"vocab_size": VOCABULARY, "seed": 1, "script": script, "script_at": PROMPT}
        common |= {"max_context": PROMPT + len(script)}

        def worker(speeds: Speeds, **table: Any) -> dict[str, Any]:
            return {
                "model": "table",
                "num_cpus": 0.1,
                "threads": 1,
                "max_sessions": max(2, sessions),
                "settings": {"max_step_sessions": max(2, sessions), "token_budget": max(512, 64 * sessions)},
                "table": common | {"step_ms": speeds.step, "row_ms": speeds.row} | table,
            }

        return parse(
            {
                "coordinator": {
                    "max_running": sessions,
                    "max_waiting": sessions,
                    "speculation": {"method": "draft_model", **speculation},
                },
                "target": worker(self.target),
                "draft": worker(self.draft, disagreement=1.0 - self.acceptance),
            }
        )


@dataclass(frozen=True, slots=True)
class Told:
    """What one pass of some sessions saw."""

    wall_s: float
    finals: tuple[Final, ...]
    ids: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together."""
        return sum(len(ids) for ids in self.ids) / self.wall_s

    def rounds(self) -> list[Any]:
        """Of all sessions, without the first ones, which read prompts, and the last ones, which may have blocks cut short."""
        return [each for final in self.finals for each in list(final.rounds)[2:-2]]


async def sessions_at_once(
    client: Client,
    count: int,
    max_tokens: int,
    progress: Callable[[], None] = lambda: None,
    first: int = 0,
    **options: Any,
) -> Told:
    """So many sessions that begin together, each with a prompt of its own. `first`: number of the first prompt, of 343."""
    finals: list[Final | None] = [None] * count
    texts: list[tuple[int, ...]] = [()] * count

    async def one(number: int) -> None:
        prompt = [1 + (first + number) // power % 7 for power in (1, 7, 49)] + [5]
        fields = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "return_rounds": True,
            "private_prompt": True,
            **options,
        }
        async for event in client.generate(prompt_ids=prompt, **fields):
            if isinstance(event, Final):
                finals[number] = event
            elif hasattr(event, "ids"):
                texts[number] += tuple(event.ids)
        progress()

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    wall_s = time.perf_counter() - begun
    return Told(wall_s, tuple(final for final in finals if final is not None), tuple(texts))


def mean(values: Sequence[float]) -> float:
    """0.0 of none."""
    return sum(values) / len(values) if values else 0.0
