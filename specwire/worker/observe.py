"""What the engine tells those who watch: one record a step, one a refused or repeated task.

Law. Observers are called on the event loop, in the order of events, behind the writers of the answers. An observer that
raises is logged once and never asked again; it cannot hurt a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specwire.law.tasks import Answer, SessionId, StepTiming

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One task's part in one step."""

    session: SessionId
    trace: bytes
    """W3C trace context of the coordinator's span; empty: not traced."""
    rows: int
    """Rows of the model this task used in this step."""
    done: bool
    """Whether the task ended with this step."""
    began_wall_ns: int
    """Wall clock at the task's first step, for spans only."""
    queue_us: int
    """Waited so far, over all steps."""
    compute_us: int
    """Prepare, compute and sample of all steps so far."""
    proposed: int
    """Tokens of the block that was judged or made; 0 unless done."""
    accepted: int
    """Tokens of it that stand; 0 for a draft."""
    error: str
    """What the model did wrong; empty: nothing."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step."""

    timing: StepTiming
    """`step` in it is the step's number on this worker. `answer_us` is not known yet and zero."""
    began_wall_ns: int
    ended_wall_ns: int
    """Wall clock, for spans only; durations come from `timing`."""
    tasks: tuple[TaskRecord, ...]
    failed: bool
    """The step raised; all its tasks failed."""


class Observer(Protocol):
    """Watches an engine. Called on the event loop; must not block."""

    def step_done(self, record: StepRecord) -> None:
        """A step ended, well or not."""

    def task_done(self, answer: Answer) -> None:
        """A task was answered: with a verdict, a block, a refusal or a failure. Its timing is not filled in."""

    def session_count(self, sessions: int, waiting: int) -> None:
        """How many sessions hold a slot and how many tasks wait; called when either changed."""


class Observers:
    """Several observers as one, and the guard around them."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def _each(self, method: str, *args: object) -> None:
        for observer in list(self._observers):
            try:
                getattr(observer, method)(*args)
            except Exception:
                log.exception("observer %r failed and is not asked again", observer)
                self._observers.remove(observer)

    def step_done(self, record: StepRecord) -> None:
        """See Observer."""
        self._each("step_done", record)

    def task_done(self, answer: Answer) -> None:
        """See Observer."""
        self._each("task_done", answer)

    def session_count(self, sessions: int, waiting: int) -> None:
        """See Observer."""
        self._each("session_count", sessions, waiting)
