"""One request while it is generated: its counters, its deadline, and what waits for its client."""

from __future__ import annotations

import pytest

from coordinator.clock import RequestClock
from coordinator.session import RequestSpec, Session, Tally
from specwire.law.values import GREEDY, MAX_U32, Law, Source

SPEC = RequestSpec("req-1", (1, 2), GREEDY, Law.SHARED_NOISE, 3, 10, (), frozenset(), None, 8, "auto")


def a_session(give_up_at: float | None = None) -> Session:
    """A request just accepted."""
    return Session(7, SPEC, RequestClock(), give_up_at)


def test_a_plain_round_is_a_round_and_nothing_else() -> None:
    """It drafts nothing, so it does not lower the acceptance rate."""
    tally = Tally()
    tally.round(Source.NONE, 0, 0)

    assert (1, 0, 0, 0, []) == (tally.rounds, tally.drafts, tally.drafted, tally.accepted, tally.per_position)


def test_accepted_are_counted_by_position() -> None:
    """Position i counts the rounds in which all before it and it were accepted."""
    tally = Tally()
    for accepted in (0, 1, 3, 1):
        tally.round(Source.DRAFT_MODEL, 3, accepted)

    assert (4, 4, 12, 5) == (tally.rounds, tally.drafts, tally.drafted, tally.accepted)
    assert tally.per_position == [3, 1, 1]
    assert sum(tally.per_position) == tally.accepted


def test_sources_are_counted_apart() -> None:
    """And together they are all."""
    tally = Tally()
    tally.round(Source.DRAFT_MODEL, 4, 3)
    tally.round(Source.NGRAM, 2, 1)
    message = tally.message()

    assert (4, 3) == (message.drafted_by_model, message.accepted_by_model)
    assert (2, 1) == (message.drafted_by_ngram, message.accepted_by_ngram)
    assert (6, 4) == (message.drafted, message.accepted)


def test_every_counter_is_in_the_message() -> None:
    """None is dropped or confused with another."""
    tally = Tally(1, 2, 3, 4, [5, 6], 7, 8, 9, 10, 11)
    message = tally.message()

    assert [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] == [
        message.rounds,
        message.drafts,
        message.drafted,
        message.accepted,
        *message.accepted_per_position,
        message.drafted_by_model,
        message.accepted_by_model,
        message.drafted_by_ngram,
        message.accepted_by_ngram,
        message.fallbacks,
    ]


@pytest.mark.parametrize(
    ("give_up_at", "now", "left"),
    [(None, 5.0, 0), (7.5, 5.0, 2500), (5.0, 5.0, 1), (4.0, 5.0, 1), (5.0001, 5.0, 1), (1e9, 5.0, MAX_U32)],
)
def test_time_left_never_means_no_limit_by_mistake(give_up_at: float | None, now: float, left: int) -> None:
    """Zero is no limit, so a deadline that is over is one millisecond; one in a year is the longest the wire holds, since a
    larger number would break the frame for everybody."""

    assert left == a_session(give_up_at).time_left_ms(now)


def test_tokens_wait_for_the_client_and_are_counted() -> None:
    """So that a slow reader is noticed."""
    session = a_session()
    session.emit_tokens((1, 2), "ab")
    session.emit_tokens((3,), "")
    session.emit_tokens((), "c")

    assert [((1, 2), "ab"), ((3,), ""), ((), "c")] == [(tuple(r.tokens.ids), r.tokens.text) for r in session.out]
    assert session.behind == 3


def test_an_empty_event_is_no_event() -> None:
    """A round whose text is held back and whose ids are none has nothing to say."""
    session = a_session()
    session.emit_tokens((), "")

    assert (0, 0) == (len(session.out), session.behind)


def test_repr_tells_the_story() -> None:
    """Which one, how far, and whether it is over."""

    assert repr(a_session()) == "Session(7, generated=0, outcome=open, None)"
