"""Scores from logits against log_softmax, forward and backward, and what is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from padfree.losses import logits as module
from padfree.losses import score_logits
from tests.refused import refused


def plain(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    return logprobs.gather(-1, labels[..., None].long())[..., 0], entropy


ROWS = [(torch.float64, 1e-12, 1e-10), (torch.float32, 1e-5, 1e-4), (torch.bfloat16, 2e-3, 1e-2)]


@pytest.mark.parametrize(("dtype", "atol", "rtol"), ROWS, ids=str)
@pytest.mark.parametrize("shape", [(31,), (7, 31), (2, 5, 31), (2, 2, 3, 31), (0, 31), (3, 1)], ids=str)
@pytest.mark.parametrize("entropy", [True, False])
def test_against_log_softmax(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    atol: float,
    rtol: float,
    entropy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 100)  # three tokens, vocabulary 31
    source = (torch.randn(shape) * 3).to(dtype)
    labels = torch.randint(0, shape[-1], shape[:-1])
    ours, theirs = source.clone().requires_grad_(), source.clone().requires_grad_()
    found = score_logits(ours, labels, temperature=0.7, entropy=entropy)
    expected = plain(theirs, labels, 0.7)
    torch.testing.assert_close(found[0], expected[0], atol=atol, rtol=rtol)
    upstream, upstream_entropy = torch.randn(2, *shape[:-1], dtype=found[0].dtype)
    if entropy:
        torch.testing.assert_close(found[1], expected[1], atol=atol, rtol=rtol)
        ((found[0] * upstream).sum() + (found[1] * upstream_entropy).sum()).backward()
        ((expected[0] * upstream).sum() + (expected[1] * upstream_entropy).sum()).backward()
    else:
        assert found[1] is None
        (found[0] * upstream).sum().backward()
        (expected[0] * upstream).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=atol, rtol=rtol)
    assert ours.grad.dtype == dtype


def test_gradcheck() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(
        lambda x: score_logits(x, labels, temperature=1.3, entropy=True), (logits,), fast_mode=False
    )


def test_only_one_of_the_two_results_is_used() -> None:
    logits, labels = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.tensor([0, 5, 2, 2])
    for which in (0, 1):
        (grad,) = torch.autograd.grad(score_logits(logits, labels, entropy=True)[which].sum(), logits)
        (expected,) = torch.autograd.grad(plain(logits, labels, 1.0)[which].sum(), logits)
        torch.testing.assert_close(grad, expected)


def test_huge_and_forbidden_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-float("inf"), 2.0, 1.0]], requires_grad=True)
    logprobs, entropy = score_logits(logits, torch.tensor([1, 1]), entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    expected = torch.log_softmax(torch.tensor([2.0, 1.0]), 0)
    torch.testing.assert_close(logprobs.detach(), torch.stack([torch.tensor(-2e4), expected[0]]))
    torch.testing.assert_close(entropy.detach(), torch.stack([torch.tensor(0.0), -(expected.exp() * expected).sum()]))
    assert logits.grad.isfinite().all()


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation newly allocated."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known, self.elements, self.count = known.untyped_storage().data_ptr(), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() != self.known:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("cut", [False, True])
def test_forward_allocates_no_second_tensor_of_that_size(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 500)
    logits = torch.randn(4, 21, 100, requires_grad=True)
    given = logits[:, :-1] if cut else logits
    labels = torch.randint(0, 100, given.shape[:-1])
    with Largest(logits) as largest:
        logprobs, _ = score_logits(given, labels, entropy=True)
    assert largest.elements <= 500
    with Largest(logits) as largest:
        torch.autograd.grad(logprobs.sum(), given)
    assert largest.elements <= logits.numel()


def test_refusals() -> None:
    logits = torch.randn(4, 6)
    with refused("labels"):
        score_logits(logits, torch.zeros(3, dtype=torch.long))
    with refused("temperature"):
        score_logits(logits, torch.zeros(4, dtype=torch.long), temperature=0.0)
