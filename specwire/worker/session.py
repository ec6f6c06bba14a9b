"""One session at a worker: its text, how much of it is cached, and whose turn it is.

Law. Text and cache are two counts: `prefix` is what the cache is meant to hold, `filled` how much of it has been written. They
part when a task is split over steps or abandoned, and the next task of the session simply catches up. Only `begin` and
`finish` change the text; a refusal changes nothing and says the length and the hash there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from specwire.law.cursor import Prefix, common
from specwire.law.tasks import Answer, Reason, Refusal, SessionId, Task
from specwire.law.values import Opening
from specwire.worker.jobs import Job, samples


@dataclass(slots=True, eq=False)
class Session:
    """One generation's text at this worker."""

    id: SessionId
    opening: Opening
    slot: int
    prefix: Prefix
    filled: int = 0
    """Tokens written to the cache slot. At most len(prefix), but while a draft runs ahead of the text in the front's task."""
    found: tuple[int, ...] = ()
    """Tokens that another text left in the slot. Its own has been their beginning so far; empty once something else is written."""
    deadline_ns: int | None = None
    """When its request is over, by the last task that said so and began. None: nobody said."""
    epoch: int = 0
    """Of the last task that began. Never falls."""
    number: int = -1
    """Of the last task that began. -1: none did. Never falls."""
    last: Task | None = None
    """The last finished task, as long as no newer one began."""
    answer: Answer | None = None
    """Its answer, for a repeat. Invariant: set exactly when `last` is."""
    answered_ns: int = 0
    """When that was. 0: never."""
    touched: float = 0.0
    """When its coordinator last spoke of it."""
    front: Job | None = None
    """The job whose turn it is."""
    behind: deque[Job] = field(default_factory=deque)
    """Later jobs of the same epoch, in order. Empty unless `front` is set."""

    def __repr__(self) -> str:
        at = f"front={self.front.task.number} behind={len(self.behind)}" if self.front else "idle"
        return (
            f"Session({self.id.counter} epoch={self.epoch} number={self.number} slot={self.slot} "
            f"length={len(self.prefix)} filled={self.filled} {at})"
        )

    @property
    def newest(self) -> tuple[int, int]:
        """Epoch and number of the newest task taken."""
        job = self.behind[-1] if self.behind else self.front
        return (job.task.epoch, job.task.number) if job else (self.epoch, self.number)

    def place(self, reason: Reason, detail: str = "") -> Refusal:
        """A refusal that says where the session stands."""
        if self.number < 0:
            return Refusal(reason, 0, 0, detail)  # created for a task that never began: holds nothing
        return Refusal(reason, len(self.prefix), self.prefix.hash_at(len(self.prefix)), detail)

    def follows(self, task: Task) -> Refusal | None:
        """Checks 3 and 4 of the law: None when the task may begin."""
        if task.keep == 0:
            return None
        if task.keep > len(self.prefix):
            return self.place(Reason.LENGTH)
        if self.prefix.hash_at(task.keep) != task.keep_hash:
            return self.place(Reason.HASH)
        return None

    def standing(self, task: Task) -> int:
        """Tokens of the task's text that need not be computed when it begins. Beyond that the cache is of no use to it: a row of
        scores belongs to the last confirmed token, so that one is always written (again)."""
        stands = min(self.filled, task.keep)
        if self.found and not (task.opening and task.opening.private_prompt):
            stands += common(self.found[stands:], task.append)
        return min(stands, task.base - 1 if samples(task) else task.base)

    def begin(self) -> None:
        """The front's first step: cuts and extends the text, forgets the stored answer."""
        assert self.front is not None
        assert not self.front.begun
        task = self.front.task
        self.deadline_ns = self.front.deadline_ns
        written, self.filled = min(self.filled, task.keep), self.standing(task)
        self.front.reused = max(0, self.filled - written)
        if self.filled < task.base:
            self.found = ()
        if task.opening is not None:
            self.opening = task.opening
            self.prefix = Prefix(task.opening.fingerprint())
        self.prefix.cut(task.keep)
        self.prefix.extend(task.append)
        self.epoch, self.number = task.epoch, task.number
        self.last = self.answer = None
        self.front.begun = True

    def cached(self, most: int | None = None) -> tuple[int, ...]:
        """What the slot holds for certain; of that, at most so many tokens."""
        if self.found:
            return self.found[:most]
        return tuple(self.prefix.tokens[: self.filled if most is None else min(most, self.filled)])

    def finish(self, answer: Answer, tail: Iterable[int] = ()) -> None:
        """The front is done, and the cache holds its text. `tail`: the tokens that stand after its append."""
        assert self.front is not None
        assert self.front.begun
        self.prefix.extend(tail)
        self.filled = len(self.prefix)
        self.last, self.answer = self.front.task, answer
        self.front = None
