"""Starts that fail: one message that says why, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy import ray_head
from deploy.ray_head import Head
from deploy.state import Process, StateFolder
from tests.on_ray.conftest import PATIENCE, TOPOLOGY, Service, environment


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Service]:
    """Nothing runs yet."""
    found = Service(StateFolder(tmp_path / "state"), "")
    yield found
    if found.folder.read() is not None:  # the test has failed
        found.command("down", "--grace", "0")


def up(service: Service, text: str, *options: str) -> tuple[int, str]:
    """Status and message of an `up` that should fail; nothing may be left of it."""
    path = service.folder.path.parent / "t.yaml"
    path.write_text(text)
    done = service.command("up", str(path), "--timeout", PATIENCE, *options)

    assert ([], None, False) == (remains(service), service.folder.read(), "Traceback" in done.stderr), done.stderr
    return done.returncode, done.stderr


def remains(service: Service) -> list[list[str]]:
    """Commands of what still runs of a service."""
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(service.folder.path) in part for part in process.info["cmdline"] or [])
    ]


def test_a_taken_port(fresh: Service) -> None:
    """Named with its holder."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said = up(fresh, TOPOLOGY.replace("port: 0", f"port: {port}"), "--no-ray")

    assert 2 == status
    assert f"coordinator.port: got {port}, must be a free port of 127.0.0.1: Address already in use" in said


@pytest.mark.parametrize("model", ["/no/such/folder", "no such/model!"])
def test_a_model_that_is_not_there(fresh: Service, model: str) -> None:
    """Told before anything is started."""
    status, said = up(fresh, f"coordinator: {{port: 0}}\ntarget: {{model: {model!r}}}\n", "--no-ray")

    assert (True, True) == (status in (2, 3), model in said)


def test_a_worker_that_dies_while_starting(fresh: Service) -> None:
    """Its last words are shown, and what was started with it is stopped."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said = up(fresh, TOPOLOGY.replace("target:", f"target:\n  port: {port}"), "--no-ray")

    assert 3 == status
    assert "target-0 exited with code 2 while starting. It said:" in said
    assert f"127.0.0.1:{port}" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("means", "how"),
    [
        pytest.param("ray", signal.SIGINT, marks=pytest.mark.ray),
        pytest.param("ray", signal.SIGHUP, marks=pytest.mark.ray),
        ("processes", signal.SIGINT),
        ("processes", signal.SIGTERM),
    ],
)
def test_a_start_that_is_interrupted(fresh: Service, means: str, how: signal.Signals) -> None:
    """Stops what was started so far: by Ctrl-C, by a terminal that is closed, by whoever ends processes."""
    path = fresh.folder.path.parent / "t.yaml"
    path.write_text(TOPOLOGY)
    options = [] if means == "ray" else ["--no-ray"]
    starting = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "up", str(path), *options],
        env=environment(fresh.folder.path),
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # ignored where tests run in the background
    )
    begun = (
        "ray" if how is signal.SIGHUP else "coordinator"
    )  # Ray itself is on its way, and nobody's note of it is written
    while starting.poll() is None and not fresh.folder.log(begun).exists():
        time.sleep(0.01)
    starting.send_signal(how)

    assert 130 == starting.wait(60)
    assert ([], None) == (remains(fresh), fresh.folder.read())


@pytest.mark.ray
def test_resources_that_are_not_there(fresh: Service) -> None:
    """What was asked and what is free, after the time-out; Ray is stopped again (report 140)."""
    text = TOPOLOGY.replace("ray: {address: local}", "ray: {address: local, placement_timeout_s: 0.5}")
    status, said = up(fresh, text.replace("  num_cpus: 0.1", "  num_cpus: 900\n  resources: {unobtainium: 2}"))

    assert 3 == status
    assert "target-0: CPU 900, unobtainium 2" in said
    assert "unobtainium: 4 asked, 0 free" in said


@pytest.mark.ray
def test_a_ray_that_is_not_there(fresh: Service) -> None:
    """Joining says which Ray was meant."""
    status, said = up(fresh, TOPOLOGY.replace("address: local", "address: '127.0.0.1:1'"))

    assert (3, True) == (status, "Ray at 127.0.0.1:1" in said)


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_that_runs_is_joined_and_left_running(fresh: Service, tmp_path: Path) -> None:
    """RAY_ADDRESS says which; a second Specwire in it is refused and does not harm the first."""
    other = StateFolder(tmp_path / "other")
    other.prepare()
    # From a process of its own, as everywhere: a head outlives whoever started it.
    code = (
        "import dataclasses, json, pathlib, sys; from deploy import ray_head; from deploy.state import StateFolder\n"
        "head = ray_head.start(StateFolder(pathlib.Path(sys.argv[1])), 80, float(sys.argv[2]))\n"
        "print(json.dumps([head.address, str(head.folder), dataclasses.astuple(head.process)]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, other.path, PATIENCE], check=True, capture_output=True, text=True
    )
    address, files, process = json.loads(told.stdout)
    head = Head(address, Path(files), Process(*process))
    try:
        spans = {"OTEL_TRACES_EXPORTER": "none", "OTEL_SERVICE_NAME": "mine"}
        fresh.variables = ray_head.environment(other) | {"RAY_ADDRESS": head.address} | spans
        path = tmp_path / "t.yaml"
        path.write_text(TOPOLOGY.replace("ray: {address: local}", ""))
        started = fresh.command("up", str(path), "--timeout", PATIENCE)
        rival = Service(StateFolder(tmp_path / "rival"), "", fresh.variables)
        refused = rival.command("up", str(path), "--timeout", PATIENCE)
        said = fresh.command("generate", "1,2,3", "--ids", "--max-tokens", "5")
        actors = json.loads(fresh.command("status", "--actors", "--json").stdout)["actors"]
        environs = [psutil.Process(fresh.pid(name)).environ() for name in ("coordinator", "target-0", "draft-0")]
        stopped = fresh.command("down", "--grace", "2")

        assert (0, 2, 0, 0) == (started.returncode, refused.returncode, said.returncode, stopped.returncode), (
            started.stderr
        )
        assert "this Ray already has a Specwire" in refused.stderr
        assert [("coordinator", "alive"), ("target-0", "alive"), ("draft-0", "alive")] == [
            (actor["name"], actor["state"]) for actor in actors
        ]
        assert [spans] * 3 == [{key: found.get(key) for key in spans} for found in environs]
        assert (True, None) == (head.process.alive, fresh.folder.read())
    finally:
        ray_head.stop(head.folder)
    assert not head.process.alive
