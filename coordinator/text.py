"""Text to ids and back, by the model's own tokenizer.

Law. Special tokens are added once: by the tokenizer for raw text, by the chat template for a conversation. What a caller sends is
never cut or padded here, whatever the tokenizer's file says. Text that cannot be tokenized is the caller's fault and says why.

Needs the `tokenizers` library alone; the model is elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from coordinator.chat import ChatTemplate
from coordinator.detokenize import MARK, ByteLevelStream, PieceStream, TextStream
from specwire.law.errors import InvalidArgument
from specwire.wire.info import vocabulary_fingerprint


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """One model's tokenizer. Not changed after loading."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`load` is the usual way. `eos_token_ids`: from the model's generation config."""
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._chat_template = chat_template
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        spelling: dict[str, int] = library.get_vocab(with_added_tokens=True)
        self._vocabulary: list[bytes] = [b""] * (max(spelling.values(), default=-1) + 1)
        for token, i in spelling.items():
            self._vocabulary[i] = token.encode()
        added = library.get_added_tokens_decoder()
        self._special: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        kinds = _decoder_kinds(library)
        self._byte_level = kinds in (["ByteLevel"], ["ByteLevel", "Fuse"])
        self._hold_marks = "ByteLevel" in kinds
        # A byte of the text is a character of a token, unless text is changed before, or swallowed by an added token.
        keeps_all = library.normalizer is None and not any(token.lstrip or token.rstrip for token in added.values())
        self._longest = max(map(len, spelling), default=0) if self._byte_level and keeps_all else 0
        self._bytes: dict[int, bytes] = {}
        self._byte_of: dict[int, int] = {}
        if "ByteFallback" in kinds:
            self._byte_of = {spelling[s]: b for b in range(256) if (s := f"<0x{b:02X}>") in spelling}

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a model's folder or a tokenizer.json. Raises InvalidArgument naming the file that is missing or broken."""
        path = Path(path)
        folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
        if not file.is_file():
            raise InvalidArgument("tokenizer", str(path), "a tokenizer.json or a folder that holds one")
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise InvalidArgument(
                "tokenizer", str(file), f"a file that the tokenizers library reads ({error})"
            ) from error
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        source = _chat_template_source(folder, config)
        template = ChatTemplate(source, special) if source is not None else None
        return cls(library, template, _eos_token_ids(folder, library, special))

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, chat={self._chat_template is not None}, eos={self.eos_token_ids})"
        )

    @property
    def vocab_size(self) -> int:
        """Highest id + 1."""
        return len(self._vocabulary)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids without text when special tokens are skipped."""
        return self._special

    @property
    def has_chat_template(self) -> bool:
        """True when `encode_chat` can be used."""
        return self._chat_template is not None

    def vocabulary(self) -> list[bytes]:
        """The token of each id in the tokenizer's own spelling, UTF-8; empty where an id has none."""
        return list(self._vocabulary)

    def fingerprint(self) -> str:
        """As workers report theirs, so that equal means the same token for every id."""
        return vocabulary_fingerprint(self._vocabulary)

    def encode(self, text: str, *, field: str = "prompt", allow_empty: bool = False) -> list[int]:
        """Ids of a raw text, with the special tokens that the tokenizer adds by itself.

        Raises InvalidArgument naming `field` for text that is not Unicode, or that gives no token unless `allow_empty`."""
        ids = self._encode(text, field, add_special_tokens=True)
        if not ids and not allow_empty:
            raise InvalidArgument(field, text, "at least one token (this model's tokenizer adds no begin token)")
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation of {"role", "content"} with a generation prompt. Special tokens are the template's affair."""
        if self._chat_template is None:
            raise InvalidArgument(
                "chat", f"{len(messages)} messages", "absent: this model has no chat template; use prompt"
            )
        for index, message in enumerate(messages):
            for key, value in message.items():
                _check_unicode(value, f"chat.messages[{index}].{key}")
        ids = self._encode(self._chat_template.render(messages), "chat", add_special_tokens=False)
        if not ids:
            raise InvalidArgument("chat", f"{len(messages)} messages", "at least one token after the chat template")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids. Raises InvalidArgument for an id outside the vocabulary."""
        ids = list(ids)  # the library takes no other sequence
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InvalidArgument("ids", i, f"in [0, {self.vocab_size})")
        text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        if MARK not in text or self._byte_level:
            return text
        stream = self.stream(skip_special_tokens)  # marks are our own affair, see coordinator.detokenize
        return stream.push(ids) + stream.flush()

    def stream(self, skip_special: bool = True) -> TextStream:
        """A fresh stream for one answer."""
        skip = self._special if skip_special else frozenset[int]()
        if self._byte_level:
            return ByteLevelStream(self._bytes_of, skip)
        return PieceStream(
            lambda ids: self._library.decode(ids, skip_special_tokens=False), skip, self._byte_of, self._hold_marks
        )

    def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        _check_unicode(text, field)
        # of the library's two ways only this one lets other threads run
        ids: list[int] = self._library.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """No fewer tokens than this make such a text. Quick, however long it is; 0 where nothing can be said."""
        return -(-len(text) // self._longest) if self._longest else 0

    def _bytes_of(self, i: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary."""
        known = self._bytes.get(i)
        if known is None:
            token = self._vocabulary[i].decode() if 0 <= i < self.vocab_size else ""
            # A token with a character outside the spelling (added by hand) stands for its own text.
            spelled = all(c in _BYTE_OF_CHAR for c in token)
            known = self._bytes[i] = bytes([_BYTE_OF_CHAR[c] for c in token]) if spelled else token.encode()
        return known


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = text[error.start : error.end][:8]
        raise InvalidArgument(
            field, where, f"text without lone surrogates (one is at character {error.start})"
        ) from error


def _decoder_kinds(library: tokenizers.Tokenizer) -> list[str]:
    """Names of the decoder's parts in order; empty when the tokenizer has none."""
    if library.decoder is None:
        return []
    state = json.loads(library.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(file.name, str(file), f"JSON ({error})") from error
    if not isinstance(content, dict):
        raise InvalidArgument(file.name, str(file), "a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """What templates may name: bos_token and the like, each as its text."""
    special: dict[str, Any] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return special


def _chat_template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """In Hugging Face's order: its own file, a JSON file, the tokenizer's config (a text, or named ones with a `default`)."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        found = {t["name"]: t["template"] for t in found}.get("default")
    return found if isinstance(found, str) else None


def _eos_token_ids(folder: Path, library: tokenizers.Tokenizer, special: Mapping[str, Any]) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the tokenizer's own end token."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise InvalidArgument(f"{name}: eos_token_id", found, "an id or a list of ids")
            return tuple(ids)
    own = library.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return () if own is None else (own,)
