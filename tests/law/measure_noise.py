"""Prints what judging costs per row: `python -m tests.law.measure_noise`. A measurement, not a test.

Eight blocks of four tokens, all accepted, so that no row is spared; vocabulary 49,152; the best of ten passes.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from specwire.law.values import GREEDY, Block, Law, Opening, SamplingSpec
from specwire.lm.sampling_torch import Draw, choose_rows
from target_service.verify import JudgeItem, judge

VOCAB, BLOCKS, K = 49_152, 8, 4
SPECS = {
    "shared noise": SamplingSpec(),
    "temperature 0.7": SamplingSpec(0.7),
    "top-k 50": SamplingSpec(0.8, top_k=50),
    "top-p 0.95": SamplingSpec(0.8, top_p=0.95),
    "top-k 20, top-p 0.95": SamplingSpec(0.6, 20, 0.95),
    "min-p 0.05": SamplingSpec(1.0, min_p=0.05),
    "greedy": GREEDY,
}


def scores_like_a_models(rows: int) -> torch.Tensor:
    """A few strong candidates over a broad bulk, float32 [rows, vocab]."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0.0, 2.0, (rows, VOCAB))
    scores[:, :200] += 14.0 - 1.5 * np.log1p(np.arange(200))
    return torch.from_numpy(scores.astype(np.float32))


def main() -> None:
    scores = scores_like_a_models(BLOCKS * (K + 1))
    for name, spec in SPECS.items():
        items = []
        for n in range(BLOCKS):
            session = Opening(Law.SHARED_NOISE, spec, n, 0, 1)
            draws = [Draw(spec, n, 0, 50 + j) for j in range(K)]
            tokens = choose_rows(scores[n * (K + 1) : n * (K + 1) + K], draws)
            items.append(JudgeItem(session, Block(tuple(int(token) for token in tokens)), 50))
        walls = []
        for _ in range(10):
            begin = time.perf_counter()
            verdicts = judge(scores, items)
            walls.append((time.perf_counter() - begin) / len(scores) * 1e3)
        assert [verdict.accepted for verdict in verdicts] == [K] * BLOCKS
        print(f"{name:22s} best {min(walls):.3f}  median {sorted(walls)[5]:.3f} ms per row")


if __name__ == "__main__":
    main()
