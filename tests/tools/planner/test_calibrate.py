"""Calibration: the measured micro-batches, extrapolation from few layers, and a tiny model on the CPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import DeepseekV3Config, Gemma3TextConfig, Qwen3Config, Qwen3MoeConfig

from padfree.packing import CostModel
from padfree.tools.planner.calibrate import (
    MEASURED_TOKENS,
    REPEATS,
    WHOLE_MODEL_WEIGHTS,
    calibrate,
    extrapolated,
    measured_layers,
    micro_batches,
    with_layers,
)
from padfree.tools.planner.time_model import choose_time_model
from tests.refused import refused
from tests.tools.planner.cases import config_of

MODULE = importlib.import_module("padfree.tools.planner.calibrate")  # the package has a function of this name

# Large enough that the time depends on tokens, not on operator overhead.
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
}


def test_micro_batches_differ_in_length_and_in_number() -> None:
    found = micro_batches(1024, 1024)
    assert [len(batch) * batch[0] for batch in found] == [1024, 512, 256, 1024, 1024, 1024, 256, 1024]
    assert max(map(max, found)) == 1024
    assert min(map(max, found)) == 16
    # no sample is longer than the number of positions of the model
    assert max(map(max, micro_batches(100, 1024))) == 100
    assert all(min(batch) >= 2 and sum(batch) <= 8 for batch in micro_batches(8, 8))


def test_which_layers_are_measured() -> None:
    deep = Qwen3Config(num_hidden_layers=28)
    assert measured_layers(deep, whole=10**12) == (28,)
    assert measured_layers(deep, whole=1) == (1, 4)
    assert measured_layers(Qwen3Config(num_hidden_layers=4), whole=1) == (1, 2)
    assert measured_layers(Qwen3Config(num_hidden_layers=2), whole=1) == (2,)
    gemma = Gemma3TextConfig(num_hidden_layers=24)  # five windowed layers, then a full one
    assert measured_layers(gemma, whole=1) == (6, 12)
    assert measured_layers(Gemma3TextConfig(num_hidden_layers=26), whole=1) == (6, 12)
    assert with_layers(gemma, 6).layer_types == gemma.layer_types[:6]
    assert gemma.num_hidden_layers == 24
    dense_first = DeepseekV3Config(num_hidden_layers=10, first_k_dense_replace=3)
    assert measured_layers(dense_first, whole=1) == (4, 5)
    every_second = Qwen3MoeConfig(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[])
    assert measured_layers(every_second, whole=1) == (2, 4)


def test_two_depths_tell_the_time_of_many_layers() -> None:
    rest, layer = [0.7, 0.1], [0.3, 0.02]
    taken = [[r + depth * each for r, each in zip(rest, layer, strict=True)] for depth in (2, 4)]
    assert extrapolated(taken, (2, 4), 30) == pytest.approx([0.7 + 30 * 0.3, 0.1 + 30 * 0.02])
    assert extrapolated(taken[:1], (2,), 2) == taken[0]
    # noise that makes the deeper model look faster is not extrapolated
    assert extrapolated([[1.0], [0.5]], (2, 4), 30) == [1.0]


@pytest.fixture
def _even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs everything with a fake clock on which a token takes 0.1 ms, so that load on the machine does not matter."""
    now, gradients = [0.0], MODULE.Engine.gradients

    def counted(engine: Any, prepared: Any) -> Any:
        found = gradients(engine, prepared)
        now[0] += sum(1e-4 * batch.packed.num_tokens for batch, _ in prepared.packs)
        return found

    monkeypatch.setattr(MODULE.Engine, "gradients", counted)
    monkeypatch.setattr(MODULE, "time", SimpleNamespace(perf_counter=lambda: now[0]))


@pytest.mark.usefixtures("_even_clock")
@pytest.mark.parametrize("layers", [1, 4])
def test_a_tiny_model_on_the_cpu(layers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path))
    monkeypatch.setitem(MEASURED_TOKENS, "cpu", 96)
    if layers > 1:
        monkeypatch.setitem(WHOLE_MODEL_WEIGHTS, "cpu", 1)
    model = Qwen3Config(**TINY, num_hidden_layers=layers)
    config = config_of(run={"device": "cpu"})
    seen: list[tuple[int, int]] = []
    found = calibrate(model, config, progress=lambda done, all: seen.append((done, all)))
    assert found.layers == ((1,) if layers == 1 else (1, 2))
    assert seen[-1] == (len(seen), len(seen))
    assert len(seen) == (REPEATS + 1) * len(found.layers) * len(found.measurements)
    assert found.cost.linear == pytest.approx(1e-4)
    assert found.worst == pytest.approx(1.0)
    assert all(each.seconds > 0 for each in found.measurements)
    assert CostModel.from_json(found.path) == found.cost
    about = json.loads(found.path.with_suffix(".about.json").read_text())
    assert (about["device"], about["dtype"]) == ("cpu", "float32")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_time_model(config, model, None).cost == found.cost


@pytest.mark.usefixtures("_even_clock")
def test_recomputation_is_measured_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path))
    monkeypatch.setitem(MEASURED_TOKENS, "cpu", 48)
    model = Qwen3Config(**TINY, num_hidden_layers=1)
    paths = {
        calibrate(model, config_of(run={"device": "cpu"}, parallel={"checkpointing": mode})).path
        for mode in ("none", "full")
    }
    assert len(paths) == 2


def test_times_that_do_not_agree_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One micro-batch always takes a hundred times as long as its tokens suggest."""
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path))

    def runner(*arguments: object) -> Callable[[Sequence[int]], float]:
        return lambda lengths: sum(lengths) * (0.1 if len(lengths) == 2 else 0.001)

    monkeypatch.setattr(MODULE, "_runner", runner)
    with refused("--calibrate"):
        calibrate(Qwen3Config(**TINY, num_hidden_layers=1), config_of(run={"device": "cpu"}))
    assert not list(tmp_path.iterdir())


def test_a_measured_cost_is_recovered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times from a known cost model, with one and with four of 24 layers."""
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path))
    monkeypatch.setitem(WHOLE_MODEL_WEIGHTS, "cpu", 1)

    def runner(model: Qwen3Config, *arguments: object) -> Callable[[Sequence[int]], float]:
        depth = model.num_hidden_layers
        return lambda lengths: 0.5 + sum((0.2 + 0.01 * depth) * n + 1e-5 * depth * n * n for n in lengths)

    monkeypatch.setattr(MODULE, "_runner", runner)
    found = calibrate(Qwen3Config(**TINY, num_hidden_layers=24), config_of(run={"device": "cpu"}))
    assert found.layers == (1, 4)
    assert found.cost.linear == pytest.approx(0.2 + 0.24)
    assert found.cost.quadratic == pytest.approx(24e-5)
    assert found.cost.constant == pytest.approx(0.5)
    assert found.worst == pytest.approx(1.0)


def test_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with refused("run.device"):
        calibrate(Qwen3Config(**TINY), config_of(run={"device": "cuda"}))
    with refused("lora.rank"):
        calibrate(Qwen3Config(**TINY), config_of(lora={"rank": 4}))


def test_a_cache_that_cannot_be_written_is_said_before_the_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*arguments: object) -> None:
        raise AssertionError("the measuring has begun")

    monkeypatch.setattr(MODULE, "_measured", measured)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "file" / "cache"))
    with refused("PADFREE_CACHE"):
        calibrate(Qwen3Config(**TINY, num_hidden_layers=1), config_of(run={"device": "cpu"}))
