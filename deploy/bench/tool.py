"""What the command lines of measurements have in common: checked lists of numbers, one line for a fault, and a clean end.

A measurement that starts services must stop them however it is ended: a closed terminal (HUP) and a TERM are taken as Ctrl-C is.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from specwire.law.errors import InvalidArgument, SpecwireError

T = TypeVar("T")


def run(work: Callable[[], int]) -> int:
    """Exit status of `work`: its own, 2 for what was asked wrongly, 3 for services that could not start, 130 when interrupted."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2
    except SpecwireError as error:
        print(error, file=sys.stderr)
        return 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def numbers(option: str, text: str, least: float, *, whole: bool = False) -> list[float]:
    """Numbers with commas between them. Raises InvalidArgument, which names the option."""
    limit = f"{'whole numbers' if whole else 'numbers'} of at least {least:g}, with commas between them"
    try:
        found = [float(int(each)) if whole else float(each) for each in text.split(",")]
    except ValueError:
        raise InvalidArgument(option, text, limit) from None
    if not all(least <= each < math.inf for each in found):
        raise InvalidArgument(option, text, limit)
    return found


def chosen(option: str, text: str, among: Sequence[T]) -> list[T]:
    """Those of a list that are named by their numbers, from 1, with commas between them. Raises InvalidArgument."""
    found = [int(number) for number in numbers(option, text, 1, whole=True)]
    if max(found) > len(among):
        raise InvalidArgument(option, text, f"numbers of at most {len(among)}")
    return [among[number - 1] for number in found]


def count(option: str, value: int, least: int = 1) -> int:
    """A number of passes or prompts. Raises InvalidArgument."""
    if value < least:
        raise InvalidArgument(option, value, f"at least {least}")
    return value


def writable(option: str, path: str | None) -> Path | None:
    """Where numbers go, seen to before an hour of measuring and not after. Raises InvalidArgument."""
    if path is None:
        return None
    try:
        with Path(path).open("a"):
            return Path(path)
    except OSError as error:
        raise InvalidArgument(option, path, f"a file that can be written ({error.strerror})") from None


def parser(module: str, doc: str, note: str = "") -> argparse.ArgumentParser:
    """For a measurement: the first line of its docstring, a note on how long it takes, defaults beside the options."""
    return argparse.ArgumentParser(
        f"python -m {module}",
        description=doc.partition("\n")[0] + note,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def save(output: Path | None, found: Any) -> None:
    """Writes the numbers, if they were asked for."""
    if output is not None:
        output.write_text(json.dumps(found, indent=1))
