"""`padfree demo`: what packing saves on a synthetic data set, and that it changes nothing.

Three tables on one screen: the tokens a padded and a packed pass over the data compute, how evenly a step lies on the
ranks, and one gradient step of a small random Qwen3 three ways (one sample at a time, padded, packed) with its time and
the largest difference of any parameter's gradient.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from padfree.batch import IGNORE, Sample
from padfree.packing import CostModel, pack, plan_step

if TYPE_CHECKING:
    from rich.console import Console

VOCABULARY = 1024
GRADIENT_SAMPLES = 24


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo",
        help="pack a synthetic data set and compare with padding",
        description="Packs a synthetic data set and compares it with padding: tokens, balance, time and gradients.",
        epilog="example: padfree demo --samples 4000 --max-tokens 8192",
    )
    command.add_argument("--samples", type=int, default=4000, help="number of samples (default %(default)s)")
    command.add_argument("--max-tokens", type=int, default=8192, help="tokens per micro-batch (default %(default)s)")
    command.add_argument("--ranks", type=int, default=8, help="devices to plan for (default %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of the data and the model (default %(default)s)")
    command.set_defaults(run=run)


def synthetic_samples(count: int, longest: int, rng: np.random.Generator) -> list[Sample]:
    """Samples of log-normal length (median 490, sigma 1), of which the first third is a prompt."""
    lengths = np.clip(rng.lognormal(np.log(490), 1.0, count), 4, longest).astype(np.int64)
    return [
        Sample(tokens=rng.integers(0, VOCABULARY, n), loss_mask=np.arange(n) >= n // 3, uid=index)
        for index, n in enumerate(lengths)
    ]


def run(settings: argparse.Namespace) -> None:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ValueError("demo: the package rich is missing; pip install rich") from error
    for name, least in (("samples", 1), ("max_tokens", 64), ("ranks", 1)):
        if getattr(settings, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: {getattr(settings, name)}; give {least} or more")
    console = Console()
    rng = np.random.default_rng(settings.seed)
    samples = synthetic_samples(settings.samples, settings.max_tokens, rng)
    lengths = np.array([len(sample) for sample in samples])
    console.print(
        f"{len(samples):,} samples of {lengths.min()} to {lengths.max():,} tokens, "
        f"{lengths.sum():,} in all, micro-batches of {settings.max_tokens:,} tokens\n"
    )
    _show_waste(console, samples, lengths, settings.max_tokens)
    _show_plan(console, lengths, settings.ranks, settings.max_tokens)
    _show_gradients(console, settings.seed, rng)


def padded_tokens(lengths: NDArray[np.int64], rows: int) -> int:
    """Tokens computed when every batch of `rows` samples is padded to its longest."""
    batches = [lengths[i : i + rows] for i in range(0, len(lengths), rows)]
    return int(sum(len(batch) * batch.max() for batch in batches))


def _show_waste(console: Console, samples: list[Sample], lengths: NDArray[np.int64], max_tokens: int) -> None:
    start = time.perf_counter()
    packs = pack(samples, max_tokens=max_tokens)
    seconds = time.perf_counter() - start
    real = int(lengths.sum())
    rows = [("padded, batches of 8", padded_tokens(lengths, 8)), ("padded, batches of 32", padded_tokens(lengths, 32))]
    rows.append(("packed", sum(batch.num_tokens for batch in packs)))
    table = _table("what is computed", "tokens", "of them real", "times packed")
    for name, tokens in rows:
        table.add_row(name, f"{tokens:,}", f"{real / tokens:.1%}", f"{tokens / real:.2f}")
    console.print(table)
    fill = real / (len(packs) * max_tokens)
    console.print(f"packed into {len(packs):,} micro-batches, {fill:.2%} full, in {seconds * 1e3:.0f} ms\n")


def _show_plan(console: Console, lengths: NDArray[np.int64], ranks: int, max_tokens: int) -> None:
    # A small model's ratio of attention to the rest: the quadratic part is what makes equal tokens unequal work.
    cost = CostModel(linear=1.0, quadratic=1e-4, constant=0.0)
    start = time.perf_counter()
    plan = plan_step(lengths, ranks=ranks, max_tokens=max_tokens, cost=cost)
    seconds = time.perf_counter() - start
    console.print(
        f"one step over {ranks} ranks: {plan.num_micro_batches} micro-batches each, "
        f"the slowest rank's work is {plan.imbalance:.3f} times the mean (planned in {seconds * 1e3:.0f} ms)\n"
    )


def _show_gradients(console: Console, seed: int, rng: np.random.Generator) -> None:
    """One gradient of a small model three ways; the first is the definition of right."""
    samples = synthetic_samples(GRADIENT_SAMPLES, 1024, rng)
    model = _small_model(seed)
    ways = {
        "one at a time": _gradient_of(model, _loss_one_at_a_time, samples),
        "padded": _gradient_of(model, _loss_padded, samples),
        "packed": _gradient_of(model, _loss_packed, samples),
    }
    _, exact_loss, exact = ways["one at a time"]
    scale = max(float(gradient.abs().max()) for gradient in exact)
    table = _table(f"a gradient step of {len(samples)} samples", "seconds", "loss", "largest gradient difference")
    for name, (seconds, loss, gradients) in ways.items():
        difference = max(float((a - b).abs().max()) for a, b in zip(gradients, exact, strict=True)) / scale
        table.add_row(name, f"{seconds:.2f}", f"{loss:.6f}", f"{difference:.1e}")
        if not np.isclose(loss, exact_loss, rtol=1e-4) or difference > 1e-3:
            raise ValueError(
                f"demo: the {name} gradient differs by {difference:.1e}; this build of torch is not to be trusted"
            )
    console.print(table)
    faster = ways["padded"][0] / ways["packed"][0]
    console.print(f"packed is {faster:.1f} times as fast as padded here, with the same loss and the same gradients")


def _small_model(seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config: Any = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    model: Any = Qwen3ForCausalLM
    return model(config)


Loss = Callable[[Any, list[Sample]], float]


def _gradient_of(model: Any, loss: Loss, samples: list[Sample]) -> tuple[float, float, list[torch.Tensor]]:
    loss(model, samples[:2])  # the first call pays for set-up
    model.zero_grad()
    start = time.perf_counter()
    value = loss(model, samples)
    seconds = time.perf_counter() - start
    return seconds, value, [parameter.grad.clone() for parameter in model.parameters()]


def _loss_packed(model: Any, samples: list[Sample]) -> float:
    from padfree.cp import shard
    from padfree.head import score
    from padfree.model import attach, hidden_states

    attach(model)
    total = 0.0
    for batch in pack(samples, max_tokens=8192):
        local = shard(batch)
        scores = score(hidden_states(model, local), model.lm_head.weight, local.labels)
        loss = -(local.weights * scores.logprobs).sum()
        torch.autograd.backward(loss)
        total += float(loss.detach())
    model.set_attn_implementation("sdpa")
    return total


def _loss_one_at_a_time(model: Any, samples: list[Sample]) -> float:
    return padded_loss(model, [[sample] for sample in samples], sum(sample.num_labels for sample in samples))


def _loss_padded(model: Any, samples: list[Sample]) -> float:
    batches = [samples[i : i + 8] for i in range(0, len(samples), 8)]
    return padded_loss(model, batches, sum(sample.num_labels for sample in samples))


def padded_loss(model: Any, batches: Sequence[Sequence[Sample]], count: int) -> float:
    """The token mean over `count` scored tokens, with its gradient, by plain transformers code on padded rows."""
    total = 0.0
    for batch in batches:
        longest = max(len(sample) for sample in batch)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, IGNORE)
        for row, sample in enumerate(batch):
            tokens = torch.from_numpy(sample.tokens.astype(np.int64))
            input_ids[row, : len(sample)] = tokens
            mask[row, : len(sample)] = 1
            labels[row, : len(sample)] = torch.where(torch.from_numpy(sample.mask.copy()), tokens, IGNORE)
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        torch.autograd.backward(loss / count)
        total += float(loss.detach()) / count
    return total


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
