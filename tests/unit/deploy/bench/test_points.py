"""What the service adds, as the simulator is told."""

from __future__ import annotations

import pytest

from deploy.bench.points import PAIR, POINTS, Point, adds, rate, world
from deploy.bench.set_speed import Told
from specwire.client import Final
from specwire.v1 import inference_pb2 as pb


def told(sessions: int, drafted: int = 0, total_us: int = 30_000, draft_us: int = 0, target_us: int = 21_000) -> Told:
    """Passes of ten equal rounds a session, each of which commits two tokens."""
    one = pb.Round(
        drafted=drafted,
        committed=2,
        total_us=total_us,
        draft_compute_us=draft_us,
        target_compute_us=target_us,
        step_rows=drafted + 1,
    )
    final = Final("length", None, "", pb.Usage(), 0, pb.SpeculationStats(), pb.Timing(), (one,) * 10)
    return Told(1.0, (final,) * sessions, ((1,) * 20,) * sessions)


def test_ten_points() -> None:
    """No two alike, each said in words."""
    names = [str(point) for point in POINTS]

    assert (10, 10) == (len(names), len(set(names)))
    assert "8 at once, plain, target link 20 ms" == names[0]
    assert "9 at once, k=4, rotation of 3, draft link 40 ms" == names[6]
    assert {"num_speculative_tokens": "auto", "schedule": "auto", "rotation_groups": 2} == POINTS[-1].speculation()


def test_what_the_service_adds() -> None:
    """Set: 20.5 ms a row, 21.5 of three; 2.1 ms a drafted token. Of 15 more sessions each costs 200 us."""
    plain, many = told(1, total_us=24_000), told(16, total_us=27_000)
    alone = told(1, drafted=2, total_us=31_000, draft_us=4_600, target_us=21_900)
    found = adds(PAIR, alone, plain, many)

    assert pytest.approx((400.0, 200.0)) == (found.target_step, found.draft_step)
    assert pytest.approx((200.0, 4_500.0 - 400.0)) == (found.answer, found.ways)


def test_a_point_on_paper() -> None:
    """What is set, with what the service adds to it."""
    extra = adds(PAIR, told(1, 2, 31_000, 4_600, 21_900), told(1, total_us=24_000), told(16, total_us=27_000))
    made = world(Point(8, 4, "rotation", 3, draft_ms=40.0), PAIR, extra)

    assert pytest.approx((20_900.0, 23_400.0)) == (made.target.at(1), made.target.at(6))
    assert pytest.approx((2_300.0, 42_050.0, 2_050.0)) == (made.draft.at(1), made.draft_link_us, made.target_link_us)
    assert (8, 4, "rotation", 3, 0.7) == (made.sessions, made.k, made.schedule, made.groups, made.acceptance)


def test_the_rate_is_of_all_sessions() -> None:
    """Two tokens in 30 ms, eight times."""
    assert pytest.approx(8 * 2 / 0.030) == rate([told(8), told(8)])
