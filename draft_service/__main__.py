"""`python -m draft_service --config FILE [--set key=value ...]`: the draft as a process."""

from __future__ import annotations

import sys

from draft_service.config import DraftConfig
from draft_service.role import DRAFT
from specwire.worker.main import main

if __name__ == "__main__":
    sys.exit(main(DRAFT, DraftConfig))
