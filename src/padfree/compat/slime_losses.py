"""The scores and losses of the former FSDP backend of slime (an RL framework). `padfree.compat.slime` exports them.

Logits have shape [T-1, V] and log-probabilities [T-1]. Entry j-1 belongs to token j. The functions differ from slime's
in these points:

- Forward needs no second tensor as large as the logits.
- Log-probabilities are float32 even if the logits are bfloat16 or float16.
- The logits are divided by the temperature for the entropy as well.
- With context parallelism, the entropy of the last entry is computed. slime sets it to 0.
- Log-ratios are limited to ±20, so that no loss is infinite.
- `allow_compile` has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padfree.arrays import number_array
from padfree.choices import KLEstimator
from padfree.config.policy_settings import ClipSettings
from padfree.errors import UserError
from padfree.losses import checks
from padfree.losses.kl import kl_divergence
from padfree.losses.logits import score_logits
from padfree.losses.objectives.clip import clipped_ratio
from padfree.losses.segment_sums import segment_sum, spread


def selective_log_softmax(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Return the log-probabilities [...] of `input_ids` [...] under `logits` [..., V]."""
    return score_logits(logits, input_ids)[0]


def gather_log_probs_packed(
    shifted_logits: Tensor,
    input_ids: Tensor,
    allow_compile: bool,
    cu_seqlens: Tensor | None = None,
    temperature: float | None = None,
) -> Tensor:
    """Return the log-probabilities [T-1] of the tokens `input_ids[1:]` under the logits [T-1, V] or [1, T-1, V].

    The result for the first token of a sequence is meaningless, and `unpack_sequences` drops it. `cu_seqlens` is
    ignored.
    """
    logits, tokens = _without_batch_dim(shifted_logits, input_ids)
    if len(tokens) != len(logits) + 1:
        raise UserError(
            "input_ids",
            f"has {len(tokens)} tokens, but the logits have {len(logits)} positions",
            "give T tokens for logits of T - 1 positions",
        )
    return score_logits(logits, tokens[1:], temperature=_temperature(temperature))[0]


def get_logprob_and_entropy_with_cp(
    logits: Tensor,
    target_tokens: Tensor,
    cp_rank: int,
    cp_size: int,
    cp_group: Any,
    model_input_ids: Tensor,
    allow_compile: bool,
    temperature: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log_probs [T-1], entropy [T-1]) of all tokens `target_tokens` [T], on every rank. Collective.

    `logits` [chunk, V] belong to this rank's chunk of the tokens. `model_input_ids` is ignored. Compute the same loss
    on every rank, and *sum* the parameter gradients over the context ranks.
    """
    logits, tokens = _without_batch_dim(logits, target_tokens)
    chunk = len(logits)
    if not 0 <= cp_rank < cp_size:
        raise UserError("cp_rank", f"{cp_rank} is out of range for cp_size {cp_size}", "give 0 up to cp_size - 1")
    if len(tokens) > chunk * cp_size or not len(tokens):
        raise UserError(
            "target_tokens",
            f"has {len(tokens)} tokens for {cp_size} chunks of {chunk} tokens",
            f"give 1 up to {cp_size * chunk} tokens",
        )
    # The last entry has no known next token. It gets an arbitrary label and is dropped below.
    labels = torch.nn.functional.pad(tokens[1:], (0, chunk * cp_size - len(tokens) + 1))
    mine = labels[cp_rank * chunk : (cp_rank + 1) * chunk]
    log_probs, entropy = score_logits(logits, mine, temperature=_temperature(temperature), entropy=True)
    assert entropy is not None
    scores = torch.stack([log_probs, entropy], dim=1)
    if cp_size > 1:
        scores = _GatherChunks.apply(scores, cp_rank, cp_size, cp_group)  # type: ignore[no-untyped-call]
    log_probs, entropy = scores[: len(tokens) - 1].unbind(1)
    return log_probs, entropy


def sum_of_sample_mean(x: Tensor, response_lengths: Sequence[int], loss_masks: Sequence[Tensor]) -> Tensor:
    """Return the sum over samples of the masked mean Σ(xᵢ·mᵢ) / max(Σmᵢ, 1).

    `x` holds the values of all responses, concatenated. `loss_masks` holds one mask per response.
    """
    x = checks.loss_input("x", x)
    loss_masks = [_mask(mask, f"loss_masks of sample {index}").to(x) for index, mask in enumerate(loss_masks)]
    if len(response_lengths) != len(loss_masks):
        raise UserError(
            "loss_masks",
            f"has {len(loss_masks)} masks for {len(response_lengths)} response_lengths",
            "give one mask per sample",
        )
    given = [len(mask) for mask in loss_masks]
    if given != list(response_lengths):
        index = next(i for i, length in enumerate(response_lengths) if given[i] != length)
        raise UserError(
            "loss_masks",
            f"has {given[index]} entries for sample {index}, whose response length is {response_lengths[index]}",
            "give one entry per response token",
        )
    total = sum(response_lengths)
    if x.shape != (total,):
        raise UserError(
            "x",
            f"has shape {tuple(x.shape)}, but response_lengths add up to {total}",
            "give one entry per response token",
        )
    if not total:
        return x.sum()
    mask = torch.cat(loss_masks)
    num_samples = len(response_lengths)
    lengths = torch.tensor(response_lengths, device=x.device)
    sample_index = torch.repeat_interleave(torch.arange(num_samples, device=x.device), lengths, output_size=total)
    counts = segment_sum(mask, sample_index, num_samples)
    weights = mask * spread(1.0 / counts.clamp(min=1.0), sample_index).to(x.dtype)
    return torch.where(mask != 0, x * weights, 0.0).sum()


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and an indicator that is 1 for each token whose ratio was clipped, otherwise 0.

    `ppo_kl`: old minus new log-probability.
    """
    clip = ClipSettings(low=eps_clip, high=eps_clip_high, dual=eps_clip_c)
    log_ratio = -checks.loss_input("ppo_kl", ppo_kl)
    losses, clipped = clipped_ratio(log_ratio, advantages, low=clip.low, high=clip.high, dual=clip.dual)
    return losses, clipped.to(losses.dtype)


def compute_approx_kl(log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: KLEstimator) -> Tensor:
    """Estimate KL(policy ‖ base) for each token. `kl_loss_type` is k1, k2, k3 or low_var_kl."""
    return kl_divergence(log_probs, log_probs_base, kl_loss_type)


class _GatherChunks(torch.autograd.Function):
    """Autograd function that concatenates the chunks of a sequence from all ranks. Backward returns the gradient of
    this rank's chunk.
    """

    @staticmethod
    def forward(ctx: Any, chunk: Tensor, rank: int, world: int, group: Any) -> Tensor:
        if dist.get_world_size(group) != world or dist.get_rank(group) != rank:
            raise UserError(
                "cp_group",
                f"has rank {dist.get_rank(group)} of {dist.get_world_size(group)}, which contradicts cp_rank {rank} "
                f"and cp_size {world}",
                "give the group that cp_rank and cp_size belong to",
            )
        ctx.begin, ctx.end = rank * len(chunk), (rank + 1) * len(chunk)
        parts = [torch.empty_like(chunk, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, chunk.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.begin : ctx.end], None, None, None


def _mask(values: Any, name: str) -> Tensor:
    """Convert a loss mask to a tensor. If the mask already is a tensor, it stays on its device. Error messages call the
    mask `name`.
    """
    if isinstance(values, Tensor):
        return checks.quantity(name, values)
    return torch.as_tensor(number_array(values, name))


def _without_batch_dim(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [N, V] and tokens [T] without a leading dimension of 1."""
    logits, tokens = checks.quantity("logits", logits), checks.index("input_ids", tokens)
    if logits.dim() == 3 and len(logits) == 1:
        logits = logits[0]
    if tokens.dim() == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if logits.dim() != 2 or tokens.dim() != 1:
        raise UserError(
            "logits",
            f"has shape {tuple(logits.shape)}, and the tokens have shape {tuple(tokens.shape)}",
            "give logits [T, V] and tokens [T]",
        )
    return logits, tokens.to(logits.device)


def _temperature(temperature: float | None) -> float:
    return 1.0 if temperature is None else temperature
