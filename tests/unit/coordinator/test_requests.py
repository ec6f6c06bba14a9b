"""From a client's message to a checked request: what is filled in, and that every refusal names field, value and limit."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from coordinator.clock import RequestClock
from coordinator.config import CoordinatorConfig
from coordinator.requests import LONG_TEXT, MAX_REQUEST_ID, check_request, encode_chat, encode_text, sampling_in_force
from coordinator.session import RequestSpec
from coordinator.stops import MAX_STOPS
from coordinator.text import Tokenizer
from specwire.law.errors import InvalidArgument
from specwire.law.values import MAX_U64, Law, SamplingSpec
from specwire.v1 import inference_pb2 as pb
from specwire.v1 import types_pb2
from specwire.wire.info import WorkerInfo
from tests.support.tokenizers import byte_tokenizer

VOCAB, CONTEXT = 300, 40
TARGET = WorkerInfo(
    role="target",
    model="m",
    architecture="table",
    vocab_size=VOCAB,
    vocab_fingerprint="",
    model_fingerprint="",
    max_context=CONTEXT,
    max_sessions=4,
    max_block=8,
    max_append=50,
    device="cpu",
    precision="float32",
    version="0",
    protocol_version=1,
    incarnation=7,
    node="here",
    eos_token_ids=(2, 3),
)
TOKENIZER = Tokenizer(byte_tokenizer())


def check(
    request: pb.GenerateRequest,
    tokenizer: Tokenizer | None = None,
    target: WorkerInfo = TARGET,
    clock: RequestClock | None = None,
    **speculation: Any,
) -> RequestSpec:
    """The checked request. `speculation`: settings of the service."""
    config = CoordinatorConfig.model_validate({"speculation": speculation, "default_max_tokens": 20})
    return asyncio.run(check_request(request, clock or RequestClock(), config, tokenizer, target))


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_cannot_fit_is_not_tokenized(chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen megabytes take half a minute, and the answer is known before."""
    tokenizer = Tokenizer(byte_tokenizer())
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda *_: pytest.fail("tokenized"))
    text = "x" * (CONTEXT * tokenizer._longest)
    request = pb.GenerateRequest(prompt=text)
    if chat:
        request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]))

    field = r"chat.messages\[0\].content" if chat else "prompt"
    with pytest.raises(InvalidArgument, match=rf"{field}: got '{len(text)} characters', must be at most 39 tokens"):
        check(request, tokenizer)


def asked(*ids: int, **fields: Any) -> pb.GenerateRequest:
    """A request by ids."""
    return pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=ids or (5, 6)), **fields)


def test_what_is_left_out_is_filled_in() -> None:
    """Seed, id, limit, sampling, end tokens and block length: the service's and the model's own."""
    spec = check(asked())

    assert ((5, 6), SamplingSpec(), Law.SHARED_NOISE, 20) == (spec.prompt, spec.sampling, spec.law, spec.max_tokens)
    assert (None, 8, "auto") == (spec.num_speculative_tokens, spec.max_block, spec.method)
    assert (frozenset({2, 3}), (), False) == (spec.end_tokens, spec.stops, spec.return_rounds)
    assert spec.request_id.startswith("req-")
    assert 0 <= spec.seed <= MAX_U64


def test_what_is_given_is_taken() -> None:
    """Every field of a request has its place."""
    spec = check(
        asked(
            7,
            8,
            9,
            max_tokens=11,
            stop=["b", "a"],
            stop_token_ids=[12],
            ignore_eos=True,
            temperature=0.5,
            top_k=13,
            top_p=0.25,
            min_p=0.125,
            seed=14,
            speculation=pb.Speculation(num_speculative_tokens=3, method=pb.METHOD_NGRAM, law=types_pb2.LAW_REJECTION),
            return_rounds=True,
            request_id="mine",
        ),
        TOKENIZER,
    )

    assert spec == RequestSpec(
        request_id="mine",
        prompt=(7, 8, 9),
        sampling=SamplingSpec(0.5, 13, 0.25, 0.125),
        law=Law.REJECTION,
        seed=14,
        max_tokens=11,
        stops=("b", "a"),
        end_tokens=frozenset({12}),
        num_speculative_tokens=3,
        max_block=3,
        method="ngram",
        return_rounds=True,
    )


def test_seeds_of_requests_without_one_differ() -> None:
    """Two clients who name none get two answers."""

    assert check(asked()).seed != check(asked()).seed


def test_seed_zero_is_a_seed() -> None:
    """Absent is not zero."""

    assert check(asked(seed=0)).seed == 0


# ------------------------------------------------------------------ the prompt


def test_text_is_tokenized_and_timed() -> None:
    """The clock learns how long it took."""
    clock = RequestClock()
    spec = check(pb.GenerateRequest(prompt="sky"), TOKENIZER, clock=clock)

    assert tuple(TOKENIZER.encode("sky")) == spec.prompt
    assert clock.tokenize_us >= 0


def test_long_text_is_the_same_text() -> None:
    """It is tokenized beside the event loop, so that it holds nobody up."""
    text = "ab" * LONG_TEXT

    assert TOKENIZER.encode(text) == asyncio.run(encode_text(TOKENIZER, text))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(prompt_ids=pb.TokenIds()), "prompt_ids"),
        (asked(5, VOCAB), "prompt_ids"),
        (asked(*[5] * CONTEXT), "prompt"),
        (pb.GenerateRequest(prompt="sky"), "prompt"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="sky")])), "chat"),
        (asked(max_tokens=0), "max_tokens"),
        (asked(stop=["sky"]), "stop"),
        (asked(stop_token_ids=[VOCAB]), "stop_token_ids"),
        (asked(temperature=-1), "temperature"),
        (asked(temperature=float("nan")), "temperature"),
        (asked(top_p=0), "top_p"),
        (asked(min_p=2), "min_p"),
        (asked(speculation=pb.Speculation(num_speculative_tokens=9)), "speculation.num_speculative_tokens"),
        (asked(speculation=pb.Speculation(method=9)), "speculation.method"),  # type: ignore[arg-type]
        (asked(speculation=pb.Speculation(law=9)), "law"),  # type: ignore[arg-type]
        (asked(request_id="x" * (MAX_REQUEST_ID + 1)), "request_id"),
        (asked(request_id="a\nb"), "request_id"),
    ],
)
def test_what_is_wrong_is_named(request_: pb.GenerateRequest, field: str) -> None:
    """Nothing is started, nothing is guessed."""
    with pytest.raises(InvalidArgument) as caught:
        check(request_)

    assert field == caught.value.field


@pytest.mark.parametrize("stops", [["sky", ""], ["s"] * (MAX_STOPS + 1)])
def test_stops_have_limits(stops: list[str]) -> None:
    """An empty stop string would end every answer at once."""
    with pytest.raises(InvalidArgument, match="stop"):
        check(asked(stop=stops), TOKENIZER)


def test_a_conversation_needs_a_message() -> None:
    """A template of nothing is no prompt."""
    with pytest.raises(InvalidArgument, match=r"chat\.messages"):
        asyncio.run(encode_chat(TOKENIZER, pb.Chat()))


def test_the_limit_of_the_context_is_told() -> None:
    """One token must fit behind the prompt; the message tells both numbers."""
    with pytest.raises(InvalidArgument, match=f"got '{CONTEXT} tokens', must be at most {CONTEXT - 1} tokens"):
        check(asked(*[5] * CONTEXT))

    assert check(asked(*[5] * (CONTEXT - 1))).max_tokens == 1


@pytest.mark.parametrize(("wanted", "given"), [(None, 20), (7, 7), (1000, CONTEXT - 2)])
def test_the_answer_fits_the_context(wanted: int | None, given: int) -> None:
    """The default of the service, what was asked for, or what is left."""
    request = asked() if wanted is None else asked(max_tokens=wanted)

    assert given == check(request).max_tokens


def test_the_default_fits_the_context_too() -> None:
    """A long prompt leaves less than the default."""

    assert check(asked(*[5] * (CONTEXT - 5))).max_tokens == 5


# ------------------------------------------------------------------ sampling

DEFAULTS = SamplingSpec(0.75, 50, 0.875, 0.0625)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, DEFAULTS),
        ({"top_k": 40}, dataclasses.replace(DEFAULTS, top_k=40)),
        ({"top_k": 0}, dataclasses.replace(DEFAULTS, top_k=0)),
        ({"temperature": 0}, dataclasses.replace(DEFAULTS, temperature=0.0)),
        ({"top_p": 1}, dataclasses.replace(DEFAULTS, top_p=1.0)),
        ({"min_p": 0}, dataclasses.replace(DEFAULTS, min_p=0.0)),
    ],
)
def test_settings_are_filled_in_one_by_one(fields: dict[str, Any], expected: SamplingSpec) -> None:
    """Leaving the temperature out while setting top_k does not turn sampling off, and a zero that was sent is a zero."""

    assert expected == check(asked(**fields), target=dataclasses.replace(TARGET, default_sampling=DEFAULTS)).sampling


# ------------------------------------------------------------------ speculation


@pytest.mark.parametrize(
    ("asked_for", "service", "fixed", "longest"),
    [
        ({}, {}, None, 8),
        ({}, {"num_speculative_tokens": 3}, 3, 3),
        ({}, {"num_speculative_tokens": 0}, 0, 0),
        ({"auto": True}, {"num_speculative_tokens": 3}, None, 8),
        ({"num_speculative_tokens": 5}, {}, 5, 5),
        ({"num_speculative_tokens": 0}, {}, 0, 0),
        ({"num_speculative_tokens": 5, "auto": True}, {}, None, 5),
        ({"num_speculative_tokens": 0, "auto": True}, {}, 0, 0),
        ({"num_speculative_tokens": 5}, {"max_num_speculative_tokens": 5}, 5, 5),
    ],
)
def test_block_lengths(asked_for: dict[str, Any], service: dict[str, Any], fixed: int | None, longest: int) -> None:
    """Fixed where a number was given, the controller's where auto was, with the number as its limit where both were."""
    spec = check(asked(speculation=pb.Speculation(**asked_for)), **service)

    assert (fixed, longest) == (spec.num_speculative_tokens, spec.max_block)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (pb.METHOD_UNSPECIFIED, "draft_model"),
        (pb.METHOD_AUTO, "auto"),
        (pb.METHOD_DRAFT_MODEL, "draft_model"),
        (pb.METHOD_NGRAM, "ngram"),
    ],
)
def test_methods(method: pb.Method.ValueType, expected: str) -> None:
    """Unspecified is the service's."""

    assert expected == check(asked(speculation=pb.Speculation(method=method)), method="draft_model").method


@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (types_pb2.LAW_UNSPECIFIED, Law.REJECTION),
        (types_pb2.LAW_SHARED_NOISE, Law.SHARED_NOISE),
        (types_pb2.LAW_REJECTION, Law.REJECTION),
    ],
)
def test_laws(law: types_pb2.Law.ValueType, expected: Law) -> None:
    """Unspecified is the service's."""

    assert expected is check(asked(speculation=pb.Speculation(law=law)), law="rejection").law


@pytest.mark.parametrize(
    ("fields", "shown"),
    [({"top_p": 1.1}, "1.1"), ({"min_p": -0.1}, "-0.1"), ({"temperature": 100.5}, "100.5")],
)
def test_a_refused_number_is_shown_as_it_was_given(fields: dict[str, float], shown: str) -> None:
    """Not as the number of 32 bits that it became on its way."""
    with pytest.raises(InvalidArgument, match=rf"got {shown}, must be"):
        sampling_in_force(pb.GenerateRequest(prompt="a", **fields), TARGET)
