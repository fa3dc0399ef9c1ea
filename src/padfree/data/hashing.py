"""A hash of a JSON value."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def hash_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
