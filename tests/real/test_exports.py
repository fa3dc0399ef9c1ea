"""Exports of a run on real weights are loaded by transformers and PEFT and equal the trained model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import padfree
from padfree.distributed import distributed
from padfree.train.preflight import preflight
from padfree.train.run import mesh_of
from padfree.train.setup import build_engine, export
from tests.real.cases import (
    QUESTIONS,
    SMOLLM2,
    config_of,
    conversations,
    load,
    message,
    needs_smollm2,
    written,
)

pytestmark = [needs_smollm2, pytest.mark.slow]


def answer(folder: Path, question: str) -> str:
    """The greedy answer of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # bfloat16 is slow on a CPU
    prompt = tokenizer.apply_chat_template(
        [message("user", question)], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_an_export_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    run = padfree.sft(
        model=SMOLLM2,
        data={"path": written(tmp_path / "rows.jsonl", conversations()), "epochs": 2},
        batch={"samples": 3, "max_tokens": 256},
        optimizer={"lr": 1e-7},
        run={"folder": tmp_path / "run", "device": "cpu"},
    )
    assert run.steps == 2
    assert run.model is not None
    exported, before = (AutoModelForCausalLM.from_pretrained(folder) for folder in (run.model, SMOLLM2))
    assert exported.dtype == before.dtype == torch.bfloat16
    assert exported.state_dict().keys() == before.state_dict().keys()
    assert answer(run.model, QUESTIONS[0]) == "The capital of France is Paris."


def test_adapters_in_peft_have_the_logprobs_that_were_trained(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = config_of(
        tmp_path,
        conversations(),
        lora={"rank": 4, "export": "adapter"},
        batch={"samples": 3},
        optimizer={"lr": 1e-3},
    )
    with distributed(device="cpu") as device:
        preflight_result = preflight(config, processes=1, device_type="cpu")
        engine = build_engine(config, mesh_of(config, device), preflight_result.tokenizer)
        samples = list(preflight_result.source.samples)
        losses = [engine.step(samples, step=step).loss for step in range(2)]
        assert losses[1] < losses[0]
        trained = engine.scorer.logprobs(samples)
        export(config, engine.model, tmp_path / "adapter", preflight_result.tokenizer)

    def logprobs(model: torch.nn.Module, dtype: torch.dtype = torch.float64) -> np.ndarray:
        found = []
        for sample in samples:
            tokens = torch.tensor(sample.tokens)
            with torch.no_grad():
                scores = torch.log_softmax(model(tokens[None]).logits[0, :-1].to(dtype), dim=-1)
            found.append(scores.gather(1, tokens[1:, None])[:, 0][torch.tensor(sample.mask[1:])])
        return torch.cat(found).double().numpy()

    ours = np.concatenate([values[sample.mask] for values, sample in zip(trained, samples, strict=True)])
    loaded = peft.PeftModel.from_pretrained(load().eval(), tmp_path / "adapter").eval()
    theirs = logprobs(loaded)
    wide = logprobs(loaded.double())
    noise = np.abs(theirs - wide).max()
    assert 0 < noise < 1e-3
    assert np.abs(ours - wide).max() <= 8 * noise
    assert np.abs(wide - logprobs(load().eval())).max() > 1e-2, "the adapters do something"
