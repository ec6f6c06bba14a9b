"""What `make demo` runs: fetch, start under Ray, ask, show where the time went, compare with plain decoding, stop.

It uses what a user would: the default topology, the client, and the tables of `specwire generate`. It has a state folder and a port
of its own, so that a Specwire that runs is not disturbed, and it stops all it started, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import time
from types import FrameType
from typing import Any

from deploy import ask, lifecycle, models, render, state, topology
from deploy.ask import Answer
from specwire.law.errors import SpecwireError

QUESTION = """Here is a note. "The night train to Lisbon leaves Porto at 23:40 from platform 4. It stops in Aveiro at 00:25, in \
Coimbra at 01:10 and in Santarem at 02:50, and arrives in Lisbon at 03:45. Bring your own food, since the dining car is closed at \
night." Write the note again, word for word, and then say when the train arrives in Lisbon."""
"""Close enough to its prompt for guesses to be good, as in editing, extracting and answering from a document."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-ray", action="store_true", help="plain processes instead of Ray")
    parser.add_argument("--prompt", default=QUESTION, help="ask something else")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of a speculative and a plain run to compare")
    parser.add_argument("--max-tokens", type=int, default=80)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    os.environ["SPECWIRE_STATE"] = str(state.folder().path / "demo")
    began = time.monotonic()
    try:
        _demo(options, began)
    except KeyboardInterrupt:
        _say(began, "interrupted; everything that was started is stopped")
        return 130
    except SpecwireError as error:
        _say(began, f"failed: {error}")
        return 1
    _say(began, "done; everything that was started is stopped")
    return 0


def _demo(options: argparse.Namespace, began: float) -> None:
    with contextlib.suppress(SpecwireError):
        lifecycle.down(1.0)  # left by a demo that was killed
    _say(began, "fetching the demo models")
    with models.bars() as report:
        models.fetch("demo", report)
    plan = topology.load()
    plan = plan.model_copy(update={"coordinator": plan.coordinator.model_copy(update={"port": 0})})
    by = "as plain processes" if options.no_ray else "under Ray, each an actor of its own"
    _say(began, f"starting coordinator, target and draft {by}")
    try:
        running, stats = lifecycle.up(plan, "the demo", not options.no_ray, 180.0, _Steps(began))
        console = render.console()
        console.print(render.workers(stats.workers))
        _say(began, f"asking at {running.endpoint}:")
        print(f"\n{options.prompt}\n")
        asyncio.run(_talk(running.endpoint, options))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # stopping is bounded, and must not stop half-way
        _say(began, "stopping")
        with contextlib.suppress(state.StateError):
            lifecycle.down(5.0)


async def _talk(endpoint: str, options: argparse.Namespace) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": options.prompt}],
        "max_tokens": options.max_tokens,
        "temperature": 0.0,
    }
    console = render.console()
    answer = await ask.ask(endpoint, fields, None, ask.write)
    assert answer.final is not None
    print("\n")
    console.print(render.summary(answer.final), style="dim", soft_wrap=True)
    console.print(render.timing(answer.final.timing, answer.final.speculation.rounds))
    if options.pairs < 1:
        return
    print(f"The same request, {options.pairs} times with and without speculation, in turns:")
    ratios = []
    for pair in range(options.pairs):
        # In turns, and each first in every other pair: whatever else this machine does hits both alike.
        kinds = [("speculative", {}), ("plain", {"num_speculative_tokens": 0})]
        runs: dict[str, Answer] = {}
        for kind, setting in kinds if pair % 2 == 0 else kinds[::-1]:
            runs[kind] = await ask.ask(endpoint, fields | setting, None, lambda text: None)
        ratios.append(compare(runs["speculative"], runs["plain"]))
        print("  " + describe(runs["speculative"], runs["plain"]))
    print(
        f"Speculation is {statistics.median(ratios):.2f} times as fast here (median). It depends on the text: see the README.\n"
    )


def seconds(answer: Answer) -> float:
    """How long the service took."""
    assert answer.final is not None
    return answer.final.timing.total_us / 1e6


def compare(fast: Answer, plain: Answer) -> float:
    """How many times as fast per token."""
    return (seconds(plain) / len(plain.ids)) / (seconds(fast) / len(fast.ids))


def describe(fast: Answer, plain: Answer) -> str:
    """One pair in a line, and whether the tokens were the same, as they should be."""
    same = next((i for i, (a, b) in enumerate(zip(fast.ids, plain.ids, strict=False)) if a != b), None)
    verdict = "same tokens" if same is None else f"tokens part at {same}: a near-tie of rounding, see docs/decisions.md"
    return (
        f"speculative {seconds(fast):.2f} s, plain {seconds(plain):.2f} s for {len(fast.ids)} tokens: "
        f"{compare(fast, plain):.2f}x; {verdict}"
    )


class _Steps:
    """Prints each new step of a start once."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._last = ""

    def __call__(self, step: str) -> None:
        if step != self._last:
            self._last = step
            _say(self._began, f"  {step}")


def _say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
