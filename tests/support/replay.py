"""A speculative service on paper: rounds with known costs and a known acceptance, for judging the controller's choices.

Times are microseconds. Chance comes from a seeded generator; nothing sleeps.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.ledger import WARM_TOKENS
from coordinator.lookup import NgramGuess
from coordinator.window import RequestWindow, Room, ServiceCurves
from specwire.law.tasks import StepTiming
from specwire.law.values import Source
from specwire.wire.stopwatch import Passage

STEEP = {1: 37_000, 2: 45_000, 5: 80_000, 9: 140_000}
"""A CPU on which every row costs: rows -> microseconds."""
FLAT = {1: 37_000, 2: 40_000, 5: 46_000, 9: 51_000}
"""A device that hardly notices them."""


def step_us(shape: dict[int, int], rows: float) -> float:
    """Linear between and beyond the measured points."""
    points = sorted(shape.items())
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if rows <= x1 or (x1, y1) == points[-1]:
            return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)
    raise AssertionError


def way(compute_us: float, link_us: float) -> Passage:
    """A task's way with nothing but compute and link."""
    return Passage(wait_us=0, transfer_us=round(link_us), queue_us=0, compute_us=round(compute_us), overhead_us=0)


@dataclass
class World:
    """What is true. The controller sees it only through rounds and profiles."""

    shape: dict[int, int] = field(default_factory=lambda: dict(FLAT))
    acceptance: Callable[[int], float] = lambda position: 0.7
    """Chance that the token at a position of the block (from 0) stands, given that all before it do."""
    draft_us: float = 5_000
    draft_link_us: float = 0
    target_link_us: float = 1_000
    sessions: int = 1
    noise: float = 0.05
    """Step times vary by so much up or down."""
    read_us: float | None = None
    """What a draft that is far behind takes to read a token, beside the target. None: it never falls behind."""
    prompt_us: float = 0
    """What the target takes to read a token of the prompt."""

    def plain_us(self) -> float:
        """A plain round."""
        return step_us(self.shape, self.sessions) + self.target_link_us

    def round_us(self, k: int) -> float:
        """A round with a draft's block, every session doing the same."""
        if k == 0:
            return self.plain_us()
        verify = step_us(self.shape, self.sessions * (k + 1)) + self.target_link_us
        return k * self.draft_us + self.draft_link_us + verify

    def best_fixed(self, longest: int) -> tuple[float, int]:
        """Microseconds per token, and block length, of the best choice in hindsight."""
        return min((self.round_us(k) / self.tokens(k), k) for k in range(longest + 1))

    def tokens(self, k: int) -> float:
        """Expected tokens of a round with a draft's block."""
        expected = chance = 1.0
        for position in range(k):
            chance *= self.acceptance(position)
            expected += chance
        return expected

    def profiles(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What target and draft say of themselves at start."""
        return tuple(round(step_us(self.shape, 1 << n)) for n in range(5)), (round(self.draft_us),) * 5


class Replay:
    """One request after another through one controller."""

    def __init__(self, world: World, seed: int = 0, *, profiled: bool = True) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.curves = ServiceCurves()
        if profiled:
            target, draft = world.profiles()
            self.curves.target_profile(target)
            self.curves.draft_profile(draft)
        self.lengths: list[int] = []
        """Block length of every round so far."""
        self.behind = 0
        """Tokens that the draft has not read."""
        self._unread = 0
        """Tokens of the prompt that the target has not read."""
        self.expected_us = self.expected_tokens = 0.0
        """What the choices so far cost and bring on average: their worth without their luck."""
        self._step = 0

    def request(self, tokens: int, longest: int = 8, window: RequestWindow | None = None, prompt: int = 0) -> float:
        """Generates so many tokens, after a prompt of so many; returns the microseconds it took."""
        window = window or self.curves.request(None, longest)
        self.behind = self._unread = prompt
        total, left = 0.0, tokens
        while left > 0:
            us, committed = self.round(window, min(longest, left - 1))
            total += us
            left -= committed
        return total

    def us_per_token(self) -> float:
        """Of the choices so far, luck left out."""
        return self.expected_us / self.expected_tokens

    def round(
        self, window: RequestWindow, longest: int, guess: NgramGuess | None = None, hit: float = 0.0
    ) -> tuple[float, int]:
        """One round: its microseconds and committed tokens. `hit`: chance of each token of the guess."""
        world = self.world
        ready = world.read_us is None or self.behind <= WARM_TOKENS
        plan = window.plan(Room(longest, longest if ready else 0, guess, world.sessions)) if longest > 0 else None
        k = plan.num_tokens if plan else 0
        if (
            longest > 0
            and not ready
            and window.worth_reading(Room(longest, longest, None, world.sessions), self.behind)
        ):
            assert world.read_us is not None
            us = round(self.behind * world.read_us)
            self.curves.observe_read(StepTiming(compute_us=us, prefill_rows=self.behind, sessions=1))
            self.behind = 0
        source = plan.source if plan else Source.NONE
        self.lengths.append(k)
        self.expected_us += world.round_us(k)
        self.expected_tokens += world.tokens(k)
        accepted = 0
        while accepted < k and self.random.random() < (hit if source is Source.NGRAM else world.acceptance(accepted)):
            accepted += 1
        rows = world.sessions * (k + 1)
        verify = step_us(world.shape, rows) * self._jitter()
        prompt, self._unread = self._unread, 0
        target_way = way(verify + prompt * world.prompt_us, world.target_link_us)
        draft_way = None
        if source is Source.DRAFT_MODEL:
            draft_way = way(k * world.draft_us * self._jitter(), world.draft_link_us * self._jitter())
            self.curves.observe_draft(k, draft_way)
        self._step += 1
        step = StepTiming(compute_us=target_way.compute_us, rows=rows, prefill_rows=prompt, step=self._step)
        self.curves.observe_verify(source, step, target_way)
        window.observe(source, k, accepted, draft_way, target_way, first=prompt > 0)
        self.behind = 1 if source is Source.DRAFT_MODEL else self.behind + accepted + 1
        return target_way.total_us + (draft_way.total_us if draft_way else 0), accepted + 1

    def _jitter(self) -> float:
        return 1.0 + self.world.noise * (2.0 * self.random.random() - 1.0)
