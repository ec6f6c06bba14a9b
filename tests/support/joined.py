"""Ledgers and workers joined by a wire that does as it is told: no sockets, threads, clocks or models.

Law. Both ends are the product's own: `coordinator.ledger` here, `specwire.worker.sessions` there. What one end says lies on the
wire until somebody delivers, repeats or loses it; a worker's job waits until somebody begins and finishes it. The target is a
function of the text in the worker's own session, so text that was cut wrongly, sent twice or mixed up gives other tokens.

A link is one stream at a time. A lost stream loses the tasks on it; its answers may still turn up, under the old number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coordinator.ledger import (
    Command,
    Commit,
    End,
    Envelope,
    Fail,
    Fallback,
    Later,
    Ledger,
    Limits,
    Phase,
    Replayed,
    Role,
    Send,
    Stale,
)
from coordinator.mirror import Mirror
from specwire.law.cursor import Prefix, step
from specwire.law.errors import SpecwireError
from specwire.law.tasks import Answer, Failure, ProposeTask, Reason, Refusal, SessionId, Task, VerifyTask
from specwire.law.values import GREEDY, Block, Law, Opening, Source, Verdict
from specwire.worker.jobs import Job
from specwire.worker.sessions import Accept, Resend, SessionTable

COORDINATOR = 77
"""Incarnation of the only coordinator."""
LEASE_S = 10.0
IDLE_S = 100.0
VOCAB = 6
"""Small, so that wrong guesses are often right by chance."""


# ------------------------------------------------------------------ the models


def target_choice(prefix_hash: int, vocab: int = VOCAB) -> int:
    """The target's token after a text: a function of every token of it and of the opening."""
    return step(prefix_hash, 1_000_003) % vocab


def plain(opening: Opening, prompt: Sequence[int], count: int, vocab: int = VOCAB) -> list[int]:
    """Plain decoding: what every schedule must give."""
    text = Prefix(opening.fingerprint(), prompt)
    for _ in range(count):
        text.extend((target_choice(text.hash_at(len(text)), vocab),))
    return list(text.tokens[len(prompt) :])


def judge(text_hash: int, block: Block, vocab: int = VOCAB) -> Verdict:
    """The target's verdict on a block that follows a text."""
    for accepted, token in enumerate(block.tokens):
        chosen = target_choice(text_hash, vocab)
        if chosen != token:
            return Verdict(accepted, chosen)
        text_hash = step(text_hash, token)
    return Verdict(len(block), target_choice(text_hash, vocab))


def guess(text_hash: int, count: int, agreement: int, vocab: int = VOCAB) -> Block:
    """What a draft proposes: the target's own token in `agreement` of 100 places, its neighbour in the others."""
    tokens = []
    for _ in range(count):
        token = target_choice(text_hash, vocab)
        if step(text_hash, 2_000_003) % 100 >= agreement:
            token = (token + 1) % vocab
        tokens.append(token)
        text_hash = step(text_hash, token)
    return Block(tuple(tokens), (), Source.DRAFT_MODEL)


# ------------------------------------------------------------------ a worker


class Worker:
    """The session rules of a worker. Jobs are begun and finished from outside, with what the model is said to have given."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.incarnation = 1
        self.table = SessionTable(num_slots, IDLE_S)

    def __repr__(self) -> str:
        return f"Worker({self.incarnation}, {self.table!r})"

    def restart(self) -> None:
        """Another life: everything is forgotten."""
        self.incarnation += 1
        self.table = SessionTable(self.num_slots, IDLE_S)

    def receive(self, task: Task, now: float) -> list[Answer]:
        """A task arrives. Returns what is answered at once."""
        outcome = self.table.admit(Job(task), now)
        if isinstance(outcome, Refusal):
            return [refused(task, outcome)]
        if isinstance(outcome, Resend):
            return [outcome.answer]
        if isinstance(outcome, Accept):
            place = outcome.session.place(Reason.STALE, "overtaken")
            return [refused(job.task, place) for job in outcome.overtaken]
        return []

    def jobs(self) -> list[Job]:
        """Whose turn it is, by session."""
        return sorted(self.table.fronts(), key=lambda job: job.task.session)

    def begin(self, job: Job) -> None:
        """The first step of a job."""
        if not job.begun:
            assert job.session is not None
            job.session.begin()

    def finish(
        self, job: Job, result: Verdict | Block | None, tail: Sequence[int], length: int | None = None
    ) -> list[Answer]:
        """The job is done. `tail`: what stands in the cache after its append. `length`: a lie about the cache."""
        self.begin(job)
        task, session = job.task, job.session
        assert session is not None
        stands = task.base + len(tail) if length is None else length
        answer = Answer(task.session, task.epoch, task.number, stands, result)
        session.finish(answer, tail)
        return [answer, *(refused(late.task, refusal) for late, refusal in self.table.turn(session))]

    def fail(self, job: Job, failure: Failure) -> list[Answer]:
        """The model failed: the session is gone."""
        self.begin(job)
        others = self.table.drop(job.task.session)
        task = job.task
        gone = [refused(other.task, Refusal(Reason.LENGTH)) for other in others if other is not job]
        return [Answer(task.session, task.epoch, task.number, 0, failure), *gone]

    def evict(self, session: SessionId) -> list[Answer]:
        """The cache is needed for something else; tasks of the session are told."""
        return [refused(job.task, Refusal(Reason.LENGTH)) for job in self.table.drop(session)]

    def honest(self, job: Job, agreement: int) -> list[Answer]:
        """What the models above give. A draft's last token is not in its cache."""
        self.begin(job)
        task, session = job.task, job.session
        assert session is not None
        text_hash = session.prefix.hash_at(len(session.prefix))
        if isinstance(task, ProposeTask):
            block = guess(text_hash, task.num_tokens, agreement)
            return self.finish(job, block, block.tokens[:-1])
        assert isinstance(task, VerifyTask)
        if task.prefill_only:
            return self.finish(job, None, ())
        verdict = judge(text_hash, task.block)
        return self.finish(job, verdict, task.block.tokens[: verdict.accepted])


def refused(task: Task, refusal: Refusal) -> Answer:
    """A refusal as an answer."""
    return Answer(task.session, task.epoch, task.number, refusal.length, refusal)


# ------------------------------------------------------------------ the wire and the shell


@dataclass
class Link:
    """The way to one worker and back."""

    role: Role
    worker: Worker
    up: bool = False
    generation: int = 0
    known: int = 0
    """The worker's incarnation as last heard."""
    tasks: list[Task] = field(default_factory=list)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    """With the number of the stream each came on."""
    closes: list[SessionId] = field(default_factory=list)


@dataclass
class Generation:
    """One ledger and what its shell knows."""

    ledger: Ledger
    max_tokens: int
    output: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int, Source]] = field(default_factory=list)
    """(drafted, accepted, source) of every verdict."""
    error: SpecwireError | None = None
    later: int = 0
    """Retries that are due."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """By base: the block that was sent there."""
    last_sent: dict[Role, tuple[int, int]] = field(default_factory=dict)
    """Epoch and number of the last task to each worker."""
    high_water: tuple[int, int, int] = (0, 0, 0)
    """Epoch and both task numbers as last seen."""
    truth: Prefix = field(init=False)
    """Prompt and plain decoding, as far as `output` was compared with it."""

    def __post_init__(self) -> None:
        self.truth = Prefix(self.ledger.opening.fingerprint(), self.ledger.prefix.tokens)

    @property
    def over(self) -> bool:
        """Whether it has ended, whatever way."""
        return self.ledger.phase is Phase.OVER


class World:
    """Some generations, a draft, a target, and the wire between them."""

    def __init__(self, limits: Limits, target_slots: int = 4, draft_slots: int = 4) -> None:
        self.limits = limits
        self.links = {
            Role.DRAFT: Link(Role.DRAFT, Worker(draft_slots)),
            Role.TARGET: Link(Role.TARGET, Worker(target_slots)),
        }
        self.generations: dict[SessionId, Generation] = {}
        self.counts: Counter[str] = Counter()
        self.now = 0.0

    def open(self, prompt: Sequence[int], seed: int = 1, max_tokens: int = 20, with_draft: bool = True) -> Generation:
        """A request is admitted."""
        session = SessionId(COORDINATOR, len(self.generations) + 1)
        opening = Opening(Law.SHARED_NOISE, GREEDY, seed, 0, len(prompt))
        generation = Generation(Ledger(session, opening, prompt, self.limits, with_draft), max_tokens)
        self.generations[session] = generation
        return generation

    def running(self) -> list[Generation]:
        """Those that are not over."""
        return [each for each in self.generations.values() if not each.over]

    # -------------------------------------------------------------- streams

    def connect(self, role: Role) -> None:
        """A stream stands."""
        link = self.links[role]
        assert not link.up
        link.generation += 1
        assert link.worker.table.leases.open_stream(COORDINATOR, link.generation, LEASE_S)
        same = link.known == link.worker.incarnation
        link.known, link.up = link.worker.incarnation, True
        for each in self.running():
            if role is Role.DRAFT:
                self.execute(each, each.ledger.draft_up(same))
            else:
                self.execute(each, each.ledger.target_up(same, link.generation))
        self.deliver_closes(role)

    def disconnect(self, role: Role, lose_answers: bool = True) -> None:
        """The stream is lost, with the tasks on it."""
        link = self.links[role]
        assert link.up
        link.up = False
        link.tasks.clear()
        if lose_answers:
            link.answers.clear()
        link.worker.table.leases.lose_stream(COORDINATOR, self.now)
        link.worker.table.purge_unbegun(COORDINATOR)
        for each in self.running():
            self.execute(each, each.ledger.draft_down() if role is Role.DRAFT else each.ledger.target_down())

    def restart(self, role: Role) -> None:
        """The worker dies, and lives again. Its stream is lost with it."""
        link = self.links[role]
        if link.up:
            self.disconnect(role, lose_answers=False)
        link.worker.restart()
        link.closes.clear()

    def advance(self, seconds: float) -> None:
        """Time passes: leases run out."""
        self.now += seconds
        for link in self.links.values():
            link.worker.table.expire(self.now)

    # -------------------------------------------------------------- messages

    def deliver_task(self, role: Role, index: int = 0, again: bool = False) -> None:
        """A task arrives at its worker. `again`: and stays on the wire, to arrive once more."""
        link = self.links[role]
        task = link.tasks[index] if again else link.tasks.pop(index)
        self.say(link, link.worker.receive(task, self.now))

    def deliver_answer(self, role: Role, index: int = 0, again: bool = False) -> None:
        """An answer arrives at its ledger."""
        link = self.links[role]
        generation, answer = link.answers[index] if again else link.answers.pop(index)
        each = self.generations[answer.session]
        if role is Role.DRAFT:
            self.execute(each, each.ledger.draft_answered(answer, generation))
        else:
            self.execute(each, each.ledger.target_answered(answer, generation))

    def deliver_closes(self, role: Role) -> None:
        """What has ended is told."""
        link = self.links[role]
        for session in link.closes if link.up else ():
            link.worker.table.close(session, self.now)
        if link.up:
            link.closes.clear()

    def say(self, link: Link, answers: Sequence[Answer]) -> None:
        """A worker answers: on its stream, or into nothing when there is none."""
        if link.up:
            link.answers.extend((link.generation, answer) for answer in answers)

    # -------------------------------------------------------------- the shell

    def begin(self, each: Generation, source: Source, num_tokens: int = 0, guessed: Sequence[int] = ()) -> None:
        """The next round."""
        self.execute(each, each.ledger.begin(source, num_tokens, guessed, Envelope()))

    def run_ahead(self, each: Generation, num_tokens: int) -> None:
        """The draft goes on while its block is judged."""
        self.execute(each, each.ledger.run_ahead(num_tokens))

    def late(self, each: Generation) -> None:
        """The draft's time is over."""
        self.execute(each, each.ledger.draft_late())

    def retry(self, each: Generation) -> None:
        """A while has passed since the target had no room."""
        each.later -= 1
        self.execute(each, each.ledger.retry())

    def finish(self, each: Generation) -> None:
        """The answer is complete, or nobody wants it."""
        self.execute(each, each.ledger.finish())

    def execute(self, each: Generation, commands: Sequence[Command]) -> None:
        """Does what a ledger says."""
        if each.ledger.ahead_outcome is not None:
            self.counts[f"ahead_{each.ledger.ahead_outcome}"] += 1
            each.ledger.ahead_outcome = None
        for command in commands:
            self.counts[type(command).__name__] += 1
            match command:
                case Send(role, task, again):
                    self._send(each, role, task, again)
                case Commit(tokens, block, accepted):
                    each.output.extend(tokens)
                    each.rounds.append((len(block), accepted, block.source if len(block) else Source.NONE))
                case Fallback(cause):
                    self.counts[cause] += 1
                case Replayed(_, cause):
                    self.counts[cause] += 1
                case Later():
                    each.later += 1
                case Stale():
                    pass
                case Fail(error):
                    each.error = error
                    self.finish(each)
                case End(role):
                    link = self.links[role]
                    link.tasks = [task for task in link.tasks if task.session != each.ledger.session]
                    link.closes.append(each.ledger.session)

    def _send(self, each: Generation, role: Role, task: ProposeTask | VerifyTask, again: bool) -> None:
        link, mirror = self.links[role], mirror_of(each.ledger, role)
        mirror.sent(task, link.generation)
        at = (task.epoch, task.number)
        if not again:
            before = each.last_sent.get(role, (0, 0))
            assert at[0] >= before[0], "the epoch only rises"
            assert at[1] > before[1], "numbers only rise"
        each.last_sent[role] = at
        if isinstance(task, VerifyTask) and not task.prefill_only:
            assert task.block == each.blocks.setdefault(task.base, task.block), "once sent, a block stands"
            assert all(token < self.limits.vocab_size for token in task.block.tokens), "the target knows these ids"
        if link.up:
            link.tasks.append(task)
        else:
            mirror.stream_lost()

    # -------------------------------------------------------------- good weather

    def fair(self, agreement: int = 100, *roles: Role) -> bool:
        """Everything on the wire is delivered in order and every job is done, at these workers only if any are named. False:
        nothing was left to do."""
        moved = False
        for role, link in self.links.items():
            if roles and role not in roles:
                continue
            while link.tasks:
                self.deliver_task(role)
                moved = True
            for job in link.worker.jobs():
                self.say(link, link.worker.honest(job, agreement))
                moved = True
            while link.answers:
                self.deliver_answer(role)
                moved = True
            self.deliver_closes(role)
        for each in self.running():
            if each.later:
                self.retry(each)
                moved = True
        return moved

    def round(self, each: Generation, source: Source, num_tokens: int = 0, agreement: int = 100) -> None:
        """One whole round without trouble, and the draft brought up to date beside it."""
        self.begin(each, source, num_tokens)
        for _ in self.limited("round"):
            if not self.fair(agreement):
                break

    def limited(self, what: str, most: int = 1000) -> Iterator[int]:
        """Counts turns of a loop that must end."""
        yield from range(most)
        raise AssertionError(f"{what} does not end")

    def check(self) -> None:
        """Every law that holds at any time."""
        for link in self.links.values():
            link.worker.table.check()
        for each in self.generations.values():
            ledger = each.ledger
            ledger.check()
            compared = len(each.truth) - ledger.opening.prompt_length
            for token in each.output[compared:]:
                assert token == target_choice(each.truth.hash_at(len(each.truth))), "the text is that of plain decoding"
                each.truth.extend((token,))
            assert list(each.truth.tokens) == list(ledger.prefix.tokens)
            water = (ledger.epoch, ledger.draft.number, ledger.target.number)
            assert all(new >= old for new, old in zip(water, each.high_water, strict=True)), "nothing falls"
            each.high_water = water
            for role, link in self.links.items():
                flying = mirror_of(ledger, role).in_flight
                on_wire = {task.number for task in link.tasks if task.session == ledger.session}
                assert not each.over or not on_wire
                assert flying is None or not any(number > flying.number for number in on_wire)


def mirror_of(ledger: Ledger, role: Role) -> Mirror:
    """The belief about one worker."""
    return ledger.draft if role is Role.DRAFT else ledger.target
