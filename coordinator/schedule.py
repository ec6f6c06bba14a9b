"""How sessions share a draft and a target: in step, by turns, or with the draft running ahead. The one place that decides. Pure.

Law (design, section 5; m groups of b/m sessions, k tokens a block, d and v the steps of draft and target for so many sessions).

- *Synchronous* (m = 1): all draft, then all are judged. A round takes k*d + r_d + r_t + v.
- *Rotation* (m > 1): the target judges one group while the draft works for the others. A group's turn comes every
  max(m*v, m*k*d, k*d + r_d + r_t + v): whichever of target, draft and way is the bottleneck.
- *Run-ahead*: while a block is judged the draft goes on from its own guess of what follows it. On a hit the next block is there,
  or on its way, when the verdict comes; on a miss the draft begins anew, after the step it is in. Of several sessions some are then
  late, and each step of the target serves those that are there.

Where draft and target share cores, what works beside each other stretches (`curves.beside`, measured), and the overlap loses. No
choice depends on what is being drafted, and a verdict alone commits, so each is exact; under `rejection` nothing runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from coordinator.curves import ServiceCurves

Choice = Literal["auto", "synchronous", "rotation", "run_ahead"]

MAX_GROUPS = 8
_TRIED_GROUPS = (2, 3)
"""What `auto` compares: with more, groups are smaller and steps hardly shorter."""
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_BETTER = 1.03
"""A schedule stands until another promises so many times its rate: changing it costs a round or two."""
_EVERY_ROUNDS = 16
"""Rounds of each session between two decisions."""
_TRIAL_EVERY = 1024
"""Rounds of the service after which running ahead may be tried again though it looks worse: what works beside what changes. And
rounds in step while there are none, but for ..."""
_TRIAL_EVERY_EACH = 256
"""... so many rounds of each session: all take part."""
_TRIAL = 8
"""Rounds of such a trial; in step, of each session."""
_FEW = 2
"""Sessions up to which running ahead is tried though it looks worse: of more, some draft while others are judged, whatever the
schedule, and what is held against running ahead itself fades (`curves.ahead_error`)."""
_WORTH_A_TRY = 0.9
"""What running ahead promises of several is right within a tenth or so: if that decides while they take turns, it is tried."""
_MOST = 0.5
"""Share of rounds that must be of sessions which can run ahead."""
_PASSES = 4
"""Towards how many sessions are in a step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who works when."""

    groups: int = 1
    """Sessions are divided into so many groups that take turns."""
    ahead: bool = False
    """The draft goes on from its own guess while a block is judged."""

    def together(self, sessions: int) -> int:
        """How many of so many sessions work at the same time, at most: those of the largest group."""
        return -(-sessions // self.groups)

    def __str__(self) -> str:
        if self.groups > 1:
            return f"rotation of {self.groups}"
        return "run-ahead" if self.ahead else "synchronous"


SYNCHRONOUS = Schedule()
RUN_AHEAD = Schedule(ahead=True)


def rotation_us(groups: int, draft_us: float, links_us: float, verify_us: float) -> float:
    """From one turn of a group to its next. `draft_us`: a block of one group; `links_us`: r_d + r_t; `verify_us`: a step for one
    group. One group: a synchronous round."""
    once = draft_us + links_us + verify_us
    return once if groups == 1 else max(groups * verify_us, groups * draft_us, once)


def ahead_us(
    whole: float, hit: float, k: int, token_us: float, draft_link_us: float, verify_us: float, target_link_us: float
) -> float:
    """A round of a session whose draft runs ahead, on average. `whole`: chance that all of a block stands; `hit`: that the bonus is
    guessed as well."""
    judged = verify_us + target_link_us
    late = max(0.0, (k + 1) * token_us + draft_link_us - judged)
    begun = 0.5 * token_us if late > draft_link_us else 0.0  # the step it is in when it learns of a refusal
    anew = k * token_us + draft_link_us
    return judged + whole * late + (whole - hit) * anew + (1.0 - whole) * (anew + begun)


def ahead_together_us(
    whole: float,
    hit: float,
    k: int,
    token_us: float,
    draft_link_us: float,
    step_us: Callable[[float], float],
    target_link_us: float,
    sessions: int,
) -> float:
    """The same where several do. Those whose guess was wrong come later than others: sessions fall out of step, a target's step
    serves those that are there, and who comes while one is under way waits, for half of it on average. How many are in a step
    depends on how long rounds are, and these on it. `step_us`: a step for so many sessions, on average."""
    together, wait_us = float(sessions), 0.0
    for _ in range(_PASSES):
        verify_us = step_us(together)
        round_us = wait_us + ahead_us(whole, hit, k, token_us, draft_link_us, verify_us, target_link_us)
        if sessions == 1:
            break
        busy = min(1.0, (sessions - 1) * verify_us / round_us)
        wait_us = 0.5 * verify_us * busy * (1.0 - verify_us / round_us)
        seen = max(1.0, sessions * min(1.0, (verify_us + target_link_us) / round_us))
        together = (together + seen) / 2  # by halves, so that it settles
    return round_us


class Scheduler:
    """Chooses the schedule of a service and divides its sessions."""

    __slots__ = (
        "_able",
        "_apart",
        "_before",
        "_choice",
        "_chosen",
        "_groups_wanted",
        "_in_step",
        "_left",
        "_members",
        "_rounds",
        "_size",
    )

    def __init__(self, choice: Choice = "auto", groups: int = 2) -> None:
        """`groups`: of a rotation that is fixed by the settings."""
        self._choice = choice
        self._groups_wanted = groups
        self._chosen = RUN_AHEAD if choice == "run_ahead" else SYNCHRONOUS
        self._members: dict[int, int] = {}
        """Session to group, from 1; only while there are groups."""
        self._size: list[int] = []
        """Sessions of each group."""
        self._left = 0
        """Rounds until the next decision."""
        self._in_step = self._apart = 0
        """Rounds since nothing ran ahead, and since sessions were neither ahead nor in groups."""
        self._able = self._rounds = 0
        """Rounds since the last decision: of sessions that can run ahead, and all."""
        self._before: Schedule | None = None
        """What stood before the trial of running ahead that is under way; None: none is."""

    def __repr__(self) -> str:
        return f"Scheduler({self._choice}: {self._chosen}, sizes={self._size})"

    def __len__(self) -> int:
        """Sessions that are in a group."""
        return len(self._members)

    @property
    def asked(self) -> str:
        """What the settings ask for, in words."""
        return str(Schedule(self._groups_wanted) if self._choice == "rotation" else self._choice).replace("_", "-")

    @property
    def chosen(self) -> Schedule:
        """What is in force."""
        return self._chosen

    @property
    def standing(self) -> Schedule:
        """What is in force, or will be again after the trial that is under way."""
        return self._before or self._chosen

    def round(self, curves: ServiceCurves, sessions: int, longest: int, able: bool = True) -> Schedule:
        """The schedule in force for the round that begins. Call once per round of a session that could be drafted for. `sessions`:
        at work now; `longest`: longest block of a request that has long to go; `able`: this one can run ahead."""
        if self._choice in ("synchronous", "run_ahead"):
            return self._chosen
        if self._choice == "rotation":
            return self._set(Schedule(max(1, min(self._groups_wanted, sessions))))
        if not self._chosen.ahead:
            curves.not_ahead()
        self._in_step = 0 if self._chosen.ahead else self._in_step + 1
        self._apart = 0 if self._chosen == SYNCHRONOUS else self._apart + 1
        self._able += able
        self._rounds += 1
        self._left = min(self._left, _EVERY_ROUNDS * sessions) - 1
        if self._chosen.groups > sessions:
            self._before = None
            self._set(SYNCHRONOUS)
        elif self._left < 0:
            self._left = _EVERY_ROUNDS * sessions - 1
            self._set(self._best(curves, sessions, longest))
        return self._chosen

    def group(self, session: int) -> int:
        """Group of a session, from 1; 0: there are no groups. A session that begins a round is put where fewest are."""
        if self._chosen.groups == 1:
            return 0
        size, mine = self._size, self._members.get(session, 0)
        least = min(range(len(size)), key=size.__getitem__)
        if mine and size[mine - 1] <= size[least] + 1:
            return mine
        if mine:
            size[mine - 1] -= 1
        size[least] += 1
        self._members[session] = least + 1
        return least + 1

    def leave(self, session: int) -> None:
        """A session is over."""
        if group := self._members.pop(session, 0):
            self._size[group - 1] -= 1

    def _set(self, schedule: Schedule) -> Schedule:
        if schedule.groups != self._chosen.groups:
            self._members.clear()
            self._size = [0] * schedule.groups if schedule.groups > 1 else []
        self._chosen = schedule
        return schedule

    def _best(self, curves: ServiceCurves, sessions: int, longest: int) -> Schedule:
        """What promises most tokens per time, the present one if nothing is clearly better."""
        able, self._able, self._rounds = self._able / self._rounds, 0, 0
        if longest < 1 or not curves.verify.known:
            return SYNCHRONOUS
        rates = {
            schedule: curves.best_rate(schedule, sessions, longest) for schedule in self._candidates(sessions, able)
        }
        if RUN_AHEAD in rates:  # who cannot works in step
            rates[RUN_AHEAD] = able * rates[RUN_AHEAD] + (1.0 - able) * rates[SYNCHRONOUS]
        best = max(rates, key=rates.__getitem__)
        before, self._before = self._before, None
        stands = before or self._chosen  # a trial is no choice
        if rates[best] > _BETTER * rates.get(stands, 0.0):
            return best
        near = rates.get(RUN_AHEAD, 0.0) > _WORTH_A_TRY * rates.get(stands, 0.0) and not curves.has_seen_ahead(sessions)
        tried = self._due(stands, sessions, near)
        if tried in rates:
            all_take_part = tried == SYNCHRONOUS or stands.groups > 1
            self._left, self._before = _TRIAL * (sessions if all_take_part else 1) - 1, stands
            return tried
        return stands

    def _due(self, stands: Schedule, sessions: int, near: bool) -> Schedule | None:
        """What is to be tried although it looks worse: of rounds in step nothing is learnt while there are none, and only running
        ahead tells whether what overlaps takes longer. `near`: it looks hardly worse, and nobody knows."""
        if near and stands.groups > 1 and sessions > _FEW:
            return RUN_AHEAD
        if stands.groups > 1 or (stands.ahead and sessions > _FEW):
            return SYNCHRONOUS if self._apart >= max(_TRIAL_EVERY, _TRIAL_EVERY_EACH * sessions) else None
        return RUN_AHEAD if not stands.ahead and sessions <= _FEW and self._in_step >= _TRIAL_EVERY else None

    @staticmethod
    def _candidates(sessions: int, able: float) -> Sequence[Schedule]:
        ahead = (RUN_AHEAD,) if able >= _MOST else ()
        return (SYNCHRONOUS, *ahead, *(Schedule(groups) for groups in _TRIED_GROUPS if groups <= sessions))


def lengths(longest: int) -> list[int]:
    """Block lengths at which schedules are compared."""
    return [*(k for k in _LENGTHS if k < longest), longest]


__all__ = [
    "RUN_AHEAD",
    "SYNCHRONOUS",
    "Choice",
    "Schedule",
    "Scheduler",
    "ahead_together_us",
    "ahead_us",
    "lengths",
    "rotation_us",
]
