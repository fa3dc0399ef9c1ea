"""Settings without effect in a run are reported, and every setting has a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from padfree.config import Config, config_from_dict, load_config
from padfree.config.inert import READ_BY, inert_settings, rule_of
from tests.refused import refused

RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"


def settings(kind: type[Any] = Config, prefix: str = "") -> Iterator[str]:
    """Every setting by its name; tables follow what they hold, with a point behind."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        if not entry.metadata.get("setting", True):
            continue
        if is_dataclass(hints[entry.name]):
            yield from settings(hints[entry.name], f"{prefix}{entry.name}.")  # type: ignore[arg-type]
            yield f"{prefix}{entry.name}."
        else:
            yield f"{prefix}{entry.name}"


def test_every_setting_has_a_rule_and_every_rule_a_setting() -> None:
    """A new setting must be entered in READ_BY: whether every run reads it, or which ones do."""
    names = set(settings())
    leaves, tables = {name for name in names if name[-1] != "."}, {name[:-1] for name in names if name[-1] == "."}
    without = []
    for name in leaves:
        try:
            rule_of(name)
        except KeyError:
            without.append(name)
    assert without == []
    assert READ_BY.keys() <= leaves | tables
    unconditional = {name for name, rule in READ_BY.items() if rule is None}
    assert unconditional <= leaves, "a whole table cannot be read by every run: its next setting may not be"


@pytest.mark.parametrize("recipe", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_has_no_setting_without_effect(recipe: Path) -> None:
    assert inert_settings(load_config(recipe)) == []


CASES: list[tuple[str, list[str], str | None]] = [
    ("sft", ["loss.clip.low=0.1"], "loss.clip.low has no effect with loss.kind=sft"),
    ("sft", ["loss.clip.low=0.2"], "loss.clip.low has no effect with loss.kind=sft"),  # the default, but given
    ("sft", ["loss.gspo.low=0.1"], "loss.gspo.low has no effect with loss.kind=sft"),
    ("sft", ["loss.advantage=grpo"], "loss.advantage has no effect in padfree sft"),
    ("sft", ["loss.kl_estimator=k1"], "loss.kl_estimator has no effect in padfree sft"),
    ("rl", ["loss.kl_weighting=ratio"], "loss.kl_weighting has no effect with loss.kl_coefficient=0"),
    ("rl", ["loss.kl_weighting=ratio", "loss.kl_coefficient=0.1", "reference.path=m"], None),
    ("rl", ["loss.kind=gspo"], "loss.clip.high, loss.clip.low have no effect with loss.kind=gspo"),
    ("rl", ["loss.gspo.low=0.1"], "loss.gspo.low has no effect with loss.kind=clip"),
    ("rl", ["critic.gae_lambda=0.95"], "critic.gae_lambda has no effect with loss.advantage=grpo"),
    ("rl", ["loss.opsm.delta=1e-4"], "loss.opsm.delta has no effect without 'opsm' in loss.corrections"),
    (
        "rl",
        ["rollout.samples_per_prompt=4"],
        "rollout.samples_per_prompt has no effect without rollout.reward, rollout.environment or roll",
    ),
    ("sft", ["data.turns=apart", "data.loss_on=all"], "data.turns has no effect with data.loss_on=all"),
    ("sft", ["data.turns=apart", "data.loss_on=last"], None),
    ("sft", ["data.chat_template=a", "data.prompt_format=plain"], "data.chat_template has no effect with data.prompt"),
    ("sft", ["data.chat_template=a", "data.prompt_format=chat"], None),
    ("rl-local", ["rollout.canary=0.1"], "rollout.canary has no effect with rollout.engine=in_process"),
    ("rl-local", ["rollout.overlong_penalty=2.0"], "rollout.overlong_penalty has no effect with rollout.overlong_b"),
    ("rl-local", ["rollout.overlong_penalty=2.0", "rollout.overlong_buffer=8"], None),
    ("rl-local", ["rollout.filter_bound=4.0"], "rollout.filter_bound has no effect with rollout.filter=none"),
    ("rl-local", ["rollout.episode_timeout=9"], None),  # of the reward
    ("rl-local", ["rollout.episode_timeout=9", "rollout.reward=model:m"], "rollout.episode_timeout has no effect with"),
    ("rl-local", ["data.append_eos=true"], "data.append_eos has no effect in a run that samples responses"),
    ("rl-vllm", ["rollout.kv_cache_memory=2.0"], "rollout.kv_cache_memory has no effect with rollout.engine=vllm"),
    ("sft", ["lora.alpha=16"], "lora.alpha has no effect with lora.rank=0"),
    ("sft", ["lora.alpha=16", "lora.rank=8"], None),
    ("sft", ["schedule.kind=constant", "schedule.final=0.1"], "schedule.final has no effect with schedule.kind=con"),
    ("sft", ["parallel.layout=headtail"], "parallel.layout has no effect with parallel.context=1"),
    ("sft", ["parallel.compile=none", "parallel.kernels=auto"], "parallel.kernels has no effect with parallel.compile"),
    ("sft", ["eval.start=false"], "eval.start has no effect without eval.path"),
    ("sft", ["batch.buffer=8"], "batch.buffer has no effect without batch.tokens"),
    ("sft", ["data.overlong=drop", "data.max_length=none"], "data.overlong has no effect without data.max_length"),
    ("sft", ["checkpoint.export=false", "checkpoint.export_dtype=float32"], "checkpoint.export_dtype has no effect wi"),
    ("distill", ["loss.distill.beta=0.5"], "loss.distill.beta has no effect with loss.distill.divergence=forward-kl"),
    ("dpo", ["loss.dpo.gamma=0.0"], "loss.dpo.gamma has no effect with loss.dpo.variant=sigmoid"),
    ("reward", ["parallel.head_memory=low"], "parallel.head_memory has no effect in padfree reward"),
    ("sft", ["loss.low=none"], None),  # to switch it off
]


@pytest.mark.parametrize(("recipe", "changes", "said"), CASES, ids=[" ".join(case[1]) for case in CASES])
def test_what_has_no_effect_is_said(recipe: str, changes: list[str], said: str | None) -> None:
    found = inert_settings(load_config(RECIPES / f"{recipe}.toml", changes))
    assert [line[: len(said)] for line in found] == [said] if said is not None else found == []


def test_settings_that_nobody_gave_are_not_said(tmp_path: Path) -> None:
    config = load_config(RECIPES / "sft.toml")
    assert "data.path" in config.given
    assert "loss.clip.low" not in config.given
    assert replace(config, run=replace(config.run, steps=3)).given == config.given
    assert "given" not in config.to_dict()
    with refused("given"):
        config_from_dict({**config.to_dict(), "given": ["loss.clip.low"]})
    file = tmp_path / "train.jsonl"
    file.write_text("{}\n")
    none = "neither a Hub id nor a folder of DatasetDict.save_to_disk"
    (line,) = inert_settings(load_config(RECIPES / "sft.toml", [f"data.path={file}", "data.split=train"]))
    assert line == f"data.split has no effect because data.path names {none}"


@pytest.mark.parametrize(
    ("kind", "split", "subset"), [("hub", True, True), ("dict", True, False), ("one", False, False), ("gone", 0, 0)]
)
def test_splits_and_subsets_have_an_effect_where_the_data_has_them(
    kind: str, split: bool, subset: bool, tmp_path: Path
) -> None:
    (tmp_path / "dict").mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").touch()
    (tmp_path / "one" / "state.json").touch()
    path = {"hub": "openai/gsm8k", "gone": "gone.jsonl"}.get(kind, str(tmp_path / kind))
    words = [f"data.path={path}", f"eval.path={path}", "data.split=a", "data.subset=b", "eval.split=c"]
    lines = inert_settings(load_config(RECIPES / "sft.toml", words))
    assert any(line.startswith("data.subset ") for line in lines) != subset
    for name in ("data.split", "eval.split"):
        assert any(line.startswith(f"{name} ") for line in lines) != split
