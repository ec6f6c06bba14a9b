"""Settings are checked once, and what is wrong is told with field, value and limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from coordinator.config import CoordinatorConfig, load
from specwire.law.errors import InvalidArgument


def test_every_setting_has_a_default() -> None:
    """Nothing needs to be given, and the port is not open to others."""
    config = load(None, {})

    assert CoordinatorConfig() == config
    assert config.bind == "127.0.0.1:8470"


def test_a_file_and_what_is_put_over_it(tmp_path: Path) -> None:
    """Overrides go over the file, the file over defaults, key by key."""
    path = tmp_path / "coordinator.yaml"
    path.write_text("max_running: 4\nspeculation:\n  law: rejection\n  max_num_speculative_tokens: 6\n")
    config = load(str(path), {"speculation.max_num_speculative_tokens": 5, "name": "c1"})

    assert (4, "rejection", 5, "c1") == (
        config.max_running,
        config.speculation.law,
        config.speculation.max_num_speculative_tokens,
        config.name,
    )


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    """A file of comments alone is fine."""
    path = tmp_path / "coordinator.yaml"
    path.write_text("# nothing yet\n")

    assert CoordinatorConfig() == load(str(path), {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_running": 0}, "max_running: got 0, must be greater than or equal to 1"),
        ({"bind": 8470}, "bind: got 8470, must be a valid string"),
        ({"bind": "127.0.0.1"}, "bind: got '127.0.0.1', must be host:port with a port in [0, 65535]"),
        ({"nmae": "x"}, "nmae: got 'x', must be absent: there is no such setting"),
        ({"speculation.lwa": "x"}, "speculation.lwa: got 'x', must be absent: there is no such setting"),
        ({"speculation.law": "fast"}, "speculation.law: got 'fast', must be 'shared_noise' or 'rejection'"),
        (
            {"speculation.num_speculative_tokens": 65},
            "speculation.num_speculative_tokens: got 65, must be auto or a whole number in [0, 64]",
        ),
        (
            {"speculation.num_speculative_tokens": "atuo"},
            "speculation.num_speculative_tokens: got 'atuo', must be auto or a whole number in [0, 64]",
        ),
        (
            {"speculation.num_speculative_tokens": True},
            "speculation.num_speculative_tokens: got True, must be auto or a whole number in [0, 64]",
        ),
        (
            {"speculation.num_speculative_tokens": 9},
            "speculation.num_speculative_tokens: got 9, must be at most max_num_speculative_tokens (8)",
        ),
        (
            {"speculation.draft_timeout_ms": 0},
            "speculation.draft_timeout_ms: got 0, must be auto or a whole number in [1, 600000]",
        ),
        ({"lease_s": float("nan")}, "lease_s: got nan, must be less than or equal to 3600"),
        ({"name.first": "x"}, "name: got {'first': 'x'}, must be a valid string"),
    ],
)
def test_what_is_wrong_is_named(overrides: dict[str, Any], message: str) -> None:
    """Field with its path, value, limit; no setting is ignored and none is guessed."""
    with pytest.raises(InvalidArgument) as caught:
        load(None, overrides)

    assert message == str(caught.value)


def test_a_foreign_address_needs_permission() -> None:
    """Loopback is the default; the message names the setting and the way out."""
    with pytest.raises(InvalidArgument, match="--insecure") as caught:
        load(None, {"bind": "0.0.0.0:8470"})

    assert (caught.value.field, caught.value.value) == ("bind", "0.0.0.0:8470")
    assert load(None, {"bind": "0.0.0.0:8470", "insecure": True}).insecure


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (b"- a\n- b\n", "one mapping by name"),
        (b"a: [1\n", "YAML"),
        (b"\xff\xfe\x00", "YAML"),
        (b"3: 4\n", "one mapping by name"),
    ],
    ids=["list", "not yaml", "binary", "number as key"],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes, limit: str) -> None:
    """One line, not a traceback."""
    path = tmp_path / "coordinator.yaml"
    path.write_bytes(content)

    with pytest.raises(InvalidArgument, match=limit):
        load(str(path), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With what the system says."""
    with pytest.raises(InvalidArgument, match="No such file"):
        load(str(tmp_path / "none.yaml"), {})


def test_a_path_through_a_value_is_refused() -> None:
    """`name` is no group of settings."""
    with pytest.raises(InvalidArgument, match="under a group"):
        load(None, {"name": "x", "name.first": "y"})


def test_settings_never_change() -> None:
    """Checked once means that nobody changes them after that."""
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        CoordinatorConfig().max_running = 5  # type: ignore[misc]


@pytest.mark.parametrize("count", ["auto", 0, 8])
def test_block_lengths_that_are_allowed(count: int | str) -> None:
    """The controller's choice, plain decoding, and up to the longest."""

    assert count == load(None, {"speculation.num_speculative_tokens": count}).speculation.num_speculative_tokens
