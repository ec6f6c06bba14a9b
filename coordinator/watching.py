"""Who watches this coordinator: what the settings and the standard OTEL variables ask for, and nothing else."""

from __future__ import annotations

import logging

from coordinator.config import CoordinatorConfig
from coordinator.driver import Driver
from coordinator.metrics import CoordinatorMetrics
from coordinator.observe import Observer, Observers
from coordinator.tracing import RequestTracing
from specwire.telemetry import SERVICES, setup_tracing

log = logging.getLogger(__name__)


class Watching:
    """Metrics and spans of one coordinator, from its start to its end."""

    def __init__(self, config: CoordinatorConfig, host: str) -> None:
        """Opens /metrics. Raises InvalidArgument when its port is taken."""
        observers: list[Observer] = []
        self.metrics_port: int | None = None
        self._metrics: CoordinatorMetrics | None = None
        if config.metrics_port is not None:
            self._metrics = CoordinatorMetrics(config.vllm_metric_names)
            self.metrics_port = self._metrics.serve(host, config.metrics_port)
            log.info("metrics at http://%s:%d/metrics", host, self.metrics_port)
            observers.append(self._metrics)
        off = config.trace_detail == "off"
        self._spans = None if off else setup_tracing(SERVICES["coordinator"], config.name)
        if self._spans is not None:
            observers.append(RequestTracing(self._spans, rounds=config.trace_detail == "round"))
        self.observers = Observers(observers)

    def read(self, driver: Driver) -> None:
        """Whose counters /metrics shows."""
        if self._metrics is not None:
            self._metrics.watch(driver)

    def close(self) -> None:
        """Sends the last spans and closes /metrics; takes at most a few seconds, whatever the collector does. Blocks."""
        if self._metrics is not None:
            self._metrics.close()
        if self._spans is not None:
            self._spans.close()
