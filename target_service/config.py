"""Settings of the target."""

from __future__ import annotations

from specwire.worker.config import Name, WorkerConfig


class TargetConfig(WorkerConfig):
    """Serves a target model: judges proposed blocks, many sessions in one pass."""

    name: Name = "target-0"
    linger: bool = True
    """Wait briefly for blocks that the coordinator announces, when that saves more time than it costs."""
