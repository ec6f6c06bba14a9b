"""The coordinator as a Ray actor. Ray runs a dead actor's constructor again and nothing else, so the constructor ends with a
serving coordinator. This class is plain; deploy/cluster.py makes it remote."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any

from coordinator.config import CoordinatorConfig
from coordinator.serve import serve
from specwire.settings import LOG_FORMAT

START_TIMEOUT_S = 60.0


class CoordinatorActor:
    """Serves from its construction to `stop`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = CoordinatorConfig.model_validate(config)
        logging.basicConfig(level=self._config.log_level.upper(), format=LOG_FORMAT)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._address = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S) or self._error is not None:
            raise RuntimeError(f"coordinator cannot start: {self._error or 'it took too long'}")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(serve(self._config, self._stop, self._serving))
        except BaseException as error:
            self._error = error
            self._ready.set()

    def _serving(self, address: str) -> None:
        self._address = address
        self._ready.set()

    def address(self) -> str:
        """host:port."""
        return self._address

    def ping(self) -> dict[str, Any]:
        """Who and where; raises when it no longer serves."""
        if not self._thread.is_alive():
            raise RuntimeError(f"coordinator stopped: {self._error}")
        return {"name": self._config.name, "role": "coordinator", "address": self._address, "pid": os.getpid()}

    def stop(self) -> None:
        """Drains and ends."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(self._config.drain_s + 5.0)
