"""The cost of a sample of n tokens is linear · n + quadratic · n². Each micro-batch and each step add a constant.

Matmuls apply every weight to every token once. In attention, every token attends to every token before it. Two packs
with equal numbers of tokens can therefore take different times.

The factors come from the model's config (`from_config`) or from times measured on the device (`fit`). Packing uses only
ratios of costs, so the unit does not matter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from padfree.arrays import need_number, number_array
from padfree.errors import UserError
from padfree.sizes import ModelSizes

Floats = NDArray[np.float64]

FORWARD_AND_BACKWARD = 3
"""The cost of forward and backward, relative to forward. Backward costs twice as much as forward: one matmul for the
gradient of the input, one for the gradient of the weight.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """The cost of a sample of n tokens is linear · n + quadratic · n².

    A micro-batch additionally costs `constant`, and a step costs `step` for its optimizer update.
    """

    linear: float
    quadratic: float = 0.0
    constant: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            need_number(field, value, 0.0, sys.float_info.max, "give a finite number of 0 or more")

    def __call__(self, lengths: ArrayLike) -> Floats:
        """Return the costs [n] of samples with these lengths [n]. The fixed costs `constant` (of a micro-batch) and
        `step` (of a step) are not included.
        """
        n = number_array(lengths, "lengths").astype(np.float64)
        return self.linear * n + self.quadratic * n * n

    @staticmethod
    def tokens() -> CostModel:
        """Return a cost model in which the cost of a sample is its number of tokens."""
        return CostModel(linear=1.0)

    @staticmethod
    def from_config(config: Any) -> CostModel:
        """Return a cost model in FLOPs of forward and backward, from a Hugging Face config (object or dict).

        Only the experts that a token uses count. In layers with a sliding window, every window is assumed to be full.
        """

        sizes = ModelSizes.of(config)
        full, windowed = sizes.attention, sizes.windowed_attention
        in_windows = sizes.windowed_layers * sizes.window * (windowed.query + windowed.output)
        # A weight takes one multiplication and one addition per token. Causal attention computes n² / 2 scores, one per
        # (query, key).
        return CostModel(
            linear=FORWARD_AND_BACKWARD * (2.0 * (sizes.weights + in_windows) + sizes.state_flops),
            quadratic=FORWARD_AND_BACKWARD * 1.0 * sizes.full_layers * (full.query + full.output),
        )

    @staticmethod
    def fit(lengths: Sequence[ArrayLike], seconds: ArrayLike) -> CostModel:
        """Fit a cost model to measured times, by least squares of the relative error. Coefficients are at least 0.

        `lengths[i]`: the lengths of the samples of micro-batch i, or the length of its only sample. `seconds[i]`: the
        time of micro-batch i.
        """
        time = number_array(seconds, "seconds").astype(np.float64)
        if time.ndim != 1 or len(time) != len(lengths) or not len(time):
            raise UserError(
                "seconds", f"has shape {time.shape} for {len(lengths)} measurements", "give one time per micro-batch"
            )
        if not ((time > 0) & (time < np.inf)).all():
            raise UserError("seconds", f"range from {time.min()} to {time.max()}", "give finite times above 0")
        batches = [np.atleast_1d(number_array(batch, "lengths").astype(np.float64)) for batch in lengths]
        features = np.array([[batch.sum(), (batch * batch).sum(), 1.0] for batch in batches])
        linear, quadratic, constant = _nonnegative_least_squares(features / time[:, None], np.ones(len(time))).tolist()
        return CostModel(linear=linear, quadratic=quadratic, constant=constant)

    def to_json(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def from_json(path: str | Path) -> CostModel:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        names = [*CostModel.__dataclass_fields__]
        if not isinstance(values, dict) or not {"linear"} <= set(values) <= set(names):
            raise UserError(
                f"{path}", "is not a cost model", f"write it with CostModel.to_json (keys {', '.join(names)})"
            )
        return CostModel(**values)


def _nonnegative_least_squares(features: Floats, target: Floats) -> Floats:
    """Return the non-negative coefficients c that minimise the squared error of `features` @ c against `target`.

    Every subset of the columns of `features` is tried, which is fast because there are few columns.
    """
    scale: Floats = np.maximum(np.abs(features).max(0), np.finfo(np.float64).tiny)
    scaled = features / scale
    width = features.shape[1]
    best, least = np.zeros(width), float(target @ target)
    for columns in chain.from_iterable(combinations(range(width), size) for size in range(1, width + 1)):
        chosen = list(columns)
        solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
        error = float(np.square(scaled[:, chosen] @ solution - target).sum())
        if (solution >= 0).all() and error < least * (1 - 1e-12):
            best, least = np.zeros(width), error
            best[chosen] = solution
    return best / scale
