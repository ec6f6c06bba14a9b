"""The target, as the shared worker shell needs to know it."""

from __future__ import annotations

from specwire.lm.port import LanguageModel
from specwire.wire.codec import Kind
from specwire.worker.service import Role
from specwire.worker.stepper import Stepper
from target_service.config import TargetConfig


def _build(config: TargetConfig, model: LanguageModel) -> Stepper:
    from target_service.engine import TargetStepper

    return TargetStepper(
        model,
        token_budget=config.token_budget,
        max_sessions=config.max_step_sessions,
        max_block=config.model.max_block,
        max_append=config.max_append,
        linger=config.linger,
    )


TARGET = Role(name="target", kind=Kind.VERIFY, service="specwire.v1.Target", method="Verify", build=_build)
