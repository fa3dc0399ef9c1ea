"""The central types: what they hold, what they refuse, and how they are padded."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from padfree import PackedBatch, Sample, Segments, pack
from tests.refused import refused

IGNORE = -100


def batch_of(*lengths: int) -> PackedBatch:
    """One pack whose tokens count up from 1."""
    first = np.cumsum([1, *lengths])
    return pack([Sample(tokens=np.arange(n) + start) for n, start in zip(lengths, first, strict=False)])[0]


class TestSample:
    def test_every_token_is_trained_on_without_a_mask_and_the_first_is_never_scored(self) -> None:
        sample = Sample(tokens=[5, 6, 7])
        assert sample.mask.tolist() == [True, True, True]
        assert sample.num_labels == 2
        assert len(sample) == 3

    def test_with_numbers_returns_a_new_sample(self) -> None:
        """The new arrays are checked, and everything else, including the original sample, is unchanged."""
        sample = Sample(
            tokens=np.array([4, 5, 6]), loss_mask=np.array([False, True, True]), reward=0.5, uid="a", group=3,
            advantages=np.zeros(3, np.float32),
        )  # fmt: skip
        numbers = {"advantages": np.array([1, 2, 3]), "ref_logprobs": -np.ones(3)}
        found, expected = sample.with_numbers(**numbers), replace(sample, **numbers)
        for field in fields(Sample):
            one, other = getattr(found, field.name), getattr(expected, field.name)
            assert np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other, field.name
        assert found.advantages is not None
        assert found.advantages.dtype == np.float32
        assert sample.advantages is not None
        assert not sample.advantages.any()
        with pytest.raises(ValueError, match=r"advantages of sample 'a': has shape"):
            sample.with_numbers(advantages=np.zeros(2))

    def test_empty_and_one_token_samples_are_legal(self) -> None:
        assert len(Sample(tokens=[])) == 0
        assert Sample(tokens=[]).num_labels == 0
        assert Sample(tokens=[0]).num_labels == 0

    def test_truncation_takes_everything_that_belongs_to_the_tokens(self) -> None:
        sample = Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], advantages=[0.0, 1.0, 2.0], reward=1.0, uid="a")
        cut = sample.truncated(2)
        assert cut.tokens.tolist() == [1, 2]
        assert cut.mask.tolist() == [False, True]
        assert cut.advantages is not None
        assert cut.advantages.tolist() == [0.0, 1.0]
        assert (cut.reward, cut.uid) == (1.0, "a")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tokens": [1.0, 2.0]}, r"tokens of sample 'x': got a float64.*integer token ids"),
            ({"tokens": [[1, 2]]}, r"tokens of sample 'x': .*shape \(1, 2\).*flat list"),
            ({"tokens": [1, -2]}, r"tokens of sample 'x': token id -2 is negative"),
            ({"tokens": [1, 2], "loss_mask": [1]}, r"loss_mask of sample 'x': has shape \(1,\) for 2 tokens"),
            ({"tokens": [1, 2], "loss_mask": [1, 2]}, r"loss_mask of sample 'x': has values other than 0 and 1"),
            ({"tokens": [1, 2], "advantages": [0.5]}, r"advantages of sample 'x': has shape \(1,\) for 2 tokens"),
            ({"tokens": [1, 2], "advantages": [0.5, np.nan]}, r"advantages of sample 'x': is nan at token 1"),
            ({"tokens": [1, 2], "logprobs": [-np.inf, 0.0]}, r"logprobs of sample 'x': is -inf at token 0"),
        ],
    )
    def test_bad_input_is_refused_in_one_line(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            Sample(**arguments, uid="x")  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


class TestSegments:
    def test_the_pad_is_its_own_last_segment(self) -> None:
        segments = Segments.from_lengths([5, 3], pad_length=3)
        assert segments.cu_seqlens.tolist() == [0, 5, 8, 11]
        assert segments.cu_seqlens.dtype == torch.int32
        assert (segments.max_seqlen, segments.pad_length, segments.num_samples) == (5, 3, 2)
        assert (segments.num_segments, segments.num_tokens) == (3, 11)
        assert segments.offsets.tolist() == [0, 5, 8, 11]

    def test_no_segments_and_empty_segments(self) -> None:
        assert Segments.from_lengths([]).cu_seqlens.tolist() == [0]
        assert Segments.from_lengths([0, 2, 0]).cu_seqlens.tolist() == [0, 0, 2, 2]
        assert Segments.from_lengths([]).max_seqlen == 0

    @pytest.mark.parametrize("lengths", [[3, -1], [[1, 2]]])
    def test_negative_or_nested_lengths_are_refused(self, lengths: list[int]) -> None:
        with refused("lengths"):
            Segments.from_lengths(lengths)

    def test_more_tokens_than_32_bits_count_are_refused(self) -> None:
        with pytest.raises(ValueError, match="int32"):
            Segments.from_lengths([2**31])


class TestPadding:
    """The worked examples of padding."""

    @pytest.mark.parametrize(
        ("lengths", "length", "cu_seqlens"),
        [((4, 2), 8, [0, 4, 6, 8]), ((3, 2, 2), 10, [0, 3, 5, 7, 10]), ((4, 1), 2 * 4, [0, 4, 5, 8])],
    )
    def test_to_a_length(self, lengths: tuple[int, ...], length: int, cu_seqlens: list[int]) -> None:
        batch = batch_of(*lengths).padded_to(length)
        assert batch.segments.cu_seqlens.tolist() == cu_seqlens
        assert batch.num_tokens == length
        assert batch.segments.max_seqlen == max(np.diff(cu_seqlens))

    @pytest.mark.parametrize(("tokens", "multiple", "pad"), [(13, 4, 3), (10, 3, 2), (16, 4, 0), (1, 4, 3), (3, 8, 5)])
    def test_to_a_multiple(self, tokens: int, multiple: int, pad: int) -> None:
        batch = batch_of(tokens).padded_to_multiple(multiple)
        assert (batch.num_tokens, batch.pad_length) == (tokens + pad, pad)
        assert batch.segments.num_segments == (2 if pad else 1)

    def test_a_pad_token_counts_nowhere(self) -> None:
        batch = batch_of(5, 3).padded_to(11)
        assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0]
        assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]
        assert batch.labels.tolist() == [2, 3, 4, 5, IGNORE, 7, 8, IGNORE, IGNORE, IGNORE, IGNORE]
        assert batch.weights[8:].tolist() == [0, 0, 0]
        assert batch.sample_index.tolist() == [0] * 5 + [1] * 3 + [2] * 3
        assert batch.num_samples == 2
        assert batch.lengths == [5, 3]

    def test_a_second_padding_replaces_the_first(self) -> None:
        batch = batch_of(5, 3).padded_to(11)
        assert batch.padded_to(9).segments.cu_seqlens.tolist() == [0, 5, 8, 9]
        assert batch.without_pad().segments.cu_seqlens.tolist() == [0, 5, 8]
        assert batch.without_pad().pad_length == 0
        assert batch.padded_to(11) is batch

    def test_padding_keeps_rollout_arrays_aligned(self) -> None:
        sample = Sample(tokens=[1, 2, 3], advantages=[0.0, 0.5, 1.5])
        rollout = pack([sample], multiple_of=4)[0].rollout
        assert rollout is not None
        assert rollout.advantages is not None
        assert rollout.advantages.tolist() == [0.5, 1.5, 0, 0]
        assert rollout.logprobs is None

    def test_refusals(self) -> None:
        with refused("length"):
            batch_of(5).padded_to(3)
        with refused("multiple"):
            batch_of(5).padded_to_multiple(0)


class TestPackedBatch:
    def test_model_inputs_are_what_an_hf_model_takes(self) -> None:
        inputs = batch_of(2, 3).model_inputs()
        assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 5)
        assert "attention_mask" not in inputs
        assert inputs["use_cache"] is False
        assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 2, 5]
        assert inputs["max_length_q"] == inputs["max_length_k"] == 3

    def test_to_moves_every_tensor_and_keeps_the_host_side(self) -> None:
        sample = Sample(tokens=[1, 2, 3], advantages=[0.0, 0.5, 1.5], uid="a", group="g")
        moved = pack([sample])[0].to("meta")
        assert {getattr(moved, field).device.type for field in moved.TOKEN_FIELDS} == {"meta"}
        assert moved.rollout is not None
        assert moved.rollout.advantages is not None
        assert moved.rollout.advantages.device.type == moved.segments.cu_seqlens.device.type == "meta"
        assert moved.segments.offsets.tolist() == [0, 3]
        assert moved.samples[0].uid == "a"

    def test_unpack_gives_views_without_the_pad(self) -> None:
        batch = batch_of(2, 0, 3).padded_to(8)
        values = torch.arange(8.0)
        pieces = batch.unpack(values)
        assert [piece.tolist() for piece in pieces] == [[0, 1], [], [2, 3, 4]]
        assert pieces[2].data_ptr() == values[2:].data_ptr()

    def test_unpack_refuses_another_length(self) -> None:
        with refused("values"):
            batch_of(8).unpack(torch.zeros(7))

    def test_fields_must_agree(self) -> None:
        batch = batch_of(3)
        with refused("weights"):
            batch.with_weights(torch.ones(2))
        assert batch.with_weights(torch.ones(3)).weights.tolist() == [1, 1, 1]
