"""What a worker says of itself comes back whole; two vocabularies are one, or the first difference is named."""

from __future__ import annotations

import dataclasses

import pytest

from specwire.law.errors import InvalidArgument, VocabularyMismatch
from specwire.law.values import MAX_U64, SamplingSpec
from specwire.v1 import types_pb2
from specwire.wire.info import (
    WorkerInfo,
    compare_vocabularies,
    decode_worker_info,
    encode_worker_info,
    vocabulary_fingerprint,
)

INFO = WorkerInfo(
    role="draft",
    model="small",
    architecture="llama",
    vocab_size=11,
    vocab_fingerprint="ab",
    model_fingerprint="cd",
    max_context=12,
    max_sessions=13,
    max_block=14,
    max_append=15,
    device="cpu",
    precision="float32",
    version="1.2",
    protocol_version=16,
    incarnation=MAX_U64,
    node="here:1",
    eos_token_ids=(2, 3),
    default_sampling=SamplingSpec(0.5, 17, 0.25, 0.125),
    draft_vocab_size=18,
    step_profile_us=(19, 20),
    threads=21,
)


@pytest.mark.parametrize("role", ["draft", "target", "coordinator"])
def test_every_field_comes_back(role: str) -> None:
    """No two fields are confused: each holds another value."""
    info = dataclasses.replace(INFO, role=role)

    assert info == decode_worker_info(encode_worker_info(info))


def test_no_defaults_differ_from_default_sampling() -> None:
    """A model that states none leaves them to the server; one that states greedy means it."""
    silent = dataclasses.replace(INFO, default_sampling=None)

    assert silent == decode_worker_info(encode_worker_info(silent))
    assert not encode_worker_info(silent).HasField("default_sampling")


def test_unknown_role_is_refused() -> None:
    """A registration without a role is nobody's."""
    with pytest.raises(InvalidArgument, match="role"):
        decode_worker_info(types_pb2.WorkerInfo())


def test_fingerprint_tells_maps_apart() -> None:
    """Order, borders between tokens, and length all count; no tokens at all is no fingerprint."""
    maps = [(b"a", b"b"), (b"b", b"a"), (b"ab",), (b"a", b"b", b""), (b"", b"ab")]

    assert len({vocabulary_fingerprint(each) for each in maps}) == len(maps)
    assert vocabulary_fingerprint(()) == ""


WORDS = [b"the", b"sky", b"is", b"blue"]


@pytest.mark.parametrize(
    "other",
    [
        WORDS,
        [*WORDS, b"pad", b"pad2"],
        WORDS[:3],
        [b"the", b"", b"is", b"blue"],
        [],
    ],
    ids=["equal", "longer", "shorter", "a hole", "no tokenizer"],
)
def test_padding_may_differ(other: list[bytes]) -> None:
    """Ids that one of the two does not have cannot be misread."""
    compare_vocabularies("target", WORDS, "draft", other)
    compare_vocabularies("target", other, "draft", WORDS)


def test_first_difference_is_named() -> None:
    """With both models, the id, and both tokens."""
    with pytest.raises(VocabularyMismatch) as caught:
        compare_vocabularies("big", WORDS, "small", [b"the", b"sky", b"was", b"red"])

    assert str(caught.value) == "vocabularies differ first at id 2: big has 'is', small has 'was'"


def test_equal_sizes_do_not_make_equal_maps() -> None:
    """The size is the same, every id means another token."""
    with pytest.raises(VocabularyMismatch, match="id 0"):
        compare_vocabularies("big", WORDS, "small", WORDS[::-1])


def test_maps_that_hardly_meet_are_refused() -> None:
    """Nothing contradicts, because nothing is shared."""
    with pytest.raises(VocabularyMismatch, match="share only 0"):
        compare_vocabularies("big", [b"a", b"b", b"", b""], "small", [b"", b"", b"c", b"d"])


def test_bytes_that_are_no_text_are_shown_all_the_same() -> None:
    """A token can be half a character."""
    with pytest.raises(VocabularyMismatch, match="'\ufffd'"):
        compare_vocabularies("big", [b"\xe4"], "small", [b"a"])
