"""How a long fetch shows itself: one callback, and the bars that a terminal makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Report(Protocol):
    """Called as a step goes on."""

    def __call__(self, step: str, done: int, total: int | None, unit: str) -> None:
        """`unit`: "B" for bytes, else what is counted. `total` None: not known. done == total ends the step."""


def silent(step: str, done: int, total: int | None, unit: str) -> None:
    """A report that shows nothing."""


@contextlib.contextmanager
def bars() -> Iterator[Report]:
    """Bars on a terminal's standard error; one line per finished step anywhere else."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = [
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    ]
    tasks: dict[str, TaskID] = {}
    finished: set[str] = set()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(step: str, done: int, total: int | None, unit: str) -> None:
            shown = _shown(done, total, unit)
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total, shown=shown)
            progress.update(tasks[step], completed=done, total=total, shown=shown)
            if done == total and step not in finished and not console.is_terminal:
                console.print(f"{step}: {shown}", highlight=False)
            if done == total:
                finished.add(step)

        yield report


def _shown(done: int, total: int | None, unit: str) -> str:
    if unit == "B":
        return f"{done / 1e6:.0f} MB" if total is None else f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
    return f"{done} {unit}" if total is None else f"{done} of {total} {unit}"
