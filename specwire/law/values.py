"""The values that cross between files: frozen, and refusing to be built wrong.

Nothing here knows protobuf, clocks or models. Token ids are ids of the target's vocabulary. A *position* is a token's index
in prompt plus output, from 0. Sizes that only a service knows (vocabulary, context) are checked by that service.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass, field

from specwire.law.errors import InvalidArgument

MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1


class Law(enum.Enum):
    """How a block is judged (design: acceptance laws)."""

    SHARED_NOISE = "shared_noise"
    REJECTION = "rejection"


class Source(enum.Enum):
    """Where a block came from."""

    NONE = "none"
    DRAFT_MODEL = "draft_model"
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How one row of scores becomes one law. Order of work: temperature, top-k, top-p, min-p."""

    temperature: float = 1.0
    """In [0, 100]. Zero is greedy: the law is a point mass on the best token, ties to the lower id."""
    top_k: int = 0
    """Keep the best so many tokens; 0 is no limit."""
    top_p: float = 1.0
    """In (0, 1]. Keep the smallest set of best tokens that reaches this share; 1 is no limit."""
    min_p: float = 0.0
    """In [0, 1]. Keep tokens with at least this share of the best token's probability; 0 is no limit."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:  # also refuses nan
            raise InvalidArgument("temperature", self.temperature, "in [0, 100]")
        if not 0 <= self.top_k <= MAX_U32:
            raise InvalidArgument("top_k", self.top_k, f"in [0, {MAX_U32}]")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgument("top_p", self.top_p, "in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidArgument("min_p", self.min_p, "in [0, 1]")

    @property
    def greedy(self) -> bool:
        """True when no draw is made."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """True when top-k, top-p or min-p can remove a token."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


GREEDY = SamplingSpec(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a worker must know to begin a session; part of every replay from zero."""

    law: Law
    sampling: SamplingSpec
    seed: int
    """In [0, 2^64)."""
    choice: int
    """Which of several answers to one prompt, from 0."""
    prompt_length: int
    """Tokens of the prompt, at least 1."""
    private_prompt: bool = False
    """The text is read whole, and nothing of it serves another session. No part of the fingerprint: the law is the same."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_U64:
            raise InvalidArgument("seed", self.seed, "in [0, 2^64)")
        if not 0 <= self.choice <= MAX_U32:
            raise InvalidArgument("choice", self.choice, f"in [0, {MAX_U32}]")
        if not 1 <= self.prompt_length <= MAX_U32:
            raise InvalidArgument("prompt_length", self.prompt_length, f"in [1, {MAX_U32}]")

    def fingerprint(self) -> int:
        """64 bits that start the prefix hash: two workers that agree on a hash agree on the law too.

        Sampling numbers are hashed as float32, since that is what travels."""
        spec = self.sampling
        packed = struct.pack(
            "<BfIffQII",
            1 if self.law is Law.SHARED_NOISE else 2,
            spec.temperature,
            spec.top_k,
            spec.top_p,
            spec.min_p,
            self.seed,
            self.choice,
            self.prompt_length,
        )
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"specwire").digest(), "little")


@dataclass(frozen=True, slots=True)
class SparseLaw:
    """A draft's law at one position: cut to its support *before* sampling, so this *is* the draft law."""

    ids: tuple[int, ...]
    weights: tuple[int, ...]
    """Positive integers; probability of ids[i] is weights[i] / sum(weights)."""

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) != len(self.weights):
            raise InvalidArgument(
                "draft_law", f"{len(self.ids)} ids, {len(self.weights)} weights", "as many weights as ids, at least one"
            )
        if len(set(self.ids)) != len(self.ids):
            raise InvalidArgument("draft_law.ids", self.ids, "without repeats")
        if min(self.weights) <= 0 or sum(self.weights) > MAX_U32:
            raise InvalidArgument("draft_law.weights", self.weights, f"positive, with a sum of at most {MAX_U32}")


@dataclass(frozen=True, slots=True)
class Block:
    """Proposed tokens, in order. Empty: plain decoding."""

    tokens: tuple[int, ...] = ()
    laws: tuple[SparseLaw, ...] = ()
    """One per token, or none at all: then each law is a point mass on its token (n-gram, greedy, shared noise)."""
    source: Source = field(default=Source.NONE, compare=False)

    def __post_init__(self) -> None:
        if self.laws and len(self.laws) != len(self.tokens):
            raise InvalidArgument("block.laws", len(self.laws), f"none or one per token ({len(self.tokens)})")

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Block:
        """The first `length` tokens. Under `rejection` a cut must never depend on the tokens that are cut."""
        return Block(self.tokens[:length], self.laws[:length], self.source)


EMPTY_BLOCK = Block()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's decision about one block."""

    accepted: int
    """Tokens of the block that stand, from its first."""
    added: int
    """The correction (after a refusal) or the bonus (after none). Not yet in the target's cache."""

    def __post_init__(self) -> None:
        if self.accepted < 0:
            raise InvalidArgument("verdict.accepted", self.accepted, "at least 0")
        if self.added < 0:
            raise InvalidArgument("verdict.added", self.added, "a token id")

    def committed(self, block: Block) -> tuple[int, ...]:
        """What the block becomes: its accepted tokens and the added one."""
        if self.accepted > len(block):
            raise InvalidArgument("verdict.accepted", self.accepted, f"at most the block's {len(block)} tokens")
        return (*block.tokens[: self.accepted], self.added)
