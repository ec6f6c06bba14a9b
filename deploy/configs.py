"""From a topology to the configuration of each service. Pure; both ways of starting them hand these on unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deploy.topology import TABLE, CoordinatorRole, Placed, Topology, TopologyError, WorkerRole
from specwire.law.errors import InvalidArgument
from specwire.process import COMPUTES

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean all interfaces, and where this machine reaches what listens on them."""
MODEL_KEYS = (
    "gguf_file",
    "tokenizer",
    "embeddings_from",
    "device",
    "precision",
    "threads",
    "max_context",
    "max_sessions",
    "max_block",
    "exactness",
    "table",
)
"""Settings of a worker that are its model's."""


def service_configs(
    topology: Topology, resolve: Callable[[str], str] = str, coordinator_address: str | None = None
) -> dict[str, dict[str, Any]]:
    """The configuration of each service by name, in the order in which they start.

    `resolve` turns a model's name into what the services load. `coordinator_address` is where workers find the coordinator
    when that is not the address it listens on, say 0.0.0.0. Raises TopologyError for a name that `resolve` refuses."""
    target = topology.target
    own_tokenizer = _resolved(resolve, "target.model", target.model) if target.model != TABLE else None
    coordinator = topology.coordinator
    address = coordinator_address or reachable(coordinator.host, coordinator.port)
    configs: dict[str, dict[str, Any]] = {}
    for name, part in topology.services().items():
        config: dict[str, Any] = {
            "name": name,
            "bind": _address(part.host, part.port),
            "insecure": topology.insecure,
            "metrics_port": part.metrics_port,
        }
        if isinstance(part, WorkerRole):
            config |= {"coordinator": address, "model": _model(name.split("-")[0], part, resolve)}
            if part.host in WILDCARDS:
                config["advertise"] = WILDCARDS[part.host]
        elif isinstance(part, CoordinatorRole):
            config |= {
                "tokenizer": (
                    _resolved(resolve, "target.tokenizer", target.tokenizer) if target.tokenizer else own_tokenizer
                ),
                "model_name": target.model,
                "speculation": part.speculation.model_dump(),
                "max_waiting": part.max_waiting,
                "trace_detail": topology.telemetry.detail,
            }
            config |= {"max_running": part.max_running} if part.max_running is not None else {}
        configs[name] = _merged(config, part.settings)
    return configs


def _model(role: str, part: WorkerRole, resolve: Callable[[str], str]) -> dict[str, Any]:
    """The `model` block of a worker: what is said here; what is not said is left to the service."""
    given = part.model_dump(include=set(MODEL_KEYS), exclude_none=True)
    for key in ("tokenizer", "embeddings_from"):
        if key in given:
            given[key] = _resolved(resolve, f"{role}.{key}", given[key])
    return given | {"model": part.model if part.model == TABLE else _resolved(resolve, f"{role}.model", part.model)}


def _resolved(resolve: Callable[[str], str], path: str, name: str) -> str:
    """What the services load for a model's name that stands at this path of the topology."""
    try:
        return resolve(name)
    except InvalidArgument as error:
        raise TopologyError(str(InvalidArgument(path, error.value, error.limit))) from None


def origin(role: str, part: Placed, path: Sequence[str]) -> str:
    """Where in the topology a key of a service's configuration stands, or could: the way back from `service_configs`."""
    if not _holds(part.settings, path):
        known = set(type(part).model_fields)
        if isinstance(part, WorkerRole) and path[0] == "model" and len(path) > 1 and path[1] in ("model", *MODEL_KEYS):
            return ".".join((role, *path[1:]))
        if path[0] != "model" and path[0] in known:
            return ".".join((role, *path))
        if path[0] == "trace_detail":
            return "telemetry.detail"
    return ".".join((role, "settings", *path))


def _holds(settings: Any, path: Sequence[str]) -> bool:
    """Whether these settings say something at the path, or something else in its place."""
    for part in path:
        if not isinstance(settings, Mapping):
            return True
        if part not in settings:
            return False
        settings = settings[part]
    return True


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str, port: int) -> str:
    """Where this machine reaches a service that listens on `host`."""
    return _address(WILDCARDS.get(host, host), port)


def visible_gpus(topology: Topology) -> dict[str, str]:
    """Which GPUs each plain process sees (CUDA_VISIBLE_DEVICES), by name; Ray does this by itself.

    A worker that names its GPU (cuda:1) keeps it. The others take the next GPU with room, in order: two workers with
    `num_gpus: 1` get one each, two with 0.5 share the first."""
    room: list[float] = []
    seen: dict[str, str] = {}
    for name, part in topology.services().items():
        if not isinstance(part, WorkerRole) or part.device != "cuda" or not part.num_gpus:
            continue
        need = part.num_gpus
        if need < 1:
            index = next((i for i, left in enumerate(room) if left >= need - 1e-9), len(room))
            room += [1.0] * (index + 1 - len(room))
            room[index] -= need
            seen[name] = str(index)
        else:
            first = len(room)
            room += [0.0] * int(need)
            seen[name] = ",".join(str(i) for i in range(first, len(room)))
    return seen


def telemetry_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a Ray that runs already cannot know of the caller's environment: where spans go, and how. Without the headers, which
    hold secrets, since Ray shows an actor's environment to whoever asks."""
    return {key: value for key, value in environ.items() if key.startswith("OTEL_") and "HEADERS" not in key}


def environment(part: Placed, gpus: str | None = None) -> dict[str, str]:
    """Environment of one service."""
    found = {**COMPUTES, "PYTHONUNBUFFERED": "1"}
    if isinstance(part, WorkerRole) and part.threads:
        found["OMP_NUM_THREADS"] = str(part.threads)
    if gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = gpus
    return found
