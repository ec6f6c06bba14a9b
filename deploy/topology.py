"""What runs where: one YAML file, read once, frozen, and refused with the path, the value and the limit of what is wrong in it.

This module is pure and knows neither Ray nor processes. `configs.py` turns a topology into the configuration of each service.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specwire.law.errors import CallerFault
from specwire.settings import strict_yaml
from specwire.wire.rpc import is_loopback

DEFAULT_PORT = 8470
TABLE = "table"
"""The model that needs no weights."""
Port = Annotated[int, Field(ge=0, le=65535)]
Amount = Annotated[float, Field(ge=0)]


class TopologyError(CallerFault):
    """The topology cannot be used; the text says where and why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Placed(_Strict):
    """What Ray reserves for one actor. Plain processes use `num_gpus` alone, to share the GPUs out."""

    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach the service only when it is not loopback; that needs `insecure: true`."""
    port: Port = 0
    """0: any free port. Workers may move freely, since they announce themselves."""
    metrics_port: Port | None = None
    """Prometheus /metrics; 0: any free port; absent: none."""
    num_cpus: Amount = 1.0
    """Share of cores that Ray counts for it; fractions are allowed. Bookkeeping only: `threads` is what it uses."""
    num_gpus: Amount = 0.0
    """GPUs it gets: a fraction of one (0.5) or a whole number."""
    resources: dict[str, Amount] = Field(default_factory=dict)
    """Custom Ray resources, for instance {fast_link: 1}."""
    node: str | None = None
    """IP address, host name or Ray node id where it must run. Absent: `strategy` decides."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the service's own configuration, checked by the service."""

    @field_validator("num_gpus")
    @classmethod
    def _whole_or_part(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("must be a fraction below 1 or a whole number")
        return value


class Speculation(_Strict):
    """What a request gets that does not say otherwise."""

    num_speculative_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    """Longest block; 0: plain decoding; auto: chosen round by round."""
    max_num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = 8
    """Longest block that auto considers, and most that a request may ask for."""
    method: Literal["auto", "draft_model", "ngram"] = "auto"
    law: Literal["shared_noise", "rejection"] = "shared_noise"
    schedule: Literal["auto", "synchronous", "rotation", "run_ahead"] = "auto"
    """How sessions share draft and target: in step; in groups that take turns; or with the draft going on from its own guess
    while a block is judged; auto: whichever promises most."""
    rotation_groups: Annotated[int, Field(ge=2, le=8)] = 2
    """Groups of a rotation that is asked for; auto compares 2 and 3."""
    draft_timeout_ms: Literal["auto"] | Annotated[int, Field(ge=1, le=600_000)] = "auto"
    """How long a round waits for its block; auto: four times what it should take."""


class CoordinatorRole(Placed):
    """The service that clients talk to."""

    port: Port = DEFAULT_PORT
    num_cpus: Amount = 0.1
    max_running: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Requests generated at a time. Absent: what the target's slots allow."""
    max_waiting: Annotated[int, Field(ge=0, le=65536)] = 64
    """Requests that may wait; one more is refused with a retry hint."""
    speculation: Speculation = Speculation()


class WorkerRole(Placed):
    """A draft or a target."""

    model: str
    """`demo`, `demo-draft`, `table`, a folder or a hub id."""
    gguf_file: str | None = None
    tokenizer: str | None = None
    embeddings_from: str | None = None
    """The target's checkpoint, for a draft without an embedding table."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "float32"
    """auto: the fastest that the device has instructions for and that leaves the model as it is. int8 (CPU) changes it."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Compute threads on a CPU; 0: as the library decides."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    max_sessions: Annotated[int, Field(ge=1, le=65536)] | None = None
    max_block: Annotated[int, Field(ge=0, le=4096)] | None = None
    exactness: Literal["fast", "strict"] = "fast"
    table: dict[str, Any] | None = None
    """Only with `model: table`: which tables."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """So many of them. A session lives at one target and one draft; the coordinator shares sessions out by load."""


class RaySettings(_Strict):
    """Which Ray."""

    address: str = Field(default="local", pattern=r"^(local|auto|ray://.+|[^:/]+:\d+)$")
    """local: start one here and stop it with `down`. auto: the running one (RAY_ADDRESS). Or an address."""
    placement_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """How long to wait for the resources asked for."""
    object_store_mb: Annotated[int, Field(ge=75, le=65536)] = 80
    """Of a Ray started here. Nothing of ours goes through it, so the least that Ray takes."""


class Telemetry(_Strict):
    """Tracing detail; where traces go is said by the standard OTEL variables."""

    detail: Literal["off", "request", "round"] = "request"


class Topology(_Strict):
    """The whole file."""

    name: str = Field(default="specwire", pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")
    coordinator: CoordinatorRole = CoordinatorRole()
    target: WorkerRole
    draft: WorkerRole | None = None
    """Absent: plain decoding, or n-gram guesses by the coordinator alone."""
    strategy: Literal["pack", "spread", "strict_spread"] = "pack"
    """pack: few nodes. spread: many, if there are. strict_spread: one node each, or refuse."""
    telemetry: Telemetry = Telemetry()
    ray: RaySettings = RaySettings()
    insecure: bool = False
    """Allows hosts other than loopback without TLS. Whoever reaches the port can use the service."""

    @model_validator(mode="after")
    def _across_fields(self) -> Topology:
        for role, part in self.roles().items():
            if not self.insecure and not is_loopback(part.host):
                raise ValueError(
                    f"{role}.host: got {part.host!r}, must be loopback (127.0.0.1) unless insecure is true: "
                    "there is no TLS, and whoever reaches the port could use the service"
                )
            if isinstance(part, WorkerRole):
                _check_worker(role, part)
        return self

    def roles(self) -> dict[str, Placed]:
        """The roles that are there, in the order in which they start."""
        parts: dict[str, Placed | None] = {
            "coordinator": self.coordinator,
            "target": self.target,
            "draft": self.draft,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def services(self) -> dict[str, Placed]:
        """Every process by name (coordinator, target-0, draft-0 ...), in the order in which they start."""
        found: dict[str, Placed] = {}
        for role, part in self.roles().items():
            if isinstance(part, WorkerRole):
                found.update({f"{role}-{i}": part for i in range(part.count)})
            else:
                found[role] = part
        return found


def _check_worker(role: str, part: WorkerRole) -> None:
    if part.table is not None and part.model != TABLE:
        raise ValueError(f"{role}.table: got a table, must be absent unless model is 'table' (it is {part.model!r})")
    if part.count > 1 and part.port:
        raise ValueError(f"{role}.port: got {part.port}, must be 0 when count is above 1: they cannot share a port")
    if part.num_gpus and part.device == "cpu":
        raise ValueError(f"{role}.num_gpus: got {part.num_gpus:g}, must be 0 for device 'cpu'")


def parse(document: object, source: str = "topology") -> Topology:
    """A topology from parsed YAML. Raises TopologyError with one line per fault."""
    if not isinstance(document, Mapping):
        raise TopologyError(f"{source}: got {type(document).__name__}, must be a mapping with at least `target`")
    try:
        return Topology.model_validate(document)
    except ValidationError as error:
        raise TopologyError("\n".join(f"{source}: {line}" for line in explain(error, Topology))) from None


def load(path: Path | None = None) -> Topology:
    """A topology from a file, or from the shipped ones by name (`plain`); the default one without a path."""
    if path is None:
        path = Path("default")
    shipped = files("deploy.topologies") / f"{path}.yaml"
    try:
        if len(path.parts) == 1 and not path.suffix and not path.exists() and shipped.is_file():
            text, source = shipped.read_text(), f"{path} (shipped)"
        else:
            text, source = path.read_text(), str(path)
    except FileNotFoundError:
        raise TopologyError(
            f"{path}: no such file, and none of the shipped ones: {', '.join(shipped_names())}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot be read: {error}") from None
    try:
        document = strict_yaml(text)
    except yaml.YAMLError as error:
        raise TopologyError(f"{source}: not YAML: {error}") from None
    return parse(document, source)


def shipped_names() -> list[str]:
    """Names of the topologies in the package."""
    return sorted(entry.name[:-5] for entry in files("deploy.topologies").iterdir() if entry.name.endswith(".yaml"))


def explain(
    error: ValidationError, model: type[BaseModel], where: Callable[[Sequence[str]], str] = ".".join
) -> list[str]:
    """Each fault as `path: got value, must limit`; the alternatives of one field share a line. `where`: how a path is called."""
    lines: dict[str, str] = {}
    for fault in error.errors():
        parts = [str(part) for part in fault["loc"] if not str(part).startswith(("constrained-", "literal["))]
        path = where(parts) if parts else ""
        message = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            near = difflib.get_close_matches(parts[-1], _keys(model, parts[:-1]), n=1)
            lines[path] = f"{path}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
        elif fault["type"] == "missing":
            lines[path] = f"{path}: missing"
        elif not path:
            lines[message] = message
        else:
            limit = re.sub(r"^(\w+ should|must) ", "", message)
            if fault["type"] == "value_error" and limit == message:
                limit = f"be {limit}"  # validators of services leave it out, since their refusals say it before
            lines[path] = (
                f"{lines[path]}, or {limit}" if path in lines else f"{path}: got {fault['input']!r}, must {limit}"
            )
    return list(lines.values())


def _keys(model: Any, path: Sequence[str]) -> list[str]:
    """The known keys at a path of the model, whose parts may be dataclasses and lists of them."""
    for part in path:
        if part.isdecimal():
            continue  # a place in a list: the step before has found what it holds
        annotation = get_type_hints(model).get(part)
        inner = [each for each in (annotation, *get_args(annotation)) if _has_keys(each)]
        if not inner:
            return []
        model = inner[0]
    return (
        [field.name for field in dataclasses.fields(model)]
        if dataclasses.is_dataclass(model)
        else [*model.model_fields]
    )


def _has_keys(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))
