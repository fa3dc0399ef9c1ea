"""Bounds that settings of several sections share, as keywords of `setting`."""

from __future__ import annotations

from typing import Any

SECONDS: dict[str, Any] = {"above": 0, "most": 1e8, "fix": "give more than 0 seconds, 1e+08 at most"}
"""Of a timeout, at most three years: timers count nanoseconds in 64 bits."""

GIB: dict[str, Any] = {"least": 2.0**-30, "most": 2.0**20}
"""Of memory, from a byte to a pebibyte."""
