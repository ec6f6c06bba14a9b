"""Settings of the draft."""

from __future__ import annotations

from pydantic import Field

from specwire.worker.config import Name, WorkerConfig


class DraftConfig(WorkerConfig):
    """Serves a draft model: proposes blocks of tokens, many sessions in one pass. Without `model.model` it serves `table`, a
    built-in model that makes tokens up, for tests. Ends with status 0 after SIGTERM or SIGINT, 2 when it cannot start.

    example: python -m draft_service --set coordinator=127.0.0.1:8470 --set model.model=models/smollm2-draft
    """

    name: Name = "draft-0"
    draft_law_top_m: int = Field(default=32, ge=1, le=65_536)
    """Under `rejection` the draft's law is cut to so many tokens before sampling, and travels: about 6 bytes each."""
