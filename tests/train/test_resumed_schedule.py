"""A resumed run goes on with the learning rate of its step.

A schedule that begins again would pass the tests of resuming with a constant learning rate.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padfree.distributed import Mesh
from tests.train.cases import weights_of
from tests.train.test_trainer import crash
from tests.train.trainer_cases import SFT, lines, make_config, make_trainer, save_config


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_learning_rate_of_a_resumed_run_is_that_of_its_step(kind: str, mesh: Mesh, tmp_path: Path) -> None:
    model = save_config(tmp_path / "model")
    schedule = {"kind": kind, "warmup": 2, "final": 0.1}
    whole = make_trainer(make_config(tmp_path / "whole", model, **SFT, schedule=schedule), mesh)
    whole.run()
    rates = [line["lr"] for line in lines(tmp_path / "whole")]
    assert len(set(rates)) == 6, "every step has its own"

    config = make_config(tmp_path / "parts", model, **SFT, schedule=schedule, checkpoint={"every": 2})
    first = make_trainer(config, mesh)
    crash(first.engine, at=3)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    resumed = make_trainer(config, mesh)
    assert resumed.step == 2
    resumed.run()
    assert [line["lr"] for line in lines(tmp_path / "parts")] == rates
    for name, weight in weights_of(whole.engine.model).items():
        assert torch.equal(weight, weights_of(resumed.engine.model)[name]), name
