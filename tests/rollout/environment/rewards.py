"""Rewards in a module that a process imports quickly."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any


def digits(text: str) -> float:
    return sum(letter.isdigit() for letter in text) / 8


def share_of_digits(response: str, row: Mapping[str, Any]) -> float:
    return digits(response)


def sometimes_raises(response: str, row: Mapping[str, Any]) -> float:
    if row["answer"] == "2":
        raise RuntimeError("no such answer")
    return digits(response)


def sometimes_ends(response: str, row: Mapping[str, Any]) -> float:
    if row["answer"] == "2":
        os._exit(3)
    sys.stdout.write("what a reward prints\n")
    return digits(response)


def hangs(response: str, row: Mapping[str, Any]) -> float:
    if row["answer"] == "2":
        time.sleep(600)
    return digits(response)


def reads_input(response: str, row: Mapping[str, Any]) -> float:
    sys.stdin.read()
    return digits(response)
