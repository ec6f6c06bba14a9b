"""Who is registered, who is fit for work, and who gets the next session. Time is an argument."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.fleet import Fleet, Standing, Worker
from specwire.law.errors import InvalidArgument, VersionMismatch
from specwire.wire.codec import PROTOCOL_VERSION
from specwire.wire.info import WorkerInfo

INFO = WorkerInfo(
    role="target",
    model="m",
    architecture="table",
    vocab_size=9,
    vocab_fingerprint="",
    model_fingerprint="",
    max_context=100,
    max_sessions=4,
    max_block=8,
    max_append=50,
    device="cpu",
    precision="float32",
    version="0",
    protocol_version=PROTOCOL_VERSION,
    incarnation=7,
    node="here",
)


def info(role: str = "target", incarnation: int = 7, **fields: Any) -> WorkerInfo:
    """A worker's own description."""
    return dataclasses.replace(INFO, role=role, incarnation=incarnation, **fields)


def a_fleet() -> Fleet:
    """Heartbeats every second, suspect after two."""
    return Fleet(heartbeat_s=1.0, suspect_after_s=2.0)


def ready(fleet: Fleet, name: str, role: str = "target", now: float = 0.0) -> Worker:
    """A registered worker whose stream stands."""
    worker, _ = fleet.register(name, info(role), f"{name}:1", now)
    fleet.connected(worker)
    return worker


def test_a_new_worker_needs_a_link() -> None:
    """It is known, and not yet fit for work."""
    fleet = a_fleet()
    worker, fresh = fleet.register("t0", info(), "a:1", 0.0)

    assert (True, Standing.CONNECTING) == (fresh, worker.standing)
    assert fleet.pick("target") is None


def test_registering_again_is_a_heartbeat() -> None:
    """The same life at the same address: nothing is torn down."""
    fleet = a_fleet()
    first = ready(fleet, "t0")
    second, fresh = fleet.register("t0", info(), "t0:1", 5.0)

    assert (first, False, 5.0, Standing.READY) == (second, fresh, second.last_heartbeat, second.standing)


@pytest.mark.parametrize(("address", "incarnation"), [("elsewhere:1", 7), ("t0:1", 8)])
def test_another_life_or_address_replaces_the_worker(address: str, incarnation: int) -> None:
    """Its sessions and its count of streams are the same name's."""
    fleet = a_fleet()
    first = ready(fleet, "t0")
    first.sessions.add(3)
    second, fresh = fleet.register("t0", info(incarnation=incarnation), address, 1.0)

    assert (True, Standing.CONNECTING, {3}, 1) == (fresh, second.standing, second.sessions, second.connects)
    assert list(fleet.of("target")) == [second]


def test_a_replaced_life_does_not_take_the_name_back() -> None:
    """It woke after its replacement. Two lives under one name would take it from each other for ever."""
    fleet = a_fleet()
    ready(fleet, "t0")
    younger, _ = fleet.register("t0", info(incarnation=8), "b:1", 1.0)
    fleet.connected(younger)
    with pytest.raises(InvalidArgument, match="a younger one has it"):
        fleet.register("t0", info(incarnation=7), "t0:1", 2.0)

    assert list(fleet.of("target")) == [younger]


def test_a_replaced_life_may_have_the_name_when_it_is_free() -> None:
    """The younger one is gone, and the older one turns out to have been alive all the time."""
    fleet = a_fleet()
    ready(fleet, "t0")
    younger, _ = fleet.register("t0", info(incarnation=8), "b:1", 1.0)
    fleet.disconnected(younger, "gone")
    older, fresh = fleet.register("t0", info(incarnation=7), "t0:1", 2.0)

    assert (True, 7) == (fresh, older.info.incarnation)
    assert list(fleet.of("target")) == [older]


def test_another_protocol_is_refused() -> None:
    """Both versions are named, and nothing is remembered."""
    fleet = a_fleet()
    with pytest.raises(VersionMismatch, match=f"99.*{PROTOCOL_VERSION}"):
        fleet.register("t0", info(protocol_version=99), "a:1", 0.0)

    assert fleet.workers == {}


@pytest.mark.parametrize(("name", "role"), [("", "target"), ("t0", "coordinator")])
def test_a_registration_must_make_sense(name: str, role: str) -> None:
    """A name, and something to do."""
    with pytest.raises(InvalidArgument):
        a_fleet().register(name, info(role), "a:1", 0.0)


def test_a_name_has_one_role() -> None:
    """A draft that took a target's name by mistake must not take its sessions."""
    fleet = a_fleet()
    ready(fleet, "w0", "target")

    with pytest.raises(InvalidArgument, match="target"):
        fleet.register("w0", info("draft"), "b:1", 0.0)


@pytest.mark.parametrize(("name", "incarnation", "known"), [("t0", 7, True), ("t0", 8, False), ("t1", 7, False)])
def test_heartbeats_of_strangers_ask_them_to_register(name: str, incarnation: int, known: bool) -> None:
    """A coordinator that restarted knows nobody, and a worker that restarted is somebody else."""
    fleet = a_fleet()
    ready(fleet, "t0")

    assert known is fleet.heartbeat(name, incarnation, 1.0)


def test_a_refused_worker_is_asked_to_register_and_is_weighed_again() -> None:
    """What it was refused for may be mended. Until it is connected it is like a new one."""
    fleet = a_fleet()
    worker = ready(fleet, "d0", "draft")
    fleet.refuse(worker, "another vocabulary")

    assert fleet.heartbeat("d0", 7, 1.0) is False
    again, fresh = fleet.register("d0", info("draft"), "d0:1", 2.0)
    assert (worker, True, Standing.CONNECTING, "") == (again, fresh, again.standing, again.reason)
    assert fleet.heartbeat("d0", 7, 3.0)


def test_a_refused_worker_gets_no_work_by_reconnecting() -> None:
    """Its stream may break and stand again; that it does not fit stays true."""
    fleet = a_fleet()
    worker = ready(fleet, "d0", "draft")
    fleet.refuse(worker, "another vocabulary")
    fleet.connected(worker)

    assert (None, Standing.REFUSED, "another vocabulary") == (fleet.pick("draft"), worker.standing, worker.reason)


def test_why_a_worker_was_refused_stays_readable() -> None:
    """Also when its stream ends after that."""
    fleet = a_fleet()
    worker = ready(fleet, "d0", "draft")
    fleet.refuse(worker, "another vocabulary")
    fleet.disconnected(worker, "stopped")

    assert (Standing.REFUSED, "another vocabulary") == (worker.standing, worker.reason)


@pytest.mark.parametrize(
    ("silent_s", "now", "standing"),
    [
        (0.0, 3.0, Standing.READY),
        (0.0, 3.1, Standing.SUSPECT),
        (2.0, 0.0, Standing.READY),
        (2.1, 0.0, Standing.SUSPECT),
    ],
)
def test_silence_makes_suspect(silent_s: float, now: float, standing: Standing) -> None:
    """An echo owed for more than two seconds, or a heartbeat that late."""
    fleet = a_fleet()
    worker = ready(fleet, "t0")
    fleet.judge(worker, silent_s, now)

    assert standing is worker.standing


def test_a_suspect_that_speaks_is_ready_again() -> None:
    """And gets sessions again."""
    fleet = a_fleet()
    worker = ready(fleet, "t0")
    fleet.judge(worker, 9.0, 0.0)
    suspected = fleet.pick("target")
    fleet.judge(worker, 0.0, 0.0)

    assert (None, worker, "") == (suspected, fleet.pick("target"), worker.reason)


@pytest.mark.parametrize("standing", [Standing.CONNECTING, Standing.LOST, Standing.REFUSED])
def test_silence_is_weighed_only_where_work_is_done(standing: Standing) -> None:
    """A worker that is lost is not suspect, it is lost."""
    fleet = a_fleet()
    worker = ready(fleet, "t0")
    worker.standing = standing
    fleet.judge(worker, 9.0, 99.0)

    assert standing is worker.standing


def test_a_lost_stream_says_why() -> None:
    """Until the next one stands."""
    fleet = a_fleet()
    worker = ready(fleet, "t0")
    fleet.disconnected(worker, "unavailable: reset")
    lost = (worker.standing, worker.reason)
    fleet.connected(worker)

    assert (Standing.LOST, "unavailable: reset") == lost
    assert (Standing.READY, "", 2) == (worker.standing, worker.reason, worker.connects)


def test_the_emptiest_gets_the_next_session() -> None:
    """Of those that are ready, of that role; ties to the lower name."""
    fleet = a_fleet()
    workers = {name: ready(fleet, name) for name in ("t2", "t1", "t0")}
    ready(fleet, "d0", "draft")
    workers["t0"].sessions.update({1, 2})
    workers["t1"].sessions.add(3)
    workers["t2"].sessions.add(4)
    first = fleet.pick("target")
    fleet.disconnected(workers["t1"], "gone")

    assert (workers["t1"], workers["t2"]) == (first, fleet.pick("target"))


def test_nobody_is_picked_where_nobody_is() -> None:
    """A service without a draft still serves."""
    fleet = a_fleet()
    ready(fleet, "t0")

    assert fleet.pick("draft") is None
    assert repr(fleet.pick("target")) == "Worker(t0, ready, sessions=0)"
