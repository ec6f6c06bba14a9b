"""`specwire generate`: one request from the command line. Text goes to stdout as it comes, everything else to stderr."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deploy import ready, render
from specwire.client import Client, Event, Final, Started, Tokens
from specwire.law.errors import InvalidArgument, OurFault, Unavailable


@dataclass
class Answer:
    """What one request brought."""

    started: Started | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    final: Final | None = None

    def take(self, event: Event) -> str:
        """Adds an event. Returns the text that is new with it."""
        if isinstance(event, Started):
            self.started = event
            return ""
        if isinstance(event, Tokens):
            self.ids.extend(event.ids)
        else:
            self.final = event
        self.text += event.text
        return event.text


async def ask(address: str, fields: dict[str, Any], timeout: float | None, show: Callable[[str], None]) -> Answer:
    """Sends one request and shows the text as it comes."""
    answer = Answer()
    async with Client(address) as client:
        async for event in client.generate(timeout=timeout, **fields):
            if text := answer.take(event):
                show(text)
    if answer.final is None:
        raise OurFault("the stream ended without a final event")
    return answer


def input_fields(prompt: str, raw: bool, ids: bool, system: str | None) -> dict[str, Any]:
    """The input of a request: a conversation, a raw text, or token ids. `-` reads the prompt from standard input."""
    if prompt == "-":
        prompt = sys.stdin.read()
    if system is not None and (raw or ids):
        raise InvalidArgument("--system", system, "absent with --raw and --ids: only a conversation has roles")
    if ids:
        try:
            return {"prompt_ids": [int(part) for part in prompt.replace(",", " ").split()]}
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
    interactive = not as_json

    def show(text: str) -> None:
        if interactive:
            sys.stdout.write(text)
            sys.stdout.flush()

    try:
        answer = asyncio.run(ask(address, fields, timeout, show))
    except Unavailable as error:
        answers = asyncio.run(ready.probe(address)) is not None
        raise (error if answers else ready.unavailable(address)) from None
    finally:
        sys.stdout.flush()
    assert answer.final is not None
    if as_json:
        print(json.dumps(to_json(answer), ensure_ascii=False))
        return
    if not answer.text and answer.ids:
        show(" ".join(map(str, answer.ids)))  # no tokenizer at the service
    show("\n")
    console = render.console(stderr=True)
    if answer.final.rounds:
        console.print(render.rounds(answer.final.rounds))
        console.print(render.timing(answer.final.timing, answer.final.speculation.rounds))
    console.print(render.summary(answer.final), style="dim", soft_wrap=True)


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
        "usage": render.plain(final.usage),
        "speculation": render.plain(final.speculation),
        "timing": render.plain(final.timing),
        "rounds": [render.plain(each) for each in final.rounds],
        "retries": final.retries,
    }
