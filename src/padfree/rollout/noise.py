"""Random numbers that follow from what they are for, and from nothing else.

    key      (seed, batch, response)           one 64-bit integer for each response of a run
    noise    (key, position, token) -> Gumbel  the token of the largest logit + noise is a draw from softmax(logits)

There is no state that is used up. A response gets the same noise whoever writes it, beside whatever else, on the CPU
and on a GPU, in the first run and in a resumed one. Two programs whose logits differ by rounding draw the same token
unless the two best sums are that close together.

`GREEDY` is the key of a response without noise: the likeliest token at every position.

The hash is splitmix64 (`padfree.arrays`), here on the device as well.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from padfree.arrays import SPLITMIX64, splitmix64

GREEDY = 0
"""The key of a response that is not drawn; a hash is this number once in 2**64 times."""


def response_keys(seed: int, batch: int, responses: NDArray[np.int64]) -> NDArray[np.int64]:
    """[R] for these responses of a global batch, numbered over the whole of it."""
    values = np.zeros(len(responses), np.uint64)
    for part in (np.uint64(seed), np.uint64(batch), responses.astype(np.uint64)):
        values = splitmix64(values ^ part)
    return values.view(np.int64)


def key_behind(key: int, position: int) -> int:
    """For the rest of a response from this position on, where something else draws that has seeds and no positions."""
    values = splitmix64(np.array([key], np.int64).view(np.uint64) ^ np.uint64(position))
    return int(splitmix64(values).view(np.int64)[0])


def turn_key(key: int, place: tuple[int, ...]) -> int:
    """For a turn of an episode, by its place in the tree: branches on the way to it, and the turn's number there.

    The first turn of the first branch has the key of the response; turns of a greedy episode are all greedy.
    """
    if key == GREEDY or place == (0,):
        return key
    values = np.array([key], np.int64).view(np.uint64)
    for number in (len(place), *place):
        values = splitmix64(values ^ np.array([number], np.int64).view(np.uint64))
    return int(splitmix64(values).view(np.int64)[0])


def gumbel_noise(keys: Tensor, position: int | Tensor, vocabulary: int) -> Tensor:
    """[R, V] float32 for the token at this position of each response, one for all or [R]; `keys` [R] int64."""
    at_position = _mixed_on_device(keys ^ position)
    tokens = torch.arange(vocabulary, dtype=torch.int64, device=keys.device)
    bits = _shifted(_mixed_on_device(at_position[:, None] ^ tokens), 32)  # [R, V] of 0 to 2**32 - 1
    uniform = (bits.double() + 0.5) * 2.0**-32
    return torch.where((keys == GREEDY)[:, None], 0.0, -torch.log(-torch.log(uniform)).float())


def _mixed_on_device(values: Tensor) -> Tensor:
    """The same bits as `splitmix64`: torch has no unsigned 64-bit multiplication, but signed ones wrap alike."""
    increment, first, second = (_signed(number) for number in SPLITMIX64)
    values = values + increment
    values = (values ^ _shifted(values, 30)) * first
    values = (values ^ _shifted(values, 27)) * second
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, places: int) -> Tensor:
    """To the right, zeros from the left: torch's own shift repeats the sign."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
