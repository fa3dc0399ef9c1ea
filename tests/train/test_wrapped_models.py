"""Fine-tuning a multimodal checkpoint on text: the language model is trained, the rest is exported unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from padfree.cli.main import main
from padfree.config import Config
from padfree.model.load import load_model
from padfree.model.wrapper import language_config, wrapper_of
from padfree.testing.models import LETTERS
from padfree.train.run import train
from tests.ranks import run_ranks
from tests.rounding import largest_difference
from tests.train.test_train import make_config, write_lines

TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": 1,
    "eos_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
WINDOWED: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
CHUNKED: dict[str, Any] = {
    "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "attention_chunk_size": 8,
    "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
WRAPPERS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {
        "text_config": {**TEXT, **DELTA},
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "num_position_embeddings": 16,
        },
    },
    "Gemma3": {"text_config": {**TEXT, **WINDOWED}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "Gemma4": {
        "text_config": {
            **TEXT, **WINDOWED, "global_head_dim": 8, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0,
        },
        "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8},
        "audio_config": None,
    },
    "Llama4": {
        "text_config": {**TEXT, **CHUNKED},
        "vision_config": {
            **VISION, "intermediate_size": 64, "vision_output_dim": 32, "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "Mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
    },
}  # fmt: skip


def save(folder: Path, name: str) -> None:
    """A random multimodal model in a folder with a tokenizer of single letters."""
    model_class = getattr(transformers, f"{name}ForConditionalGeneration", None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    model_class(getattr(transformers, f"{name}Config")(**WRAPPERS[name])).save_pretrained(folder)
    vocabulary = {letter: index for index, letter in enumerate(["<eos>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "X"}))


def run_config(folder: Path, name: str, where: str) -> Config:
    run = {"folder": str(folder / f"{name} {where}"), "steps": 2, "device": "cpu"}
    return make_config(
        folder, folder / name, folder / "data.jsonl",
        optimizer={"lr": 1e-2, "eps": 1e-4}, run=run, checkpoint={"every": 1, "keep": 2},
    )  # fmt: skip


ON_TWO_RANKS = ("Qwen3_5", "Llama4")


def two_ranks(rank: int, world: int, folder: Path) -> None:
    """The whole run, except its export, and its second step repeated."""
    for name in ON_TWO_RANKS:
        config = run_config(folder, name, "two")
        assert train(config).step == 2
        if rank == 0:
            (folder / f"{name} two" / "model").rename(folder / f"{name} exported")
            shutil.rmtree(folder / f"{name} two" / "checkpoints" / "step-00000002")
        dist.barrier()
        assert train(config).step == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models, data, and the results of two ranks."""
    folder = tmp_path_factory.mktemp("wrapped")
    for name in WRAPPERS:
        save(folder / name, name)
    write_lines(folder / "data.jsonl", [{"prompt": f"{a}+{a}", "response": f"= {2 * a}"} for a in range(8)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PADFREE_CACHE", str(folder / "cache"))
        run_ranks(2, two_ranks, folder)
        yield folder


def tensors_of(folder: Path, name: str) -> dict[str, Tensor]:
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    found: dict[str, Tensor] = model_class.from_pretrained(folder).state_dict()
    return found


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_language_model_is_trained_and_the_rest_stays(name: str, folder: Path) -> None:
    result = train(run_config(folder, name, "one"))
    assert result.step == 2
    exported = folder / f"{name} one" / "model"
    before, after = tensors_of(folder / name, name), tensors_of(exported, name)
    assert before.keys() == after.keys()
    trained = {key for key in before if "language_model" in key or key.startswith("lm_head")}
    assert trained < before.keys()
    for key in before.keys() - trained:
        assert torch.equal(before[key], after[key]), key
    moved = {key for key in trained if not torch.equal(before[key], after[key])}
    assert len(moved) > len(trained) / 2
    assert (exported / "preprocessor_config.json").exists()
    again = load_model(exported)  # it can be trained further
    wrapper = wrapper_of(again)
    assert wrapper is not None
    assert wrapper.config.architectures == [f"{name}ForConditionalGeneration"]
    if name in ON_TWO_RANKS:
        once, resumed = (
            tensors_of(folder / f"{name} exported", name),
            tensors_of(folder / f"{name} two" / "model", name),
        )
        assert once.keys() == resumed.keys() == after.keys()
        assert all(torch.equal(once[key], resumed[key]) for key in once)
        assert largest_difference(once, after)[0] < 1e-5
        assert all(torch.equal(before[key], once[key]) for key in before.keys() - trained)


@pytest.mark.parametrize("name", ["Qwen3_5", "Gemma3"])
def test_the_check_passes(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(folder / name), "--data", str(folder / "data.jsonl"), "--samples", "3"]
    assert main(["check", *arguments, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ForCausalLM, all of its 2 layers")
    assert lines[-1] == "passed: packed training gives the same results as one sample at a time"


def test_configs_of_one_model_have_no_language_model_inside() -> None:
    assert language_config(transformers.Qwen3Config()) is None
    assert language_config(transformers.Qwen3_5TextConfig()) is None
    text = language_config(transformers.Gemma3Config())
    assert isinstance(text, transformers.Gemma3TextConfig)
