"""What a table model is asked to be: its law, its script, its speed and its faults. Plain values, checked when built."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Literal

from specwire.law.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong on purpose. It strikes where every selector that is given agrees."""

    kind: Literal["raise", "nan", "sleep", "hang"]
    """raise: RuntimeError before anything is written. nan: the selected rows are not-a-number. sleep: waits `seconds`.
    hang: waits until `TableModel.release()`, at most `seconds` (0: for ever)."""
    call: int | None = None
    """Only in this pass of the model, counted from 1."""
    feed: int | None = None
    """Only this feed of a pass, from 0."""
    row: int | None = None
    """Only this wanted row of a feed, from 0."""
    first_token: int | None = None
    """Only sequences that begin with this token: marks a request whatever the batch it is in."""
    position: int | None = None
    """Only the row that scores the token at this position."""
    seconds: float = 0.0
    times: int | None = None
    """Strike at most so often; None: always."""

    def __post_init__(self) -> None:
        if self.kind not in ("raise", "nan", "sleep", "hang"):
            raise InvalidArgument("faults.kind", self.kind, "raise, nan, sleep or hang")
        if not self.seconds >= 0:
            raise InvalidArgument("faults.seconds", self.seconds, "at least 0")


@dataclass(frozen=True, slots=True)
class TableConfig:
    """A table model. Two models of equal seed, order and sharpness have the same law."""

    vocab_size: int = 16
    seed: int = 0
    """Picks the law."""
    sharpness: float = 2.0
    """Scores lie in [-sharpness, sharpness]; 0 is the uniform law."""
    order: int | None = None
    """Scores depend on the last so many tokens; None: on the whole prefix and its positions."""
    disagreement: float = 0.0
    """In [0, 1]: share of another table, `noise_seed`, mixed into the scores; and the share of scripted tokens left out.
    0: the law of `seed` alone, so a draft with it agrees with its target everywhere."""
    noise_seed: int = 1
    script: tuple[int, ...] = ()
    """Tokens that get `script_strength` on top, in order. Past its end the table goes on alone."""
    script_at: int = 0
    """Position of the script's first token, when `script_after` is None: the prompt's length."""
    script_after: int | None = None
    """The script begins after the first token of this id in the sequence, say a prompt's last token."""
    script_strength: float = 60.0
    eos_token_ids: tuple[int, ...] = ()
    max_context: int = 256
    padding_columns: int = 0
    """Columns past the vocabulary that the model has inside, with the best scores of all. They never come out."""
    columns: tuple[int, ...] | None = None
    """Reduced vocabulary: target id of each score column, ascending. None: every id."""
    tokens: tuple[str, ...] | None = None
    """Spelling of each id; None: <0>, <1>, ..."""
    name: str = "table"
    step_ms: float = 0.0
    """A pass takes at least so long, waiting and not computing ..."""
    row_ms: float = 0.0
    """... and so much longer for each token fed."""
    faults: tuple[Fault, ...] = ()

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (a class attribute that pydantic looks for)

    def __post_init__(self) -> None:
        size = self.vocab_size
        if not 1 <= size <= 2**24:
            raise InvalidArgument("table.vocab_size", size, "in [1, 2^24]")
        if not 0.0 <= self.disagreement <= 1.0:
            raise InvalidArgument("table.disagreement", self.disagreement, "in [0, 1]")
        if not 0.0 <= self.sharpness < float("inf"):
            raise InvalidArgument("table.sharpness", self.sharpness, "finite, at least 0")
        if self.order is not None and self.order < 0:
            raise InvalidArgument("table.order", self.order, "at least 0, or absent")
        if self.max_context < 1:
            raise InvalidArgument("table.max_context", self.max_context, "at least 1")
        if self.padding_columns < 0:
            raise InvalidArgument("table.padding_columns", self.padding_columns, "at least 0")
        if not (self.step_ms >= 0 and self.row_ms >= 0):
            raise InvalidArgument("table.step_ms, row_ms", (self.step_ms, self.row_ms), "at least 0")
        for field, ids in (
            ("script", self.script),
            ("eos_token_ids", self.eos_token_ids),
            ("columns", self.columns or ()),
        ):
            if any(not 0 <= token < size for token in ids):
                raise InvalidArgument(f"table.{field}", ids, f"token ids in [0, {size})")
        if self.columns is not None and (not self.columns or list(self.columns) != sorted(set(self.columns))):
            raise InvalidArgument("table.columns", self.columns, "ascending without repeats, at least one")
        if self.tokens is not None and len(self.tokens) != size:
            raise InvalidArgument("table.tokens", f"{len(self.tokens)} spellings", f"one per id ({size})")

    def vocabulary(self) -> tuple[bytes, ...]:
        """Spelling of each id."""
        spelled = self.tokens if self.tokens is not None else tuple(f"<{token}>" for token in range(self.vocab_size))
        return tuple(token.encode() for token in spelled)

    def fingerprint(self) -> str:
        """Changes with anything that changes scores; speed and faults do not."""
        silent = {"step_ms", "row_ms", "faults", "name", "tokens", "max_context"}
        law = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name not in silent]
        return hashlib.blake2b(repr(law).encode(), digest_size=16).hexdigest()
