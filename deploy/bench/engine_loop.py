"""Step times of the bare engine, without a service around it: d, v and t of the speedup formula.

The same model, built by the same loader, fed by a plain loop in this process: forward and judge, nothing else.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specwire.law.values import GREEDY, Block, Law, Opening
from specwire.lm.load import ModelConfig, build_model
from specwire.lm.port import Feed, LanguageModel


class EngineLoop:
    """One target and one draft, driven by hand."""

    def __init__(self, target: dict[str, Any], draft: dict[str, Any] | None) -> None:
        """Model settings as in the workers' configurations."""
        self.target = build_model(ModelConfig.model_validate({**target, "max_sessions": 1}))
        self.draft = build_model(ModelConfig.model_validate({**draft, "max_sessions": 1})) if draft else None
        self._samples: dict[tuple[str, int], list[float]] = {}

    def measure(self, context: int, rows: Sequence[int], repeats: int = 3) -> None:
        """Adds samples: target steps of each number of rows, and a draft step, with `context` tokens cached."""
        prompt = [1 + i % 1000 for i in range(context)]
        for model, name, counts in ((self.target, "target", tuple(rows)), (self.draft, "draft", (1,))):
            if model is None:
                continue
            model.forward([Feed(0, 0, prompt, 0)])
            for count in counts:
                for _ in range(repeats):
                    begun = time.perf_counter()
                    self._step(model, name, prompt, count)
                    self._samples.setdefault((name, count), []).append(time.perf_counter() - begun)

    def plain_steps(self, context: int, count: int) -> list[float]:
        """Seconds of so many plain steps of the target one after the other, beginning with `context` tokens cached."""
        return [step() for step in self.steps(context, count)]

    def steps(self, context: int, count: int) -> Iterator[Callable[[], float]]:
        """So many plain steps of the target, to be taken in turn; each says how many seconds it took."""
        prompt = [1 + i % 1000 for i in range(context + count)]
        self.target.forward([Feed(0, 0, prompt[:context], 0)])

        def step(length: int) -> float:
            begun = time.perf_counter()
            self._step(self.target, "target", prompt[:length], 1)
            return time.perf_counter() - begun

        for length in range(context + 1, context + count + 1):
            yield functools.partial(step, length)

    def _step(self, model: LanguageModel, name: str, prompt: list[int], rows: int) -> None:
        """`rows` tokens written after all but the last token of the prompt, all of them judged or drafted from."""
        tokens = prompt[:rows]
        scores = model.forward([Feed(0, len(prompt) - 1, tokens, rows)])
        if name == "target":
            from target_service.verify import JudgeItem, judge

            opening = Opening(Law.SHARED_NOISE, GREEDY, 0, 0, len(prompt))
            judge(scores, [JudgeItem(opening, Block(tuple(tokens[1:])), len(prompt))])
        else:
            from specwire.lm.sampling_torch import choose_shared_noise

            choose_shared_noise(scores[-1], GREEDY, 0, 0, len(prompt), model.spec.columns)

    def seconds(self, name: str, rows: int) -> float:
        """Median of a step; between measured row counts, linear."""
        known = sorted(count for kind, count in self._samples if kind == name)
        below = max((count for count in known if count <= rows), default=known[0])
        above = min((count for count in known if count >= rows), default=known[-1])
        low, high = (statistics.median(self._samples[name, count]) for count in (below, above))
        return low if above == below else low + (high - low) * (rows - below) / (above - below)
