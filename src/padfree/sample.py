"""A sample: one document or one rollout, on the host.

    tokens      [n]     5 4 3 2 1
    loss_mask   [n]     0 0 1 1 1        which tokens are trained on
    advantages  [n]     0 0 a a a        optional arrays of a rollout: element j belongs to token j

`padfree.batch` concatenates samples. n is the number of tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padfree.arrays import float_array, mask_array, need_whole, single_number, token_array
from padfree.choices import ROLLOUT_ARRAYS
from padfree.errors import UserError
from padfree.images import Image, check_images, truncated_images
from padfree.kept_sets import KeptSets, kept_array
from padfree.routes import Routes, checked_routes

TOKEN_ARRAYS = (*ROLLOUT_ARRAYS, "old_logprobs")
"""The optional per-token arrays of a sample: `ROLLOUT_ARRAYS`, and `old_logprobs`, which the trainer adds before an
update.
"""


def _name(uid: str | int | None) -> str:
    return "sample" if uid is None else f"sample {uid!r}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One document or one rollout, on the host.

    `loss_mask[j]` says whether token j is trained on; without a mask, all tokens are. The first token of a sample is
    never scored, because no position predicts it.
    """

    tokens: NDArray[np.integer[Any]]  # [n]
    loss_mask: NDArray[np.bool_] | None = None  # [n]; an array after construction
    logprobs: NDArray[np.float32] | None = None  # [n] reported by the sampler
    ref_logprobs: NDArray[np.float32] | None = None  # [n]
    advantages: NDArray[np.float32] | None = None  # [n]
    returns: NDArray[np.float32] | None = None  # [n]
    values: NDArray[np.float32] | None = None  # [n]
    old_logprobs: NDArray[np.float32] | None = None  # [n] computed by the trainer before it first trains on the sample
    reward: float | None = None
    raw_reward: Any = None
    uid: str | int | None = None
    group: str | int | None = None
    source: str | None = None
    terms: Mapping[str, float] | None = None  # named numbers that the task's loss reads, such as a margin
    images: tuple[Image, ...] = ()  # in the order of their placeholder tokens
    rotary_positions: NDArray[np.int64] | None = None  # [P, n] if they are not 0, 1, 2, ...: `padfree.model.vision`
    routes: Routes | None = None  # [n, R, k] experts that the sampler chose for each token: `padfree.routes`
    kept: KeptSets | None = None  # [n] the ids among which each token was sampled; None: the whole vocabulary

    def __post_init__(self) -> None:
        name = _name(self.uid)
        tokens = token_array(self.tokens, name)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "loss_mask", mask_array(self.loss_mask, len(tokens), name))
        for field in TOKEN_ARRAYS:
            values = getattr(self, field)
            if values is not None:
                object.__setattr__(self, field, float_array(values, len(tokens), field, name))
        if self.reward is not None:
            object.__setattr__(self, "reward", single_number(self.reward, f"reward of {name}"))
        object.__setattr__(self, "images", check_images(self.images, tokens, self.sampled, name))
        object.__setattr__(self, "kept", kept_array(self.kept, len(tokens), name))
        self._check_kept(name)
        if self.rotary_positions is not None:
            positions = np.asarray(self.rotary_positions)
            if positions.ndim != 2 or positions.shape[1] != len(tokens) or positions.dtype.kind not in "iu":
                raise UserError(
                    "rotary_positions",
                    f"{name} has a {positions.dtype} array of shape {positions.shape} for {len(tokens)} tokens",
                    f"give integers of shape [P, {len(tokens)}], with P position ids per token",
                )
            object.__setattr__(self, "rotary_positions", positions.astype(np.int64, copy=False))
        if self.routes is not None:
            object.__setattr__(self, "routes", checked_routes(self.routes, len(tokens), name))

    def _check_kept(self, name: str) -> None:
        """Raise a `UserError` if a trained token is not in its kept set, the ids from which it was sampled."""
        wrong = (
            np.zeros(0, np.int64) if self.kept is None else np.flatnonzero(self.mask & ~self.kept.contain(self.tokens))
        )
        if len(wrong):
            raise UserError(
                "kept",
                f"the ids kept at index {wrong[0]} of {name} do not contain the trained token {self.tokens[wrong[0]]}",
                "give the ids from which the token was sampled, or set the loss_mask of the token to 0",
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Return `loss_mask`, which is never None after construction: without a given mask, it is an array of True."""
        assert self.loss_mask is not None
        return self.loss_mask

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """Return bools [n] that say whether a policy sampled each token.

        A policy sampled all trained tokens of a sample that has `logprobs`, and no tokens of other samples.
        """
        return self.mask & (self.logprobs is not None)

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Return bools [n] that say whether each token is scored. These are the trained tokens, except the sample's
        first token.
        """
        return self.mask & (np.arange(len(self)) > 0)

    @property
    def num_labels(self) -> int:
        """Number of scored tokens."""
        return int(np.count_nonzero(self.mask[1:]))

    def with_numbers(self, **arrays: NDArray[Any]) -> Sample:
        """Return a copy of the sample with new values for some per-token arrays (`TOKEN_ARRAYS`). Only the new arrays
        are checked.
        """
        other = object.__new__(type(self))
        for about in fields(self):
            object.__setattr__(other, about.name, getattr(self, about.name))
        for field, values in arrays.items():
            assert field in TOKEN_ARRAYS, field
            object.__setattr__(other, field, float_array(values, len(self), field, _name(self.uid)))
        return other

    def truncated(self, length: int) -> Sample:
        """Return a sample of the first `length` tokens, with the per-token arrays cut to match."""
        need_whole("length", length, 0, "give the number of tokens to keep, 0 or more")
        cut: dict[str, Any] = {
            field: array[:length]
            for field in ("tokens", "loss_mask", *TOKEN_ARRAYS, "routes")
            if (array := getattr(self, field)) is not None
        }
        if self.images:
            cut["images"] = truncated_images(self.images, length)
        if self.rotary_positions is not None:
            cut["rotary_positions"] = self.rotary_positions[:, :length]
        if self.kept is not None:
            cut["kept"] = self.kept[:length]
        return replace(self, **cut)


def with_arrays(samples: Sequence[Sample], **arrays: Sequence[NDArray[Any]]) -> list[Sample]:
    """Return copies of the samples with new per-token arrays.

    `with_arrays(samples, ref_logprobs=found)` gives sample i the array `found[i]`.
    """
    found = list(samples)
    for name, values in arrays.items():
        found = [sample.with_numbers(**{name: own}) for sample, own in zip(found, values, strict=True)]
    return found


def common_fields(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the names of the rollout arrays that the samples have. Raise `UserError` unless all samples have the same
    arrays.
    """
    present: Mapping[str, list[bool]] = {f: [getattr(s, f) is not None for s in samples] for f in TOKEN_ARRAYS}
    for field, there in present.items():
        if any(there) and not all(there):
            index = there.index(False)
            name = _name(samples[index].uid)
            raise UserError(
                field, f"is missing in {name} at index {index}, but other samples have it", "give it for all samples"
            )
    return tuple(field for field, there in present.items() if any(there))
