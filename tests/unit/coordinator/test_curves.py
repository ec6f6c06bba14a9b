"""What is learnt of a service under a schedule, and what it promises of each."""

from __future__ import annotations

import itertools
from math import prod

import pytest

from coordinator.curves import ServiceCurves
from coordinator.measure import PRIOR, ByLoad
from coordinator.schedule import RUN_AHEAD, SYNCHRONOUS, Schedule, ahead_together_us, ahead_us, rotation_us
from coordinator.window import Plan, Room
from specwire.law.tasks import StepTiming
from specwire.law.values import Source
from specwire.wire.stopwatch import Passage

DRAFT, NGRAM, NONE = Source.DRAFT_MODEL, Source.NGRAM, Source.NONE
DRAFT_LINK, DRAFT_WAY = 37, 30
TARGET_LINK, TARGET_WAY = 69, 60


def to_draft(compute_us: int) -> Passage:
    """30 us of way, and 7 in the queue."""
    return Passage(wait_us=10, transfer_us=15, queue_us=7, compute_us=compute_us, overhead_us=5)


def to_target(compute_us: int) -> Passage:
    """60 us of way, and 9 in the queue."""
    return Passage(wait_us=20, transfer_us=30, queue_us=9, compute_us=compute_us, overhead_us=10)


def verify_us(rows: float) -> float:
    """The target's step."""
    return 900 + 100 * rows


def token_us(sessions: float) -> float:
    """The draft's."""
    return 90 + 10 * sessions


def learnt(sessions: int = 1, beside: float = 1.0, curve: tuple[float, ...] = (0.8, 0.5)) -> ServiceCurves:
    """A service that knows itself, in step so far."""
    curves = ServiceCurves()
    curves.target_profile(tuple(round(verify_us(1 << n)) for n in range(5)))
    curves.draft_profile(tuple(round(token_us(1 << n)) for n in range(5)))
    curves.beside = ByLoad(beside, known=True)
    curves.sessions = sessions
    curves.curve[DRAFT] = list(curve)
    curves.observe_draft(2, to_draft(round(2 * token_us(sessions))))
    us = round(verify_us(sessions))
    curves.observe_verify(NONE, StepTiming(compute_us=us, rows=sessions, sessions=sessions, step=1), to_target(us))
    return curves


def draft_and_verdict(curves: ServiceCurves, step: int, *, k: int = 2, slower: float = 1.0) -> None:
    """A block comes and is judged, in a group of so many as are in a turn now."""
    size = -(-curves.sessions // curves.schedule.groups)
    curves.observe_draft(k, to_draft(round(slower * k * token_us(size))))
    us = round(slower * verify_us(size * (k + 1)))
    timing = StepTiming(compute_us=us, rows=size * (k + 1), sessions=size, step=step)
    curves.observe_verify(DRAFT, timing, to_target(us), beside=True)


# ------------------------------------------------------------------ what is promised


@pytest.mark.parametrize("beside", [0.9, 1.0, 1.5])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize(("groups", "sessions", "size"), [(2, 2, 1), (2, 4, 2), (2, 5, 3), (3, 7, 3), (3, 3, 1)])
def test_a_rotation_takes_what_the_formula_says(groups: int, sessions: int, size: int, k: int, beside: float) -> None:
    """Of the largest group's steps, stretched as measured; of the ways alone, since turns are in the formula."""
    curves, stretch = learnt(sessions, beside), max(1.0, beside)
    draft_us = stretch * k * token_us(size)
    expected = rotation_us(groups, draft_us, DRAFT_WAY + TARGET_WAY, stretch * verify_us(size * (k + 1)))

    assert pytest.approx(expected) == curves.schedule_us(Schedule(groups), sessions, k, 0.5, 0.3)


@pytest.mark.parametrize("beside", [0.9, 1.0, 1.5])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize(
    ("sessions", "whole", "guessed"), [(1, 0.0, 0.0), (1, 0.7, 0.4), (1, 1.0, 0.4), (1, 1.0, 1.0), (3, 0.7, 0.4)]
)
def test_running_ahead_takes_what_the_formula_says(
    sessions: int, whole: float, guessed: float, k: int, beside: float
) -> None:
    """With the acceptance's own chance of a right guess, while none was seen."""
    curves, stretch = learnt(sessions, beside), max(1.0, beside)
    expected = ahead_together_us(
        whole,
        guessed,
        k,
        stretch * token_us(sessions),
        DRAFT_WAY,
        lambda together: stretch * verify_us(round(together * (k + 1))),
        TARGET_WAY,
        sessions,
    )

    assert pytest.approx(expected) == curves.schedule_us(RUN_AHEAD, sessions, k, whole, guessed)


@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_in_step_it_takes_a_round(sessions: int, k: int) -> None:
    """With what waits for others in the links, and whatever a draft beside a step makes of it."""
    curves = learnt(sessions, beside=2.0)
    expected = k * token_us(sessions) + DRAFT_LINK + TARGET_LINK + verify_us(sessions * (k + 1))

    assert pytest.approx(expected) == curves.round_us(DRAFT, k, sessions)
    assert curves.round_us(DRAFT, k, sessions) == curves.schedule_us(SYNCHRONOUS, sessions, k, 0.7, 0.5)


def test_the_best_rate_is_that_of_the_best_length() -> None:
    """After 0.8 and 0.5 every token stands with the chance of the last; a guess must be right once more than the block is long."""
    curves = learnt(sessions=4)
    chances = [0.8, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    stands = [prod(chances[:k]) for k in range(8)]
    for schedule in (SYNCHRONOUS, RUN_AHEAD, Schedule(2), Schedule(3)):
        rates = {
            k: sum(stands[: k + 1]) / curves.schedule_us(schedule, 4, k, stands[k], stands[k + 1])
            for k in (1, 2, 3, 4, 6)
        }
        plain = [1 / (verify_us(4) + TARGET_LINK)] if schedule == SYNCHRONOUS else []
        for longest in (1, 3, 6):
            expected = max(*plain, *(rates[k] for k in rates if k <= longest), 0.0)

            assert pytest.approx(expected) == curves.best_rate(schedule, 4, longest)


def test_plain_decoding_is_a_way_to_be_in_step() -> None:
    """With a draft that never finds a token it is the best one; who takes turns or runs ahead does it for blocks."""
    curves = learnt(curve=(0.0,))
    plain = 1 / (verify_us(1) + TARGET_LINK)

    assert pytest.approx(plain) == curves.best_rate(SYNCHRONOUS, 1, 8)
    assert [True, True] == [curves.best_rate(each, 1, 8) < plain for each in (RUN_AHEAD, Schedule(2))]


def test_before_anything_is_judged_a_rate_is_that_of_the_prior() -> None:
    """For every token."""
    curves = learnt(curve=())
    expected = (1 + PRIOR) / curves.schedule_us(RUN_AHEAD, 1, 1, PRIOR, PRIOR**2)

    assert pytest.approx(expected) == curves.best_rate(RUN_AHEAD, 1, 1)


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, RUN_AHEAD, Schedule(2)])
def test_rounds_are_timed_by_the_schedule_in_force(schedule: Schedule) -> None:
    """Where it is not simply one thing after the other, and for a draft's blocks."""
    curves = learnt(sessions=4)
    curves.schedule = schedule
    timer = curves.timer(DRAFT, 4)

    assert (None, None) == (curves.timer(NGRAM, 4), curves.timer(NONE, 4))
    assert (timer is None) is (schedule == SYNCHRONOUS)
    assert timer is None or timer(3, 0.6, 0.4) == curves.schedule_us(schedule, 4, 3, 0.6, 0.4)


@pytest.mark.parametrize(
    ("curve", "schedule", "sessions", "expected"),
    [
        ((1.0, 1.0, 1.0, 0.5), SYNCHRONOUS, 1, 4),
        ((1.0, 1.0, 1.0, 0.5), RUN_AHEAD, 1, 3),  # what follows four is guessed right half as often
        ((0.8,) * 8, SYNCHRONOUS, 2, 3),
        ((0.8,) * 8, Schedule(2), 2, 6),  # the draft's time is hidden behind the other group's step
    ],
)
def test_a_block_is_as_long_as_the_schedule_makes_it_worth(
    curve: tuple[float, ...], schedule: Schedule, sessions: int, expected: int
) -> None:
    """The plan of a round counts on what is in force."""
    curves = learnt(sessions, curve=curve)
    curves.schedule = schedule
    rate, plan = curves.request(None, 8).best(Room(8, 8, None, sessions))

    assert Plan(DRAFT, expected) == plan
    assert rate >= curves.best_rate(schedule, sessions, 8)


@pytest.mark.parametrize(("k", "whole", "bonus"), [(1, 0.8, 0.5), (2, 0.8 * 0.5, 0.25), (3, 0.8 * 0.5 * 0.25, 0.25)])
def test_the_chance_of_a_guess_is_that_of_a_block_one_longer(k: int, whole: float, bonus: float) -> None:
    """The bonus is one more token that the draft has to find."""

    assert pytest.approx((whole, whole * bonus)) == learnt(curve=(0.8, 0.5, 0.25)).request(None, 8).guessed(k)


# ------------------------------------------------------------------ what is learnt


def test_ways_are_learnt_under_every_schedule() -> None:
    """What waits at a worker is no way."""
    for schedule in (SYNCHRONOUS, RUN_AHEAD, Schedule(2)):
        curves = ServiceCurves()
        curves.sessions, curves.schedule = 4, schedule
        draft_and_verdict(curves, step=1)

        assert (DRAFT_WAY, TARGET_WAY) == (curves.draft_way.at(4), curves.target_way.at(4))


def test_ways_are_learnt_by_load() -> None:
    """As links are."""
    curves = learnt(sessions=1)
    curves.sessions = 8
    curves.observe_draft(1, Passage(100, 200, 999, 5_000, 300))

    assert [DRAFT_WAY, DRAFT_WAY, 600] == [curves.draft_way.at(sessions) for sessions in (1, 2, 8)]


def test_a_rotation_teaches_nothing_of_links() -> None:
    """Its waits are those of turns, and would be counted twice; in step again they are as they were."""
    curves = learnt(sessions=4)
    links = (curves.draft_link, curves.target_link, curves.block_link, curves.crowding)
    before = [repr(each) for each in links]
    curves.schedule = Schedule(2)
    for step in range(2, 40):
        curves.observe_draft(2, Passage(110, 15, 700, 220, 5))
        timing = StepTiming(compute_us=1_500, rows=6, sessions=2, step=step)
        curves.observe_verify((DRAFT, NONE)[step % 2], timing, Passage(120, 30, 900, 1_500, 10), beside=step % 3 > 0)

    assert before == [repr(each) for each in links]
    assert curves.draft_way.at(4) == pytest.approx(130, rel=0.05)
    assert curves.target_way.at(4) == pytest.approx(160, rel=0.05)


@pytest.mark.parametrize("beside", [1.0, 2.0])
def test_who_decodes_plainly_may_have_been_waited_with(beside: float) -> None:
    """A target lingers for those that draft. That is no way of a plain round, whether or not steps take longer beside a draft."""
    curves = learnt(sessions=4, beside=beside)
    before = curves.plain_us(4)
    for step in range(2, 60):
        timing = StepTiming(compute_us=round(verify_us(4)), rows=4, sessions=4, step=step)
        curves.observe_verify(NONE, timing, Passage(20, 30, 8_000, round(verify_us(4)), 10), beside=True)

    assert pytest.approx(before) == curves.plain_us(4)


@pytest.mark.parametrize(("beside", "queue_us"), [(True, 0), (False, 0), (False, 8_000)])
def test_a_way_that_changed_is_seen(beside: bool, queue_us: int) -> None:
    """While no draft works; a shorter one also beside one, since that makes none shorter."""
    curves = learnt(sessions=4)
    for step in range(2, 200):
        timing = StepTiming(compute_us=round(verify_us(4)), rows=4, sessions=4, step=step)
        curves.observe_verify(NONE, timing, Passage(5, 5, queue_us, round(verify_us(4)), 0), beside=beside)

    assert curves.target_link.at(4) == pytest.approx(10 + queue_us, rel=0.05)


@pytest.mark.parametrize(
    ("queue_us", "expected"),
    [(5_000, TARGET_WAY), (0, TARGET_LINK)],
    ids=["waits that are over", "a way that became longer"],
)
def test_in_a_rotation_plain_decoding_has_no_longer_way_than_is_seen(queue_us: int, expected: int) -> None:
    """What a plain round takes is not observed there; what was observed before may be long ago."""
    curves = learnt(sessions=4)
    if queue_us:
        for step in range(2, 60):
            timing = StepTiming(compute_us=round(verify_us(4)), rows=4, sessions=4, step=step)
            curves.observe_verify(NONE, timing, Passage(20, 30, queue_us, round(verify_us(4)), 10))
    synchronous = curves.plain_us(4)
    curves.schedule = Schedule(2)
    for step in range(60, 200):
        timing = StepTiming(compute_us=1_500, rows=6, sessions=2, step=step)
        way_us = 0 if queue_us else 500
        curves.observe_verify(DRAFT, timing, Passage(20, 30 + way_us, 4_000, 1_500, 10), beside=True)
    in_turns = curves.plain_us(4)

    assert (True, verify_us(4) + expected) == (in_turns <= synchronous, pytest.approx(in_turns, abs=1))


def test_a_step_is_one_of_its_target() -> None:
    """Steps of two targets with the same number are two; each counts once, however many verdicts come of it."""
    one, two = learnt(), learnt()
    before = one.verify.at(1)
    for target in ("target-0", "target-1", "target-1"):
        timing = StepTiming(compute_us=4_000, rows=1, sessions=2, step=2)
        two.observe_verify(NONE, timing, to_target(4_000), target=target)
        one.observe_verify(NONE, timing, to_target(4_000), target="target-0")

    assert before < one.verify.at(1) < two.verify.at(1)
    again = learnt()
    for target in ("target-0", "target-1"):
        again.observe_verify(
            NONE, StepTiming(compute_us=4_000, rows=1, sessions=2, step=2), to_target(4_000), target=target
        )
    assert again.verify.at(1) == two.verify.at(1)


def test_a_rotation_that_comes_first_leaves_links_unknown() -> None:
    """As if no draft had been asked."""
    curves = ServiceCurves()
    curves.sessions, curves.schedule = 4, Schedule(2)
    draft_and_verdict(curves, step=1)

    assert [False] * 3 == [each.known for each in (curves.draft_link, curves.target_link, curves.block_link)]


@pytest.mark.parametrize("schedule", [SYNCHRONOUS, Schedule(2), Schedule(3)])
def test_a_draft_is_as_fast_as_its_steps_with_one_group(schedule: Schedule) -> None:
    """Three of seven are at the draft in a rotation of three, and a step takes as long as that."""
    curves = learnt(sessions=7)
    curves.schedule = schedule
    for step in range(2, 60):
        draft_and_verdict(curves, step, slower=2.0)

    assert 2 * token_us(1) == pytest.approx(curves.draft_token.value, rel=0.01)


def test_steps_of_a_rotation_are_learnt_as_any() -> None:
    """Without a draft beside them, or where that makes no difference."""
    curves = learnt(sessions=4)
    curves.schedule = Schedule(2)
    for step in range(2, 60):
        timing = StepTiming(compute_us=3_000, rows=6, sessions=2, step=step)
        curves.observe_verify(DRAFT, timing, to_target(3_000))

    assert curves.verify.at(6) == pytest.approx(3_000, rel=0.01)


def hit_rate(curves: ServiceCurves) -> float:
    """What is thought of a guess whose chance by acceptance is 0.4, after a block that stands: read off the time of a round, which
    falls evenly with it."""
    never, always = (ahead_us(1.0, hit, 2, token_us(1), DRAFT_WAY, verify_us(3), TARGET_WAY) for hit in (0.0, 1.0))
    return (never - curves.schedule_us(RUN_AHEAD, 1, 2, 1.0, 0.4)) / (never - always)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], 0.4),
        ([False], 0.4 * 4 / 4.4),
        ([True], 0.4 * 5 / 4.4),
        ([True, False, False, True, False] * 40, 0.4),  # as expected
        ([False] * 1000, 0.4 * 4 / 84),  # 200 count
        ([True] * 1000, 0.4 * 204 / 84),
        ([True, False] * 500, 0.4 * 104 / 84),
        ([True] * 1000 + [False] * 2000, 0.4 * 4 / 84),
    ],
)
def test_guesses_move_the_hit_rate_to_what_is_measured(outcomes: list[bool], expected: float) -> None:
    """From what acceptance says, which counts for four right ones; old ones count less."""
    curves = learnt()
    for right in outcomes:
        curves.observe_guess(0.4, right)

    assert expected == pytest.approx(hit_rate(curves), abs=0.01 if len(outcomes) > 1 else 1e-9)


def test_every_guess_moves_it_a_little() -> None:
    """A wrong one down, a right one up."""
    curves = learnt()
    rates = [hit_rate(curves)]
    for right in (*[False] * 20, *[True] * 200):
        curves.observe_guess(0.4, right)
        rates.append(hit_rate(curves))

    assert [True] * 20 == [later < former for former, later in itertools.pairwise(rates[:21])]
    assert [True] * 200 == [later > former for former, later in itertools.pairwise(rates[20:])]


@pytest.mark.parametrize("whole", [0.95, 1.0])
def test_no_guess_is_surer_than_the_block_before_it(whole: float) -> None:
    """Of guesses that do better than acceptance says."""
    curves = learnt()
    for _ in range(100):
        curves.observe_guess(0.4, True)
    always = ahead_us(whole, whole, 2, token_us(1), DRAFT_WAY, verify_us(3), TARGET_WAY)

    assert pytest.approx(always) == curves.schedule_us(RUN_AHEAD, 1, 2, whole, 0.9)


def ahead(curves: ServiceCurves, factor: float, sessions: int = 4, prefill_rows: int = 0, queue_us: int = 0) -> None:
    """A round whose block was drafted ahead took so many times what it should take."""
    step = StepTiming(compute_us=1_000, rows=12, sessions=4, step=2, prefill_rows=prefill_rows)
    way = Passage(wait_us=0, transfer_us=10, queue_us=queue_us, compute_us=1_000, overhead_us=0)
    curves.observe_ahead(sessions, 1_000.0, way, step, 1_000.0 * factor)


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ([], 1.0),
        ([1.5] * 16, 1.25),  # the formula counts for sixteen
        ([0.5, 1.5] * 300, 1.0),
        ([0.8] * 2000, (0.8 * 200 + 16) / 216),  # 200 count
        ([1.0] * 10 + [1e6], 28 / 27),  # a worker was lost, and came back
    ],
)
def test_rounds_ahead_move_what_they_are_thought_to_take(factors: list[float], expected: float) -> None:
    """At this load, under this schedule; other schedules stay as they are."""
    curves = learnt(sessions=4)
    before = {each: curves.schedule_us(each, 4, 2, 0.6, 0.4) for each in (SYNCHRONOUS, Schedule(2), RUN_AHEAD)}
    for factor in factors:
        ahead(curves, factor)
    after = {each: curves.schedule_us(each, 4, 2, 0.6, 0.4) for each in before}

    assert pytest.approx(expected, abs=0.01) == after[RUN_AHEAD] / before[RUN_AHEAD]
    assert [before[SYNCHRONOUS], before[Schedule(2)]] == [after[SYNCHRONOUS], after[Schedule(2)]]


@pytest.mark.parametrize("prompt", [{"prefill_rows": 1}, {"queue_us": 1_501}])
def test_prompts_are_not_held_against_running_ahead(prompt: dict[str, int]) -> None:
    """Neither in the round's own step nor in the one before it, which took longer than any without."""
    curves = learnt(sessions=4)
    for _ in range(100):
        ahead(curves, 1.8, **prompt)
    fair = curves.ahead_error(4)
    ahead(curves, 1.8, queue_us=1_500)

    assert (1.0, True) == (fair, curves.ahead_error(4) > 1.0)


def test_nothing_is_compared_with_a_formula_of_what_was_never_measured() -> None:
    """Before the target's first step is known, its time has no unit."""
    curves = ServiceCurves()
    ahead(curves, 2.0)

    assert 1.0 == curves.ahead_error(4)


def test_what_speaks_against_running_ahead_fades() -> None:
    """Half of it in 1400 rounds without, so that it is looked at again."""
    curves = learnt(sessions=8)
    for _ in range(200):
        ahead(curves, 1.3, sessions=8)
    errors = [curves.ahead_error(8)]
    for _ in range(20_000):
        curves.not_ahead()
    errors.append(curves.ahead_error(8))

    assert errors[0] > 1.25
    assert 1.0 <= errors[1] < 1.001


@pytest.mark.parametrize(("learnt_at", "asked"), [(8, 7), (8, 5), (7, 8), (16, 9), (8, 16), (4, 64)])
def test_what_is_learnt_at_one_load_holds_for_those_near_it(learnt_at: int, asked: int) -> None:
    """Else one session that comes or goes would change the schedule, again and again."""
    curves = learnt(sessions=learnt_at)
    for _ in range(100):
        ahead(curves, 1.3, sessions=learnt_at)

    assert curves.ahead_error(learnt_at) == curves.ahead_error(asked) > 1.2


def test_rounds_apart_say_nothing_of_links_in_step() -> None:
    """A block that ran ahead may miss a step that others share."""
    curves = learnt(sessions=4)
    before = curves.schedule_us(SYNCHRONOUS, 4, 2, 0.6, 0.4)
    curves.turn_to(RUN_AHEAD, 4)
    for step in range(2, 100):
        curves.observe_draft(2, Passage(20, 30, 5_000, 2 * round(token_us(4)), 10))
        timing = StepTiming(compute_us=round(verify_us(12)), rows=12, sessions=4, step=step)
        curves.observe_verify(DRAFT, timing, Passage(20, 30, 5_000, timing.compute_us, 10), beside=True)

    assert pytest.approx(before, rel=0.02) == curves.schedule_us(SYNCHRONOUS, 4, 2, 0.6, 0.4)


def test_the_first_plain_round_may_have_met_a_pause() -> None:
    """Plain decoding is not thought to take as long for ever, which would keep a useless draft at work."""
    curves = ServiceCurves()
    curves.target_profile((1_000,) * 5)
    curves.turn_to(SYNCHRONOUS, 16)
    timing = StepTiming(compute_us=1_000, rows=16, sessions=16, step=1)
    curves.observe_verify(NONE, timing, Passage(20, 30, 13_700, 1_000, 10))

    assert 1_000 + 4 * 60 + 1_000 == curves.plain_us(16)


def test_guesses_say_nothing_of_other_schedules() -> None:
    """Nor of acceptance."""
    curves = learnt(sessions=4)
    schedules = (SYNCHRONOUS, Schedule(2))
    before = [curves.schedule_us(each, 4, 2, 0.6, 0.4) for each in schedules], curves.recent_acceptance()
    curves.observe_guess(0.4, True)

    assert before == ([curves.schedule_us(each, 4, 2, 0.6, 0.4) for each in schedules], curves.recent_acceptance())


def test_what_a_draft_takes_while_it_runs_ahead_is_not_held_against_rounds_in_step() -> None:
    """Steps and draft tokens that take twice as long beside each other: in step neither would, and its price stays."""
    curves = learnt(beside=2.0)
    before = curves.schedule_us(SYNCHRONOUS, 1, 2, 0.4, 0.2)
    curves.schedule = RUN_AHEAD
    for step in range(2, 100):
        draft_and_verdict(curves, step, slower=2.0)

    assert pytest.approx(before, rel=0.02) == curves.schedule_us(SYNCHRONOUS, 1, 2, 0.4, 0.2)
