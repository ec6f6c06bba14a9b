"""The demo models behind a running service, shared by the tests of this folder; and the numbers they report.

Nothing here is downloaded: without the demo models in the cache the tests skip and say so (`make test` fetches them first).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.models import resolve
from specwire.law.errors import Unavailable
from specwire.lm.load import ModelConfig, build_model
from specwire.lm.torch_lm import TorchModel
from tests.e2e.stack import Stack, stack
from tests.support.near_tie import Tally, rescore_by

WORKER: dict[str, Any] = {"precision": "float32", "threads": 2, "max_context": 768, "max_sessions": 10}
DEMO: dict[str, Any] = {
    "target": {"model": "demo", **WORKER},
    "draft": {"model": "demo-draft", "embeddings_from": "demo", **WORKER},
}
"""The demo pair in float32, which is the exact mode on a CPU."""

_NOTES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def notes(pytestconfig: pytest.Config) -> list[str]:
    """Lines for the end of the run: what is reported rather than held to a limit."""
    return pytestconfig.stash.setdefault(_NOTES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the notes."""
    lines = config.stash.get(_NOTES, [])
    if lines:
        terminalreporter.section("measured on real weights")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def demo() -> str:
    """The folder of the demo target."""
    try:
        return resolve("demo")
    except Unavailable as reason:
        pytest.skip(str(reason))


@functools.cache
def demo_model(**settings: Any) -> TorchModel:
    """The demo target in this process, without a service; one for each set of settings."""
    given = {"model": resolve("demo"), "max_context": 768, "max_sessions": 4, "threads": 2}
    model = build_model(ModelConfig.model_validate(given | settings))
    assert isinstance(model, TorchModel)
    return model


@pytest.fixture(scope="session")
def tally(notes: list[str]) -> Iterator[Tally]:
    """Compares float32 sequences of all tests here; the model is loaded at the first difference. One in 20 may part."""
    book = Tally(lambda tokens: rescore_by(demo_model(precision="float32"))(tokens), "float32")
    yield book
    notes.append(book.report())
    book.settle()


@pytest.fixture(scope="session")
def service(demo: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo pair as processes. Only asked; a test that breaks something starts its own."""
    with stack(tmp_path_factory.mktemp("service"), DEMO) as running:
        yield running
