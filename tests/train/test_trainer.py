"""Whole runs: the same metrics on any layout and after a resume; stopping by signals and at the end."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from padfree.config import Config
from padfree.distributed import Mesh, make_mesh
from padfree.sample import Sample
from padfree.train.batcher import make_batcher
from padfree.train.determinism import deterministic
from padfree.train.engine import Engine
from padfree.train.finite_checks import NonFiniteError
from padfree.train.step import PendingStep
from padfree.train.trainer import RunResult, Trainer, any_rank_wants
from tests.ranks import run_ranks
from tests.refused import refused
from tests.train.cases import weights_of
from tests.train.trainer_cases import ONE_UPDATE, RL, SFT, lines, make_config, make_trainer, samples, save_config


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(tmp_path_factory.mktemp("model"))


def ranks(rank: int, world: int, layouts: list[tuple[int, Config]]) -> list[RunResult]:
    return [make_trainer(config, make_mesh("cpu", context=context)).run() for context, config in layouts]


def test_metrics_do_not_depend_on_the_layout_nor_on_a_resume(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    """One process; two data ranks; two context ranks for the first steps and one process for the others."""
    elsewhere = []
    for name, sections in (("sft", SFT), ("rl", RL)):
        config = make_config(tmp_path / name, model_folder, **sections)
        newest = tmp_path / name / "checkpoints" / "step-00000006"
        assert make_trainer(config, mesh).run() == RunResult(step=6, stopped=False, checkpoint=newest)
        begun = {**sections, "run": {"steps": 3}}  # inside a rollout batch
        elsewhere.append((1, make_config(tmp_path / f"{name} data", model_folder, **sections)))
        elsewhere.append((2, make_config(tmp_path / f"{name} resumed", model_folder, **begun)))
    run_ranks(2, ranks, elsewhere)
    for name, sections in (("sft", SFT), ("rl", RL)):
        make_trainer(make_config(tmp_path / f"{name} resumed", model_folder, **sections), mesh).run()
        expected = lines(tmp_path / name)
        assert [line["step"] for line in expected] == list(range(6))
        for folder in (f"{name} data", f"{name} resumed"):
            found = lines(tmp_path / folder)
            assert len(found) == 6
            for line, other in zip(found, expected, strict=True):
                assert line == pytest.approx(other, rel=1e-5, abs=1e-5), folder


@pytest.mark.parametrize(
    "sections",
    [SFT, RL, ONE_UPDATE, {"batch": {"tokens": 30, "max_tokens": 16}}],
    ids=["sft", "rl", "rl, one update", "tokens"],
)
def test_resume_is_bitwise(sections: dict[str, Any], mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    whole = make_trainer(make_config(tmp_path / "whole", model_folder, **sections), mesh)
    whole.run()
    for steps in (2, 4, 6) if sections is not RL else (1, 3, 4, 6):  # a rollout batch has 4 updates
        run = {"steps": steps}
        part = make_trainer(make_config(tmp_path / "parts", model_folder, **sections, run=run), mesh)
        part.run()
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    for name, weight in weights_of(whole.engine.model).items():
        assert torch.equal(weight, weights_of(part.engine.model)[name]), name


@pytest.mark.parametrize("changes", [{}, {"kind": "gspo"}, {"kl_coefficient": 0.1}, {"temperature": 0.7}], ids=str)
def test_one_update_with_a_batch_needs_no_old_logprobs(
    changes: dict[str, Any], mesh: Mesh, model_folder: Path, tmp_path: Path
) -> None:
    """The old policy equals the policy of the only update: the same run without an extra pass over the batch."""
    trainers = {}
    for old_policy in ("auto", "trainer"):
        loss = {**ONE_UPDATE["loss"], **changes, "old_policy": old_policy}
        trainers[old_policy] = make_trainer(
            make_config(tmp_path / old_policy, model_folder, batch=ONE_UPDATE["batch"], loss=loss), mesh
        )
        trainers[old_policy].run()
    written = {name: (tmp_path / name / "metrics.jsonl").read_text() for name in trainers}
    assert "seconds/old_logprobs" in written["trainer"]
    assert "seconds/old_logprobs" not in written["auto"]
    assert not trainers["auto"].batches.waits_for_updates
    assert trainers["trainer"].batches.waits_for_updates
    for line, other in zip(lines(tmp_path / "auto"), lines(tmp_path / "trainer"), strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-6)
        assert line["loss/ratio"] == 1.0
    for name, weight in weights_of(trainers["auto"].engine.model).items():
        torch.testing.assert_close(weight, weights_of(trainers["trainer"].engine.model)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("refresh", [1, 2])
def test_resume_with_a_reference_that_is_refreshed_is_bitwise(
    refresh: int, mesh: Mesh, model_folder: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {**RL, "reference": {"path": str(model_folder), "refresh": refresh}}
    steps = {"steps": 11}
    whole = make_trainer(make_config(tmp_path / "whole", model_folder, **sections, run=steps), mesh)
    whole.run()
    for stop in (3, 4, 6, 9, 11):  # batches end after 4 and 8 steps
        part = make_trainer(make_config(tmp_path / "parts", model_folder, **sections, run={"steps": stop}), mesh)
        part.run()
    found = lines(tmp_path / "whole")
    assert lines(tmp_path / "parts") == found
    # A refreshed reference equals the policy until the next update.
    assert found[3]["loss/kl"] > 1e-6
    assert (found[4]["loss/kl"] < 1e-9) == (refresh == 1)
    assert found[8]["loss/kl"] < 1e-9
    for name, weight in weights_of(whole.engine.model).items():
        assert torch.equal(weight, weights_of(part.engine.model)[name]), name


def test_lines_of_steps_that_were_not_saved_are_written_again(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, **SFT, checkpoint={"every": 2})
    trainer = make_trainer(config, mesh)
    crash(trainer.engine, at=5)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert len(lines(tmp_path)) == 5
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # the process died while writing
    again = make_trainer(config, mesh)
    assert again.step == 4
    assert again.run().step == 6
    assert [line["step"] for line in lines(tmp_path)] == list(range(6))


def crash(engine: Engine, at: int) -> None:
    begin = engine.begin

    def crashing(*args: Any, **kwargs: Any) -> PendingStep:
        if kwargs["step"] == at:
            raise KeyboardInterrupt
        return begin(*args, **kwargs)

    engine.begin = crashing  # type: ignore[method-assign]


def test_a_signal_ends_the_run_after_the_update_with_a_checkpoint(
    mesh: Mesh, model_folder: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path, model_folder, **RL)
    trainer = make_trainer(config, mesh)
    begin = trainer.engine.begin

    def signalling(*args: Any, **kwargs: Any) -> PendingStep:
        if kwargs["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(*args, **kwargs)

    trainer.engine.begin = signalling  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGTERM)
    result = trainer.run()
    assert (result.step, result.stopped) == (2, True)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000002"
    assert signal.getsignal(signal.SIGTERM) is before
    assert make_trainer(config, mesh).run().step == 6


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_updates_begun_ahead_change_nothing(kind: str, mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    """As on a GPU: an update begins before the previous one is finished. Checkpoints are the same."""
    weights = []
    for ahead in (False, True):
        config = make_config(
            tmp_path / str(ahead), model_folder, **{"sft": SFT, "rl": RL}[kind], checkpoint={"every": 2, "keep": 3}
        )
        trainer = make_trainer(config, mesh)
        trainer.prepares_next = ahead
        order: list[str] = []
        note_order(trainer, order)
        trainer.run()
        weights.append(weights_of(trainer.engine.model))
        overlapping = any(pair == ("begin", "begin") for pair in pairwise(order))
        assert overlapping == ahead
        assert order.count("begin") == order.count("finish") == 6
    assert lines(tmp_path / "True") == lines(tmp_path / "False")
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
    again = make_trainer(make_config(tmp_path / "True", model_folder, **{"sft": SFT, "rl": RL}[kind]), mesh)
    assert again.step == 6


def note_order(trainer: Trainer, order: list[str]) -> None:
    begin = trainer.engine.begin

    def noting(*args: Any, **kwargs: Any) -> PendingStep:
        order.append("begin")
        pending = begin(*args, **kwargs)
        finish = pending.finish

        def finishing() -> Any:
            order.append("finish")
            return finish()

        pending.finish = finishing  # type: ignore[method-assign]
        return pending

    trainer.engine.begin = noting  # type: ignore[method-assign]


def test_nan_in_an_update_ahead_of_another_stops_both(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    """The next update has begun before the loss is known. It must not change the weights."""
    clean = [Sample(tokens=np.minimum(sample.tokens, 38), uid=sample.uid) for sample in samples()]
    clean[5].tokens[2] = 39
    config = make_config(tmp_path, model_folder, **SFT, data={"shuffle": False}, checkpoint={"every": 10})
    trainer = make_trainer(config, mesh, clean)
    trainer.prepares_next = True
    embeddings = trainer.engine.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, ids, rows: rows.masked_fill(ids[0][..., None] == 39, float("nan")))
    with pytest.raises(NonFiniteError, match=f"step 1: the loss is nan on rank 0.* inspect sample {clean[5].uid}"):
        trainer.run()
    one = make_trainer(make_config(tmp_path / "one", model_folder, **SFT, data={"shuffle": False}), mesh, clean)
    one.engine.step(clean[:4])
    for name, weight in weights_of(trainer.engine.model).items():
        assert torch.equal(weight, weights_of(one.engine.model)[name]), name


def test_a_signal_while_an_update_is_ahead(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, **SFT)
    trainer = make_trainer(config, mesh, on_step=lambda metrics: os.kill(os.getpid(), signal.SIGTERM))
    trainer.prepares_next = True
    result = trainer.run()
    assert result.stopped
    assert result.step < 6
    assert [line["step"] for line in lines(tmp_path)] == list(range(result.step))
    assert make_trainer(config, mesh).step == result.step


def test_deterministic_is_for_the_run_alone(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    seen: list[bool] = []

    def on_step(_: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    for wanted in (True, False):
        folder = tmp_path / str(wanted)
        config = make_config(folder, model_folder, **SFT, run={"steps": 2, "deterministic": wanted})
        make_trainer(config, mesh, on_step=on_step).run()
        assert not torch.are_deterministic_algorithms_enabled()
    assert seen == [True, True, False, False]
    assert lines(tmp_path / "True") == lines(tmp_path / "False")
    with pytest.raises(KeyboardInterrupt), deterministic(True):
        raise KeyboardInterrupt
    assert not torch.are_deterministic_algorithms_enabled()


def test_rl_uses_whole_groups_and_the_reference(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, **RL, reference={"path": str(model_folder)}, run={"steps": 4})
    trainer = make_trainer(config, mesh)
    groups = next(make_batcher(config, samples()))
    assert [len(group) for group in groups] == [3, 3]
    assert all(len({sample.group for sample in group}) == 1 for group in groups)
    trainer.run()
    found = lines(tmp_path)
    # Before the first update the reference equals the policy: the divergence is 0, and positive later.
    assert found[0]["loss/kl"] == pytest.approx(0.0, abs=1e-9)
    assert found[3]["loss/kl"] > 1e-6
    assert found[0]["loss/ratio"] == pytest.approx(1.0, abs=1e-6)
    assert [line["epoch"] for line in found] == [0, 0, 1, 1]
    assert found[0]["reward"] == 1.0


@pytest.mark.parametrize("kind", ["gspo", "cispo", "reinforce"])
def test_other_losses_run(kind: str, mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    loss = {"kind": kind, "advantage": "rloo", "entropy_coefficient": 0.01}
    config = make_config(tmp_path, model_folder, batch=RL["batch"], loss=loss, run={"steps": 2})
    make_trainer(config, mesh).run()
    assert all(np.isfinite(line["loss"]) and line["gradient_norm"] > 0 for line in lines(tmp_path))


def test_the_run_ends_with_the_data(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, batch={"samples": 5, "max_tokens": 16}, run={"steps": None})
    assert make_trainer(config, mesh).run().step == 3 * 3
    assert sum(line["samples"] for line in lines(tmp_path)) == 36
    assert make_trainer(config, mesh).run().step == 9, "nothing is left to do"


def test_a_sample_that_comes_twice_in_a_batch_is_trained_twice(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, model_folder, batch={"tokens": 200, "max_tokens": 16}, run={"steps": 1})
    make_trainer(config, mesh).run()
    assert lines(tmp_path)[0]["samples"] > 12


def test_refusals(mesh: Mesh, model_folder: Path, tmp_path: Path) -> None:
    with refused("data.path", "in memory has no samples"):
        make_batcher(make_config(tmp_path, model_folder, **SFT), [])
    with refused("batch.samples"):
        make_batcher(make_config(tmp_path, model_folder, **{**RL, "batch": {"samples": 2, "max_tokens": 9}}), samples())
    config = make_config(tmp_path, model_folder, batch={"samples": 4, "max_tokens": 8})
    with refused("max_tokens"):
        make_trainer(config, mesh).run()


def one_of_two(rank: int, world: int) -> list[bool]:
    mesh = make_mesh("cpu")
    return [any_rank_wants(rank == 1, mesh), any_rank_wants(False, mesh)]


def test_all_ranks_stop_if_one_rank_wants_to(mesh: Mesh) -> None:
    assert run_ranks(2, one_of_two) == [[True, False], [True, False]]
    assert any_rank_wants(True, mesh)
    assert not any_rank_wants(False, mesh)
