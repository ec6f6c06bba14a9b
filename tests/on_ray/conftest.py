"""The whole service as `specwire up` starts it, by both means. One service per means is shared by all claims."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from deploy.state import Running, StateFolder
from specwire.client import SyncClient

TOPOLOGY = """
coordinator: {port: 0, speculation: {num_speculative_tokens: 4, method: draft_model}}
target:
  model: table
  threads: 1
  num_cpus: 0.1
  table: {vocab_size: 16, seed: 1, order: 2, max_context: 4096, row_ms: 2.0}
draft:
  model: table
  threads: 1
  num_cpus: 0.1
  table: {vocab_size: 16, seed: 1, order: 2, max_context: 4096, disagreement: 0.3}
ray: {address: local}
"""
"""The target takes its time, so that a request lasts long enough to lose something in its midst."""
PATIENCE = "240"


@dataclass
class Service:
    """A service that was started from a command line."""

    folder: StateFolder
    means: str
    variables: dict[str, str] = field(default_factory=dict)
    """On top of the usual environment."""

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`specwire` with arguments, from a shell of its own."""
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", *arguments],
            env=environment(self.folder.path) | self.variables,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    @property
    def running(self) -> Running:
        """What the state file says."""
        found = self.folder.read()
        assert found is not None
        return found

    def client(self) -> SyncClient:
        """A client of it."""
        return SyncClient(self.running.endpoint)

    def pid(self, name: str) -> int:
        """The process that serves under a name now, as the service itself tells."""
        if name == "coordinator":
            port = int(self.running.endpoint.rpartition(":")[2])
            return next(
                each.pid
                for each in psutil.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None
            )
        with self.client() as client:
            return next(
                int(worker.info.node.rpartition(":")[2]) for worker in client.stats().workers if worker.name == name
            )


def environment(folder: Path) -> dict[str, str]:
    """The environment of a shell whose Specwire lives in `folder`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SPECWIRE_"))}
    return kept | {"SPECWIRE_STATE": str(folder)}


@pytest.fixture(scope="session", params=[pytest.param("ray", marks=pytest.mark.ray), "processes"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A running service."""
    found = Service(StateFolder(tmp_path_factory.mktemp(request.param)), request.param)
    path = found.folder.path / "topology.yaml"
    path.write_text(TOPOLOGY)
    options = [] if request.param == "ray" else ["--no-ray"]
    done = found.command("up", str(path), "--timeout", PATIENCE, *options)
    assert 0 == done.returncode, done.stderr
    yield found
    before = family(found.running)
    done = found.command("down", "--grace", "2")
    assert (0, []) == (done.returncode, [each for each in before if each.is_running()]), done.stderr
    assert found.folder.read() is None


def family(running: Running) -> list[psutil.Process]:
    """Every process of a service."""
    found = [each for process in running.processes if (each := process.find()) is not None]
    return [*found, *(child for each in found for child in each.children(recursive=True))]
