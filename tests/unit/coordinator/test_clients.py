"""What a link says with its tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

from coordinator.clients import WorkerLink
from coordinator.ledger import Role
from specwire.law.tasks import SessionId, VerifyTask
from specwire.law.values import Block
from specwire.wire.codec import Kind, TaskFrame, decode_task_frame

TASK = VerifyTask(SessionId(1, 1), 1, 1, 2, 3, (4,), None, block=Block((5,)))


class Owner:
    """Says that two are due in a group, and keeps which one it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def due(self, link: WorkerLink, group: int | None) -> tuple[int, int, int]:
        """See LinkEvents."""
        self.asked.append(group)
        return 2, 1_000, group or 7

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


class Enough(Exception):
    """A frame was written."""


class Call:
    """A stream that ends with the first frame."""

    def __init__(self) -> None:
        self.raw = b""

    async def write(self, raw: bytes) -> None:
        """That one."""
        self.raw = raw
        raise Enough


def said(groups: list[int]) -> tuple[list[int | None], TaskFrame]:
    """Which group was asked for, and the frame, where tasks of these groups go out together; none: what is due is announced."""
    owner, call = Owner(), Call()

    async def write() -> None:
        link = WorkerLink("target-0", Role.TARGET, "a:1", 9, 1_000, owner)
        link.up = True
        for counter, group in enumerate(groups, start=1):
            link.send(dataclasses.replace(TASK, session=SessionId(9, counter), group=group))
        if not groups:
            link.announce()
        with contextlib.suppress(Enough):
            await link._write(call)

    asyncio.run(write())
    return owner.asked, decode_task_frame(Kind.VERIFY, call.raw, 9)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], None),
        ([0], None),
        ([0, 0], None),
        ([2], 2),
        ([0, 3, 0], 3),  # who decodes plainly goes along with any group
        ([1, 2], 1),
    ],
)
def test_of_the_tasks_group_is_said_who_is_due(groups: list[int], expected: int | None) -> None:
    """The first that is one; whoever is due first where there is none."""
    asked, frame = said(groups)

    assert [expected] == asked
    assert (2, 1_000, expected or 7) == (frame.due_sessions, frame.due_us, frame.due_group)
    assert groups == [task.group for task in frame.tasks]
