"""From a client's message to a checked request. Every refusal names field, value and limit, and starts nothing."""

from __future__ import annotations

import asyncio
import secrets

import numpy as np

from coordinator.clock import RequestClock
from coordinator.config import CoordinatorConfig
from coordinator.session import RequestSpec
from coordinator.stops import MAX_STOPS
from coordinator.text import Tokenizer
from specwire.law.errors import InvalidArgument
from specwire.law.values import MAX_U32, Law, SamplingSpec
from specwire.v1 import inference_pb2 as pb
from specwire.wire.codec import decode_law
from specwire.wire.info import WorkerInfo
from specwire.wire.stopwatch import now_ns

LONG_TEXT = 20_000
"""Characters from which tokenizing leaves the event loop, so that one long prompt does not hold up every stream."""
MAX_REQUEST_ID = 128

_METHODS = {pb.METHOD_AUTO: "auto", pb.METHOD_DRAFT_MODEL: "draft_model", pb.METHOD_NGRAM: "ngram"}


async def encode_text(
    tokenizer: Tokenizer | None, text: str, field: str = "prompt", context: int | None = None
) -> list[int]:
    """Raw text to ids. `context`: a text that cannot fit is refused without being tokenized."""
    if tokenizer is None:
        raise InvalidArgument(field, "text", "absent: this service has no tokenizer; use prompt_ids")
    _check_length(tokenizer, text, field, context)
    if len(text) > LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, field=field)
    return tokenizer.encode(text, field=field)


def _check_length(tokenizer: Tokenizer, text: str, field: str, context: int | None) -> None:
    """Tokenizing takes seconds a megabyte, and its result would be refused."""
    if context is not None and (fewest := tokenizer.fewest_tokens(text)) >= context:
        raise InvalidArgument(
            field,
            f"{len(text)} characters",
            f"at most {context - 1} tokens (context limit {context}), and so many characters are {fewest} at least",
        )


async def encode_chat(tokenizer: Tokenizer | None, chat: pb.Chat, context: int | None = None) -> list[int]:
    """A conversation to ids. `context`: see `encode_text`."""
    if tokenizer is None:
        raise InvalidArgument("chat", "messages", "absent: this service has no tokenizer; use prompt_ids")
    if not chat.messages:
        raise InvalidArgument("chat.messages", 0, "at least one message")
    for index, message in enumerate(chat.messages):
        _check_length(tokenizer, message.content, f"chat.messages[{index}].content", context)
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    if sum(len(message["content"]) for message in messages) > LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode_chat, messages)
    return tokenizer.encode_chat(messages)


async def check_request(
    request: pb.GenerateRequest,
    clock: RequestClock,
    config: CoordinatorConfig,
    tokenizer: Tokenizer | None,
    target: WorkerInfo,
) -> RequestSpec:
    """Raises InvalidArgument."""
    request_id = request.request_id or f"req-{secrets.token_hex(8)}"
    if len(request_id) > MAX_REQUEST_ID or not request_id.isprintable():
        raise InvalidArgument("request_id", request_id, f"at most {MAX_REQUEST_ID} printable characters")
    begun = now_ns()
    match request.WhichOneof("input"):
        case "prompt":
            prompt = await encode_text(tokenizer, request.prompt, context=target.max_context)
        case "chat":
            prompt = await encode_chat(tokenizer, request.chat, target.max_context)
        case "prompt_ids":
            prompt = list(request.prompt_ids.ids)
        case _:
            raise InvalidArgument("input", None, "exactly one of prompt, chat, prompt_ids")
    clock.tokenize_us = (now_ns() - begun) // 1000
    if not prompt:
        raise InvalidArgument("prompt_ids", [], "at least one token")
    highest = max(prompt)
    if highest >= target.vocab_size:
        raise InvalidArgument("prompt_ids", highest, f"ids in [0, {target.vocab_size})")
    if len(prompt) >= target.max_context:
        raise InvalidArgument(
            "prompt",
            f"{len(prompt)} tokens",
            f"at most {target.max_context - 1} tokens (context limit {target.max_context})",
        )
    room = target.max_context - len(prompt)
    if request.HasField("max_tokens"):
        if request.max_tokens < 1:
            raise InvalidArgument("max_tokens", request.max_tokens, "at least 1")
        max_tokens = min(request.max_tokens, room)
    else:
        max_tokens = min(config.default_max_tokens, room)
    if len(request.stop) > MAX_STOPS:
        raise InvalidArgument("stop", f"{len(request.stop)} strings", f"at most {MAX_STOPS}")
    if "" in request.stop:
        raise InvalidArgument("stop", "", "without empty strings")
    if request.stop and tokenizer is None:
        raise InvalidArgument("stop", list(request.stop), "absent: this service has no tokenizer; use stop_token_ids")
    for token in request.stop_token_ids:
        if token >= target.vocab_size:
            raise InvalidArgument("stop_token_ids", token, f"ids in [0, {target.vocab_size})")
    ends = set(request.stop_token_ids)
    if not request.ignore_eos:
        ends.update(target.eos_token_ids)
    num_speculative_tokens, max_block, method = _speculation(request.speculation, config)
    return RequestSpec(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=sampling_in_force(request, target),
        law=decode_law(request.speculation.law, Law(config.speculation.law)),
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        stops=tuple(request.stop),
        end_tokens=frozenset(ends),
        num_speculative_tokens=num_speculative_tokens,
        max_block=max_block,
        method=method,
        return_rounds=request.return_rounds,
        private_prompt=request.private_prompt,
    )


def sampling_in_force(request: pb.GenerateRequest, target: WorkerInfo) -> SamplingSpec:
    """Each setting as asked for, else the model's default, one by one: leaving the temperature out while setting top_k does
    not turn sampling off."""
    default = target.default_sampling or SamplingSpec()
    top_k = request.top_k if request.HasField("top_k") else default.top_k
    try:
        return SamplingSpec(
            temperature=request.temperature if request.HasField("temperature") else default.temperature,
            top_k=min(top_k, MAX_U32),
            top_p=request.top_p if request.HasField("top_p") else default.top_p,
            min_p=request.min_p if request.HasField("min_p") else default.min_p,
        )
    except InvalidArgument as error:
        if isinstance(error.value, float):  # as it was given, before it had 32 bits
            raise InvalidArgument(error.field, float(str(np.float32(error.value))), error.limit) from None
        raise


def _speculation(message: pb.Speculation, config: CoordinatorConfig) -> tuple[int | None, int, str]:
    """(fixed block length or None for the controller, longest block, method)."""
    settings = config.speculation
    limit = settings.max_num_speculative_tokens
    if message.method and message.method not in _METHODS:
        raise InvalidArgument("speculation.method", message.method, "METHOD_AUTO, METHOD_DRAFT_MODEL or METHOD_NGRAM")
    method = _METHODS.get(message.method, settings.method)
    if message.HasField("num_speculative_tokens"):
        count = message.num_speculative_tokens
        if count > limit:
            raise InvalidArgument("speculation.num_speculative_tokens", count, f"in [0, {limit}]")
        return (None if message.auto and count > 0 else count), count, method
    if message.auto or settings.num_speculative_tokens == "auto":
        return None, limit, method
    return settings.num_speculative_tokens, settings.num_speculative_tokens, method
