"""The time model, in order: a named file, a measurement of this device, a GPU's peak, none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from padfree.packing import CostModel
from padfree.tools.planner.time_model import PEAK_FRACTION, choose_time_model, cost_path
from tests.refused import refused
from tests.tools.planner.cases import config_of

MODEL = Qwen3Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
MEASURED = CostModel(linear=1e-5, quadratic=1e-9, constant=1e-3)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_named_on_the_command_line() -> None:
    time_model = choose_time_model(config_of(model={"dtype": "bfloat16"}), MODEL, "H100")
    assert time_model.cost == CostModel.from_config(MODEL)
    assert time_model.seconds(989e12 * PEAK_FRACTION * 3) == pytest.approx(3.0)
    assert time_model.source == "assuming 40% of the 989 TFLOP/s of H100"
    assert choose_time_model(config_of(), MODEL, "H100").per_second is None  # peaks are known for bfloat16 only
    with refused("--gpu"):
        choose_time_model(config_of(), MODEL, "abacus")


def test_without_a_gpu_or_a_model() -> None:
    assert choose_time_model(config_of(), MODEL, None).seconds(1.0) is None
    assert choose_time_model(config_of(), None, None).cost == CostModel.tokens()


def test_adapters_need_two_of_three_products() -> None:
    whole, adapters = (choose_time_model(config_of(lora={"rank": rank}), MODEL, None).cost for rank in (0, 4))
    assert adapters == CostModel(linear=whole.linear * 2 / 3, quadratic=whole.quadratic)


def test_a_measurement_of_this_device_is_used_and_a_named_file_goes_before_it(tmp_path: Path) -> None:
    config = config_of()
    stored = cost_path("cpu", MODEL, config)
    assert stored.parent == tmp_path / "cost"
    stored.parent.mkdir()
    MEASURED.to_json(stored)
    time_model = choose_time_model(config, MODEL, None)
    assert time_model.cost == MEASURED
    assert time_model.seconds(2.5) == 2.5
    assert "measured on cpu" in time_model.source
    # not used for another device, model or dtype
    assert choose_time_model(config_of(model={"dtype": "bfloat16"}), MODEL, "H100").cost != MEASURED
    assert choose_time_model(config, LlamaConfig(hidden_size=64), None).cost != MEASURED
    assert choose_time_model(config_of(model={"dtype": "bfloat16"}), MODEL, None).cost != MEASURED

    named = tmp_path / "named.json"
    CostModel(linear=7.0).to_json(named)
    assert choose_time_model(config_of(batch={"cost": str(named)}), MODEL, "H100").cost == CostModel(linear=7.0)


def test_the_key_does_not_depend_on_where_a_model_lies() -> None:
    other = Qwen3Config.from_dict({**MODEL.to_dict(), "_name_or_path": "elsewhere", "dtype": "bfloat16"})
    assert cost_path("cpu", MODEL, config_of()) == cost_path("cpu", other, config_of())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("no json", "is not a cost model"),
        ('{"linear": "a", "quadratic": 0, "constant": 0}', "is not a cost model"),
        ('{"linear": 0, "quadratic": 0, "constant": 1}', "does not grow with the number of tokens"),
    ],
)
def test_files_that_hold_no_cost_model(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    if text is not None:
        path.write_text(text)
    with refused("batch.cost") as error:
        choose_time_model(config_of(batch={"cost": str(path)}), MODEL, None)
    assert "\n" not in str(error.value)
