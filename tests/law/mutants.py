"""Mistakes that implementations of speculative decoding have really made, each as a patch of the product's own functions.

The matrix: for each law, which proofs must catch a mistake, or that it cannot matter there (`HARMLESS`), which is asserted as
well. `enumeration` sums every path of one round, from the draft's draw to the verdict; `chi_square` holds samples of whole
answers against the exact joint law; `equality` compares tokens with plain decoding. Under `rejection` the draft's law counts,
under the others only the target's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import target_service.verify
from coordinator.ledger import Ledger
from draft_service.engine import Drafted
from draft_service.proposers import model as proposing
from draft_service.proposers.base import Proposal, Want
from specwire.law import accept
from specwire.law.noise import Purpose
from specwire.law.sampling import cut_to_sparse, law_of, sample, sample_sparse
from specwire.law.values import EMPTY_BLOCK, Block, SamplingSpec, Source, Verdict
from specwire.lm.port import Feed
from specwire.lm.table import TableModel
from specwire.lm.table_config import TableConfig

ENUMERATION, CHI_SQUARE, EQUALITY = "enumeration", "chi_square", "equality"
Proofs = tuple[str, ...]
HARMLESS: Proofs = ()

TARGET = TableConfig(vocab_size=4, seed=3, sharpness=1.5, name="target")
DRAFT = TableConfig(vocab_size=4, seed=3, sharpness=1.5, disagreement=0.55, noise_seed=5, name="draft")
"""About half of what it proposes is accepted. Every token of the context counts, its place included."""
PROMPT = (1, 2)
TOKENS = 4
TOP_M = 2
SPEC = SamplingSpec(temperature=0.9, top_p=0.85)
"""A top-p that cuts: 68 of 256 continuations are possible."""


@dataclass(frozen=True)
class Mistake:
    """One seeded mistake."""

    what: str
    patch: Callable[[pytest.MonkeyPatch], None]
    rejection: Proofs
    """Proofs that must catch it under this law; none: it cannot matter."""
    shared_noise: Proofs = HARMLESS
    greedy: Proofs = HARMLESS


def _ratio_inverted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accept, "accept_probability", lambda target, draft: min(1.0, draft / max(target, 1e-300)))


def _correction_from_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accept, "residual", lambda target, draft: target)


def _bonus_from_first_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accept, "bonus_row", lambda block: 0)


def _accept_with_the_drafts_draw(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accept, "accepts", lambda chance, position, draws: draws(position, Purpose.DRAFT) < chance)


def _correct_with_the_draw_that_refused(patch: pytest.MonkeyPatch) -> None:
    original = accept.judge_rejection

    def judge(target_law: Any, block: Block, first_position: int, draws: accept.Uniforms) -> Verdict:
        def reused(position: int, purpose: Purpose) -> float:
            return draws(position, Purpose.ACCEPT if purpose is Purpose.CORRECTION else purpose)

        return original(target_law, block, first_position, reused)

    patch.setattr(target_service.verify, "judge_rejection", judge)


def _sampled_from(law_to_sample: Callable[[np.ndarray, Want], Any], declared_too: bool = False) -> Any:
    """A proposer that draws from one law and states the right one, or the same."""

    def draw(self: proposing.ModelProposer, scores: torch.Tensor, want: Want) -> Proposal:
        row, opening = scores.numpy(), want.opening
        drawn = law_to_sample(row, want)
        stated = drawn if declared_too else cut_to_sparse(law_of(row, opening.sampling), TOP_M)
        u = proposing.uniform(opening.seed, opening.choice, want.position, Purpose.DRAFT)
        return Proposal((sample(drawn, u) if isinstance(drawn, np.ndarray) else sample_sparse(drawn, u),), (stated,))

    return draw


def _full_law_sampled(patch: pytest.MonkeyPatch) -> None:
    full = _sampled_from(lambda row, want: law_of(row, SamplingSpec(temperature=want.opening.sampling.temperature)))
    patch.setattr(proposing.ModelProposer, "_draw_from_cut", full)


def _full_law_sampled_and_believed(patch: pytest.MonkeyPatch) -> None:
    _full_law_sampled(patch)
    patch.setattr(accept, "draft_law_at", lambda block, j: block.laws[j])
    patch.setattr(
        accept,
        "draft_probability",
        lambda draft, token: draft.weights[draft.ids.index(token)] / sum(draft.weights) if token in draft.ids else 1e-9,
    )


def _colder(row: np.ndarray, want: Want) -> Any:
    return cut_to_sparse(law_of(row, SamplingSpec(temperature=want.opening.sampling.temperature / 3)), TOP_M)


def _temperature_not_declared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proposing.ModelProposer, "_draw_from_cut", _sampled_from(_colder))


def _temperature_of_its_own(patch: pytest.MonkeyPatch) -> None:
    original = proposing._draw

    def other(want: Want) -> Any:
        draw = original(want)
        return type(draw)(SamplingSpec(temperature=draw.spec.temperature * 3), draw.seed, draw.choice, draw.position)

    patch.setattr(proposing, "_draw", other)
    patch.setattr(proposing.ModelProposer, "_draw_from_cut", _sampled_from(_colder, declared_too=True))


def _weak_positions_dropped(patch: pytest.MonkeyPatch) -> None:
    def kept(self: Drafted) -> Block:
        for index, token in enumerate(self.tokens):
            laws = self.laws[index : index + 1]
            weak = all(law.weights[law.ids.index(token)] < max(law.weights) for law in laws) if laws else token > 1
            if weak:
                return Block(tuple(self.tokens[:index]), tuple(self.laws[:index]), Source.DRAFT_MODEL)
        return Block(tuple(self.tokens), tuple(self.laws), Source.DRAFT_MODEL)

    patch.setattr(Drafted, "block", kept)


def _blocks_given_up_for_what_they_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_sound", lambda self, block: EMPTY_BLOCK if 3 in block.tokens else block)


def _stale_cache(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """What was refused stays in the cache: a cell that was written once is not written again."""

    def patch(patch: pytest.MonkeyPatch) -> None:
        original = TableModel.forward

        def forward(self: TableModel, feeds: Sequence[Feed]) -> torch.Tensor:
            if self.config.name != name:
                return original(self, feeds)
            return original(self, [_with_old_tokens(self, feed) for feed in feeds])

        patch.setattr(TableModel, "forward", forward)

    return patch


def _with_old_tokens(model: TableModel, feed: Feed) -> Feed:
    held = model._lengths[feed.slot] if feed.start else 0  # a new session begins at 0, and is none of this
    old = [int(cell) & 0xFFFFFFFF for cell in model._cells[feed.slot, feed.start : held]]
    return Feed(feed.slot, feed.start, [*old, *feed.tokens[len(old) :]][: len(feed.tokens)], feed.rows)


def _noise_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    original = target_service.verify.JudgeItem.draw
    patch.setattr(target_service.verify.JudgeItem, "draw", lambda self, j: original(self, 0))


def _noise_not_shared(patch: pytest.MonkeyPatch) -> None:
    original = proposing._draw

    def other(want: Want) -> Any:
        draw = original(want)
        return type(draw)(draw.spec, draw.seed ^ 1, draw.choice, draw.position)

    patch.setattr(proposing, "_draw", other)


def _filters_forgotten_by_the_judge(patch: pytest.MonkeyPatch) -> None:
    def bare(spec: SamplingSpec) -> SamplingSpec:
        return SamplingSpec(temperature=spec.temperature)

    choose, law = target_service.verify.choose_row, target_service.verify.fast_law
    patch.setattr(target_service.verify, "fast_law", lambda row, spec: law(row, bare(spec)))
    patch.setattr(
        target_service.verify,
        "choose_row",
        lambda row, draw: choose(row, type(draw)(bare(draw.spec), draw.seed, draw.choice, draw.position)),
    )


MISTAKES = [
    Mistake("ratio inverted", _ratio_inverted, (ENUMERATION,)),
    Mistake("correction drawn from the target instead of the difference", _correction_from_target, (ENUMERATION,)),
    Mistake("bonus from the wrong row", _bonus_from_first_row, (ENUMERATION,), (EQUALITY,), (EQUALITY,)),
    Mistake("acceptance draw is the draft's draw", _accept_with_the_drafts_draw, (ENUMERATION, CHI_SQUARE)),
    Mistake("correction drawn with the draw that refused", _correct_with_the_draw_that_refused, (ENUMERATION,)),
    # Caught by its rounding alone, 1e-8: a token outside its stated law is judged as a point mass, which makes it right again.
    Mistake("sampled from the full law, verified with the cut one", _full_law_sampled, (ENUMERATION,)),
    Mistake("the same, and tokens outside the cut are believed", _full_law_sampled_and_believed, (ENUMERATION,)),
    Mistake("draft temperature not the declared one", _temperature_not_declared, (ENUMERATION,)),
    Mistake("draft temperature of its own, and declared", _temperature_of_its_own, HARMLESS),
    Mistake("position kept only if its own token was likely", _weak_positions_dropped, (ENUMERATION, CHI_SQUARE)),
    Mistake("block given up for what it holds", _blocks_given_up_for_what_they_hold, (ENUMERATION,)),
    Mistake(
        "stale cache of the target after a refusal", _stale_cache("target"), (CHI_SQUARE,), (EQUALITY,), (EQUALITY,)
    ),
    Mistake("stale cache of the draft after a refusal", _stale_cache("draft"), HARMLESS),
    Mistake("noise of the block's first row at every row", _noise_of_the_first_row, HARMLESS, (EQUALITY,)),
    Mistake("draft's noise not the target's", _noise_not_shared, HARMLESS),
    Mistake("filters forgotten by the judge", _filters_forgotten_by_the_judge, (ENUMERATION,), (EQUALITY,)),
]
