"""A report for people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deploy.bench import page
from deploy.bench.passes import Load
from deploy.bench.report import PARTS, advice, point
from tests.unit.deploy.bench.made import passed, record


def report() -> dict[str, Any]:
    """Plain, two lengths and auto at two loads."""
    points = []
    for load in (Load(concurrency=1), Load(concurrency=4)):
        plain = [passed("plain", record(11.0), load=load), passed("plain", record(11.0), load=load)]
        points.append(point(plain, plain))
        for n, name in enumerate(("k = 1", "k = 2", "auto"), start=1):
            mine = [passed(name, record(6.0, drafted=8, accepted=(3,)), wall_s=10.0 - n, load=load) for _ in range(2)]
            points.append(point(mine, plain))
    return {
        "specwire": "1",
        "machine": {"cores": 2, "processor": "x"},
        "workers": [{"name": "target-0", "model": "m", "device": "cpu", "precision": "float16", "resident_mb": 512.4}],
        "settings": {"items": [{"kind": "chat"}], "repeats": 2, "method": "auto"},
        "points": points,
        "advice": advice(points),
        "comparisons": [],
    }


def test_the_page_tells_what_was_measured_and_how() -> None:
    """A row a point in both tables, the choice first, its images at the end."""
    text = page.markdown(report(), ["anatomy.svg"])
    lines = text.splitlines()

    assert sum(line.startswith("| 4 at once |") for line in lines) == 2 * 4
    assert lines.index("## What to choose") < lines.index("## Numbers")
    assert "- 1 at once: **auto**." in text
    assert "- target-0: m, cpu, float16, 512 MB resident" in lines
    assert lines[-1] == "![anatomy.svg](anatomy.svg)"
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert widths == {len(page.COLUMNS) + 1, len(PARTS) + 3}


def test_plots_are_drawn(tmp_path: Path) -> None:
    """Four images, each well-formed and with its axes named."""
    made = page.plots(report(), tmp_path)

    assert made == [
        f"{n}.svg" for n in ("speedup_by_length", "speedup_by_concurrency", "latency_throughput", "anatomy")
    ]
    for name in made:
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")


def test_what_has_no_second_point_is_not_drawn(tmp_path: Path) -> None:
    """One load: no curve over loads."""
    one = report()
    one["points"] = [found for found in one["points"] if found["concurrency"] == 1]

    assert "speedup_by_concurrency.svg" not in page.plots(one, tmp_path)


def test_without_matplotlib_there_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert page.plots(report(), tmp_path) == []


def test_texts_of_others_are_no_markup() -> None:
    """A kind may be called anything."""
    strange = report()
    strange["settings"]["items"] = [{"kind": "<b>|[x](y)\nz"}]

    assert "(\\<b\\>\\|\\[x\\]\\(y\\) z)" in page.markdown(strange, [])


def test_a_recommendation_is_a_sentence() -> None:
    """Its names keep their case."""
    each = {"load": "1 at once", "choose": "auto", "why": "k = 2 and TTFT"}

    assert page.recommendation(each) == "1 at once: auto. K = 2 and TTFT."
