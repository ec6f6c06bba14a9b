"""Both services as processes: one ready line, an orderly end, one line when they cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draft_service.config import DraftConfig
from draft_service.role import DRAFT
from specwire.settings import build_config
from specwire.worker.config import WorkerConfig
from specwire.worker.main import main, unsaid_model
from target_service.config import TargetConfig
from target_service.role import TARGET

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120


@contextmanager
def started(service: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The process, its output piped; gone afterwards, whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", service, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("service", "number"), [("draft_service", signal.SIGTERM), ("target_service", signal.SIGINT)])
def test_ready_then_a_signal_then_exit_zero(service: str, number: signal.Signals) -> None:
    """Says where it is reached; metrics are there; ends by itself."""
    with started(service, "--set", "name=me", "--set", "metrics_port=0") as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        role = service.removesuffix("_service")
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{int(ready.split()[-1])}/metrics", timeout=20).read()
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)

        assert ready.startswith(f"specwire: {role} me ready at 127.0.0.1:")
        assert b"specwire:worker_steps_total 0.0" in metrics
        assert out == ""
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert 1 == err.count("specwire: warning: no model.model is set, so me serves 'table'")


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        (TargetConfig, {}, True),
        (DraftConfig, {"model": {"max_sessions": 2}}, True),
        (TargetConfig, {"model": {"model": "table"}}, False),
        (TargetConfig, {"model": {"model": "models/smollm2"}}, False),
        (DraftConfig, {"model": {"table": {"vocab_size": 9}}}, False),
    ],
)
def test_a_model_that_nobody_chose_is_told(kind: type[WorkerConfig], settings: dict[str, Any], told: bool) -> None:
    """The default makes tokens up; whoever asked for it by name knows."""
    warning = unsaid_model(build_config(kind, settings)) or ""

    expected = (
        f"no model.model is set, so {kind().name} serves 'table', a built-in model that makes tokens up, for tests. "
    )
    assert (told, told) == (warning.startswith(expected), bool(warning))


@pytest.mark.parametrize("service", ["target_service", "draft_service"])
def test_help_says_what_is_served_by_default(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside how to start it with a model."""
    role, kind = (TARGET, TargetConfig) if service == "target_service" else (DRAFT, DraftConfig)
    with pytest.raises(SystemExit):
        main(role, kind, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())

    assert "Without `model.model` it serves `table`, a built-in model that makes tokens up, for tests." in shown
    assert f"example: python -m {service} --set coordinator=127.0.0.1:8470 --set model.model=" in shown


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("hang_s=-1", "hang_s: got -1, must be greater than 0"),
        ("model.device=cuda", "device: got 'cuda', must be cpu for model 'table'"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(setting: str, reason: str) -> None:
    """Exit 2."""
    with started("target_service", "--set", setting) as process:
        out, err = process.communicate(timeout=PATIENCE_S)

        assert process.returncode == 2
        assert err.strip().splitlines()[-1] == f"specwire: target_service cannot start: {reason}"
        assert "Traceback" not in err
        assert out == ""
