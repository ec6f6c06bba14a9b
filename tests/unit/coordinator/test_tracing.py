"""A request's spans: one tree, each span once, however the request ends, and a bounded number of them."""

from __future__ import annotations

import pytest

from coordinator.clock import RequestClock
from coordinator.observe import NO_CALL, Call, Observers
from coordinator.session import RequestSpec, Session
from coordinator.tracing import RequestTracing
from specwire.law.errors import InvalidArgument, NoRoom, OurFault
from specwire.law.values import Law, SamplingSpec, Source
from specwire.spans import unpack
from specwire.v1 import inference_pb2 as pb
from specwire.wire.stopwatch import Passage, now_ns
from tests.support.spans import ListSink, Written, check_tree

WAY = Passage(wait_us=10, transfer_us=200, queue_us=30, compute_us=400, overhead_us=50)
SECRET = 424_242
"""A token of the prompt. It must be nowhere."""


class Play:
    """A coordinator that only does what observers hear of."""

    def __init__(self, detail: str = "round", sampled: bool = True) -> None:
        self.sink = ListSink(sampled)
        self.tracing = RequestTracing(self.sink, rounds=detail == "round")

    def open(self, call: Call = NO_CALL, seed: int = 7, max_tokens: int = 100) -> Session:
        spec = RequestSpec(
            "req-1",
            (1, SECRET),
            SamplingSpec(temperature=0.5),
            Law.SHARED_NOISE,
            seed,
            max_tokens,
            (),
            frozenset(),
            4,
            4,
            "auto",
        )
        session = Session(1, spec, RequestClock(), None, call)
        session.target_name, session.draft_name = "target-0", "draft-0"
        self.tracing.opened(session)
        return session

    def begin(self, session: Session, drafting: bool = True) -> tuple[bytes, bytes]:
        session.clock.begin_round(now_ns())
        traces = self.tracing.round_begun(session)
        if drafting:
            session.clock.round.draft_ready_ns = session.to_draft.ready_ns = now_ns()
        else:
            self.ask_target(session)
        return traces

    def ask_target(self, session: Session) -> None:
        session.to_target.ready_ns = now_ns()
        session.clock.round.target_ready_ns = session.clock.round.target_ready_ns or session.to_target.ready_ns

    def block(self, session: Session, tokens: int = 4) -> None:
        session.clock.draft_passage(WAY)
        self.tracing.drafted(session, WAY, tokens)
        self.ask_target(session)

    def verdict(self, session: Session, drafted: int = 4, accepted: int = 3) -> None:
        source = Source.DRAFT_MODEL if drafted else Source.NONE
        session.tally.round(source, drafted, accepted)
        session.clock.target_passage(WAY)
        session.generated += accepted + 1
        self.tracing.round_done(session, session.tally.rounds - 1, source, drafted, accepted, accepted + 1, WAY)

    def round(self, session: Session) -> tuple[bytes, bytes]:
        traces = self.begin(session)
        self.block(session)
        self.verdict(session)
        return traces

    def end(self, session: Session, outcome: str) -> None:
        session.over, session.outcome, session.clock.ended_ns = True, outcome, now_ns()
        if outcome == "finished":
            session.out.append(pb.GenerateResponse(final=pb.Final(finish_reason=pb.FINISH_REASON_LENGTH)))
        self.tracing.ended(session)

    def one(self, name: str) -> Written:
        (span,) = self.sink.named(name)
        return span


def check(play: Play, parent_of_root: int = 0) -> None:
    """A tree, without the prompt."""
    check_tree(play.sink.spans, parent_of_root)
    for span in play.sink.spans:
        assert not any(str(SECRET) in str(value) for value in span.attributes.values())


def test_a_request_of_two_rounds_is_one_tree() -> None:
    """generate > round > draft.propose, target.verify, with the numbers of the request's own tally."""
    play = Play()
    session = play.open(Call("chat", "m"))
    play.round(session)
    play.begin(session, drafting=False)
    play.verdict(session, drafted=0, accepted=0)
    play.end(session, "finished")

    check(play)
    assert [span.name for span in play.sink.spans] == [
        "draft.propose",
        "target.verify",
        "round",
        "target.verify",
        "round",
        "generate",
    ]
    top = play.one("generate").attributes
    assert top["gen_ai.operation.name"] == "chat"
    assert top["gen_ai.request.model"] == "m"
    assert top["gen_ai.request.seed"] == 7
    assert top["gen_ai.response.finish_reasons"] == ["length"]
    assert top["gen_ai.usage.input_tokens"] == 2
    assert top["gen_ai.usage.output_tokens"] == 5
    assert (top["specwire.rounds"], top["specwire.drafted"], top["specwire.accepted"]) == (2, 4, 3)
    assert top["specwire.acceptance_rate"] == 0.75
    assert top["specwire.draft.transfer_us"] == 200
    assert top["specwire.target.compute_us"] == 800
    assert play.one("generate").error is None
    assert play.one("draft.propose").us == pytest.approx(WAY.total_us, abs=1)
    assert play.sink.named("target.verify")[0].attributes["specwire.accepted"] == 3
    assert [span.attributes["specwire.block_source"] for span in play.sink.named("round")] == ["draft_model", "none"]


def test_a_block_that_took_two_tasks_tells_of_both() -> None:
    """A draft ran ahead from a wrong guess, and drafted anew: the span says what the round's books say."""
    play = Play()
    session = play.open()
    play.begin(session)
    session.clock.draft_passage(WAY)
    play.block(session)
    play.verdict(session)

    span = play.one("draft.propose")
    said = span.attributes
    assert session.clock.round.draft == WAY + WAY
    assert span.us == pytest.approx((WAY + WAY).total_us, abs=1)
    assert (400, 800) == (said["specwire.transfer_us"], said["specwire.compute_us"])


def test_every_timing_of_the_final_event_is_an_attribute() -> None:
    """What the client is told and what the span says is the same, field by field."""
    play = Play("request")
    session = play.open()
    play.round(session)
    play.end(session, "finished")

    timing = session.clock.timing()
    said = play.one("generate").attributes
    for field in pb.Timing.DESCRIPTOR.fields:
        name = field.name.replace("draft_", "draft.", 1).replace("target_", "target.", 1)
        assert said[f"specwire.{name}"] == getattr(timing, field.name)


def test_tasks_carry_the_calls_as_parents() -> None:
    """What a worker does for a task hangs below draft.propose or target.verify."""
    play = Play()
    session = play.open()
    draft, target = play.round(session)
    play.end(session, "finished")

    for trace, name in ((draft, "draft.propose"), (target, "target.verify")):
        ref = unpack(trace)
        assert ref is not None
        assert (ref.trace_id, ref.span_id, ref.flags) == (play.one(name).trace_id, play.one(name).span_id, 1)


def test_detail_request_has_sums_and_nothing_on_the_wire() -> None:
    """One span a request, whatever its length."""
    play = Play("request")
    session = play.open()
    traces = [play.round(session) for _ in range(500)]
    play.end(session, "finished")

    assert set(traces) == {(b"", b"")}
    assert [span.name for span in play.sink.spans] == ["generate"]
    assert play.one("generate").attributes["specwire.rounds"] == 500


def test_a_request_that_is_not_sampled_leaves_nothing() -> None:
    """No bytes on the wire, no span, no state."""
    play = Play(sampled=False)
    session = play.open()
    assert play.round(session) == (b"", b"")
    play.end(session, "finished")

    assert play.sink.spans == []
    assert repr(play.tracing).startswith("RequestTracing(requests=0")


@pytest.mark.parametrize(("rounds", "traced"), [(64, 64), (500, 64 + 28), (2000, 64 + 121), (5000, 256)])
def test_the_number_of_spans_is_bounded(rounds: int, traced: int) -> None:
    """The first 64 rounds, then one in 16, at most 256; sums tell of all (report 160)."""
    play = Play()
    session = play.open()
    for _ in range(rounds):
        play.round(session)
    play.end(session, "finished")

    assert len(play.sink.named("round")) == traced
    assert len(play.sink.spans) == 1 + 3 * traced
    top = play.one("generate").attributes
    assert (top["specwire.rounds"], top["specwire.rounds_traced"]) == (rounds, traced)
    check(play)


@pytest.mark.parametrize("moment", ["waiting", "drafting", "verifying", "between"])
@pytest.mark.parametrize("outcome", ["cancelled", "failed"])
def test_every_span_ends_once_whatever_ends_the_request(moment: str, outcome: str) -> None:
    """Before, during and after the first token; a stream that is never read ends by its deadline (report 152)."""
    play = Play()
    session = play.open()
    expected = ["generate"]
    if moment in ("drafting", "verifying"):
        play.begin(session)
        expected = ["draft.propose", "round", "generate"]
    if moment == "verifying":
        play.block(session)
        expected.insert(1, "target.verify")
    if moment == "between":
        play.round(session)
        expected = ["draft.propose", "target.verify", "round", "generate"]
    if outcome == "failed":
        session.error = OurFault("the text of a bug")
    play.end(session, outcome)
    play.tracing.ended(session)

    check(play)
    assert [span.name for span in play.sink.spans] == expected
    top = play.one("generate")
    assert top.attributes["specwire.outcome"] == outcome
    assert "gen_ai.response.finish_reasons" not in top.attributes
    if outcome == "cancelled":
        assert (top.error, top.attributes["rpc.response.status_code"]) == ("cancelled", "CANCELLED")
    else:
        assert (top.error, top.attributes["error.type"]) == ("failed: internal error", "OurFault")
    if moment in ("drafting", "verifying"):
        assert play.one("round").error == outcome


def test_a_fallback_ends_the_call_to_the_draft() -> None:
    """The propose span says why; the round goes on and says it too; a late block adds nothing."""
    play = Play()
    session = play.open()
    play.begin(session)
    play.tracing.fallback(session, "draft_timeout")
    play.ask_target(session)
    play.verdict(session, drafted=0, accepted=0)
    play.tracing.drafted(session, WAY, 4)
    play.end(session, "finished")

    check(play)
    assert play.one("draft.propose").error == "draft_timeout"
    assert play.one("round").attributes["specwire.fallback"] == "draft_timeout"
    assert play.one("round").error is None


def test_the_clients_trace_is_continued() -> None:
    """A W3C traceparent is the parent of generate, and asks the sampler."""
    play = Play()
    session = play.open(Call(trace_parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    play.round(session)
    play.end(session, "finished")

    check(play, 0xB7AD6B7169203331)
    assert play.one("generate").trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    parent = play.sink.asked[0][1]
    assert parent is not None
    assert parent.flags == 1


def test_a_refused_request_has_a_span_that_says_why_without_the_clients_text() -> None:
    """Field and limit are ours; the value is the client's."""
    play = Play()
    play.tracing.refused(
        Call(request_id="r"), RequestClock(), InvalidArgument("stop", "my secret", "without empty strings")
    )
    play.tracing.refused(Call(), RequestClock(), NoRoom("full"))

    first, second = play.sink.spans
    assert first.error == "refused: stop must be without empty strings"
    assert first.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert second.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert "secret" not in repr(play.sink.spans)


def test_seeds_beyond_signed_integers_are_told_as_text() -> None:
    """OTLP has no unsigned integers; half of the seeds would break an export."""
    play = Play()
    for seed in (2**63 - 1, 2**64 - 1):
        play.end(play.open(seed=seed), "finished")

    small, large = (span.attributes for span in play.sink.spans)
    assert (small["gen_ai.request.seed"], small["specwire.seed"]) == (2**63 - 1, str(2**63 - 1))
    assert "gen_ai.request.seed" not in large
    assert large["specwire.seed"] == str(2**64 - 1)


def test_an_observer_that_raises_is_heard_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Serving goes on, and so do the others (report 146)."""

    class Broken(RequestTracing):
        def round_begun(self, session: Session) -> tuple[bytes, bytes]:
            raise ValueError("counters cannot fall")

    play = Play()
    both = Observers([Broken(ListSink(), rounds=True), play.tracing])
    session = play.open()
    traces = [both.round_begun(session) for _ in range(3)]

    assert all(trace[1] for trace in traces)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
