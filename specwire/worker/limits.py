"""What a worker accepts: the limits both services share, checked before a task is admitted."""

from __future__ import annotations

from specwire.law.errors import InvalidArgument
from specwire.law.tasks import Task
from specwire.lm.port import ModelSpec


def check_task(task: Task, end: int, max_append: int, spec: ModelSpec) -> None:
    """Raises InvalidArgument naming field, value and limit. `end`: length of the sequence once the task is done."""
    if len(task.append) > max_append:
        raise InvalidArgument("append", f"{len(task.append)} tokens", f"at most {max_append}")
    if end > spec.max_context:
        raise InvalidArgument("keep + append + block", end, f"at most the context of {spec.max_context} tokens")
    if task.append and max(task.append) >= spec.vocab_size:
        raise InvalidArgument("append", max(task.append), f"token ids under {spec.vocab_size}")
