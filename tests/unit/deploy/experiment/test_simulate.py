"""The simulated service: its times are those of the formulas, and nothing is lost or invented in it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.schedule import ahead_us, rotation_us
from deploy.experiment.service import Service
from deploy.experiment.simulate import Results, Steps, World, best_fixed, fix, main, simulate
from specwire.law.errors import InvalidArgument

ENDLESS = 10**9
"""Tokens of an answer that does not end while it is looked at."""


def world(**settings: Any) -> World:
    """Exact times, and answers without end."""
    return World(**{"answer_tokens": ENDLESS, "schedule": "synchronous", "acceptance": 0.8, **settings})


def run(there: World, rounds: int = 20, warm_up: int = 5) -> Results:
    """A short run."""
    return simulate(there, rounds=rounds, warm_up=warm_up)


# -------------------------------------------------------------------- times


@pytest.mark.parametrize(("k", "sessions"), [(1, 1), (4, 1), (8, 1), (4, 6)])
@pytest.mark.parametrize(("draft_link", "target_link"), [(0, 0), (3_000, 500), (80_000, 1_000)])
def test_a_synchronous_round_takes_what_its_parts_take(
    k: int, sessions: int, draft_link: int, target_link: int
) -> None:
    """k*d + r_d + r_t + v, to the microsecond, with d and v of all sessions together."""
    target, draft = Steps.line(20_000, 500), Steps.line(2_000, 100)
    links = {"draft_link_us": draft_link, "target_link_us": target_link}
    found = run(world(k=k, sessions=sessions, target=target, draft=draft, **links))

    expected = k * draft.at(sessions) + draft_link + target_link + target.at(sessions * (k + 1))
    assert (expected, expected) == (found.round_us, found.period_us)


@pytest.mark.parametrize("sessions", [1, 6])
def test_a_plain_round_is_a_step_and_a_way(sessions: int) -> None:
    """v + r_t, whatever the draft and its link."""
    found = run(world(k=0, sessions=sessions, target_link_us=700, draft_link_us=9_000))

    assert (20_000 + 500 * (sessions - 1) + 700, 1.0) == (found.round_us, found.acceptance_length)


def test_the_coordinator_takes_its_time_for_each_frame_and_answer() -> None:
    """A round receives two frames, with an answer of each session."""
    found = run(world(k=4, sessions=3, coordinator_us=300, coordinator_answer_us=10))

    assert 4 * 2_000 + 20_000 + 500 * 14 + 2 * (300 + 3 * 10) == found.round_us


TURNS = {
    "target": (Steps.line(30_000, 500), Steps.line(2_000), 1_000, 1_000),
    "draft": (Steps.line(5_000), Steps.line(2_000, 2_000), 1_000, 1_000),
    "draft's way": (Steps.line(5_000), Steps.line(2_000), 60_000, 1_000),
    "target's way": (Steps.line(5_000), Steps.line(2_000), 1_000, 60_000),
}


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("bottleneck", TURNS)
def test_a_rotation_turns_as_its_bottleneck_lets_it(bottleneck: str, groups: int) -> None:
    """m*v, or the m blocks that the draft makes meanwhile, or once round: whatever takes longest."""
    target, draft, draft_link, target_link = TURNS[bottleneck]
    links = {"draft_link_us": draft_link, "target_link_us": target_link}
    there = world(k=4, sessions=6, schedule="rotation", groups=groups, target=target, draft=draft, **links)
    block, verify = 4 * draft.at(6 // groups), target.at(6 // groups * 5)
    once = block + draft_link + target_link + verify
    terms = {"target": groups * verify, "draft": groups * block, "draft's way": once, "target's way": once}
    found = run(there, 30, 20)

    assert max(terms.values()) == terms[bottleneck] == rotation_us(groups, block, draft_link + target_link, verify)
    assert terms[bottleneck] == pytest.approx(found.round_us, rel=0.02)


def test_groups_hide_the_draft_behind_the_target() -> None:
    """A target that is the bottleneck is never idle, and each step has half of the sessions."""
    found = run(world(k=4, sessions=8, schedule="rotation"), 20, 20)

    assert (1.0, 4.0) == (found.target_busy, found.step_sessions)


@pytest.mark.parametrize(
    ("k", "token", "verify", "draft_link", "target_link"),
    [(4, 2_000, 20_000, 1_000, 1_000), (4, 2_000, 20_000, 20_000, 1_000), (8, 4_000, 10_000, 1_000, 20_000)],
)
@pytest.mark.parametrize("acceptance", [1.0, 0.9, 0.7])
def test_running_ahead(acceptance: float, k: int, token: int, verify: int, draft_link: int, target_link: int) -> None:
    """A round is `ahead_us` for the blocks that stood and the hits that there were; without misses to the microsecond."""
    links = {"draft_link_us": draft_link, "target_link_us": target_link}
    steps = {"target": Steps.line(verify), "draft": Steps.line(token)}
    found = run(world(k=k, schedule="run_ahead", acceptance=acceptance, **steps, **links), 150)
    whole, hit = found.stood / found.asked_ahead, found.hits / found.asked_ahead
    expected = ahead_us(whole, hit, k, token, draft_link, verify, target_link)

    assert expected == pytest.approx(found.round_us, rel=1e-12 if acceptance == 1.0 else 0.03)
    assert acceptance**k == pytest.approx(whole, abs=0.1)
    assert acceptance ** (k + 1) == pytest.approx(hit, abs=0.1)


def test_what_overlaps_on_shared_cores_takes_longer() -> None:
    """The draft's five tokens take as long as ten beside the target, which has done half of its step by then."""
    ahead = world(k=4, schedule="run_ahead", acceptance=1.0, target=Steps.line(20_000), stretch=2.0)
    turns = dataclasses.replace(ahead, schedule="synchronous")

    assert 20_000 + 10_000 == run(ahead).round_us
    assert 8_000 + 20_000 == run(turns).round_us


def test_who_comes_late_is_waited_for() -> None:
    """Two sessions that fell out of step find together again, and do not where nobody waits."""
    there = world(k=4, sessions=2, jitter=0.3, answer_tokens=40)
    found = run(there, 100)
    alone = run(dataclasses.replace(there, linger=False), 100)

    assert found.step_sessions > 1.9
    assert alone.step_sessions < 1.9


# -------------------------------------------------------------------- tokens


def falling(position: int) -> float:
    """Acceptance as a function."""
    return 0.9 - 0.1 * position


@pytest.mark.parametrize("acceptance", [0.7, (0.9, 0.8, 0.5), falling], ids=["constant", "by position", "function"])
def test_tokens_of_a_round_are_those_of_theory(acceptance: float | tuple[float, ...] | Callable[[int], float]) -> None:
    """E = 1 + sum of the chances that so many stand, within four standard errors."""
    there = world(k=4, sessions=8, acceptance=acceptance)
    found = run(there, 60)
    stands = [math.prod(there.stands(n) for n in range(k)) for k in range(1, 5)]
    mean = 1.0 + sum(stands)
    variance = sum((2 * k + 1) * chance for k, chance in enumerate(stands, start=1)) + 1.0 - mean**2

    assert mean == pytest.approx(there.tokens(4))
    assert abs(mean - found.acceptance_length) < 4 * math.sqrt(variance / found.rounds)


@pytest.mark.parametrize("schedule", ["auto", "synchronous", "rotation", "run_ahead"])
@pytest.mark.parametrize("k", [None, 4])
def test_nothing_is_lost_and_nothing_invented(schedule: Any, k: int | None) -> None:
    """All tokens are those of complete answers and of those under way; nobody works longer than there is time."""
    there = World(
        sessions=5,
        schedule=schedule,
        k=k,
        jitter=0.2,
        stretch=1.3,
        answer_tokens=30,
        prompt_tokens=40,
        targets=2,
        drafts=2,
    )
    service = Service(there, seed=3)
    found = service.run(rounds=40, warm_up=0)

    assert found.tokens == sum(service.answers) + sum(session.committed for session in service.sessions.values())
    assert {30} == set(service.answers)
    assert 5 == len(service.sessions)
    assert 5 == sum(len(target.bound) for target in service.targets)
    assert 0.0 < found.target_busy <= 1.0
    assert 0.0 <= found.draft_busy <= 1.0


def test_a_seed_repeats_a_run() -> None:
    """The same seed gives the same numbers, another one others."""
    there = World(sessions=3, jitter=0.1, answer_tokens=50)
    first, again, other = (simulate(there, seed=seed, rounds=30, warm_up=5) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_a_text_is_as_easy_whatever_the_blocks() -> None:
    """Two drafts that guess alike are judged alike: longer blocks never commit less of the same text in a round."""
    two, four = (run(world(k=k), 50) for k in (2, 4))

    assert two.tokens_per_s * two.round_us < four.tokens_per_s * four.round_us


# -------------------------------------------------------------------- load


def test_two_targets_do_twice_as_much() -> None:
    """Sessions are spread evenly, and each pair is a service of its own."""
    one = run(world(k=4, sessions=4))
    two = run(world(k=4, sessions=8, targets=2, drafts=2))

    assert one.round_us == two.round_us
    assert 2 * one.rounds_per_s == pytest.approx(two.rounds_per_s)


def test_requests_that_come_by_themselves_are_served_as_they_come() -> None:
    """An open loop below what the service can do brings its rate times its answers, and never more sessions than there may be."""
    there = World(sessions=8, arrivals_per_s=1.0, answer_tokens=60, k=0, schedule="synchronous")
    service = Service(there, seed=1)
    found = service.run(rounds=200, warm_up=20)

    assert 60 == pytest.approx(found.tokens_per_s, rel=0.15)
    assert len(service.sessions) <= 8


def test_more_requests_than_can_be_served_wait() -> None:
    """An open loop above that is a closed one."""
    busy = world(k=4, sessions=3, answer_tokens=20)
    flooded = dataclasses.replace(busy, arrivals_per_s=1000.0)

    assert run(busy, 60).tokens_per_s == pytest.approx(run(flooded, 60, 20).tokens_per_s, rel=0.05)


def test_a_long_prompt_is_read_before_it_is_drafted_for() -> None:
    """The draft reads beside the target, and proposes once it has."""
    found = simulate(world(k=4, prompt_tokens=500, draft_read_us=100, target_read_us=50), rounds=10, warm_up=0)

    assert 0 < found.k < 4
    assert 4 == simulate(world(k=4, prompt_tokens=500, draft_read_us=100), rounds=10, warm_up=10).k


def test_thousands_of_sessions() -> None:
    """Two thousand, in steps of at most 512."""
    found = simulate(world(k=4, sessions=2_000), rounds=1, warm_up=1)

    assert 2_000 <= found.rounds
    assert found.step_sessions <= 512


# -------------------------------------------------------------------- settings and results


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sessions", 0),
        ("draft_link_us", -1.0),
        ("target_link_us", float("nan")),
        ("jitter", 1.0),
        ("stretch", 0.5),
        ("acceptance", 1.5),
        ("acceptance", ()),
        ("acceptance", (0.5, -0.1)),
        ("longest", 65),
        ("k", 9),
        ("groups", 9),
        ("schedule", "sometimes"),
        ("token_budget", 8),
        ("target", Steps.line(0.0)),
    ],
)
def test_a_world_that_cannot_be_is_refused(field: str, value: Any) -> None:
    """By name."""
    with pytest.raises(InvalidArgument) as refused:
        World(**{field: value})

    assert field == refused.value.field


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((1, -1.0),), ((2, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0))])
def test_steps_that_cannot_be_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    """They rise in rows and never fall in time."""
    with pytest.raises(InvalidArgument):
        Steps(points)


def test_steps_are_linear_between_points_and_beyond() -> None:
    """A single point says that rows cost nothing."""
    steps = Steps(((2, 100.0), (4, 200.0), (8, 300.0)))

    assert [50, 100, 150, 200, 250, 400] == [steps.at(rows) for rows in (1, 2, 3, 4, 6, 12)]
    assert 7.0 == Steps(((1, 7.0),)).at(99)


def test_the_best_in_hindsight() -> None:
    """A draft that is always right pays more the longer its blocks; one that never is, nothing."""
    good, bad = (best_fixed(world(acceptance=a), (0, 2, 4), rounds=10, warm_up=2) for a in (1.0, 0.0))

    assert (["plain", "k=2 synchronous", "k=4 synchronous"], "k=4 synchronous") == (
        list(map(str, good[0])),
        str(good[1]),
    )
    assert "plain" == str(bad[1])


def test_every_schedule_is_tried_where_the_world_leaves_it_open() -> None:
    """With as many groups as there are sessions for."""
    tried, _ = best_fixed(world(schedule="auto", sessions=2), (4,), rounds=5, warm_up=2)

    assert ["plain", "k=4 synchronous", "k=4 run-ahead", "k=4 rotation of 2"] == list(map(str, tried))
    assert "k=4 rotation of 3" == str(fix(world(sessions=3), 4, "rotation", 3, rounds=2, warm_up=1))


def test_the_command_prints_a_table_and_writes_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each combination."""
    file = tmp_path / "numbers.json"
    arguments = "--sessions 1,2 --draft-link-us 0,20000 --acceptance 0.9,0.5 --k 2 --schedule synchronous --best"
    status = main([*arguments.split(), "--rounds", "5", "--warm-up", "2", "--json", str(file)])
    found = json.loads(file.read_text())

    assert 0 == status
    assert [(1, 0), (1, 20_000), (2, 0), (2, 20_000)] == [
        (each["world"]["sessions"], each["world"]["draft_link_us"]) for each in found
    ]
    assert [0.9, 0.5] == found[0]["world"]["acceptance"]
    assert {"plain", "k=2 synchronous"} <= set(found[0]["fixed"])
    assert "Simulated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("--stretch", "0", "finite and at least 1"),
        ("--longest", "65", "in [0, 64]"),
        ("--target-us", "0", "longer than nothing for a single row"),
        ("--target-row-us", "-1", "finite and at least 0"),
        ("--draft-us", "nan", "finite and at least 0"),
        ("--sessions", "1,x", "whole numbers of at least 1"),
        ("--sessions", "0", "whole numbers of at least 1"),
        ("--draft-link-us", "-1", "numbers of at least 0"),
        ("--acceptance", "1.5", "in [0, 1]"),
        ("--k", "many", "auto or a whole number"),
        ("--rounds", "0", "at least 1"),
        ("--warm-up", "-1", "at least 0"),
        ("--target-us", "inf", "finite"),
        ("--sessions", "1000000", "in [1, 100000]"),
        ("--schedule rotation --groups", "1", "at least 2"),
    ],
)
def test_the_command_names_an_option_that_cannot_be(
    option: str, value: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was typed, on standard error, with status 2 and nothing simulated."""
    status = main([*option.split()[:-1], f"{option.split()[-1]}={value}"])
    said = capsys.readouterr()

    assert (2, "", True, True) == (status, said.out, said.err.startswith(option.split()[-1]), limit in said.err)


def test_the_table_leaves_out_what_is_empty_and_says_once_what_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Links in the title while there is one of each, hits only where something ran ahead."""
    short = ["--k", "2", "--rounds", "5", "--warm-up", "2", "--sessions", "1"]
    main([*short, "--schedule", "synchronous"])
    same = capsys.readouterr().out
    main([*short, "--schedule", "run_ahead", "--draft-link-us", "0,500"])
    differ = capsys.readouterr().out

    assert ["Simulated, r_d 0.5 ms, r_t 0.5 ms", False, False] == [
        same.splitlines()[0].strip(),
        "hits" in same,
        "r_d, ms" in same,
    ]
    assert ["Simulated, r_t 0.5 ms", True, True] == [
        differ.splitlines()[0].strip(),
        "hits" in differ,
        "r_d, ms" in differ,
    ]
