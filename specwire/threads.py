"""How threads wait on cores that several processes share."""

from __future__ import annotations

import os

SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
"""Environment of a process that computes. A thread without work sleeps, so that it does not take the time of whoever has some;
but not at once: a step is hundreds of short parallel pieces, and to wake a thread for each costs a tenth of the step.
20,000 turns are under a millisecond."""


def share_cores() -> None:
    """Sets it for this process, unless its environment says otherwise. Before torch loads OpenMP."""
    for name, value in SHARED_CORES.items():
        os.environ.setdefault(name, value)
