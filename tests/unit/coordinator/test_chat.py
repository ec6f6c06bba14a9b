"""Conversations to text."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from coordinator.chat import ChatTemplate
from coordinator.text import Tokenizer
from specwire.law.errors import InvalidArgument
from tests.support.tokenizers import BOS, CHAT_TEMPLATE, byte_tokenizer, save_model_folder

USER = [{"role": "user", "content": "hi"}]


def render(source: str, **special: str) -> str:
    """One user message through a template."""
    return ChatTemplate(source, special).render(USER)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'a': '<é&>'} | tojson }}", '{"a": "<é&>"}'),
        ("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}!", "hi!"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2030"),
        ("{{ tools is none and documents is none }}", "True"),
    ],
)
def test_features_templates_rely_on(source: str, expected: str) -> None:
    """What Hugging Face gives templates, ours gives too."""
    template = ChatTemplate(source, {"bos_token": BOS}, now=lambda: datetime.datetime(2030, 1, 2))

    assert expected == template.render(USER)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "has no element 5"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ messages.append(1) }}", "not safely callable|access to attribute"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
    ],
)
def test_a_template_that_fails_is_the_callers_fault(source: str, said: str) -> None:
    """Errors inside the template name the field and say what it said; it cannot leave its sandbox."""
    with pytest.raises(InvalidArgument, match=rf"chat\.messages: got \['user'\].*({said})"):
        render(source)


def test_a_template_that_does_not_compile_is_refused_at_load() -> None:
    """The operator hears of it before the first request."""
    with pytest.raises(InvalidArgument, match="chat_template"):
        ChatTemplate("{% for %}", {})


def test_a_conversation_needs_messages_with_roles() -> None:
    """Empty conversations and messages without a role are refused by name."""
    template = ChatTemplate("x", {})
    with pytest.raises(InvalidArgument, match=r"chat\.messages: got \[\]"):
        template.render([])
    with pytest.raises(InvalidArgument, match=r"chat\.messages\[1\]\.role"):
        template.render([*USER, {"role": "", "content": "x"}])


@pytest.mark.parametrize("role", ["wizard", "SYSTEM", "user ", "assistent"])
def test_a_role_that_nobody_has_is_refused(role: str) -> None:
    """Most templates would put it into the prompt, and the model would answer something else."""
    with pytest.raises(
        InvalidArgument, match=r"messages\[0\]\.role: got .*, must be one of system, user, assistant, tool"
    ):
        ChatTemplate("x", {}).render([{"role": role, "content": "x"}])


def test_model_without_template_refuses_conversations() -> None:
    """The error says what to use instead."""
    with pytest.raises(InvalidArgument, match="no chat template; use prompt"):
        Tokenizer(byte_tokenizer()).encode_chat(USER)


def test_template_that_renders_nothing_is_refused(tmp_path: Path) -> None:
    """No tokens, no start."""
    folder = save_model_folder(tmp_path, byte_tokenizer(), chat_template="{# nothing #}")
    with pytest.raises(InvalidArgument, match="at least one token"):
        Tokenizer.load(folder).encode_chat(USER)


def test_where_templates_are_found(tmp_path: Path) -> None:
    """Its own file wins over the tokenizer's config, which may hold one text or several named ones."""
    library = byte_tokenizer()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    folders = [
        save_model_folder(tmp_path / "a", library, chat_template="file", tokenizer_config={"chat_template": "config"}),
        save_model_folder(tmp_path / "b", library, tokenizer_config={"chat_template": "config"}),
        save_model_folder(tmp_path / "c", library, tokenizer_config={"chat_template": named}),
        save_model_folder(tmp_path / "d", library, special_tokens_map={"bos_token": BOS}, chat_template=CHAT_TEMPLATE),
    ]
    loaded = [Tokenizer.load(folder) for folder in folders]

    assert ["file", "config", "named", f"{BOS}<turn>user\nhi<turn>assistant\n"] == [
        t.decode(t.encode_chat(USER), skip_special_tokens=False) for t in loaded
    ]
