"""GGUF files are read back: by gguf's reader bit by bit, and by transformers with equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from padfree.cli.main import main
from padfree.model.gguf_file import write_gguf
from padfree.model.gguf_vocabulary import gguf_vocabulary
from padfree.testing.models import build
from padfree.testing.tokenizers import TEXTS, tiny_tokenizer
from padfree.warning import PadfreeWarning
from tests.refused import refused

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

VOCABULARY = 420
"""20 more than the tokenizer has: files of models are often padded."""


def tiny(name: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build(name, vocab_size=VOCABULARY, **changes)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.eval()


def write(model: PreTrainedModel, path: Path, tokenizer: Any = None) -> Any:
    write_gguf(model, tokenizer or tiny_tokenizer("chatml"), path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing else is left"
    return gguf.GGUFReader(path)


def tensors_of(reader: Any) -> dict[str, Tensor]:
    """Every tensor as stored: bfloat16 matrices and float32 vectors, in the order of torch's dimensions."""
    found = {}
    for entry in reader.tensors:
        raw = torch.from_numpy(np.array(entry.data))
        assert entry.tensor_type == (gguf.GGMLQuantizationType.F32 if raw.ndim == 1 else gguf.GGMLQuantizationType.BF16)
        stored = raw if raw.ndim == 1 else raw.contiguous().view(torch.bfloat16)
        assert list(stored.shape) == list(reversed(entry.shape.tolist()))
        found[entry.name] = stored
    return found


def value(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def rotated_by_neighbours(x: Tensor, frequencies: Tensor) -> Tensor:
    """RoPE as llama.cpp applies it to Llama: neighbours (0 1) (2 3) ... rotate together. [heads, T, d] -> the same."""
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_rope", "qwen2", "qwen3"])
def test_every_tensor_is_there_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    found = tensors_of(write(model, tmp_path / "model.gguf"))
    map_ = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.split("_")[0].upper()], 2)
    heads = {"q_proj": 4, "k_proj": 2}
    for hf_name, parameter in model.named_parameters():
        stored = found.pop(map_.get_name(hf_name, (".weight", ".bias")))
        part = hf_name.split(".")[-2]
        if name.startswith("llama") and part in heads:
            # row 2 i + j of a head is row i + j d / 2 of transformers
            head_dim = len(stored) // heads[part]
            order = [
                head * head_dim + row // 2 + (row % 2) * head_dim // 2
                for head in range(heads[part])
                for row in range(head_dim)
            ]
            assert order[:3] == [0, head_dim // 2, 1]
            parameter = parameter[order]
        assert torch.equal(stored, parameter.to(stored.dtype)), hf_name
    assert found.keys() == ({"rope_freqs.weight"} if name == "llama_rope" else set())


def test_llama_attends_equally_with_neighbours(tmp_path: Path) -> None:
    """Scores of a layer from the file's own tensors, RoPE over neighbours and stored factors, against transformers."""
    model = tiny("llama_rope")
    reader = write(model, tmp_path / "model.gguf")
    found = tensors_of(reader)
    attention: Any = model.model.layers[0].self_attn
    x = torch.randn(1, 40, 64)
    cos, sin = model.model.rotary_emb(x, torch.arange(40)[None])
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = (project(x).unflatten(-1, (-1, 16)).transpose(1, 2) for project in (attention.q_proj, attention.k_proj))
    q, k = (entry[0] for entry in apply_rotary_pos_emb(q, k, cos, sin))
    expected = q @ k.repeat_interleave(2, 0).transpose(-1, -2)

    base, width = value(reader, "llama.rope.freq_base"), value(reader, "llama.rope.dimension_count")
    frequencies = base ** -(torch.arange(0, width, 2) / width) / found["rope_freqs.weight"]
    assert 1.0 < found["rope_freqs.weight"].min() < 2.0 < 7.9 < found["rope_freqs.weight"].max(), "different factors"
    q, k = (
        rotated_by_neighbours(
            (x[0] @ found[f"blk.0.attn_{letter}.weight"].float().T).unflatten(-1, (-1, 16)).transpose(0, 1), frequencies
        )
        for letter in "qk"
    )
    torch.testing.assert_close(q @ k.repeat_interleave(2, 0).transpose(-1, -2), expected, rtol=1e-4, atol=1e-4)


def test_gemma_norms_and_settings(tmp_path: Path) -> None:
    model = tiny("gemma3", num_hidden_layers=7, layer_types=None, query_pre_attn_scalar=16, sliding_window=8)
    reader = write(model, tmp_path / "model.gguf")
    found = tensors_of(reader)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 7)
    for hf_name, parameter in model.named_parameters():
        stored = found.pop(names.get_name(hf_name, (".weight", ".bias")))
        expected = parameter + 1 if hf_name.endswith("norm.weight") else parameter.to(torch.bfloat16)
        assert torch.equal(stored, expected), hf_name
    assert not found
    assert value(reader, "gemma3.attention.sliding_window") == 8
    assert value(reader, "gemma3.rope.freq_base") == 1_000_000


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_transformers_reads_the_same_model_and_tokenizer(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"layer_types": None, "query_pre_attn_scalar": 16} if name == "gemma3" else {}
    model = tiny(name, **changes)
    tokenizer = tiny_tokenizer("chatml")
    write(model, tmp_path / "model.gguf", tokenizer)
    # llama.cpp takes the width of a head for query_pre_attn_scalar; transformers does not read Qwen3's width of a head
    options = {"gemma3": {"query_pre_attn_scalar": 16}, "qwen3": {"head_dim": 16}}.get(name, {})
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32, **options)
    ids = torch.randint(0, VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(read.eval()(ids).logits, model(ids).logits)
    loaded = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token, loaded.bos_token, loaded.pad_token) == ("<|im_end|>", "<s>", "<pad>")
    for text in [*TEXTS, "<|im_start|>user\nHello <|im_end|>"]:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def sentence_piece() -> PreTrainedTokenizerFast:
    """A tokenizer like Gemma's, whose merges are not in the order of the ids."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc"]
    merges = [("b", "c"), ("a", "b"), ("▁", "a"), ("ab", "c"), ("a", "bc"), ("▁a", "bc")]
    vocabulary = {token: index for index, token in enumerate([*letters, "▁a", "ab", "▁abc", "abc", "bc"])}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Replace("▁", " ")
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_tokens(["▁▁"])
    return tokenizer


def by_scores(text: str, vocabulary: dict[str, int], scores: list[float]) -> list[str]:
    """SentencePiece's BPE: merge the pair whose result has the highest score, the leftmost first."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[vocabulary[pieces[i] + pieces[i + 1]]], i)
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in vocabulary
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_scores_merge_as_the_list_of_merges_does() -> None:
    tokenizer = sentence_piece()
    found = gguf_vocabulary(tokenizer, 300)
    assert (found.model, found.pre, found.space_prefix) == ("llama", None, False)
    assert found.scores is not None
    types = dict(zip(found.tokens, found.types, strict=True))
    kinds = [types[token] for token in ("<unk>", "<s>", "<0x41>", "abc", "  ", "[PAD299]")]
    assert kinds == [2, 3, 6, 1, 4, 5]
    for text in ("abc", "a abc", "bca abcab", "cab abc", "abab cbc"):
        assert by_scores(text, tokenizer.get_vocab(), found.scores) == tokenizer.tokenize(text), text


def test_a_tokenizer_that_llama_cpp_would_split_differently_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    assert gguf_vocabulary(tokenizer, VOCABULARY).pre == "gpt-2"
    backend: Any = tokenizer.backend_tokenizer
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    assert gguf_vocabulary(tokenizer, VOCABULARY).pre == "smollm"
    for other in (
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), words]),
        pre_tokenizers.Whitespace(),
    ):
        backend.pre_tokenizer = other
        with refused("tokenizer"):
            gguf_vocabulary(tokenizer, VOCABULARY)
    with refused("tokenizer"):
        gguf_vocabulary(tiny_tokenizer(), 300)  # more tokens than the model
    with refused("tokenizer"):
        gguf_vocabulary(tiny_tokenizer(kind="metaspace"), VOCABULARY)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_added_tokens_without_an_embedding_are_left_out(kind: str) -> None:
    """As in Gemma 3's text models, whose tokenizer has an image token; a padding token can be one of them, too."""
    tokenizer = tiny_tokenizer() if kind == "byte-level" else sentence_piece()
    size = len(tokenizer)
    expected = gguf_vocabulary(tokenizer, size)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.add_tokens(["<padding>"])
    tokenizer.pad_token = "<padding>"
    with pytest.warns(PadfreeWarning, match=r"lacks 2 added tokens .* \(<image>, <padding>\)"):
        assert gguf_vocabulary(tokenizer, size) == expected
    tokenizer.eos_token = "<image>"  # generation could not end
    with refused("tokenizer", "'<image>' has the id"):
        gguf_vocabulary(tokenizer, size)


def test_a_file_of_a_model_with_fewer_embeddings_than_tokens_is_read_again(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("chatml")
    model = build("qwen3", vocab_size=len(tokenizer))
    tokenizer.add_tokens(["<image>", "<padding>"], special_tokens=True)
    tokenizer.pad_token = "<padding>"
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, len(tokenizer) - 1]
    with pytest.warns(PadfreeWarning, match="lacks 2 added tokens"):
        reader = write(model, tmp_path / "model.gguf", tokenizer)
    assert len(value(reader, "tokenizer.ggml.tokens")) == model.config.vocab_size
    assert "tokenizer.ggml.padding_token_id" not in reader.fields
    assert "tokenizer.ggml.eot_token_id" not in reader.fields


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {}),
        ("mistral", {}),
        ("qwen3_moe", {}),
        ("qwen2_sliding", {}),
        ("gemma3", {}),  # its sliding windows alternate
        ("gemma3", {"layer_types": None}),  # query_pre_attn_scalar is not the width of a head
        ("llama", {"hidden_act": "gelu"}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ],
)
def test_what_the_format_cannot_say_is_refused(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = build(name, vocab_size=VOCABULARY, **changes)
    with refused("MODEL"):
        write_gguf(model, tiny_tokenizer(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = build("llama", vocab_size=VOCABULARY)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = 3.4e38  # finite in float32
    with refused("MODEL"):
        write_gguf(model, tiny_tokenizer(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, path = tmp_path / "source", tmp_path / "out" / "tiny.gguf"
    tiny("qwen3").to(torch.bfloat16).save_pretrained(source)
    tiny_tokenizer("chatml").save_pretrained(source)
    capsys.readouterr()
    for words, setting in (
        ([str(source), str(path)], "FILE"),  # no folder
        ([str(source), str(path.with_suffix(".bin"))], "FILE"),
        ([str(tmp_path), str(tmp_path / "x.gguf")], "MODEL"),
    ):
        assert main(["export", *words]) == 1
        assert capsys.readouterr().err.startswith(f"padfree export: {setting}: ")
    path.parent.mkdir()
    assert main(["export", str(source), str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: qwen3, bfloat16, {path.stat().st_size / 1e6:.1f} MB\n"
    assert main(["export", str(source), str(path)]) == 1
    assert "exists" in capsys.readouterr().err
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).state_dict()
        for folder, options in ((source, {}), (path.parent, {"gguf_file": path.name, "head_dim": 16}))
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_adapters_are_merged_and_the_template_is_that_of_the_exported_tokenizer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    base, run = tmp_path / "base", tmp_path / "run"
    tiny("llama").save_pretrained(base)
    tiny_tokenizer("chatml").save_pretrained(base)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(run / "model")
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(run / "model")
    (run / "run.json").write_text(json.dumps({"made_by": "padfree", "run": "x"}))
    (run / "config.json").write_text(json.dumps({"data": {"chat_template": "moved.jinja"}}))
    assert main(["export", str(run), str(tmp_path / "model.gguf")]) == 0
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    expected, name = adapted.merge_and_unload().state_dict(), "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(expected[name], AutoModelForCausalLM.from_pretrained(base).state_dict()[name])
    for name, tensor in expected.items():
        rounded = tensor if tensor.ndim == 1 else tensor.to(torch.bfloat16).float()
        assert torch.equal(read[name], rounded), name
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert value(reader, "tokenizer.chat_template") == "{{ messages[0]['content'] }}"
