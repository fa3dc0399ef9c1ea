"""Every public function × every type a user may hand to it: right, or refused in one line.

    SLOTS["losses.grpo_advantages rewards"]     an argument of a function, and the kinds of input that it refuses
    kind                                        int64, bool, bfloat16, a numpy array, a list, nothing at all, ...

Right means: the numbers of the same call in float64, up to the rounding of the type that comes back, and never an
integer type where float64 would have given a float. The entries are 0 and 1, so that every kind holds them exactly.
Refused means: a UserError. Nothing else may happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import padfree
from padfree import losses
from padfree.attention import apply_sinks, sinks_gradient, varlen_attention, varlen_backward
from padfree.attention import varlen_forward as forward
from padfree.compat import slime
from padfree.cp import attend, gather_tokens, shard
from padfree.errors import UserError
from padfree.head import fused_loss, score
from padfree.losses import LossInputs
from padfree.packing import CostModel, TokenBudgetBatcher, balance, fill, pack, plan_step, unpack
from padfree.sample import Sample
from padfree.segments import Segments

FLOATS = "float16 bfloat16 float32 float64"
INTEGERS = "int64 int32 int16 int8 uint8"
HOST = "numpy numpy_int list"
KINDS = f"{INTEGERS} bool {FLOATS} complex64 {HOST} empty".split()


def cast(kind: str, values: Any) -> Any:
    """The values as an input of this kind. "empty" has no entries."""
    wide = torch.tensor(values, dtype=torch.float64)
    if kind == "numpy":
        return wide.numpy()
    if kind == "numpy_int":
        return wide.long().numpy()
    if kind == "list":
        return wide.long().tolist()
    if kind == "empty":
        return wide[:0].float()
    return wide.to(getattr(torch, kind))


@dataclass(frozen=True)
class Slot:
    """One argument: how it is passed, entries for it, and the kinds that are refused."""

    call: Callable[[Any], Any]
    values: Any
    refused: str
    exact: bool = False  # the type is handed through: integers stay integers


def numbers(result: Any) -> Iterator[Tensor]:
    """The arrays of whatever a function returns."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (np.ndarray, np.generic, float, int)):
        yield torch.as_tensor(np.asarray(result))
    elif is_dataclass(result) and not isinstance(result, type):
        for field in fields(result):
            yield from numbers(getattr(result, field.name))
    elif isinstance(result, dict):
        for name in sorted(result):
            yield from numbers(result[name])
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from numbers(part)


COMPUTED = (torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps)
WIDEST = torch.complex128
EIGHT = [1, 0, 0, 1, 1, 0, 1, 1]


def groups(x: Any) -> Tensor:
    return torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])[: len(x)]


def mask(x: Any) -> Tensor:
    return torch.tensor([True, True, False, True, True, True, False, True])[: len(x)]


def kl(x: Any) -> Tensor:
    return torch.linspace(0.1, 0.8, 8, dtype=torch.float64)[: len(x)]


def inputs(x: Any, **changes: Any) -> LossInputs:
    """Loss inputs as long as x, in float64."""
    given = {
        name: kl(x) * factor
        for name, factor in (
            ("logprobs", -1.0), ("entropy", 1.0), ("old_logprobs", -0.9), ("rollout_logprobs", -1.1),
            ("ref_logprobs", -1.2), ("advantages", 0.5), ("values", 0.7), ("old_values", 0.6), ("returns", 0.9),
        )
    }  # fmt: skip
    return LossInputs(
        **{
            "mask": mask(x), "weights": torch.full((len(x),), 0.125, dtype=torch.float64), "sample_index": groups(x),
            "num_samples": 3, **given, **changes,
        }
    )  # fmt: skip


POLICY = losses.PolicySettings(
    corrections=(losses.TokenTISSettings(), losses.SequenceMaskSettings(), losses.OPSMSettings()),
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
)
PAIRS = torch.tensor([[0, 1], [2, 1]])
HALF = torch.full((2,), 0.5, dtype=torch.float64)
TENSORS_ONLY = f"complex64 {HOST}"
INDEX = f"bool complex64 {FLOATS} {HOST} empty"  # "empty" is a float tensor, as torch.tensor([]) is
MASK = f"{INTEGERS} complex64 {FLOATS} {HOST} empty"


def loss_field(name: str) -> Slot:
    """A field of LossInputs, through every loss that reads it."""

    def call(x: Any) -> Any:
        given = inputs(x, **{name: x})
        if name in ("values", "old_values", "returns"):
            return losses.value_loss(given, losses.ValueSettings())
        policy = losses.policy_loss(given, POLICY)
        if name in ("logprobs", "ref_logprobs", "weights"):
            return policy, losses.sft_loss(given), losses.dpo_loss(given, losses.DPOSettings(), PAIRS, HALF)
        return policy

    return Slot(call, EIGHT, TENSORS_ONLY)


def reward_model(
    scores: Any, ends: Any = None, sample_index: Any = None, pairs: Any = PAIRS, weights: Any = HALF
) -> Any:
    ends = torch.tensor([0, 0, 1, 0, 0, 1, 0, 1]).bool()[: len(scores)] if ends is None else ends
    sample_index = groups(scores) if sample_index is None else sample_index
    return losses.reward_model_loss(
        scores, ends, sample_index, 3, losses.RewardModelSettings(margin=0.5), pairs, weights
    )


LOSSES = {
    "grpo_advantages rewards": Slot(lambda x: losses.grpo_advantages(x, groups(x), 3), EIGHT, TENSORS_ONLY),
    "grpo_advantages groups": Slot(lambda x: losses.grpo_advantages(kl(x), x, 2), EIGHT, INDEX),
    "rloo_advantages rewards": Slot(lambda x: losses.rloo_advantages(x, groups(x), 3), EIGHT, TENSORS_ONLY),
    "rloo_advantages groups": Slot(lambda x: losses.rloo_advantages(kl(x), x, 2), EIGHT, INDEX),
    "token_rewards rewards": Slot(
        lambda x: losses.token_rewards(x, mask(EIGHT), groups(EIGHT), kl=kl(EIGHT), kl_coefficient=0.1),
        [1, 0, 1], f"{TENSORS_ONLY} empty",
    ),
    "token_rewards kl": Slot(
        lambda x: losses.token_rewards(kl(EIGHT)[:3], mask(x), groups(x), kl=x, kl_coefficient=0.1), EIGHT, TENSORS_ONLY
    ),
    "discounted_returns rewards": Slot(
        lambda x: losses.discounted_returns(x, mask(x), groups(x), gamma=0.9), EIGHT, TENSORS_ONLY
    ),
    "discounted_returns mask": Slot(lambda x: losses.discounted_returns(kl(x), x, groups(x), gamma=0.9), EIGHT, MASK),
    "discounted_returns sample_index": Slot(
        lambda x: losses.discounted_returns(kl(x), mask(x), x, gamma=0.9), [0, 0, 0, 0, 1, 1, 1, 1], INDEX
    ),
    "gae rewards": Slot(lambda x: losses.gae(x, kl(x).float(), mask(x), groups(x)), EIGHT, TENSORS_ONLY),
    "gae values": Slot(lambda x: losses.gae(kl(x).float(), x, mask(x), groups(x)), EIGHT, TENSORS_ONLY),
    "gae both": Slot(lambda x: losses.gae(x, x, mask(x), groups(x)), EIGHT, TENSORS_ONLY),
    "whiten values": Slot(lambda x: losses.whiten(x, mask(x)), EIGHT, TENSORS_ONLY),
    "whiten values, mean kept": Slot(lambda x: losses.whiten(x, mask(x), shift_mean=False), EIGHT, TENSORS_ONLY),
    "whiten mask": Slot(lambda x: losses.whiten(kl(x), x), EIGHT, MASK),
    "reinforce_plus_plus rewards": Slot(
        lambda x: losses.reinforce_plus_plus(
            x, mask(EIGHT), groups(EIGHT), kl=kl(EIGHT), kl_coefficient=0.1, gamma=0.9
        ),
        [1, 0, 1], f"{TENSORS_ONLY} empty",
    ),
    "reinforce_plus_plus_baseline rewards": Slot(
        lambda x: losses.reinforce_plus_plus_baseline(
            x, torch.tensor([0, 0, 1])[: len(x)], 2, mask(EIGHT), groups(EIGHT), kl=kl(EIGHT), kl_coefficient=0.1
        ),
        [1, 0, 1], f"{TENSORS_ONLY} empty",
    ),
    "kl_divergence logprobs": Slot(
        lambda x: [losses.kl_divergence(x, kl(x).float(), k) for k in ("k1", "k2", "k3", "low_var_kl")],
        EIGHT, TENSORS_ONLY,
    ),
    "kl_divergence base_logprobs": Slot(
        lambda x: [losses.kl_divergence(kl(x).float(), x, k) for k in ("k1", "k2", "k3", "low_var_kl")],
        EIGHT, TENSORS_ONLY,
    ),
    "kl_divergence both": Slot(
        lambda x: [losses.kl_divergence(x, x, k) for k in ("k1", "k2", "k3", "low_var_kl")], EIGHT, TENSORS_ONLY
    ),
    "clipped_ratio log_ratio": Slot(
        lambda x: losses.clipped_ratio(x, kl(x).float(), low=0.2, high=0.3, dual=3.0)[0], EIGHT, TENSORS_ONLY
    ),
    "clipped_ratio advantages": Slot(
        lambda x: losses.clipped_ratio(kl(x).float(), x, low=0.2, high=0.3, dual=3.0)[0], EIGHT, TENSORS_ONLY
    ),
    "clipped_ratio both": Slot(
        lambda x: losses.clipped_ratio(x, x, low=0.2, high=0.3, dual=3.0)[0], EIGHT, TENSORS_ONLY
    ),
    "score_logits logits": Slot(
        lambda x: losses.score_logits(x, groups(x)[: len(x)], temperature=0.7, entropy=True),
        [[1, 0, 1], [0, 0, 1]], TENSORS_ONLY,
    ),
    "score_logits labels": Slot(
        lambda x: losses.score_logits(kl(EIGHT).reshape(4, 2)[: len(x)], x), [1, 0, 1], INDEX
    ),
    "segment_sum values": Slot(lambda x: losses.segment_sum(x, groups(x), 3), EIGHT, TENSORS_ONLY),
    "segment_sum sample_index": Slot(lambda x: losses.segment_sum(kl(x), x, 2), EIGHT, INDEX),
    "segment_mean values": Slot(lambda x: losses.segment_mean(x, mask(x), groups(x), 3), EIGHT, TENSORS_ONLY),
    "segment_mean mask": Slot(lambda x: losses.segment_mean(kl(x), x, groups(x), 3), EIGHT, MASK),
    "spread values": Slot(
        lambda x: losses.spread(x, torch.tensor([0, 0, 1, 2])), [1, 0, 1], f"{TENSORS_ONLY} empty", exact=True
    ),
    "spread sample_index": Slot(lambda x: losses.spread(kl(EIGHT), x), EIGHT, INDEX),
    "sample_ends position_ids": Slot(
        lambda x: losses.sample_ends(x, groups(x), torch.tensor([2, 2, 1])), EIGHT, INDEX
    ),
    "sample_ends lengths": Slot(
        lambda x: losses.sample_ends(groups(EIGHT), groups(EIGHT), x), [1, 0, 1], INDEX
    ),
    "reward_model_loss scores": Slot(reward_model, EIGHT, f"{TENSORS_ONLY}"),
    "reward_model_loss ends": Slot(lambda x: reward_model(kl(x), ends=x), EIGHT, MASK),
    "reward_model_loss pairs": Slot(lambda x: reward_model(kl(EIGHT), pairs=x), [[0, 1], [1, 0]], INDEX),
    "reward_model_loss pair_weights": Slot(
        lambda x: reward_model(kl(EIGHT), weights=x), [1, 0], f"{TENSORS_ONLY} empty"
    ),
    "token_weights masks": Slot(
        lambda x: losses.token_weights("sample-mean", [x, mask(EIGHT).numpy()]), EIGHT, ""
    ),
    "batch_weights labels": Slot(
        lambda x: losses.batch_weights("sample-mean", x, groups(x), 3, divisor=3.0), EIGHT, INDEX
    ),
    "batch_weights group_counts": Slot(
        lambda x: losses.batch_weights("group-mean", groups(EIGHT), groups(EIGHT), 3, divisor=2.0, group_counts=x),
        [1, 0, 1], f"{TENSORS_ONLY} empty",
    ),
    "weight_divisor counts": Slot(
        lambda x: losses.weight_divisor("token-mean", x), EIGHT, f"bool complex64 {FLOATS} numpy"
    ),
    "group_token_counts counts": Slot(
        lambda x: losses.group_token_counts(x, ["a", "b", "a", "c"] * (len(x) // 4)),
        EIGHT, f"bool complex64 {FLOATS} numpy", exact=True,
    ),
    "scored_counts masks": Slot(lambda x: losses.scored_counts([x]), EIGHT, "", exact=True),
    **{
        f"LossInputs {name}": loss_field(name)
        for name in (
            "logprobs", "entropy", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "values",
            "old_values", "returns", "weights",
        )
    },
    "LossInputs mask": Slot(lambda x: losses.sft_loss(inputs(x, mask=x)), EIGHT, MASK),
    "LossInputs sample_index": Slot(lambda x: losses.policy_loss(inputs(x, sample_index=x), POLICY), EIGHT, INDEX),
}  # fmt: skip

SEGMENTS = Segments.from_lengths([3, 5])
BATCH = padfree.collate([Sample(tokens=[1, 2, 3]), Sample(tokens=[4, 5, 6, 7, 8])])
WIDE = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 2, 4)


ROWS = [[[(7 * t + 3 * h) >> bit & 1 for bit in range(4)] for h in range(2)] for t in range(8)]
HIDDEN = [[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0]]
WEIGHT = torch.arange(-10, 10, dtype=torch.float64).reshape(5, 4) / 8


def head(function: Callable[..., Any]) -> dict[str, Slot]:
    """`score` and `fused_loss` by argument. Half precision other than bfloat16 is refused, and so are integers."""
    labels = torch.tensor([4, -100, 1])

    def scored(x: Any, y: Any, chosen: Any = labels, **options: Any) -> Any:
        extra = [lambda logprobs, entropy, rows: -logprobs] if function is fused_loss else []
        return function(x, y, chosen, *extra, entropy=True, **options)

    like = lambda x: WEIGHT.to(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else WEIGHT  # noqa: E731
    refused = f"{INTEGERS} bool float16 {TENSORS_ONLY}"
    name = function.__name__
    return {
        f"{name} hidden": Slot(
            lambda x: scored(x, WEIGHT if not hasattr(x, "dtype") else like(x), labels[: len(x)]), HIDDEN, refused
        ),
        f"{name} labels": Slot(lambda x: scored(WEIGHT[:3], WEIGHT, x), [1, 0, 1], f"{INDEX}"),
        f"{name} temperature": Slot(
            lambda x: scored(WEIGHT[:3], WEIGHT, temperature=x), [1, 1, 1], f"{TENSORS_ONLY} empty"
        ),
        f"{name} bias": Slot(
            lambda x: scored(WEIGHT[:3], WEIGHT, bias=x),
            [1, 0, 1, 1, 0],
            f"{INTEGERS} bool float16 bfloat16 float32 {TENSORS_ONLY} empty",
        ),
    }


ATTENTION_REFUSED = f"{INTEGERS} bool {TENSORS_ONLY} empty"
TENSORS = {
    "varlen_attention": Slot(
        lambda x: varlen_attention(x, x, x, SEGMENTS, SEGMENTS, return_lse=True), ROWS, ATTENTION_REFUSED
    ),
    "varlen_attention sinks": Slot(
        lambda x: varlen_attention(WIDE, WIDE, WIDE, SEGMENTS, SEGMENTS, sinks=x), [1, 0], f"{TENSORS_ONLY} empty"
    ),
    "varlen_forward": Slot(lambda x: forward(x, x, x, SEGMENTS, SEGMENTS), ROWS, ATTENTION_REFUSED),
    "varlen_backward": Slot(
        lambda x: varlen_backward(
            x, WIDE, WIDE, WIDE, *forward(WIDE, WIDE, WIDE, SEGMENTS, SEGMENTS), SEGMENTS, SEGMENTS
        ),
        ROWS,
        f"{INTEGERS} bool {FLOATS.removesuffix('float64')} {TENSORS_ONLY} empty",
    ),
    "apply_sinks out": Slot(
        lambda x: apply_sinks(x, WIDE[..., 0].float(), torch.zeros(2)), ROWS, f"{INTEGERS} bool {TENSORS_ONLY} empty"
    ),
    "apply_sinks sinks": Slot(
        lambda x: apply_sinks(WIDE, WIDE[..., 0], x), [1, 0], f"{INTEGERS} bool {TENSORS_ONLY} empty"
    ),
    "sinks_gradient sinks": Slot(
        lambda x: sinks_gradient(WIDE, WIDE, WIDE[..., 0], x), [1, 0], f"{INTEGERS} bool {TENSORS_ONLY} empty"
    ),
    "attend": Slot(lambda x: attend(x, x, x, shard(BATCH).context), ROWS, ATTENTION_REFUSED),
    "gather_tokens": Slot(lambda x: gather_tokens(x, shard(BATCH).context), EIGHT, f"{TENSORS_ONLY} empty", exact=True),
    **head(score),
    **head(fused_loss),
}


def sample(**values: Any) -> Any:
    made = Sample(**{"tokens": np.arange(len(next(iter(values.values())))), **values})
    return [getattr(made, name) for name in values]


def packed(x: Any) -> Any:
    return [part.input_ids for part in pack([Sample(tokens=x), Sample(tokens=[1, 2])])]


NOT_INTEGER = f"bool complex64 {FLOATS} numpy"
PACKING = {
    "fill lengths": Slot(lambda x: list(fill(x, 4)), EIGHT, NOT_INTEGER, exact=True),
    "balance costs": Slot(lambda x: balance(x, 2), EIGHT, "bool complex64", exact=True),
    "balance lengths": Slot(lambda x: balance([1] * len(x), 2, lengths=x, cap=8), EIGHT, NOT_INTEGER, exact=True),
    "plan_step lengths": Slot(
        lambda x: plan_step(x, ranks=2, max_tokens=8).tokens, EIGHT, f"{NOT_INTEGER} empty", exact=True
    ),
    "CostModel lengths": Slot(lambda x: CostModel(linear=1.0, quadratic=0.5)(x), EIGHT, "complex64"),
    "CostModel.fit seconds": Slot(lambda x: CostModel.fit([10, 20, 30], x), [1, 1, 1], "complex64 empty"),
    "Segments.from_lengths": Slot(lambda x: Segments.from_lengths(x).offsets, EIGHT, NOT_INTEGER, exact=True),
    "Sample tokens": Slot(packed, EIGHT, NOT_INTEGER, exact=True),
    "Sample loss_mask": Slot(lambda x: sample(loss_mask=x), EIGHT, "complex64", exact=True),
    **{
        f"Sample {name}": Slot(lambda x, name=name: sample(**{name: x}), EIGHT, "complex64")
        for name in ("logprobs", "ref_logprobs", "advantages", "returns", "values")
    },
    "pack weights": Slot(
        lambda x: pack([Sample(tokens=np.arange(len(x)))], weights=[x])[0].weights, EIGHT, "complex64"
    ),
    "PackedBatch.with_weights": Slot(lambda x: BATCH.with_weights(x).weights, EIGHT, f"{TENSORS_ONLY} empty"),
    "unpack values": Slot(lambda x: unpack(BATCH, x), EIGHT, f"{HOST} empty", exact=True),
    "PackedBatch.unpack values": Slot(BATCH.unpack, EIGHT, f"{HOST} empty", exact=True),
    "TokenBudgetBatcher samples": Slot(
        lambda x: [len(batch) for batch in TokenBudgetBatcher([x, x], budget=9)], EIGHT, "", exact=True
    ),
}


def slime_pack(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "tokens": [[1, 2, 3], [4, 5]], "loss_masks": [[1, 0], [1]], "rewards": [1.0, 0.0], "raw_rewards": [1, 0],
        "response_lengths": [2, 1], "advantages": [[0.5, 0.5], [1.0]], "returns": [[0.5, 0.5], [1.0]], **changes,
    }  # fmt: skip
    (pack,) = slime.pack_sequences(**given)
    return [pack[name] for name in sorted(pack) if isinstance(pack[name], Tensor)]


LOGITS = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
COMPAT = {
    "pack_sequences tokens": Slot(lambda x: slime_pack(tokens=[x, [4, 5]]), [1, 0, 1], f"{NOT_INTEGER} empty"),
    "pack_sequences loss_masks": Slot(lambda x: slime_pack(loss_masks=[x, [1]]), [1, 0], "complex64 empty"),
    "pack_sequences rewards": Slot(lambda x: slime_pack(rewards=x), [1, 0], "complex64 empty"),
    "pack_sequences advantages": Slot(lambda x: slime_pack(advantages=[x, [1.0]]), [1, 0], "complex64 empty"),
    "pack_sequences rollout_log_probs": Slot(
        lambda x: slime_pack(rollout_log_probs=[x, [1.0]]), [1, 0], "complex64 empty"
    ),
    "get_seqlen_balanced_partitions": Slot(
        lambda x: slime.get_seqlen_balanced_partitions(x, 2, True), EIGHT, "bool complex64 empty", exact=True
    ),
    "selective_log_softmax logits": Slot(
        lambda x: slime.selective_log_softmax(x, torch.tensor([2, 0])[: len(x)]), [[1, 0, 1], [0, 0, 1]], TENSORS_ONLY
    ),
    "selective_log_softmax input_ids": Slot(lambda x: slime.selective_log_softmax(LOGITS, x), [1, 0, 1, 1], INDEX),
    "gather_log_probs_packed logits": Slot(
        lambda x: slime.gather_log_probs_packed(x, torch.tensor([0, 1, 2])[: len(x) + 1], False),
        [[1, 0, 1], [0, 0, 1]], TENSORS_ONLY,
    ),
    "gather_log_probs_packed input_ids": Slot(
        lambda x: slime.gather_log_probs_packed(LOGITS[:3], x, False), [1, 0, 1, 1], INDEX
    ),
    "get_logprob_and_entropy_with_cp logits": Slot(
        lambda x: slime.get_logprob_and_entropy_with_cp(
            x, torch.tensor([0, 1])[: len(x)], 0, 1, None, torch.tensor([0, 1]), False
        ),
        [[1, 0, 1], [0, 0, 1]], f"{TENSORS_ONLY} empty",
    ),
    "get_logprob_and_entropy_with_cp tokens": Slot(
        lambda x: slime.get_logprob_and_entropy_with_cp(LOGITS, x, 0, 1, None, x, False), [1, 0, 1, 1], INDEX
    ),
    "sum_of_sample_mean x": Slot(
        lambda x: slime.sum_of_sample_mean(x, [len(x[:3]), len(x[3:])], [mask(x)[:3], mask(x)[3:]]), EIGHT, TENSORS_ONLY
    ),
    "sum_of_sample_mean loss_masks": Slot(
        lambda x: slime.sum_of_sample_mean(kl(EIGHT)[: len(x)], [len(x)], [x]), EIGHT, "complex64"
    ),
    "compute_policy_loss ppo_kl": Slot(
        lambda x: slime.compute_policy_loss(x, kl(x).float(), 0.2, 0.3, 3.0), EIGHT, TENSORS_ONLY
    ),
    "compute_policy_loss advantages": Slot(
        lambda x: slime.compute_policy_loss(kl(x).float(), x, 0.2, 0.3), EIGHT, TENSORS_ONLY
    ),
    "compute_approx_kl": Slot(lambda x: slime.compute_approx_kl(x, x, "k3"), EIGHT, TENSORS_ONLY),
}  # fmt: skip

SLOTS = {
    **{f"losses.{name}": slot for name, slot in LOSSES.items()},
    **TENSORS,
    **{f"packing.{name}": slot for name, slot in PACKING.items()},
    **{f"slime.{name}": slot for name, slot in COMPAT.items()},
}


def refusal(call: Callable[[Any], Any], given: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(given)
    return str(caught.value)


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_input_is_right_or_refused(kind: str, name: str) -> None:
    slot = SLOTS[name]
    given = cast(kind, slot.values)
    if kind in slot.refused.split():
        message = refusal(slot.call, given)
        assert "\n" not in message
        assert ";" in message, message
        return
    found = list(numbers(slot.call(given)))
    if kind == "empty":
        assert all(part.isfinite().all() for part in found)
        return
    reference = next(kind for kind in ("float64", "int64", "bool") if kind not in slot.refused.split())
    expected = list(numbers(slot.call(cast(reference, slot.values))))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        if other.is_floating_point() and not slot.exact:
            assert one.is_floating_point(), one.dtype
        # what is no float64 is computed as float32 at least, and rounded to the type that comes back
        eps = max(torch.finfo(one.dtype).eps, COMPUTED[kind == "float64"]) if one.is_floating_point() else 0.0
        rounding = 4 * eps
        torch.testing.assert_close(one.to(WIDEST), other.to(WIDEST), rtol=rounding, atol=rounding)
