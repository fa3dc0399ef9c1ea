"""Models that receive the same token ids must have the same tokens for them."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from padfree.cli.main import main
from padfree.config import Config, load_config
from padfree.config.hub import GIVEN_TEXT, named_models
from padfree.testing.models import save_with_tokenizer
from padfree.train.preflight import preflight
from padfree.train.vocabulary import compare_vocabularies
from tests.refused import refused

RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def changed(folder: Path, to: Path, change: Any) -> str:
    """A copy of a model whose tokenizer has another vocabulary."""
    shutil.copytree(folder, to)
    path = to / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content["model"]["vocab"])
    path.write_text(json.dumps(content))
    return str(to)


def swap(vocabulary: dict[str, int]) -> None:
    vocabulary["7"], vocabulary["+"] = vocabulary["+"], vocabulary["7"]


def drop(vocabulary: dict[str, int]) -> None:
    del vocabulary["+"]


def rename(vocabulary: dict[str, int]) -> None:
    vocabulary["é"] = vocabulary.pop("+")


def add(vocabulary: dict[str, int]) -> None:
    vocabulary["é"] = len(vocabulary)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parent = tmp_path_factory.mktemp("models")
    own = save_with_tokenizer(parent / "own", vocab_size=64, tie_word_embeddings=False)
    found = {"own": str(own)}
    for change in (swap, drop, rename, add):
        found[change.__name__] = changed(own, parent / change.__name__, change)
    shutil.copytree(own, parent / "bare")
    for path in (parent / "bare").glob("tokenizer*"):
        path.unlink()
    return {**found, "bare": str(parent / "bare")}


def settings_with_text(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Every setting whose value is free text, or a list or table of texts."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint, name = hints[entry.name], f"{prefix}{entry.name}"
        if is_dataclass(hint):
            yield from settings_with_text(hint, f"{name}.")  # type: ignore[arg-type]
        elif _takes_text(hint):
            yield name


def _takes_text(hint: Any) -> bool:
    if hint is str:
        return True
    if get_origin(hint) in (Union, types.UnionType, tuple, dict):
        return any(_takes_text(argument) for argument in get_args(hint))
    return False


ON_TEXT = ["batch.samples=4", "batch.max_tokens=64"]
RUNS: dict[str, tuple[str, list[str]]] = {
    # a setting, and a run that uses it; MODEL is replaced by the other model
    "model.tokenizer": ("sft", ["model.tokenizer=MODEL"]),
    "reference.path": ("rl", ["reference.path=MODEL", "loss.kl_coefficient=0.1"]),
    "teacher.path": ("distill", ["teacher.path=MODEL"]),
    "critic.path": ("rl", ["critic.path=MODEL", "loss.advantage=gae"]),
}
NO_MODELS = """
    model.attention model.freeze parallel.checkpointing data.image_folder lora.targets
    rollout.environment rollout.agent rollout.engine rollout.servers
    rollout.launch.command rollout.launch.devices rollout.launch.environment rollout.transfer_folder data.path
    data.subset data.split data.system data.prompt_template
    data.columns data.chat_template batch.cost run.folder loss.kind loss.corrections
    slurm.python slurm.sbatch slurm.setup
    checkpoint.best track.wandb track.trackio track.mlflow eval.path eval.split
"""
"""Settings of free text that do not name a model. `rollout.engine` and servers get the weights and ids of the run."""


def test_every_setting_that_names_a_model_is_known() -> None:
    """A new setting of free text must be compared as a model, or be listed in NO_MODELS."""
    values = {"model.path": "m", "model.tokenizer": "t", "reference.path": "r", "loss.kl_coefficient": "1"}
    assert set(RUNS) | {"model.path"} | set(GIVEN_TEXT) | set(NO_MODELS.split()) == set(settings_with_text(Config))
    config = load_config(RECIPES / "rl.toml", [f"{name}={value}" for name, value in values.items()])
    assert {"model.path", "model.tokenizer", "reference.path"} <= named_models(config).keys()


def config_of(setting: str, own: str, other: str, tmp_path: Path) -> Config:
    command, changes = RUNS[setting]
    path = tmp_path / "d.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(8)]
    if command == "rl":
        rows = [{"tokens": [3, 4, 5], "response_length": 2, "reward": n % 2, "group": n // 4} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"model.path={own}", "model.dtype=float32", f"data.path={path}", f"run.folder={tmp_path / 'run'}"]
    overrides += [*ON_TEXT, "run.device=cpu", *(change.replace("MODEL", other) for change in changes)]
    return load_config(RECIPES / f"{command}.toml", overrides)


@pytest.mark.parametrize("setting", RUNS)
@pytest.mark.parametrize("other", ["swap", "rename"])
def test_another_vocabulary_of_the_same_size_is_refused(
    setting: str, other: str, folders: dict[str, str], tmp_path: Path
) -> None:
    config = config_of(setting, folders["own"], folders[other], tmp_path)
    assert named_models(config)[setting] == folders[other]
    with pytest.raises(ValueError, match=r"has other token ids than") as caught:
        preflight(config, processes=1, device_type="cpu", dry=True)
    line = str(caught.value)
    assert line.startswith(f"{setting}: {folders[other]} has other token ids than ")
    assert folders["own"] in line
    turned = setting == "model.tokenizer"  # the run uses the other tokenizer
    swapped, renamed = ("'+' is 9, but", "'é' is 12, but") if turned else ("'7' is 12 in", "'+' is unknown in")
    assert f"{swapped if other == 'swap' else renamed} {'for the model' if turned else 'that model'}" in line
    assert "\n" not in line


@pytest.mark.parametrize("setting", ["reference.path", "teacher.path", "critic.path"])
def test_a_model_may_know_more_tokens_but_not_fewer(setting: str, folders: dict[str, str], tmp_path: Path) -> None:
    more = config_of(setting, folders["own"], folders["add"], tmp_path)
    assert not [note for note in preflight(more, processes=1, device_type="cpu", dry=True).notes if "token id" in note]
    fewer = config_of(setting, folders["own"], folders["drop"], tmp_path)
    with pytest.raises(ValueError, match=r"'\+' is unknown in that model, .* in this run; .* or set model.tokenizer="):
        preflight(fewer, processes=1, device_type="cpu", dry=True)


def test_a_tokenizer_with_new_tokens_for_the_trained_model_is_noted(folders: dict[str, str], tmp_path: Path) -> None:
    config = config_of("model.tokenizer", folders["own"], folders["add"], tmp_path)
    notes = preflight(config, processes=1, device_type="cpu", dry=True).notes
    (note,) = [note for note in notes if note.startswith("model.tokenizer")]
    assert "has 1 tokens that the tokenizer of" in note
    assert "'é'" in note


@pytest.mark.parametrize("setting", ["reference.path", "teacher.path", "critic.path"])
def test_what_is_assumed_of_a_model_without_a_tokenizer_is_said(
    setting: str, folders: dict[str, str], tmp_path: Path
) -> None:
    config = config_of(setting, folders["own"], folders["bare"], tmp_path)
    notes = [note for note in preflight(config, processes=1, device_type="cpu", dry=True).notes if "tokenizer" in note]
    assert notes == [
        f"{setting}: {folders['bare']} has no tokenizer; assuming that token ids have the same meaning in "
        f"{folders['bare']} and {folders['own']}"
    ]


def test_an_evaluation_compares_too(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("model.tokenizer", folders["own"], folders["swap"], tmp_path)
    overrides = [
        f"model.path={folders['own']}",
        f"model.tokenizer={folders['swap']}",
        f"eval.path={config.data.path[0]}",
    ]
    overrides += ["model.dtype=float32", "run.device=cpu", *ON_TEXT]
    assert main(["eval", str(RECIPES / "sft.toml"), *overrides]) == 1
    assert "has other token ids than" in capsys.readouterr().err


def test_the_first_token_that_differs_is_the_one_with_the_lowest_id() -> None:
    own = {"a": 0, "b": 1, "c": 2}
    assert compare_vocabularies(own, {**own, "d": 3}, "teacher.path", "T", "M") is None
    with refused("teacher.path"):
        compare_vocabularies(own, {"a": 0, "b": 2, "c": 1}, "teacher.path", "T", "M")
