"""What holds of a service however it was started, with Ray and without: it is found, it heals, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from specwire.client import Final, SyncClient, Tokens
from specwire.law.errors import SpecwireError
from specwire.v1 import inference_pb2 as pb
from tests.on_ray.conftest import Service, family

PROMPT = (1, 2, 3)
NUM_TOKENS = 300
PATIENCE_S = 120.0
FROZEN_S = 2.5


def answer(
    client: SyncClient, on_token: Callable[[int], None] = lambda count: None, **fields: object
) -> tuple[list[int], Final]:
    """One seeded request. `on_token` hears how many tokens there are so far."""
    ids: list[int] = []
    for event in client.generate(
        prompt_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=5, ignore_eos=True, **fields
    ):
        if isinstance(event, Tokens):
            ids.extend(event.ids)
            on_token(len(ids))
        elif isinstance(event, Final):
            return ids, event
    raise AssertionError("no final event")


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[SyncClient]:
    """A client that lives through what happens to the service."""
    with service.client() as found:
        yield found


@pytest.fixture(scope="module")
def plain(client: SyncClient) -> list[int]:
    """The tokens without speculation."""
    return answer(client, num_speculative_tokens=0)[0]


def healed(client: SyncClient) -> pb.GetStatsResponse:
    """The service's state once all workers are ready."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        try:
            stats = client.stats()
        except SpecwireError:
            stats = pb.GetStatsResponse()
        if stats.ready and [worker.state for worker in stats.workers] == ["ready", "ready"]:
            return stats
        time.sleep(0.1)
    raise AssertionError(f"not healed: {stats}")


def test_it_speculates_and_says_the_same(client: SyncClient, plain: list[int]) -> None:
    """With the draft in use."""
    ids, final = answer(client)

    assert plain == ids
    assert final.speculation.accepted_by_model > 0


def test_every_role_is_a_process_of_its_own(service: Service) -> None:
    """Coordinator, target and draft."""
    assert 3 == len({service.pid(name) for name in ("coordinator", "target-0", "draft-0")})


def test_another_shell_finds_it(service: Service) -> None:
    """By the state file alone."""
    status = json.loads(service.command("status", "--json").stdout)
    said = service.command("generate", "1,2,3", "--ids", "--max-tokens", "5", "--seed", "1")

    assert (True, ["draft-0", "target-0"]) == (status["ready"], sorted(worker["name"] for worker in status["workers"]))
    assert (0, 5) == (said.returncode, len(said.stdout.split()))


def test_a_second_up_is_refused(service: Service) -> None:
    """With what runs, and at once."""
    done = service.command("up", "table")

    assert 2 == done.returncode
    assert f"already running: {service.folder.path / 'topology.yaml'} at {service.running.endpoint}" in done.stderr


def test_nothing_listens_beyond_loopback(service: Service) -> None:
    """Ray's own ports included: whoever reaches a Ray can run any code."""
    ours = {process.pid for process in family(service.running)}
    listening = [
        (each.pid, each.laddr.ip.removeprefix("::ffff:"))
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.pid in ours
    ]

    assert {"127.0.0.1"} == {address for _, address in listening}
    assert {service.pid(name) for name in ("coordinator", "target-0", "draft-0")} <= {pid for pid, _ in listening}


@pytest.mark.parametrize("victim", ["draft-0", "target-0", "coordinator"])
def test_a_killed_role_comes_back_and_no_token_is_lost(
    service: Service, client: SyncClient, plain: list[int], victim: str
) -> None:
    """kill -9 in mid-stream: the same tokens, no error, and afterwards the draft is in use again (reports 132 and 134)."""
    former = service.pid(victim)
    killed = threading.Event()

    def kill(count: int) -> None:
        if count > NUM_TOKENS // 3 and not killed.is_set():
            killed.set()
            os.kill(former, signal.SIGKILL)

    ids, _ = answer(client, kill)
    healed(client)
    again, final = answer(client)

    assert (True, plain, plain) == (killed.is_set(), ids, again)
    assert final.speculation.accepted_by_model > 0
    assert former != service.pid(victim)


@pytest.mark.parametrize("victim", ["draft-0", "target-0", "coordinator"])
def test_a_frozen_role_goes_on(service: Service, client: SyncClient, plain: list[int], victim: str) -> None:
    """SIGSTOP in mid-stream, for longer than silence is taken for life, then SIGCONT: the same tokens, by the same process."""
    frozen = service.pid(victim)
    thaw = threading.Timer(FROZEN_S, os.kill, (frozen, signal.SIGCONT))

    def freeze(count: int) -> None:
        if count > NUM_TOKENS // 3 and not thaw.is_alive() and thaw.ident is None:
            os.kill(frozen, signal.SIGSTOP)
            thaw.start()

    ids, _ = answer(client, freeze)
    thaw.join()
    healed(client)
    again, final = answer(client)

    assert (plain, plain, frozen) == (ids, again, service.pid(victim))
    assert final.speculation.accepted_by_model > 0
