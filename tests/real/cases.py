"""SmolLM2-135M-Instruct with its real weights: short conversations, and the loss and gradients of a first step.

    ours(config)                  data, tokens, masks, packs and loss as `padfree sft` and the others have them
    gradients_of(model, loss)     those of any other code, by the same names

Gradients are compared as a whole and per parameter, relative to their norm. The rounding of float32 in 30 real layers
is measured: the other code also runs in float64, and padfree may differ from float64 by a few times as much as the
other code in float32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from padfree.config import Config, config_from_dict
from padfree.distributed import distributed
from padfree.sample import Sample
from padfree.train.batch_preparer import BatchPreparer
from padfree.train.batcher import make_batcher
from padfree.train.preflight import preflight
from padfree.train.run import mesh_of
from padfree.train.setup import build_engine, build_reference

SMOLLM2 = Path(os.environ.get("PADFREE_REAL", "unset")) / "smollm2"
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2.exists(), reason="PADFREE_REAL names no folder with smollm2; `make test-real` fetches it"
)

QUESTIONS = ("What is the capital of France?", "Name two colours.", "What is 7 plus 5?", "Who wrote Faust?")
GOOD = ("The capital of France is Paris.", "Red and blue.", "7 plus 5 is 12.", "Goethe wrote it.")
BAD = ("It is Rome.", "Dogs and cats are colours, I think.", "13", "Nobody wrote it, it has always been there.")

FACTOR = 4.0
"""The largest allowed ratio of padfree's distance from float64 to that of the other code."""


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations() -> list[dict[str, Any]]:
    """One of them with two answers."""
    rows = [[message("user", q), message("assistant", a)] for q, a in zip(QUESTIONS, GOOD, strict=True)]
    return [{"messages": rows[0] + rows[1]}, {"messages": rows[2]}, {"messages": rows[3]}]


def pairs() -> list[dict[str, Any]]:
    return [
        {
            "prompt": [message("user", question)],
            "chosen": [message("assistant", good)],
            "rejected": [message("assistant", bad)],
        }
        for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True)
    ]


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(folder: Path = SMOLLM2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """In training mode, without dropout, with eager attention: on a CPU, sdpa rounds 20 times as much in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.train()


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The loss of a first step, and its gradients by parameter."""

    loss: float
    gradients: dict[str, Tensor]
    samples: Sequence[Sample] = ()


def config_of(folder: Path, rows: Sequence[Mapping[str, Any]], **sections: Any) -> Config:
    """Settings of a run on these rows, with all of them in one step."""
    values: dict[str, Any] = {
        "model": {"path": str(SMOLLM2)},
        "data": {"path": [str(written(folder / "rows.jsonl", rows))], "shuffle": False},
        "batch": {"samples": 2 * len(rows), "max_tokens": 256},
        "parallel": {"compile": "none", "checkpointing": "none"},
        "run": {"folder": str(folder / "run"), "device": "cpu"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return config_from_dict(values)


def ours(config: Config) -> Found:
    """The samples of the first optimizer step of this run."""
    with distributed(device="cpu") as device:
        mesh = mesh_of(config, device)
        preflight_result = preflight(config, processes=1, device_type="cpu")
        engine = build_engine(config, mesh, preflight_result.tokenizer)
        batches = BatchPreparer(
            engine,
            make_batcher(config, preflight_result.source.samples),
            loss=config.loss,
            data=config.data,
            rollout=config.rollout,
            seed=config.run.seed,
            reference=build_reference(config, mesh, engine),
            teacher=None,
            critic=None,
            rollouts=None,
        )
        batch = batches.next(0)
        assert batch is not None
        prepared = engine.prepare(batch.samples_of(0))
        assert prepared.plan.num_micro_batches > 0
        sums = engine.gradients(prepared)
        return Found(loss=float(sums.loss), gradients=gradients_in(engine.model), samples=tuple(batch.samples_of(0)))


def gradients_in(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient: Any = parameter.grad
        found[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach()
    return found


def gradients_of(model: torch.nn.Module, loss: Tensor) -> Found:
    """Backward through any code's loss."""
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    return Found(loss=float(loss.detach()), gradients=gradients_in(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """The distance between gradients, relative to the norm of the second."""

    whole: float
    largest: float  # of a single parameter


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Distance:
    assert found.keys() == expected.keys()
    apart = torch.stack([(found[name].double() - tensor).norm() for name, tensor in expected.items()])
    norms = torch.stack([tensor.norm().double() for tensor in expected.values()])
    return Distance(whole=float(apart.norm() / norms.norm()), largest=float((apart / norms).max()))


def assert_as_close(found: Found, other: Found, wide: Found) -> None:
    """`found` is as close to the other code in float64 as that code in float32, up to a small factor."""
    assert found.loss == pytest.approx(wide.loss, abs=FACTOR * max(abs(other.loss - wide.loss), 1e-6))
    noise, difference = distance(other.gradients, wide.gradients), distance(found.gradients, wide.gradients)
    for name in ("whole", "largest"):
        allowed = FACTOR * getattr(noise, name)
        assert 0 < allowed < 5e-3, f"{name}: {allowed:.1e} is another result, not rounding"
        assert getattr(difference, name) <= allowed, f"{name}: {getattr(difference, name):.1e} over {allowed:.1e}"
