"""Log-probabilities of whole samples, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from padfree.distributed import Mesh, make_mesh
from padfree.sharding.parallelize import parallelize, transformations
from padfree.train.scorer import Scorer
from tests.ranks import run_ranks
from tests.train.cases import make_samples, small_model

TEMPERATURE = 0.7
Arrays = list[np.ndarray[Any, Any]]


def model_of(name: str) -> PreTrainedModel:
    return small_model(name, **({"resid_pdrop": 0.5, "embd_pdrop": 0.5} if name == "gpt2" else {}))


def scored(mesh: Mesh, name: str = "llama_tied") -> Arrays:
    model = model_of(name)
    parallelize(model, transformations(mesh))
    found = Scorer(model, mesh, max_tokens=14, temperature=TEMPERATURE).logprobs(make_samples())
    assert model.training
    return found


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "granite", "gpt2"])
def test_against_the_model_itself(name: str, mesh: Mesh) -> None:
    """With the head's soft caps and scales, without dropout; 0 for unscored tokens."""
    model = model_of(name).eval()
    model.set_attn_implementation("eager")  # some versions of transformers ignore soft caps with sdpa
    for sample, found in zip(make_samples(), scored(mesh, name), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0, :-1] / TEMPERATURE
        expected = np.zeros(len(sample))
        targets = torch.from_numpy(sample.tokens[1:])[:, None]
        expected[1:] = logits.log_softmax(-1).gather(1, targets)[:, 0].numpy() * sample.mask[1:]
        np.testing.assert_allclose(found, expected, atol=2e-5)


def ranks(rank: int, world: int) -> list[Arrays]:
    return [scored(make_mesh("cpu", context=context)) for context in (1, 2)]


def test_every_rank_has_all(mesh: Mesh) -> None:
    expected = scored(mesh)
    for by_layout in run_ranks(2, ranks):
        for found in by_layout:
            for mine, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-4)
