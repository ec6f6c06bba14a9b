"""The port between the engine, which both services share, and what each service does in a step.

Law. The engine decides when; a stepper decides what and computes it. Both are used by the engine thread only. A stepper keeps
nothing between steps but measured times; what a task needs from step to step is in its job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specwire.law.tasks import Failure, Task
from specwire.law.values import Block, Verdict
from specwire.lm.port import ModelSpec
from specwire.worker.jobs import Job


@dataclass(frozen=True, slots=True)
class Due:
    """Sessions whose tasks are announced or expected, but not here."""

    sessions: int = 0
    by: float = 0.0
    """Engine clock, seconds, until which they are expected."""
    group: int = 0
    """Group that they are in. 0: none, or not known."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one job does in the next step."""

    job: Job
    rows: int
    """Tokens fed. 0: the job has nothing to compute and only needs its answer."""
    last: bool
    """After this step the job's claim is served: for a target the task is done, for a draft one more token is there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next: a step, or waiting until `wait_until` for tasks that are due."""

    parts: tuple[Part, ...] = ()
    wait_until: float | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A finished job."""

    job: Job
    result: Verdict | Block | Failure | None
    tail: tuple[int, ...] = ()
    """Tokens that stand after the append: accepted ones at a target, drafted ones that are cached at a draft."""


@dataclass(slots=True)
class StepResult:
    """What a step did."""

    done: list[Done] = field(default_factory=list)
    prepare_ns: int = 0
    compute_ns: int = 0
    sample_ns: int = 0
    rows: int = 0
    prefill_rows: int = 0


class Stepper(Protocol):
    """A service's own work."""

    @property
    def spec(self) -> ModelSpec:
        """What the model is. Does not mutate."""

    @property
    def num_slots(self) -> int:
        """Sessions that can hold a cache. Does not mutate."""

    def check(self, task: Task) -> None:
        """Raises InvalidArgument on a task that breaks the service's limits. Does not mutate."""

    def plan(self, jobs: Sequence[Job], due: Sequence[Due], free_since: float, now: float) -> Plan:
        """Chooses among jobs, oldest first. `due`: sessions not here, all still to come. Does not mutate; called again when
        something arrives or the wait is over."""

    def copy(self, source: int, target: int, length: int) -> None:
        """The model's own."""

    def cut(self, slot: int, length: int) -> None:
        """The model's own."""

    def run(self, parts: Sequence[Part]) -> StepResult:
        """Computes. The jobs have begun. Moves `filled` of their sessions; raises whatever the model raises."""
