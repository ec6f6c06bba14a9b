"""The controller against the best fixed choice in hindsight, on services with known costs.

Each case generates four answers of 300 tokens, learning included, and compares what its choices cost on average, so that luck in
acceptance does not count.
"""

from __future__ import annotations

import pytest

from tests.support.replay import FLAT, STEEP, Replay, World

SHAPES = {"flat": FLAT, "steep": STEEP}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("link_ms", [0, 20, 80])
@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8, 0.95])
def test_close_to_the_best_and_never_worse_than_plain(shape: str, link_ms: int, chance: float) -> None:
    """Within 8 % of hindsight everywhere, and never more than 3 % behind plain decoding."""
    world = World(SHAPES[shape], acceptance=lambda position: chance, draft_link_us=1_000 * link_ms)
    replay = Replay(world, seed=17)
    for _ in range(4):
        replay.request(300)
    best, _ = world.best_fixed(8)

    assert replay.us_per_token() < 1.08 * best
    assert replay.us_per_token() < 1.03 * world.plain_us()


@pytest.mark.parametrize("sessions", [8, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_load(shape: str, sessions: int) -> None:
    """The same with many sessions in a step, where each further row costs all of them."""
    world = World(SHAPES[shape], acceptance=lambda position: 0.6, sessions=sessions, draft_link_us=2_000)
    replay = Replay(world, seed=18)
    for _ in range(4):
        replay.request(300)
    best, _ = world.best_fixed(8)

    assert replay.us_per_token() < 1.05 * best
    assert replay.us_per_token() < 1.03 * world.plain_us()


@pytest.mark.parametrize("decline", [0.95, 0.8])
def test_acceptance_that_falls_along_the_block(decline: float) -> None:
    """Positions are judged one by one: a draft that is good for two tokens drafts about two."""
    world = World(acceptance=lambda position: 0.9 * decline ** (position * position), draft_link_us=5_000)
    replay = Replay(world, seed=19)
    for _ in range(4):
        replay.request(300)
    best, _ = world.best_fixed(8)

    assert replay.us_per_token() < 1.05 * best
