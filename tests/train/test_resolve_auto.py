"""The resolution of `auto` settings by device and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from padfree.config import CheckpointConfig, Config
from padfree.distributed import Mesh
from padfree.estimate.activations import levels_by_layer
from padfree.estimate.layer_options import forward_flops, level_flops
from padfree.estimate.memory import estimate_memory
from padfree.layers.offload import LAYERS_PER_COPY
from padfree.model.structure import layers_of
from padfree.train import resolve_auto as module
from padfree.train.disk import DiskUse
from padfree.train.resolve_auto import USABLE_FRACTION, expected_asynchronous, resolve_auto, resolve_auto_on
from tests.refused import refused
from tests.train.cases import alone
from tests.train.trainer_cases import make_config

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiler", lambda kind: ("inductor" if kind == "cuda" else "none", "because"))


def skeleton(hidden: int = 256) -> PreTrainedModel:
    import torch

    config = Qwen3Config(
        num_hidden_layers=4, hidden_size=hidden, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=1000,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call, no-any-return]


def config_of(tmp_path: Any, **parallel: Any) -> Config:
    return make_config(
        tmp_path, tmp_path, batch={"samples": 4, "max_tokens": 65536}, model={"dtype": "bfloat16"}, parallel=parallel
    )


def needed(config: Config, hidden: int = 256, processes: int = 1) -> float:
    found = estimate_memory(config, skeleton(hidden), processes=processes, device_type="cuda")
    return found.device / USABLE_FRACTION


@pytest.mark.parametrize("way", ["none", "selective", "full"])
def test_the_fastest_that_fits_is_taken(way: str, tmp_path: Any) -> None:
    """With exactly the memory that a choice needs, it is chosen; all faster choices need more."""
    divided = {"expert": 2}  # the graphs of compiled layers are broken, so all layers have the same level
    asked = config_of(tmp_path, **divided)
    wanted = {
        reshard: config_of(tmp_path, compile="inductor", checkpointing=way, reshard=reshard, **divided)
        for reshard in (True, False)
    }
    for reshard, config in wanted.items():
        memory = needed(config, processes=2) + 1
        found = resolve_auto(asked, skeleton(), processes=2, device_type="cuda", memory=memory)
        chosen = found.config.parallel
        assert (chosen.compile, chosen.checkpointing, chosen.reshard) == ("inductor", way, reshard)
        assert set(found.reasons) == {"parallel.compile", "parallel.checkpointing", "parallel.reshard"}
        assert any(line.startswith(f"parallel.checkpointing={way}: needs about") for line in found.lines())
    assert needed(wanted[True], processes=2) < needed(wanted[False], processes=2)


@pytest.mark.parametrize("compiler", ["inductor", "none"])
@pytest.mark.parametrize("hidden", [256, 2048])
@pytest.mark.parametrize("processes", [1, 2])
def test_levels_by_layer_fill_the_memory(processes: int, hidden: int, compiler: str, tmp_path: Any) -> None:
    """The chosen levels fit the device. With more memory, fewer recompute, until every layer keeps everything."""
    asked = config_of(tmp_path, compile=compiler)
    few, most = (
        needed(config_of(tmp_path, compile=compiler, checkpointing=way, reshard=reshard), hidden, processes) + 1
        for way, reshard in (("full", processes > 1), ("none", False))
    )
    costs, seen = [], set()
    for share in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0):
        memory = few + share * (most - few)
        found = resolve_auto(asked, skeleton(hidden), processes=processes, device_type="cuda", memory=memory)
        chosen = found.config.parallel
        estimate = estimate_memory(found.config, skeleton(hidden), processes=processes, device_type="cuda")
        assert estimate.device <= USABLE_FRACTION * memory
        levels = levels_by_layer(chosen.checkpointing, 4)
        layers = zip(layers_of(skeleton(hidden)), levels, strict=True)
        costs.append(sum(level_flops(skeleton(hidden), *each, 2, compiler != "none") for each in layers))
        seen |= set(levels)
        if chosen.checkpointing not in ("none", "full", "selective"):
            (line,) = [each for each in found.lines() if each.startswith("parallel.checkpointing=")]
            assert "keep everything" in line or "none" not in levels
            assert " layers " in line
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0
    assert chosen.reshard is False
    assert "host" not in seen or (hidden >= 2048 and compiler != "none")
    assert seen <= {"host", "full", "selective", "attention", "none"}
    assert len(seen) > 1


def test_a_model_of_4b_fills_a_device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers offload, the last keep everything, and the copies end before the backward pass."""
    import torch

    monkeypatch.setattr(module, "_machine_memory", lambda: 1000.0 * GIB)
    config = Qwen3Config(
        num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    asked, memory = config_of(tmp_path), 200.0 * GIB
    found = resolve_auto(asked, model, processes=1, device_type="cuda", memory=memory)
    chosen = found.config.parallel.checkpointing
    levels = levels_by_layer(chosen, 36)
    assert levels[0] == "host"
    assert levels[-1] == "none"
    assert levels.count("host") <= 36 / LAYERS_PER_COPY
    estimate = estimate_memory(found.config, model, processes=1, device_type="cuda")
    assert 0.98 * USABLE_FRACTION * memory < estimate.device <= USABLE_FRACTION * memory
    line = next(each for each in found.lines() if each.startswith("parallel.checkpointing="))
    assert line.startswith(f"parallel.checkpointing={chosen}: {levels.count('host')} layers offload, ")
    assert config_of(tmp_path, compile="inductor", checkpointing=chosen).parallel.checkpointing == chosen


def test_it_says_what_a_smaller_optimizer_state_would_save(tmp_path: Any) -> None:
    """With the memory of float32 state, layers recompute; with int8 state, all keep everything, as the line says."""
    asked = config_of(tmp_path, compile="inductor")
    all_kept = config_of(tmp_path, compile="inductor", checkpointing="none", reshard=False)
    small = replace(all_kept, optimizer=replace(all_kept.optimizer, state="int8"))
    memory = needed(small) * 1.001
    found = resolve_auto(asked, skeleton(), processes=1, device_type="cuda", memory=memory)
    levels = levels_by_layer(found.config.parallel.checkpointing, 4)
    assert set(levels) != {"none"}
    layers = list(zip(layers_of(skeleton()), levels, strict=True))
    repeated = sum(level_flops(skeleton(), *each, 2, True) for each in layers)
    whole = repeated + 3 * sum(forward_flops(skeleton(), layer) for layer, _ in layers)
    assert found.reasons["parallel.checkpointing"].endswith(f"int8 {repeated / whole:.0%}")
    smaller = replace(asked, optimizer=replace(asked.optimizer, state="int8"))
    found = resolve_auto(smaller, skeleton(), processes=1, device_type="cuda", memory=memory)
    assert found.config.parallel.checkpointing == "none"
    assert "optimizer.state" not in found.reasons["parallel.checkpointing"]


@pytest.mark.parametrize("value", ["most", "3 most", "none 3", "0 none", "1 host,", "1 host; 2 none", "-1 none", ""])
def test_levels_that_are_not_levels_are_refused(value: str, tmp_path: Any) -> None:
    with refused("parallel.checkpointing"):
        config_of(tmp_path, compile="inductor", checkpointing=value)
    with refused("parallel.checkpointing", about="compiled layers"):
        config_of(tmp_path, compile="none", checkpointing="3 attention")


def test_what_is_set_stays(tmp_path: Any) -> None:
    given = {"compile": "none", "checkpointing": "full", "reshard": True}
    found = resolve_auto(config_of(tmp_path, **given), skeleton(), processes=1, device_type="cuda", memory=GIB * 100)
    assert found.config == config_of(tmp_path, **given)
    assert found.lines() == []
    half = resolve_auto(
        config_of(tmp_path, checkpointing="selective"), skeleton(), processes=1, device_type="cuda", memory=GIB * 100
    )
    assert (half.config.parallel.checkpointing, half.config.parallel.reshard) == ("selective", False)
    assert set(half.reasons) == {"parallel.compile", "parallel.reshard"}


def test_nothing_fits(tmp_path: Any) -> None:
    for processes, reshard in ((1, False), (2, True)):  # a single process has split weights, which need least
        found = resolve_auto(
            config_of(tmp_path), skeleton(), processes=processes, device_type="cuda", memory=GIB // 100
        )
        assert (found.config.parallel.checkpointing, found.config.parallel.reshard) == ("full", reshard)
        assert "lower batch.max_tokens" in found.reasons["parallel.checkpointing"]


@pytest.mark.parametrize(("device", "parallel"), [("cpu", {}), ("cuda", {"context": 2}), ("cuda", {"compile": False})])
def test_host_is_for_whole_graphs_of_compiled_layers(device: str, parallel: dict[str, Any], tmp_path: Any) -> None:
    memory = needed(config_of(tmp_path, compile="inductor", checkpointing="host", reshard=True), 2048) + 1
    found = resolve_auto(
        config_of(tmp_path, **parallel), skeleton(2048), processes=2, device_type=device, memory=memory
    )
    assert found.config.parallel.checkpointing != "host"


def test_adapters_are_put_in_once(tmp_path: Any) -> None:
    pytest.importorskip("peft")
    from dataclasses import replace

    from padfree.config import LoraConfig

    config = replace(config_of(tmp_path), lora=LoraConfig(rank=2))
    model = skeleton()
    found = resolve_auto(config, model, processes=1, device_type="cuda", memory=GIB // 100)
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 4 * 7
    assert found.config.lora == config.lora


def test_on_this_machine(tmp_path: Any) -> None:
    mesh: Mesh = alone()
    Qwen3Config(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=40,
                architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)  # fmt: skip
    config = make_config(tmp_path / "run", tmp_path / "config.json", batch={"samples": 4, "max_tokens": 64})
    found = resolve_auto_on(config, mesh)
    parallel = found.config.parallel
    assert (parallel.compile, parallel.checkpointing, parallel.reshard) == ("none", "none", False)
    assert found.fields()["parallel.checkpointing"] == "none"
    assert resolve_auto_on(found.config, mesh).config is found.config


def test_a_gpu_without_a_compiler_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert module._compiler("cpu")[0] == "none"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert module._compiler("cuda") == (
        "none", "the compiler needs a C compiler, and none was found (install gcc, or set CC)"
    )  # fmt: skip
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/cc")
    assert module._compiler("cuda")[0] == "inductor"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton" in module._compiler("cuda")[1]


@pytest.mark.parametrize(
    ("free", "processes", "replicate", "local", "expected", "reason"),
    [
        (100.0, 1, 1, 1, True, "a checkpoint needs 12.00 GiB of 100.00 GiB of free memory on host "),
        (20.0, 1, 1, 1, False, "12.00 GiB of 20.00 GiB"),
        (20.0, 8, 1, 4, True, "6.00 GiB of 20.00 GiB"),  # half of the ranks are on this host
        (20.0, 8, 2, 4, False, "12.00 GiB of 20.00 GiB"),  # one replica writes everything
        (20.0, 64, 1, 4, False, "192.00 MiB, which takes less than a second"),
    ],
)
def test_the_expected_choice_for_checkpoints(
    free: float,
    processes: int,
    replicate: int,
    local: int,
    expected: bool,
    reason: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(module, "free_host_memory", lambda: free * GIB)
    monkeypatch.setattr(module, "disk_use", lambda *_: DiskUse(checkpoint=12 * GIB, export=0))
    config = config_of(tmp_path, replicate=replicate)
    found = expected_asynchronous(config, skeleton(), processes=processes, device_type="cuda")
    assert found is not None
    assert found.config.checkpoint.asynchronous is expected
    assert reason in found.lines()[0]
    assert found.lines()[0].startswith(f"checkpoint.asynchronous={str(expected).lower()}: ")
    assert found.fields()["checkpoint.asynchronous because"] in found.lines()[0]


def test_no_choice_is_expected_without_checkpoints_or_auto(tmp_path: Any) -> None:
    asked = config_of(tmp_path)
    for checkpoint in (CheckpointConfig(every=None), CheckpointConfig(every=1, asynchronous=True)):
        config = replace(asked, checkpoint=checkpoint)
        assert expected_asynchronous(config, skeleton(), processes=1, device_type="cuda") is None
    offloaded = replace(asked, parallel=replace(asked.parallel, offload=True))
    for config, device_type in ((asked, "cpu"), (offloaded, "cuda")):
        found = expected_asynchronous(config, skeleton(), processes=1, device_type=device_type)
        assert found is not None
        assert "the model is in host memory" in found.lines()[0]
