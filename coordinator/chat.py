"""A conversation to the text its model was trained on, as Hugging Face renders chat templates.

Law. The template is the operator's code and runs in a sandbox that cannot change what it is given. Whatever goes wrong inside it
for one conversation is that request's fault and says so; a template that cannot even be compiled is refused when it is loaded.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specwire.law.errors import InvalidArgument


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. For serving its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, ensure_ascii: bool = False
) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


ROLES = ("system", "user", "assistant", "tool", "developer")
"""Who can speak. Which of them a model knows its template says; others are slips of the pen, which most templates let pass."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, Any],
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`special_tokens`: bos_token, eos_token and the like, as the template names them.
        `now` is for templates that print the date.

        Raises InvalidArgument when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidArgument("chat_template", source, f"a template that compiles ({error})") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation with the beginning of the assistant's next turn. Raises InvalidArgument naming the field."""
        if not messages:
            raise InvalidArgument("chat.messages", [], "at least one message")
        for index, message in enumerate(messages):
            if (role := message.get("role")) not in ROLES:
                raise InvalidArgument(f"chat.messages[{index}].role", role, f"one of {', '.join(ROLES)}")
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # any kind: the template is foreign code
            roles = [m["role"] for m in messages]
            raise InvalidArgument(
                "chat.messages",
                roles,
                f"a conversation that the model's chat template takes ({error or type(error).__name__})",
            ) from error
