"""What a round costs the coordinator: processor time per verdict, with many sessions at once.

    specwire up deploy/topologies/synthetic.yaml --no-ray
    python -m deploy.bench.coordinator

Law. Only the coordinator's process is counted, its client streams included; workers and clients are other processes. A round here
is one verdict for one session. Sessions run all the time of a measurement: each client asks again when its answer ends.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from deploy import lifecycle
from deploy.bench import tool
from deploy.bench.bars import listening
from specwire.client import Client
from specwire.law.errors import InvalidArgument

SETTLING_S = 2.0
"""Until all sessions are under way."""


async def measure(address: str, sessions: int, seconds: float, windows: int, tokens: int) -> dict[str, Any]:
    """Processor time of the coordinator over `windows` stretches of `seconds`, with so many sessions."""
    process = psutil.Process(listening(int(address.rpartition(":")[2])))
    over = asyncio.Event()

    async def keep_asking(client: Client, number: int) -> None:
        while not over.is_set():
            async for _ in client.generate(prompt_ids=[1 + number % 8, 2, 3], max_tokens=tokens, temperature=0.0):
                if over.is_set():
                    break

    async with Client(address) as client, asyncio.TaskGroup() as group:
        for number in range(sessions):
            group.create_task(keep_asking(client, number))
        await asyncio.sleep(SETTLING_S)
        seen = []
        for _ in range(windows):
            before, rounds = sum(process.cpu_times()[:2]), (await client.stats()).speculation.rounds
            await asyncio.sleep(seconds)
            after, later = sum(process.cpu_times()[:2]), (await client.stats()).speculation.rounds
            seen.append((after - before, later - rounds))
        over.set()
    each_us = [1e6 * cpu / rounds for cpu, rounds in seen if rounds]
    return {
        "sessions": sessions,
        "cpu_us_per_round": statistics.median(each_us),
        "least": min(each_us),
        "most": max(each_us),
        "rounds_per_s": statistics.median(rounds / seconds for _, rounds in seen),
        "cores": statistics.median(cpu / seconds for cpu, _ in seen),
    }


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """The curve as a table."""
    table = Table("sessions", "CPU us per session-round", "rounds/s", "cores", title="Coordinator")
    for each in results:
        spread = f"{each['cpu_us_per_round']:.0f} [{each['least']:.0f}, {each['most']:.0f}]"
        table.add_row(str(each["sessions"]), spread, f"{each['rounds_per_s']:.0f}", f"{each['cores']:.2f}")
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    return tool.run(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = tool.parser("deploy.bench.coordinator", __doc__)
    parser.add_argument("--address", help="host:port; default: the service that was started here")
    parser.add_argument("--sessions", default="64,128,256,512", help="how many at once, one after the other")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one window")
    parser.add_argument("--windows", type=int, default=5, help="windows for each number of sessions")
    parser.add_argument("--max-tokens", type=int, default=400, help="of one answer")
    parser.add_argument("--json", help="file for the numbers")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    counts = [int(each) for each in tool.numbers("--sessions", args.sessions, 1, whole=True)]
    if not 0 < args.seconds < math.inf:
        raise InvalidArgument("--seconds", args.seconds, "above 0")
    tool.count("--windows", args.windows)
    tool.count("--max-tokens", args.max_tokens)
    output = tool.writable("--json", args.json)
    results = []
    for sessions in counts:
        console.print(f"{sessions} sessions ...")
        run = measure(lifecycle.endpoint(args.address), sessions, args.seconds, args.windows, args.max_tokens)
        results.append(asyncio.run(run))
    show(results, console)
    tool.save(output, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
