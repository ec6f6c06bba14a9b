"""Steps of shapes that never change, so that a GPU can repeat them from a recording (a CUDA graph) without a Python call between.

A layer is some twenty kernels of a few microseconds, and starting one takes as long; recorded, a step of a small model takes what
its kernels take. What is recorded is the body, from token ids to hidden states. The head follows as it is, for the rows that are
wanted: recorded, it would compute scores nobody asked for, and each recording would keep room for them.

Law. Same function as `FusedBody` over the same cache, up to rounding. A step is a rectangle: row i is slot i, rows are as wide as
the longest feed, and both are rounded up to a shape that was recorded; tokens that stand for nothing go to the spare cell
(feeds.py). What does not fit a shape is not taken, and runs as ever. A recording reads and writes the addresses that it was made
with, so the cache and the weights must stay where they are. On a CPU the same code runs without recording: tests hold it to the
law there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specwire.lm.feeds import Group, plan_fixed
from specwire.lm.fused import FusedBody
from specwire.lm.kv_slots import KVSlots
from specwire.lm.port import Feed

LEAST_CONTEXT = 256
"""Cells that the smallest shape reads; the next ones read twice as many."""
WARM_UP = 2
"""Runs before recording: libraries make their plans and take their memory then."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recording is made for."""

    rows: int
    """Slots 0 .. rows - 1."""
    width: int
    """Tokens of a row."""
    context: int
    """Cells of a slot that are read."""


@dataclass(slots=True)
class _Step:
    """One shape, ready to run: what goes in, what comes out, and how."""

    inputs: torch.Tensor
    """[4, rows * width] int64: tokens, positions, cells, slots."""
    states: torch.Tensor
    """[rows * width, hidden], of the last run."""
    run: Callable[[], None]


class StaticSteps:
    """The recordings of one model. A shape is recorded when it is met first."""

    def __init__(self, body: FusedBody, kv: KVSlots, widest: int) -> None:
        """`widest`: tokens of the longest row that is taken; others are prompts, which keep a GPU busy as they are."""
        self._body, self._kv = body, kv
        self._widths = _up_to(widest, 1)
        self._rows = _up_to(kv.num_slots, 1)
        self._contexts = _up_to(kv.capacity, LEAST_CONTEXT)
        self._steps: dict[Shape, _Step] = {}
        self._pool = torch.cuda.graph_pool_handle() if kv.device.type == "cuda" else None

    def __repr__(self) -> str:
        return f"StaticSteps(recorded={len(self._steps)} widths={self._widths} rows={self._rows})"

    def shape(self, feeds: Sequence[Feed]) -> Shape | None:
        """The smallest that holds them; None: there is none."""
        width = max(len(feed.tokens) for feed in feeds)
        if width > self._widths[-1]:
            return None
        last_slot = max(feed.slot for feed in feeds)
        end = max(feed.start + len(feed.tokens) for feed in feeds)
        return Shape(_least(self._rows, last_slot + 1), _least(self._widths, width), _least(self._contexts, end))

    def states(self, feeds: Sequence[Feed], shape: Shape) -> torch.Tensor:
        """Runs a step of that shape. Hidden states of all its rows, [rows * width, hidden], until the next step; which of them are
        wanted the cache knows, in the order of feeds."""
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = self._prepare(shape)
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

        if self._pool is None:
            states = body()

            def again() -> None:
                states.copy_(body())

            return _Step(inputs, states, again)
        beside = torch.cuda.Stream(self._kv.device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._kv.device))
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                body()
        torch.cuda.current_stream(self._kv.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            states = body()
        return _Step(inputs, states, graph.replay)


def _up_to(last: int, first: int) -> list[int]:
    """`first`, twice as many, and so on; the end is `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _least(sizes: Sequence[int], needed: int) -> int:
    return next(size for size in sizes if size >= needed)
