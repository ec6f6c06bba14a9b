"""What both workers can be told, where it comes from, and how it is refused.

Configuration is read once, checked once, printed at start and never changed. It comes from one YAML file (`--config`) and from
`--set key=value`, which wins; nothing is read from the environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specwire.law.errors import InvalidArgument
from specwire.lm.load import ModelConfig
from specwire.wire.rpc import check_bind, split_address
from specwire.worker.shares import check_budget

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
"""A time-out: longer than nothing, at most a day."""

Name = Annotated[str, Field(min_length=1, max_length=200)]


class WorkerConfig(BaseModel):
    """Fields of both workers."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: Name
    """Name in the topology. A worker that registers under a name replaces the former holder of it."""
    bind: str = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free one. Anything but loopback needs `insecure`."""
    advertise: str | None = None
    """host or host:port at which the coordinator reaches this worker. Default: what it is bound to."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    coordinator: str | None = None
    """host:port of the coordinator to register with. Default: wait to be called."""
    model: ModelConfig = ModelConfig()
    """Which model, see specwire/lm/load.py: model, device, precision, max_context, max_sessions, max_block, threads ..."""
    token_budget: int = Field(default=512, ge=1, le=1_000_000)
    """Rows of one step. More: prompts are read faster; fewer: running sessions wait less behind them. At least
    4 x (max_block + 1 + 8)."""
    max_step_sessions: int = Field(default=64, ge=2, le=65_536)
    """Sessions of one step."""
    max_append: int = Field(default=4096, ge=1, le=10_000_000)
    """Most tokens one task may append; the coordinator splits longer texts."""
    max_lease_s: Seconds = 60.0
    """Upper limit for the lease that a coordinator asks for: how long sessions outlive their stream."""
    idle_s: Seconds = 600.0
    """A session nobody spoke of for so long is dropped, should its close have been lost; it costs a replay at most."""
    hang_s: Seconds = 60.0
    """A step that takes longer makes the worker unhealthy."""
    drain_s: Seconds = 10.0
    """After SIGTERM: time for tasks at hand to be answered."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of /metrics on the bound host; 0 picks one. Default: none."""
    profile: bool = True
    """Measure steps of 1, 2, 4 and 8 rows at start and tell the coordinator."""

    @model_validator(mode="after")
    def _agrees(self) -> WorkerConfig:
        check_bind(self.bind, self.insecure)
        if self.coordinator is not None:
            split_address(self.coordinator, "coordinator")
        check_budget(self.token_budget, self.model.max_block + 1)
        return self


C = TypeVar("C", bound=WorkerConfig)


def build_config(kind: type[C], values: dict[str, Any]) -> C:
    """Checks plain values. Raises InvalidArgument naming field, value and limit."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidArgument):
            raise cause from None
        field = ".".join(str(part) for part in first["loc"]) or "configuration"
        if first["type"] == "extra_forbidden":
            raise InvalidArgument(field, first["input"], "absent: there is no such setting") from None
        if first["type"] == "missing":
            raise InvalidArgument(field, None, "given") from None
        limit = first["msg"].removeprefix("Input should be ").replace("String should have", "text of", 1)
        raise InvalidArgument(field, first["input"], limit) from None


def set_value(values: dict[str, Any], setting: str) -> None:
    """Applies one `a.b=value`; the value is read as YAML, so numbers, booleans and lists are what they look like."""
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise InvalidArgument("--set", setting, "key=value")
    *parents, last = key.split(".")
    for parent in parents:
        below = values.setdefault(parent, {})
        if not isinstance(below, dict):
            raise InvalidArgument(key, text, f"under a group; {parent} is {below!r}")
        values = below
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidArgument(key, text, "a YAML value") from error


def read_config(kind: type[C], program: str, arguments: Sequence[str]) -> C:
    """Configuration from a command line. Raises InvalidArgument; --help exits."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=kind.__doc__,
        epilog=_settings(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, e.g. model.max_sessions=4; repeatable",
    )
    parsed = parser.parse_args(arguments)
    values: dict[str, Any] = {}
    if parsed.config is not None:
        try:
            values = yaml.safe_load(Path(parsed.config).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InvalidArgument("--config", parsed.config, f"a readable YAML file ({error})") from error
        if not isinstance(values, dict):
            raise InvalidArgument("--config", parsed.config, "a YAML file of settings, one mapping")
    for setting in parsed.set:
        set_value(values, setting)
    return build_config(kind, values)


def _settings(kind: type[BaseModel], prefix: str = "") -> str:
    lines = ["settings (default):"] if not prefix else []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            lines.append(_settings(inner, f"{prefix}{name}."))
        else:
            default = "required" if field.is_required() else field.default
            lines.append(f"  {prefix}{name} ({default})")
    return "\n".join(lines)


def show_config(config: WorkerConfig) -> str:
    """The whole configuration as YAML, for the log."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False).rstrip()
