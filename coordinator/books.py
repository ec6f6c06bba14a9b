"""The service's raw counters. They only rise; rates are for the reader to form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from coordinator.session import Tally


@dataclass
class Books:
    """Since the start of the process."""

    tally: Tally = field(default_factory=Tally)
    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests: finished, failed, cancelled, refused."""
    replays: Counter[str] = field(default_factory=Counter)
    """Texts told again, by cause."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Rounds that went on without the draft, by cause."""
    guesses: Counter[str] = field(default_factory=Counter)
    """Blocks drafted ahead of a verdict: hit, miss."""
    stale_answers: int = 0
    """Answers that matched nothing and changed nothing."""
    generated_tokens: int = 0
