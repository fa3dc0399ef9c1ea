"""The packages of the first step are imported in a thread, and an import error there is harmless."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from padfree.config import Config, ModelConfig, ParallelConfig, config_from_dict
from padfree.testing.models import save_with_tokenizer
from padfree.train import early_imports, run
from padfree.train.early_imports import COMPILER, EPILOGUES, FLASH_ATTENTION_4, HEAD, EarlyImports, first_step_modules


def config_of(**sections: dict[str, Any]) -> Config:
    model = {"path": "m", "dtype": "bfloat16", **sections.pop("model", {})}
    batch = {"samples": 1, "max_tokens": 8}
    return config_from_dict({"model": model, "data": {"path": "d"}, "batch": batch, "run": {"folder": "f"}, **sections})


def modules_of(config: Config, device_type: str) -> list[str]:
    return first_step_modules(config.model, config.parallel, device_type)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path; its modules are removed from sys.modules afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("early_")]:
        del sys.modules[name]


def test_imports_happen_in_order_and_off_the_main_thread(packages: Path) -> None:
    for name in ("early_one", "early_two"):
        (packages / f"{name}.py").write_text("import threading\nthread = threading.current_thread()\n")
    (packages / "early_two.py").write_text("import sys\nbefore = 'early_one' in sys.modules\nimport early_one\n")
    with EarlyImports(["early_one", "early_two"]) as imports:
        imports.wait()
        assert sys.modules["early_one"].thread is not threading.main_thread()
        assert sys.modules["early_two"].before


def test_the_garbage_collector_rests_until_they_are_imported(packages: Path) -> None:
    (packages / "early_one.py").write_text("import gc\nenabled = gc.isenabled()\n")
    with EarlyImports(["early_one"]) as imports:
        imports.wait()
        assert not sys.modules["early_one"].enabled
        assert gc.isenabled()
    with EarlyImports(["early_one"]):  # a run that is refused
        pass
    assert gc.isenabled()


@pytest.mark.parametrize("content", ["raise RuntimeError('broken')", "import early_nothing", "this is no Python"])
def test_a_package_that_fails_is_left_to_whoever_needs_it(packages: Path, content: str) -> None:
    (packages / "early_broken.py").write_text(content)
    (packages / "early_behind.py").write_text("")
    with EarlyImports(["early_missing", "early_broken", "early_behind"]) as imports:
        imports.wait()
    assert "early_behind" in sys.modules
    with pytest.raises((RuntimeError, ImportError, SyntaxError)):
        __import__("early_broken")


def test_a_run_that_ends_early_waits_for_no_import_and_begins_no_further_one(packages: Path) -> None:
    (packages / "early_slow.py").write_text("import early_gate\nearly_gate.entered.set()\nearly_gate.opened.wait(60)\n")
    (packages / "early_never.py").write_text("")
    gate: Any = SimpleNamespace(entered=threading.Event(), opened=threading.Event())
    sys.modules["early_gate"] = gate
    with EarlyImports(["early_slow", "early_never"]) as imports:
        assert gate.entered.wait(60)
    assert "early_slow" in sys.modules  # its import is still running
    gate.opened.set()
    imports.wait()
    assert "early_never" not in sys.modules


def test_nothing_is_started_without_modules() -> None:
    before = threading.active_count()
    with EarlyImports([]) as imports:
        assert threading.active_count() == before
        imports.wait()


@pytest.mark.parametrize("has_flash4", [True, False])
def test_what_is_imported_is_what_the_settings_may_use(has_flash4: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(is_installed=lambda: has_flash4)
    monkeypatch.setattr(early_imports, "BACKENDS", {"fa4": backend})
    flash4 = FLASH_ATTENTION_4 if has_flash4 else ()
    assert modules_of(config_of(), "cpu") == []
    assert modules_of(config_of(), "cuda") == [*HEAD, *COMPILER, *flash4, *EPILOGUES]
    assert modules_of(config_of(parallel={"compile": "none"}), "cuda") == [*HEAD, *flash4]
    assert modules_of(config_of(parallel={"kernels": "none"}), "cuda") == [*HEAD, *COMPILER, *flash4]
    assert modules_of(config_of(model={"attention": "torch"}), "cuda") == [*HEAD, *COMPILER, *EPILOGUES]
    assert modules_of(config_of(model={"dtype": "float32"}), "cuda") == [*HEAD, *COMPILER]


def test_a_run_waits_for_them_before_it_builds_the_engine(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADFREE_CACHE", str(tmp_path / "cache"))
    (packages / "early_slow.py").write_text("import time\ntime.sleep(1)\n")
    (tmp_path / "data.jsonl").write_text('{"text": "1 + 1 = 2"}\n')
    model = save_with_tokenizer(tmp_path / "model")
    data = {"path": [str(tmp_path / "data.jsonl")]}
    config = config_from_dict(
        {
            "model": {"path": str(model)},
            "data": data,
            "batch": {"samples": 1, "max_tokens": 64},
            "run": {"folder": str(tmp_path / "run"), "device": "cpu"},
        }
    )
    asked: list[str] = []

    def modules(model: ModelConfig, parallel: ParallelConfig, device_type: str) -> list[str]:
        asked.append(device_type)
        return ["early_slow"]

    def build_engine(config: Config, mesh: Any, tokenizer: Any) -> None:
        assert "early_slow" in sys.modules
        assert not [thread for thread in threading.enumerate() if thread.name == "early imports"]
        raise ValueError("the engine is another test's matter")

    monkeypatch.setattr(run, "first_step_modules", modules)
    monkeypatch.setattr(run, "build_engine", build_engine)
    with pytest.raises(ValueError, match="another test's matter"):
        run.train(config)
    assert asked == ["cpu"]
