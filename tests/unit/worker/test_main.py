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

import pytest

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
