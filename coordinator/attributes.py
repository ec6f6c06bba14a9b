"""What the coordinator's spans say: a few dozen attributes, always the same ones, and nothing of what was asked or answered.

Every name is in `specwire.telemetry`.
"""

from __future__ import annotations

from coordinator.observe import Call
from coordinator.session import Session
from specwire.law.errors import InvalidArgument, SpecwireError
from specwire.spans import Value
from specwire.v1 import inference_pb2 as pb
from specwire.wire.rpc import status_of
from specwire.wire.stopwatch import Passage

INFERENCE_METHOD = "specwire.v1.Inference/Generate"
DRAFT_METHOD = "specwire.v1.Draft/Propose"
TARGET_METHOD = "specwire.v1.Target/Verify"
MAX_SIGNED = 2**63
"""OTLP integers are signed; half of all seeds are not below this."""

_TIMING = tuple(field.name for field in pb.Timing.DESCRIPTOR.fields)
_TIMING_ATTRIBUTES = {
    name: f"specwire.{name.replace('draft_', 'draft.').replace('target_', 'target.')}" for name in _TIMING
}


def call_attributes(method: str, worker: str, way: Passage | None) -> dict[str, Value]:
    """Of a call to a worker."""
    attributes: dict[str, Value] = {"rpc.system.name": "grpc", "rpc.method": method, "specwire.worker": worker}
    if way is not None:
        attributes |= {
            "specwire.wait_us": way.wait_us,
            "specwire.transfer_us": way.transfer_us,
            "specwire.queue_us": way.queue_us,
            "specwire.compute_us": way.compute_us,
            "specwire.overhead_us": way.overhead_us,
        }
    return attributes


def request_attributes(call: Call, request_id: str, outcome: str) -> dict[str, Value]:
    """Of every request."""
    return {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "specwire",
        "gen_ai.request.model": call.model,
        "rpc.system.name": "grpc",
        "rpc.method": INFERENCE_METHOD,
        "specwire.request_id": request_id,
        "specwire.outcome": outcome,
    }


def add_sampling(attributes: dict[str, Value], session: Session) -> None:
    """What was asked for, as it is in force."""
    spec, sampling = session.spec, session.spec.sampling
    attributes |= {
        "gen_ai.request.max_tokens": spec.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.top_p": sampling.top_p,
        "specwire.min_p": sampling.min_p,
        "specwire.seed": str(spec.seed),
        "specwire.law": spec.law.value,
        "specwire.method": spec.method,
        "gen_ai.usage.input_tokens": len(spec.prompt),
        "gen_ai.usage.output_tokens": session.generated,
    }
    if spec.seed < MAX_SIGNED:
        attributes["gen_ai.request.seed"] = spec.seed


def add_sums(attributes: dict[str, Value], session: Session) -> None:
    """The numbers of the final event."""
    tally, timing = session.tally, session.clock.timing()
    attributes |= {
        "specwire.rounds": tally.rounds,
        "specwire.drafts": tally.drafts,
        "specwire.drafted": tally.drafted,
        "specwire.accepted": tally.accepted,
        "specwire.drafted_by_ngram": tally.drafted_by_ngram,
        "specwire.accepted_by_ngram": tally.accepted_by_ngram,
        "specwire.fallbacks": tally.fallbacks,
    }
    if tally.drafted:
        attributes["specwire.acceptance_rate"] = tally.accepted / tally.drafted
        attributes["specwire.mean_acceptance_length"] = 1 + tally.accepted / tally.drafts
    for name, attribute in _TIMING_ATTRIBUTES.items():
        attributes[attribute] = getattr(timing, name)


def add_error(attributes: dict[str, Value], outcome: str, error: SpecwireError | None) -> str | None:
    """How the call went. Returns what the span's status says; None: nothing went wrong."""
    if outcome == "finished":
        attributes["rpc.response.status_code"] = "OK"
        return None
    if error is None:
        attributes["rpc.response.status_code"], attributes["error.type"] = "CANCELLED", outcome
        return outcome
    code, text = status_of(error)
    if isinstance(error, InvalidArgument):
        text = f"{error.field} must be {error.limit}"  # without the value, which is the client's text
    attributes["rpc.response.status_code"], attributes["error.type"] = code.name, type(error).__name__
    return f"{outcome}: {text}"
