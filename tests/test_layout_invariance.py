"""Layout is free: the loss and the gradients of all parameters do not depend on how a global batch is laid out.

    one global batch      8 samples, 4 pairs, one sample without labels
    reference             the whole batch in one pack of one process
    layouts               micro-batches of any split; data × context ranks (4,1) (1,4) (2,2); packs of one step over
                          4, 2 and 1 of 4 ranks

For every loss and every way of averaging, the loss is compared. Gradients go through a small Qwen3, whose backward pass
is the slow part: for one loss every way of averaging has its own backward pass; for the others one backward pass covers
the sum of all ways, each with a different factor, so that an error in any of them is detected. A rank sums its
micro-batches, then all ranks are summed, as in training. Four processes are started once, for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from padfree.batch import LocalBatch
from padfree.cp import shard
from padfree.head import fused_loss, score
from padfree.losses import (
    WEIGHT_MODES,
    CISPOSettings,
    ClipSettings,
    DPOSettings,
    GSPOSettings,
    IcePopSettings,
    LossInputs,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    RewardModelSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    SFTSettings,
    Statistics,
    TokenTISSettings,
    ValueSettings,
    compute_loss,
    dpo_loss,
    is_elementwise,
    make_token_loss,
    needs_entropy,
    preference_pairs,
    reward_model_loss,
    sample_ends,
    token_weights,
    value_loss,
)
from padfree.model import attach, hidden_states, lm_head_of
from padfree.packing.collate import collate
from padfree.sample import Sample
from padfree.testing.models import build
from tests.ranks import run_ranks

CLIP = ClipSettings(low=0.1, high=0.2)
TOKEN_LOSSES: dict[str, SFTSettings | PolicySettings] = {
    "sft": SFTSettings(),
    "clip": PolicySettings(objective=CLIP),
    "dual clip, entropy": PolicySettings(
        objective=ClipSettings(low=0.1, high=0.2, dual=1.1), entropy_coefficient=0.03, old_policy="sampler"
    ),
    "gspo, k3": PolicySettings(objective=GSPOSettings(low=0.02, high=0.03), kl_coefficient=0.2),
    "cispo, k1": PolicySettings(objective=CISPOSettings(high=0.1), kl_coefficient=0.2, kl_estimator="k1"),
    "reinforce, k2": PolicySettings(objective=ReinforceSettings(), kl_coefficient=0.2, kl_estimator="k2"),
    "low_var_kl": PolicySettings(old_policy="current", kl_coefficient=0.2, kl_estimator="low_var_kl"),
    "k3 by ratio": PolicySettings(objective=CLIP, kl_coefficient=0.2, kl_weighting="ratio"),
    "token tis": PolicySettings(objective=CLIP, corrections=(TokenTISSettings(high=1.1),)),
    "sequence tis": PolicySettings(objective=CLIP, corrections=(SequenceTISSettings(high=1.5),), old_policy="current"),
    "icepop": PolicySettings(objective=CLIP, corrections=(IcePopSettings(low=0.8, high=1.2),)),
    "sequence mask": PolicySettings(objective=CLIP, corrections=(SequenceMaskSettings(low=0.95, high=1.05),)),
    "token mask": PolicySettings(
        objective=CLIP, corrections=(SequenceMaskSettings(low=0.85, high=1.2, statistic="token"),)
    ),
    "opsm": PolicySettings(objective=CLIP, corrections=(OPSMSettings(delta=0.01),)),
}
VALUE = ValueSettings(clip=0.2)
CASES = [(loss, mode) for loss in (*TOKEN_LOSSES, "value") for mode in WEIGHT_MODES]
PAIR_CASES = [("dpo", "pairs"), ("reward model", "pairs")]
FEW_CASES = [case for case in CASES if case[0] == "clip" or case[1] == "sample-mean"]
FACTORS = {"token-mean": 1.0, "sample-mean": 0.7, "sum-of-sample-mean": 0.2, "sample-sum": 0.1, "constant": 3.0}
"""Factors of the ways of averaging that share a backward pass; 1 if none is given."""

LENGTHS = (5, 9, 4, 12, 7, 6, 3, 8)
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
SILENT = 5
SPLITS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one pack": (tuple(range(8)),),
    "pairs, two uneven packs": ((4, 5), (6, 7, 0, 1, 2, 3)),
    "each alone": tuple((i,) for i in range(8)),
    "across pairs": ((0, 2, 4), (7,), (1, 3, 5, 6)),
}
FACTOR = 5.0
"""The multiple of the rounding error of one pack that other layouts must stay below."""
CASES_OF = {torch.float64: CASES, torch.float32: FEW_CASES}
"""float32 tests only rounding: every loss and every way of averaging, but not all combinations."""

Cases = list[tuple[str, str]]


@dataclass(frozen=True)
class Result:
    """Of the whole global batch."""

    losses: dict[tuple[str, str], Tensor]
    statistics: dict[tuple[str, str], Tensor]
    gradients: dict[tuple[str, str], list[Tensor]]  # by parameter

    def sum_over_ranks(self) -> None:
        tensors = [*self.losses.values(), *self.statistics.values(), *(g for gs in self.gradients.values() for g in gs)]
        flat = torch.cat([tensor.double().flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))


class Policy:
    """A small Qwen3 and a vector that maps its hidden states to values (or scores)."""

    def __init__(self, dtype: torch.dtype) -> None:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 40, "num_hidden_layers": 1}
        self.model: PreTrainedModel = attach(build("qwen3", **sizes))
        self.head = lm_head_of(self.model)
        # Qwen3's own norm computes in float32 for every dtype, which would hide float64 results.
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "Qwen3RMSNorm":
                    norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                    norm.weight = child.weight
                    setattr(module, name, norm)
        self.model.to(dtype)
        self.critic = torch.linspace(-1, 1, 32, dtype=dtype).requires_grad_()
        self.parameters = [*self.model.parameters(), self.critic]
        self.weight = self.model.get_output_embeddings().weight
        assert self.head.bias is None
        assert self.head.softcap is None


@cache
def make_policy(dtype: torch.dtype) -> Policy:
    return Policy(dtype)


def make_samples() -> list[Sample]:
    """Rollouts whose log-probabilities are near the model's own, so that ratios are near 1 and some are clipped."""
    rng = np.random.default_rng(0)
    policy = make_policy(torch.float64)
    samples = []
    for index, length in enumerate(LENGTHS):
        mask = np.arange(length) > rng.integers(0, 2)
        mask[rng.integers(2, length)] = index % 2  # a gap here and there
        if index == SILENT:
            mask[:] = False
        plain = Sample(tokens=rng.integers(0, 40, length), loss_mask=mask)
        local = shard(collate([replace(plain, loss_mask=None)]), backend="reference")
        with torch.no_grad():
            own = score(hidden_states(policy.model, local), policy.weight, local.labels).logprobs.numpy()
        near = np.roll(own, 1)  # element j belongs to token j
        samples.append(
            replace(
                plain,
                logprobs=near + rng.normal(0, 0.15, length),
                ref_logprobs=near + rng.normal(0, 0.15, length),
                advantages=np.full(length, rng.normal()),
                returns=rng.normal(0, 1, length),
                values=rng.normal(0, 1, length),
                group=index // 2,
                reward=float(index % 2),
                uid=index,
            )
        )
    return samples


def layout_result(
    samples: list[Sample], packs: list[tuple[int, ...]], cases: Cases, dtype: torch.dtype, context: Any = None
) -> Result:
    """What this process contributes with these micro-batches. `context` is the group that shares each of its packs."""
    policy = make_policy(dtype)
    weights = {mode: token_weights(mode, [s.mask for s in samples], **weight_settings(mode)) for mode in WEIGHT_MODES}
    world, rank = (1, 0) if context is None else (dist.get_world_size(context), dist.get_rank(context))

    def reduce(values: Tensor) -> Tensor:
        summed = values.clone()
        if context is not None:
            dist.all_reduce(summed, group=context)
        return summed

    result = Result(losses={}, statistics={}, gradients={})
    for pack in packs:
        local = {
            mode: shard(
                collate([samples[i] for i in pack], weights=[weights[mode][i] for i in pack]).padded_to_multiple(world),
                world=world,
                rank=rank,
                group=context,
                backend="reference",
            )
            for mode in WEIGHT_MODES
        }
        hidden = hidden_states(policy.model, local[WEIGHT_MODES[0]])
        objectives: dict[tuple[str, str], Tensor] = {}
        for (name, mode), loss, found in row_losses(policy, hidden, local, cases, reduce):
            add(result.losses, (name, mode), loss.detach())
            if found:
                numbers = torch.stack([number.double() for pair in found.values() for number in pair])
                add(result.statistics, (name, mode), numbers)
            add(objectives, (name, mode if name == "clip" else "all modes"), FACTORS.get(mode, 1.0) * loss)
        for case, objective in objectives.items():
            found = torch.autograd.grad(objective, policy.parameters, retain_graph=True, materialize_grads=True)
            if case in result.gradients:
                found = [total + gradient for total, gradient in zip(result.gradients[case], found, strict=True)]
            result.gradients[case] = list(found)
    return result


def add(sums: dict[tuple[str, str], Tensor], case: tuple[str, str], term: Tensor) -> None:
    sums[case] = sums[case] + term if case in sums else term


def row_losses(
    policy: Policy, hidden: Tensor, local: dict[Any, LocalBatch], cases: Cases, reduce: Callable[[Tensor], Tensor]
) -> Iterator[tuple[tuple[str, str], Tensor, Statistics]]:
    """Every case on one micro-batch. Elementwise losses are fused with the head, as in training."""
    for name, mode in cases:
        batch = local.get(mode, next(iter(local.values())))
        assert batch.rollout is not None
        inputs = LossInputs.from_batch(batch)
        assert inputs.rollout_logprobs is not None
        assert inputs.old_values is not None
        inputs = replace(inputs, old_logprobs=inputs.rollout_logprobs + 0.1 * inputs.old_values)
        if name == "value":
            output = value_loss(replace(inputs, values=hidden @ policy.critic), VALUE)
        elif name in TOKEN_LOSSES:
            settings = TOKEN_LOSSES[name]
            entropy = needs_entropy(settings)
            if is_elementwise(settings):
                token_loss = make_token_loss(inputs, settings, reduce=reduce)
                fused = fused_loss(hidden, policy.weight, batch.labels, token_loss, entropy=entropy)
                scored = inputs.with_scores(fused.logprobs, fused.entropy)
                needed = mode == "sample-mean"  # statistics do not depend on weights
                found = compute_loss(scored, settings, reduce=reduce).statistics if needed else {}
                yield (name, mode), fused.loss, found
                continue
            scores = score(hidden, policy.weight, batch.labels, entropy=entropy)
            output = compute_loss(inputs.with_scores(scores.logprobs, scores.entropy), settings, reduce=reduce)
        else:
            pairs = torch.from_numpy(preference_pairs(batch.samples))
            pair_weights = torch.full((len(pairs),), 1 / len(PAIRS), dtype=hidden.dtype)
            if name == "dpo":
                scores = score(hidden, policy.weight, batch.labels)
                output = dpo_loss(
                    inputs.with_scores(scores.logprobs), DPOSettings(beta=0.5), pairs, pair_weights, reduce=reduce
                )
            else:
                lengths = torch.tensor([info.length for info in batch.samples])
                ends = sample_ends(batch.position_ids, batch.sample_index, lengths)
                output = reward_model_loss(
                    hidden @ policy.critic,
                    ends,
                    batch.sample_index,
                    batch.num_samples,
                    RewardModelSettings(margin=0.1),
                    pairs,
                    pair_weights,
                    reduce=reduce,
                )
        yield (name, mode), output.loss, output.statistics


def weight_settings(mode: str) -> dict[str, Any]:
    groups = [index // 2 for index in range(len(LENGTHS))]
    return {"constant": {"constant": 100.0}, "group-mean": {"groups": groups}}.get(mode, {})


def ranks(
    rank: int, world: int, samples: list[Sample], layouts: list[tuple[int, int]]
) -> tuple[list[tuple[torch.dtype, Result]], Result] | None:
    """The sum over all ranks for each layout, and for packs of different widths; from rank 0 only. In float32, which
    tests only rounding, for data and context ranks together."""
    results = []
    for data, context in layouts:
        groups = [dist.new_group(list(range(first, first + context))) for first in range(0, world, context)]
        mine, data_rank = groups[rank // context], rank // context
        own = PAIRS[data_rank::data]
        packs = [own[0], tuple(i for pair in own[1:] for i in pair)][: len(own)]
        for dtype in CASES_OF if min(data, context) > 1 else [torch.float64]:
            group = mine if context > 1 else None
            result = layout_result(samples, packs, CASES_OF[dtype] + PAIR_CASES, dtype, group)
            result.sum_over_ranks()
            results.append((dtype, result))
    by_row = ranks_by_row(rank, samples)
    return (results, by_row) if rank == 0 else None


WAVES = ([(4, 0)], [(2, 1), (1, 2), (1, 3)])
"""Packs of each micro-batch, side by side on four ranks: the number of ranks that share one, and its pair."""


def ranks_by_row(rank: int, samples: list[Sample]) -> Result:
    """The sum over all ranks of a step whose packs are shared by different numbers of ranks."""
    total: Result | None = None
    for wave in WAVES:
        first = 0
        for width, pair in wave:
            group = dist.new_group(list(range(first, first + width)))
            if first <= rank < first + width:
                context = group if width > 1 else None
                found = layout_result(samples, [PAIRS[pair]], CASES + PAIR_CASES, torch.float64, context)
            first += width
        if total is None:
            total = found
            continue
        for sums, terms in ((total.losses, found.losses), (total.statistics, found.statistics)):
            for case, term in terms.items():
                add(sums, case, term)
        for case, gradients in found.gradients.items():
            total.gradients[case] = [a + b for a, b in zip(total.gradients[case], gradients, strict=True)]
    assert total is not None
    total.sum_over_ranks()
    return total


def differences(found: Result, exact: Result) -> Result:
    """The relative error of each number; for a gradient, relative to the norm of the parameter's gradient.

    The last gradient of a case is all of them together.
    """

    def relative(found: Tensor, exact: Tensor, smallest: float) -> Tensor:
        return (found.double() - exact).abs() / exact.abs().clamp(min=smallest)

    gradients = {}
    for case, found_gradients in found.gradients.items():
        pairs = list(zip(found_gradients, exact.gradients[case], strict=True))
        errors = torch.stack([(mine.double() - right).norm() for mine, right in pairs])
        norms = torch.stack([right.norm() for _, right in pairs])
        gradients[case] = [*(errors / norms), errors.norm() / norms.norm()]
    return Result(
        losses={case: relative(loss, exact.losses[case], 0.1) for case, loss in found.losses.items()},
        statistics={
            case: relative(numbers, exact.statistics[case], 10.0) for case, numbers in found.statistics.items()
        },
        gradients=gradients,
    )


def largest(tensors: Iterable[Tensor]) -> float:
    return max(float(tensor.max()) for tensor in tensors)


def assert_exact(found: Result, exact: Result) -> None:
    """In float64 every layout gives the same result except for the last digits."""
    error = differences(found, exact)
    for kind in (error.losses, error.statistics):
        assert all(largest([numbers]) <= 1e-12 for numbers in kind.values()), kind
    for case, gradients in error.gradients.items():
        assert float(gradients[-1]) <= 1e-12, case
        assert largest(gradients) <= 1e-11, case  # of a single parameter


def assert_as_exact(found: Result, alone: Result, exact: Result) -> None:
    """In float32 a layout is as far from the float64 result as one pack on one process, whatever the machine.

    A loss is one number, and one pack may be exact by luck: its noise is measured by the worst of all cases. The noise
    of a gradient is measured in the same case.
    """
    error, noise = differences(found, exact), differences(alone, exact)
    assert 0 < largest(noise.losses.values()) < 1e-5, "rounding, not a different result"
    for errors, noises in ((error.losses, noise.losses), (error.statistics, noise.statistics)):
        allowed = FACTOR * largest(noises.values())
        assert all(largest([numbers]) <= allowed for numbers in errors.values()), (errors, allowed)
    for case, gradients in error.gradients.items():
        assert 0 < largest(noise.gradients[case]) < 1e-4, case
        assert gradients[-1] <= FACTOR * noise.gradients[case][-1], case
        assert largest(gradients) <= FACTOR * largest(noise.gradients[case]), case


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples()


@pytest.fixture(scope="module")
def reference(samples: list[Sample]) -> dict[torch.dtype, Result]:
    packs = list(SPLITS["one pack"])
    return {dtype: layout_result(samples, packs, CASES_OF[dtype] + PAIR_CASES, dtype) for dtype in CASES_OF}


@pytest.fixture(scope="module")
def exact(samples: list[Sample], reference: dict[torch.dtype, Result]) -> dict[torch.dtype, Result]:
    """The cases of each dtype, in float64."""
    few = layout_result(samples, list(SPLITS["one pack"]), FEW_CASES + PAIR_CASES, torch.float64)
    return {torch.float64: reference[torch.float64], torch.float32: few}


@pytest.fixture(scope="module")
def check(reference: dict[torch.dtype, Result], exact: dict[torch.dtype, Result]) -> Callable[..., None]:
    def compare(found: Result, dtype: torch.dtype) -> None:
        if dtype == torch.float64:
            assert_exact(found, exact[dtype])
        else:
            assert_as_exact(found, reference[dtype], exact[dtype])

    return compare


def test_losses_differ_from_each_other(reference: dict[torch.dtype, Result]) -> None:
    """Otherwise a correction or a mode that does nothing would look invariant."""
    losses = reference[torch.float64].losses
    assert len({float(loss) for loss in losses.values()}) == len(losses)


@pytest.mark.parametrize("dtype", CASES_OF, ids=str)
@pytest.mark.parametrize("split", [name for name in SPLITS if name != "one pack"])
def test_micro_batches(
    split: str, dtype: torch.dtype, samples: list[Sample], check: Callable[[Result, torch.dtype], None]
) -> None:
    cases = CASES_OF[dtype] + (PAIR_CASES if split.startswith("pairs") else [])
    found = layout_result(samples, list(SPLITS[split]), cases, dtype)
    check(found, dtype)


@pytest.mark.slow
def test_data_and_context_ranks(
    samples: list[Sample],
    reference: dict[torch.dtype, Result],
    check: Callable[[Result, torch.dtype], None],
) -> None:
    """Also packs of different widths, which `parallel.context = "auto"` makes."""
    results, by_row = run_ranks(4, ranks, samples, [(4, 1), (1, 4), (2, 2)])[0]
    assert [dtype for dtype, _ in results] == [torch.float64] * 3 + [torch.float32]
    for dtype, result in results:
        assert set(result.losses) == set(reference[dtype].losses)
        check(result, dtype)
    check(by_row, torch.float64)
