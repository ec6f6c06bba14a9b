"""Where a text stands: hashes of every length, growing, cutting, and the facts about both caches after a verdict."""

from __future__ import annotations

import pytest

from coordinator.mirror import Mirror
from specwire.law.cursor import Cursor, Prefix, step
from specwire.law.tasks import Answer, ProposeTask, SessionId, VerifyTask
from specwire.law.values import GREEDY, Block, Law, Opening, Verdict

SESSION = SessionId(1, 1)
OPENING = Opening(Law.SHARED_NOISE, GREEDY, seed=1, choice=0, prompt_length=2)
FINGERPRINT = OPENING.fingerprint()
MASK = 2**64 - 1


def splitmix64(state: int) -> tuple[int, int]:
    """The published generator (Steele et al. 2014): next state, next output."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def test_step_of_token_zero_is_splitmix64() -> None:
    """The hash is the published one, so a worker in another language can be written from the proto's comment."""
    state, outputs, hashes = 0, [], []
    for _ in range(3):
        hashes.append(step(state, 0))
        state, out = splitmix64(state)
        outputs.append(out)

    assert outputs == hashes


@pytest.mark.parametrize(
    ("prefix_hash", "token", "expected"),
    [
        (0, 0, 0xE220A8397B1DCDAF),
        (0, 1, 0x6E789E6AA1B965F4),
        (1, 0, 0x910A2DEC89025CC1),
        (MASK, 2**32 - 1, 0xD3C3FC2C2DE810EC),
    ],
)
def test_step_is_pinned(prefix_hash: int, token: int, expected: int) -> None:
    """The hash is part of the protocol."""

    assert expected == step(prefix_hash, token)


def test_hash_depends_on_opening_order_and_length() -> None:
    """Other law, other order, or one token fewer: another hash."""
    texts = [(), (1,), (2,), (1, 2), (2, 1), (1, 2, 0), (1, 2, 0, 0)]
    ends = {Prefix(FINGERPRINT, text).hash_at(len(text)) for text in texts}
    ends.add(Prefix(FINGERPRINT + 1, (1, 2)).hash_at(2))

    assert len(texts) + 1 == len(ends)


def test_hash_at_zero_is_the_fingerprint() -> None:
    """An empty text says nothing but the law it will be continued under."""

    assert Prefix(FINGERPRINT, (5, 6)).hash_at(0) == FINGERPRINT


def test_extend_in_pieces_is_extend_at_once() -> None:
    """How a text was cut into tasks does not show in its hash."""
    pieces = Prefix(FINGERPRINT)
    pieces.extend((5,))
    pieces.extend(())
    pieces.extend((6, 7))
    whole = Prefix(FINGERPRINT, (5, 6, 7))

    assert [whole.hash_at(n) for n in range(4)] == [pieces.hash_at(n) for n in range(4)]


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_cut_then_extend_is_as_if_never_otherwise(length: int) -> None:
    """A cut leaves no trace of what was cut."""
    prefix = Prefix(FINGERPRINT, (5, 6, 7))
    prefix.cut(length)
    prefix.extend((9, 9))
    fresh = Prefix(FINGERPRINT, [*(5, 6, 7)[:length], 9, 9])

    assert (list(fresh.tokens), fresh.hash_at(length + 2)) == (list(prefix.tokens), prefix.hash_at(length + 2))


@pytest.mark.parametrize("length", [-1, 4])
def test_cut_outside_the_text_is_refused(length: int) -> None:
    """A text cannot be cut to what it is not, and stays whole when that is tried."""
    prefix = Prefix(FINGERPRINT, (5, 6, 7))
    with pytest.raises(ValueError, match="of 3 tokens"):
        prefix.cut(length)

    assert len(prefix) == 3


@pytest.mark.parametrize("length", [-1, 4])
def test_hash_outside_the_text_is_refused(length: int) -> None:
    """Python's negative indices must not read the end's hash as another length's."""
    prefix = Prefix(FINGERPRINT, (5, 6, 7))

    with pytest.raises(IndexError):
        prefix.hash_at(length)


@pytest.mark.parametrize(
    ("tokens", "start", "count"),
    [((5, 6), 0, 2), ((6, 7), 1, 2), ((6, 7, 8), 1, 2), ((6, 9, 7), 1, 1), ((9,), 0, 0), ((), 1, 0), ((5,), 3, 0)],
)
def test_common_counts_equal_tokens(tokens: tuple[int, ...], start: int, count: int) -> None:
    """From `start` on, up to the first difference or the end of either."""

    assert count == Prefix(FINGERPRINT, (5, 6, 7)).common(tokens, start)


def test_repr_tells_length_and_hash() -> None:
    """Two people with two logs can compare them."""

    assert f"Prefix(length=2, hash={step(step(FINGERPRINT, 5), 6):016x})" == repr(Prefix(FINGERPRINT, (5, 6)))


def test_cursor_is_a_value() -> None:
    """Epoch, length and hash together name a place."""

    assert Cursor(1, 2, 3) == Cursor(1, 2, 3)
    assert Cursor(1, 2, 3) != Cursor(2, 2, 3)


def judged(prefix: Prefix, block: Block, verdict: Verdict) -> Mirror:
    """A target's mirror after one verdict on a text that was new to it."""
    mirror = Mirror()
    task = VerifyTask(SESSION, 1, mirror.next_number(), 0, FINGERPRINT, tuple(prefix.tokens), OPENING, block=block)
    mirror.sent(task, 1)
    mirror.answered(Answer(SESSION, 1, 1, task.base + verdict.accepted, verdict), prefix, block.tokens)
    prefix.extend(verdict.committed(block))
    mirror.settle(prefix)
    return mirror


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_added_token_is_not_in_the_targets_cache(accepted: int) -> None:
    """Correction or bonus: the target has chosen it, but nobody has fed it."""
    prefix = Prefix(FINGERPRINT, (5, 6))
    mirror = judged(prefix, Block((7, 8)), Verdict(accepted, 9))

    assert len(prefix) - 1 == mirror.match
    assert tuple(mirror.place(prefix)[2]) == (9,)


def drafted(prefix: Prefix, block: Block, cached: int) -> Mirror:
    """A draft's mirror after it proposed `block` and kept `cached` tokens of it."""
    mirror = Mirror()
    number = mirror.next_number()
    task = ProposeTask(SESSION, 1, number, 0, FINGERPRINT, tuple(prefix.tokens), OPENING, num_tokens=len(block))
    mirror.sent(task, 1)
    mirror.answered(Answer(SESSION, 1, 1, task.base + cached, block), prefix, block.tokens)
    return mirror


def test_draft_is_one_short_after_full_acceptance() -> None:
    """Its last proposal was never fed back, so two tokens are due: that one and the bonus."""
    prefix = Prefix(FINGERPRINT, (5, 6))
    mirror = drafted(prefix, Block((7, 8)), cached=1)
    prefix.extend((7, 8, 9))
    mirror.settle(prefix)

    assert mirror.match == 3
    assert tuple(mirror.place(prefix)[2]) == (8, 9)


def test_last_drafted_token_is_cached_only_when_the_draft_ran_ahead() -> None:
    """The answer's length says so, and then one token is due."""
    prefix = Prefix(FINGERPRINT, (5, 6))
    mirror = drafted(prefix, Block((7, 8)), cached=2)
    prefix.extend((7, 8, 9))
    mirror.settle(prefix)

    assert mirror.match == 4
    assert tuple(mirror.place(prefix)[2]) == (9,)


def test_refused_tokens_are_cut_from_the_drafts_belief() -> None:
    """What the target refused is not text, so the draft's cache of it counts for nothing."""
    prefix = Prefix(FINGERPRINT, (5, 6))
    mirror = drafted(prefix, Block((7, 8, 3)), cached=2)
    prefix.extend((7, 9))
    mirror.settle(prefix)

    assert mirror.match == 3
    assert tuple(mirror.place(prefix)[2]) == (9,)
