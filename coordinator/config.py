"""The coordinator's settings: frozen, checked once, printed at start."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from specwire.law.errors import InvalidArgument
from specwire.settings import build_config, put_value, read_file
from specwire.wire.rpc import check_bind


class Frozen(pydantic.BaseModel):
    """Unknown keys are refused, values never change."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class SpeculationConfig(Frozen):
    """What a request gets that does not say otherwise."""

    num_speculative_tokens: int | Literal["auto"] = "auto"
    """Block length; 0 is plain decoding; `auto` lets the controller choose round by round."""
    max_num_speculative_tokens: int = pydantic.Field(default=8, ge=1, le=64)
    """Longest block that `auto` considers, and most that a request may ask for."""
    method: Literal["auto", "draft_model", "ngram"] = "auto"
    law: Literal["shared_noise", "rejection"] = "shared_noise"
    schedule: Literal["auto", "synchronous", "rotation", "run_ahead"] = "auto"
    """How sessions share draft and target: in step; in groups that take turns; or with the draft going on from its own guess
    while a block is judged. `auto` compares what they promise. Answers are the same."""
    rotation_groups: int = pydantic.Field(default=2, ge=2, le=8)
    """Groups of a rotation that is asked for; `auto` compares 2 and 3."""
    draft_timeout_ms: int | Literal["auto"] = "auto"
    """How long a round waits for its block. `auto`: four times what it should take, at least 50 ms. Under `rejection` no
    round gives up on a block that may come, since when a block is late could depend on what it holds."""

    @pydantic.field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _count(cls, value: object) -> object:
        return _auto_or_whole(value, 0, 64)

    @pydantic.field_validator("draft_timeout_ms", mode="before")
    @classmethod
    def _timeout(cls, value: object) -> object:
        return _auto_or_whole(value, 1, 600_000)


def _auto_or_whole(value: object, least: int, most: int) -> object:
    if value != "auto" and not (type(value) is int and least <= value <= most):
        raise ValueError(f"auto or a whole number in [{least}, {most}]")
    return value


class CoordinatorConfig(Frozen):
    """Runs the coordinator: the process that clients call, that workers register with, and that moves blocks between draft and
    target. Ends with status 0 after SIGTERM or SIGINT (running requests may finish), 2 when it cannot start.

    example: python -m coordinator --set bind=127.0.0.1:8470 --set tokenizer=models/smollm2
    """

    name: str = "coordinator"
    bind: str = "127.0.0.1:8470"
    """host:port for clients and workers. Port 0: any free one."""
    insecure: bool = False
    """Allows an address that others can reach, without TLS."""
    model_name: str = ""
    """Name told to clients. Empty: the target's."""
    tokenizer: str | None = None
    """Folder with tokenizer.json, or that file. None: clients must send ids."""
    max_running: int = pydantic.Field(default=32, ge=1, le=65_536)
    """Requests generated at a time; never more than the target has cache slots."""
    max_waiting: int = pydantic.Field(default=128, ge=0, le=1_000_000)
    """Requests that may wait for one of those places."""
    default_max_tokens: int = pydantic.Field(default=512, ge=1)
    """Token limit of a request that names none (the context limit applies too)."""
    speculation: SpeculationConfig = SpeculationConfig()
    lease_s: float = pydantic.Field(default=30.0, gt=0, le=3600)
    """How long a worker keeps a session after its stream is lost."""
    heartbeat_s: float = pydantic.Field(default=1.0, gt=0, le=60)
    suspect_after_s: float = pydantic.Field(default=2.0, gt=0, le=600)
    """Silence after which a worker gets no new work."""
    recovery_timeout_s: float = pydantic.Field(default=120.0, gt=0, le=86_400)
    """How long a running request without a deadline waits for a lost target."""
    drain_s: float = pydantic.Field(default=30.0, ge=0, le=3600)
    """How long running requests may take to finish after SIGTERM."""
    client_buffer_tokens: int = pydantic.Field(default=256, ge=1)
    """Tokens a client may be behind before its generation pauses."""
    metrics_port: int | None = pydantic.Field(default=None, ge=0, le=65_535)
    """Port of /metrics on the host of `bind`. 0: any free one. None: off."""
    vllm_metric_names: bool = False
    """Also says under `vllm:` what vLLM has under the same name, for dashboards made for it."""
    trace_detail: Literal["off", "request", "round"] = "request"
    """Spans, where the standard OTEL variables name a collector."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @pydantic.model_validator(mode="after")
    def _together(self) -> CoordinatorConfig:
        """What only two settings together can say. Raises InvalidArgument."""
        check_bind(self.bind, self.insecure)
        count, most = self.speculation.num_speculative_tokens, self.speculation.max_num_speculative_tokens
        if count != "auto" and count > most:
            field = "speculation.num_speculative_tokens"
            raise InvalidArgument(field, count, f"at most max_num_speculative_tokens ({most})")
        return self


def load(path: str | None, overrides: dict[str, Any]) -> CoordinatorConfig:
    """Reads a YAML file (None: defaults) and puts `overrides` (dotted keys) over it. Raises InvalidArgument."""
    values = read_file(path)
    for key, value in overrides.items():
        put_value(values, key, value)
    return build_config(CoordinatorConfig, values)
