"""Reward models and critics on one GPU: the same steps as on the CPU, within bfloat16 precision; no synchronisation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from padfree.distributed import Mesh, distributed, make_mesh
from padfree.losses import RewardModelSettings, ValueSettings
from padfree.model.load import load_model
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tasks.reward import RewardMicroBatchLoss
from padfree.train.critic import ValueMicroBatchLoss
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings
from padfree.train.scorer import ScalarScorer
from tests.train.cases import make_samples, small_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    small_model(head_dim=64).save_pretrained(found)
    return found


def scalar_samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        replace(
            sample,
            group=index // 2,
            reward=float(1 - index % 2),
            terms={"margin": 0.25},
            returns=rng.normal(size=len(sample)).astype(np.float32),
            values=np.zeros(len(sample), np.float32),
        )
        for index, sample in enumerate(make_samples())
    ]


def make_engine(name: str, folder: Path, mesh: Mesh, dtype: torch.dtype, *, shared: bool, compile: str) -> Engine:
    steps = transformations(mesh, dtype=dtype, compile=compile, reshard=compile == "none")
    model = load_model(
        folder, device=mesh.device, head="scalar", shard=lambda model: parallelize(model, steps), spread=0.3
    )
    pack_settings = PackSettings(ends=name == "reward", share_prefixes=shared)
    scorer = ScalarScorer(model, mesh, max_tokens=64, pack_settings=pack_settings)
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-3, eps=1e-2))
    if name == "reward":
        settings = RewardModelSettings(margin=0.1)
        return Engine(scorer, optimizer, LossSettings(loss=settings), RewardMicroBatchLoss(settings))
    return Engine(scorer, optimizer, LossSettings(loss=ValueSettings()), ValueMicroBatchLoss(ValueSettings()))


@pytest.mark.parametrize("name", ["reward", "value"])
def test_bf16_steps_are_close_to_those_of_the_cpu(name: str, folder: Path) -> None:
    samples, losses, numbers = scalar_samples(), {}, {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        with distributed(device=device) as here:
            engine = make_engine(name, folder, make_mesh(here), dtype, shared=False, compile="none")
            assert isinstance(engine.scorer, ScalarScorer)
            if name == "reward":
                numbers[device] = engine.scorer.rewards(samples)
            else:
                numbers[device] = np.concatenate(engine.scorer.values(samples))
            losses[device] = [engine.step(samples).loss for _ in range(2)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=3e-2, abs=3e-2)
    scale = float(np.abs(numbers["cpu"]).max())
    np.testing.assert_allclose(numbers["cuda"], numbers["cpu"], atol=5e-2 * scale)


@pytest.mark.parametrize("name", ["reward", "value"])
@pytest.mark.parametrize(("compile", "shared"), [("none", False), ("none", True), ("inductor", False)])
def test_the_host_never_waits_within_a_step(name: str, compile: str, shared: bool, folder: Path) -> None:
    samples = scalar_samples()
    with distributed(device="cuda") as device:
        engine = make_engine(name, folder, make_mesh(device), torch.bfloat16, shared=shared, compile=compile)
        for _ in range(2):  # load and compile kernels
            engine.step(samples)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = engine.begin(engine.prepare(samples))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pending.finish().num_samples == len(samples)
