"""A worker inside a process that is not its own, on an event loop in a background thread. For Ray actors and notebooks.

Law. The constructor returns when the worker serves, and raises what made it fail; whoever re-runs the constructor has a
serving worker again.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from specwire.worker.config import WorkerConfig
from specwire.worker.main import serve
from specwire.worker.service import Role, WorkerServer


class HostedWorker:
    """Serves from construction to `stop`. Its methods may be called from any thread."""

    def __init__(self, role: Role, config: WorkerConfig) -> None:
        self._config = config
        self._started: Future[WorkerServer] = Future()
        self._thread = threading.Thread(target=self._run, args=(role, config), name=config.name, daemon=True)
        self._thread.start()
        self._server = self._started.result()

    def _run(self, role: Role, config: WorkerConfig) -> None:
        async def run() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await serve(role, config, self._stop, self._started.set_result)

        try:
            asyncio.run(run())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def __repr__(self) -> str:
        return f"HostedWorker({self._config.name} at {self._server.address})"

    @property
    def address(self) -> str:
        """host:port at which the worker can be reached."""
        return self._server.address

    def ping(self) -> dict[str, str | int]:
        """Name, address, incarnation, and what is wrong (empty: nothing)."""
        trouble = self._server.engine.trouble() if self._thread.is_alive() else "stopped"
        return {
            "name": self._config.name,
            "address": self._server.address,
            "incarnation": self._server.incarnation,
            "trouble": trouble,
        }

    def stop(self) -> None:
        """Drains and ends. Returns when the worker is gone."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
