"""A pack over several ranks gives the logits and gradients of one process, without leaks between samples.

Every rank first runs the whole pack alone, for comparison. All cases run in one start of the processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from padfree.batch import PackedBatch
from padfree.choices import LayoutKind
from padfree.cp import gather_tokens, shard
from padfree.model import attach
from padfree.testing.models import EXPERTS, VOCABULARY, build, row
from tests.ranks import run_ranks
from tests.rounding import FACTOR, assert_same_but_for_rounding, in_float64, largest_difference, noise_of

METHODS = ("allgather", "ring", "ulysses")
KINDS: tuple[LayoutKind, ...] = ("contiguous", "headtail", "balanced")

ROWS = (
    [3, 1, 41, 2, 1],  # one document over three of four ranks, and documents of one token
    [61],  # fewer documents than ranks
    [1, 1, 1, 1, 1, 20, 7],
    [2, 30],  # more padding than one rank holds
)
PADDED = (48, 64, 32, 48)

# architecture, changes to its config, packs, layouts, methods, whether activations are recomputed
Case = tuple[str, dict[str, Any], Sequence[int], Sequence[LayoutKind], Sequence[str], bool]
CASES: list[Case] = [
    # fewer key heads than ranks
    ("llama", {}, [0], KINDS, METHODS, False),
    ("llama", {}, [1], ["contiguous"], METHODS, False),
    ("llama", {}, [2], ["headtail"], METHODS, False),
    ("llama", {}, [3], ["balanced"], METHODS, False),
    ("llama", {}, [0], ["balanced"], METHODS, True),
    # windows, which the ring refuses
    ("gemma3", {}, [0], ["balanced"], ["allgather", "ulysses"], False),
    # soft caps
    ("gemma2", {"layer_types": ["full_attention"] * 2}, [0], ["balanced"], METHODS, False),
    # attention sinks and experts
    ("gpt_oss", {"layer_types": ["full_attention"] * 2}, [0], ["balanced"], METHODS, False),
    # values narrower than keys
    ("deepseek_v3", {}, [2], ["balanced"], METHODS, False),
]


def run(model: PreTrainedModel, batch: PackedBatch, weights: Tensor, **layout: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [T, V] of the whole pack, and this rank's part of the gradient of every parameter."""
    model.zero_grad()
    local = shard(batch, **layout)
    logits = gather_tokens(model(**local.model_inputs()).logits[0], local.context)
    real = batch.num_tokens - batch.pad_length
    (logits[:real] * weights[:real]).sum().backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return logits.detach(), gradients


def layouts(
    rank: int, world: int, kinds: Sequence[LayoutKind] = KINDS, methods: Sequence[str] = METHODS
) -> Iterator[dict[str, Any]]:
    for method in methods:
        for kind in kinds:
            yield {"method": method, "kind": kind, "world": world, "rank": rank, "group": dist.group.WORLD}


Difference = tuple[str, float, float]


def cases_of(world: int) -> list[Case]:
    """On two ranks the layouts and methods once each; what differs by model and row shows on four, each layout with
    each method on one row."""
    first, *others = CASES
    return [(*first[:3], ["balanced"], *first[4:]), *others] if world > 2 else [first]


def parity(rank: int, world: int) -> list[Difference]:
    """(case, difference of logits, difference of gradients), relative to the allowed rounding error."""
    found = []
    for name, changes, numbers, kinds, methods, recomputed in cases_of(world):
        model = attach(build(name, **changes))
        if recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number in numbers:
            batch = row(ROWS[number]).padded_to(PADDED[number])
            weights = torch.randn(batch.num_tokens, VOCABULARY, generator=torch.Generator().manual_seed(number))
            expected, expected_gradients = run(model, batch, weights)
            expected_gradients = {key: gradient.clone() for key, gradient in expected_gradients.items()}
            real = sum(ROWS[number])
            wide, wide_gradients = run(in_float64(model), batch, weights.double())
            noise = noise_of({"logits": expected[:real]}, {"logits": wide[:real]})
            gradient_noise = noise_of(expected_gradients, wide_gradients)
            for layout in layouts(rank, world, kinds, methods):
                logits, gradients = run(model, batch, weights, **layout)
                for gradient in gradients.values():
                    dist.all_reduce(gradient)
                case = f"{name} {ROWS[number]} {layout['method']} {layout['kind']}"
                difference, _ = largest_difference({"logits": logits[:real]}, {"logits": expected[:real]})
                gradient_difference, where = largest_difference(gradients, expected_gradients)
                found.append((f"{case}: {where}", difference / noise, gradient_difference / gradient_noise))
    return found


# Leaks


def changed(batch: PackedBatch, segment: int) -> PackedBatch:
    """The same pack with every token of one segment (or of the pad) changed."""
    start, end = batch.segments.offsets[segment], batch.segments.offsets[segment + 1]
    tokens = batch.input_ids.clone()
    tokens[start:end] = (tokens[start:end] + 1 + torch.arange(end - start) % (VOCABULARY - 1)) % VOCABULARY
    assert (tokens[start:end] != batch.input_ids[start:end]).all()
    return replace(batch, input_ids=tokens)


def logits_of(model: PreTrainedModel, batch: PackedBatch, **layout: Any) -> Tensor:
    local = shard(batch, backend="cpu", **layout)
    return gather_tokens(model(**local.model_inputs()).logits[0], local.context)


def leaks(model: PreTrainedModel, batch: PackedBatch, **layout: Any) -> list[tuple[int, int, float]]:
    """(changed segment, other segment, largest difference in the other's logits), for all pairs of segments."""
    found = []
    before = logits_of(model, batch, **layout)
    offsets = batch.segments.offsets
    for source in range(batch.segments.num_segments):
        after = logits_of(model, changed(batch, source), **layout)
        for other in range(batch.segments.num_segments):
            part = slice(offsets[other], offsets[other + 1])
            difference = float((after[part] - before[part]).abs().max())
            if other == source:
                assert difference > 0.0, "the changed sample itself must change"
            else:
                found.append((source, other, difference))
    return found


@torch.no_grad()
def leak_cases(rank: int, world: int) -> list[tuple[str, bool, list[tuple[int, int, float]]]]:
    """(case, whether it has experts, leaks) of every case."""
    found = []
    batch = row([13, 1, 28]).padded_to(48)
    full = {"layer_types": ["full_attention"] * 2}
    for name, changes in (("llama", {}), ("gpt_oss", full))[: world // 2]:
        model = attach(build(name, **changes)).eval()
        for layout in layouts(rank, world, ["balanced"]):  # the others: tests/cp/test_attend.py
            case = f"{name} {layout['method']} {layout['kind']}"
            found.append((case, name in EXPERTS, leaks(model, batch, **layout)))
    return found


def everything(rank: int, world: int) -> tuple[list[Difference], list[tuple[str, bool, list[tuple[int, int, float]]]]]:
    return parity(rank, world), leak_cases(rank, world)


@pytest.mark.parametrize("world", [2, 4])
def test_one_row_over_several_ranks_equals_one_process_and_leaks_nothing(world: int) -> None:
    for parities, leaking in run_ranks(world, everything):
        assert len(parities) == (9 if world == 2 else 3 + 3 * 3 + 2 + 4 * 3)
        for case, difference, gradient_difference in parities:
            assert difference <= FACTOR, f"{case}: logits differ by {difference:.1f} times their rounding"
            assert gradient_difference <= FACTOR, f"{case}: gradients by {gradient_difference:.1f} times theirs"
        assert len(leaking) == 3 * (world // 2)
        for case, experts, differences in leaking:
            assert len(differences) == 4 * 3
            for source, other, difference in differences:
                assert difference <= (1e-5 if experts else 0.0), f"{case}: {source} changed {other} by {difference:.1e}"


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "deepseek_v3", "gpt_oss"])
def test_a_changed_sample_changes_no_other(name: str) -> None:
    model = attach(build(name)).eval()
    for source, other, difference in leaks(model, row([13, 1, 22, 6], pad=4)):
        assert difference <= (1e-5 if name in EXPERTS else 0.0), f"{source} changed {other} by {difference:.1e}"


def test_a_pad_of_any_length_changes_no_gradient() -> None:
    model = attach(build("llama"))
    batch = row([13, 1, 22])
    weights = torch.randn(64, VOCABULARY)
    expected, expected_gradients = run(model, batch, weights)
    expected_gradients = {name: gradient.clone() for name, gradient in expected_gradients.items()}
    wide, wide_gradients = run(in_float64(model), batch, weights.double())
    for length in (37, 40, 64):
        padded = batch.padded_to(length)
        for tried in (padded, changed(padded, 3)):
            logits, gradients = run(model, tried, weights)
            assert_same_but_for_rounding({"logits": logits[:36]}, {"logits": expected}, {"logits": wide})
            assert_same_but_for_rounding(gradients, expected_gradients, wide_gradients)
