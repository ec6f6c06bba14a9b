"""One generation, event by event: what each event makes the ledger say, in order. Stories are in tests/scenario."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.ledger import (
    MAX_TROUBLES,
    NO_ENVELOPE,
    WARM_TOKENS,
    Command,
    Commit,
    End,
    Envelope,
    Fail,
    Fallback,
    Later,
    Ledger,
    Limits,
    Phase,
    Replayed,
    Role,
    Send,
    Stale,
)
from specwire.law.errors import BadLaw, OurFault, TooLate
from specwire.law.tasks import Answer, Failure, ProposeTask, Reason, Refusal, SessionId, VerifyTask
from specwire.law.values import GREEDY, Block, Law, Opening, Source, SparseLaw, Verdict

SESSION = SessionId(1, 1)
PROMPT = (10, 11, 12)
VOCAB = 100
DRAFT, PLAIN, NGRAM = Source.DRAFT_MODEL, Source.NONE, Source.NGRAM


class Shell:
    """Sends what a ledger says and answers as it is told; workers do nothing by themselves."""

    def __init__(self, prompt: tuple[int, ...] = PROMPT, with_draft: bool = True, **limits: int) -> None:
        opening = Opening(Law.SHARED_NOISE, GREEDY, 1, 0, len(prompt))
        ample = Limits(target_max_append=512, draft_max_append=512, draft_max_context=1000, vocab_size=VOCAB)
        self.ledger = Ledger(SESSION, opening, prompt, dataclasses.replace(ample, **limits), with_draft)
        self.generation = {Role.DRAFT: 1, Role.TARGET: 1}
        self.said: list[Command] = []

    def do(self, commands: list[Command]) -> list[Command]:
        """Sends are sent; the rest is for the test to look at."""
        for command in commands:
            if isinstance(command, Send):
                mirror = self.ledger.draft if command.role is Role.DRAFT else self.ledger.target
                mirror.sent(command.task, self.generation[command.role])
        self.ledger.check()
        self.said += commands
        return commands

    def begin(
        self, source: Source = DRAFT, num_tokens: int = 3, guess: tuple[int, ...] = (), **envelope: Any
    ) -> list[Command]:
        """The next round."""
        return self.do(self.ledger.begin(source, num_tokens, guess, Envelope(**envelope)))

    @property
    def proposing(self) -> ProposeTask:
        """The draft's task in flight."""
        task = self.ledger.draft.in_flight
        assert isinstance(task, ProposeTask)
        return task

    @property
    def verifying(self) -> VerifyTask:
        """The target's task in flight."""
        task = self.ledger.target.in_flight
        assert isinstance(task, VerifyTask)
        return task

    def draft(self, result: Any, length: int | None = None) -> list[Command]:
        """The draft answers. A block's last token is not in its cache unless `length` says so."""
        task = self.proposing
        cached = max(0, len(result) - 1) if isinstance(result, Block) else 0
        answer = Answer(SESSION, task.epoch, task.number, task.base + cached if length is None else length, result)
        return self.do(self.ledger.draft_answered(answer, self.generation[Role.DRAFT]))

    def target(self, result: Any, length: int | None = None) -> list[Command]:
        """The target answers."""
        task = self.verifying
        accepted = result.accepted if isinstance(result, Verdict) else 0
        answer = Answer(SESSION, task.epoch, task.number, task.base + accepted if length is None else length, result)
        return self.do(self.ledger.target_answered(answer, self.generation[Role.TARGET]))

    def drafted(self, *tokens: int, num_tokens: int = 3) -> list[Command]:
        """A round up to the draft's answer."""
        self.begin(DRAFT, num_tokens)
        return self.draft(Block(tokens))

    def plain_round(self, token: int) -> list[Command]:
        """A round without a block."""
        self.begin(PLAIN)
        return self.target(Verdict(0, token))


def kinds(commands: list[Command]) -> list[str]:
    """Names of the commands, with the worker."""
    return [
        f"{type(c).__name__} {c.role.value}" if isinstance(c, Send | Replayed) else type(c).__name__ for c in commands
    ]


def text(ledger: Ledger) -> tuple[int, ...]:
    """What was committed after the prompt."""
    return tuple(ledger.prefix.tokens[ledger.opening.prompt_length :])


# ------------------------------------------------------------------ rounds


def test_plain_decoding_is_a_round_with_an_empty_block() -> None:
    """The same task, the same verdict, no draft."""
    shell = Shell(with_draft=False)
    (send,) = shell.begin(PLAIN)
    assert isinstance(send, Send)
    expected = VerifyTask(SESSION, 1, 1, 0, shell.ledger.opening.fingerprint(), PROMPT, shell.ledger.opening)

    assert Send(Role.TARGET, expected) == send
    assert [Commit((20,), Block(), 0)] == shell.target(Verdict(0, 20))
    assert (Phase.READY, (20,)) == (shell.ledger.phase, text(shell.ledger))


def test_the_second_round_keeps_the_first() -> None:
    """Only the added token is new to the target."""
    shell = Shell(with_draft=False)
    shell.plain_round(20)
    shell.begin(PLAIN)

    assert (3, (20,), None) == (shell.verifying.keep, shell.verifying.append, shell.verifying.opening)


def test_the_draft_is_asked_then_the_target() -> None:
    """One after the other, each with the whole prompt and the opening at first."""
    shell = Shell()

    assert kinds(shell.begin(DRAFT, 3)) == ["Send draft"]
    assert (PROMPT, 3) == (shell.proposing.append, shell.proposing.num_tokens)
    assert kinds(shell.draft(Block((20, 21, 22)))) == ["Send target"]
    assert (PROMPT, (20, 21, 22)) == (shell.verifying.append, shell.verifying.block.tokens)


def test_full_acceptance_commits_the_block_and_the_bonus() -> None:
    """No cut, so no new epoch; the target lacks the bonus, the draft its last token and the bonus."""
    shell = Shell()
    shell.drafted(20, 21, 22)
    (commit,) = shell.target(Verdict(3, 30))
    shell.begin(DRAFT, 3)

    assert Commit((20, 21, 22, 30), Block((20, 21, 22)), 3) == commit
    assert (1, 5, (22, 30)) == (shell.proposing.epoch, shell.proposing.keep, shell.proposing.append)


def test_a_correction_cuts_and_raises_the_epoch() -> None:
    """What the target refused is gone from both caches' belief."""
    shell = Shell()
    shell.drafted(20, 21, 22)
    (commit,) = shell.target(Verdict(1, 30))
    shell.begin(DRAFT, 3)

    assert Commit((20, 30), Block((20, 21, 22)), 1) == commit
    assert (2, 4, (30,)) == (shell.proposing.epoch, shell.proposing.keep, shell.proposing.append)


def test_an_ngram_guess_is_judged_without_the_draft() -> None:
    """It needs nobody's help."""
    shell = Shell()

    assert kinds(shell.begin(NGRAM, 0, (20, 21))) == ["Send target"]
    assert (Block((20, 21)), NGRAM) == (shell.verifying.block, shell.verifying.block.source)


def test_an_empty_guess_is_plain_decoding() -> None:
    """A look-up that found nothing."""
    shell = Shell()
    shell.begin(NGRAM, 0, ())

    assert Block() == shell.verifying.block


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_without_a_draft_the_draft_is_not_asked(num_tokens: int) -> None:
    """Whatever the plan says."""

    assert kinds(Shell(with_draft=False).begin(DRAFT, num_tokens)) == ["Send target"]


def test_an_empty_proposal_is_a_plain_step() -> None:
    """Not an error: the draft may be at the end of its context."""
    shell = Shell()

    assert kinds(shell.drafted()) == ["Send target"]
    assert Block() == shell.verifying.block


def test_a_text_longer_than_the_drafts_context_is_not_drafted() -> None:
    """The draft has no place for even one more token."""
    shell = Shell(draft_max_context=len(PROMPT))

    assert kinds(shell.begin(DRAFT, 3)) == ["Send target"]


def test_the_envelope_goes_along() -> None:
    """The trace of the moment is in both tasks of every round, the deadline in the first ones only."""
    shell = Shell()
    seen = []
    for _ in range(2):
        shell.begin(DRAFT, 3, time_left_ms=9, draft_trace=b"d", target_trace=b"t")
        asked = shell.proposing
        shell.draft(Block((20,)))
        judged = shell.verifying
        seen.append((asked.time_left_ms, asked.trace, judged.time_left_ms, judged.trace))
        shell.target(Verdict(0, 21))

    assert [(9, b"d", 9, b"t"), (0, b"d", 0, b"t")] == seen


def test_the_group_goes_along_with_the_block() -> None:
    """Text that only fills the cache goes with any turn; a block that is sent again has its own."""
    shell = Shell(target_max_append=2)
    shell.begin(DRAFT, 3, group=2)
    shell.draft(Block((20, 21)))
    groups = [(shell.verifying.prefill_only, shell.verifying.group)]
    for answer in (None, Refusal(Reason.LENGTH), None):
        shell.target(answer)
        groups.append((shell.verifying.prefill_only, shell.verifying.group))
    shell.target(Verdict(2, 30))
    shell.begin(PLAIN)
    groups.append((shell.verifying.prefill_only, shell.verifying.group))

    assert [(True, 0), (False, 2), (True, 0), (False, 2), (False, 0)] == groups


def test_a_round_begins_only_when_the_last_is_over() -> None:
    """The shell's bug, and it is told."""
    shell = Shell()
    shell.begin()

    with pytest.raises(AssertionError, match="drafting"):
        shell.begin()


# ------------------------------------------------------------------ long texts


def test_a_long_prompt_reaches_the_target_in_chunks() -> None:
    """All but the last only fill the cache; the block goes with the last."""
    shell = Shell(target_max_append=2)
    shell.drafted(20, 21)
    first = shell.verifying
    shell.target(None)
    second = shell.verifying

    assert ((10, 11), True, Block()) == (first.append, first.prefill_only, first.block)
    assert (2, (12,), False, Block((20, 21))) == (second.keep, second.append, second.prefill_only, second.block)


def test_a_chunk_that_changed_nothing_is_a_failure() -> None:
    """A target that says it did a chunk and holds no more than before would be asked for ever."""
    shell = Shell(target_max_append=2)
    shell.begin(PLAIN)

    assert kinds(shell.target(None, length=0)) == ["Replayed target", "Send target"]
    assert kinds(shell.target(None, length=0)) == ["Fail"]


def test_a_draft_far_behind_reads_beside_plain_decoding() -> None:
    """Nobody waits for its prompt."""
    shell = Shell(prompt=tuple(range(WARM_TOKENS + 1)))

    assert kinds(shell.begin(DRAFT, 3)) == ["Send draft", "Send target"]
    assert (0, Phase.VERIFYING) == (shell.proposing.num_tokens, shell.ledger.phase)


def test_a_draft_that_caught_up_is_asked_in_the_next_round() -> None:
    """Its warm answer moves its belief, and says nothing to the round."""
    prompt = tuple(range(WARM_TOKENS + 1))
    shell = Shell(prompt=prompt)
    shell.begin(DRAFT, 3)
    assert shell.draft(Block()) == []
    shell.target(Verdict(0, 30))

    assert kinds(shell.begin(DRAFT, 3)) == ["Send draft"]
    assert (len(prompt), (30,)) == (shell.proposing.keep, shell.proposing.append)


def test_a_draft_far_behind_is_left_there_unless_told() -> None:
    """Reading costs the others something; whoever plans says whether it is worth that."""
    shell = Shell(prompt=tuple(range(WARM_TOKENS + 1)))
    ledger = shell.ledger

    assert ledger.to_read() == WARM_TOKENS + 1
    assert [type(each) for each in ledger.begin(DRAFT, 3, (), NO_ENVELOPE, warm=False)] == [Send]


def test_a_draft_still_reading_is_not_disturbed() -> None:
    """One task in flight: rounds go on without it."""
    shell = Shell(prompt=tuple(range(WARM_TOKENS + 1)))
    shell.begin(DRAFT, 3)
    shell.target(Verdict(0, 30))

    assert kinds(shell.begin(DRAFT, 3)) == ["Send target"]


def test_a_draft_reads_in_chunks() -> None:
    """The next one follows the answer to the last."""
    shell = Shell(prompt=tuple(range(WARM_TOKENS + 30)), draft_max_append=20)
    shell.begin(DRAFT, 3)

    assert kinds(shell.draft(Block())) == ["Send draft"]
    assert (20, 20) == (shell.proposing.keep, len(shell.proposing.append))


@pytest.mark.parametrize("append", [1, 2])
def test_a_chunk_before_the_block_keeps_the_round_waiting(append: int) -> None:
    """A draft that takes small bites is told the text in chunks, and then asked for the block it owes."""
    shell = Shell(draft_max_append=append)
    said = shell.begin(DRAFT, 3)
    asked = []
    while shell.ledger.phase is Phase.DRAFTING:
        asked.append(shell.proposing.num_tokens)
        said += shell.draft(Block((20, 21) if shell.proposing.num_tokens else ()))

    assert [0] * (len(asked) - 1) + [3] == asked
    assert Block((20, 21)) == shell.verifying.block


def test_a_chunk_before_the_block_that_changed_nothing_ends_the_waiting() -> None:
    """A draft that says it read and holds no more than before would be asked for ever."""
    shell = Shell(draft_max_append=1)
    shell.begin(DRAFT, 3)

    assert kinds(shell.draft(Block(), length=0)) == ["Fallback", "Send target"]


# ------------------------------------------------------------------ the draft in trouble


def test_a_late_draft_is_left_behind() -> None:
    """The round goes on at once, in a new epoch, and what the draft still says changes nothing."""
    shell = Shell()
    shell.begin(DRAFT, 3)
    late = Answer(SESSION, shell.proposing.epoch, shell.proposing.number, 5, Block((20, 21, 22)))

    assert kinds(shell.do(shell.ledger.draft_late())) == ["Fallback", "Send target"]
    assert (2, Block()) == (shell.verifying.epoch, shell.verifying.block)
    assert [Stale(Role.DRAFT)] == shell.do(shell.ledger.draft_answered(late, 1))


def test_lateness_matters_only_while_waiting() -> None:
    """A timer that fires too late does nothing."""
    shell = Shell()
    shell.drafted(20)

    assert shell.ledger.draft_late() == []


def test_after_lateness_the_draft_is_asked_again() -> None:
    """From what is confirmed in its cache."""
    shell = Shell()
    shell.begin(DRAFT, 3)
    shell.do(shell.ledger.draft_late())
    shell.target(Verdict(0, 30))

    assert kinds(shell.begin(DRAFT, 3)) == ["Send draft"]
    assert (2, 0) == (shell.proposing.number, shell.proposing.keep)


@pytest.mark.parametrize("reason", [Reason.LENGTH, Reason.HASH])
def test_a_forgetful_draft_is_replayed_within_the_round(reason: Reason) -> None:
    """Once; the text is short, so the block is still worth it."""
    shell = Shell()
    shell.drafted(20)
    shell.target(Verdict(1, 30))
    shell.begin(DRAFT, 2)

    assert kinds(shell.draft(Refusal(reason))) == ["Replayed draft", "Send draft"]
    assert (0, 2, 2) == (shell.proposing.keep, shell.proposing.num_tokens, shell.proposing.epoch)


def test_a_draft_that_refuses_twice_is_left_alone_for_the_round() -> None:
    """The fallback is told, so that it is counted."""
    shell = Shell()
    shell.begin(DRAFT, 2)
    shell.draft(Refusal(Reason.HASH))

    assert kinds(shell.draft(Refusal(Reason.HASH))) == ["Replayed draft", "Fallback", "Send target"]


def test_a_forgetful_draft_with_a_long_text_reads_beside_the_round() -> None:
    """Replaying within the round would keep the client waiting."""
    shell = Shell(prompt=tuple(range(WARM_TOKENS)))
    shell.drafted(20)
    shell.target(Verdict(1, 30))
    shell.begin(DRAFT, 2)

    assert kinds(shell.draft(Refusal(Reason.LENGTH))) == ["Replayed draft", "Fallback", "Send target"]


@pytest.mark.parametrize("reason", [Reason.NO_ROOM, Reason.TOO_LATE, Reason.STALE, Reason.INVALID, Reason.CLOSED])
def test_a_draft_that_cannot_is_done_without(reason: Reason) -> None:
    """The cause is named."""
    shell = Shell()
    shell.begin(DRAFT, 2)
    fallback, send = shell.draft(Refusal(reason))

    assert (Fallback(f"draft_{reason.value}"), "Send target") == (fallback, *kinds([send]))


@pytest.mark.parametrize(
    "result", [Failure("it broke"), Failure("nan", bad_law=True), None, Verdict(0, 1), Block((1, 2, 3, 4))]
)
def test_a_draft_gone_wrong_is_done_without(result: Any) -> None:
    """A failure, an answer of the wrong kind, or more tokens than were asked for: it begins anew next time."""
    shell = Shell()
    shell.begin(DRAFT, 3)

    assert kinds(shell.draft(result)) == ["Fallback", "Send target"]
    assert shell.ledger.draft.match == 0


def test_troubles_of_the_draft_are_not_the_targets() -> None:
    """A draft refused twice, then a target fails once: that is one failure, and it is replayed."""
    shell = Shell()
    shell.begin(DRAFT, 2)
    shell.draft(Refusal(Reason.HASH))
    shell.draft(Refusal(Reason.HASH))

    assert kinds(shell.target(Failure("it broke"))) == ["Replayed target", "Send target"]


def test_a_lost_draft_is_done_without() -> None:
    """At once while its block is awaited."""
    shell = Shell()
    shell.begin(DRAFT, 3)

    assert kinds(shell.do(shell.ledger.draft_down())) == ["Fallback", "Send target"]


def test_a_draft_lost_in_between_is_no_event() -> None:
    """Nobody waits for it."""
    shell = Shell()
    shell.drafted(20)

    assert shell.ledger.draft_down() == []


def test_a_lost_draft_is_not_asked() -> None:
    """Until it is back."""
    shell = Shell()
    shell.drafted(20)
    shell.ledger.draft_down()
    shell.target(Verdict(1, 30))

    assert kinds(shell.begin(DRAFT, 3)) == ["Send target"]


@pytest.mark.parametrize(("same", "keep"), [(True, 3), (False, 0)])
def test_a_draft_that_is_back_is_asked_again(same: bool, keep: int) -> None:
    """The same one goes on where it stood, another one is told everything."""
    shell = Shell()
    shell.drafted(20)
    shell.ledger.draft_down()
    shell.target(Verdict(1, 30))
    shell.plain_round(31)
    shell.do(shell.ledger.draft_up(same))
    shell.begin(DRAFT, 3)

    assert (keep, tuple(shell.ledger.prefix.tokens[keep:])) == (shell.proposing.keep, shell.proposing.append)


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_that_changed_under_a_round_ends_the_waiting(same: bool) -> None:
    """Old proposals are not asked for again, so the round must not wait for one."""
    shell = Shell()
    shell.begin(DRAFT, 3)

    assert kinds(shell.do(shell.ledger.draft_up(same))) == ["Fallback", "Send target"]


def test_ids_the_target_lacks_do_not_reach_it() -> None:
    """A draft's padding rows: the block ends before the first of them."""
    shell = Shell()
    shell.drafted(20, VOCAB, 22)

    assert Block((20,)) == shell.verifying.block


def test_laws_with_ids_the_target_lacks_do_not_reach_it() -> None:
    """The cut is at the first law that names one, whichever token was drawn: a cut that depends on the drafted token would
    bias the output under `rejection`."""
    sound, unsound = SparseLaw((20, 21), (1, 1)), SparseLaw((21, VOCAB), (1, 1))
    shell = Shell()
    shell.begin(DRAFT, 3)
    shell.draft(Block((20, 21, 20), (sound, unsound, sound)))

    assert Block((20,), (sound,)) == shell.verifying.block


# ------------------------------------------------------------------ the target in trouble


def test_once_sent_a_block_stands() -> None:
    """The same worker gets the same task, another one the same block."""
    shell = Shell()
    shell.drafted(20, 21)
    sent = shell.verifying
    shell.ledger.target_down()
    again = shell.do(shell.ledger.target_up(True, 2))
    shell.ledger.target_down()
    anew = shell.do(shell.ledger.target_up(False, 3))

    assert [Send(Role.TARGET, sent, again=True)] == again
    assert kinds(anew) == ["Replayed target", "Send target"]
    assert (sent.block, 0, PROMPT) == (shell.verifying.block, shell.verifying.keep, shell.verifying.append)


def test_a_new_target_that_owes_nothing_is_no_replay() -> None:
    """Nothing was told to the old one."""

    assert Shell().ledger.target_up(False, 1) == []


def test_a_block_drafted_while_the_target_is_away_waits() -> None:
    """And goes out when it is back."""
    shell = Shell()
    shell.drafted(20)
    shell.target(Verdict(1, 30))
    shell.begin(DRAFT, 2)
    shell.ledger.target_down()

    assert shell.draft(Block((21, 22))) == []
    assert kinds(shell.do(shell.ledger.target_up(True, 2))) == ["Send target"]
    assert Block((21, 22)) == shell.verifying.block


def test_an_answer_of_a_former_stream_changes_nothing() -> None:
    """Even the right one: the task was sent again, and the answer to that will count."""
    shell = Shell()
    shell.drafted(20, 21)
    task = shell.verifying
    answer = Answer(SESSION, task.epoch, task.number, task.base + 2, Verdict(2, 30))
    shell.ledger.target_down()
    shell.generation[Role.TARGET] = 2
    shell.do(shell.ledger.target_up(True, 2))

    assert [Stale(Role.TARGET)] == shell.do(shell.ledger.target_answered(answer, 1))
    assert [Commit((20, 21, 30), Block((20, 21)), 2)] == shell.do(shell.ledger.target_answered(answer, 2))
    assert [Stale(Role.TARGET)] == shell.do(shell.ledger.target_answered(answer, 2))


@pytest.mark.parametrize("reason", [Reason.LENGTH, Reason.HASH, Reason.STALE, Reason.CLOSED])
def test_a_refusal_of_the_target_is_replayed(reason: Reason) -> None:
    """In a new epoch, with the same block, as often as a round may have troubles."""
    shell = Shell()
    shell.drafted(20, 21)
    for _ in range(MAX_TROUBLES):
        assert kinds(shell.target(Refusal(reason))) == ["Replayed target", "Send target"]
        assert Block((20, 21)) == shell.verifying.block
    (fail,) = shell.target(Refusal(reason))

    assert isinstance(fail, Fail)
    assert isinstance(fail.error, OurFault)


def test_no_room_is_asked_again_later() -> None:
    """As often as it takes: only the request's deadline ends it."""
    shell = Shell()
    shell.drafted(20)
    for _ in range(3 * MAX_TROUBLES):
        assert [Later()] == shell.target(Refusal(Reason.NO_ROOM))
        assert kinds(shell.do(shell.ledger.retry())) == ["Send target"]

    assert Block((20,)) == shell.verifying.block


def test_later_is_nothing_when_the_time_has_passed_otherwise() -> None:
    """A second timer, or one that fires after the end."""
    shell = Shell()
    shell.begin(PLAIN)
    waiting = shell.ledger.retry()
    shell.target(Verdict(0, 20))

    assert ([], []) == (waiting, shell.ledger.retry())


def test_too_late_is_the_requests_fault() -> None:
    """Its deadline passed in the target's queue."""
    shell = Shell()
    shell.begin(PLAIN)
    (fail,) = shell.target(Refusal(Reason.TOO_LATE))

    assert isinstance(fail, Fail)
    assert isinstance(fail.error, TooLate)


def test_an_invalid_task_is_our_fault() -> None:
    """Asking again would be refused again; the detail is for the log."""
    shell = Shell()
    shell.begin(PLAIN)
    (fail,) = shell.target(Refusal(Reason.INVALID, detail="block: got 9"))

    assert isinstance(fail, Fail)
    assert (OurFault, True) == (type(fail.error), "block: got 9" in str(fail.error))


def test_a_bad_law_fails_the_request() -> None:
    """A retry would fail alike, and no token is invented."""
    shell = Shell()
    shell.drafted(20)
    (fail,) = shell.target(Failure("not a number", bad_law=True))

    assert isinstance(fail, Fail)
    assert (BadLaw, ()) == (type(fail.error), text(shell.ledger))


def test_a_failure_is_tried_once_more() -> None:
    """From the beginning, since the worker dropped the session; the second one fails the request."""
    shell = Shell()
    shell.drafted(20)
    first = shell.target(Failure("it broke"))
    assert (0, Block((20,))) == (shell.verifying.keep, shell.verifying.block)
    second = shell.target(Failure("it broke"))

    assert (["Replayed target", "Send target"], ["Fail"]) == (kinds(first), kinds(second))


def test_refusals_are_no_failures() -> None:
    """A target that forgot the session and then failed once has failed once."""
    shell = Shell()
    shell.drafted(20)
    shell.target(Refusal(Reason.LENGTH))

    assert kinds(shell.target(Failure("it broke"))) == ["Replayed target", "Send target"]


def test_each_round_has_its_own_troubles() -> None:
    """One failure per round is nothing that adds up."""
    shell = Shell()
    for token in range(20, 23):
        shell.begin(PLAIN)
        shell.target(Failure("it broke"))
        shell.target(Verdict(0, token))

    assert text(shell.ledger) == (20, 21, 22)


@pytest.mark.parametrize(
    ("result", "length"),
    [(Verdict(3, 30), 5), (Verdict(0, VOCAB), 3), (Verdict(1, 30), 5), (Block((20,)), 3), (None, 3)],
    ids=["more than proposed", "no such id", "holds what was refused", "a block", "no verdict"],
)
def test_a_verdict_that_cannot_be_is_a_failure(result: Any, length: int) -> None:
    """No invented token is committed."""
    shell = Shell()
    shell.drafted(20, 21)

    assert kinds(shell.target(result, length)) == ["Replayed target", "Send target"]
    assert text(shell.ledger) == ()


# ------------------------------------------------------------------ stale answers and the end


@pytest.mark.parametrize(("epoch", "number"), [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("role", list(Role))
def test_answers_to_other_tasks_change_nothing(role: Role, epoch: int, number: int) -> None:
    """Epoch and number must both be right."""
    shell = Shell()
    shell.begin(DRAFT, 3)
    if role is Role.TARGET:
        shell.draft(Block((20,)))
    before = repr(shell.ledger)
    hear = shell.ledger.draft_answered if role is Role.DRAFT else shell.ledger.target_answered
    result = Block((20,)) if role is Role.DRAFT else Verdict(0, 30)

    assert [Stale(role)] == hear(Answer(SESSION, epoch, number, 3, result), 1)
    assert before == repr(shell.ledger)


@pytest.mark.parametrize("with_draft", [True, False])
def test_the_end_is_told_to_whoever_knows_the_session(with_draft: bool) -> None:
    """Once."""
    ledger = Shell(with_draft=with_draft).ledger
    roles = [Role.TARGET, Role.DRAFT] if with_draft else [Role.TARGET]

    assert ([End(role) for role in roles], []) == (ledger.finish(), ledger.finish())


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DRAFTING, Phase.VERIFYING])
def test_after_the_end_nothing_happens(phase: Phase) -> None:
    """Whatever still arrives, from whatever phase it ended."""
    shell = Shell()
    if phase is not Phase.READY:
        shell.begin(DRAFT, 3)
    if phase is Phase.VERIFYING:
        shell.draft(Block((20,)))
    assert phase is shell.ledger.phase
    ledger = shell.ledger
    flying = ledger.draft.in_flight or ledger.target.in_flight
    number = flying.number if flying is not None else 0
    ledger.finish()
    ledger.check()
    events = [
        ledger.draft_answered(Answer(SESSION, 1, number, 3, Block((20,))), 1),
        ledger.target_answered(Answer(SESSION, 1, number, 3, Verdict(0, 30)), 1),
        ledger.draft_late(),
        ledger.draft_down(),
        ledger.target_down(),
        ledger.draft_up(False),
        ledger.target_up(False, 2),
        ledger.retry(),
    ]

    assert [[Stale(Role.DRAFT)], [Stale(Role.TARGET)], [], [], [], [], [], []] == events
    assert (Phase.OVER, ()) == (ledger.phase, text(ledger))


def test_repr_tells_the_story() -> None:
    """Phase, epoch, lengths and both beliefs on one line."""
    shell = Shell()
    shell.drafted(20, 21)

    assert repr(shell.ledger) == (
        "Ledger(verifying, epoch=1, committed=3, block=2, target=Mirror(stream, match=0, tail=0, in_flight=#1), "
        "draft=Mirror(stream, match=3, tail=1, in_flight=none))"
    )


# ------------------------------------------------------------------ another draft


def test_another_draft_is_told_everything() -> None:
    """It takes the place of the former one between two rounds; the epoch rises, so that the former one's answers are stale."""
    shell = Shell()
    shell.drafted(20, 21, 22)
    shell.target(Verdict(3, 30))
    epoch = shell.ledger.epoch
    shell.ledger.take_draft(dataclasses.replace(shell.ledger.limits, draft_max_context=7))
    assert kinds(shell.begin(DRAFT, 3)) == [
        "Send target"
    ]  # 4 committed: the new draft's context is too short for the block
    shell.target(Verdict(0, 31))

    shell.ledger.take_draft(dataclasses.replace(shell.ledger.limits, draft_max_context=1000))
    shell.begin(DRAFT, 3)
    assert (0, (*PROMPT, 20, 21, 22, 30, 31), 3) == (
        shell.proposing.keep,
        shell.proposing.append,
        shell.proposing.num_tokens,
    )
    assert shell.proposing.epoch > epoch


def test_a_session_without_a_draft_may_get_one() -> None:
    """From the next round on."""
    shell = Shell(with_draft=False)
    shell.plain_round(20)
    shell.ledger.take_draft(shell.ledger.limits)

    assert kinds(shell.begin(DRAFT, 3)) == ["Send draft"]


def test_a_draft_is_not_exchanged_while_its_block_is_awaited() -> None:
    """The shell's bug, and it is told."""
    shell = Shell()
    shell.begin(DRAFT, 3)
    with pytest.raises(AssertionError):
        shell.ledger.take_draft(shell.ledger.limits)
