"""Who may run. Pure: bounded running, bounded waiting, first come first served.

Law. A request is running, waiting, or neither. `leave` is called exactly once for each that `enter` took, whatever became of
it, and says who runs next. A request that cannot even wait is refused at once with a hint when to try again.
"""

from __future__ import annotations

from collections import OrderedDict

from specwire.law.errors import NoRoom


class Admission:
    """The door."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running: set[int] = set()
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self._mean_s = 1.0

    def __repr__(self) -> str:
        return (
            f"Admission(running={len(self.running)}/{self.max_running}, waiting={len(self.waiting)}/{self.max_waiting})"
        )

    def enter(self, request: int) -> bool:
        """True: runs at once. False: waits. Raises NoRoom."""
        if len(self.running) < self.max_running and not self.waiting:
            self.running.add(request)
            return True
        if len(self.waiting) >= self.max_waiting:
            hint = self._mean_s * (len(self.waiting) + 1) / max(1, self.max_running)
            raise NoRoom(
                f"{len(self.running)} requests running (limit {self.max_running}) and {len(self.waiting)} waiting "
                f"(limit {self.max_waiting})",
                retry_after_s=max(0.1, min(60.0, hint)),
            )
        self.waiting[request] = None
        return False

    def leave(self, request: int, took_s: float | None = None) -> list[int]:
        """A request is over, from wherever it was. Returns those that may run now, in order. `took_s` of a finished one
        feeds the retry hint."""
        self.waiting.pop(request, None)
        self.running.discard(request)
        if took_s is not None:
            self._mean_s += 0.1 * (took_s - self._mean_s)
        return self.resize(self.max_running)

    def resize(self, max_running: int) -> list[int]:
        """The number of places changed. Returns those that may run now, in order."""
        self.max_running = max_running
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            request, _ = self.waiting.popitem(last=False)
            self.running.add(request)
            admitted.append(request)
        return admitted
