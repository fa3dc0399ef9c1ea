"""One sample of 1,048,576 tokens: offsets, positions, scaled RoPE, layouts and attention, checked at selected tokens.

    model        one layer with a window of 64 keys, YaRN, float32: what a token becomes depends on the 64 before it
    reference    the same weights in float64 on only these 64 tokens, at their positions, with HF's own attention

Stock models compute the angles of RoPE in float32, where a million times a frequency is rounded to 1/16. Training and
inference with transformers do the same, and so does the reference.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from padfree.attention import varlen_attention
from padfree.batch import PackedBatch
from padfree.cp import shard, work
from padfree.model import attach, hidden_states
from padfree.packing import collate
from padfree.sample import Sample
from padfree.segments import Segments
from padfree.testing.models import build

TOKENS, WORLD, WINDOW = 1 << 20, 8, 64
POSITIONS = (0, 1, 63, 64, 65, 40_959, 40_960, 131_072, 524_287, 524_288, TOKENS - 2, TOKENS - 1)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    tokens = np.random.default_rng(0).integers(0, 64, TOKENS)
    return collate([Sample(tokens=tokens, loss_mask=np.arange(TOKENS) % 2 == 1)])


def test_a_model_at_positions_up_to_a_million(batch: PackedBatch) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 25.6, "original_max_position_embeddings": 40_960}
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = build(
        "mistral", **sizes, num_key_value_heads=1, head_dim=8, sliding_window=WINDOW, max_position_embeddings=TOKENS,
        rope_parameters=rope,
    )  # fmt: skip
    plain = copy.deepcopy(model).double().eval()
    plain.set_attn_implementation("eager")
    attach(model)
    with torch.no_grad():
        found = hidden_states(model, shard(batch))
        for position in POSITIONS:
            first = max(0, position - WINDOW + 1)
            ids = batch.input_ids[None, first : position + 1]
            expected = plain.model(input_ids=ids, position_ids=torch.arange(first, position + 1)[None])
            right = expected.last_hidden_state[0, -1]
            error = float((found[position].double() - right).abs().max() / right.abs().max())
            assert error < 1e-4, (position, error)


def test_every_token_is_on_one_context_rank_with_its_position_and_label(batch: PackedBatch) -> None:
    assert batch.segments.cu_seqlens.tolist() == [0, TOKENS]
    assert batch.segments.cu_seqlens.dtype == torch.int32
    for kind in ("balanced", "headtail", "contiguous"):
        seen = np.zeros(TOKENS, dtype=np.int64)
        for rank in range(WORLD):
            local = shard(batch, world=WORLD, rank=rank, kind=kind)
            own = local.context.plan.own.numpy()
            seen[own] += 1
            assert len(own) == TOKENS // WORLD
            assert (local.position_ids.numpy() == own).all()
            assert (local.input_ids == batch.input_ids[local.context.plan.own]).all()
            assert (local.labels == batch.labels[local.context.plan.own]).all()
        assert (seen == 1).all()
        layout = local.context.layout
        assert work(layout, batch.segments).sum() == TOKENS * (TOKENS + 1) // 2, "2^39 pairs, more than 32 bits hold"


def test_attention_of_the_last_queries_to_a_million_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(16, 2, 8, generator=generator)
    k, v = (torch.randn(TOKENS, 1, 8, generator=generator) for _ in range(2))
    found = varlen_attention(q, k, v, Segments.from_lengths([16]), Segments.from_lengths([TOKENS]), causal=True)
    for place in (0, 7, 15):
        seen = TOKENS - 16 + place + 1
        logits = torch.einsum("hd,nd->hn", q[place].double(), k[:seen, 0].double()) * 8**-0.5
        expected = torch.softmax(logits, dim=-1) @ v[:seen, 0].double()
        torch.testing.assert_close(found[place].double(), expected, rtol=1e-4, atol=1e-6)
