"""Loss settings refuse invalid values, and need no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from padfree.config import LossConfig
from padfree.config.loss import CORRECTIONS, OBJECTIVES
from padfree.config.loss_settings import DPOSettings, RewardModelSettings, ValueSettings
from padfree.config.policy_settings import (
    CISPOSettings,
    ClipSettings,
    GSPOSettings,
    IcePopSettings,
    OPSMSettings,
    PolicySettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    TokenTISSettings,
)
from padfree.losses import objectives

NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ClipSettings, {"low": -0.1}, "loss.clip.low: -0.1"),
        (ClipSettings, {"low": 1.5}, "loss.clip.low: 1.5"),
        (ClipSettings, {"high": NAN}, "loss.clip.high: nan"),
        (ClipSettings, {"dual": 1.0}, "loss.clip.dual: 1.0; give more than 1"),
        (GSPOSettings, {"low": -1.0}, "loss.gspo.low"),
        (GSPOSettings, {"high": -1.0}, "loss.gspo.high"),
        (CISPOSettings, {"low": 2.0}, "loss.cispo.low"),
        (CISPOSettings, {"high": -2.0}, "loss.cispo.high"),
        (TokenTISSettings, {"low": 1.2}, r"loss.token_tis: \[1.2, 2.0\]"),
        (SequenceTISSettings, {"high": 0.5}, r"loss.sequence_tis: \[0.0, 0.5\]"),
        (IcePopSettings, {"low": -1.0}, r"loss.icepop: \[-1.0, 5.0\]"),
        (IcePopSettings, {"low": 1.0, "high": 1.0}, r"loss.icepop: \[1.0, 1.0\]"),
        (
            SequenceMaskSettings,
            {"statistic": "median"},
            "loss.sequence_mask.statistic: 'median'; give one of mean, sum, token",
        ),
        (OPSMSettings, {"delta": -1e-3}, "loss.opsm.delta"),
        (PolicySettings, {"old_policy": "ancient"}, "old_policy: 'ancient'"),
        (PolicySettings, {"kl_estimator": "k4"}, "kl_estimator: 'k4'"),
        (PolicySettings, {"kl_coefficient": -0.1}, "kl_coefficient: -0.1"),
        (PolicySettings, {"kl_coefficient": NAN}, "kl_coefficient: nan"),
        (PolicySettings, {"entropy_coefficient": NAN}, "entropy_coefficient: nan"),
        (
            PolicySettings,
            {"corrections": (IcePopSettings(), IcePopSettings(low=0.1))},
            r"loss.corrections: \['icepop', 'icepop'\]; name no correction twice",
        ),
        (
            PolicySettings,
            {"corrections": (TokenTISSettings(),), "old_policy": "sampler"},
            "compare the sampler with itself",
        ),
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


def test_a_kind_is_a_table_of_a_recipe_and_a_file_of_the_objectives() -> None:
    assert {name: kind.kind for name, kind in OBJECTIVES.items()} == {name: name for name in OBJECTIVES}
    assert {name: kind.kind for name, kind in CORRECTIONS.items()} == {name: name for name in CORRECTIONS}
    files = {path.stem for path in Path(objectives.__file__ or "").parent.glob("*.py")}
    assert files - {"__init__", "contract", "custom"} == set(OBJECTIVES)
    for name, kind in OBJECTIVES.items():
        assert callable(objectives._built_in(name))
        assert PolicySettings(objective=kind()) == LossConfig(kind=name, old_policy="trainer").settings()
