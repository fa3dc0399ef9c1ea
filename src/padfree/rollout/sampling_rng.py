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

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

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
    noise = _gumbel(_mixed_on_device(at_position[:, None] ^ tokens))
    return torch.where((keys == GREEDY)[:, None], 0.0, noise)


LARGE = 4096
"""Vocabularies of this size and above are drawn from by candidates on the CPU."""

CANDIDATES = 20.0
RARE = 2.0**-10
"""`gumbel_argmax` ignores tokens with a probability below RARE / CANDIDATES whose hash is not in the highest RARE."""


def gumbel_argmax(scores: Tensor, keys: Tensor, position: int | Tensor) -> Tensor:
    """[R] int64: `(scores + gumbel_noise(keys, position, V)).argmax(1)` for log-probabilities `scores` [R, V].

    On the CPU the noise of a large vocabulary would cost more than the model. There the hash is computed for all
    tokens, and the two logarithms only for tokens that may have the largest sum:

        uniform <= 1 - RARE                  =>   noise <= -log(1 - uniform) <= -log(RARE)
        and score <= log(RARE / CANDIDATES)  =>   sum <= -log(CANDIDATES)

    The largest sum is above -log(CANDIDATES), and so among the other tokens, but for one draw in exp(CANDIDATES), about
    5e8. If none of them is, all V tokens are compared. The result is exact in both cases.
    """
    num_rows, vocabulary = scores.shape
    if scores.device.type != "cpu" or vocabulary < LARGE:
        return (scores + gumbel_noise(keys, position, vocabulary)).argmax(1)
    is_greedy = keys == GREEDY
    if is_greedy.any():
        drawn, others = scores.argmax(1), ~is_greedy
        if others.any():
            drawn[others] = gumbel_argmax(scores[others], keys[others], _of_rows(position, others))
        return drawn
    at_position = _mixed_on_device(keys ^ position)
    parts = [part.detach().numpy() for part in scores.tensor_split(torch.get_num_threads()) if len(part)]
    starts = np.array_split(at_position.numpy(), torch.get_num_threads())
    if len(parts) == 1:
        found = _candidates(parts[0], starts[0])
    else:  # NumPy leaves the interpreter to other threads while it computes
        with ThreadPoolExecutor(len(parts)) as pool:
            found = list(chain.from_iterable(pool.map(_candidates, parts, starts)))
    rows = torch.arange(num_rows).repeat_interleave(torch.tensor([len(tokens) for tokens in found]))
    tokens = torch.from_numpy(np.concatenate(found))
    sums = scores[rows, tokens] + _gumbel(_mixed_on_device(at_position[rows] ^ tokens))
    best, first = _largest(sums.numpy(), rows.numpy(), num_rows)
    drawn = torch.from_numpy(np.append(tokens.numpy(), 0)[first])
    # 1e-3 is far more than the rounding of a sum. Scores that are not numbers come here, too.
    unsure = torch.from_numpy(~(best > 1e-3 - math.log(CANDIDATES)))
    if unsure.any():
        noise = gumbel_noise(keys[unsure], _of_rows(position, unsure), vocabulary)
        drawn[unsure] = (scores[unsure] + noise).argmax(1)
    return drawn


def _of_rows(position: int | Tensor, chosen: Tensor) -> int | Tensor:
    return position[chosen] if isinstance(position, Tensor) and position.ndim else position


def _largest(
    values: NDArray[np.float32], rows: NDArray[np.int64], num_rows: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The largest value of each row and the index of the first such value; -inf and -1 for a row without values."""
    best, first = np.full(num_rows, -np.inf, np.float32), np.full(num_rows, -1)
    np.maximum.at(best, rows, values)
    index = np.flatnonzero(values == best[rows])[::-1]
    first[rows[index]] = index  # the last assignment stays
    return best, first


def _candidates(scores: NDArray[np.float32], at_position: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Tokens [n] of each response that may have its largest sum, from `scores` [r, V]."""
    vocabulary = scores.shape[1]
    tokens = np.arange(vocabulary, dtype=np.uint64)
    hashes, shifted = np.empty_like(tokens), np.empty_like(tokens)
    found = []
    for row, start in zip(scores, at_position.view(np.uint64), strict=True):
        # The hash but for its last step, which changes only the lowest of the 32 bits that the noise is made of.
        np.bitwise_xor(tokens, start, out=hashes)
        hashes += np.uint64(SPLITMIX64[0])
        for places, factor in ((30, SPLITMIX64[1]), (27, SPLITMIX64[2])):
            np.right_shift(hashes, np.uint64(places), out=shifted)
            hashes ^= shifted
            hashes *= np.uint64(factor)
        is_rare = hashes >= np.uint64(int((1 - RARE) * 2**64) - 2**33)
        found.append(np.flatnonzero(is_rare | (row > math.log(RARE / CANDIDATES))))
    return found


def _gumbel(hashes: Tensor) -> Tensor:
    """Noise of these hashes, float32 of the same shape."""
    uniform = (_shifted(hashes, 32).double() + 0.5) * 2.0**-32  # of 0 to 2**32 - 1
    return -torch.log(-torch.log(uniform)).float()


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
