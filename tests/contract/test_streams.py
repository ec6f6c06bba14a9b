"""Streams, for both services alike: how they begin, end, come back, and what is kept or freed by it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time

import grpc
import pytest

from specwire.law.tasks import Reason, Task
from specwire.lm.table_config import Fault, TableConfig
from specwire.v1 import types_pb2
from specwire.wire import rpc
from specwire.wire.codec import PROTOCOL_VERSION, Kind, TaskFrame, encode_task_frame
from specwire.wire.info import decode_worker_info
from tests.contract.harness import (
    Peer,
    at_desk,
    model_of,
    on_a_loop,
    plain,
    refused,
    sizes,
    text,
    tokens_of,
    until,
    until_busy,
    until_empty,
    worker,
)

pytestmark = pytest.mark.parametrize("role", ["draft", "target"])
TABLE = TableConfig(vocab_size=16, seed=3)
HANGS_ONCE = dataclasses.replace(TABLE, faults=(Fault("hang", call=1),))


async def ended(peer: Peer) -> tuple[grpc.StatusCode, str]:
    """Code and text with which the stream ends; frames before it are kept."""
    while True:
        try:
            peer.frames.append(await peer.frame())
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""


@on_a_loop
async def test_welcome_names_the_workers_life(role: str) -> None:
    """The first frame is the Welcome, even when an echo was asked for at once."""
    async with worker(role, TABLE) as server:
        peer = Peer(server, role)
        await peer.connect()
        await peer.send(echo=5)
        first, second = await peer.frame(), await peer.frame()

        assert (first.welcome, second.echo) == (server.incarnation, 5)
        await peer.drop()


@on_a_loop
async def test_another_protocol_version_is_turned_away(role: str) -> None:
    """Both versions are named."""
    async with worker(role, TABLE) as server:
        peer = Peer(server, role)
        await peer.connect(dataclasses.replace(peer.hello, protocol_version=77))

        assert await ended(peer) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            f"protocol versions differ: coordinator 77, {role} {PROTOCOL_VERSION}",
        )
        await peer.drop()


@on_a_loop
async def test_what_is_no_frame_ends_the_stream(role: str) -> None:
    """Garbage, and tasks before Hello. The worker serves the next stream."""
    kind = Kind.VERIFY if role == "target" else Kind.PROPOSE
    async with worker(role, TABLE) as server:
        async with Peer(server, role) as peer:
            await peer.send_raw(b"\xff\xff\xff\xff")
            code, details = await ended(peer)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith("frame: got '4 bytes'")
        channel = rpc.open_channel(server.address)
        call = rpc.raw_stream_call(channel, peer._method)()
        await call.write(encode_task_frame(kind, TaskFrame(tasks=(text().ask(role, 0),))))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await call.details()).startswith("hello: got None")
        await channel.close()
        async with Peer(server, role) as peer:
            assert peer.welcome == server.incarnation


@on_a_loop
async def test_a_stream_that_comes_back_finds_its_sessions(role: str) -> None:
    """No replay: the next task keeps what the former stream brought, and a repeat gets the stored answer."""
    async with worker(role, TABLE) as server:
        session = text()
        async with Peer(server, role) as peer:
            task = session.ask(role, 0)
            first = await peer.one(task)
        async with Peer(server, role, generation=2) as peer:
            again = await peer.one(task)
            session.prefix.extend(tokens_of(first))
            further = await peer.one(session.ask(role, 3))
            calls = await at_desk(server, lambda desk: model_of(server).calls)

        assert again.result == first.result
        assert calls == 2
        assert tokens_of(further) == plain(TABLE, session, 1)


@on_a_loop
async def test_an_answer_that_found_no_stream_is_given_to_the_next(role: str) -> None:
    """The stream breaks during the step. The new one repeats the task and is answered without work."""
    async with worker(role, HANGS_ONCE) as server:
        session = text()
        task = session.ask(role, 0)
        async with Peer(server, role) as peer:
            await peer.send(task)
            await until_busy(server)
        model_of(server).release()
        async with Peer(server, role, generation=2) as peer:
            answer = await peer.one(task)

        assert tokens_of(answer) == plain(TABLE, session, 1)
        assert model_of(server).calls == 1


@on_a_loop
async def test_older_streams_end(role: str) -> None:
    """A newer stream of one coordinator ends the older; an older one that comes late is turned away."""
    async with worker(role, TABLE) as server, Peer(server, role, generation=4) as old:
        async with Peer(server, role, generation=5):
            assert await ended(old) == (grpc.StatusCode.UNAVAILABLE, "generation 5 of this stream took over")
            late = Peer(server, role, generation=3)
            await late.connect()
            assert await ended(late) == (
                grpc.StatusCode.UNAVAILABLE,
                "stale stream: generation 3 after a higher one",
            )
            await late.drop()
        assert (await sizes(server))["peers"] == 1


@on_a_loop
async def test_sessions_lapse_after_the_lease(role: str) -> None:
    """A coordinator that never returns costs nothing in the end."""
    async with worker(role, TABLE) as server:
        async with Peer(server, role, lease_ms=20) as peer:
            await peer.ask(text(counter=1).ask(role, 0), text(counter=2).ask(role, 0))
            await peer.send(closes=(text(counter=2).id,))
            await peer.echo()
            assert (await sizes(server))["sessions"] == 1
        await until_empty(server)


@on_a_loop
async def test_closed_sessions_stay_closed(role: str) -> None:
    """The queued task is dropped, the slot is free at once, a late task cannot bring the session back."""
    async with worker(role, HANGS_ONCE, slots=2) as server, Peer(server, role) as peer:
        blocker, session = text(counter=1), text(counter=2)
        blocked = blocker.ask(role, 0)
        await peer.send(blocked)
        await until_busy(server)
        await peer.send(session.ask(role, 0))
        await peer.send(closes=(session.id,))
        await peer.echo()
        model_of(server).release()
        await peer.answers(blocked)
        late, other = session.ask(role, 0), text(counter=3).ask(role, 0)
        late_answer, other_answer = await peer.ask(late, other)

        assert refused(late_answer) == (Reason.CLOSED, 0, 0)
        assert tokens_of(other_answer) == plain(TABLE, text(), 1)
        assert model_of(server).calls == 2
        assert (await sizes(server))["tombstones"] == 1


@on_a_loop
async def test_an_echo_does_not_wait_for_the_engine(role: str) -> None:
    """The link can be measured while a step hangs."""
    async with worker(role, HANGS_ONCE) as server, Peer(server, role) as peer:
        await peer.send(text().ask(role, 0))
        await until_busy(server)
        await peer.echo(7)

        assert not any(frame.answers for frame in peer.frames)
        model_of(server).release()


@on_a_loop
async def test_two_coordinators_do_not_meet(role: str) -> None:
    """The same counters, other texts; closing one's session leaves the other's."""
    async with worker(role, TABLE) as server, Peer(server, role, 1) as one, Peer(server, role, 2) as two:
        mine, yours = text((1, 2, 3), incarnation=1), text((9, 8, 7), incarnation=2)
        my_answer = await one.one(mine.ask(role, 0))
        your_answer = await two.one(yours.ask(role, 0))
        await one.send(closes=(mine.id,))
        await one.echo()
        yours.prefix.extend(tokens_of(your_answer))

        assert tokens_of(my_answer) == plain(TABLE, mine, 1)
        assert tokens_of(await two.one(yours.ask(role, 3))) == plain(TABLE, yours, 1)


@on_a_loop
async def test_full_means_no_room_but_orphans_give_way(role: str) -> None:
    """A live coordinator's sessions keep their slots; those of a lost stream make room for whoever is here."""
    async with worker(role, TABLE, slots=2) as server:
        async with Peer(server, role, 1) as gone:
            await gone.ask(text(counter=1).ask(role, 0))
        async with Peer(server, role, 2) as here:
            first = text(counter=1, incarnation=2)
            second = text(counter=2, incarnation=2)
            third = text(counter=3, incarnation=2)
            answers = await here.ask(first.ask(role, 0), second.ask(role, 0))
            full = await here.one(third.ask(role, 0))
            await here.send(closes=(first.id,))
            fits = await here.one(third.ask(role, 0))

        assert [tokens_of(answer) for answer in answers] == [plain(TABLE, first, 1)] * 2
        assert refused(full) == (Reason.NO_ROOM, 0, 0)
        assert tokens_of(fits) == plain(TABLE, third, 1)


@on_a_loop
async def test_a_thousand_sessions_leave_nothing_behind(role: str) -> None:
    """Ended at random points, some in work, some twice, some never asked for; then every map is empty (field report 144)."""
    chance = random.Random(5)
    async with worker(role, TABLE, slots=8) as server:
        async with Peer(server, role, lease_ms=1) as peer:
            for round_number in range(125):
                sessions = [text(counter=1 + 8 * round_number + i) for i in range(8)]
                tasks: list[Task] = [session.ask(role, 0) for session in sessions]
                asked = chance.sample(tasks, 5)
                await peer.send(*tasks)
                early = [task.session for task in tasks if task not in asked]
                await peer.send(closes=tuple(early))
                await peer.answers(*asked)
                await peer.send(closes=tuple(session.id for session in sessions))
            await peer.echo()
            assert await at_desk(server, lambda desk: len(desk.table)) == 0
        await until_empty(server)


@on_a_loop
async def test_an_idle_worker_uses_no_cpu(role: str) -> None:
    """Connected, sessions open, nothing to do: the engine thread and the event loop both sleep."""
    async with worker(role, TABLE) as server, Peer(server, role) as peer:
        await peer.one(text().ask(role, 0))
        await peer.echo()
        threads = [thread for thread in threading.enumerate() if thread.name == "engine"] + [threading.current_thread()]
        clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in threads]
        began = [time.clock_gettime(clock) for clock in clocks]
        await asyncio.sleep(0.4)

        assert sum(time.clock_gettime(clock) for clock in clocks) - sum(began) < 0.02


@on_a_loop
async def test_info_and_vocabulary(role: str) -> None:
    """What the worker is, and each id's token."""
    table = dataclasses.replace(TABLE, max_context=99, eos_token_ids=(4, 5))
    async with worker(role, table, slots=3, max_block=6, max_append=77) as server:
        channel = rpc.open_channel(server.address)
        service = f"/specwire.v1.{role.title()}"
        ask_info = channel.unary_unary(
            f"{service}/Info", types_pb2.InfoRequest.SerializeToString, types_pb2.InfoResponse.FromString
        )
        ask_vocabulary = channel.unary_unary(
            f"{service}/Vocabulary",
            types_pb2.VocabularyRequest.SerializeToString,
            types_pb2.VocabularyResponse.FromString,
        )
        info = decode_worker_info((await ask_info(types_pb2.InfoRequest())).info)
        vocabulary = (await ask_vocabulary(types_pb2.VocabularyRequest())).tokens
        await channel.close()

        assert info == server.info
        assert (info.role, info.max_context, info.max_sessions, info.max_block, info.max_append) == (role, 99, 3, 6, 77)
        assert info.eos_token_ids == (4, 5)
        assert tuple(vocabulary) == tuple(b"<%d>" % token for token in range(16))


@on_a_loop
async def test_stopping_answers_what_is_at_hand_and_then_ends(role: str) -> None:
    """Drain: the running step's answer arrives, later streams are turned away, open ones end as unavailable."""
    async with worker(role, HANGS_ONCE) as server, Peer(server, role) as peer:
        session = text()
        task = session.ask(role, 0)

        async def stopped_taking() -> bool:
            return not server._servicer._taking

        await peer.send(task)
        await until_busy(server)
        stopping = asyncio.create_task(server.stop())
        late = [Peer(server, role, incarnation) for incarnation in range(2, 52)]
        await until(stopped_taking)
        for each in late:  # many: a refusal must never overtake the Hello it answers
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
                await each.__aenter__()
        model_of(server).release()
        answer = (await peer.answers(task))[0]
        how = await ended(peer)
        await stopping
        for each in late:
            await each.drop()

        assert tokens_of(answer) == plain(TABLE, session, 1)
        assert how == (grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")
