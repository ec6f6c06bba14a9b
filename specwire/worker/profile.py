"""How long a pass takes, measured once at start: what a controller knows before the first request."""

from __future__ import annotations

import logging

from specwire.lm.port import Feed, LanguageModel
from specwire.wire.stopwatch import now_ns

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8)
REPEATS = 6
CONTEXT = 64


def step_profile(model: LanguageModel, max_rows: int) -> tuple[int, ...]:
    """Microseconds of the fastest of some passes of 1, 2, 4, 8 rows of one sequence with a short context; stops at `max_rows`
    or the model's capacity. The fastest, since other services load and are measured beside this one. Empty when the model
    fails: a fault shows in serving, where it is somebody's task."""
    context = max(0, min(CONTEXT, model.capacity - max(ROWS)))
    profile: list[int] = []
    try:
        if context:
            model.forward([Feed(0, 0, [0] * context, 0)])
        for rows in ROWS:
            if rows > max(1, max_rows) or context + rows > model.capacity:
                break
            times = [_time(model, context, rows) for _ in range(REPEATS + 1)]
            profile.append(max(1, min(times[1:]) // 1000))
    except Exception:
        log.exception("the step profile could not be measured")
        return ()
    return tuple(profile)


def _time(model: LanguageModel, context: int, rows: int) -> int:
    began = now_ns()
    model.forward([Feed(0, context, [0] * rows, rows)])
    model.synchronize()
    return now_ns() - began
