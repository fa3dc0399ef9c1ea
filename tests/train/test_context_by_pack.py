"""`parallel.context = "auto"`: packs with different numbers of context ranks in one step, exact for every method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from padfree.distributed import make_mesh
from padfree.packing.context_sizes import context_sizes
from padfree.train.microbatch import PackSettings
from tests.ranks import run_ranks
from tests.train.cases import LOSSES, alone, make_engine, make_samples, small_model, two_steps
from tests.train.test_shared_prefixes import assert_close, gradients, tree_samples

LENGTHS = (5, 9, 4, 52, 7, 6, 3, 8, 25, 11)
MAX_TOKENS = 14
CASES = [("allgather", "gspo"), ("ring", "sft"), ("ulysses", "clip")]


def changed(engine: Any, method: str) -> Any:
    engine.scorer.packer.pack_settings = PackSettings(method=method)
    return engine


def cases(rank: int, world: int) -> dict[str, Any]:
    mesh = make_mesh("cpu", contexts=context_sizes(world))
    found: dict[str, Any] = {}
    for method, loss in CASES:
        engine = changed(make_engine(mesh, LOSSES[loss]), method)
        reports, weights = two_steps(engine, make_samples(LENGTHS))
        found[method] = ([report.loss for report in reports], weights, reports[0].plan.widths, reports[0].num_tokens)
        found[f"{method} logprobs"] = engine.scorer.logprobs(make_samples(LENGTHS))
    samples = tree_samples()
    engine = make_engine(mesh, LOSSES["clip"])
    old = [sample.ref_logprobs for sample in samples]
    found["shared"] = gradients(engine, samples, old, PackSettings(share_prefixes=True), 16)
    plan = engine.scorer.packer.plan(samples)
    found["shared widths"], found["sharing"] = plan.widths, plan.sharing
    return found


def test_rows_of_different_widths_train_as_one_process_does() -> None:
    every = run_ranks(4, cases)
    mesh = alone()
    for method, loss in CASES:
        engine = make_engine(mesh, LOSSES[loss], max_tokens=sum(LENGTHS))
        reports, weights = two_steps(engine, make_samples(LENGTHS))
        expected = engine.scorer.logprobs(make_samples(LENGTHS))
        for found in every:
            losses, own, widths, tokens = found[method]
            assert set(np.unique(widths)) == {1, 2, 4}
            assert tokens == sum(LENGTHS)
            assert losses == pytest.approx([report.loss for report in reports], rel=1e-5, abs=1e-6)
            for name, weight in weights.items():
                torch.testing.assert_close(own[name], weight, rtol=1e-5, atol=1e-5)
            for scored, right in zip(found[f"{method} logprobs"], expected, strict=True):
                np.testing.assert_allclose(scored, right, atol=2e-5)
    samples = tree_samples()
    old = [sample.ref_logprobs for sample in samples]
    right: dict[str, Tensor] = gradients(
        make_engine(mesh, LOSSES["clip"], small_model()), samples, old, PackSettings(), 1
    )
    for found in every:
        assert found["shared widths"].max() > 1
        assert found["sharing"] > 1
        assert_close(found["shared"], right, 1e-5)
