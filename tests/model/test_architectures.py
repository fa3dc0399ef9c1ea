"""docs/reference/architectures.md agrees with a test of some of the architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from padfree.model import TESTED
from padfree.tools.architectures import try_architecture

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"


@pytest.mark.parametrize("name", ["llama", "lfm2", "bamba", "llama4_text", "rwkv", "recurrent_gemma", "bert"])
def test_the_page_is_true(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}:" not in text:
        pytest.skip("the page was generated with another version of transformers")
    found_here = try_architecture(name)
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    found, said = found_here.line().split(" | "), line.split(" | ")
    assert found[:6] == said[:6]
    assert found[6].split("(")[0] == said[6].split("(")[0], "differences in numbers differ by machine"


def test_every_architecture_is_on_the_page_and_those_refused_have_a_reason() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Image-text models")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    types = [row[0].strip(" `") for row in rows]
    if f"transformers {transformers.__version__}:" in text:
        assert types == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    attached = [row for row in rows if row[2] == "yes"]
    refused = [row for row in rows if row[2] == "no"]
    assert len(attached) + len(refused) == len(rows) > 150
    assert f"{len(attached)} attached, {len(refused)} refused, each with its reason" in text
    assert all(row[6].strip(" |") for row in refused)
    assert {row[1].removesuffix(" ✓") for row in attached} >= set(TESTED)
