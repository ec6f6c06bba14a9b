"""Frames to bytes and back; what is malformed costs its own task and nobody else's; a round costs few bytes."""

from __future__ import annotations

import dataclasses

import pytest

from specwire.law.errors import InvalidArgument
from specwire.law.tasks import (
    Answer,
    Failure,
    ProposeTask,
    Reason,
    Refusal,
    SessionId,
    StepTiming,
    TaskTiming,
    VerifyTask,
)
from specwire.law.values import GREEDY, MAX_U32, MAX_U64, Block, Law, Opening, SamplingSpec, Source, SparseLaw, Verdict
from specwire.v1 import draft_pb2, target_pb2, types_pb2
from specwire.wire.codec import (
    AnswerFrame,
    Hello,
    Kind,
    TaskFrame,
    decode_answer_frame,
    decode_law,
    decode_sampling,
    decode_task_frame,
    encode_answer_frame,
    encode_law,
    encode_sampling,
    encode_task_frame,
)

ME = MAX_U64 - 2
"""The coordinator's incarnation."""
SESSION = SessionId(ME, 2**40)
OPENING = Opening(Law.REJECTION, SamplingSpec(0.5, 40, 0.75, 0.25), MAX_U64, 2, 9)
LAWS = (SparseLaw((7, 2**32 - 1), (1, 2**31)), SparseLaw((8,), (1,)))
TIMING = TaskTiming(4, 1, 2, 30)
STEP = StepTiming(1, 2, 3, 4, 5, 6, 7, 8, 2**40)

PROPOSE = ProposeTask(SESSION, 3, 4, 0, OPENING.fingerprint(), (5, 6), OPENING, 7, b"trace", group=2, num_tokens=8)
VERIFY = VerifyTask(SESSION, 3, 4, 2, MAX_U64, (5, 6), None, 7, b"trace", block=Block((7, 8), LAWS))
GROUPED = dataclasses.replace(VERIFY, group=3)
LAST_GROUP = dataclasses.replace(VERIFY, group=MAX_U32)
PREFILL = VerifyTask(SESSION, MAX_U32, MAX_U32, MAX_U32, 0, (), None, MAX_U32, prefill_only=True)


@pytest.mark.parametrize(
    ("kind", "frame"),
    [
        (Kind.PROPOSE, TaskFrame()),
        (Kind.VERIFY, TaskFrame(hello=Hello(ME, 1, 30_000, 2))),
        (Kind.PROPOSE, TaskFrame(tasks=(PROPOSE,), closes=(SESSION, SessionId(ME, 1)), echo=MAX_U64)),
        (Kind.VERIFY, TaskFrame(tasks=(VERIFY, PREFILL), due_sessions=2, due_us=3)),
        (Kind.VERIFY, TaskFrame(tasks=(GROUPED, VERIFY, LAST_GROUP), due_sessions=2, due_us=3, due_group=MAX_U32)),
        (Kind.VERIFY, TaskFrame(Hello(ME, 2, 3, 4), (GROUPED,), (SESSION,), 5, 6, 7, 8)),
    ],
)
def test_task_frames_come_back(kind: Kind, frame: TaskFrame) -> None:
    """Every field of every task survives the wire."""

    assert frame == decode_task_frame(kind, encode_task_frame(kind, frame), ME)


RESULTS = [
    Refusal(Reason.HASH, 9, MAX_U64, "why"),
    Refusal(Reason.CLOSED),
    Failure("it broke", bad_law=True),
    Failure(""),
]


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        *((kind, result) for kind in Kind for result in RESULTS),
        (Kind.PROPOSE, Block((7, 8), LAWS)),
        (Kind.PROPOSE, Block()),
        (Kind.VERIFY, Verdict(2, 0)),
        (Kind.VERIFY, Verdict(0, MAX_U32)),
        (Kind.VERIFY, None),
    ],
)
def test_answers_come_back(kind: Kind, result: Verdict | Block | Refusal | Failure | None) -> None:
    """Every kind of result, with every field of answer and frame."""
    frame = AnswerFrame(MAX_U64, (Answer(SESSION, 3, 4, 5, result, TIMING),), STEP, 6)

    assert frame == decode_answer_frame(kind, encode_answer_frame(kind, frame), ME)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_number(reason: Reason) -> None:
    """None of them travels as another."""
    frame = AnswerFrame(answers=(Answer(SESSION, 1, 1, 0, Refusal(reason)),))

    assert frame == decode_answer_frame(Kind.VERIFY, encode_answer_frame(Kind.VERIFY, frame), ME)


def test_blocks_of_a_draft_say_so() -> None:
    """Counters tell the draft's blocks from n-grams."""
    raw = encode_answer_frame(Kind.PROPOSE, AnswerFrame(answers=(Answer(SESSION, 1, 1, 3, Block((7,))),)))
    result = decode_answer_frame(Kind.PROPOSE, raw, ME).answers[0].result

    assert isinstance(result, Block)
    assert Source.DRAFT_MODEL is result.source


def test_no_group_costs_nothing() -> None:
    """Nor does a frame that announces nobody."""
    plain, grouped = (
        encode_task_frame(Kind.VERIFY, TaskFrame(tasks=(dataclasses.replace(VERIFY, group=group),), due_group=group))
        for group in (0, 1)
    )

    assert (4, b"") == (len(grouped) - len(plain), encode_task_frame(Kind.VERIFY, TaskFrame()))


def test_sessions_take_the_streams_incarnation() -> None:
    """Only the counter travels; the stream's Hello completes it."""
    raw = encode_task_frame(Kind.PROPOSE, TaskFrame(tasks=(PROPOSE,), closes=(SESSION,)))
    frame = decode_task_frame(Kind.PROPOSE, raw, 77)

    assert [SessionId(77, SESSION.counter)] * 2 == [frame.tasks[0].session, frame.closes[0]]


def test_hello_names_the_sessions_of_its_own_frame() -> None:
    """The first frame may carry tasks already."""
    raw = encode_task_frame(Kind.VERIFY, TaskFrame(Hello(ME, 1, 2, 3), (VERIFY,)))

    assert decode_task_frame(Kind.VERIFY, raw, None).tasks == (VERIFY,)


def test_tasks_before_hello_are_refused() -> None:
    """Whose they are nobody could say."""
    raw = encode_task_frame(Kind.VERIFY, TaskFrame(tasks=(VERIFY,)))

    with pytest.raises(InvalidArgument, match="hello"):
        decode_task_frame(Kind.VERIFY, raw, None)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x05ab", b"\x08" * 3])
def test_bytes_that_are_no_frame_are_refused(kind: Kind, raw: bytes) -> None:
    """Neither end trusts the other to speak protobuf."""
    with pytest.raises(InvalidArgument, match="frame"):
        decode_task_frame(kind, raw, ME)
    with pytest.raises(InvalidArgument, match="frame"):
        decode_answer_frame(kind, raw, ME)


def _bad_proposes() -> list[draft_pb2.ProposeTask]:
    opening = types_pb2.Open(law=types_pb2.LAW_SHARED_NOISE, prompt_length=1)
    no_law, no_prompt, too_hot = (types_pb2.Open() for _ in range(3))
    for each in (no_law, no_prompt, too_hot):
        each.CopyFrom(opening)
    no_law.law = types_pb2.LAW_UNSPECIFIED
    no_prompt.prompt_length = 0
    too_hot.sampling.temperature = float("nan")
    return [
        draft_pb2.ProposeTask(session=9, epoch=3, number=4, keep=0, append=[1]),
        draft_pb2.ProposeTask(session=9, epoch=3, number=4, keep=1, open=opening),
        *(draft_pb2.ProposeTask(session=9, epoch=3, number=4, open=each) for each in (no_law, no_prompt, too_hot)),
    ]


@pytest.mark.parametrize("bad", _bad_proposes(), ids=["no open", "needless open", "no law", "no prompt", "temperature"])
def test_a_malformed_propose_is_refused_alone(bad: draft_pb2.ProposeTask) -> None:
    """It is answered as invalid under its own number; the tasks around it are served."""
    frame = draft_pb2.ProposeRequest.FromString(encode_task_frame(Kind.PROPOSE, TaskFrame(tasks=(PROPOSE,))))
    frame.tasks.append(bad)
    frame.tasks.append(frame.tasks[0])
    decoded = decode_task_frame(Kind.PROPOSE, frame.SerializeToString(), ME)
    (answer,) = decoded.invalid

    assert decoded.tasks == (PROPOSE, PROPOSE)
    assert (SessionId(ME, 9), 3, 4) == (answer.session, answer.epoch, answer.number)
    assert isinstance(answer.result, Refusal)
    assert answer.result.reason is Reason.INVALID


@pytest.mark.parametrize(
    "bad",
    [
        target_pb2.VerifyTask(session=9, keep=1),
        target_pb2.VerifyTask(session=9, keep=1, append=[1], block=[2], prefill_only=True),
        target_pb2.VerifyTask(session=9, keep=1, append=[1], block=[2], draft_laws=[types_pb2.SparseLaw()]),
        target_pb2.VerifyTask(session=9, keep=1, append=[1], draft_laws=[types_pb2.SparseLaw(ids=[1], weights=[1])]),
    ],
    ids=["no row", "block in prefill", "empty law", "law without token"],
)
def test_a_malformed_verify_is_refused_alone(bad: target_pb2.VerifyTask) -> None:
    """As for a draft."""
    frame = target_pb2.VerifyRequest.FromString(encode_task_frame(Kind.VERIFY, TaskFrame(tasks=(VERIFY,))))
    frame.tasks.append(bad)
    decoded = decode_task_frame(Kind.VERIFY, frame.SerializeToString(), ME)

    assert decoded.tasks == (VERIFY,)
    assert [answer.result.reason for answer in decoded.invalid if isinstance(answer.result, Refusal)] == [
        Reason.INVALID
    ]


def test_an_answer_that_is_no_value_fails_its_own_task() -> None:
    """A draft gone wrong on one session must not take the stream of all others down."""
    good = Answer(SESSION, 1, 2, 3, Block((7,)))
    frame = draft_pb2.ProposeResponse.FromString(encode_answer_frame(Kind.PROPOSE, AnswerFrame(answers=(good, good))))
    frame.answers[0].laws.add(ids=[1, 1], weights=[1, 2])
    bad, after = decode_answer_frame(Kind.PROPOSE, frame.SerializeToString(), ME).answers

    assert good == after
    assert (bad.epoch, bad.number, bad.session) == (1, 2, SESSION)
    assert isinstance(bad.result, Failure)
    assert "draft_law.ids" in bad.result.detail


@pytest.mark.parametrize("number", [0, 99])
def test_a_refusal_without_a_known_reason_fails_its_own_task(number: int) -> None:
    """A newer worker may know more reasons."""
    frame = target_pb2.VerifyResponse()
    frame.answers.add(session=1, epoch=1, number=2).refusal.reason = number  # type: ignore[assignment]
    (answer,) = decode_answer_frame(Kind.VERIFY, frame.SerializeToString(), ME).answers

    assert Failure(f"malformed answer: refusal.reason: got {number}, must be a known reason") == answer.result


def test_long_times_are_the_longest_the_wire_holds() -> None:
    """A task that was held up for more than 71 minutes is still answered."""
    long = 2**40
    timing = TaskTiming(long, long, long, long)
    frame = AnswerFrame(answers=(Answer(SESSION, 1, 1, 3, Block((7,)), timing),), step=StepTiming(long, long, long))
    decoded = decode_answer_frame(Kind.PROPOSE, encode_answer_frame(Kind.PROPOSE, frame), ME)

    assert TaskTiming(MAX_U32, MAX_U32, MAX_U32, MAX_U32) == decoded.answers[0].timing
    assert StepTiming(MAX_U32, MAX_U32, MAX_U32) == decoded.step


def test_compute_of_one_step_is_told_once() -> None:
    """The step's time stands in the frame; a verdict that took just this step does not repeat it."""
    answer = Answer(SESSION, 1, 1, 3, Verdict(0, 1), TaskTiming(compute_us=6))
    told = encode_answer_frame(Kind.VERIFY, AnswerFrame(answers=(answer,), step=StepTiming(1, 2, 3)))
    message = target_pb2.VerifyResponse.FromString(told).answers[0]

    assert message.compute_us == 0
    assert decode_answer_frame(Kind.VERIFY, told, ME).answers == (answer,)


def test_compute_without_a_step_is_told() -> None:
    """However short it was."""
    frame = AnswerFrame(answers=(Answer(SESSION, 1, 1, 3, None, TaskTiming(compute_us=1)),))

    assert frame == decode_answer_frame(Kind.VERIFY, encode_answer_frame(Kind.VERIFY, frame), ME)


def test_compute_of_several_steps_is_told() -> None:
    """A prompt chunk split over steps took longer than the last of them."""
    answer = Answer(SESSION, 1, 1, 3, None, TaskTiming(compute_us=600))
    frame = AnswerFrame(answers=(answer,), step=StepTiming(1, 2, 3))

    assert decode_answer_frame(Kind.VERIFY, encode_answer_frame(Kind.VERIFY, frame), ME).answers == (answer,)


@pytest.mark.parametrize("spec", [GREEDY, SamplingSpec(), SamplingSpec(0.5, 3, 0.25, 0.125)])
def test_sampling_comes_back(spec: SamplingSpec) -> None:
    """What float32 holds comes back as it was."""

    assert spec == decode_sampling(encode_sampling(spec))


def test_absent_sampling_is_greedy_without_filters() -> None:
    """The proto says what absence means."""

    assert decode_sampling(types_pb2.Sampling()) == GREEDY


def test_explicit_top_p_of_zero_is_refused() -> None:
    """Absent is 1; a zero that was sent is a zero."""
    with pytest.raises(InvalidArgument, match="top_p"):
        decode_sampling(types_pb2.Sampling(top_p=0.0))


@pytest.mark.parametrize("law", list(Law))
def test_laws_come_back(law: Law) -> None:
    """Each law has a number of its own."""

    assert law is decode_law(encode_law(law), default=None)


def test_an_unspecified_law_is_the_default_where_there_is_one() -> None:
    """A request may leave the law to the server, a task may not."""

    assert decode_law(0, Law.REJECTION) is Law.REJECTION
    with pytest.raises(InvalidArgument, match="law"):
        decode_law(0)


def test_an_unknown_law_is_refused_even_where_there_is_a_default() -> None:
    """An answer under another law than the one asked for would be a wrong answer."""
    with pytest.raises(InvalidArgument, match="law"):
        decode_law(3, Law.SHARED_NOISE)


# ------------------------------------------------------------------ size

IDS = (40_001, 39_999, 41_234, 40_777)
BUSY = TaskTiming(residence_us=100_000, parse_us=150, queue_us=20_000, compute_us=78_000)
BUSY_STEP = StepTiming(
    900, 76_000, 1_100, 90, rows=40, prefill_rows=0, sessions=8, previous_serialise_us=80, step=10**6
)


def round_bytes(sessions: int, deadline_ms: int, due: int, group: int) -> float:
    """Bytes of one round of `sessions` that share their frames, for each of them: k = 4, all accepted, not traced."""
    session = SessionId(ME, 1234)
    place = {
        "session": session,
        "epoch": 100,
        "number": 300,
        "keep": 500,
        "keep_hash": 2**63 + 7,
        "time_left_ms": deadline_ms,
    }
    propose = ProposeTask(**place, append=IDS[:2], num_tokens=4)  # type: ignore[arg-type]
    verify = VerifyTask(**place, append=IDS[:1], block=Block(IDS), group=group)  # type: ignore[arg-type]
    block = Answer(session, 100, 300, 505, Block(IDS), BUSY)
    verdict = Answer(session, 100, 300, 505, Verdict(4, IDS[0]), dataclasses.replace(BUSY, compute_us=78_001))
    frames = [
        encode_task_frame(Kind.PROPOSE, TaskFrame(tasks=(propose,) * sessions)),
        encode_answer_frame(Kind.PROPOSE, AnswerFrame(answers=(block,) * sessions, step=BUSY_STEP)),
        encode_task_frame(
            Kind.VERIFY,
            TaskFrame(
                tasks=(verify,) * sessions,
                due_sessions=due,
                due_us=100_000 if due else 0,
                due_group=group if due else 0,
            ),
        ),
        encode_answer_frame(Kind.VERIFY, AnswerFrame(answers=(verdict,) * sessions, step=BUSY_STEP)),
    ]
    return sum(map(len, frames)) / sessions


@pytest.mark.parametrize(
    ("sessions", "deadline_ms", "due", "group"), [(1, 0, 0, 0), (2, 60_000, 2, 0), (8, 60_000, 8, 0), (8, 60_000, 8, 2)]
)
def test_a_round_costs_at_most_200_bytes(sessions: int, deadline_ms: int, due: int, group: int) -> None:
    """Both workers, both directions, alone, in company and in turns, timings included."""

    assert round_bytes(sessions, deadline_ms, due, group) <= 200
