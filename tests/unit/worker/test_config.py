"""Settings: where they come from, and how wrong ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from draft_service.config import DraftConfig
from specwire.law.errors import InvalidArgument
from specwire.settings import build_config, read_config, set_value, show_config
from target_service.config import TargetConfig


def test_a_file_and_settings_that_win(tmp_path: Path) -> None:
    """Values of --set are YAML, groups are dotted."""
    file = tmp_path / "target.yaml"
    file.write_text("name: big\nmodel: {max_sessions: 3, table: {vocab_size: 9}}\n")
    config = read_config(
        TargetConfig,
        "p",
        [
            "--config",
            str(file),
            "--set",
            "model.max_sessions=5",
            "--set",
            "linger=false",
            "--set",
            "model.table.script=[1, 2]",
        ],
    )

    assert (config.name, config.model.max_sessions, config.linger) == ("big", 5, False)
    assert config.model.table is not None
    assert (config.model.table.vocab_size, config.model.table.script) == (9, (1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hang_s": -1}, "hang_s: got -1, must be greater than 0"),
        ({"hang_s": 0}, "hang_s: got 0, must be greater than 0"),
        ({"hang_s": float("nan")}, "hang_s: got nan, must be a finite number"),
        ({"drain_s": 1e9}, "drain_s: got 1000000000.0, must be less than or equal to 86400"),
        (
            {"max_lease_s": "soon"},
            "max_lease_s: got 'soon', must be a valid number, unable to parse string as a number",
        ),
        ({"colour": "red"}, "colour: got 'red', must be absent: there is no such setting"),
        ({"model": {"slots": 3}}, "model.slots: got 3, must be absent: there is no such setting"),
        ({"model": {"max_sessions": 0}}, "model.max_sessions: got 0, must be greater than or equal to 1"),
        ({"token_budget": 99}, "token_budget: got 99, must be at least 100, four times"),
        ({"bind": "0.0.0.0:0"}, "bind: got '0.0.0.0:0', must be a loopback address"),
        ({"bind": "here"}, "bind: got 'here', must be host:port"),
        ({"coordinator": "there"}, "coordinator: got 'there', must be host:port"),
        ({"name": ""}, "name: got '', must be text of at least 1 character"),
        ({"draft_law_top_m": 0}, "draft_law_top_m: got 0, must be greater than or equal to 1"),
        ({"metrics_port": -1}, "metrics_port: got -1, must be greater than or equal to 0"),
    ],
)
def test_wrong_settings_are_refused_with_field_value_and_limit(settings: dict[str, object], message: str) -> None:
    """Never ignored, never bent."""
    with pytest.raises(InvalidArgument) as caught:
        build_config(DraftConfig, settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "/nowhere.yaml"], "--config: got '/nowhere.yaml', must be a readable YAML file"),
        (["--set", "name"], "--set: got 'name', must be key=value"),
        (["--set", "name.first=a", "--set", "name=[", "--set", "x=1"], "name: got '[', must be a YAML value"),
        (["--set", "name=a", "--set", "name.first=b"], "name.first: got 'b', must be under a group; name is 'a'"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str) -> None:
    """With the word that is wrong."""
    with pytest.raises(InvalidArgument) as caught:
        read_config(DraftConfig, "p", arguments)
    assert str(caught.value).startswith(message)


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    """A list, binary bytes."""
    for content in (b"- 1\n- 2\n", b"\xff\xfe\x00"):
        file = tmp_path / "c.yaml"
        file.write_bytes(content)
        with pytest.raises(InvalidArgument, match="--config"):
            read_config(DraftConfig, "p", ["--config", str(file)])


def test_help_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """And exits with 0."""
    with pytest.raises(SystemExit) as caught:
        read_config(TargetConfig, "python -m target_service", ["--help"])
    shown = capsys.readouterr().out

    assert caught.value.code == 0
    for line in ("  token_budget (512)", "  model.max_sessions (8)", "  linger (True)", "  name (target-0)"):
        assert line in shown


def test_frozen_and_printed_whole() -> None:
    """What is printed at start builds the same configuration."""
    import yaml

    config = build_config(TargetConfig, {"advertise": "a:1"})
    with pytest.raises(ValidationError):
        config.name = "other"  # type: ignore[misc]

    assert build_config(TargetConfig, yaml.safe_load(show_config(config))) == config


def test_set_value_builds_groups() -> None:
    """Deep ones too."""
    values: dict[str, object] = {"a": {"b": 1}}
    set_value(values, "a.c.d=[x, 2]")

    assert values == {"a": {"b": 1, "c": {"d": ["x", 2]}}}
