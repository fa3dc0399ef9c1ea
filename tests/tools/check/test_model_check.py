"""A correct model passes all checks, and every planted mistake is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import RwkvConfig

from padfree.batch import PackedBatch
from padfree.distributed import Mesh
from padfree.sample import Sample
from padfree.testing.models import build
from padfree.tools.check import CheckReport, check_model, random_samples
from padfree.tools.check.packed import Variation
from padfree.train.microbatch import PackSettings
from tests.ranks import run_ranks
from tests.refused import refused
from tests.tools.check import cases as cases

ALONE, REVERSED = "one sample per pack", "a few packs, samples reversed"
LEAKS = ("leak from even to odd samples", "leak from odd to even samples")
PADS = ("pad after every pack", "pad of other tokens")
SHARED = "shared prefixes"
ALL = {"packed", ALONE, REVERSED, SHARED, *LEAKS, *PADS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {
        name: cases.save_model(tmp_path_factory.mktemp(name), name) for name in ("qwen3", "gemma3", "gpt2", "qwen3_moe")
    }


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2", "qwen3_moe"])
def test_a_right_model_passes(name: str, folders: Mapping[str, Path]) -> None:
    said: list[str] = []
    report = check_model(folders[name], cases.make_samples(), device="cpu", on_progress=said.append)
    assert report.passed, report.verdict
    assert {row.check for row in report.rows} == ALL
    assert not report.skipped
    assert {row.part for row in cases.packs_of(report, "packed")} >= {"layer 0", "layer 1"}
    exact = [row for check in (*LEAKS, "pad of other tokens") for row in cases.packs_of(report, check)]
    assert all((row.difference, row.limit) == (0, 0) for row in exact) or name == "qwen3_moe"
    assert max(row.difference for row in report.rows) < 1e-4
    assert said[0].startswith("reference")
    assert not dist.is_initialized() or dist.get_world_size() == 1


def test_bfloat16_passes_by_the_noise_of_transformers(folders: Mapping[str, Path]) -> None:
    report = check_model(folders["qwen3"], cases.make_samples((9, 17, 30, 4)), dtype=torch.bfloat16, device="cpu")
    assert report.passed, report.verdict
    noise = {row.quantity: row.noise for row in cases.packs_of(report, "packed")}
    assert noise["log-probabilities"] > 1e-3


def test_a_config_gets_random_weights_and_random_samples() -> None:
    report = check_model(build("qwen3", num_hidden_layers=3, **cases.SIZES).config, 3, layers=2, device="cpu")
    assert report.passed, report.verdict
    assert (report.random_weights, report.num_layers, len(report.lengths)) == (True, 2, 3)
    assert report.samples == "samples of random tokens"


def run_broken(
    monkeypatch: pytest.MonkeyPatch, folder: Path, where: str, mistake: Callable[..., Any], **options: Any
) -> CheckReport:
    monkeypatch.setattr(where, mistake)
    return check_model(folder, cases.make_samples(), device="cpu", **options)


COLLATE = "padfree.train.microbatch.collate"


def test_positions_that_count_on_are_found(monkeypatch: pytest.MonkeyPatch, folders: Mapping[str, Path]) -> None:
    report = run_broken(monkeypatch, folders["gpt2"], COLLATE, cases.no_position_reset)
    failed = cases.failures(report)
    assert {("packed", "log-probabilities"), ("packed", "loss"), ("packed", "gradients")} <= failed
    assert "wpe" in {row.part for row in report.failed}
    assert not {check for check, _ in failed} & {ALONE, *LEAKS, "pad of other tokens"}  # samples do not see each other
    assert ("packed", "normaliser") not in failed


def test_a_boundary_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch, folders: Mapping[str, Path]) -> None:
    report = run_broken(monkeypatch, folders["qwen3"], COLLATE, cases.boundary_off_by_one)
    failed = cases.failures(report)
    assert {("packed", "log-probabilities"), ("packed", "gradients")} <= failed
    assert {(leak, "log-probabilities") for leak in LEAKS} <= failed
    assert ALONE not in {check for check, _ in failed}
    assert "leak from even to odd" in report.verdict


def test_a_pad_in_the_last_sample_is_found(monkeypatch: pytest.MonkeyPatch, folders: Mapping[str, Path]) -> None:
    broken = cases.pad_in_the_last_sample(PackedBatch.padded_to)
    report = run_broken(monkeypatch, folders["qwen3"], "padfree.batch.PackedBatch.padded_to", broken)
    failed = cases.failures(report)
    assert failed == {(PADS[0], quantity) for quantity in ("loss", "normaliser", "gradients")}
    assert report.verdict == f"FAILED: {PADS[0]} (loss, normaliser, gradients)"


@pytest.mark.parametrize(
    ("where", "mistake", "right"),
    [
        (COLLATE, cases.mean_of_each_row, {"packed"}),  # it makes no difference in a single pack
        ("padfree.train.engine.token_weights", cases.prompt_counted, set()),
    ],
)
def test_a_wrong_normaliser_is_found(
    where: str,
    mistake: Callable[..., Any],
    right: set[str],
    monkeypatch: pytest.MonkeyPatch,
    folders: Mapping[str, Path],
) -> None:
    report = run_broken(monkeypatch, folders["qwen3"], where, mistake)
    failed = cases.failures(report)
    single = {PADS[0], SHARED} if right else set()
    assert {check for check, _ in failed} == {"packed", ALONE, REVERSED, PADS[0], SHARED} - right - single
    assert {quantity for _, quantity in failed} == {"loss", "normaliser", "gradients"}


def test_weights_in_low_precision_are_found_below_the_noise(
    monkeypatch: pytest.MonkeyPatch, folders: Mapping[str, Path]
) -> None:
    report = run_broken(monkeypatch, folders["qwen3"], COLLATE, cases.rounded_weights, dtype=torch.bfloat16)
    assert ("packed", "normaliser") in cases.failures(report)
    assert ("packed", "gradients") not in cases.failures(report)


def test_a_method_that_is_refused_is_told_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, folders: Mapping[str, Path]
) -> None:
    magic = Variation(name="magic", max_tokens=99, pack_settings=PackSettings(method="magic"), may_be_refused=True)
    monkeypatch.setattr("padfree.tools.check.model_check.variations", lambda samples, context: [magic])
    report = check_model(folders["qwen3"], cases.make_samples(), device="cpu")
    assert report.passed
    assert [skipped.check for skipped in report.skipped] == ["magic"]
    assert report.skipped[0].reason.startswith("method: 'magic' is unknown; choose one of")
    others = [replace(magic, may_be_refused=False)]
    monkeypatch.setattr("padfree.tools.check.model_check.variations", lambda samples, context: others)
    with refused("method"):
        check_model(folders["qwen3"], cases.make_samples(), device="cpu")


def test_what_is_refused() -> None:
    config = build("qwen3", **cases.SIZES).config
    rng_samples = random_samples(cases.VOCABULARY, 3)
    long = [Sample(tokens=[1] * 300), Sample(tokens=[1, 2])]
    untrained = [replace(sample, loss_mask=[False] * len(sample)) for sample in rng_samples]
    for source, options, message in (
        (config, {"samples": 1}, "samples: 1 is too few"),
        (config, {"samples": untrained}, "samples: none of the 3 samples has a trained token"),
        (build("gpt2").config, {"samples": long}, "samples: 0 has 300 tokens, but the model has 256 positions"),
        (config, {"samples": random_samples(99, 3)}, r"samples: \d has token id \d+, but the model's vocabulary"),
        (config, {"dtype": torch.float16}, "dtype: torch.float16"),
        (config, {"backend": "magic"}, "backend: 'magic'"),
        (config, {"context": 2}, r"does not divide the 1 processes"),
        (RwkvConfig(num_hidden_layers=1), {}, "model: RwkvForCausalLM cannot be trained packed"),
        ("no/where/at/all", {}, "model: no/where/at/all does not exist"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            check_model(source, **{"device": "cpu", **options})
        assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_is_told_before_anything_is_compared(tmp_path: Path) -> None:
    model = build("qwen3", **cases.SIZES)
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)  # finite, but overflows in float32
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gives a non-finite loss"):
        check_model(tmp_path, cases.make_samples(), device="cpu")


# Two processes


def check_on_ranks(rank: int, world: int, folder: Path) -> dict[str, CheckReport]:
    samples, pairs = cases.make_samples((7, 12, 5)), cases.make_samples((7, 12, 5, 9))
    options: dict[str, Any] = {"device": "cpu", "layers": 1}
    reports = {
        "cp": check_model(folder, samples, context=2, **options),
        "dp": check_model(folder, samples, **options),
        "pairs, cp": check_model(folder, loss="reward", samples=pairs, context=2, **options),
        "pairs, dp": check_model(folder, loss="reward", samples=pairs, **options),
    }
    parallelize = importlib.import_module("padfree.sharding.parallelize")
    shard_model = parallelize.shard_model
    alone = [dist.new_group([other]) for other in range(world)][rank]
    mine = DeviceMesh.from_group(alone, "cpu", mesh_dim_names=("fsdp",))

    def over_data_alone(model: Any, mesh: Mesh, **settings: Any) -> None:
        shard_model(model, replace(mesh, fsdp=mine), **settings)

    parallelize.shard_model = over_data_alone
    reports["gradients over data ranks only"] = check_model(folder, samples, context=2, **options)
    return reports


def test_two_processes_pass_and_a_lost_gradient_is_found(folders: Mapping[str, Path]) -> None:
    first, second = run_ranks(2, check_on_ranks, folders["qwen3"])
    assert first == second  # every process returns the report of rank 0
    methods = {"contiguous allgather", "headtail allgather", "balanced ring", "contiguous ulysses"}
    report = first["cp"]
    assert report.passed, report.verdict
    assert {row.check for row in report.rows} == ALL | methods
    assert (report.data_ranks, report.context_ranks) == (1, 2)
    assert first["dp"].passed, first["dp"].verdict
    assert {row.check for row in first["dp"].rows} == ALL
    for layout in ("pairs, cp", "pairs, dp"):
        assert first[layout].passed, first[layout].verdict

    lost = cases.failures(first["gradients over data ranks only"])
    assert {quantity for _, quantity in lost} == {"gradients"}
    assert {check for check, _ in lost} == {"packed", ALONE, REVERSED, PADS[0], SHARED} | methods
