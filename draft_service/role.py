"""The draft, as the shared worker shell needs to know it."""

from __future__ import annotations

from draft_service.config import DraftConfig
from specwire.lm.port import LanguageModel
from specwire.wire.codec import Kind
from specwire.worker.service import Role
from specwire.worker.stepper import Stepper


def _build(config: DraftConfig, model: LanguageModel) -> Stepper:
    from draft_service.engine import DraftStepper
    from draft_service.proposers.model import ModelProposer

    return DraftStepper(
        ModelProposer(model, config.draft_law_top_m),
        token_budget=config.token_budget,
        max_sessions=config.max_step_sessions,
        max_block=config.model.max_block,
        max_append=config.max_append,
    )


DRAFT = Role(name="draft", kind=Kind.PROPOSE, service="specwire.v1.Draft", method="Propose", build=_build)
