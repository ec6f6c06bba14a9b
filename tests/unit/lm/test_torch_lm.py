"""The port over tiny random models agrees with transformers, whatever the chunks, blocks, cuts and neighbours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specwire.lm import torch_lm
from specwire.lm.fused import FusedBody, _Norm
from specwire.lm.port import Feed
from specwire.lm.torch_lm import TorchModel
from tests.unit.lm.tiny import CONFIGS, CONTEXT, VOCAB, greedy

KINDS = sorted(CONFIGS)
Load = Callable[..., TorchModel]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def full_scores(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [[7], PROMPT], ids=["one", "many"])
def test_greedy_equals_generate(kind: str, prompt: list[int], load: Load, reference: Callable[[str], Any]) -> None:
    """Token for token, from a prompt of one token too (field report 1)."""
    expected = reference(kind).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20, do_sample=False
    )

    assert expected[0, len(prompt) :].tolist() == greedy(load(kind), prompt, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forced_scores_equal_one_full_pass(kind: str, load: Load, reference: Callable[[str], Any]) -> None:
    """Chunks, blocks and cut-backs change no score beyond rounding (field report 49)."""
    rng = random.Random(1)
    tokens = [rng.randrange(VOCAB) for _ in range(CONTEXT)]
    expected = full_scores(reference(kind), tokens)
    model = load(kind)

    actual = [model.forward([Feed(2, 0, tokens[:7], 7)]).clone()]
    at = 7
    while at < len(tokens):
        width = min(rng.randint(1, 6), len(tokens) - at)
        wrong = [(token + 1) % VOCAB for token in tokens[at : at + width]]
        model.forward([Feed(2, at, wrong, rng.randint(0, width))])  # refused: the cache is cut back to `at`
        actual.append(model.forward([Feed(2, at, tokens[at : at + width], width)]).clone())
        at += width

    torch.testing.assert_close(torch.cat(actual), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_are_transformers_layers(kind: str, load: Load) -> None:
    """The same ragged batch through both, cache and all. Which architectures are fused is stated."""
    fused, plain = load(kind), load(kind, fused=False)
    feeds = [Feed(0, 0, PROMPT, 3), Feed(1, 0, PROMPT[:5], 5), Feed(3, 0, PROMPT[2:4], 1)]
    blocks = [Feed(0, 9, PROMPT[:4], 4), Feed(1, 5, [8], 1), Feed(3, 1, PROMPT[:3], 3)]

    assert isinstance(fused._body, FusedBody) == (kind not in ("granite", "gpt2"))
    assert not isinstance(plain._body, FusedBody)
    for batch in (feeds, blocks):
        torch.testing.assert_close(fused.forward(batch), plain.forward(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    """Both ways to compute it."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(5, 48, generator=generator).to(dtype) * torch.tensor([[0.0], [1e-4], [1.0], [50.0], [1e4]]).to(
        dtype
    )
    weight = torch.randn(48, generator=generator).to(dtype)

    expected = torch.nn.functional.rms_norm(states, (48,), weight, 1e-5)
    for strict in (False, True):
        torch.testing.assert_close(_Norm(weight, 1e-5, strict)(states), expected)


def test_a_strict_norm_does_not_depend_on_the_row() -> None:
    """A vectorised hypot gives another last bit to the rows that fill no whole vector: of this value, to rows 16 to 19."""
    states = torch.zeros(20, 576)
    states[:, 0] = 25.377243

    assert len(_Norm(torch.ones(576), 1e-5, strict=True)(states).unique(dim=0)) == 1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("exactness", ["fast", "strict"])
def test_ragged_batches_equal_solo_runs(kind: str, exactness: str, load: Load, reference: Callable[[str], Any]) -> None:
    """Sequences join, leave and are cut back at different positions; each gets the scores it would get alone."""
    rng = random.Random(2)
    model = load(kind, exactness=exactness, max_block=4)
    texts: dict[int, list[int]] = {}
    for _ in range(30):
        feeds = []
        for slot in rng.sample(range(4), rng.randint(1, 4)):
            text = texts.setdefault(slot, [])
            if len(text) > 40 or rng.random() < 0.1:
                text.clear()  # this one left, another joins
            start = max(0, len(text) - rng.choice([0, 0, 1, 3]))
            width = rng.choice([1, 2, 3, 5, 17])
            del text[start:]
            text += [rng.randrange(VOCAB) for _ in range(width)]
            feeds.append(Feed(slot, start, text[start:], rng.randint(0, width)))
        expected = [
            full_scores(reference(kind), texts[feed.slot])[len(texts[feed.slot]) - feed.rows :] for feed in feeds
        ]

        torch.testing.assert_close(model.forward(feeds), torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_order_of_feeds_is_order_of_rows(load: Load) -> None:
    """Rows come back as asked, though rows of a pass are sorted by slot and attend in groups."""
    model = load("llama")
    long, short = list(range(40)), [5, 6]
    alone = [model.forward([Feed(slot, 0, tokens, 2)]).clone() for slot, tokens in ((3, short), (0, long), (1, short))]

    together = model.forward([Feed(3, 0, short, 2), Feed(0, 0, long, 2), Feed(1, 0, short, 2)])

    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_a_slot_that_held_not_a_number_is_clean_for_the_next(load: Load) -> None:
    """Zero times not-a-number is not zero, so masking alone would not do. The neighbour is longer, so its cells are read too."""
    model = load("llama")
    feeds = [Feed(0, 0, PROMPT, 1), Feed(1, 0, [9] * (len(PROMPT) + 5), 1)]
    expected = model.forward(feeds).clone()
    assert len(model._passes(feeds)[0].groups) == 1
    for storage in (*model._kv._keys.values(), *model._kv._values.values()):
        storage[0] = torch.nan
    model._kv._ever_written[0] = CONTEXT

    torch.testing.assert_close(model.forward(feeds), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3_wide", "gpt2"])
@pytest.mark.parametrize(
    "settings", [{}, {"fused": False}, {"exactness": "strict", "max_block": 4}], ids=["fused", "plain", "strict"]
)
def test_a_copied_beginning_goes_on_as_if_it_had_been_read(kind: str, settings: dict[str, Any], load: Load) -> None:
    """In every layer, keys and values, beside a longer neighbour; the source goes on too, and the others are not touched."""
    model = load(kind, **settings)
    other, neighbour = [9, 8, 7], [2] * 30
    more = [Feed(0, len(PROMPT), [4, 6], 2), Feed(1, 3, [5], 1), Feed(3, 30, [1], 1)]
    for length in (0, 1, 7, len(PROMPT)):
        start = [Feed(0, 0, PROMPT, 0), Feed(1, 0, other, 0), Feed(3, 0, neighbour, 0)]
        read = [Feed(2, 0, PROMPT[:length], 0)] if length else []
        model.forward([*start, *read])
        expected = model.forward([*more, Feed(2, length, [4, 4], 2)]).clone()
        model.forward([*start, Feed(2, 0, [8] * 20, 0)])

        model.copy(0, 2, length)

        actual = model.forward([*more, Feed(2, length, [4, 4], 2)])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_copy_clears_what_the_target_held(load: Load) -> None:
    """Not-a-numbers too, wherever they lie. The neighbour is longer, so its cells are read too."""
    model = load("llama")
    beside = [Feed(0, len(PROMPT), [4], 1), Feed(1, 4, [5], 1)]
    model.forward([Feed(0, 0, PROMPT, 0), Feed(1, 0, PROMPT[:4], 0)])
    expected = model.forward(beside).clone()
    assert len(model._passes(beside)[0].groups) == 1
    model.forward([Feed(0, 0, PROMPT, 0), Feed(1, 0, [9] * CONTEXT, 0)])
    for storage in (*model._kv._keys.values(), *model._kv._values.values()):
        storage[1] = torch.nan

    model.copy(0, 1, 4)

    torch.testing.assert_close(model.forward(beside), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="starts at 6, but holds 5 tokens"):
        model.forward([Feed(1, 6, [5], 1)])


def test_what_stands_behind_a_cut_does_no_harm(load: Load) -> None:
    """A row that nobody judged may have been not-a-number. The neighbour is longer, so its cell is read too."""
    model = load("llama")
    beside = [Feed(0, 5, [4], 1), Feed(1, len(PROMPT), [5], 1)]
    model.forward([Feed(0, 0, PROMPT[:5], 0), Feed(1, 0, PROMPT, 0)])
    expected = model.forward(beside).clone()
    model.forward([Feed(0, 0, PROMPT[:8], 0)])
    for storage in (*model._kv._keys.values(), *model._kv._values.values()):
        storage[0, :, 7] = torch.nan

    model.cut(0, 5)

    torch.testing.assert_close(model.forward(beside), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="slot 0 holds 6 tokens, not 7"):
        model.cut(0, 7)


def test_a_slot_that_was_copied_to_is_wiped_for_the_next_text(load: Load) -> None:
    """What was copied counts as written: a not-a-number among it is gone when another text starts there."""
    model = load("llama")
    feeds = [Feed(0, 0, PROMPT, 1), Feed(1, 0, [9] * (len(PROMPT) + 5), 1)]
    expected = model.forward(feeds).clone()
    model.forward([Feed(0, 0, [1], 0), Feed(1, 0, [9] * (len(PROMPT) + 5), 0)])
    for storage in (*model._kv._keys.values(), *model._kv._values.values()):
        storage[1] = torch.nan
    model.copy(1, 0, len(PROMPT) + 5)

    torch.testing.assert_close(model.forward(feeds), expected)


@pytest.mark.parametrize(
    ("source", "target", "length"), [(0, 0, 1), (0, 1, 4), (0, 1, -1), (4, 1, 1), (0, 4, 1), (0, -1, 1)]
)
def test_a_copy_that_cannot_be_changes_no_slot(source: int, target: int, length: int, load: Load) -> None:
    """Refused before anything is written."""
    model = load("llama")
    start = [Feed(0, 0, [1, 2, 3], 0), Feed(1, 0, [4, 5], 0), Feed(3, 0, [6], 0)]
    more = [Feed(0, 3, [7], 1), Feed(1, 2, [7], 1), Feed(3, 1, [7], 1)]
    model.forward(start)
    expected = model.forward(more).clone()
    model.forward(start)
    with pytest.raises(ValueError, match="slot"):
        model.copy(source, target, length)

    torch.testing.assert_close(model.forward(more), expected)


@pytest.mark.parametrize("kind", ["llama", "llama_heads", "qwen3_wide"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_rows_attend_together_or_apart_alike(
    kind: str, precision: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows padded in one call of attention, each in its own, or as it pays: the same scores up to rounding."""
    model = load(kind, precision=precision)
    prompts = [Feed(slot, 0, PROMPT[: 5 + slot], 0) for slot in (0, 1, 3)]
    blocks = [Feed(0, 5, PROMPT[:1], 1), Feed(1, 6, PROMPT[:6], 4), Feed(3, 8, PROMPT[:3], 3)]
    seen = {}
    for cost in (0, 10, 10**6):
        monkeypatch.setitem(torch_lm._ATTENTION_CALL, "cpu", cost)
        model.forward(prompts)
        seen[cost] = [[len(group.lengths) for group in model._passes(blocks)[0].groups], model.forward(blocks).clone()]

    assert [[1, 1, 1], [2, 1], [2, 1]] == [groups for groups, _ in seen.values()]
    spread = seen[0][1].std().item()
    for _, scores in seen.values():
        assert (scores - seen[0][1]).abs().max().item() < {"float32": 1e-5}.get(precision, 0.05) * spread


def test_prompt_chunks_return_no_rows(load: Load) -> None:
    """A chunk whose scores nobody needs costs no head and returns an empty array of the right width."""
    assert load("llama").forward([Feed(0, 0, PROMPT, 0)]).shape == (0, VOCAB)


def test_strict_scores_do_not_depend_on_the_batch(load: Load) -> None:
    """Bit for bit: alone or with others, token by token or in a block."""
    model = load("llama", exactness="strict", max_block=4)
    single = [model.forward([Feed(0, at, [token], 1)]).clone() for at, token in enumerate(PROMPT)]
    model.forward([Feed(1, 0, [8, 8, 8], 0), Feed(2, 0, PROMPT[:2], 0)])

    together = model.forward([Feed(1, 3, [1], 1), Feed(2, 2, PROMPT[2:], len(PROMPT) - 2), Feed(3, 0, [4], 1)])

    assert torch.equal(together[1:-1], torch.cat(single[2:]))


def test_float64_scores_of_the_same_weights(load: Load) -> None:
    """`score_sequence` is the referee of near-ties: float64, within float32 rounding of what the port said."""
    model = load("qwen2")
    exact = model.score_sequence(PROMPT)

    assert exact.dtype == torch.float64
    np.testing.assert_allclose(model.forward([Feed(0, 0, PROMPT, len(PROMPT))]), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("feed", "said"),
    [
        (Feed(4, 0, [1], 1), "slot 4"),
        (Feed(0, 0, [], 0), "0 tokens"),
        (Feed(0, 0, [1], 2), "2 wanted rows"),
        (Feed(0, 9, [1], 1), "holds"),
        (Feed(0, 0, [1] * (CONTEXT + 1), 1), "capacity"),
        (Feed(0, 0, [VOCAB], 1), "token ids"),
        (Feed(0, 0, [-1], 1), "token ids"),
    ],
)
def test_bad_feeds_are_refused_before_anything_is_written(feed: Feed, said: str, load: Load) -> None:
    """And the neighbours in the pass are untouched."""
    model = load("llama")
    model.forward([Feed(0, 0, [1, 2, 3], 1)])
    expected = model.forward([Feed(0, 3, [4], 1)]).clone()
    with pytest.raises(ValueError, match=said):
        model.forward([Feed(1, 0, [5], 1), feed])

    torch.testing.assert_close(model.forward([Feed(0, 3, [4], 1)]), expected)


def test_both_ends_of_the_context(load: Load) -> None:
    """A block may end exactly at the limit, with a longer neighbour in the pass (field reports 53, 55)."""
    model = load("llama")
    model.forward([Feed(0, 0, [1] * (CONTEXT - 1), 0), Feed(1, 0, [2], 0)])
    alone = model.forward([Feed(0, CONTEXT - 1, [3], 1)]).clone()

    beside = model.forward([Feed(0, CONTEXT - 1, [3], 1), Feed(1, 1, [4, 5, 6, 7, 8], 5)])

    torch.testing.assert_close(beside[:1], alone, rtol=1e-4, atol=1e-4)
