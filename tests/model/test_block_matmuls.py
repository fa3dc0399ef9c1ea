"""Operators of `rollout.exact` on a CPU: they compute what the model's own code computes, with bits of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from padfree.model.block_matmuls import BLOCK_ROWS, experts_forward, linear_in_blocks, use_block_matmuls
from padfree.model.stacked_experts import stacked_experts
from padfree.testing.models import build

TOKENS = 57


def inputs(experts: nn.Module, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, D], choices [T, 2] and weights [T, 2]. The last expert gets no token."""
    generator = torch.Generator().manual_seed(0)
    count = int(experts.num_experts) - 1  # type: ignore[call-overload]
    scores = torch.rand(TOKENS, count, generator=generator)
    return (
        torch.randn(TOKENS, width, generator=generator),
        scores.topk(2).indices,
        torch.rand(TOKENS, 2, generator=generator),
    )


def result_and_gradients(
    experts: nn.Module, forward: object, hidden: Tensor, choices: Tensor, weights: Tensor
) -> list[Tensor]:
    leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_(), *experts.parameters()]
    out = forward(leaves[0], choices, leaves[1])  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaves)]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_compute_what_the_model_computes(name: str) -> None:
    """With a gate; transposed, with biases; without a gate. Forward and all gradients, in float64."""
    experts = stacked_experts(build(name))[0].double()
    experts.config._experts_implementation = "eager"  # type: ignore[union-attr]  # grouped_mm has no float64
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]  # type: ignore[index]
    hidden, choices, weights = inputs(experts, int(width))
    case = hidden.double(), choices, weights.double()
    expected = result_and_gradients(experts, experts.forward, *case)
    found = result_and_gradients(experts, lambda *tensors: experts_forward(experts, *tensors), *case)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_bits_of_a_token_do_not_depend_on_other_tokens(name: str) -> None:
    experts = stacked_experts(build(name))[0]
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]  # type: ignore[index]
    case = inputs(experts, int(width))
    with torch.no_grad():
        expected = experts_forward(experts, *case)
        for start, end in ((0, 1), (5, 6), (3, 20), (20, TOKENS)):
            found = experts_forward(experts, *(tensor[start:end] for tensor in case))
            assert torch.equal(found, expected[start:end])
        order = torch.randperm(TOKENS)
        assert torch.equal(experts_forward(experts, *(tensor[order] for tensor in case)), expected[order])


def test_every_matmul_of_an_expert_has_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    linear = nn.functional.linear

    def recorded(x: Tensor, *others: Tensor | None) -> Tensor:
        shapes.append(tuple(x.shape))
        return linear(x, *others)

    monkeypatch.setattr(nn.functional, "linear", recorded)
    sizes = [0, 1, BLOCK_ROWS, BLOCK_ROWS + 1, 0, 3 * BLOCK_ROWS]
    rows, weight = torch.randn(sum(sizes), 12), torch.randn(len(sizes), 7, 12)
    found = linear_in_blocks(rows, weight, None, sizes, False)
    assert shapes == [(BLOCK_ROWS, 12)] * 7
    wanted = [part @ matrix.T for part, matrix in zip(rows.split(sizes), weight, strict=True)]
    torch.testing.assert_close(found, torch.cat(wanted))


@pytest.mark.parametrize("bias", [False, True])
def test_a_single_output_has_the_same_bits_for_any_number_of_rows(bias: bool) -> None:
    """PyTorch multiplies with a vector here, whose bits differ between odd and even numbers of rows."""
    torch.manual_seed(0)
    own, x = nn.Linear(64, 1, bias=bias), torch.randn(300, 64)
    expected = own(x)
    use_block_matmuls(nn.Sequential(own))
    found = own(x)
    torch.testing.assert_close(found, expected)
    for count in (16, 17, 31, 100, 255):
        assert torch.equal(own(x[:count]), found[:count])
    gradients = torch.autograd.grad(found.square().sum(), [*own.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [*own.parameters()])
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
