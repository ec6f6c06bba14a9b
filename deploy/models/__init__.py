"""Models by name: `demo` and `demo-draft` (shipped or converted once into the cache), folders, hub ids.

`fetch` may go online; `resolve` never does. Loads nothing until asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.models.download import fetch
    from deploy.models.progress import Report, bars
    from deploy.models.store import Entry, ModelError, listing, resolve, verify

__all__ = ["Entry", "ModelError", "Report", "bars", "fetch", "listing", "resolve", "verify"]

_HOMES = {"fetch": "download", "Report": "progress", "bars": "progress"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'deploy.models' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"deploy.models.{_HOMES.get(name, 'store')}"), name)
    globals()[name] = value
    return value
