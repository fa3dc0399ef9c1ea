"""`padfree doctor` against a real vLLM server on the CPU: `make test-vllm` installs it and runs these tests.

One server, with processed log-probabilities, serves all cases. In each case the model folder differs from what the
server serves, so that the server is the one with the fault: older weights, another RoPE base, no adapter. Faults of
sampling are in rollouts that the server wrote with other sampling settings. Seeds change the folders and the rollouts.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from padfree.sample import Sample
from padfree.testing.tokenizers import TEMPLATES
from padfree.tools.doctor import DoctorReport, examine_rollouts, examine_server, open_patient
from padfree.tools.talk.find_model import find_model
from tests.rollout.vllm.vllm_cases import unused_url
from tests.tools.doctor.fault_cases import save, tokenizer_of

VENV = Path(os.environ.get("PADFREE_VLLM", "without-vllm"))
PYTHON = VENV / "bin" / "python"
PATIENCE = 300.0
SEEDS = int(os.environ.get("PADFREE_SEEDS", "1"))  # repetitions of each fault, with other weights and rollouts
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM; make test-vllm makes one and runs these"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("vllm") / "served", "llama_tied", 0, attention_bias=False, **SIZES)


@pytest.fixture(scope="module")
def server(served: Path) -> Iterator[str]:
    url = unused_url()
    port = url.rpartition(":")[2]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(served)]
    command += ["--served-model-name", "served", "--port", port, "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "16384"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    log = served.parent / "vllm.log"
    with log.open("wb") as output:
        environment = {**os.environ, **ENVIRONMENT}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        end = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
                    if reply.status == 200:
                        break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def changed(
    served: Path, folder: Path, seed: int, *, parts: str | None = None, head: bool = False, **config: Any
) -> Path:
    """A copy of the served model: other tensors (those with `parts` in their name), a head of its own, other config."""
    make: Any = AutoModelForCausalLM
    model = make.from_pretrained(served, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if parts is not None and parts in name:
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
        if head:
            drawn = torch.randn(model.lm_head.weight.shape, generator=generator) * SIZES["hidden_size"] ** -0.5
            model.lm_head.weight = torch.nn.Parameter(drawn)
            config["tie_word_embeddings"] = False
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    tokenizer_of(served).save_pretrained(folder)
    return folder


def adapter(served: Path, folder: Path, seed: int) -> Path:
    from peft import LoraConfig, get_peft_model

    make: Any = AutoModelForCausalLM
    torch.manual_seed(seed)
    base = make.from_pretrained(served, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(served)
    adapted.save_pretrained(folder)
    return folder


def template(served: Path, folder: Path, seed: int) -> Path:
    changed(served, folder, seed)
    tokenizer = tokenizer_of(folder)
    tokenizer.chat_template = TEMPLATES["no_system"]
    tokenizer.save_pretrained(folder)
    return folder


def twice(served: Path, folder: Path, seed: int) -> Path:
    """The tokenizer of the model adds nothing, that of the server adds a bos token."""
    changed(served, folder, seed)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


def merges(served: Path, folder: Path, seed: int) -> Path:
    """Another tokenizer with the same vocabulary."""
    changed(served, folder, seed)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["merges"] = state["model"]["merges"][: 20 + seed]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


Make = Callable[[Path, Path, int], Path]


def with_config(**config: Any) -> Make:
    return lambda served, folder, seed: changed(served, folder, seed, **config)


def with_tensors(parts: str) -> Make:
    return lambda served, folder, seed: changed(served, folder, seed, parts=parts)


def rope_base(served: Path, folder: Path, seed: int) -> Path:
    return changed(served, folder, seed, rope_parameters={"rope_type": "default", "rope_theta": 2e4 * (1 + seed)})


FOLDERS: dict[str, tuple[str, Make]] = {
    "stale weights": ("stale weights", with_tensors("")),
    "stale layer": ("stale weights", with_tensors("layers.1.")),
    "stale norms": ("stale weights", with_tensors("norm")),
    "tied head": ("tied head", lambda served, folder, seed: changed(served, folder, seed, head=True)),
    "RoPE base": ("RoPE base", rope_base),
    "RoPE scaling": ("RoPE scaling", with_config(rope_parameters=YARN)),
    "norm epsilon": ("norm epsilon", with_config(rms_norm_eps=1e-2)),
    "adapter": ("adapter not loaded", adapter),
    "chat template": ("chat template", template),
    "special tokens": ("special tokens added", twice),
    "tokenizer": ("tokenizer", merges),
}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 20},
    "min-p": {"min_p": 0.05},
    "repetition penalty": {"repetition_penalty": 1.1},
}


def text_of(report: DoctorReport) -> str:
    return "\n".join(report.lines())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_fault_is_named(name: str, server: str, served: Path, tmp_path: Path) -> None:
    cause, make = FOLDERS[name]
    for seed in range(SEEDS):
        folder = make(served, tmp_path / str(seed), seed)
        previous = [str(served)] if cause == "stale weights" else []
        report = examine_server(open_patient(str(folder), find_model(str(folder)), previous=previous), server)
        assert report.causes[:1] == [cause], text_of(report)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_it_is_healthy(temperature: float, server: str, served: Path) -> None:
    report = examine_server(open_patient(str(served), find_model(str(served))), server, temperature=temperature)
    assert report.healthy, text_of(report)
    assert [finding.part for finding in report.findings] == ["prompts", "responses"]
    assert not report.untested, text_of(report)


def rollouts(url: str, seed: int, **settings: Any) -> list[Sample]:
    """Responses of the server to random prompts."""
    rng, samples = np.random.default_rng(seed), []
    for number in range(6):
        prompt = [1, *rng.integers(4, 300, 11).tolist()]
        body = {"model": "served", "prompt": prompt, "max_tokens": 32, "logprobs": 0, "seed": 10 * seed + number}
        body |= {"temperature": 1.0, "return_token_ids": True, "ignore_eos": True, **settings}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            (choice,) = json.load(reply)["choices"]
        tokens = np.array(prompt + choice["token_ids"])
        logprobs = np.array([0.0] * len(prompt) + choice["logprobs"]["token_logprobs"], np.float32)
        samples.append(Sample(tokens=tokens, loss_mask=np.arange(len(tokens)) >= 12, logprobs=logprobs, reward=0.0))
    return samples


@pytest.mark.parametrize("name", SAMPLED)
def test_a_fault_of_sampling_is_named(name: str, server: str, served: Path) -> None:
    patient = open_patient(str(served), find_model(str(served)))
    for seed in range(SEEDS):
        samples = rollouts(server, seed, **SAMPLED[name])
        report = examine_rollouts(patient, samples, subject="rollouts of vLLM")
        assert report.causes == [name], text_of(report)
        if name == "temperature":
            assert examine_rollouts(patient, samples, subject="rollouts of vLLM", temperature=0.6).healthy
