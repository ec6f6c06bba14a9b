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
    assert len(shapes) - 1 == len(found._steps) > 8


def test_shapes(steps: Callable[[str], tuple[TorchModel, TorchModel, StaticSteps]]) -> None:
    """The smallest that holds all rows: by the last slot, the longest feed and the furthest cell."""
    _, _, found = steps("llama")

    assert Shape(1, 1, 16) == found.shape([Feed(0, 15, [1], 1)])
    assert Shape(1, 1, 32) == found.shape([Feed(0, 16, [1], 1)])
    assert Shape(4, 4, 64) == found.shape([Feed(2, 40, [1, 2, 3], 3), Feed(0, 3, [1], 1)])
    assert Shape(2, WIDEST, CONTEXT) == found.shape([Feed(1, CONTEXT - WIDEST, [1] * WIDEST, 1)])
    assert found.shape([Feed(0, 0, [1] * (WIDEST + 1), 1)]) is None


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu(graphs: bool, load: Load) -> None:
    """Recorded, as the loader makes it; and the setting that says otherwise."""
    model, plain = load("llama", device="cuda", cuda_graphs=graphs), load("llama", device="cuda", fused=False)
    assert graphs == (model._static is not None)
    for start in (0, 3, 6, 2):
        feeds = [Feed(0, start, [1, 2, 3], 3), Feed(2, start, [4, 5], 1)]
        torch.testing.assert_close(model.forward(feeds), plain.forward(feeds), rtol=1e-3, atol=1e-3)


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
        for layers in ("transformers", "our layers", "recorded")
        for sessions in (1, 2)
        for rows in (1, 5, 9)
    }
    assert "scores differ from transformers' by" in capsys.readouterr().out


def test_layers_that_compute_something_else_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache that was not cut back."""
    states = StaticSteps.states

    def stale(self: StaticSteps, feeds: list[Feed], shape: Shape) -> torch.Tensor:
        moved = [Feed(feed.slot, feed.start - 1, feed.tokens, feed.rows) for feed in feeds]
        return states(self, moved, shape)

    monkeypatch.setattr(StaticSteps, "states", stale)

    assert measure_steps.main(["--device", "cpu", "--sizes", "tiny", "--context", "20", "--repeats", "2"]) == 1
    assert "tiny, recorded, torch.float32: scores differ by" in capsys.readouterr().err


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
