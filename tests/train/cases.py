"""A tiny model, rollouts, and an engine on any mesh, for the tests of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from padfree.distributed import Mesh, make_mesh
from padfree.losses import (
    CISPOSettings,
    ClipSettings,
    GSPOSettings,
    OPSMSettings,
    PolicySettings,
    SFTSettings,
)
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.sample import Sample, with_arrays
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import build
from padfree.train.engine import Engine, LossSettings
from padfree.train.scorer import Scorer
from padfree.train.step import StepReport

VOCABULARY = 40
LENGTHS = (5, 9, 4, 12, 7, 6, 3, 8)
MAX_TOKENS = 14
LR = 1e-2
# If a gradient is 0 except for rounding, Adam with a small eps would turn the rounding into a full step.
OPTIMIZER = OptimizerConfig(lr=LR, eps=1e-2, weight_decay=0.1)

LOSSES: dict[str, LossSettings] = {
    "sft": LossSettings(loss=SFTSettings()),
    "clip": LossSettings(loss=PolicySettings(objective=ClipSettings(low=0.05, high=0.05)), aggregation="sample-mean"),
    "gspo": LossSettings(loss=PolicySettings(objective=GSPOSettings(low=0.5, high=0.9)), aggregation="group-mean"),
    "cispo": LossSettings(loss=PolicySettings(objective=CISPOSettings(high=0.01), entropy_coefficient=0.1)),
    "opsm": LossSettings(
        loss=PolicySettings(objective=ClipSettings(), corrections=(OPSMSettings(delta=1e-4),), kl_coefficient=0.1)
    ),
}


def small_model(name: str = "qwen3", **changes: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCABULARY}
    return build(name, **{**sizes, **changes})


def make_samples(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for index, length in enumerate(lengths):
        mask = np.arange(length) > 1
        if index == 5:
            mask[:] = False
        samples.append(
            Sample(
                tokens=rng.integers(0, VOCABULARY, length),
                loss_mask=mask,
                ref_logprobs=-rng.random(length).astype(np.float32) * 3,
                advantages=np.full(length, rng.normal()),
                reward=float(rng.integers(0, 2)),
                group=index // 2,
                uid=f"s{seed}-{index}",
            )
        )
    return samples


def make_engine(
    mesh: Mesh,
    settings: LossSettings,
    model: PreTrainedModel | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    optimizer: OptimizerConfig = OPTIMIZER,
    **changes: Any,
) -> Engine:
    model = small_model() if model is None else model
    parallelize(model, transformations(mesh, **changes))
    scorer = Scorer(model, mesh, max_tokens=max_tokens // mesh.context.size, overlong="alone")
    return Engine(scorer, make_optimizer(model, optimizer), settings)


def two_steps(engine: Engine, samples: list[Sample]) -> tuple[list[StepReport], dict[str, Tensor]]:
    """Two updates with the same samples and the old log-probabilities before the first; reports and final weights."""
    needs_old = not isinstance(engine.settings.loss, SFTSettings)
    samples = with_arrays(samples, old_logprobs=engine.scorer.logprobs(samples)) if needs_old else samples
    reports = [engine.step(samples, step=step) for step in range(2)]
    return reports, weights_of(engine.model)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def alone() -> Mesh:
    """The mesh of a single process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return make_mesh("cpu")
