"""Whatever workers and wire do, the text is that of plain decoding, and once they behave every answer is finished.

The machine below plays the world against ledgers: frames are lost, repeated, delayed and put out of order; workers restart,
evict, have no room, fail, answer late; drafts lie. `tests.support.joined` holds the joined ends and the laws.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.ledger import MAX_TROUBLES, WARM_TOKENS, Limits, Phase, Role
from specwire.law.errors import OurFault
from specwire.law.tasks import Failure, ProposeTask
from specwire.law.values import Block, Source
from specwire.worker.jobs import Job
from tests.support.joined import LEASE_S, VOCAB, Generation, Link, World, plain

QUICK = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
DEEP = settings(QUICK, max_examples=500, stateful_step_count=120, derandomize=False)

AMPLE = Limits(target_max_append=512, draft_max_append=512, draft_max_context=10_000, vocab_size=VOCAB)

roles = st.sampled_from(Role)
pick = st.integers(0, 10_000)
often = st.sampled_from([False, False, False, True])


class LedgersAgainstTheWorld(RuleBasedStateMachine):
    """Two or three generations share a draft and a target. `pick` chooses among what there is."""

    world: World

    @initialize(
        limits=st.builds(
            Limits,
            target_max_append=st.sampled_from([1, 7, 512]),
            draft_max_append=st.sampled_from([1, 7, 512]),
            draft_max_context=st.sampled_from([12, 10_000]),
            vocab_size=st.just(VOCAB),
        ),
        slots=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        prompts=st.lists(st.sampled_from([1, 2, 5, WARM_TOKENS, WARM_TOKENS + 1, 100]), min_size=1, max_size=3),
        drafts=st.booleans(),
        agreement=st.sampled_from([0, 50, 90, 100]),
        seed=st.integers(0, 5),
    )
    def start(
        self,
        limits: Limits,
        slots: tuple[int, int],
        prompts: list[int],
        drafts: bool,
        agreement: int,
        seed: int,
    ) -> None:
        """Requests are admitted and streams stand."""
        self.world = World(limits, *slots)
        self.agreement = agreement
        self.target_troubles: dict[int, int] = {}
        """By session: failures of the target in its present round."""
        for role in Role:
            self.world.connect(role)
        for number, length in enumerate(prompts):
            self.world.open([(3 * n + number) % VOCAB for n in range(length)], seed, max_tokens=40, with_draft=drafts)

    # -------------------------------------------------------------- helpers

    def ready(self) -> list[Generation]:
        """Those that wait for their next round."""
        return [each for each in self.world.running() if each.ledger.phase is Phase.READY]

    def tasks(self) -> list[tuple[Role, int]]:
        """What is on its way to the workers."""
        return [(role, n) for role, link in self.world.links.items() for n in range(len(link.tasks))]

    def answers(self) -> list[tuple[Role, int]]:
        """What is on its way back."""
        return [(role, n) for role, link in self.world.links.items() for n in range(len(link.answers))]

    def jobs(self, *only: Role) -> list[tuple[Link, Job]]:
        """What the workers could do now."""
        links = [link for role, link in self.world.links.items() if not only or role in only]
        return [(link, job) for link in links for job in link.worker.jobs()]

    def one_job(self, which: int, *only: Role) -> list[tuple[Link, Job]]:
        """One of them, or none when there is none."""
        jobs = self.jobs(*only)
        return [jobs[which % len(jobs)]] if jobs else []

    def up(self, role: Role) -> bool:
        """Whether a stream stands."""
        return self.world.links[role].up

    # -------------------------------------------------------------- rounds

    @precondition(lambda self: self.ready())
    @rule(
        which=pick,
        source=st.sampled_from(Source),
        num_tokens=st.integers(0, 5),
        right=st.integers(0, 5),
        wrong=st.lists(st.integers(0, VOCAB + 1), max_size=2),
    )
    def begin(self, which: int, source: Source, num_tokens: int, right: int, wrong: list[int]) -> None:
        """The next round, or the end. An n-gram guess is right for a while, and then it may be anything."""
        ready = self.ready()
        if not ready:
            return
        each = ready[which % len(ready)]
        if len(each.output) >= each.max_tokens:
            self.world.finish(each)
            return
        ledger = each.ledger
        ahead = plain(ledger.opening, ledger.prefix.tokens, right) if source is Source.NGRAM else []
        self.target_troubles[ledger.session.counter] = 0
        self.world.begin(each, source, num_tokens, [*ahead, *wrong])

    @precondition(lambda self: self.ready())
    @rule(which=pick, num_tokens=st.integers(0, 5))
    def round_in_good_weather(self, which: int, num_tokens: int) -> None:
        """Everything goes well for a while."""
        ready = self.ready()
        if ready:
            self.world.begin(ready[which % len(ready)], Source.DRAFT_MODEL, num_tokens)
            for _ in range(6):
                self.world.fair(self.agreement)

    @precondition(lambda self: any(each.ledger.phase is Phase.VERIFYING for each in self.world.running()))
    @rule(which=pick, num_tokens=st.integers(0, 5))
    def run_ahead(self, which: int, num_tokens: int) -> None:
        """At any time; also for a round without a block."""
        running = self.world.running()
        if running:
            self.world.run_ahead(running[which % len(running)], num_tokens)

    @precondition(lambda self: self.ready())
    @rule(which=pick, num_tokens=st.integers(1, 5), order=st.lists(st.sampled_from(Role), min_size=6, max_size=12))
    def round_that_runs_ahead(self, which: int, num_tokens: int, order: list[Role]) -> None:
        """A block, and while it is judged the draft goes on; verdict and guess come in either order."""
        ready = self.ready()
        if not ready or not all(self.up(role) for role in Role):
            return
        each = ready[which % len(ready)]
        self.world.begin(each, Source.DRAFT_MODEL, num_tokens)
        for _ in range(2):
            self.world.fair(self.agreement, Role.DRAFT)
        self.world.run_ahead(each, num_tokens)
        for role in order:
            self.world.fair(self.agreement, role)

    @precondition(lambda self: any(each.ledger.phase is Phase.DRAFTING for each in self.world.running()))
    @rule(which=pick)
    def draft_is_late(self, which: int) -> None:
        """At any time; also for a round that no longer waits."""
        running = self.world.running()
        if running:
            self.world.late(running[which % len(running)])

    @precondition(lambda self: any(each.later for each in self.world.running()))
    @rule(which=pick)
    def retry(self, which: int) -> None:
        """A while after the target had no room."""
        waiting = [each for each in self.world.running() if each.later]
        if waiting:
            self.world.retry(waiting[which % len(waiting)])

    @precondition(lambda self: self.world.running())
    @rule(which=pick, really=often)
    def cancel(self, which: int, really: bool) -> None:
        """The client goes away."""
        running = self.world.running()
        if running and really:
            self.world.finish(running[which % len(running)])

    # -------------------------------------------------------------- the wire

    @precondition(lambda self: self.tasks())
    @rule(which=pick, again=often)
    def task_arrives(self, which: int, again: bool) -> None:
        """In whatever order, or twice."""
        tasks = self.tasks()
        if tasks:
            self.world.deliver_task(*tasks[which % len(tasks)], again)

    @precondition(lambda self: self.answers())
    @rule(which=pick, again=often)
    def answer_arrives(self, which: int, again: bool) -> None:
        """In whatever order, or twice; also one of a stream that is lost."""
        answers = self.answers()
        if answers:
            self.world.deliver_answer(*answers[which % len(answers)], again)

    @precondition(lambda self: any(link.closes for link in self.world.links.values()))
    @rule(role=roles)
    def closes_arrive(self, role: Role) -> None:
        """What is over is told."""
        self.world.deliver_closes(role)

    @rule(role=roles, lose_answers=st.booleans(), really=often)
    def stream_breaks(self, role: Role, lose_answers: bool, really: bool) -> None:
        """With everything on it, but for answers that turn up later."""
        if self.up(role) and really:
            self.world.disconnect(role, lose_answers)

    @precondition(lambda self: not all(self.up(role) for role in Role))
    @rule(role=roles)
    def stream_comes_back(self, role: Role) -> None:
        """To whatever life of the worker."""
        if not self.up(role):
            self.world.connect(role)

    # -------------------------------------------------------------- the workers

    @precondition(lambda self: self.jobs())
    @rule(which=pick)
    def work_begins(self, which: int) -> None:
        """And is not done yet."""
        for link, job in self.one_job(which):
            link.worker.begin(job)

    @precondition(lambda self: self.jobs())
    @rule(which=pick)
    def work_is_done(self, which: int) -> None:
        """As it should be."""
        for link, job in self.one_job(which):
            self.world.say(link, link.worker.honest(job, self.agreement))

    @precondition(lambda self: self.jobs(Role.DRAFT))
    @rule(
        which=pick,
        tokens=st.lists(st.integers(0, VOCAB + 2), max_size=7),
        cached=st.integers(0, 7),
        lie=st.none() | st.integers(0, 130),
    )
    def draft_talks_nonsense(self, which: int, tokens: list[int], cached: int, lie: int | None) -> None:
        """Any tokens, too few or too many, in its cache or not, and a cache of any length."""
        block = Block(tuple(tokens), (), Source.DRAFT_MODEL)
        for link, job in self.one_job(which, Role.DRAFT):
            self.world.say(link, link.worker.finish(job, block, tokens[:cached], lie))

    @precondition(lambda self: self.jobs())
    @rule(which=pick, really=often)
    def model_fails(self, which: int, really: bool) -> None:
        """The session is gone with it. A target that fails twice in one round fails the request."""
        for link, job in self.one_job(which) if really else ():
            if link.role is Role.TARGET:
                counter = job.task.session.counter
                self.target_troubles[counter] = self.target_troubles.get(counter, 0) + 1
            self.world.say(link, link.worker.fail(job, Failure("it broke")))

    @rule(role=roles, which=pick, really=often)
    def session_is_evicted(self, role: Role, which: int, really: bool) -> None:
        """The worker needs the room."""
        link = self.world.links[role]
        sessions = link.worker.table.ids()
        if sessions and really:
            self.world.say(link, link.worker.evict(sessions[which % len(sessions)]))

    @rule(role=roles, really=often)
    def worker_restarts(self, role: Role, really: bool) -> None:
        """And knows nothing."""
        if really:
            self.world.restart(role)

    @precondition(lambda self: not all(self.up(role) for role in Role))
    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        """Leases of lost streams run out."""
        self.world.advance(seconds)

    # -------------------------------------------------------------- laws

    @invariant()
    def laws(self) -> None:
        """See `World.check`."""
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def requests_fail_for_a_reason(self) -> None:
        """Nothing but a target that failed twice in one round, or refused all the time, ends a request."""
        if not hasattr(self, "world"):
            return
        for each in self.world.generations.values():
            if each.error is not None:
                assert isinstance(each.error, OurFault)
                refused = f"refused {MAX_TROUBLES + 1} times" in str(each.error)
                assert refused or self.target_troubles.get(each.ledger.session.counter, 0) > 1, each.error

    def teardown(self) -> None:
        """The troubles are over: every answer is finished, and nothing is left of it anywhere."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for role in Role:
            if not self.up(role):
                world.connect(role)
        for _ in world.limited("the good weather", 5000):
            for each in self.ready():
                if len(each.output) < each.max_tokens:
                    world.begin(each, Source.DRAFT_MODEL, 3)
                else:
                    world.finish(each)
            for each in world.running():
                world.run_ahead(each, 3)
            moved = world.fair(self.agreement)
            world.check()
            if not moved and not world.running():
                break
            assert moved or self.ready(), f"stuck: {world.running()}"
        world.advance(2 * LEASE_S)
        for link in world.links.values():
            assert (0, 0) == (len(link.worker.table), link.worker.table.sizes()["waiting"]), "sessions are freed"


# ------------------------------------------------------------------ the same by dice

WEIGHTS: dict[str, float] = {
    "begin": 10,
    "task_arrives": 12,
    "work_is_done": 12,
    "answer_arrives": 12,
    "round_in_good_weather": 1,
    "work_begins": 2,
    "draft_is_late": 1,
    "retry": 2,
    "cancel": 0.1,
    "closes_arrive": 1,
    "stream_breaks": 1,
    "stream_comes_back": 3,
    "draft_talks_nonsense": 1,
    "model_fails": 0.5,
    "session_is_evicted": 1,
    "worker_restarts": 0.5,
    "run_ahead": 4,
    "round_that_runs_ahead": 4,
    "time_passes": 0.5,
}
"""How often what happens: mostly what should, so that ledgers get far enough for the rest to matter."""


def walk(seed: int, steps: int) -> LedgersAgainstTheWorld:
    """The machine's rules, drawn by weight: hypothesis shrinks better, dice get further in the same time."""
    dice = random.Random(seed)
    state = LedgersAgainstTheWorld()
    state.start(
        limits=Limits(dice.choice([1, 7, 512]), dice.choice([1, 7, 512]), dice.choice([30, 10_000]), VOCAB),
        slots=(dice.randint(1, 3), dice.randint(1, 3)),
        prompts=[dice.choice([1, 2, 5, WARM_TOKENS, WARM_TOKENS + 1]) for _ in range(dice.randint(1, 3))],
        drafts=dice.random() < 0.9,
        agreement=dice.choice([50, 90, 100]),
        seed=seed,
    )

    def number(most: int) -> int:
        return dice.randint(0, most)

    arguments: dict[str, Callable[[], Any]] = {
        "which": lambda: number(10_000),
        "source": lambda: dice.choice(list(Source)),
        "num_tokens": lambda: number(5),
        "right": lambda: number(5),
        "wrong": lambda: [number(VOCAB + 1) for _ in range(number(2))],
        "again": lambda: dice.random() < 0.2,
        "role": lambda: dice.choice(list(Role)),
        "lose_answers": lambda: dice.random() < 0.5,
        "really": lambda: True,
        "tokens": lambda: [number(VOCAB + 2) for _ in range(number(7))],
        "cached": lambda: number(7),
        "lie": lambda: dice.choice([None, number(130)]),
        "order": lambda: [dice.choice(list(Role)) for _ in range(dice.randint(6, 12))],
        "seconds": lambda: dice.choice([1.0, LEASE_S]),
    }
    for step, name in enumerate(dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=steps)):
        happens = getattr(state, name)
        try:
            happens(**{key: arguments[key]() for key in inspect.signature(happens).parameters})
            state.laws()
            state.requests_fail_for_a_reason()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {step}: {name}")
            raise
    state.teardown()
    return state


def test_by_dice() -> None:
    """Many tokens, much acceptance, and every kind of trouble was there; the laws held all the time."""
    counts: Counter[str] = Counter()
    accepted = tokens = 0
    for seed in range(50):
        world = walk(seed, 300).world
        counts.update(world.counts)
        tokens += sum(len(each.output) for each in world.generations.values())
        accepted += sum(
            n for each in world.generations.values() for _, n, source in each.rounds if source is Source.DRAFT_MODEL
        )
    said = ["Stale", "Later", "End"]
    of_the_draft = ["draft_timeout", "draft_lost", "draft_failed", "draft_length", "draft_no_room"]
    of_the_target = ["target_lost", "target_length", "target_failed"]
    of_guesses = ["ahead_True", "ahead_False"]

    assert [] == [each for each in (*said, *of_the_draft, *of_the_target, *of_guesses) if not counts[each]]
    assert tokens > 2000
    assert accepted > 500


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_by_dice_deeply(first: int) -> None:
    """The same for other seeds, and longer."""
    for seed in range(first, first + 50):
        walk(seed, 600)


@pytest.mark.slow
class TestLedgersAgainstTheWorldDeeply(LedgersAgainstTheWorld.TestCase):
    """The same for much longer, with fresh luck."""

    settings = DEEP


class TestLedgersAgainstTheWorld(LedgersAgainstTheWorld.TestCase):
    """Short, and the same every time."""

    settings = QUICK


# ------------------------------------------------------------------ good weather


def lone(prompt: int, max_tokens: int = 10_000, limits: Limits = AMPLE, **fields: Any) -> tuple[World, Generation]:
    """A world with one generation, both streams up."""
    world = World(limits)
    for role in (Role.DRAFT, Role.TARGET):
        world.connect(role)
    return world, world.open([n % VOCAB for n in range(prompt)], max_tokens=max_tokens, **fields)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("prompt", [1, 2, 9, WARM_TOKENS])
def test_a_perfect_draft_gives_k_and_one_tokens_every_round(k: int, prompt: int) -> None:
    """From the first round on, at every k: nothing is missing in its cache after full acceptance."""
    world, each = lone(prompt)
    for _ in range(20):
        world.round(each, Source.DRAFT_MODEL, k)
        world.check()

    assert [(k, k, Source.DRAFT_MODEL)] * 20 == each.rounds
    assert 0 == world.counts["Replayed"] + world.counts["Fallback"] + world.counts["Stale"]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("first", [Role.DRAFT, Role.TARGET])
def test_a_perfect_draft_that_runs_ahead_is_asked_once_a_round(k: int, first: Role) -> None:
    """Verdict first or guess first: the next block is what was proposed ahead, and each later round takes one task to the draft."""
    world, each = lone(prompt=3)
    tasks = []
    world.begin(each, Source.DRAFT_MODEL, k)
    world.fair(100, Role.DRAFT)
    for _ in range(20):
        world.run_ahead(each, k)
        tasks += world.links[Role.DRAFT].tasks
        second = Role.TARGET if first is Role.DRAFT else Role.DRAFT
        world.fair(100, first)
        if first is Role.TARGET:
            world.begin(each, Source.DRAFT_MODEL, k)
        world.fair(100, second)
        if first is Role.DRAFT:
            world.begin(each, Source.DRAFT_MODEL, k)
        world.check()

    assert [(k, k, Source.DRAFT_MODEL)] * 20 == each.rounds
    assert [(1, k + 1)] * 20 == [(len(task.append), task.num_tokens) for task in tasks]
    assert [20 * (k + 1)] == [len(each.output)]
    assert {task.epoch for task in tasks} == {1}


@pytest.mark.parametrize("agreement", [0, 50, 80])
@pytest.mark.parametrize("first", [Role.DRAFT, Role.TARGET])
def test_a_poor_draft_that_runs_ahead_costs_its_own_time_only(agreement: int, first: Role) -> None:
    """What was proposed in vain is dropped with a new epoch; no text is ever told again for it, and what stands stays cached."""
    world, each = lone(prompt=3)
    for _ in range(60):
        if each.ledger.phase is Phase.READY:
            world.begin(each, Source.DRAFT_MODEL, 4)
        world.fair(agreement, Role.DRAFT)
        world.fair(agreement, Role.DRAFT)
        world.run_ahead(each, 4)
        world.fair(agreement, first)
        world.fair(agreement)
        world.check()
    accepted = sum(accepted for _, accepted, _ in each.rounds)

    assert 50 <= len(each.rounds)
    assert agreement == 0 or accepted > 0
    assert 0 == world.counts["Replayed"] + world.counts["Fallback"]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_perfect_draft_with_a_long_prompt_begins_in_the_second_round(k: int) -> None:
    """It reads the prompt beside the target's first round, so nobody waits for it."""
    world, each = lone(prompt=500, limits=Limits(100, 100, 10_000, VOCAB))
    for _ in range(5):
        world.round(each, Source.DRAFT_MODEL, k)

    assert [(0, 0, Source.NONE), *[(k, k, Source.DRAFT_MODEL)] * 4] == each.rounds


@pytest.mark.parametrize("pause", [1, 10, 50, 200])
def test_after_a_pause_the_draft_is_as_good_as_before(pause: int) -> None:
    """Fifty tokens without it, or two hundred, which it reads beside plain decoding as they come: full acceptance in the first
    round it is asked again."""
    world, each = lone(prompt=5)
    for k in (3, *[0] * pause, 3, 3):
        world.round(each, Source.DRAFT_MODEL, k)

    assert [(3, 3, Source.DRAFT_MODEL)] * 2 == each.rounds[-2:]
    assert world.counts["Replayed"] == 0


@pytest.mark.parametrize("agreement", [0, 50, 80])
def test_a_poor_draft_costs_acceptance_and_nothing_else(agreement: int) -> None:
    """Refusals cut both caches; no replay is ever needed for them."""
    world, each = lone(prompt=3)
    for _ in range(60):
        world.round(each, Source.DRAFT_MODEL, 4, agreement)
        world.check()
    accepted = sum(accepted for _, accepted, _ in each.rounds)

    assert agreement == 0 or accepted > 0
    assert 0 == world.counts["Replayed"] + world.counts["Fallback"] + world.counts["Stale"]


@pytest.mark.parametrize("role", list(Role))
def test_the_draft_is_in_use_before_and_after_a_restart(role: Role) -> None:
    """Whichever worker dies, acceptance is full again in the round after."""
    world, each = lone(prompt=10)
    for _ in range(3):
        world.round(each, Source.DRAFT_MODEL, 4)
    world.restart(role)
    world.round(each, Source.DRAFT_MODEL if role is Role.TARGET else Source.NONE, 4)
    world.connect(role)
    for _ in range(5):
        if each.ledger.phase is Phase.READY:
            world.round(each, Source.DRAFT_MODEL, 4)
        world.fair()

    assert [(4, 4)] * 3 == [(drafted, accepted) for drafted, accepted, _ in each.rounds[:3]]
    assert [(4, 4)] * 2 == [(drafted, accepted) for drafted, accepted, _ in each.rounds[-2:]]
    world.check()


@pytest.mark.parametrize("append", [1, 3, 20])
def test_a_draft_that_takes_small_bites_still_proposes(append: int) -> None:
    """A text longer than one of its tasks may append is told in chunks, and the round still gets its block."""
    world, each = lone(prompt=10, limits=Limits(512, append, 10_000, VOCAB))
    for _ in range(4):
        world.round(each, Source.DRAFT_MODEL, 3)

    assert [(3, 3, Source.DRAFT_MODEL)] * 4 == each.rounds


def test_proposals_are_cached_as_the_draft_says() -> None:
    """A draft that ran ahead holds its last token too, and then only the bonus is sent."""
    world, each = lone(prompt=4)
    world.begin(each, Source.DRAFT_MODEL, 2)
    world.deliver_task(Role.DRAFT)
    link = world.links[Role.DRAFT]
    (job,) = link.worker.jobs()
    block = Block(tuple(plain(each.ledger.opening, each.ledger.prefix.tokens, 2)), (), Source.DRAFT_MODEL)
    world.say(link, link.worker.finish(job, block, block.tokens))
    world.fair()
    world.begin(each, Source.DRAFT_MODEL, 2)
    task = link.tasks[0]

    assert isinstance(task, ProposeTask)
    assert (6, 1) == (task.keep, len(task.append))
