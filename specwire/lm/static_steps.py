"""Steps of shapes that never change, so that a GPU can repeat them from a recording (a CUDA graph) without a Python call between.

A layer is some twenty kernels of a few microseconds, and starting one takes as long; recorded, a step of a small model takes what
its kernels take. What is recorded is the body, from token ids to hidden states. The head follows as it is, for the rows that are
wanted: recorded, it would compute scores nobody asked for, and each recording would keep room for them.

Law. Same function as `FusedBody` over the same cache, up to rounding. A step is a rectangle: row i is slot i, rows are as wide as
the longest feed, and it runs in the smallest recorded shape that holds it; tokens that stand for nothing go to the spare cell
(feeds.py). What no shape holds, or only one with too many of those, is not taken and runs as ever. All recordings are made at
loading: made while somebody waits, one would take as long as many steps. A recording reads and writes the addresses that it was
made with, so the cache and the weights must stay where they are; and it reads cells behind a row's own, so nothing that is not a
number may stand in the cache (`KVSlots.keep_numbers`). On a CPU the same code runs without recording: tests hold it to the law
there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.lm.feeds import Group, plan_fixed
from specwire.lm.fused import FusedBody
from specwire.lm.kv_slots import KVSlots
from specwire.lm.port import Feed

log = logging.getLogger(__name__)

LEAST_CONTEXT = 256
"""Cells that the smallest shape reads; the next ones read twice as many."""
MOST_IDLE = 256
"""Tokens of a rectangle that may stand for nothing: so many cost a GPU about what starting a step's kernels one by one does."""
WARM_UP = 2
"""Runs before recording: libraries make their plans and take their memory then."""
RECORDING_S = 10.0
"""What recording may take in all; the largest shapes are the last."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recording is made for."""

    rows: int
    """Slots 0 .. rows - 1."""
    width: int
    """Tokens of a row."""
    context: int
    """Cells of a slot that are read."""

    @property
    def tokens(self) -> int:
        """That are computed."""
        return self.rows * self.width


@dataclass(slots=True)
class _Step:
    """One shape, ready to run: what goes in, what comes out, and how."""

    inputs: torch.Tensor
    """[4, rows * width] int64: tokens, positions, cells, slots."""
    states: torch.Tensor
    """[rows * width, hidden], of the last run."""
    run: Callable[[], None]


class StaticSteps:
    """The recordings of one model."""

    def __init__(self, body: FusedBody, kv: KVSlots, widest: int) -> None:
        """`widest`: tokens of the longest row that is taken; others are prompts, which keep a GPU busy as they are."""
        self._body, self._kv = body, kv
        self._widest = widest
        self._steps: dict[Shape, _Step] = {}
        self._gpu = kv.device.type == "cuda"
        if self._gpu:  # one for all of them: they share memory, and a library keeps room of its own for each stream
            self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        kv.keep_numbers = True

    def __repr__(self) -> str:
        return f"StaticSteps(shapes={len(self._steps)} widest={self._widest})"

    def record(self, seconds: float = RECORDING_S) -> None:
        """Records steps of all shapes, the smallest first, as long as there is time."""
        kv = self._kv
        shapes = [
            Shape(rows, width, context)
            for context in _up_to(kv.capacity, LEAST_CONTEXT)
            for rows in _up_to(kv.num_slots, 1)
            for width in _up_to(self._widest, 1)
        ]
        give_up = time.monotonic() + seconds
        for shape in shapes:
            if time.monotonic() > give_up:
                break
            try:
                self._steps[shape] = self._prepare(shape)
            except RuntimeError as error:  # no memory for it, or a kernel of this model that cannot be recorded
                log.warning("%d x %d tokens are not recorded: %s", shape.rows, shape.width, _line(error))
                break
        log.info("recorded %d of %d shapes of steps", len(self._steps), len(shapes))

    def shape(self, feeds: Sequence[Feed]) -> Shape | None:
        """The smallest that holds them; None: there is none."""
        lengths = [len(feed.tokens) for feed in feeds]
        rows, width = max(feed.slot for feed in feeds) + 1, max(lengths)
        context = max(feed.start + length for feed, length in zip(feeds, lengths, strict=True))
        most = sum(lengths) + MOST_IDLE
        holding = (
            shape
            for shape in self._steps
            if shape.rows >= rows and shape.width >= width and shape.context >= context and shape.tokens <= most
        )
        return min(holding, key=lambda shape: (shape.tokens, shape.context), default=None)

    def states(self, feeds: Sequence[Feed]) -> torch.Tensor | None:
        """Runs a step. Hidden states of all its rows, [rows * width, hidden], until the next step; which of them are wanted the
        cache knows, in the order of feeds. None, and nothing done: no shape holds them."""
        shape = self.shape(feeds)
        if shape is None:
            return None
        step = self._steps[shape]
        (rectangle,) = plan_fixed(feeds, self._kv.capacity, shape.rows, shape.width)
        for feed in feeds:
            self._kv.open(feed.slot, feed.start, feed.start + len(feed.tokens))
        slots = np.repeat(rectangle.slots, shape.width)
        numbers = (rectangle.tokens.ravel(), rectangle.positions.ravel(), rectangle.cells.ravel(), slots)
        packed = torch.from_numpy(np.concatenate((*numbers, rectangle.wanted))).to(self._kv.device, non_blocking=True)
        step.inputs.view(-1).copy_(packed[: step.inputs.numel()])
        step.run()
        self._kv.wanted = packed[step.inputs.numel() :]
        return step.states

    def _prepare(self, shape: Shape) -> _Step:
        count = shape.rows * shape.width
        inputs = torch.zeros(4, count, dtype=torch.int64, device=self._kv.device)
        inputs[2] = self._kv.capacity  # trial runs write nothing but spare cells
        inputs[3] = torch.arange(shape.rows, device=inputs.device).repeat_interleave(shape.width)
        group = Group(0, (shape.width,) * shape.rows, 0, shape.context, unmasked=False)

        def body() -> torch.Tensor:
            tokens, positions = self._kv.begin_fixed(inputs, group)
            states: torch.Tensor = self._body(tokens, positions, self._kv)
            return states

        if not self._gpu:
            states = body()

            def again() -> None:
                states.copy_(body())

            return _Step(inputs, states, again)
        outside = torch.cuda.current_stream(self._kv.device)
        try:
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    body()
            graph = torch.cuda.CUDAGraph()
            # of this thread alone: what others do on the device meanwhile is none of the recording's business
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                states = body()
        finally:
            torch.cuda.set_stream(outside)  # a recording that fails may leave its own behind
            outside.wait_stream(self._stream)
        return _Step(inputs, states, graph.replay)


def _up_to(last: int, first: int) -> list[int]:
    """`first`, twice as many, and so on; the end is `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
