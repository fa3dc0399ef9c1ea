"""The functions of the former FSDP backend of slime (an RL framework for LLMs), with the signatures and keys of slime.

A pack is a dict with these and other keys:

    tokens        [T]     the T tokens of all sequences
    cu_seqlens    [n+1]   boundaries of the n sequences
    loss_masks    [R]     masks of the R response tokens
    log_probs     [T-1]   entry j-1 is the log-probability of token j

The functions differ from slime's in these points:

- The pack stores the number of padding tokens as `pad_length`. slime counted trailing zeros, but 0 is a valid token id.
- `pad_packed_sequence_with_cp` does not change the caller's dict.
- No pack has more than `max_tokens_per_gpu` tokens.
- Inconsistent lengths raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from padfree.arrays import integer_array, need_whole, number_array
from padfree.compat.slime_losses import (
    compute_approx_kl,
    compute_policy_loss,
    gather_log_probs_packed,
    get_logprob_and_entropy_with_cp,
    selective_log_softmax,
    sum_of_sample_mean,
)
from padfree.errors import UserError
from padfree.packing.balance import balance
from padfree.segments import Segments

__all__ = [
    "compute_approx_kl",
    "compute_policy_loss",
    "gather_log_probs_packed",
    "get_logprob_and_entropy_with_cp",
    "get_seqlen_balanced_partitions",
    "pack_sequences",
    "pad_packed_sequence_with_cp",
    "selective_log_softmax",
    "sum_of_sample_mean",
    "unpack_sequences",
]

TOKEN_KEYS = ("tokens", "position_ids")
SCORE_KEYS = ("log_probs", "ref_log_probs", "cur_log_probs", "entropy")
RESPONSE_KEYS = ("loss_masks", "advantages", "returns", "rollout_log_probs")

Packed = dict[str, Any]


def pack_sequences(
    tokens: Sequence[Any],
    loss_masks: Sequence[Any],
    rewards: Sequence[Any],
    raw_rewards: Sequence[Any],
    response_lengths: Sequence[int],
    advantages: Sequence[Any],
    returns: Sequence[Any],
    rollout_log_probs: Sequence[Any] | None = None,
    max_tokens_per_gpu: int | None = None,
    num_packs: int | None = None,
) -> list[Packed]:
    """Pack sequences into `num_packs` packs.

    `num_packs` defaults to ceil(total tokens / max_tokens_per_gpu), or to 1 without this limit. If a pack would exceed
    the limit, there are more packs, up to one per sequence.
    """
    if not len(tokens):
        return []
    response_level = {"loss_masks": loss_masks, "advantages": advantages, "returns": returns}
    if rollout_log_probs is not None:
        response_level["rollout_log_probs"] = rollout_log_probs
    _check_sequences(
        tokens, response_lengths, response_level, {"rewards": rewards, "raw_rewards": raw_rewards}, num_packs
    )

    ids = [integer_array(sequence, f"tokens of sequence {index}") for index, sequence in enumerate(tokens)]
    by_sequence = [float(reward) for reward in number_array(rewards, "rewards")]
    lengths = np.array([len(sequence) for sequence in ids], dtype=np.int64)
    packs = []
    for part in _partition(lengths, num_packs, max_tokens_per_gpu):
        chosen = [int(i) for i in part]
        segments = Segments.from_lengths(lengths[part])
        packs.append(
            {
                "tokens": torch.cat([torch.from_numpy(ids[i]) for i in chosen]),
                "position_ids": torch.cat([torch.arange(int(n), dtype=torch.int32) for n in lengths[part]]),
                "cu_seqlens": segments.cu_seqlens,
                "loss_masks": _concatenate("loss_masks", loss_masks, chosen).to(torch.int32),
                **{
                    key: _concatenate(key, lists, chosen)
                    for key, lists in response_level.items()
                    if key != "loss_masks"
                },
                "rewards": torch.tensor([by_sequence[i] for i in chosen], dtype=torch.float32),
                "raw_reward": [raw_rewards[i] for i in chosen],
                "response_lengths": [int(response_lengths[i]) for i in chosen],
                "indices": chosen,
                "pad_length": 0,
            }
        )
    return packs


def unpack_sequences(packed: Packed) -> list[Packed]:
    """Return one dict per sequence, without padding. Of the log-probabilities [T-1], those of responses are kept."""
    offsets = [int(offset) for offset in packed["cu_seqlens"]]
    pad_length = int(packed.get("pad_length", 0))
    responses = [int(length) for length in packed["response_lengths"]]
    starts, ends, num_tokens = offsets[:-1], offsets[1:], offsets[-1]
    if len(responses) != len(starts):
        raise UserError(
            "response_lengths",
            f"has {len(responses)} entries for {len(starts)} sequences in cu_seqlens",
            "give one per sequence",
        )
    ends[-1] -= pad_length
    for index, (start, end, response) in enumerate(zip(starts, ends, responses, strict=True)):
        if not 0 <= response <= end - start:
            raise UserError(
                "response_lengths",
                f"is {response} for sequence {index}, which has {end - start} tokens",
                "give a number from 0 to the number of tokens in the sequence",
            )
    response_ends = np.cumsum(responses).tolist()
    num_responses = response_ends[-1]
    response_starts = [end - response for end, response in zip(response_ends, responses, strict=True)]

    sequences: list[Packed] = [{} for _ in starts]
    for key, values in packed.items():
        if key in ("cu_seqlens", "pad_length"):
            continue
        if key in TOKEN_KEYS:
            _expect(key, values, num_tokens)
            spans = list(zip(starts, ends, strict=True))
        elif key in SCORE_KEYS:
            _expect(key, values, num_tokens - 1)
            _check_scorable(key, starts, ends, responses)
            spans = [(end - 1 - response, end - 1) for end, response in zip(ends, responses, strict=True)]
        elif key in RESPONSE_KEYS:
            # Like slime's function, `pad_packed_sequence_with_cp` also pads loss_masks.
            padded = key == "loss_masks" and len(values) == num_responses + pad_length
            _expect(key, values, num_responses + pad_length if padded else num_responses)
            spans = list(zip(response_starts, response_ends, strict=True))
        else:
            _expect(key, values, len(sequences))
            for sequence, value in zip(sequences, values, strict=True):
                sequence[key] = value
            continue
        for sequence, (start, end) in zip(sequences, spans, strict=True):
            sequence[key] = values[start:end]
    return sequences


def _check_scorable(key: str, starts: list[int], ends: list[int], responses: list[int]) -> None:
    for index, (start, end, response) in enumerate(zip(starts, ends, responses, strict=True)):
        if response and response == end - start:
            raise UserError(
                f"{key}",
                f"cannot score the first token of sequence {index}, because all of its {response} tokens are response "
                "tokens",
                "keep at least one prompt token",
            )


def pad_packed_sequence_with_cp(packed: Packed, cp_size: int) -> Packed:
    """Return a new dict with tokens padded to a multiple of `cp_size`. The pad extends the last sequence."""
    need_whole("cp_size", cp_size, 1, "give 1 or more")
    pad = -len(packed["tokens"]) % cp_size
    padded = dict(packed)
    padded["pad_length"] = int(packed.get("pad_length", 0)) + pad
    if pad:
        for key in ("tokens", "position_ids", "loss_masks"):
            if key in packed:
                padded[key] = torch.nn.functional.pad(packed[key], (0, pad))
        padded["cu_seqlens"] = packed["cu_seqlens"].clone()
        padded["cu_seqlens"][-1] += pad
    return padded


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Return `k_partitions` lists of indices with nearly equal total lengths. No list is empty."""
    need_whole("k_partitions", k_partitions, 1, "give 1 or more")
    if k_partitions > len(seqlen_list):
        raise UserError(
            "k_partitions",
            f"{k_partitions} exceeds the {len(seqlen_list)} sequences",
            "give at most the number of sequences",
        )
    if equal_size and len(seqlen_list) % k_partitions:
        raise UserError(
            "k_partitions",
            f"{k_partitions} does not divide {len(seqlen_list)} sequences",
            "give a divisor of the number of sequences, or equal_size=False",
        )
    parts = balance(seqlen_list, k_partitions, equal_count=equal_size)
    return [[int(i) for i in part] for part in parts]


def _partition(lengths: np.ndarray[Any, Any], num_packs: int | None, cap: int | None) -> list[Any]:
    """Divide the sequences into `num_packs` parts of similar token counts, as arrays of sequence indices.

    If a part would have more than `cap` tokens, the sequences are divided into more parts.
    """
    count = len(lengths)
    if cap is not None:
        need_whole("max_tokens_per_gpu", cap, 1, "give 1 or more")
    if cap is not None and lengths.max() > cap:
        index = int(lengths.argmax())
        raise UserError(
            "max_tokens_per_gpu",
            f"{cap} is less than the {lengths[index]} tokens of sequence {index}",
            "raise max_tokens_per_gpu, or shorten the sequence",
        )
    packs = num_packs or (1 if cap is None else -(-int(lengths.sum()) // cap))
    packs = max(1, min(packs, count))
    if cap is not None:
        packs = max(packs, -(-int(lengths.sum()) // cap))
    while True:
        try:
            return list(balance(lengths, packs, lengths=lengths, cap=cap))
        except UserError:
            if packs >= count:
                raise
            packs += 1


def _check_sequences(
    tokens: Sequence[Any],
    response_lengths: Sequence[int],
    response_level: dict[str, Sequence[Any]],
    sequence_level: dict[str, Sequence[Any]],
    num_packs: int | None,
) -> None:
    if num_packs is not None:
        need_whole("num_packs", num_packs, 1, "give 1 or more")
    for key, values in {"response_lengths": response_lengths, **response_level, **sequence_level}.items():
        if len(values) != len(tokens):
            raise UserError(f"{key}", f"has {len(values)} entries for {len(tokens)} sequences", "give one per sequence")
    for index, (sequence, response) in enumerate(zip(tokens, response_lengths, strict=True)):
        if not 0 <= response <= len(sequence):
            raise UserError(
                "response_lengths",
                f"is {response} for sequence {index}, which has {len(sequence)} tokens",
                "give a number from 0 to the number of tokens in the sequence",
            )
    for key, lists in response_level.items():
        for index, (values, response) in enumerate(zip(lists, response_lengths, strict=True)):
            if len(values) != response:
                raise UserError(
                    f"{key}",
                    f"has {len(values)} entries for sequence {index}, whose response has {response} tokens",
                    "give one per response token",
                )


def _concatenate(key: str, lists: Sequence[Any], chosen: list[int]) -> Tensor:
    """Concatenate per-token values of the sequences with the indices `chosen`. Return a float32 tensor with one value
    per response token.

    `lists[i]` holds the values of sequence i. `key` is the name of these values, such as "advantages".
    """
    arrays = [number_array(lists[i], f"{key} of sequence {i}").reshape(-1) for i in chosen]
    if key == "loss_masks":
        for i, array in zip(chosen, arrays, strict=True):
            if not np.isin(array, (0, 1)).all():
                raise UserError(
                    f"loss_masks of sequence {i}",
                    "has values other than 0 and 1",
                    "give 0 or 1 per token, and use advantages to weight tokens",
                )
    return torch.cat([torch.from_numpy(array.astype(np.float32)) for array in arrays])


def _expect(key: str, values: Any, length: int) -> None:
    if len(values) != length:
        raise UserError(
            f"{key}", f"has {len(values)} entries, but this pack needs {length}", "give the values of this pack"
        )
