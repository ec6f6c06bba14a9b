"""Any frame of values comes back from the wire as it was; any bytes at all give a frame or InvalidArgument, nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.law.errors import InvalidArgument
from specwire.law.tasks import (
    Answer,
    Failure,
    ProposeTask,
    Reason,
    Refusal,
    SessionId,
    StepTiming,
    Task,
    TaskTiming,
    VerifyTask,
)
from specwire.law.values import MAX_U32, MAX_U64, Block, Law, Opening, SamplingSpec, SparseLaw, Verdict
from specwire.wire.codec import (
    AnswerFrame,
    Hello,
    Kind,
    TaskFrame,
    decode_answer_frame,
    decode_task_frame,
    encode_answer_frame,
    encode_task_frame,
)

ME = 0x1234_5678_9ABC_DEF0
QUICK = settings(max_examples=50, deadline=None, derandomize=True, database=None)

u32 = st.one_of(st.integers(0, 300), st.integers(0, MAX_U32))
u64 = st.one_of(st.integers(0, 300), st.integers(0, MAX_U64))
tokens = st.lists(u32, max_size=5).map(tuple)
sessions = st.builds(SessionId, st.just(ME), u64)
kinds = st.sampled_from(Kind)


def fraction(low: float, high: float, **more: Any) -> st.SearchStrategy[float]:
    """What float32 can hold, since that is what travels."""
    return st.floats(low, high, width=32, **more)


specs = st.builds(
    SamplingSpec,
    fraction(0, 100),
    u32,
    fraction(0, 1, exclude_min=True),
    fraction(0, 1),
)
openings = st.builds(Opening, st.sampled_from(Law), specs, u64, u32, st.integers(1, MAX_U32))


@st.composite
def sparse_laws(draw: st.DrawFn) -> SparseLaw:
    """Up to four tokens with positive weights."""
    ids = draw(st.lists(u32, min_size=1, max_size=4, unique=True))
    return SparseLaw(tuple(ids), tuple(draw(st.integers(1, MAX_U32 // 4)) for _ in ids))


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """With a law for each token, or none."""
    drafted = draw(tokens)
    return Block(drafted, tuple(draw(sparse_laws()) for _ in drafted) if draw(st.booleans()) else ())


@st.composite
def tasks(draw: st.DrawFn, kind: Kind) -> Task:
    """One sound task."""
    keep = draw(u32)
    fields: dict[str, Any] = {
        "session": draw(sessions),
        "epoch": draw(u32),
        "number": draw(u32),
        "keep": keep,
        "keep_hash": draw(u64),
        "append": draw(tokens),
        "opening": draw(openings) if keep == 0 else None,
        "time_left_ms": draw(u32),
        "trace": draw(st.binary(max_size=25)),
    }
    if kind is Kind.PROPOSE:
        return ProposeTask(**fields, num_tokens=draw(u32))
    if not fields["append"] or draw(st.booleans()):
        return VerifyTask(**fields, prefill_only=True)
    return VerifyTask(**fields, block=draw(blocks()))


@st.composite
def task_frames(draw: st.DrawFn, kind: Kind) -> TaskFrame:
    """Tasks of several sessions, and what else a frame may say."""
    hello = st.builds(Hello, st.just(ME), u32, u32, u32)
    return TaskFrame(
        hello=draw(st.none() | hello),
        tasks=tuple(draw(st.lists(tasks(kind), max_size=3))),
        closes=tuple(draw(st.lists(sessions, max_size=3))),
        echo=draw(u64),
        due_sessions=draw(u32) if kind is Kind.VERIFY else 0,
        due_us=draw(u32) if kind is Kind.VERIFY else 0,
    )


refusals = st.builds(Refusal, st.sampled_from(Reason), u32, u64, st.text(max_size=8))
failures = st.builds(Failure, st.text(max_size=8), st.booleans())
timings = st.builds(TaskTiming, u32, u32, u32, st.integers(1, MAX_U32))
steps = st.builds(StepTiming, u32, u32, u32, u32, u32, u32, u32, u32, u64)


@st.composite
def answer_frames(draw: st.DrawFn, kind: Kind) -> AnswerFrame:
    """Answers of several sessions."""
    results: st.SearchStrategy[Any] = blocks() if kind is Kind.PROPOSE else st.none() | st.builds(Verdict, u32, u32)
    answers = st.builds(Answer, sessions, u32, u32, u32, refusals | failures | results, timings)
    return AnswerFrame(
        welcome=draw(st.none() | u64),
        answers=tuple(draw(st.lists(answers, max_size=3))),
        step=draw(st.none() | steps),
        echo=draw(u64),
    )


@QUICK
@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), task_frames(kind))))
def test_task_frames_come_back(case: tuple[Kind, TaskFrame]) -> None:
    """Encoding and decoding is the identity, and an opening keeps its fingerprint."""
    kind, frame = case
    decoded = decode_task_frame(kind, encode_task_frame(kind, frame), ME)

    assert frame == decoded
    for sent, came in zip(frame.tasks, decoded.tasks, strict=True):
        assert sent.opening is None or came.opening is not None
        assert sent.opening is None or sent.opening.fingerprint() == came.opening.fingerprint()  # type: ignore[union-attr]


def told_once(kind: Kind, frame: AnswerFrame) -> AnswerFrame:
    """A verdict's compute that is the step's, but for the grain of rounding, comes back as the step's."""
    step = frame.step
    if kind is Kind.PROPOSE or step is None:
        return frame
    step_us = step.prepare_us + step.compute_us + step.sample_us
    answers = [
        Answer(a.session, a.epoch, a.number, a.length, a.result, TaskTiming(*_but_compute(a.timing), step_us))
        if 0 <= a.timing.compute_us - step_us <= 2
        else a
        for a in frame.answers
    ]
    return AnswerFrame(frame.welcome, tuple(answers), step, frame.echo)


def _but_compute(timing: TaskTiming) -> tuple[int, int, int]:
    return timing.residence_us, timing.parse_us, timing.queue_us


@QUICK
@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), answer_frames(kind))))
def test_answer_frames_come_back(case: tuple[Kind, AnswerFrame]) -> None:
    """Encoding and decoding is the identity."""
    kind, frame = case

    assert told_once(kind, frame) == decode_answer_frame(kind, encode_answer_frame(kind, frame), ME)


@QUICK
@given(
    kinds.flatmap(lambda kind: st.tuples(st.just(kind), task_frames(kind), answer_frames(kind))),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 400),
)
def test_spoilt_frames_give_a_frame_or_invalid_argument(
    case: tuple[Kind, TaskFrame, AnswerFrame], flips: list[tuple[int, int]], cut: int
) -> None:
    """Bytes changed and cut at random: no other exception, and what is decoded are values."""
    kind, asked, answered = case
    for raw, decode in (
        (encode_task_frame(kind, asked), decode_task_frame),
        (encode_answer_frame(kind, answered), decode_answer_frame),
    ):
        spoilt = bytearray(raw[: len(raw) - cut % (len(raw) + 1)])
        for place, value in flips:
            if spoilt:
                spoilt[place % len(spoilt)] = value
        with contextlib.suppress(InvalidArgument):
            decode(kind, bytes(spoilt), ME)


@QUICK
@given(kinds, st.binary(max_size=64))
def test_garbage_gives_a_frame_or_invalid_argument(kind: Kind, raw: bytes) -> None:
    """As above, for bytes that never were a frame."""
    with contextlib.suppress(InvalidArgument):
        decode_task_frame(kind, raw, ME)
    with contextlib.suppress(InvalidArgument):
        decode_answer_frame(kind, raw, ME)
