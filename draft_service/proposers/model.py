"""A smaller language model that proposes token by token: one forward pass for all sequences, one token each.

Law. Under `shared_noise` it chooses as the target would, with the same noise at the same absolute position; greedy is the same
with no noise. Under `rejection` its row is cut to the best `top_m` tokens first, and the token is drawn from that cut law with
the counter-based uniform of purpose DRAFT: the law that travels is exactly the law that was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draft_service.proposers.base import Advance, Line, Proposal, Want
from specwire.law.errors import BadLaw
from specwire.law.noise import Purpose, uniform
from specwire.law.sampling import sample_sparse
from specwire.law.values import Law
from specwire.lm.port import Feed, LanguageModel, ModelSpec
from specwire.lm.sampling_torch import Draw, choose_rows, draft_law
from specwire.wire.stopwatch import now_ns

if TYPE_CHECKING:
    import torch


class ModelProposer:
    """Any `LanguageModel` as a proposer."""

    def __init__(self, model: LanguageModel, top_m: int) -> None:
        self._model = model
        self._top_m = top_m

    @property
    def spec(self) -> ModelSpec:
        """The model's own."""
        return self._model.spec

    @property
    def num_slots(self) -> int:
        """The model's own."""
        return self._model.num_slots

    def copy(self, source: int, target: int, length: int) -> None:
        """The model's own."""
        self._model.copy(source, target, length)

    def cut(self, slot: int, length: int) -> None:
        """The model's own."""
        self._model.cut(slot, length)

    def advance(self, lines: Sequence[Line]) -> Advance:
        """See the port."""
        began = now_ns()
        feeds = [Feed(line.slot, line.start, line.tokens, 1 if line.want else 0) for line in lines]
        scores = self._model.forward(feeds)  # [lines that want, columns]
        self._model.synchronize()
        computed = now_ns()
        wants = [line.want for line in lines if line.want]
        chosen = iter(self._choose(scores, wants))
        proposals = [next(chosen) if line.want else None for line in lines]
        return Advance(proposals, computed - began, now_ns() - computed)

    def _choose(self, scores: torch.Tensor, wants: Sequence[Want]) -> list[Proposal | BadLaw]:  # [wants, columns]
        columns = self.spec.columns
        drawn = [row for row, want in enumerate(wants) if _is_drawn(want)]
        by_noise = [row for row, want in enumerate(wants) if not _is_drawn(want)]
        proposals: dict[int, Proposal | BadLaw] = {}
        if by_noise:
            draws = [_draw(wants[row]) for row in by_noise]
            rows = scores if not drawn else scores[by_noise]
            for row, token in zip(by_noise, choose_rows(rows, draws, columns), strict=True):
                proposals[row] = token if isinstance(token, BadLaw) else Proposal((token,))
        for row in drawn:
            try:
                proposals[row] = self._draw_from_cut(scores[row], wants[row])
            except BadLaw as error:
                proposals[row] = error
        return [proposals[row] for row in range(len(wants))]

    def _draw_from_cut(self, scores: torch.Tensor, want: Want) -> Proposal:  # [columns]
        opening = want.opening
        law = draft_law(scores, opening.sampling, self._top_m, self.spec.columns)
        token = sample_sparse(law, uniform(opening.seed, opening.choice, want.position, Purpose.DRAFT))
        return Proposal((token,), (law,))


def _is_drawn(want: Want) -> bool:
    return want.opening.law is Law.REJECTION and not want.opening.sampling.greedy


def _draw(want: Want) -> Draw:
    opening = want.opening
    return Draw(opening.sampling, opening.seed, opening.choice, want.position)
