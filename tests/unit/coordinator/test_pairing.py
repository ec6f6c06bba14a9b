"""Which draft may stand beside which target: one that could not read what the target says is refused by name and token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator import pairing
from coordinator.fleet import Fleet, Standing, Worker
from coordinator.pairing import Pairing, check_reads_all
from specwire.law.errors import VocabularyMismatch
from specwire.wire.info import vocabulary_fingerprint
from tests.unit.coordinator.test_fleet import info

WORDS = [b"word%d" % index for index in range(17)]


def test_a_draft_that_ends_before_a_token_of_the_target_is_refused() -> None:
    """By both names, the id and the token, and with what may help."""
    with pytest.raises(VocabularyMismatch) as caught:
        check_reads_all("target big", WORDS, "draft small", WORDS[:16])

    assert (
        "draft small ends at id 15, and target big has 'word16' at id 16: the draft could not read a text with it. "
        "If its model has a row for that id, set the draft's tokenizer to the target's"
    ) == str(caught.value)


def test_the_first_token_past_its_end_is_named() -> None:
    """Padding before it is not; and a token may be half a character."""
    with pytest.raises(VocabularyMismatch, match="ends at id 3, and big has '\ufffd' at id 6"):
        check_reads_all("big", [*WORDS[:4], b"", b"", b"\xe4", b"more"], "small", WORDS[:4])


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (WORDS, WORDS),
        (WORDS[:16], WORDS),
        ([*WORDS[:16], b""], WORDS[:16]),
        ([*WORDS[:16], b"", b""], [*WORDS[:16], b""]),
        (WORDS, [*WORDS[:8], b"", *WORDS[9:]]),
        ([], []),
    ],
    ids=["equal", "the draft has more", "padding", "padding of both", "a hole", "no tokenizer"],
)
def test_a_draft_that_reads_all_is_fine(target: list[bytes], draft: list[bytes]) -> None:
    """What only the draft can say is cut off its blocks; a row without a token is one all the same."""
    check_reads_all("big", target, "small", draft)


# ------------------------------------------------------------------ as workers come


def known(fleet: Fleet, role: str, vocabulary: Sequence[bytes]) -> Worker:
    """A worker with this vocabulary, whose stream stands."""
    worker, _ = fleet.register(role, info(role, vocab_fingerprint=vocabulary_fingerprint(vocabulary)), "a:1", 0.0)
    fleet.connected(worker)
    return worker


def check(
    monkeypatch: pytest.MonkeyPatch, target: list[bytes], draft: list[bytes], last: str
) -> tuple[Worker, Worker, str]:
    """Both workers after the one that came last was checked, and why it was refused."""
    fleet, said = Fleet(1.0, 2.0), {"target": target, "draft": draft}

    async def told(worker: Worker) -> list[bytes]:
        return said[worker.info.role]

    monkeypatch.setattr(pairing, "fetch_vocabulary", told)
    workers = {role: known(fleet, role, vocabulary) for role, vocabulary in said.items()}
    refused = ""
    try:
        asyncio.run(Pairing(fleet, None, "").check(workers[last]))
    except VocabularyMismatch as error:
        refused = str(error)
    return workers["target"], workers["draft"], refused


def test_a_draft_that_comes_and_cannot_read_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen tokens beside sixteen."""
    target, _, refused = check(monkeypatch, WORDS, WORDS[:16], last="draft")

    assert Standing.READY is target.standing
    assert "draft draft (m) ends at id 15, and target target (m) has 'word16' at id 16" in refused


def test_a_target_that_comes_stays_and_the_draft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service works on without it, and says why."""
    target, draft, refused = check(monkeypatch, WORDS, WORDS[:16], last="target")

    assert (Standing.READY, "", Standing.REFUSED) == (target.standing, refused, draft.standing)
    assert "has 'word16' at id 16" in draft.reason


@pytest.mark.parametrize("last", ["target", "draft"])
@pytest.mark.parametrize("target", [WORDS[:16], [*WORDS[:16], b""]], ids=["shorter", "padded"])
def test_a_draft_with_more_is_welcome(monkeypatch: pytest.MonkeyPatch, target: list[bytes], last: str) -> None:
    """And padding is no token that it would have to read."""
    draft = WORDS if len(target) == 16 else WORDS[:16]
    one, other, refused = check(monkeypatch, target, draft, last)

    assert (Standing.READY, Standing.READY, "") == (one.standing, other.standing, refused)
