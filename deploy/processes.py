"""Starting and stopping without Ray: plain processes on this machine, kept alive by `supervisor.py`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

import deploy
from deploy import ready, supervisor
from deploy.configs import environment, reachable, visible_gpus
from deploy.ready import StartError
from deploy.state import NothingRuns, Process, Running, StateFolder
from deploy.supervisor import Service
from deploy.topology import Topology
from specwire.wire.rpc import split_address

if TYPE_CHECKING:
    from specwire.v1 import inference_pb2 as pb

MODULES = {"coordinator": "coordinator", "target": "target_service", "draft": "draft_service"}


def up(
    folder: StateFolder,
    topology: Topology,
    configs: Mapping[str, Mapping[str, Any]],
    source: str,
    timeout_s: float,
    progress: Callable[[str], None],
    grace_s: float = 10.0,
) -> tuple[Running, pb.GetStatsResponse]:
    """Starts everything and waits until it serves. What was started is stopped again when that fails or is interrupted.

    The caller holds the folder exclusively and has seen that nothing runs. Raises StartError."""
    endpoint = str(configs["coordinator"]["bind"])
    ready.check_port(endpoint)
    workers = tuple(name for name in configs if name != "coordinator")
    running = Running("processes", reachable(*split_address(endpoint)), source, workers, time.time())
    for log in folder.logs.glob("*.log"):
        log.unlink()
    supervisor.write_plan(folder, services(folder, topology, configs), running, grace_s)
    keeper = _start_supervisor(folder)

    def failed() -> str | None:
        if keeper.poll() is not None:
            return f"the supervisor {supervisor.how(keeper.returncode)}:\n{ready.tail(folder.log('supervisor'))}"
        return first_failure(folder)

    try:
        stats = ready.wait_ready(running.endpoint, workers, timeout_s, failed, progress)
    except BaseException:
        down(folder, grace_s=2.0, also=keeper.pid)
        raise
    return folder.read() or running, stats


def services(folder: StateFolder, topology: Topology, configs: Mapping[str, Mapping[str, Any]]) -> list[Service]:
    """Writes each configuration where its service reads it, and says how to start them, in order."""
    parts = topology.services()
    gpus = visible_gpus(topology)
    found = []
    for name, config in configs.items():
        path = folder.configs / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
        # -P: the folder we happen to stand in is no place to import from.
        command = (sys.executable, "-P", "-m", MODULES[name.split("-")[0]], "--config", str(path))
        found.append(Service(name, command, environment(parts[name], gpus.get(name)) | import_path()))
    return found


def import_path() -> dict[str, str]:
    """Where our own packages are, for a checkout that was never installed."""
    root = str(Path(next(iter(deploy.__path__))).parent)
    if "site-packages" in root:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _start_supervisor(folder: StateFolder) -> subprocess.Popen[bytes]:
    with folder.log("supervisor").open("ab") as log:
        return subprocess.Popen(
            (sys.executable, "-P", "-m", "deploy.supervisor", str(folder.path)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder.path,
            env={**os.environ, **import_path()},
            start_new_session=True,
        )


def first_failure(folder: StateFolder) -> str | None:
    """During a start: the first service that died, with what it said last. One that dies at start would die again."""
    running = folder.read()
    for process in running.processes if running is not None else ():
        if process.exit:
            said = ready.last_words(folder.log(process.name)) or "(it wrote nothing)"
            return f"{process.name} {process.exit} while starting. It said:\n{said}"
    return None


def down(folder: StateFolder, grace_s: float, also: int | None = None) -> list[str]:
    """Stops everything that the state file names, within `grace_s` and some seconds. Returns the names of what was stopped.

    The supervisor goes first, or it would start again what we stop. `also`: a process that may not be in the file yet."""
    running = folder.read()
    if running is None:
        raise NothingRuns("nothing is running")
    processes = list(running.processes)
    if also is not None and all(process.pid != also for process in processes) and psutil.pid_exists(also):
        processes.append(Process.of("supervisor", also))
    keepers = [process for process in processes if process.name == "supervisor"]
    names = [process.name for process in processes if process.alive]
    end(keepers, grace_s + 1.0)
    running = folder.read() or replace(running, processes=tuple(processes))  # the supervisor may have written last
    end([process for process in running.processes if process.name != "supervisor"], grace_s)
    folder.clear()
    return [name for name in names if name != "supervisor"]


def end(processes: Sequence[Process], grace_s: float) -> None:
    """TERM, then KILL. Only processes that are still the ones we mean."""
    living = [found for process in processes if (found := process.find()) is not None]
    for process in living:
        _quietly(process.terminate)
    _, stubborn = psutil.wait_procs(living, timeout=grace_s)
    for process in stubborn:
        _quietly(process.kill)
    _, left = psutil.wait_procs(stubborn, timeout=5.0)
    if left:
        raise StartError(f"processes that do not end: {', '.join(str(process.pid) for process in left)}")


def _quietly(act: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        act()
