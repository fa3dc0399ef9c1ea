"""Suggestions for data with a known best answer, and the memory limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3Config

from padfree.packing import CostModel
from padfree.tools.planner.epoch import PlanShape
from padfree.tools.planner.memory_plan import GIBIBYTE, USABLE_FRACTION, DeviceMemory
from padfree.tools.planner.suggest import suggest
from tests.tools.planner.cases import config_of, log_normal

SMALL = Qwen3Config(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
)
COST = CostModel.from_config(SMALL)
MEMORY = 64 * 2.0**20


def need_of(config: Any = SMALL, **sections: dict[str, Any]) -> DeviceMemory:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return DeviceMemory(config_of(**sections), model)


def steps_of(lengths: NDArray[np.int64], size: int = 64) -> list[NDArray[np.int64]]:
    return [lengths[start : start + size] for start in range(0, len(lengths), size)]


def test_most_tokens_is_the_last_that_fits() -> None:
    need, shape = need_of(), PlanShape(ranks=4, max_tokens=1)
    most = need.most_tokens(shape, MEMORY)
    assert most % 256 == 0
    assert need.estimate(replace(shape, max_tokens=most)).device <= USABLE_FRACTION * MEMORY
    assert need.estimate(replace(shape, max_tokens=most + 256)).device > USABLE_FRACTION * MEMORY
    assert need.most_tokens(shape, MEMORY, checkpointing="full") > most
    assert need.most_tokens(shape, 1.0) == 0


def test_adapters_are_put_in_once() -> None:
    pytest.importorskip("peft")
    need, shape = need_of(lora={"rank": 4}), PlanShape(ranks=1, max_tokens=64)
    first, second = need.estimate(shape), need.estimate(shape)
    assert first == second
    assert 0 < first.trained < first.parameters / 4


def test_short_samples_need_no_context_ranks() -> None:
    need = need_of()
    found = suggest(steps_of(log_normal(640, 300)), PlanShape(ranks=4, max_tokens=1), COST, need=need, memory=MEMORY)
    assert (found.context, found.layout) == (1, None)
    assert found.max_tokens is not None
    # a step of 64 samples is small: one micro-batch per rank holds its part, and more has no effect
    assert 300 <= found.max_tokens <= 2048
    assert found.reasons[1] == "context 1: the longest sample, 300 tokens, fits on one device"
    assert found.overrides() == [f"batch.max_tokens={found.max_tokens}", "parallel.context=1"]


def test_the_smallest_context_that_holds_the_longest_sample() -> None:
    need, shape = need_of(), PlanShape(ranks=8, max_tokens=1)
    most = need.most_tokens(shape, MEMORY)
    longest = int(2.5 * most)
    lengths = np.append(log_normal(630, most // 2), [longest] * 10)
    found = suggest(steps_of(lengths), shape, COST, need=need, memory=MEMORY)
    assert found.context in (4, 8)
    assert found.reasons[1].startswith(f"context 4: the longest sample has {longest:,} tokens; 4 devices together hold")
    assert found.max_tokens is not None
    assert found.max_tokens * found.context >= longest
    assert found.layout == "balanced"
    chosen = replace(shape, context=found.context, max_tokens=found.max_tokens)
    assert need.estimate(chosen).device <= USABLE_FRACTION * MEMORY


def test_large_steps_use_the_memory_there_is() -> None:
    need, shape = need_of(), PlanShape(ranks=2, max_tokens=1)
    lengths = log_normal(2000, 512)
    most = need.most_tokens(shape, MEMORY)
    assert lengths.sum() > 8 * most
    # a fixed cost per micro-batch: fewer are better
    cost = replace(COST, constant=float(COST([4096])[0]))
    found = suggest([lengths], shape, cost, need=need, memory=MEMORY)
    assert found.max_tokens == most
    assert f"max tokens {most:,}: the most that memory allows" in found.reasons


def test_one_long_sample_a_step_is_worth_more_context_ranks() -> None:
    """If one sample costs as much as the rest of its step, other data ranks wait, unless context ranks share it."""
    steps = [np.array([8192] + [64] * 64)] * 4
    quadratic = CostModel(linear=1.0, quadratic=1.0)
    found = suggest(steps, PlanShape(ranks=4, max_tokens=1), quadratic, need=need_of(), memory=GIBIBYTE)
    assert found.context == 2
    assert any(reason.startswith("context 2 instead of 1: steps are ") for reason in found.reasons)


def test_a_sample_that_no_context_holds() -> None:
    need, shape = need_of(), PlanShape(ranks=2, max_tokens=1)
    longest = 5 * need.most_tokens(shape, MEMORY)
    found = suggest([np.array([longest, 10])], shape, COST, need=need, memory=MEMORY)
    assert found.context == 2
    assert "data.max_length=" in found.reasons[1]
    assert found.reasons[2].startswith("with parallel.checkpointing=full a device would have room for about")


def test_weights_that_do_not_fit() -> None:
    need = need_of()
    least = need.estimate(PlanShape(ranks=1, max_tokens=1)).device
    found = suggest([np.array([10])], PlanShape(ranks=1, max_tokens=1), COST, need=need, memory=0.9 * least)
    assert found.max_tokens is found.context is found.layout is None
    assert found.overrides() == []
    assert found.reasons[0].startswith("nothing fits: ")
    ranks = next(ranks for ranks in (2, 4, 8) if need.most_tokens(PlanShape(ranks=ranks, max_tokens=1), 0.9 * least))
    assert found.reasons[1].startswith(f"with {ranks} ranks a device would have room for micro-batches of about")
