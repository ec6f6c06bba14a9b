"""The unit suite cannot start Ray: whoever needs it belongs into tests/on_ray."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import ray` gives an empty room, and `ray.init` raises. Costs nothing, unlike importing the real one."""
    empty = types.ModuleType("ray")
    empty.__spec__ = importlib.machinery.ModuleSpec("ray", None)  # others ask whether Ray is installed

    def init(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a unit test starts Ray")

    empty.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", empty)
