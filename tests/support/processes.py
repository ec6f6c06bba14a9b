"""The whole stack as processes, each started as its user starts it, for tests that send signals.

Law. A process is ready when it says so on its standard output, which is the line people wait for as well; the service is
ready when its statistics say so. Logs go to files, whose ends are shown when something did not come up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from specwire.client import SyncClient
from specwire.law.errors import SpecwireError
from specwire.lm.table_config import TableConfig
from specwire.v1 import inference_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
"""Processes load a tensor library before they serve."""
POLL_S = 0.02
MODULES = {"coordinator": "coordinator", "draft": "draft_service", "target": "target_service"}


class Processes:
    """A coordinator, drafts and a target. `start` each by its name: coordinator, target-0, draft-0, draft-1, ..."""

    def __init__(self, folder: Path, **coordinator: Any) -> None:
        self.folder = folder
        self.address = ""
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._configs: dict[str, dict[str, Any]] = {
            "coordinator": {"bind": "127.0.0.1:0", "drain_s": 0, "heartbeat_s": 0.1, **coordinator}
        }
        self._lives = 0
        self._client: SyncClient | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._client is not None:
            self._client.close()
        for name in list(self.running):
            self.kill(name)

    @property
    def client(self) -> SyncClient:
        """One for all, made when first asked for."""
        if self._client is None:
            self._client = SyncClient(self.address)
        return self._client

    # ---------------------------------------------------------------- life and death

    def plan(self, name: str, table: TableConfig, slots: int = 16, **config: Any) -> None:
        """How a worker is to be started."""
        model = {"model": "table", "table": _plain(dataclasses.asdict(table)), "max_sessions": slots, "max_block": 8}
        self._configs[name] = {"name": name, "profile": False, "model": model, **config}

    def start(self, *names: str) -> None:
        """Starts them together and waits until each says that it is ready; a coordinator where it was before."""
        outs = {name: self._spawn(name) for name in names}
        for name, out in outs.items():
            said = self._ready_line(name, out)
            if name == "coordinator":
                self.address = self._configs[name]["bind"] = said

    def _spawn(self, name: str) -> Path:
        assert name not in self.running
        self._lives += 1
        config = self.folder / f"{name}.yaml"
        place = {} if name == "coordinator" else {"coordinator": self.address}
        config.write_text(yaml.safe_dump({**self._configs[name], **place}))
        out, err = (self.folder / f"{name}-{self._lives}.{kind}" for kind in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            self.running[name] = subprocess.Popen(
                self.command(name, config), cwd=ROOT, env=self.environment(), stdout=stdout, stderr=stderr
            )
        return out

    def command(self, name: str, config: Path) -> list[str]:
        """How it is started."""
        return [sys.executable, "-m", MODULES[name.partition("-")[0]], "--config", str(config)]

    def environment(self) -> dict[str, str] | None:
        """What it finds in its environment. None: what this process has."""
        return None

    def _ready_line(self, name: str, out: Path) -> str:
        give_up = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"ready at (\S+)", out.read_text())):
            if self.running[name].poll() is not None or time.monotonic() > give_up:
                raise AssertionError(f"{name} did not come up: {out.with_suffix('.err').read_text()[-2000:]}")
            time.sleep(POLL_S)
        return found.group(1).rstrip(",")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal."""
        self.running[name].send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL, whether it was stopped or not; returns when the process is gone."""
        process = self.running.pop(name)
        process.kill()
        process.wait(PATIENCE_S)

    def terminate(self, *names: str) -> list[int]:
        """SIGTERM for all of them at once; returns the exit statuses."""
        processes = [self.running.pop(name) for name in names]
        for process in processes:
            process.terminate()
        return [process.wait(PATIENCE_S) for process in processes]

    # ---------------------------------------------------------------- asking

    def until(self, holds: Callable[[pb.GetStatsResponse], bool]) -> pb.GetStatsResponse:
        """Waits until the statistics say so. A coordinator that does not answer is asked again."""
        give_up = time.monotonic() + PATIENCE_S
        stats = pb.GetStatsResponse()
        while time.monotonic() < give_up:
            with contextlib.suppress(SpecwireError):
                stats = self.client.stats()
                if holds(stats):
                    return stats
            time.sleep(POLL_S)
        raise AssertionError(f"waited in vain; last seen:\n{stats}")

    def ready(self) -> None:
        """Waits until every worker that runs is ready in its present life."""
        nodes = {name: str(process.pid) for name, process in self.running.items() if name != "coordinator"}

        def all_ready(stats: pb.GetStatsResponse) -> bool:
            seen = {w.name: w.info.node.rpartition(":")[2] for w in stats.workers if w.state == "ready"}
            return nodes.items() <= seen.items()

        self.until(all_ready)


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
