"""Hugging Face's Trainer with packing: only the data collator changes, to `PackedCollator`.

    python examples/hf_trainer.py --model Qwen/Qwen3-0.6B --data train.jsonl --output trained

Every batch becomes one pack `[1, T]` whose position ids restart in each sample. `PackedCollator` tests a small copy of
the model and refuses models that would mix the samples. With flash attention (`--attention flash_attention_2`) packing
has no extra cost. HF's `sdpa` creates a `[T, T]` mask, so keep batches small.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from padfree.compat.hf import PackedCollator
from padfree.data import TokenizedDataset, load_sft


class Features(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenised samples as dicts for a Trainer."""

    def __init__(self, samples: TokenizedDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {"input_ids": sample.tokens, "loss_mask": sample.mask}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="Hugging Face's Trainer with packing.")
    parser.add_argument("--model", required=True, help="a folder or a Hub id")
    parser.add_argument("--data", required=True, nargs="+", help="JSONL files")
    parser.add_argument("--output", default="trained", help="folder of the trained model (default %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="samples per device and batch (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data (default %(default)s)")
    parser.add_argument(
        "--attention", default="sdpa", help="attention implementation of transformers (default %(default)s)"
    )
    given = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation=given.attention)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=given.output,
            per_device_train_batch_size=given.samples,
            num_train_epochs=given.epochs,
            learning_rate=given.lr,
            remove_unused_columns=False,  # the collator reads loss_mask
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=Features(load_sft(given.data, tokenizer)),
        data_collator=PackedCollator(model),
    )
    trainer.train()
    trainer.save_model(given.output)
    tokenizer.save_pretrained(given.output)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
