"""Services that tests of this folder share. They are only asked; a test that breaks something starts its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from specwire.lm.table_config import TableConfig
from tests.support.service import Service, like, service, the_loop

TARGET = TableConfig(vocab_size=32, seed=3, sharpness=3.0, max_context=512)
"""What the shared target is."""

DRAFTS = {
    "good": TARGET,
    "middling": like(TARGET, disagreement=0.3),
    "random": like(TARGET, seed=99, sharpness=0.0),
    "stubborn": like(TARGET, columns=(5,)),
}
"""Drafts by quality: the target itself, right about half the time, uniform, and one that always says the same."""


@contextlib.contextmanager
def shared(manager: AbstractAsyncContextManager[Service]) -> Iterator[Service]:
    """A service on the shared loop, for a fixture."""
    stack = the_loop().run(manager.__aenter__())
    try:
        yield stack
    finally:
        the_loop().run(manager.__aexit__(None, None, None))


@pytest.fixture(scope="session", params=[*DRAFTS, "absent"])
def any_draft(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A stack per quality of draft."""
    drafts = [DRAFTS[request.param]] if request.param in DRAFTS else []
    with shared(service(TARGET, *drafts)) as stack:
        yield stack


@pytest.fixture(scope="session")
def middling() -> Iterator[Service]:
    """A stack whose draft is right about half the time."""
    with shared(service(TARGET, DRAFTS["middling"])) as stack:
        yield stack


@pytest.fixture(scope="session")
def perfect() -> Iterator[Service]:
    """A stack whose draft is the target."""
    with shared(service(TARGET, DRAFTS["good"])) as stack:
        yield stack
