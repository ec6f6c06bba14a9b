"""`python -m coordinator`: one coordinator, without Ray."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys

import yaml

from coordinator.config import CoordinatorConfig, load
from coordinator.serve import serve
from specwire.law.errors import SpecwireError

DESCRIPTION = """Runs the coordinator: the process that clients call, that workers register with, and that moves blocks between
draft and target. Every setting has a default; see CoordinatorConfig in coordinator/config.py for all of them."""
EPILOG = """example:
  python -m coordinator --set bind=127.0.0.1:8470 --set tokenizer=models/smollm2
Ends with status 0 after SIGTERM or SIGINT (running requests may finish), 2 when it cannot start."""


def parse(argv: list[str] | None = None) -> CoordinatorConfig:
    """Command line to settings. Raises InvalidArgument."""
    parser = argparse.ArgumentParser(
        "python -m coordinator", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, dotted, YAML value"
    )
    args = parser.parse_args(argv)
    overrides = {}
    for item in args.set:
        key, separator, value = item.partition("=")
        if not separator:
            parser.error(f"--set {item}: must be KEY=VALUE")
        overrides[key] = yaml.safe_load(value)
    return load(args.config, overrides)


async def _main(config: CoordinatorConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(
        config, stop, lambda address: print(f"specwire: coordinator {config.name} ready at {address}", flush=True)
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    try:
        config = parse(argv)
        logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        print(f"specwire: coordinator settings {config.model_dump_json()}", flush=True)
        asyncio.run(_main(config))
    except SpecwireError as error:
        print(f"specwire: coordinator cannot start: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
