"""What runs inside Ray: one service of any kind as an actor; and the process that holds a Ray of ours.

Law. Ray repeats the constructor of a dead actor and nothing else, so the constructor ends with a serving service.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from specwire.process import keep_what_is_there

PATIENCE_S = 120.0


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
        keep_what_is_there()

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


def _lean(patience_s: float) -> None:
    """Makes a head of two processes and its agents instead of five, and gives them time on a busy machine.

    Ray has no setting for this, so its own parts are replaced: the autoscaler's monitor, the log monitor and the dashboard's server
    are of no use here and cost as much to start as the rest together; and Ray's 30 seconds for the node to appear are too few
    when the cores are taken. With a Ray that is built otherwise this does nothing, and the head starts as usual."""
    from ray._private import services
    from ray._private.node import Node

    asked = services.get_node
    if not all(hasattr(Node, part) for part in ("start_monitor", "start_log_monitor", "start_api_server", "webui_url")):
        return

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        self._webui_url = ""

    def patient(*args: Any, **kwargs: Any) -> Any:
        give_up = time.monotonic() + patience_s
        while True:
            try:
                return asked(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    for part in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(Node, part, nothing)
    services.get_node = patient


def hold(files: str, told: str, host: str, cores: str, object_store_mb: str) -> None:
    """Starts a Ray here, writes its address to the file `told`, and ends it at SIGTERM. `files`: its session folder."""
    import ray

    with contextlib.suppress(ImportError, AttributeError):
        _lean(PATIENCE_S)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ray.init(
        address="local",
        num_cpus=int(cores),
        object_store_memory=int(object_store_mb) * 1_000_000,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=files,
        _node_ip_address=host,
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray took them
        signal.signal(number, lambda *_: over.set())
    fresh = Path(told).with_suffix(".tmp")
    fresh.write_text(ray.get_runtime_context().gcs_address)
    fresh.replace(told)
    over.wait()
    ray.shutdown()


if __name__ == "__main__":
    hold(*sys.argv[1:])
