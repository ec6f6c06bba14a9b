"""A coordinator's link against a real worker: whatever breaks its stream, it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.clients import WorkerLink
from coordinator.ledger import Role
from specwire.law.tasks import SessionId, VerifyTask
from specwire.law.values import Block
from specwire.lm.table_config import TableConfig
from tests.contract.harness import on_a_loop, until, worker

TASK = VerifyTask(SessionId(9, 1), 1, 1, 2, 3, (4,), None, block=Block((5,)))


class Owner:
    """Cannot take in the first frame that is written, and keeps why the link went down."""

    def __init__(self) -> None:
        self.downs: list[str] = []
        self.failed = False

    def due(self, link: WorkerLink, group: int | None) -> tuple[int, int, int]:
        """See LinkEvents."""
        return 0, 0, 0

    def link_down(self, link: WorkerLink, reason: str) -> None:
        """See LinkEvents."""
        self.downs.append(reason)

    def frame_written(self, *arguments: Any) -> None:
        """See LinkEvents."""
        if not self.failed:
            self.failed = True
            raise LookupError("a fault of ours")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@on_a_loop
async def test_a_writer_that_fails_costs_the_stream_and_not_the_link(caplog: pytest.LogCaptureFixture) -> None:
    """The call it cancels looks to the reader as if the link itself had been told to end."""
    owner = Owner()
    async with worker("target", TableConfig(vocab_size=16, seed=3)) as server:
        link = WorkerLink("target-0", Role.TARGET, server.address, 9, 60_000, owner)

        async def up(generation: int) -> bool:
            return link.up and link.generation == generation

        link.start()
        await until(lambda: up(1))
        link.send(TASK)
        await until(lambda: up(2))
        await link.stop()

    assert owner.downs == ["broken stream: LookupError"]
    assert "a fault of ours" in caplog.text
