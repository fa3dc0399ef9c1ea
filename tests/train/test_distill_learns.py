"""On the demo's task, a distilled student is better after the same steps than a fine-tuned one.

The teacher has seen many examples and the students few. The fine-tuned student overfits, so that its held-out loss is
higher (by 10 to 14 % with three seeds).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.config import config_from_dict
from padfree.data import SFTDataSettings, load_sft
from padfree.distributed import distributed, make_mesh
from padfree.model.load import load_model
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.arithmetic import problems, train_tokenizer, write_model, write_rows
from padfree.train.run import train
from padfree.train.scorer import Scorer


def run(folder: Path, model: Path, data: Path, *, steps: int, samples: int, **sections: Any) -> Path:
    train(
        config_from_dict(
            {
                "model": {"path": str(model)},
                "data": {"path": [str(data)], "epochs": None},
                "batch": {"samples": samples, "max_tokens": 8192},
                "optimizer": {"lr": 8e-3, "eps": 1e-6},
                "schedule": {"kind": "linear", "warmup": steps // 20, "final": 0.1},
                "run": {"folder": str(folder), "steps": steps, "device": "cpu"},
                **sections,
            }
        )
    )
    return folder / "model"


def held_out_loss(model_path: Path, data: Path, tokenizer: Any) -> float:
    """Mean negative log-probability of the response tokens."""
    found = load_sft([str(data)], tokenizer, SFTDataSettings(), progress=False)
    samples = [found[index] for index in range(len(found))]
    with distributed(device="cpu") as device:
        mesh = make_mesh(device)
        model = load_model(
            model_path, device=mesh.device, shard=lambda model: parallelize(model, transformations(mesh))
        )
        logprobs = Scorer(model, mesh, max_tokens=8192).logprobs(samples)
    return -float(np.concatenate(logprobs).sum()) / sum(sample.num_labels for sample in samples)


def compare(folder: Path, *, teacher_steps: int, steps: int, rows: int, student_rows: int) -> dict[str, float]:
    """Held-out losses of the teacher, the fine-tuned student and the distilled student."""
    data, few, held_out = (folder / f"{name}.jsonl" for name in ("train", "few", "held_out"))
    tokenizer = train_tokenizer(write_rows(data, problems(rows, seed=0)))
    write_rows(few, islice(problems(rows, seed=0), student_rows))
    write_rows(held_out, problems(200, seed=1))
    write_model(folder / "large", tokenizer, 64)
    write_model(folder / "small", tokenizer, 32)
    models = {"teacher": run(folder / "teacher", folder / "large", data, steps=teacher_steps, samples=24)}
    models["sft"] = run(folder / "sft", folder / "small", few, steps=steps, samples=16)
    distill = {"loss": {"kind": "distill"}, "teacher": {"path": str(models["teacher"])}}
    models["distill"] = run(folder / "distill", folder / "small", few, steps=steps, samples=16, **distill)
    return {name: held_out_loss(path, held_out, tokenizer) for name, path in models.items()}


@pytest.mark.slow
def test_distillation_beats_fine_tuning_at_equal_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    found = compare(tmp_path, teacher_steps=80, steps=40, rows=1000, student_rows=32)
    assert found["teacher"] < found["distill"] < found["sft"], found
