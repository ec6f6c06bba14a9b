"""The state file: what it says of processes that are gone, and of files that are not ours."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy import lifecycle, state
from deploy.state import Process, RayState, Running, StateError, StateFolder

GONE = Process("target-0", 2**22 + 7, "then")
"""Past the largest process id there can be."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    """A state folder in force."""
    monkeypatch.setenv("SPECWIRE_STATE", str(tmp_path / "state"))
    found = state.folder()
    found.prepare()
    return found


def running(*processes: Process) -> Running:
    """A service of plain processes."""
    return Running("processes", "127.0.0.1:8470", "default", ("target-0",), 1.0, processes)


def test_what_is_written_is_read(folder: StateFolder) -> None:
    """All of it, Ray included."""
    ray = RayState("127.0.0.1:6379", "specwire", started=True, folder="/somewhere")
    written = replace(running(Process("ray", 1, "then", 3, "killed by SIGKILL")), mode="ray", ray=ray)
    folder.write(written)

    assert written == folder.read()


def test_nothing_was_started(folder: StateFolder) -> None:
    """No file, no service."""
    assert folder.read() is None


def test_this_process_lives() -> None:
    """By id and start time."""
    assert Process.of("me", os.getpid()).alive


def test_a_dead_process_is_gone() -> None:
    """Also while nobody has asked for its exit code: a zombie does not work."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = Process.of("child", child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert (True, False) == (child.returncode is None, known.alive)
    child.communicate()
    assert not known.alive


def test_a_reused_process_id_is_another_process() -> None:
    """The id lives, but began at another time."""
    mine = Process.of("me", os.getpid())

    assert not replace(mine, began=f"{mine.began}0").alive


@pytest.mark.skipif(not state.BOOT_ID.exists(), reason="needs Linux")
def test_a_clock_that_is_set_changes_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start times in seconds since 1970 follow it. `down` once found nothing of what ran, and left it running."""
    mine = Process.of("me", os.getpid())
    before = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: before + 8.0)

    assert mine.alive
    assert Process.of("me", os.getpid()) == mine


def test_a_process_that_never_was_is_told() -> None:
    with pytest.raises(psutil.NoSuchProcess):
        Process.of("nobody", 2**22 + 1)
    assert not Process("nobody", 2**22 + 1, "then").alive


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 2, "ray": null, "processes": [{}]}'])
def test_a_file_that_is_not_ours_is_refused(folder: StateFolder, text: str) -> None:
    """With its path, and never a traceback."""
    (folder.path / "state.json").write_text(text)

    with pytest.raises(StateError, match=r"state\.json: .*remove it if nothing runs"):
        folder.read()


def test_a_file_of_another_version_is_refused(folder: StateFolder) -> None:
    """It may mean something else."""
    (folder.path / "state.json").write_text('{"version": 99}')

    with pytest.raises(StateError, match="written by another version"):
        folder.read()


def test_a_second_up_is_refused_with_what_runs(folder: StateFolder) -> None:
    """The user sees what to stop."""
    folder.write(running(Process.of("target-0", os.getpid()), GONE))

    with pytest.raises(
        StateError, match=r"already running: default at 127\.0\.0\.1:8470 \(plain processes: target-0\)"
    ):
        lifecycle._refuse_second(folder)


def test_a_stale_file_does_not_stand_in_the_way(folder: StateFolder) -> None:
    """After a power cut the file names processes that are gone."""
    folder.write(running(GONE))
    lifecycle._refuse_second(folder)

    assert folder.read() is None


def test_a_joined_ray_counts_as_running(folder: StateFolder) -> None:
    """Its actors are not processes that we know."""
    joined = replace(running(), mode="ray", ray=RayState("auto", "specwire", started=False))

    assert (True, False) == (joined.alive, running().alive)


def test_two_cannot_start_at_once(folder: StateFolder) -> None:
    """The second is told at once, not after the first."""
    with (
        folder.exclusively(),
        pytest.raises(StateError, match="another `specwire up` or `down` is at work"),
        folder.exclusively(),
    ):
        pass


def test_a_process_replaces_the_former_of_its_name() -> None:
    """One entry per name."""
    newer = replace(GONE, pid=GONE.pid + 1, restarts=1)

    assert (newer,) == running(GONE).with_process(newer).processes


def test_the_endpoint_comes_from_option_variable_file_then_habit(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order."""
    monkeypatch.delenv("SPECWIRE_ADDRESS", raising=False)
    found = [lifecycle.endpoint(None)]
    folder.write(replace(running(), endpoint="127.0.0.1:1111"))
    found.append(lifecycle.endpoint(None))
    monkeypatch.setenv("SPECWIRE_ADDRESS", "127.0.0.1:2222")
    found.append(lifecycle.endpoint(None))
    found.append(lifecycle.endpoint("127.0.0.1:3333"))

    assert ["127.0.0.1:8470", "127.0.0.1:1111", "127.0.0.1:2222", "127.0.0.1:3333"] == found


def test_others_cannot_look_into_the_folder(folder: StateFolder) -> None:
    """It holds logs, and the token of our Ray."""
    assert 0o700 == folder.path.stat().st_mode & 0o777
