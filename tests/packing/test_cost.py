from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from padfree.packing.cost import CostModel

DENSE = {
    "model_type": "mistral",
    "sliding_window": None,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 10,
}


def test_costs_of_samples() -> None:
    model = CostModel(linear=2.0, quadratic=0.5, constant=7.0)
    assert model([0, 1, 10]).tolist() == [0.0, 2.5, 70.0]
    assert model(np.array([], dtype=np.int64)).shape == (0,)
    assert CostModel.tokens()([3, 5]).tolist() == [3.0, 5.0]


def test_from_config_by_hand() -> None:
    weights = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 10
    expected = CostModel(linear=6.0 * weights, quadratic=6.0 * 2 * 2 * 4)
    assert CostModel.from_config(DENSE) == expected
    assert CostModel.from_config(SimpleNamespace(**DENSE)) == expected
    assert CostModel.from_config({"text_config": DENSE}) == expected
    assert CostModel.from_config({**DENSE, "head_dim": None}) == expected, "transformers derives it"


def test_windowed_and_linear_layers() -> None:
    full = CostModel.from_config(DENSE)
    pair = 3 * 2 * (2 * 4 + 2 * 4)  # FLOPs of one (query, key) pair in one layer
    windowed = CostModel.from_config({**DENSE, "sliding_window": 5})
    assert windowed == CostModel(linear=full.linear + 2 * 5 * pair, quadratic=0.0)
    assert full.quadratic == 2 * pair / 2  # half of n² pairs
    ministral = {**DENSE, "model_type": "ministral", "sliding_window": 5}
    mixed = CostModel.from_config({**ministral, "layer_types": ["sliding_attention", "full_attention"]})
    assert mixed.quadratic == full.quadratic / 2
    assert mixed.linear == (full.linear + windowed.linear) / 2


SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}


@pytest.mark.parametrize(
    ("config", "unused"),
    [
        (Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32, intermediate_size=96), 0.0),
        (Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=16, intermediate_size=96, sliding_window=8), 0.0),
        (GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128, n_positions=32), 0.0),
        (MixtralConfig(**SIZES, num_key_value_heads=2, intermediate_size=96, num_local_experts=4), 0.5),
        (
            Qwen3MoeConfig(
                **SIZES,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size=96,
                moe_intermediate_size=32,
                num_experts=8,
                num_experts_per_tok=2,
                mlp_only_layers=[0],
            ),
            0.75,
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_weights_are_those_of_the_real_model(config: Any, unused: float) -> None:
    """Six FLOPs per token and weight of the real model's matrices; only the experts that a token is routed to."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.ndim > 1}
    experts = sum(p.numel() for name, p in matrices.items() if "experts" in name)
    tables = sum(
        p.numel() for name, p in matrices.items() if "embed" in name or name.endswith(("wte.weight", "wpe.weight"))
    )
    used = sum(p.numel() for p in matrices.values()) - tables - unused * experts
    attended = CostModel.from_config(config)
    window = getattr(config, "sliding_window", None) or 0
    windowed = (getattr(config, "layer_types", None) or []).count("sliding_attention")
    heads = config.num_attention_heads * (getattr(config, "head_dim", None) or 64 // config.num_attention_heads)
    assert attended.linear == 6.0 * used + 6.0 * windowed * window * 2 * heads
    assert attended.quadratic == 6.0 * (config.num_hidden_layers - windowed) * heads


def test_latent_attention() -> None:
    config = {
        **DENSE,
        "model_type": "deepseek_v3",
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 6,
        "q_lora_rank": 5,
        "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 3,
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7,
        "first_k_dense_replace": 1,
    }
    attention = 8 * 5 + 5 * 2 * 5 + 8 * (6 + 2) + 6 * 2 * (3 + 4) + 2 * 4 * 8
    mlp = 3 * 8 * 16 + (3 * 8 * 7 * 3 + 8 * 4)
    model = CostModel.from_config(config)
    assert model.linear == 6.0 * (2 * attention + mlp + 8 * 10)
    assert model.quadratic == 3.0 * 2 * 2 * (2 + 3 + 4)


def test_json_round_trip(tmp_path: Path) -> None:
    model = CostModel(linear=1 / 3, quadratic=2e-9, constant=0.25, step=0.125)
    model.to_json(tmp_path / "cost.json")
    assert CostModel.from_json(tmp_path / "cost.json") == model
    (tmp_path / "short.json").write_text('{"linear": 1.0, "quadratic": 0.5, "constant": 2.0}')
    assert CostModel.from_json(tmp_path / "short.json") == CostModel(linear=1.0, quadratic=0.5, constant=2.0)
    (tmp_path / "other.json").write_text('{"quadratic": 1.0}')
    with pytest.raises(ValueError, match="not a cost model"):
        CostModel.from_json(tmp_path / "other.json")


def test_fit_recovers_the_model() -> None:
    truth = CostModel(linear=1e-5, quadratic=3e-10, constant=0.02)
    rng = np.random.default_rng(0)
    batches = [rng.integers(1, 8192, size) for size in (1, 1, 2, 3, 5, 8, 13)]
    fitted = CostModel.fit(batches, [truth(batch).sum() + truth.constant for batch in batches])
    for field in ("linear", "quadratic", "constant"):
        assert getattr(fitted, field) == pytest.approx(getattr(truth, field), rel=1e-6)
    noisy = [(truth(batch).sum() + truth.constant) * rng.uniform(0.98, 1.02) for batch in batches]
    fitted = CostModel.fit(batches, noisy)
    assert fitted([4096])[0] == pytest.approx(truth([4096])[0], rel=0.1)


def test_fit_gives_no_negative_coefficient() -> None:
    """Times that grow more slowly than the tokens would give a negative quadratic coefficient."""
    lengths = [100, 1000, 2000, 4000, 8000]
    fitted = CostModel.fit(lengths, [0.1 + n**0.7 for n in lengths])
    assert fitted.quadratic == 0.0
    assert fitted.linear > 0
    assert fitted.constant > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CostModel(linear=-1.0), "linear: -1.0"),
        (lambda: CostModel(linear=1.0, quadratic=float("nan")), "quadratic: nan"),
        (lambda: CostModel.from_config({"model_type": "llama", "hidden_size": 8}), "config: has no num_hidden_layers"),
        (lambda: CostModel.fit([1, 2], [1.0]), "seconds: has shape"),
        (lambda: CostModel.fit([1, 2], [1.0, 0.0]), "seconds: range from 0.0 to 1.0"),
        (lambda: CostModel.fit([], []), "seconds: has shape"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
