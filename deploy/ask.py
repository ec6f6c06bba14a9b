"""`specwire generate`: one request from the command line. Text goes to stdout as it comes, everything else to stderr."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deploy import ready, render
from specwire.client import Client, Event, Final, Started, Tokens
from specwire.law.errors import InvalidArgument, OurFault, SpecwireError, TooLate, Unavailable


class OutputError(OurFault):
    """The answer came and cannot be written."""


@dataclass
class Answer:
    """What one request brought."""

    started: Started | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    final: Final | None = None
    shown: bool = False
    """Something of it was to be seen."""

    def take(self, event: Event) -> str:
        """Adds an event. Returns what is new to be shown: text, or ids where the service has no tokenizer."""
        if isinstance(event, Started):
            self.started = event
            return ""
        if isinstance(event, Tokens):
            begun = bool(self.ids)
            self.ids.extend(event.ids)
            if self.started is not None and self.started.ids_only:
                return " " * begun + " ".join(map(str, event.ids))
        else:
            self.final = event
        self.text += event.text
        return event.text


async def ask(
    address: str,
    fields: dict[str, Any],
    timeout: float | None,
    show: Callable[[str], None],
    answer: Answer | None = None,
    note: Callable[[str], None] = lambda said: None,
) -> Answer:
    """Sends one request and shows the text as it comes. `answer` is filled also when the request fails on the way. `note` is told,
    before the first token, what of the request cannot be had."""
    answer = Answer() if answer is None else answer
    async with Client(address) as client:
        async for event in client.generate(timeout=timeout, **fields):
            if text := answer.take(event):
                answer.shown = True
                show(text)
            if isinstance(event, Started) and (said := shortened(fields.get("max_tokens"), event)):
                note(said)
    if answer.final is None:
        raise OurFault("the stream ended without a final event")
    return answer


def shortened(asked: int | None, started: Started) -> str | None:
    """What to say when the context has room for fewer tokens than were asked for."""
    if asked is None or started.max_tokens >= asked:
        return None
    return f"max_tokens: {asked} asked, {started.max_tokens} fit the context"


def input_fields(prompt: str, raw: bool, ids: bool, system: str | None) -> dict[str, Any]:
    """The input of a request: a conversation, a raw text, or token ids. `-` reads the prompt from standard input."""
    if prompt == "-":
        if sys.stdin is None:
            raise InvalidArgument("PROMPT", prompt, "a text: standard input is closed")
        prompt = sys.stdin.read()
    if system is not None and (raw or ids):
        raise InvalidArgument("--system", system, "absent with --raw and --ids: only a conversation has roles")
    if ids:
        try:
            parts = re.split(r"\s*,\s*|\s+", prompt.strip()) if prompt.strip() else []
            return {"prompt_ids": [int(part) for part in parts]}
        except ValueError:
            raise InvalidArgument(
                "PROMPT", prompt, "token ids separated by commas or spaces, because of --ids"
            ) from None
    if raw:
        return {"prompt": prompt}
    roles = [("system", system)] if system is not None else []
    return {"messages": [{"role": role, "content": text} for role, text in [*roles, ("user", prompt)]]}


def run(address: str, fields: dict[str, Any], timeout: float | None, as_json: bool) -> None:
    """The whole command. Raises what the client raises."""
    answer = Answer()

    def show(text: str) -> None:
        if not as_json:
            write(text)

    console = render.console(stderr=True)

    def note(said: str) -> None:
        console.print(f"specwire: {said}", soft_wrap=True)

    try:
        asyncio.run(ask(address, fields, timeout, show, answer, note))
    except KeyboardInterrupt:
        if answer.shown:
            with contextlib.suppress(OSError, OutputError):
                show("\n")
        raise
    except SpecwireError as error:
        if answer.shown and not isinstance(error, OutputError):
            show("\n")  # what is said of it stands on a line of its own
        raise _explained(error, address, timeout, answer) from None
    assert answer.final is not None
    if as_json:
        write(json.dumps(to_json(answer), ensure_ascii=False) + "\n")
        return
    if answer.ids and not answer.shown:
        show(" ".join(map(str, answer.ids)))  # a service of before that does not say that it has no tokenizer
    show("\n")
    if answer.final.rounds:
        console.print(render.rounds(answer.final.rounds))
        console.print(render.timing(answer.final.timing, answer.final.speculation.rounds))
    console.print(render.summary(answer.final), style="dim", soft_wrap=True)


def write(text: str) -> None:
    """To standard output, at once. Raises OutputError, and BrokenPipeError when whoever read has gone."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "standard output is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write the answer: {error.strerror}") from None


def _explained(error: SpecwireError, address: str, timeout: float | None, answer: Answer) -> SpecwireError:
    """The same, for somebody who sees only the command."""
    if isinstance(error, TooLate) and timeout is not None:
        return TooLate(
            f"the request did not end within {timeout:g} s (--timeout); {render.counted(len(answer.ids), 'token')} had come"
        )
    if not isinstance(error, Unavailable):
        return error
    if answer.started is not None:
        return OurFault(
            f"the service was lost in mid-answer, after {render.counted(len(answer.ids), 'token')}: {error}"
        )
    return ready.explained(error, address)


def to_json(answer: Answer) -> dict[str, Any]:
    """An answer as plain values, named as in inference.proto."""
    final, started = answer.final, answer.started
    assert final is not None
    return {
        "request_id": started.request_id if started else "",
        "model": started.model if started else "",
        "text": answer.text,
        "token_ids": answer.ids,
        "finish_reason": final.finish_reason,
        "stop": final.stop,
        "seed": final.seed,
        "max_tokens": started.max_tokens if started else None,
        "usage": render.plain(final.usage),
        "speculation": render.plain(final.speculation),
        "timing": render.plain(final.timing),
        "rounds": [render.plain(each) for each in final.rounds],
        "retries": final.retries,
    }
