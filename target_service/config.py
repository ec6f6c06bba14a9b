"""Settings of the target."""

from __future__ import annotations

from specwire.worker.config import Name, WorkerConfig


class TargetConfig(WorkerConfig):
    """Serves a target model: judges proposed blocks, many sessions in one pass. Without `model.model` it serves `table`, a
    built-in model that makes tokens up, for tests. Ends with status 0 after SIGTERM or SIGINT, 2 when it cannot start.

    example: python -m target_service --set coordinator=127.0.0.1:8470 --set model.model=models/smollm2
    """

    name: Name = "target-0"
    linger: bool = True
    """Wait briefly for blocks that the coordinator announces, when that saves more time than it costs."""
