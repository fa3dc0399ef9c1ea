"""A real vLLM server on the CPU, in an environment of its own: `make test-vllm` makes it and runs these tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from padfree.cli.demo.data import problems, train_tokenizer, write_model, write_rows
from padfree.config import Config, config_from_dict
from padfree.rollout.vllm.canary import DRAWN, LIMITS, Canary, Scores, canary_sequences
from padfree.rollout.vllm.http import Server
from padfree.rollout.vllm.launch import Launched, Launcher
from padfree.train.run import train
from tests.rollout.vllm.test_run import lines, servers_of

ROOT = Path(__file__).parents[3]
VENV = Path(os.environ.get("PADFREE_VLLM", "without-vllm"))
PYTHON = VENV / "bin" / "python"
COMMAND = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-model-len", "512"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a start is shorter without a compiler, and needs none
}
PATIENCE = 300.0
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SFT_STEPS, RL_STEPS = 100, 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM; make test-vllm makes one and runs these"),
]


STALE_HEAD = """
import os
from padfree.rollout.vllm import plugin

def register():
    repack = plugin.process_tied
    plugin.process_tied = lambda model: None if os.path.exists(os.environ["STALE_HEAD"]) else repack(model)
"""
"""A plugin for vLLM: while the file is there, our transfer engine leaves the packed copy of a tied head as it was."""


def write_plugin(folder: Path) -> None:
    about = folder / "stale_head-0.dist-info"
    about.mkdir(parents=True)
    (folder / "stale_head.py").write_text(STALE_HEAD)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stale_head\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nstale_head = stale_head:register\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's problems and tokenizer, and two models with tied embeddings whose heads have the size vLLM wants."""
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = train_tokenizer(write_rows(folder / "train.jsonl", problems(2000, seed=0, most_steps=1)))
    for name in ("policy", "served", "other"):
        write_model(folder / name, tokenizer, 128, head=64)
    other: Any = AutoModelForCausalLM.from_pretrained(folder / "other")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    other.save_pretrained(folder / "other")
    asked = problems(256, seed=1, most_steps=1)
    write_rows(folder / "prompts.jsonl", ({"prompt": row["prompt"], "answer": row["answer"]} for row in asked))
    write_plugin(folder / "plugin")
    return folder


def even_digits(response: str, row: Mapping[str, Any]) -> float:
    return sum(letter in "02468" for letter in response) / max(len(response), 1)


def make_config(folder: Path, run: Path, *, steps: int = 3, **sections: Any) -> Config:
    paths = os.pathsep.join([str(ROOT / "src"), str(folder / "plugin")])
    environment = {**ENVIRONMENT, "PYTHONPATH": paths, "STALE_HEAD": str(folder / "stale")}
    values: dict[str, Any] = {
        "model": {"path": str(folder / "policy")},
        "data": {"path": [str(folder / "prompts.jsonl")], "epochs": None},
        "batch": {"samples": 32, "max_tokens": 2048},
        "rollout": {
            "reward": "tests.rollout.vllm.test_server:even_digits",
            "group": 8,
            "max_new_tokens": 12,
            "engine": "vllm",
            "timeout": PATIENCE,
        },
        "loss": {"kind": "clip", "temperature": 0.9},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"export": False},
        "run": {"folder": str(run), "steps": steps, "device": "cpu"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    if not {"servers", "engine"} & sections.get("rollout", {}).keys():
        values["rollout"]["launch"] = {"command": COMMAND, "devices": ["cpu"], "environment": environment}
    return config_from_dict(values)


@pytest.fixture(scope="module")
def launchers(folder: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Launcher]]:
    """One for each fixture below that a chosen test asks for: all start at a time, each takes a while."""
    model = {"path": str(folder / "served")}
    sections: dict[str, dict[str, Any]] = {"server": {}, "second": {}, "adapters": {"lora": {"rank": 4}}}
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    found = {
        name: Launcher(make_config(folder, folder / name, model=model, **changes), ADAPTED if changes else ())
        for name, changes in sections.items()
        if name in wanted
    }
    try:
        for launcher in found.values():
            launcher.start()
        for launcher in found.values():
            launcher.await_ready(PATIENCE)
        yield found
    finally:
        for launcher in found.values():
            launcher.close()


@pytest.fixture(scope="module")
def server(launchers: dict[str, Launcher]) -> Server:
    return launchers["server"].servers[0]


@pytest.fixture(scope="module")
def second(launchers: dict[str, Launcher]) -> Launched:
    return launchers["second"].launched[0]


@pytest.fixture(scope="module")
def adapters(launchers: dict[str, Launcher]) -> Server:
    return launchers["adapters"].servers[0]


@pytest.mark.parametrize("transfer", ["group", "files"])
def test_weights_of_a_model_with_tied_embeddings_arrive(
    transfer: str, server: Server, folder: Path, tmp_path: Path
) -> None:
    train(make_config(folder, tmp_path / "run", rollout={"servers": [server.url], "transfer": transfer}))
    found = lines(tmp_path / "run")
    assert len(found) == 3
    for line in found:
        assert line["sampler/canary_difference"] < 1e-4
        assert line["loss/sampler_difference"] < 1e-4, "at temperature 0.9"
        assert line["sampler/exchange_bytes"] > 1e6
    assert found[1]["sampler/canary_followed"] == pytest.approx(1.0, abs=1e-2)
    assert server.version() == "2"


def test_the_canary_stops_a_run_on_a_server_with_a_stale_head(server: Server, folder: Path, tmp_path: Path) -> None:
    """All weights arrive but the packed copy of the tied head, which is that of other weights."""
    given = {"servers": [server.url]}
    train(make_config(folder, tmp_path / "other", steps=1, model={"path": str(folder / "other")}, rollout=given))
    (folder / "stale").touch()
    line = (
        r"was given policy version 0, but its log-probabilities differ from the trainer's by .*; use padfree's transfer"
    )
    try:
        with pytest.raises(ValueError, match=line) as caught:
            train(make_config(folder, tmp_path / "run", rollout=given))
    finally:
        (folder / "stale").unlink()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path / "run"), "nothing was trained"
    train(make_config(folder, tmp_path / "run", steps=1, rollout=given))  # right once more


def trainer_scores(path: Path, rows: list[tuple[list[int], list[float]]]) -> Scores:
    model: Any = AutoModelForCausalLM.from_pretrained(path).eval()
    found = []
    with torch.no_grad():
        for tokens, _ in rows:
            scores = torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0].double(), -1)
            found.append([scores[place, token].item() for place, token in enumerate(tokens[1:])])
    return Scores.of(found, DRAWN)


def test_the_canary_catches_vllms_own_reload_of_tied_embeddings(server: Server, folder: Path) -> None:
    """It answers that it has reloaded, and computes its head from the old weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    sequences = canary_sequences(tokenizer, vocabulary=len(tokenizer), longest=512)
    model = server.call("GET", "/v1/models")["data"][0]["id"]
    shutil.copy(folder / "other" / "model.safetensors", folder / "served" / "model.safetensors")
    server.call("POST", "/collective_rpc", {"method": "reload_weights"})
    rows = server.score(sequences, drawn=DRAWN, temperature=1.0, model=model, salt="reloaded")
    found = Scores.of([logprobs for _, logprobs in rows], DRAWN)
    with pytest.raises(ValueError, match="its log-probabilities differ from the trainer's by") as caught:
        Canary(LIMITS["float32"]).judge(server.url, found, trainer_scores(folder / "other", rows), 1)
    assert "\n" not in str(caught.value)


def test_only_adapters_travel(adapters: Server, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = {"rank": 4, "alpha": 16.0}
    train(make_config(folder, tmp_path / "run", lora=lora, optimizer={"lr": 2e-2}, rollout={"servers": [adapters.url]}))
    found = lines(tmp_path / "run")
    assert len(found) == 3
    whole = (folder / "policy" / "model.safetensors").stat().st_size
    for line in found:
        assert line["sampler/canary_difference"] < 1e-4
        assert line["loss/sampler_difference"] < 1e-4
        assert line["sampler/exchange_bytes"] < whole / 10
    assert found[2]["sampler/canary_followed"] == pytest.approx(1.0, abs=1e-2)


def test_the_demos_task_is_learned_as_in_the_process(server: Server, folder: Path, tmp_path: Path) -> None:
    """The same steps with responses of either engine: the rewards rise alike."""
    train(
        config_from_dict(
            {
                "model": {"path": str(folder / "policy")},
                "data": {"path": [str(folder / "train.jsonl")], "epochs": None},
                "batch": {"samples": 40, "max_tokens": 8192},
                "optimizer": {"lr": 4e-3, "eps": 1e-6},
                "schedule": {"kind": "linear", "warmup": 5, "final": 0.1},
                "run": {"folder": str(tmp_path / "sft"), "steps": SFT_STEPS, "device": "cpu"},
            }
        )
    )
    means = {}
    for name, engine in (("in_process", {"engine": "in_process"}), ("vllm", {"servers": [server.url]})):
        config = make_config(
            folder,
            tmp_path / name,
            steps=RL_STEPS,
            model={"path": str(tmp_path / "sft" / "model")},
            batch={"samples": 64, "max_tokens": 8192},
            rollout={"reward": "number_after_hashes", "max_new_tokens": 48, **engine},
            loss={"kind": "clip", "temperature": 1.0},
            optimizer={"lr": 1e-3},
        )
        train(config)
        rewards = [line["reward"] for line in lines(tmp_path / name)]
        means[name] = float(np.mean(rewards[:2])), float(np.mean(rewards[-2:]))
    for begin, end in means.values():
        assert end > begin + 0.1
    assert means["vllm"][1] == pytest.approx(means["in_process"][1], abs=0.15)


def test_one_of_two_servers_is_killed(
    server: Server, second: Launched, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PADFREE_VLLM_KILLS says how often; every group is trained on exactly once."""
    urls = [server.url, second.server.url]
    wanted = int(os.environ.get("PADFREE_VLLM_KILLS", "1"))
    killed: list[int] = []
    asked: list[str] = []
    complete = Server.complete

    def recorded(server: Server, *args: Any, **settings: Any) -> Any:
        asked.append(server.url)
        return complete(server, *args, **settings)

    def killer() -> None:
        one, last = second, 0
        while len(killed) < wanted:
            if one.starts > last and one._keeper is not None and one.server.url in asked[-8:]:
                last = one.starts
                asked.clear()
                killed.extend(servers_of(one._keeper.pid))
                os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.002)

    monkeypatch.setattr(Server, "complete", recorded)
    threading.Thread(target=killer, daemon=True).start()
    counted: list[tuple[float, float]] = []

    def on_step(metrics: Mapping[str, Any]) -> None:
        counted.append((metrics["samples"], metrics["groups"]))
        if len(killed) == wanted and metrics["sampler/servers"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # which ends the run after this step

    train(make_config(folder, tmp_path / "run", steps=5000, rollout={"servers": urls}), on_step=on_step)
    assert len(killed) == wanted
    assert set(counted) == {(32, 4)}
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(len(found)))
    assert second.starts >= 1 + wanted
    assert sum(line["sampler/retried"] for line in found) > 0
    assert all(line["sampler/canary_difference"] < 1e-4 for line in found)
    written = [json.loads(line)["batch"] for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert sorted(set(written)) == list(range(1, len(found) + 1))
    assert np.isfinite([line["loss"] for line in found]).all()
