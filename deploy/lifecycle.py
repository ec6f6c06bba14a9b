"""`up`, `down` and what they need to agree on: which service is meant, and by what means it runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from deploy import configs, ray_head, ready, state, topology
from deploy.state import NothingRuns, Running, StateError, StateFolder
from deploy.topology import Topology, TopologyError
from specwire.law.errors import InvalidArgument
from specwire.wire.rpc import split_address

if TYPE_CHECKING:
    from specwire.v1 import inference_pb2 as pb

Say = Callable[[str], None]


def up(plan: Topology, source: str, use_ray: bool, timeout_s: float, say: Say) -> tuple[Running, pb.GetStatsResponse]:
    """Starts what a topology says and waits until it serves. `source`: where it came from, for people.

    Raises TopologyError, StateError, StartError."""
    folder = state.folder()
    with folder.exclusively(), _said_of(source):
        _refuse_second(folder)
        plan = _with_port(plan)
        say("looking at the models")
        found = configs.service_configs(plan, resolver())
        check(plan, found)
        if use_ray:
            from deploy import cluster

            return cluster.up(folder, plan, found, source, timeout_s, say)
        from deploy import processes

        return processes.up(folder, plan, found, source, timeout_s, say)


def down(grace_s: float) -> list[str]:
    """Stops what `up` started. Returns the names of what was stopped. Raises StateError when nothing runs."""
    folder = state.folder()
    with folder.exclusively():
        running = folder.read()
        if running is None:
            raise NothingRuns("nothing is running")
        if running.mode == "ray":
            from deploy import cluster

            return cluster.down(folder, running, grace_s)
        from deploy import processes

        return processes.down(folder, grace_s)


def _refuse_second(folder: StateFolder) -> None:
    running = folder.read()
    if running is None:
        return
    if running.alive:
        raise StateError(f"already running: {running.describe()}. First: specwire down")
    # A machine that was switched off leaves such a file; a Ray whose holder was killed leaves its parts as well.
    if running.ray is not None and running.ray.started:
        ray_head.stop(Path(running.ray.folder))
    folder.clear()


def _with_port(plan: Topology) -> Topology:
    """Port 0 becomes a free one now: workers and clients need to know it before the coordinator lives."""
    if plan.coordinator.port:
        return plan
    port = ready.free_port(plan.coordinator.host)
    return plan.model_copy(update={"coordinator": plan.coordinator.model_copy(update={"port": port})})


def resolver() -> Callable[[str], str]:
    """From a model's name to what services load. Each name is looked up once."""
    from functools import cache

    from deploy import models

    return cache(lambda name: str(models.resolve(name)))


@contextlib.contextmanager
def _said_of(source: str) -> Iterator[None]:
    """Every line that says what is wrong with a topology begins with where it came from, as those of `topology.parse` do."""
    try:
        yield
    except TopologyError as error:
        raise TopologyError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from None


def check(plan: Topology, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Holds every configuration against its service's own rules, before anything starts. Raises TopologyError with one line per
    fault, each with the path in the topology that it comes from."""
    from coordinator.config import CoordinatorConfig
    from draft_service.config import DraftConfig
    from target_service.config import TargetConfig

    kinds: dict[str, type[BaseModel]] = {"coordinator": CoordinatorConfig, "target": TargetConfig, "draft": DraftConfig}
    services = plan.services()
    lines: dict[str, None] = {}  # several services of one role have the same faults
    for name, config in found.items():
        role = name.split("-")[0]
        where = partial(configs.origin, role, services[name])
        try:
            kinds[role].model_validate(config)
        except ValidationError as error:
            lines |= dict.fromkeys(topology.explain(error, kinds[role], where))
        except InvalidArgument as error:
            path = (*(["model"] if error.field.startswith("table.") else []), *error.field.split("."))
            lines[str(InvalidArgument(where(path), error.value, error.limit))] = None
    if lines:
        raise TopologyError("\n".join(lines))


def endpoint(address: str | None) -> str:
    """Where the service is: as given, else SPECWIRE_ADDRESS, else the state file, else the usual place."""
    chosen = address or os.environ.get("SPECWIRE_ADDRESS")
    if chosen:
        split_address(chosen)
        return chosen
    running = state.folder().read()
    return running.endpoint if running is not None else f"127.0.0.1:{topology.DEFAULT_PORT}"
