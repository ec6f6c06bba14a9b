"""A draft that goes on from its own guess while its block is judged: what each event makes the ledger say, in order.

A round proposes 20, 21, 22. While they are judged the draft is asked for its guess of the bonus, and three tokens after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.ledger import WARM_TOKENS, Command, Commit, Fallback, Later, Phase, Replayed, Role, Send, Stale
from specwire.law.cursor import Prefix
from specwire.law.tasks import Answer, Failure, ProposeTask, Reason, Refusal, VerifyTask
from specwire.law.values import GREEDY, Block, Law, Opening, Source, SparseLaw, Verdict
from tests.unit.coordinator.test_ledger import DRAFT, NGRAM, PLAIN, PROMPT, SESSION, VOCAB, Shell, kinds, text

BLOCK = (20, 21, 22)
BONUS = 30
WHOLE = Verdict(3, BONUS)
OPENING = Opening(Law.SHARED_NOISE, GREEDY, 1, 0, len(PROMPT))
TEXT = (*PROMPT, *BLOCK, BONUS)
"""What stands after a verdict that refuses nothing."""


def proposed(*tokens: int) -> Block:
    """A block of the draft."""
    return Block(tokens, (), DRAFT)


HIT = proposed(BONUS, 40, 41, 42)
MISS = proposed(BONUS + 1, 40, 41, 42)


def asked(number: int, kept: tuple[int, ...], append: tuple[int, ...], num_tokens: int, epoch: int = 1) -> Send:
    """The draft is to keep this text, add that, and propose so many tokens."""
    keep_hash = Prefix(OPENING.fingerprint(), kept).hash_at(len(kept))
    opening = None if kept else OPENING
    return Send(
        Role.DRAFT,
        ProposeTask(SESSION, epoch, number, len(kept), keep_hash, append, opening, num_tokens=num_tokens),
    )


def sent(number: int, kept: tuple[int, ...], append: tuple[int, ...], block: tuple[int, ...], epoch: int = 1) -> Send:
    """The target is to keep this text, add that, and judge a block."""
    keep_hash = Prefix(OPENING.fingerprint(), kept).hash_at(len(kept))
    opening = None if kept else OPENING
    return Send(
        Role.TARGET, VerifyTask(SESSION, epoch, number, len(kept), keep_hash, append, opening, block=Block(block))
    )


NEXT = sent(2, (*PROMPT, *BLOCK), (BONUS,), (40, 41, 42))
"""The next block, which was proposed ahead."""
FURTHER = asked(3, (*TEXT, 40, 41), (42,), 4)
"""And what the draft is asked while that one is judged."""


class AheadShell(Shell):
    """A shell whose draft runs ahead."""

    def ahead(self, num_tokens: int = 3) -> list[Command]:
        """The draft is to go on."""
        return self.do(self.ledger.run_ahead(num_tokens))

    def guess(self, result: Any = HIT, length: int | None = None) -> list[Command]:
        """What it was asked ahead is answered."""
        return self.draft(result, length)


def judging(block: tuple[int, ...] = BLOCK, length: int | None = None, **limits: Any) -> AheadShell:
    """A shell whose block is at the target, and nothing at the draft. `length`: what the draft caches, unless all but the last."""
    shell = AheadShell(**limits)
    shell.begin(DRAFT, len(block) or 3)
    shell.draft(proposed(*block), length)
    return shell


def running() -> AheadShell:
    """A shell whose draft runs ahead."""
    shell = judging()
    shell.ahead()
    return shell


GUESS, VERDICT, BEGIN = "guess", "verdict", "begin"
ORDERS = [(GUESS, VERDICT, BEGIN), (VERDICT, GUESS, BEGIN), (VERDICT, BEGIN, GUESS)]
"""The block is judged last, the client is slow and the guess comes between two rounds, or it is waited for."""
each_order = pytest.mark.parametrize("order", ORDERS, ids=["guess first", "between rounds", "waited for"])


def happen(
    shell: AheadShell,
    order: tuple[str, ...],
    guess: Any = HIT,
    verdict: Verdict = WHOLE,
    begin: tuple[Source, int, tuple[int, ...]] = (DRAFT, 3, ()),
    length: int | None = None,
) -> list[Command]:
    """These events, one after the other; all that was said."""
    events: dict[str, Callable[[], list[Command]]] = {
        GUESS: lambda: shell.guess(guess, length),
        VERDICT: lambda: shell.target(verdict),
        BEGIN: lambda: shell.begin(*begin),
    }
    return [command for each in order for command in events[each]()]


PHASES = [(), (VERDICT,), (VERDICT, BEGIN)]
each_phase = pytest.mark.parametrize("before", PHASES, ids=["verifying", "ready", "drafting"])
"""What has happened before the draft makes trouble."""
AFTER = {(): (VERDICT, BEGIN), (VERDICT,): (BEGIN,), (VERDICT, BEGIN): ()}
"""And what is still to happen until the next round has begun."""


# ------------------------------------------------------------------ what is asked


@pytest.mark.parametrize(
    ("length", "kept", "append"),
    [
        (3, PROMPT, (20, 21, 22)),
        (4, (*PROMPT, 20), (21, 22)),
        (5, (*PROMPT, 20, 21), (22,)),
        (6, (*PROMPT, 20, 21), (22,)),  # the guess follows the last token, so that one is fed again
    ],
)
def test_the_draft_goes_on_from_what_it_caches(length: int, kept: tuple[int, ...], append: tuple[int, ...]) -> None:
    """The rest of its block is its text now, though nobody has judged it; the guess is one token more."""
    shell = judging(length=length)

    assert [asked(2, kept, append, 4)] == shell.ahead(3)
    assert Phase.VERIFYING is shell.ledger.phase


@pytest.mark.parametrize("block", [(20,), (20, 21)])
def test_a_short_block_may_go_on_too(block: tuple[int, ...]) -> None:
    """With another length than its own."""

    assert [asked(2, (*PROMPT, *block[:-1]), block[-1:], 6)] == judging(block).ahead(5)


def test_nothing_goes_along_with_what_is_asked_ahead() -> None:
    """Neither a trace nor a deadline; the round of that block has not begun."""
    shell = AheadShell()
    shell.begin(DRAFT, 3, time_left_ms=9, draft_trace=b"d", target_trace=b"t", group=2)
    shell.draft(proposed(*BLOCK))

    assert [asked(2, (*PROMPT, 20, 21), (22,), 4)] == shell.ahead()


@pytest.mark.parametrize(("context", "expected"), [(1000, 4), (10, 4), (9, 3), (8, 2), (7, None), (6, None)], ids=str)
def test_the_drafts_context_shortens_what_is_asked_or_forbids_it(context: int, expected: int | None) -> None:
    """Six tokens are its text; there must be room for a guess and for a token after it."""
    said = judging(draft_max_context=context).ahead(3)

    assert ([asked(2, (*PROMPT, 20, 21), (22,), expected)] if expected else []) == said


def _beside_reading(source: Source) -> Callable[[], AheadShell]:
    """A draft that was far behind has caught up while something is judged that is not its own."""

    def shell() -> AheadShell:
        made = AheadShell(prompt=tuple(range(WARM_TOKENS + 1)))
        made.begin(source, 0, BLOCK)
        made.draft(Block())
        assert made.ledger.draft.match == len(made.ledger.prefix)
        return made

    return shell


def _with_laws() -> AheadShell:
    shell = AheadShell()
    shell.begin(DRAFT, 2)
    shell.draft(Block((20, 21), (SparseLaw((20,), (1,)), SparseLaw((21, 22), (1, 1))), DRAFT))
    return shell


def _after_trouble(make: Callable[[AheadShell], object]) -> Callable[[], AheadShell]:
    def shell() -> AheadShell:
        made = judging()
        make(made)
        return made

    return shell


def _drafting() -> AheadShell:
    shell = AheadShell()
    shell.begin(DRAFT, 3)
    return shell


def _given_up() -> AheadShell:
    shell = _drafting()
    shell.do(shell.ledger.draft_late())
    return shell


@pytest.mark.parametrize(
    "make",
    [
        _beside_reading(NGRAM),
        _beside_reading(PLAIN),
        _with_laws,
        lambda: judging(()),
        lambda: judging((VOCAB, 21, 22)),
        AheadShell,
        _drafting,
        _given_up,
        running,
        lambda: judging(length=2),
        _after_trouble(lambda shell: shell.ledger.draft_down()),
        _after_trouble(lambda shell: shell.target(WHOLE)),
        _after_trouble(lambda shell: shell.ledger.finish()),
        lambda: AheadShell(with_draft=False),
    ],
    ids=[
        "n-gram",
        "plain",
        "laws",
        "empty",
        "nothing of it is sound",
        "before a round",
        "while it is drafted",
        "given up",
        "ahead already",
        "the draft has lost text",
        "the draft is lost",
        "between rounds",
        "over",
        "no draft",
    ],
)
def test_nothing_runs_ahead_where_that_cannot_be(make: Callable[[], AheadShell]) -> None:
    """There is no block of the draft at the target, or the draft is not where it ends."""
    shell = make()
    before = repr(shell.ledger)

    assert [] == shell.ahead()
    assert (before, None) == (repr(shell.ledger), shell.ledger.ahead_outcome)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_guess_alone_is_not_asked_for(num_tokens: int) -> None:
    """Without a token after it there is nothing to gain."""

    assert [] == judging().ahead(num_tokens)


@pytest.mark.parametrize("block", [(20, VOCAB, 22), (20, 21, VOCAB)])
def test_nothing_runs_ahead_of_a_block_that_was_cut(block: tuple[int, ...]) -> None:
    """What the draft found next is no token of the target, so no guess of the same draft can be right."""

    assert [] == judging(block).ahead()


def test_after_a_block_that_was_cut_the_next_may_go_on() -> None:
    """What follows the correction is another text."""
    shell = judging((20, VOCAB, 22))
    shell.target(Verdict(1, 50))
    shell.begin(DRAFT, 3)
    shell.draft(proposed(60, 61, 62))

    assert [asked(3, (*PROMPT, 20, 50, 60, 61), (62,), 4)] == shell.ahead()


@pytest.mark.parametrize(("max_append", "append"), [(3, [BLOCK]), (2, [])])
def test_what_is_asked_ahead_appends_no_more_than_the_draft_takes(max_append: int, append: list[Any]) -> None:
    """A draft that caches nothing of its block, and takes two tokens: it would refuse the task as invalid."""
    shell = AheadShell(prompt=(10, 11), draft_max_append=max_append)
    shell.begin(DRAFT, 3)
    shell.draft(proposed(*BLOCK), length=2)

    assert append == [each.task.append for each in shell.ahead() if isinstance(each, Send)]


# ------------------------------------------------------------------ the guess is right


@each_order
def test_the_next_block_is_what_was_proposed_ahead(order: tuple[str, ...]) -> None:
    """No task to the draft between two rounds, and it goes on from there. The epoch stays."""
    shell = running()

    assert [Commit((*BLOCK, BONUS), Block(BLOCK), 3), NEXT] == happen(shell, order)
    assert (True, None, DRAFT) == (shell.ledger.ahead_outcome, shell.ledger.ahead, shell.verifying.block.source)
    assert [FURTHER] == shell.ahead()


@each_order
def test_every_round_may_have_its_block_from_the_one_before(order: tuple[str, ...]) -> None:
    """One task to the draft in each, and no new epoch."""
    shell = running()
    for bonus in range(30, 80, 4):
        said = happen(shell, order, proposed(*range(bonus, bonus + 4)), Verdict(3, bonus))
        assert [Role.TARGET] == [each.role for each in said if isinstance(each, Send)]
        assert ["Send draft"] == kinds(shell.ahead())

    assert (1, 15) == (shell.ledger.epoch, shell.ledger.draft.number)
    assert (*BLOCK, *range(30, 79)) == text(shell.ledger)


def test_nothing_is_said_while_both_are_out() -> None:
    """The guess changes nothing before the verdict; a round that waits for it says nothing either."""
    first, later = running(), running()
    later.target(WHOLE)

    assert ([], None, Phase.VERIFYING) == (first.guess(), first.ledger.ahead_outcome, first.ledger.phase)
    assert ([], None, Phase.DRAFTING) == (later.begin(DRAFT, 3), later.ledger.ahead_outcome, later.ledger.phase)


@each_phase
def test_a_draft_that_runs_ahead_can_be_asked(before: tuple[str, ...]) -> None:
    """It has been; nothing is left to read for it."""
    shell = running()
    happen(shell, before)

    assert (True, 0, []) == (shell.ledger.draft_ready(), shell.ledger.to_read(), shell.ledger.warm())


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@each_order
def test_the_block_is_as_long_as_it_was_asked_ahead(order: tuple[str, ...], num_tokens: int) -> None:
    """Whatever the plan would have asked for now."""
    shell = running()

    assert NEXT == happen(shell, order, begin=(DRAFT, num_tokens, ()))[-1]


@pytest.mark.parametrize(
    ("length", "further"),
    [
        (10, FURTHER),  # it holds its last token, which is fed again
        (9, FURTHER),
        (8, asked(3, (*TEXT, 40), (41, 42), 4)),
        (7, asked(3, TEXT, (40, 41, 42), 4)),
        (6, None),  # not even the guess: it is not where the block begins
    ],
)
@each_order
def test_the_draft_caches_what_it_says(order: tuple[str, ...], length: int, further: Send | None) -> None:
    """From there it goes on."""
    shell = running()

    assert NEXT == happen(shell, order, length=length)[-1]
    assert ([further] if further else []) == shell.ahead()


@each_order
@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_a_draft_that_caches_less_is_told_the_rest_afterwards(length: int, order: tuple[str, ...]) -> None:
    """It lost something of its text and has a good block nevertheless; the next round asks from where it is."""
    shell = running()
    happen(shell, order, length=length)
    shell.target(Verdict(3, 50))
    said = shell.begin(DRAFT, 3)

    assert [asked(3, TEXT[:length], (*TEXT[length:], 40, 41, 42, 50), 3)] == said


@pytest.mark.parametrize(
    ("guess", "block"),
    [((BONUS, 40), (40,)), ((BONUS, 40, VOCAB, 42), (40,)), ((BONUS, VOCAB, 41, 42), ()), ((BONUS, 40, 41), (40, 41))],
)
@each_order
def test_of_the_next_block_the_target_gets_what_it_knows(
    order: tuple[str, ...], guess: tuple[int, ...], block: tuple[int, ...]
) -> None:
    """A short one, or none at all, where the draft's context ends or its padding rows begin."""
    shell = running()

    assert sent(2, (*PROMPT, *BLOCK), (BONUS,), block) == happen(shell, order, proposed(*guess))[-1]
    assert shell.ledger.ahead_outcome is True
    assert (VOCAB in guess) is (shell.ahead() == [])  # nobody goes on from what was cut


def test_a_block_proposed_ahead_is_judged_like_any() -> None:
    """A correction in it cuts both caches."""
    shell = running()
    happen(shell, ORDERS[0])

    assert [Commit((40, 50), Block((40, 41, 42)), 1)] == shell.target(Verdict(1, 50))
    assert [asked(3, (*TEXT, 40), (50,), 3, epoch=2)] == shell.begin(DRAFT, 3)


def test_who_reads_the_outcome_sets_it_back() -> None:
    """The ledger says what was decided last."""
    shell = running()
    happen(shell, ORDERS[0])
    shell.ledger.ahead_outcome = None
    shell.ahead()

    assert shell.ledger.ahead_outcome is None
    shell.target(Verdict(0, 50))
    assert shell.ledger.ahead_outcome is False


# ------------------------------------------------------------------ the guess is wrong


@pytest.mark.parametrize("guess", [MISS, proposed(BONUS), proposed(BONUS + 1), proposed()], ids=repr)
@each_order
def test_another_bonus_than_guessed_begins_anew(order: tuple[str, ...], guess: Block) -> None:
    """In a new epoch, from the end of the block, which stands in the draft's cache; a guess with nothing after it is of no use."""
    shell = running()
    again = asked(3, (*PROMPT, *BLOCK), (BONUS,), 3, epoch=2)

    assert [Commit((*BLOCK, BONUS), Block(BLOCK), 3), again] == happen(shell, order, guess)
    assert (False, None, Phase.DRAFTING) == (shell.ledger.ahead_outcome, shell.ledger.ahead, shell.ledger.phase)


@each_order
def test_what_is_asked_anew_is_what_the_plan_says(order: tuple[str, ...]) -> None:
    """And its block is judged in the new epoch."""
    shell = running()

    assert asked(3, (*PROMPT, *BLOCK), (BONUS,), 1, epoch=2) == happen(shell, order, MISS, begin=(DRAFT, 1, ()))[-1]
    assert [sent(2, (*PROMPT, *BLOCK), (BONUS,), (60,), epoch=2)] == shell.draft(proposed(60))
    assert [asked(4, TEXT, (60,), 4, epoch=2)] == shell.ahead()


@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("order", [(VERDICT, BEGIN), (GUESS, VERDICT, BEGIN)], ids=["in flight", "answered"])
def test_a_refusal_in_the_block_begins_anew(order: tuple[str, ...], accepted: int) -> None:
    """In a new epoch. What stands of the block is in the draft's cache, and is not told again."""
    shell = running()
    stands = BLOCK[:accepted]
    again = asked(3, (*PROMPT, *stands), (50,), 3, epoch=2)

    assert [Commit((*stands, 50), Block(BLOCK), accepted), again] == happen(shell, order, verdict=Verdict(accepted, 50))
    assert (False, None) == (shell.ledger.ahead_outcome, shell.ledger.ahead)


@pytest.mark.parametrize("order", [(VERDICT, GUESS), (VERDICT, BEGIN, GUESS)], ids=["between rounds", "drafting"])
def test_what_was_proposed_beyond_a_refusal_is_stale(order: tuple[str, ...]) -> None:
    """Even if its first token is the correction."""
    shell = running()
    task = shell.proposing
    late = Answer(SESSION, task.epoch, task.number, task.base + 3, proposed(50, 40, 41, 42))
    happen(shell, order[:-1], verdict=Verdict(1, 50))
    before = repr(shell.ledger)

    assert [Stale(Role.DRAFT)] == shell.do(shell.ledger.draft_answered(late, 1))
    assert before == repr(shell.ledger)


# ------------------------------------------------------------------ the plan wants something else


@pytest.mark.parametrize(
    ("begin", "block"),
    [((PLAIN, 0, ()), ()), ((DRAFT, 0, ()), ()), ((NGRAM, 2, (60, 61)), (60, 61)), ((NGRAM, 0, ()), ())],
    ids=["plain", "no tokens", "n-gram", "an empty guess"],
)
@pytest.mark.parametrize(
    ("order", "outcome", "length"),
    [((VERDICT, BEGIN), None, 5), ((GUESS, VERDICT, BEGIN), True, 7), ((VERDICT, GUESS, BEGIN), True, 7)],
    ids=["in flight", "guess first", "between rounds"],
)
def test_a_round_without_the_draft_drops_what_was_proposed_ahead(
    order: tuple[str, ...],
    outcome: bool | None,
    length: int,
    begin: tuple[Source, int, tuple[int, ...]],
    block: tuple[int, ...],
) -> None:
    """Right or not: in a new epoch. What stands of it is in the draft's cache when it is asked again."""
    shell = running()
    task = shell.proposing
    late = Answer(SESSION, task.epoch, task.number, task.base + 3, HIT)

    assert sent(2, (*PROMPT, *BLOCK), (BONUS,), block, epoch=2) == happen(shell, order, begin=begin)[-1]
    assert (outcome, None) == (shell.ledger.ahead_outcome, shell.ledger.ahead)
    assert [Stale(Role.DRAFT)] == shell.do(shell.ledger.draft_answered(late, 1))
    shell.target(Verdict(0, 50))
    epoch = shell.ledger.epoch
    assert [asked(3, TEXT[:length], (*TEXT[length:], 50), 3, epoch)] == shell.begin(DRAFT, 3)


# ------------------------------------------------------------------ the draft in trouble


@each_phase
@pytest.mark.parametrize(
    ("refusal", "length"),
    [
        (Refusal(Reason.HASH), 0),
        (Refusal(Reason.LENGTH), 0),
        (Refusal(Reason.LENGTH, 2, Prefix(OPENING.fingerprint(), PROMPT).hash_at(2)), 2),
        (Refusal(Reason.HASH, 2, 12345), 0),
    ],
    ids=["another text", "nothing", "less", "as much, but not ours"],
)
def test_a_draft_that_forgot_is_told_again(before: tuple[str, ...], refusal: Refusal, length: int) -> None:
    """At once where a round waits for it, else when one asks it. The epoch rises."""
    shell = running()
    happen(shell, before)
    said = shell.guess(refusal)
    said += happen(shell, AFTER[before])
    replay = Replayed(Role.DRAFT, f"draft_{refusal.reason.value}")
    again = asked(3, TEXT[:length], TEXT[length:], 3, epoch=2)

    assert [replay, again] == [command for command in said if not isinstance(command, Commit)]
    assert (None, None) == (shell.ledger.ahead, shell.ledger.ahead_outcome)


def test_a_draft_that_forgets_twice_is_left_alone_for_the_round() -> None:
    """As one that did not run ahead."""
    shell = running()
    happen(shell, (VERDICT, BEGIN))
    shell.guess(Refusal(Reason.HASH))

    assert kinds(shell.draft(Refusal(Reason.HASH))) == ["Replayed draft", "Fallback", "Send target"]


def test_a_forgetful_draft_with_a_long_text_reads_beside_the_round() -> None:
    """The client would wait for its reading."""
    shell = AheadShell(prompt=tuple(range(WARM_TOKENS - 3)))
    shell.drafted(*BLOCK)
    shell.target(WHOLE)
    shell.begin(DRAFT, 3)
    shell.draft(proposed(60, 61, 62))
    shell.ahead()
    shell.target(Verdict(3, 63))
    shell.begin(DRAFT, 3)

    assert kinds(shell.guess(Refusal(Reason.LENGTH))) == ["Replayed draft", "Fallback", "Send target"]


@each_phase
@pytest.mark.parametrize("reason", [Reason.NO_ROOM, Reason.STALE, Reason.TOO_LATE, Reason.INVALID, Reason.CLOSED])
def test_a_draft_that_cannot_is_done_without(before: tuple[str, ...], reason: Reason) -> None:
    """What was confirmed before stays so. A round that waits goes on without, and is counted; one that has its block is not
    touched, and the next one asks."""
    shell = running()
    happen(shell, before)
    said = shell.guess(Refusal(reason)) + happen(shell, AFTER[before])
    plain = sent(2, (*PROMPT, *BLOCK), (BONUS,), (), epoch=2)
    again = asked(3, PROMPT, (*BLOCK, BONUS), 3, epoch=2)

    expected = [again] if AFTER[before] else [Fallback(f"draft_{reason.value}"), plain]
    assert expected == [command for command in said if not isinstance(command, Commit)]
    assert (None, None) == (shell.ledger.ahead, shell.ledger.ahead_outcome)


@each_phase
@pytest.mark.parametrize(
    "result",
    [Failure("it broke"), Failure("nan", bad_law=True), None, Verdict(0, 1), proposed(30, 40, 41, 42, 43)],
    ids=["broken", "no law", "nothing", "a verdict", "too much"],
)
def test_a_draft_gone_wrong_begins_anew(before: tuple[str, ...], result: Any) -> None:
    """A failure, an answer of the wrong kind, or more than a guess and three tokens: nothing of its cache is believed."""
    shell = running()
    happen(shell, before)
    said = shell.guess(result, length=6) + happen(shell, AFTER[before])
    plain = sent(2, (*PROMPT, *BLOCK), (BONUS,), (), epoch=2)
    again = asked(3, (), TEXT, 3, epoch=2)

    assert [Fallback("draft_failed"), again if AFTER[before] else plain] == [
        command for command in said if not isinstance(command, Commit)
    ]
    assert (None, None) == (shell.ledger.ahead, shell.ledger.ahead_outcome)


@pytest.mark.parametrize("before", PHASES[:2], ids=["verifying", "ready"])
def test_lateness_matters_only_while_waiting(before: tuple[str, ...]) -> None:
    """Nobody waits for a guess before its round has begun, and it is as good as before."""
    shell = running()
    happen(shell, before)

    assert [] == shell.do(shell.ledger.draft_late())
    assert NEXT == happen(shell, (*AFTER[before], GUESS))[-1]


def test_a_late_guess_is_left_behind() -> None:
    """The round goes on at once, in a new epoch; the next one asks from what was confirmed."""
    shell = running()
    task = shell.proposing
    late = Answer(SESSION, task.epoch, task.number, task.base + 3, HIT)
    happen(shell, (VERDICT, BEGIN))
    plain = sent(2, (*PROMPT, *BLOCK), (BONUS,), (), epoch=2)

    assert [Fallback("draft_timeout"), plain] == shell.do(shell.ledger.draft_late())
    assert [Stale(Role.DRAFT)] == shell.do(shell.ledger.draft_answered(late, 1))
    assert (None, None) == (shell.ledger.ahead, shell.ledger.ahead_outcome)
    shell.target(Verdict(0, 50))
    assert [asked(3, PROMPT, (*BLOCK, BONUS, 50), 3, epoch=2)] == shell.begin(DRAFT, 3)


@each_phase
def test_what_a_lost_draft_was_asked_ahead_is_lost(before: tuple[str, ...]) -> None:
    """Until it is back nobody asks it; a round that waits goes on."""
    shell = running()
    task = shell.proposing
    late = Answer(SESSION, task.epoch, task.number, task.base + 3, HIT)
    happen(shell, before)
    waited = shell.ledger.phase is Phase.DRAFTING
    said = shell.do(shell.ledger.draft_down())
    plain = sent(2, (*PROMPT, *BLOCK), (BONUS,), (), epoch=2 if waited else 1)

    assert ([Fallback("draft_lost"), plain] if waited else []) == said
    assert [Stale(Role.DRAFT)] == shell.do(shell.ledger.draft_answered(late, 1))
    rest = happen(shell, AFTER[before])
    assert waited or plain == rest[-1]
    assert (None, None) == (shell.ledger.ahead, shell.ledger.ahead_outcome)


@each_phase
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("down", [True, False])
def test_a_draft_that_is_back_is_asked_anew(before: tuple[str, ...], same: bool, down: bool) -> None:
    """The same one has what was confirmed before it ran ahead, another one nothing. `down`: and not only another in its place."""
    shell = running()
    happen(shell, before)
    waited = shell.ledger.phase is Phase.DRAFTING
    said = shell.do(shell.ledger.draft_down()) if down else []
    shell.generation[Role.DRAFT] = 2
    said += shell.do(shell.ledger.draft_up(same))
    assert (["Fallback", "Send target"] if waited else []) == kinds(said)
    happen(shell, AFTER[before])
    if waited:
        shell.target(Verdict(0, 50))
        shell.begin(DRAFT, 3)
    task, whole = shell.proposing, (*TEXT, 50) if waited else TEXT
    length = len(PROMPT) if same else 0

    assert asked(3, whole[:length], whole[length:], 3, task.epoch) == Send(Role.DRAFT, task)
    assert task.epoch > 1
    assert shell.ledger.ahead_outcome is None


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("order", [(GUESS,), (GUESS, VERDICT), (VERDICT, GUESS)], ids=["verifying", "ready", "later"])
def test_a_guess_that_is_here_is_dropped_with_its_draft(order: tuple[str, ...], same: bool) -> None:
    """It is another epoch then, and what was right is asked for again."""
    shell = running()
    happen(shell, order)
    said = shell.do(shell.ledger.draft_down())
    shell.generation[Role.DRAFT] = 2
    said += shell.do(shell.ledger.draft_up(same))
    assert [] == said
    (*_, ask) = happen(shell, (BEGIN,) if VERDICT in order else (VERDICT, BEGIN))

    assert isinstance(ask, Send)
    assert (Role.DRAFT, 2, 3) == (ask.role, ask.task.epoch, ask.task.number)
    assert same or ask.task.keep == 0
    assert TEXT == (*shell.ledger.prefix.tokens[: ask.task.keep], *ask.task.append)


def test_another_draft_knows_nothing_of_what_was_proposed_ahead() -> None:
    """It takes the place of the former between two rounds."""
    shell = running()
    happen(shell, (VERDICT, GUESS))
    shell.ledger.take_draft(dataclasses.replace(shell.ledger.limits))

    assert [asked(3, (), TEXT, 3, epoch=2)] == shell.begin(DRAFT, 3)


def test_a_draft_is_not_exchanged_while_it_runs_ahead() -> None:
    """The shell's bug, and it is told."""
    shell = running()
    shell.target(WHOLE)

    with pytest.raises(AssertionError):
        shell.ledger.take_draft(shell.ledger.limits)


# ------------------------------------------------------------------ the target in trouble


def _forgot(shell: AheadShell) -> list[Command]:
    return shell.target(Refusal(Reason.LENGTH))


def _failed(shell: AheadShell) -> list[Command]:
    return shell.target(Failure("it broke"))


def _another(shell: AheadShell) -> list[Command]:
    shell.ledger.target_down()
    shell.generation[Role.TARGET] = 2
    return shell.do(shell.ledger.target_up(False, 2))


def _full(shell: AheadShell) -> list[Command]:
    assert [Later()] == shell.target(Refusal(Reason.NO_ROOM))
    return shell.do(shell.ledger.retry())


each_replay = pytest.mark.parametrize("trouble", [_forgot, _failed, _another, _full])


@each_replay
@pytest.mark.parametrize("guessed", [False, True], ids=["guess out", "guess here"])
def test_a_target_told_again_judges_the_same_block(
    guessed: bool, trouble: Callable[[AheadShell], list[Command]]
) -> None:
    """In a new epoch; and what the draft proposes beyond it is as good as before."""
    shell = running()
    if guessed:
        shell.guess()

    assert sent(2, (), PROMPT, BLOCK, epoch=2) == trouble(shell)[-1]
    said = happen(shell, (VERDICT, BEGIN) if guessed else ORDERS[2])
    assert [Commit((*BLOCK, BONUS), Block(BLOCK), 3)] == said[:1]
    assert [sent(3, (*PROMPT, *BLOCK), (BONUS,), (40, 41, 42), epoch=2)] == said[1:]
    assert [asked(3, (*TEXT, 40, 41), (42,), 4, epoch=2)] == shell.ahead()


@each_replay
def test_a_miss_after_a_replay_is_one_more_epoch(trouble: Callable[[AheadShell], list[Command]]) -> None:
    """Whoever cuts raises it."""
    shell = running()
    trouble(shell)

    assert asked(3, (*PROMPT, *BLOCK), (BONUS,), 3, epoch=3) == happen(shell, ORDERS[0], MISS)[-1]


@each_replay
def test_a_target_told_again_may_be_run_ahead_of(trouble: Callable[[AheadShell], list[Command]]) -> None:
    """Its trouble is none of the draft's."""
    shell = judging()
    trouble(shell)

    assert [asked(2, (*PROMPT, 20, 21), (22,), 4, epoch=2)] == shell.ahead()
    assert sent(3, (*PROMPT, *BLOCK), (BONUS,), (40, 41, 42), epoch=2) == happen(shell, ORDERS[1])[-1]


def test_the_draft_goes_on_while_the_target_is_away() -> None:
    """The block stands until it is judged."""
    shell = judging()
    shell.ledger.target_down()
    assert [asked(2, (*PROMPT, 20, 21), (22,), 4)] == shell.ahead()
    shell.guess()
    shell.generation[Role.TARGET] = 2
    again = shell.do(shell.ledger.target_up(True, 2))

    assert [Send(Role.TARGET, shell.verifying, again=True)] == again
    assert NEXT == happen(shell, (VERDICT, BEGIN))[-1]


def test_a_block_proposed_ahead_waits_for_a_target_that_is_away() -> None:
    """And goes out when it is back."""
    shell = running()
    happen(shell, (GUESS, VERDICT))
    shell.ledger.target_down()

    assert [] == shell.begin(DRAFT, 3)
    assert [NEXT] == shell.do(shell.ledger.target_up(True, 2))


# ------------------------------------------------------------------ the end


@each_phase
def test_after_the_end_no_guess_counts(before: tuple[str, ...]) -> None:
    """Whatever the draft still says."""
    shell = running()
    happen(shell, before)
    task = shell.proposing
    shell.ledger.finish()
    answer = Answer(SESSION, task.epoch, task.number, task.base + 3, HIT)

    assert [Stale(Role.DRAFT)] == shell.do(shell.ledger.draft_answered(answer, 1))
    assert [[], []] == [shell.do(shell.ledger.draft_down()), shell.do(shell.ledger.draft_up(True))]
    assert (Phase.OVER, None) == (shell.ledger.phase, shell.ledger.ahead_outcome)
    assert text(shell.ledger) == ((*BLOCK, BONUS) if before else ())


def test_a_draft_that_dies_while_it_runs_ahead_keeps_no_other_away() -> None:
    """Its guess is not asked for again: nothing is in flight, and another draft can take its place before the verdict is here."""
    shell = running()
    happen(shell, ())
    assert shell.ledger.draft.in_flight is not None
    shell.ledger.draft_down()

    assert shell.ledger.draft.in_flight is None
    shell.ledger.take_draft(shell.ledger.limits)
    shell.ledger.check()
