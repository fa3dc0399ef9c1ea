"""The steps of a run by plain transformers code, and how the packed ones compare with them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from padfree.cli.demo.folder import Demo
from padfree.config import Config
from padfree.errors import UserError
from padfree.record.files import METRICS

SAME_LOSS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Losses of the padded and the packed way may differ by so much, by what is computed in."""


def padded_steps(demo: Demo, config: Config, steps: int) -> dict[str, Any]:
    """Steps by plain transformers code: each batch padded to its longest sample, one optimizer step."""
    from transformers import AutoModelForCausalLM

    from padfree.check.padded import padded_loss
    from padfree.train.optimizer import make_optimizer, set_learning_rate
    from padfree.train.schedule import learning_rate_factor
    from padfree.train.training_data import load_tokenizer, load_training_data, make_batcher

    device, lower = config.run.device, config.model.dtype != "float32"
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train().to(device)
    chosen = config.optimizer
    optimizer = make_optimizer(
        model, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, weight_decay=chosen.weight_decay
    )
    batcher = make_batcher(config, load_training_data(config, load_tokenizer(config)).samples)
    schedule: dict[str, Any] = asdict(config.schedule)  # kind, warmup, final
    losses, seconds = [], []
    with demo.bar(steps) as bar:
        for step in range(steps):
            samples: list[Any] = [sample for group in next(batcher) for sample in group]
            begin = time.perf_counter()
            set_learning_rate(optimizer, chosen.lr * learning_rate_factor(step, steps=config.run.steps, **schedule))
            with torch.autocast(device, dtype=torch.bfloat16, enabled=lower):
                losses.append(padded_loss(model, [samples], sum(sample.num_labels for sample in samples)))
            assert chosen.max_grad_norm is not None
            torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            bar(step + 1, f"loss {losses[-1]:.4f}")
    return {"losses": losses, "seconds": seconds}


def comparison(config: Config, padded: Mapping[str, Any], *, set_up: int) -> dict[str, Any]:
    """The same of the steps of a run that `padded_steps` made, too; the first `set_up` of either are not timed."""
    steps = read_metrics(Path(config.run.folder))[: len(padded["losses"])]
    difference = max(abs(step["loss"] - loss) for step, loss in zip(steps, padded["losses"], strict=True))
    if difference > SAME_LOSS[config.model.dtype]:
        raise UserError(
            "demo", f"losses differ by {difference:.1e} from the padded ones", "this torch cannot be trusted"
        )
    faster = sum(padded["seconds"][set_up:]) / sum(step["seconds"] for step in steps[set_up:])
    return {"difference": difference, "faster": faster}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
