"""Who gets rows in the next step: the one rule by which both engines divide a token budget.

Law. A claim is some `bulk` rows that may be split over steps (a prompt, a replay) and then `final` rows that go together, in
one step, right after the last of the bulk. A claim whose rows all fit a block's worth is *urgent*, any other is *long*.

- Urgent claims are served first and whole, oldest first.
- While long claims wait, a quarter of the budget is theirs, so neither side starves.
- Among long claims the oldest gets half of what they have, so it always moves; the rest goes to the shortest first, so that a
  short prompt does not wait for a long one to be read.
- A step never takes more than `budget` rows and `max_claims` claims.

Every claim is served within a bounded number of steps, because `budget` is at least four times the largest urgent claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.law.errors import InvalidArgument

URGENT_BULK = 8
"""Rows of bulk with which a claim still counts as urgent: the correction or bonus, and a few tokens that were missed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one job still needs, in rows of the model."""

    key: int
    """Whose it is. Claims are given in order of age, oldest first."""
    bulk: int
    final: int

    @property
    def total(self) -> int:
        """All rows left."""
        return self.bulk + self.final

    @property
    def urgent(self) -> bool:
        """Whether it goes first and whole."""
        return self.bulk <= URGENT_BULK


@dataclass(frozen=True, slots=True)
class Share:
    """Rows given to a claim in the next step. `last`: nothing of the claim is left after it."""

    key: int
    rows: int
    last: bool


def least_budget(max_final: int) -> int:
    """Smallest budget under which every claim is served: a quarter of it holds the largest urgent one."""
    return 4 * (max_final + URGENT_BULK)


def check_budget(budget: int, max_final: int) -> None:
    """Raises InvalidArgument on a budget too small for the law."""
    if budget < least_budget(max_final):
        limit = f"at least {least_budget(max_final)}, four times a block's rows ({max_final}) and {URGENT_BULK} more"
        raise InvalidArgument("token_budget", budget, limit)


def share(claims: Sequence[Claim], budget: int, max_claims: int) -> list[Share]:
    """Divides one step among claims, oldest first."""
    urgent = [claim for claim in claims if claim.urgent]
    long = [claim for claim in claims if not claim.urgent]
    reserved = min(budget // 4, sum(claim.total for claim in long))
    shares: list[Share] = []
    left = budget - reserved
    room = max_claims - (1 if long else 0)
    for claim in urgent:
        if len(shares) < room and claim.total <= left:
            shares.append(Share(claim.key, claim.total, True))
            left -= claim.total
        else:
            break  # a younger, smaller one must not pass for ever
    return shares + _share_long(long, left + reserved, max_claims - len(shares))


def _share_long(long: Sequence[Claim], rows: int, max_claims: int) -> list[Share]:
    if not long:
        return []
    oldest, others = long[0], sorted(long[1:], key=lambda claim: claim.total)
    others = others[: max(0, max_claims - 1)]
    first = _part(oldest, max(rows // 2, rows - sum(claim.total for claim in others)))
    shares, left = [first], rows - first.rows
    for claim in others:
        if left <= 0:
            break
        part = _part(claim, left)
        if part.rows or part.last:
            shares.append(part)
            left -= part.rows
    return shares


def _part(claim: Claim, rows: int) -> Share:
    """As much of a claim as fits: all of it, or bulk only."""
    if claim.total <= rows:
        return Share(claim.key, claim.total, True)
    return Share(claim.key, min(claim.bulk, rows), False)
