"""Settings are read as written, or refused with a message that says what to write."""

from __future__ import annotations

import functools
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import padfree
from padfree import losses
from padfree.cli.train import recipe_lines
from padfree.config import Config, OptimizerConfig, config_from_dict, load_config
from padfree.config.checkpointing import levels_of, stretched
from padfree.config.mixture import DataSource
from padfree.config.settings_table import setting_entries
from tests.refused import refused

NEEDED: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": ["d.jsonl"]},
    "batch": {"samples": 4, "max_tokens": 100},
    "run": {"folder": "f"},
}


def with_changes(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**NEEDED, **{name: {**NEEDED.get(name, {}), **changes} for name, changes in sections.items()}}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


RECIPE = """
[model]
path = "Qwen/Qwen3-0.6B"
dtype = "bfloat16"
[data]
path = "train.jsonl"
columns = {question = "prompt", answer = "response"}
[batch]
samples = 64
max_tokens = 8192
[optimizer]
lr = 1
betas = [0.9, 0.99]
[run]
folder = "runs/a"
"""


def test_file_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path / "recipe.toml", RECIPE)
    config = load_config(path, ["optimizer.lr=1e-5", "data.shuffle=false", "run.folder=runs/b", "optimizer.lr=2e-5"])
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert config.data.path == ("train.jsonl",)
    assert config.data.columns == {"question": "prompt", "answer": "response"}
    assert config.optimizer == OptimizerConfig(lr=2e-5, betas=(0.9, 0.99))
    assert config.data.shuffle is False
    assert config.run.folder == "runs/b"


def test_overrides_alone_and_none_and_lists() -> None:
    config = load_config(
        None,
        [
            "model.path=m",
            'data.path=["a", "b"]',
            "batch.tokens=1000",
            "batch.max_tokens=100",
            "run.folder=f",
            "optimizer.max_grad_norm=none",
            "parallel.compile=none",
            "data.columns.question=prompt",
        ],
    )
    assert config.data.path == ("a", "b")
    assert config.batch.samples is None
    assert config.optimizer.max_grad_norm is None
    assert config.parallel.compile == "none"
    assert config.data.columns == {"question": "prompt"}


def test_whole_numbers_serve_as_numbers_but_not_the_other_way_round() -> None:
    lr = config_from_dict(with_changes(optimizer={"lr": 1})).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)
    with refused("run.seed"):
        config_from_dict(with_changes(run={"seed": 1.5}))


def test_a_config_is_plain_and_comes_back() -> None:
    config = config_from_dict(with_changes(loss={"kind": "gspo", "corrections": ["opsm"]}))
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


FORMER = {f"{entry.section}.{entry.formerly}": entry.name for entry in setting_entries() if entry.formerly}
"""The setting that has replaced each former name."""


@pytest.mark.parametrize("former", FORMER)
def test_a_misspelt_former_name_is_answered_with_the_new_name(former: str) -> None:
    section, _, name = former.partition(".")
    misspelt = name[:-2] + name[-1] + name[-2]
    with refused(f"{section}.{misspelt}") as caught:
        config_from_dict(with_changes(**{section: {misspelt: 1}}))
    assert FORMER[former] in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"optimizer": {"lrr": 1}}, "optimizer.lrr"),
        ({"optimiser": {"lr": 1}}, "optimiser"),
        ({"run": {"zzzzz": 1}}, "run.zzzzz"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr"),
        ({"optimizer": {"lr": True}}, "optimizer.lr"),
        ({"optimizer": {"lr": -1.0}}, "optimizer.lr"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"optimizer": {"max_grad_norm": 0}}, "optimizer.max_grad_norm"),
        ({"data": {"shuffle": 1}}, "data.shuffle"),
        ({"data": {"columns": {"a": 1}}}, "data.columns"),
        ({"data": {"path": []}}, "data.path"),
        ({"loss": {"kind": "gsp"}}, "loss.kind"),
        (
            {"loss": {"kind": "mine"}},
            "loss.kind",
        ),
        ({"loss": {"kind": "my-losses:f"}}, "loss.kind"),
        ({"loss": {"kind": "mine:f", "low": 0.1}}, "loss.low"),
        ({"loss": {"kind": "clip", "clip": {"low": 5}}}, "loss.clip.low"),
        ({"loss": {"kind": "clip", "clip": {"low": None}}}, "loss.clip.low"),
        (
            {"loss": {"kind": "gspo", "dual": 3}},
            "loss.dual",
        ),
        ({"loss": {"corrections": ["tokentis"]}}, "loss.corrections"),
        ({"loss": {"entropy_coefficient": 0.1}}, "loss.entropy_coefficient"),
        ({"loss": {"kl_coefficient": 0.1}}, "loss.kl_coefficient"),
        ({"loss": {"aggregation": "group-mean"}}, "loss.aggregation"),
        ({"loss": {"aggregation": "constant"}}, "loss.constant"),
        ({"loss": {"constant": 3}}, "loss.constant"),
        ({"loss": {"kind": "clip", "low": 5}}, "loss.low"),
        (
            {"loss": {"kind": "clip"}, "data": {"loss_on": "last"}},
            "data.loss_on",
        ),
        (
            {
                "loss": {"kind": "clip", "kl_coefficient": 0.1},
                "rollout": {"reward": "exact_match", "samples_per_prompt": 4},
            },
            "reference.path",
        ),
        (
            {"loss": {"kind": "clip"}, "rollout": {"reward": "exact_match", "samples_per_prompt": 1}},
            "rollout.samples_per_prompt",
        ),
        ({"optimizer": {"lr": math.inf}}, "optimizer.lr"),
        ({"loss": {"epochs": 2}}, "loss.epochs"),
        ({"batch": {"tokens": 9}}, "batch.samples"),
        ({"batch": {"samples": None}}, "batch.samples"),
        ({"batch": {"max_tokens": 0}}, "batch.max_tokens"),
        ({"data": {"epochs": None}}, "run.steps"),
        ({"schedule": {"kind": "cosine"}}, "run.steps"),
        ({"schedule": {"warmup": 9}, "run": {"steps": 5}}, "schedule.warmup"),
        ({"reference": {"path": "r"}}, "reference.path"),
        ({"reference": {"refresh": 2}}, "reference.refresh"),
        ({"lora": {"rank": -1}}, "lora.rank"),
        ({"lora": {"dropout": 1.0}}, "lora.dropout"),
        ({"loss": {"kind": "clip", "opsm": {"delta": 0.1}}}, "loss.opsm.delta"),
        ({"rollout": {"reward": "exact_match"}}, "rollout.reward"),
        ({"rollout": {"samples_per_prompt": 0}}, "rollout.samples_per_prompt"),
        (
            {"loss": {"kind": "clip"}, "rollout": {"reward": "exact_match", "samples_per_prompt": 3}},
            "batch.samples",
        ),
        ({"track": {"wandb": ""}}, "track.wandb"),
        ({"model": {"path": ""}}, "model.path"),
        ({"run": {"folder": ""}}, "run.folder"),
        ({"parallel": {"context": 0}}, "parallel.context"),
        ({"parallel": {"head_memory": 0}}, "parallel.head_memory"),
        (
            {"parallel": {"head_memory": "lo"}},
            "parallel.head_memory",
        ),
        (
            {"parallel": {"checkpointing": "host", "compile": "none"}},
            "parallel.checkpointing",
        ),
        ({"checkpoint": {"every": 0}}, "checkpoint.every"),
    ],
)
def test_one_line_names_the_setting_and_the_cure(changes: dict[str, Any], setting: str) -> None:
    with refused(setting):
        config_from_dict(with_changes(**changes))


def test_what_is_missing_is_named() -> None:
    for section, name in (("model", "path"), ("data", "path"), ("batch", "max_tokens"), ("run", "folder")):
        values = {key: dict(entries) for key, entries in NEEDED.items()}
        del values[section][name]
        with refused(f"{section}.{name}"):
            config_from_dict(values)
    with refused("model.path", "missing"):
        config_from_dict({})
    with refused("optimizer"):
        config_from_dict({**NEEDED, "optimizer": 3})


@pytest.mark.parametrize("override", ["lr=1", "optimizer.lr", "=1", "optimizer.=1", ""])
def test_an_override_has_a_section_a_name_and_a_value(override: str) -> None:
    with refused("override", ".*write section.name=value"):
        load_config(None, [override])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with refused("config", r".*none.toml cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "none.toml")
    with refused("config", ".*bad.toml is not TOML: .*line 1"):
        load_config(write(tmp_path / "bad.toml", "model = = 3"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with refused("config", ".*binary.toml is (not TOML|UTF-16)"):
        load_config(tmp_path / "binary.toml")
    path = write(tmp_path / "flat.toml", "model = 3")
    with refused("override", "'model.path=m' treats 'model' as a table, but 'model' already has a plain value"):
        load_config(path, ["model.path=m"])


def test_needs_no_torch() -> None:
    code = (
        "import sys, types; parent = types.ModuleType('padfree'); parent.__path__ = [sys.argv[1]];"
        "sys.modules['padfree'] = parent; import padfree.config; padfree.config.load_config;"
        "assert 'torch' not in sys.modules"
    )
    file = padfree.__file__
    assert file is not None
    subprocess.run([sys.executable, "-c", code, str(Path(file).parent)], check=True)


def test_memory_of_the_head() -> None:
    for given, taken in (("speed", "speed"), ("low", "low"), (6, 6 << 30), (1.5, 3 << 29)):
        assert config_from_dict(with_changes(parallel={"head_memory": given})).parallel.head_bytes == taken


RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"
KINDS: dict[str, type[Any]] = {
    "clip": losses.ClipSettings,
    "gspo": losses.GSPOSettings,
    "cispo": losses.CISPOSettings,
    "reinforce": losses.ReinforceSettings,
}
CORRECTIONS: dict[str, type[Any]] = {
    "token_tis": losses.TokenTISSettings,
    "sequence_tis": losses.SequenceTISSettings,
    "icepop": losses.IcePopSettings,
    "sequence_mask": losses.SequenceMaskSettings,
    "opsm": losses.OPSMSettings,
}


def objective(config: Config) -> losses.Objective:
    settings = config.loss.settings()
    assert isinstance(settings, losses.PolicySettings)
    return settings.objective


@pytest.mark.parametrize("recipe", ["rl", "rl-local"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_loss_alone_can_be_changed_in_a_recipe(recipe: str, kind: str) -> None:
    """The bounds of clip stay with clip: the others have those of the losses themselves."""
    found = objective(load_config(RECIPES / f"{recipe}.toml", [f"loss.kind={kind}"]))
    assert found == (losses.ClipSettings(low=0.2, high=0.28) if kind == "clip" else KINDS[kind]())


def test_bounds_of_a_kind_and_of_the_chosen_kind() -> None:
    changes = ["loss.gspo.low=1e-4", "loss.gspo.high=2e-4", "loss.clip.dual=3"]
    assert objective(load_config(RECIPES / "rl.toml", changes)) == losses.ClipSettings(low=0.2, high=0.28, dual=3.0)
    chosen = ["loss.kind=gspo", *changes]
    assert objective(load_config(RECIPES / "rl.toml", chosen)) == losses.GSPOSettings(low=1e-4, high=2e-4)
    changed = load_config(RECIPES / "rl.toml", [*chosen, "loss.low=0.1"])
    assert objective(changed) == losses.GSPOSettings(low=0.1, high=2e-4)


def test_bounds_beside_the_kind_do_not_reach_another_kind(tmp_path: Path) -> None:
    recipe = write(
        tmp_path / "own.toml",
        'model.path="m"\ndata.path="d"\nrun.folder="f"\n[batch]\nsamples=4\nmax_tokens=8\n[loss]\nkind="clip"\nlow=0.2',
    )
    assert objective(load_config(recipe)) == losses.ClipSettings(low=0.2)
    with refused("loss.low"):
        load_config(recipe, ["loss.kind=gspo"])
    for cure, found in (("loss.low=none", losses.GSPOSettings()), ("loss.low=0.001", losses.GSPOSettings(low=0.001))):
        assert objective(load_config(recipe, ["loss.kind=gspo", cure])) == found


VALUES = (None, -1.0, 0.0, 0.5, 1.0, 1.5, 5.0, math.inf, math.nan)


def accepted(make: Callable[[], Any]) -> bool:
    try:
        make()
    except ValueError:
        return False
    return True


def loss_config(**changes: Any) -> Callable[[], Any]:
    return lambda: config_from_dict(with_changes(loss={"kind": "clip", **changes}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "current"),
        ({"kind": "gspo", "corrections": ["token_tis", "icepop"]}, "current"),
        ({"epochs": 2}, "trainer"),
        ({"mini_batches": 2}, "trainer"),
        ({"corrections": ["token_tis", "sequence_tis"]}, "trainer"),
        ({"corrections": ["opsm"]}, "trainer"),
        ({"old_policy": "trainer"}, "trainer"),
        ({"old_policy": "sampler"}, "sampler"),
    ],
    ids=str,
)
def test_the_old_policy_is_the_current_one_where_that_is_the_same(changes: dict[str, Any], expected: str) -> None:
    assert loss_config(**changes)().loss.settings().old_policy == expected


def test_a_recipe_is_refused_for_what_the_losses_refuse() -> None:
    """Wherever a bound stands: in the table of its kind, beside the kind, or in the losses' own settings."""

    def given(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    for low, high in itertools.product(VALUES, VALUES):
        for kind, dual in (*itertools.product(["clip"], (None, 0.5, 1.0, 2.0)), ("gspo", None), ("cispo", None)):
            bounds = given(low=low, high=high, dual=dual)
            right = accepted(functools.partial(KINDS[kind], **bounds))
            assert accepted(loss_config(kind=kind, **bounds)) == right, (kind, bounds)
            assert accepted(loss_config(kind=kind, **{kind: bounds})) == right, (kind, bounds)
    for name, (low, high) in itertools.product(CORRECTIONS, itertools.product(VALUES, VALUES)):
        bounds = given(delta=low) if name == "opsm" else given(low=low, high=high)
        right = accepted(functools.partial(CORRECTIONS[name], **bounds))
        assert accepted(loss_config(corrections=[name], **{name: bounds})) == right, (name, bounds)
    sets = [list(names) for size in (0, 1, 2) for names in itertools.combinations_with_replacement(CORRECTIONS, size)]
    for names, old in itertools.product(sets, ("trainer", "sampler", "current")):
        chosen = tuple(CORRECTIONS[name]() for name in names)
        right = accepted(functools.partial(losses.PolicySettings, corrections=chosen, old_policy=old))
        assert accepted(loss_config(corrections=names, old_policy=old)) == right, (names, old)
    for name, value in itertools.product(("kl_coefficient", "entropy_coefficient"), VALUES[1:]):
        right = accepted(functools.partial(losses.PolicySettings, **{name: value}))
        assert accepted(loss_config(**{name: value})) == right, (name, value)
    masks = [np.array([False, True])]
    for mode, constant in itertools.product(("token-mean", "constant"), VALUES):
        right = accepted(functools.partial(losses.token_weights, mode, masks, constant=constant))
        assert accepted(loss_config(aggregation=mode, constant=constant)) == right, (mode, constant)


def test_a_home_folder_is_put_in_the_place_of_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    overrides = [
        "model.path=~/model",
        "model.tokenizer=~/tokenizer",
        "reference.path=~/reference",
        "loss.kl_coefficient=0.1",
        'data.path=["~/a.jsonl", "b~.jsonl", "Some/hub-id"]',
        "batch.cost=~/cost.json",
        "run.folder=~/runs/first",
    ]
    config = load_config(Path(__file__).parents[2] / "src" / "padfree" / "recipes" / "rl.toml", overrides)
    assert config.model.path == "/home/somebody/model"
    assert config.model.tokenizer == "/home/somebody/tokenizer"
    assert config.reference.path == "/home/somebody/reference"
    assert config.data.path == ("/home/somebody/a.jsonl", "b~.jsonl", "Some/hub-id")
    assert config.batch.cost == "/home/somebody/cost.json"
    assert config.run.folder == "/home/somebody/runs/first"


# Lists of tables


def sources_of(text: str, *overrides: str) -> tuple[DataSource, ...]:
    needed = ["model.path=m", "batch.samples=4", "batch.max_tokens=64", "run.folder=r"]
    return load_config(None, [*needed, f"data.sources={text}", *overrides]).data.sources


def test_sources_from_a_recipe_and_from_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'model.path = "m"\nbatch = { samples = 4, max_tokens = 64 }\nrun.folder = "r"\n'
        '[[data.sources]]\npath = "a.jsonl"\nweight = 2\n'
        '[[data.sources]]\npath = ["b.jsonl", "c.jsonl"]\nname = "bc"\ncolumns = { question = "prompt" }\n'
    )
    first, second = load_config(recipe).data.sources
    assert (first.path, first.weight, first.label, first.columns) == (("a.jsonl",), 2.0, "a.jsonl", None)
    assert (second.path, second.weight, second.label) == (("b.jsonl", "c.jsonl"), 1.0, "bc")
    assert second.columns == {"question": "prompt"}
    assert load_config(recipe, ["data.sources.1.weight=0.5"]).data.sources[1].exact_weight == Fraction(1, 2)
    shown = "\n".join(recipe_lines(load_config(recipe).to_dict()))
    (tmp_path / "again.toml").write_text(shown)
    assert load_config(tmp_path / "again.toml") == load_config(recipe)
    (one,) = sources_of('[{path="a.jsonl",weight=0.1}]')
    assert one.exact_weight == Fraction(1, 10)
    (one,) = sources_of('{path="owner/data",subset="main"}')  # one table is a list of one
    assert (one.label, one.subset, one.split) == ("data", "main", None)


def test_a_source_takes_from_data_what_it_does_not_say() -> None:
    data = load_config(
        None,
        [
            *("model.path=m", "batch.samples=4", "batch.max_tokens=64", "run.folder=r"),
            "data.split=validation",
            'data.columns={q="prompt"}',
            'data.sources=[{path="a.jsonl"},{path="b.jsonl",split="test",columns={}}]',
        ],
    ).data
    first, second = (data.of_source(source) for source in data.sources)
    assert (first.path, first.split, first.columns, first.sources) == (("a.jsonl",), "validation", {"q": "prompt"}, ())
    assert (second.path, second.split, second.columns) == (("b.jsonl",), "test", {})
    assert data.paths == ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("[]", "data.path"),
        ("3", "data.sources"),
        ('["a.jsonl"]', "data.sources"),
        ('[{path="a",wieght=2}]', "data.sources.0.wieght"),
        ("[{weight=2}]", "data.sources.0.path"),
        ('[{path="a",weight="2"}]', "data.sources.0.weight"),
        ('[{path="a",weight=true}]', "data.sources.0.weight"),
        *((f'[{{path="a",weight={weight}}}]', "data.sources.0.weight") for weight in ("0", "-1", "nan", "inf", "1001")),
        ("[{path=[]}]", "data.sources.0.path"),
        ('[{path=["a",""]}]', "data.sources.0.path"),
        (
            '[{path="a"},{path="./a",name="b"}]',
            "data.sources.1.path",
        ),
        (
            '[{path="x/a"},{path="y/a"}]',
            "data.sources.1.name",
        ),
        ('[{path="a",name="b/c"}]', "data.sources.0.name"),
        ('[{path="a",name=""}]', "data.sources.0.name"),
        ('[{path="a",split=""}]', "data.sources.0.split"),
        ('[{path="a",columns={q=1}}]', "data.sources.0.columns"),
        ('[{path="."}]', "data.sources.0.name"),
    ],
)
def test_sources_that_cannot_be(text: str, setting: str) -> None:
    with refused(setting):
        sources_of(text)


def test_a_file_may_be_read_twice_in_two_ways(tmp_path: Path) -> None:
    same = '{path="a",columns={x="response"}},{path="a",name="b",columns={y="response"}}'
    assert len(sources_of(f"[{same}]")) == 2
    (tmp_path / "inside").mkdir()
    with pytest.raises(
        ValueError, match=r"data\.sources\.1\.path: .*inside'; list this data once, .*: data\.sources\.0 already reads"
    ):
        sources_of(f'[{{path="{tmp_path}"}},{{path="{tmp_path}/inside"}}]')


@pytest.mark.parametrize("field", ["split", "subset"])
@pytest.mark.parametrize("kind", ["file", "folder", "saved", "dict", "hub"])
def test_a_split_or_subset_sets_two_sources_apart_only_if_the_data_has_it(
    field: str, kind: str, tmp_path: Path
) -> None:
    for name in ("folder", "saved", "dict"):
        (tmp_path / name).mkdir()
    (tmp_path / "saved" / "state.json").touch()
    (tmp_path / "dict" / "dataset_dict.json").touch()
    (tmp_path / "file").touch()
    path = "owner/name" if kind == "hub" else str(tmp_path / kind)
    text = f'[{{path="{path}"}},{{path="{path}",name="b",{field}="x"}}]'
    if kind == "hub" or (kind, field) == ("dict", "split"):
        assert len(sources_of(text)) == 2
        with refused("data.sources.1.path"):  # also the default of [data] names the split
            sources_of(text, f"data.{field}=x")
    else:
        with refused("data.sources.1.path", r".*; list this data once"):
            sources_of(text)


def test_path_and_sources_exclude_each_other() -> None:
    with refused("data.path", r"\['b'\]; set data\.path=\[\] to use only data\.sources"):
        sources_of('[{path="a"}]', "data.path=b")


@pytest.mark.parametrize("entry", ["1", "x", "-1"])
def test_entries_of_a_list_that_are_not_there(entry: str) -> None:
    with refused("override", rf"'data\.sources\.{entry}\.weight=2' asks for entry '{entry}' of a list"):
        sources_of('[{path="a"}]', f"data.sources.{entry}.weight=2")


@pytest.mark.parametrize("setting", ["data.epochs", "optimizer.max_grad_norm", "data.system", "data.max_length"])
def test_none_in_a_recipe_is_none_as_on_the_command_line(setting: str) -> None:
    section, name = setting.split(".")
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "m"},
        "data": {"path": ["d"]},
        "batch": {"samples": 2, "max_tokens": 8},
        "run": {"folder": "r", "steps": 3},
    }
    values.setdefault(section, {})[name] = "none"
    assert getattr(getattr(config_from_dict(values), section), name) is None


def test_levels_by_layer_are_stretched_to_another_number_of_layers() -> None:
    assert stretched("full", 3) == "full"
    assert stretched("6 host, 30 none", 36) == "6 host, 30 none"
    assert stretched("6 host, 30 none", 6) == "1 host, 5 none"
    assert stretched("6 host, 30 none", 72) == "12 host, 60 none"
    assert stretched("2 none", 1) == "1 none"
    for num_layers in range(1, 40):
        levels = levels_of(stretched("3 host, 1 full, 7 none", num_layers), num_layers)
        assert levels == tuple(sorted(levels, key=["host", "full", "none"].index))
