"""`python -m coordinator`: one coordinator, without Ray."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from coordinator.config import CoordinatorConfig
from coordinator.serve import serve
from specwire.law.errors import SpecwireError
from specwire.process import keep_what_is_there
from specwire.settings import LOG_FORMAT, read_config, show_config


async def _main(config: CoordinatorConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready(address: str) -> None:
        keep_what_is_there()
        print(f"specwire: coordinator {config.name} ready at {address}", flush=True)

    await serve(config, stop, ready)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    try:
        config = read_config(CoordinatorConfig, "python -m coordinator", sys.argv[1:] if argv is None else argv)
        logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT)
        logging.getLogger(__name__).info("settings:\n%s", show_config(config))
        asyncio.run(_main(config))
    except SpecwireError as error:
        print(f"specwire: coordinator cannot start: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
