"""Steps of fixed shapes compute what the same layers compute at any shape, whatever the rows, widths, cuts and idle slots."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specwire.lm import measure_steps, static_steps
from specwire.lm.port import Feed
from specwire.lm.static_steps import Shape, StaticSteps
from specwire.lm.torch_lm import TorchModel
from tests.unit.lm.tiny import CONTEXT, VOCAB

Load = Callable[..., TorchModel]
WIDEST = 6


@pytest.fixture
def steps(load: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]]:
    """A model whose steps have fixed shapes, the same one without, and the former's shapes."""
    monkeypatch.setattr(static_steps, "LEAST_CONTEXT", 16)

    def get(kind: str) -> tuple[TorchModel, TorchModel, StaticSteps]:
        model = load(kind, max_block=WIDEST - 1)
        found = StaticSteps(model._body, model._kv, WIDEST)  # type: ignore[arg-type]
        with torch.no_grad():
            found.record()
        monkeypatch.setattr(model, "_static", found)
        return model, load(kind), found

    return get


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen2", "qwen3_wide", "mistral"])
def test_ragged_steps(kind: str, steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]]) -> None:
    """Sessions come, are cut back and leave; prompts go past, and are seen by the steps after them."""
    model, plain, found = steps(kind)
    rng = random.Random(4)
    texts: dict[int, list[int]] = {}
    shapes = set()
    for _ in range(60):
        feeds = []
        for slot in rng.sample(range(4), rng.randint(1, 4)):
            held = texts.setdefault(slot, [])
            if len(held) > CONTEXT - 12:
                held.clear()
            start = max(0, len(held) - rng.choice([0, 0, 1, 4]))
            tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 3, WIDEST, 11]))]
            held[start:] = tokens
            feeds.append(Feed(slot, start, tokens, rng.randint(0, len(tokens))))
        shapes.add(found.shape(feeds))

        torch.testing.assert_close(model.forward(feeds), plain.forward(feeds), rtol=1e-4, atol=1e-4)

    assert None in shapes
    assert len(shapes) > 8


def test_shapes(steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]]) -> None:
    """The smallest that holds all rows: by the last slot, the longest feed and the furthest cell."""
    _, _, found = steps("llama")

    assert Shape(1, 1, 16) == found.shape([Feed(0, 15, [1], 1)])
    assert Shape(1, 1, 32) == found.shape([Feed(0, 16, [1], 1)])
    assert Shape(4, 4, 64) == found.shape([Feed(2, 40, [1, 2, 3], 3), Feed(0, 3, [1], 1)])
    assert Shape(2, WIDEST, CONTEXT) == found.shape([Feed(1, CONTEXT - WIDEST, [1] * WIDEST, 1)])
    assert found.shape([Feed(0, 0, [1] * (WIDEST + 1), 1)]) is None


def test_what_was_not_recorded_runs_in_the_next_larger_shape(
    steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]],
) -> None:
    """There may have been no time for it."""
    _, _, found = steps("llama")
    del found._steps[Shape(1, 1, 16)], found._steps[Shape(1, 2, 16)]
    assert Shape(1, 1, 32) == found.shape([Feed(0, 3, [1], 1)])
    found.record(seconds=-1.0)
    found._steps.clear()
    found.record(seconds=-1.0)

    assert found.shape([Feed(0, 3, [1], 1)]) is None


def test_a_rectangle_is_not_for_a_few_tokens_in_a_corner(
    steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands for nothing would cost more than starting kernels one by one."""
    _, _, found = steps("llama")
    monkeypatch.setattr(static_steps, "MOST_IDLE", 8)

    assert Shape(4, 2, 16) == found.shape([Feed(3, 0, [1, 2], 1)])
    assert found.shape([Feed(3, 0, [1, 2, 3], 1)]) is None
    assert Shape(4, 4, 16) == found.shape([Feed(3, 0, [1, 2, 3], 1), Feed(0, 0, [1] * 4, 1), Feed(1, 0, [1], 1)])


def test_what_a_refused_token_left_is_no_harm(
    steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]],
) -> None:
    """It stands behind the row, where a recorded step reads too: hidden, but zero times not-a-number is not zero."""
    model, plain, _ = steps("llama")
    feeds = [Feed(0, 0, [1, 2, 3, 4], 1)], [Feed(0, 4, [5], 1)], [Feed(0, 5, [6], 1)]
    expected = [plain.forward(each).clone() for each in feeds][-1]
    embeddings = model._body.embed_tokens.weight
    kept = embeddings[7].clone()
    with torch.inference_mode():
        model.forward(feeds[0])
        embeddings[7] = torch.nan
        refused = model.forward([Feed(0, 4, [5, 7, 7], 3)])
        embeddings[7] = kept
    model.forward(feeds[1])

    assert [False, True, True] == refused.isnan().any(1).tolist()
    torch.testing.assert_close(model.forward(feeds[2]), expected, rtol=1e-4, atol=1e-4)


def test_not_a_number_stays_in_its_row(steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]]) -> None:
    """Rows of a rectangle meet no one else's cells, and tokens that stand for nothing nobody's."""
    model, plain, _ = steps("llama")
    feeds = [Feed(0, 0, [1, 2, 3], 1), Feed(1, 0, [4, 5], 2)]
    expected = plain.forward(feeds).clone()
    model.forward(feeds)
    model._kv.both(0, 4, 8)[0, :, 1] = torch.nan

    actual = model.forward([Feed(0, 3, [7], 1), Feed(1, 0, [4, 5], 2)])

    assert bool(actual[0].isnan().all())
    torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_recorded_runs_as_ever(
    steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No memory left, for instance: it is said, and what is recorded already stays."""
    model, plain, found = steps("llama")
    prepare = found._prepare

    def fail(shape: Shape) -> object:
        if shape.width > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return prepare(shape)

    monkeypatch.setattr(found, "_prepare", fail)
    found._steps.clear()
    with torch.no_grad():
        found.record()
    for tokens in ([1, 2, 3], [4, 5], [6]):
        feeds = [Feed(0, 0, tokens, 1)]
        torch.testing.assert_close(model.forward(feeds), plain.forward(feeds), rtol=1e-4, atol=1e-4)

    assert [Shape(1, 1, 16)] == list(found._steps)
    assert ["1 x 2 tokens are not recorded: CUDA out of memory. Tried to allocate"] == caplog.messages


SEQUENCE = [((0, 0), (2, 0)), ((0, 3), (2, 2)), ((0, 6), (2, 4)), ((0, 2), (2, 1))]
"""Slots and where their feeds begin, step by step."""


def test_the_sequence_of_the_next_test(steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]]) -> None:
    """On a CPU, so that it is known to be one."""
    model, plain, found = steps("llama")
    follow(model, plain)
    assert found._steps


def follow(model: TorchModel, plain: TorchModel) -> None:
    for starts in SEQUENCE:
        feeds = [Feed(slot, start, [1 + slot, 4, 5][: 3 - slot // 2], 1) for slot, start in starts]
        torch.testing.assert_close(model.forward(feeds), plain.forward(feeds), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu(graphs: bool, load: Load) -> None:
    """Recorded, as the loader makes it; and the setting that says otherwise."""
    model, plain = load("llama", device="cuda", cuda_graphs=graphs), load("llama", device="cuda", fused=False)
    assert graphs == (model._static is not None and bool(model._static._steps))
    follow(model, plain)


# ---------------------------------------------------------------- the measurement


def test_the_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU: all three ways, checked against each other, and the numbers in a file."""
    output = tmp_path / "steps.json"
    arguments = ["--device", "cpu", "--sizes", "tiny", "--context", "20", "--repeats", "2", "--json", str(output)]

    assert measure_steps.main([*arguments, "--sessions", "1,2"]) == 0

    found = json.loads(output.read_text())
    assert list(found["differences"]) == ["tiny float32"]
    assert {(each["layers"], each["sessions"], each["rows"]) for each in found["timings"]} == {
        (layers, sessions, rows)
        for layers in ("transformers", "our layers", "fixed shapes")
        for sessions in (1, 2)
        for rows in (1, 5, 9)
    }
    assert "scores differ from transformers' by" in capsys.readouterr().out


def test_layers_that_compute_something_else_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache that was not cut back."""
    states = StaticSteps.states

    def stale(self: StaticSteps, feeds: list[Feed]) -> torch.Tensor | None:
        return states(self, [Feed(feed.slot, feed.start - 1, feed.tokens, feed.rows) for feed in feeds])

    monkeypatch.setattr(StaticSteps, "states", stale)

    assert measure_steps.main(["--device", "cpu", "--sizes", "tiny", "--context", "20", "--repeats", "2"]) == 1
    assert "tiny, fixed shapes, torch.float32: scores differ by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--device", "cuda:99", "must be cpu or one of the"),
        ("--device", "gpu", "must be cuda, cuda:N or cpu"),
        ("--sizes", "135M,2B", "got '2B', must be of tiny, 135M"),
        ("--sessions", "1,0", "got '1,0', must be whole numbers from 1 to 256"),
        ("--sessions", "a", "got 'a', must be whole numbers from 1 to 256"),
        ("--context", "0", "got 0, must be from 1 to 100000"),
        ("--repeats", "1", "got 1, must be from 2 to 10000"),
        ("--limit", "nan", "got nan, must be above 0"),
    ],
)
def test_what_is_asked_wrongly(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, before any model is made."""
    assert measure_steps.main(["--device", "cpu", option, value]) == 2

    error = capsys.readouterr().err
    assert error.startswith(option)
    assert said in error
