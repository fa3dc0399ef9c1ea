"""The setting `parallel.checkpointing`: which activations each layer keeps for its backward pass.

    none                       all layers have the level `none`, i.e. keep all activations
    6 host, 30 none            the first 6 layers offload activations to host memory, the other 30 keep all

A level says which activations a layer keeps. If the setting is `auto`, `padfree.estimate.levels` chooses a level for
each layer, and writes them as in the second example.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import get_args

from padfree.choices import Checkpointing, LayerLevel
from padfree.errors import UserError, need

NAME = "parallel.checkpointing"
UNIFORM: tuple[Checkpointing, ...] = get_args(Checkpointing)
LEVELS: tuple[LayerLevel, ...] = get_args(LayerLevel)
OFFLOADED = ("host", "attention")
"""The levels of activation checkpointing that need layers compiled with torch.compile."""


def check_checkpointing(value: str) -> None:
    """Raise a `UserError` unless `value` is `auto`, a level such as `host`, or a list such as `6 host, 30 none`."""
    if value == "auto" or value in UNIFORM:
        return
    parts = _parts(value)
    fix = f"give auto, {', '.join(UNIFORM)}, or numbers of layers from the first layer on, as in '6 host, 30 none'"
    need(parts is not None, NAME, value, fix)
    unknown = next((level for _, level in parts or () if level not in LEVELS), None)
    need(unknown is None, NAME, value, f"{unknown!r} is not a checkpointing level; use {', '.join(LEVELS)}")


def is_by_layer(value: str) -> bool:
    return value != "auto" and value not in UNIFORM


def uses_host(value: str) -> bool:
    """Return whether this value of `parallel.checkpointing` lets any layer offload activations to host memory."""
    return value == "host" or (is_by_layer(value) and "host" in _names(value))


def needs_compiled_layers(value: str) -> bool:
    """Return whether any layer has a checkpointing level that needs torch.compile. `value`: the value of
    `parallel.checkpointing`.
    """
    return value == "host" or (is_by_layer(value) and any(level in OFFLOADED for level in _names(value)))


def levels_of(value: str, num_layers: int) -> tuple[LayerLevel, ...]:
    """Return the checkpointing level of each layer. `value` lists the levels, as in `6 host, 30 none`: six layers have
    the level `host`, and 30 layers the level `none`.

    Raise a `UserError` if the numbers of layers in `value` do not add up to `num_layers`.
    """
    levels = tuple(level for count, level in _parts(value) or () for _ in range(count))
    if len(levels) != num_layers:
        raise UserError(
            NAME, f"names {len(levels)} layers, but the model has {num_layers}", "name all layers", value=value
        )
    return levels  # type: ignore[return-value]


def stretched(value: str, num_layers: int) -> str:
    """Adapt a value such as `6 host, 30 none` (a level of checkpointing for each layer) to a model with `num_layers`
    layers.

    With 12 layers, this value becomes `2 host, 10 none`. A value without numbers of layers is returned unchanged.
    """
    if not is_by_layer(value):
        return value
    levels = [level for count, level in _parts(value) or () for _ in range(count)]
    heights = ((2 * number + 1) * len(levels) // (2 * num_layers) for number in range(num_layers))
    return text_of([levels[height] for height in heights])  # type: ignore[misc]


def text_of(levels: Sequence[LayerLevel]) -> str:
    """Return the value of `parallel.checkpointing` that gives each layer its level: the inverse of `levels_of`."""
    return ", ".join(f"{len(list(equal))} {level}" for level, equal in groupby(levels))


def _names(value: str) -> list[str]:
    return [level for _, level in _parts(value) or ()]


def _parts(value: str) -> list[tuple[int, str]] | None:
    found = [re.fullmatch(r"\s*([1-9]\d{0,4})\s+([a-z]+)\s*", part) for part in value.split(",")]
    return None if None in found else [(int(each[1]), each[2]) for each in found if each is not None]
