"""The start-up profile: what it feeds, and that it never stops a start."""

from __future__ import annotations

from specwire.lm.table import TableModel
from specwire.lm.table_config import Fault, TableConfig
from specwire.worker.profile import step_profile


def test_passes_of_one_two_four_and_eight_rows() -> None:
    """The cost of a row shows."""
    profile = step_profile(TableModel(TableConfig(step_ms=1, row_ms=1), 1), 9)

    assert len(profile) == 4
    assert profile[0] >= 2000
    assert profile[3] >= 9000


def test_small_models_and_short_blocks() -> None:
    """Only what the model can be asked for."""
    assert len(step_profile(TableModel(TableConfig(max_context=3), 1), 9)) == 2
    assert len(step_profile(TableModel(TableConfig(), 1), 4)) == 3
    assert len(step_profile(TableModel(TableConfig(), 1), 1)) == 1


def test_a_model_that_raises_has_no_profile() -> None:
    """The fault will show in serving."""
    assert step_profile(TableModel(TableConfig(faults=(Fault("raise"),)), 1), 9) == ()
