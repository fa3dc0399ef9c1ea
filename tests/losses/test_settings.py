"""Settings refuse in one line what no loss could mean, and need no torch."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from padfree.losses.settings import (
    CISPOSettings,
    ClipSettings,
    DPOSettings,
    GSPOSettings,
    IcePopSettings,
    OPSMSettings,
    PolicySettings,
    RewardModelSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
    ValueSettings,
)

from padfree.losses import settings as module

NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ClipSettings, {"low": -0.1}, "clip low: -0.1"),
        (ClipSettings, {"low": 1.5}, "clip low: 1.5"),
        (ClipSettings, {"high": NAN}, "clip high: nan"),
        (ClipSettings, {"dual": 1.0}, "clip dual: 1.0; give more than 1"),
        (GSPOSettings, {"low": -1.0}, "gspo low"),
        (GSPOSettings, {"high": -1.0}, "gspo high"),
        (CISPOSettings, {"low": 2.0}, "cispo low"),
        (CISPOSettings, {"high": -2.0}, "cispo high"),
        (TokenTISSettings, {"low": 1.2}, "token TIS: low 1.2"),
        (SequenceTISSettings, {"high": 0.5}, "sequence TIS: low 0.0, high 0.5"),
        (IcePopSettings, {"low": -1.0}, "icepop: low -1.0"),
        (IcePopSettings, {"low": 1.0, "high": 1.0}, "icepop: low 1.0, high 1.0"),
        (SequenceMaskSettings, {"statistic": "median"}, "statistic: 'median'; use one of mean, sum, token"),
        (OPSMSettings, {"delta": -1e-3}, "opsm delta"),
        (PolicySettings, {"old_policy": "ancient"}, "old_policy: 'ancient'"),
        (PolicySettings, {"kl_estimator": "k4"}, "kl_estimator: 'k4'"),
        (PolicySettings, {"kl_coefficient": -0.1}, "kl_coefficient: -0.1"),
        (PolicySettings, {"kl_coefficient": NAN}, "kl_coefficient: nan"),
        (PolicySettings, {"entropy_coefficient": NAN}, "entropy_coefficient: nan"),
        (PolicySettings, {"corrections": (IcePopSettings(), IcePopSettings(low=0.1))}, "IcePopSettings given twice"),
        (PolicySettings, {"corrections": (TokenTISSettings(),), "old_policy": "sampler"}, "compares the sampler with"),
        (PolicySettings, {"corrections": (OPSMSettings(),), "old_policy": "current"}, "never masks"),
        (ValueSettings, {"clip": -0.2}, "value clip"),
        (DPOSettings, {"beta": 0.0}, "beta: 0.0"),
        (DPOSettings, {"label_smoothing": 0.5}, "label_smoothing: 0.5"),
        (RewardModelSettings, {"margin": -1.0}, "margin: -1.0"),
    ],
)
def test_refusals(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        kind(**given)
    assert "\n" not in str(caught.value)


def test_settings_compare_and_hash_by_value() -> None:
    first, second = PolicySettings(corrections=(OPSMSettings(),)), PolicySettings(corrections=(OPSMSettings(),))
    assert first == second
    assert hash(first) == hash(second)
    assert first != PolicySettings()


def test_settings_import_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert names == {"__future__", "math", "dataclasses", "typing"}
