"""Specwire: speculative decoding with draft and target apart.

Exports lazily, so that importing one room loads nothing of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specwire.client import Client, SyncClient

__version__ = "0.1.0"

__all__ = ["Client", "SyncClient", "__version__"]


def __getattr__(name: str) -> Any:
    if name in {"Client", "SyncClient"}:
        from specwire import client

        return getattr(client, name)
    raise AttributeError(f"module 'specwire' has no attribute {name!r}")
