"""A loaded model equals that of `from_pretrained` bit for bit, on any number of ranks, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from padfree.model.load import load_model
from padfree.model.named_tensors import named_tensors, region_of
from padfree.testing.models import ARCHITECTURES, build
from tests.ranks import run_ranks


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything a forward depends on, gathered: parameters under all their names, and all buffers."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors
    }


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def shard_layers(model: PreTrainedModel) -> None:
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)


def saved(folder: Path, name: str = "llama", **changes: Any) -> Path:
    build(name, **changes).save_pretrained(folder)
    return folder


def change_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_equals_from_pretrained(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    # In bfloat16, values are cast, except in the modules that an architecture keeps in float32.
    for dtype in (torch.float32, torch.bfloat16) if name in ("llama", "gpt2", "qwen3_moe") else (torch.bfloat16,):
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        model = load_model(tmp_path, dtype=dtype)
        assert model.training
        assert type(model) is type(expected)
        assert_same(whole(model), whole(expected))


def test_reads_several_files(tmp_path: Path) -> None:
    original = build("llama_tied")
    original.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(whole(load_model(str(tmp_path))), whole(original))


def test_bfloat16_files_become_float32_parameters(tmp_path: Path) -> None:
    original = build("qwen3").bfloat16()
    original.save_pretrained(tmp_path)
    got = load_model(tmp_path, dtype=torch.float32)
    for name, parameter in original.named_parameters():
        assert torch.equal(got.get_parameter(name), parameter.float())


def test_ties_hold_by_identity(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, "llama_tied"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    untied = load_model(saved(tmp_path / "untied", "llama"))
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight


def test_keeps_the_generation_settings(tmp_path: Path) -> None:
    original = build("llama")
    original.generation_config.temperature = 0.25
    original.generation_config.do_sample = True
    original.save_pretrained(tmp_path)
    assert load_model(tmp_path).generation_config.temperature == 0.25


def test_base_model_names_and_legacy_buffers_are_read_as_transformers_does(tmp_path: Path) -> None:
    original = build("gpt2")
    original.save_pretrained(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:  # like the original files of GPT-2
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    change_weights(tmp_path, change)
    assert_same(whole(load_model(tmp_path)), whole(original))


def test_old_rotary_buffers_in_files_are_ignored(tmp_path: Path) -> None:
    original = build("llama")
    original.save_pretrained(tmp_path)
    change_weights(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert_same(whole(load_model(tmp_path)), whole(original))


def test_tied_in_the_config_and_stored_twice(tmp_path: Path) -> None:
    original = build("llama_tied")
    original.save_pretrained(tmp_path)
    embedding = original.get_input_embeddings().weight.detach()
    change_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert_same(whole(load_model(tmp_path)), whole(original))
    change_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied .* tie_word_embeddings to false"):
        load_model(tmp_path)


@pytest.mark.parametrize("source", ["file", "folder", "object", "folder with weights"])
def test_random_weights_where_they_are_asked_for(source: str, tmp_path: Path) -> None:
    config = build("qwen3").config
    config.save_pretrained(tmp_path)
    saved(tmp_path / "whole", "qwen3")
    before = torch.get_rng_state()
    options: Any = {
        "file": {"source": tmp_path / "config.json"},
        "folder": {"source": tmp_path, "init": "random"},
        "object": {"source": config},
        "folder with weights": {"source": tmp_path / "whole", "init": "random"},
    }[source]
    first, second, other = (whole(load_model(**options, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(first, second)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert abs(first[name].std() - config.initializer_range) < 0.1 * config.initializer_range
    assert torch.equal(first["model.norm.weight"], torch.ones(64))


def sharded(
    rank: int, world: int, folders: list[str], refused: list[str], tied: str
) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    results, messages = [], []
    for folder in folders:
        model = load_model(folder, shard=shard_layers, seed=5)
        parameter = model.get_parameter("model.norm.weight")
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() == 64 // world
        tensors = whole(model)
        logits = model(input_ids=torch.arange(6)[None], use_cache=False).logits.detach()
        assert torch.isfinite(logits).all()
        results.append(tensors)
    for folder in refused:
        with pytest.raises(ValueError) as caught:
            load_model(folder, shard=shard_layers)
        messages.append(str(caught.value))

    def apart(model: PreTrainedModel) -> None:
        fully_shard(model.base_model)
        fully_shard(model)

    with pytest.raises(ValueError, match=r"shard: separates lm_head\.weight from the tensor it is tied to"):
        load_model(tied, shard=apart)
    return results, messages


def test_several_ranks_load_and_refuse_as_one_does(tmp_path: Path) -> None:
    """Slices, ties, merged experts, odd sizes, random weights; an error is raised on every rank."""
    originals = [build("llama_tied"), build("qwen3", vocab_size=63), build("qwen3_moe")]
    folders = [tmp_path / str(number) for number in range(len(originals))]
    for original, folder in zip(originals, folders, strict=True):
        original.save_pretrained(folder)
    (tmp_path / "random").mkdir()
    originals[0].config.save_pretrained(tmp_path / "random")
    names = [str(folder) for folder in (*folders, tmp_path / "random" / "config.json")]
    expected = [whole(model) for model in originals] + [whole(load_model(names[-1], seed=5))]
    refused = [saved(tmp_path / kind) for kind in ("missing", "shape")]
    change_weights(refused[0], lambda tensors: tensors.pop("model.norm.weight"))
    change_weights(refused[1], lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    for results, messages in run_ranks(2, sharded, names, [str(folder) for folder in refused], names[0]):
        for result, tensors in zip(results, expected, strict=True):
            assert_same(result, tensors)
        assert "model.norm.weight is missing" in messages[0]
        assert "model.norm.weight has shape [65]" in messages[1]


def missing(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def unexpected(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(64, 64)}))


def other_shape(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(64, 63)}))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def adapter(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-7])


def lost_shard(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def in_shards(folder: Path) -> list[Path]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30KB")
    return sorted(folder.glob("model-*.safetensors"))


def change_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def extra_shard(folder: Path) -> None:
    shards = in_shards(folder)
    (folder / "model-00099-of-00099.safetensors").write_bytes(shards[0].read_bytes())


def whole_beside_shards(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    in_shards(folder)
    (folder / "model.safetensors").write_bytes(content)


def lost_index(folder: Path) -> None:
    in_shards(folder)
    (folder / "model.safetensors.index.json").unlink()


def broken_index(folder: Path) -> None:
    in_shards(folder)
    (folder / "model.safetensors.index.json").write_text("{")


def moved_in_the_index(folder: Path) -> None:
    shards = in_shards(folder)
    change_index(folder, lambda mapping: mapping.update({"model.norm.weight": shards[0].name}))


def unnamed_in_the_index(folder: Path) -> None:
    shards = in_shards(folder)
    tensors = load_file(shards[0])
    save_file({**tensors, "model.extra.weight": torch.ones(2)}, shards[0], metadata={"format": "pt"})


def missing_in_shards(folder: Path) -> None:
    shards = in_shards(folder)
    tensors = load_file(shards[1])
    name = min(tensors)
    del tensors[name]
    save_file(tensors, shards[1], metadata={"format": "pt"})
    change_index(folder, lambda mapping: mapping.pop(name))


def escaping_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def config_field(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def encoder(folder: Path) -> None:
    config_field(folder, model_type="vit")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, r"model: model\.layers\.1\.mlp\.up_proj\.weight is missing in .*; give complete files"),
        (
            unexpected,
            r"model: model\.layers\.2\.mlp\.up_proj\.weight is unknown to the config, but in .*; give the config",
        ),
        (other_shape, r"model: lm_head\.weight has shape \[64, 63\] in .*, but \[64, 64\] according to the config"),
        (pickled, r"has pytorch_model\.bin but no model\.safetensors; convert the weights to safetensors"),
        (adapter, r"has adapter_model\.safetensors but no model\.safetensors"),
        (truncated, r"model\.safetensors cannot be read .*; copy or download the file again"),
        (lost_shard, r"model-00002-of-\d+\.safetensors is missing, although model\.safetensors\.index\.json names it"),
        (no_weights, r"has no weights \(model\.safetensors or .*; copy or download the weights, or set init=random"),
        (extra_shard, r"model-00099-of-00099\.safetensors is not named in model\.safetensors\.index\.json; remove"),
        (
            whole_beside_shards,
            r"model\.safetensors is not named in model\.safetensors\.index\.json; remove the file or the index",
        ),
        (
            lost_index,
            r"model-00001-of-\d+\.safetensors is one of several files, but their index, .* is missing; copy",
        ),
        (broken_index, r"index\.json has no valid weight_map; copy or download the file again"),
        (
            moved_in_the_index,
            r"model: model\.norm\.weight is not in .*model-.*safetensors, although .*index\.json says that it is",
        ),
        (
            unnamed_in_the_index,
            r"model: model\.extra\.weight is unknown to the config, but in .*model-00001-of-\d+\.safetensors; give the",
        ),
        (missing_in_shards, r"model: .*weight is missing in .*; give complete files"),
        (escaping_shard, r"is missing, although model\.safetensors\.index\.json names it"),
        (encoder, r"'vit' is not a causal language model"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(damage: Any, message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def one_expert(change: str) -> Any:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(name)
        if change == "unexpected":
            tensors[name] = tensor
            tensors[name.replace("experts.3", "experts.4")] = tensor.clone()
        elif change == "shape":
            tensors[name] = torch.ones(33, 64)

    return damage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is missing\); give complete files"),
        (
            "unexpected",
            r"experts\.4\.up_proj\.weight in model\.safetensors is not part of the model of this config",
        ),
        (
            "shape",
            r"experts\.3\.up_proj\.weight has shape \[33, 64\] in .*model\.safetensors, but \[32, 64\] according",
        ),
    ],
)
def test_an_expert_that_is_not_whole_is_named(
    change: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers merges experts, and would report a failure in a long table."""
    saved(tmp_path, "qwen3_moe")
    change_weights(tmp_path, one_expert(change))
    capfd.readouterr()
    with pytest.raises(ValueError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


def test_a_hub_id_that_cannot_be_had_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nand no cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match=r"model: somebody/some-model is not a local folder, and it cannot be downloaded from the Hub"
    ):
        load_model("somebody/some-model")


def test_a_hub_folder_without_safetensors_does_not_become_random(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    build("llama").config.save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match="has no safetensors files on the Hub"):
        load_model("somebody/some-model")
    saved(tmp_path)
    assert named_tensors(load_model("somebody/some-model")).keys() == named_tensors(build("llama")).keys()


def test_a_buffer_that_the_model_does_not_restore_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(
        ValueError, match=r"_init_weights of LlamaForCausalLM does not initialise the buffer model\.rotary"
    ):
        load_model(tmp_path)


def test_regions() -> None:
    def rows(shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...], at: tuple[int, ...]) -> Any:
        return [(part.start, part.stop) for part in region_of(shape, placements, mesh, at)]

    assert [rows((5, 2), [Shard(0)], (2,), (r,))[0] for r in (0, 1)] == [(0, 3), (3, 5)]
    assert [rows((3,), [Shard(0)], (4,), (r,))[0] for r in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert rows((5, 2), [Replicate(), Shard(1)], (2, 2), (1, 1)) == [(0, 5), (1, 2)]
    assert rows((), [Replicate()], (2,), (1,)) == []
    with pytest.raises(AssertionError):
        rows((5,), [Partial()], (2,), (0,))
