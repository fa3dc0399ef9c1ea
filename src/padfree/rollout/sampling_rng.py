"""Random numbers for sampling, computed as hashes, without generator state.

    key      hash of (seed, training batch, response)    one 64-bit integer for each response of a run
    noise    hash of (key, position, token)              Gumbel noise: argmax(logits + noise) is a sample

The noise of a response does not depend on the other responses of a decode batch, on the device, or on whether the run
was resumed. Logits that differ only by rounding almost always give the same token.

A response with the key `GREEDY` is decoded without noise. The hash function is splitmix64 (`padfree.arrays`).
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
"""The random key of a response that is decoded greedily, i.e. without noise.

The key of a sampled response has this value only with probability 2**-64.
"""


def response_keys(seed: int, batch: int, responses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the random keys (sampling seeds) [R] of R responses. `responses` [R]: their indices in batch `batch`."""
    values = np.zeros(len(responses), np.uint64)
    for part in (np.uint64(seed), np.uint64(batch), responses.astype(np.uint64)):
        values = splitmix64(values ^ part)
    return values.view(np.int64)


def key_behind(key: int, position: int) -> int:
    """Return the random key of a request that continues a response after its first `position` tokens.

    Servers use a key as a seed. A continuation therefore needs a key of its own, or random numbers would repeat.
    """
    values = splitmix64(np.array([key], np.int64).view(np.uint64) ^ np.uint64(position))
    return int(splitmix64(values).view(np.int64)[0])


def turn_key(key: int, path: tuple[int, ...]) -> int:
    """Return the random key of a turn of an episode. `key`: the random key of the episode.

    `path`: integers that identify the turn in its episode, e.g. by its place in the tree of turns. If `key` is
    `GREEDY`, the result is `GREEDY`.
    """
    if key == GREEDY or path == (0,):
        return key
    values = np.array([key], np.int64).view(np.uint64)
    for number in (len(path), *path):
        values = splitmix64(values ^ np.array([number], np.int64).view(np.uint64))
    return int(splitmix64(values).view(np.int64)[0])


def gumbel_noise(keys: Tensor, position: int | Tensor, vocabulary: int) -> Tensor:
    """Return Gumbel noise [R, V] float32 for one position of each response.

    `keys` [R] int64: random keys of the responses. `position`: an int for all responses, or [R].
    """
    at_position = _mixed_on_device(keys ^ position)
    tokens = torch.arange(vocabulary, dtype=torch.int64, device=keys.device)
    noise = _gumbel(_mixed_on_device(at_position[:, None] ^ tokens))
    return torch.where((keys == GREEDY)[:, None], 0.0, noise)


LARGE = 4096
"""Smallest vocabulary for which `gumbel_argmax` on a CPU computes noise only for candidates, i.e. tokens with a large
score or a large random number.
"""

CANDIDATES = 20.0
RARE = 2.0**-10
"""On the CPU, `gumbel_argmax` computes the noise of a token only if its probability is above RARE / CANDIDATES, or if
its uniform random number is above 1 - RARE.
"""


def gumbel_argmax(scores: Tensor, keys: Tensor, position: int | Tensor) -> Tensor:
    """Sample one token from each of R distributions: `(scores + gumbel_noise(keys, position, V)).argmax(1)`.

    `scores` [R, V]: log-probabilities. The result is [R] int64.
    """
    num_responses, vocabulary = scores.shape
    if scores.device.type != "cpu" or vocabulary < LARGE:
        return (scores + gumbel_noise(keys, position, vocabulary)).argmax(1)
    is_greedy = keys == GREEDY
    if is_greedy.any():
        sampled, others = scores.argmax(1), ~is_greedy
        if others.any():
            sampled[others] = gumbel_argmax(scores[others], keys[others], _select(position, others))
        return sampled
    at_position = _mixed_on_device(keys ^ position)
    parts = [part.detach().numpy() for part in scores.tensor_split(torch.get_num_threads()) if len(part)]
    starts = np.array_split(at_position.numpy(), torch.get_num_threads())
    if len(parts) == 1:
        candidates = _candidates(parts[0], starts[0])
    else:  # NumPy releases the GIL while it computes
        with ThreadPoolExecutor(len(parts)) as pool:
            candidates = list(chain.from_iterable(pool.map(_candidates, parts, starts)))
    responses = torch.arange(num_responses).repeat_interleave(torch.tensor([len(tokens) for tokens in candidates]))
    tokens = torch.from_numpy(np.concatenate(candidates))
    sums = scores[responses, tokens] + _gumbel(_mixed_on_device(at_position[responses] ^ tokens))
    best, first = _largest(sums.numpy(), responses.numpy(), num_responses)
    sampled = torch.from_numpy(np.append(tokens.numpy(), 0)[first])
    # For every other token, noise <= -log(RARE) and score <= log(RARE / CANDIDATES): the sum is <= -log(CANDIDATES). If
    # no candidate is above this bound (once in 5e8 samples), or a score is NaN, all tokens are compared. 1e-3 is far
    # larger than the rounding of a sum.
    unsure = torch.from_numpy(~(best > 1e-3 - math.log(CANDIDATES)))
    if unsure.any():
        noise = gumbel_noise(keys[unsure], _select(position, unsure), vocabulary)
        sampled[unsure] = (scores[unsure] + noise).argmax(1)
    return sampled


def _select(position: int | Tensor, chosen: Tensor) -> int | Tensor:
    return position[chosen] if isinstance(position, Tensor) and position.ndim else position


def _largest(
    values: NDArray[np.float32], groups: NDArray[np.int64], num_groups: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the largest value of each group of values, and the index of its first occurrence.

    `groups`: the number of the group to which each value belongs. An empty group gives -inf and the index -1.
    """
    best, first = np.full(num_groups, -np.inf, np.float32), np.full(num_groups, -1)
    with np.errstate(invalid="ignore"):  # NaN scores: some processors raise the flag that numpy warns about
        np.maximum.at(best, groups, values)
    index = np.flatnonzero(values == best[groups])[::-1]
    first[groups[index]] = index  # the last assignment wins
    return best, first


def _candidates(scores: NDArray[np.float32], at_position: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the candidates of each of r responses: the tokens for which `gumbel_argmax` computes noise.

    `scores` [r, V]: log-probabilities. `at_position` [r]: for each response, a hash of its random key and the position.
    """
    vocabulary = scores.shape[1]
    tokens = np.arange(vocabulary, dtype=np.uint64)
    hashes, shifted = np.empty_like(tokens), np.empty_like(tokens)
    candidates = []
    for own_scores, start in zip(scores, at_position.view(np.uint64), strict=True):
        # Compute splitmix64 without its last step, which changes only the lowest of the 32 bits that the noise uses.
        np.bitwise_xor(tokens, start, out=hashes)
        hashes += np.uint64(SPLITMIX64[0])
        for bits, factor in ((30, SPLITMIX64[1]), (27, SPLITMIX64[2])):
            np.right_shift(hashes, np.uint64(bits), out=shifted)
            hashes ^= shifted
            hashes *= np.uint64(factor)
        is_rare = hashes >= np.uint64(int((1 - RARE) * 2**64) - 2**33)
        candidates.append(np.flatnonzero(is_rare | (own_scores > math.log(RARE / CANDIDATES))))
    return candidates


def _gumbel(hashes: Tensor) -> Tensor:
    """Return the Gumbel noise that belongs to each hash, float32 of the same shape as `hashes`."""
    uniform = (_shifted(hashes, 32).double() + 0.5) * 2.0**-32  # from integers 0 to 2**32 - 1
    return -torch.log(-torch.log(uniform)).float()


def _mixed_on_device(values: Tensor) -> Tensor:
    """Return the `splitmix64` hashes of these values, computed in torch, bit for bit.

    Torch has no unsigned 64-bit multiplication; the signed one gives the same bits.
    """
    increment, first, second = (_signed(number) for number in SPLITMIX64)
    values = values + increment
    values = (values ^ _shifted(values, 30)) * first
    values = (values ^ _shifted(values, 27)) * second
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return the int64 values shifted right, with zeros from the left. Torch's own shift repeats the sign bit."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
