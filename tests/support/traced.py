"""The stack as processes with the OTEL variables one likes, and with wall clocks that are wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from specwire.lm.table_config import TableConfig
from specwire.v1 import inference_pb2_grpc
from tests.support.processes import PATIENCE_S, Processes

SKEWED = """
import runpy, sys, time
real, skew = time.time_ns, int(sys.argv[1])
time.time_ns = lambda: real() + skew
module, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""A service whose wall clock is wrong; its monotonic clock is not."""


class TracedProcesses(Processes):
    """`skew_ms` by role."""

    def __init__(
        self, folder: Path, environ: Mapping[str, str], skew_ms: Mapping[str, int], **coordinator: Any
    ) -> None:
        super().__init__(folder, **coordinator)
        self._environ = {**{k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}, **environ}
        self._skew_ms = skew_ms

    def command(self, name: str, config: Path) -> list[str]:
        """With its clock put wrong."""
        python, flag, module, *rest = super().command(name, config)
        skew_ns = self._skew_ms.get(name.partition("-")[0], 0) * 1_000_000
        return [python, "-c", SKEWED, str(skew_ns), module, *rest] if skew_ns else [python, flag, module, *rest]

    def environment(self) -> dict[str, str]:
        """Nothing of the OTEL variables that this process has."""
        return self._environ

    def stub(self) -> tuple[grpc.Channel, Any]:
        """For what the client has no field for."""
        channel = grpc.insecure_channel(self.address)
        return channel, inference_pb2_grpc.InferenceStub(channel)

    def log(self, name: str) -> str:
        """What it said so far."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}-*.err")))

    def end_all(self) -> dict[str, float]:
        """SIGTERM for all at once. Returns how many seconds each took, and asserts that none was killed or failed."""
        begun, took = time.monotonic(), {}
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        while self.running:
            name, process = self.running.popitem()
            assert process.wait(PATIENCE_S) == 0, self.log(name)
            took[name] = time.monotonic() - begun
        return took


@contextmanager
def processes(
    folder: Path,
    environ: Mapping[str, str],
    target: TableConfig,
    draft: TableConfig,
    skew_ms: Mapping[str, int] | None = None,
    **coordinator: Any,
) -> Iterator[TracedProcesses]:
    """Coordinator, target-0 and draft-0, ready."""
    with TracedProcesses(folder, environ, skew_ms or {}, **coordinator) as stack:
        stack.plan("target-0", target, drain_s=1.0)
        stack.plan("draft-0", draft, drain_s=1.0)
        stack.start("coordinator")
        stack.start("target-0", "draft-0")
        stack.ready()
        yield stack
