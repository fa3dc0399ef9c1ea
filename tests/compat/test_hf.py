"""`PackedCollator`: what it gives, and a real `Trainer` whose loss and weights are those of one sample at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from padfree.compat.hf import PackedCollator

IGNORE = -100
FEATURES = [
    {"input_ids": [1, 2, 3], "labels": [IGNORE, 2, 3]},
    {"input_ids": [4, 5], "labels": [4, 5]},
    {"input_ids": [0, 6, 7, 0], "labels": [IGNORE, IGNORE, 7, 0]},
]


def test_one_packed_row() -> None:
    batch = PackedCollator()(FEATURES)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 6, 7, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[IGNORE, 2, 3, IGNORE, 5, IGNORE, IGNORE, 7, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    assert batch["attention_mask"] is None


def test_fixed_length_and_multiple() -> None:
    fixed = PackedCollator(length=12)(FEATURES)
    assert fixed["input_ids"].shape == (1, 12)
    assert fixed["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 12]
    assert fixed["labels"][0, 9:].tolist() == [IGNORE] * 3
    assert PackedCollator(multiple_of=8)(FEATURES)["input_ids"].shape == (1, 16)
    assert PackedCollator(length=16, multiple_of=8)(FEATURES)["input_ids"].shape == (1, 16)


def test_masks_and_already_packed_features() -> None:
    feature = {"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 1, 1, 1, 1], "seq_lengths": [3, 2]}
    batch = PackedCollator()([feature])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[IGNORE, 2, 3, IGNORE, 5]]


@pytest.mark.parametrize(
    ("collator", "features", "message"),
    [
        (PackedCollator(), [], "features: empty list"),
        (PackedCollator(), [{"text": "x"}], r"features: no input_ids in feature 0 \(it has \['text'\]\)"),
        (PackedCollator(), [{"input_ids": [1, 2], "attention_mask": [1, 0]}], "attention_mask: zeros in feature 0"),
        (PackedCollator(), [{"input_ids": [1, 2], "labels": [2, IGNORE]}], "labels: feature 0 differs"),
        (PackedCollator(), [{"input_ids": [1, 2], "loss_mask": [1]}], r"loss_mask: shape \(1,\) for 2 tokens"),
        (PackedCollator(), [{"input_ids": [1, 2], "seq_lengths": [1]}], "seq_lengths: 1 in all for 2 tokens"),
        (PackedCollator(length=8), FEATURES, "length: 8 for 9 tokens"),
        (PackedCollator(length=12, multiple_of=8), FEATURES, "length: 12 is not a multiple of multiple_of=8"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    collator: PackedCollator, features: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        collator(features)
    assert "\n" not in str(error.value)


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


def test_a_trainer_run_equals_one_sample_at_a_time(tmp_path: Path, rng: np.random.Generator) -> None:
    """Four steps of a real `Trainer` on packed rows against a plain loop over single samples, losses and weights."""
    samples = [rng.integers(0, 64, n).tolist() for n in rng.integers(2, 24, 16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trained = tiny_model()
    trainer = Trainer(
        model=trained,
        args=arguments,
        train_dataset=[{"input_ids": tokens} for tokens in samples],  # type: ignore[arg-type]
        data_collator=PackedCollator(multiple_of=16),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = tiny_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for step, loss in enumerate(losses):
        batch = samples[4 * step : 4 * step + 4]
        count = sum(len(tokens) - 1 for tokens in batch)
        total = 0.0
        for tokens in batch:
            row = torch.tensor([tokens])
            logits = plain(input_ids=row).logits[0, :-1]
            part = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum") / count
            part.backward()
            total += part.item()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(total, abs=1e-4)  # the Trainer's log rounds to four digits
    assert len(losses) == 4
    for (name, ours), theirs in zip(trained.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
