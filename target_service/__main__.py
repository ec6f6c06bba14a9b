"""`python -m target_service --config FILE [--set key=value ...]`: the target as a process."""

from __future__ import annotations

import sys

from specwire.worker.main import main
from target_service.config import TargetConfig
from target_service.role import TARGET

if __name__ == "__main__":
    sys.exit(main(TARGET, TargetConfig))
