"""Whether workers and tokenizer mean the same by a token id. Maps are compared, not sizes; padding may differ. A draft must also be
able to read whatever its target may say; what only the draft can say is cut off its blocks (`coordinator.ledger`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc.aio

from coordinator.fleet import Fleet, Standing, Worker
from coordinator.text import Tokenizer
from specwire.law.errors import Unavailable, VocabularyMismatch
from specwire.v1 import draft_pb2_grpc, target_pb2_grpc, types_pb2
from specwire.wire import rpc
from specwire.wire.info import compare_vocabularies

log = logging.getLogger(__name__)


class Pairing:
    """Compares vocabularies by fingerprint, and by entry only where fingerprints differ."""

    def __init__(self, fleet: Fleet, tokenizer: Tokenizer | None, tokenizer_name: str) -> None:
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._tokenizer_name = tokenizer_name
        self._agreed: set[tuple[str, str]] = set()

    async def check(self, worker: Worker) -> None:
        """Raises VocabularyMismatch when the worker does not fit the tokenizer or the workers it would be paired with. A draft
        that does not fit a new target is refused instead of the target."""
        mine = worker.info.vocab_fingerprint
        if self._tokenizer is not None and worker.info.role == "target":
            await self._compare(
                f"tokenizer {self._tokenizer_name}",
                self._tokenizer.fingerprint(),
                self._tokenizer.vocabulary(),
                f"target {worker.name} ({worker.info.model})",
                worker,
            )
        others = "draft" if worker.info.role == "target" else "target"
        for other in list(self._fleet.of(others)):
            if other.standing is Standing.REFUSED or other.info.vocab_fingerprint == mine:
                continue
            target, draft = (worker, other) if worker.info.role == "target" else (other, worker)
            try:
                vocabulary = await fetch_vocabulary(target)
                await self._compare(
                    f"target {target.name} ({target.info.model})",
                    target.info.vocab_fingerprint,
                    vocabulary,
                    f"draft {draft.name} ({draft.info.model})",
                    draft,
                )
            except VocabularyMismatch as error:
                if draft is worker:
                    raise
                log.error("refused %s: %s", draft.name, error)
                self._fleet.refuse(draft, str(error))
            except Unavailable as error:
                log.warning("cannot compare %s with %s yet: %s", worker.name, other.name, error)

    async def _compare(
        self, name: str, fingerprint: str, vocabulary: Sequence[bytes], worker_name: str, worker: Worker
    ) -> None:
        theirs = worker.info.vocab_fingerprint
        if fingerprint == theirs or not theirs or (fingerprint, theirs) in self._agreed:
            return
        own = await fetch_vocabulary(worker)
        compare_vocabularies(name, vocabulary, worker_name, own)
        if worker.info.role == "draft":
            check_reads_all(name, vocabulary, worker_name, own)
        self._agreed.add((fingerprint, theirs))


def check_reads_all(
    target_name: str, target_vocabulary: Sequence[bytes], draft_name: str, draft_vocabulary: Sequence[bytes]
) -> None:
    """Raises VocabularyMismatch for a token of the target past the draft's end: from the first such token of a text on, the draft
    would refuse every task, and nobody be told. Padding is no token (b"")."""
    for index in range(len(draft_vocabulary), len(target_vocabulary)):
        if target_vocabulary[index]:
            raise VocabularyMismatch(
                f"{draft_name} ends at id {len(draft_vocabulary) - 1}, and {target_name} has "
                f"{target_vocabulary[index].decode(errors='replace')!r} at id {index}: the draft could not read a text with it. "
                "If its model has a row for that id, set the draft's tokenizer to the target's"
            )


async def fetch_vocabulary(worker: Worker) -> list[bytes]:
    """Asks a worker for its vocabulary. Raises Unavailable."""
    async with rpc.open_channel(worker.address) as channel:
        stub = (target_pb2_grpc.TargetStub if worker.info.role == "target" else draft_pb2_grpc.DraftStub)(channel)
        try:
            response = await stub.Vocabulary(types_pb2.VocabularyRequest(), timeout=10.0)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{worker.name} did not tell its vocabulary: {error.details()}") from error
        return list(response.tokens)
