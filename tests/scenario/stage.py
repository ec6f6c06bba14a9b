"""What the verbs of a transcript do. Ledger and session rules are the product's own, joined as in `tests.support.joined`.

    open PROMPT [draft=no] [max_tokens=N] [end=ID] [target_append=N] [draft_append=N] [draft_context=N] [slots=N]
                                      a request; both streams stand from the first one on
    begin draft N | ngram IDS | plain the next round
    draft proposes [IDS] [cached=IDS] [length=N]
                                      the draft takes its task and proposes. In its cache are all but the last, unless it is
                                      said what is; the length it tells is that of its cache, unless it is said what it tells
    target accepts N adds ID          the target takes its task and judges
    target reads, draft reads         it takes a task that only fills the cache
    target receives, draft receives   it takes a task and does not get to it, or says at once why not
    target fails WHY [nan]            its model fails
    ... held                          the answer stays on the wire
    deliver draft | target [again]    an answer arrives; again: and stays on the wire, to arrive once more
    repeat draft | target             the last task arrives once more
    late                              the draft's time is over
    disconnect draft | target [late]  the stream is lost with all that is on it; late: but for answers, which turn up later
    connect, restart, evict draft | target
    advance SECONDS                   leases run out
    retry                             a while has passed since the target had no room
    cancel                            the client goes away
    holds draft | target              what the worker knows

A verb is about session 1 unless it ends with @N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from coordinator.ledger import (
    Command,
    Commit,
    End,
    Fail,
    Fallback,
    Later,
    Limits,
    Replayed,
    Role,
    Send,
    Stale,
)
from coordinator.stops import Ending
from specwire.law.tasks import Answer, Failure, ProposeTask, Refusal, SessionId, Task, VerifyTask
from specwire.law.values import Block, Source, Verdict
from specwire.worker.jobs import Job
from tests.support.joined import COORDINATOR, Generation, World


def ids(tokens: Sequence[int]) -> str:
    """Token ids for people."""
    return "[" + " ".join(map(str, tokens)) + "]"


def told(task: Task) -> str:
    """A task for people."""
    parts = [f"#{task.number} epoch={task.epoch} keep={task.keep} append={ids(task.append)}"]
    if isinstance(task, ProposeTask):
        parts.append(f"propose {task.num_tokens}" if task.num_tokens else "only read")
    if isinstance(task, VerifyTask):
        parts.append("only read" if task.prefill_only else f"judge {ids(task.block.tokens)}")
    return ", ".join(parts + ["open"] * (task.opening is not None))


def said(answer: Answer) -> str:
    """An answer for people."""
    match answer.result:
        case Verdict(accepted, added):
            result = f"accepted {accepted}, added {added}"
        case Block(tokens):
            result = f"proposed {ids(tokens)}" if tokens else "read"
        case Refusal(reason, length):
            result = f"refused: {reason.value}, holds {length}"
        case Failure(detail, bad_law):
            result = f"failed: {detail}" + " (no law)" * bad_law
        case _:
            result = "read"
    return f"#{answer.number} epoch={answer.epoch} length={answer.length}, {result}"


class Stage(World):
    """A world that writes down what is said."""

    def __init__(self) -> None:
        super().__init__(Limits(512, 512, 1000, 1000))
        self.lines: list[str] = []
        self.endings: dict[SessionId, Ending] = {}
        self.last_task: dict[Role, Task] = {}

    # -------------------------------------------------------------- verbs

    def play(self, line: str) -> list[str]:
        """Does one verb. Returns what was said."""
        self.lines = []
        line, _, at = line.partition("@")
        verb, *words = line.split()
        if verb == "open":
            self.verb_open(words)
            return self.lines
        each = self.generations[SessionId(COORDINATOR, int(at or 1))]
        if verb in ("draft", "target"):
            self.verb_work(each, Role(verb), words)
        else:
            verbs: dict[str, Callable[[Generation, list[str]], object]] = {
                "begin": self.verb_begin,
                "deliver": lambda _, w: self.deliver_answer(Role(w[0]), again="again" in w),
                "repeat": lambda _, w: self.arrive(Role(w[0]), self.last_task[Role(w[0])]),
                "late": lambda e, _: self.late(e),
                "disconnect": lambda _, w: self.disconnect(Role(w[0]), lose_answers="late" not in w),
                "connect": lambda _, w: self.connect(Role(w[0])),
                "restart": lambda _, w: self.restart(Role(w[0])),
                "evict": lambda e, w: self.say(
                    self.links[Role(w[0])], self.links[Role(w[0])].worker.evict(e.ledger.session)
                ),
                "advance": lambda _, w: self.advance(float(w[0])),
                "retry": lambda e, _: self.retry(e),
                "cancel": lambda e, _: self.finish(e),
                "holds": lambda e, w: self.holds(e, Role(w[0])),
            }
            verbs[verb](each, words)
        each.ledger.check()
        for link in self.links.values():
            self.deliver_closes(link.role)
            link.worker.table.check()
        if verb != "holds":
            self.lines.append(repr(each.ledger))
        return self.lines

    def verb_open(self, words: list[str]) -> None:
        """A request. Streams stand when the first one comes."""
        prompt = [int(word) for word in words if "=" not in word]
        options = dict(word.split("=") for word in words if "=" in word)
        names = {
            "target_append": "target_max_append",
            "draft_append": "draft_max_append",
            "draft_context": "draft_max_context",
        }
        self.limits = dataclasses.replace(
            self.limits, **{names[key]: int(value) for key, value in options.items() if key in names}
        )
        if not self.generations:
            for role in (Role.DRAFT, Role.TARGET):
                self.links[role].worker.num_slots = int(options.get("slots", 4))
                self.links[role].worker.restart()
                self.links[role].worker.incarnation = 1
                self.connect(role)
        each = self.open(prompt, with_draft=options.get("draft") != "no")
        end = {int(options["end"])} if "end" in options else set()
        self.endings[each.ledger.session] = Ending(int(options.get("max_tokens", 1000)), end)
        self.lines.append(repr(each.ledger))

    def verb_begin(self, each: Generation, words: list[str]) -> None:
        """The next round."""
        match words:
            case ["draft", count]:
                self.begin(each, Source.DRAFT_MODEL, int(count))
            case ["ngram", *guess]:
                self.begin(each, Source.NGRAM, 0, [int(token) for token in guess])
            case ["plain"]:
                self.begin(each, Source.NONE)
            case _:
                raise ValueError(words)

    def verb_work(self, each: Generation, role: Role, words: list[str]) -> None:
        """A worker takes the session's task, if one is on the wire, and does what the model is said to do."""
        held = "held" in words
        link = self.links[role]
        for task in [task for task in link.tasks if task.session == each.ledger.session]:
            link.tasks.remove(task)
            self.arrive(role, task, held)
        if words[0] == "receives":
            return
        (job,) = [job for job in link.worker.jobs() if job.task.session == each.ledger.session]
        answers = self.work(role, job, [word for word in words if word != "held"])
        self.holds(each, role)
        self.answer(role, answers, held)

    def work(self, role: Role, job: Job, words: list[str]) -> list[Answer]:
        """What the model does."""
        worker = self.links[role].worker
        match words:
            case ["proposes", *rest]:
                tokens = tuple(int(word) for word in rest if "=" not in word)
                options = dict(word.split("=") for word in rest if "=" in word)
                cached = tuple(map(int, options["cached"].split(","))) if "cached" in options else tokens[:-1]
                length = int(options["length"]) if "length" in options else None
                return worker.finish(job, Block(tokens, (), Source.DRAFT_MODEL), cached, length)
            case ["accepts", count, "adds", token]:
                assert isinstance(job.task, VerifyTask)
                assert not job.task.prefill_only
                accepted = int(count)
                return worker.finish(job, Verdict(accepted, int(token)), job.task.block.tokens[:accepted])
            case ["reads"]:
                return worker.finish(job, Block() if role is Role.DRAFT else None, ())
            case ["fails", why, *nan]:
                return worker.fail(job, Failure(why, bad_law=nan == ["nan"]))
            case _:
                raise ValueError(words)

    # -------------------------------------------------------------- what is said

    def arrive(self, role: Role, task: Task, held: bool = False) -> None:
        """A task reaches its worker; what it says at once is said."""
        self.last_task[role] = task
        self.answer(role, self.links[role].worker.receive(task, self.now), held)

    def answer(self, role: Role, answers: Sequence[Answer], held: bool) -> None:
        """A worker speaks. Unless held, it is heard."""
        link = self.links[role]
        for answer in answers:
            self.lines.append(
                f"<- {role.value} {said(answer)}" + ("" if link.up else " (nobody hears it)") + " (held)" * held
            )
        self.say(link, answers)
        for left in range(len(answers), 0, -1) if link.up and not held else ():
            self.deliver_answer(role, len(link.answers) - left)

    def holds(self, each: Generation, role: Role) -> None:
        """What a worker knows of the session."""
        session = self.links[role].worker.table.get(each.ledger.session)
        self.lines.append(
            f"   {role.value} holds {session!r}" if session is not None else f"   {role.value} holds nothing"
        )

    def execute(self, each: Generation, commands: Sequence[Command]) -> None:
        """Writes down what a ledger says, then does it."""
        for command in commands:
            match command:
                case Send(role, task, again):
                    up = "" if self.links[role].up else " (stream lost)"
                    self.lines.append(f"-> {role.value} {told(task)}" + " (again)" * again + up)
                case Commit(tokens, block, accepted):
                    self.lines.append(f"   commit {ids(tokens)}, accepted {accepted} of {len(block)}")
                case Fallback(cause):
                    self.lines.append(f"   fallback: {cause}")
                case Replayed(role, cause):
                    self.lines.append(f"   replay of {role.value}: {cause}")
                case Later():
                    self.lines.append("   later")
                case Stale(role):
                    self.lines.append(f"   stale answer of {role.value}")
                case Fail(error):
                    self.lines.append(f"   fail: {type(error).__name__}: {error}")
                case End(role):
                    self.lines.append(f"-> {role.value} close")
            super().execute(each, [command])
            if isinstance(command, Commit):
                self.show(each, command)

    def show(self, each: Generation, commit: Commit) -> None:
        """The answer takes what it wants, and ends the generation when it is complete."""
        accepted = self.endings[each.ledger.session].accept(commit.tokens)
        if accepted.end is not None:
            self.lines.append(
                f"   answer takes {ids(accepted.ids)} and is complete: {accepted.end.finish_reason.value}"
            )
            self.finish(each)
