"""A resumed run is compared with its checkpoint: changed data, models and settings are reported or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from padfree.checkpoint.checkpoint_files import hash_of
from padfree.config import config_from_dict
from padfree.config.setting import Resume
from padfree.distributed import Mesh, make_mesh
from padfree.testing.models import build, save_with_tokenizer
from padfree.train.resume import RULES, data_record, flat_settings, rule_of
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import VOCABULARY
from tests.train.trainer_cases import RL, SFT, lines, make_config, make_trainer, samples, save_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("model"))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


# The table


def test_there_is_a_rule_for_every_setting(tmp_path: Path) -> None:
    mixture = {"path": [], "sources": [{"path": "a"}, {"path": "b"}]}
    settings = {*flat_settings(make_config(tmp_path, tmp_path, **SFT)), "run.folder", "data.path"}
    settings |= {*flat_settings(make_config(tmp_path, tmp_path, **SFT, data=mixture))}
    groups = {"groups": [{"match": "tower", "lr_scale": 0.1, "weight_decay": 0.0}]}
    settings |= {*flat_settings(make_config(tmp_path, tmp_path, **{**SFT, "optimizer": groups}))}
    for name in settings:
        assert rule_of(name) in get_args(Resume), name
    assert RULES.keys() - {"data.sources"} <= {name.replace(".0.", ".") for name in settings}


def test_a_table_of_any_names_is_one_setting(tmp_path: Path) -> None:
    """Names inside the table, such as options of sbatch, have no rules of their own."""
    slurm = {"nodes": 2, "processes": 8, "sbatch": {"time": "1:00:00", "qos": "low"}}
    sources = {"path": [], "sources": [{"path": "a", "columns": {"q": "prompt"}}]}
    settings = flat_settings(make_config(tmp_path, tmp_path, **SFT, slurm=slurm, data=sources))
    assert settings["slurm.sbatch"] == slurm["sbatch"]
    assert settings["data.sources.0.columns"] == {"q": "prompt"}
    assert all(rule_of(name) in get_args(Resume) for name in settings)


def test_the_table_in_the_docs_is_that_of_the_fields() -> None:
    page = (ROOT / "docs" / "guides" / "checkpoints.md").read_text()
    for rule in get_args(Resume)[1:]:
        names = ", ".join(f"`{name}`" for name, own in RULES.items() if own == rule)
        assert f"| {rule} | {names} |" in page, f"| {rule} | {names} |"


# What may change


def test_what_may_change_is_said_kept_and_takes_effect(mesh: Mesh, model: Path, tmp_path: Path) -> None:
    make_trainer(make_config(tmp_path, model, **SFT, run={"steps": 2}), mesh).run()
    chosen = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-4, "weight_decay": 0.1, "max_grad_norm": 0.5}
    said: list[str] = []
    other = {"model": {"attention": "reference"}, "batch": {"samples": 4, "max_tokens": 20}, "run": {"steps": 3}}
    config = make_config(tmp_path, model, **other, optimizer=chosen)
    trainer = make_trainer(config, mesh, on_note=said.append)
    groups = trainer.engine.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-4 for group in groups)
    assert trainer.run().step == 3
    assert [line["lr"] for line in lines(tmp_path)] == [5e-3, 5e-3, 1e-3]
    (line,) = said
    assert line.startswith(f"resuming {tmp_path / 'checkpoints' / 'step-00000002'} with changed settings: ")
    assert "optimizer.betas [0.8, 0.9] (was [0.9, 0.95])" in line
    assert "batch.max_tokens 20 (was 16)" in line
    assert "run.steps 3 (was 2)" in line
    (event,) = [event for event in events(tmp_path) if event["kind"] == "resume"]
    assert event["optimizer.weight_decay"] == {"was": 0.0, "is": 0.1}
    assert set(event) == {
        *("time", "kind", "step", "checkpoint"),
        *(f"optimizer.{name}" for name in chosen),
        *("model.attention", "batch.max_tokens", "run.steps"),
    }
    said.clear()
    make_trainer(config, mesh, on_note=said.append)
    assert said == [], "the checkpoint was made with these settings"


# What must stay


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"shuffle": False}},
            r"data\.shuffle: False, but .*step-00000002 was made with True; either set it back,",
        ),
        (
            {"data": {"epochs": 4}},
            r"data\.epochs: 4, but .* was made with 3; either set it back, or give another run\.folder",
        ),
        ({"batch": {"samples": 5}}, r"batch\.samples: 5, but .* was made with 4"),
        ({"batch": {"samples": None, "tokens": 30}}, r"batch\.samples: None, but .* was made with 4"),
        ({"run": {"seed": 1}}, r"run\.seed: 1, but .* was made with 0; .* start over with checkpoint\.resume=false$"),
        ({"lora": {"rank": 2}}, r"lora\.rank: 2, but .* was made with 0"),
        ({"loss": {"kind": "clip"}}, r"loss\.kind: 'clip', but .* was made with 'sft'"),
    ],
)
def test_what_must_stay_is_refused_by_its_name(
    sections: dict[str, Any], message: str, mesh: Mesh, model: Path, tmp_path: Path
) -> None:
    make_trainer(make_config(tmp_path, model, **SFT, run={"steps": 2}), mesh).run()
    values = {**SFT, **sections, "run": {"steps": 3, **sections.get("run", {})}}
    values["batch"] = {**SFT["batch"], **sections.get("batch", {})}
    changed = make_config(tmp_path, model, **values)
    with pytest.raises(ValueError, match=f"^{message}"):
        train(changed)  # before the data, which does not exist, is read
    if "lora" not in sections:
        with pytest.raises(ValueError, match=f"^{message}"):
            make_trainer(changed, mesh)


def test_what_a_rollout_batch_was_begun_with_stays_until_it_is_done(mesh: Mesh, model: Path, tmp_path: Path) -> None:
    for steps in (3, 4):  # 4 updates per batch
        folder = tmp_path / str(steps)
        make_trainer(make_config(folder, model, **RL, run={"steps": steps}), mesh).run()
        warmer = make_config(folder, model, **{**RL, "loss": {**RL["loss"], "temperature": 1.5}}, run={"steps": 5})
        if steps == 3:
            with refused("loss.temperature"):
                make_trainer(warmer, mesh)
        else:
            assert make_trainer(warmer, mesh).run().step == 5


@pytest.mark.parametrize(("field", "value"), [("rms_norm_eps", 1e-3), ("rope_theta", 7.0), ("hidden_act", "relu")])
def test_a_model_that_computes_something_else_is_refused(field: str, value: Any, mesh: Mesh, tmp_path: Path) -> None:
    path = save_config(tmp_path / "model")
    config = make_config(tmp_path / "run", path, **SFT, run={"steps": 1})
    make_trainer(config, mesh).run()
    make_trainer(config, mesh)
    stored = json.loads(path.read_text())
    if field == "rope_theta":
        stored["rope_parameters"]["rope_theta"] = value
    path.write_text(json.dumps({**stored, "use_cache": False, **({} if field == "rope_theta" else {field: value})}))
    with refused("model.path", rf"\S*{field} is .* in the model's config, but .* made with .*"):
        make_trainer(config, mesh)
    path.write_text(json.dumps({**stored, "use_cache": False}) if field != "rope_theta" else json.dumps(stored))
    if field != "rope_theta":
        make_trainer(config, mesh)  # fields that do not affect the computation may change


def test_a_reference_with_other_weights_is_refused(mesh: Mesh, model: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        small = build("llama_tied", seed=seed, hidden_size=32, intermediate_size=32, vocab_size=VOCABULARY)
        small.save_pretrained(tmp_path / str(seed))
    shutil.copytree(tmp_path / "0", tmp_path / "reference")
    reference = {"path": str(tmp_path / "reference")}
    config = make_config(tmp_path / "run", model, **RL, reference=reference, run={"steps": 1})
    make_trainer(config, mesh).run()
    make_trainer(config, mesh)
    shutil.rmtree(tmp_path / "reference")
    shutil.copytree(tmp_path / "1", tmp_path / "reference")
    with refused("reference.path"):
        make_trainer(config, mesh)


def test_a_checkpoint_from_before_the_record_is_said_and_resumed(mesh: Mesh, model: Path, tmp_path: Path) -> None:
    make_trainer(make_config(tmp_path, model, **SFT, run={"steps": 2}), mesh).run()
    path = tmp_path / "checkpoints" / "step-00000002" / "manifest.json"
    content = json.loads(path.read_text())["content"]
    del content["extra"]["made_with"]
    path.write_text(json.dumps({"sha256": hash_of(content), "content": content}))
    said: list[str] = []
    config = make_config(tmp_path, model, **SFT, run={"steps": 3})
    assert make_trainer(config, mesh, on_note=said.append).run().step == 3
    (line,) = said
    assert line.endswith("does not record data, model and settings, so they are not compared with those of this run")
    said.clear()
    make_trainer(config, mesh, on_note=said.append)
    assert said == []


def unlike(rank: int, world: int, folder: str, model: str) -> list[str]:
    mesh = make_mesh("cpu")
    said = []
    for name, sections, data in (
        ("settings", {"optimizer": {"weight_decay": float(rank)}}, None),
        ("data", {}, {"digest": str(rank), "samples": 1, "tokens": 1}),
    ):
        config = make_config(Path(folder) / name, Path(model), **SFT, **sections)
        with pytest.raises(ValueError) as caught:
            make_trainer(config, mesh, data=data)
        said.append(str(caught.value))
    return said


def test_ranks_that_read_or_do_something_else_are_refused(model: Path, tmp_path: Path) -> None:
    """Machines may have different files with the same name; the ranks would train on inconsistent batches."""
    first, second = run_ranks(2, unlike, str(tmp_path), str(model))
    assert first == second
    assert first[0].startswith("run: ranks 0 and 1 have different settings; start every process with the same")
    assert first[1].startswith("data.path: ranks 0 and 1 have different data; ")


# Data


def rows(folder: Path, name: str, sums: Any) -> str:
    text = "".join(json.dumps({"prompt": f"{a}+{b}=", "response": str(c)}) + "\n" for a, b, c in sums)
    (folder / name).write_text(text)
    return str(folder / name)


def test_other_data_is_refused_whatever_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    save_with_tokenizer(tmp_path / "model")
    right = [(a, b, a + b) for a in range(2) for b in range(4)]
    path = rows(tmp_path, "train.jsonl", right)

    def run(steps: int, **data: Any) -> int:
        values = {
            "model": {"path": str(tmp_path / "model")},
            "data": {"path": [path], "epochs": 9, **data},
            "batch": {"samples": 4, "max_tokens": 32},
            "checkpoint": {"every": 1000},  # so that there is a checkpoint at the end
            "run": {"folder": str(tmp_path / "run"), "steps": steps, "device": "cpu"},
        }
        return train(config_from_dict(values)).step

    assert run(1) == 1
    moved = rows(tmp_path, "moved.jsonl", right)
    assert run(2, path=[moved]) == 2, "the same samples in another file"
    assert run(3, path=[moved], max_length=99) == 3
    with refused("data.loss_on"):
        run(4, path=[moved], max_length=99, loss_on="all")
    rows(tmp_path, "moved.jsonl", [(a, b, 9 - c) for a, b, c in right])
    with refused("data.path", r".*moved\.jsonl has other content \(8 samples of 48 tokens\) than .*"):
        run(4, path=[moved], max_length=99)
    assert len(lines(tmp_path / "run")) == 3


def test_the_digest_of_rollouts_is_that_of_all_they_bring() -> None:
    from dataclasses import replace

    found = samples()
    digest = data_record(found)["digest"]
    assert data_record(samples())["digest"] == digest
    for changes in ({"reward": 7.0}, {"group": 9}, {"ref_logprobs": None}, {"loss_mask": ~found[0].mask}):
        assert data_record([replace(found[0], **changes), *found[1:]])["digest"] != digest, changes
    assert data_record([*found[1:], found[0]])["digest"] != digest
    assert data_record([replace(found[0], uid="other", source="moved"), *found[1:]])["digest"] == digest
