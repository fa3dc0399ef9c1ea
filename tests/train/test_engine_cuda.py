"""The engine on one GPU: the same steps as on the CPU, within bfloat16 precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from padfree.distributed import distributed, make_mesh
from padfree.sample import with_arrays
from tests.train.cases import LOSSES, make_engine, make_samples, small_model, two_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "opsm"])  # its threshold is ambiguous in bfloat16
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


@pytest.mark.parametrize("name", ["sft", "clip", "gspo"])
@pytest.mark.parametrize(("compile", "reshard"), [("none", True), ("inductor", True), ("inductor", False)])
def test_the_host_never_waits_within_a_step(name: str, compile: str, reshard: bool) -> None:
    """Preparing and beginning steps never synchronises; only `finish` does."""
    samples = make_samples()
    with distributed(device="cuda") as device:
        mesh = make_mesh(device)
        model = small_model(head_dim=64).to(device)
        engine = make_engine(mesh, LOSSES[name], model, dtype=torch.bfloat16, compile=compile, reshard=reshard)
        if name != "sft":
            samples = with_arrays(samples, old_logprobs=engine.scorer.logprobs(samples))
        for _ in range(2):  # load and compile kernels
            engine.step(samples, lr_factor=0.1)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = engine.begin(engine.prepare(samples), lr_factor=0.1)
            second = engine.begin(engine.prepare(samples), lr_factor=0.1, after=first)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert first.finish().num_samples == second.finish().num_samples == len(samples)


def test_masters_are_those_of_fsdp_on_a_gpu() -> None:
    """The same operations are rounded, so that a step is bit-identical."""
    samples, found = make_samples(), []
    with distributed(device="cuda") as device:
        mesh = make_mesh(device)
        for reshard in (True, False):
            model = small_model(head_dim=64).to(device)
            engine = make_engine(mesh, LOSSES["sft"], model, dtype=torch.bfloat16, reshard=reshard)
            found.append(engine.step(samples, lr_factor=0.1))
    assert (found[0].loss, found[0].gradient_norm) == (found[1].loss, found[1].gradient_norm)


def test_varying_lengths_are_compiled_once() -> None:
    rng = np.random.default_rng(0)
    with distributed(device="cuda") as device:
        model = small_model(head_dim=64).to(device)
        engine = make_engine(make_mesh(device), LOSSES["sft"], model, dtype=torch.bfloat16, compile="inductor")
        torch._dynamo.reset()  # an earlier test may have compiled the same layers
        counters.clear()
        graphs = []
        for step in range(200):
            lengths = tuple(int(n) for n in rng.integers(2, 14, size=int(rng.integers(1, 6))))
            engine.step(make_samples(lengths, seed=step), lr_factor=0.01)
            graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]
