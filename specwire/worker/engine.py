"""The engine: one thread that owns the device, the sessions and every decision about them.

Law. Everything that reaches the engine comes through one inbox, in order; everything that leaves it goes to the event loop in
one wake-up. Between two steps it takes all that waits. Only this thread touches the desk or the model. With nothing to do it
blocks and uses no CPU. Observers are told on the event loop, behind the writers of the answers: what they do would hold those up.

A step that raises fails its own tasks and nobody else's: they are answered with a Failure, their sessions dropped, their slots
freed, and the engine goes on. `trouble` tells when a step takes too long or several failed in a row, since then the process
is alive and of no use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from specwire.law.tasks import Failure, StepTiming
from specwire.spans import wall_offset_ns
from specwire.wire.stopwatch import now_ns
from specwire.worker.desk import Delivery, Desk
from specwire.worker.observe import Observers, StepRecord
from specwire.worker.records import task_records
from specwire.worker.stepper import Part, Stepper, StepResult

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3
"""Failed steps after which the worker says it is not well ..."""
FAILURE_MEMORY_S = 10.0
"""... for so long, since nobody would find out that it recovered if nobody tried."""

NOTES_WAIT_NS = 100_000_000
"""Observers hear of what happened with the next answers, or this long afterwards: a wake-up of the loop for each token of a block
would take the interpreter from the step that makes the next one."""

Command = Callable[[Desk, int], None]
"""Something to do to the desk between two steps, with the stamp at which it is done."""


class Engine:
    """Starts its thread at once; `ready` is done when the stepper is built."""

    def __init__(
        self,
        build: Callable[[], Stepper],
        loop: asyncio.AbstractEventLoop,
        observers: Observers,
        max_lease_s: float,
        idle_s: float,
        hang_s: float,
        *,
        prefix_caching: bool = True,
    ) -> None:
        self.ready: Future[Stepper] = Future()
        self._build = build
        self._loop = loop
        self._observers = observers
        self._max_lease_s = max_lease_s
        self._idle_s = idle_s
        self._hang_s = hang_s
        self._prefix_caching = prefix_caching
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._busy_since_ns: int | None = None
        self._failures = 0
        self._failed_at_ns = 0
        self._steps = 0
        self._free_since_ns = 0
        self._wall_offset_ns = wall_offset_ns()
        self._counts = (0, 0)
        self._notes: list[Callable[[], None]] = []
        """What observers have not been told yet."""
        self._noted_ns = 0
        """Stamp of the oldest of them."""
        self._idle_calls: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def wait_ready(self) -> Stepper:
        """Returns when the stepper is built; raises what building raised."""
        built = asyncio.Event()

        def wake(_: Future[Stepper]) -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits any more, and the loop is closed
                self._loop.call_soon_threadsafe(built.set)

        self.ready.add_done_callback(wake)
        await built.wait()
        return self.ready.result()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def put(self, command: Command) -> None:
        """Asks the engine to do something between two steps. Callable from any thread; never blocks."""
        self._inbox.put(command)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the running step. False: it did not end in time (a step hangs)."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def when_idle(self, call: Callable[[], object]) -> None:
        """Calls `call` in the engine thread once no task is left."""
        self._inbox.put(lambda desk, now: self._idle_calls.append(call))

    def trouble(self) -> str:
        """Why the worker cannot be relied on. Empty: all is well. Callable from any thread."""
        busy, now = self._busy_since_ns, now_ns()
        if not self.ready.done():
            return "loading"
        if not self._thread.is_alive():
            return "the engine has ended"
        if busy is not None and (now - busy) / 1e9 > self._hang_s:
            return f"a step has taken {(now - busy) / 1e9:.0f} s"
        if self._failures >= FAILURES_IN_A_ROW and (now - self._failed_at_ns) / 1e9 < FAILURE_MEMORY_S:
            return f"{self._failures} steps failed in a row"
        return ""

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            stepper = self._build()
        except BaseException as error:
            self.ready.set_exception(error)
            return
        desk = Desk(stepper, self._max_lease_s, self._idle_s, prefix_caching=self._prefix_caching)
        self.ready.set_result(stepper)
        self._free_since_ns = now_ns()
        timeout: float | None = None
        while self._take(desk, timeout):
            try:
                timeout = self._turn(desk, stepper)
            except Exception:
                log.exception("the engine's bookkeeping failed; every session is dropped")
                desk.reset(Failure("internal error"))
                timeout = 0.0
        self._post(desk, tell=True)

    def _turn(self, desk: Desk, stepper: Stepper) -> float | None:
        """One round of the loop. Returns how long to wait for the next command; None: for ever."""
        now = now_ns()
        desk.expire(now)
        plan = desk.plan(self._free_since_ns, now)
        self._post(desk, tell=not plan.parts)
        if plan.parts:
            self._step(desk, stepper, plan.parts)
            self._free_since_ns = now_ns()
            return 0.0
        if plan.wait_until is None:
            self._wall_offset_ns = wall_offset_ns()  # read between tasks, so that each lies on one clock
        if plan.wait_until is None and self._idle_calls:
            calls, self._idle_calls = self._idle_calls, []
            for call in calls:
                call()
        ends = [end for end in (plan.wait_until, desk.table.next_expiry()) if end is not None]
        return max(0.0, min(ends) - now_ns() / 1e9) if ends else None

    def _take(self, desk: Desk, timeout: float | None) -> bool:
        """Waits for the first command, then takes all there are. False: stop."""
        try:
            command = self._inbox.get(timeout=timeout) if timeout != 0.0 else self._inbox.get_nowait()
            while True:
                if command is None:
                    return False
                try:
                    command(desk, now_ns())
                except Exception:
                    log.exception("a command to the engine failed")
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _step(self, desk: Desk, stepper: Stepper, parts: Sequence[Part]) -> None:
        began = now_ns()
        began_wall = began + self._wall_offset_ns
        self._busy_since_ns = began
        self._steps += 1
        failure: Failure | None = None
        result = StepResult()
        try:
            desk.begin(parts, began, began_wall)
            run_at = now_ns()
            result = stepper.run(parts)
            result.prepare_ns += run_at - began
            self._failures = 0
        except Exception as error:
            log.exception("step %d failed", self._steps)
            failure = Failure(f"the model failed ({type(error).__name__})")
            self._failures += 1
            self._failed_at_ns = now_ns()
        ended = now_ns()
        timing = StepTiming(
            prepare_us=result.prepare_ns // 1000,
            compute_us=result.compute_ns // 1000,
            sample_us=result.sample_ns // 1000,
            rows=result.rows,
            prefill_rows=result.prefill_rows,
            sessions=len(parts),
            step=self._steps,
        )
        if failure is None:
            desk.finish(parts, result, timing, ended)
        else:
            desk.fail(parts, failure, timing, ended)
        self._busy_since_ns = None
        record = StepRecord(
            timing=timing,
            began_wall_ns=began_wall,
            ended_wall_ns=began_wall + (ended - began),
            tasks=task_records(parts, result, failure),
            failed=failure is not None,
        )
        self._notes.append(partial(self._observers.step_done, record))
        self._post(desk, tell=False)

    def _post(self, desk: Desk, *, tell: bool) -> None:
        """Hands over what there is to send. Observers hear of it when something is sent, soon, or now: `tell`."""
        out, answered = desk.take_out()
        notes, now = self._notes, now_ns()
        notes += [partial(self._observers.task_done, answer) for answer in answered]
        counts = (len(desk.table), desk.table.waiting())
        if counts != self._counts:
            self._counts = counts
            notes.append(partial(self._observers.session_count, *counts))
        if not (out or notes):
            self._noted_ns = now
        elif out or tell or now - self._noted_ns > NOTES_WAIT_NS:
            self._notes, self._noted_ns = [], now
            try:
                self._loop.call_soon_threadsafe(_hand_over, self._loop, out, notes)
            except RuntimeError:
                log.debug("the event loop is closed; %d deliveries and %d notes are lost", len(out), len(notes))


def _hand_over(loop: asyncio.AbstractEventLoop, out: list[Delivery], notes: list[Callable[[], None]]) -> None:
    for delivery in out:
        delivery.stream.deliver(delivery)
    if notes:
        loop.call_soon(_tell, notes)  # after those who write what was delivered


def _tell(notes: list[Callable[[], None]]) -> None:
    for note in notes:
        note()
