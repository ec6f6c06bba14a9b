"""How every service reads its settings: one YAML file (`--config`), then `--set key=value`, which wins.

Law. Settings are read once, checked once, printed at start and never changed; nothing is read from the environment. A refusal
names the field, its value and the limit.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from specwire.law.errors import InvalidArgument

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of every service's log."""

C = TypeVar("C", bound=BaseModel)


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
        limit = (
            first["msg"]
            .removeprefix("Value error, ")
            .removeprefix("must be ")
            .removeprefix("Input should be ")
            .replace("String should have", "text of", 1)
        )
        raise InvalidArgument(field, first["input"], limit) from None


def put_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets `a.b` of nested groups."""
    *parents, last = key.split(".")
    for parent in parents:
        below = values.setdefault(parent, {})
        if not isinstance(below, dict):
            raise InvalidArgument(key, value, f"under a group; {parent} is {below!r}")
        values = below
    values[last] = value


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that comes twice: YAML's own rule, which its reader does not keep, so that the first would be lost unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See yaml.SafeLoader."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def strict_yaml(text: str) -> Any:
    """What a YAML text says. Raises yaml.YAMLError, also for a key that comes twice in one mapping."""
    return yaml.load(text, _StrictLoader)


def set_value(values: dict[str, Any], setting: str) -> None:
    """Applies one `a.b=value`; the value is read as YAML, so numbers, booleans and lists are what they look like."""
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise InvalidArgument("--set", setting, "key=value")
    try:
        put_value(values, key, yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise InvalidArgument(key, text, "a YAML value") from error


def read_file(path: str | None) -> dict[str, Any]:
    """The settings of a YAML file; None: none. Raises InvalidArgument."""
    if path is None:
        return {}
    try:
        values = strict_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument("--config", path, f"a readable YAML file ({error})") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InvalidArgument("--config", path, "a YAML file of settings, one mapping by name")
    return values


def read_config(kind: type[C], program: str, arguments: Sequence[str]) -> C:
    """Configuration from a command line. Raises InvalidArgument; --help exits."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=inspect.cleandoc(kind.__doc__ or ""),
        epilog=_settings(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, dotted, with a YAML value; repeatable",
    )
    parsed = parser.parse_args(arguments)
    values = read_file(parsed.config)
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


def show_config(config: BaseModel) -> str:
    """The whole configuration as YAML, for the log."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False).rstrip()
