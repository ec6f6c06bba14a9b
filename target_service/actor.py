"""The target as a Ray actor. A plain class: `deploy/cluster.py` wraps it with the options of its placement.

Law. Ray re-runs only the constructor after a crash, so the constructor ends with a serving worker, which registers itself
with the coordinator under its old name and a new incarnation.
"""

from __future__ import annotations

from typing import Any

from specwire.settings import build_config
from specwire.worker.hosted import HostedWorker
from specwire.worker.main import prepare_logging, prepare_threads
from target_service.config import TargetConfig
from target_service.role import TARGET


class TargetActor:
    """One target."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = build_config(TargetConfig, settings)
        prepare_logging()
        prepare_threads(config)
        self._worker = HostedWorker(TARGET, config)

    def address(self) -> str:
        """host:port at which the coordinator reaches it."""
        return self._worker.address

    def ping(self) -> dict[str, str | int]:
        """Name, address, incarnation, and trouble (empty: none)."""
        return self._worker.ping()

    def stop(self) -> None:
        """Drains and ends the worker; the actor itself is ended by whoever made it."""
        self._worker.stop()
