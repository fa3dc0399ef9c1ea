"""A name that exists nowhere is refused at once; a slow answer of the Hub is not a refusal."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from padfree.config.hub import check_name
from padfree.model.model_files import opened
from tests.refused import refused


def hub_error(kind: type[Exception]) -> Exception:
    """One of the Hub's errors without the response that it wants to be made of."""
    error = kind.__new__(kind)
    Exception.__init__(error, "no")
    return error


class ConnectError(Exception):
    """As HTTP libraries call it."""


class ReadTimeout(Exception):  # noqa: N818
    """As HTTP libraries call it."""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that says what the Hub will answer."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def answer(error: Exception | None) -> None:
        def repo_info(self: Any, name: str, **options: Any) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", repo_info)

    return answer


def test_what_is_here_or_looks_like_a_path_is_not_asked_for(tmp_path: Path, answers: Any) -> None:
    answers(AssertionError("the Hub was asked"))
    check_name(str(tmp_path), "model.path")
    for name in ("./qwen", "models/qwen/base", "/no/where", "~/no/where/at/all", str(tmp_path / "none"), "a b"):
        with refused("model.path", ".* does not exist"):
            check_name(name, "model.path")
    with refused("model.path", r"'aaa.*\.\.\.' cannot be read \(File name too long\)"):
        check_name("a" * 5000, "model.path")


def test_the_answer_of_the_hub_counts(answers: Any) -> None:
    answers(None)
    check_name("owner/name", "model.path")
    answers(hub_error(GatedRepoError))
    check_name("owner/name", "model.path")
    answers(hub_error(RepositoryNotFoundError))
    with refused("model.path", "'owner/name' was not found on disk or on the Hub: the Hub has no model of"):
        check_name("owner/name", "model.path")
    with refused("data", "'owner/name' was not found on disk or on the Hub: the Hub has no dataset of"):
        check_name("owner/name", "data", "dataset")


def test_no_connection_is_an_answer_and_a_slow_one_is_none(answers: Any) -> None:
    answers(ConnectError("Name or service\nnot known"))
    with pytest.raises(
        ValueError, match=r"on the Hub: the Hub cannot be reached \(Name or service not known\); correct the name"
    ):
        check_name("owner/name", "model.path")
    answers(ReadTimeout("slow"))
    check_name("owner/name", "model.path")


def test_a_closed_port_is_found_out_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, against an address where nobody listens."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(ValueError, match="the Hub cannot be reached"):
        check_name("owner/name", "model.path")
    assert time.monotonic() - begin < 5


def test_offline_mode_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"the Hub is not asked in offline mode \(HF_HUB_OFFLINE\)"):
        check_name("owner/name", "model.path")


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model"]
)
def test_a_file_of_a_model_without_permission_is_named(file: str, public: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (public / name).write_text("{}")
    (public / "README.md").chmod(0)  # nobody reads it
    (public / "model-00001-of-00002.safetensors").symlink_to(public / "gone")
    with as_another_user():
        check_name(str(public), "teacher.path")
    (public / file).touch()
    (public / file).chmod(0)
    with as_another_user():
        with refused("teacher.path", f"{file}: Permission denied; give the user of this process permission"):
            check_name(str(public), "teacher.path")
        with refused("MODEL", f"{file}: Permission denied"):
            check_name(str(public / file), "MODEL")


def test_a_weight_file_that_loses_its_permission_is_not_called_missing(public: Path) -> None:
    weights = public / "model.safetensors"
    weights.touch()
    weights.chmod(0)
    with as_another_user(), refused("model", "Permission denied; give the user of this process permission"):
        opened(weights)
    weights.chmod(0o644)
    with refused("model", "cannot be read .*; copy or download the file again"):
        opened(weights)
