"""Where files lie that can be had again: models that were fetched, kernels that were compiled."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """SPECWIRE_CACHE, else the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("SPECWIRE_CACHE") or platformdirs.user_cache_dir("specwire", appauthor=False))
