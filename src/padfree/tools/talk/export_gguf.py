"""Write a model, the model of a run, or a model with adapters to a GGUF file, which llama.cpp reads."""

from __future__ import annotations

from pathlib import Path

from padfree.model.gguf_file import write_gguf
from padfree.tools.talk.find_model import SETTING, ModelFiles
from padfree.tools.talk.speaker import load_language_model
from padfree.train.training_data import open_tokenizer


def export_gguf(files: ModelFiles, path: Path) -> str:
    """Write the model to `path`, with merged adapters and the tokenizer's chat template. Return its `model_type`."""
    tokenizer = open_tokenizer(files.tokenizer, SETTING)
    model, _ = load_language_model(files)
    write_gguf(model, tokenizer, path)
    return str(model.config.model_type)
