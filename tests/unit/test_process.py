"""What processes of ours tell their libraries."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specwire.process import COMPUTES, keep_what_is_there, prepare_to_compute


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """The collector looks at everything again."""
    yield
    gc.unfreeze()


def test_the_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user has set stands."""
    for name in COMPUTES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")

    prepare_to_compute()

    assert {**COMPUTES, "GOMP_SPINCOUNT": "7"} == {name: os.environ[name] for name in COMPUTES}


@pytest.mark.usefixtures("unfrozen")
def test_what_was_loaded_is_not_looked_at_again() -> None:
    """Only what is made afterwards can be garbage."""
    loaded = [[n] for n in range(1000)]

    keep_what_is_there()

    young = gc.get_objects()
    assert gc.get_freeze_count() > 1000
    assert not any(each is loaded[0] for each in young)


@pytest.mark.parametrize("transparent", ["madvise", "always"])
def test_tensors_lie_in_large_pages(transparent: str) -> None:
    """As torch reads its environment: a name that it no longer knew would be silently without effect."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or f"[{transparent}]" not in setting.read_text():
        pytest.skip(f"large pages are not {transparent} here")
    script = (
        "from specwire.process import prepare_to_compute; prepare_to_compute(); import torch; x = torch.ones(64 << 20);"
        "print(sum(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')))"
    )

    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)

    assert int(found.stdout) >= 200 << 10  # of 256 MiB, in KiB
