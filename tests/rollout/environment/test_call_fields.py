"""Calls may ask for the truncation of the run, and for no other."""

from __future__ import annotations

from typing import Any

import pytest

from padfree.rollout.environment.call_fields import CHAT, check_fields
from padfree.rollout.environment.listener import CallError
from padfree.rollout.truncation import WHOLE, Truncation

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.7}
RULE = Truncation(top_p=0.9, top_k=20, min_p=0.1, min_new_tokens=4)


@pytest.mark.parametrize(
    ("truncation", "fields"),
    [
        (WHOLE, {"top_p": 1, "top_k": 0, "min_p": 0, "min_tokens": 0}),
        (WHOLE, {"top_p": 1.0, "top_k": -1, "min_p": 0.0}),
        (RULE, {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "min_tokens": 4}),
        (RULE, {}),
    ],
)
def test_the_truncation_of_the_run_is_honoured(truncation: Truncation, fields: dict[str, Any]) -> None:
    assert not check_fields({**BODY, **fields}, CHAT, 0.7, truncation)


@pytest.mark.parametrize(
    ("truncation", "field", "value"),
    [
        (WHOLE, "top_p", 0.9),
        (WHOLE, "top_k", 5),
        (WHOLE, "min_p", 0.1),
        (WHOLE, "min_tokens", 2),
        (WHOLE, "top_p", True),
        (RULE, "top_p", 1),
        (RULE, "top_k", -1),
        (RULE, "min_p", 0),
        (RULE, "min_tokens", 0),
        (RULE, "top_p", "0.9"),
    ],
)
def test_another_truncation_is_refused_by_name(truncation: Truncation, field: str, value: Any) -> None:
    with pytest.raises(CallError, match=rf"{field}: .* differs from the run's"):
        check_fields({**BODY, field: value}, CHAT, 0.7, truncation)
