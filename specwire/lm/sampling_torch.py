"""Laws and choices from rows of scores that lie in a tensor, on any device; for the target's judge and the draft's proposers.

Law. The reference is `specwire.law.sampling`; this file gives the same answers for the same scores, on every device. On the CPU
a row is a numpy view and goes through `specwire.law.race`, one row at a time, so rows behind a refusal cost nothing.
On another device all rows of a step are bounded there in one pass and only the few tokens that can win come back; the reference's
arithmetic decides among them on the host, so a device's own logarithms never decide. A row the few do not settle
(filters that keep very many, odd scores) comes to the host whole.

`columns` maps score columns to target ids, ascending: noise and results always speak target ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.law.errors import BadLaw
from specwire.law.noise import FIRST_MULTIPLIER, SECOND_MULTIPLIER, U_MAX, Bits, Ids, halves, row_key
from specwire.law.race import (
    COLDEST,
    LOG2,
    OFFSET,
    SLACK,
    STEP,
    Prefix,
    fast_choice,
    fast_law,
    finish,
    premixed_columns,
)
from specwire.law.sampling import Row, cut_to_sparse
from specwire.law.values import SamplingSpec, SparseLaw

BATCH_ELEMENTS = 2**24
"""Scores bounded in one pass on a device: about 0.3 GB of buffers."""
PREFIX = 512
"""Best tokens of a filtered row that come back from a device; enough for nearly every filter in use."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a row needs besides its scores: how it is sampled and whose noise it gets."""

    spec: SamplingSpec
    seed: int
    choice: int
    position: int


def host_array(scores: torch.Tensor) -> Row:
    """Scores as numpy: a view on the CPU, a copy from elsewhere. Any shape, columns last."""
    scores = scores.detach()
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    array: Row = scores.contiguous().cpu().numpy()
    return array


def choose_shared_noise(
    scores_row: torch.Tensor, spec: SamplingSpec, seed: int, choice: int, position: int, columns: Ids | None = None
) -> int:
    """The token id chosen at a position. [columns] -> id. Raises BadLaw."""
    chosen = choose_rows(scores_row[None], [Draw(spec, seed, choice, position)], columns)[0]
    if isinstance(chosen, BadLaw):
        raise chosen
    return chosen


def choose_rows(scores: torch.Tensor, draws: Sequence[Draw], columns: Ids | None = None) -> list[int | BadLaw]:
    """The token id chosen at each row; a row that is no law gives its error and disturbs no other. [rows, columns]."""
    assert scores.ndim == 2
    assert scores.shape[0] == len(draws)
    if scores.device.type == "cpu":
        return [choose_row(row, draw, columns) for row, draw in zip(host_array(scores), draws, strict=True)]
    return choose_rows_on_device(scores, draws, columns)


def choose_row(row: Row, draw: Draw, columns: Ids | None = None) -> int | BadLaw:
    """The token id chosen at one row, on the host. [columns]."""
    try:
        return fast_choice(row, draw.spec, draw.seed, draw.choice, draw.position, columns)
    except BadLaw as bad:
        return bad


def draft_law(scores_row: torch.Tensor, spec: SamplingSpec, m: int, columns: Ids | None = None) -> SparseLaw:
    """The draft's law under `rejection`: sampled, then cut to its best m. [columns] -> at most m ids. Raises BadLaw."""
    return cut_to_sparse(fast_law(host_array(scores_row), spec), m, columns)


def choose_rows_on_device(
    scores: torch.Tensor, draws: Sequence[Draw], columns: Ids | None = None
) -> list[int | BadLaw]:
    """`choose_rows` for scores better left where they are; runs on the CPU as well, so it can be tested there."""
    scores = scores.detach()
    chosen: list[int | BadLaw | None] = [None] * len(draws)
    by_kind: dict[str, list[int]] = {"greedy": [], "race": [], "prefix": []}
    for r, draw in enumerate(draws):
        if draw.spec.greedy:
            by_kind["greedy"].append(r)
        elif draw.spec.temperature >= COLDEST:
            by_kind["prefix" if draw.spec.filtered else "race"].append(r)
    step = max(1, BATCH_ELEMENTS // scores.shape[1])
    for kind, choose in (("greedy", _greedy), ("race", _race), ("prefix", _prefix)):
        for start in range(0, len(by_kind[kind]), step):
            rows = by_kind[kind][start : start + step]
            part = scores if len(rows) == len(scores) else scores[torch.tensor(rows, device=scores.device)]
            for r, token in zip(rows, choose(part, [draws[r] for r in rows], columns), strict=True):
                chosen[r] = token
    return [
        choose_row(host_array(scores[r]), draws[r], columns) if token is None else token
        for r, token in enumerate(chosen)
    ]


def _target_ids(found: Ids, columns: Ids | None) -> Ids:
    return found if columns is None else columns[found]


def _greedy(scores: torch.Tensor, draws: Sequence[Draw], columns: Ids | None) -> list[int | None]:
    """First of the best of each row; None when the best is not finite. [rows, columns]."""
    best = scores.amax(dim=1)  # nan if any is
    order = torch.arange(scores.shape[1], device=scores.device)
    first = torch.where(scores == best[:, None], order, scores.shape[1]).amin(dim=1)
    first = torch.where(best.isfinite(), first, -1)
    found = first.cpu().numpy()
    return [None if column < 0 else int(_target_ids(found[r : r + 1], columns)[0]) for r, column in enumerate(found)]


def bits_on_device(premixed: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """`noise.mix_into` in int32, where shifts keep the sign and are masked. [columns], [rows, 1] x 2 -> [rows, columns]."""
    x = premixed + low
    x ^= (x >> 16) & 0xFFFF
    x *= FIRST_MULTIPLIER
    x ^= high
    x ^= (x >> 15) & 0x1FFFF
    x *= SECOND_MULTIPLIER - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


_tables: dict[tuple[int, torch.device], tuple[Bits, torch.Tensor]] = {}
"""By identity of the numpy table, which is kept, so that the identity stays its own."""


def _table(premixed: Bits, device: torch.device) -> torch.Tensor:
    """A premixed table on a device, sent once. [columns] int32."""
    key = (id(premixed), device)
    if key not in _tables:
        if len(_tables) >= 8:
            _tables.clear()
        _tables[key] = (premixed, torch.from_numpy(premixed.view(np.int32).copy()).to(device))
    return _tables[key][1]


def _keys(draws: Sequence[Draw], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    keys = [row_key(draw.seed, draw.choice, draw.position) for draw in draws]
    words = np.array([halves(key) for key in keys], dtype=np.uint32).view(np.int32)
    both = torch.from_numpy(words).to(device)
    return both[:, :1], both[:, 1:], keys


def _race(scores: torch.Tensor, draws: Sequence[Draw], columns: Ids | None) -> list[int | None]:
    """`race.racers` for many rows: bound on the device, finish on the host. [rows, columns]."""
    low, high, keys = _keys(draws, scores.device)
    table = _table(premixed_columns(scores.shape[1], columns), scores.device)
    heat = torch.tensor([draw.spec.temperature for draw in draws], dtype=torch.float64, device=scores.device)
    x = bits_on_device(table, low, high)
    # halved, since int32 has a sign: the logarithm is one less and the offset one larger
    bound = ((x >> 1) & 0x7FFFFFFF).to(torch.float32).view(torch.int32).to(torch.float32)
    bound = scores.to(torch.float32) + bound * (-STEP * heat).to(torch.float32)[:, None]
    best, first = bound.max(dim=1)
    noise = _gumbel(x.gather(1, first[:, None]))[:, 0]
    score = scores.gather(1, first[:, None])[:, 0].double()
    mark = score + heat * (noise - OFFSET - LOG2) - SLACK * (score.abs() + 256 * heat)
    mark = torch.where(best.isfinite(), mark, torch.nan)  # nothing passes: no racers in an odd row
    rows, found = (bound.double() >= mark[:, None]).nonzero(as_tuple=True)
    values = scores[rows, found].double().cpu().numpy()
    counts = torch.bincount(rows, minlength=len(draws)).cpu().numpy()
    ids = _target_ids(found.cpu().numpy(), columns)
    chosen: list[int | None] = []
    end = 0
    for draw, key, count in zip(draws, keys, counts.tolist(), strict=True):
        start, end = end, end + count
        scaled = values[start:end] / draw.spec.temperature
        chosen.append(finish(ids[start:end], scaled, key) if count else None)
    return chosen


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """`noise.gumbel` of int32 bits, within a few ulp."""
    u = ((bits.long() & 0xFFFFFFFF).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u.clamp(max=U_MAX)))


def _prefix(scores: torch.Tensor, draws: Sequence[Draw], columns: Ids | None) -> list[int | None]:
    """Filtered rows: the best tokens and an exact-enough total come back. [rows, columns]."""
    size = min(PREFIX, scores.shape[1])
    values, found = scores.topk(size, dim=1)
    heat = torch.tensor([draw.spec.temperature for draw in draws], dtype=torch.float64, device=scores.device)
    totals = ((scores.double() - values[:, :1].double()) / heat[:, None]).exp().sum(dim=1)
    chosen: list[int | None] = []
    for draw, row_values, row_found, total in zip(
        draws, values.double().cpu().numpy(), found.cpu().numpy(), totals.cpu().tolist(), strict=True
    ):
        spec, scaled = draw.spec, row_values / draw.spec.temperature
        order = np.lexsort((row_found, -scaled))
        prefix = Prefix(row_found[order], scaled[order])
        n = prefix.settled(spec, total) if np.isfinite(total) and total >= 1.0 else None
        key = row_key(draw.seed, draw.choice, draw.position)
        chosen.append(None if n is None else finish(_target_ids(prefix.columns[:n], columns), prefix.scaled[:n], key))
    return chosen
