"""Adapters on experts on a GPU: the grouped kernels agree with float64, also for experts without tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from padfree.config import LoraConfig
from padfree.model.expert_adapters import low_rank
from padfree.model.lora import is_adapter
from tests.model.test_expert_adapters import adapted

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rank", [3, 8, 16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_grouped_kernels_agree_with_float64(compiled: bool, rank: int) -> None:
    """The gradients of an expert without tokens are exactly 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 64), (8, rank, 64), (8, 128, rank))
    inputs = [torch.randn(shape, generator=generator).bfloat16() / shape[-1] ** 0.5 for shape in shapes]
    ends = torch.tensor([0, 100, 101, 101, 180, 300, 300, 300], dtype=torch.int32)

    def outcome(device: str, dtype: torch.dtype) -> list[Tensor]:
        torch._dynamo.reset()
        leaves = [tensor.to(device, dtype, copy=True).requires_grad_() for tensor in inputs]
        function = torch.compile(low_rank) if compiled and device == "cuda" else low_rank
        result = function(*leaves, ends.to(device))
        (result * torch.linspace(-1, 1, 128, device=device, dtype=dtype)).sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    found = outcome("cuda", torch.bfloat16)
    for own, expected in zip(found, outcome("cpu", torch.float64), strict=True):
        bound = 8 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
        torch.testing.assert_close(own.cpu().double(), expected, atol=bound, rtol=0)
    for gradient in found[2:]:
        assert all(not gradient[expert].any() for expert in (0, 3, 6, 7))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_float32_gradients_are_those_of_the_cpu(name: str) -> None:
    model = adapted(name, LoraConfig(rank=3, targets=("all-linear", "experts")))

    def gradients(device: str) -> dict[str, Tensor]:
        model.to(device).zero_grad()
        model(input_ids=torch.arange(12, device=device)[None]).logits.log_softmax(-1)[..., 3].sum().backward()
        return {key: each.grad.cpu() for key, each in model.named_parameters() if is_adapter(key)}

    expected, found = gradients("cpu"), gradients("cuda")
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=0, msg=key)
