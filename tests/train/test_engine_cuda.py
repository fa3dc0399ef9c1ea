"""The engine on one GPU: the same steps as on the CPU, to what bfloat16 allows."""

from __future__ import annotations

import pytest
import torch
from train_cases import LOSSES, make_engine, make_samples, small_model, two_steps

from padfree.dist import distributed, make_mesh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.filterwarnings("ignore")  # inductor warns about what it compiles, FSDP2 about a group of one
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "opsm"])  # its threshold falls either way in bf16
def test_bf16_steps_are_close_to_those_of_the_cpu(name: str) -> None:
    samples = make_samples()
    losses = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        with distributed(device=device) as here:
            mesh = make_mesh(here)
            model = small_model(head_dim=16).to(here)
            reports, weights = two_steps(make_engine(mesh, LOSSES[name], model, dtype=dtype), samples)
            assert all(torch.isfinite(weight).all() for weight in weights.values())
            assert {weight.dtype for weight in weights.values()} == {torch.float32}, "the optimizer keeps float32"
            losses[device] = [report.loss for report in reports]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=2e-2, abs=2e-2)
