"""`pack` and `unpack`: the worked example, the round trip, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree import CostModel, Sample, pack, unpack
from padfree.packing import collate
from tests.refused import refused

IGNORE = -100
THREE = [Sample(tokens=tokens) for tokens in ([1, 2, 3, 4, 5], [10, 11, 12], [20, 21, 22, 23, 24, 25, 26])]


def test_the_worked_example() -> None:
    (batch,) = pack(THREE)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 22, 23, 24, 25, 26]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    assert batch.segments.cu_seqlens.tolist() == [0, 5, 8, 15]
    assert batch.labels.tolist() == [2, 3, 4, 5, IGNORE, 11, 12, IGNORE, 21, 22, 23, 24, 25, 26, IGNORE]
    assert "attention_mask" not in batch.model_inputs()
    assert batch.weights.sum().item() == pytest.approx(1.0)
    assert batch.weights[batch.labels == IGNORE].eq(0).all()


def test_a_budget_of_ten_holds_four_samples() -> None:
    (batch,) = pack([Sample(tokens=[7] * n) for n in (4, 2, 3, 1)], max_tokens=10)
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 0]


def test_whole_sequences_drive_attention_and_responses_drive_the_loss() -> None:
    lengths, responses = (512, 768, 256), (256, 384, 128)
    samples = [
        Sample(tokens=np.arange(n), loss_mask=np.arange(n) >= n - r) for n, r in zip(lengths, responses, strict=True)
    ]
    (batch,) = pack(samples)
    assert batch.segments.cu_seqlens.tolist() == [0, 512, 1280, 1536]
    scored = [int((labels != IGNORE).sum()) for labels in batch.unpack(batch.labels)]
    assert scored == list(responses)


def test_what_belongs_to_a_prediction_is_shifted_with_its_label() -> None:
    sample = Sample(tokens=[3, 4, 5], loss_mask=[0, 0, 1], logprobs=[0.0, -1.0, -2.0], advantages=[9.0, 8.0, 7.0])
    (batch,) = pack([sample], weights=[np.array([0.1, 0.2, 0.3])])
    assert batch.labels.tolist() == [IGNORE, 5, IGNORE]
    assert batch.weights.tolist() == pytest.approx([0, 0.2, 0])
    assert batch.rollout is not None
    assert batch.rollout.logprobs is not None
    assert batch.rollout.logprobs.tolist() == [-1.0, -2.0, 0.0]
    assert batch.rollout.advantages is not None
    assert batch.rollout.advantages.tolist() == [8.0, 7.0, 0.0]
    assert batch.rollout.values is None


def test_no_samples_give_no_packs_and_empty_samples_keep_their_place() -> None:
    assert pack([]) == []
    (batch,) = pack([Sample(tokens=[]), Sample(tokens=[0]), Sample(tokens=[])])
    assert batch.segments.cu_seqlens.tolist() == [0, 0, 1, 1]
    assert batch.lengths == [0, 1, 0]
    (only_empty,) = pack([Sample(tokens=[])], multiple_of=4)
    assert only_empty.num_tokens == 0


def test_token_arrays_of_any_integer_type_mix() -> None:
    samples = [Sample(tokens=np.array([1, 2], dtype=dtype)) for dtype in (np.uint16, np.int32, np.uint64, np.int64)]
    assert collate(samples).input_ids.tolist() == [1, 2] * 4


def test_fully_masked_samples_have_no_weight() -> None:
    (batch,) = pack([Sample(tokens=[1, 2, 3], loss_mask=[0, 0, 0])])
    assert batch.labels.tolist() == [IGNORE] * 3
    assert batch.weights.tolist() == [0, 0, 0]


def test_packs_can_be_balanced_by_cost() -> None:
    lengths = [8, 4, 4, 4, 4]
    samples = [Sample(tokens=np.zeros(n, dtype=np.int64)) for n in lengths]
    cost = CostModel(linear=0.0, quadratic=1.0, constant=0.0)
    packs = pack(samples, num_packs=2, cost=cost)
    totals = sorted(sum(n * n for n in batch.lengths) for batch in packs)
    assert totals == [64, 64]


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return [
        Sample(
            tokens=rng.integers(0, 3, n),  # token id 0 is an ordinary token
            loss_mask=rng.integers(0, 2, n),
            advantages=rng.normal(size=n),
            uid=index,
        )
        for index, n in enumerate(lengths)
    ]


@settings(max_examples=300)
@given(sample_lists(), st.integers(12, 40), st.sampled_from([1, 2, 3]), st.booleans())
def test_round_trip(samples: list[Sample], max_tokens: int, multiple_of: int, by_number: bool) -> None:
    max_tokens += -max_tokens % multiple_of
    if by_number:
        packs = pack(samples, num_packs=min(3, len(samples)), multiple_of=multiple_of)
    else:
        packs = pack(samples, max_tokens=max_tokens, multiple_of=multiple_of)
        assert all(batch.num_tokens <= max_tokens for batch in packs)
    assert all(batch.num_tokens % multiple_of == 0 for batch in packs)
    assert sorted(info.index for batch in packs for info in batch.samples) == list(range(len(samples)))
    for batch in packs:
        indices = [info.index for info in batch.samples]
        assert indices == sorted(indices)
    tokens = unpack(packs, [batch.input_ids for batch in packs])
    labels = unpack(packs, [batch.labels for batch in packs])
    advantages = unpack(packs, [batch.rollout.advantages for batch in packs])  # type: ignore[union-attr,misc]
    positions = unpack(packs, [batch.position_ids for batch in packs])
    for sample, ids, scored, advantage, position in zip(samples, tokens, labels, advantages, positions, strict=True):
        n = len(sample)
        assert ids.tolist() == sample.tokens.tolist()
        assert position.tolist() == list(range(n))
        shifted = [int(t) if m else IGNORE for t, m in zip(sample.tokens[1:], sample.mask[1:], strict=True)]
        assert scored.tolist() == [*shifted, IGNORE][:n]
        assert advantage.tolist() == [*sample.advantages[1:], 0][:n]  # type: ignore[index]
    total = sum(float(batch.weights.sum()) for batch in packs)
    assert total == pytest.approx(1.0 if any(sample.num_labels for sample in samples) else 0.0)


def test_collate_is_one_pack() -> None:
    assert collate(THREE).num_samples == 3
    with refused("samples", "is empty"):
        collate([])


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (THREE, {"max_tokens": 6}, r"max_tokens: 6 is less than the 7 tokens of sample at index 2; raise max_tokens"),
        (THREE, {"max_tokens": 0}, "max_tokens: 0; give a positive multiple"),
        (
            THREE,
            {"max_tokens": 15, "multiple_of": 4},
            "max_tokens: 15 is not divisible by multiple_of=4; give a positive multiple of 4",
        ),
        (THREE, {"multiple_of": 0}, "multiple_of: 0; give 1 or more"),
        (THREE, {"num_packs": 0}, "num_packs: 0; give 1 or more"),
        (THREE, {"num_packs": 4}, "num_packs: 4 exceeds the 3 samples; give at most one pack per sample"),
        (THREE, {"num_packs": 1, "max_tokens": 8}, "cap"),
        (THREE, {"weights": [np.ones(5)]}, "weights: has 1 arrays for 3 samples"),
        (THREE[:1], {"weights": [np.ones(4)]}, r"weights of sample at index 0: has shape \(4,\) for 5 tokens"),
        (
            THREE[:1],
            {"weights": [np.full(5, np.nan)]},
            "weights of sample at index 0: contains a number that is not finite",
        ),
        ([Sample(tokens=[1], uid="a"), Sample(tokens=[2], uid="a")], {}, "uid: 'a' occurs at index 0 and 1"),
        (
            [Sample(tokens=[1], values=[0.0]), Sample(tokens=[2], uid="b")],
            {},
            "values: is missing in sample 'b' at index 1, but other samples have it",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(samples: list[Sample], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pack(samples, **settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_unpack_takes_one_tensor_per_batch_of_one_call() -> None:
    packs = pack(THREE, max_tokens=8)
    with refused("values"):
        unpack(packs, [torch.zeros(7)])
    for batches in ([*packs, *packs], [*pack(THREE[:1]), *pack(THREE[1:])], [collate([one]) for one in THREE]):
        with refused("batches", "several calls"):
            unpack(batches, [batch.input_ids for batch in batches])
    assert [len(piece) for piece in unpack(packs[::-1], [batch.input_ids for batch in packs[::-1]])] == [5, 3, 7]
    (batch,) = pack(THREE)
    assert [len(piece) for piece in unpack(batch, batch.input_ids)] == [5, 3, 7]


@pytest.mark.parametrize("wrong", [3, None, torch.zeros(15), torch.tensor(1.0), len])
def test_unpack_names_the_wrong_argument(wrong: object) -> None:
    packs = pack(THREE, max_tokens=8)
    with refused("values", type(wrong).__name__):
        unpack(packs, wrong)  # type: ignore[arg-type]
    with refused("batches", type(wrong).__name__):
        unpack(wrong, [torch.zeros(8)])  # type: ignore[arg-type]
