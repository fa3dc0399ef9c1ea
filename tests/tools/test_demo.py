"""`padfree demo` at a tiny size: every stage writes its files, the losses agree, and a stopped demo resumes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from padfree.cli.main import main
from padfree.tools.demo import run_demo
from padfree.tools.demo.demo_folder import Demo, DemoSizes, console
from padfree.tools.demo.stages import SAME_LOSS, STAGES, train_packed
from tests.refused import refused

TINY = DemoSizes(
    rows=60,
    prompts=8,
    hidden=32,
    samples=6,
    sft_steps=5,
    compared=3,
    responses=8,
    group=4,
    rl_steps=2,
    max_new_tokens=6,
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_demo, "SIZES", TINY)


def test_a_demo_that_is_stopped_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during the packed run, then --resume: the run continues from its checkpoint, then the other stages."""
    folder = tmp_path / "demo"
    plain_bar = Demo.bar

    @contextmanager
    def interrupted(self: Demo, total: int | None) -> Iterator[Callable[[int, str], None]]:
        with plain_bar(self, total) as bar:

            def update(done: int, text: str) -> None:
                bar(done, text)
                if total == TINY.sft_steps and done == 2:
                    os.kill(os.getpid(), signal.SIGINT)

            yield update

    with monkeypatch.context() as patched:
        patched.setattr(Demo, "bar", interrupted)
        with pytest.raises(SystemExit) as end:
            main(["demo", "--folder", str(folder)])
    assert end.value.code == 130
    shown = capsys.readouterr().out
    assert f"continue with: padfree demo --folder {folder} --resume" in shown
    assert sorted(json.loads((folder / "demo.json").read_text())) == ["check", "data", "padded", "plan"]
    assert not (folder / "rl").exists()

    before = os.environ.get("PADFREE_CACHE")
    assert main(["demo", "--folder", str(folder), "--resume"]) == 0
    assert os.environ.get("PADFREE_CACHE") == before
    shown = capsys.readouterr().out
    assert shown.count("already done") == 4
    found = json.loads((folder / "demo.json").read_text())
    assert list(found) == list(STAGES)
    assert found["packed"]["difference"] <= SAME_LOSS["float32"]
    assert found["packed"]["faster"] > 0
    assert found["check"]["gradients"] < 1e-4
    assert 0 <= found["reward"]["before"] <= 1
    for name in ("plan.html", "report.html", "check.json", "sft/model/config.json", "rl/rollouts.jsonl", "cache"):
        assert (folder / name).exists(), name
    steps = [json.loads(line)["step"] for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(TINY.sft_steps))
    table = shown[shown.index("packed compared with padded") :]
    assert "times as fast" in table
    assert " -> " in table
    assert str(folder / "report.html") in table


def test_a_wrong_loss_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [{"step": step, "loss": 5.0001, "seconds": 1.0} for step in range(4)]
    monkeypatch.setattr(Demo, "train", lambda *_: steps)
    made = Demo(tmp_path / "demo", console(), TINY, known=STAGES, resume=False)
    made.found["padded"] = {"losses": [5.0, 5.0, 5.0], "seconds": [1.0, 1.0, 1.0]}
    with refused("demo"):
        train_packed(made)


def test_folders_that_are_refused_and_one_that_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert main(["demo", "--folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (f"padfree demo: --folder: {tmp_path} is not empty; give a new or empty folder\n")
    assert main(["demo", "--folder", str(tmp_path / "mine.txt")]) == 1
    assert "mine.txt is not empty" in capsys.readouterr().err
    assert main(["demo", "--folder", str(tmp_path / "none"), "--resume"]) == 1
    assert "--resume: " in capsys.readouterr().err
    folder = tmp_path / "old"
    Demo(folder, console(), TINY, known=STAGES, resume=False).keep("data", {})
    assert Demo(folder, console(), TINY, known=STAGES, resume=True).found == {"data": {}}
    assert Demo(folder, console(), TINY, known=STAGES, resume=False).found == {}


def test_a_folder_with_more_than_a_demo_is_not_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign, mixed, used = tmp_path / "foreign", tmp_path / "mixed", tmp_path / "used"
    for folder, state in ((foreign, '{"name": "my demo"}'), (mixed, "{}"), (used, "{}")):
        folder.mkdir()
        (folder / "demo.json").write_text(state)
    (mixed / "thesis.tex").write_text("precious")
    (used / "sft").mkdir()
    with FileLock(used / "sft" / "run.lock"):
        for folder, message in (
            (foreign, "demo.json was not written by a demo; give a new or empty --folder"),
            (mixed, "holds thesis.tex in addition to an earlier demo; give a new or empty"),
            (used, "is in use by another process; wait until that run ends"),
        ):
            assert main(["demo", "--folder", str(folder)]) == 1
            assert message in capsys.readouterr().err
            assert (folder / "demo.json").exists()
    (mixed / "demo.json").write_text("{")
    assert main(["demo", "--folder", str(mixed), "--resume"]) == 1
    assert "--resume: " in capsys.readouterr().err
    assert (mixed / "thesis.tex").read_text() == "precious"
