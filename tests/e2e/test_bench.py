"""`specwire bench` against the demo pair, with transformers beside it: numbers that belong together, not their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from deploy.bench.bench import Settings, bench
from deploy.bench.hf import ASSISTED, GENERATE
from deploy.bench.workload import Item
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.weights, pytest.mark.slow]

ITEMS = [
    Item("repeat", "Repeat this sentence three times: the cat sat on the mat.", 24),
    Item("chat", "Why is the sky blue?", 16),
]


def test_a_report_of_the_demo_pair(service: Stack, tmp_path: Path) -> None:
    """All answers are those of plain decoding, transformers' own included (float32), and everything is written."""
    configs = [
        yaml.safe_load((service.folder.configs / f"{name}.yaml").read_text()) for name in ("target-0", "draft-0")
    ]
    target, draft = (config["model"] for config in configs)
    settings = Settings(ITEMS, [1, 2], [], [2], "auto", repeats=1, models=(target, draft))
    quiet = Console(quiet=True)
    report = bench(service.address, settings, tmp_path, quiet, quiet)

    alone = ["plain", "k = 2", "auto", GENERATE, ASSISTED]
    assert [point["variant"] for point in report["points"]] == [*alone, *alone[:3]]
    assert [point.get("answers_that_differ", 0) for point in report["points"]] == [0] * 8
    assert all(point["tokens"] == report["points"][0]["tokens"] > 20 for point in report["points"])
    drafted = {point["variant"]: point["speculation"]["drafted"] for point in report["points"]}
    assert drafted["plain"] == 0 < drafted["k = 2"]
    assert all(point["ttft_ms"]["p50"] < point["end_to_end_ms"]["p50"] for point in report["points"])
    assert [(each["variant"], each["against"]) for each in report["comparisons"]] == [
        ("plain", GENERATE),
        ("auto", GENERATE),
        ("auto", ASSISTED),
    ]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", *[".svg"] * 4]
