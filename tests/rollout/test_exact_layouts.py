"""Sampler and trainer compute the same bits in layouts that are drawn at random, for every architecture of `TESTED`.

    sampler    number of slots, rows of a step, prefill passes of any size     responses, log-probabilities [n]
    trainer    packs of any samples, padding, shared prefixes, recomputation,  log-probabilities [n]: equal bits
               gradients

On a CPU in float32. `REFUSED` lists the architectures without this promise, and the reason that padfree gives for each.
A JUnit report (`--junitxml=FILE -o junit_family=xunit1`) holds the number of compared log-probabilities of each
architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from padfree.cp import shard
from padfree.head import score
from padfree.layers.recompute import recompute_layers
from padfree.model import TESTED, attach, hidden_states, lm_head_of
from padfree.model.block_matmuls import use_block_matmuls
from padfree.model.sharing import sharing_obstacle
from padfree.model.structure import layers_of
from padfree.packing import CostModel, collate
from padfree.packing.collate import prefixes_of, with_shared_prefixes
from padfree.rollout import SamplingRequest
from padfree.rollout.engines.in_process import decode_steps, slot_schedule
from padfree.rollout.engines.in_process.cached_model import CachedModel
from padfree.rollout.engines.in_process.decode import Decoder
from padfree.rollout.engines.in_process.exact_operators import model_problem
from padfree.rollout.engines.in_process.policy_model import PolicyModel
from padfree.rollout.sampling_rng import response_keys
from padfree.sample import Sample
from padfree.testing.models import ARCHITECTURES, VOCABULARY, build

CPU = torch.device("cpu")
LEAST_TOKENS = 16
"""Shorter packs are padded to this number of tokens. A run pads to more (`row_trial`)."""

EXAMPLES = 3
PROMPT_LENGTHS = (1, 7, 30, 131)

_RECURRENT = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid_mamba", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "zamba",
    "zamba2",
)  # fmt: skip
REFUSED = {
    **dict.fromkeys(_RECURRENT, "has a recurrent state|layers of type"),
    **dict.fromkeys(("gemma3n", "gemma4"), "custom code"),
    **dict.fromkeys(("gpt2", "opt"), "no entries for the positions of padding"),
    "llama4": "counts positions along the whole pack",
}
"""Regular expressions of the reasons, by architecture."""


@st.composite
def layouts(draw: Callable[..., Any]) -> dict[str, Any]:
    return {
        "prompts": draw(st.lists(st.sampled_from(PROMPT_LENGTHS), min_size=1, max_size=3)),
        "group": draw(st.integers(1, 3)),
        "max_new_tokens": draw(st.integers(1, 9)),
        "temperature": draw(st.sampled_from((1.0, 0.7))),
        "slots": draw(st.integers(1, 9)),
        "step_rows": draw(st.sampled_from(((16,), (32, 16), (64,)))),
        "prefill": draw(st.sampled_from((8, 40, 8192))),
        "seed": draw(st.integers(0, 1000)),
        "packs": draw(st.integers(1, 4)),
        "padding": draw(st.integers(0, 40)),
        "shares": draw(st.booleans()),
        "recompute": draw(st.booleans()),
    }


def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same trained model without and with recomputation."""
    found = []
    for mode in ("none", "full"):
        model = attach(build(name)).eval()
        use_block_matmuls(model)
        if mode == "full":
            recompute_layers(layers_of(model), "full")
        found.append(model)
    return found[0], found[1]


def sampled(cached: CachedModel, drawn: dict[str, Any]) -> tuple[list[Sample], list[np.ndarray[Any, Any]]]:
    generator = np.random.default_rng(drawn["seed"])
    prompts = [generator.integers(0, VOCABULARY, length) for length in drawn["prompts"]]
    keys = response_keys(0, drawn["seed"], np.arange(len(prompts) * drawn["group"]))
    requests = [
        SamplingRequest(tokens=prompts[number // drawn["group"]], max_new_tokens=drawn["max_new_tokens"], key=int(key))
        for number, key in enumerate(keys)
    ]
    decoder = Decoder(
        cached, num_slots=drawn["slots"], temperature=drawn["temperature"], stops=[2], step_rows=drawn["step_rows"]
    )
    with (
        mock.patch.object(decode_steps, "PREFILL_TOKENS", drawn["prefill"]),
        mock.patch.object(slot_schedule, "PREFILL_TOKENS", drawn["prefill"]),
    ):
        responses = decoder.sample(requests)
    samples = []
    for number, (request, response) in enumerate(zip(requests, responses, strict=True)):
        tokens = np.concatenate([request.tokens, response.tokens])
        own = np.arange(len(tokens)) >= len(request.tokens)
        samples.append(Sample(tokens=tokens, loss_mask=own, group=number // drawn["group"], uid=number))
    return samples, [response.logprobs for response in responses]


def trained_logprobs(model: PreTrainedModel, samples: list[Sample], drawn: dict[str, Any]) -> list[Any]:
    order = np.random.default_rng(drawn["seed"]).permutation(len(samples))
    found: list[Any] = [None] * len(samples)
    for part in np.array_split(order, min(drawn["packs"], len(samples))):
        chosen = [samples[number] for number in part]
        packed = collate(chosen)
        if drawn["shares"] and sharing_obstacle(model) is None:
            packed = with_shared_prefixes(packed, chosen, prefixes_of(chosen, True, CostModel(linear=1.0)))
        packed = packed.padded_to(max(LEAST_TOKENS, packed.num_tokens + drawn["padding"]))
        local = shard(packed, backend="tiles")
        with torch.set_grad_enabled(drawn["recompute"]):
            scores = score(
                hidden_states(model, local), lm_head_of(model), local.labels, temperature=drawn["temperature"]
            )
        for number, values in zip(part, packed.unpack(scores.logprobs.detach()), strict=True):
            found[number] = values[-int(samples[number].loss_mask.sum()) - 1 : -1]  # each token predicts the next
    return found


def architectures() -> list[str]:
    return [name for name, (class_name, _) in ARCHITECTURES.items() if class_name in TESTED]


@pytest.mark.parametrize("name", architectures())
def test_sampler_and_trainer_agree_in_drawn_layouts(name: str, record_property: Callable[[str, object], None]) -> None:
    plain, recomputed = models(name)
    reason = model_problem(plain, CPU)
    if name in REFUSED:
        assert reason is not None
        assert re.search(REFUSED[name], reason), reason
        return
    assert reason is None, reason
    policy = PolicyModel(plain, torch.float32, CPU)
    policy.update(plain)
    cached = CachedModel(policy.model, backend="tiles", exact=True)
    compared = 0

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(drawn=layouts())
    def agree(drawn: dict[str, Any]) -> None:
        nonlocal compared
        samples, found = sampled(cached, drawn)
        expected = trained_logprobs(recomputed if drawn["recompute"] else plain, samples, drawn)
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert np.array_equal(ours, theirs.numpy()), f"log-probabilities of sample {number} in {drawn}"
            compared += len(ours)

    agree()
    assert compared > 0
    record_property("log-probabilities", compared)
