"""A worker as a process: configuration in, one ready line out, signals to an orderly end.

Law. Exit 0 after SIGTERM or SIGINT. Exit 2, with one line that says why, when it cannot start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from specwire.law.errors import SpecwireError
from specwire.lm.load import TABLE
from specwire.process import keep_what_is_there, prepare_to_compute
from specwire.settings import LOG_FORMAT, read_config
from specwire.worker.config import WorkerConfig
from specwire.worker.service import Role, WorkerServer

log = logging.getLogger(__name__)

C = TypeVar("C", bound=WorkerConfig)


async def serve(
    role: Role, config: WorkerConfig, stop: asyncio.Event, on_ready: Callable[[WorkerServer], None]
) -> None:
    """Runs a worker until `stop` is set. Raises what starting raises."""
    server = WorkerServer(role, config)
    starting = asyncio.create_task(server.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()  # asked to end while loading: the engine's thread is a daemon and ends with the process
        await asyncio.gather(starting, return_exceptions=True)
        return
    try:
        starting.result()
        on_ready(server)
        await stopping
    finally:
        stopping.cancel()
        if starting.exception() is None:
            await server.stop()


def main(role: Role, kind: type[C], arguments: Sequence[str] | None = None) -> int:
    """The body of `python -m draft_service` and `python -m target_service`."""
    program = f"{role.name}_service"
    prepare_logging()
    try:
        config = read_config(kind, f"python -m {program}", sys.argv[1:] if arguments is None else arguments)
        if (warning := unsaid_model(config)) is not None:
            print(f"specwire: warning: {warning}", file=sys.stderr)
        prepare_threads(config)
        asyncio.run(_until_signal(role, config))
        status = 0
    except Exception as error:
        log.debug("start failed", exc_info=True)
        reason = str(error) if isinstance(error, SpecwireError) else f"{type(error).__name__}: {error}"
        print(f"specwire: {program} cannot start: {reason}", file=sys.stderr)
        status = 2
    if any(thread.name == "engine" for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a step or a load that hangs must not keep the process
    return status


def unsaid_model(config: WorkerConfig) -> str | None:
    """A warning where nobody said which model to serve, since the default is easily taken for a real one."""
    if "model" in config.model.model_fields_set or config.model.table is not None:
        return None
    return (
        f"no model.model is set, so {config.name} serves {TABLE!r}, a built-in model that makes tokens up, for tests. "
        f"Set model.model to a folder or a hub id; set it to {TABLE} if that is meant"
    )


def prepare_logging() -> None:
    """To stderr: ours from INFO on, others' warnings."""
    logging.basicConfig(format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("specwire").setLevel(logging.INFO)


def prepare_threads(config: WorkerConfig) -> None:
    """What torch and OpenMP read when they are loaded; see process.py."""
    prepare_to_compute()
    if config.model.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.model.threads))


async def _until_signal(role: Role, config: WorkerConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready(server: WorkerServer) -> None:
        keep_what_is_there()
        metrics = f", metrics at port {server.metrics_port}" if server.metrics_port is not None else ""
        print(f"specwire: {role.name} {config.name} ready at {server.address}{metrics}", flush=True)

    await serve(role, config, stop, ready)
