"""Data rows with several samples: a unit of batches and of the loss; shared prefixes; exact resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from padfree.config import Config, config_from_dict
from padfree.cp import shard
from padfree.data import StoredSamples, TokenizedDataset
from padfree.distributed import Mesh, make_mesh
from padfree.estimate.memory import estimate_memory
from padfree.head import score
from padfree.losses import SFTSettings, WeightMode
from padfree.model import attach, hidden_states, lm_head_of
from padfree.model.structure import skeleton
from padfree.optim.optimizer import make_optimizer
from padfree.optim.optimizer_settings import OptimizerConfig
from padfree.packing import CostModel, collate
from padfree.sample import Sample
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tasks.reading import TrainingData
from padfree.testing.models import build, save_with_tokenizer
from padfree.testing.tokenizers import TEMPLATES
from padfree.train.batch_preparer import distinct
from padfree.train.batcher import count_steps, make_batcher
from padfree.train.engine import Engine, LossSettings
from padfree.train.evaluate import make_evaluation
from padfree.train.microbatch import PackSettings
from padfree.train.run import train
from padfree.train.scorer import Scorer
from padfree.train.setup import build_engine
from padfree.train.shared_turns import copied_keys, run_cost
from padfree.train.training_data import load_held_out, load_tokenizer, load_training_data
from tests.data.stores import conversation, write_store
from tests.ranks import run_ranks
from tests.train.trainer_cases import lines
from tests.train.ways import write

TURNS = (3, 1, 4, 2, 1, 5)
MODES: tuple[WeightMode, ...] = ("token-mean", "sample-mean", "sum-of-sample-mean", "sample-sum", "constant")


def stored(folder: Path, turns: Sequence[int] = TURNS, **options: Any) -> TokenizedDataset:
    rows = [conversation(seed, count, **options) for seed, count in enumerate(turns)]
    return TokenizedDataset(write_store(folder, rows))


def config_of(folder: Path, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": ["train.jsonl"], "epochs": 2},
        "batch": {"samples": 2, "max_tokens": 400},
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "run": {"folder": str(folder / "run"), "device": "cpu"},
        "checkpoint": {"every": 1000, "export": False},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return config_from_dict(values)


# Batches


@pytest.mark.parametrize("batch", [{"samples": 2}, {"samples": None, "tokens": 900, "buffer": 4}])
def test_a_batch_has_whole_rows(batch: dict[str, Any], tmp_path: Path) -> None:
    data, config = stored(tmp_path), config_of(tmp_path, batch={"max_tokens": 400, **batch})
    seen: list[list[str]] = []
    for groups in make_batcher(config, data):
        rows = [str(group[0].uid).partition(" ")[0] for group in groups]
        for row, group in zip(rows, groups, strict=True):
            assert {sample.group or sample.uid for sample in group} == {row}
            assert len(group) == TURNS[int(row.rpartition(":")[2]) - 1]
        if batch["samples"] is not None:
            assert len(groups) == 2
        else:
            assert sum(len(sample) for group in groups for sample in group) <= 900
        seen.append(rows)
    flat = [row for rows in seen for row in rows]
    assert sorted(flat) == sorted(2 * [f"train.jsonl:{line}" for line in range(1, 7)])
    source = TrainingData(samples=data, report=data.report, place=data.place)
    assert count_steps(config, source, enough=100) == pytest.approx(len(seen), abs=0 if batch["samples"] else 1)


def test_a_row_that_a_batch_has_twice_is_two_units(tmp_path: Path) -> None:
    data = stored(tmp_path, (2, 1))
    samples = distinct([*data, *data])
    assert [sample.group for sample in samples] == [
        "train.jsonl:1",
        "train.jsonl:1",
        None,
        "train.jsonl:1 (time 2)",
        "train.jsonl:1 (time 2)",
        None,
    ]
    assert len({sample.uid for sample in samples}) == 6


# Loss and gradients


def make_engine(mesh: Mesh, mode: WeightMode, pack_settings: PackSettings, *, grouped: bool, max_tokens: int) -> Engine:
    """GPT-2 computes in one dtype throughout: float64."""
    model = build("gpt2", vocab_size=40, n_positions=512).double()
    parallelize(model, transformations(mesh))
    scorer = Scorer(model, mesh, max_tokens=max_tokens // mesh.context.size, pack_settings=pack_settings)
    constant = 77.0 if mode == "constant" else None
    settings = LossSettings(loss=SFTSettings(), aggregation=mode, constant=constant, groups_are_rows=grouped)
    return Engine(scorer, make_optimizer(model, OptimizerConfig(lr=0.0)), settings)


def outcome(engine: Engine, samples: Sequence[Sample]) -> tuple[float, dict[str, Tensor]]:
    prepared = engine.prepare(samples)
    sums = engine.gradients(prepared)
    loss = sums.loss.clone()
    torch.distributed.all_reduce(loss, group=engine.mesh.loss.group)
    found = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
        for name, parameter in engine.model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss), found


def rows_on_ranks(rank: int, world: int, folder: Path, context: int) -> list[tuple[float, dict[str, Tensor], float]]:
    data, mesh, found = list(TokenizedDataset(folder)), make_mesh("cpu", context=context), []
    for mode in MODES:
        engine = make_engine(mesh, mode, PackSettings(share_prefixes="auto"), grouped=True, max_tokens=400)
        loss, gradients = outcome(engine, data)
        found.append((loss, gradients, engine.scorer.packer.plan(data).sharing))
    return found


def one_at_a_time(
    samples: Sequence[Sample], units: Sequence[object], mode: WeightMode
) -> tuple[float, dict[str, Tensor]]:
    """The definition: one sample at a time, without padfree's token weights, plans and sharing."""
    model = attach(build("gpt2", vocab_size=40, n_positions=512).double())
    counts = {unit: sum(s.num_labels for s, u in zip(samples, units, strict=True) if u == unit) for unit in set(units)}
    tokens, number = sum(counts.values()), len(counts)
    total = torch.zeros((), dtype=torch.float64)
    for sample, unit in zip(samples, units, strict=True):
        local = shard(collate([replace(sample, group=None)]))
        scores = score(hidden_states(model, local), lm_head_of(model), local.labels)
        divisor = {
            "token-mean": tokens,
            "sample-mean": number * counts[unit],
            "sum-of-sample-mean": counts[unit],
            "sample-sum": number,
            "constant": 77.0,
        }[mode]
        # Token weights are float32.
        total = total - scores.logprobs.sum() * float(np.float32(1.0 / divisor))
    total.backward()  # type: ignore[no-untyped-call]
    return float(total), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[Any, ...], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).abs().max()) <= 1e-12 * largest, name


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (2, 2)], ids=["alone", "two data ranks", "two context ranks"])
def test_loss_and_gradients_are_those_of_a_hand_split_file(layout: tuple[int, int], tmp_path: Path) -> None:
    """Packed, shared and over several ranks, against one sample at a time of a file with one row per turn."""
    data = stored(tmp_path / "rows")
    split = TokenizedDataset(
        write_store(tmp_path / "split", [[(s.tokens.tolist(), s.mask.astype(int).tolist())] for s in data])
    )
    assert all(sample.group is None for sample in split)
    units = [sample.group or sample.uid for sample in data]
    world, context = layout
    found = run_ranks(world, rows_on_ranks, tmp_path / "rows", context)
    for number, mode in enumerate(MODES):
        expected = one_at_a_time(list(split), units, mode)
        for rank in range(world):
            assert_same(found[rank][number], expected)
            assert found[rank][number][2] > 1.5  # much of the batch is shared


def test_without_units_every_sample_counts(mesh: Mesh, tmp_path: Path) -> None:
    """Groups of pairs and rollouts are not data rows: each of their samples counts separately."""
    data = list(stored(tmp_path))
    engine = make_engine(mesh, "sample-mean", PackSettings(), grouped=False, max_tokens=400)
    assert_same(outcome(engine, data), one_at_a_time(data, [sample.uid for sample in data], "sample-mean"))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [({}, True), ({"loss": {"kind": "clip"}}, False), ({"loss": {"kind": "dpo"}}, False)],
)
def test_which_runs_count_rows(sections: dict[str, Any], expected: bool, mesh: Mesh, tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model", num_hidden_layers=1)
    config = config_of(tmp_path, parallel={"checkpointing": "none", "compile": False, "reshard": False}, **sections)
    assert build_engine(config, mesh, None).settings.groups_are_rows is expected


# Runs


@pytest.fixture
def rows_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The config of a run on stored rows with several samples."""
    save_with_tokenizer(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "train.jsonl").write_text("{}\n")
    data = stored(tmp_path / "rows", vocabulary=20)
    monkeypatch.setattr("padfree.tasks.sft.load_sft", lambda *_, **__: data)
    path = str(tmp_path / "train.jsonl")
    return config_of(tmp_path, data={"path": path}, loss={"aggregation": "sample-mean"})


def test_a_resumed_run_is_the_same(rows_run: Config, tmp_path: Path) -> None:
    def run(folder: str, *steps: int) -> Any:
        for count in steps:
            train(replace(rows_run, run=replace(rows_run.run, folder=str(tmp_path / folder), steps=count)))
        return lines(tmp_path / folder)

    whole = run("whole", 6)
    assert len(whole) == 6
    assert run("parts", 2, 3, 6) == whole
    assert sum(line["samples"] for line in whole[:3]) == sum(TURNS)
    assert sum(line["rows"] for line in whole[:3]) == len(TURNS)


def test_the_dry_run_counts_rows_samples_and_what_they_share(rows_run: Config, tmp_path: Path) -> None:
    from padfree.cli.train import description

    shown = list(description(rows_run))
    assert "data: 6 rows, 16 samples" in shown
    (first,) = [line for line in shown if line.startswith("first step")]
    step = next(iter(make_batcher(rows_run, stored(tmp_path / "again", vocabulary=20))))
    samples = [sample for group in step for sample in group if isinstance(sample, Sample)]
    computed = collate(samples, share_prefixes="auto", cost=cost_of(rows_run)).num_tokens
    tokens = sum(map(len, samples))
    assert computed < tokens
    assert f"{len(samples)} samples, {tokens:,} tokens ({computed:,} computed, the rest shared)" in first


def test_the_plan_counts_what_is_shared(rows_run: Config, tmp_path: Path) -> None:
    from padfree.tools.planner.epoch import PlanShape
    from padfree.tools.planner.run_plan import make_plan
    from padfree.tools.planner.steps import load_steps
    from padfree.tools.planner.time_model import choose_time_model

    found = load_steps(rows_run)
    data = stored(tmp_path / "again", vocabulary=20)
    batches = [[s for group in groups for s in group] for groups in make_batcher(replace_epochs(rows_run, 1), data)]
    assert [step.tolist() for step in found.steps] == [[len(sample) for sample in batch] for batch in batches]
    trees = [collate(batch, share_prefixes="auto", cost=cost_of(rows_run)).num_tokens for batch in batches]
    assert found.shared_tokens == int(data.lengths.sum()) - sum(trees)
    plan = make_plan(found, PlanShape(ranks=1, max_tokens=4000), choose_time_model(rows_run, None, None))
    assert plan.epoch.slot_tokens.tolist() == trees
    assert "6 rows, 16 samples" in next(plan.lines())
    assert plan.summary()["rows"] == 6
    assert any("samples of a data row share" in line and f"for {sum(trees):,} tokens" in line for line in plan.lines())


def cost_of(config: Config) -> CostModel:
    return run_cost(config.batch, skeleton(config.model.path))


def replace_epochs(config: Config, epochs: int) -> Config:
    return replace(config, data=replace(config.data, epochs=epochs))


def test_evaluation_takes_whole_rows(rows_run: Config, mesh: Mesh, tmp_path: Path) -> None:
    config = replace(
        rows_run,
        eval=replace(rows_run.eval, path=rows_run.data.path, samples=3),
        parallel=replace(rows_run.parallel, checkpointing="none", compile="none", reshard=False),
    )
    held_out = load_held_out(config, None)
    assert held_out is not None
    assert len(held_out.samples) == sum(TURNS[:3])
    engine = build_engine(config, mesh, None)
    measure = make_evaluation(config.eval, config.loss, engine, held_out, None, seed=config.run.seed)
    assert measure is not None
    metrics = measure(0)
    samples = [sample for sample in held_out.samples if isinstance(sample, Sample)]
    logprobs = engine.scorer.logprobs(samples)
    labels = sum(sample.num_labels for sample in samples)
    assert metrics["eval/loss"] == pytest.approx(-sum(float(each.sum()) for each in logprobs) / labels, rel=1e-5)


def test_a_row_longer_than_the_token_budget_is_refused(rows_run: Config) -> None:
    from padfree.train.preflight import preflight

    config = replace(rows_run, batch=replace(rows_run.batch, samples=None, tokens=300))
    message = (
        r"batch\.tokens: 300 tokens, but train\.jsonl:1 turn 1 has \d+ tokens in its 3 samples, and \d more are too"
    )
    with pytest.raises(ValueError, match=message):
        preflight(config, processes=1, device_type="cpu", dry=True)


# Memory


def test_copied_keys_are_in_the_memory_estimate(rows_run: Config, tmp_path: Path) -> None:
    model = build("qwen3")
    data = stored(tmp_path / "again", vocabulary=20)
    copies = copied_keys(rows_run.batch, rows_run.loss, rows_run.rollout, data, model)
    cost = CostModel.from_config(model.config)
    tree = collate([data[index] for index in range(11, 16)], share_prefixes="auto", cost=cost).segments
    ends = [sum(int(tree.lengths[node]) for node in path(tree.parents, node)) for node in range(len(tree.lengths))]
    assert copies == pytest.approx(sum(ends) / int(tree.lengths.sum()))
    assert copies > 2
    flat: StoredSamples = TokenizedDataset(write_store(tmp_path / "flat", [conversation(0, 1)]))
    assert copied_keys(rows_run.batch, rows_run.loss, rows_run.rollout, flat, model) == 0.0
    unshared = replace(rows_run, batch=replace(rows_run.batch, share_prefixes=False))
    assert copied_keys(unshared.batch, unshared.loss, unshared.rollout, data, model) == 0.0
    config = replace(rows_run, parallel=replace(rows_run.parallel, checkpointing="none", compile="none", reshard=False))
    with_copies, without = (
        estimate_memory(config, model, processes=1, device_type="cuda", copied_keys=keys).working
        for keys in (100 * copies, 0.0)
    )
    assert with_copies > without


def path(parents: Any, node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = int(parents[node])
    return found


def test_a_template_that_rewrites_turns_makes_rows_of_several_samples(tmp_path: Path) -> None:
    """From a file of conversations to a run: each sample is what the model sees when it generates the turn."""
    save_with_tokenizer(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "template.jinja").write_text(TEMPLATES["forgetful"])
    said = [("a", "bc</think>de"), ("fg", "h</think>ij"), ("k", "lm</think>no")]
    messages = [
        {"role": role, "content": text} for pair in said for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    write(tmp_path, "whole", [{"messages": messages}, {"messages": messages[:2]}])
    shown = [
        [*({**one, "content": one["content"].split("</think>")[-1]} for one in messages[:end]), messages[end]]
        for end in (1, 3, 5)
    ]
    write(tmp_path, "split", [{"messages": each} for each in shown] + [{"messages": messages[:2]}])
    template = {"chat_template": str(tmp_path / "template.jinja"), "epochs": 1}

    def config(name: str, **data: Any) -> Config:
        path = {"path": str(tmp_path / f"{name}.jsonl")}
        run = {"folder": str(tmp_path / f"run {name}")}
        return config_of(tmp_path, data={**template, **path, **data}, run=run, batch={"samples": 4, "max_tokens": 2000})

    whole, split = (
        load_training_data(one, load_tokenizer(one)).samples
        for one in (config("whole"), config("split", loss_on="last"))
    )
    assert isinstance(whole, StoredSamples)
    assert whole.row_starts.tolist() == [0, 3, 4]
    assert [sample.group for sample in whole] == ["whole.jsonl:1"] * 3 + [None]
    for sample, other in zip(whole, split, strict=True):
        np.testing.assert_array_equal(sample.tokens, other.tokens)
        np.testing.assert_array_equal(sample.mask, other.mask)
    train(config("whole"))
    train(config("split", loss_on="last"))
    (one,), (other,) = lines(tmp_path / "run whole"), lines(tmp_path / "run split")
    assert (one["rows"], one["samples"], other["rows"]) == (2, 4, 4)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)
