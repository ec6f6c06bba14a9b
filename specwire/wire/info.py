"""What a worker says of itself, as a value and in protobuf, and whether two vocabularies are one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from specwire.law.errors import InvalidArgument, VocabularyMismatch
from specwire.law.values import SamplingSpec
from specwire.v1 import types_pb2
from specwire.wire.codec import decode_sampling, encode_sampling

ROLES = {"draft": types_pb2.ROLE_DRAFT, "target": types_pb2.ROLE_TARGET, "coordinator": types_pb2.ROLE_COORDINATOR}
_ROLES_BACK = {number: name for name, number in ROLES.items()}


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """See WorkerInfo in types.proto, whose fields these are."""

    role: str
    model: str
    architecture: str
    vocab_size: int
    vocab_fingerprint: str
    """Empty: the model has no tokenizer and only sizes can be compared."""
    model_fingerprint: str
    max_context: int
    max_sessions: int
    max_block: int
    max_append: int
    device: str
    precision: str
    version: str
    protocol_version: int
    incarnation: int
    node: str
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: SamplingSpec | None = None
    draft_vocab_size: int = 0
    step_profile_us: tuple[int, ...] = ()
    threads: int = 0


def encode_worker_info(info: WorkerInfo) -> types_pb2.WorkerInfo:
    """Value to protobuf."""
    message = types_pb2.WorkerInfo(
        role=ROLES[info.role],
        model=info.model,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        vocab_fingerprint=info.vocab_fingerprint,
        model_fingerprint=info.model_fingerprint,
        max_context=info.max_context,
        max_sessions=info.max_sessions,
        max_block=info.max_block,
        max_append=info.max_append,
        device=info.device,
        precision=info.precision,
        version=info.version,
        protocol_version=info.protocol_version,
        incarnation=info.incarnation,
        node=info.node,
        eos_token_ids=info.eos_token_ids,
        draft_vocab_size=info.draft_vocab_size,
        step_profile_us=info.step_profile_us,
        threads=info.threads,
    )
    if info.default_sampling is not None:
        message.default_sampling.CopyFrom(encode_sampling(info.default_sampling))
    return message


def decode_worker_info(message: types_pb2.WorkerInfo) -> WorkerInfo:
    """Protobuf to value. Raises InvalidArgument."""
    if message.role not in _ROLES_BACK:
        raise InvalidArgument("role", message.role, "ROLE_DRAFT or ROLE_TARGET")
    return WorkerInfo(
        role=_ROLES_BACK[message.role],
        model=message.model,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        vocab_fingerprint=message.vocab_fingerprint,
        model_fingerprint=message.model_fingerprint,
        max_context=message.max_context,
        max_sessions=message.max_sessions,
        max_block=message.max_block,
        max_append=message.max_append,
        device=message.device,
        precision=message.precision,
        version=message.version,
        protocol_version=message.protocol_version,
        incarnation=message.incarnation,
        node=message.node,
        eos_token_ids=tuple(message.eos_token_ids),
        default_sampling=decode_sampling(message.default_sampling) if message.HasField("default_sampling") else None,
        draft_vocab_size=message.draft_vocab_size,
        step_profile_us=tuple(message.step_profile_us),
        threads=message.threads,
    )


def vocabulary_fingerprint(vocabulary: Sequence[bytes]) -> str:
    """Hash of an id-to-token map: SHA-256 over each token's length (4 bytes, little-endian) and bytes. No tokens: empty string."""
    if not vocabulary:
        return ""
    digest = hashlib.sha256()
    for token in vocabulary:
        digest.update(len(token).to_bytes(4, "little"))
        digest.update(token)
    return digest.hexdigest()


def compare_vocabularies(
    target_name: str, target_vocabulary: Sequence[bytes], draft_name: str, draft_vocabulary: Sequence[bytes]
) -> None:
    """Raises VocabularyMismatch naming both models and the first id that differs. Padding (ids past one's end, or without a
    token) may differ."""
    for index in range(max(len(target_vocabulary), len(draft_vocabulary))):
        ours = target_vocabulary[index] if index < len(target_vocabulary) else b""
        theirs = draft_vocabulary[index] if index < len(draft_vocabulary) else b""
        if ours and theirs and ours != theirs:
            raise VocabularyMismatch(
                f"vocabularies differ first at id {index}: {target_name} has {ours.decode(errors='replace')!r}, "
                f"{draft_name} has {theirs.decode(errors='replace')!r}"
            )
    if target_vocabulary and draft_vocabulary:
        shared = sum(1 for a, b in zip(target_vocabulary, draft_vocabulary, strict=False) if a and b)
        if shared < min(len(target_vocabulary), len(draft_vocabulary)) // 2:
            raise VocabularyMismatch(f"{target_name} and {draft_name} share only {shared} token ids")
