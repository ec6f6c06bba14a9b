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


def test_tensors_lie_in_large_pages() -> None:
    """As torch reads its environment: a name that it no longer knew would be silently without effect."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("large pages are not to be asked for here")
    script = (
        "import mmap, sys; huge = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS);"
        "huge.madvise(mmap.MADV_HUGEPAGE); huge.write(b'1' * (8 << 20));"
        "got = lambda: sum(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('AnonHugePages'));"
        "before = got(); import torch; x = torch.ones(16 << 20); print(before, got() - before)"
    )
    found = []
    for variables in ({}, COMPUTES):
        clean = {name: value for name, value in os.environ.items() if name not in COMPUTES}
        done = subprocess.run(
            [sys.executable, "-c", script], env={**clean, **variables}, capture_output=True, check=True, text=True
        )
        asked, got = map(int, done.stdout.split())
        if not asked:
            pytest.skip("the system has no large page left")
        found.append(got)

    assert found[1] > found[0]
