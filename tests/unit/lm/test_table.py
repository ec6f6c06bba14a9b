"""The table model: scores are a function of the cached prefix, read back from the slot, and of nothing else."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwire.law.errors import InvalidArgument
from specwire.lm.port import Feed
from specwire.lm.table import TableModel
from specwire.lm.table_config import Fault, TableConfig
from tests.unit.lm.tiny import greedy

SLOTS, CAPACITY = 3, 24


def solo(tokens: list[int], **config: Any) -> np.ndarray:
    """Scores after each token of a fresh sequence alone: the dumb reference."""
    model = TableModel(TableConfig(**{"vocab_size": 7, "max_context": CAPACITY} | config), 1)
    return model.forward([Feed(0, 0, tokens, len(tokens))]).numpy()


moves = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, SLOTS - 1), st.integers(0, CAPACITY), st.lists(st.integers(0, 6), min_size=1, max_size=9)
        ),
        min_size=1,
        max_size=SLOTS,
        unique_by=lambda move: move[0],
    ),
    max_size=8,
)


@settings(deadline=None)
@given(moves, st.sampled_from([None, 0, 1, 3]))
def test_any_feeds_cuts_and_joins_equal_solo_runs(
    steps: list[list[tuple[int, int, list[int]]]], order: int | None
) -> None:
    """Against the dumb reference, exactly: a batch leaves no trace in its neighbours, a cut leaves none in what follows."""
    model = TableModel(TableConfig(vocab_size=7, order=order, max_context=CAPACITY), SLOTS)
    texts: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    for step in steps:
        feeds, expected = [], []
        for slot, keep, tokens in step:
            start = min(keep, len(texts[slot]), CAPACITY - len(tokens))
            texts[slot] = texts[slot][:start] + tokens
            feeds.append(Feed(slot, start, tokens, len(tokens)))
            expected.append(solo(texts[slot], order=order)[start:])

        assert np.array_equal(model.forward(feeds).numpy(), np.concatenate(expected))


def test_a_stale_token_anywhere_changes_the_scores() -> None:
    """A wrong cut shows: keeping one token too many gives another law."""
    right = solo([1, 2, 3, 4])[-1]
    model = TableModel(TableConfig(vocab_size=7, max_context=CAPACITY), 1)
    model.forward([Feed(0, 0, [1, 5], 1)])

    assert not np.array_equal(model.forward([Feed(0, 2, [3, 4], 1)])[0], right)


def test_a_cached_token_out_of_its_place_changes_the_scores() -> None:
    """The slot holds positions as a real cache does, so right tokens in wrong places are wrong."""
    model = TableModel(TableConfig(vocab_size=7, max_context=CAPACITY), 1)
    model.forward([Feed(0, 0, [1, 1, 1], 1)])
    expected = model.forward([Feed(0, 3, [2], 1)]).clone()
    model._cells[0, 1] = model._cells[0, 2]

    assert not np.array_equal(model.forward([Feed(0, 3, [2], 1)]), expected)


@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_a_copied_beginning_goes_on_as_if_it_had_been_read(length: int) -> None:
    """The source is as it was, and of what the target held before, shorter or longer, nothing is left."""
    model = TableModel(TableConfig(vocab_size=7, max_context=CAPACITY), SLOTS)
    held, more = [1, 2, 3, 4, 5, 6], [0, 3]
    for before in ([], [6, 6], [6] * CAPACITY):
        if before:
            model.forward([Feed(2, 0, before, 0)])
        model.forward([Feed(0, 0, held, 0)])
        model.copy(0, 2, length)

        with pytest.raises(ValueError, match=f"starts at {length + 1}, but holds {length} tokens"):
            model.forward([Feed(2, length + 1, more, 1)])
        scores = model.forward([Feed(2, length, more, 2), Feed(0, 6, more, 2)]).numpy()
        expected = solo([*held[:length], *more])[-2:], solo([*held, *more])[-2:]
        assert np.array_equal(np.concatenate(expected), scores)


@pytest.mark.parametrize(("source", "target", "length"), [(0, 0, 1), (0, 1, 4), (0, 1, -1), (3, 1, 1), (0, -1, 1)])
def test_a_copy_that_cannot_be_changes_no_slot(source: int, target: int, length: int) -> None:
    """Refused before anything is written."""
    model = TableModel(TableConfig(vocab_size=7, max_context=CAPACITY), SLOTS)
    texts = {0: [1, 2, 3], 1: [4, 5], 2: [6]}
    model.forward([Feed(slot, 0, tokens, 0) for slot, tokens in texts.items()])
    with pytest.raises(ValueError, match="slot"):
        model.copy(source, target, length)

    scores = model.forward([Feed(slot, len(tokens), [0], 1) for slot, tokens in texts.items()]).numpy()
    assert np.array_equal(np.concatenate([solo([*tokens, 0])[-1:] for tokens in texts.values()]), scores)


def test_order_counts_the_tokens_that_matter() -> None:
    """A table of order 1 forgets all but the last token, wherever it stands."""
    assert np.array_equal(solo([1, 2, 3], order=1)[-1], solo([5, 3], order=1)[-1])
    assert not np.array_equal(solo([1, 2, 3], order=2)[-1], solo([5, 3], order=2)[-1])


def test_disagreement_goes_from_the_target_to_another_law() -> None:
    """0 is the target, 1 knows nothing of it, and agreement falls in between."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 7, CAPACITY).tolist()
    best = solo(tokens).argmax(1)
    agreements = [(solo(tokens, disagreement=share).argmax(1) == best).mean() for share in (0.0, 0.4, 1.0)]

    assert agreements[0] == 1.0
    assert agreements[0] > agreements[1] > agreements[2]


def test_scripts_force_a_text_and_end() -> None:
    """By position, or after a marker token of the prompt; then the table goes on alone."""
    at = TableModel(TableConfig(vocab_size=7, script=(4, 5, 6, 0), script_at=3, max_context=CAPACITY), 1)
    after = TableModel(TableConfig(vocab_size=7, script=(4, 5, 6, 0), script_after=3, max_context=CAPACITY), 1)
    plain = TableModel(TableConfig(vocab_size=7, max_context=CAPACITY), 1)

    assert greedy(at, [1, 2, 2], 4) == [4, 5, 6, 0]
    assert greedy(after, [1, 3], 4) == [4, 5, 6, 0]
    text = greedy(at, [1, 2, 2], 8)
    assert text[4:] == greedy(plain, [1, 2, 2, *text[:4]], 4)


def test_padding_columns_never_come_out() -> None:
    """They have the best scores inside (field reports 57, 59)."""
    model = TableModel(TableConfig(vocab_size=7, padding_columns=5, max_context=CAPACITY), 1)

    assert np.array_equal(model.forward([Feed(0, 0, [1, 2], 2)]), solo([1, 2]))


def test_columns_are_a_cut_of_the_full_law() -> None:
    """A reduced vocabulary has the target's scores at its own ids."""
    model = TableModel(TableConfig(vocab_size=7, columns=(0, 3, 6), max_context=CAPACITY), 1)

    assert model.spec.columns is not None
    assert model.spec.columns.tolist() == [0, 3, 6]
    assert np.array_equal(model.forward([Feed(0, 0, [1, 2], 2)]), solo([1, 2])[:, [0, 3, 6]])


def test_faults_strike_where_they_are_told() -> None:
    """A request is marked by its first token, whatever the batch it stands in."""
    fault = Fault("nan", first_token=5, position=2)
    model = TableModel(TableConfig(vocab_size=7, faults=(fault,)), 3)
    scores = model.forward([Feed(0, 0, [1, 2], 2), Feed(2, 0, [5, 2], 2)])

    assert np.isnan(scores.numpy()).all(axis=1).tolist() == [False, False, False, True]
    assert not model.forward([Feed(2, 2, [3], 1)]).isnan().any()


def test_a_raised_fault_leaves_the_model_usable() -> None:
    """Only the numbered pass fails, and the same feed may be given again."""
    model = TableModel(TableConfig(vocab_size=7, max_context=CAPACITY, faults=(Fault("raise", call=2),)), 1)
    model.forward([Feed(0, 0, [1], 1)])
    with pytest.raises(RuntimeError, match="injected fault in pass 2"):
        model.forward([Feed(0, 1, [2], 1)])

    assert np.array_equal(model.forward([Feed(0, 1, [2], 1)])[0], solo([1, 2])[1])


def test_a_hang_ends_when_released() -> None:
    """So that a test can end; `times` keeps later passes free."""
    model = TableModel(TableConfig(vocab_size=7, faults=(Fault("hang", times=1),)), 1)
    thread = threading.Thread(target=model.forward, args=([Feed(0, 0, [1], 1)],))
    thread.start()
    model.release()
    thread.join(5)

    assert not thread.is_alive()
    model.forward([Feed(0, 0, [1], 1)])


def test_speed_is_set_by_waiting() -> None:
    """step_ms for a pass and row_ms for each token fed; the wait burns no processor."""
    model = TableModel(TableConfig(vocab_size=7, step_ms=20, row_ms=10), 2)
    wall, cpu = time.perf_counter(), time.thread_time()
    model.forward([Feed(0, 0, [1, 2], 1), Feed(1, 0, [1], 1)])

    assert time.perf_counter() - wall >= 0.05
    assert time.thread_time() - cpu < 0.025


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"vocab_size": 0}, "table.vocab_size"),
        ({"disagreement": 1.5}, "table.disagreement"),
        ({"sharpness": float("nan")}, "table.sharpness"),
        ({"script": (16,)}, "table.script"),
        ({"columns": (3, 1)}, "table.columns"),
        ({"eos_token_ids": (-1,)}, "table.eos_token_ids"),
        ({"tokens": ("a",)}, "table.tokens"),
    ],
)
def test_bad_settings_are_named(config: dict[str, Any], field: str) -> None:
    """Field, value and limit."""
    with pytest.raises(InvalidArgument, match="must be") as caught:
        TableConfig(**config)

    assert caught.value.field == field


def test_fingerprint_follows_the_law_and_not_the_speed() -> None:
    """What changes scores changes it."""
    plain = TableConfig().fingerprint()

    assert TableConfig(step_ms=3, faults=(Fault("raise", call=9),)).fingerprint() == plain
    assert TableConfig(seed=1).fingerprint() != plain
    assert TableConfig(disagreement=0.1).fingerprint() != plain
