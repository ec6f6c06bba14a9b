"""What slots hold, and rectangles: every fed token stands once, in its own slot, and padding stands nowhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.lm.feeds import Group, Pass, Rectangle, SlotLengths, as_pass, pack, plan, plan_fixed
from specwire.lm.port import Feed

CAPACITY, SLOTS = 40, 6


@st.composite
def batches(draw: st.DrawFn) -> list[Feed]:
    """Feeds of distinct slots with any starts, lengths and wanted rows."""
    feeds = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True)):
        start = draw(st.integers(0, CAPACITY - 1))
        count = draw(st.integers(1, CAPACITY - start))
        tokens = [
            100 * slot + position for position in range(start, start + count)
        ]  # each token knows where it belongs
        feeds.append(Feed(slot, start, tokens, draw(st.integers(0, count))))
    return feeds


def check(feeds: list[Feed], rectangles: list[Rectangle]) -> None:
    """What `plan` and `plan_fixed` promise alike."""
    written: dict[tuple[int, int], int] = {}
    scored: dict[int, tuple[int, int]] = {}  # result row -> (token, rectangle)
    for number, rectangle in enumerate(rectangles):
        rows, width = rectangle.tokens.shape
        assert rectangle.slots.shape == (rows,)
        assert rectangle.slots.tolist() == sorted(set(rectangle.slots.tolist()))
        assert rectangle.positions.max() < rectangle.context <= CAPACITY
        for row in range(rows):
            slot = int(rectangle.slots[row])
            seen_before = [position for (s, position) in written if s == slot]
            for column in range(width):
                cell, token = int(rectangle.cells[row, column]), int(rectangle.tokens[row, column])
                if cell == CAPACITY:
                    continue  # padding
                assert cell == rectangle.positions[row, column]
                assert (slot, cell) not in written
                assert all(cell > position for position in seen_before)
                written[slot, cell] = token
        for flat, result in zip(rectangle.wanted.tolist(), rectangle.results.tolist(), strict=True):
            assert rectangle.cells.flat[flat] != CAPACITY
            assert result not in scored
            scored[result] = (int(rectangle.tokens.flat[flat]), number)
        assert rectangle.results.tolist() == sorted(rectangle.results.tolist())
    assert written == {(f.slot, f.start + i): token for f in feeds for i, token in enumerate(f.tokens)}
    wanted = [token for f in feeds for token in list(f.tokens)[len(f.tokens) - f.rows :]]
    assert [scored[row][0] for row in range(len(scored))] == wanted


@given(batches(), st.integers(0, 60))
def test_every_token_once_and_padding_nowhere(feeds: list[Feed], overhead: int) -> None:
    """For any batch and any price of a pass."""
    rectangles = plan(feeds, CAPACITY, overhead)

    check(feeds, rectangles)
    cost = sum(overhead + rectangle.tokens.size for rectangle in rectangles)
    assert cost <= overhead + len(feeds) * max(len(feed.tokens) for feed in feeds)  # never worse than one rectangle
    assert cost <= sum(overhead + len(feed.tokens) for feed in feeds)  # nor than one each


@given(batches(), st.integers(1, 9))
def test_fixed_rectangles_have_one_shape(feeds: list[Feed], width: int) -> None:
    """Under `strict` a slot is always the same row, and the pass reads as many cells as a slot has."""
    rectangles = plan_fixed(feeds, CAPACITY, SLOTS, width)

    check(feeds, rectangles)
    assert {rectangle.tokens.shape for rectangle in rectangles} == {(SLOTS, width)}
    assert {rectangle.context for rectangle in rectangles} == {CAPACITY}
    assert all(rectangle.slots.tolist() == list(range(SLOTS)) for rectangle in rectangles)


def check_groups(forward: Pass) -> None:
    """Groups follow each other, and a row of one is the tokens of one slot up to its last."""
    at = 0
    for group in forward.groups:
        assert group.first == at
        for row, length in enumerate(group.lengths):
            mine = slice(at, at + length)
            assert set(forward.slots[mine].tolist()) == {group.slot + row}
            assert forward.positions[mine].max() < group.context
            if group.unmasked:
                assert forward.positions[mine].tolist() == [group.context - 1]
            at += length
    assert at == len(forward.tokens)


@given(batches(), st.integers(0, 60))
def test_a_pass_holds_every_token_once_and_no_padding(feeds: list[Feed], call_cost: int) -> None:
    """Each with its slot, position and cell; wanted rows in the order in which they were asked for."""
    forward = pack(feeds, call_cost)

    check_groups(forward)
    keys = list(zip(forward.slots.tolist(), forward.positions.tolist(), strict=True))
    assert keys == sorted((f.slot, f.start + i) for f in feeds for i in range(len(f.tokens)))
    assert forward.tokens.tolist() == [100 * slot + position for slot, position in keys]
    assert forward.cells.tolist() == forward.positions.tolist()
    assert forward.tokens[forward.wanted].tolist() == [
        t for f in feeds for t in list(f.tokens)[len(f.tokens) - f.rows :]
    ]
    assert forward.results.tolist() == list(range(len(forward.wanted)))
    assert forward.written == tuple(sorted((f.slot, f.start, f.start + len(f.tokens)) for f in feeds))
    padded = sum(call_cost + len(group.lengths) * group.width for group in forward.groups)
    assert (
        padded <= sum(call_cost + len(feed.tokens) for feed in feeds) + call_cost
    )  # about a call for each row at worst


@given(batches(), st.integers(1, 9))
def test_a_rectangle_as_a_pass_is_the_same_row_after_row(feeds: list[Feed], width: int) -> None:
    """Padding included, which no group may write over a valid cell."""
    for rectangle in (*plan(feeds, CAPACITY, 8), *plan_fixed(feeds, CAPACITY, SLOTS, width)):
        forward = as_pass(rectangle, CAPACITY)

        check_groups(forward)
        assert forward.tokens.reshape(forward.rows, -1).tolist() == rectangle.tokens.tolist()
        written = [(slot, cell) for slot, first, end in forward.written for cell in range(first, end)]
        cells = zip(forward.slots.tolist(), forward.cells.tolist(), strict=True)
        assert sorted((slot, cell) for slot, cell in cells if cell < CAPACITY) == sorted(written)
        if rectangle.fixed:
            assert {(group.context, group.unmasked) for group in forward.groups} == {(CAPACITY, False)}


def test_rows_of_unlike_length_attend_apart_where_padding_costs_more_than_a_call() -> None:
    """Slots 0 and 1 are neighbours, as are 3 and 4."""
    feeds = [Feed(0, 7, [1], 1), Feed(1, 5, [1, 2], 1), Feed(3, 7, [1], 1), Feed(4, 0, range(30), 1)]

    assert pack(feeds, 10).groups == (
        Group(0, (1, 2), 0, 8, unmasked=False),
        Group(3, (1,), 3, 8, unmasked=True),
        Group(4, (30,), 4, 30, unmasked=False),
    )


def test_a_prompt_chunk_is_not_padded_against_single_tokens() -> None:
    """Seven single rows beside a chunk of 32 would cost 256 tokens as one rectangle."""
    feeds = [Feed(0, 0, range(32), 0), *(Feed(slot, 30, [1], 1) for slot in range(1, 6))]

    assert [rectangle.tokens.shape for rectangle in plan(feeds, CAPACITY, 8)] == [(1, 32), (5, 1)]


def test_slightly_ragged_rows_stay_together() -> None:
    """A second pass would read all weights again."""
    feeds = [Feed(0, 0, [1, 2, 3], 1), Feed(1, 0, [1], 1), Feed(2, 0, [1, 2], 1)]

    assert [rectangle.tokens.shape for rectangle in plan(feeds, CAPACITY, 8)] == [(3, 3)]


@given(st.lists(st.integers(0, CAPACITY), min_size=2, max_size=4), st.data())
def test_a_copy_is_as_long_as_was_asked_and_nothing_else_changes(held: list[int], data: st.DataObject) -> None:
    """Shorter or longer than what the target held, and nothing at all too."""
    lengths = SlotLengths(len(held), CAPACITY, 9)
    lengths.end([Feed(slot, 0, [1] * count, 0) for slot, count in enumerate(held)])
    source, target = data.draw(st.permutations(range(len(held))))[:2]
    length = data.draw(st.integers(0, held[source]))
    lengths.copy(source, target, length)

    expected = [length if slot == target else count for slot, count in enumerate(held)]
    assert expected == [lengths[slot] for slot in range(len(held))]


@pytest.mark.parametrize(
    ("source", "target", "length", "said"),
    [
        (3, 0, 1, "slot 3 does not exist, there are 3"),
        (-1, 0, 1, "slot -1 does not exist"),
        (0, 3, 1, "slot 3 does not exist"),
        (0, -1, 1, "slot -1 does not exist"),
        (0, 0, 1, "slot 0 holds 5 tokens, not 1 for slot 0"),
        (0, 1, 6, "slot 0 holds 5 tokens, not 6 for slot 1"),
        (2, 1, 1, "slot 2 holds 0 tokens, not 1 for slot 1"),
        (0, 1, -1, "slot 0 holds 5 tokens, not -1 for slot 1"),
    ],
)
def test_a_copy_that_cannot_be_changes_nothing(source: int, target: int, length: int, said: str) -> None:
    """Python would take slot -1 for the last one, and length -1 for all but one token."""
    lengths = SlotLengths(3, CAPACITY, 9)
    lengths.end([Feed(0, 0, [1] * 5, 0), Feed(1, 0, [1] * 2, 0)])
    with pytest.raises(ValueError, match=said):
        lengths.copy(source, target, length)

    assert [5, 2, 0] == [lengths[slot] for slot in range(3)]
