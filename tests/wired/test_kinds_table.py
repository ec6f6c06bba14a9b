"""The table in docs/field_reports.md names tests that exist."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS.parent / "docs" / "field_reports.md").read_text(encoding="utf-8")


def names_in(file: Path) -> list[str]:
    """Names of its tests."""
    return re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_test_named_in_the_table_exists() -> None:
    """Each file is there and each pattern matches at least one test."""
    named = re.findall(r"`(\w+/test_\w+\.py)(?:::(\w+\*?))?`", TABLE)
    missing = [
        (file, pattern)
        for file, pattern in named
        if not (TESTS / file).is_file() or not any(fnmatch(name, pattern or "*") for name in names_in(TESTS / file))
    ]

    assert [] == missing
    assert len(named) > 40


def test_every_kind_has_a_row_and_every_test_of_a_kind_is_in_it() -> None:
    """Kinds 1 to 57; a test that carries a kind in its name is found by that kind's row."""
    rows = {int(number): row for number, row in re.findall(r"^\| (\d+) ?(.*)$", TABLE, re.MULTILINE)}
    carried = [
        (int(name.split("_")[2]), f"wired/{file.name}")
        for file in sorted((TESTS / "wired").glob("test_*.py"))
        for name in names_in(file)
        if name.startswith("test_kind_")
    ]

    assert list(range(1, 52)) == sorted(rows)  # one row for 51 to 57
    assert [] == [(kind, file) for kind, file in carried if file not in rows[kind]]
