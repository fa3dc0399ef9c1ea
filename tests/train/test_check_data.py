"""The limits of a model, and the first sample that exceeds them."""

from __future__ import annotations

import numpy as np
import torch

from padfree.sample import Sample
from padfree.testing.models import build
from padfree.train.check_data import ModelLimits, check_fits, lengths_of
from tests.refused import refused


def test_limits_are_read_off_the_modules() -> None:
    with torch.device("meta"):
        found = {
            name: ModelLimits.of(build(name)) for name in ("gpt2", "opt", "qwen3", "gemma3", "gpt_neox", "deepseek_v3")
        }
    assert all(limits.vocabulary == 64 for limits in found.values())
    ends = {name for name, limits in found.items() if limits.positions is not None}
    assert ends == {"gpt2", "opt"}
    assert found["gpt2"].positions == found["opt"].positions == 256
    assert ModelLimits.of(build("qwen3", vocab_size=256)).positions is None, "the vocabulary is not a position table"


def test_two_models_can_be_given_what_both_can() -> None:
    table = ModelLimits(vocabulary=64, positions=8, trained_positions=8)
    rotary = ModelLimits(vocabulary=32, positions=None, trained_positions=4)
    assert table.within(rotary) == ModelLimits(vocabulary=32, positions=8, trained_positions=8)
    assert rotary.within(table) == ModelLimits(vocabulary=32, positions=8, trained_positions=4)
    assert rotary.within(rotary).positions is None


def test_the_first_sample_beyond_the_limits_is_named() -> None:
    samples = [Sample(tokens=np.array([1, 2])), Sample(tokens=np.array([1, 2, 7])), Sample(tokens=np.array([9]))]
    assert lengths_of(samples).tolist() == [2, 3, 1]

    def check(vocabulary: int, positions: int | None, look_at_tokens: bool = True) -> None:
        check_fits(
            samples,
            ModelLimits(vocabulary=vocabulary, positions=positions, trained_positions=None),
            place=lambda index: f"line {index}",
            setting="data",
            look_at_tokens=look_at_tokens,
            vocabulary_cure="give others",
            positions_cure="cut them",
        )

    check(10, 3)
    check(5, None, look_at_tokens=False)
    with refused("data", "line 1 has 3 tokens, but the model has 2 positions"):
        check(10, 2)
    with refused("data", "line 1 has token id 7, but the model's vocabulary has 7"):
        check(7, None)
