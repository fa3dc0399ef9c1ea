"""`rollout.engine`: built-in engines by name, a user's by import path; everything else is a UserError."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from padfree.choices import SAMPLING_ENGINES
from padfree.config import Config, load_config
from padfree.rollout.engines import check_engine_name, make_sampler
from tests.refused import refused

RECIPES = Path(__file__).parents[2] / "src" / "padfree" / "recipes"
SAMPLER = """
class Sampler:
    def update_weights(self, trained, version): ...
    def sample(self, requests, *, on_progress=None): return []
    def metrics(self): return {}
    def close(self): ...

def whole(config, mesh, trained, tokenizer, score):
    return Sampler()

def half(config, mesh, trained, tokenizer, score):
    return object()

def narrow(config):
    return Sampler()

def raising(config, mesh, trained, tokenizer, score):
    return {}["no such key"]

class Late(Sampler):
    def sample(self, requests, *, on_progress=None): raise TypeError("of the user")

def late(config, mesh, trained, tokenizer, score):
    return Late()
"""


def config_of(engine: str) -> Config:
    return load_config(RECIPES / "rl-local.toml", [f"rollout.engine={engine}"])


def made(engine: str) -> Any:
    unused: Any = None
    return make_sampler(config_of(engine), unused, unused, unused, unused)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"samplers_{tmp_path.name}.py").write_text(SAMPLER)
    return f"samplers_{tmp_path.name}"


def test_every_name_has_an_engine() -> None:
    for path in SAMPLING_ENGINES.values():
        module, _, name = path.partition(":")
        assert callable(getattr(import_module(module), name))


def test_a_function_of_the_user_makes_the_sampler(module: str) -> None:
    check_engine_name(f"{module}:whole")
    assert type(made(f"{module}:whole").sampler).__name__ == "Sampler"


@pytest.mark.parametrize(
    ("function", "about"),
    [
        ("half", "returned an object of type object, which has no update_weights"),
        ("narrow", "cannot be called with"),
        ("absent", "the module has no 'absent'"),
        ("raising", "raised KeyError: 'no such key'"),
    ],
)
def test_an_object_that_is_not_a_sampler_is_rejected(module: str, function: str, about: str) -> None:
    with refused("rollout.engine", about):
        made(f"{module}:{function}")


def test_an_exception_of_a_users_engine_is_a_user_error(module: str) -> None:
    with refused("rollout.engine", "raised TypeError: of the user"):
        made(f"{module}:late").sample([])


def test_a_missing_module_is_rejected_before_anything_is_loaded() -> None:
    with refused("rollout.engine", "'nowhere_at_all:f': there is no module nowhere_at_all"):
        check_engine_name("nowhere_at_all:f")


def test_an_unknown_name_is_rejected_with_a_suggestion() -> None:
    with refused("rollout.engine", "'vlm'"):
        config_of("vlm")
