"""The draft's bookkeeping around any proposer: what is read, what is asked for, what is cached afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from draft_service.engine import DraftStepper
from draft_service.proposers.base import Advance, Line, Proposal
from specwire.law.errors import BadLaw, InvalidArgument
from specwire.law.tasks import Failure, ProposeTask, SessionId, VerifyTask
from specwire.law.values import GREEDY, Block, Law, Opening
from specwire.lm.port import ModelSpec
from specwire.worker.jobs import Job
from specwire.worker.sessions import SessionTable
from specwire.worker.stepper import Done

OPENING = Opening(Law.SHARED_NOISE, GREEDY, 0, 0, 1)
SPEC = ModelSpec("fake", "fake", 1000, (), 64, (), GREEDY, "cpu", "float32", "f")


@dataclass
class Counting:
    """A fake proposer: the token at a position is the position. Gives up to `width` tokens at once and checks its reader."""

    width: int = 1
    spec: ModelSpec = SPEC
    num_slots: int = 4
    read: dict[int, list[int]] = field(default_factory=dict)
    """slot -> tokens read, as a cache would hold them."""
    fail_at: int | None = None
    steps: int = 0

    def advance(self, lines: Sequence[Line]) -> Advance:
        self.steps += 1
        out: list[Proposal | BadLaw | None] = []
        for line in lines:
            cache = self.read.setdefault(line.slot, [])
            assert line.start <= len(cache), "a hole in the cache"
            del cache[line.start :]
            cache.extend(line.tokens)
            want = line.want
            if want is None:
                out.append(None)
            elif want.position == self.fail_at:
                out.append(BadLaw("no"))
            else:
                count = min(self.width, want.limit)
                out.append(Proposal(tuple(range(want.position, want.position + count))))
        return Advance(out, 1000, 10)


def run(stepper: DraftStepper, table: SessionTable, *tasks: ProposeTask) -> dict[int, Done]:
    """Steps until all are done; by session counter."""
    for order, task in enumerate(tasks):
        stepper.check(task)
        table.admit(Job(task, order=order), 0.0)
    done: dict[int, Done] = {}
    while jobs := [job for job in table.fronts() if job.task.session.counter not in done]:
        plan = stepper.plan(jobs, [], 0.0, 0.0)
        assert plan.parts
        for part in plan.parts:
            if not part.job.begun:
                assert part.job.session is not None
                part.job.session.begin()
        for each in stepper.run(plan.parts).done:
            done[each.job.task.session.counter] = each
    return done


def ask(counter: int, text: int, num_tokens: int) -> ProposeTask:
    """A session of `text` tokens, from nothing."""
    return ProposeTask(SessionId(1, counter), 1, 1, 0, 0, tuple(range(text)), OPENING, num_tokens=num_tokens)


def fresh(proposer: Counting, budget: int = 512) -> tuple[DraftStepper, SessionTable]:
    """A stepper and a table with one peer."""
    table = SessionTable(4, 60.0)
    table.leases.open_stream(1, 1, 60.0)
    return DraftStepper(proposer, budget, 64, 8, 100), table


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_a_block_grows_by_what_the_proposer_gives(width: int, length: int) -> None:
    """Token by token or many at once: the same block; what was fed back, and only that, is in the cache."""
    proposer = Counting(width)
    done = run(*fresh(proposer), ask(1, 5, length))[1]
    fed = len(proposer.read[0])

    assert done.result == Block(tuple(range(5, 5 + length)))
    assert proposer.read[0] == list(range(fed))
    assert done.tail == tuple(range(5, fed))
    if width == 1:
        assert fed == 5 + length - 1


def test_sequences_of_all_lengths_in_one_pass_each_step() -> None:
    """As many steps as the longest needs."""
    proposer = Counting()
    done = run(*fresh(proposer), ask(1, 3, 2), ask(2, 9, 8), ask(3, 1, 1), ask(4, 4, 0))

    assert {counter: each.result for counter, each in done.items()} == {
        1: Block((3, 4)),
        2: Block(tuple(range(9, 17))),
        3: Block((1,)),
        4: Block(()),
    }
    assert proposer.steps == 8


def test_a_long_append_is_read_in_pieces() -> None:
    """Within the budget, and the last piece proposes."""
    proposer = Counting()
    done = run(*fresh(proposer, 36), ask(1, 50, 2))[1]

    assert done.result == Block((50, 51))
    assert proposer.steps == 2 + 1


def test_up_to_date_and_asked_again_reads_its_last_token_again() -> None:
    """A row belongs to a token that is fed; nothing else is repeated."""
    proposer = Counting()
    stepper, table = fresh(proposer)
    first = run(stepper, table, ask(1, 6, 0))[1]
    session = first.job.session
    assert session is not None
    from specwire.law.tasks import Answer

    session.finish(Answer(session.id, 1, 1, 6, Block()))
    again = ProposeTask(session.id, 1, 2, 6, session.prefix.hash_at(6), (), None, num_tokens=2)

    assert run(stepper, table, again)[1].result == Block((6, 7))
    assert proposer.read[0] == list(range(7))


def test_a_law_that_is_none_fails_its_own_sequence() -> None:
    """In the middle of a block; the neighbour gets its own."""
    proposer = Counting(fail_at=7)
    done = run(*fresh(proposer), ask(1, 5, 4), ask(2, 8, 4))

    assert isinstance(done[1].result, Failure)
    assert done[1].result.bad_law
    assert done[2].result == Block((8, 9, 10, 11))


def test_the_limits() -> None:
    """Named with field, value and limit."""
    stepper, _ = fresh(Counting())
    with pytest.raises(InvalidArgument, match="append: got \\(\\), must be at least one token to propose from"):
        stepper.check(ask(1, 0, 1))
    with pytest.raises(InvalidArgument, match="task: got 'VerifyTask', must be a ProposeTask"):
        stepper.check(VerifyTask(SessionId(1, 1), 1, 1, 0, 0, (1,), OPENING))
    assert stepper.length(ask(1, 60, 100)) == 4
    assert stepper.length(ask(1, 5, 100)) == 8
