"""Losses of pairs, teachers, reward models and critics: correct ones pass, and planted mistakes are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from padfree.cli.main import main
from padfree.losses import LossInputs, LossOutput, ValueSettings, value_loss
from padfree.testing.models import save_with_tokenizer
from padfree.tools.check import CheckReport, check_model
from padfree.tools.check.plain_losses import CheckedLoss
from padfree.train.microbatch import at_ends
from tests.tools.check import cases

LOSSES: tuple[CheckedLoss, ...] = ("dpo", "kto", "distill", "reward", "value")
LENGTHS = (7, 12, 5, 9, 11, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_right_loss_passes(loss: CheckedLoss, folder: Path) -> None:
    report = check_model(folder, loss=loss, samples=cases.make_samples(LENGTHS), device="cpu")
    assert report.passed, report.verdict
    assert {row.check for row in report.rows} == {
        "packed",
        "one sample per pack",
        "a few packs, samples reversed",
        "shared prefixes",
    }
    assert not report.skipped
    loss_row, gradients = cases.packs_of(report, "packed")[:2]
    assert float(loss_row.where.partition(",")[0]) > 1e-3, "there is something to compare"
    assert gradients.difference < 1e-4
    assert {row.part for row in report.rows} >= {"layer 0", "layer 1"}


@pytest.mark.parametrize("loss", ["dpo", "value"])
def test_positions_that_count_on_are_found(loss: CheckedLoss, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("padfree.train.microbatch.collate", cases.no_position_reset)
    report = check_model(folder, loss=loss, samples=cases.make_samples(LENGTHS), device="cpu")
    assert ("packed", "gradients") in cases.failures(report)


def test_mistakes_of_each_loss_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(loss: CheckedLoss) -> set[tuple[str, str]]:
        report: CheckReport = check_model(folder, loss=loss, samples=cases.make_samples(LENGTHS), device="cpu")
        return cases.failures(report)

    def shifted(packed: Any, pad_token: int | None) -> Any:
        found = at_ends(packed, pad_token)
        return type(found)(**{**_fields(found), "labels": found.labels.roll(-1)})

    def unclipped(inputs: LossInputs, settings: ValueSettings) -> LossOutput:
        return value_loss(inputs, ValueSettings(clip=None))

    with monkeypatch.context() as planted:
        planted.setattr("padfree.train.microbatch.at_ends", shifted)
        assert ("packed", "loss") in failed("reward")
    with monkeypatch.context() as planted:
        planted.setattr("padfree.train.critic.value_loss", unclipped)
        assert ("packed", "loss") in failed("value")
    with monkeypatch.context() as planted:
        planted.setattr("padfree.losses.preference.softplus", torch.nn.functional.relu)
        assert ("packed", "loss") in failed("dpo")
    with monkeypatch.context() as planted:
        planted.setattr("padfree.tasks.distill.lm_head_of", lambda model: _scaled(model))
        assert ("packed", "gradients") in failed("distill")


def _fields(packed: Any) -> dict[str, Any]:
    from dataclasses import fields

    return {entry.name: getattr(packed, entry.name) for entry in fields(packed)}


def _scaled(model: Any) -> Any:
    from dataclasses import replace

    from padfree.model import lm_head_of

    return replace(lm_head_of(model), logit_scale=1.1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    model, data = save_with_tokenizer(tmp_path / "model"), tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "9+9"} for a in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["check", "--model", str(model), "--device", "cpu", "--data", str(data)]
    for loss in ("dpo", "reward"):
        assert main([*common, "--loss", loss]) == 0
        printed = capsys.readouterr().out
        assert f"the {loss} loss of one pair at a time" in printed
        assert printed.splitlines()[-1].startswith("passed")
    assert main([*common, "--loss", "ppo"]) == 1
    assert "--loss: 'ppo'; choose one of nll, dpo" in capsys.readouterr().err


def test_a_reward_model_with_its_own_head(tmp_path: Path) -> None:
    base = cases.save_model(tmp_path / "base", "qwen3")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.save_pretrained(tmp_path / "reward")
    report = check_model(tmp_path / "reward", loss="reward", samples=cases.make_samples(LENGTHS), device="cpu")
    assert report.passed, report.verdict
