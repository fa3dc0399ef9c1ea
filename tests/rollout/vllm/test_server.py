"""A real vLLM server on the CPU, in an environment of its own: `make test-vllm` makes it and runs these tests."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from padfree.cli.demo.data import problems, train_tokenizer, write_rows
from padfree.config import Config, config_from_dict
from padfree.rollout.vllm import sampler as sampler_module
from padfree.rollout.vllm.canary import DRAWN, LIMITS, Canary, Scores, canary_sequences
from padfree.rollout.vllm.http import Server, ServerLostError
from padfree.rollout.vllm.launch import KEEPER, server_command, server_environment
from padfree.train.run import train
from tests.rollout.vllm.test_keeper import wait_until
from tests.rollout.vllm.test_run import RecordedLauncher, lines, servers_of

ROOT = Path(__file__).parents[3]
VENV = Path(os.environ.get("PADFREE_VLLM", ROOT / ".venv-vllm"))
PYTHON = VENV / "bin" / "python"
COMMAND = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-model-len", "512"]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT / "src"),
}
PATIENCE = 600.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM in {VENV}; make test-vllm sets it up"),
]


def write_model(folder: Path, tokenizer: Any, *, tied: bool, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a tokenizer and prompts."""
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = train_tokenizer(list(problems(1000, seed=0)))
    for seed in (0, 1):
        write_model(folder / f"tied{seed}", tokenizer, tied=True, seed=seed)
    asked = ({"prompt": row["prompt"]} for row in problems(64, seed=1, most_steps=2))
    write_rows(folder / "prompts.jsonl", asked)
    return folder


@contextmanager
def started(config: Config, log: Path, port: int) -> Iterator[Server]:
    command = server_command(config, name="policy", port=port)
    server = Server(f"http://127.0.0.1:{port}", PATIENCE)
    with log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, str(KEEPER), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=server_environment(config, "cpu"),
        )

    def answers() -> bool:
        assert keeper.poll() is None, log.read_text()[-3000:]
        try:
            server.call("GET", "/health", timeout=5.0)
        except ServerLostError:
            return False
        return True

    try:
        wait_until(answers, PATIENCE)
        yield server
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait(60)


def even_digits(response: str, row: Mapping[str, Any]) -> float:
    return sum(letter in "02468" for letter in response) / max(len(response), 1)


def make_config(folder: Path, run: Path, *, model: Path | None = None, steps: int = 3, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(model or folder / "tied0")},
        "data": {"path": [str(folder / "prompts.jsonl")], "epochs": None},
        "batch": {"samples": 32, "max_tokens": 2048},
        "rollout": {
            "reward": "tests.rollout.vllm.test_server:even_digits",
            "group": 8,
            "max_new_tokens": 12,
            "engine": "vllm",
            "launch": {"command": COMMAND, "devices": ["cpu"], "environment": ENVIRONMENT},
        },
        "loss": {"kind": "clip", "temperature": 0.9},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"export": False},
        "run": {"folder": str(run), "steps": steps, "device": "cpu"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """One server for several tests, of a copy of the tied model."""
    shutil.copytree(folder / "tied0", folder / "served")
    config = make_config(folder, folder / "unused", model=folder / "served")
    with started(config, folder / "server.log", 18731) as server:
        yield server


@pytest.mark.parametrize("transfer", ["group", "files"])
def test_a_run_on_a_model_with_tied_embeddings(transfer: str, server: Server, folder: Path, tmp_path: Path) -> None:
    rollout = {"launch": {}, "servers": [server.url], "transfer": transfer}
    config = make_config(folder, tmp_path / "run", rollout={**_rollout(folder), **rollout})
    train(config)
    found = lines(tmp_path / "run")
    assert len(found) == 3
    for line in found:
        assert line["sampler/canary_difference"] < 1e-4
        assert line["loss/sampler_difference"] < 1e-4, "at temperature 0.9"
        assert line["sampler/exchange_bytes"] > 1e6
    assert found[1]["sampler/canary_followed"] == pytest.approx(1.0, abs=1e-2)
    assert server.version() == "2"


def _rollout(folder: Path) -> dict[str, Any]:
    found = make_config(folder, folder / "unused").to_dict()["rollout"]
    assert isinstance(found, dict)
    return {name: found[name] for name in ("reward", "group", "max_new_tokens", "engine")}


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
    tokenizer = AutoTokenizer.from_pretrained(folder / "tied0")
    sequences = canary_sequences(tokenizer, vocabulary=len(tokenizer), longest=512)
    shutil.copy(folder / "tied1" / "model.safetensors", folder / "served" / "model.safetensors")
    server.call("POST", "/collective_rpc", {"method": "reload_weights"})
    rows = server.score(sequences, drawn=DRAWN, temperature=1.0, model="policy", salt="reloaded")
    found = Scores.of([logprobs for _, logprobs in rows], DRAWN)
    with pytest.raises(ValueError, match="its log-probabilities differ from the trainer's by") as caught:
        Canary(LIMITS["float32"]).judge(server.url, found, trainer_scores(folder / "tied1", rows), 1)
    assert "\n" not in str(caught.value)


def test_only_adapters_travel(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = make_config(folder, tmp_path / "run", lora={"rank": 4, "alpha": 16.0}, optimizer={"lr": 2e-2})
    train(config)
    found = lines(tmp_path / "run")
    assert len(found) == 3
    whole = (folder / "tied0" / "model.safetensors").stat().st_size
    for line in found:
        assert line["sampler/canary_difference"] < 1e-4
        assert line["sampler/exchange_bytes"] < whole / 10
    assert found[2]["sampler/canary_followed"] == pytest.approx(1.0, abs=1e-2)


def test_one_of_two_servers_is_killed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PADFREE_VLLM_KILLS says how often; every group is trained on exactly once."""
    wanted = int(os.environ.get("PADFREE_VLLM_KILLS", "1"))
    killed: list[int] = []
    asked: list[str] = []
    complete = Server.complete

    def recorded(server: Server, *args: Any, **settings: Any) -> Any:
        asked.append(server.url)
        return complete(server, *args, **settings)

    def killer() -> None:
        wait_until(lambda: RecordedLauncher.present is not None, PATIENCE)
        launcher = RecordedLauncher.present
        assert launcher is not None
        one, last = launcher.launched[1], 0
        while len(killed) < wanted:
            if one.starts > last and one._keeper is not None and one.server.url in asked[-8:]:
                last = one.starts
                asked.clear()
                killed.extend(servers_of(one._keeper.pid))
                os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.002)

    monkeypatch.setattr(sampler_module, "Launcher", RecordedLauncher)
    monkeypatch.setattr(Server, "complete", recorded)
    RecordedLauncher.present = None
    config = make_config(folder, tmp_path / "run", steps=2000)
    launch = dataclasses.replace(config.rollout.launch, devices=("cpu", "cpu"))
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, launch=launch))
    threading.Thread(target=killer, daemon=True).start()
    counted: list[tuple[float, float]] = []

    def on_step(metrics: Mapping[str, Any]) -> None:
        counted.append((metrics["samples"], metrics["groups"]))
        if len(killed) == wanted and metrics["sampler/servers"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)  # which ends the run after this step

    train(config, on_step=on_step)
    assert len(killed) == wanted
    assert set(counted) == {(32, 4)}
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(len(found)))
    assert found[-1]["sampler/restarts"] >= wanted
    assert sum(line["sampler/retried"] for line in found) > 0
    assert all(line["sampler/canary_difference"] < 1e-4 for line in found)
    uids = [json.loads(line)["batch"] for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert sorted(set(uids)) == list(range(1, len(found) + 1))
    assert np.isfinite([line["loss"] for line in found]).all()
