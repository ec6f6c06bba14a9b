"""The belief about one worker: what moves it, what does not, and where the next task begins."""

from __future__ import annotations

import pytest

from coordinator.mirror import Mirror, State
from specwire.law.cursor import Prefix
from specwire.law.tasks import Answer, ProposeTask, Reason, Refusal, SessionId
from specwire.law.values import GREEDY, Block, Law, Opening

SESSION = SessionId(1, 1)
OPENING = Opening(Law.SHARED_NOISE, GREEDY, seed=1, choice=0, prompt_length=4)
TEXT = (10, 11, 12, 13)


def a_prefix(*more: int) -> Prefix:
    """The prompt, and what was committed since."""
    return Prefix(OPENING.fingerprint(), (*TEXT, *more))


def ask(mirror: Mirror, prefix: Prefix, epoch: int = 1, generation: int = 1) -> ProposeTask:
    """Sends the next task."""
    keep, keep_hash, rest = mirror.place(prefix)
    opening = OPENING if keep == 0 else None
    task = ProposeTask(SESSION, epoch, mirror.next_number(), keep, keep_hash, tuple(rest), opening, num_tokens=3)
    mirror.sent(task, generation)
    return task


def answer(task: ProposeTask, length: int, tokens: tuple[int, ...] = ()) -> Answer:
    """The task was done."""
    return Answer(SESSION, task.epoch, task.number, length, Block(tokens))


def streaming(prefix: Prefix) -> Mirror:
    """A mirror of a worker that holds the whole text."""
    mirror = Mirror()
    mirror.answered(answer(ask(mirror, prefix), len(prefix)), prefix, ())
    return mirror


def test_nothing_is_believed_at_first() -> None:
    """The first task begins at zero."""
    mirror, prefix = Mirror(), a_prefix()

    assert (0, OPENING.fingerprint(), list(TEXT)) == mirror.place(prefix)
    assert (State.REPLAY, True) == (mirror.state, mirror.idle)


def test_one_task_in_flight() -> None:
    """A second one would cut what the first one's answer is about."""
    mirror, prefix = Mirror(), a_prefix()
    ask(mirror, prefix)

    with pytest.raises(AssertionError, match="one task in flight"):
        ask(mirror, prefix)


@pytest.mark.parametrize(
    ("epoch", "number", "generation", "counts"),
    [(1, 1, 1, True), (2, 1, 1, False), (0, 1, 1, False), (1, 2, 1, False), (1, 0, 1, False), (1, 1, 2, False)],
)
def test_only_the_answer_to_the_task_in_flight_counts(epoch: int, number: int, generation: int, counts: bool) -> None:
    """Epoch, number and stream must all be right."""
    mirror, prefix = Mirror(), a_prefix()
    ask(mirror, prefix, epoch=1, generation=1)

    assert counts is mirror.matches(Answer(SESSION, epoch, number, 4, Block()), generation)


def test_an_answer_counts_once() -> None:
    """Its second coming finds nothing in flight."""
    mirror, prefix = Mirror(), a_prefix()
    task = ask(mirror, prefix)
    mirror.answered(answer(task, 4), prefix, ())

    assert not mirror.matches(answer(task, 4), 1)


@pytest.mark.parametrize(
    ("length", "match", "tail"),
    [(4, 4, ()), (5, 4, (20,)), (6, 4, (20, 21)), (9, 4, (20, 21, 22)), (3, 3, ()), (0, 0, ())],
)
def test_the_answers_length_decides(length: int, match: int, tail: tuple[int, ...]) -> None:
    """Never a rule of thumb: a worker may hold less than it was told, or more than it was asked for."""
    mirror, prefix = Mirror(), a_prefix()
    mirror.answered(answer(ask(mirror, prefix), length), prefix, (20, 21, 22))

    assert (match, tail) == (mirror.match, mirror.tail)
    mirror.check(prefix)


def test_the_last_token_is_always_sent_again() -> None:
    """Its row is what drafts or judges the next one, also where the cache is complete."""
    prefix = a_prefix()
    keep, keep_hash, rest = streaming(prefix).place(prefix)

    assert (3, prefix.hash_at(3), [13]) == (keep, keep_hash, list(rest))


def test_a_lone_token_is_always_a_new_beginning() -> None:
    """There is nothing before it to keep."""
    prefix = Prefix(OPENING.fingerprint(), (10,))
    mirror = Mirror()
    mirror.answered(answer(ask(mirror, prefix), 1), prefix, ())

    assert mirror.place(prefix)[0] == 0


@pytest.mark.parametrize(
    ("committed", "match"), [((20, 21, 30), 6), ((20, 30), 5), ((30,), 4), ((20, 21, 22, 30), 6), ((), 4)]
)
def test_settling_keeps_what_became_text(committed: tuple[int, ...], match: int) -> None:
    """Of the tail 20, 21 as much as the verdict left standing."""
    mirror, prefix = Mirror(), a_prefix()
    mirror.answered(answer(ask(mirror, prefix), 6), prefix, (20, 21, 22))
    prefix.extend(committed)
    mirror.settle(prefix)

    assert (match, ()) == (mirror.match, mirror.tail)
    mirror.check(prefix)


def test_settling_waits_for_the_task_in_flight() -> None:
    """Its answer will say where the worker stands."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    ask(mirror, prefix)
    prefix.extend((20,))
    mirror.settle(prefix)

    assert mirror.match == 4


@pytest.mark.parametrize("reason", [Reason.LENGTH, Reason.HASH])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_refusal_with_our_hash_moves_the_belief_there(reason: Reason, length: int) -> None:
    """The worker says where it stands, and it is our text."""
    prefix = a_prefix(20, 21)
    mirror = streaming(prefix)
    ask(mirror, prefix)
    mirror.refused(Refusal(reason, length, prefix.hash_at(length)), prefix)

    assert (length, State.STREAM, True) == (mirror.match, mirror.state, mirror.idle)


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(Reason.HASH, 2, 12345),
        Refusal(Reason.LENGTH, 0, 0),
        Refusal(Reason.LENGTH, 0, OPENING.fingerprint()),
        Refusal(Reason.HASH, 7, 12345),
    ],
    ids=["another text", "no session", "empty session", "more than we have"],
)
def test_a_refusal_with_another_hash_begins_anew(refusal: Refusal) -> None:
    """What the worker holds is not our text, or is nothing."""
    prefix = a_prefix(20, 21)
    mirror = streaming(prefix)
    ask(mirror, prefix)
    mirror.refused(refusal, prefix)

    assert (0, State.REPLAY, True) == (mirror.match, mirror.state, mirror.idle)


@pytest.mark.parametrize("reason", [Reason.NO_ROOM, Reason.STALE, Reason.TOO_LATE, Reason.INVALID, Reason.CLOSED])
def test_other_refusals_say_nothing_about_the_cache(reason: Reason) -> None:
    """Nothing was done and nothing was changed."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    ask(mirror, prefix)
    mirror.refused(Refusal(reason), prefix)

    assert (4, State.STREAM, True) == (mirror.match, mirror.state, mirror.idle)


def test_a_lost_stream_stops_everything() -> None:
    """Whether the task was done nobody knows, and its answer of the former stream no longer counts."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    task = ask(mirror, prefix)
    mirror.stream_lost()

    assert (State.PROBE, False, False) == (mirror.state, mirror.idle, mirror.matches(answer(task, 4), 1))


def test_the_same_worker_gets_the_same_task() -> None:
    """It repeats its answer if it had done it."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    task = ask(mirror, prefix)
    mirror.stream_lost()
    again = mirror.stream_back(same_worker=True)
    assert again is not None
    mirror.sent(again, 2)

    assert again is task
    assert (True, False) == (mirror.matches(answer(task, 4), 2), mirror.matches(answer(task, 4), 1))


def test_another_worker_knows_nothing() -> None:
    """The task in flight is forgotten with the cache it was about."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    ask(mirror, prefix)
    mirror.stream_lost()

    assert mirror.stream_back(same_worker=False) is None
    assert (State.REPLAY, 0, True) == (mirror.state, mirror.match, mirror.idle)


def test_the_same_worker_keeps_its_cache() -> None:
    """Nothing was in flight: the belief is as good as before."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    mirror.stream_lost()

    assert mirror.stream_back(same_worker=True) is None
    assert (State.STREAM, 4, True) == (mirror.state, mirror.match, mirror.idle)


def test_a_worker_that_was_never_asked_is_not_probed() -> None:
    """There is nothing to be unsure about."""
    mirror = Mirror()
    mirror.stream_lost()

    assert mirror.state is State.REPLAY


def test_an_abandoned_task_leaves_what_is_confirmed() -> None:
    """What came after it is unknown, and the hash at `keep` protects the next task."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    task = ask(mirror, prefix)
    mirror.abandoned()

    assert (4, True, False) == (mirror.match, mirror.idle, mirror.matches(answer(task, 6), 1))


def running_ahead(prefix: Prefix) -> tuple[Mirror, ProposeTask]:
    """A worker that has proposed 20, 21, holds the first of them, and is asked to go on from both."""
    mirror = Mirror()
    mirror.answered(answer(ask(mirror, prefix), 5), prefix, (20, 21))
    beyond = a_prefix(20)
    task = ProposeTask(SESSION, 1, mirror.next_number(), 5, beyond.hash_at(5), (21,), num_tokens=3)
    mirror.sent(task, 1)
    return mirror, task


@pytest.mark.parametrize(
    ("length", "match", "tail"),
    [
        (8, 4, (20, 21, 30, 31)),
        (9, 4, (20, 21, 30, 31, 32)),
        (12, 4, (20, 21, 30, 31, 32)),
        (6, 4, (20, 21)),
        (5, 4, (20,)),
        (4, 4, ()),
        (2, 2, ()),
        (0, 0, ()),
    ],
)
def test_who_ran_ahead_holds_what_nobody_has_judged(length: int, match: int, tail: tuple[int, ...]) -> None:
    """Block and proposals, as far as its answer's length says; no more of the text is confirmed by that."""
    prefix = a_prefix()
    mirror, task = running_ahead(prefix)
    mirror.ran_ahead(answer(task, length), prefix, (20, 21, 30, 31, 32))

    assert (match, tail, None) == (mirror.match, mirror.tail, mirror.in_flight)
    mirror.check(prefix)


@pytest.mark.parametrize(
    ("committed", "match", "tail"),
    [
        ((20, 21, 30), 7, (31,)),  # block and bonus
        ((20, 21, 50), 6, (30, 31)),  # another bonus: what is left does not follow the text
        ((20, 21, 30, 31), 8, ()),
        ((20, 21, 30, 31, 32), 8, ()),
        ((50,), 4, (20, 21, 30, 31)),
        ((), 4, (20, 21, 30, 31)),
    ],
)
def test_text_that_has_caught_up_is_confirmed(committed: tuple[int, ...], match: int, tail: tuple[int, ...]) -> None:
    """The tail goes on from there."""
    prefix = a_prefix()
    mirror, task = running_ahead(prefix)
    mirror.ran_ahead(answer(task, 8), prefix, (20, 21, 30, 31, 32))
    prefix.extend(committed)
    mirror.caught_up(prefix)

    assert (match, tail) == (mirror.match, mirror.tail)
    mirror.check(prefix)


@pytest.mark.parametrize("committed", [(20, 21, 50), (20, 50), (50,)])
@pytest.mark.parametrize("answered", [False, True])
def test_who_was_overtaken_keeps_what_became_text(committed: tuple[int, ...], answered: bool) -> None:
    """Of what it was known to hold: 20 alone while it has not answered. The rest is hope, and its answer counts no more."""
    prefix = a_prefix()
    mirror, task = running_ahead(prefix)
    if answered:
        mirror.ran_ahead(answer(task, 8), prefix, (20, 21, 30, 31, 32))
    prefix.extend(committed)
    mirror.overtaken(prefix)
    stands = prefix.common((20, 21) if answered else (20,), 4)

    assert (4 + stands, ()) == (mirror.match, mirror.tail)
    assert (True, False) == (mirror.idle, mirror.matches(answer(task, 8), 1))
    mirror.check(prefix)


def test_the_next_task_of_who_was_overtaken_begins_where_the_text_parted() -> None:
    """With a number of its own."""
    prefix = a_prefix()
    mirror, _ = running_ahead(prefix)
    prefix.extend((20, 50))
    mirror.overtaken(prefix)
    task = ask(mirror, prefix, epoch=2)

    assert (3, 5, (50,)) == (task.number, task.keep, task.append)


def test_numbers_rise_across_replays() -> None:
    """An answer to a task before the replay is never taken for one after it."""
    prefix = a_prefix()
    mirror = streaming(prefix)
    mirror.lost_cache()

    assert ask(mirror, prefix).number == 2


def test_repr_tells_the_story() -> None:
    """State, what is confirmed, what is hoped for, what is awaited."""
    mirror, prefix = Mirror(), a_prefix()
    before = repr(mirror)
    ask(mirror, prefix)

    assert before == "Mirror(replay, match=0, tail=0, in_flight=none)"
    assert repr(mirror) == "Mirror(stream, match=0, tail=0, in_flight=#1)"
