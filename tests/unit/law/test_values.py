"""Values refuse to be built wrong, say which field was wrong, and never change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specwire.law.errors import InvalidArgument
from specwire.law.values import (
    EMPTY_BLOCK,
    GREEDY,
    MAX_U32,
    MAX_U64,
    Block,
    Law,
    Opening,
    SamplingSpec,
    Source,
    SparseLaw,
    Verdict,
)

NAN, INFINITY = float("nan"), float("inf")


def an_opening(**fields: Any) -> Opening:
    """A sound opening, but for the given fields."""
    return Opening(**{"law": Law.SHARED_NOISE, "sampling": GREEDY, "seed": 7, "choice": 0, "prompt_length": 3} | fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("top_k", -1),
        ("top_k", MAX_U32 + 1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", NAN),
    ],
)
def test_sampling_out_of_range_names_its_field(field: str, value: float) -> None:
    """A setting outside its range cannot exist, and the error names it."""
    with pytest.raises(InvalidArgument) as caught:
        SamplingSpec(**{field: value})  # type: ignore[arg-type]

    assert field == caught.value.field


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(0.0, 0, 1.0, 0.0),
        SamplingSpec(100.0, MAX_U32, 1.0, 1.0),
        SamplingSpec(top_p=1e-9),
    ],
)
def test_borders_of_sampling_belong_to_it(spec: SamplingSpec) -> None:
    """The borders that the documentation names are allowed."""

    assert spec == dataclasses.replace(spec)


def test_greedy_means_temperature_zero() -> None:
    """No draw is made exactly at temperature zero."""

    assert (GREEDY.greedy, SamplingSpec(temperature=1e-6).greedy) == (True, False)


@pytest.mark.parametrize(
    ("spec", "filtered"),
    [
        (SamplingSpec(), False),
        (SamplingSpec(top_k=1), True),
        (SamplingSpec(top_p=0.5), True),
        (SamplingSpec(min_p=0.1), True),
    ],
)
def test_filtered_means_that_a_token_can_be_removed(spec: SamplingSpec, filtered: bool) -> None:
    """Each filter counts, temperature does not."""

    assert filtered == spec.filtered


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", MAX_U64 + 1),
        ("choice", -1),
        ("choice", MAX_U32 + 1),
        ("prompt_length", 0),
        ("prompt_length", MAX_U32 + 1),
    ],
)
def test_opening_out_of_range_names_its_field(field: str, value: int) -> None:
    """An opening that no worker could use cannot exist."""
    with pytest.raises(InvalidArgument) as caught:
        an_opening(**{field: value})

    assert field == caught.value.field


@pytest.mark.parametrize(
    "other",
    [
        {"law": Law.REJECTION},
        {"sampling": SamplingSpec(temperature=0.5)},
        {"sampling": SamplingSpec(temperature=0.0, top_k=4)},
        {"sampling": SamplingSpec(temperature=0.0, top_p=0.5)},
        {"sampling": SamplingSpec(temperature=0.0, min_p=0.5)},
        {"seed": 8},
        {"choice": 1},
        {"prompt_length": 4},
    ],
)
def test_every_field_of_an_opening_is_in_its_fingerprint(other: dict[str, Any]) -> None:
    """Two workers that agree on a hash agree on everything that shapes the answer."""

    assert an_opening().fingerprint() != an_opening(**other).fingerprint()


def test_fingerprint_is_pinned() -> None:
    """The fingerprint is part of the protocol: another number would make old peers refuse everything."""
    opening = an_opening(law=Law.REJECTION, sampling=SamplingSpec(0.7, 40, 0.9, 0.05), seed=MAX_U64, choice=2)

    assert opening.fingerprint() == 0xA68970CED6D29B16


def test_fingerprint_sees_what_travels() -> None:
    """Numbers travel as float32, so two that are one there have one fingerprint."""
    double = an_opening(sampling=SamplingSpec(temperature=0.7))
    single = an_opening(sampling=SamplingSpec(temperature=0.699999988079071))

    assert double.fingerprint() == single.fingerprint()


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        ((), ()),
        ((1,), ()),
        ((1, 2), (1,)),
        ((1, 1), (1, 2)),
        ((1, 2), (0, 1)),
        ((1, 2), (-1, 3)),
        ((1, 2), (MAX_U32, 1)),
    ],
)
def test_sparse_law_refuses_what_is_no_law(ids: tuple[int, ...], weights: tuple[int, ...]) -> None:
    """Empty, ragged, repeated, weightless or overflowing: none of them is a law."""
    with pytest.raises(InvalidArgument, match="draft_law"):
        SparseLaw(ids, weights)


def test_sparse_law_takes_the_largest_sum() -> None:
    """Weights may sum to exactly 2^32 - 1."""

    assert sum(SparseLaw((3, 5), (MAX_U32 - 1, 1)).weights) == MAX_U32


@pytest.mark.parametrize("laws", [1, 3])
def test_block_has_one_law_per_token_or_none(laws: int) -> None:
    """Some tokens with a law and some without would be judged by two rules."""
    with pytest.raises(InvalidArgument, match=r"block\.laws"):
        Block((4, 5), (SparseLaw((4,), (1,)),) * laws)


def test_block_is_its_tokens_and_laws_wherever_it_came_from() -> None:
    """The source is for counters; it does not travel and does not make two blocks differ."""

    assert Block((4, 5), source=Source.NGRAM) == Block((4, 5), source=Source.DRAFT_MODEL)


def test_cut_block_keeps_laws_and_source() -> None:
    """A shorter block is the same proposal, ended earlier."""
    laws = tuple(SparseLaw((token, 9), (1, 2)) for token in (4, 5, 6))
    cut = Block((4, 5, 6), laws, Source.DRAFT_MODEL).cut(2)

    assert ((4, 5), laws[:2], Source.DRAFT_MODEL) == (cut.tokens, cut.laws, cut.source)


def test_empty_block_is_plain_decoding() -> None:
    """Nothing proposed, nothing to accept: the verdict's token is the output."""

    assert (len(EMPTY_BLOCK), Verdict(0, 8).committed(EMPTY_BLOCK)) == (0, (8,))


@pytest.mark.parametrize(("accepted", "added", "field"), [(-1, 0, "verdict.accepted"), (0, -1, "verdict.added")])
def test_verdict_refuses_negative_numbers(accepted: int, added: int, field: str) -> None:
    """No sign carries a meaning."""
    with pytest.raises(InvalidArgument) as caught:
        Verdict(accepted, added)

    assert field == caught.value.field


@pytest.mark.parametrize(("accepted", "text"), [(0, (9,)), (1, (4, 9)), (2, (4, 5, 9))])
def test_committed_is_accepted_and_added(accepted: int, text: tuple[int, ...]) -> None:
    """What stands of the block, and one token more, whether correction or bonus."""

    assert text == Verdict(accepted, 9).committed(Block((4, 5)))


def test_verdict_cannot_accept_more_than_was_proposed() -> None:
    """A verdict longer than its block is no verdict."""
    with pytest.raises(InvalidArgument, match="at most the block's 2 tokens"):
        Verdict(3, 9).committed(Block((4, 5)))


@pytest.mark.parametrize(
    ("value", "field"),
    [(GREEDY, "temperature"), (an_opening(), "seed"), (EMPTY_BLOCK, "tokens"), (Verdict(0, 1), "added")],
)
def test_values_never_change(value: object, field: str) -> None:
    """A value that two files hold is the same value in both."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, 1)


def test_long_values_are_shortened_in_messages() -> None:
    """An error about a million ids is still one line."""
    error = InvalidArgument("prompt_ids", list(range(1000)), "shorter")

    assert len(str(error)) < 130
