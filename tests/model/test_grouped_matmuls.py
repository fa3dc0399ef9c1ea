"""Experts of `rollout.exact` on a GPU, computed on a CPU: the results of the model, and bits without other tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from padfree.model import grouped_matmuls
from padfree.model.block_matmuls import BLOCK_ROWS
from padfree.model.grouped_matmuls import experts_forward, use_exact_matmuls
from padfree.model.stacked_experts import stacked_experts
from padfree.testing.models import build
from tests.model.test_block_matmuls import TOKENS, inputs, result_and_gradients


def experts_of(name: str) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    experts: Any = stacked_experts(build(name))[0]
    return experts, inputs(experts, int(experts.down_proj.shape[2 if experts.is_transposed else 1]))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h"])
def test_experts_compute_what_the_model_computes(name: str) -> None:
    """With a gate; transposed, with biases; without a gate. Forward and all gradients."""
    experts, (hidden, choices, weights) = experts_of(name)
    experts.double().config._experts_implementation = "eager"  # grouped_mm has no float64
    case = hidden.double(), choices, weights.double()
    expected = result_and_gradients(experts, experts.forward, *case)
    found = result_and_gradients(experts, lambda *tensors: experts_forward(experts, *tensors), *case)
    for got, want in zip(found, expected, strict=True):  # experts are added in float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_token_do_not_depend_on_other_tokens(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a matmul whose rows are independent, as `row_trial` requires of the library."""

    def one_row_at_a_time(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        experts = torch.searchsorted(ends, torch.arange(len(x)), right=True)
        return torch.stack([row @ weight[expert] for row, expert in zip(x, experts.tolist(), strict=True)])

    monkeypatch.setattr(grouped_matmuls, "grouped_matmul", one_row_at_a_time)
    experts, case = experts_of("qwen3_moe")
    experts.to(dtype)
    case = case[0].to(dtype), case[1], case[2].to(dtype)
    with torch.no_grad():
        expected = experts_forward(experts, *case)
        assert expected.dtype == dtype
        for start, end in ((0, 1), (5, 6), (3, 20), (20, TOKENS)):
            found = experts_forward(experts, *(tensor[start:end] for tensor in case))
            assert torch.equal(found, expected[start:end])
        order = torch.randperm(TOKENS)
        assert torch.equal(experts_forward(experts, *(tensor[order] for tensor in case)), expected[order])


def test_each_device_gets_its_matmuls() -> None:
    for device, module in (("cpu", "block_matmuls"), ("cuda", "grouped_matmuls")):
        model = build("qwen3_moe")
        model.narrow = narrow = nn.Linear(64, 1)
        use_exact_matmuls(model, torch.device(device))
        forwards = [experts.forward.func for experts in stacked_experts(model)]  # type: ignore[union-attr]
        assert forwards
        assert all(forward.__module__ == f"padfree.model.{module}" for forward in forwards)
        rows = torch.randn(BLOCK_ROWS, 64)
        assert narrow(rows).shape == (BLOCK_ROWS, 1)
        assert "forward" in vars(narrow)
