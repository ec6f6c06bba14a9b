"""A Ray of our own on this machine: started detached, kept to loopback, locked with a token, ended to the last process.

`import ray` does not stand here: a process of its own (`deploy.actor`, run as a program) holds the head. Its ports are bound to
loopback only, because whoever reaches a Ray can run any code; it takes a token besides, so that other users of this machine
cannot either. It is ended by the processes that we started and their children, never by `ray stop`, which ends every Ray on the
machine. And it has fewer parts than `ray start` gives it: no server for Ray's own client, no autoscaler, no dashboard, no spare
workers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from deploy import processes, ready
from deploy.ready import StartError
from deploy.state import Process, RayState, Running, StateFolder
from deploy.supervisor import how
from deploy.topology import RaySettings

HOST = "127.0.0.1"
TOKEN = "ray_token"
PREFIX = "specwire-ray-"
MARK = "SPECWIRE_RAY_FILES"
"""In the environment of every process of our Ray, since some of them change their command."""
RAY_WAS_SLOW = "timed out during startup"
"""In Ray's words, when one of its parts took too long."""
LONGEST_TMP = 40
"""Ray puts sockets some 65 characters below its folder, and a socket's path ends at 107."""


@dataclass(frozen=True, slots=True)
class Head:
    """A started head."""

    address: str
    folder: Path
    process: Process


def require() -> None:
    """Raises StartError when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise StartError("Ray is not installed. Either: pip install 'specwire[ray]', or: specwire up --no-ray")


def environment(folder: StateFolder) -> dict[str, str]:
    """What every process of our Ray, and whoever connects to it, has in its environment before Ray is imported."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Despite its name: 0 makes Ray use loopback for all its ports, on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.path / TOKEN),
        # Spare workers would never be used: our actors need an environment of their own.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def find(folder: StateFolder, settings: RaySettings, running: Running, namespace: str, timeout_s: float) -> Running:
    """Decides which Ray, and starts it when it is to be ours. RAY_ADDRESS counts unless the topology says which."""
    address = settings.address
    if "address" not in settings.model_fields_set:
        address = os.environ.get("RAY_ADDRESS") or address
    if address != "local":
        return replace(running, ray=RayState(address, namespace, started=False))
    ready.check_port(running.endpoint)

    def note(files: Path | None) -> None:
        if files is None:
            folder.clear()
        else:
            folder.write(replace(running, ray=RayState("", namespace, started=True, folder=str(files))))

    head = start(folder, settings.object_store_mb, timeout_s, note)
    state = RayState(head.address, namespace, started=True, folder=str(head.folder))
    return replace(running, ray=state, processes=(head.process,))


def start(
    folder: StateFolder, object_store_mb: int, timeout_s: float, note: Callable[[Path | None], None] = lambda _: None
) -> Head:
    """Starts a head and waits until it runs. Raises StartError with its last words.

    `note`: told of its files before anything runs that has them, so that whoever comes after us finds what we leave behind,
    however we end; and of None once all that is gone. Ray gives its own parts 30 seconds to start, which a busy machine may exceed:
    so it is tried again while there is time."""
    give_up = time.monotonic() + timeout_s
    token = folder.path / TOKEN
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    while True:
        try:
            return _try(folder, object_store_mb, give_up, note)
        except StartError as error:
            if RAY_WAS_SLOW not in str(error) or time.monotonic() > give_up:
                raise


def _try(folder: StateFolder, object_store_mb: int, give_up: float, note: Callable[[Path | None], None]) -> Head:
    base = tempfile.gettempdir()
    files = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base if len(base) < LONGEST_TMP else "/tmp"))
    try:
        note(files)
        return _run(folder, files, object_store_mb, give_up)
    except BaseException:
        stop(files)
        note(None)
        raise


def _run(folder: StateFolder, files: Path, object_store_mb: int, give_up: float) -> Head:
    told = files / "address"
    numbers = (str(cores()), str(object_store_mb))
    command = (sys.executable, "-P", "-m", "deploy.actor", str(files), str(told), HOST, *numbers)
    with folder.log("ray").open("wb") as log:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder.path,
            env={**_without_ray(os.environ), **environment(folder), **processes.import_path(), MARK: str(files)},
            start_new_session=True,
        )
    while not told.exists():
        if started.poll() is not None:
            raise StartError(f"Ray {how(started.returncode)} while starting:\n{ready.tail(folder.log('ray'))}")
        if time.monotonic() > give_up:
            raise StartError(f"Ray did not start in time:\n{ready.tail(folder.log('ray'))}")
        time.sleep(0.05)
    return Head(told.read_text(), files, Process.of("ray", started.pid))


def _without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """A Ray that the user's environment names is another one."""
    return {key: value for key, value in environment.items() if not key.startswith("RAY_")}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def listens(address: str) -> bool:
    """Whether somebody accepts connections there. Ray itself would wait for minutes to find out."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False


def reachable(state: RayState) -> bool:
    """False when it is certain that no Ray is there: nobody listens, or it never said where."""
    if not state.address:
        return False
    plain = ":" in state.address and "//" not in state.address
    return not plain or listens(state.address)


def stop(files: Path, grace_s: float = 3.0) -> None:
    """Ends the head with these files, all that it started and all that these started, and removes the files."""
    if not files.name.startswith(PREFIX):  # no folder of ours: what is looked for is in many a command
        raise ValueError(f"{files} is not the folder of a Ray of ours")
    # Parts whose holder died first are nobody's children any more.
    roots = [each for each in psutil.process_iter() if _belongs(each, files)]
    family = {each.pid: each for root in roots for each in [root, *_children(root)]}
    living = []
    for each in family.values():
        with contextlib.suppress(psutil.Error):  # it may end at any time
            if each.is_running():
                living.append(Process.of("ray", each.pid))
    processes.end(living, grace_s)
    shutil.rmtree(files, ignore_errors=True)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _belongs(process: psutil.Process, files: Path) -> bool:
    """Whether it is of the Ray with this session folder: by its command, or by the environment that we gave it."""
    with contextlib.suppress(psutil.Error, OSError):
        return any(str(files) in part for part in process.cmdline()) or process.environ().get(MARK) == str(files)
    return False
