"""Each update is normalised by the tokens of its own mini-batch, not by those of the whole rollout batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from padfree.distributed import Mesh
from padfree.train.step import PendingStep, PreparedStep
from tests.train.trainer_cases import make_config, make_trainer, save_config


@pytest.mark.parametrize("aggregation", ["token-mean", "sample-mean", "group-mean"])
def test_the_weights_of_every_mini_batch_add_up_to_one(aggregation: str, mesh: Mesh, tmp_path: Path) -> None:
    loss = {"kind": "clip", "aggregation": aggregation, "mini_batches": 2, "skip_zero_gradient": False}
    batch = {"samples": 6, "max_tokens": 16}
    trainer = make_trainer(make_config(tmp_path / "run", save_config(tmp_path / "model"), batch=batch, loss=loss), mesh)
    totals: list[tuple[int, float]] = []
    begin = trainer.engine.begin

    def recorded(prepared: PreparedStep, **options: Any) -> PendingStep:
        total = sum(float(micro_batch.packed.weights.sum()) for micro_batch, _ in prepared.packs)
        totals.append((len(prepared.samples), total))
        return begin(prepared, **options)

    trainer.engine.begin = recorded  # type: ignore[method-assign]
    trainer.run()
    assert [count for count, _ in totals] == [3] * 6, "two updates with each batch of six samples"
    assert [total for _, total in totals] == pytest.approx([1.0] * 6)
