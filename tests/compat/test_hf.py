"""`PackedCollator`: its batches, the models that it refuses, and real trainers compared with single samples."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from padfree.compat.hf import PackedCollator
from padfree.testing.models import save_with_tokenizer
from tests.refused import refused

IGNORE = -100
FEATURES = [
    {"input_ids": [1, 2, 3], "labels": [IGNORE, 2, 3]},
    {"input_ids": [4, 5], "labels": [4, 5]},
    {"input_ids": [0, 6, 7, 0], "labels": [IGNORE, IGNORE, 7, 0]},
]


def test_one_packed_row() -> None:
    batch = PackedCollator(tiny_model())(FEATURES)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 6, 7, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[IGNORE, 2, 3, IGNORE, 5, IGNORE, IGNORE, 7, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    assert "attention_mask" not in batch


def test_fixed_length_and_multiple() -> None:
    fixed = PackedCollator(tiny_model(), length=12)(FEATURES)
    assert fixed["input_ids"].shape == (1, 12)
    assert fixed["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 12]
    assert fixed["labels"][0, 9:].tolist() == [IGNORE] * 3
    assert PackedCollator(tiny_model(), multiple_of=8)(FEATURES)["input_ids"].shape == (1, 16)
    assert PackedCollator(tiny_model(), length=16, multiple_of=8)(FEATURES)["input_ids"].shape == (1, 16)


def test_masks_and_already_packed_features() -> None:
    feature = {"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 1, 1, 1, 1], "seq_lengths": [3, 2]}
    batch = PackedCollator(tiny_model())([feature])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[IGNORE, 2, 3, IGNORE, 5]]


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_positions_that_restart_begin_a_sample(convert: Any) -> None:
    feature = {"input_ids": [1, 2, 3, 4, 5], "position_ids": convert([0, 1, 2, 0, 1])}
    for more in ({}, {"seq_lengths": [3, 2]}):
        batch = PackedCollator(tiny_model())([{**feature, **more}, {"input_ids": [6], "position_ids": convert([0])}])
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
        assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6]
        assert batch["labels"].tolist() == [[IGNORE, 2, 3, IGNORE, 5, IGNORE]]
    for positions in ([1, 2, 3, 4, 5], [0, 1, 1, 2, 3], [0, 0, 2, 3, 4], [0, 1, 2, 3, 5], [4, 3, 2, 1, 0]):
        with refused("position_ids", "of example 0 do not count 0, 1, 2"):
            PackedCollator(tiny_model())([{**feature, "position_ids": convert(positions)}])
    with refused("seq_lengths", "and position_ids of example 0 give different sequences"):
        PackedCollator(tiny_model())([{**feature, "seq_lengths": [2, 3]}])
    with refused("position_ids", "has shape"):
        PackedCollator(tiny_model())([{**feature, "position_ids": convert([[0, 1, 2, 0, 1]] * 3)}])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_type_ids", [0, 0, 1]),
        ("token_type_ids", torch.ones(3)),
        ("pixel_values", torch.zeros(3, 4)),
        ("cu_seq_lens_q", np.array([0, 1, 3])),
        ("weights", [0.5, 1.0, 1.0]),
        ("nested", [["a", [1]]]),
    ],
)
def test_keys_that_would_change_the_samples_are_refused(key: str, value: Any) -> None:
    feature = {"input_ids": [1, 2, 3], key: value}
    with refused(key, "is not used by PackedCollator, but example 1 has it; remove"):
        PackedCollator(tiny_model())([{"input_ids": [1]}, feature])


def test_keys_that_cannot_change_the_samples_are_ignored() -> None:
    collator = PackedCollator(tiny_model())
    more = {
        "token_type_ids": [0, 0, 0],
        "special_tokens_mask": [1, 0, 0],
        "length": 3,
        "text": "a",
        "none": None,
        "messages": [{"role": "user", "content": "a"}],
        "names": np.array(["a", "b"]),
    }
    batch, plain = collator([{"input_ids": [1, 2, 3], **more}]), collator([{"input_ids": [1, 2, 3]}])
    assert batch.keys() == plain.keys()
    assert batch["input_ids"].tolist() == plain["input_ids"].tolist()


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**SMALL, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
LFM2 = ("Lfm2ForCausalLM", {**HEADS, "layer_types": ["conv", "full_attention"]})
OPT = ("OPTForCausalLM", {**SMALL, "ffn_dim": 32, "num_attention_heads": 2, "word_embed_proj_dim": 32, "dropout": 0.0})
BLOOM = ("BloomForCausalLM", {**SMALL, "n_head": 2})


def stock(class_name: str, values: dict[str, Any], implementation: str | None = None) -> PreTrainedModel:
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**values))
    if implementation is not None:
        model.set_attn_implementation(implementation)
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (LFM2, "a pack gives other results than one sample at a time"),
        (OPT, "a pack gives other results than one sample at a time: outputs differ"),
        (BLOOM, "a pack gives other results than one sample at a time: outputs differ"),
        (("FalconForCausalLM", {**SMALL, "num_attention_heads": 2}), "outputs differ"),
        (("GptOssForCausalLM", {**HEADS, "num_local_experts": 2, "head_dim": 16}, "eager"), "outputs differ"),
        (("LlamaForCausalLM", {**HEADS, "attention_chunk_size": 16}), "attention_chunk_size is 16"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_models_that_mix_packed_samples_are_refused(model: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^model: {model[0]} with transformers' own attention .*{reason}") as caught:
        PackedCollator(stock(*model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_models_that_keep_packed_samples_apart_are_taken(implementation: str) -> None:
    PackedCollator(stock("Qwen3ForCausalLM", HEADS, implementation))


def test_flash_attention_must_be_told_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a substitute function checks which arguments reach flash attention."""
    told, not_told = stock("Qwen3ForCausalLM", HEADS), stock("StableLmForCausalLM", HEADS)
    for model in (told, not_told):
        monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    PackedCollator(told)
    with pytest.raises(ValueError, match=r"StableLmForCausalLM .*outputs differ"):
        PackedCollator(not_told)
    monkeypatch.setattr(told.config, "_attn_implementation_internal", "my_attention")
    with pytest.raises(ValueError, match="attention implementation 'my_attention' is not supported"):
        PackedCollator(told)


def test_an_adapter_model_is_looked_into_and_a_collator_can_be_sent_to_workers() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    collator = pickle.loads(pickle.dumps(PackedCollator(adapted)))
    assert collator(FEATURES)["input_ids"].shape == (1, 9)


def test_samples_that_change_the_frequencies_of_others_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = stock("LlamaForCausalLM", {**HEADS, "max_position_embeddings": 16, "rope_parameters": rope})
    collator = PackedCollator(model)
    collator([{"input_ids": [1] * 16}, {"input_ids": [2] * 16}])
    with pytest.raises(ValueError, match=r"has 17 tokens, but more than 16 tokens change .*; shorten samples"):
        collator([{"input_ids": [1] * 17}])


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
        )
    )


FOUR_AT_A_TIME: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "train_sampling_strategy": "sequential",
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}


def one_at_a_time(model: PreTrainedModel, samples: list[list[int]]) -> float:
    """The mean loss over all predicted tokens, one call per sample. Leaves the gradients in the model."""
    count = sum(len(tokens) - 1 for tokens in samples)
    total = 0.0
    for tokens in samples:
        row = torch.tensor([tokens])
        logits = model(input_ids=row).logits[0, :-1]
        part = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum") / count
        part.backward()
        total += part.item()
    return total


def test_a_trainer_run_equals_one_sample_at_a_time(tmp_path: Path, rng: np.random.Generator) -> None:
    """Four steps of a real `Trainer` with packing have the losses and weights of a plain loop over single samples."""
    samples = [rng.integers(0, 64, n).tolist() for n in rng.integers(2, 24, 16)]
    arguments = TrainingArguments(output_dir=str(tmp_path), remove_unused_columns=False, **FOUR_AT_A_TIME)
    trained = tiny_model()
    trainer = Trainer(
        model=trained,
        args=arguments,
        train_dataset=[{"input_ids": tokens} for tokens in samples],  # type: ignore[arg-type]
        data_collator=PackedCollator(trained, multiple_of=16),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = tiny_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for step, loss in enumerate(losses):
        total = one_at_a_time(plain, samples[4 * step : 4 * step + 4])
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(total, abs=1e-4)  # the Trainer's log rounds to four digits
    assert len(losses) == 4
    for (name, ours), theirs in zip(trained.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("default")
def test_trls_trainer_equals_one_sample_at_a_time(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    folder = str(save_with_tokenizer(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["1+2=3", "a", "hello world", "4*5=20 # ok", "abc", "x-y", "7/7=1", "the end of it"]
    model, plain = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(tmp_path / "run"), bf16=False, **FOUR_AT_A_TIME),
        train_dataset=datasets.Dataset.from_list([{"text": text} for text in texts]),
        processing_class=tokenizer,
        data_collator=PackedCollator(model),
    )
    samples = [list(row["input_ids"]) for row in trainer.train_dataset]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for step, loss in enumerate(losses):
        assert loss == pytest.approx(one_at_a_time(plain, samples[4 * step : 4 * step + 4]), abs=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("refused", [LFM2, OPT], ids=["lfm2", "opt"])
def test_the_cure_for_a_refused_model_works(refused: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """The advice for a refused model: padding, with transformers.Trainer and DataCollatorForSeq2Seq(tokenizer)."""
    tokenizer = AutoTokenizer.from_pretrained(str(save_with_tokenizer(tmp_path / "model")))
    tokenizer.pad_token = tokenizer.eos_token
    model, plain = stock(*refused), stock(*refused)
    samples = [[5, 6, 7, 8, 9], [3, 4], [10, 11, 12], [20, 21, 22, 23]]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path / "run"), **FOUR_AT_A_TIME),
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in samples],  # type: ignore[arg-type]
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert loss == pytest.approx(one_at_a_time(plain, samples), abs=1e-4)
