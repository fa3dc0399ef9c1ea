"""Mixtures of sources: weights in every kind of run, reports, and exact resume."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from padfree.checkpoint.checkpointer import latest_in
from padfree.cli.main import main
from padfree.cli.train import description
from padfree.config import Config, config_from_dict
from padfree.record.file_names import CHECKPOINTS
from padfree.testing.models import save_with_tokenizer
from padfree.tools.planner.steps import load_steps
from padfree.train.batcher import count_steps, make_batcher, source_shares
from padfree.train.preflight import preflight
from padfree.train.run import train
from padfree.train.training_data import load_tokenizer, load_training_data
from tests.ranks import run_ranks
from tests.train.processes import alone, ended, forked
from tests.train.test_killed import die, run
from tests.train.trainer_cases import lines
from tests.train.ways import DATA, way_config, write, write_data

PROBLEMS = [(f"{a}+{b}=", f"the sum is {a + b}") for a in range(3) for b in (2, 5)]
OTHERS = [(f"{a}-{b}=", f"that is {a - b}") for a in (5, 7) for b in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(folder / "cache"))


def make_folder(folder: Path) -> Path:
    """Two sources for every kind of data: files of the same names in the folder and in `more`."""
    save_with_tokenizer(folder / "model", num_hidden_layers=1)
    save_with_tokenizer(folder / "teacher", hidden_size=48, num_hidden_layers=1)
    (folder / "more").mkdir()
    write_data(folder, PROBLEMS)
    write_data(folder / "more", OTHERS)
    return folder


def sources(folder: Path, kind: str, *weights: float) -> list[dict[str, Any]]:
    one = {"path": [str(folder / f"{kind}.jsonl")], "weight": weights[0]}
    two = {"path": [str(folder / "more" / f"{kind}.jsonl")], "weight": weights[1], "name": "more"}
    return [one, two]


def mixture(folder: Path, way: str, name: str = "run", *weights: float, **sections: Any) -> Config:
    given = {"path": [], "sources": sources(folder, DATA[way], *(weights or (0.5, 2.0))), "epochs": 2}
    return way_config(folder, way, name, data=given | sections.pop("data", {}), **sections)


def batches(config: Config) -> tuple[list[list[Any]], Any]:
    source = load_training_data(config, load_tokenizer(config), import_reward=False)
    return list(make_batcher(config, source.samples, source.parts)), source


# Weights


@pytest.mark.parametrize("way", ["sft", "dpo", "reward", "distill", "clip", "environment"])
def test_two_epochs_show_every_row_as_its_weight_says(way: str, folder: Path) -> None:
    found, source = batches(mixture(folder, way))
    counts: Counter[str] = Counter()
    for groups in found:
        for group in groups:
            names = {str(sample.source) for sample in group}
            assert len(names) == 1  # a group has one source
            if way == "clip":
                assert len(group) == 2  # whole groups
                assert len({sample.group for sample in group}) == 1
            counts.update({str(group[0].uid): 1})
    kind = DATA[way]
    own = {uid: count for uid, count in counts.items() if uid.startswith(f"{kind}.jsonl:")}
    more = {uid: count for uid, count in counts.items() if uid.startswith(f"more/{kind}.jsonl:")}
    assert len(own) + len(more) == len(counts)
    assert set(own.values()) == {1}  # half in each of two epochs
    assert len(own) == len(PROBLEMS)
    assert set(more.values()) == {4}  # twice in each of two epochs
    assert len(more) == len(OTHERS)
    assert len(source.samples) == sum(source.parts)
    assert source.place(len(source.samples) - 1).startswith(f"more/{kind}.jsonl:")


def test_groups_of_the_same_name_in_two_sources_stay_apart(folder: Path) -> None:
    _, source = batches(mixture(folder, "clip"))
    groups = Counter(sample.group for sample in source.samples)
    assert set(groups.values()) == {2}
    assert len(groups) == len(PROBLEMS) + len(OTHERS)


def test_one_source_of_weight_one_is_the_path(folder: Path) -> None:
    path = str(folder / "texts.jsonl")
    plain = way_config(folder, "sft", "run", data={"epochs": 3})
    mixed = way_config(folder, "sft", "run", data={"path": [], "sources": [{"path": path}], "epochs": 3})
    found, source = batches(mixed)
    expected, other = batches(plain)
    assert [[g[0].uid for g in groups] for groups in found] == [[g[0].uid for g in groups] for groups in expected]
    assert source.samples.digest == other.samples.digest


def test_sources_of_weight_one_are_read_like_two_paths(folder: Path) -> None:
    paths = [str(folder / "texts.jsonl"), str(folder / "more" / "texts.jsonl")]
    expected, _ = batches(way_config(folder, "sft", "run", data={"path": paths, "epochs": 2}))
    found, _ = batches(mixture(folder, "sft", "run", 1.0, 1.0))
    assert [[g[0].tokens.tolist() for g in groups] for groups in found] == [
        [g[0].tokens.tolist() for g in groups] for groups in expected
    ]


def test_each_source_has_its_own_columns_and_format(folder: Path, tmp_path: Path) -> None:
    write(tmp_path, "asked", [{"question": "1+1=", "answer": "2"}])
    write(tmp_path, "plain", [{"text": "two and two"}])
    given = [
        {"path": str(tmp_path / "asked.jsonl"), "columns": {"question": "prompt", "answer": "response"}},
        {"path": str(tmp_path / "plain.jsonl"), "weight": 3},
    ]
    found, _ = batches(way_config(folder, "sft", "run", data={"path": [], "sources": given, "epochs": 1}))
    samples = [sample for groups in found for group in groups for sample in group]
    assert Counter(sample.source for sample in samples) == {"asked.jsonl": 1, "plain.jsonl": 3}
    assert {bool(sample.mask[0]) for sample in samples if sample.source == "plain.jsonl"} == {True}


# Counts and reports


def test_shares_of_the_tokens(folder: Path) -> None:
    config = mixture(folder, "sft")
    source = load_training_data(config, load_tokenizer(config))
    one, two = source_shares(config.data, config.loss, config.rollout, source.samples, source.parts)
    assert (one.name, one.rows, one.samples, one.weight, one.epochs) == ("texts.jsonl", 6, 6, 0.5, 1.0)
    assert (two.name, two.rows, two.samples, two.weight, two.epochs) == ("more", 4, 4, 2.0, 4.0)
    shown = [sample for groups in batches(config)[0] for group in groups for sample in group]
    tokens = Counter[str]()
    for sample in shown:
        tokens[str(sample.source)] += len(sample)
    assert one.share == pytest.approx(tokens["texts.jsonl"] / sum(tokens.values()))
    assert one.share + two.share == pytest.approx(1.0)


@pytest.mark.parametrize("way", ["sft", "dpo", "clip", "environment"])
def test_the_dry_run_and_the_plan_show_every_source(way: str, folder: Path) -> None:
    config = mixture(folder, way, "never")
    shown = list(description(config))
    kind = DATA[way]
    (first,) = [line for line in shown if line.startswith(f"  {kind}.jsonl: ")]
    (second,) = [line for line in shown if line.startswith("  more: ")]
    assert "weight 0.5: " in first
    assert first.endswith("each row once in 2 epochs")
    assert "weight 2: " in second
    assert second.endswith("each row 4 times in 2 epochs")
    steps = load_steps(config)
    assert [source.name for source in steps.sources] == [f"{kind}.jsonl", "more"]
    once = replace(config, data=replace(config.data, epochs=1))
    groups = [group for batch in batches(once)[0] for group in batch]
    assert sorted(steps.lengths.tolist()) == sorted(len(sample) for group in groups for sample in group)
    assert sum(map(len, steps.steps)) == len(steps.lengths)


@pytest.mark.parametrize("batch", [{"samples": 4}, {"samples": None, "tokens": 60}])
def test_steps_are_those_of_the_batcher(batch: dict[str, Any], folder: Path) -> None:
    config = mixture(folder, "sft", batch=batch, data={"epochs": 1})
    found, source = batches(config)
    assert [step.tolist() for step in load_steps(config).steps] == [[len(g[0]) for g in groups] for groups in found]
    assert count_steps(config, source, enough=1000) == len(found)


def test_steps_of_several_epochs_of_unlike_length(folder: Path) -> None:
    config = mixture(folder, "sft", "run", 0.3, 1.7, data={"epochs": 7})
    found, source = batches(config)
    assert count_steps(config, source, enough=1000) == len(found)


# Errors


def refused(config: Config) -> str:
    with pytest.raises(ValueError) as caught:
        preflight(config, processes=1, device_type="cpu", dry=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "data.sources.1.path: bad.jsonl has no rows; give a file with rows"),
        ([{"q": "a", "a": "b"}], {}, "data.sources.1.columns: bad.jsonl has the columns ['a', 'q']; expected"),
        (
            [{"text": "a b"}],
            {"columns": {"x": "text"}},
            "data.sources.1.columns: 'x' (mapped to 'text') is not a column of bad.jsonl",
        ),
        (
            [{"text": "abc"}],
            {"weight": 0.4},
            "data.sources.1.weight: 0.4 × 1 rows × 2 epochs (data.epochs) is less than one row",
        ),
        ([{"text": 3}], {}, "bad.jsonl line 1: 'text' is 3; expected a string"),
    ],
)
def test_sources_that_cannot_be_read(
    rows: list[dict[str, Any]], changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    write(tmp_path, "bad", rows)
    given = [{"path": str(folder / "texts.jsonl")}, {"path": str(tmp_path / "bad.jsonl"), **changes}]
    assert refused(mixture(folder, "sft", data={"sources": given})).startswith(message)


def test_a_file_that_is_not_there(folder: Path) -> None:
    given = [{"path": str(folder / "texts.jsonl")}, {"path": str(folder / "none.jsonl")}]
    assert refused(mixture(folder, "sft", data={"sources": given})).startswith("data: ")


@pytest.mark.parametrize(
    ("way", "other"), [("sft", "pairs"), ("dpo", "texts"), ("clip", "texts"), ("reward", "prompts")]
)
def test_sources_of_another_kind(way: str, other: str, folder: Path) -> None:
    given = [{"path": str(folder / f"{DATA[way]}.jsonl")}, {"path": str(folder / f"{other}.jsonl")}]
    message = refused(mixture(folder, way, data={"sources": given}))
    assert message.startswith("data.sources.1.columns: ") or f"{other}.jsonl" in message


# Whole runs


def train_on_ranks(rank: int, world: int, config: Config) -> None:
    train(config)


def test_the_order_does_not_depend_on_ranks(folder: Path) -> None:
    off = {"checkpoint": {"every": 1000, "export": False}, "run": {"steps": 4}}
    train(mixture(folder, "sft", "one rank", **off))
    run_ranks(2, train_on_ranks, mixture(folder, "sft", "two ranks", **off))
    one, two = lines(folder / "one rank"), lines(folder / "two ranks")
    assert [line["tokens"] for line in one] == [line["tokens"] for line in two]
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in two], rel=1e-5)
    # The loss of a step is the mean of its sources' losses, weighted by their tokens.
    for first, second, groups in zip(one, two, batches(mixture(folder, "sft"))[0], strict=False):
        tokens = Counter[str]()
        for (sample,) in groups:
            tokens[str(sample.source)] += sample.num_labels
        losses = {name: first[f"source/{name}/loss"] for name in tokens}
        assert sum(losses[name] * count for name, count in tokens.items()) / sum(tokens.values()) == pytest.approx(
            first["loss"], rel=1e-5
        )
        assert losses == pytest.approx({name: second[f"source/{name}/loss"] for name in tokens}, rel=1e-5)


def test_rewards_by_source(folder: Path) -> None:
    train(mixture(folder, "clip", "rewards", checkpoint={"export": False}))
    for line in lines(folder / "rewards"):
        found = {name: line[name] for name in line if name.startswith("source/")}
        assert found
        assert set(found) <= {"source/rollouts.jsonl/reward", "source/more/reward"}
        assert set(found.values()) == {0.5}  # one of two answers to each problem is right


def test_what_may_change_on_resume(folder: Path, tmp_path: Path) -> None:
    off: dict[str, Any] = {"checkpoint": {"every": 1000, "export": False}}
    train(mixture(folder, "sft", "resumed", **off, run={"steps": 2}))

    def resumed(given: list[dict[str, Any]], **data: Any) -> Config:
        return mixture(folder, "sft", "resumed", **off, run={"steps": 3}, data={"sources": given, **data})

    one, two = sources(folder, "texts", 0.5, 2.0)
    message = refused(resumed([one, two | {"weight": 1.5}]))
    assert message.startswith("data.sources.1.weight: 1.5, but ")
    assert "was made with 2.0; either set it back" in message
    assert refused(resumed([one])).startswith("data.sources.1.weight: 1.0, but ")
    message = refused(resumed([], path=[str(folder / "texts.jsonl")]))
    assert message.startswith("data.sources.0.weight: 1.0, but ")
    with pytest.raises(ValueError, match=r"data\.sources\.0\.path: .* gives other samples"):
        train(resumed([two | {"weight": 0.5, "name": "a"}, one | {"weight": 2.0}]))
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "texts.jsonl").write_bytes((folder / "more" / "texts.jsonl").read_bytes())
    assert train(resumed([one, two | {"path": [str(moved / "texts.jsonl")]}])).step == 3


def test_the_command_takes_sources_from_its_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('batch = { samples = 4, max_tokens = 256 }\nrun = { device = "cpu", steps = 2 }\n')
    given = json.dumps([str(folder / "texts.jsonl")]), json.dumps(str(folder / "more"))
    overrides = [
        f"model.path={folder / 'model'}",
        f"run.folder={tmp_path / 'run'}",
        f'data.sources=[{{path={given[0]},weight=2}},{{path={given[1][:-1]}/texts.jsonl",name="more"}}]',
    ]
    main(["sft", str(recipe), *overrides])
    assert "done after 2 steps" in capsys.readouterr().out
    assert main(["sft", str(recipe), *overrides[:2], overrides[2].replace("weight", "wieght")]) != 0
    error = capsys.readouterr().err
    assert error.strip().endswith("data.sources.0.wieght: no such setting; did you mean data.sources.0.weight?")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sft", "dpo", "clip"])
def test_killed_and_resumed_is_the_same_to_the_bit(way: str, tmp_path: Path) -> None:
    (tmp_path / "way").write_text(way)
    alone(run_and_kill, tmp_path)
    whole, killed = lines(tmp_path / "whole"), lines(tmp_path / "killed")
    assert len(whole) == 5
    assert whole == killed
    found = [latest_in(tmp_path / name / CHECKPOINTS) for name in ("whole", "killed")]
    files = [sorted(path.glob("rank-*")) for path in found if path is not None]
    assert files[0][0].read_bytes() == files[1][0].read_bytes()


def run_and_kill(folder: Path) -> None:
    def code_of(function: Callable[[Config], int], config: Config) -> int:
        child, read = forked(lambda pipe: function(config), folder / "output.txt")
        os.close(read)
        return ended(child)

    make_folder(folder)
    way = (folder / "way").read_text()
    changes: dict[str, Any] = {"checkpoint": {"every": 1, "export": False}, "run": {"steps": 5}}
    data = {"epochs": None}
    whole, killed = (mixture(folder, way, name, 0.5, 2.0, data=data, **changes) for name in ("whole", "killed"))
    said = folder / "output.txt"
    assert code_of(run, whole) == 0, said.read_text()
    assert code_of(die, killed) == -signal.SIGKILL, said.read_text()
    assert code_of(run, killed) == 0, said.read_text()


def test_batches_that_a_run_takes_are_those_of_the_batcher(folder: Path) -> None:
    config = mixture(folder, "sft", "taken", checkpoint={"export": False}, run={"steps": 4})
    train(config)
    expected = [sum(len(g[0]) for g in groups) for groups in islice(iter(batches(config)[0]), 4)]
    assert [line["tokens"] for line in lines(folder / "taken")] == expected


def test_config_from_dict_takes_sources() -> None:
    values = {
        "model": {"path": "m"},
        "data": {"sources": [{"path": "a"}, {"path": "b", "weight": 2}]},
        "batch": {"samples": 4, "max_tokens": 64},
        "run": {"folder": "r"},
    }
    assert [source.weight for source in config_from_dict(values).data.sources] == [1.0, 2.0]
