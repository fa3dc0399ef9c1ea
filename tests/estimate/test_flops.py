"""FLOPs of a step compared with the matrices of a real model, and peaks of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from padfree.estimate.flops import Flops, model_cost, peak_tflops
from padfree.packing import CostModel
from tests.train.cases import small_model

CPU = torch.device("cpu")


def test_metrics_are_rates_of_a_device_and_a_share_of_its_peak() -> None:
    flops = Flops(cost=CostModel(linear=1e12), head=0.5e12, devices=2, peak=None)
    assert flops.metrics([10, 10, 10], 20, 2.0) == {"tflops_per_device": (30 - 0.5 * 10) / 2 / 2}
    known = replace(flops, peak=100.0).metrics([10, 10, 10], 20, 2.0)
    assert known["mfu"] == known["tflops_per_device"] / 100.0
    assert flops.metrics([10], 10, 0.0) == {}


def test_adapters_need_no_gradients_of_the_weights_below_them() -> None:
    config = small_model().config
    whole = model_cost(config)
    assert whole == CostModel.from_config(config)
    assert model_cost(config, adapters=True) == replace(whole, linear=whole.linear * 2 / 3)


def test_flops_of_a_model_are_six_for_each_weight_that_a_token_meets() -> None:
    model = small_model()
    flops = Flops.of(model.config, devices=1, device=CPU, dtype=torch.bfloat16)
    assert flops.peak is None
    matrices = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim == 2}
    embeddings, head = matrices["model.embed_tokens.weight"], matrices["lm_head.weight"]
    layers = sum(matrices.values()) - embeddings - head
    pairs = 6 * 2 * model.config.num_attention_heads * model.config.head_dim * 7 * 7
    # 2 layers; a (query, key) pair multiplies 2 d numbers per head, half of the n² pairs are causal, 6 FLOPs each
    assert flops.step([7], 7) == 6 * 7 * (layers + head) + pairs
    assert flops.step([7], 3) == 6 * (7 * layers + 3 * head) + pairs
    frozen = Flops.of(model.config, devices=1, device=CPU, dtype=torch.bfloat16, adapters=True)
    assert frozen.step([7], 3) == pytest.approx(4 * (7 * layers + 3 * head) + pairs)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
