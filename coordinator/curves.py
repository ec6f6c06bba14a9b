"""What all requests of a service have learnt together: step times, links, acceptance, and what may be spent on finding out.

Law. Moved by observations only. Compute and link are kept apart, as workers and coordinator measure them: a busy network does
not make the model look slow, nor the reverse.

What a draft takes from the target is the draft's price. Where both share cores or a link, a step takes longer while a draft works,
also for sessions that decode plainly; were that booked on the target, drafting would look no worse than leaving it, and go on for
ever. So plain rounds are priced by what is seen while no draft works, and rounds with a draft's block by what those rounds see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from coordinator.lookup import EXPECTED
from coordinator.measure import LARGEST_ERROR, PRIOR, Acceptance, Average, ByLoad, ErrorByLoad, StepTimes
from coordinator.schedule import SYNCHRONOUS, Schedule, ahead_together_us, lengths, rotation_us
from specwire.law.tasks import StepTiming
from specwire.law.values import Source
from specwire.wire.stopwatch import Passage

if TYPE_CHECKING:
    from coordinator.window import RequestWindow

LARGEST_ALLOWANCE = 8.0
"""Plain rounds that the allowance for trials gathers at most, unless a trial costs more."""
_FIRST_ALLOWANCE = 4.0
"""Plain rounds that a new service may spend on finding out."""
_SERVICE_MEMORY = 0.995
"""200 rounds count for the service."""
_NO_CROWD = 1.05
"""Steps that take so much longer beside a draft are called as long as others: timings are no better."""
_MUCH_TEXT = 16
"""Tokens of text from which on a step tells what reading costs: few go along with the tokens that are proposed."""
_GUESSES = 4.0
"""Right guesses of a draft that ran ahead that the acceptance alone counts for."""
_LARGEST_ERROR_AHEAD = 2.0
"""What is further off was something else: a worker that was lost, a pause."""
_LONGEST_WAIT = 1.5
"""Steps that a block waits for the one before it, at most, if that read no prompt."""
_PACE_EVERY = 16
"""Plans between two thoughts of the length that is best for all."""
_UNMEASURED_DRAFT = 0.15
"""Draft time per token, in target steps, before anything is known."""


def acceptances(memory: float) -> dict[Source, Acceptance]:
    """By who guesses. Of the draft's tokens by their place in a block; of n-gram lookup's by how many tokens match before them."""
    return {Source.DRAFT_MODEL: Acceptance(memory), Source.NGRAM: Acceptance(memory, EXPECTED)}


class ServiceCurves:
    """What all requests of a service have learnt together."""

    def __init__(self) -> None:
        self.verify = StepTimes()
        """The target's step by rows, while no draft works."""
        self.draft_steps = StepTimes()
        """The draft's step by sessions in it. Only its shape is used once `draft_token` is known."""
        self.draft_token = Average()
        """Microseconds of draft compute per token, alone at the draft."""
        self.draft_read = Average()
        """Microseconds of draft compute per token of text that it reads; 0: not measured."""
        self.draft_link = ByLoad()
        """r_d: what a block takes beyond its compute."""
        self.target_link = ByLoad()
        """r_t: what a verdict takes beyond its step, while no draft works."""
        self.block_link = ByLoad()
        """r_t of a draft's block. It may miss a step that others share."""
        self.crowding = ByLoad(1.0, known=True)
        """How many times longer than `verify` the step of a draft's block takes, for other drafts that work beside it."""
        self.beside = ByLoad(2.0 * _NO_CROWD - 1.0, known=True)
        """The same of any step beside which a draft works. Where that turns out to be no longer, what is seen beside drafts is as
        good as what is seen without them."""
        self.acceptance = acceptances(_SERVICE_MEMORY)
        self.curve = {source: each.curve() for source, each in self.acceptance.items()}
        """`acceptance[s].curve()`, kept up to date."""
        self.allowance = _FIRST_ALLOWANCE
        """Plain rounds that may be lost to trials. Negative only while a trial went worse than feared."""
        self.allowance_limit = LARGEST_ALLOWANCE
        self.sessions = 1
        """Sessions that share the steps, ..."""
        self.schedule = SYNCHRONOUS
        """... and how, in the round that is spoken of: see `turn_to`."""
        self.draft_way = ByLoad()
        """r_d without what waits for other groups of a rotation."""
        self.target_way = ByLoad()
        """The same of r_t."""
        self._guessed = self._hoped = 0.0
        """Guesses of a draft that ran ahead: right ones, and right ones expected by acceptance. Older ones count less."""
        self._ahead_took = ErrorByLoad()
        """Of rounds whose draft ran ahead, in multiples of `ahead_us`."""
        self._last_step = "", -1
        self._pace: dict[tuple[int, int], tuple[int, int]] = {}
        """By sessions and longest block: the length of `others_us`, and how often it may be asked until it is thought of again."""
        self._drafted = self._accepted = 0.0

    def __repr__(self) -> str:
        curve = [round(a, 2) for a in self.curve[Source.DRAFT_MODEL][:8]]
        return (
            f"ServiceCurves(plain={self.plain_us(1):.0f} us, draft={self.draft_us(1):.0f} us, "
            f"draft_link={self.draft_link}, target_link={self.target_link}, block_link={self.block_link}, "
            f"crowding={self.crowding}, acceptance={curve}, allowance={self.allowance:.2f})"
        )

    def turn_to(self, schedule: Schedule, sessions: int) -> None:
        """What is asked and observed next is of a round that was planned under this schedule, with so many sessions. Rounds of one
        service differ: not every session can run ahead."""
        self.schedule, self.sessions = schedule, sessions

    def target_profile(self, step_profile_us: tuple[int, ...]) -> None:
        """A target was measured at its start."""
        self.verify.profile(step_profile_us)

    def draft_profile(self, step_profile_us: tuple[int, ...]) -> None:
        """A draft was measured at its start."""
        self.draft_steps.profile(step_profile_us)
        if step_profile_us:
            self.draft_token = Average(float(step_profile_us[0]))

    def request(self, num_speculative_tokens: int | None, longest: int) -> RequestWindow:
        """A new request. `num_speculative_tokens`: always so many (0: plain); None: chosen round by round, up to `longest`."""
        from coordinator.window import RequestWindow  # late: that file builds on this one

        return RequestWindow(self, num_speculative_tokens, longest)

    def plain_us(self, sessions: int) -> float:
        """A plain round, while no draft works."""
        link_us, way_us = self.target_link.at(sessions), self.target_way.at(sessions)
        if not self.target_link.known:  # a draft has worked always
            link_us = way_us
        elif self.schedule.groups > 1:  # then it is not observed; a way without waits is the least that it is
            link_us = min(link_us, way_us)
        return self.verify.at(sessions) + link_us

    def plain_turn_us(self, sessions: int) -> float:
        """A plain round under the present schedule. In a rotation a row that comes back misses the step that has just begun for
        another group: it goes along once in a turn, as any."""
        groups = self.schedule.groups
        if groups == 1:
            return self.plain_us(sessions)
        verify_us = self._stretch(sessions) * self.verify.at(self.schedule.together(sessions))
        return rotation_us(groups, 0.0, self.target_way.at(sessions), verify_us)

    def draft_us(self, sessions: int) -> float:
        """Draft compute per token with so many sessions at the draft."""
        if not self.draft_token.known and not self.draft_steps.known:
            return _UNMEASURED_DRAFT * self.verify.at(1)
        return self.draft_token.value * self.draft_steps.at(sessions) / self.draft_steps.at(1)

    def draft_seconds(self, num_tokens: int) -> float:
        """How long a block should take to come. Generous while nothing is known."""
        link = self.draft_link if self.schedule == SYNCHRONOUS else self.draft_way
        if not link.known:
            return 0.25 * (num_tokens + 1)
        return (num_tokens * self.draft_us(self.schedule.together(self.sessions)) + link.at(self.sessions)) / 1e6

    def read_rounds(self, num_tokens: int, sessions: int) -> float:
        """What it costs that a draft reads so much text, in plain rounds: at worst all sessions stand still for it."""
        token_us = min(self.draft_read.value, self.draft_us(1))  # reading a token takes no longer than proposing one
        return sessions * num_tokens * token_us / self.plain_us(sessions)

    def observe_read(self, step: StepTiming) -> None:
        """A draft has read text in this step, of one session or of many."""
        if step.prefill_rows >= _MUCH_TEXT:
            self.draft_read.observe(step.busy_us / (step.rows + step.prefill_rows))

    def observe_draft(self, drafted: int, way: Passage) -> None:
        """A block came. Few tokens were read for it (`ledger.WARM_TOKENS`), so its time is that of proposing. Microseconds."""
        self.draft_way.observe(self.sessions, way.way_us)
        if self.schedule == SYNCHRONOUS:  # else waits are in it that are not there in step
            self.draft_link.observe(self.sessions, way.total_us - way.compute_us)
        if drafted > 0:
            share = self.draft_steps.at(self.schedule.together(self.sessions)) / self.draft_steps.at(1)
            if self.schedule.ahead:  # it worked beside a step
                share *= self._stretch(self.sessions)
            self.draft_token.observe(way.compute_us / drafted / share)

    def idle(self, source: Source, rounds: float) -> None:
        """So many rounds went by without a block of this source. A draft's times were those of another load, perhaps."""
        self.acceptance[source].idle(rounds)
        if source is Source.DRAFT_MODEL:
            self.draft_token.idle(rounds)
            for each in (self.draft_link, self.block_link, self.crowding):
                each.idle(self.sessions, rounds)

    def observe_verify(
        self, source: Source, step: StepTiming, way: Passage, *, beside: bool = False, target: str = ""
    ) -> None:
        """A verdict came from this step of this target. `beside`: a draft worked while its task was under way. Steps with prompt
        rows say nothing of a round; a step's time counts once."""
        if step.prefill_rows:
            return
        sessions, link_us, drafted = self.sessions, way.total_us - way.compute_us, source is Source.DRAFT_MODEL
        us, new = step.busy_us, (target, step.step) != self._last_step
        self._last_step = target, step.step
        longer = min(us / self.verify.at(step.rows), LARGEST_ERROR) if beside and self.verify.known else 1.0
        if beside and new:
            self.beside.observe(sessions, longer)
        quiet = not beside or self.beside.at(sessions) <= _NO_CROWD
        self.target_way.observe(sessions, way.way_us)
        if self.schedule.groups > 1:
            pass  # the waits are those of turns, which the schedule's formula has in it
        elif drafted:
            # where drafts run ahead, the one beside it is its own, and it may have missed a step: neither is so in step
            if not self.schedule.ahead:
                self.block_link.observe(sessions, link_us, self._block_link(sessions))
                self.crowding.observe(sessions, longer)
        elif not beside or link_us < self.target_link.at(sessions):
            # One that drafts may be waited for, but shortens no way. The first of all may have met a pause.
            expected_us = None if self.target_link.known else self.target_way.at(sessions)
            self.target_link.observe(sessions, link_us, expected_us)
        if new and (quiet or not self.verify.known):
            self.verify.observe(step.rows, us)

    def observe_guess(self, expected: float, right: bool) -> None:
        """A draft ran ahead, and it is known what its guess was worth. `expected`: its chance by acceptance alone."""
        self._guessed = self._guessed * _SERVICE_MEMORY + right
        self._hoped = self._hoped * _SERVICE_MEMORY + expected

    def observe_block(self, source: Source, drafted: int, accepted: int, first: int = 0) -> None:
        """A block was judged. `first`: see `acceptances`."""
        self.acceptance[source].observe(drafted, accepted, first)
        self.curve[source] = self.acceptance[source].curve()
        if source is Source.DRAFT_MODEL:
            self._drafted = self._drafted * _SERVICE_MEMORY + drafted
            self._accepted = self._accepted * _SERVICE_MEMORY + accepted

    def recent_acceptance(self) -> float | None:
        """Accepted / drafted of the draft over the last 200 blocks or so. None: nothing drafted yet."""
        return self._accepted / self._drafted if self._drafted else None

    def present_length(self, sessions: int, longest: int) -> int:
        """Block length that a new request would begin with, if the draft can follow."""
        if longest < 1:
            return 0
        from coordinator.window import Room

        return self.request(None, longest).best(Room(longest, longest, None, max(1, sessions)))[1].num_tokens

    def price(self, source: Source, sessions: int) -> tuple[float, float, float]:
        """What a block costs: once, per token, and by how much it stretches the target's step."""
        plain = self.target_link.at(sessions)
        if source is not Source.DRAFT_MODEL:
            return plain, 0.0, 1.0
        return (
            self._block_link(sessions) + (self.draft_link if self.draft_link.known else self.draft_way).at(sessions),
            self.draft_us(sessions),
            max(1.0, self.crowding.at(sessions)),
        )

    def timer(self, source: Source, sessions: int) -> Callable[[int, float, float], float] | None:
        """What rounds of a draft's blocks take under the present schedule, by their length, the chance that all of a block stands,
        and that the token after it is guessed right too. None: `price` says it."""
        if source is not Source.DRAFT_MODEL or self.schedule == SYNCHRONOUS:
            return None
        return partial(self.schedule_us, self.schedule, sessions)

    def schedule_us(self, schedule: Schedule, sessions: int, num_tokens: int, whole: float, guessed: float) -> float:
        """Expected time of a session's round under a schedule, every session doing the same."""
        if schedule == SYNCHRONOUS:
            return self.round_us(Source.DRAFT_MODEL, num_tokens, sessions)
        if schedule.ahead:
            return self.ahead_error(sessions) * self.ahead_us(sessions, num_tokens, whole, guessed)
        stretch = self._stretch(sessions)
        size = schedule.together(sessions)
        token_us, verify_us = stretch * self.draft_us(size), stretch * self.verify.at(size * (num_tokens + 1))
        draft_way, target_way = self.draft_way.at(sessions), self.target_way.at(sessions)
        return rotation_us(schedule.groups, num_tokens * token_us, draft_way + target_way, verify_us)

    def ahead_us(self, sessions: int, num_tokens: int, whole: float, guessed: float) -> float:
        """What a round of a draft that runs ahead should take, before it was seen."""
        stretch = self._stretch(sessions)
        hit = min(whole, guessed * (self._guessed + _GUESSES) / (self._hoped + _GUESSES))
        return ahead_together_us(
            whole,
            hit,
            num_tokens,
            stretch * self.draft_us(sessions),
            self.draft_way.at(sessions),
            lambda together: stretch * self.verify.at(round(together * (num_tokens + 1))),
            self.target_way.at(sessions),
            sessions,
        )

    def ahead_error(self, sessions: int) -> float:
        """How many times longer than `ahead_us` rounds turned out to take, with so many sessions or about as many."""
        return self._ahead_took.at(sessions)

    def has_seen_ahead(self, sessions: int) -> bool:
        """Whether `ahead_error` was observed at this load, not long ago."""
        return self._ahead_took.knows(sessions)

    def not_ahead(self) -> None:
        """A round was planned under another schedule: what is known of this one is of less worth."""
        self._ahead_took.idle()

    def observe_ahead(self, sessions: int, expected_us: float, way: Passage, step: StepTiming, us: float) -> None:
        """A round of `us` is over whose block was drafted ahead, or was to be. Steps that read prompts, its own or one that it
        waited for, say nothing of a schedule."""
        if self.verify.known and not step.prefill_rows and way.queue_us <= _LONGEST_WAIT * step.busy_us:
            self._ahead_took.observe(sessions, min(us / expected_us, _LARGEST_ERROR_AHEAD))

    def others_us(self, sessions: int, longest: int) -> float:
        """What a session in step waits for the draft whatever it drafts itself, since others draft: the time of the length that is
        best where all do the same. Their links are not in it: over a long way nobody waits."""
        if sessions == 1 or self.schedule != SYNCHRONOUS:
            return 0.0
        length, left = self._pace.get((sessions, longest), (0, 0))
        if not left:
            length, left = self._best_in_step(sessions, longest), _PACE_EVERY
        self._pace[sessions, longest] = length, left - 1
        return length * self.draft_us(sessions)

    def _best_in_step(self, sessions: int, longest: int) -> int:
        """Of the draft's blocks, by what all requests have learnt; 0: plain decoding."""
        best, length = 1.0 / self.plain_us(sessions), 0
        for k, chance, _, expected in self._blocks(longest):
            if (rate := expected / self.round_us(Source.DRAFT_MODEL, k, sessions)) > best:
                best, length = rate, k
            if chance < 0.01:
                break
        return length

    def best_rate(self, schedule: Schedule, sessions: int, longest: int) -> float:
        """Tokens per microsecond of each session under a schedule, at its best block length; where nobody waits for anybody, plain
        decoding is one."""
        best = 1.0 / self.plain_us(sessions) if schedule == SYNCHRONOUS else 0.0
        compared = set(lengths(longest))
        for k, chance, guessed, expected in self._blocks(longest):
            if k in compared:
                best = max(best, expected / self.schedule_us(schedule, sessions, k, chance, guessed))
        return best

    def _blocks(self, longest: int) -> Iterator[tuple[int, float, float, float]]:
        """The draft's blocks by length: the chance that all of one stands, that the token after it is guessed too, and the tokens
        to expect of a round."""
        curve = self.curve[Source.DRAFT_MODEL]
        last = curve[-1] if curve else PRIOR
        expected = chance = 1.0
        for k in range(1, longest + 1):
            chance *= curve[k - 1] if k <= len(curve) else last
            expected += chance
            yield k, chance, chance * (curve[k] if k < len(curve) else last), expected

    def _stretch(self, sessions: int) -> float:
        """How many times longer what overlaps takes, on cores that draft and target share."""
        return max(1.0, self.beside.at(sessions))

    def _block_link(self, sessions: int) -> float:
        """r_t of a draft's block; until one was judged at this load, that of other rounds."""
        if self.block_link.knows(sessions):
            return self.block_link.at(sessions)
        return (self.target_link if self.target_link.known else self.target_way).at(sessions)

    def round_us(self, source: Source, num_tokens: int, sessions: int) -> float:
        """Expected time of a round, every session doing the same."""
        once, per_token, stretch = self.price(source, sessions)
        return once + num_tokens * per_token + stretch * self.verify.at(sessions * (num_tokens + 1))
