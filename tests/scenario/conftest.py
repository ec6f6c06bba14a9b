"""Transcripts: a verb, a line, and everything the ledger and the workers said. In the manner of etcd-io/raft's testdata.

`pytest tests/scenario --rewrite-transcripts` writes what is said now into the files. Read the difference, and commit only what
you understand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTDATA = Path(__file__).parent / "testdata"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flag."""
    parser.addoption(
        "--rewrite-transcripts", action="store_true", help="write what is said now into tests/scenario/testdata"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per file. A folder without any would pass in silence, so it fails."""
    if "transcript" in metafunc.fixturenames:
        files = sorted(TESTDATA.glob("*.txt"))
        assert files, f"no transcripts in {TESTDATA}"
        metafunc.parametrize("transcript", files, ids=[file.stem for file in files])


@pytest.fixture
def rewrite(pytestconfig: pytest.Config) -> bool:
    """Whether files are written instead of compared."""
    return bool(pytestconfig.getoption("--rewrite-transcripts", default=False))
