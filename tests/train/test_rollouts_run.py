"""Runs that sample their rollouts: the same on any layout and after a resume; clear errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from padfree.config import Config, LoraConfig, config_from_dict
from padfree.distributed import Mesh, distributed, make_mesh
from padfree.model.load import load_model
from padfree.model.lora import add_adapters
from padfree.model.named_tensors import named_tensors
from padfree.record.file_names import ROLLOUTS as FILE
from padfree.record.run_folder import mark_run_folder
from padfree.rollout.collect.batch_report import ResponseExamples
from padfree.rollout.collect.collector import Collector
from padfree.rollout.collect.sample_exchange import whole
from padfree.rollout.engines import make_sampler
from padfree.rollout.engines.in_process.policy_model import copy_weights
from padfree.rollout.token_ids import vocabulary_of
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.testing.models import save_with_tokenizer
from padfree.train.batcher import make_batcher
from padfree.train.run import train
from padfree.train.setup import build_engine
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.trainer_cases import TIMES

HERE = "tests.train.test_rollouts_run"


def share_of_digits(response: str, row: Mapping[str, Any]) -> float:
    return sum(letter.isdigit() for letter in response) / 6 + len(row["prompt"]) / 100


def raises(response: str, row: Mapping[str, Any]) -> float:
    if row["answer"] == "4":
        raise KeyError("no such answer")
    return 0.0


def not_a_number(response: str, row: Mapping[str, Any]) -> float:
    return float("nan")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with tied embeddings, and a tokenizer that decodes to the original text."""
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), writes_back=True, num_hidden_layers=1)


def make_config(folder: Path, model_path: Path, **sections: Any) -> Config:
    rows = [{"question": f"{a}+{'1' * b}", "answer": str(a + 1)} for a in range(4) for b in range(1, 4)]
    data = folder.parent / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "model": {"path": str(model_path)},
        "data": {"path": [str(data)], "columns": {"question": "prompt"}, "epochs": None},
        "batch": {"samples": 12, "max_tokens": 40},
        "rollout": {
            "reward": f"{HERE}:share_of_digits",
            "samples_per_prompt": 3,
            "max_new_tokens": 6,
            "max_concurrent": 5,
        },
        "loss": {"kind": "clip", "temperature": 0.8},
        "optimizer": {"lr": 2e-3, "eps": 1e-3},
        "checkpoint": {"every": 1000, "export": False},
        "run": {"folder": str(folder), "steps": 3, "device": "cpu"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def first_samples(config: Config) -> list[Sample]:
    """The rollouts of the first batch, on this process of the group."""
    mesh = make_mesh("cpu", context=config.parallel.context)
    if mesh.loss.rank == 0:
        mark_run_folder(config)  # the rollouts write to it
    tokenizer = load_tokenizer(config)
    batcher = make_batcher(config, load_training_data(config, tokenizer).samples)
    groups: Sequence[Any] = next(batcher)
    engine = build_engine(config, mesh)
    sampler = make_sampler(config, mesh, engine.model, tokenizer, engine.scorer.logprobs)
    collector = Collector(
        config.rollout, config.loss, config.run, mesh, sampler, tokenizer, vocabulary=vocabulary_of(engine.model)
    )
    collector.sync_weights(engine.model, 0)
    collector.put(groups, batch=batcher.step, version=0)
    return whole(collector.take(batcher.step, version=0))


def ranks(rank: int, world: int, configs: list[Config], failing: Config) -> tuple[list[list[Sample]], str]:
    found = []
    for config in configs:
        found.append(first_samples(config))
        train(config)
    with pytest.raises(ValueError) as caught:
        train(failing)
    return found, str(caught.value)


def test_rollouts_are_those_of_one_process_on_any_layout(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "one", model_folder)
    with distributed(device="cpu"):
        expected = first_samples(config)
    train(config)
    others = [
        make_config(tmp_path / "data", model_folder),
        make_config(tmp_path / "context", model_folder, parallel={"context": 2}, rollout={"max_concurrent": 64}),
    ]
    failing = make_config(tmp_path / "failing", model_folder, rollout={"reward": f"{HERE}:raises"})
    results = run_ranks(2, ranks, others, failing)
    for found, error in results:
        for samples in found:
            assert len(samples) == len(expected) == 12
            for sample, other in zip(samples, expected, strict=True):
                assert np.array_equal(sample.tokens, other.tokens)
                assert np.array_equal(sample.mask, other.mask)
                assert (sample.uid, sample.group, sample.reward) == (other.uid, other.group, other.reward)
                np.testing.assert_allclose(sample.logprobs, other.logprobs, atol=1e-4)
        assert error.startswith(f"reward: {HERE}:raises raised KeyError: 'no such answer' for sample 'prompts.jsonl:")
    assert results[0][1] == results[1][1], "both ranks raise the error of the one that failed"
    for folder in ("data", "context"):
        for line, other in zip(lines(tmp_path / folder), lines(tmp_path / "one"), strict=True):
            assert line == pytest.approx(other, rel=1e-4, abs=1e-5)
        shown, others_shown = (lines(tmp_path / name, FILE) for name in (folder, "one"))
        assert [line["response"] for line in shown] == [line["response"] for line in others_shown]


def test_samples_and_what_is_written_of_them(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", model_folder, loss={"old_policy": "trainer"})
    with distributed(device="cpu"):
        samples = first_samples(config)
    assert [sample.group for sample in samples] == [group for group in samples_groups(samples) for _ in range(3)]
    assert len({sample.uid for sample in samples}) == 12
    tokenizer = load_tokenizer(config)
    endings = set()
    for sample in samples:
        response = sample.tokens[sample.mask]
        first = int(np.argmax(sample.mask))
        assert sample.mask[first:].all()
        assert tokenizer.decode(sample.tokens[:first]).count("+") == 1
        ended = response[-1] == tokenizer.eos_token_id
        endings.add(bool(ended))
        assert tokenizer.eos_token_id not in response[:-1]
        assert ended or len(response) == 6
        assert sample.logprobs is not None
        assert (sample.logprobs[first:] < 0).all()
        assert not sample.logprobs[:first].any()
        text = tokenizer.decode(response[:-1] if ended else response)
        assert sample.reward == pytest.approx(
            share_of_digits(text, {"prompt": tokenizer.decode(sample.tokens[:first])})
        )
    assert endings == {False, True}, "some end with eos, some at max_new_tokens"
    train(config)
    for line in lines(tmp_path / "run"):
        assert 0 < line["loss/sampler_difference"] < 1e-5, "the same model, in float32"
        assert line["response_length_max"] <= 6
        assert line["reward_max"] > line["reward_min"]
    shown = lines(tmp_path / "run", FILE)
    assert [line["batch"] for line in shown] == [1] * 4 + [2] * 4 + [3] * 4
    assert {"batch", "uid", "prompt", "response", "reward", "tokens", "ended"} == set(shown[0])
    assert all(line["reward"] == pytest.approx(share_of_digits(line["response"], line)) for line in shown)


def samples_groups(samples: Sequence[Sample]) -> list[Any]:
    return list(dict.fromkeys(sample.group for sample in samples))


def test_a_resumed_run_repeats_the_rollouts_to_the_bit(model_folder: Path, tmp_path: Path) -> None:
    loss = {"kind": "gspo", "epochs": 2}
    train(make_config(tmp_path / "whole", model_folder, loss=loss, run={"steps": 6}))
    for steps in (2, 6):
        part = make_config(tmp_path / "parts", model_folder, loss=loss, run={"steps": steps})
        train(part)
        # As if the first run had continued after its last checkpoint and died while writing a line.
        with (tmp_path / "parts" / FILE).open("a") as file:
            file.write(json.dumps({"batch": 2, "response": "?"}) + '\n{"batch": 2, "resp' if steps == 2 else "")
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert lines(tmp_path / "parts", FILE) == lines(tmp_path / "whole", FILE)
    assert lines(tmp_path / "whole")[0]["reward"] != lines(tmp_path / "whole")[2]["reward"]


def test_examples_of_earlier_batches_are_kept_whatever_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "run" / FILE
    texts = ["plain", "two\nlines\r\x0b\x85\u2028 東京 \ufffd", ""]
    for batch, text in enumerate(texts, start=1):
        ResponseExamples(path).write(batch, [{"response": text}])
    ResponseExamples(path).write(3, [{"response": "again"}])
    with path.open(encoding="utf-8", newline="\n") as file:
        found = [json.loads(line) for line in file]
    assert found == [
        {"batch": 1, "response": texts[0]},
        {"batch": 2, "response": texts[1]},
        {"batch": 3, "response": "again"},
    ]


def test_a_prompt_that_comes_twice_in_a_batch_makes_two_groups(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", model_folder, batch={"samples": 12 * 2 * 3, "max_tokens": 40})
    with distributed(device="cpu"):
        samples = first_samples(config)
    groups = samples_groups(samples)
    assert len(groups) == 24
    assert "prompts.jsonl:5" in groups
    assert "prompts.jsonl:5 (time 2)" in groups
    once, twice = (
        [sample.tokens.tolist() for sample in samples if sample.group == name]
        for name in ("prompts.jsonl:5", "prompts.jsonl:5 (time 2)")
    )
    assert len(once) == len(twice) == 3
    assert once != twice, "each response has its own noise"


def test_smallest_sizes(model_folder: Path, tmp_path: Path) -> None:
    """Groups of one sample, prompts of one token, responses of one token, batches of one sample."""
    (tmp_path / "one.jsonl").write_text('{"prompt": "7"}\n')
    config = make_config(
        tmp_path / "run",
        model_folder,
        data={"path": [str(tmp_path / "one.jsonl")], "columns": {}},
        batch={"samples": 1, "max_tokens": 2},
        rollout={"samples_per_prompt": 1, "max_new_tokens": 1},
        loss={"kind": "reinforce", "advantage": "reinforce++"},
        run={"steps": 2},
    )
    assert train(config).step == 2
    assert [(line["samples"], line["tokens"], line["scored_tokens"]) for line in lines(tmp_path / "run")] == [
        (1, 2, 1)
    ] * 2


def test_the_run_ends_with_the_prompts(model_folder: Path, tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "run",
        model_folder,
        data={"epochs": 1},
        batch={"samples": 24, "max_tokens": 40},
        run={"steps": None},
    )
    assert train(config).step == 2
    assert [line["samples"] for line in lines(tmp_path / "run")] == [24, 12], "12 prompts, 8 in a batch, all used"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"reward": f"{HERE}:raises"}}, "reward: .*KeyError: 'no such answer'"),
        (
            {"rollout": {"reward": f"{HERE}:not_a_number"}},
            r"reward: .* nan .*prompts.jsonl:",
        ),
        ({"rollout": {"reward": f"{HERE}:nothing"}}, "reward: .*'nothing'"),
        ({"rollout": {"reward": "best"}}, "reward: 'best'"),
        ({"rollout": {"samples_per_prompt": 1}}, "rollout.samples_per_prompt: 1"),
        (
            {"loss": {"advantage": "given"}},
            "loss.advantage: 'given'",
        ),
        (
            {"batch": {"max_tokens": 10}},
            r"batch.max_tokens: 10 tokens, but prompts.jsonl:3 has 11 tokens with its response",
        ),
        (
            {"data": {"max_length": 10}},
            "max_length: 10, but the prompt prompts.jsonl:3 has 5 tokens",
        ),
        (
            {"data": {"columns": {"question": "unused"}}},
            r"columns: prompts.jsonl has the columns \['answer', 'question'\]",
        ),
    ],
)
def test_refusals(sections: dict[str, Any], message: str, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        train(make_config(tmp_path / "run", model_folder, **sections))
    assert "\n" not in str(caught.value)


def always_zero(response: str, row: Mapping[str, Any]) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("sections", "learns"),
    [
        ({"rollout": {"reward": f"{HERE}:always_zero"}}, False),
        ({"rollout": {"reward": f"{HERE}:always_zero"}, "loss": {"entropy_coefficient": 0.1}}, True),
        ({}, True),
    ],
)
def test_a_run_whose_groups_have_no_signal_says_that_nothing_was_learned(
    sections: dict[str, Any], learns: bool, model_folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    train(make_config(tmp_path / "run", model_folder, run={"steps": 2}, **sections), on_note=said.append)
    found = [line for line in said if line.startswith("nothing was learned: in each of 8 groups")]
    assert len(found) == (0 if learns else 1)


def test_rollouts_without_a_token_to_train_are_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Collector.take

    def untrained(self: Collector, *arguments: Any, **options: Any) -> list[Sample]:
        samples = written(self, *arguments, **options)
        return [replace(sample, loss_mask=np.zeros(len(sample), np.bool_)) for sample in samples]

    monkeypatch.setattr(Collector, "take", untrained)
    with refused("rollout.reward", "none of the 12 samples of batch 1 has a token to train"):
        train(make_config(tmp_path / "run", model_folder))


def test_no_prompts_and_no_tokenizer(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    data = {"path": [str(tmp_path / "empty.jsonl")]}
    with refused("data", "empty.jsonl has no rows"):
        train(make_config(tmp_path / "run", model_folder, data=data))
    model = {"path": str(model_folder / "config.json")}
    with refused("model.tokenizer"):
        train(make_config(tmp_path / "run", model_folder, model=model))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    model = {"path": str(model_folder), "tokenizer": str(tmp_path / "endless")}
    with refused("model.tokenizer"):
        train(make_config(tmp_path / "run", model_folder, model=model))


# Weights for the sampler


def test_the_copy_of_a_sharded_bfloat16_model(mesh: Mesh, model_folder: Path) -> None:
    steps = transformations(mesh, dtype=torch.bfloat16)
    trained = load_model(model_folder, shard=lambda model: parallelize(model, steps))
    copy = load_model(model_folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    copy_weights(trained, copy)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    plain = load_model(model_folder)
    for name, tensor in named_tensors(copy).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, (named_tensors(plain)[name] * 1.5).bfloat16()), name


def test_the_copy_of_a_model_with_adapters(mesh: Mesh, model_folder: Path) -> None:
    pytest.importorskip("peft")
    trained, copy = load_model(model_folder), load_model(model_folder).eval()
    add_adapters(trained, LoraConfig(rank=2, alpha=6.0))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
    copy_weights(trained, copy)
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected, found = (model(input_ids=tokens).logits for model in (trained.eval(), copy))
        plain = load_model(model_folder).eval()(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 0.1
