"""Stop strings against the obvious way: look at the whole text after every token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.stops import StopMatcher

stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)
pieces = st.lists(st.text(alphabet="ab\nc", max_size=3), max_size=15)


@settings(max_examples=150, deadline=None)
@given(stops, pieces)
def test_matcher_against_search(wanted: list[str], text: list[str]) -> None:
    """What is shown is the text before the first stop string to end, and is never taken back."""
    matcher = StopMatcher(wanted)
    whole = shown = ""
    for piece in text:
        whole += piece
        more, found = matcher.push(piece)
        shown += more
        ends = [(at + len(s), at, s) for s in wanted if (at := whole.find(s)) >= 0]
        if ends:
            _, begin, expected = min(ends)

            assert (expected, whole[:begin]) == (found, shown)
            return

        assert found is None
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert held == "" or any(s.startswith(held) for s in wanted)
    assert whole == shown + matcher.flush()
