"""Names in the package: one name, one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import padfree
from padfree.config import Config, config_from_dict
from padfree.config.setting import rules_of
from tests.refused import refused

PACKAGE = Path(padfree.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
SAME_JOB = {"matmul_epilogues", "matmuls", "qk_norm_rope", "rms_norm", "row_sums", "swiglu", "sampler"}
"""Stems of two files that do the same job: an operator and the graph pass that inserts it, two samplers, the matmuls of
layers and of the head."""


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_with_the_same_stem_do_the_same_job() -> None:
    stems = defaultdict(list)
    for path in FILES:
        if not path.stem.startswith("__"):
            stems[path.stem].append(path)
    assert {stem for stem, found in stems.items() if len(found) > 1} == SAME_JOB


def renamed(kind: Any, prefix: str = "") -> dict[str, str]:
    """The new name of each setting by its old one."""
    found = {}
    for entry in fields(kind):
        hint = get_type_hints(kind)[entry.name]
        if is_dataclass(hint):
            found |= renamed(hint, f"{prefix}{entry.name}.")
        elif (old := rules_of(entry).formerly) is not None:
            found[f"{prefix}{old}"] = f"{prefix}{entry.name}"
    return found


RENAMED = renamed(Config)
REST = {
    "model": {"path": "m"},
    "data": {"path": ["d"]},
    "batch": {"samples": 1, "max_tokens": 9},
    "run": {"folder": "f"},
}


def test_settings_that_were_renamed() -> None:
    assert RENAMED == {
        "critic.lam": "critic.gae_lambda",
        "eval.draws": "eval.samples_per_prompt",
        "eval.passes": "eval.pass_threshold",
        "loss.router": "loss.load_balancing",
        "loss.weights": "loss.aggregation",
        "rollout.batch": "rollout.max_concurrent",
        "rollout.group": "rollout.samples_per_prompt",
    }


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_refused_with_the_new_one(old: str) -> None:
    section, name = old.split(".")
    with refused(old, f".*{RENAMED[old]}"):
        config_from_dict({**REST, section: {name: 1}})
