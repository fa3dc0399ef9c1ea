"""The slime-compatible scores and losses compared with their formulas, on one and on several context ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from padfree.compat.slime_losses import (
    compute_approx_kl,
    compute_policy_loss,
    gather_log_probs_packed,
    get_logprob_and_entropy_with_cp,
    selective_log_softmax,
    sum_of_sample_mean,
)
from tests.ranks import run_ranks
from tests.refused import refused

X = torch.tensor([0.5, 0.3, 0.2, 0.8, 0.1, 0.4, 0.6, 0.2, 0.3])
MASKS = [torch.tensor(m) for m in ([1, 1, 0], [1, 1], [1, 1, 1, 1])]


def plain(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Whole-sequence log-probabilities of tokens[1:] and entropies, from logits of every position."""
    logprobs = torch.log_softmax(logits[:-1] / temperature, dim=-1)
    return logprobs.gather(-1, tokens[1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("shape", [(6, 11), (2, 3, 11)], ids=str)
def test_selective_log_softmax(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 11, shape[:-1])
    expected = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
    found = selective_log_softmax(logits, ids)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, upstream)[0], torch.autograd.grad(expected, logits, upstream)[0]
    )


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("leading", [False, True])
def test_gather_log_probs_packed(leading: bool, temperature: float | None) -> None:
    logits, tokens = torch.randn(8, 11), torch.randint(0, 11, (8,))
    expected = plain(logits, tokens, temperature or 1.0)[0]
    shifted, ids = (logits[None, :-1], tokens[None]) if leading else (logits[:-1], tokens)
    cu_seqlens = torch.tensor([0, 3, 8])
    found = gather_log_probs_packed(shifted, ids, allow_compile=True, cu_seqlens=cu_seqlens, temperature=temperature)
    torch.testing.assert_close(found, expected)
    with refused("input_ids"):
        gather_log_probs_packed(logits, tokens, allow_compile=False)
    with pytest.raises(ValueError, match="give logits"):
        gather_log_probs_packed(torch.randn(2, 4, 11), tokens, allow_compile=False)


@pytest.mark.parametrize("temperature", [None, 1.7])
def test_one_context_rank(temperature: float | None) -> None:
    logits = torch.randn(8, 11, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 11, (8,))
    found = get_logprob_and_entropy_with_cp(logits, tokens, 0, 1, None, tokens, False, temperature=temperature)
    expected = plain(logits, tokens, temperature or 1.0)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(
            torch.autograd.grad(ours.square().sum(), logits, retain_graph=True)[0],
            torch.autograd.grad(theirs.square().sum(), logits, retain_graph=True)[0],
        )


CASES = [(8, None), (8, 0.7), (7, 1.3), (5, 0.5), (1, 2.0)]  # (tokens known of 8, temperature)


def context_ranks(rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every rank computes the same loss from the gathered scores. Returns them and the gradient of its logits."""
    results = []
    for num_tokens, temperature in CASES:
        logits, tokens, upstream = case(num_tokens)
        chunk = logits.chunk(world)[rank].clone().requires_grad_()
        log_probs, entropy = get_logprob_and_entropy_with_cp(
            chunk, tokens, rank, world, None, tokens, True, temperature=temperature
        )
        (log_probs @ upstream[0] + entropy @ upstream[1]).backward()
        assert chunk.grad is not None
        results.append((log_probs.detach(), entropy.detach(), chunk.grad))
    with refused("cp_group"):
        get_logprob_and_entropy_with_cp(chunk, tokens, 0, 8, None, tokens, True)
    return results


def case(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(8, 11, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 11, (num_tokens,), generator=generator)
    return logits, tokens, torch.randn(2, num_tokens - 1, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("world", [2, 4])
def test_context_ranks_against_one_process(world: int) -> None:
    """Includes the last entry of the entropy, and checks that the gradient is not `world` times too large."""
    by_rank = run_ranks(world, context_ranks)
    for index, (num_tokens, temperature) in enumerate(CASES):
        logits, tokens, upstream = case(num_tokens)
        logits.requires_grad_()
        expected = plain(logits[:num_tokens], tokens, temperature or 1.0)
        (expected[0] @ upstream[0] + expected[1] @ upstream[1]).backward()
        for results in by_rank:
            torch.testing.assert_close(results[index][:2], tuple(one.detach() for one in expected))
        torch.testing.assert_close(torch.cat([results[index][2] for results in by_rank]), logits.grad)


def test_context_refusals() -> None:
    logits, tokens = torch.randn(4, 11), torch.randint(0, 11, (9,))
    with refused("target_tokens"):
        get_logprob_and_entropy_with_cp(logits, tokens, 0, 2, None, tokens, False)
    with refused("cp_rank"):
        get_logprob_and_entropy_with_cp(logits, tokens[:8], 2, 2, None, tokens, False)


def test_sum_of_sample_mean_worked() -> None:
    assert float(sum_of_sample_mean(X, [3, 2, 4], MASKS)) == pytest.approx(1.225)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64])
def test_sum_of_sample_mean_against_the_loop(dtype: torch.dtype) -> None:
    lengths = [4, 0, 1, 6, 3]
    masks = [(torch.rand(n) < 0.6).to(dtype) for n in lengths]
    masks[4] = torch.zeros(3, dtype=dtype)
    x = torch.randn(sum(lengths), dtype=torch.float64, requires_grad=True)
    expected = sum(
        (part * mask).sum() / mask.sum().clamp(min=1) for part, mask in zip(x.split(lengths), masks, strict=True)
    )
    found = sum_of_sample_mean(x, lengths, masks)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x)[0], torch.autograd.grad(expected, x)[0])


def test_sum_of_sample_mean_refuses_what_does_not_add_up() -> None:
    assert sum_of_sample_mean(torch.zeros(0), [], []) == 0
    assert sum_of_sample_mean(torch.zeros(0), [0], [torch.zeros(0)]) == 0
    with refused("x"):
        sum_of_sample_mean(X, [3, 2, 3], [*MASKS[:2], MASKS[2][:3]])
    with refused("loss_masks"):
        sum_of_sample_mean(X, [3, 2, 3], MASKS)
    with refused("loss_masks"):
        sum_of_sample_mean(X, [5, 4], MASKS)


def test_policy_loss_formula() -> None:
    ppo_kl, advantages = torch.randn(2, 50, dtype=torch.float64)
    ratio = torch.exp(-ppo_kl)
    expected = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.3) * advantages)
    losses, fraction = compute_policy_loss(ppo_kl, advantages, 0.2, 0.3)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(fraction, (-ratio.clamp(0.8, 1.3) * advantages > -ratio * advantages).double())
    bounded = torch.where(advantages < 0, torch.minimum(expected, -1.5 * advantages), expected)
    torch.testing.assert_close(compute_policy_loss(ppo_kl, advantages, 0.2, 0.3, 1.5)[0], bounded)
    with refused("loss.clip.dual"):
        compute_policy_loss(ppo_kl, advantages, 0.2, 0.3, 1.0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_approx_kl_formula(kind: Any) -> None:
    log_probs, base = torch.randn(2, 50, dtype=torch.float64) * 2
    x = log_probs - base
    expected = {
        "k1": x,
        "k2": x**2 / 2,
        "k3": torch.exp(-x) - 1 + x,
        "low_var_kl": (torch.exp(-x) - 1 + x).clamp(-10, 10),
    }[kind]
    torch.testing.assert_close(compute_approx_kl(log_probs, base, kind), expected)
