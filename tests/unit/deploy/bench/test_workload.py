"""What is asked, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.bench.workload import DEFAULT_MAX_TOKENS, SHIPPED, Item, load
from specwire.law.errors import InvalidArgument


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_workloads_are_whole(name: str) -> None:
    """Each has some requests of its own kind, and none twice."""
    items = load([name])

    assert {item.kind for item in items} == {name}
    assert len({item.prompt for item in items}) == len(items) >= 4


def test_workloads_are_asked_in_turn() -> None:
    """So that a pass that is cut short has seen all of them."""
    assert [item.kind for item in load(SHIPPED)[:6]] == [*SHIPPED, SHIPPED[0]]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    """Kind and length may be left out; blank lines do not count."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "kind": "x", "max_tokens": 5}\n', encoding="utf-8")

    assert load([str(path)]) == [Item("mine", "a", DEFAULT_MAX_TOKENS), Item("x", "b", 5)]
    assert [item.max_tokens for item in load([str(path)], max_tokens=7)] == [7, 7]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json", "line 1"),
        ('{"prompt": "a"}\n[1]', "line 2"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "at least 1"),
        ('{"prompt": "a", "max_tokens": true}', "at least 1"),
        ('{"prompt": "a", "kind": 3}', "kind"),
        ('{"prompt": "a", "promt": "b"}', "promt"),
        ("\n", "at least one line"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    """File, line and what was expected."""
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(InvalidArgument) as raised:
        load([str(path)])
    assert told in str(raised.value)


def test_a_workload_that_is_not_there() -> None:
    """The names that are."""
    with pytest.raises(InvalidArgument, match="chat, code, summarise, extract, story"):
        load(["chatt"])


def test_no_text(tmp_path: Path) -> None:
    """A binary file is named, not dumped."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(bytes(range(256)))

    with pytest.raises(InvalidArgument, match="UTF-8"):
        load([str(path)])
