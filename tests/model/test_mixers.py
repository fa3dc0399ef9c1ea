"""Recurrent layers on whole samples: over context ranks, recomputed, compiled."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from padfree.batch import PackedBatch
from padfree.cp import gather_tokens, shard
from padfree.layers.compile import compile_layers
from padfree.layers.recompute import recompute_layers
from padfree.model import attach, probe
from padfree.model.mixers import installed
from padfree.model.mixers.by_segment import by_segment
from padfree.model.structure import layers_of
from padfree.segments import Segments
from padfree.testing.models import MIXERS, VOCABULARY, build, row
from tests.model.plain_kernels import plain_kernels, ways
from tests.ranks import run_ranks
from tests.refused import refused
from tests.rounding import largest_difference

LENGTHS = [9, 3, 1, 12, 7, 10]
KIND_OF = {
    "qwen3_5": "gated_delta",
    "kimi_linear": "gated_delta",
    "olmo_hybrid": "gated_delta",
    "bamba": "mamba2",
    "nemotron_h": "mamba2",
    "zamba2": "mamba2",
    "falcon_h1": "mamba2",
    "jamba": "mamba1",
    "mamba": "mamba1",
    "lfm2": "short_convolution",
    "minimax": "lightning",
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def run(model: PreTrainedModel, batch: PackedBatch, **layout: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    local = shard(batch, **layout)
    logits = gather_tokens(model(**local.model_inputs()).logits[0], local.context)
    real = batch.num_tokens - batch.pad_length
    torch.manual_seed(1)
    (logits[:real] * torch.randn(real, VOCABULARY)).sum().backward()
    return logits[:real].detach(), gradients(model)


def over_ranks(rank: int, world: int) -> list[tuple[str, float]]:
    """(case, largest difference from one process) of logits and summed gradients."""
    found = []
    batch = row(LENGTHS).padded_to(48)
    for name, method, kind in (
        ("qwen3_5", "allgather", "balanced"),
        ("jamba", "ulysses", "headtail"),
        ("bamba", "ring", "contiguous"),
        ("lfm2", "allgather", "balanced"),
        ("minimax", "allgather", "headtail"),
    ):
        model = attach(build(name))
        logits, expected = run(model, batch)
        layout = {"world": world, "rank": rank, "group": dist.group.WORLD, "method": method, "kind": kind}
        split_logits, split = run(model, batch, **layout)
        for gradient in split.values():
            dist.all_reduce(gradient)
        found.append((name, largest_difference({"logits": split_logits}, {"logits": logits})[0]))
        found.append((name, largest_difference(split, expected)[0]))
    few = row([8, 3]).padded_to(32)  # of four ranks, two have no sample
    model = attach(build("qwen3_5"))
    _, expected = run(model, few)
    _, split = run(model, few, world=world, rank=rank, group=dist.group.WORLD)
    assert all(parameter.grad is not None for parameter in model.parameters()), "every rank reaches every parameter"
    for gradient in split.values():
        dist.all_reduce(gradient)
    found.append(("few samples", largest_difference(split, expected)[0]))
    return found


def fast_over_ranks(rank: int, world: int) -> list[tuple[str, float]]:
    """The same on all segments at once."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        plain_kernels(patch)
        for name in ("lfm2", "qwen3_5"):
            model = attach(build(name))
            for lengths in (LENGTHS, [8, 3]):
                batch = row(lengths).padded_to(48)
                _, expected = run(model, batch)
                _, split = run(model, batch, world=world, rank=rank, group=dist.group.WORLD)
                assert ways(model) == {True}
                assert all(parameter.grad is not None for parameter in model.parameters())
                for gradient in split.values():
                    dist.all_reduce(gradient)
                found.append((f"fast {name} {lengths}", largest_difference(split, expected)[0]))
    return found


def all_over_ranks(rank: int, world: int) -> list[tuple[str, float]]:
    return over_ranks(rank, world) + (fast_over_ranks(rank, world) if world == 4 else [])


@pytest.mark.parametrize("world", [2, 4])
def test_mixers_over_context_ranks_give_what_one_process_gives(world: int) -> None:
    for found in run_ranks(world, all_over_ranks):
        assert len(found) == (15 if world == 4 else 11)
        assert [(name, difference) for name, difference in found if not difference < 1e-5] == []


@pytest.mark.parametrize("name", KIND_OF)
def test_the_kind_is_read_from_the_parameters(name: str) -> None:
    model = attach(build(name))
    kinds = {mixer.kind for module in model.modules() if (mixer := installed(module)) is not None}
    assert kinds == {KIND_OF[name]}


def test_all_architectures_with_mixers_have_them_installed_and_others_have_none() -> None:
    assert all(any(installed(module) for module in attach(build(name)).modules()) for name in MIXERS)
    assert not any(installed(module) for module in attach(build("llama")).modules())


@pytest.mark.parametrize("name", ["qwen3_next", "jamba"])
def test_the_stock_model_and_copies_keep_their_own_forward(name: str) -> None:
    model = build(name)
    ids = row([9]).input_ids[None]
    expected = model(input_ids=ids, use_cache=False).logits
    attach(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    batch = row([5, 4])
    assert model(**shard(batch).model_inputs()).logits.abs().max() > 0
    assert twin(**shard(batch).model_inputs()).logits.abs().max() == 0, "a copy calls its own modules"
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", ["qwen3_5", "jamba", "lfm2"])
def test_recomputed_layers_give_the_same(name: str) -> None:
    model, batch = attach(build(name)), row(LENGTHS, pad=3)
    logits, expected = run(model, batch)
    recompute_layers(layers_of(model), "full")
    again_logits, again = run(model, batch)
    assert torch.equal(again_logits, logits)
    assert largest_difference(again, expected)[0] < 1e-6


@pytest.mark.parametrize("kept", ["none", "selective"])
def test_compiled_layers_give_the_same(kept: Any) -> None:
    mixing = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    model, batch = attach(build("qwen3_5", **mixing)), row(LENGTHS, pad=3)
    _, expected = run(model, batch)
    compile_layers(layers_of(model), "aot_eager", kept)
    _, again = run(model, batch)
    assert largest_difference(again, expected)[0] < 1e-5


def test_segments_of_one_length_are_rows_of_one_call() -> None:
    calls: list[tuple[int, ...]] = []

    def call(values: list[Tensor]) -> Tensor:
        calls.append(tuple(values[0].shape))
        return values[0].cumsum(1)

    values = torch.randn(13, 2, dtype=torch.float64)
    result = by_segment(call, [values], [5, 3, 0, 5])
    assert calls == [(2, 5, 2), (1, 3, 2)]
    expected = torch.cat([piece.cumsum(0) for piece in torch.split(values, [5, 3, 5])])
    assert (result - expected).abs().max() < 1e-12


class LeakingDeltaNet(Qwen3_5GatedDeltaNet):
    """Keeps the last token of the previous call, a leak that boundaries inside a call cannot prevent."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        before = self.__dict__.get("before")
        object.__setattr__(self, "before", hidden_states[-1:, -1:].detach())
        if before is not None:
            hidden_states = hidden_states + 0.1 * before
        return super().forward(hidden_states, *args, **kwargs)


class LeakingRows(Qwen3_5GatedDeltaNet):
    """Mixes the samples of its batch."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mean = hidden_states.mean(0, keepdim=True)
        return super().forward(hidden_states + (mean - mean.detach()), *args, **kwargs)


@pytest.mark.parametrize("leak", [LeakingDeltaNet, LeakingRows])
def test_a_leak_planted_in_a_mixer_is_found(leak: type[Qwen3_5GatedDeltaNet]) -> None:
    class Leaking(Qwen3_5ForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for module in self.modules():
                if type(module) is Qwen3_5GatedDeltaNet:
                    module.__class__ = leak

    model = Leaking(build("qwen3_5").config)
    with pytest.raises(ValueError, match=r"a pack gives other results|depends on the samples before it"):
        attach(model)
    assert probe.probe(model).leak is not None


@pytest.mark.parametrize("name", ["qwen3_5", "jamba", "llama4"])
def test_shared_prefixes_are_refused(name: str) -> None:
    """A recurrent state would have to branch at the end of the prefix."""
    model, inputs = attach(build(name)), shard(row([5, 3, 4])).model_inputs()
    segments = Segments.from_lengths([5, 3, 4], parents=np.array([-1, 0, 0]))
    context = replace(inputs["attn_context"], segments=segments)
    with refused("share_prefixes"):
        model(**{**inputs, "attn_context": context})
