"""`exactness: strict` on real weights, and compiled layers without it: no score depends on a block's length, its neighbours or its
slot, to the last bit.

What `strict` costs, and how far `fast` is from it elsewhere, is told at the end of the run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specwire.law.values import GREEDY, Block, Law, Opening, SamplingSpec, Verdict
from specwire.lm import native
from specwire.lm.port import Feed
from specwire.lm.torch_lm import TorchModel
from target_service.verify import JudgeItem, judge
from tests.e2e.conftest import DEMO, demo_model
from tests.e2e.prompts import all_prompts, chat
from tests.e2e.stack import Stack, stack

pytestmark = pytest.mark.weights

SHAPE: dict[str, Any] = {"max_sessions": 3, "max_block": 4, "max_context": 128}
"""A strict pass is 3 x 5 tokens."""
START = 10
"""Tokens of prompt."""


class Text:
    """A known text, scored by one model in every way that a service could."""

    def __init__(self, model: TorchModel, count: int) -> None:
        self.model = model
        self.count = count
        rng = random.Random(1)
        self.vocab = model.spec.vocab_size
        self.tokens = [rng.randrange(self.vocab) for _ in range(START + count)]
        self.fastest_s = float("inf")
        """The shortest pass so far."""

    def _score(self, feeds: list[Feed], which: int) -> torch.Tensor:
        begun = time.perf_counter()
        scores = self.model.forward(feeds)
        self.fastest_s = min(self.fastest_s, time.perf_counter() - begun)
        before = sum(feed.rows for feed in feeds[:which])
        return scores[before : before + feeds[which].rows].clone()

    def plain(self, slot: int = 0) -> torch.Tensor:
        """Token by token, alone. [count, vocab]."""
        self._score([Feed(slot, 0, self.tokens[:START], 0)], 0)
        return torch.cat([self._score([Feed(slot, at, self.tokens[at : at + 1], 1)], 0) for at in self._places()])

    def blocks(self, slot: int = 0, neighbours: bool = False) -> torch.Tensor:
        """In blocks of any length after a prompt in two chunks, alone or among others of any length. [count, vocab]."""
        rng = random.Random(2)
        self._score([Feed(slot, 0, self.tokens[:7], 0)], 0)
        self._score([Feed(slot, 7, self.tokens[7:START], 0)], 0)
        rows, at = [], START
        while at < len(self.tokens):
            width = min(rng.randint(1, 5), len(self.tokens) - at)
            feeds = [Feed(slot, at, self.tokens[at : at + width], width)]
            if neighbours:
                others = [other for other in range(self.model.num_slots) if other != slot]
                feeds += [Feed(other, 0, self._noise(rng), rng.randint(0, 1)) for other in others]
                rng.shuffle(feeds)
            rows.append(self._score(feeds, next(i for i, feed in enumerate(feeds) if feed.slot == slot)))
            at += width
        return torch.cat(rows)

    def _noise(self, rng: random.Random) -> list[int]:
        return [rng.randrange(self.vocab) for _ in range(rng.randint(1, 8))]

    def _places(self) -> range:
        return range(START, len(self.tokens))


WAYS: dict[str, Callable[[Text], torch.Tensor]] = {
    "another slot": lambda text: text.plain(slot=2),
    "blocks": lambda text: text.blocks(),
    "blocks among others": lambda text: text.blocks(slot=1, neighbours=True),
}


def differences(text: Text, expected: torch.Tensor) -> dict[str, float]:
    """Largest difference of a score from plain decoding, by the way it was computed."""
    seen = torch.isfinite(expected)
    return {way: float((score(text) - expected)[seen].abs().max()) for way, score in WAYS.items()}


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing can be compiled."""
    monkeypatch.setattr(native, "load", lambda _: None)


@pytest.mark.usefixtures("on_torch")
@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_scores_do_not_depend_on_the_pass(precision: str, demo: str, notes: list[str]) -> None:
    """Every score is plain decoding's, bit for bit. Under `fast` they differ by rounding."""
    count = 10 if precision == "float32" else 6
    found, step_ms = {}, {}
    for exactness in ("fast", "strict"):
        text = Text(demo_model(precision=precision, exactness=exactness, **SHAPE), count)
        expected = text.plain()
        step_ms[exactness] = 1e3 * text.fastest_s
        found[exactness] = differences(text, expected)
    worst = max(found["fast"].values())
    notes.append(
        f"strict {precision}: a plain step takes {step_ms['strict']:.0f} ms (3 x 5 tokens), {step_ms['fast']:.0f} when fast (one); "
        f"scores differ by at most {max(found['strict'].values()):.1e}, {worst:.1e} when fast"
    )

    assert dict.fromkeys(WAYS, 0.0) == found["strict"]
    assert worst < (1e-2 if precision == "float32" else 2.0)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", pytest.param("float32", marks=pytest.mark.slow)])
def test_compiled_layers_are_exact(precision: str, demo: str, notes: list[str]) -> None:
    """The same without `strict`; what a block costs beside a plain step is told."""
    if native.load(getattr(torch, precision)) is None:
        pytest.skip("needs Linux, AVX2 and a C compiler")
    model = demo_model(precision=precision, **SHAPE)
    assert model.compiled
    text = Text(model, 40)
    expected = text.plain()
    plain_ms, block_ms = (
        1e3 * min(seconds_of(model, [Feed(0, 9, text.tokens[9 : 9 + width], width)]) for _ in range(5))
        for width in (1, 5)
    )
    notes.append(
        f"compiled {precision}: a plain step takes {plain_ms:.0f} ms, a block of five tokens {block_ms:.0f} ms"
    )

    assert dict.fromkeys(WAYS, 0.0) == differences(text, expected)


def seconds_of(model: TorchModel, feeds: list[Feed]) -> float:
    begun = time.perf_counter()
    model.forward(feeds)
    return time.perf_counter() - begun


@pytest.mark.usefixtures("on_torch")
@pytest.mark.parametrize("spec", [GREEDY, SamplingSpec(temperature=0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_verdicts_are_plain_decoding_s(spec: SamplingSpec, demo: str) -> None:
    """A block of the tokens that plain decoding chose is accepted whole, and the bonus is the next one: no tie can part them."""
    model = demo_model(precision="float32", exactness="strict", **SHAPE)
    prompt = Text(model, 0).tokens
    opening = Opening(Law.SHARED_NOISE, spec, 7, 0, START)

    def verdict(feed: Feed, block: tuple[int, ...], base: int) -> Verdict:
        (found,) = judge(model.forward([feed]), [JudgeItem(opening, Block(block), base)])
        assert isinstance(found, Verdict)
        return found

    chosen: list[int] = []
    feed = Feed(0, 0, prompt, 1)
    for base in range(START, START + 9):
        chosen.append(verdict(feed, (), base).added)
        feed = Feed(0, base, chosen[-1:], 1)
    first = verdict(Feed(1, 0, [*prompt, *chosen[:4]], 5), tuple(chosen[:4]), START)
    second = verdict(Feed(1, START + 4, chosen[4:8], 4), tuple(chosen[5:8]), START + 5)

    assert Verdict(4, chosen[4]) == first
    assert Verdict(3, chosen[8]) == second


@pytest.fixture(scope="module", params=["strict", "compiled"])
def strict(request: pytest.FixtureRequest, demo: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo pair, the target strict and on torch, or with compiled layers. The draft decides no token, so it may stay fast."""
    shape: dict[str, Any] = {"max_sessions": 4, "max_block": 4, "max_context": 256}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "strict":
            shape["exactness"] = "strict"
            patch.setenv("CC", "false")  # no library comes of it
        elif native.load(torch.float32) is None:
            pytest.skip("needs Linux, AVX2 and a C compiler")
        document = DEMO | {"target": DEMO["target"] | shape}
        with stack(tmp_path_factory.mktemp("strict"), document) as running:
            yield running


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_a_strict_service_needs_no_excuse(sampling: dict[str, Any], strict: Stack) -> None:
    """Speculative and batched answers are plain and solo ones, with no near-tie allowed."""
    requests = [{"messages": chat(text), "max_tokens": 32, **sampling} for text in all_prompts()[:8]]
    plain = strict.answers([request | {"num_speculative_tokens": 0} for request in requests])
    together = strict.answers(
        [request | {"num_speculative_tokens": 1 + i % 4} for i, request in enumerate(requests)], at_once=True
    )

    assert [answer.ids for answer in plain] == [answer.ids for answer in together]
