"""Attached models on a GPU in bfloat16, with the available kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from padfree.attention import choose_backend
from padfree.batch import PackedBatch
from padfree.cp import shard
from padfree.model import attach
from padfree.testing.models import EXPERTS, VOCABULARY, build, row

pytestmark = pytest.mark.gpu

LENGTHS = [300, 1, 77, 129, 40]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 512}
HEAD_DIM = 64


def large(name: str) -> PreTrainedModel:
    """A model whose heads have 64 channels, in bfloat16 on the GPU; its rotary frequencies stay in float32."""
    head = {} if name == "gpt2" else {"head_dim": HEAD_DIM}
    model = build(name, **SIZES, **head).cuda()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def skip_without(backend: str, name: str) -> None:
    softcap = name == "gemma2"
    try:
        choose_backend("cuda", torch.bfloat16, HEAD_DIM, softcap=softcap, requested=backend)
    except ValueError as error:
        pytest.skip(str(error))


def run(model: PreTrainedModel, batch: PackedBatch, backend: str) -> tuple[Tensor, Tensor]:
    """Logits of the real tokens and the gradients of all parameters in one vector, float32."""
    model.zero_grad()
    real = batch.num_tokens - batch.pad_length
    logits = model(**shard(batch, backend=backend).model_inputs()).logits[0, :real]
    return _after(model, logits, batch)


def run_single(model: PreTrainedModel, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    samples = batch.unpack(batch.input_ids)
    logits = torch.cat([model(input_ids=sample[None], use_cache=False).logits[0] for sample in samples])
    return _after(model, logits, batch)


def _after(model: PreTrainedModel, logits: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).cuda()
    (logits.float() * weights).sum().backward()
    gradients = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logits.detach().float(), torch.cat(gradients)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "auto"),  # one of the others
        *product(["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_oss"], ["torch", "fa4", "flex"]),
    ],
)
def test_packed_is_as_exact_as_one_at_a_time(name: str, backend: str) -> None:
    """Against one sample at a time in float32, packed bfloat16 is no worse than one sample at a time in bfloat16."""
    skip_without(backend, name)
    model = large(name)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    exact = copy.deepcopy(stock).float()
    batch = row(LENGTHS, pad=5).to("cuda")
    expected = run_single(exact, batch)
    alone = run_single(stock, batch)
    packed = run(attach(model), batch, backend)
    for what, actual, single, reference in zip(("logits", "gradients"), packed, alone, expected, strict=True):
        allowed = 1.5 * error(single, reference) + 2e-3
        assert error(actual, reference) <= allowed, f"{what}: {error(actual, reference):.1e} over {allowed:.1e}"


@torch.no_grad()
@pytest.mark.parametrize("backend", ["torch", "fa4", "flex"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_changed_sample_changes_no_other(name: str, backend: str) -> None:
    skip_without(backend, name)
    model = attach(large(name), backend).eval()
    batch = row(LENGTHS, pad=5).to("cuda")
    offsets = batch.segments.offsets
    before = model(**shard(batch).model_inputs()).logits[0]
    for source in range(batch.segments.num_segments):
        changed = batch.input_ids.clone()
        changed[offsets[source] : offsets[source + 1]] += 1
        after = model(**shard(replace(batch, input_ids=changed % VOCABULARY)).model_inputs()).logits[0]
        for other in range(batch.segments.num_segments):
            part = slice(offsets[other], offsets[other + 1])
            if other == source:
                assert not torch.equal(after[part], before[part])
            elif name in EXPERTS:
                assert error(after[part].float(), before[part].float()) <= 0.02, f"{source} changed {other}"
            else:
                assert torch.equal(after[part], before[part]), f"{source} changed {other}"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_never_waits_for_the_device(name: str) -> None:
    model = attach(large(name))
    inputs = shard(row(LENGTHS, pad=5).to("cuda")).model_inputs()
    model(**inputs).logits.float().square().mean().backward()  # loads the kernels
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
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_layers(name: str) -> None:
    model = attach(large(name))
    batches = [row(lengths).to("cuda") for lengths in ([100, 29], [64, 64, 7], [300], [11, 12, 13, 400])]
    expected = [run(model, batch, "auto") for batch in batches]
    for layer in model.model.layers:
        layer.compile()
    graphs = []
    for batch, (logits, gradients) in zip(batches, expected, strict=True):
        compiled_logits, compiled_gradients = run(model, batch, "auto")
        assert error(compiled_logits, logits) <= 0.02
        assert error(compiled_gradients, gradients) <= 0.05
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] <= graphs[1] <= 2 * graphs[0]
    assert graphs[1:] == [graphs[1]] * 3, f"new graphs after the second length: {graphs}"
