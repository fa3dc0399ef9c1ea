"""Every training command, from data to exported model, on GSM8K problems: the same metrics on any layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from padfree.config import Config
from padfree.testing.arithmetic import train_tokenizer, write_model
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.train.trainer_cases import TIMES
from tests.train.ways import HELD_OUT, WAYS, held_out, way_config, write, write_data

PROBLEMS, QUESTIONS = 6, 4
WRITERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
LAYOUTS = {"1": (1, 1), "2 data": (2, 1), "2 context": (2, 2), "2 x 2": (4, 2)}  # processes, context ranks
EXPORTED = ("1", "2 x 2")
POLICY, SCALAR = ("clip", "gspo", "cispo"), ("reward", "adapters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gsm8k_solutions: list[dict[str, Any]]) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    problems = [(row["question"], row["175b_verification"]["solution"]) for row in gsm8k_solutions[:PROBLEMS]]
    tokenizer = train_tokenizer([{"prompt": problem, "response": solution} for problem, solution in problems])
    write_model(folder / "model", tokenizer, 16, layers=1)
    write_model(folder / "teacher", tokenizer, 32, layers=1)
    write_data(folder, problems)
    rollouts = [
        {
            "prompt": row["question"],
            "response": row[writer]["solution"],
            "reward": float(row[writer]["is_correct"]),
            "group": f"question {number}",
        }
        for number, row in enumerate(gsm8k_solutions[:QUESTIONS])
        for writer in WRITERS
    ]
    write(folder, "rollouts", rollouts)
    return folder


def ranks(rank: int, world: int, configs: list[Config]) -> None:
    torch.set_num_threads(1)
    for config in configs:
        train(config)


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in (*TIMES, "seconds/evaluation")} for line in found
    ]


def config_of(folder: Path, way: str, layout: str) -> Config:
    return way_config(
        folder,
        way,
        f"{way} {layout}",
        batch={"samples": 4 * QUESTIONS} if way in POLICY else {},
        eval=held_out(folder, way),
        parallel={"context": LAYOUTS[layout][1]},
        checkpoint={"export": layout in EXPORTED},
    )


@pytest.mark.slow
def test_every_way_is_the_same_on_any_layout(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics and evaluations of two steps, sampled responses, and exports that transformers loads."""
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    configs = {layout: [config_of(folder, way, layout) for way in WAYS] for layout in LAYOUTS}
    ranks(0, 1, configs["1"])
    run_ranks(2, ranks, [*configs["2 data"], *configs["2 context"]])
    run_ranks(4, ranks, configs["2 x 2"])
    for way in WAYS:
        expected = lines(folder / f"{way} 1")
        assert [line["step"] for line in expected] == [0, 1]
        for line in expected:
            assert line["gradient_norm"] > 1e-3
            assert math.isfinite(line["loss"])
        for layout in LAYOUTS:
            place = folder / f"{way} {layout}"
            for line, other in zip(lines(place), expected, strict=True):
                assert line == pytest.approx(other, rel=1e-5, abs=1e-5), (way, layout)
        kind: Any = AutoModelForSequenceClassification if way in SCALAR else AutoModelForCausalLM
        one, four = (kind.from_pretrained(folder / f"{way} {layout}" / "model").state_dict() for layout in EXPORTED)
        for name, weight in one.items():
            torch.testing.assert_close(four[name], weight, rtol=0, atol=1e-5)
    for way in HELD_OUT:
        measured = lines(folder / f"{way} 1", "evaluation.jsonl")
        assert [line["step"] for line in measured] == [0, 2]
        for layout in LAYOUTS:
            for line, other in zip(lines(folder / f"{way} {layout}", "evaluation.jsonl"), measured, strict=True):
                assert line == pytest.approx(other, rel=1e-5, abs=1e-5), (way, layout)
    for way in ("environment", "critic"):
        first = lines(folder / f"{way} 1")[0]
        assert (first["episodes"], first["samples_per_episode"], first["turns"]) == (4, 2, 2)
        responses = [[line["response"] for line in lines(folder / f"{way} {n}", "rollouts.jsonl")] for n in LAYOUTS]
        assert all(found == responses[0] for found in responses)
    folders = [folder / f"critic {layout}" / "critic" for layout in EXPORTED]
    critics = [AutoModelForSequenceClassification.from_pretrained(place).state_dict() for place in folders]
    for name, weight in critics[0].items():
        torch.testing.assert_close(critics[1][name], weight, rtol=0, atol=1e-5)
    for way in POLICY:
        first, second = lines(folder / f"{way} 1")
        assert 0 < first["reward"] < 1
        assert first["loss/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert second["loss/ratio"] != pytest.approx(1.0, abs=1e-5), "the second mini-batch uses an updated model"
