"""From files to an exported model: text for SFT, text and token ids for RL, alone and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from padfree.config import Config, LossConfig, config_from_dict
from padfree.distributed import distributed, make_mesh
from padfree.losses import OPSMSettings, PolicySettings, SequenceTISSettings
from padfree.testing.models import save_with_tokenizer
from padfree.train.run import train
from padfree.train.setup import build_engine
from padfree.train.training_data import load_tokenizer
from tests.ranks import run_ranks
from tests.refused import refused


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(folder: Path, model_path: Path, data_path: Path, **sections: Any) -> Config:
    return config_from_dict(
        {
            "model": {"path": str(model_path)},
            "data": {"path": [str(data_path)], **sections.pop("data", {})},
            "batch": {"samples": 4, "max_tokens": 64},
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
            "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
            "run": {"folder": str(folder), "steps": 3, "device": "cpu"},
            **sections,
        }
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_ranks(rank: int, world: int, configs: list[Config]) -> None:
    for config in configs:
        train(config)


def test_files_to_model(model_folder: Path, tmp_path: Path) -> None:
    sums = [(a, b) for a in range(4) for b in (7, 30)]
    questions = [{"question": f"{a}+{b}", "answer": f"the sum is {a + b} #### {a + b}"} for a, b in sums]
    questions[3]["answer"] += " and no more"
    sft_data = write_lines(tmp_path / "sft.jsonl", questions)
    rollouts = [
        {"prompt": row["question"], "response": answer, "reward": float(answer == row["answer"])}
        for row in questions
        for answer in (row["answer"], "no idea")
    ]
    rl_data = write_lines(tmp_path / "rl.jsonl", rollouts)
    sections: dict[str, tuple[Path, dict[str, Any]]] = {
        "sft": (
            sft_data,
            {
                "data": {
                    "epochs": 2,
                    "max_length": 30,
                    "overlong": "truncate",
                    "columns": {"question": "prompt", "answer": "response"},
                }
            },
        ),
        "rl": (rl_data, {"loss": {"kind": "cispo"}}),
    }
    for name, (data, changes) in sections.items():
        result = train(make_config(tmp_path / name, model_folder, data, **changes))
        assert (result.step, result.stopped) == (3, False)
        rows = [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        assert [row["action"] for row in rows] == (["truncated"] if name == "sft" else [])
    halves = [
        make_config(tmp_path / f"{name} two", model_folder, data, **changes, parallel={"context": 2})
        for name, (data, changes) in sections.items()
    ]
    run_ranks(2, train_ranks, halves)
    for name in sections:
        assert losses(tmp_path / f"{name} two") == pytest.approx(losses(tmp_path / name), abs=1e-5)
        one, two, start = (
            AutoModelForCausalLM.from_pretrained(folder).state_dict()
            for folder in (tmp_path / name / "model", tmp_path / f"{name} two" / "model", model_folder)
        )
        for key, weight in one.items():
            torch.testing.assert_close(two[key], weight, atol=1e-5, rtol=0)
        assert any(not torch.equal(weight, start[key]) for key, weight in one.items())
    assert losses(tmp_path / "sft")[-1] < losses(tmp_path / "sft")[0]


def test_settings_reach_the_parts(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        model_folder,
        tmp_path,
        parallel={"checkpointing": "full", "layout": "headtail", "method": "ring"},
        loss={
            "kind": "gspo",
            "low": 0.1,
            "high": 0.2,
            "temperature": 0.5,
            "corrections": ["opsm"],
            "aggregation": "group-mean",
        },
    )
    with distributed(device="cpu") as device:
        engine = build_engine(config, make_mesh(device))
    assert engine.settings.aggregation == "group-mean"
    assert (engine.scorer.temperature, engine.scorer.packer.max_tokens) == (0.5, 64)
    pack_settings = engine.scorer.packer.pack_settings
    assert (pack_settings.layout, pack_settings.method) == ("headtail", "ring")
    assert all(layer.gradient_checkpointing for layer in engine.model.model.layers)
    settings = config.loss.settings()
    assert (settings.objective.low, settings.objective.high) == (0.1, 0.2)  # type: ignore[union-attr]
    assert engine.optimizer.param_groups[0]["eps"] == 1e-4


def test_corrections_have_their_own_settings() -> None:
    config = LossConfig(
        kind="clip",
        corrections=("sequence_tis", "opsm"),
        sequence_tis=SequenceTISSettings(high=3.0, geometric=True),
    )
    settings = config.settings()
    assert isinstance(settings, PolicySettings)
    assert settings.corrections == (SequenceTISSettings(high=3.0, geometric=True), OPSMSettings())


def test_token_ids_need_no_tokenizer_but_text_does(model_folder: Path, tmp_path: Path) -> None:
    config_file = model_folder / "config.json"
    rollouts = [
        {"prompt_tokens": [3, 4], "response_tokens": [5, 6 + row], "reward": row % 2, "group": row // 2}
        for row in range(4)
    ]
    data = write_lines(tmp_path / "rl.jsonl", rollouts)
    config = make_config(tmp_path / "run", config_file, data, loss={"kind": "clip"}, checkpoint={"export": False})
    assert train(config).step == 1
    assert not (tmp_path / "run" / "model").exists()
    with refused("model.tokenizer"):
        load_tokenizer(make_config(tmp_path / "sft", config_file, data))
    text = write_lines(tmp_path / "text.jsonl", [{"prompt": "1+1", "response": "2", "reward": 1.0}])
    with refused("model.tokenizer"):
        train(make_config(tmp_path / "text", config_file, text, loss={"kind": "clip"}))
