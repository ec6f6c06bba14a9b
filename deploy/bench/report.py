"""From passes to numbers: percentiles, throughput, acceptance, where time went, and ratios against plain decoding with intervals.

Pure. Ratios pair passes of the same repeat, which ran next to each other; decode speedups pair the same request of both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploy.bench.hf import ASSISTED, GENERATE
from deploy.bench.passes import Load, Pass, Record
from deploy.bench.statistics import bootstrap, median_ratio, spread, total_ratio
from specwire.client import Final

PLAIN, AUTO = "plain", "auto"
PERCENTILES = (50, 95, 99)
ENOUGH_PASSES = 5
"""Of fewer, resampling gives an interval that says too much."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def point(passes: Sequence[Pass], plain: Sequence[Pass]) -> dict[str, Any]:
    """What one variant did at one load, over its repeats. `plain`: the passes without speculation, in the same order."""
    records = [record for each in passes for record in each.records]
    tokens = sum(len(record.ids) for record in records)
    wall = sum(each.wall_s for each in passes)
    found: dict[str, Any] = {
        "variant": passes[0].variant,
        "load": str(passes[0].load),
        "concurrency": passes[0].load.concurrency,
        "rate": passes[0].load.rate,
        "requests": len(records),
        "tokens": tokens,
        "requests_per_s": len(records) / wall,
        "tokens_per_s": tokens / wall,
        "ttft_ms": _spread(1e3 * record.ttft_s for record in records),
        "time_per_output_token_ms": _spread(1e3 * r.tpot_s for r in records if r.tpot_s is not None),
        "inter_token_latency_ms": _spread(1e3 * gap for record in records for gap in record.gaps),
        "end_to_end_ms": _spread(1e3 * record.total_s for record in records),
        "speculation": speculation(records),
        "anatomy_ms_per_token": anatomy(records),
        "bytes_per_token": sum(final.timing.wire_bytes for final in _finals(records)) / max(1, tokens),
    }
    if passes[0].variant != PLAIN:
        found |= against_plain(passes, plain)
    return found


def against_plain(passes: Sequence[Pass], plain: Sequence[Pass]) -> dict[str, Any]:
    """Throughput and decoding of a variant over those of plain decoding, and how many answers differ."""
    throughput = [(mine.tokens_per_s, other.tokens_per_s) for mine, other in zip(passes, plain, strict=True)]
    decoding: list[tuple[float, float]] = []
    whole: list[tuple[float, float]] = []
    kinds: dict[str, list[tuple[float, float]]] = {}
    differing = 0
    for mine, other in zip(passes, plain, strict=True):
        for record, reference in zip(mine.records, other.records, strict=True):
            differing += record.ids != reference.ids
            whole.append((reference.total_s, record.total_s))
            kinds.setdefault(record.item.kind, []).append(whole[-1])
            if len(record.ids) > 1 and len(reference.ids) > 1:
                decoding.append((reference.total_s - reference.ttft_s, record.total_s - record.ttft_s))
    return {
        "throughput_speedup": bootstrap(throughput, median_ratio).plain(),
        "request_speedup": bootstrap(whole, total_ratio).plain(),
        "decode_speedup": bootstrap(decoding, total_ratio).plain() if decoding else None,
        "request_speedup_by_kind": {kind: total_ratio(pairs) for kind, pairs in kinds.items()},
        "answers_that_differ": differing,
    }


def speculation(records: Iterable[Record]) -> dict[str, Any]:
    """Acceptance, from raw counters of all requests."""
    rounds = drafts = drafted = accepted = by_model = by_ngram = 0
    positions: list[int] = []
    for final in _finals(records):
        stats = final.speculation
        rounds, drafts = rounds + stats.rounds, drafts + stats.drafts
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
        by_model, by_ngram = by_model + stats.drafted_by_model, by_ngram + stats.drafted_by_ngram
        counts = list(stats.accepted_per_position)
        positions += [0] * (len(counts) - len(positions))
        for n, count in enumerate(counts):
            positions[n] += count
    return {
        "rounds": rounds,
        "blocks": drafts,
        "drafted": drafted,
        "accepted": accepted,
        "drafted_by_model": by_model,
        "drafted_by_ngram": by_ngram,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": (accepted + drafts) / drafts if drafts else None,
        "accepted_per_position": [count / drafts for count in positions] if drafts else [],
    }


PARTS = {
    "draft": ("draft_compute_us",),
    "target": ("target_compute_us",),
    "transfer": ("draft_transfer_us", "target_transfer_us"),
    "queue": ("draft_queue_us", "target_queue_us", "admission_us"),
    "workers' overhead": ("draft_overhead_us", "target_overhead_us"),
    "coordinator": ("coordinator_us", "wait_us", "tokenize_us"),
    "client": ("client_us",),
    "recovery": ("recovery_us",),
    "unattributed": ("unattributed_us",),
}
"""Parts of a request's critical path, and the measured intervals each is made of. Together they are its whole time."""


def anatomy(records: Sequence[Record]) -> dict[str, float]:
    """Milliseconds of the critical path per token, by part. Prompt time is in it."""
    tokens = max(1, sum(len(record.ids) for record in records))
    return {
        part: sum(getattr(final.timing, name) for final in _finals(records) for name in names) / 1e3 / tokens
        for part, names in PARTS.items()
    }


def _finals(records: Iterable[Record]) -> list[Final]:
    return [record.final for record in records if record.final is not None]


def comparisons(passes: Mapping[str, Sequence[Pass]]) -> list[dict[str, Any]]:
    """Ours over transformers' own decoding, by tokens per second. `passes`: by variant, all at one load."""
    pairs = ((PLAIN, GENERATE), (AUTO, GENERATE), (AUTO, ASSISTED))
    return [
        {
            "variant": mine,
            "against": other,
            "throughput_ratio": bootstrap(
                [(a.tokens_per_s, b.tokens_per_s) for a, b in zip(passes[mine], passes[other], strict=True)],
                median_ratio,
            ).plain(),
        }
        for mine, other in pairs
        if other in passes
    ]


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    if not found:
        return {}
    return {"mean": statistics.fmean(found), **{f"p{percent}": percentile(found, percent) for percent in PERCENTILES}}


def advice(points: Sequence[dict[str, Any]], lost: Sequence[str] = ()) -> list[dict[str, Any]]:
    """For each load how to run, and why: the most tokens per second of those that are surely more than plain decoding's; else
    plainly. It goes by the ratios as they are shown, in two decimals, so that no word stands beside a number that denies it.
    `lost`: workers that went away meanwhile."""
    doubt = f"; but {' and '.join(lost)} went away meanwhile: measure again" if lost else ""
    advised = []
    for load in dict.fromkeys(found["load"] for found in points):
        here = [found for found in points if found["load"] == load]
        plain = next(found for found in here if found["variant"] == PLAIN)
        others = [found for found in here if found["variant"] not in (PLAIN, GENERATE, ASSISTED)]
        faster = [found for found in others if _shown(found, "low") > 1.0]
        best = max(faster or others, key=lambda found: found["throughput_speedup"]["value"], default=None)
        if best is None or not faster:
            worse = best is not None and all(_shown(found, "high") < 1.0 for found in others)
            why = "everything else is slower" if worse else "nothing is surely faster than plain decoding"
            why += f"; the best of them, {best['variant']}, {_ratio(best)}" if best else ""
            advised.append({"load": load, "choose": PLAIN, "why": why + doubt})
            continue
        rate, length = best["speculation"]["acceptance_rate"], best["speculation"]["mean_acceptance_length"]
        why = f"{_ratio(best)}: {best['tokens_per_s']:.1f} tokens/s against {plain['tokens_per_s']:.1f}"
        if rate is not None:
            why += f"; {100 * rate:.0f} % of drafted tokens stand, {length:.2f} tokens a block"
        advised.append({"load": load, "choose": best["variant"], "why": why + doubt})
    return advised


def _shown(found: dict[str, Any], end: str) -> float:
    """An end of a ratio's interval as `_ratio` shows it."""
    ratio = found["throughput_speedup"]
    return float(f"{ratio['value' if ratio[end] is None else end]:.2f}")


def _ratio(found: dict[str, Any]) -> str:
    ratio = found["throughput_speedup"]
    few = f" (of {ratio['pairs']} passes; {ENOUGH_PASSES} tell more)" if ratio["pairs"] < ENOUGH_PASSES else ""
    return f"{ratio['value']:.2f} times plain{spread(ratio)}{few}"


def loads(concurrency: Sequence[int], rates: Sequence[float]) -> list[Load]:
    """Closed loops first."""
    return [*(Load(concurrency=n) for n in concurrency), *(Load(rate=rate) for rate in rates)]
