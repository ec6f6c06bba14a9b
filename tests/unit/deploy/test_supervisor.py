"""When the dead start again, and what the supervisor does to its children."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy import processes, ready
from deploy.state import Process, Running, StateError, StateFolder
from deploy.supervisor import HEALTHY_AFTER_S, LONGEST_DELAY_S, Backoff, Service, Supervisor, how

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def test_the_pause_doubles_up_to_a_limit() -> None:
    """A service that dies at once does not burn a core."""
    backoff = Backoff()
    pauses = []
    for _ in range(8):
        backoff.begin(0.0)
        pauses.append(backoff.died(0.0))

    assert [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, LONGEST_DELAY_S, LONGEST_DELAY_S] == pauses


def test_a_long_life_is_forgiven() -> None:
    """After it the next start comes soon again."""
    backoff = Backoff(failures=5)
    backoff.begin(100.0)

    assert 100.0 + HEALTHY_AFTER_S + 0.2 == backoff.died(100.0 + HEALTHY_AFTER_S)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, "exited with code 0"), (2, "exited with code 2"), (-9, "killed by SIGKILL"), (-250, "killed by signal 250")],
)
def test_exit_codes_are_told_for_people(code: int, expected: str) -> None:
    """Signals by name."""
    assert expected == how(code)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    """A state folder."""
    found = StateFolder(tmp_path)
    found.prepare()
    return found


@pytest.fixture
def supervise(folder: StateFolder) -> Iterator[Callable[..., Supervisor]]:
    """Makes supervisors of services that run the given programs, and ends them."""
    made: list[Supervisor] = []

    def make(*codes: str) -> Supervisor:
        services = [Service(f"s-{i}", (sys.executable, "-c", code), {"MINE": str(i)}) for i, code in enumerate(codes)]
        made.append(Supervisor(folder, services, Running("processes", "127.0.0.1:1", "test", (), 0.0)))
        made[-1].step(0.0)
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.stop(0.0)


def entry(folder: StateFolder, name: str) -> Process:
    """What the state file says of a service."""
    running = folder.read()
    assert running is not None
    return next(process for process in running.processes if process.name == name)


def until_dead(process: Process) -> None:
    """Waits until a process has ended. Its exit code is left for its parent."""
    give_up = time.monotonic() + 10
    while process.alive and time.monotonic() < give_up:
        time.sleep(0.002)


def test_children_get_their_environment_and_their_log(
    folder: StateFolder, supervise: Callable[..., Supervisor]
) -> None:
    """Each its own."""
    supervise("import os; print(os.environ['MINE'])", "import os; print(os.environ['MINE'])")
    for name in ("s-0", "s-1"):
        until_dead(entry(folder, name))

    assert ["0\n", "1\n"] == [folder.log(name).read_text() for name in ("s-0", "s-1")]


def test_a_killed_child_starts_again_when_due(folder: StateFolder, supervise: Callable[..., Supervisor]) -> None:
    """As a new process, with the former one's end on record."""
    supervisor = supervise(SLEEP)
    first = entry(folder, "s-0")
    os.kill(first.pid, signal.SIGKILL)
    until_dead(first)
    supervisor.step(10.0)
    between = entry(folder, "s-0")
    supervisor.step(10.3)
    second = entry(folder, "s-0")

    assert (first, 0) == (between, between.restarts)
    assert (True, 1) == (second.pid != first.pid, second.restarts)
    assert "killed by SIGKILL" == second.exit


def test_stop_ends_the_stubborn_too(folder: StateFolder, supervise: Callable[..., Supervisor]) -> None:
    """TERM, then KILL, within a bounded time."""
    supervisor = supervise(SLEEP, STUBBORN)
    children = [entry(folder, name) for name in ("s-0", "s-1")]
    while not folder.log("s-1").stat().st_size:  # it has not yet said that it ignores signals
        time.sleep(0.002)
    supervisor.stop(0.2)

    assert [False, False] == [child.alive for child in children]


def test_a_failure_while_starting_is_told_with_the_last_words(
    folder: StateFolder, supervise: Callable[..., Supervisor]
) -> None:
    """The first service that died, how, and what it said."""
    supervisor = supervise("import sys; print('no such model', flush=True); sys.exit(2)")
    until_dead(entry(folder, "s-0"))
    supervisor.step(1.0)
    before = processes.first_failure(folder)
    supervisor.step(2.0)
    after = str(processes.first_failure(folder))

    assert (None, True) == (before, after.startswith("s-0 exited with code 2 while starting. It said:\nno such model"))


def test_a_service_that_says_why_it_cannot_start_is_quoted_with_that_alone(folder: StateFolder) -> None:
    """Its settings, which it shows first, are in its log."""
    log = folder.log("target-0")
    log.write_text("linger: true\nmodel:\n  device: cuda\nspecwire: target_service cannot start: device: got 'cuda'\n")
    assert "specwire: target_service cannot start: device: got 'cuda'" == ready.last_words(log)
    log.write_text("linger: true\nSegmentation fault\n")
    assert "linger: true\nSegmentation fault" == ready.last_words(log)


def test_down_ends_what_the_file_names_without_a_supervisor(
    folder: StateFolder, supervise: Callable[..., Supervisor]
) -> None:
    """The supervisor may have been killed; its children are found by the file."""
    supervise(SLEEP)
    running = folder.read()
    assert running is not None
    child = entry(folder, "s-0")
    folder.write(Running("processes", "127.0.0.1:1", "test", (), 0.0, (child,)))

    assert ["s-0"] == processes.down(folder, 1.0)
    assert (False, None) == (child.alive, folder.read())


def test_down_with_nothing_running_says_so(folder: StateFolder) -> None:
    """It is no success."""
    with pytest.raises(StateError, match="nothing is running"):
        processes.down(folder, 1.0)
