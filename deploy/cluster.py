"""Starting and stopping under Ray: all calls to Ray stand in this file.

Law. Ray places actors and runs their constructors again when they die; it carries no data. The coordinator comes first, then
the workers, which announce themselves to it. Actors are detached, so they outlive this process. Only a Ray that we
started is stopped by `down`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import placement, processes, ray_head, ready
from deploy.actor import Hosted
from deploy.configs import WILDCARDS, environment, telemetry_environment
from deploy.placement import Node
from deploy.ready import StartError
from deploy.state import Running, StateError, StateFolder
from deploy.topology import Topology
from specwire.wire.rpc import split_address

if TYPE_CHECKING:
    from specwire.v1 import inference_pb2 as pb

NAMESPACE = "specwire"
ACTORS = {
    "coordinator": ("coordinator.actor", "CoordinatorActor"),
    "target": ("target_service.actor", "TargetActor"),
    "draft": ("draft_service.actor", "DraftActor"),
}
CALL_S = 10.0
CONNECT_S = 60.0
"""Of a Ray that is there; a busy machine needs long."""


def up(
    folder: StateFolder,
    topology: Topology,
    configs: Mapping[str, Mapping[str, Any]],
    source: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> tuple[Running, pb.GetStatsResponse]:
    """Starts everything and waits until it serves; what was started is stopped when that fails or is interrupted.

    The caller holds the folder exclusively and has seen that nothing runs. Raises StartError."""
    ray_head.require()
    give_up = time.monotonic() + timeout_s

    def left() -> float:
        return max(1.0, give_up - time.monotonic())

    workers = tuple(name for name in configs if name != "coordinator")
    for log in folder.logs.glob("*.log"):
        log.unlink()
    running = Running("ray", str(configs["coordinator"]["bind"]), source, workers, time.time())
    say("starting Ray")
    try:
        running = ray_head.find(folder, topology.ray, running, NAMESPACE, timeout_s)
        folder.write(running)
        say("connecting to Ray")
        connect(folder, running, min(CONNECT_S, left()))
        _refuse_second(configs)
    except StateError:
        _disconnect()
        folder.clear()
        raise
    except BaseException:
        noted = running if running.ray is not None else folder.read()
        if noted is not None:  # else no Ray was found, or the one that was begun is stopped
            down(folder, noted, grace_s=1.0)
        raise
    try:
        say("placing the actors")
        endpoint, watch = _start_actors(folder, topology, configs, running, left())
        running = replace(running, endpoint=endpoint)
        folder.write(running)
        stats = ready.wait_ready(endpoint, workers, left(), watch, say)
    except BaseException:
        down(folder, running, grace_s=1.0)
        raise
    _disconnect()
    return running, stats


def connect(folder: StateFolder, running: Running, timeout_s: float) -> Any:
    """Connects this process to the Ray of `running` and returns the module. Raises StartError."""
    assert running.ray is not None
    ray_head.require()
    os.environ.update(ray_head.environment(folder) if running.ray.started else {"RAY_USAGE_STATS_ENABLED": "0"})
    import ray

    # Ray warns of what is meant: that we do not take its signal handler, and that detached actors have a placement group.
    logging.getLogger("ray").setLevel(logging.ERROR)
    if not ray.is_initialized():
        address = running.ray.address
        if not address:
            raise StartError("the start of this Ray was cut short; first: specwire down")
        if not ray_head.reachable(running.ray):
            raise StartError(f"Ray at {address} cannot be used: nobody listens there")
        ready.within(
            timeout_s,
            f"Ray at {address}",
            lambda: ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            ),
        )
    return ray


def _disconnect() -> None:
    import ray

    ray.shutdown()


def _refuse_second(configs: Mapping[str, Any]) -> None:
    """A shared Ray may hold a Specwire that another state file speaks of."""
    import ray

    taken = sorted(set(configs) & set(ray.util.list_named_actors()))
    if taken:
        raise StateError(f"this Ray already has a Specwire (actors {', '.join(taken)} in namespace {NAMESPACE})")


def nodes() -> list[Node]:
    """The living nodes and what is free on each."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(each["NodeID"], each["NodeManagerAddress"], each["NodeManagerHostname"], free.get(each["NodeID"], {}))
        for each in ray.nodes()
        if each["Alive"]
    ]


def _start_actors(
    folder: StateFolder,
    topology: Topology,
    configs: Mapping[str, Mapping[str, Any]],
    running: Running,
    timeout_s: float,
) -> tuple[str, Callable[[], str | None]]:
    """Reserves the places and creates the actors. Returns the endpoint, and what tells that an actor failed."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    assert running.ray is not None
    before = nodes()
    asked = placement.bundles(topology, before, ray.util.get_node_ip_address())
    group = placement_group(
        [dict(bundle.resources) for bundle in asked],
        strategy=topology.strategy.upper(),
        name=NAMESPACE,
        lifetime="detached",
    )
    patience = min(timeout_s, topology.ray.placement_timeout_s)
    if not group.wait(patience):
        raise StartError(placement.refusal(asked, before, topology.strategy, patience))
    addresses = {node.node_id: node.address for node in nodes()}
    placed = {index: addresses[node] for index, node in placement_group_table(group)["bundles_to_node_id"].items()}

    endpoint = ""
    starting: dict[Any, str] = {}
    for index, (name, part) in enumerate(topology.services().items()):
        config = dict(configs[name])
        if name != "coordinator":
            config["coordinator"] = endpoint
            if part.host in WILDCARDS and "advertise" not in part.settings:
                config["advertise"] = placed[index]
        module, kind = ACTORS[name.split("-")[0]]
        actor = (
            ray.remote(Hosted)
            .options(
                name=name,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=part.num_cpus,
                num_gpus=part.num_gpus,
                resources=part.resources or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                runtime_env={
                    "env_vars": telemetry_environment(os.environ) | environment(part) | processes.import_path()
                },
            )
            .remote(module, kind, config, str(folder.log(name)) if running.ray.started else None)
        )
        ref = actor.address.remote()
        starting[ref] = name
        if name == "coordinator":
            endpoint = _endpoint(_await_address(ref, timeout_s), placed[index])
    return endpoint, lambda: _first_failure(folder, running, starting)


def _await_address(ref: Any, timeout_s: float) -> str:
    import ray

    try:
        return str(ray.get(ref, timeout=timeout_s))
    except ray.exceptions.GetTimeoutError:
        raise StartError(f"coordinator did not start within {timeout_s:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise StartError(f"coordinator could not start: {ready.cause(error)}") from None


def _endpoint(bound: str, node: str) -> str:
    """Where others reach what is bound there: a wildcard stands for the node's address."""
    host, port = split_address(bound)
    return bound if host not in WILDCARDS else f"{node}:{port}"


def _first_failure(folder: StateFolder, running: Running, starting: dict[Any, str]) -> str | None:
    """During a start: why it will never be ready, or None."""
    import ray

    if any(not process.alive for process in running.processes):
        return f"Ray ended:\n{ready.tail(folder.log('ray'))}"
    done, _ = ray.wait(list(starting), num_returns=len(starting), timeout=0) if starting else ([], [])
    for ref in done:
        name = starting.pop(ref)
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            return f"{name} could not start: {ready.cause(error)}"
    return None


def down(folder: StateFolder, running: Running, grace_s: float) -> list[str]:
    """Ends the actors, and Ray if it is ours. Returns the names of the services that were stopped."""
    assert running.ray is not None
    stopped: list[str] = []
    if ray_head.reachable(running.ray):
        try:
            connect(folder, running, CONNECT_S)
            stopped = _stop_actors(running, grace_s)
            _disconnect()
        except StartError:
            if not running.ray.started:
                raise
    if running.ray.started:
        ray_head.stop(Path(running.ray.folder))
    folder.clear()
    return stopped


def _stop_actors(running: Running, grace_s: float) -> list[str]:
    """The coordinator first, since its requests need the workers to finish."""
    import ray

    give_up = time.monotonic() + grace_s
    stopped = []
    for name in ("coordinator", *running.workers):
        try:
            actor = ray.get_actor(name)
        except ValueError:
            continue
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait([actor.stop.remote()], timeout=max(0.0, give_up - time.monotonic()))
        ray.kill(actor, no_restart=True)
        stopped.append(name)
    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(NAMESPACE))
    return stopped


def report(folder: StateFolder, running: Running) -> list[dict[str, Any]]:
    """Node, process and address of each actor, as the actors tell."""
    connect(folder, running, CONNECT_S)
    import ray

    rows: list[dict[str, Any]] = []
    for name in ("coordinator", *running.workers):
        try:
            rows.append({**ray.get(ray.get_actor(name).where.remote(), timeout=CALL_S), "name": name, "state": "alive"})
        except ValueError:
            rows.append({"name": name, "state": "gone"})
        except ray.exceptions.RayError as error:
            rows.append({"name": name, "state": f"not answering: {ready.cause(error)}"})
    _disconnect()
    return rows
