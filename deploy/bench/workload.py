"""What a benchmark asks: prompts with their kinds and lengths, from JSONL files.

One JSON object a line: `prompt` (the user's message), and if wanted `kind` (for groups in the report) and `max_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from specwire.law.errors import InvalidArgument

SHIPPED = ("chat", "code", "summarise", "extract", "story")
"""Workloads that come with the package, by name."""
DEFAULT_MAX_TOKENS = 96
_KEYS = {"prompt", "kind", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Item:
    """One request."""

    kind: str
    prompt: str
    max_tokens: int


def load(names: Sequence[str], max_tokens: int | None = None) -> list[Item]:
    """The requests of these workloads, shipped ones by name or files, in turn: one of each, then the next of each. `max_tokens`
    replaces what they say. Raises InvalidArgument, which names file and line."""
    lists = [list(_read(name, max_tokens)) for name in names]
    longest = max((len(items) for items in lists), default=0)
    return [items[n] for n in range(longest) for items in lists if n < len(items)]


def _read(name: str, max_tokens: int | None) -> Iterator[Item]:
    if name in SHIPPED:
        text = (files("deploy.bench") / "workloads" / f"{name}.jsonl").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidArgument("workload", name, "a text file in UTF-8") from None
        except OSError as error:
            limit = f"{', '.join(SHIPPED)}, or a JSONL file that can be read ({error.strerror})"
            raise InvalidArgument("workload", name, limit) from None
    count = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            count += 1
            yield _item(f"{name}, line {number}", line, Path(name).stem, max_tokens)
    if not count:
        raise InvalidArgument("workload", name, "a file with at least one line")


def _item(where: str, line: str, kind: str, max_tokens: int | None) -> Item:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidArgument(where, line[:60], f"a JSON object ({error.msg})") from None
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str) or not found["prompt"]:
        raise InvalidArgument(where, line[:60], "an object whose `prompt` is a text")
    if unknown := found.keys() - _KEYS:
        raise InvalidArgument(where, ", ".join(sorted(unknown)), f"no keys but {', '.join(sorted(_KEYS))}")
    length = found.get("max_tokens", DEFAULT_MAX_TOKENS)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise InvalidArgument(where, length, "max_tokens of at least 1")
    if not isinstance(found.get("kind", ""), str):
        raise InvalidArgument(where, found["kind"], "a kind that is a text")
    return Item(found.get("kind") or kind, found["prompt"], max_tokens or length)
