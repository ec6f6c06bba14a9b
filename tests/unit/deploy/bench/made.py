"""Answers and passes made up for reports."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.bench.passes import Load, Pass, Record
from deploy.bench.workload import Item
from specwire.client import Final
from specwire.v1 import inference_pb2 as pb


def record(
    total_s: float,
    *,
    ttft_s: float = 1.0,
    tokens: int = 11,
    kind: str = "chat",
    drafted: int = 0,
    accepted: Sequence[int] = (),
    first_id: int = 0,
) -> Record:
    """`accepted`: per position, in as many blocks as the first has tries: `drafted` counts all."""
    gap = (total_s - ttft_s) / (tokens - 1) if tokens > 1 else 0.0
    blocks = drafted // 2
    final = Final(
        finish_reason="length",
        stop=None,
        text="",
        usage=pb.Usage(completion_tokens=tokens),
        seed=1,
        speculation=pb.SpeculationStats(
            rounds=tokens, drafts=blocks, drafted=drafted, accepted=sum(accepted), accepted_per_position=accepted
        ),
        timing=pb.Timing(
            total_us=round(1e6 * total_s),
            target_compute_us=round(0.8e6 * total_s),
            target_transfer_us=round(0.15e6 * total_s),
            unattributed_us=round(0.05e6 * total_s),
            wire_bytes=100 * tokens,
        ),
        rounds=(),
    )
    ids = tuple(range(first_id, first_id + tokens))
    return Record(Item(kind, "?", tokens), ids, ttft_s, total_s, (gap,) * (tokens - 1), final)


def passed(variant: str, *records: Record, wall_s: float = 10.0, load: Load | None = None) -> Pass:
    """One pass."""
    return Pass(variant, load or Load(concurrency=1), wall_s, records)
