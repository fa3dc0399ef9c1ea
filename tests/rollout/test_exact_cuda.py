"""`rollout.exact` on a Hopper GPU in bfloat16: sampled log-probabilities have the bits of the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from padfree.attention.backend import Pages
from padfree.attention.selection import BACKENDS
from padfree.attention.spec import AttentionSpec
from padfree.batch import IGNORE
from padfree.config import LoraConfig
from padfree.cp import shard
from padfree.head import fused_loss, score
from padfree.layers.compile import compile_layers
from padfree.layers.recompute import Kept
from padfree.model import attach, hidden_states, lm_head_of
from padfree.model.grouped_matmuls import use_exact_matmuls
from padfree.model.lora import add_adapters
from padfree.model.structure import layers_of
from padfree.packing import collate
from padfree.rollout.engines.in_process.exact_attention import has_bits_of_trainer
from padfree.rollout.engines.in_process.exact_operators import HOPPER, model_problem
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.engines.in_process.row_trial import (
    PACK_ROWS,
    SHORTEST_PACK,
    ExpertShape,
    agreeing_tokens,
    trial,
)
from padfree.rollout.engines.in_process.sampler import InProcessSampler
from padfree.sample import Sample
from padfree.segments import Segments
from padfree.testing.models import VOCABULARY, build
from padfree.tools.check import check_sampler
from tests.rollout.sampling_cases import group_requests

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
GROUPED = (ExpertShape(128, 8, 2048, 1536, False), ExpertShape(128, 8, 768, 2048, False))
SIZES = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    torch._dynamo.reset()  # its limit counts the graphs of all tests of the process together
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("needs a Hopper GPU")
    if not BACKENDS["fa4"].is_installed():
        pytest.skip("needs flash-attn-4")


def on_gpu(name: str) -> PreTrainedModel:
    """A model in bfloat16 whose rotary frequencies are float32, and not those that a CPU computes."""
    model = build(name, **SIZES).eval().to(CUDA)
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(torch.nextafter(frequencies, torch.full_like(frequencies, 2.0)))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 3)], ids=str)
def test_one_query_with_pages_has_the_bits_of_the_pack(d: int, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths, backend = (700, 128, 129, 1, 40), BACKENDS["fa4"]
    total, spec = sum(lengths), AttentionSpec(scale=d**-0.5)
    q, k, v = (torch.randn(total, count, d, device=CUDA).bfloat16() for count in (heads[0], heads[1], heads[1]))
    segments = Segments.from_lengths(lengths, device=CUDA)
    out, lse = backend.forward(q, k, v, segments, segments, spec)
    places = [(i, p) for i, n in enumerate(lengths) for p in sorted({0, n // 2, n - 1})]
    starts = segments.offsets
    pages_each = [-(-(p + 1) // 128) for _, p in places]
    first = np.cumsum([0, *pages_each])
    keys, values = (torch.zeros(int(first[-1]) * 128, heads[1], d, device=CUDA).bfloat16() for _ in range(2))
    table = torch.zeros(len(places), max(pages_each), dtype=torch.int32)
    for number, (i, p) in enumerate(places):
        here = slice(int(first[number]) * 128, int(first[number]) * 128 + p + 1)
        keys[here], values[here] = (x[int(starts[i]) : int(starts[i]) + p + 1] for x in (k, v))
        table[number, : pages_each[number]] = torch.arange(int(first[number]), int(first[number + 1]))
    index = torch.tensor([int(starts[i]) + p for i, p in places], device=CUDA)
    counts = torch.tensor([p + 1 for _, p in places], dtype=torch.int32, device=CUDA)
    pages = Pages(table=table.to(CUDA), lengths=counts, longest=max(lengths))
    one = Segments.from_lengths([1] * len(places), device=CUDA)
    found, found_lse = backend.paged_forward(
        q[index], keys.view(-1, 128, heads[1], d), values.view(-1, 128, heads[1], d), one, pages, spec
    )
    assert torch.equal(found, out[index])
    assert torch.equal(found_lse, lse[index])


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (16, 8), (32, 8), (9, 3), (48, 1)])
@pytest.mark.parametrize("window", [None, 1, 100, 512])
def test_the_kernel_of_decode_steps_has_the_bits_of_the_pack(
    size: int, heads: int, key_heads: int, window: int | None
) -> None:
    spec = AttentionSpec(scale=size**-0.5, window=window)
    assert has_bits_of_trainer("fa4", heads, (key_heads, size), spec, torch.bfloat16, CUDA)


@pytest.mark.parametrize("name", ["qwen3", "llama", "olmo2", "mistral", "qwen3_moe", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_agree_to_the_bit(name: str, compiled: bool, temperature: float) -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, length) for length in (5, 1, 128, 129, 60, 300)]
    report = check_sampler(
        on_gpu(name), prompts, max_new_tokens=48, temperature=temperature, compiled=compiled, backend="fa4"
    )
    assert report.unequal == 0, report.verdict


@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_grouped_matmuls_have_bits_that_do_not_depend_on_the_division_of_rows(shape: ExpertShape) -> None:
    found = agreeing_tokens(shape, (64, 256, *PACK_ROWS), device=CUDA, dtype=torch.bfloat16)
    assert found == {64, 256, *PACK_ROWS}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_a_run_accepts_mixtures_of_experts(name: str) -> None:
    model = on_gpu(name)
    assert model_problem(model, CUDA) is None
    choice = trial(layers_of(model), 20, CUDA, torch.bfloat16)
    assert choice.step_rows, choice.problem


@pytest.mark.parametrize("kept", ["none", "selective", "input"])
@pytest.mark.parametrize(("name", "rank"), [("qwen3", 0), ("qwen3", 8), ("qwen3_moe", 0), ("mixtral", 0)])
def test_training_has_the_bits_of_the_sampler(name: str, rank: int, kept: Kept) -> None:
    """With gradients, the fused loss, shared groups, adapters and whatever is saved for backward."""
    trained = attach(on_gpu(name), "fa4")
    lora = LoraConfig(rank=rank) if rank else None
    if lora is not None:
        add_adapters(trained, lora)
        for parameter in trained.parameters():
            parameter.data = parameter.data.to(device=CUDA, dtype=torch.bfloat16)
            if parameter.requires_grad:
                parameter.data.normal_(std=0.1)
    policy = PolicyModel(trained, torch.bfloat16, CUDA, adapters=lora)
    policy.update(trained)
    sampler = InProcessSampler(
        policy, stops=(VOCABULARY,), temperature=1.0, batch_size=20, attention="fa4", compiled=True, exact=True
    )
    requests = group_requests((6, 1, 140, 3), group=5, max_new_tokens_each=(40, 12))
    responses = sampler.sample(requests)
    sampler.close()
    samples = [
        Sample(
            tokens=np.concatenate([request.tokens, response.tokens]),
            loss_mask=np.arange(len(request.tokens) + len(response.tokens)) >= len(request.tokens),
        )
        for request, response in zip(requests, responses, strict=True)
    ]
    use_exact_matmuls(trained, CUDA)
    compile_layers(layers_of(trained), "inductor", kept, exact=True)
    sampled = np.concatenate([response.logprobs for response in responses])
    for size in (20, 7):
        found = []
        for start in range(0, len(samples), size):
            packed = collate(samples[start : start + size])
            local = shard(packed.padded_to(max(SHORTEST_PACK, packed.num_tokens)).to(CUDA))
            hidden = hidden_states(trained, local)
            fused = fused_loss(hidden, lm_head_of(trained), local.labels, lambda logprobs, *_: -logprobs)
            fused.loss.backward()
            with torch.no_grad():
                scored = score(hidden_states(trained, local), lm_head_of(trained), local.labels).logprobs
            assert torch.equal(scored, fused.logprobs)
            found.append(fused.logprobs[local.labels != IGNORE].cpu().numpy())
        assert (np.concatenate(found) == sampled).all()
