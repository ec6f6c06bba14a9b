"""How many tokens the next round proposes, and who proposes them."""

from __future__ import annotations

import itertools

import pytest

from coordinator.lookup import NgramGuess
from coordinator.measure import Average
from coordinator.window import PLAIN, Plan, RequestWindow, Room, ServiceCurves
from specwire.law.tasks import StepTiming
from specwire.law.values import Source
from tests.support.replay import FLAT, STEEP, Replay, World, step_us, way

DRAFT, NGRAM, NONE = Source.DRAFT_MODEL, Source.NGRAM, Source.NONE


def guess(length: int = 8, match: int = 4) -> NgramGuess:
    """Some guess."""
    return NgramGuess(tuple(range(length)), match)


def room(longest: int = 8, draft: int = 8, ngram: NgramGuess | None = None, sessions: int = 1) -> Room:
    """Plenty of it."""
    return Room(longest, draft, ngram, sessions)


def taught(source: Source, drafted: int, accepted: int, rounds: int = 60) -> ServiceCurves:
    """A flat service whose blocks all fared alike."""
    curves = ServiceCurves()
    curves.target_profile(tuple(round(step_us(FLAT, 1 << n)) for n in range(5)))
    curves.draft_profile((5_000,))
    for _ in range(rounds):
        curves.observe_block(source, drafted, accepted)
    return curves


@pytest.mark.parametrize(
    ("fixed", "where", "expected"),
    [
        (4, room(), Plan(DRAFT, 4)),
        (1, room(), Plan(DRAFT, 1)),
        (0, room(ngram=guess()), PLAIN),
        (64, room(), Plan(DRAFT, 8)),
        (4, room(longest=2), Plan(DRAFT, 2)),
        (4, room(longest=0), PLAIN),
        (4, room(draft=3), Plan(DRAFT, 3)),
        (4, room(draft=0), PLAIN),
        (4, room(draft=0, ngram=guess(3)), Plan(NGRAM, 3)),
        (4, room(draft=0, ngram=guess(9)), Plan(NGRAM, 4)),
    ],
)
def test_fixed_length_is_capped_by_room_alone(fixed: int, where: Room, expected: Plan) -> None:
    """num_speculative_tokens=n proposes n, 0 is off, and only limits shorten it."""
    window = taught(DRAFT, 8, 0).request(fixed, 8)

    assert expected == window.plan(where)


@pytest.mark.parametrize("longest", [0, -1])
def test_no_room_is_plain(longest: int) -> None:
    """The last token is never drafted for."""
    assert taught(DRAFT, 8, 8).request(None, 8).plan(room(longest=longest)) == PLAIN


def test_upper_limit_of_a_request_holds() -> None:
    """A request's own limit caps what the controller chooses."""
    assert Plan(DRAFT, 3) == taught(DRAFT, 8, 8).request(None, 3).plan(room())


def test_a_perfect_draft_gets_full_blocks() -> None:
    """Draft = target: every block is as long as allowed, at 8 and at 64."""
    for longest in (8, 64):
        replay = Replay(World(acceptance=lambda position: 1.0), seed=1)
        replay.request(3_000, longest)

        assert longest == replay.lengths[len(replay.lengths) // 2]


def test_a_useless_draft_is_left() -> None:
    """Nothing accepted, nothing drafted."""
    assert taught(DRAFT, 4, 0).request(None, 8).plan(room()) == PLAIN


def test_length_grows_with_acceptance() -> None:
    """Better drafts draft longer."""
    lengths = []
    for a in (0.5, 0.7, 0.9):
        replay = Replay(World(acceptance=lambda position, a=a: a), seed=2)
        replay.request(1_500)
        lengths.append(replay.curves.present_length(1, 8))

    assert lengths == sorted(set(lengths))


def test_length_falls_to_zero_with_load() -> None:
    """Acceptance 0.5 where every row costs: speculation alone, none among many."""
    lengths = []
    for sessions in (1, 4, 32, 128):
        world = World(dict(STEEP), acceptance=lambda position: 0.5, sessions=sessions)
        replay = Replay(world, seed=3)
        replay.request(400)
        lengths.append(replay.curves.present_length(sessions, 8))

    assert [lengths[0] > 0, *lengths[2:]] == [True, 0, 0]
    assert lengths == sorted(lengths, reverse=True)


def test_a_long_default_is_no_harm() -> None:
    """Up to 64 allowed and little accepted: blocks stay short, so little is wasted."""
    replay = Replay(World(acceptance=lambda position: 0.5), seed=4)
    replay.request(600, longest=64)

    assert max(replay.lengths[20:]) <= 4


def test_trusted_guess_beats_a_middling_draft() -> None:
    """A guess costs no draft time; once its like have stood, it wins, and without a guess the draft works on."""
    curves = taught(DRAFT, 4, 2)
    for _ in range(30):
        curves.observe_block(NGRAM, 8, 8)
    window = curves.request(None, 8)
    for _ in range(12):
        window.plan(room(ngram=guess()))
        window.observe(NGRAM, 8, 8, None, way(50_000, 1_000))

    assert window.plan(room(ngram=guess())).source is NGRAM
    assert window.plan(room()).source is DRAFT


def test_distrusted_guess_gives_way_to_the_draft() -> None:
    """Guesses with matches of a length that failed are not used, while other lengths may be."""
    curves = taught(DRAFT, 8, 7)
    window = curves.request(None, 8)
    for _ in range(12):
        window.plan(room(ngram=guess(match=2)))
        window.observe(NGRAM, 4, 0, None, way(50_000, 1_000))

    assert window.plan(room(ngram=guess(match=2))).source is DRAFT


def test_a_guess_gets_better_with_every_token_that_stands() -> None:
    """Its third token is worth what the first one is of a match that is two longer, to service and request alike."""
    curves = ServiceCurves()
    window = curves.request(None, 16)

    def chances(match: int) -> list[float]:
        window.plan(room(ngram=guess(match=match)))
        return window._chances(NGRAM, 8)

    assert chances(2)[2:] == pytest.approx(chances(4)[:6])
    assert chances(4)[0] > chances(2)[0] + 0.1
    for _ in range(20):
        window.plan(room(ngram=guess(match=4)))
        window.observe(NGRAM, 8, 1, None, way(50_000, 1_000))
    assert chances(4)[:2] == pytest.approx(chances(2)[2:4])
    assert chances(4)[0] > 0.75
    assert chances(4)[1] < 0.4
    assert curves.request(None, 16)._chances(NGRAM, 8)[0] == pytest.approx(curves.curve[NGRAM][0])


def test_same_rounds_same_choices() -> None:
    """No clock and no chance: a replay repeats itself."""
    first, second = Replay(World(), seed=6), Replay(World(), seed=6)
    first.request(500)
    second.request(500)

    assert first.lengths == second.lengths


def test_hysteresis_keeps_a_choice_among_equals() -> None:
    """Steady acceptance does not make the length flicker from round to round."""
    replay = Replay(World(acceptance=lambda position: 0.7), seed=7)
    replay.request(2_000)
    settled = replay.lengths[100:-10]
    changes = sum(a != b for a, b in itertools.pairwise(settled))

    assert changes < len(settled) / 8


@pytest.mark.parametrize("link_us", [0, 20_000, 80_000])
def test_trials_keep_within_their_allowance(link_us: int) -> None:
    """With nothing ever accepted, all that speculation costs is 1 % and what a new service may spend."""
    world = World(dict(STEEP), acceptance=lambda position: 0.0, draft_link_us=link_us, noise=0.0)
    replay = Replay(world)
    us = replay.request(3_000)
    lost = us / world.plain_us() - 3_000

    assert 0 < lost < 0.011 * 3_000 + 8
    assert any(replay.lengths[1_000:])


@pytest.mark.parametrize("sessions", [1, 4, 16])
def test_sessions_earn_one_allowance_together(sessions: int) -> None:
    """Each of them waits for a trial of one. So what a round earns is one part of as many, and trials are as rare."""
    curves = taught(DRAFT, 4, 0)
    curves.allowance = 0.0
    window = curves.request(None, 8)
    plain_us = round(curves.plain_us(sessions))
    for _ in range(20):
        window.plan(room(draft=0, sessions=sessions))
        window.observe(NONE, 0, 0, None, way(plain_us, 0))

    assert 20 * 0.01 / sessions == pytest.approx(curves.allowance, rel=1e-3)


def test_drop_and_recovery_are_followed() -> None:
    """Acceptance 0.8, then nothing, then 0.8 again, within one request: off within 60 rounds, on again within 150."""
    now = [0.8]
    replay = Replay(World(acceptance=lambda position: now[0], draft_link_us=5_000), seed=8)
    window = replay.curves.request(None, 8)
    replay.request(300, window=window)
    assert sum(replay.lengths[-20:-8]) > 20
    now[0] = 0.0
    replay.request(200, window=window)
    off = replay.lengths[-100:]
    now[0] = 0.8
    start = len(replay.lengths)
    replay.request(600, window=window)
    on = replay.lengths[start + 150 :]

    assert sum(off) < 20
    assert sum(k > 0 for k in on) > 0.9 * len(on) - 8


def test_a_link_that_gets_better_is_noticed() -> None:
    """A draft given up for its link is taken up again when the link is good."""
    world = World(draft_link_us=150_000, acceptance=lambda position: 0.8)
    replay = Replay(world, seed=9)
    replay.request(300)
    assert replay.lengths[-50:].count(0) > 45
    world.draft_link_us = 2_000
    for _ in range(6):
        replay.request(300)

    assert sum(k > 0 for k in replay.lengths[-60:]) > 50


def test_a_draft_that_was_slow_under_load_is_taken_up_when_it_is_alone() -> None:
    """Two cores that serve eight requests leave little to the draft; one request leaves it a core."""
    plain = []
    for seed in (12, 13, 14):
        crowd = World(acceptance=lambda position: 0.6, draft_us=19_000, shape=STEEP, sessions=8)
        replay = Replay(crowd, seed)
        for _ in range(8):
            replay.request(200)
        assert sum(k > 0 for k in replay.lengths[-100:]) < 10
        crowd.sessions, crowd.draft_us = 1, 4_500
        begin = len(replay.lengths)
        for _ in range(3):
            replay.request(200)
        plain.append(sum(k == 0 for k in replay.lengths[begin:]))

    assert sum(plain) < 120  # of 1,164; 204 if old times weighed as much as new ones


def test_a_new_request_begins_with_what_others_learnt() -> None:
    """The service's curve is a request's first guess, at once."""
    replay = Replay(World(acceptance=lambda position: 0.9), seed=10)
    for _ in range(5):
        replay.request(300)
    start = len(replay.lengths)
    replay.request(60)

    assert replay.lengths[start] >= 5


def test_a_request_unlike_others_finds_its_own_length() -> None:
    """One request with poor acceptance in a service with good ones drafts less than they do."""
    good = [0.9]
    replay = Replay(World(acceptance=lambda position: good[0]), seed=11)
    for _ in range(5):
        replay.request(300)
    good[0] = 0.2
    window = replay.curves.request(None, 8)
    replay.request(200, window=window)
    usual = replay.curves.present_length(1, 8)

    assert window.best(room())[1].num_tokens < usual / 2


def test_prompt_rows_do_not_count_as_step_time() -> None:
    """A step that also read a prompt says nothing of verify time, and a step seen by many sessions counts once."""
    curves = taught(DRAFT, 4, 2)
    before = curves.plain_us(1)
    target_way = way(900_000, 0)
    curves.observe_verify(
        NONE, StepTiming(compute_us=900_000, rows=1, prefill_rows=500, sessions=1, step=1), target_way
    )

    assert before == curves.plain_us(1)
    curves.observe_verify(NONE, StepTiming(compute_us=50_000, rows=1, sessions=2, step=2), target_way)
    once = curves.plain_us(1)
    curves.observe_verify(NONE, StepTiming(compute_us=50_000, rows=1, sessions=2, step=2), target_way)
    assert once == curves.plain_us(1) > before


def test_an_empty_block_of_a_draft_teaches_no_acceptance() -> None:
    """A draft that returned nothing was neither right nor wrong."""
    curves = taught(DRAFT, 4, 2)
    window = curves.request(None, 8)
    window.plan(room())
    curves.observe_draft(0, way(0, 3_000))
    before = curves.recent_acceptance()
    window.observe(NONE, 0, 0, None, way(38_000, 1_000))

    assert before == curves.recent_acceptance() == 0.5


def test_nothing_known_still_plans() -> None:
    """Without profiles, observations or acceptance there is a choice, and a generous idea of the draft's time."""
    curves = ServiceCurves()

    assert curves.recent_acceptance() is None
    assert 0 <= curves.request(None, 8).plan(room(sessions=64)).num_tokens <= 8
    assert curves.draft_seconds(4) >= 1.0


def test_draft_seconds_follow_the_measurements() -> None:
    """k*d + r_d, in seconds."""
    curves = taught(DRAFT, 4, 2)
    curves.observe_draft(4, way(20_000, 3_000))

    assert curves.draft_seconds(8) == pytest.approx(0.043)


def test_a_trial_that_never_ran_is_given_back() -> None:
    """A plan that is not followed by a round costs nothing."""
    curves = taught(DRAFT, 4, 0)
    window = curves.request(None, 8)
    window.plan(room())
    window.observe(NONE, 0, 0, None, way(37_000, 0))
    held = curves.allowance
    plan = window.plan(room())
    assert plan.num_tokens > 0
    assert curves.allowance < held
    window.plan(room())
    window.plan(room(longest=0))

    assert held == pytest.approx(curves.allowance)


def test_repr_tells_the_story() -> None:
    """What is chosen, and why."""
    window = RequestWindow(taught(DRAFT, 8, 8), None, 8)
    window.plan(room())

    assert repr(window) == "RequestWindow(fixed=None, current=draft_model 8)"


def contended(beside: bool) -> ServiceCurves:
    """Two sessions on two cores that a draft shares: steps of 24 ms take 33 while it works, and its blocks miss a step."""
    curves = ServiceCurves()
    curves.sessions = 2
    for step in range(0, 400, 2):
        if not beside or step < 200:
            curves.observe_verify(
                NONE, StepTiming(compute_us=24_000, rows=2, sessions=2, step=step), way(24_000, 5_000)
            )
            continue
        curves.observe_draft(1, way(8_000, 5_000))
        for source, rows, number in ((NONE, 1, step), (DRAFT, 2, step + 1)):
            timing = StepTiming(compute_us=33_000, rows=rows, sessions=1, step=number)
            curves.observe_verify(source, timing, way(33_000, 22_000), beside=True)
    return curves


def test_what_a_draft_takes_from_the_target_is_the_drafts_price() -> None:
    """Plain rounds are priced by what they take while nobody drafts, however long nobody has seen that."""
    quiet, busy = contended(beside=False), contended(beside=True)

    assert busy.plain_us(2) == quiet.plain_us(2) == pytest.approx(29_000, rel=0.01)
    assert busy.price(DRAFT, 2) == pytest.approx((5_000 + 22_000, 8_000, 33 / 24), rel=0.05)
    assert busy.round_us(NGRAM, 1, 2) == pytest.approx(quiet.round_us(NGRAM, 1, 2), rel=0.01)


def test_a_draft_that_only_takes_from_others_is_left() -> None:
    """1.6 tokens in 74 ms, beside steps that take 38 for one: no worse than that, and worse than the 29 of nobody drafting."""
    curves = contended(beside=True)
    for accepted in (1, 1, 0, 1, 0) * 20:
        curves.observe_block(DRAFT, 1, accepted)

    assert curves.request(None, 1).best(room(longest=1, sessions=2))[1] == PLAIN


def test_a_machine_that_became_faster_is_noticed_beside_a_draft() -> None:
    """A draft beside it does not shorten a step."""
    curves = contended(beside=True)
    for step in range(1000, 1200):
        timing = StepTiming(compute_us=12_000, rows=2, sessions=1, step=step)
        curves.observe_verify(DRAFT, timing, way(12_000, 3_000), beside=True)

    assert curves.verify.at(2) == pytest.approx(12_000, rel=0.1)
    assert curves.price(DRAFT, 2)[2] == pytest.approx(1.0, abs=0.05)


def test_a_pause_in_the_first_trial_at_a_load_does_not_end_drafting() -> None:
    """The first block at a load had to wait for prompts: it counts as four rounds' links, and no more."""
    curves = taught(DRAFT, 4, 3)
    curves.sessions = 8
    curves.observe_verify(NONE, StepTiming(compute_us=60_000, rows=8, sessions=8, step=1), way(60_000, 4_000))
    curves.observe_verify(DRAFT, StepTiming(compute_us=60_000, rows=9, sessions=8, step=2), way(60_000, 700_000))

    assert curves.price(DRAFT, 8)[0] == 4 * 4_000 + 1_000


@pytest.mark.parametrize(
    ("accepted", "allowance", "read_us", "expected"),
    [
        (3, 0.0, 1_000, True),  # its blocks are the best choice
        (0, 4.0, 1_000, True),  # a trial that the allowance bears: 100 tokens take 100 ms of a round of 38
        (0, 2.0, 1_000, False),
        (0, 0.5, 0, True),  # nobody knows what reading costs: a trial alone takes 5 ms and 3 more
        (0, 0.1, 0, False),
        (0, 8.0, 100_000, True),  # more than it ever holds, though no token is read in more than it is proposed
    ],
)
def test_a_draft_reads_where_that_may_pay(accepted: int, allowance: float, read_us: int, expected: bool) -> None:
    """A prompt is read by the draft because its blocks are wanted, or out of the allowance for trials."""
    curves = taught(DRAFT, 4, accepted)
    curves.allowance = allowance
    curves.draft_read = Average(read_us)

    assert curves.request(None, 8).worth_reading(room(), 100) is expected
    plain_us = curves.plain_us(1)
    both_us = 100 * min(read_us, 5_000) + curves.round_us(DRAFT, 1, 1) - plain_us  # the trial it is for is paid with it
    spent = both_us / plain_us if expected and not accepted else 0.0
    assert curves.allowance == pytest.approx(allowance - spent)


@pytest.mark.parametrize(
    ("prompt", "tokens", "read_us"), [(60, 100, 300), (60, 100, 1_000), (2_000, 100, 300), (60, 3_000, 600)]
)
def test_a_draft_that_must_read_before_it_is_tried_is_found_to_be_good(
    prompt: int, tokens: int, read_us: float
) -> None:
    """Of 3,000 tokens none stands, then all: reading leaves something for the trial that it is for."""
    now = [0.0]
    world = World(
        acceptance=lambda position: now[0], draft_us=8_000, draft_link_us=25_000, read_us=read_us, prompt_us=3_000
    )
    replay = Replay(world, seed=9)
    for _ in range(3_000 // tokens):
        replay.request(tokens, prompt=prompt)
    poor = replay.us_per_token()
    now[0] = 1.0
    for _ in range(30_000 // tokens):
        replay.request(tokens, prompt=prompt)

    assert poor < 1.03 * world.plain_us()
    assert sum(length > 0 for length in replay.lengths[-100:]) > 80


def test_a_link_that_became_faster_is_noticed_beside_a_draft() -> None:
    """A first round that had to wait for a prompt must not make drafting look good for ever."""
    curves = contended(beside=True)
    before = curves.target_link.at(2)
    for step in range(1000, 1100):
        timing = StepTiming(compute_us=33_000, rows=1, sessions=1, step=step)
        curves.observe_verify(NONE, timing, way(33_000, 2_000), beside=True)

    assert before == pytest.approx(5_000)
    assert curves.target_link.at(2) == pytest.approx(2_000, rel=0.01)


def test_beside_a_draft_of_its_own_machine_all_is_as_without() -> None:
    """Steps take no longer while it works; so a target that slows down is seen to, and not the draft blamed."""
    curves = ServiceCurves()
    curves.sessions = 4
    for step in range(600):
        us = 24_000 if step < 300 else round(24_000 * 1.002 ** min(step - 300, 200))
        timing = StepTiming(compute_us=us, rows=4, sessions=4, step=step)
        curves.observe_verify((NONE, DRAFT)[step % 2], timing, way(us, 3_000), beside=step > 20)

    assert curves.verify.at(4) == pytest.approx(24_000 * 1.002**200, rel=0.02)
    assert curves.price(DRAFT, 4)[2] < 1.05
    assert curves.target_link.at(4) == pytest.approx(3_000)


def test_a_target_without_a_profile_is_known_after_a_step() -> None:
    """Whatever worked beside it."""
    curves = ServiceCurves()
    curves.observe_verify(DRAFT, StepTiming(compute_us=30_000, rows=2, sessions=1, step=1), way(30_000, 0), beside=True)

    assert curves.verify.at(2) == pytest.approx(30_000)


def test_a_pause_in_the_first_trial_at_a_load_is_not_its_crowding() -> None:
    """One of ten that count."""
    curves = contended(beside=False)
    for step in (1_001, 1_002):
        timing = StepTiming(compute_us=240_000, rows=2, sessions=1, step=step)
        curves.observe_verify(DRAFT, timing, way(240_000, 0), beside=True)

    assert curves.price(DRAFT, 2)[2] < 1.6


def test_steps_that_read_much_text_tell_what_reading_costs() -> None:
    """However many sessions read in it; the few tokens that go along with proposing tell nothing."""
    curves = taught(DRAFT, 4, 0)
    curves.observe_read(StepTiming(compute_us=9_000, rows=1, prefill_rows=2, sessions=3, step=1))
    assert curves.draft_read.known is False
    curves.observe_read(StepTiming(compute_us=100_000, rows=0, prefill_rows=1_000, sessions=8, step=2))

    assert curves.draft_read.value == 100


def test_a_reading_that_was_refused_is_paid_back() -> None:
    """The draft has no room: it is thought of again, but not soon."""
    curves = taught(DRAFT, 4, 0)
    curves.draft_read = Average(1_000.0)
    curves.allowance = 6.0
    window = curves.request(None, 8)
    asked = [window.worth_reading(room(), 100)]
    window.not_read()
    asked += [window.worth_reading(room(), 100) for _ in range(64)]

    assert asked == [True, *[False] * 63, True]
    trial = curves.round_us(DRAFT, 1, 1) / curves.plain_us(1) - 1.0
    assert curves.allowance == pytest.approx(6.0 - curves.read_rounds(100, 1) - trial)


def test_the_trial_that_reading_was_for_is_paid_already() -> None:
    """Once: whatever others spent meanwhile."""
    curves = taught(DRAFT, 4, 0)
    curves.allowance = 8.0
    window = curves.request(None, 8)
    assert window.worth_reading(room(), 100)
    curves.allowance = -1.0
    plans = []
    for _ in range(4):
        plan = window.plan(room())
        plans.append(plan.source)
        window.observe(plan.source, plan.num_tokens, 0, None, way(37_000, 0))

    assert plans == [NONE, DRAFT, NONE, NONE]


def test_what_was_too_dear_to_read_is_thought_of_again() -> None:
    """Every fourth round."""
    curves = taught(DRAFT, 4, 0)
    curves.draft_read = Average(1_000.0)
    curves.allowance = 0.0
    window = curves.request(None, 8)
    first = window.worth_reading(room(), 100)
    curves.allowance = 8.0

    assert [first, *(window.worth_reading(room(), 100) for _ in range(4))] == [False, False, False, False, True]


@pytest.mark.parametrize(("fixed", "expected"), [(0, False), (3, True)])
def test_a_fixed_length_needs_its_draft(fixed: int, expected: bool) -> None:
    """Whatever that costs."""
    curves = taught(DRAFT, 4, 0)
    curves.allowance = -5.0

    assert curves.request(fixed, 8).worth_reading(room(), 100) is expected


def test_many_at_work_make_reading_dear() -> None:
    """All of them wait for it, at worst."""
    curves = taught(DRAFT, 4, 0)
    curves.draft_read = Average(1_000.0)

    assert curves.read_rounds(100, 8) == pytest.approx(8 * 100_000 / curves.plain_us(8))


@pytest.mark.parametrize(
    ("sessions", "stands", "alone", "among_others"),
    [(4, 0.4, 1, 2), (8, 0.4, 1, 2), (8, 0.2, 0, 1), (1, 0.4, 2, 2)],
)
def test_in_step_a_shorter_block_saves_no_time_of_the_draft(
    sessions: int, stands: float, alone: int, among_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others, of whose tokens 0.7 stand, draft two and are waited for. A request that knows its own to stand less often drafts what
    is worth its rows, not what would be best were all like it."""
    curves = ServiceCurves()
    curves.target_profile((20_000, 20_500, 21_500, 23_500, 27_500, 35_500))
    curves.draft_profile((3_000,))
    curves.curve[DRAFT] = [0.7] * 8
    window = curves.request(None, 8)
    for index in range(60):
        window._acceptance[DRAFT].observe(1, int((index + 1) * stands) - int(index * stands))

    assert among_others == window.best(room(sessions=sessions))[1].num_tokens
    monkeypatch.setattr(ServiceCurves, "others_us", lambda *_: 0.0)
    assert alone == window.best(room(sessions=sessions))[1].num_tokens
