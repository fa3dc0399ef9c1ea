"""The metrics of a step, by name. `padfree.record.metrics_file` writes them; progress lines and trackers show them."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from padfree.estimate.flops import Flops, Shared
from padfree.packing import CostModel, StepPlan
from padfree.sample import Sample
from padfree.train.engine import SkippedSamples, StepReport


def step_metrics(
    step: int,
    report: StepReport,
    *,
    rates: Mapping[str, float],
    seconds: float,
    flops: Flops | None = None,
    compute_seconds: Sequence[float] = (),
    memory_gib: float | None = None,
) -> dict[str, Any]:
    """The metrics of one step. `compute_seconds`: compute time of each data rank, without waiting for other ranks."""
    skipped = report.skipped or SkippedSamples()
    found = {
        "step": step,
        "loss": report.loss,
        "gradient_norm": report.gradient_norm,
        **rates,
        "samples": report.num_samples,
        **({} if report.num_rows is None else {"rows": report.num_rows}),
        "tokens": report.num_tokens,
        "scored_tokens": report.num_labels,
        **({} if report.skipped is None else {"skipped_samples": skipped.samples, "skipped_tokens": skipped.tokens}),
        "seconds": seconds,
        "tokens_per_second": (report.num_tokens - skipped.tokens) / seconds if seconds > 0 else 0.0,
        "computed_tokens": int(report.plan.computed_tokens.sum()),
        "micro_batches": report.plan.num_micro_batches,
        "fill": report.plan.fill,
        "imbalance": report.plan.imbalance,
        "padding_share": report.padding_share,
        **{f"loss/{name}": value for name, value in report.statistics.items()},
        **{f"source/{name}/loss": value for name, value in report.source_losses.items()},
    }
    if sum(compute_seconds) > 0:
        found["imbalance_measured"] = max(compute_seconds) * len(compute_seconds) / sum(compute_seconds)
    if flops is not None:
        found |= flops.metrics(
            report.plan.lengths, report.num_labels - skipped.labels, seconds, shared=_shared(report.plan),
            image_features=report.image_features,
        )  # fmt: skip
    if memory_gib is not None:
        found["memory_gib"] = memory_gib
    return found


def _shared(plan: StepPlan) -> Shared | None:
    """Return the number of tokens and of (query, key) pairs that sharing prefixes saves; None without sharing."""
    if plan.prefixes is None:
        return None
    tokens = pairs = 0.0
    for packs, is_first in zip(plan.micro_batches, plan.is_first, strict=True):
        for indices in (samples for samples, counts in zip(packs, is_first, strict=True) if counts):
            tree, lengths = plan.prefixes.restricted(indices), plan.lengths[indices].astype(float)
            tokens += lengths.sum() - tree.num_tokens
            pairs += (lengths**2).sum() - tree.cost(CostModel(linear=0.0, quadratic=1.0))
    return Shared(tokens=tokens, pairs=pairs)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far, in GiB: GPU memory, or host memory if the device is a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not available on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, KiB elsewhere


def reward_metrics(
    samples: Sequence[Sample], *, end_tokens: Collection[int] = (), sources: Sequence[str] = ()
) -> dict[str, float]:
    """Return metrics of a rollout batch: its rewards, and the lengths of its responses in trained tokens.

    `sources`: names of the sources of a mixture, whose mean rewards are also returned. With `end_tokens`, the metrics
    include the share of responses that were cut off before one of these tokens.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [int(sample.mask.sum()) for sample in samples]
    found = {
        "response_length": sum(lengths) / len(lengths),
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
    }
    if rewards:
        mean = sum(rewards) / len(rewards)
        found["reward"] = mean
        found["reward_std"] = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        found["reward_min"] = min(rewards)
        found["reward_max"] = max(rewards)
    for name in sources:
        own = [sample.reward for sample in samples if sample.source == name and sample.reward is not None]
        if own:
            found[f"source/{name}/reward"] = sum(own) / len(own)
    if end_tokens:
        found["response_cut"] = sum(int(sample.tokens[-1]) not in end_tokens for sample in samples) / len(samples)
    return found
