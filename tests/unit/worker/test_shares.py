"""How a step's rows are divided: the budget is kept, urgent ones come first, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.law.errors import InvalidArgument
from specwire.worker.shares import URGENT_BULK, Claim, Share, check_budget, least_budget, share

MAX_FINAL = 9
BUDGET = least_budget(MAX_FINAL)
claims_strategy = st.lists(
    st.tuples(st.one_of(st.integers(0, 12), st.integers(0, 400)), st.integers(0, MAX_FINAL)), max_size=20
).map(lambda pairs: [Claim(key, bulk, final) for key, (bulk, final) in enumerate(pairs)])


def rows(shares: list[Share]) -> dict[int, int]:
    """Rows by key."""
    return {each.key: each.rows for each in shares}


def test_urgent_first_and_whole_oldest_first() -> None:
    """A claim that does not fit any more ends the list: a younger, smaller one must not pass for ever."""
    claims = [Claim(0, 0, 30), Claim(1, 0, 30), Claim(2, 0, 9), Claim(3, 0, 9)]

    assert share(claims, 68, 64) == [Share(0, 30, True), Share(1, 30, True)]


def test_a_quarter_is_for_long_ones_while_they_wait() -> None:
    """And the rest too, when nobody else wants it."""
    long = Claim(9, 1000, 1)
    busy = [Claim(key, 0, 9) for key in range(9)]

    assert rows(share([*busy, long], 68, 64)) == {**dict.fromkeys(range(5), 9), 9: 23}
    assert rows(share([long], 68, 64)) == {9: 68}


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The oldest gets half, the rest goes to the shortest first."""
    claims = [Claim(0, 1000, 1), Claim(1, 500, 1), Claim(2, 20, 1)]

    assert share(claims, 100, 64) == [Share(0, 50, False), Share(2, 21, True), Share(1, 29, False)]


def test_the_final_rows_are_never_split_from_each_other() -> None:
    """All of the bulk fits, the final rows do not: they come in the next step, which is urgent."""
    assert share([Claim(0, 60, 9)], 68, 64) == [Share(0, 60, False)]


def test_nothing_to_compute_is_served() -> None:
    """A claim without rows takes none."""
    assert share([Claim(0, 0, 0)], 68, 64) == [Share(0, 0, True)]


@given(claims_strategy, st.integers(2, 6))
def test_budget_and_claims_are_kept(claims: list[Claim], max_claims: int) -> None:
    """Never more rows than the budget, never more claims than allowed, no claim twice, none over its need."""
    shares = share(claims, BUDGET, max_claims)
    by_key = {claim.key: claim for claim in claims}

    assert sum(each.rows for each in shares) <= BUDGET
    assert len(shares) <= max_claims
    assert len({each.key for each in shares}) == len(shares)
    for each in shares:
        claim = by_key[each.key]
        assert each.rows == claim.total if each.last else each.rows <= claim.bulk
        assert each.last or each.rows > 0


@given(claims_strategy)
def test_neither_side_starves(claims: list[Claim]) -> None:
    """The oldest of both kinds moves in every step; long ones together get a quarter or all they need."""
    shares = rows(share(claims, BUDGET, 64))
    urgent = [claim for claim in claims if claim.urgent]
    long = [claim for claim in claims if not claim.urgent]

    if urgent:
        assert shares[urgent[0].key] == urgent[0].total
    if long:
        assert shares[long[0].key] > 0
        needed = sum(claim.total for claim in long)
        given_to_long = sum(shares.get(claim.key, 0) for claim in long)
        assert given_to_long >= min(needed, BUDGET // 4) - MAX_FINAL  # a final that does not fit waits


@given(claims_strategy, st.integers(2, 5))
def test_everything_is_served_in_the_end(claims: list[Claim], max_claims: int) -> None:
    """Step after step, with urgent newcomers in each, all of the first ones are done within a bound."""
    waiting, steps = list(claims), 0
    first = {claim.key for claim in claims}
    while any(claim.key in first for claim in waiting):
        steps += 1
        assert steps <= 4 + 2 * len(claims) + sum(claim.total for claim in claims) // (BUDGET // 8)
        got = {each.key: each for each in share(waiting, BUDGET, max_claims)}
        left = []
        for claim in waiting:
            each = got.get(claim.key)
            if each is None:
                left.append(claim)
            elif not each.last:
                left.append(Claim(claim.key, claim.bulk - each.rows, claim.final))
        waiting = [*left, Claim(1000 + steps, 0, MAX_FINAL)]


def test_a_budget_too_small_is_refused() -> None:
    """A quarter must hold the largest urgent claim."""
    check_budget(4 * (9 + URGENT_BULK), 9)
    with pytest.raises(InvalidArgument, match="token_budget: got 67, must be at least 68"):
        check_budget(67, 9)
