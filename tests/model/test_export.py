"""An exported folder equals the model bit for bit, and stock transformers loads it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from padfree.config import LoraConfig
from padfree.model import export
from padfree.model.adapter import attach
from padfree.model.export import export_adapters, export_model, separate_tensors, whole_tensors
from padfree.model.load import load_model
from padfree.model.lora import add_adapters, initial_values, is_adapter
from padfree.model.named_tensors import named_tensors
from padfree.model.split_weight import is_split
from padfree.optim.master_weights import split_weights
from padfree.rollout.engines.servers.weight_stream import SentWeights, WeightStream
from padfree.testing.models import build
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import alone


def assert_same(got: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert type(got) is type(expected)
    names = [name for name, _ in expected.named_parameters(remove_duplicate=False)]
    assert names == [name for name, _ in got.named_parameters(remove_duplicate=False)]
    for name in names:
        assert torch.equal(got.get_parameter(name), expected.get_parameter(name)), name


def shard_layers(model: PreTrainedModel) -> None:
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")), unk_token="?"
    )


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe", "gpt2", "deepseek_v3"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = build(name)
    assert export_model(model, tmp_path / "out", tokenizer()) == tmp_path / "out"
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)
    assert_same(load_model(tmp_path / "out"), model)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == {"a": 0, "b": 1, "?": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_attachment_does_not_show(tmp_path: Path) -> None:
    model = attach(build("llama"))
    export_model(model, tmp_path)
    assert "padfree" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert again(input_ids=torch.arange(4)[None]).logits.isfinite().all()


def test_dtype_and_file_size(tmp_path: Path) -> None:
    model = build("llama")
    export_model(model, tmp_path, dtype=torch.bfloat16, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert_same(again, model.bfloat16())


def sharded(rank: int, world: int, pairs: list[tuple[str, str]]) -> None:
    for source, target in pairs:
        model = load_model(source, shard=shard_layers)
        export_model(model, target)
        assert_same(AutoModelForCausalLM.from_pretrained(target), AutoModelForCausalLM.from_pretrained(source))
    with refused("export", ".* is not an earlier export .*"):
        export_model(model, Path(pairs[0][0]).parent)


def test_sharded_models_export_what_they_loaded(tmp_path: Path) -> None:
    pairs = []
    for name in ("llama_tied", "qwen3_moe"):
        build(name, vocab_size=63).save_pretrained(tmp_path / name)
        pairs.append((str(tmp_path / name), str(tmp_path / f"{name}-out")))
    run_ranks(2, sharded, pairs)
    with safe_open(tmp_path / "llama_tied-out" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    export_model(build("llama"), tmp_path / "out", max_shard_size="30KB")
    model = build("llama", seed=1)
    export_model(model, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert_same(load_model(tmp_path / "out"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"is not an earlier export .*; give a new or empty folder"):
        export_model(build("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"is not an earlier export .*; give a new or empty folder"):
        export_model(build("llama"), tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "precious"
    export_model(build("llama"), tmp_path / "out")
    (tmp_path / "out" / "run").mkdir()
    with pytest.raises(ValueError, match=r"holds run besides an earlier export of padfree; give a new"):
        export_model(build("llama"), tmp_path / "out")


def test_a_model_that_was_not_exported_is_not_replaced(tmp_path: Path) -> None:
    """A folder with the files of an export but without its record."""
    model = build("llama")
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(
        ValueError, match=r"base is not an earlier export of padfree \(it has no padfree_export\.json\); giv"
    ):
        export_model(build("llama", seed=1), tmp_path / "base")
    (tmp_path / "base" / "padfree_export.json").write_text('{"files": []}')
    with pytest.raises(ValueError, match=r"base is not an earlier export"):
        export_model(build("llama", seed=1), tmp_path / "base")
    assert_same(load_model(tmp_path / "base"), model)


def test_the_dtype_of_the_files_is_chosen_and_float32_parts_stay(tmp_path: Path) -> None:
    model = build("ernie4_5_moe")
    export_model(model, tmp_path, dtype=torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    routers = {name for name, _ in model.named_parameters() if ".gate." in name}  # in float32 for transformers
    assert len(routers) > 1
    for name, parameter in load_model(tmp_path).named_parameters():
        original = model.get_parameter(name)
        assert torch.equal(parameter, original if name in routers else original.bfloat16().float()), name


def test_a_full_disk_leaves_the_earlier_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("llama")
    export_model(model, tmp_path / "out")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "sync", full)
        with refused("export", ".*out cannot be written .*No space left.*") as caught:
            export_model(build("llama", seed=1), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert_same(load_model(tmp_path / "out"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_died_between_its_renames_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    export_model(model, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    monkeypatch.setattr(export, "sync", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(ValueError, match="broken"):
        export_model(build("llama", seed=1), tmp_path / "out")
    assert_same(load_model(tmp_path / "out"), model)


# Weights that are stored as `SplitWeight`

EXPORTED = {
    "merged": lambda model: dict(whole_tensors(model)),
    "separate": lambda model: dict(separate_tensors(model)),
    "sent": lambda model: sent(model, torch.bfloat16),
    "sent in float32": lambda model: sent(model, torch.float32),
    "changes": lambda model: changes(model, torch.bfloat16),
    "changes in float32": lambda model: changes(model, torch.float32),
}


def sent(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    return dict(named for bucket in WeightStream(model, dtype).buckets(model, keep=True) for named in bucket.tensors)


def changes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    weights = SentWeights(stream=WeightStream(model, dtype), group=alone().loss.group)
    weights.keep(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return dict(named for bucket in weights.buckets(model, 1) for named in bucket.tensors)


OF_LINEARS, OF_EXPERTS = LoraConfig(rank=2), LoraConfig(rank=2, targets=("all-linear", "experts"))


def with_adapters(name: str, lora: LoraConfig | None) -> PreTrainedModel:
    model = build(name)
    if lora is not None:
        add_adapters(model, lora)
        for tensor_name, tensor in named_tensors(model).items():
            if is_adapter(tensor_name):  # B too, which begins as zeros
                tensor.data.copy_(initial_values(tensor_name.replace("lora_B", "lora_A"), tensor.shape, 7))
    return model


@pytest.mark.parametrize("consumer", EXPORTED)
@pytest.mark.parametrize(
    ("name", "lora"), [("ernie4_5_moe", None), ("llama_tied", OF_LINEARS), ("qwen3_moe", OF_EXPERTS)]
)
def test_split_weights_leave_the_process_as_plain_tensors(name: str, lora: LoraConfig | None, consumer: str) -> None:
    """With parameters that stay in float32 (the routers of Ernie), adapters, and adapters of experts."""
    found = []
    for splits in (False, True):
        model = with_adapters(name, lora)
        if splits:
            split_weights(model.parameters())
            assert any(map(is_split, named_tensors(model).values()))
        found.append(EXPORTED[consumer](model))
    expected, tensors = found
    assert tensors.keys() == expected.keys()
    for tensor_name, tensor in tensors.items():
        assert not is_split(tensor), tensor_name
        assert torch.equal(tensor, expected[tensor_name]), tensor_name


@pytest.mark.parametrize(("name", "lora"), [("llama_tied", OF_LINEARS), ("qwen3_moe", OF_EXPERTS)])
def test_adapters_of_split_weights_are_exported(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    model = with_adapters(name, lora)
    export_adapters(model, tmp_path / "plain")
    split_weights(parameter for parameter in model.parameters() if parameter.requires_grad)
    export_adapters(model, tmp_path / "split")
    plain, own = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("plain", "split"))
    assert own.keys() == plain.keys()
    assert all(torch.equal(own[tensor_name], plain[tensor_name]) for tensor_name in plain)
