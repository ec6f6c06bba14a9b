"""Ratios and their intervals."""

from __future__ import annotations

import pytest

from deploy.bench.statistics import bootstrap, median_ratio, shown, total_ratio


def test_one_pair_has_no_interval() -> None:
    """Nothing could be resampled, and an interval of no width would look like certainty."""
    found = bootstrap([(3.0, 2.0)], median_ratio)

    assert ("1.500 (n=1)", "1.50") == (str(found), shown(found.plain()))
    assert {"value": 1.5, "low": None, "high": None, "pairs": 1} == found.plain()


def test_pairs_that_agree_have_a_narrow_one() -> None:
    """And it is shown."""
    found = bootstrap([(3.0, 2.0)] * 4, total_ratio)

    assert "1.500 [1.500, 1.500] (n=4)" == str(found)
    assert "1.50 [1.50, 1.50]" == shown(found.plain())


def test_no_pairs_are_an_error() -> None:
    """Nothing was measured."""
    with pytest.raises(ValueError, match="no pairs"):
        bootstrap([], median_ratio)
