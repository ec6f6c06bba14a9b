"""A request's critical path: each part where it belongs, nothing twice, and what is left is told."""

from __future__ import annotations

from coordinator.clock import MAX_ROUNDS_KEPT, RequestClock
from specwire.law.values import MAX_U32
from specwire.wire.stopwatch import Passage

MS = 1_000_000
DRAFT_WAY = Passage(wait_us=1, transfer_us=20, queue_us=300, compute_us=4_000, overhead_us=50_000)
TARGET_WAY = Passage(wait_us=2, transfer_us=30, queue_us=400, compute_us=5_000, overhead_us=60_000)


def a_clock(keep_rounds: bool = True) -> RequestClock:
    """A request that arrived at 1 s."""
    return RequestClock(arrived_ns=1000 * MS, keep_rounds=keep_rounds)


def test_passages_are_split_by_worker() -> None:
    """Only waiting at the coordinator is one sum for both."""
    clock = a_clock()
    clock.draft_passage(DRAFT_WAY)
    clock.target_passage(TARGET_WAY)
    clock.target_passage(TARGET_WAY)
    clock.ended_ns = 2000 * MS
    timing = clock.timing()

    assert [20, 300, 4_000, 50_000] == [
        timing.draft_transfer_us,
        timing.draft_queue_us,
        timing.draft_compute_us,
        timing.draft_overhead_us,
    ]
    assert [60, 800, 10_000, 120_000] == [
        timing.target_transfer_us,
        timing.target_queue_us,
        timing.target_compute_us,
        timing.target_overhead_us,
    ]
    assert timing.wait_us == 5


def test_parts_and_the_rest_sum_to_the_total() -> None:
    """Every part of the path is in the sum once."""
    clock = a_clock()
    parts = [
        "admission_us",
        "tokenize_us",
        "draft_compute_us",
        "draft_queue_us",
        "draft_overhead_us",
        "draft_transfer_us",
        "target_compute_us",
        "target_queue_us",
        "target_overhead_us",
        "target_transfer_us",
        "coordinator_us",
        "wait_us",
        "client_us",
        "recovery_us",
    ]
    for power, name in enumerate(parts):
        setattr(clock, name, 2**power)
    clock.hidden_us = 7
    clock.wire_bytes = 8
    clock.ended_ns = clock.arrived_ns + 100 * MS
    timing = clock.timing()

    assert timing.total_us == 100_000
    assert [2**power for power in range(len(parts))] == [getattr(timing, name) for name in parts]
    assert timing.unattributed_us == 100_000 - (2 ** len(parts) - 1)
    assert (7, 8) == (timing.hidden_us, timing.wire_bytes)


def test_intervals_longer_than_the_total_leave_nothing() -> None:
    """Rounding up must not become a negative rest."""
    clock = a_clock()
    clock.coordinator_us = 101
    clock.ended_ns = clock.arrived_ns + 100_000

    assert (100, 0) == (clock.timing().total_us, clock.timing().unattributed_us)


def test_time_to_first_token() -> None:
    """From the arrival; zero where there was none."""
    clock = a_clock()
    clock.ended_ns = clock.arrived_ns + 9 * MS
    before = clock.timing().time_to_first_token_us
    clock.first_token_ns = clock.arrived_ns + 3 * MS

    assert (0, 3_000) == (before, clock.timing().time_to_first_token_us)


def test_work_counts_for_the_request_and_its_round() -> None:
    """A new round begins at zero, the request does not."""
    clock = a_clock()
    clock.work(0, 5_000)
    clock.begin_round(6_000)
    clock.work(6_000, 8_000)

    assert (7, 2) == (clock.coordinator_us, clock.round.coordinator_us)


def test_a_round_tells_what_it_was_made_of() -> None:
    """Where the block came from, what became of it, and where the time went."""
    clock = a_clock()
    clock.begin_round(1000 * MS)
    clock.round.source, clock.round.drafted = "draft_model", 4
    clock.work(1000 * MS, 1000 * MS + 7_000)
    clock.draft_passage(DRAFT_WAY)
    clock.target_passage(TARGET_WAY)
    clock.end_round(3, accepted=2, committed=3, end_ns=1200 * MS, rows=40, sessions=8)
    (told,) = clock.rounds

    assert (3, "draft_model", 4, 2, 3) == (told.index, told.source, told.drafted, told.accepted, told.committed)
    assert (200_000, 40, 8) == (told.total_us, told.step_rows, told.step_sessions)
    assert (4_000, 20, 50_300) == (told.draft_compute_us, told.draft_transfer_us, told.draft_other_us)
    assert (5_000, 30, 60_400) == (told.target_compute_us, told.target_transfer_us, told.target_other_us)
    assert told.coordinator_us == 7 + 1 + 2


def test_a_round_of_several_chunks_tells_all_of_them() -> None:
    """A long prompt reaches the target in pieces; the first round took the time of all."""
    clock = a_clock()
    clock.begin_round(0)
    for _ in range(3):
        clock.target_passage(TARGET_WAY)
    clock.end_round(0, 0, 1, 300 * MS, 1, 1)

    assert (15_000, 90, 3 * 60_400) == (
        clock.rounds[0].target_compute_us,
        clock.rounds[0].target_transfer_us,
        clock.rounds[0].target_other_us,
    )
    assert clock.rounds[0].coordinator_us == 6


def test_a_block_that_was_asked_for_twice_tells_both() -> None:
    """A draft that ran ahead in vain is asked anew, and the round waited for both."""
    clock = a_clock()
    clock.begin_round(0)
    for _ in range(2):
        clock.draft_passage(DRAFT_WAY)
    seen = clock.round.draft
    clock.target_passage(TARGET_WAY)
    clock.end_round(0, 0, 1, 300 * MS, 1, 1)

    assert DRAFT_WAY + DRAFT_WAY == seen
    assert (8_000, 40, 2 * 50_300) == (
        clock.rounds[0].draft_compute_us,
        clock.rounds[0].draft_transfer_us,
        clock.rounds[0].draft_other_us,
    )
    clock.begin_round(1)
    assert clock.round.draft is None


def test_a_plain_round_has_no_draft_time_but_what_was_wasted() -> None:
    """Waiting for a block that never came is told as the draft's other time."""
    clock = a_clock()
    clock.begin_round(0)
    clock.round.draft_wait_us = 50_000
    clock.target_passage(TARGET_WAY)
    clock.end_round(0, 0, 1, 100 * MS, 1, 1)

    assert (0, 0, 50_000) == (
        clock.rounds[0].draft_compute_us,
        clock.rounds[0].draft_transfer_us,
        clock.rounds[0].draft_other_us,
    )


def test_a_round_of_hours_is_told_as_the_longest_there_is() -> None:
    """A round that waited for a lost target longer than the field holds must not fail its request."""
    clock = a_clock()
    clock.begin_round(0)
    clock.round.draft_wait_us = 2**40
    clock.target_passage(Passage(2**40, 2**40, 2**40, 2**40, 2**40))
    clock.end_round(0, 0, 1, 2**60, 1, 1)
    told = clock.rounds[0]

    assert {MAX_U32} == {told.total_us, told.draft_other_us, told.target_compute_us, told.target_transfer_us}


def test_rounds_are_kept_only_where_asked_for_and_up_to_a_limit() -> None:
    """An answer of a million tokens does not become a message of a million rounds."""
    without, many = a_clock(keep_rounds=False), a_clock()
    for clock in (without, many):
        for index in range(MAX_ROUNDS_KEPT + 1):
            clock.end_round(index, 0, 1, 1, 1, 1)

    assert (0, MAX_ROUNDS_KEPT) == (len(without.rounds), len(many.rounds))
