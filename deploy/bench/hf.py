"""Hugging Face transformers as a baseline: `generate`, and assisted generation with the service's own draft.

A process of its own (`specwire.lm.baseline`), so that it has every core and its threads are not the service's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from deploy.bench.workload import Item
from specwire.law.errors import OurFault
from specwire.process import COMPUTES

GENERATE, ASSISTED = "hf generate", "hf assisted"
LINE_LIMIT = 1 << 22


class HuggingFace:
    """The process, from outside. `start` it before use and `stop` it at the end."""

    def __init__(self, target: Mapping[str, Any], draft: Mapping[str, Any] | None) -> None:
        """Model settings as in the workers' configurations."""
        self._settings = [json.dumps(each) for each in (target, draft) if each is not None]
        self._process: asyncio.subprocess.Process | None = None
        self.variants = [GENERATE, ASSISTED][: len(self._settings)]

    async def start(self) -> None:
        """Returns when the models are loaded. Raises OurFault."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specwire.lm.baseline", *self._settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **COMPUTES},
            limit=LINE_LIMIT,
        )
        await self._answer()

    async def ask(self, variant: str, item: Item) -> tuple[tuple[int, ...], list[float], float]:
        """Ids, seconds from the request to each token, and to the end. Greedy."""
        assert self._process is not None
        assert self._process.stdin is not None
        messages = [{"role": "user", "content": item.prompt}]
        asked = {"messages": messages, "max_tokens": item.max_tokens, "assisted": variant == ASSISTED}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        await self._process.stdin.drain()
        found = await self._answer()
        return tuple(found["ids"]), found["arrivals"], found["total_s"]

    async def _answer(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise OurFault(f"transformers ended with status {await self._process.wait()}; what it said is above")
        return json.loads(line)

    async def stop(self) -> None:
        """Ends it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
