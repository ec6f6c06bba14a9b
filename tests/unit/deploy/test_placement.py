"""What is asked of Ray and what is said when it cannot be had (reports 138 and 140)."""

from __future__ import annotations

import pytest

from deploy import placement, topology
from deploy.placement import Node
from specwire.law.errors import InvalidArgument

HERE = Node("n1", "10.0.0.1", "alpha", {"CPU": 2.0, "memory": 1e9, "node:10.0.0.1": 1.0})
THERE = Node("n2", "10.0.0.2", "beta", {"CPU": 4.0, "GPU": 1.0, "node:10.0.0.2": 1.0})


def plan(**fields: object) -> topology.Topology:
    """A table topology with a draft, changed."""
    worker = {"model": "table", "num_cpus": 0.5}
    return topology.parse({"target": worker, "draft": worker, **fields})


def test_a_bundle_per_service_in_order() -> None:
    """Fractions, custom resources and nothing that is zero."""
    asked = placement.bundles(
        plan(target={"model": "table", "num_cpus": 0, "resources": {"fast": 1}}), [HERE], HERE.address
    )

    assert [
        ("coordinator", {"CPU": 0.1}),
        ("target-0", {"fast": 1.0}),
        ("draft-0", {"CPU": 0.5}),
    ] == [(bundle.name, bundle.resources) for bundle in asked]


def test_an_empty_request_still_needs_a_place() -> None:
    """Ray refuses an empty bundle."""
    asked = placement.bundles(plan(coordinator={"num_cpus": 0}), [HERE], HERE.address)

    assert {"CPU": placement.LEAST} == asked[0].resources


@pytest.mark.parametrize("wanted", ["10.0.0.2", "beta", "n2"])
def test_a_node_is_named_by_address_host_or_id(wanted: str) -> None:
    """All three lead to the same bundle."""
    asked = placement.bundles(
        plan(insecure=True, target={"model": "table", "host": "0.0.0.0", "node": wanted}), [HERE, THERE], HERE.address
    )

    assert {"CPU": 1.0, "node:10.0.0.2": placement.LEAST} == asked[1].resources


def test_an_unknown_node_is_refused_with_the_known_ones() -> None:
    """At once, not by waiting for it."""
    with pytest.raises(
        InvalidArgument, match=r"target-0.node: got 'gamma', must be a node of this cluster: 10.0.0.1 \(alpha\)"
    ):
        placement.bundles(plan(target={"model": "table", "node": "gamma"}), [HERE], HERE.address)


def test_loopback_services_stay_on_this_machine() -> None:
    """In a cluster of several machines a loopback address is reached from its own only."""
    asked = placement.bundles(plan(), [HERE, THERE], HERE.address)

    assert [placement.LEAST] * 3 == [bundle.resources["node:10.0.0.1"] for bundle in asked]


@pytest.mark.parametrize("fields", [{"strategy": "strict_spread"}, {"target": {"model": "table", "node": "beta"}}])
def test_loopback_and_other_machines_contradict_each_other(fields: dict[str, object]) -> None:
    """Better refused than started and never reached."""
    with pytest.raises(InvalidArgument, match="must be an address that other nodes reach"):
        placement.bundles(plan(**fields), [HERE, THERE], HERE.address)


def test_the_refusal_says_what_was_asked_and_what_is_free() -> None:
    """And which resource falls short."""
    gpus = plan(
        target={"model": "x", "device": "cuda", "num_gpus": 1}, draft={"model": "x", "device": "cuda", "num_gpus": 1}
    )
    free = [Node("n1", "127.0.0.1", "alpha", {"CPU": 1.5, "GPU": 1.0, "memory": 1e9, "node:127.0.0.1": 1.0})]
    asked = placement.bundles(gpus, free, "127.0.0.1")

    assert (
        "Ray cannot place this topology (strategy strict_spread; waited 30 s).\n"
        "asked:\n"
        "  coordinator: CPU 0.1\n"
        "  target-0: CPU 1, GPU 1\n"
        "  draft-0: CPU 1, GPU 1\n"
        "free:\n"
        "  node 127.0.0.1 (alpha): CPU 1.5, GPU 1\n"
        "strict_spread needs a node for each of the 3 services; there are 1.\n"
        "CPU: 2.1 asked, 1.5 free\n"
        "GPU: 2 asked, 1 free"
    ) == placement.refusal(asked, free, "strict_spread", 30.0)
