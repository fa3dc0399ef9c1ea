"""References: a separate model or other adapters; refresh and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from padfree.checkpoint.checkpoint_files import CheckpointError
from padfree.checkpoint.checkpointer import Checkpointer
from padfree.config import Config, config_from_dict
from padfree.distributed import Mesh, make_mesh
from padfree.model.lora import is_adapter
from padfree.model.named_tensors import named_tensors
from padfree.train.engine import Engine
from padfree.train.rl.reference_model import AdapterReference, ModelReference, ReferenceModel
from padfree.train.setup import build_engine, build_reference
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import LR, make_samples, small_model

SAMPLES = make_samples()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second")):
        small_model("llama_tied", num_hidden_layers=1, seed=seed).save_pretrained(folder / name)
    small_model("llama_tied", num_hidden_layers=1, intermediate_size=48).save_pretrained(folder / "wider")
    return folder


def make_config(models: Path, *, reference: str = "first", refresh: int | None = 2, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(models / "first")},
        "reference": {"path": str(models / reference), "refresh": refresh},
        "data": {"path": ["in memory"]},
        "batch": {"samples": 4, "max_tokens": 16},
        "loss": {"kind": "reinforce", "kl_coefficient": 0.1, "advantage": "given"},
        "optimizer": {"lr": LR},
        "run": {"folder": "nowhere", "device": "cpu"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


def built(config: Config, mesh: Mesh) -> tuple[Engine, ReferenceModel]:
    engine = build_engine(config, mesh)
    reference = build_reference(config, mesh, engine)
    assert reference is not None
    return engine, reference


def batches(engine: Engine, reference: ReferenceModel, number: int) -> None:
    for _ in range(number):
        engine.step(SAMPLES)
        reference.after_batch(engine.model)


def logprobs(scorer: Any) -> np.ndarray[Any, Any]:
    return np.concatenate(scorer.logprobs(SAMPLES))


LORA = {"rank": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [{}, LORA], ids=["weights", "adapters"])
def test_it_becomes_the_trained_model_when_it_is_due(
    lora: dict[str, Any], dtype: str, mesh: Mesh, models: Path
) -> None:
    engine, reference = built(make_config(models, lora=lora, model={"dtype": dtype}), mesh)
    assert isinstance(reference, AdapterReference if lora else ModelReference)
    start = logprobs(engine.scorer)
    batches(engine, reference, 1)
    assert not reference.tensors_to_save()
    assert np.array_equal(logprobs(reference), start)
    assert abs(logprobs(engine.scorer) - start).max() > 1e-3
    batches(engine, reference, 1)
    trained = logprobs(engine.scorer)
    assert np.array_equal(logprobs(reference), trained)
    batches(engine, reference, 1)
    assert np.array_equal(logprobs(reference), trained)
    assert abs(logprobs(engine.scorer) - trained).max() > 1e-3
    batches(engine, reference, 1)
    assert np.array_equal(logprobs(reference), logprobs(engine.scorer))


def test_adapters_need_no_second_model(mesh: Mesh, models: Path) -> None:
    """The results equal those of a separate model bit for bit, and the policy's adapters are unchanged."""
    config = make_config(models, lora=LORA, refresh=None)
    engine, reference = built(config, mesh)
    alone = build_reference(config, mesh)
    assert isinstance(alone, ModelReference)
    batches(engine, reference, 2)
    before = {name: tensor.detach().clone() for name, tensor in named_tensors(engine.model).items()}
    assert np.array_equal(logprobs(reference), logprobs(alone))
    assert not reference.refreshed
    for name, tensor in named_tensors(engine.model).items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.requires_grad == is_adapter(name)


def test_a_model_of_its_own_takes_weights_and_adapters_together(mesh: Mesh, models: Path) -> None:
    engine, reference = built(make_config(models, lora=LORA, reference="second"), mesh)
    assert isinstance(reference, ModelReference)
    assert not any(parameter.requires_grad for parameter in reference.scorer.model.parameters())
    assert abs(logprobs(reference) - logprobs(engine.scorer)).max() > 0.1
    batches(engine, reference, 2)
    np.testing.assert_allclose(logprobs(reference), logprobs(engine.scorer), atol=1e-4)


def test_another_model_cannot_be_refreshed(mesh: Mesh, models: Path) -> None:
    config = make_config(models, reference="wider")
    with refused("reference.refresh"):
        built(config, mesh)
    assert build_reference(make_config(models, reference="wider"), mesh) is not None


# Checkpoints


def save(folder: Path, engine: Engine, reference: ReferenceModel) -> Path:
    return Checkpointer(folder, keep_last=9).save(
        reference.batches,
        model=engine.model,
        optimizer=engine.optimizer,
        extra={"reference": reference.state_dict()},
        rank_state={},
        reference=reference.tensors_to_save(),
    )


def load(path: Path, engine: Engine, reference: ReferenceModel) -> None:
    extra, _ = Checkpointer(path.parent).load(
        path, model=engine.model, optimizer=engine.optimizer, reference=reference.tensors()
    )
    reference.load_state_dict(extra["reference"])


@pytest.mark.parametrize("lora", [{}, LORA], ids=["weights", "adapters"])
def test_resume_restores_it(lora: dict[str, Any], mesh: Mesh, models: Path, tmp_path: Path) -> None:
    """Before the first refresh from reference.path, after it from the checkpoint."""
    config = make_config(models, lora=lora)
    engine, reference = built(config, mesh)
    for _ in range(3):
        batches(engine, reference, 1)
        path = save(tmp_path, engine, reference)
        again, restored = built(config, mesh)
        load(path, again, restored)
        assert np.array_equal(logprobs(restored), logprobs(reference))
        assert restored.state_dict() == reference.state_dict()
    batches(engine, reference, 1)
    batches(again, restored, 1)
    assert np.array_equal(logprobs(restored), logprobs(engine.scorer))
    assert restored.batches == 4


def ranks(rank: int, world: int, models: Path, folder: Path) -> list[Any]:
    found = []
    for name, lora in (("weights", {}), ("adapters", LORA)):
        engine, reference = built(make_config(models, lora=lora), make_mesh("cpu"))
        batches(engine, reference, 3)
        save(folder / name, engine, reference)
        found.append((logprobs(engine.scorer), logprobs(reference)))
    return found


def test_two_ranks_do_what_one_does(mesh: Mesh, models: Path, tmp_path: Path) -> None:
    """One process also resumes their checkpoint."""
    results = run_ranks(2, ranks, models, tmp_path)[0]
    for (name, lora), (policy, scored) in zip((("weights", {}), ("adapters", LORA)), results, strict=True):
        config = make_config(models, lora=lora)
        engine, reference = built(config, mesh)
        batches(engine, reference, 3)
        np.testing.assert_allclose(policy, logprobs(engine.scorer), atol=1e-4)
        np.testing.assert_allclose(scored, logprobs(reference), atol=1e-4)
        again, restored = built(config, mesh)
        load(tmp_path / name / "step-00000003", again, restored)
        np.testing.assert_allclose(logprobs(restored), scored, atol=1e-4)


def test_a_checkpoint_of_another_reference_is_refused(mesh: Mesh, models: Path, tmp_path: Path) -> None:
    engine, reference = built(make_config(models, lora=LORA), mesh)
    batches(engine, reference, 2)
    path = save(tmp_path, engine, reference)
    again, other = built(make_config(models, lora=LORA, reference="second"), mesh)
    with pytest.raises(
        CheckpointError,
        match=r"^checkpoint: .* has another reference model \(.* in the checkpoint and .* in this run\); keep",
    ):
        load(path, again, other)
