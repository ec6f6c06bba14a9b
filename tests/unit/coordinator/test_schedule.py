"""How sessions share a draft and a target: what each schedule costs, which one is chosen, and who is in which group."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.curves import ServiceCurves
from coordinator.measure import ByLoad
from coordinator.schedule import (
    RUN_AHEAD,
    SYNCHRONOUS,
    Choice,
    Schedule,
    Scheduler,
    ahead_together_us,
    ahead_us,
    lengths,
    rotation_us,
)
from specwire.law.tasks import StepTiming
from specwire.law.values import Source
from specwire.wire.stopwatch import Passage
from tests.support.replay import way

DRAFT, NONE = Source.DRAFT_MODEL, Source.NONE
FLAT = (1_000,) * 5
"""A target whose steps take a millisecond, whatever is in them."""
STEEP = tuple(10_000 << n for n in range(8))
"""One that takes 10 ms for every row."""


def service(
    profile_us: tuple[int, ...] = FLAT,
    draft_us: int = 100,
    link_us: int = 0,
    acceptance: float = 1.0,
    beside: float = 1.0,
    sessions: int = 1,
) -> ServiceCurves:
    """What a service has learnt that so many sessions used in step. `link_us`: of each of the two links."""
    curves = ServiceCurves()
    curves.target_profile(profile_us)
    curves.draft_profile((draft_us,) * 5)
    curves.beside = ByLoad(beside, known=True)
    curves.sessions = sessions
    us = round(curves.verify.at(sessions))
    curves.observe_draft(4, way(4 * draft_us, link_us))
    curves.observe_verify(NONE, StepTiming(compute_us=us, rows=sessions, sessions=sessions, step=1), way(us, link_us))
    curves.curve[DRAFT] = [acceptance] * 8
    return curves


def rounds(scheduler: Scheduler, curves: ServiceCurves, count: int, sessions: int = 1, longest: int = 1) -> list[str]:
    """The schedules of so many rounds."""
    return [str(scheduler.round(curves, sessions, longest)) for _ in range(count)]


def decided(scheduler: Scheduler, curves: ServiceCurves, sessions: int = 1, longest: int = 1) -> Schedule:
    """What is in force after the next decision."""
    rounds(scheduler, curves, 16 * sessions + 1, sessions, longest)
    return scheduler.chosen


# ------------------------------------------------------------------ what a round takes


@pytest.mark.parametrize(
    ("groups", "draft_us", "links_us", "verify_us", "expected"),
    [
        (2, 10, 20, 100, 200),  # the target never waits
        (3, 10, 20, 100, 300),
        (2, 100, 10, 20, 200),  # nor the draft
        (3, 100, 10, 20, 300),
        (2, 10, 500, 20, 530),  # the way
        (3, 10, 500, 20, 530),
    ],
)
def test_a_rotation_is_as_fast_as_its_bottleneck(
    groups: int, draft_us: float, links_us: float, verify_us: float, expected: float
) -> None:
    """max(m*v, m*k*d, k*d + r_d + r_t + v), as the design has it."""

    assert expected == rotation_us(groups, draft_us, links_us, verify_us)


@pytest.mark.parametrize(("draft_us", "links_us", "verify_us"), [(10, 20, 100), (100, 10, 20), (10, 500, 20)])
def test_one_group_is_a_synchronous_round(draft_us: float, links_us: float, verify_us: float) -> None:
    """One after the other, whatever takes longest."""

    assert draft_us + links_us + verify_us == rotation_us(1, draft_us, links_us, verify_us)


def simulated(groups: int, draft_us: float, links_us: float, verify_us: float) -> float:
    """From one turn of a group to its next, once all is settled: a draft and a target that serve one group at a time."""
    draft_free = target_free = 0.0
    ready = [0.0] * groups
    before = 0.0
    for _ in range(20):
        before = ready[0]
        for group in range(groups):
            draft_free = max(ready[group], draft_free) + draft_us
            target_free = max(draft_free + links_us, target_free) + verify_us
            ready[group] = target_free
    return ready[0] - before


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(
    ("draft_us", "links_us", "verify_us"),
    [
        pytest.param(10, 20, 100, id="target"),
        pytest.param(10, 500, 20, id="way"),
        pytest.param(100, 10, 20, id="draft"),
    ],
)
def test_turns_of_two_devices_take_what_the_formula_says(
    groups: int, draft_us: float, links_us: float, verify_us: float
) -> None:
    """A draft and a target with a queue each, turn after turn."""

    assert simulated(groups, draft_us, links_us, verify_us) == rotation_us(groups, draft_us, links_us, verify_us)


@pytest.mark.parametrize(
    ("whole", "hit", "token_us", "expected"),
    [
        (1.0, 1.0, 10, 120),  # the next block is there before the verdict
        (0.0, 0.0, 10, 145),  # and was in vain: another one, from the verdict on
        (1.0, 0.0, 10, 145),
        (0.75, 0.5, 10, 132.5),
        (1.0, 1.0, 100, 305),  # the verdict waits for guess and block
        (1.0, 0.0, 100, 510),  # which tell that it was wrong: then another block
        (0.0, 0.0, 100, 375),  # a refusal does not: half a step that the draft is in, then another block
        (0.5, 0.25, 100, 391.25),
    ],
)
def test_what_running_ahead_takes(whole: float, hit: float, token_us: float, expected: float) -> None:
    """Blocks of two; a verdict takes 100 + 20, a block's way 5."""

    assert expected == ahead_us(whole, hit, 2, token_us, 5, 100, 20)


def test_a_draft_just_as_fast_as_the_target_costs_nothing() -> None:
    """Three tokens in the time of a verdict."""

    assert [120, 120 + 0.5 * 80] == [ahead_us(hit, hit, 2, 40, 0, 100, 20) for hit in (1.0, 0.5)]


@pytest.mark.parametrize(("token_us", "draft_link_us"), [(40, 5), (39, 10)])
def test_a_draft_that_is_done_when_it_hears_of_a_refusal_begins_at_once(token_us: float, draft_link_us: float) -> None:
    """It was asked when the target was, and hears half a way after the verdict as it was asked half a way after the question: three
    tokens are made in the 120 that a verdict takes, though what it made may be on its way still."""

    assert 120 + 2 * token_us + draft_link_us == ahead_us(0.0, 0.0, 2, token_us, draft_link_us, 100, 20)


def step_us(together: int) -> float:
    """Of sessions that judge three rows each."""
    return 100.0 + 3.0 * together


def test_one_that_runs_ahead_has_nobody_to_wait_for() -> None:
    """The same as before, exactly."""
    alone = ahead_together_us(0.7, 0.5, 2, 10.0, 40.0, step_us, 20.0, 1)

    assert ahead_us(0.7, 0.5, 2, 10.0, 40.0, step_us(1), 20.0) == alone


def test_who_is_always_right_stays_in_step() -> None:
    """All are there at every step; only the way of a verdict lies between two of them, in which somebody else may be served."""
    together = ahead_together_us(1.0, 1.0, 2, 10.0, 5.0, step_us, 0.0, 8)

    assert pytest.approx(step_us(8)) == together


@given(
    whole=st.floats(0, 1),
    hit=st.floats(0, 1),
    token=st.floats(1, 100),
    draft_link=st.floats(0, 1000),
    target_link=st.floats(0, 1000),
    sessions=st.integers(1, 64),
)
def test_rounds_together_are_never_quicker_than_alone_nor_worse_than_by_all_and_one_more_step(
    whole: float, hit: float, token: float, draft_link: float, target_link: float, sessions: int
) -> None:
    """Company adds rows and waits, and no wait is longer than the step of all."""
    hit = min(whole, hit)
    alone = ahead_us(whole, hit, 2, token, draft_link, step_us(1), target_link)
    by_all = ahead_us(whole, hit, 2, token, draft_link, step_us(sessions), target_link)
    found = ahead_together_us(whole, hit, 2, token, draft_link, step_us, target_link, sessions)

    assert 0.999 * alone <= found <= by_all + step_us(sessions)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(1, [1]), (2, [1, 2]), (5, [1, 2, 3, 4, 5]), (8, [1, 2, 3, 4, 6, 8])],
)
def test_lengths_end_with_the_longest(longest: int, expected: list[int]) -> None:
    """A few before it."""

    assert expected == lengths(longest)
    assert [32, 64] == lengths(64)[-2:]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [(Schedule(), "synchronous"), (Schedule(3), "rotation of 3"), (Schedule(ahead=True), "run-ahead")],
)
def test_a_schedule_has_a_name(schedule: Schedule, expected: str) -> None:
    """For people."""

    assert expected == str(schedule)


# ------------------------------------------------------------------ what the settings say


@pytest.mark.parametrize(
    ("choice", "expected"), [("synchronous", SYNCHRONOUS), ("run_ahead", RUN_AHEAD), ("rotation", Schedule(3))]
)
def test_what_is_fixed_stays(choice: Choice, expected: Schedule) -> None:
    """Whatever would be better, and for whatever is left to propose."""
    scheduler = Scheduler(choice, 3)
    chosen = {
        scheduler.round(curves, 4, longest)
        for curves in (ServiceCurves(), service(), service(beside=2.0))
        for longest in (1, 8)
        for _ in range(100)
    }

    assert {expected} == chosen


def test_a_fixed_rotation_has_no_more_groups_than_sessions() -> None:
    """As many as there are, while there are fewer; one group is none."""
    scheduler, curves = Scheduler("rotation", 3), service()

    assert [SYNCHRONOUS, Schedule(2), Schedule(3), Schedule(3), Schedule(2), SYNCHRONOUS] == [
        scheduler.round(curves, sessions, 4) for sessions in (1, 2, 3, 9, 2, 0)
    ]


# ------------------------------------------------------------------ who is in which group


def rotating(groups: int = 2, sessions: int = 99) -> Scheduler:
    """A scheduler in a rotation."""
    scheduler = Scheduler("rotation", groups)
    scheduler.round(service(), sessions, 4)
    return scheduler


@pytest.mark.parametrize("choice", ["auto", "synchronous", "run_ahead"])
def test_without_groups_everybody_goes_with_anybody(choice: Choice) -> None:
    """And nothing is kept of them."""
    scheduler = Scheduler(choice)

    assert ([0, 0], 0) == ([scheduler.group(1), scheduler.group(2)], len(scheduler))


def test_who_begins_goes_where_fewest_are() -> None:
    """And stays there, round after round."""
    scheduler = rotating(3)
    first = [scheduler.group(session) for session in range(7)]

    assert [1, 2, 3, 1, 2, 3, 1] == first
    assert first == [scheduler.group(session) for session in range(7)]
    assert "Scheduler(rotation: rotation of 3, sizes=[3, 2, 2])" == repr(scheduler)


def test_who_leaves_makes_room() -> None:
    """The next to come takes the place, or one of the others moves when it begins a round."""
    scheduler = rotating()
    for session in range(4):
        scheduler.group(session)
    scheduler.leave(1)
    scheduler.leave(3)

    assert (2, 2) == (scheduler.group(0), len(scheduler))
    assert [1, 1, 2] == [scheduler.group(session) for session in (2, 8, 9)]


def test_who_was_never_there_may_leave() -> None:
    """Twice, and before any round."""
    scheduler = rotating()
    scheduler.group(1)
    for session in (7, 1, 1):
        scheduler.leave(session)

    assert (0, 1, 2) == (len(scheduler), scheduler.group(2), scheduler.group(3))


def test_another_schedule_forgets_the_groups() -> None:
    """They are made anew when it comes back; to stay is no change."""
    scheduler, curves = rotating(3), service()
    for session in range(5):
        scheduler.group(session)
    scheduler.round(curves, 5, 4)
    assert 5 == len(scheduler)
    scheduler.round(curves, 2, 4)
    assert 0 == len(scheduler)
    scheduler.leave(4)

    assert [1, 2, 1] == [scheduler.group(session) for session in (4, 3, 4)]
    scheduler.round(curves, 1, 4)
    assert ([0, 0], 0) == ([scheduler.group(session) for session in (4, 3)], len(scheduler))


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["begins", "begins", "leaves"])), max_size=40),
)
def test_groups_are_balanced_once_everybody_has_begun_a_round(groups: int, events: list[tuple[int, str]]) -> None:
    """Whoever came, went and came again meanwhile: the largest has one more than the smallest, and nobody is counted twice."""
    scheduler = rotating(groups)
    here = set()
    for session, event in events:
        if event == "leaves":
            scheduler.leave(session)
            here.discard(session)
        else:
            assert 1 <= scheduler.group(session) <= groups
            here.add(session)
        assert len(here) == len(scheduler)
    for session in sorted(here):
        scheduler.group(session)
    sizes = Counter(dict.fromkeys(range(1, groups + 1), 0))
    sizes.update(scheduler.group(session) for session in here)

    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert f"sizes={[sizes[group] for group in range(1, groups + 1)]}" in repr(scheduler)


# ------------------------------------------------------------------ what is best


def test_synchronous_while_nothing_is_known() -> None:
    """Of the target's steps, however good the draft is said to be; nor without a token to propose."""
    unknown = ServiceCurves()
    unknown.curve[DRAFT], unknown.beside = [1.0] * 8, ByLoad(1.0, known=True)

    assert ["synchronous"] * 40 == rounds(Scheduler(), ServiceCurves(), 40, sessions=4, longest=8)
    assert ["synchronous"] * 40 == rounds(Scheduler(), unknown, 40, longest=8)
    assert ["synchronous"] * 40 == rounds(Scheduler(), service(), 40, longest=0)


@pytest.mark.parametrize("sessions", [2, 4, 8])
def test_rotation_where_every_row_costs_and_links_are_long(sessions: int) -> None:
    """Two half steps take no longer than a whole one, and the other group's way is hidden behind them."""
    curves = service(STEEP, draft_us=1_000, link_us=50_000, acceptance=0.9, sessions=sessions)
    rates = {each: curves.best_rate(each, sessions, 4) for each in (Schedule(), *map(Schedule, range(2, 4)))}
    chosen = decided(Scheduler(), curves, sessions, 4)

    assert chosen.groups > 1
    assert chosen.groups <= sessions
    assert rates[chosen] > 1.05 * rates[SYNCHRONOUS]


def test_nobody_takes_turns_alone() -> None:
    """Though a rotation is priced without what waits for others, and that would make it look best."""
    curves = service(draft_us=2_000, acceptance=0.0)
    curves.curve[DRAFT] = [1.0, 0.0]
    for step in range(2, 60):
        curves.observe_draft(1, Passage(0, 20_000, 5_000, 2_000, 0))
        timing = StepTiming(compute_us=1_000, rows=1, sessions=1, step=step)
        curves.observe_verify(NONE, timing, Passage(0, 20_000, 5_000, 1_000, 0))
    rates = [curves.best_rate(each, 1, 1) for each in (Schedule(2), RUN_AHEAD, SYNCHRONOUS)]

    assert sorted(rates, reverse=True) == rates
    assert 1 == decided(Scheduler(), curves).groups


def test_no_rotation_where_a_step_takes_as_long_with_half_the_rows() -> None:
    """Two steps instead of one, and hardly anything to hide, however good the draft is."""

    assert 1 == decided(Scheduler(), service(draft_us=10, acceptance=0.9, sessions=4), 4, 4).groups


@pytest.mark.parametrize(
    ("before", "beside", "expected"),
    [
        (1.3, 1.00, RUN_AHEAD),  # 10 % better
        (1.3, 1.06, RUN_AHEAD),  # 4 %
        (1.3, 1.08, SYNCHRONOUS),  # 2 %
        (1.3, 1.12, SYNCHRONOUS),
        (1.0, 1.06, RUN_AHEAD),
        (1.0, 1.12, RUN_AHEAD),  # 2 % worse
        (1.0, 1.18, SYNCHRONOUS),  # 7 %
    ],
)
def test_what_is_in_force_stays_while_nothing_is_clearly_better(
    before: float, beside: float, expected: Schedule
) -> None:
    """Two tokens in 1100, or in 1000 times what a draft beside it makes of that."""
    scheduler, curves = Scheduler(), service(beside=before)
    first = decided(scheduler, curves)
    curves.beside = ByLoad(beside, known=True)

    assert (RUN_AHEAD if before == 1.0 else SYNCHRONOUS) == first
    assert expected == decided(scheduler, curves)


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_decision_stands_for_sixteen_rounds_of_each_session(sessions: int) -> None:
    """Changing costs a round or two."""
    scheduler, curves = Scheduler(), service(beside=1.3)
    first = rounds(scheduler, curves, 1, sessions)
    curves.beside = ByLoad(1.0, known=True)

    assert ["synchronous"] * 16 * sessions == first + rounds(scheduler, curves, 16 * sessions - 1, sessions)
    assert ["run-ahead"] == rounds(scheduler, curves, 1, sessions)


@pytest.mark.parametrize("left", [1, 0])
def test_fewer_sessions_than_groups_are_in_step_at_once(left: int) -> None:
    """Not only at the next decision."""
    curves = service(STEEP, draft_us=1_000, link_us=50_000, acceptance=0.9, sessions=8)
    scheduler = Scheduler()
    groups = decided(scheduler, curves, 8, 4).groups
    assert [1, 2] == [scheduler.group(session) for session in (1, 2)]
    stays = scheduler.round(curves, groups, 4)

    assert (groups, SYNCHRONOUS) == (stays.groups, scheduler.round(curves, left, 4))
    assert (0, 0) == (scheduler.group(1), len(scheduler))


def test_one_session_with_a_fast_and_good_draft_runs_ahead() -> None:
    """A target that hardly notices rows, nine tokens of ten accepted."""

    assert RUN_AHEAD == decided(Scheduler(), service(link_us=200, acceptance=0.9), longest=8)


@pytest.mark.parametrize("acceptance", [0.0, 0.3])
def test_one_session_with_a_poor_draft_does_not(acceptance: float) -> None:
    """What is drafted ahead is drafted in vain, and stands in the way of what is wanted."""

    assert SYNCHRONOUS == decided(Scheduler(), service(draft_us=800, acceptance=acceptance, beside=1.05), longest=8)


def test_nothing_runs_ahead_on_cores_that_both_share() -> None:
    """As in the test before the last, but what works beside the target takes as much from it."""
    curves = service(link_us=200, acceptance=0.9)
    for step in range(2, 100):
        timing = StepTiming(compute_us=2_000, rows=1, sessions=1, step=step)
        curves.observe_verify(NONE, timing, way(2_000, 200), beside=True)

    assert pytest.approx(2.0, abs=0.01) == curves.beside.at(1)
    assert (1_000, SYNCHRONOUS) == (round(curves.verify.at(1)), decided(Scheduler(), curves, longest=8))


# ------------------------------------------------------------------ a trial


def test_after_many_rounds_running_ahead_is_tried_again() -> None:
    """What works beside what may have changed. It takes eight rounds, and the next one is as far away."""
    scheduler = Scheduler()
    seen = rounds(scheduler, service(beside=2.0), 2200)
    changes = [n for n in range(1, len(seen)) if seen[n - 1] != seen[n]]
    begin, end, again = changes[:3]

    assert ("synchronous", 1024, "run-ahead") == (seen[0], begin, seen[begin])
    assert 8 == end - begin
    assert 1024 <= again - end < 1024 + 16


def test_during_a_trial_what_it_will_go_back_to_stands() -> None:
    """So that a log tells of choices only."""
    scheduler, curves = Scheduler(), service(beside=2.0)

    assert ["run-ahead", "synchronous"] == [rounds(scheduler, curves, 1025)[-1], str(scheduler.standing)]
    assert SYNCHRONOUS == scheduler.chosen or rounds(scheduler, curves, 8)[-1] == str(scheduler.standing)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("auto", "auto"), ("synchronous", "synchronous"), ("rotation", "rotation of 3"), ("run_ahead", "run-ahead")],
)
def test_what_is_asked_for_is_named_as_what_is_in_force(choice: Choice, expected: str) -> None:
    """Also before the first round, while nothing takes turns yet."""
    assert expected == Scheduler(choice, 3).asked


def test_a_trial_that_pays_stays() -> None:
    """The draft has got cores of its own, which only a trial can show."""
    scheduler, curves = Scheduler(), service(beside=2.0)
    rounds(scheduler, curves, 1025)
    curves.beside = ByLoad(1.0, known=True)

    assert ["run-ahead"] * 300 == rounds(scheduler, curves, 300)


def good(sessions: int) -> ServiceCurves:
    """A draft far away that is always right: running ahead gains most."""
    curves = service(sessions=sessions, acceptance=0.95, link_us=2_000)
    for _ in range(60):
        curves.beside.observe(sessions, 1.0)
    return curves


@pytest.mark.parametrize("sessions", [1, 4, 16])
def test_who_cannot_run_ahead_is_not_counted_on(sessions: int) -> None:
    """Under `rejection` nothing does: then it is none of the choices, and for a few it is worth as much less."""
    curves, scheduler, mixed = good(sessions), Scheduler(), Scheduler()
    for n in range(40 * sessions):
        scheduler.round(curves, sessions, 8, able=False)
        mixed.round(curves, sessions, 8, able=n % 4 > 0)

    assert not scheduler.chosen.ahead
    assert RUN_AHEAD == mixed.chosen == decided(Scheduler(), curves, sessions, 8)


def test_a_service_whose_sessions_can_no_longer_run_ahead_stops_doing_so() -> None:
    """At the next decision."""
    scheduler = Scheduler()
    assert RUN_AHEAD == decided(scheduler, good(4), 4, 8)
    for _ in range(2 * 16 * 4):
        scheduler.round(good(4), 4, 8, able=False)

    assert not scheduler.chosen.ahead


def test_one_outage_does_not_end_running_ahead_for_good() -> None:
    """All eight sessions waited five seconds for a target once. What is held against it fades, and it is taken up again."""
    scheduler, curves = Scheduler(), good(8)
    assert RUN_AHEAD == decided(scheduler, curves, 8, 8)
    step = StepTiming(compute_us=1_000, rows=72, sessions=8, step=1)
    for _ in range(80):
        curves.observe_ahead(8, 1_000.0, way(1_000, 0), step, 5_000_000.0)
    after = rounds(scheduler, curves, 40_000, 8, 8)

    assert "run-ahead" in after[-4_000:]


def test_several_that_run_ahead_work_in_step_now_and_then() -> None:
    """Eight rounds of each in 256: nothing else says what rounds in step take."""
    scheduler, curves = Scheduler(), good(4)
    assert RUN_AHEAD == decided(scheduler, curves, 4, 8)
    seen = rounds(scheduler, curves, 2_200, 4, 8)
    changes = [n for n in range(1, len(seen)) if seen[n - 1] != seen[n]]

    assert ["synchronous", "run-ahead", "synchronous", "run-ahead"] == [seen[n] for n in changes]
    assert [32, 32] == [changes[1] - changes[0], changes[3] - changes[2]]
    assert 1_024 <= changes[2] - changes[1] < 1_024 + 64


def test_no_trial_where_many_share_the_draft() -> None:
    """Of more than two, some draft while others are judged: what works beside what is seen anyway."""
    two, three = (rounds(Scheduler(), service(beside=2.0, sessions=n), 1200, sessions=n) for n in (2, 3))

    assert [8, 0] == [seen.count("run-ahead") for seen in (two, three)]


@pytest.mark.parametrize(("promise", "expected"), [(0.95, [64, 64]), (0.85, [])])
def test_who_takes_turns_tries_running_ahead_where_it_looks_hardly_worse(promise: float, expected: list[int]) -> None:
    """Eight rounds of each of eight: what it promises for many is right within a tenth. Then it is known, until that fades."""
    rates = {Schedule(2): 1.0, RUN_AHEAD: promise}
    curves = service()
    curves.best_rate = lambda schedule, *_: rates.get(schedule, 0.5)  # type: ignore[method-assign]
    scheduler, seen = Scheduler(), []
    for _ in range(10_000):
        schedule = scheduler.round(curves, 8, 8)
        curves.turn_to(schedule, 8)
        if schedule.ahead:
            timing = StepTiming(compute_us=1_000, rows=8, sessions=8, step=len(seen))
            curves.observe_ahead(8, 1_000, way(1_000, 200), timing, 1_000)
        seen.append(schedule.ahead)

    assert expected == [len(list(group)) for ahead, group in itertools.groupby(seen) if ahead]


def test_a_trial_takes_eight_rounds() -> None:
    """`_AHEAD_TRIAL`."""
    scheduler, curves = Scheduler(), service(beside=2.0)

    assert 8 == rounds(scheduler, curves, 1025 + 32).count("run-ahead")


def test_a_trial_that_is_hardly_worse_ends_too() -> None:
    """Two tokens in 1120 instead of 1100: what was there before was the choice, and is still."""
    scheduler, curves = Scheduler(), service(beside=1.12)

    assert "synchronous" == rounds(scheduler, curves, 1025 + 128)[-1]


def test_who_is_left_alone_need_not_wait_for_rounds_of_others() -> None:
    """64 sessions were in step; the one that is left would run ahead, and does after 16 rounds of its own."""
    profile = (1_000, 1_000, 1_000, 1_000, 1_000, 2_000, 4_000, 8_000)
    scheduler, curves = Scheduler(), service(profile)
    assert RUN_AHEAD == decided(Scheduler(), curves)
    assert ["synchronous"] == rounds(scheduler, curves, 1, sessions=64)

    assert ["run-ahead"] == rounds(scheduler, curves, 17)[-1:]


def test_while_sessions_take_turns_rounds_in_step_are_tried() -> None:
    """Only they say what they take. Eight of each session, out of a thousand; then it is as before, if nothing was learnt."""
    curves = service()
    curves.best_rate = lambda schedule, sessions, longest: 2.0 if schedule.groups == 2 else 1.0  # type: ignore[method-assign]
    seen = rounds(Scheduler(), curves, 1400, sessions=4)
    changes = [n for n in range(1, len(seen)) if seen[n - 1] != seen[n]]

    assert ("rotation of 2", "rotation of 2") == (seen[changes[0] - 1], seen[-1])
    assert (2, 32, "synchronous") == (len(changes), changes[1] - changes[0], seen[changes[0]])
