"""Blocks that sessions of a target wait for: what the target is told is coming. Constant time, however many there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Company:
    """Of one target and one group."""

    sessions: int = 0
    due_ns: int = 0
    """When the last of them is due."""


class Awaited:
    """By target and group: how many blocks are being drafted, and until when."""

    __slots__ = ("_companies", "_members")

    def __init__(self) -> None:
        self._companies: dict[str, dict[int, _Company]] = {}
        self._members: dict[int, tuple[str, int]] = {}
        """Session to its target and group."""

    def __repr__(self) -> str:
        return f"Awaited({self._companies})"

    def __len__(self) -> int:
        return len(self._members)

    def begins(self, session: int, target: str, group: int, due_ns: int) -> None:
        """A session waits for its block from now on."""
        self.ends(session)
        self._members[session] = target, group
        company = self._companies.setdefault(target, {}).setdefault(group, _Company())
        company.sessions += 1
        company.due_ns = max(company.due_ns, due_ns)

    def ends(self, session: int) -> None:
        """It does not any more. Not an error if it did not."""
        place = self._members.pop(session, None)
        if place is None:
            return
        target, group = place
        companies = self._companies[target]
        companies[group].sessions -= 1
        if not companies[group].sessions:
            del companies[group]
            if not companies:
                del self._companies[target]

    def due(self, target: str, group: int | None) -> tuple[int, int, int]:
        """(sessions, stamp until which their blocks are due, group) of this group, or of the one that is due first. Zeros: none."""
        companies = self._companies.get(target)
        if not companies:
            return 0, 0, 0
        if group is None:
            group = min(companies, key=lambda each: companies[each].due_ns)
        company = companies.get(group)
        return (company.sessions, company.due_ns, group) if company is not None else (0, 0, 0)
