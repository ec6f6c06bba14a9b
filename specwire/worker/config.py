"""What both workers can be told."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specwire.lm.load import ModelConfig
from specwire.wire.rpc import check_bind, split_address
from specwire.worker.shares import check_budget

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
"""A time-out: longer than nothing, at most a day."""

Name = Annotated[str, Field(min_length=1, max_length=200)]


class WorkerConfig(BaseModel):
    """Fields of both workers."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: Name
    """Name in the topology. A worker that registers under a name replaces the former holder of it."""
    bind: str = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free one. Anything but loopback needs `insecure`."""
    advertise: str | None = None
    """host or host:port at which the coordinator reaches this worker. Default: what it is bound to."""
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    coordinator: str | None = None
    """host:port of the coordinator to register with. Default: wait to be called."""
    model: ModelConfig = ModelConfig()
    """Which model, see specwire/lm/load.py: model, device, precision, max_context, max_sessions, max_block, threads ..."""
    token_budget: int = Field(default=512, ge=1, le=1_000_000)
    """Rows of one step. More: prompts are read faster; fewer: running sessions wait less behind them. At least
    4 x (max_block + 1 + 8)."""
    max_step_sessions: int = Field(default=64, ge=2, le=65_536)
    """Sessions of one step."""
    max_append: int = Field(default=4096, ge=1, le=10_000_000)
    """Most tokens one task may append; the coordinator splits longer texts."""
    max_lease_s: Seconds = 60.0
    """Upper limit for the lease that a coordinator asks for: how long sessions outlive their stream."""
    idle_s: Seconds = 600.0
    """A session nobody spoke of for so long is dropped, should its close have been lost; it costs a replay at most."""
    hang_s: Seconds = 60.0
    """A step that takes longer makes the worker unhealthy."""
    drain_s: Seconds = 10.0
    """After SIGTERM: time for tasks at hand to be answered."""
    prefix_caching: bool = True
    """A prompt that begins like an earlier one is read from where they part. false: every prompt is read whole, for instance where
    one user must not learn from the time of an answer what another has asked."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Port of /metrics on the bound host; 0 picks one. Default: none."""
    profile: bool = True
    """Measure steps of 1, 2, 4 and 8 rows at start and tell the coordinator."""

    @model_validator(mode="after")
    def _agrees(self) -> WorkerConfig:
        check_bind(self.bind, self.insecure)
        if self.coordinator is not None:
            split_address(self.coordinator, "coordinator")
        check_budget(self.token_budget, self.model.max_block + 1)
        return self
