"""How many tokens the next round proposes, and who proposes them. Zero is one of the answers.

Law. A request's next block is the one with the most expected tokens per unit of time:

    E(k) / (k*d + r_d + v(b*(k + 1)) + r_t)        against        1 / (v(b) + r_t)

E(k) = 1 + a_1 + a_1*a_2 + ... with a_i the chance that token i stands given that all before it stand; d draft time per token, r_d
and r_t what the links and queues add, v the target's step by rows, b the sessions that share it. Every session is priced as
if all did the same, since under load a row, and a draft that works beside a step, cost all of them time (curves.py). In a step that
waits for the blocks of others a shorter one, or none, saves a row and no time of the draft (`curves.others_us`). A guess of
n-gram lookup has no d and no r_d, and its a_i are what matches of its length and longer ones are worth (lookup.py).

Only past rounds and the committed text decide, never what is being drafted; so any choice is exact under `rejection` too.

A choice stands until another is 2 % better, and plain decoding counts for 2 % more than it brings. What is not chosen is tried
again out of an allowance: 1 % of the time, in units of plain rounds. A trial that pays gives back what it took, so a draft that
has become good is taken up at once; one that does not pay costs what the allowance holds and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import mul

from coordinator.curves import LARGEST_ALLOWANCE, ServiceCurves, acceptances
from coordinator.lookup import NgramGuess
from coordinator.measure import MAX_BLOCK, PRIOR
from coordinator.schedule import SYNCHRONOUS
from specwire.law.values import Source
from specwire.wire.stopwatch import Passage

__all__ = ["PLAIN", "Plan", "RequestWindow", "Room", "ServiceCurves"]

_LENGTHS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64})
"""Block lengths compared: past 8 neighbours differ too little to be told apart."""
_HYSTERESIS = 1.02
_CERTAINTY = 1.02
"""Plain decoding counts for so much more: what it brings is known, what a draft brings is estimated. With the hysteresis a block
must promise 4 % to be begun and is given up when it promises nothing."""
_REQUEST_MEMORY = 0.97
"""33 rounds count for a request."""
_REQUEST_WEIGHT = 16.0
"""Observations that the service's curve, moved to the request's level, weighs against the request's own at one position. Of 6, 16
and 32 the middle one lost least over steady and changing acceptance (tests/support/replay.py)."""
_EXPLORATION = 0.01
_HOPED = 0.95
"""Acceptance that a trial hopes for; it drafts no more than it takes to gain if so."""
_READING_EVERY = 4
"""Rounds after which it is thought of again whether a draft that was left behind is to catch up."""
_REFUSED_EVERY = 64
"""The same where it was asked to, and did not."""
_PLAIN_EVERY, _OTHER_EVERY = 64, 32
"""Rounds after which plain decoding, or the other source, is tried again while one source pays."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The next round."""

    source: Source
    num_tokens: int
    """Tokens to propose; zero exactly when the source is NONE."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the next round may do."""

    longest: int
    """Longest block that target, context and max_tokens leave: one less than the tokens still wanted."""
    draft: int
    """Most tokens the draft can propose now; 0: it is away, or not to be asked."""
    guess: NgramGuess | None
    """What n-gram lookup proposes; None: nothing, or not to be asked."""
    sessions: int
    """Sessions expected to share the target's step, this one included."""


PLAIN = Plan(Source.NONE, 0)


class RequestWindow:
    """One request's choice, round by round."""

    __slots__ = (
        "_acceptance",
        "_current",
        "_curves",
        "_fixed",
        "_longest",
        "_match",
        "_prepaid",
        "_rate",
        "_reading",
        "_reserve",
        "_since",
        "_unread",
    )

    def __init__(self, curves: ServiceCurves, num_speculative_tokens: int | None, longest: int) -> None:
        self._curves = curves
        self._fixed = num_speculative_tokens
        self._longest = min(longest, MAX_BLOCK)
        self._acceptance = acceptances(_REQUEST_MEMORY)
        self._current = PLAIN
        """The last choice that was not a trial."""
        self._since = {Source.NONE: 0, Source.DRAFT_MODEL: 0, Source.NGRAM: 0}
        """Rounds since each was last used."""
        self._match = 1
        """Length of match of the guess that was planned last."""
        self._rate = 0.0
        """Tokens per microsecond of the best choice at the last plan; 0: a fixed block length."""
        self._reserve = 0.0
        """What the trial under way took from the allowance; 0: none is."""
        self._reading = 0.0
        """What the reading asked for last took from the allowance, ..."""
        self._prepaid = 0.0
        """... and what it took for the trial that is to follow."""
        self._unread = 0
        """Rounds until it is thought of again whether the draft is to read."""

    def __repr__(self) -> str:
        current = f"{self._current.source.value} {self._current.num_tokens}"
        return f"RequestWindow(fixed={self._fixed}, current={current})"

    def plan(self, room: Room) -> Plan:
        """The next round. Call once per round."""
        self._curves.sessions = room.sessions
        self._curves.allowance += self._reserve  # a trial that was planned and never carried out
        self._reserve = 0.0
        self._match = room.guess.match_length if room.guess is not None else 1
        if self._fixed is not None:
            return self._plan_fixed(room, self._fixed)
        self._rate, best = self.best(room)
        self._current = best
        return self._trial(room, best) or best

    def worth_reading(self, room: Room, num_tokens: int) -> bool:
        """Whether the draft is to read so many tokens, to be able to propose. `room`: as if it had. It is where its blocks are the
        best choice. Else it is the first half of a trial, and the allowance has to bear both; as far as that can hold so much."""
        if self._fixed is not None:
            return self._fixed > 0
        if self._unread > 0:
            self._unread -= 1
            return False
        self._reading = self._prepaid = 0.0
        rate, best = self.best(room)
        if best.source is Source.DRAFT_MODEL:
            return True
        curves = self._curves
        reading = curves.read_rounds(num_tokens, room.sessions)
        trial = self._loss(Source.DRAFT_MODEL, room.draft, room.sessions, rate)[0]
        if min(reading + trial, LARGEST_ALLOWANCE) > curves.allowance:
            self._unread = _READING_EVERY - 1
            return False
        self._reading, self._prepaid = reading, trial
        curves.allowance -= reading + trial
        return True

    def not_read(self) -> None:
        """The draft did not do it: it has no room, or failed. Asking again every round would help nobody."""
        self._curves.allowance += self._reading + self._prepaid
        self._reading = self._prepaid = 0.0
        self._unread = _REFUSED_EVERY - 1

    def observe(
        self,
        source: Source,
        drafted: int,
        accepted: int,
        draft_way: Passage | None,
        target_way: Passage,
        *,
        first: bool = False,
    ) -> None:
        """A round is over: who drafted how much, what stood, and how long it took. `first`: prompt rows were in the step, so its
        time is not a round's."""
        curves = self._curves
        for known in self._since:
            self._since[known] += 1
        self._since[source] = 0
        if source is not Source.NONE and drafted > 0:
            place = self._place(source)
            self._acceptance[source].observe(drafted, accepted, place)
            curves.observe_block(source, drafted, accepted, place)
        for other, acceptance in self._acceptance.items():
            if other is not source:
                acceptance.idle()
                curves.idle(other, 1.0 / curves.sessions)
        if self._rate > 0.0:
            us: float = target_way.total_us + (draft_way.total_us if draft_way else 0)
            if self._reserve > 0.0 and drafted > 0 and curves.schedule == SYNCHRONOUS:
                # one that drafts among many gains by what the others pay: a trial is of what all would do
                us = max(us, curves.round_us(source, drafted, curves.sessions))
            self._settle(accepted + 1, us, first)

    def guessed(self, num_tokens: int) -> tuple[float, float]:
        """Chances, by acceptance, that a block of the draft stands, and that the token after it is guessed right too."""
        *block, bonus = self._chances(Source.DRAFT_MODEL, num_tokens + 1)
        return (whole := prod(block)), whole * bonus

    def best(self, room: Room) -> tuple[float, Plan]:
        """Tokens per microsecond of the best choice, and the choice. The last one wins over others that are hardly better."""
        curves, sessions, current = self._curves, room.sessions, self._current
        step_us = curves.verify.at
        others_us = curves.others_us(sessions, self._longest)
        plain_rate = 1.0 / (curves.plain_turn_us(sessions) + others_us)
        rate, plan = plain_rate * _CERTAINTY, PLAIN
        stay_rate, stay = rate, PLAIN
        for source, limit in self._sources(room):
            fixed_us, token_us, stretch = curves.price(source, sessions)
            timer = curves.timer(source, sessions)
            keep = min(current.num_tokens, limit) if current.source is source else 0
            expected, chance = 1.0, 1.0
            chances = self._chances(source, limit)
            for k, stands in enumerate(chances, start=1):
                chance *= stands
                expected += chance
                if k in _LENGTHS or k == limit or k == keep:  # noqa: SIM109  (a tuple would be built each time)
                    if timer is None:
                        us = fixed_us + max(k * token_us, others_us) + stretch * step_us(sessions * (k + 1))
                    else:
                        us = timer(k, chance, chance * chances[min(k, limit - 1)])
                    this = expected / us
                    if this > rate:
                        rate, plan = this, Plan(source, k)
                    if k == keep:
                        stay_rate, stay = this, Plan(source, k)
                if chance < 0.01 and k >= keep:
                    break  # what comes after adds nothing
        if stay.source is current.source and rate < stay_rate * _HYSTERESIS:
            rate, plan = stay_rate, stay
        return (plain_rate, PLAIN) if plan is PLAIN else (rate, plan)

    def _sources(self, room: Room) -> list[tuple[Source, int]]:
        """Who can propose now, and how much at most."""
        longest = min(room.longest, self._longest)
        found: list[tuple[Source, int]] = []
        if (draft := min(room.draft, longest)) > 0:
            found.append((Source.DRAFT_MODEL, draft))
        if room.guess is not None and (guess := min(len(room.guess.tokens), longest)) > 0:
            found.append((Source.NGRAM, guess))
        return found

    def _plan_fixed(self, room: Room, fixed: int) -> Plan:
        """Always `fixed` tokens as far as there is room; of two sources the one that promises more for its time."""
        rate, plan = 0.0, PLAIN
        sources = self._sources(room) if fixed > 0 else []
        if len(sources) == 1:
            return Plan(sources[0][0], min(sources[0][1], fixed))
        for source, most in sources:
            limit = min(most, fixed)
            expected, chance = 1.0, 1.0
            for stands in self._chances(source, limit):
                chance *= stands
                expected += chance
            this = expected / self._curves.round_us(source, limit, room.sessions)
            if this > rate:
                rate, plan = this, Plan(source, limit)
        return plan

    def _place(self, source: Source) -> int:
        """Position of a block's first token: see `acceptances`."""
        return self._match - 1 if source is Source.NGRAM else 0

    def _chances(self, source: Source, limit: int) -> list[float]:
        """a_1 ... a_limit: the request's own, shrunk toward the service's curve moved to the request's level."""
        base = self._curves.curve[source]
        own = self._acceptance[source]
        tries, hits, weight = own.tries, own.hits, _REQUEST_WEIGHT
        seen, stood, hoped = sum(tries), sum(hits), sum(map(mul, tries, base))
        # Of a request that does better, refusals shrink; of one that does worse, acceptances: both stay in [0, 1].
        if stood > hoped:
            level = (seen - stood + weight) / (seen - hoped + weight)
            lift = 1.0 - level
        else:
            level, lift = (stood + weight) / (hoped + weight), 0.0
        first = self._place(source)
        moved = [lift + level * a for a in base[first : first + limit]]
        chances = [(h + weight * a) / (t + weight) for h, t, a in zip(hits[first:], tries[first:], moved, strict=False)]
        chances += moved[len(chances) :]
        if len(chances) < limit:
            # longer matches than are told apart are one; a place in a block that nobody has judged is like the last that was
            last = chances[-1] if source is Source.NGRAM else lift + level * (base[-1] if base else PRIOR)
            chances += [last] * (limit - len(chances))
        return chances

    def _trial(self, room: Room, best: Plan) -> Plan | None:
        """Another choice, if one is due and the allowance bears its cost: what it takes if only one token comes of it."""
        curves, since = self._curves, self._since
        if curves.allowance < 0.0 and not self._prepaid:
            return None
        tried: Plan | None = None
        cost = 0.0
        if best is not PLAIN and since[Source.NONE] >= _PLAIN_EVERY and curves.schedule.groups == 1:
            tried = PLAIN
            plain_us = curves.plain_us(room.sessions)
            cost = max(0.0, (plain_us - 1.0 / self._rate) / plain_us)
        else:
            due = 1 if best is PLAIN else _OTHER_EVERY
            others = [(s, limit) for s, limit in self._sources(room) if s is not best.source and since[s] >= due]
            if others:
                source, limit = max(others, key=lambda other: since[other[0]])
                cost, tried = self._loss(source, limit, room.sessions, self._rate)
        if tried is None:
            return None
        curves.allowance_limit = max(LARGEST_ALLOWANCE, cost)
        if tried.source is Source.DRAFT_MODEL and self._prepaid:
            curves.allowance += self._prepaid
            self._prepaid = 0.0
        elif cost > curves.allowance:
            return None
        self._reserve = cost
        curves.allowance -= cost
        return tried

    def _loss(self, source: Source, limit: int, sessions: int, rate: float) -> tuple[float, Plan]:
        """What a trial of this source costs if only one token comes of it, in plain rounds, and the trial: the shortest block that
        would beat plain decoding if the source were good, or a single token if none would. `rate`: tokens per microsecond of the
        best choice."""
        curves = self._curves
        plain_us = curves.plain_us(sessions)
        once_us, token_us, stretch = curves.price(source, sessions)
        chosen, chosen_us = 1, 0.0
        expected = chance = 1.0
        for k in range(1, limit + 1):
            us = once_us + k * token_us + stretch * curves.verify.at(sessions * (k + 1))
            chosen_us = chosen_us or us
            chance *= _HOPED
            expected += chance
            if expected * plain_us > us:
                chosen, chosen_us = k, us
                break
        return max(0.0, (chosen_us - 1.0 / rate) / plain_us), Plan(source, chosen)

    def _settle(self, committed: int, us: float, first: bool) -> None:
        """Earns the round's share of the allowance, and books what a trial really cost: less than nothing when it paid."""
        curves = self._curves
        plain_us = curves.plain_us(curves.sessions)
        change = self._reserve + _EXPLORATION * us / plain_us / curves.sessions  # all of them wait for a trial of one
        if self._reserve > 0.0 and not first:
            change -= (us - committed / self._rate) / plain_us
        self._reserve = 0.0
        curves.allowance = min(curves.allowance_limit, curves.allowance + change)
