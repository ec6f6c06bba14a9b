"""What Ray runs: one service of any kind as an actor.

Law. Ray repeats the constructor of a dead actor and nothing else, so the constructor ends with a serving service.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from typing import Any


class Hosted:
    """One service as a Ray actor."""

    def __init__(self, module: str, name: str, config: dict[str, Any], log: str | None) -> None:
        if log is not None:
            _write_to(log)
        try:
            self._service = getattr(importlib.import_module(module), name)(config)
        except BaseException:
            traceback.print_exc()
            import ray

            # Ray gives an actor up whose constructor raises. At a first start that is right: the reason is in the
            # configuration. After a crash the reason may pass, say a port not yet free, so die instead and be tried again.
            if ray.get_runtime_context().was_current_actor_reconstructed:
                time.sleep(1.0)
                os._exit(1)
            raise

    def address(self) -> str:
        """host:port."""
        return str(self._service.address())

    def where(self) -> dict[str, Any]:
        """Who and where."""
        import ray

        context = ray.get_runtime_context()
        found = dict(self._service.ping())
        return found | {
            "pid": os.getpid(),
            "node": ray.util.get_node_ip_address(),
            "node_id": context.get_node_id(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
        }

    def stop(self) -> None:
        """Drains."""
        self._service.stop()


def _write_to(path: str) -> None:
    """Standard output and error of this process go to the service's log, as they do without Ray."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
