"""The packing calls of `padfree.compat.slime`: slime's keys and shapes, without its defects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padfree.compat.slime import (
    get_seqlen_balanced_partitions,
    pack_sequences,
    pad_packed_sequence_with_cp,
    unpack_sequences,
)
from tests.refused import refused


def sequences(lengths: list[int], responses: list[int]) -> dict[str, Any]:
    """Arguments of `pack_sequences` in which every value encodes its sequence and position."""
    return {
        "tokens": [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)],
        "loss_masks": [[j % 2 for j in range(r)] for r in responses],
        "rewards": [float(i) for i in range(len(lengths))],
        "raw_rewards": [{"right": i} for i in range(len(lengths))],
        "response_lengths": responses,
        "advantages": [[i + j / 100 for j in range(r)] for i, r in enumerate(responses)],
        "returns": [[-i - j / 100 for j in range(r)] for i, r in enumerate(responses)],
        "rollout_log_probs": [[-0.5 * i] * r for i, r in enumerate(responses)],
    }


def test_the_worked_example() -> None:
    (packed,) = pack_sequences(**sequences([5, 3, 7], [2, 1, 3]))
    assert packed["tokens"].tolist() == [0, 1, 2, 3, 4, 100, 101, 102, 200, 201, 202, 203, 204, 205, 206]
    assert packed["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6]
    assert packed["cu_seqlens"].tolist() == [0, 5, 8, 15]
    assert packed["response_lengths"] == [2, 1, 3]
    dtypes = {key: value.dtype for key, value in packed.items() if isinstance(value, torch.Tensor)}
    assert dtypes == {
        "tokens": torch.int64,
        "position_ids": torch.int32,
        "cu_seqlens": torch.int32,
        "loss_masks": torch.int32,
        "advantages": torch.float32,
        "returns": torch.float32,
        "rollout_log_probs": torch.float32,
        "rewards": torch.float32,
    }
    assert packed["raw_reward"] == [{"right": 0}, {"right": 1}, {"right": 2}]
    assert packed["indices"] == [0, 1, 2]
    assert packed["pad_length"] == 0


def test_no_sequences_give_no_packs_and_log_probs_are_optional() -> None:
    assert pack_sequences([], [], [], [], [], [], []) == []
    arguments = sequences([3], [1])
    del arguments["rollout_log_probs"]
    assert "rollout_log_probs" not in pack_sequences(**arguments)[0]


def test_padding_extends_the_last_entry_and_leaves_the_callers_dict_alone() -> None:
    (packed,) = pack_sequences(**sequences([5, 8], [2, 3]))
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in packed.items()}
    padded = pad_packed_sequence_with_cp(packed, 4)
    assert padded["cu_seqlens"].tolist() == [0, 5, 16]
    assert padded["pad_length"] == 3
    assert padded["tokens"].tolist() == [*packed["tokens"].tolist(), 0, 0, 0]
    assert padded["position_ids"][-3:].tolist() == [0, 0, 0]
    assert padded["loss_masks"].tolist() == [*packed["loss_masks"].tolist(), 0, 0, 0]
    assert packed.keys() == before.keys()
    for key, value in before.items():
        same = torch.equal(packed[key], value) if isinstance(value, torch.Tensor) else packed[key] == value
        assert same, key


@pytest.mark.parametrize(("tokens", "cp_size", "pad"), [(13, 4, 3), (10, 3, 2), (16, 4, 0), (1, 4, 3), (3, 8, 5)])
def test_pad_lengths(tokens: int, cp_size: int, pad: int) -> None:
    (packed,) = pack_sequences(**sequences([tokens], [0]))
    padded = pad_packed_sequence_with_cp(packed, cp_size)
    assert padded["pad_length"] == pad
    assert len(padded["tokens"]) == tokens + pad
    assert pad_packed_sequence_with_cp(padded, cp_size)["pad_length"] == pad


def test_a_chain_of_eight_and_sixteen() -> None:
    (packed,) = pack_sequences(**sequences([5, 3, 5], [1, 1, 1]))
    assert pad_packed_sequence_with_cp(packed, 4)["cu_seqlens"].tolist() == [0, 5, 8, 16]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    return lengths, [draw(st.integers(0, n - 1)) for n in lengths]


@settings(max_examples=200)
@given(cases(), st.integers(1, 12), st.sampled_from([None, 9, 16, 40]))
def test_round_trip_with_padding(case: tuple[list[int], list[int]], cp_size: int, cap: int | None) -> None:
    lengths, responses = case
    arguments = sequences(lengths, responses)
    # Sequences that end in token 0 and whose mask ends in 0: nothing may be mistaken for padding.
    arguments["tokens"] = [[*tokens[:-1], 0] for tokens in arguments["tokens"]]
    packs = pack_sequences(**arguments, max_tokens_per_gpu=cap)
    assert sorted(i for packed in packs for i in packed["indices"]) == list(range(len(lengths)))
    for packed in packs:
        assert cap is None or len(packed["tokens"]) <= cap
        assert packed["indices"] == sorted(packed["indices"])
        padded = pad_packed_sequence_with_cp(packed, cp_size)
        padded["log_probs"] = torch.arange(len(padded["tokens"]) - 1) + 1  # entry j - 1 says j: the token it scores
        starts = padded["cu_seqlens"].tolist()
        for place, sequence in enumerate(unpack_sequences(padded)):
            index = sequence["indices"]
            response = responses[index]
            assert sequence["tokens"].tolist() == arguments["tokens"][index]
            assert sequence["position_ids"].tolist() == list(range(lengths[index]))
            assert sequence["loss_masks"].tolist() == arguments["loss_masks"][index]
            assert sequence["advantages"].tolist() == pytest.approx(arguments["advantages"][index])
            assert sequence["returns"].tolist() == pytest.approx(arguments["returns"][index])
            assert sequence["rewards"].item() == arguments["rewards"][index]
            assert sequence["raw_reward"] == {"right": index}
            assert sequence["response_lengths"] == response
            end = starts[place] + lengths[index]
            assert sequence["log_probs"].tolist() == list(range(end - response, end))


def test_the_cap_is_a_cap() -> None:
    # ceil(36 / 13) = 3 packs cannot hold three 7s and three 5s within 13 unless paired 7 + 5.
    packs = pack_sequences(**sequences([7, 7, 7, 5, 5, 5], [1] * 6), max_tokens_per_gpu=12)
    assert sorted(len(packed["tokens"]) for packed in packs) == [12, 12, 12]
    # Here ceil(27 / 14) = 2 packs are not enough: 9 + 9 is over the cap.
    packs = pack_sequences(**sequences([9, 9, 9], [1] * 3), max_tokens_per_gpu=14)
    assert [len(packed["tokens"]) for packed in packs] == [9, 9, 9]


def test_never_more_packs_than_sequences() -> None:
    assert len(pack_sequences(**sequences([4, 4], [1, 1]), num_packs=5)) == 2
    assert len(pack_sequences(**sequences([4, 4, 4, 4], [1] * 4), num_packs=2)) == 2


def test_partitions(rng: np.random.Generator) -> None:
    lengths = rng.integers(1, 1000, 64).tolist()
    for equal_size in (False, True):
        parts = get_seqlen_balanced_partitions(lengths, 8, equal_size)
        assert sorted(index for part in parts for index in part) == list(range(64))
        assert all(part == sorted(part) and part for part in parts)
        sums = [sum(lengths[i] for i in part) for part in parts]
        assert max(sums) / (sum(sums) / 8) < 1.01
    assert {len(part) for part in parts} == {8}


def test_unpacking_refuses_what_does_not_fit() -> None:
    (packed,) = pack_sequences(**sequences([4, 4], [2, 2]))
    with pytest.raises(ValueError, match="log_probs: has 8 entries, but this pack needs 7"):
        unpack_sequences({**packed, "log_probs": torch.zeros(8)})
    with pytest.raises(ValueError, match="rewards: has 3 entries, but this pack needs 2"):
        unpack_sequences({**packed, "rewards": torch.zeros(3)})
    (whole,) = pack_sequences(**sequences([4, 4], [2, 4]))
    with pytest.raises(
        ValueError,
        match="log_probs: cannot score the first token of sequence 1, because all of its 4 tokens are response",
    ):
        unpack_sequences({**whole, "log_probs": torch.zeros(7)})
    with refused("cp_size"):
        pad_packed_sequence_with_cp(packed, 0)
    with refused("k_partitions"):
        get_seqlen_balanced_partitions([1, 2], 3, False)
    with refused("k_partitions"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, True)


def test_real_rollouts_keep_the_cap(gsm8k_solutions: list[dict[str, Any]]) -> None:
    solutions = [row[model]["solution"] for row in gsm8k_solutions[:200] for model in row if "finetuning" in model]
    lengths = [len(text.split()) + 1 for text in solutions]
    packs = pack_sequences(**sequences(lengths, [n - 1 for n in lengths]), max_tokens_per_gpu=1024)
    assert max(len(packed["tokens"]) for packed in packs) <= 1024
    assert sum(len(packed["tokens"]) for packed in packs) == sum(lengths)
