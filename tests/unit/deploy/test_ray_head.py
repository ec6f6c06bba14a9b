"""Which Ray is meant, what its processes find in their environment, and how its long accounts are cut short."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy import lifecycle, ray_head, ready, topology
from deploy.ray_head import Head
from deploy.ready import StartError
from deploy.state import Process, RayState, Running, StateFolder

RUNNING = Running("ray", "127.0.0.1:0", "default", (), 0.0)  # a service of the developer's may be at the usual port
HEAD = Head("127.0.0.1:6379", Path("/ray"), Process("ray", 1, "then"))


def found(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch, ray_address: str | None = None) -> Running:
    """What `find` makes of a topology and RAY_ADDRESS."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray_address is not None:
        monkeypatch.setenv("RAY_ADDRESS", ray_address)
    monkeypatch.setattr(ray_head, "start", lambda *arguments: HEAD)
    plan = topology.parse({"target": {"model": "table"}, "ray": settings})
    return ray_head.find(StateFolder(Path("/state")), plan.ray, RUNNING, "specwire", 1.0)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    """Where `up` works."""
    made = StateFolder(tmp_path / "state")
    made.prepare()
    return made


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every head that was begun; each is a process that only sleeps, and the caller is interrupted as it begins."""
    popen, made = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def interrupted(command: object, **settings: Any) -> None:
        made.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_head.subprocess, "Popen", interrupted)
    yield made
    for each in made:
        each.kill()
        each.wait()


def test_nothing_is_left_of_a_start_that_is_interrupted(
    folder: StateFolder, begun: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the moment at which the head begins: neither a process nor a file nor a word."""
    monkeypatch.setattr(ray_head.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(ray_head, "LONGEST_TMP", 1000)
    with pytest.raises(KeyboardInterrupt):
        ray_head.find(folder, topology.parse({"target": {"model": "table"}}).ray, RUNNING, "specwire", 1.0)

    assert ([False], None, []) == (
        [psutil.pid_exists(each.pid) for each in begun],
        folder.read(),
        list(tmp_path.glob(f"{ray_head.PREFIX}*")),
    )


def test_what_an_impatient_end_left_is_found(
    folder: StateFolder, begun: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or interrupted once more while it cleans up: the files are on record before the head begins, and `down` ends what
    has them."""

    def interrupted_again(files: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_head, "stop", interrupted_again)
    with pytest.raises(KeyboardInterrupt):
        ray_head.find(folder, topology.parse({"target": {"model": "table"}}).ray, RUNNING, "specwire", 1.0)
    monkeypatch.undo()
    monkeypatch.setenv("SPECWIRE_STATE", str(folder.path))

    running = folder.read()
    assert running is not None
    assert running.ray is not None
    assert ("", True, ()) == (running.ray.address, running.ray.started, running.processes)
    assert begun[0].poll() is None
    lifecycle.down(1.0)

    assert (False, None, False) == (
        psutil.pid_exists(begun[0].pid),
        folder.read(),
        Path(running.ray.folder).exists(),
    )


def test_by_default_a_ray_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by us, so stopped by us, with its process on record."""
    running = found({}, monkeypatch)

    assert RayState("127.0.0.1:6379", "specwire", started=True, folder="/ray") == running.ray
    assert (HEAD.process,) == running.processes


@pytest.mark.parametrize(
    ("settings", "ray_address", "expected"),
    [
        ({}, "10.0.0.1:6379", "10.0.0.1:6379"),
        ({"address": "auto"}, None, "auto"),
        ({"address": "10.0.0.2:6379"}, "10.0.0.1:6379", "10.0.0.2:6379"),
    ],
)
def test_a_ray_that_is_named_is_joined(
    settings: dict[str, str], ray_address: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topology's word wins over the environment's."""
    assert RayState(expected, "specwire", started=False) == found(settings, monkeypatch, ray_address).ray


def test_the_word_local_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says `local` means it."""
    joined = found({"address": "local"}, monkeypatch, "10.0.0.1:6379").ray

    assert joined is not None
    assert joined.started


def test_our_ray_is_on_loopback_and_locked() -> None:
    """And sends nothing home."""
    environment = ray_head.environment(StateFolder(Path("/state")))

    assert ("0", "token", "/state/ray_token", "0") == tuple(
        environment[f"RAY_{name}"]
        for name in ("ENABLE_WINDOWS_OR_OSX_CLUSTER", "AUTH_MODE", "AUTH_TOKEN_PATH", "USAGE_STATS_ENABLED")
    )


def test_settings_of_another_ray_do_not_reach_ours() -> None:
    """The rest of the environment does, OTEL variables for instance."""
    assert {"OTEL_SERVICE_NAME": "x"} == ray_head._without_ray({"RAY_ADDRESS": "auto", "OTEL_SERVICE_NAME": "x"})


def test_a_socket_that_refuses_is_not_waited_for() -> None:
    """Ray would wait for minutes; addresses that cannot be tried are left to it."""
    states = [RayState(address, "specwire", started=False) for address in ("127.0.0.1:1", "auto", "ray://127.0.0.1:1")]

    assert [False, True, True] == [ray_head.reachable(state) for state in states]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("short", "short"),
        ("", "RuntimeError"),
        (
            "The actor died because of an error raised in its creation task, ray::Hosted() (pid=7)\n"
            "  File 'actor.py', line 9, in __init__\n"
            "specwire.law.errors.InvalidArgument: bind: got '127.0.0.1:80', must be a free port\n",
            "specwire.law.errors.InvalidArgument: bind: got '127.0.0.1:80', must be a free port",
        ),
        ("RuntimeError: coordinator cannot start: x\n  note below", "RuntimeError: coordinator cannot start: x"),
    ],
)
def test_the_line_that_matters(text: str, expected: str) -> None:
    """Ray tells where; the user needs why."""
    assert expected == ready.cause(RuntimeError(text))


def test_what_answers_in_time_is_returned() -> None:
    """And what it raises is told in one line."""

    def fail() -> None:
        raise ConnectionError("no\nmore")

    assert 3 == ready.within(10.0, "Ray", lambda: 3)
    with pytest.raises(StartError, match=r"^Ray cannot be used: no$"):
        ready.within(10.0, "Ray", fail)


def test_what_does_not_answer_is_left_behind() -> None:
    """Within the time."""
    over = threading.Event()
    with pytest.raises(StartError, match="Ray does not answer within 0 s"):
        ready.within(0.01, "Ray", over.wait)
    over.set()


def test_only_rays_of_ours_are_ended() -> None:
    """A folder that is in everybody's command would end everybody."""
    for other in ("", "/", "/tmp"):
        with pytest.raises(ValueError, match="not the folder of a Ray of ours"):
            ray_head.stop(Path(other))


def test_parts_whose_holder_was_killed_are_found_and_ended(tmp_path: Path) -> None:
    """By the mark in their environment, since Ray's processes change their command; and their files go."""
    files = tmp_path / f"{ray_head.PREFIX}x"
    files.mkdir()
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    part = subprocess.Popen(sleeper, env={**os.environ, ray_head.MARK: str(files)})
    other = subprocess.Popen(sleeper, env={**os.environ, ray_head.MARK: str(tmp_path / "other")})
    while not all(psutil.Process(each.pid).cmdline() == sleeper for each in (part, other)):  # not yet what they will be
        time.sleep(0.001)
    ray_head.stop(files, 0.5)
    ended = (part.poll() is not None, other.poll() is not None, files.exists())
    other.kill()
    other.wait()

    assert (True, False, False) == ended
