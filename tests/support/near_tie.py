"""Tells a near-tie of floating point from a bug, where two runs that should give the same tokens do not.

Law. Kernels depend on the shape of a pass, so the same tokens give scores that differ in the last digits. The *row difference* is
the most by which any row that a service could have computed at a position differs from that row in float64. A token *may win* when
some row within that difference of the float64 row makes it win: noise included, and with filters whose edge may lie on either side
of it. Two rows are each within the difference, so scores are told apart by no less than twice the difference. At the first place
where two sequences part, both tokens must be such that may win, else it is a bug. What comes behind that place is not compared.

Every near-tie is printed, counted, and held against a limit (`Tally`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specwire.law.noise import Floats, gumbel, noise_bits, row_key
from specwire.law.sampling import choose
from specwire.law.values import GREEDY, SamplingSpec

if TYPE_CHECKING:
    from specwire.lm.torch_lm import TorchModel

Mask = npt.NDArray[np.bool_]
Rescore = Callable[[Sequence[int]], tuple[Floats, float]]
"""From a prefix to the float64 row of the token after it, [vocab], and the row difference."""

WIDTHS = (1, 2, 4, 9)
"""Lengths of passes (block + 1) whose rows are measured."""


def may_win(row: Floats, spec: SamplingSpec, noise: Floats, difference: float) -> Mask:
    """Which tokens some row within `difference` of this one would choose. [vocab], [vocab] -> [vocab]."""
    if difference == 0.0:  # then there is no excuse, not even for an exact tie
        mask = np.zeros(len(row), dtype=np.bool_)
        mask[choose(row, spec, noise)] = True
        return mask
    twice = 2 * difference / (spec.temperature or 1.0)
    scaled = row / (spec.temperature or 1.0)
    may, must = survival(scaled, spec, twice)
    race = scaled if spec.greedy else scaled + noise
    # a token within reach of the best score survives for certain, though not which one
    certain = max(race[scaled >= scaled.max() - twice].min(), race[must].max(initial=-np.inf))
    return may & (race >= certain - twice)


def survival(scaled: Floats, spec: SamplingSpec, twice: float) -> tuple[Mask, Mask]:
    """Tokens that may survive the filters, and those that must, when scores may move by half of `twice`. [vocab] -> 2 x [vocab]."""
    may = scaled > -np.inf
    must = may.copy()
    if spec.greedy or not spec.filtered:
        return may, must
    ranked = np.sort(scaled[may])[::-1]
    if 0 < spec.top_k < len(ranked):
        may &= scaled >= ranked[spec.top_k - 1] - twice
        must &= scaled > ranked[spec.top_k] + twice
        ranked = ranked[: spec.top_k]
    if spec.top_p < 1.0:
        reached = np.concatenate([[0.0], np.cumsum(np.exp(ranked - ranked[0]))])
        # shares move by at most exp(twice): a weight and the total by half of it each
        above = np.searchsorted(-ranked, -(scaled + twice), side="left")
        near = np.searchsorted(-ranked, -(scaled - twice), side="right")
        least = reached[above] * np.exp(-twice)
        most = (reached[near] - np.exp(np.minimum(scaled - ranked[0], 0.0))) * np.exp(twice)
        may &= least < spec.top_p * reached[-1]
        must &= most < spec.top_p * reached[-1]
    if spec.min_p > 0.0:
        edge = ranked[0] + np.log(spec.min_p)
        may &= scaled >= edge - twice
        must &= scaled >= edge + twice
    return may, must


@dataclass(frozen=True)
class Parting:
    """Where two sequences part, and what the float64 row says of the two tokens."""

    index: int
    """In the output, from 0."""
    tokens: tuple[int, int]
    gap: float
    """How far the two are apart with the noise included, in scores."""
    difference: float
    """The row difference, in scores."""
    candidates: int
    """Tokens that may win."""
    near_tie: bool
    """Both tokens are among them."""


def part(
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
    rescore: Rescore,
    spec: SamplingSpec = GREEDY,
    seed: int = 0,
) -> Parting | None:
    """The first difference between two outputs, judged; None when there is none. Ending sooner than the other is a bug."""
    if tuple(expected) == tuple(actual):
        return None
    index = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
    if index is None:
        return Parting(min(len(expected), len(actual)), (-1, -1), float("inf"), 0.0, 0, False)
    first, second = expected[index], actual[index]
    row, difference = rescore([*prompt, *expected[:index]])
    noise = gumbel(noise_bits(row_key(seed, 0, len(prompt) + index), range(len(row))))
    winners = may_win(row, spec, noise, difference)
    race = row if spec.greedy else row + spec.temperature * noise
    return Parting(
        index,
        (first, second),
        float(abs(race[first] - race[second])),
        difference,
        int(winners.sum()),
        bool(winners[first] and winners[second]),
    )


@dataclass
class Tally:
    """Compares sequences and keeps count. A bug fails at once; near-ties fail when there are too many (`settle`)."""

    rescore: Rescore
    name: str = ""
    sequences: int = 0
    partings: list[Parting] = field(default_factory=list)

    def compare(
        self,
        prompt: Sequence[int],
        expected: Sequence[int],
        actual: Sequence[int],
        spec: SamplingSpec = GREEDY,
        seed: int = 0,
    ) -> None:
        """Two outputs for one prompt, all as ids."""
        self.sequences += 1
        parting = part(prompt, expected, actual, self.rescore, spec, seed)
        if parting is None:
            return
        assert parting.near_tie, f"not a near-tie: {parting}\nexpected {list(expected)}\nactual   {list(actual)}"
        self.partings.append(parting)

    def report(self) -> str:
        """One line."""
        found = "; ".join(f"at {p.index}, {p.gap:.1e} apart, rows differ by {p.difference:.1e}" for p in self.partings)
        return (
            f"{self.name}: {len(self.partings)} near-ties in {self.sequences} sequences{f' ({found})' if found else ''}"
        )

    def settle(self, one_in: int = 20) -> None:
        """At most one sequence in so many may have parted; one is always allowed."""
        assert len(self.partings) <= max(1, self.sequences / one_in), self.report()


def rescore_by(model: TorchModel) -> Rescore:
    """Rows of the model's own weights in float64, and how far its passes of any length are from them. Uses slot 0."""
    from specwire.lm.port import Feed

    def rescore(tokens: Sequence[int]) -> tuple[Floats, float]:
        tokens = list(tokens)
        row: Floats = model.score_sequence(tokens)[-1].numpy()
        seen = np.isfinite(row)
        difference = 0.0
        for width in WIDTHS:
            start = max(0, len(tokens) - width)
            if start:
                model.forward([Feed(0, 0, tokens[:start], 0)])
            scores = model.forward([Feed(0, start, tokens[start:], 1)])[0].numpy()
            difference = max(difference, float(np.abs(scores - row)[seen].max()))
        return row, difference

    return rescore
