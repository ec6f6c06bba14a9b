"""How a process of ours lives on its machine: cores that several share, memory that a step reads, objects that stay."""

from __future__ import annotations

import gc
import os

COMPUTES = {
    # A thread without work sleeps, so that it does not take the time of whoever has some; but not at once: a step is hundreds of
    # short parallel pieces, and to wake a thread for each costs a tenth of the step. 20,000 turns are under a millisecond.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "20000",
    # Weights and caches lie in large pages where the system allows it (Linux: not `never` in transparent_hugepage/enabled): to find
    # 70,000 small ones in each step costs a twentieth of it.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Environment of a process that computes."""


def prepare_to_compute() -> None:
    """Sets it for this process, unless its environment says otherwise. Before torch is loaded."""
    for name, value in COMPUTES.items():
        os.environ.setdefault(name, value)


def keep_what_is_there() -> None:
    """Called once a process of ours serves, and in no other: it is for all that the process holds. What was loaded by then stays
    until the end: to look through hundreds of thousands of objects for garbage, as the interpreter does now and then, would hold
    up whoever is served for some tenths of a second."""
    gc.collect()
    gc.freeze()
