"""What a model must be able to do to draft or to judge. Two shipped models do it: `table.py` and `torch_lm.py`.

A model owns a fixed number of cache slots. One sequence holds one slot. Writing at `start` makes everything the slot held
from `start` on invalid; so cutting back is choosing a smaller `start`, and costs nothing. One thread calls a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from specwire.law.values import SamplingSpec

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class Feed:
    """One sequence's part of a forward pass. Feeds of one pass may differ in every field."""

    slot: int
    start: int
    """Tokens of the slot that are cached and stay valid: tokens[0] has this position."""
    tokens: Sequence[int]
    """At least one. Written to the cache at start, start + 1, ..."""
    rows: int
    """Scores are returned for the last so many tokens; 0 for a prompt chunk whose scores nobody needs."""


@dataclass(frozen=True)
class ModelSpec:
    """What a model is. Immutable; measured capacity is a result and never written back."""

    name: str
    architecture: str
    vocab_size: int
    """Real tokens: scores of padding rows never leave the model (they are cut off or minus infinity)."""
    vocabulary: tuple[bytes, ...]
    """Token of each id in the tokenizer's own spelling, for comparison. Empty tuple when the model has no tokenizer."""
    max_context: int
    """Longest sequence, block included."""
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingSpec
    """From the model's generation config."""
    device: str
    precision: str
    fingerprint: str
    """Changes when weights' identity or a setting that changes scores changes."""
    columns: np.ndarray | None = field(default=None, compare=False)
    """Reduced draft vocabulary: target id of each score column, ascending, int64 [columns] (EAGLE-3's d2t + arange).
    None: column = target id."""
    threads: int = 0
    """Compute threads; 0 when the device decides."""


class LanguageModel(Protocol):
    """The port. Not thread-safe: the engine thread is its sole owner."""

    @property
    def spec(self) -> ModelSpec:
        """What the model is. Does not mutate."""

    @property
    def num_slots(self) -> int:
        """Cache slots; slot ids are 0 .. num_slots - 1. Fixed at construction."""

    @property
    def capacity(self) -> int:
        """Tokens a slot holds; start + len(tokens) of a feed must not exceed it. What a batched pass needs for padding is the
        model's own affair and not counted here."""

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Writes every feed's tokens to its slot and returns scores (logits), float32 or float64, [sum(rows), columns], in the
        order of feeds and tokens. Row r belongs to the token after the r-th wanted token. Feeds name distinct slots.
        Raises ValueError on a feed that breaks the above, before anything is written. The next call may overwrite the result.
        Blocks until the scores are readable on CPU models; on CUDA it is asynchronous."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Slot `target` holds the first `length` tokens of slot `source` from now on, and nothing else. Raises ValueError, before
        anything is changed, where `source` holds fewer or is `target`."""

    def cut(self, slot: int, length: int) -> None:
        """Slot `slot` holds its first `length` tokens from now on, and nothing else: what another sequence left behind them does no
        harm. Raises ValueError, before anything is changed, where it holds fewer."""

    def synchronize(self) -> None:
        """Waits until the device has done all that was asked of it, for honest timing. No-op on CPU."""
