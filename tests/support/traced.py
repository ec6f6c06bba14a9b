"""Coordinator, target and draft as real processes with table models, and with the OTEL variables one likes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from specwire.client import Client
from specwire.lm.table_config import TableConfig
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import inference_pb2_grpc

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
POLL_S = 0.05
SKEWED = """
import runpy, sys, time
real, skew = time.time_ns, int(sys.argv[1])
time.time_ns = lambda: real() + skew
module, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""A service whose wall clock is wrong; its monotonic clock is not."""


@dataclass
class Processes:
    """Running services by role."""

    logs: Path
    address: str = ""
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(
        self, module: str, role: str, settings: Mapping[str, Any], environ: Mapping[str, str], skew_ns: int
    ) -> str:
        """Starts one and returns where it serves."""
        arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        begin = [sys.executable, "-c", SKEWED, str(skew_ns), module] if skew_ns else [sys.executable, "-m", module]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        with (self.logs / role).open("w") as log:
            self.running[role] = subprocess.Popen(
                [*begin, *arguments],
                cwd=ROOT,
                env={**clean, **environ, "PYTHONWARNINGS": "ignore"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def address_of(self, role: str) -> str:
        """Where it serves, once it says so."""
        stdout = self.running[role].stdout
        assert stdout is not None
        for line in stdout:
            if " ready at " in line:
                return line.partition(" ready at ")[2].split(",")[0].strip()
        raise AssertionError(f"{role} did not start: {self.log(role)}")

    def log(self, role: str) -> str:
        """What it said so far."""
        return (self.logs / role).read_text()

    def client(self) -> Client:
        """To be closed by the caller."""
        return Client(self.address)

    def stub(self) -> tuple[grpc.Channel, Any]:
        """For what the client has no field for."""
        channel = grpc.insecure_channel(self.address)
        return channel, inference_pb2_grpc.InferenceStub(channel)

    def until_ready(self) -> None:
        """All three are, and see each other."""
        channel, stub = self.stub()
        give_up = time.monotonic() + PATIENCE_S
        with channel:
            while True:
                stats = stub.GetStats(pb.GetStatsRequest(), timeout=10, wait_for_ready=True)
                if [worker.state for worker in stats.workers] == ["ready", "ready"]:
                    return
                assert time.monotonic() < give_up, stats
                time.sleep(POLL_S)

    def stop(self) -> dict[str, float]:
        """As SIGTERM does, all at once; returns how long each took. Workers first, as their coordinator is not needed."""
        begun = time.monotonic()
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        took = {}
        for role, process in self.running.items():
            assert process.wait(PATIENCE_S) == 0, self.log(role)
            took[role] = time.monotonic() - begun
            assert process.stdout is not None
            process.stdout.close()
        self.running.clear()
        return took

    def kill(self) -> None:
        """Whatever is left."""
        for process in self.running.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.running.clear()


@contextmanager
def processes(
    logs: Path,
    environ: Mapping[str, str],
    target: TableConfig,
    draft: TableConfig,
    skew_ms: Mapping[str, int] | None = None,
    **settings: Any,
) -> Iterator[Processes]:
    """The three of them, ready. `settings` are the coordinator's."""
    stack = Processes(logs)
    skews = skew_ms or {}
    try:
        stack.start("coordinator", "coordinator", {"bind": "127.0.0.1:0", **settings}, environ, 0)
        stack.address = stack.address_of("coordinator")
        for role, table in (("target", target), ("draft", draft)):
            worker = {
                "name": f"{role}-0",
                "coordinator": stack.address,
                "profile": False,
                "drain_s": 1.0,
                "model": {"model": "table", "table": _plain(table), "max_block": 8},
            }
            stack.start(f"{role}_service", role, worker, environ, skews.get(role, 0) * 1_000_000)
        stack.until_ready()
        yield stack
    finally:
        stack.kill()


def _plain(table: TableConfig) -> dict[str, Any]:
    default = asdict(TableConfig())
    return {key: value for key, value in asdict(table).items() if value != default[key]}
