"""One generation as the coordinator sees it: events in, commands out.

Law. Committed text only grows, and only by verdicts. A round has one base, the committed text, and at most one block that
follows it; once a block was sent to the target it stands until the target has judged it, so a retry for the same base sends
the same block. Every cut, whatever its cause (a refusal, a replay, a draft given up), raises the epoch, so that answers to
what was before it are recognised and dropped. Whatever happens to the draft, the round goes on without it; whatever happens
to the target, the round waits for it.

    READY --begin--> DRAFTING --block, nothing, late--> VERIFYING --verdict--> READY ... OVER
       \\_______________________________________________^ (n-gram, plain, or the draft ran ahead)

While a block is judged the draft may go on from its own guess (`run_ahead`). What it then proposes is the next block if all of this
one stands and its first token is the bonus. Else it is dropped and the epoch rises, and the draft begins anew from what stands.

This module knows nothing of gRPC, clocks, Ray or models. Every method returns what to do, in the order in which it must be
done.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.mirror import Mirror, State
from specwire.law.cursor import Prefix, step
from specwire.law.errors import BadLaw, OurFault, SpecwireError, TooLate
from specwire.law.tasks import Answer, Failure, ProposeTask, Reason, Refusal, SessionId, VerifyTask
from specwire.law.values import EMPTY_BLOCK, Block, Opening, Source, Verdict

MAX_TROUBLES = 8
"""Refusals and failures of the target within one round, before the request fails."""
WARM_TOKENS = 16
"""A draft further behind than this is brought up to date beside what the target does, so that nobody waits for it to read. So few
go along with the first token it proposes, at no cost that shows."""


class Role(enum.Enum):
    """Which worker."""

    DRAFT = "draft"
    TARGET = "target"


class Phase(enum.Enum):
    """What the generation waits for."""

    READY = "ready"
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Send:
    """Send this task to that worker."""

    role: Role
    task: ProposeTask | VerifyTask
    again: bool = False
    """True: the very task that was sent on a stream now lost."""


@dataclass(frozen=True, slots=True)
class Commit:
    """These tokens are text. Then begin the next round, or end."""

    tokens: tuple[int, ...]
    block: Block
    accepted: int


@dataclass(frozen=True, slots=True)
class Fallback:
    """The round goes on without the draft."""

    cause: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """A worker has to be told the text again."""

    role: Role
    cause: str


@dataclass(frozen=True, slots=True)
class Later:
    """The target has no room now: call `retry` after a while."""


@dataclass(frozen=True, slots=True)
class Stale:
    """An answer matched nothing and changed nothing."""

    role: Role


@dataclass(frozen=True, slots=True)
class Fail:
    """The request fails."""

    error: SpecwireError


@dataclass(frozen=True, slots=True)
class End:
    """Tell that worker that the session is over."""

    role: Role


Command = Send | Commit | Fallback | Replayed | Later | Stale | Fail | End


@dataclass(frozen=True, slots=True)
class Limits:
    """What the workers can hold, in tokens."""

    target_max_append: int
    draft_max_append: int
    draft_max_context: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the shell knows of the moment and the ledger passes on."""

    time_left_ms: int = 0
    """Told to a worker with a session's opening only: it does not change, and every byte of a round counts."""
    draft_trace: bytes = b""
    target_trace: bytes = b""
    group: int = 0
    """Of the session, where sessions take turns."""


@dataclass(slots=True)
class Ahead:
    """What the draft was asked for beyond the block that is being judged."""

    task: ProposeTask
    tokens: tuple[int, ...] | None = None
    """Its guess of the bonus, then the next block. None: it has not answered."""


NO_ENVELOPE = Envelope()


class Ledger:
    """The state of one generation."""

    def __init__(
        self, session: SessionId, opening: Opening, prompt: Sequence[int], limits: Limits, with_draft: bool
    ) -> None:
        assert len(prompt) == opening.prompt_length
        self.session = session
        self.opening = opening
        self.limits = limits
        self.with_draft = with_draft
        self.phase = Phase.READY
        self.epoch = 1
        """Life of the text after the committed part. Only rises."""
        self.prefix = Prefix(opening.fingerprint(), prompt)
        """Prompt and committed output."""
        self.block: Block = EMPTY_BLOCK
        """The block of this round, once known. Stands until judged."""
        self.target = Mirror()
        self.draft = Mirror()
        self.envelope = NO_ENVELOPE
        self.wanted = 0
        """Tokens asked of the draft this round."""
        self.ahead: Ahead | None = None
        """The draft has gone on from its own guess, and what that is worth is not decided."""
        self.ahead_outcome: bool | None = None
        """Whether the last guess to be decided was right. Whoever reads it sets it back."""
        self.unsound = False
        """Whether the last block was cut at an id that the target does not have: its draft would only say it again."""
        self.asked_again = False
        """Whether the draft was replayed in this round. It is asked twice at most."""
        self.troubles = 0
        """Refusals and failures of the target in this round."""
        self.failures = 0
        """Failures of the target in this round. One is replayed, the second fails the request."""
        self.cuts = 0
        """How often text was cut; for people."""

    def __repr__(self) -> str:
        return (
            f"Ledger({self.phase.value}, epoch={self.epoch}, committed={len(self.prefix)}, block={len(self.block)}, "
            f"target={self.target!r}, draft={self.draft!r})"
        )

    # ---------------------------------------------------------------- rounds

    def draft_ready(self) -> bool:
        """Whether the draft can be asked to propose now."""
        if self.ahead is not None:
            return True
        behind = len(self.prefix) - self.draft.match
        return (
            self.with_draft
            and self.draft.idle
            and behind <= WARM_TOKENS
            and len(self.prefix) + 1 <= self.limits.draft_max_context
        )

    def to_read(self) -> int:
        """Tokens that a draft far behind has to read before it can propose; 0: it is not far behind, or cannot read now."""
        behind = len(self.prefix) - self.draft.match
        fits = len(self.prefix) + 1 <= self.limits.draft_max_context
        return behind if self.with_draft and self.draft.idle and behind > WARM_TOKENS and fits else 0

    def warm(self) -> list[Command]:
        """Brings a draft that is far behind up to date, beside whatever the target does."""
        return [self._ask_draft(0)] if self.to_read() else []

    def begin(
        self, source: Source, num_tokens: int, guess: Sequence[int], envelope: Envelope, *, warm: bool = True
    ) -> list[Command]:
        """Starts a round: ask the draft for `num_tokens`, or judge `guess` (n-gram), or neither (plain). `warm`: a draft far behind
        is to read, unless it is asked."""
        assert self.phase is Phase.READY, repr(self)
        self.envelope = envelope
        self.asked_again = False
        self.troubles = self.failures = 0
        self.block = EMPTY_BLOCK
        self.wanted = 0
        asked = source is Source.DRAFT_MODEL and num_tokens > 0
        if self.ahead is not None and asked:
            self.phase = Phase.DRAFTING
            self.wanted = num_tokens
            return self._take_ahead(self.ahead)
        if self.ahead is not None:
            self._drop_ahead()
        if asked and self.draft_ready():
            self.phase = Phase.DRAFTING
            self.wanted = num_tokens
            return [self._ask_draft(num_tokens)]
        commands = self.warm() if warm else []
        if source is Source.NGRAM and guess:
            self.block = self._sound(Block(tuple(guess), (), Source.NGRAM))
        return [*commands, *self._verify()]

    def run_ahead(self, num_tokens: int) -> list[Command]:
        """While its block is judged, the draft goes on: a guess of the bonus, and a next block of so many tokens. Nothing where
        that cannot be."""
        block, mirror, length = self.block, self.draft, len(self.prefix)
        able = self.phase is Phase.VERIFYING and self.ahead is None and self.with_draft and mirror.idle
        drafted = block.source is Source.DRAFT_MODEL and len(block) > 0 and not block.laws
        num_tokens = min(num_tokens, self.limits.draft_max_context - length - len(block) - 1)
        if not (able and drafted and num_tokens > 0 and mirror.match == length) or self.unsound:
            return []
        cached = min(len(mirror.tail), len(block) - 1)  # its last token is fed (again), since the guess follows it
        if mirror.tail[:cached] != block.tokens[:cached] or len(block) - cached > self.limits.draft_max_append:
            return []
        keep_hash = self.prefix.hash_at(length)
        for token in block.tokens[:cached]:
            keep_hash = step(keep_hash, token)
        append = block.tokens[cached:]
        task = ProposeTask(
            session=self.session,
            epoch=self.epoch,
            number=mirror.next_number(),
            keep=length + cached,
            keep_hash=keep_hash,
            append=append,
            num_tokens=num_tokens + 1,
        )
        self.ahead = Ahead(task)
        return [Send(Role.DRAFT, task)]

    def take_draft(self, limits: Limits) -> None:
        """Another draft takes the place of the former one, which knew nothing that counts. Not while a block is awaited."""
        assert self.draft.in_flight is None, repr(self)
        self.limits = limits
        self.with_draft = True
        self.ahead = None
        self.draft.lost_cache()
        self._cut()

    def finish(self) -> list[Command]:
        """Ends the generation, from whatever phase."""
        if self.phase is Phase.OVER:
            return []
        self.phase = Phase.OVER
        return [End(Role.TARGET), *([End(Role.DRAFT)] if self.with_draft else [])]

    # ---------------------------------------------------------------- the draft

    def draft_answered(self, answer: Answer, generation: int) -> list[Command]:
        """An answer of the draft."""
        if self.phase is Phase.OVER or not self.draft.matches(answer, generation):
            return [Stale(Role.DRAFT)]
        asked = self.draft.in_flight
        assert isinstance(asked, ProposeTask)
        awaited = self.phase is Phase.DRAFTING
        result = answer.result
        ahead = self.ahead
        if isinstance(result, Refusal):
            return self._draft_refused(result, awaited)
        if not isinstance(result, Block) or len(result) > asked.num_tokens:
            return self._draft_failed(awaited)
        if ahead is not None:
            return self._ran_ahead(ahead, answer, result)
        self.draft.answered(answer, self.prefix, result.tokens)
        if not awaited:
            self.draft.settle(self.prefix)
            return self.warm()
        if asked.num_tokens == 0:  # a chunk of the text that had to come before the block
            return [self._ask_draft(self.wanted)] if self.draft.match > asked.keep else self._draft_failed(awaited)
        self.block = self._sound(result)
        return self._verify()

    def draft_late(self) -> list[Command]:
        """The draft did not answer in time. What it still says about this round is dropped."""
        return self._without_block("draft_timeout")

    def draft_down(self) -> list[Command]:
        """The draft's stream broke."""
        self.ahead = None
        if self.draft.in_flight is not None:  # it will not be asked for again, and must not keep another draft away
            self.draft.abandoned()
        self.draft.stream_lost()
        return self._without_block("draft_lost")

    def draft_up(self, same_worker: bool) -> list[Command]:
        """The draft's stream is back, or another draft took its place. Old proposals are not asked for again."""
        self.ahead = None
        self.draft.abandoned()
        self.draft.stream_back(same_worker)
        self._cut()
        return self._without_block("draft_lost")

    def _without_block(self, cause: str) -> list[Command]:
        """A round that waits for its block goes on without it."""
        if self.phase is not Phase.DRAFTING:
            return []
        self.ahead = None
        self.draft.abandoned()
        self._cut()
        return [Fallback(cause), *self._verify()]

    def _ran_ahead(self, ahead: Ahead, answer: Answer, result: Block) -> list[Command]:
        """What the draft proposes beyond a block, which may have been judged meanwhile: then all of it stands."""
        ahead.tokens = result.tokens
        if len(self.prefix) <= ahead.task.base:
            self.draft.ran_ahead(answer, self.prefix, (*self.block.tokens, *result.tokens))
            return []
        self.draft.answered(answer, self.prefix, result.tokens)
        self._judge_ahead(ahead, self.prefix.tokens[-1])
        if self.phase is not Phase.DRAFTING:
            return []
        return self._take_ahead(ahead) if self.ahead is not None else [self._ask_draft(self.wanted)]

    def _judge_ahead(self, ahead: Ahead, bonus: int) -> None:
        """All of the block stands; whether its continuation does is now known, or will be when it is here."""
        if ahead.tokens is None:
            return
        self.draft.caught_up(self.prefix)
        self.ahead_outcome = len(ahead.tokens) > 1 and ahead.tokens[0] == bonus
        if not self.ahead_outcome:
            self._drop_ahead()

    def _take_ahead(self, ahead: Ahead) -> list[Command]:
        """The block of this round is what the draft has proposed ahead; nothing to do before it has."""
        if ahead.tokens is None:
            return []
        self.ahead = None
        self.block = self._sound(Block(ahead.tokens[1:], (), Source.DRAFT_MODEL))
        return self._verify()

    def _drop_ahead(self) -> None:
        """What the draft has proposed ahead is not wanted."""
        self.ahead = None
        self.draft.overtaken(self.prefix)
        self._cut()

    def _draft_refused(self, refusal: Refusal, awaited: bool) -> list[Command]:
        """It forgot the text: it is told again, within the round where that is quick. Or it cannot: the round goes on."""
        cause = f"draft_{refusal.reason.value}"
        beside = self.ahead is not None and not awaited  # the round has its block, and goes on with it
        self.ahead = None
        self.draft.refused(refusal, self.prefix)
        self._cut()
        if refusal.reason not in (Reason.LENGTH, Reason.HASH):
            return [] if beside else [Fallback(cause), *(self._verify() if awaited else [])]
        replayed = Replayed(Role.DRAFT, cause)
        if not awaited:
            return [replayed]
        if self.asked_again or not self.draft_ready():
            return [replayed, Fallback(cause), *self._verify()]
        self.asked_again = True
        return [replayed, self._ask_draft(self.wanted)]

    def _draft_failed(self, awaited: bool) -> list[Command]:
        """It failed, or said what cannot be: it begins anew next time."""
        self.ahead = None
        self.draft.lost_cache()
        self._cut()
        return [Fallback("draft_failed"), *(self._verify() if awaited else [])]

    # ---------------------------------------------------------------- the target

    def target_answered(self, answer: Answer, generation: int) -> list[Command]:
        """An answer of the target."""
        if self.phase is Phase.OVER or not self.target.matches(answer, generation):
            return [Stale(Role.TARGET)]
        asked = self.target.in_flight
        assert isinstance(asked, VerifyTask)
        result = answer.result
        if isinstance(result, Refusal):
            return self._target_refused(result)
        if isinstance(result, Failure):
            return self._target_failed(result)
        if asked.prefill_only:
            self.target.answered(answer, self.prefix, ())
            if self.target.match <= asked.keep:
                return self._target_failed(Failure("a chunk of text was done and nothing came of it"))
            return self._verify()
        sound = (
            isinstance(result, Verdict)
            and result.accepted <= len(self.block)
            and result.added < self.limits.vocab_size
            and answer.length <= asked.base + result.accepted
        )
        if not sound:
            return self._target_failed(Failure(f"verdict out of range: {result}"))
        assert isinstance(result, Verdict)
        self.target.answered(answer, self.prefix, self.block.tokens)
        tokens = result.committed(self.block)
        self.prefix.extend(tokens)
        self.target.settle(self.prefix)
        whole = result.accepted == len(self.block)
        if self.ahead is None:
            self.draft.settle(self.prefix)
            if not whole:
                self._cut()
        elif whole:
            self._judge_ahead(self.ahead, result.added)
        else:
            self.ahead_outcome = False
            self._drop_ahead()
        judged, self.block = self.block, EMPTY_BLOCK
        self.phase = Phase.READY
        return [Commit(tokens, judged, result.accepted)]

    def target_down(self) -> list[Command]:
        """The target's stream broke. The round waits."""
        self.target.stream_lost()
        return []

    def target_up(self, same_worker: bool, generation: int) -> list[Command]:
        """The target's stream is back, or another life of it. The standing block goes out again, as it was."""
        if self.phase is Phase.OVER:
            return []
        told = self.target.match > 0 or self.target.in_flight is not None
        task = self.target.stream_back(same_worker)
        if task is not None:
            return [Send(Role.TARGET, task, again=True)]
        commands: list[Command] = []
        if told and not same_worker:
            self._cut()
            commands.append(Replayed(Role.TARGET, "target_lost"))
        if self.phase is Phase.VERIFYING:
            commands.extend(self._verify())
        return commands

    def retry(self) -> list[Command]:
        """After `Later`."""
        if self.phase is not Phase.VERIFYING or not self.target.idle:
            return []
        return self._verify()

    def _target_refused(self, refusal: Refusal) -> list[Command]:
        self.target.refused(refusal, self.prefix)
        if refusal.reason is Reason.TOO_LATE:
            return [Fail(TooLate("the request's deadline passed before the target came to it"))]
        if refusal.reason is Reason.INVALID:
            return [Fail(OurFault(f"target refused a task: {refusal.detail}"))]
        self._cut()
        if refusal.reason is Reason.NO_ROOM:
            return [Later()]
        self.troubles += 1
        if self.troubles > MAX_TROUBLES:
            return [Fail(OurFault(f"target refused {self.troubles} times: {refusal}"))]
        return [Replayed(Role.TARGET, f"target_{refusal.reason.value}"), *self._verify()]

    def _target_failed(self, failure: Failure) -> list[Command]:
        self.target.lost_cache()
        self._cut()
        self.troubles += 1
        self.failures += 1
        if failure.bad_law:
            return [Fail(BadLaw(failure.detail))]
        if self.failures > 1:
            return [Fail(OurFault(f"target failed twice: {failure.detail}"))]
        return [Replayed(Role.TARGET, "target_failed"), *self._verify()]

    # ---------------------------------------------------------------- making tasks

    def _cut(self) -> None:
        self.epoch += 1
        self.cuts += 1

    def _sound(self, block: Block) -> Block:
        """The block up to the first id the target does not have. A draft's padding rows must not reach the target. Where there are
        laws they decide, and not the tokens drawn from them, since a cut that depends on its own token biases `rejection`."""
        self.unsound = False
        for index, token in enumerate(block.tokens):
            ids = block.laws[index].ids if block.laws else (token,)
            if max(ids) >= self.limits.vocab_size or token >= self.limits.vocab_size:
                self.unsound = True
                return block.cut(index)
        return block

    def _ask_draft(self, num_tokens: int) -> Send:
        keep, keep_hash, rest = self.draft.place(self.prefix)
        if len(rest) > self.limits.draft_max_append:
            rest, num_tokens = rest[: self.limits.draft_max_append], 0
        task = ProposeTask(
            session=self.session,
            epoch=self.epoch,
            number=self.draft.next_number(),
            keep=keep,
            keep_hash=keep_hash,
            append=tuple(rest),
            opening=self.opening if keep == 0 else None,
            time_left_ms=self.envelope.time_left_ms if keep == 0 else 0,
            trace=self.envelope.draft_trace if num_tokens else b"",
            group=self.envelope.group if num_tokens else 0,
            num_tokens=num_tokens,
        )
        return Send(Role.DRAFT, task)

    def _verify(self) -> list[Command]:
        """The next task for the target: a chunk of text it lacks, or the block. Nothing while its stream is lost."""
        self.phase = Phase.VERIFYING
        if self.target.state is State.PROBE:
            return []
        keep, keep_hash, rest = self.target.place(self.prefix)
        chunk = rest[: self.limits.target_max_append]
        prefill_only = len(chunk) < len(rest)
        task = VerifyTask(
            session=self.session,
            epoch=self.epoch,
            number=self.target.next_number(),
            keep=keep,
            keep_hash=keep_hash,
            append=tuple(chunk),
            opening=self.opening if keep == 0 else None,
            time_left_ms=self.envelope.time_left_ms if keep == 0 else 0,
            trace=self.envelope.target_trace,
            block=EMPTY_BLOCK if prefill_only else self.block,
            prefill_only=prefill_only,
            group=0 if prefill_only else self.envelope.group,
        )
        return [Send(Role.TARGET, task)]

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.target.check(self.prefix)
        self.draft.check(self.prefix)
        assert self.phase is not Phase.DRAFTING or self.draft.in_flight is not None, repr(self)
        assert self.phase in (Phase.VERIFYING, Phase.OVER) or not self.block.tokens, repr(self)
        assert self.ahead is None or (self.ahead.tokens is None) == (self.draft.in_flight is self.ahead.task), repr(
            self
        )
