"""Mixers on all segments at once on a GPU: as exact as one sample at a time, no synchronisation, compiled layers."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from padfree.batch import PackedBatch
from padfree.cp import shard
from padfree.layers.compile import compile_layers
from padfree.model import attach
from padfree.model.mixers import fla_kernels, varlen_kernel
from padfree.model.mixers.own_forward import reference_forward
from padfree.model.structure import layers_of
from padfree.testing.models import build, row
from padfree.warning import PadfreeWarning
from tests.model.plain_kernels import ways

pytestmark = pytest.mark.gpu

LENGTHS = [150, 1, 77, 129, 64, 3]
_DELTA: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_LATENT = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {**_DELTA, "head_dim": 64},
    "olmo_hybrid": _DELTA,
    "kimi_linear": {**_LATENT, "linear_head_dim": 64, "mlp_layer_types": ["dense", "dense"]},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_d_ssm": 512, "head_dim": 64},
    "lfm2": {},
}


def large(name: str) -> PreTrainedModel:
    """In bfloat16 on the GPU, with supported head sizes, if the kernels run on this machine."""
    if name != "lfm2" and (reason := fla_kernels.unavailable("cuda")) is not None:
        pytest.skip(reason)
    common: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 512}
    model = build(name, **{**common, **SIZES[name]}).cuda()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PadfreeWarning)
        tried = attach(copy.deepcopy(model))
        tried(**shard(row([3]).to("cuda")).model_inputs())
    for reason in varlen_kernel._TRIALS.values():  # the package disables some kernels with some versions of Triton
        if ways(tried) != {True} and reason is not None and "Triton" in reason:
            pytest.skip(f"{name}: {reason}")
    return model


def run(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Tensor]:
    """Logits of the real tokens and the gradient of every parameter, float32 on the host."""
    model.zero_grad()
    real = batch.num_tokens - batch.pad_length
    logits = model(**shard(batch).model_inputs()).logits[0, :real]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.device)
    (logits.float() * weights).sum().backward()
    found = {"logits": logits.detach()}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: value.float().cpu() for name, value in found.items()}


def apart(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((values[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


@pytest.mark.parametrize("name", SIZES)
def test_the_fast_way_is_as_exact_as_one_sample_at_a_time(name: str) -> None:
    """Compared with one sample at a time in float32 with plain PyTorch, on the CPU."""
    model, batch = large(name), row(LENGTHS, pad=5)
    exact = copy.deepcopy(model).float().cpu()
    slow = attach(copy.deepcopy(model), fast_mixers=False)
    expected = run(attach(exact, fast_mixers=False), batch)
    noise = apart(run(slow, batch.to("cuda")), expected)
    fast = attach(model)
    found = apart(run(fast, batch.to("cuda")), expected)
    assert ways(slow) == {False}
    assert ways(fast) == {True}, list(varlen_kernel._TRIALS.values())
    typical = sorted(noise.values())[len(noise) // 2]
    wrong = {each: (found[each], noise[each]) for each in found if found[each] > 2 * max(noise[each], typical) + 2e-3}
    assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize("name", SIZES)
def test_a_changed_sample_changes_no_other(name: str) -> None:
    model, batch = attach(large(name)).eval(), row(LENGTHS, pad=5).to("cuda")
    offsets = batch.segments.offsets
    with torch.no_grad():
        before = model(**shard(batch).model_inputs()).logits[0]
        assert ways(model) == {True}
        batch.input_ids[: offsets[1]] = (batch.input_ids[: offsets[1]] + 1) % 64
        after = model(**shard(batch).model_inputs()).logits[0]
    assert not torch.equal(after[: offsets[1]], before[: offsets[1]])
    assert torch.equal(after[offsets[1] :], before[offsets[1] :])


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_a_step_never_waits_for_the_device(name: str) -> None:
    model = attach(large(name))
    inputs = shard(row(LENGTHS, pad=5).to("cuda")).model_inputs()
    model(**inputs).logits.float().square().mean().backward()  # loads the kernels
    other = shard(row([90, 20, 31], pad=3).to("cuda")).model_inputs()
    model(**other).logits.float().square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs).logits.float().square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_compiled_layers_are_as_exact(name: str) -> None:
    model = attach(large(name))
    batches = [row(LENGTHS, pad=5).to("cuda"), row([90, 20, 31], pad=3).to("cuda")]
    exact = attach(copy.deepcopy(model).float().cpu(), fast_mixers=False)
    plain = [run(model, batch) for batch in batches]
    compile_layers(layers_of(model), "inductor", "none")
    for batch, eager in zip(batches, plain, strict=True):
        expected = run(exact, batch.to("cpu"))
        noise, found = apart(eager, expected), apart(run(model, batch), expected)
        typical = sorted(noise.values())[len(noise) // 2]
        assert all(found[each] <= 2 * max(noise[each], typical) + 2e-3 for each in found), (noise, found)
    if name == "lfm2":
        assert not counters["graph_break"]


def test_kernels_that_refuse_gradients_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that fail the test are not used at all; each segment runs transformers' plain PyTorch code."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    plain: Any = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        output, state = plain(*args, **kwargs)
        output.register_hook(_refuse)
        return output, state

    refusing.__wrapped__ = plain  # type: ignore[attr-defined]
    refusing.__module__ = modeling.__name__
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", refusing)
    monkeypatch.setattr(fla_kernels, "unavailable", lambda device_type: "it is not here")
    monkeypatch.setattr(varlen_kernel, "_TRIALS", {})
    monkeypatch.setattr(varlen_kernel, "_SAID", set())
    reference_forward.cache_clear()
    try:
        model, batch = build("qwen3_5").cuda().bfloat16(), row(LENGTHS, pad=5).to("cuda")
        expected = run(attach(copy.deepcopy(model), fast_mixers=False), batch)
        with pytest.warns(PadfreeWarning, match="one sample at a time, which is slow: it is not here"):
            found = run(attach(model), batch)
    finally:
        reference_forward.cache_clear()
    assert [name for name, *_ in varlen_kernel._TRIALS] == ["own"]
    assert "the kernel refuses" in str(list(varlen_kernel._TRIALS.values()))
    assert max(apart(found, expected).values()) < 1e-2


def _refuse(gradient: Tensor) -> Tensor:
    raise RuntimeError("the kernel refuses")


@pytest.mark.usefixtures("_fresh_compiler")
def test_experts_by_grouped_matmuls_are_compiled() -> None:
    """Stock experts in compiled layers: no graph break, and correct gradients."""
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=64, head_dim=64).cuda()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    attach(model)
    assert model.config._experts_implementation == "grouped_mm"
    batch = row(LENGTHS, pad=5).to("cuda")
    exact = attach(copy.deepcopy(model).float())
    exact.set_experts_implementation("eager")
    expected, eager = run(exact, batch), run(model, batch)
    compile_layers(layers_of(model), "inductor", "none")
    found = run(model, batch)
    assert not counters["graph_break"]
    noise = apart(eager, expected)
    # rounding can route single tokens to other experts, so compare norms, not entries
    assert all(apart(found, expected)[name] <= 2 * noise[name] + 2e-2 for name in noise)
