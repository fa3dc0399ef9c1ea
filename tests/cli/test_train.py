"""The training commands: every recipe, at a tiny size, from the command line to an exported model."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from padfree.cli.main import main
from padfree.cli.progress import Bars, progress
from padfree.config import config_from_dict, load_config
from padfree.record.metric_table import unknown_metrics
from padfree.testing.models import save_with_tokenizer

RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What makes each recipe small enough for here."""
    folder = tmp_path_factory.mktemp("data")
    model = save_with_tokenizer(tmp_path_factory.mktemp("model"))
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]
    for name in ("sft", "distill"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = [
        {"prompt": row["prompt"], "response": answer, "reward": float(answer == row["response"]), "group": group}
        for group, row in enumerate(rows)
        for answer in (row["response"], "1", "22")
    ]
    (folder / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    questions = [{"question": row["prompt"], "answer": f"#### {row['response']}"} for row in rows]
    for name in ("rl-local", "rl-ppo", "rl-environment", "rl-experts"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "9"} for row in rows]
    for name in ("dpo", "reward"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    labelled = [{"prompt": row["prompt"], "completion": row["response"], "label": True} for row in rows]
    (folder / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    small = [f"model.path={model}", "model.dtype=float32", "batch.samples=6", "batch.max_tokens=64", "run.steps=2"]
    teacher = save_with_tokenizer(tmp_path_factory.mktemp("teacher"), hidden_size=48)
    experts = save_with_tokenizer(tmp_path_factory.mktemp("experts"), architecture="qwen3_moe")
    short = {
        "rl-local": ["rollout.samples_per_prompt=3", "rollout.max_new_tokens=4"],
        "rl-ppo": ["rollout.max_new_tokens=4", "critic.warmup=1"],
        "rl-environment": ["rollout.samples_per_prompt=3", "rollout.max_new_tokens=8"],
        "rl-experts": [f"model.path={experts}", "rollout.samples_per_prompt=3", "rollout.max_new_tokens=4"],
        "distill": [f"teacher.path={teacher}"],
    }
    return {
        name: [
            *small,
            *short.get(name, []),
            f"data.path={json.dumps([str(folder / f'{name}.jsonl')])}",
            "run.device=cpu",
        ]
        for name in ("sft", *short, "rl", "dpo", "kto", "reward")
    }


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a Hub id that is not there, without asking


def test_a_missing_tracker_is_said_before_anything_is_loaded(
    overrides: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("padfree.record.trackers.find_spec", lambda name: None)
    changes = ["track.wandb=mine", "model.attention=fast"]
    assert main(["sft", str(RECIPES / "sft.toml"), *overrides["sft"], *changes]) == 1
    assert "track.wandb: 'mine', but the package wandb is missing; install it with" in capsys.readouterr().err


NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
NEEDS_SERVERS = ["rl-vllm"]  # run in tests/rollout/vllm


def test_every_recipe_is_tried_and_named_after_its_command(overrides: dict[str, list[str]]) -> None:
    assert sorted([*overrides, *NEEDS_SERVERS]) == NAMES
    for name in NAMES:
        assert name.partition("-")[0] == load_config(RECIPES / f"{name}.toml").loss.command


def test_every_recipe_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "runs.md").read_text()
    for name in NAMES:
        assert f"| `{name}` |" in page


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_SERVERS])
def test_a_recipe_is_planned_runs_and_exports(
    name: str, overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = [name.partition("-")[0], str(RECIPES / f"{name}.toml"), *overrides[name], f"run.folder={run}"]
    assert main([*arguments, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert "6 samples" in dry[dry.index("\nfirst step") :]
    assert ("\n  reference " in dry) == (name in ("distill", "dpo", "kto")), "the memory of a model besides"
    assert main(["plan", *arguments[1:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["longest_responses"] == name.startswith("rl-")
    assert plan["samples_per_step"] <= 6
    assert not run.exists()
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "step 1/2  loss" in shown
    assert "done after 2 steps" in shown
    steps = [line for line in shown.splitlines() if line.startswith("step ")]
    assert len(steps) == 2
    assert ["  reward " in line for line in steps] == [name.startswith("rl")] * 2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [0, 1]
    assert unknown_metrics({each for line in metrics for each in line}) == [], "add it to padfree.record.metric_table"
    AutoModelForCausalLM.from_pretrained(run / "model")
    assert (run / "critic" / "model.safetensors").exists() == (name == "rl-ppo")
    # Once more: the run is finished, and says so without a change.
    before = contents(run)
    assert main(arguments) == 0
    assert f"{run} is finished: all 2 steps were done before, and nothing was changed" in capsys.readouterr().out
    assert contents(run) == before


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, to the byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_with_evaluations_appends_nothing(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    data = next(word for word in overrides["sft"] if word.startswith("data.path="))
    line = ["sft", str(RECIPES / "sft.toml"), *overrides["sft"], f"run.folder={run}", data.replace("data.", "eval.", 1)]
    by_data = [*line, "run.steps=none", "data.epochs=1"]  # ends with the data: 16 samples, 6 a step
    assert main(by_data) == 0
    assert "step 3/3  loss" in capsys.readouterr().out
    before = contents(run)
    assert main([*by_data, "optimizer.lr=1e-3"]) == 0, "there is nothing left that it could steer"
    assert "is finished: all 3 steps" in capsys.readouterr().out
    assert contents(run) == before
    evaluations = [json.loads(each) for each in (run / "evaluation.jsonl").read_text().splitlines()]
    assert [each["step"] for each in evaluations] == [0, 3]
    assert unknown_metrics(evaluations[0]) == []
    # An export that is missing is made, without a further step or a second evaluation.
    shutil.rmtree(run / "model")
    assert main(by_data) == 0
    assert "done after 3 steps" in capsys.readouterr().out
    assert (run / "model" / "model.safetensors").read_bytes() == before["model/model.safetensors"]
    assert (run / "evaluation.jsonl").read_bytes() == before["evaluation.jsonl"]
    # Other held-out settings are another evaluation.
    assert main([*by_data, "eval.samples=2"]) == 0
    assert len((run / "evaluation.jsonl").read_text().splitlines()) == 3


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    line = ["rl", str(RECIPES / "rl.toml"), *overrides["rl"], f"run.folder={run}", "--dry-run"]
    assert main(line) == 0
    short = capsys.readouterr().out
    begins = [each.partition(":")[0] for each in short.splitlines() if not each.startswith(" ")]
    assert [each for each in begins if each not in ("auto", "note")] == [
        *("model", "data", "layout", "memory", "disk", "first step", "all settings")
    ], "what matters first"
    assert main([*line, "--all"]) == 0
    shown = capsys.readouterr().out
    settings, _, rest = shown.partition("\nmodel: ")
    asked = load_config(RECIPES / "rl.toml", [*overrides["rl"], f"run.folder={run}"])
    assert config_from_dict(tomllib.loads(settings)) == asked, "the settings are shown as a recipe"
    assert short.startswith(f"model: {rest}"[:200])
    rest = rest.partition("\nlayout: ")[2]
    assert rest.startswith("1 processes = 1 replicate x 1 shard x 1 context\nauto: parallel.compile=none: ")
    assert "\nauto: parallel.checkpointing=none: needs about " in rest
    assert "\nauto: checkpoint.asynchronous=false: the model is in host memory" in rest
    assert "\nmemory: about " in rest
    assert "first step: 6 samples, " in rest
    assert not run.exists()


def test_a_dry_run_of_hosts_shows_who_is_where_and_what_they_send(
    overrides: dict[str, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    changes = ["parallel.replicate=2", "parallel.context=2"]
    assert main(["sft", str(RECIPES / "sft.toml"), *overrides["sft"], *changes, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "\nhosts: 2 with 4 processes each; host 0: ranks 0 to 3, host 1: ranks 4 to 7\n" in shown
    assert "\n  weights are gathered inside a host, gradients of the 2 replicas are reduced over 2 hosts\n" in shown
    assert "\n  the 2 context ranks of a pack are inside a host\n" in shown
    assert re.search(r"\n  all-gather of weights +[0-9.]+ [KM]iB +0 B\n", shown)
    assert re.search(r"\n  all-reduce between replicas +0 B +[0-9.]+ [KM]iB\n", shown)
    assert re.search(r"\n  context, allgather +[0-9.]+ [KM]iB +0 B\n", shown)


def test_a_dry_run_shows_how_wide_rows_are(
    overrides: dict[str, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    changes = ["parallel.context=auto", "batch.max_tokens=3"]
    assert main(["sft", str(RECIPES / "sft.toml"), *overrides["sft"], *changes, "--dry-run", "--all"]) == 0
    shown = capsys.readouterr().out
    assert 'context = "auto"' in shown
    assert "\nlayout: 4 processes = 1 replicate x 4 shard x 1 to 4 context\n" in shown
    assert re.search(r"\n  packs: .*\d+ on 2 ranks", shown)
    assert "\n  context, allgather" in shown


def test_a_dry_run_of_rollouts_shows_the_sampler_and_the_longest_responses(
    overrides: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["lora.rank=2", "parallel.offload=true", "rollout.max_new_tokens=20", "run.device=cuda"]
    assert main(["rl", str(RECIPES / "rl-local.toml"), *overrides["rl-local"], *changes, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "sampler" in shown
    assert "cache" in shown
    assert "of CPU memory" in shown
    assert "data: 16 prompts" in shown
    first = shown[shown.index("first step, if every response is as long as it may be: 6 samples") :]
    assert int(first.split(" tokens")[0].rsplit(" ", 1)[1]) >= 6 * 21


def test_bad_rows_are_skipped_when_the_flag_says_so(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+2="}\n{"prompt": "2+2=", "response": "4"}\n')
    arguments = ["sft", str(RECIPES / "sft.toml"), *overrides["sft"], f"data.path={file}", "--dry-run"]
    assert main(arguments) == 1
    assert "rows.jsonl line 2: 'response' is missing" in capsys.readouterr().err
    assert main([*arguments, "--on-bad-row", "skip"]) == 0
    assert "data: 2 samples; 1 rows are skipped or dropped" in capsys.readouterr().out


METRICS = {"step": 4, "loss": 1.5, "gradient_norm": 0.5, "lr": 1e-5, "tokens_per_second": 1234.5}


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(10, shown=True) as shown:
        for done in range(0, 101, 5):
            shown.tokenising(done, 100)
        shown.step({**METRICS, "reward": 0.25, "mfu": 0.5})
        shown.sampling(3, 12)
        shown.step({**METRICS, "seconds/sampling": 12.34})
        shown.step({**METRICS, "sampler/canary_difference": 5.34e-7})
    *lines, sampled, served = [line.partition("  0:00 elapsed")[0] for line in capsys.readouterr().out.splitlines()]
    assert served == "step 5  loss 1.5000  norm 0.500  lr 1.00e-05  canary 5.3e-07  1,234 tokens/s"
    assert sampled == "step 5  loss 1.5000  norm 0.500  lr 1.00e-05  sampling 12.3 s  1,234 tokens/s"
    assert lines[:-1] == [f"tokenising {tenth} %" for tenth in range(10, 101, 10)]
    assert lines[-1] == "step 5  loss 1.5000  norm 0.500  lr 1.00e-05  reward 0.250  1,234 tokens/s  mfu 50.0%"
    with progress(10, shown=False) as shown:
        shown.tokenising(100, 100)
        shown.step(METRICS)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("steps", "count"), [(10, "5/10"), (None, "5")])
def test_progress_bars_on_a_terminal(
    steps: int | None, count: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with progress(steps, shown=True) as shown:
        assert isinstance(shown, Bars)
        shown.tokenising(50, 100)
        shown.step(METRICS)
        shown.sampling(96, 256)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"tokenising 50% ", text)
    assert re.search(r"responses +96/256 ", text)
    assert re.search(rf"step +{count} .*loss 1.5000  norm 0.500  lr 1.00e-05  1,234 tokens/s", text)


def test_groups_without_a_signal_are_said_at_the_start_and_in_every_step(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rollouts(rewards: list[list[float]]) -> list[str]:
        rows = [
            {"prompt": "1+1=", "response": str(number), "reward": reward, "group": number}
            for number, group in enumerate(rewards)
            for reward in group
        ]
        (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes = [f"data.path={json.dumps([str(tmp_path / 'rollouts.jsonl')])}", f"run.folder={tmp_path / 'run'}"]
        return ["rl", str(RECIPES / "rl.toml"), *overrides["rl"], *changes, "run.steps=1"]

    for refused in ([[1.0], [0.0]], [[1.0, 1.0], [0.0, 0.0]]):
        assert main(rollouts(refused)) == 1
        assert "data.path: " in capsys.readouterr().err
        assert main([*rollouts(refused), "--dry-run"]) == 1
        (cure,) = re.findall(r"loss\.advantage=[a-z+]+", capsys.readouterr().err)
        assert main([*rollouts(refused), cure, f"run.folder={tmp_path / str(len(refused[0]))}"]) == 0
    assert main(rollouts([[1.0, 0.0], [1.0, 1.0], [0.0]])) == 0
    printed = capsys.readouterr().out
    assert (
        "data.path: 2 of 3 groups without a learning signal (1 of one sample, 1 with equal rewards) do not" in printed
    )
    assert "no signal 2/3" in printed
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["groups_without_signal"] == 2
    assert main(rollouts([[1.0, 0.0], [1.0, 0.0], [0.0]])) == 1, "other rewards, the same tokens"
    assert capsys.readouterr().err.startswith("padfree rl: data.path: ")


def dtypes_of(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}


def test_an_export_has_the_dtype_of_the_base_model_and_a_resume_says_what_has_changed(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = save_with_tokenizer(tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(half).bfloat16().save_pretrained(half)
    line = ["sft", str(RECIPES / "sft.toml"), *overrides["sft"], f"model.path={half}", f"run.folder={tmp_path / 'run'}"]
    assert main(line) == 0
    assert "resuming" not in capsys.readouterr().out
    assert dtypes_of(tmp_path / "run" / "model") == {torch.bfloat16}
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert main([*line, "checkpoint.export_dtype=float32", "run.steps=3"]) == 0
    assert dtypes_of(tmp_path / "run" / "model") == {torch.float32}
    printed = capsys.readouterr().out
    assert 'with changed settings: run.steps 3 (was 2), checkpoint.export_dtype "float32" (was "base")\n' in printed


def test_random_weights_are_trained_where_they_are_asked_for(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_with_tokenizer(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    line = [
        "sft",
        str(RECIPES / "sft.toml"),
        *overrides["sft"],
        f"model.path={folder}",
        f"run.folder={tmp_path / 'run'}",
    ]
    assert main(line) == 1
    message = capsys.readouterr().err
    assert f"padfree sft: model.path: {folder} has no weights" in message
    assert not (tmp_path / "cache").exists(), "said before the data is tokenised"
    (cure,) = re.findall(r"model\.init=\w+", message)
    assert main([*line, cure]) == 0
    assert not (tmp_path / "run" / "model" / "model.safetensors.index.json").exists()
    assert load_file(tmp_path / "run" / "model" / "model.safetensors")


def test_the_cures_of_a_refused_resume_work(
    overrides: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["sft", str(RECIPES / "sft.toml"), *overrides["sft"], f"run.folder={tmp_path / 'run'}"]
    assert main(line) == 0
    assert main([*line, "run.seed=1"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("padfree sft: run.seed: 1, but ")
    (cure,) = re.findall(r"checkpoint\.resume=\w+", message)
    assert main([*line, "run.seed=1", cure]) == 0
    assert [json.loads(row)["step"] for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [0, 1]
    assert main([*line, "run.seed=1", "run.steps=3"]) == 0, "the newest checkpoint is that of the new run"
    assert main([*line, "run.steps=3"]) == 1
    assert main([*line, "run.steps=3", f"run.folder={tmp_path / 'another'}"]) == 0
