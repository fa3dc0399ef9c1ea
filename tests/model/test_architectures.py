"""The page of architectures says what trying them gives, for a sample of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import transformers

DOCS = Path(__file__).parents[2] / "docs"


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architectures", DOCS / "architectures.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {spec.name: made}):  # where its dataclasses look for the names of types
        spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", ["llama", "lfm2", "bamba", "llama4_text", "rwkv", "recurrent_gemma", "bert"])
def test_the_page_is_true(name: str) -> None:
    text = (DOCS / "architectures.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the page is of another version of transformers")
    row = module().tried(name)
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    found, said = row.line().split(" | "), line.split(" | ")
    assert found[:6] == said[:6]
    assert found[6].split("(")[0] == said[6].split("(")[0], "differences in numbers differ by machine"


def test_every_architecture_is_on_the_page_and_those_refused_have_a_reason() -> None:
    lines = [line for line in (DOCS / "architectures.md").read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    cells = [line.strip("|").split(" | ") for line in lines]
    assert len(lines) > 150
    assert all(cell[2] == "yes" or cell[6].strip(" |") for cell in cells)
