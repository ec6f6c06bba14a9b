"""The stack as real processes: SIGKILL and SIGSTOP in the middle of answers, for each of the three. Every answer is compared
with what the target says alone."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from specwire.client import Client
from specwire.v1 import inference_pb2 as pb
from tests.support.load import Load, load
from tests.support.processes import Processes
from tests.support.service import like, the_loop
from tests.wired.conftest import DRAFTS, TARGET

PAUSE_S = 1.5
"""How long a stopped coordinator stays stopped: three times the silence that makes a peer suspect. Not a wait for anything."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """All three, ready. Tests leave it as they found it."""
    with Processes(tmp_path_factory.mktemp("stack"), suspect_after_s=0.5) as stack:
        stack.plan("target-0", like(TARGET, step_ms=2.0))
        stack.plan("draft-0", DRAFTS["middling"])
        stack.start("coordinator")
        stack.start("target-0", "draft-0")
        stack.ready()
        yield stack


class Running:
    """A load on the shared loop, for tests that block."""

    def __init__(self, inner: Load) -> None:
        self.inner = inner

    def until_over(self, more: int) -> None:
        """See Load."""
        the_loop().run(self.inner.until_over(more))

    def until_accepted(self) -> pb.GetStatsResponse:
        """See Load."""
        return the_loop().run(self.inner.until_accepted())


@contextlib.contextmanager
def background(stack: Processes) -> Iterator[Running]:
    """Requests for as long as the block lasts. All must be right, and none may fail."""

    async def opened() -> tuple[Client, Any, Load]:
        client = Client(stack.address)
        manager = load(client, TARGET)
        return client, manager, await manager.__aenter__()

    async def closed() -> None:
        try:
            await manager.__aexit__(None, None, None)
        finally:
            await client.close()

    client, manager, running = the_loop().run(opened())
    try:
        yield Running(running)
    finally:
        the_loop().run(closed())
    assert stack.client.stats().failed == 0


def state_is(name: str, state: str) -> Any:
    """For `until`."""
    return lambda stats: any(worker.name == name and worker.state == state for worker in stats.workers)


def test_draft_killed(stack: Processes) -> None:
    """SIGKILL for the draft: answers go on without it, and its successor is used: draft tokens accepted before and after."""
    with background(stack) as running:
        running.until_accepted()
        stack.kill("draft-0")
        stack.until(state_is("draft-0", "lost"))
        running.until_over(4)
        stack.start("draft-0")
        stack.ready()
        running.until_accepted()


def test_target_killed(stack: Processes) -> None:
    """SIGKILL for the target: answers wait for its successor, at another address, and are the same."""
    with background(stack) as running:
        running.until_accepted()
        stack.kill("target-0")
        stack.until(state_is("target-0", "lost"))
        stack.start("target-0")
        stats = running.until_accepted()
        running.until_over(4)

    assert stats.replays["target_lost"] > 0


def test_draft_stopped(stack: Processes) -> None:
    """SIGSTOP for the draft: rounds time out and go on without it. SIGCONT: its late answers are dropped and it is used again."""
    with background(stack) as running:
        running.until_accepted()
        stack.signal("draft-0", signal.SIGSTOP)
        stack.until(state_is("draft-0", "suspect"))
        running.until_over(4)
        stack.signal("draft-0", signal.SIGCONT)
        stack.ready()
        running.until_accepted()


def test_target_stopped(stack: Processes) -> None:
    """SIGSTOP for the target: it is seen to be silent and everything waits. SIGCONT: everything goes on."""
    with background(stack) as running:
        running.until_accepted()
        stack.signal("target-0", signal.SIGSTOP)
        stack.until(state_is("target-0", "suspect"))
        stack.signal("target-0", signal.SIGCONT)
        stack.ready()
        running.until_accepted()
        running.until_over(4)


def test_coordinator_stopped(stack: Processes) -> None:
    """SIGSTOP and SIGCONT for the coordinator: a pause, and all goes on."""
    with background(stack) as running:
        running.until_accepted()
        stack.signal("coordinator", signal.SIGSTOP)
        time.sleep(PAUSE_S)
        stack.signal("coordinator", signal.SIGCONT)
        stack.ready()
        running.until_accepted()
        running.until_over(4)


def test_coordinator_killed(stack: Processes) -> None:
    """SIGKILL for the coordinator: clients repeat their requests at its successor and get the rest, without a gap or a repeat."""
    with background(stack) as running:
        running.until_accepted()
        stack.kill("coordinator")
        stack.start("coordinator")
        stack.ready()
        running.until_accepted()
        running.until_over(8)

    retried = [answer for answer in running.inner.answers if answer.final and answer.final.retries]
    assert len(retried) == 4  # however long each waited before it asked again: all are over now


def test_terminated_processes_end_with_status_zero(stack: Processes) -> None:
    """SIGTERM for each: exit status 0. The last test of this file, since nothing is left afterwards."""
    assert [0, 0, 0] == stack.terminate("draft-0", "target-0", "coordinator")
