"""The small process that keeps plain services alive: it starts them, restarts what dies, and stops them all when told to.

`specwire up --no-ray` starts it detached (`python -m deploy.supervisor FOLDER`). It does what Ray does for actors, so that
losing a worker heals in the same way with and without Ray: the new process announces itself to the coordinator. It is the
only writer of the state file while it lives. Services have sessions of their own, so they outlive the shell, and this
process too: `down` finds them by the state file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import psutil

from deploy.state import Process, Running, StateFolder

PLAN = "plan.json"
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 10.0
HEALTHY_AFTER_S = 30.0
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Service:
    """One service as it is to be started."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """On top of the supervisor's own."""


@dataclass
class Backoff:
    """When a dead service may start again. `now` is an argument."""

    failures: int = 0
    """Deaths in a row, each less than HEALTHY_AFTER_S after its start."""
    started: float = 0.0

    def begin(self, now: float) -> None:
        """It was started."""
        self.started = now

    def died(self, now: float) -> float:
        """It died. Returns the time at which it may start again: soon after a long life, later and later after short ones."""
        if now - self.started >= HEALTHY_AFTER_S:
            self.failures = 0
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0**self.failures)
        self.failures += 1
        return now + delay


@dataclass
class Child:
    """A service and what became of it."""

    service: Service
    backoff: Backoff = field(default_factory=Backoff)
    process: subprocess.Popen[bytes] | None = None
    due: float | None = 0.0
    """When to start it. None while it runs."""
    restarts: int = -1
    exit: str = ""


class Supervisor:
    """Owns the children. `step` looks once at all of them; `stop` ends them."""

    def __init__(self, folder: StateFolder, services: Sequence[Service], running: Running) -> None:
        self._folder = folder
        self._children = [Child(service) for service in services]
        self._running = running.with_process(Process.of("supervisor", os.getpid()))
        self._folder.write(self._running)

    def step(self, now: float) -> None:
        """Takes note of the dead and starts what is due."""
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                child.process = None
                child.exit = how(code)
                child.due = child.backoff.died(now)
                _say(f"{child.service.name} {child.exit}; starts again in {child.due - now:.1f} s")
            if child.process is None and child.due is not None and now >= child.due:
                self._start(child, now)

    def _start(self, child: Child, now: float) -> None:
        name = child.service.name
        child.backoff.begin(now)
        child.restarts += 1
        with self._folder.log(name).open("ab") as log:
            child.process = subprocess.Popen(
                child.service.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder.path,
                env={**os.environ, **child.service.environment},
                start_new_session=True,
            )
        child.due = None
        with contextlib.suppress(psutil.NoSuchProcess):  # dead already: the next step sees it
            entry = Process.of(name, child.process.pid, child.restarts, child.exit)
            self._running = self._running.with_process(entry)
            self._folder.write(self._running)
        _say(f"{name} started, process {child.process.pid}")

    def stop(self, grace_s: float) -> None:
        """Ends all within `grace_s` and a little: the coordinator first, since its requests need the workers to finish."""
        give_up = time.monotonic() + grace_s
        for child in self._children:
            child.due = None
            self._signal(child, signal.SIGTERM)
            if child.service.name == "coordinator":
                self._wait([child], give_up)
        self._wait(self._children, give_up)
        for child in self._children:
            self._signal(child, signal.SIGKILL)
        self._wait(self._children, time.monotonic() + 5.0)

    def _signal(self, child: Child, number: signal.Signals) -> None:
        if child.process is not None and child.process.poll() is None:
            child.process.send_signal(number)

    def _wait(self, children: Sequence[Child], until: float) -> None:
        for child in children:
            if child.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, until - time.monotonic()))


def how(code: int) -> str:
    """An exit code for people."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _say(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)


def write_plan(folder: StateFolder, services: Sequence[Service], running: Running, grace_s: float) -> None:
    """Leaves the supervisor its orders."""
    plan = {
        "services": [
            {"name": s.name, "command": list(s.command), "environment": dict(s.environment)} for s in services
        ],
        "grace_s": grace_s,
    }
    (folder.path / PLAN).write_text(json.dumps(plan, indent=1))
    folder.write(running)


def main(arguments: Sequence[str]) -> int:
    """Runs until SIGTERM or SIGINT."""
    folder = StateFolder(Path(arguments[0]))
    plan = json.loads((folder.path / PLAN).read_text())
    running = folder.read()
    if running is None:
        print("no state file; was this started by `specwire up --no-ray`?", file=sys.stderr)
        return 2
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    services = [Service(s["name"], tuple(s["command"]), s["environment"]) for s in plan["services"]]
    supervisor = Supervisor(folder, services, replace(running, processes=()))
    while not told.is_set():
        supervisor.step(time.monotonic())
        told.wait(LOOK_EVERY_S)
    _say("stopping")
    supervisor.stop(float(plan["grace_s"]))
    folder.clear()
    _say("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
