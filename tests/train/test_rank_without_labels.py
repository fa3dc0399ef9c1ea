"""A context rank may hold nothing but tokens of a prompt.

A mean over its own tokens would be 0 / 0 there, and the gradient of every weight would be NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.distributed import Mesh, make_mesh
from padfree.optim.optimizer import make_optimizer
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.train.engine import Engine
from padfree.train.microbatch import PackSettings
from padfree.train.scorer import Scorer
from padfree.train.step import StepReport
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, OPTIMIZER, small_model, two_steps

PROMPT, LENGTH = 12, 16


def sample() -> Sample:
    rng = np.random.default_rng(0)
    return Sample(
        tokens=rng.integers(0, 40, LENGTH),
        loss_mask=np.arange(LENGTH) >= PROMPT,
        ref_logprobs=-rng.random(LENGTH).astype(np.float32),
        advantages=np.full(LENGTH, 0.7),
        group=0,
        uid="long prompt",
    )


def updated(mesh: Mesh, loss: str) -> tuple[list[StepReport], dict[str, Tensor]]:
    model = small_model()
    parallelize(model, transformations(mesh))
    scorer = Scorer(model, mesh, max_tokens=LENGTH, pack_settings=PackSettings(layout="contiguous"))
    return two_steps(Engine(scorer, make_optimizer(model, OPTIMIZER), LOSSES[loss]), [sample()])


def over_ranks(rank: int, world: int, loss: str) -> tuple[list[StepReport], dict[str, Tensor]]:
    return updated(make_mesh("cpu", context=2), loss)


@pytest.mark.parametrize("loss", ["sft", "opsm"])
def test_a_context_rank_with_prompt_tokens_alone(loss: str, mesh: Mesh) -> None:
    """The first of two ranks holds tokens 0 to 7, all of them of the prompt."""
    assert LENGTH // 2 < PROMPT
    reports, weights = updated(mesh, loss)
    for found, found_weights in run_ranks(2, over_ranks, loss):
        for mine, other in zip(found, reports, strict=True):
            numbers: list[Any] = [mine.loss, mine.gradient_norm]
            assert numbers == pytest.approx([other.loss, other.gradient_norm], rel=1e-5)
            assert mine.statistics == pytest.approx(other.statistics, rel=1e-5, abs=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(found_weights[name], weight, atol=1e-5, rtol=0)
