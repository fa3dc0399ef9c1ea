"""The response log: reading it back, files of other runs, and interrupted runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padfree.rollout.base import Response
from padfree.rollout.engines.in_process import hf_cache
from padfree.rollout.engines.in_process import sampler as in_process
from padfree.rollout.response_log import Origin, ResponseLog
from padfree.testing.models import build
from padfree.train.resume import made_with
from padfree.train.rl.run_response_log import settings_digest
from padfree.train.run import train
from tests.rollout.vllm.test_run import SAMPLES, lines, make_config, model_folder

__all__ = ["model_folder"]  # a fixture
PROMPT = np.array([7, 8])


def origin(step: int = 0, weights: str = "w", settings: str = "s") -> Origin:
    return Origin(step=step, weights=f"{weights}{step}", settings=settings)


def response(number: int, length: int = 3, versions: list[int] | None = None) -> Response:
    rng = np.random.default_rng(number)
    return Response(
        tokens=rng.integers(0, 1 << 40, length),
        logprobs=-rng.random(length).astype(np.float32),
        ended=bool(number % 2),
        version=3,
        versions=None if versions is None else np.array(versions),
    )


def opened(folder: Path, start: Origin | None = None, *, rank: int = 0, after: int = 0) -> ResponseLog:
    response_log = ResponseLog(folder, rank)
    start = start or origin()
    if rank == 0:
        response_log.purge(start)
    response_log.begin(start, after=after)
    return response_log


def keep(response_log: ResponseLog, batch: int, *numbers: int) -> None:
    response_log.keep(batch, [(number, PROMPT, response(number)) for number in numbers])


def known(response_log: ResponseLog, batches: range = range(30), numbers: range = range(8)) -> list[tuple[int, int]]:
    return [(b, n) for b in batches for n in numbers if response_log.find(b, n, PROMPT) is not None]


def test_responses_come_back_to_the_bit(tmp_path: Path) -> None:
    """Read from the files of all ranks, also if their number has changed."""
    for rank in (0, 1):
        response_log = opened(tmp_path, rank=rank)
        response_log.keep(
            4, [(rank, PROMPT, response(rank)), (rank + 2, PROMPT, response(rank + 2, versions=[1, 1, 2]))]
        )
        response_log.sync()
    again = opened(tmp_path)
    assert known(again) == [(4, 0), (4, 1), (4, 2), (4, 3)]
    for number in range(4):
        found, expected = again.find(4, number, PROMPT), response(number, versions=[1, 1, 2] if number > 1 else None)
        assert found is not None
        for name in ("tokens", "logprobs", "token_versions"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
            assert getattr(found, name).dtype == getattr(expected, name).dtype
        assert (found.ended, found.version) == (expected.ended, expected.version)
    assert again.find(4, 0, PROMPT[:1]) is None, "it belongs to another prompt"
    longer = response(0, length=5)
    again.keep(4, [(0, PROMPT, longer)])
    found = opened(tmp_path).find(4, 0, PROMPT)
    assert found is not None
    assert len(found.tokens) == 5, "the last one counts"


@pytest.mark.parametrize("cut", [2, 30, 1000])
def test_a_truncated_line_is_skipped(cut: int, tmp_path: Path) -> None:
    """All responses of a line are read, or none."""
    response_log = opened(tmp_path)
    keep(response_log, 1, 0)
    before = next(tmp_path.iterdir()).stat().st_size
    keep(response_log, 1, 1, 2)
    response_log.close()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[: max(before + 1, len(content) - cut)])
    again = opened(tmp_path)
    assert known(again) == [(1, 0)]
    keep(again, 1, 3)
    assert known(opened(tmp_path)) == [(1, 0), (1, 3)]


def test_a_damaged_line_is_skipped(tmp_path: Path) -> None:
    response_log = opened(tmp_path)
    keep(response_log, 1, 0)
    keep(response_log, 1, 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"number":0', b'"number":5'))
    assert known(opened(tmp_path)) == [(1, 1)]


@pytest.mark.parametrize("other", [origin(weights="v"), origin(settings="t"), origin(step=5)])
def test_responses_of_other_weights_or_settings_do_not_come_back(other: Origin, tmp_path: Path) -> None:
    keep(opened(tmp_path), 1, 0)
    assert known(opened(tmp_path, other)) == []
    assert known(opened(tmp_path)) == [], "they are removed"


def test_parts_that_a_checkpoint_covers_are_removed(tmp_path: Path) -> None:
    response_log = opened(tmp_path)
    keep(response_log, 1, 0)
    response_log.turn(origin(10), after=1, highest=1)
    keep(response_log, 2, 0)
    assert len(list(tmp_path.iterdir())) == 2, "the checkpoint is not complete"
    assert known(opened(tmp_path), range(3)) == [(1, 0), (2, 0)], "a run that was killed while it was written"
    response_log.drop(10)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010.rank-00000.jsonl"]
    assert known(opened(tmp_path, origin(10), after=1)) == [(2, 0)]
    assert known(opened(tmp_path, origin(10), after=2)) == []
    response_log.turn(origin(20), after=2, highest=2)
    response_log.drop(20)
    response_log.close()
    assert not tmp_path.exists() or not list(tmp_path.iterdir()), "no file is left"


def test_responses_of_batches_that_a_checkpoint_does_not_cover_stay(tmp_path: Path) -> None:
    """A run is killed late in batch 5, starts again from the beginning, and makes a checkpoint after batch 2."""
    for batch in range(1, 6):
        keep(opened(tmp_path), batch, 0)
    response_log = opened(tmp_path)
    response_log.turn(origin(2), after=2, highest=2)
    response_log.drop(2)
    assert known(opened(tmp_path, origin(2), after=2)) == [(3, 0), (4, 0), (5, 0)]
    response_log = opened(tmp_path, origin(2), after=2)
    response_log.turn(origin(5), after=5, highest=5)
    response_log.drop(5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005.rank-00000.jsonl"]


def test_a_full_disk_is_an_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    response_log = opened(tmp_path)

    def full(file: int, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("padfree.rollout.response_log._write", full)
    keep(response_log, 1, 0)
    assert response_log.failure is not None
    assert "cannot be written (No space left on device); free disk space, or set another folder" in response_log.failure


def test_settings_that_change_nothing_do_not_count(tmp_path: Path) -> None:
    model: Any = build("qwen3")

    def digest(steps: int = 3, **rollout: Any) -> str:
        return settings_digest(made_with(make_config(tmp_path / "run", tmp_path, steps=steps, **rollout), model.config))

    plain = digest(servers=["http://a:1"])
    assert digest(servers=["http://b:1", "http://c:1"], timeout=5.0, transfer="files", max_concurrent=7) == plain
    assert digest(servers=["http://a:1"], max_new_tokens=5) != plain
    assert digest(servers=["http://a:1"], steps=4) != plain, "it may change the schedule"


class KilledError(Exception):
    pass


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "gradient_norm", "reward", "tokens", "loss/sampler_difference")
    return [tuple(line[name] for name in names) for line in lines(folder)]


def test_a_resumed_in_process_run_is_bit_identical(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in its third batch, without a checkpoint: stored responses are not sampled again."""
    chunk = 5
    calls = 0
    last: int | None = None
    write = hf_cache._write
    monkeypatch.setattr(in_process, "cache_use", lambda model: "padded")  # which is also tested by writing

    def counted(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        if calls == last:
            raise KilledError
        calls += 1
        return write(*arguments, **settings)

    monkeypatch.setattr(hf_cache, "_write", counted)
    settings: dict[str, Any] = {"engine": "in_process", "max_concurrent": chunk}
    train(make_config(tmp_path / "plain", model_folder, **settings))
    whole = calls
    assert whole == 3 * -(-SAMPLES // chunk)
    calls, last = 0, whole - 1
    config = make_config(tmp_path / "run", model_folder, **settings)
    with pytest.raises(KilledError):
        train(config)
    calls, last = 0, None
    notes: list[str] = []
    train(config, on_note=notes.append)
    assert calls == 1
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")
    assert f"reusing {3 * SAMPLES - SAMPLES % chunk} responses from the response log" in notes
    assert [line.get("responses_from_log", 0) for line in lines(tmp_path / "run")] == [12, 12, 10]
    assert not (tmp_path / "run" / "response_log").exists()


def test_other_weights_at_the_same_path_are_sampled_again(model_folder: Path, tmp_path: Path) -> None:
    """The model is trained again before the run is restarted."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = make_config(tmp_path / "run", folder, engine="in_process", steps=1)

    def killed(metrics: Mapping[str, Any]) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        train(config, on_step=killed)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    train(config)
    train(make_config(tmp_path / "plain", folder, engine="in_process", steps=1))
    assert json.dumps(numbers(tmp_path / "run")) == json.dumps(numbers(tmp_path / "plain"))
    assert "responses_from_log" not in lines(tmp_path / "run")[0]
