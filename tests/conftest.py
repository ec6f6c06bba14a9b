"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is; tests run beside each other.
settings.register_profile("specwire", deadline=None)
settings.load_profile("specwire")
