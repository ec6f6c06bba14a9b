"""What is asked of Ray's scheduler, and what to say when it cannot be had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.topology import Placed, Topology
from specwire.law.errors import InvalidArgument
from specwire.wire.rpc import is_loopback

LEAST = 0.001
"""Ray's smallest share: enough to tie a bundle to a node."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster."""

    node_id: str
    address: str
    host: str
    free: Mapping[str, float]
    """Resources not taken yet."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one service needs, in one place."""

    name: str
    resources: Mapping[str, float]


def bundles(topology: Topology, nodes: Sequence[Node], here: str) -> list[Bundle]:
    """A bundle per service, in the order in which they start. `here`: address of the node this process runs on.

    A service on loopback is reached from its own machine only, so with several machines in the cluster all of those are tied to
    this one. Raises InvalidArgument when that contradicts the topology."""
    several = len({node.address for node in nodes}) > 1
    found = []
    for name, part in topology.services().items():
        tied = _node_address(name, part.node, nodes) if part.node is not None else None
        if several and is_loopback(part.host):
            limit = "an address that other nodes reach (with insecure: true), since the cluster has several machines"
            if tied not in (None, here):
                raise InvalidArgument(f"{name}.host", part.host, f"{limit} and it is to run at {part.node}")
            if topology.strategy != "pack":
                raise InvalidArgument(f"{name}.host", part.host, f"{limit} and strategy is {topology.strategy}")
            tied = here
        found.append(Bundle(name, _resources(part, tied)))
    return found


def _resources(part: Placed, tied: str | None) -> dict[str, float]:
    asked = {"CPU": part.num_cpus, "GPU": part.num_gpus, **part.resources}
    if tied is not None:
        asked[f"node:{tied}"] = LEAST
    return {name: amount for name, amount in asked.items() if amount} or {"CPU": LEAST}


def _node_address(name: str, wanted: str, nodes: Sequence[Node]) -> str:
    for node in nodes:
        if wanted in (node.address, node.host, node.node_id):
            return node.address
    known = ", ".join(f"{node.address} ({node.host})" for node in nodes)
    raise InvalidArgument(f"{name}.node", wanted, f"a node of this cluster: {known}")


def refusal(asked: Sequence[Bundle], nodes: Sequence[Node], strategy: str, waited_s: float) -> str:
    """Why nothing started: what was asked, and what is free."""
    lines = [f"Ray cannot place this topology (strategy {strategy}; waited {waited_s:g} s).", "asked:"]
    lines += [f"  {bundle.name}: {_amounts(bundle.resources)}" for bundle in asked]
    lines.append("free:")
    lines += [f"  node {node.address} ({node.host}): {_amounts(node.free) or 'nothing'}" for node in nodes]
    if strategy == "strict_spread" and len(nodes) < len(asked):
        lines.append(f"strict_spread needs a node for each of the {len(asked)} services; there are {len(nodes)}.")
    lines += _short(asked, nodes)
    return "\n".join(lines)


def _short(asked: Sequence[Bundle], nodes: Sequence[Node]) -> list[str]:
    """Resources of which more is asked than all nodes have free."""
    total: dict[str, float] = {}
    for bundle in asked:
        for name, amount in bundle.resources.items():
            total[name] = total.get(name, 0.0) + amount
    free = {name: sum(node.free.get(name, 0.0) for node in nodes) for name in total}
    return [
        f"{name}: {amount:g} asked, {free[name]:g} free" for name, amount in total.items() if amount > free[name] + 1e-9
    ]


def _amounts(resources: Mapping[str, float]) -> str:
    """For people: the sizes of memory that Ray counts too say nothing about us."""
    hidden = ("memory", "object_store_memory", "node:__internal_head__")
    shown = [(name, amount) for name, amount in sorted(resources.items()) if name not in hidden]
    return ", ".join(
        f"on {name[5:]}" if name.startswith("node:") and amount == LEAST else f"{name} {amount:g}"
        for name, amount in shown
        if not (name.startswith("node:") and amount == 1.0)
    )
