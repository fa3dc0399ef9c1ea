"""Model folders for the tests of `padfree.tools.talk`, `padfree generate` and `padfree chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from padfree.config import LoraConfig
from padfree.data.chat_renderer import ChatRenderer
from padfree.model.export import export_adapters
from padfree.model.lora import add_adapters
from padfree.testing.models import build
from padfree.testing.tokenizers import tiny_tokenizer
from padfree.tools.talk.speaker import Speaker

CPU = torch.device("cpu")


def tiny_model(**changes: Any) -> Any:
    return build("qwen3", **{"vocab_size": len(tiny_tokenizer()), "tie_word_embeddings": True, **changes})


def save_model(folder: Path, template: str | None = "chatml", **changes: Any) -> Path:
    """A small Qwen3 with random weights and a byte-level tokenizer of 400 tokens."""
    tiny_model(**changes).save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


def save_adapters(folder: Path, base: Path) -> Path:
    """Adapters of that model that change its answers."""
    model = tiny_model()
    add_adapters(model, LoraConfig(rank=2, alpha=8.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    return export_adapters(model, folder, base=str(base))


def tiny_speaker(
    template: str | None = "chatml", *, temperature: float = 0.0, seed: int = 0, **changes: Any
) -> Speaker:
    tokenizer = tiny_tokenizer(template)
    chat = None if template is None else ChatRenderer(tokenizer)
    settings = {"dtype": torch.float32, "device": CPU, **changes}
    return Speaker(tiny_model(), tokenizer, chat=chat, temperature=temperature, seed=seed, **settings)
