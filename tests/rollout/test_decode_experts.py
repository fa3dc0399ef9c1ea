"""Experts of a decode step: the operator against transformers' own loop, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from padfree.model.stacked_experts import stacked_experts
from padfree.rollout.engines.in_process.decode_experts import (
    all_stacked,
    experts_forward,
    grouped_linear,
    reference,
    sorted_rows,
)
from padfree.testing.models import build
from tests.interpreter import DEVICE, INTERPRETED, needs_kernels

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_5_moe"]
ROUTES = {
    "spread": lambda tokens, experts, top: torch.rand(tokens, experts).topk(top).indices,
    "one expert": lambda tokens, experts, top: torch.arange(top).expand(tokens, top) + experts - top,
    "first experts": lambda tokens, experts, top: torch.arange(top).expand(tokens, top),
}


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_equal_the_models_own_loop(name: str, routes: str) -> None:
    """In float64, on transformers' plain loop. Some experts get all tokens and others none."""
    model = build(name).double().eval()
    model.set_experts_implementation("eager")
    assert all_stacked(model)
    torch.manual_seed(0)
    for module in stacked_experts(model):
        for tokens in (1, 11):
            choices = ROUTES[routes](tokens, module.num_experts, 2)
            weights = torch.rand(tokens, 2, dtype=torch.float64)
            hidden = torch.randn(tokens, model.config.get_text_config().hidden_size, dtype=torch.float64)
            with torch.no_grad():
                expected = module(hidden, choices, weights)
                found = experts_forward(module, hidden, choices, weights)
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_a_dense_model_has_no_stacked_experts() -> None:
    assert not all_stacked(build("qwen3"))


def case(
    tokens: int, experts: int, top: int, sizes: tuple[int, int], routes: str, dtype: torch.dtype, *, transposed: bool
) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    inner, columns = sizes
    shape = (experts, inner, columns) if transposed else (experts, columns, inner)
    choices = ROUTES[routes](tokens, experts, top).to(DEVICE)
    tensors = [torch.randn(each).to(DEVICE, dtype) for each in ((tokens, inner), shape, (experts, columns))]
    return (*tensors, *sorted_rows(choices, experts))


def test_the_operator_passes_opcheck() -> None:
    torch.manual_seed(0)
    order, starts = sorted_rows(torch.rand(5, 4).topk(2).indices, 4)
    arguments = (torch.randn(5, 8), torch.randn(4, 6, 8), torch.randn(4, 6), order, starts, 2, True, False)
    torch.library.opcheck(grouped_linear, arguments)


DTYPES = [(torch.float32, 2e-5)]
if not INTERPRETED:  # its tl.dot treats the bits of bfloat16 as integers
    DTYPES.append((torch.bfloat16, 2e-2))
SHAPES = [  # tokens, experts, top k, (inner, columns)
    (7, 5, 2, (48, 130)),
    (1, 8, 8, (32, 16)),
    (40, 3, 1, (33, 65)),
]


@needs_kernels
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
def test_the_kernel_equals_the_reference(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, int, int, tuple[int, int]], routes: str
) -> None:
    from padfree.rollout.engines.in_process.triton_grouped_linear import is_interpreted, multiply

    assert is_interpreted() == INTERPRETED
    top = shape[2]
    for transposed in (False, True):
        x, weight, bias, order, starts = case(*shape, routes, dtype, transposed=transposed)
        for gather, scatter, with_bias in ((top, False, True), (0, True, False), (top, True, True)):
            rows = x if gather else x[order // top].contiguous()
            arguments = (rows, weight, bias if with_bias else None, order, starts, gather, scatter, transposed)
            wide = [each.double() if each is not None and each.is_floating_point() else each for each in arguments[:3]]
            expected = reference(*wide, *arguments[3:])
            found = multiply(*arguments)
            scale = expected.abs().max()
            assert (found.double() - expected).abs().max() <= tolerance * scale
