"""Bounds that settings of several sections share."""

from __future__ import annotations

from typing import Any

SECONDS: dict[str, Any] = {"above": 0, "most": 1e8, "fix": "give more than 0 seconds, 1e+08 at most"}
"""Bounds of a timeout in seconds. Much larger values would overflow timers that count nanoseconds in 64 bits."""

GIB: dict[str, Any] = {"least": 2.0**-30, "most": 2.0**20, "allowed": "1 byte (2**-30 GiB) to 2**20 GiB"}
"""Bounds of an amount of memory in GiB."""
