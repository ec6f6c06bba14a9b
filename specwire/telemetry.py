"""Every span, attribute and metric of Specwire, with unit and meaning; and the switch that turns tracing on.

Law. A name that is not in these tables is not emitted, and `docs/telemetry.md` shows these tables; a test holds both. Metrics
are raw counters, gauges and histograms: rates and means are queries. Durations in attributes are whole microseconds, as in the
protocol, so that a span and a request's final event can be compared; durations of metrics are seconds, as Prometheus has it.
Names begin with `specwire.` (attributes) and `specwire:` (metrics), but where the OpenTelemetry conventions name the thing, their
name is used, and where vLLM counts the same thing, its name follows our prefix, so that existing dashboards need a prefix only.

Nothing here imports OpenTelemetry. Prompts and answers are never recorded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from specwire.spans import SpanSink

log = logging.getLogger(__name__)

SERVICES = {"coordinator": "specwire-coordinator", "draft": "specwire-draft", "target": "specwire-target"}
"""Service names in traces, by role."""

GENERATE, ROUND = "generate", "round"
PROPOSE, VERIFY = "draft.propose", "target.verify"
COMPUTE = {"draft": "draft.compute", "target": "target.compute"}
STEP = {"draft": "draft.step", "target": "target.step"}

FIRST_ROUNDS, ONE_ROUND_IN, MAX_ROUNDS = 64, 16, 256
"""At detail `round`: the first so many rounds have spans, then one in so many, and no request has more than so many."""


@dataclass(frozen=True, slots=True)
class SpanName:
    """A span."""

    name: str
    role: str
    """Of the service that makes it, see SERVICES."""
    kind: str
    parent: str
    """Empty: a root."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of one or more spans."""

    name: str
    unit: str
    spans: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. Counters end in _total when they are read."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    unit: str
    labels: tuple[str, ...]
    meaning: str
    vllm: bool = False
    """vLLM has it under the same name behind `vllm:`."""


# One line a name. Spans: name | service | kind | parent | meaning.
_SPANS = """
generate | coordinator | server | the client's | A request, from its arrival to its one end.
round | coordinator | internal | generate | From the plan of a round to its verdict applied.
draft.propose | coordinator | client | round | The draft's task ready to its block taken up, or given up.
target.verify | coordinator | client | round | The round's first task for the target ready to the verdict taken up.
draft.compute | draft | server | draft.propose | The task's first engine step to the end of its last.
target.compute | target | server | target.verify | The same; one per prompt chunk and one for the block.
draft.step | draft | internal | | An engine step, linked to the compute span of every traced task in it.
target.step | target | internal | | The same at the target.
"""

# Attributes: name | unit | spans | meaning. "calls" are draft.propose and target.verify; "compute" and "step" those of both roles.
_ATTRIBUTES = """
gen_ai.operation.name | | generate | chat or text_completion.
gen_ai.provider.name | | generate | specwire.
gen_ai.request.model | | generate | The model as told to the client.
gen_ai.request.max_tokens | tokens | generate | Token limit in force.
gen_ai.request.temperature | | generate | In force, the model's default filled in; 0 is greedy.
gen_ai.request.top_k | tokens | generate | In force; 0: no limit.
gen_ai.request.top_p | | generate | In force; 1: no limit.
gen_ai.request.seed | | generate | In force; absent where it does not fit into 63 bits, see specwire.seed.
gen_ai.usage.input_tokens | tokens | generate | Prompt.
gen_ai.usage.output_tokens | tokens | generate | Generated, the end token included.
gen_ai.response.finish_reasons | | generate | stop or length; absent unless finished.
rpc.system.name | | generate calls | grpc.
rpc.method | | generate calls | Full method name.
rpc.response.status_code | | generate | OK, CANCELLED, or the code of the error.
error.type | | generate round calls compute step | Class or cause of what went wrong; absent: nothing did.
specwire.request_id | | generate | Given by the client or chosen.
specwire.seed | | generate | In force, decimal, all 64 bits; repeat it to get the same answer.
specwire.law | | generate | How blocks are judged: shared_noise or rejection.
specwire.method | | generate | Where guesses may come from: auto, draft_model or ngram.
specwire.min_p | | generate | In force; 0: no limit.
specwire.outcome | | generate round | finished, failed, cancelled or refused; on a round: what cut it short.
specwire.rounds | rounds | generate | Verify rounds.
specwire.rounds_traced | rounds | generate | Rounds that have spans.
specwire.drafts | rounds | generate | Rounds with a block.
specwire.drafted | tokens | generate round calls compute | Proposed tokens.
specwire.accepted | tokens | generate round target.verify target.compute | Proposed tokens that stand; no correction, no bonus.
specwire.committed | tokens | round | Tokens added to the answer, correction or bonus included.
specwire.acceptance_rate | | generate | accepted / drafted; absent where nothing was drafted.
specwire.mean_acceptance_length | tokens | generate | 1 + accepted / drafts; absent where nothing was drafted.
specwire.drafted_by_ngram | tokens | generate | Of drafted, by n-gram lookup.
specwire.accepted_by_ngram | tokens | generate | Of accepted, by n-gram lookup.
specwire.fallbacks | rounds | generate | Rounds that went on without the draft.
specwire.fallback | | round | Why this round went on without the draft; absent: it did not.
specwire.round | | round | Number of the round, from 0.
specwire.block_source | | round | draft_model, ngram or none.
specwire.worker | | calls compute step | The worker's name in the topology.
specwire.wait_us | us | generate calls | Coordinator: ready but not written, received but not taken up.
specwire.transfer_us | us | calls | Written to received, less the worker's residence. Never negative.
specwire.queue_us | us | calls compute | Waiting for the engine.
specwire.compute_us | us | calls compute step | Engine work: prepare, forward, sample. On a step: forward alone.
specwire.overhead_us | us | calls | Parsing and answering at the worker.
specwire.draft.compute_us | us | generate | Draft's engine work on the request's path.
specwire.draft.queue_us | us | generate | Waiting for the draft's engine.
specwire.draft.overhead_us | us | generate | Parsing and answering at the draft.
specwire.draft.transfer_us | us | generate | Link to the draft and back. Never negative.
specwire.target.compute_us | us | generate | Target's engine work on the request's path.
specwire.target.queue_us | us | generate | Waiting for the target's engine.
specwire.target.overhead_us | us | generate | Parsing and answering at the target.
specwire.target.transfer_us | us | generate | Link to the target and back. Never negative.
specwire.total_us | us | generate | The request, from arrival to end.
specwire.time_to_first_token_us | us | generate | From arrival; 0 where there was none.
specwire.admission_us | us | generate | Until admitted.
specwire.tokenize_us | us | generate | Tokenizing and templating.
specwire.coordinator_us | us | generate | The coordinator's own work.
specwire.client_us | us | generate | Blocked on a client that reads slowly.
specwire.recovery_us | us | generate | Waiting for a lost worker, or for a draft that gave nothing.
specwire.unattributed_us | us | generate | Total less all parts.
specwire.hidden_us | us | generate | Draft time beside target work, so not on the path.
specwire.wire_bytes | By | generate | Protobuf payload to and from both workers.
specwire.clock | | compute step | Host whose clock placed the span. Clocks of hosts are not compared.
specwire.steps | steps | compute | Engine steps the task took part in.
specwire.step | | step | Number of the step on this worker.
specwire.rows | rows | compute step | Rows of the model: the task's, or the step's without prefill_rows.
specwire.prefill_rows | rows | step | Rows of prompts and replays.
specwire.sessions | | step | Sessions in the step, traced or not.
specwire.prepare_us | us | step | Building the batch.
specwire.sample_us | us | step | Turning scores into tokens or verdicts.
"""

# Metrics: name | kind | unit | labels | meaning. A star: vLLM has it under this name behind `vllm:`.
_METRICS = """
spec_decode_num_drafts * | counter | rounds | | Rounds with a block.
spec_decode_num_draft_tokens * | counter | tokens | | Proposed tokens that were judged.
spec_decode_num_accepted_tokens * | counter | tokens | | Of these, tokens that stand; no correction, no bonus.
spec_decode_num_accepted_tokens_per_pos * | counter | tokens | position | Accepted by position in the block, from 0.
draft_tokens_by_source | counter | tokens | source | Proposed tokens that were judged: draft_model or ngram.
accepted_tokens_by_source | counter | tokens | source | Of these, tokens that stand.
rounds | counter | rounds | | Verify rounds, plain ones included.
fallbacks | counter | rounds | cause | Rounds that went on without the draft.
draft_guesses | counter | blocks | result | Blocks drafted ahead of a verdict: hit, or miss.
replays | counter | replays | cause | Times a worker had to be told the text again.
stale_answers | counter | answers | | Workers' answers that matched nothing and changed nothing.
requests | counter | requests | outcome | finished, failed, cancelled, refused.
generation_tokens * | counter | tokens | | Tokens generated.
prompt_tokens * | counter | tokens | | Prompt tokens of the requests that were taken.
wire_bytes | counter | bytes | | Protobuf payload to and from workers, of finished rounds.
num_requests_running * | gauge | requests | | Being generated.
num_requests_waiting * | gauge | requests | | Waiting for admission.
sessions | gauge | sessions | worker role | Bound to the worker: its cache slots in use, we believe.
cache_slots | gauge | sessions | worker role | Sessions the worker can hold.
cache_tokens | gauge | tokens | worker role | Tokens that they can have together.
ready | gauge | | worker role | 1: it gets new work.
link_round_trip_seconds | gauge | s | worker role | Median of the last echoes.
time_to_first_token_seconds * | histogram | s | | Arrival to first token.
time_per_output_token_seconds | histogram | s | | One a request: first chunk to last, by the tokens after the first.
inter_token_latency_seconds | histogram | s | | One a token: the gap before its chunk, by the chunk's tokens.
inter_chunk_latency_seconds | histogram | s | | One a chunk: the gap before it, whatever it holds.
e2e_request_latency_seconds * | histogram | s | | Arrival to end, of requests that finished.
request_queue_time_seconds * | histogram | s | | Arrival to admission, tokenizing not counted.
draft_seconds | histogram | s | | A block: its task ready to the block taken up.
verify_seconds | histogram | s | | A verdict: its task ready to the verdict taken up.
transfer_seconds | histogram | s | link | Of those, the link to draft or target and back.
compute_seconds | histogram | s | link | Of those, the worker's engine work.
worker_steps | counter | steps | | Engine steps.
worker_failed_steps | counter | steps | | Engine steps whose model raised.
worker_rows | counter | rows | | Rows computed for verification, drafting or decoding.
worker_prefill_rows | counter | rows | | Rows of prompts and replays computed.
worker_reused_tokens | counter | tokens | | Tokens of prompts not computed, since the cache held them for another session.
worker_tasks | counter | tasks | outcome | Tasks answered.
worker_bad_laws | counter | tasks | | Tasks that failed on a row of scores that is no law.
worker_proposed_tokens | counter | tokens | | Tokens of blocks judged (target) or made (draft).
worker_accepted_tokens | counter | tokens | | Tokens of judged blocks that stand.
worker_compute_seconds | histogram | s | | Forward time of a step.
worker_step_seconds | histogram | s | | Prepare, forward and sample time of a step.
worker_queue_seconds | histogram | s | | Time a task waited for the engine, over all its steps.
worker_sessions | gauge | sessions | | Sessions that hold a cache slot.
worker_waiting_tasks | gauge | tasks | | Tasks that wait for a step.
"""

_GROUPS = {"calls": (PROPOSE, VERIFY), "compute": tuple(COMPUTE.values()), "step": tuple(STEP.values())}


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def _attribute(name: str, unit: str, spans: str, meaning: str) -> Attribute:
    places = tuple(place for word in spans.split() for place in _GROUPS.get(word, (word,)))
    return Attribute(name, unit, places, meaning)


def _metric(name: str, kind: str, unit: str, labels: str, meaning: str) -> Metric:
    return Metric(f"specwire:{name.rstrip(' *')}", kind, unit, tuple(labels.split()), meaning, name.endswith("*"))


SPANS = {row[0]: SpanName(*row) for row in _rows(_SPANS)}
ATTRIBUTES = {row[0]: _attribute(*row) for row in _rows(_ATTRIBUTES)}
METRICS = {metric.name: metric for metric in (_metric(*row) for row in _rows(_METRICS))}


def setup_tracing(service: str, instance: str = "", environ: Mapping[str, str] | None = None) -> SpanSink | None:
    """Spans of this process, if the standard OTEL variables ask for them; else None. Call it in the process that makes the
    spans, after it was started. Never raises: what cannot be used is told once, and serving goes on without spans."""
    endpoint = _endpoint(os.environ if environ is None else environ)
    if endpoint is None:
        return None
    try:
        from specwire.tracing import otlp_spans
    except ImportError as error:
        log.warning("OTEL variables ask for spans, but %s is missing: pip install 'specwire[otel]'", error.name)
        return None
    try:
        return otlp_spans(service, instance, endpoint)
    except Exception as error:
        log.warning("no spans: the OTEL variables cannot be used (%s)", error)
        return None


def _endpoint(environ: Mapping[str, str]) -> str | None:
    """Where the variables want spans to go. None: nowhere."""

    def get(*names: str) -> str:
        return next((value for name in names if (value := environ.get(name, "").strip())), "")

    if get("OTEL_SDK_DISABLED").lower() == "true":
        return None
    endpoint = get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exporters = [name.strip().lower() for name in get("OTEL_TRACES_EXPORTER").split(",") if name.strip()]
    if "none" in exporters or not (endpoint or exporters):
        return None
    if exporters and "otlp" not in exporters:
        log.warning("no spans: OTEL_TRACES_EXPORTER=%s, and only otlp is known", ",".join(exporters))
        return None
    protocol = get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol != "grpc":
        log.warning("no spans: OTEL_EXPORTER_OTLP_PROTOCOL=%s, and only grpc is known", protocol)
        return None
    return endpoint or "http://localhost:4317"
