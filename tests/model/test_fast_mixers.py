"""Mixers on all segments at once: equal to one sample at a time, tested before use, rejected if they leak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.cp import gather_tokens, shard
from padfree.layers.compile import compile_layers
from padfree.layers.recompute import recompute_layers
from padfree.model import attach
from padfree.model.mixers import fla_kernels, varlen_kernel
from padfree.model.mixers.by_segment import by_segment
from padfree.model.mixers.convolution import convolution
from padfree.model.structure import layers_of
from padfree.segments import Segments
from padfree.testing.models import build, row
from padfree.warning import PadfreeWarning
from tests.model.plain_kernels import delta_rule, plain_kernels, ways
from tests.model.test_mixers import LENGTHS, run
from tests.rounding import largest_difference

FAST = ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h", "falcon_h1", "zamba2"]


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Fill uninitialised memory with NaN, because some classes create parameters with `torch.empty`."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("name", [*FAST, "lfm2", "lfm2_moe"])
def test_all_at_once_is_one_sample_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels(monkeypatch)
    batch = row(LENGTHS, pad=3)
    slow = attach(build(name), fast_mixers=False)
    logits, expected = run(slow, batch)
    assert ways(slow) == {False}
    fast = attach(build(name))
    fast_logits, found = run(fast, batch)
    assert ways(fast) == {True}, varlen_kernel._TRIALS
    assert largest_difference({"logits": fast_logits}, {"logits": logits})[0] < 1e-5
    assert largest_difference(found, expected)[0] < 1e-5
    assert ways(attach(fast, fast_mixers=False)) == {False}
    assert largest_difference(run(fast, batch)[1], expected)[0] < 1e-6


@pytest.mark.parametrize(
    ("name", "kept", "layer"), [("qwen3_5", "selective", "linear_attention"), ("lfm2", "none", "conv")]
)
def test_compiled_layers_give_the_same(name: str, kept: Any, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only mixers; attention in compiled layers has its own tests. A short convolution does not break the graph."""
    plain_kernels(monkeypatch)
    model = attach(build(name, num_hidden_layers=1, layer_types=[layer]))
    batches = [row([9, 3, 12], pad=3), row([7, 20])][
        : 1 if name == "qwen3_5" else 2
    ]  # boundaries are not constants of the graph
    expected = [run(model, batch)[1] for batch in batches]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(layers_of(model), "aot_eager", kept)
    found = [run(model, batch)[1] for batch in batches]
    assert ways(model) == {True}
    assert all(largest_difference(again, once)[0] < 1e-5 for again, once in zip(found, expected, strict=True))
    assert bool(torch._dynamo.utils.counters["graph_break"]) == (name == "qwen3_5")


def test_recomputed_layers_give_the_same() -> None:
    model, batch = attach(build("lfm2")), row(LENGTHS, pad=3)
    _, expected = run(model, batch)
    recompute_layers(layers_of(model), "full")
    assert largest_difference(run(model, batch)[1], expected)[0] < 1e-6


def test_a_leak_in_the_kernels_is_found_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels(monkeypatch)

    def leaking(*args: Any, segments: Segments, **kwargs: Any) -> tuple[Tensor, None]:
        whole = Segments.from_lengths([segments.num_tokens])
        return delta_rule(*args, segments=whole, **kwargs)

    monkeypatch.setattr(fla_kernels, "gated_delta_rule", leaking)
    batch = row(LENGTHS)
    model = attach(build("qwen3_5"))
    _, found = run(model, batch)
    assert ways(model) == {False}
    (reason,) = varlen_kernel._TRIALS.values()
    assert reason is not None
    assert reason.startswith("on this machine its output differs by ")
    _, expected = run(attach(build("qwen3_5"), fast_mixers=False), batch)
    assert largest_difference(found, expected)[0] < 1e-6
    monkeypatch.setattr(varlen_kernel, "_SAID", set())
    with pytest.warns(PadfreeWarning, match="runs one sample at a time, which is slow: there is none"):
        varlen_kernel._say_once("X runs one sample at a time, which is slow: there is none")
    varlen_kernel._say_once("X runs one sample at a time, which is slow: there is none")  # fails if it warns again


def test_a_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels(monkeypatch)

    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(fla_kernels, "gated_delta_rule", failing)
    model = attach(build("qwen3_5"))
    run(model, row(LENGTHS))
    assert ways(model) == {False}
    assert list(varlen_kernel._TRIALS.values()) == ["the test failed (RuntimeError: no kernel image)"]


@pytest.mark.parametrize(("triton", "refused"), [("3.3.1", False), ("3.6.0", True), ("3.7.0", True), ("3.7.1", False)])
def test_versions_whose_gradients_are_wrong_are_named(
    triton: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like flash-linear-attention itself: on Hopper, from Triton 3.4 to 3.7.0, unless tilelang is installed."""
    unavailable = fla_kernels.unavailable.__wrapped__  # without the cache
    monkeypatch.setattr(fla_kernels, "import_module", lambda name: None)
    monkeypatch.setattr(fla_kernels, "version", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: None)
    reason = unavailable("cuda")
    assert (reason is not None) == refused
    assert not refused or reason.endswith(f"on Hopper with Triton {triton}; install Triton 3.7.1 or newer, or tilelang")
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: object())
    assert unavailable("cuda") is None
    monkeypatch.setattr(fla_kernels, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert unavailable("cuda") is None


@pytest.mark.parametrize(
    "error",
    [ImportError("No module named 'fla'"), OSError("libz3.so.4.15: cannot open"), RuntimeError("no enum at 'NONE'")],
)
def test_a_package_that_is_not_there_or_broken_is_a_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> None:
        raise error

    monkeypatch.setattr(fla_kernels, "import_module", failing)
    reason = fla_kernels.unavailable.__wrapped__("cuda")
    assert reason == f"flash-linear-attention cannot be imported ({error}); install padfree[fla]"


def test_kernels_of_a_package_are_not_called_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls flash-linear-attention if it is installed; the small copies of the probe must not."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    def kernel(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("0 active drivers")

    kernel.__wrapped__ = modeling.torch_chunk_gated_delta_rule.__wrapped__  # type: ignore[attr-defined]
    kernel.__module__ = modeling.__name__
    expected = run(attach(build("qwen3_5")), row(LENGTHS))[0]
    from padfree.model import probe
    from padfree.model.mixers.own_forward import reference_forward

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", kernel)
    monkeypatch.setattr(probe, "_VERDICTS", {})
    reference_forward.cache_clear()
    try:
        assert torch.equal(run(attach(build("qwen3_5")), row(LENGTHS))[0], expected)
    finally:
        reference_forward.cache_clear()


@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_convolution_is_that_of_each_segment(width: int) -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 2, 7]
    values = torch.randn(sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    segments = Segments.from_lengths(lengths)
    found = convolution(values.T[None], weight, bias, "silu", segments=segments)[0].T

    def one(pieces: list[Tensor]) -> Tensor:
        padded = torch.nn.functional.pad(pieces[0].transpose(1, 2), (width - 1, 0))
        return torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6)).mT

    expected = by_segment(one, [values], lengths)
    assert (found - expected).abs().max() < 1e-12
    weights = torch.randn_like(expected)
    inputs = (values, weight, bias)
    again = torch.autograd.grad(found, inputs, weights)
    for gradient, wanted in zip(again, torch.autograd.grad(expected, inputs, weights), strict=True):
        assert (gradient - wanted).abs().max() < 1e-12


def test_gathered_rows_are_whole() -> None:
    """The pad is a separate segment that affects nothing."""
    model = attach(build("lfm2"))
    with torch.no_grad():
        short = shard(row([5, 8])).model_inputs()
        long = shard(row([5, 8]).padded_to(20))
        logits = gather_tokens(model(**long.model_inputs()).logits[0], long.context)
        assert (logits[:13] - model(**short).logits[0]).abs().max() < 1e-5
