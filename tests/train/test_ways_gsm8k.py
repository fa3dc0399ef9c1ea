"""Every way to train, from the data to the exported model, on problems of GSM8K: the same metrics on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from padfree.cli.demo.data import train_tokenizer, write_model
from padfree.config import Config
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.train.loop_cases import lines
from tests.train.ways import WAYS, way_config, write_data

PROBLEMS = 6
LAYOUTS = {"1": (1, 1), "2 data": (2, 1), "2 context": (2, 2), "2 x 2": (4, 2)}  # processes, context ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gsm8k_solutions: list[dict[str, Any]]) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    problems = [(row["question"], row["175b_verification"]["solution"]) for row in gsm8k_solutions[:PROBLEMS]]
    tokenizer = train_tokenizer([{"prompt": problem, "response": solution} for problem, solution in problems])
    write_model(folder / "model", tokenizer, 16)
    write_model(folder / "teacher", tokenizer, 32)
    write_data(folder, problems)
    return folder


def ranks(rank: int, world: int, configs: list[Config]) -> None:
    torch.set_num_threads(1)
    for config in configs:
        train(config)


@pytest.mark.slow
def test_every_way_is_the_same_on_any_layout(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    configs = {
        layout: [way_config(folder, way, f"{way} {layout}", parallel={"context": context}) for way in WAYS]
        for layout, (_, context) in LAYOUTS.items()
    }
    ranks(0, 1, configs["1"])
    run_ranks(2, ranks, [*configs["2 data"], *configs["2 context"]])
    run_ranks(4, ranks, configs["2 x 2"])
    for way in WAYS:
        expected = lines(folder / f"{way} 1")
        assert [line["step"] for line in expected] == [0, 1]
        assert expected[1]["gradient_norm"] > 1e-3
        for layout in LAYOUTS:
            for line, other in zip(lines(folder / f"{way} {layout}"), expected, strict=True):
                assert line == pytest.approx(other, rel=1e-5, abs=1e-5), (way, layout)
            exported = folder / f"{way} {layout}" / "model"
            kind: Any = AutoModelForSequenceClassification if way == "reward" else AutoModelForCausalLM
            assert kind.from_pretrained(exported).config.vocab_size == len(AutoTokenizer.from_pretrained(exported))
