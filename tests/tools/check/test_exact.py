"""The float64 reference of a check: its accuracy, and its line in the report."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from padfree.testing.models import build
from padfree.tools.check import check_model
from padfree.tools.check import exact as exact_module
from padfree.tools.check.exact import float64_throughout, make_float64
from padfree.tools.check.one_at_a_time import one_at_a_time
from tests.tools.check import cases


def test_nothing_on_float64_is_computed_in_float32() -> None:
    x = torch.rand(5, dtype=torch.float64)
    with float64_throughout():
        found = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, 0, dtype=torch.float32)]
        found += [nn.functional.log_softmax(x, -1, dtype=torch.float32), x.sum(dtype=torch.float32)]
        assert torch.ones(2).float().dtype == torch.float32, "what is float32 stays so: the angles of RoPE"
        assert torch.arange(3).float().dtype == torch.float32
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert {each.dtype for each in found} == {torch.float64}
    assert x.float().dtype == torch.float32, "behind the block all is as before"


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_the_reference_is_far_more_exact_than_float32(name: str) -> None:
    """A change of weights below float32 precision changes the float64 loss as expected."""
    samples = cases.make_samples()
    model = build(name, **(cases.SIZES if name == "qwen3" else {})).eval()
    make_float64(model)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float64}
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 1e-11)
    with float64_throughout():
        losses = [one_at_a_time(one, samples).loss for one in (model, moved)]
    assert 0 < abs(losses[1] - losses[0]) < 1e-8


def test_the_report_names_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("qwen3", **cases.SIZES).config
    samples = cases.make_samples()
    report = check_model(config, samples, device="cpu")
    assert report.passed
    assert report.reference == "transformers in float64, one sample at a time, eager attention"
    assert report.noise == "transformers in float32, in padded pairs with eager attention"
    monkeypatch.setattr(exact_module, "free_memory", lambda device: 1e3)
    report = check_model(config, samples, device="cpu")
    assert report.passed
    assert report.reference.startswith("transformers in float32 (float64 needs about 0.0 GiB, but only 0.0 GiB can be ")
    assert report.reference.endswith("), one sample at a time, sdpa attention")


def test_a_model_that_does_not_run_in_float64_is_checked_in_its_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("qwen3", **cases.SIZES).config
    rms_norm = type(build("qwen3", **cases.SIZES).model.norm)
    forward = rms_norm.forward

    def no_float64(self: nn.Module, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float64:
            raise RuntimeError("no kernel for Double")
        found: Tensor = forward(self, hidden)
        return found

    monkeypatch.setattr(rms_norm, "forward", no_float64)
    report = check_model(config, cases.make_samples(), device="cpu")
    assert report.passed
    assert "in float32 (the model does not run in float64: no kernel for Double), one sample" in report.reference


def test_the_losses_of_pairs_have_the_same_reference() -> None:
    report = check_model(build("qwen3", **cases.SIZES).config, loss="dpo", samples=4, device="cpu")
    assert report.passed
    assert report.reference == "transformers in float64, the dpo loss of one pair at a time, eager attention"
