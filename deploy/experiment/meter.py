"""What a simulated service did, once it was warm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.schedule import Schedule
from deploy.experiment.engines import Engine


@dataclass(frozen=True, slots=True)
class Results:
    """Of the time that was measured. Times in microseconds."""

    wall_us: float
    tokens: int
    """Committed."""
    rounds: int
    """Verdicts, each of one session."""
    tokens_per_s: float
    rounds_per_s: float
    acceptance_length: float
    """Mean tokens of a round with a block, correction or bonus counted. 1: there was none."""
    k: float
    """Mean tokens of a block over all rounds, plain ones too."""
    token_us: float
    """Time per output token: mean over answers, of the part of each that was measured."""
    token_p50_us: float
    token_p95_us: float
    draft_busy: float
    """Part of the time in which a draft computed."""
    target_busy: float
    round_us: float
    """Mean time of a session's round, from verdict to verdict."""
    period_us: float
    """Mean time between two steps of a group; without groups: between two steps. Shorter than a round where sessions of a group do
    not come together."""
    step_rows: float
    """Mean rows of a target's step."""
    step_sessions: float
    asked_ahead: int
    """Blocks beyond which the draft went on."""
    stood: int
    """Of these, blocks all of which stood, ..."""
    hits: int
    """... and whose bonus was guessed right."""
    schedules: dict[str, int]
    """Rounds by the schedule in force."""


@dataclass(slots=True)
class _Answer:
    """The part of an answer that was measured."""

    first_us: float
    last_us: float
    tokens: int = 0
    """After the first commit."""
    rounds: int = 0
    """The same."""


class Meter:
    """Counts while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.rounds_seen = 0
        """All rounds, measured or not."""
        self._began = 0.0
        self._tokens = self._rounds = self._blocks = self._drafted = self._accepted = 0
        self._asked = self._stood = self._hits = 0
        self._answers: dict[int, _Answer] = {}
        self._busy = {False: 0.0, True: 0.0}
        self._steps = self._rows = self._sessions = 0
        self._last: dict[tuple[int, int], float] = {}
        """Engine and group to the begin of its last step."""
        self._gap_us, self._gaps = 0.0, 0
        self._schedules: dict[str, int] = {}

    def start(self, now: float) -> None:
        """The service is warm."""
        self.on, self._began = True, now

    def round(self, session: int, schedule: Schedule, drafted: int, accepted: int, now: float) -> None:
        """A verdict was applied."""
        self.rounds_seen += 1
        if not self.on:
            return
        committed = accepted + 1
        self._rounds += 1
        self._tokens += committed
        self._blocks += drafted > 0
        self._drafted += drafted
        self._accepted += accepted
        name = str(schedule)
        self._schedules[name] = self._schedules.get(name, 0) + 1
        answer = self._answers.get(session)
        if answer is None:
            self._answers[session] = _Answer(now, now)
        else:
            answer.last_us = now
            answer.tokens += committed
            answer.rounds += 1

    def ahead(self, stood: bool, hit: bool) -> None:
        """It is known whether a block stood, and what followed it was guessed right."""
        self._asked += self.on
        self._stood += self.on and stood
        self._hits += self.on and hit

    def began(self, engine: Engine, group: int, now: float) -> None:
        """A step begins."""
        if engine.drafts or not self.on:
            return
        before = self._last.get((id(engine), group))
        self._last[id(engine), group] = now
        if before is not None:
            self._gap_us += now - before
            self._gaps += 1

    def ended(self, engine: Engine, began: float, rows: int, sessions: int, now: float) -> None:
        """A step is over."""
        if not self.on:
            return
        self._busy[engine.drafts] += now - max(began, self._began)
        if not engine.drafts:
            self._steps += 1
            self._rows += rows
            self._sessions += sessions

    def results(self, engines: Sequence[Engine], now: float) -> Results:
        """What was counted until now."""
        wall = now - self._began
        for engine in engines:
            began = engine.busy_since()
            if began is not None:
                self._busy[engine.drafts] += now - max(began, self._began)
        drafts = sum(engine.drafts for engine in engines)
        parts = [each for each in self._answers.values() if each.rounds]
        token_us = sorted((each.last_us - each.first_us) / each.tokens for each in parts)
        rounds = max(1, sum(each.rounds for each in parts))
        return Results(
            wall_us=wall,
            tokens=self._tokens,
            rounds=self._rounds,
            tokens_per_s=1e6 * self._tokens / wall,
            rounds_per_s=1e6 * self._rounds / wall,
            acceptance_length=1.0 + self._accepted / max(1, self._blocks),
            k=self._drafted / max(1, self._rounds),
            token_us=statistics.fmean(token_us) if token_us else 0.0,
            token_p50_us=_percentile(token_us, 50),
            token_p95_us=_percentile(token_us, 95),
            draft_busy=self._busy[True] / wall / drafts,
            target_busy=self._busy[False] / wall / (len(engines) - drafts),
            round_us=sum(each.last_us - each.first_us for each in parts) / rounds,
            period_us=self._gap_us / max(1, self._gaps),
            step_rows=self._rows / max(1, self._steps),
            step_sessions=self._sessions / max(1, self._steps),
            asked_ahead=self._asked,
            stood=self._stood,
            hits=self._hits,
            schedules=dict(sorted(self._schedules.items())),
        )


def _percentile(values: Sequence[float], percent: int) -> float:
    """Linear between the nearest ranks."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
