"""Scalar heads: of stock models, packed, exported, and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from padfree.cp import shard
from padfree.model import attach, hidden_states
from padfree.model.export import export_model
from padfree.model.load import load_model
from padfree.model.scalar_head import scalar_head_of, scalar_scores
from padfree.model.structure import skeleton
from padfree.packing import collate
from padfree.sample import Sample
from padfree.testing.models import build
from tests.refused import refused

TOKENS = (np.array([3, 4, 5]), np.array([7, 8, 9, 10, 2]), np.array([6]))


def attached(model: PreTrainedModel) -> None:
    attach(model)


@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "gpt2", "gemma3", "opt", "gpt_neox", "qwen3_moe"])
def test_packed_scores_are_those_of_the_exported_model(name: str, tmp_path: Path) -> None:
    """From the files of a causal language model, with tied or untied heads and merged experts."""
    build(name).save_pretrained(tmp_path / "causal")
    model = load_model(tmp_path / "causal", head="scalar", seed=3, shard=attached)
    model.train(False)
    local = shard(collate([Sample(tokens=tokens) for tokens in TOKENS]))
    with torch.no_grad():
        scores = scalar_scores(hidden_states(model, local), scalar_head_of(model))
    ends = np.cumsum([len(tokens) for tokens in TOKENS]) - 1
    export_model(model, tmp_path / "reward")
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    assert plain.config.num_labels == 1
    with torch.no_grad():
        expected = [float(plain(input_ids=torch.from_numpy(tokens)[None]).logits[0, 0]) for tokens in TOKENS]
    assert scores[ends].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    again = load_model(tmp_path / "reward", head="scalar", seed=4)
    assert torch.equal(scalar_head_of(again), scalar_head_of(model)), "a head that is there is read"


def test_a_new_head_follows_from_the_seed(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    first, same, other, zero = (
        scalar_head_of(load_model(tmp_path, head="scalar", seed=seed, spread=spread))
        for seed, spread in ((1, None), (1, None), (2, None), (1, 0.0))
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not zero.any()


def test_heads_that_are_more_or_less_than_a_vector_are_refused(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path / "causal")
    with refused("model", "the head of Qwen3ForCausalLM is not a single matrix"):
        scalar_head_of(skeleton(str(tmp_path / "causal")))
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=3).save_pretrained(
        tmp_path / "three"
    )
    with refused("model", r"score.weight has shape \[3, 64\]"):
        load_model(tmp_path / "three", head="scalar")
    build("mamba").config.save_pretrained(tmp_path / "mamba")
    with pytest.raises(ValueError, match="transformers has no scalar head for 'mamba'"):
        skeleton(str(tmp_path / "mamba"), head="scalar")
