"""Where protobuf meets values: the only file that sees both. Streams carry bytes; this file makes and reads them.

Decoding never trusts: a task that cannot be built as a value becomes a refusal of that task, an answer that cannot be built
becomes a failure of its task, and the rest of the frame is served. A frame that is no protobuf at all raises InvalidArgument.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

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
from specwire.law.values import MAX_U32, Block, Law, Opening, SamplingSpec, Source, SparseLaw, Verdict
from specwire.v1 import draft_pb2, target_pb2, types_pb2

PROTOCOL_VERSION = 1
"""Rises when an older peer would misread a frame."""
ROUNDING_US = 2
"""A step's three parts are rounded down one by one, a task's time as a whole."""


class Kind(enum.Enum):
    """Which of the two streams a frame belongs to."""

    PROPOSE = "propose"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks on a stream, see Hello in types.proto."""

    incarnation: int
    protocol_version: int
    lease_ms: int
    generation: int


@dataclass(frozen=True, slots=True)
class TaskFrame:
    """Coordinator to worker."""

    hello: Hello | None = None
    tasks: tuple[Task, ...] = ()
    closes: tuple[SessionId, ...] = ()
    echo: int = 0
    due_sessions: int = 0
    due_us: int = 0
    due_group: int = 0
    invalid: tuple[Answer, ...] = ()
    """Tasks that were no values, answered already. Filled by decoding, never sent."""


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """Worker to coordinator."""

    welcome: int | None = None
    answers: tuple[Answer, ...] = ()
    step: StepTiming | None = None
    echo: int = 0


_LAWS = {Law.SHARED_NOISE: types_pb2.LAW_SHARED_NOISE, Law.REJECTION: types_pb2.LAW_REJECTION}
_LAWS_BACK: dict[int, Law] = {int(number): law for law, number in _LAWS.items()}
_REASONS = {reason: types_pb2.Refusal.Reason.Value(f"REASON_{reason.name}") for reason in Reason}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}


def encode_law(law: Law) -> types_pb2.Law.ValueType:
    """Law to its number."""
    return _LAWS[law]


def decode_law(number: int, default: Law | None = None) -> Law:
    """Number to law. Unspecified becomes `default`; raises InvalidArgument where there is none or the number is unknown."""
    if number == types_pb2.LAW_UNSPECIFIED and default is not None:
        return default
    if number not in _LAWS_BACK:
        raise InvalidArgument("law", number, "LAW_SHARED_NOISE or LAW_REJECTION")
    return _LAWS_BACK[number]


def encode_sampling(spec: SamplingSpec) -> types_pb2.Sampling:
    """Sampling to protobuf; defaults are left out."""
    message = types_pb2.Sampling(temperature=spec.temperature, top_k=spec.top_k, min_p=spec.min_p)
    if spec.top_p != 1.0:
        message.top_p = spec.top_p
    return message


def decode_sampling(message: types_pb2.Sampling) -> SamplingSpec:
    """Protobuf to sampling. Raises InvalidArgument."""
    return SamplingSpec(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
    )


def _encode_open(opening: Opening) -> types_pb2.Open:
    return types_pb2.Open(
        law=_LAWS[opening.law],
        sampling=encode_sampling(opening.sampling),
        seed=opening.seed,
        choice=opening.choice,
        prompt_length=opening.prompt_length,
        private_prompt=opening.private_prompt,
    )


def _decode_open(message: types_pb2.Open) -> Opening:
    return Opening(
        law=decode_law(message.law),
        sampling=decode_sampling(message.sampling),
        seed=message.seed,
        choice=message.choice,
        prompt_length=message.prompt_length,
        private_prompt=message.private_prompt,
    )


def _encode_laws(laws: Iterable[SparseLaw]) -> list[types_pb2.SparseLaw]:
    return [types_pb2.SparseLaw(ids=law.ids, weights=law.weights) for law in laws]


def _decode_laws(messages: Iterable[types_pb2.SparseLaw]) -> tuple[SparseLaw, ...]:
    return tuple(SparseLaw(tuple(message.ids), tuple(message.weights)) for message in messages)


def encode_task_frame(kind: Kind, frame: TaskFrame) -> bytes:
    """One frame of tasks to bytes."""
    request: draft_pb2.ProposeRequest | target_pb2.VerifyRequest
    if kind is Kind.PROPOSE:
        request = draft_pb2.ProposeRequest(tasks=[_encode_propose(task) for task in frame.tasks], echo=frame.echo)
    else:
        request = target_pb2.VerifyRequest(
            tasks=[_encode_verify(task) for task in frame.tasks],
            echo=frame.echo,
            due_sessions=frame.due_sessions,
            due_us=frame.due_us,
            due_group=frame.due_group,
        )
    if frame.hello is not None:
        request.hello.incarnation = frame.hello.incarnation
        request.hello.protocol_version = frame.hello.protocol_version
        request.hello.lease_ms = frame.hello.lease_ms
        request.hello.generation = frame.hello.generation
    for session in frame.closes:
        request.closes.add(session=session.counter)
    return request.SerializeToString()


def _encode_propose(task: Task) -> draft_pb2.ProposeTask:
    assert isinstance(task, ProposeTask)
    return draft_pb2.ProposeTask(
        session=task.session.counter,
        epoch=task.epoch,
        number=task.number,
        keep=task.keep,
        keep_hash=task.keep_hash,
        append=task.append,
        num_tokens=task.num_tokens,
        open=_encode_open(task.opening) if task.opening is not None else None,
        time_left_ms=task.time_left_ms,
        trace=task.trace,
        group=task.group,
    )


def _encode_verify(task: Task) -> target_pb2.VerifyTask:
    assert isinstance(task, VerifyTask)
    return target_pb2.VerifyTask(
        session=task.session.counter,
        epoch=task.epoch,
        number=task.number,
        keep=task.keep,
        keep_hash=task.keep_hash,
        append=task.append,
        block=task.block.tokens,
        draft_laws=_encode_laws(task.block.laws),
        prefill_only=task.prefill_only,
        group=task.group,
        open=_encode_open(task.opening) if task.opening is not None else None,
        time_left_ms=task.time_left_ms,
        trace=task.trace,
    )


def decode_task_frame(kind: Kind, raw: bytes, incarnation: int | None) -> TaskFrame:
    """Bytes to one frame of tasks. `incarnation` is that of the stream's Hello, None before it came.

    Raises InvalidArgument when the bytes are no frame, or tasks come before Hello."""
    request: draft_pb2.ProposeRequest | target_pb2.VerifyRequest
    try:
        request = (draft_pb2.ProposeRequest if kind is Kind.PROPOSE else target_pb2.VerifyRequest).FromString(raw)
    except DecodeError as error:
        raise InvalidArgument("frame", f"{len(raw)} bytes", f"a {kind.value} request") from error
    hello = None
    if request.HasField("hello"):
        said = request.hello
        hello = Hello(said.incarnation, said.protocol_version, said.lease_ms, said.generation)
        incarnation = said.incarnation
    if incarnation is None:
        raise InvalidArgument("hello", None, "in the first frame of the stream")
    tasks: list[Task] = []
    invalid: list[Answer] = []
    for message in request.tasks:
        session = SessionId(incarnation, message.session)
        try:
            if isinstance(message, draft_pb2.ProposeTask):
                tasks.append(_decode_propose(session, message))
            else:
                tasks.append(_decode_verify(session, message))
        except InvalidArgument as error:
            refusal = Refusal(Reason.INVALID, detail=str(error))
            invalid.append(Answer(session, message.epoch, message.number, 0, refusal))
    due_sessions = due_us = due_group = 0
    if isinstance(request, target_pb2.VerifyRequest):
        due_sessions, due_us, due_group = request.due_sessions, request.due_us, request.due_group
    return TaskFrame(
        hello=hello,
        tasks=tuple(tasks),
        closes=tuple(SessionId(incarnation, close.session) for close in request.closes),
        echo=request.echo,
        due_sessions=due_sessions,
        due_us=due_us,
        due_group=due_group,
        invalid=tuple(invalid),
    )


def _decode_propose(session: SessionId, message: draft_pb2.ProposeTask) -> ProposeTask:
    return ProposeTask(
        session=session,
        epoch=message.epoch,
        number=message.number,
        keep=message.keep,
        keep_hash=message.keep_hash,
        append=tuple(message.append),
        opening=_decode_open(message.open) if message.HasField("open") else None,
        time_left_ms=message.time_left_ms,
        trace=message.trace,
        num_tokens=message.num_tokens,
        group=message.group,
    )


def _decode_verify(session: SessionId, message: target_pb2.VerifyTask) -> VerifyTask:
    return VerifyTask(
        session=session,
        epoch=message.epoch,
        number=message.number,
        keep=message.keep,
        keep_hash=message.keep_hash,
        append=tuple(message.append),
        opening=_decode_open(message.open) if message.HasField("open") else None,
        time_left_ms=message.time_left_ms,
        trace=message.trace,
        block=Block(tuple(message.block), _decode_laws(message.draft_laws)),
        prefill_only=message.prefill_only,
        group=message.group,
    )


def _fits(duration_us: int) -> int:
    """A duration as the wire holds it: 71 minutes at most."""
    return min(duration_us, MAX_U32)


def _step_us(step: StepTiming | None) -> int:
    """Engine work of the frame's step."""
    return step.busy_us if step is not None else 0


def encode_answer_frame(kind: Kind, frame: AnswerFrame) -> bytes:
    """One frame of answers to bytes."""
    make = draft_pb2.ProposeResponse if kind is Kind.PROPOSE else target_pb2.VerifyResponse
    response: draft_pb2.ProposeResponse | target_pb2.VerifyResponse = make(echo=frame.echo)
    if frame.welcome is not None:
        response.welcome.incarnation = frame.welcome
    if frame.step is not None:
        step = frame.step
        response.step.CopyFrom(
            types_pb2.StepTiming(
                prepare_us=_fits(step.prepare_us),
                compute_us=_fits(step.compute_us),
                sample_us=_fits(step.sample_us),
                answer_us=_fits(step.answer_us),
                rows=step.rows,
                prefill_rows=step.prefill_rows,
                sessions=step.sessions,
                previous_serialise_us=_fits(step.previous_serialise_us),
                step=step.step,
            )
        )
    told_once = kind is Kind.VERIFY and frame.step is not None
    for answer in frame.answers:
        message = response.answers.add(
            session=answer.session.counter, epoch=answer.epoch, number=answer.number, length=answer.length
        )
        timing = answer.timing
        message.timing.residence_us = _fits(timing.residence_us)
        message.timing.parse_us = _fits(timing.parse_us)
        message.timing.queue_us = _fits(timing.queue_us)
        if not (told_once and 0 <= timing.compute_us - _step_us(frame.step) <= ROUNDING_US):
            message.compute_us = _fits(timing.compute_us)
        result = answer.result
        if isinstance(message, target_pb2.VerifyAnswer):
            message.reused = answer.reused
        if isinstance(result, Refusal):
            message.refusal.reason = _REASONS[result.reason]
            message.refusal.length = result.length
            message.refusal.hash = result.hash
            message.refusal.detail = result.detail
        elif isinstance(result, Failure):
            message.failure.detail = result.detail
            message.failure.bad_law = result.bad_law
        elif isinstance(result, Verdict):
            assert isinstance(message, target_pb2.VerifyAnswer)
            message.accepted = result.accepted
            message.added = result.added
        elif isinstance(result, Block):
            assert isinstance(message, draft_pb2.ProposeAnswer)
            message.tokens.extend(result.tokens)
            message.laws.extend(_encode_laws(result.laws))
    return response.SerializeToString()


def decode_answer_frame(kind: Kind, raw: bytes, incarnation: int) -> AnswerFrame:
    """Bytes to one frame of answers. `incarnation` is the coordinator's own. Raises InvalidArgument when the bytes are no frame."""
    response: draft_pb2.ProposeResponse | target_pb2.VerifyResponse
    try:
        response = (draft_pb2.ProposeResponse if kind is Kind.PROPOSE else target_pb2.VerifyResponse).FromString(raw)
    except DecodeError as error:
        raise InvalidArgument("frame", f"{len(raw)} bytes", f"a {kind.value} response") from error
    step = None
    if response.HasField("step"):
        said = response.step
        step = StepTiming(
            said.prepare_us,
            said.compute_us,
            said.sample_us,
            said.answer_us,
            said.rows,
            said.prefill_rows,
            said.sessions,
            said.previous_serialise_us,
            said.step,
        )
    step_us = _step_us(step) if kind is Kind.VERIFY else 0
    return AnswerFrame(
        welcome=response.welcome.incarnation if response.HasField("welcome") else None,
        answers=tuple(
            _decode_answer(SessionId(incarnation, message.session), message, step_us) for message in response.answers
        ),
        step=step,
        echo=response.echo,
    )


def _decode_answer(
    session: SessionId, message: draft_pb2.ProposeAnswer | target_pb2.VerifyAnswer, step_us: int
) -> Answer:
    said = message.timing
    timing = TaskTiming(said.residence_us, said.parse_us, said.queue_us, message.compute_us or step_us)
    try:
        result = _decode_result(message)
    except InvalidArgument as error:
        result = Failure(f"malformed answer: {error}")
    reused = message.reused if isinstance(message, target_pb2.VerifyAnswer) else 0
    return Answer(session, message.epoch, message.number, message.length, result, timing, reused)


def _decode_result(
    message: draft_pb2.ProposeAnswer | target_pb2.VerifyAnswer,
) -> Verdict | Block | Refusal | Failure | None:
    if message.HasField("refusal"):
        said = message.refusal
        if said.reason not in _REASONS_BACK:
            raise InvalidArgument("refusal.reason", said.reason, "a known reason")
        return Refusal(_REASONS_BACK[said.reason], said.length, said.hash, said.detail)
    if message.HasField("failure"):
        return Failure(message.failure.detail, message.failure.bad_law)
    if isinstance(message, draft_pb2.ProposeAnswer):
        return Block(tuple(message.tokens), _decode_laws(message.laws), Source.DRAFT_MODEL)
    return Verdict(message.accepted, message.added) if message.HasField("added") else None
