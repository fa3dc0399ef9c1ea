"""Compute how well a step uses the hardware: the FLOP/s of a device, and their fraction of the device's peak (MFU).

    tflops_per_device    FLOPs of a step / seconds / devices / 1e12
    mfu                  tflops_per_device / peak of the device in TFLOP/s

Only FLOPs that training requires are counted. Recomputation, padding, and old and reference log-probabilities are not
counted. The output head is counted only for scored tokens. Shared prefixes and repeated images count once.

`mfu` exists only for bfloat16 models on devices whose peak is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from padfree.packing import CostModel
from padfree.packing.cost import FORWARD_AND_BACKWARD
from padfree.sizes import ModelSizes

# Dense bfloat16 TFLOP/s with float32 accumulation at the boost clock, from the vendors' data sheets. If a data sheet
# gives only the figure with sparsity, half of it is used. An entry applies if all of its words are in the device's
# name. The first such entry is used, so more specific ones come first.
PEAKS: tuple[tuple[str, float], ...] = (
    ("A100", 312.0),
    ("A800", 312.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H20", 148.0),
    ("B100", 1750.0),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("A6000", 154.8),
    ("RTX 6000 Ada", 364.2),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak performance of a device in dense bfloat16 TFLOP/s, or None if the device name is unknown."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if "mig" in words:  # a MIG slice is a part of a GPU, so the GPU's peak does not apply
        return None
    for name, peak in PEAKS:
        if words.issuperset(name.lower().split()):
            return peak
    return None


def model_cost(model_config: Any, *, adapters: bool = False) -> CostModel:
    """Return the FLOPs of forward and backward as a function of sample lengths, from a Hugging Face config.

    If `adapters` is true, all weights count as frozen, because only adapters are trained.
    """
    cost = CostModel.from_config(model_config)
    return replace(cost, linear=frozen_flops(cost.linear)) if adapters else cost


def frozen_flops(flops: float) -> float:
    """Return the FLOPs of a matmul with a frozen weight, forward and backward.

    `flops`: the FLOPs of the same matmul if its weight is trained.
    """
    return flops * (FORWARD_AND_BACKWARD - 1) / FORWARD_AND_BACKWARD  # without the matmul for the weight's gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The work that a step saves because samples share prefixes.

    `tokens`: the number of tokens that are not computed again. `pairs`: the number of (query, key) pairs that attention
    does not compute again, counted without causal masking.
    """

    tokens: float
    pairs: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Computes the FLOPs of a step, and which fraction of the devices' peak FLOP/s the step reaches."""

    cost: CostModel  # of forward and backward, in FLOPs
    head: float  # FLOPs of one token in the output head, part of `cost`
    devices: int
    peak: float | None  # TFLOP/s of one device
    image: Callable[[ArrayLike], NDArray[np.float64]] | None = None  # FLOPs of images with these numbers of features

    @staticmethod
    def of(
        model_config: Any,
        *,
        devices: int,
        device: torch.device,
        dtype: torch.dtype,
        adapters: bool = False,
        frozen: float = 0.0,
        frozen_head: bool = False,
        image: Callable[[ArrayLike], NDArray[np.float64]] | None = None,
    ) -> Flops:
        """Make a `Flops` from a Hugging Face config.

        `adapters`: whether only adapters are trained. `frozen`: the fraction of the matmul weights outside the output
        head that are frozen. `frozen_head`: whether the output head is frozen.
        """
        frozen, frozen_head = (1.0, True) if adapters else (frozen, frozen_head)
        sizes = ModelSizes.of(model_config)
        head = FORWARD_AND_BACKWARD * 2.0 * sizes.hidden * sizes.vocabulary
        peak = None
        if device.type == "cuda" and dtype == torch.bfloat16:
            peak = peak_tflops(torch.cuda.get_device_name(device))
        cost = model_cost(model_config)
        body = cost.linear - head
        linear = body - frozen * (body - frozen_flops(body)) + (frozen_flops(head) if frozen_head else head)
        return Flops(
            cost=replace(cost, linear=linear),
            head=frozen_flops(head) if frozen_head else head,
            devices=devices,
            peak=peak,
            image=image,
        )

    def step(
        self, lengths: ArrayLike, num_labels: int, shared: Shared | None = None, image_features: Sequence[int] = ()
    ) -> float:
        """Return the FLOPs of a step over samples with these lengths.

        `num_labels`: the number of tokens for which the output head is computed. `shared`: the work that shared
        prefixes save. `image_features`: the number of features of each image of the step.
        """
        costs = self.cost(lengths)
        tokens = self.cost.tokens()(lengths).sum()
        saved = 0.0
        if shared is not None:  # sharing prefixes does not reduce the number of scored tokens
            saved = (self.cost.linear - self.head) * shared.tokens + self.cost.quadratic * shared.pairs
        encoded = 0.0 if self.image is None else float(self.image(image_features).sum())
        return float(costs.sum() - self.head * (tokens - num_labels) - saved) + encoded

    def metrics(
        self,
        lengths: ArrayLike,
        num_labels: int,
        seconds: float,
        shared: Shared | None = None,
        image_features: Sequence[int] = (),
    ) -> dict[str, float]:
        """Return the metric `tflops_per_device` of a step that took `seconds`.

        If the device's peak is known, also return `mfu`.
        """
        if seconds <= 0:
            return {}
        reached = self.step(lengths, num_labels, shared, image_features) / seconds / self.devices / 1e12
        found = {"tflops_per_device": reached}
        if self.peak is not None:
            found["mfu"] = reached / self.peak
        return found
