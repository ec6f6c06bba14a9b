"""A draft of no use, and what is made of the runs."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from deploy.bench.passes import Record
from deploy.bench.workload import Item
from deploy.bench.zero import AUTO, NONE, ZERO, summary, useless_draft
from specwire.client import Final
from specwire.law.errors import InvalidArgument, OurFault
from specwire.v1 import inference_pb2 as pb


def checkpoint(folder: Path, ids: list[int], dtype: str = "I64") -> Path:
    """A folder with a map of ids (less their index) between other bytes."""
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 8}')
    shifts = (np.array(ids) - np.arange(len(ids))).astype("<i8").tobytes()
    header = json.dumps(
        {
            "before": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "d2t": {"dtype": dtype, "shape": [len(ids)], "data_offsets": [3, 3 + len(shifts)]},
            "after": {"dtype": "U8", "shape": [2], "data_offsets": [3 + len(shifts), 5 + len(shifts)]},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abc" + shifts + b"de")
    return folder


def columns(folder: Path) -> tuple[list[int], bytes, bytes]:
    """Target ids of the score columns, and the bytes before and after them."""
    raw = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    shifts = np.frombuffer(raw[8 + size + 3 : -2], dtype="<i8")
    return list(shifts + np.arange(len(shifts))), raw[: 8 + size + 3], raw[-2:]


def test_a_useless_draft_means_other_tokens_and_is_otherwise_the_same(tmp_path: Path) -> None:
    """None of its ids is one of before; they ascend, as a map has to."""
    good = checkpoint(tmp_path / "good", [0, 2, 3, 7])
    made = useless_draft(good, tmp_path)
    (before, *rest), (after, *same) = columns(good), columns(made)

    assert ([0, 2, 3, 7], [1, 4, 5, 6]) == (before, after)
    assert rest == same
    assert '{"vocab_size": 8}' == (made / "config.json").read_text()


@pytest.mark.parametrize(
    ("ids", "dtype", "limit"),
    [([0, 1], "I32", "a 64-bit d2t"), ([0, 1, 2, 3, 4], "I64", "at most half of the vocabulary")],
)
def test_a_draft_that_cannot_be_renamed_is_refused(tmp_path: Path, ids: list[int], dtype: str, limit: str) -> None:
    """It has no map to change, or no other tokens are left."""
    with pytest.raises(InvalidArgument, match=limit):
        useless_draft(checkpoint(tmp_path / "other", ids, dtype), tmp_path)


def test_answers_of_one_token_say_nothing() -> None:
    """And nothing is made up."""
    lone = Record(Item("chat", "x", 1), (1,), 1.0, 1.0, (), None)
    with pytest.raises(OurFault, match="more than one token"):
        summary({NONE: [lone], ZERO: [lone], AUTO: [lone]})


def record(token_s: float, drafts: int, ids: tuple[int, ...] = (1, 2, 3)) -> Record:
    """An answer of three tokens, the first after a second."""
    speculation = pb.SpeculationStats(rounds=4, drafts=drafts)
    final = Final("length", None, "", pb.Usage(), 0, speculation, pb.Timing(), ())
    return Record(Item("chat", "x", 3), ids, 1.0, 1.0 + 2 * token_s, (token_s, token_s), final)


def test_each_way_is_held_against_no_draft() -> None:
    """By the time of a token after the first."""
    runs = {
        NONE: [record(0.020, 0), record(0.030, 0)],
        ZERO: [record(0.021, 0), record(0.031, 0)],
        AUTO: [record(0.022, 1), record(0.030, 0, (1, 2, 4))],
    }
    found = summary(runs)

    assert pytest.approx(1.0) == found[ZERO]["difference_ms"]
    assert (0.0, 0) == (found[ZERO]["rounds_with_a_block"], found[ZERO]["differing"])
    assert (0.125, 1) == (found[AUTO]["rounds_with_a_block"], found[AUTO]["differing"])
    assert pytest.approx((1.1 + 1.0) / 2) == found[AUTO]["ratio"]["value"]
